"""A report as one HTML page: tables and plots, without scripts or anything from elsewhere."""

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from sealane.cli.output import text_of

COLOURS: Final = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#000000", "#8c6d31"),
)
"""One for each line; told apart by colour-blind readers, too (Okabe and Ito)."""
WIDTH: Final = 520
HEIGHT: Final = 220
LEFT: Final = 70
BOTTOM: Final = 30
TOP: Final = 10
RIGHT: Final = 20
GRID_LINES: Final = 4
POLICY: Final = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
"""Nothing may be loaded, and no script runs, whatever a name or message contains."""
_STYLE: Final = """
body { font: 15px/1.4 system-ui, sans-serif; color: #222; background: #fff; max-width: 1100px;
  margin: 2em auto; padding: 0 1em; }
h2 { margin-top: 2em; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: 2px 12px 2px 0;
  border-bottom: 1px solid #eee; font-variant-numeric: tabular-nums; }
th { font-weight: 600; white-space: nowrap; }
pre { overflow-x: auto; background: #f6f6f6; padding: 8px; }
figure { display: inline-block; margin: 1em 1em 0 0; }
figcaption { font-weight: 600; }
svg text { font: 11px system-ui, sans-serif; fill: #444; }
.legend { margin-right: 1em; font-size: 13px; }
.wrong { color: #b00020; }
"""


@dataclass(frozen=True)
class Plot:
    """Lines over time, in one unit; None is a gap."""

    title: str
    unit: str
    lines: Mapping[str, Sequence[float | None]]


def page(title: str, parts: Iterable[str]) -> str:
    """Return the whole page of parts made by the functions below."""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            POLICY,
            f"<title>{_escaped(title)}</title>",
            f"<style>{_STYLE}</style>\n</head>\n<body>",
            f"<h1>{_escaped(title)}</h1>",
            *parts,
            "</body>\n</html>\n",
        ]
    )


def heading(text: str) -> str:
    """Return the heading of a section."""
    return f"<h2>{_escaped(text)}</h2>"


def paragraph(text: str, *, is_wrong: bool = False) -> str:
    """Return a paragraph, red if something is wrong."""
    start = '<p class="wrong">' if is_wrong else "<p>"
    return f"{start}{_escaped(text)}</p>"


def text_block(text: str) -> str:
    """Return text with its line breaks."""
    return f"<pre>{html.escape(text)}</pre>"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return records as a table with a head, or a sentence if there are none."""
    if not rows:
        return paragraph("none")
    head = "".join(f"<th>{_escaped(name.replace('_', ' '))}</th>" for name in rows[0])
    lines = (
        "<tr>" + "".join(f"<td>{_escaped(value)}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table>\n<tr>{head}</tr>\n" + "\n".join(lines) + "\n</table>"


def fields(row: Mapping[str, Any]) -> str:
    """Return one record with a line for each value."""
    lines = (
        f"<tr><th>{_escaped(name.replace('_', ' '))}</th><td>{_escaped(value)}</td></tr>"
        for name, value in row.items()
    )
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def plot(made: Plot, times: Sequence[float]) -> str:
    """Return a plot over `times`, ascending seconds; "" if no line has a value.

    Of many lines the largest are drawn, as many as there are colours.
    """
    peaks = {name: _peak(values) for name, values in made.lines.items()}
    drawn = sorted((name for name in peaks if peaks[name] >= 0), key=lambda name: -peaks[name])
    if not drawn:
        return ""
    names = drawn[: len(COLOURS)]
    frame = _Frame(times[0], times[-1], ceiling(peaks[names[0]]))
    lines = [
        _line(made.lines[name], times, frame, colour)
        for name, colour in zip(names, COLOURS, strict=False)
    ]
    legend = "".join(
        f'<span class="legend"><b style="color:{colour}">&#9632;</b> {_escaped(name)}</span>'
        for name, colour in zip(names, COLOURS, strict=False)
    )
    more = f"and {len(drawn) - len(names)} smaller" if len(drawn) > len(names) else ""
    return "\n".join(
        [
            f"<figure>\n<figcaption>{_escaped(made.title)}, {_escaped(made.unit)}</figcaption>",
            f'<svg role="img" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
            f"<title>{_escaped(made.title)}</title>",
            *_axes(frame),
            *lines,
            f"</svg>\n<div>{legend}{more}</div>\n</figure>",
        ]
    )


@dataclass(frozen=True)
class _Frame:
    """The axes of a plot."""

    start: float
    end: float
    most: float

    def x(self, time: float) -> float:
        return LEFT + (time - self.start) / (self.end - self.start or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.most * (HEIGHT - BOTTOM - TOP)


def _axes(frame: _Frame) -> Iterator[str]:
    for step in range(GRID_LINES + 1):
        value = frame.most * step / GRID_LINES
        y = frame.y(value)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    for time in (frame.start, frame.end):
        x = f'<text x="{frame.x(time):.1f}" y="{HEIGHT - 10}" text-anchor="middle">'
        yield f"{x}{time - frame.start:.0f} s</text>"


def _line(
    values: Sequence[float | None], times: Sequence[float], frame: _Frame, colour: str
) -> str:
    shapes = []
    for run in _runs(values, times):
        points = [f"{frame.x(time):.1f},{frame.y(value):.1f}" for time, value in run]
        # A point alone would be invisible as a line.
        points += [points[0]] * (len(points) == 1)
        shapes.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" '
            'stroke-width="2" stroke-linecap="round"/>'
        )
    return "\n".join(shapes)


def _peak(values: Sequence[float | None]) -> float:
    return max((value for value in values if value is not None), default=-math.inf)


def ceiling(value: float) -> float:
    """Return the next of 1, 2, 4 and 10 times a power of ten; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 4, 10) if value <= power * step * (1 + 1e-9))


def _runs(
    values: Sequence[float | None], times: Sequence[float]
) -> Iterator[list[tuple[float, float]]]:
    """Yield the runs of points between gaps."""
    points = zip(times, values, strict=True)
    for is_gap, run in groupby(points, key=lambda point: point[1] is None):
        if not is_gap:
            yield [(time, value) for time, value in run if value is not None]


def _escaped(value: object) -> str:
    return html.escape(text_of(value))
