"""Validates sections of TOML files, and reports the first fault in one line.

The line names the file, the key, the value found and the values allowed.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sealane.daemon.runtime.files import FILE_BYTES_MAX, read_bounded
from sealane.errors import UsageError
from sealane.reasons import ReasonId

_Model = TypeVar("_Model", bound=BaseModel)


def load_section(model: type[_Model], path: Path) -> _Model:
    """Read and validate a TOML file; UsageError `config.…` with one line about the first fault."""
    try:
        raw = read_bounded(path)
    except OSError as error:
        raise UsageError("config.unreadable", f"{path}: {error.strerror}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise UsageError("config.size", f"{path}: too large; allowed: {FILE_BYTES_MAX} bytes")
    return parse_toml(model, raw, source=str(path))


def parse_toml(model: type[_Model], raw: bytes, *, source: str) -> _Model:
    """Parse and validate TOML; UsageError `config.…` with one line about the first fault."""
    try:
        document = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError("config.syntax", f"{source}: not TOML: {error}") from error
    return parse_section(model, document, source=source)


def parse_section(model: type[_Model], document: object, *, source: str) -> _Model:
    """Validate `document`; UsageError `config.…` with one line about the first fault."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        # An unknown key often explains a missing one, so it is reported first.
        faults = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise _explain(model, faults[0], source) from None


def _explain(model: type[BaseModel], fault: ErrorDetails, source: str) -> UsageError:
    key = ".".join(str(part) for part in fault["loc"])
    found = _toml(fault["input"])
    context = fault.get("ctx", {})
    kind = fault["type"]
    if kind == "extra_forbidden":
        known = sorted(_fields_beside(model, fault["loc"]))
        close = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return UsageError(
            "config.key.unknown", f"{source}: {key}: unknown key; {hint}allowed: {', '.join(known)}"
        )
    if kind == "missing":
        return UsageError("config.missing", f"{source}: {key}: missing; it has no default")
    reason: ReasonId = "config.value"
    if kind == "value_error":
        allowed = str(context["error"])
    elif kind in {"enum", "literal_error"}:
        allowed = _MEMBER.sub(r"\1", str(context["expected"]))
    elif kind in {"greater_than_equal", "less_than_equal"}:
        allowed, reason = _range_of(model, fault["loc"], context), "config.range"
    else:
        allowed, reason = _KINDS.get(kind, fault["msg"]), "config.type"
    return UsageError(reason, f"{source}: {key}: found {found}; allowed: {allowed}")


_MEMBER: Final = re.compile(r"<\w+\.\w+: ('[^']*')>")
"""A member of an enum, as pydantic says it."""
_KINDS: Final = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "tuple_type": "an array",
    "model_type": "a section",
    "model_attributes_type": "a section",
}


def _toml(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "…"


def _models_along(model: type[BaseModel], loc: tuple[int | str, ...]) -> Iterator[type[BaseModel]]:
    """Yield the model at every step of `loc` except the last."""
    yield model
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = [] if field is None else [*_models_in(field.annotation)]
        if not inner:
            return
        model = inner[0]
        yield model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)


def _fields_beside(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    last = [*_models_along(model, loc)][-1]
    return [field.alias or name for name, field in last.model_fields.items()]


def _range_of(
    model: type[BaseModel], loc: tuple[int | str, ...], context: Mapping[str, object]
) -> str:
    """Return a value's bounds; inside arrays and tables, only the violated bound."""
    models = [*_models_along(model, loc)]
    names = [part for part in loc if isinstance(part, str)]
    is_field = len(models) == len(names) and loc[-1] == names[-1]
    stated = models[-1].model_fields[names[-1]].metadata if is_field else []
    bounds = {
        name: bound
        for place in (SimpleNamespace(**context), *stated)
        for name in ("ge", "le")
        if (bound := getattr(place, name, None)) is not None
    }
    if "ge" not in bounds:
        return f"at most {bounds['le']}"
    return f"{bounds['ge']}…{bounds['le']}" if "le" in bounds else f"at least {bounds['ge']}"
