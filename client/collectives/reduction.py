"""How elements of two ranks become one: NumPy's types by NumPy, bfloat16 by the native engine."""

import enum
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sealane._native import reduce_bfloat16, scale_bfloat16
from sealane.errors import UsageError

BFLOAT16: Final = "bfloat16"
Elements = npt.NDArray[Any]
"""One-dimensional; bfloat16 as its bits, uint16."""


class Operator(enum.Enum):
    """What all_reduce computes of each element."""

    SUM = "sum"
    AVERAGE = "avg"
    MAXIMUM = "max"
    MINIMUM = "min"
    PRODUCT = "product"


_UFUNCS: Final[dict[Operator, Callable[..., Any]]] = {
    Operator.SUM: np.add,
    Operator.AVERAGE: np.add,
    Operator.MAXIMUM: np.maximum,
    Operator.MINIMUM: np.minimum,
    Operator.PRODUCT: np.multiply,
}


def flat(array: Any, dtype: str | None = None) -> tuple[Elements, str]:
    """Return an array's elements as they lie in memory, and the name of their type.

    `array` has the buffer protocol and is contiguous: a NumPy array, an array of `Session.empty`.
    `dtype` "bfloat16" says that 16-bit integers are bits of that. Raises UsageError.
    """
    found = np.asarray(array)
    name = dtype or str(getattr(array, "dtype", found.dtype))
    if not found.flags.c_contiguous:
        raise UsageError("group.array", "a contiguous array is needed")
    elements = found.reshape(-1)
    if not elements.flags.writeable or elements.dtype.kind not in "iufb":
        raise UsageError("group.array", f"{name} can't be sent, or not be written to")
    if name == BFLOAT16:
        elements = elements.view(np.uint16)
    return elements, name


class Merge:
    """Combines the elements of another rank into ours.

    Raises UsageError `group.operator` for what has no meaning: means of integers, arithmetic of
    booleans.
    """

    def __init__(self, operator: Operator, elements: Elements, dtype: str, size: int) -> None:
        is_float = dtype == BFLOAT16 or elements.dtype.kind == "f"
        if elements.dtype.kind == "b" or (operator is Operator.AVERAGE and not is_float):
            raise UsageError("group.operator", f"{operator.value} of {dtype} has no meaning")
        self._operator = operator
        self._dtype = dtype
        self._size = size

    def __call__(self, ours: Elements, theirs: Elements, *, is_last: bool) -> None:
        """Combine in place; after the last one a sum becomes its mean, if that is wanted."""
        is_mean = self._operator is Operator.AVERAGE
        if self._dtype == BFLOAT16:
            operation = "sum" if is_mean else self._operator.value
            reduce_bfloat16(ours, theirs, operation)
            if is_mean and is_last:
                scale_bfloat16(ours, 1 / self._size)
            return
        _UFUNCS[self._operator](ours, theirs, out=ours)
        if is_mean and is_last:
            np.divide(ours, self._size, out=ours)
