"""Shared by the operators' commands: printing, time-outs, lists in pages."""

import argparse
import datetime as dt
import json
import shutil
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO, TypeVar

import yaml

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


FORMS: Final = ("table", "wide", "json", "yaml", "name")
"""Forms of output: aligned text, with more columns, for programs, and names alone."""


class Output:
    """Prints records in one of `FORMS`, to standard output or another file."""

    def __init__(self, form: str, file: TextIO | None = None) -> None:
        self.form = form
        self._file = file

    @property
    def file(self) -> TextIO:
        """The file it prints to."""
        return sys.stdout if self._file is None else self._file

    @property
    def is_data(self) -> bool:
        """Whether the output is for programs, with every field and nothing else."""
        return self.form in {"json", "yaml"}

    def show(
        self,
        rows: Sequence[Mapping[str, Any]],
        table: Sequence[Mapping[str, Any]] | None = None,
        *,
        wide: Sequence[Mapping[str, Any]] | None = None,
        things: str = "",
    ) -> None:
        """Print `rows` as data, or `table` (default: `rows`) as a table with a header line.

        `wide` is the table with more columns. An empty table is reported as no `things`, on
        standard error, if they are given.
        """
        shown = rows if table is None else table
        if self.is_data:
            self._print_data(list(rows))
        elif self.form == "name":
            for row in shown:
                print(text_of(_name(row)), file=self.file)
        elif shown:
            lines = wide if self.form == "wide" and wide is not None else shown
            heads = [_head(name) for name in lines[0]]
            self._print([heads, *([text_of(v) for v in row.values()] for row in lines)])
        elif things:
            print(f"no {things}", file=sys.stderr)

    def show_one(self, row: Mapping[str, Any], table: Mapping[str, Any] | None = None) -> None:
        """Print `row` as data, or `table` (default: `row`) with a line for each value."""
        if self.is_data:
            self._print_data(row)
        elif self.form == "name":
            print(text_of(_name(row)), file=self.file)
        else:
            shown = row if table is None else table
            self._print([[_head(key), text_of(value)] for key, value in shown.items()])

    def _print_data(self, value: object) -> None:
        text = _json(value)
        if self.form == "yaml":
            # Of what JSON can say, so that both forms have the same types.
            text = _yaml(json.loads(text))
        print(text, file=self.file)

    def begin_again(self) -> None:
        """Make room for the same once more: clear a terminal, begin a document, leave a line."""
        if self.form == "yaml":
            print("---", file=self.file)
        elif self.file.isatty() and not self.is_data:
            print("\x1b[H\x1b[2J", end="", file=self.file)
        elif not self.is_data:
            print(file=self.file)

    def line(self, row: Mapping[str, Any]) -> None:
        """Print one record of a stream, as one line; each YAML document is a line, too."""
        if self.is_data:
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


def _yaml(value: object) -> str:
    text: str = yaml.safe_dump(value, allow_unicode=True, sort_keys=False)
    return text.rstrip("\n")


def _name(row: Mapping[str, Any]) -> object:
    """Return what a record is called: its name, or its first value."""
    return row["name"] if "name" in row else next(iter(row.values()), "")


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
