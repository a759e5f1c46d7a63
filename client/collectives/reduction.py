"""Reductions of two arrays: by NumPy for its types, by the native engine for bfloat16."""

import enum
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sealane._native import reduce_bfloat16, scale_bfloat16
from sealane.errors import UsageError

BFLOAT16: Final = "bfloat16"
Elements = npt.NDArray[Any]
"""A one-dimensional array; bfloat16 as uint16."""


class Operator(enum.Enum):
    """Operators of `all_reduce` and `reduce_scatter`."""

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
    """Return an array's elements in memory order, without a copy, and the name of their type.

    `array` is contiguous and has the buffer protocol: a NumPy array, an array of `Session.empty`.
    With `dtype` "bfloat16" its 16-bit integers are read as bfloat16. Raises UsageError.
    """
    found = np.asarray(array)
    name = dtype or str(getattr(array, "dtype", found.dtype))
    if not found.flags.c_contiguous:
        raise UsageError("group.array", "the array isn't contiguous")
    elements = found.reshape(-1)
    if not elements.flags.writeable or elements.dtype.kind not in "iufb":
        raise UsageError("group.array", f"the array is read-only, or its type {name} can't be sent")
    if name == BFLOAT16:
        elements = elements.view(np.uint16)
    return elements, name


class Merge:
    """Combines the elements of another rank into ours.

    Raises UsageError `group.operator` for operators that the type doesn't have: means of integers,
    arithmetic of booleans.
    """

    def __init__(self, operator: Operator, elements: Elements, dtype: str, size: int) -> None:
        is_float = dtype == BFLOAT16 or elements.dtype.kind == "f"
        if elements.dtype.kind == "b" or (operator is Operator.AVERAGE and not is_float):
            raise UsageError("group.operator", f"{operator.value} isn't defined for {dtype}")
        self._operator = operator
        self._dtype = dtype
        self._size = size

    def __call__(self, ours: Elements, theirs: Elements, *, is_last: bool) -> None:
        """Combine in place; `is_last` divides a sum by the number of ranks for a mean."""
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
