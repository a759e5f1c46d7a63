"""Shared by the operators' commands: printing, time-outs, lists in pages."""

import argparse
import datetime as dt
import json
import shutil
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO, TypeVar

if TYPE_CHECKING:
    from sealane.client import Client

CALL_SECONDS: Final = 60.0
_TEXT_COLUMNS_MIN: Final = 20

SIZE_UNITS: Final = {
    "": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
}


class Page(Protocol):
    """An answer to a List call."""

    @property
    def next_page_token(self) -> str:
        """The token of the next page; empty on the last page."""


_Page = TypeVar("_Page", bound=Page)


async def pages(call: Callable[[str], Awaitable[_Page]]) -> AsyncIterator[_Page]:
    """Yield every page that `call` returns, from an empty page token on."""
    token = ""
    while True:
        page = await call(token)
        yield page
        token = page.next_page_token
        if not token:
            return


class Output:
    """Prints records as aligned text or as JSON, to standard output or another file."""

    def __init__(self, form: str, file: TextIO | None = None) -> None:
        self.form = form
        self._file = file

    @property
    def file(self) -> TextIO:
        """The file it prints to."""
        return sys.stdout if self._file is None else self._file

    def show(
        self,
        rows: Sequence[Mapping[str, Any]],
        table: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Print `rows` as JSON, or `table` (default: `rows`) as a table with a header line."""
        shown = rows if table is None else table
        if self.form == "json":
            print(_json(list(rows)), file=self.file)
        elif shown:
            heads = [_head(name) for name in shown[0]]
            self._print([heads, *([text_of(v) for v in row.values()] for row in shown)])

    def show_one(self, row: Mapping[str, Any], table: Mapping[str, Any] | None = None) -> None:
        """Print `row` as JSON, or `table` (default: `row`) with a line for each value."""
        if self.form == "json":
            print(_json(row), file=self.file)
        else:
            shown = row if table is None else table
            self._print([[_head(key), text_of(value)] for key, value in shown.items()])

    def line(self, row: Mapping[str, Any]) -> None:
        """Print one record of a stream, as one line."""
        if self.form == "json":
            print(json.dumps(row, default=_plain), file=self.file, flush=True)
        else:
            shown = (text_of(v) for v in row.values() if v != "")
            print("  ".join(shown), file=self.file, flush=True)

    def _print(self, lines: Sequence[Sequence[str]]) -> None:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            before = "".join(f"{v:<{w}}  " for v, w in zip(line[:-1], widths[:-1], strict=True))
            for part in self._wrapped(line[-1], len(before)):
                print((before + part).rstrip(), file=self.file)
                before = " " * len(before)

    def _wrapped(self, text: str, before: int) -> list[str]:
        """Wrap the last column at a terminal's width; `before` columns are in front of it."""
        if not self.file.isatty():
            return [text]
        room = max(_TEXT_COLUMNS_MIN, shutil.get_terminal_size().columns - before)
        cut = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        return cut or [""]


Command = Callable[["Client", argparse.Namespace, Output], Awaitable[None]]
"""The coroutine function that a verb runs."""


def size_text(size_bytes: int) -> str:
    """Return a size in the largest fitting unit, such as "1.5 GiB"."""
    units = ("PiB", "TiB", "GiB", "MiB", "KiB")
    unit = next((u for u in units if size_bytes >= SIZE_UNITS[u]), "KiB")
    return f"{size_bytes / SIZE_UNITS[unit]:.4g} {unit}"


def _head(name: str) -> str:
    """Return a value's heading in a table: the field's name with spaces."""
    return name.replace("_", " ")


def _json(value: object) -> str:
    return json.dumps(value, indent=2, default=_plain)


def _plain(value: object) -> object:
    return value.isoformat() if isinstance(value, dt.datetime) else str(value)


def text_of(value: object) -> str:
    """Return a value as a table shows it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {text_of(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(text_of(v) for v in value)
    if isinstance(value, dt.datetime):
        return f"{value:%Y-%m-%d %H:%M:%S} UTC"
    # A peer's text must not move the cursor of an operator's terminal.
    return "".join(c if c.isprintable() else "?" for c in str(value))
