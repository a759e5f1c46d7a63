"""Rates and quantiles of two looks at a daemon's metrics."""

import asyncio
import contextlib
import http.server
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sealane.cli import figures
from sealane.cli.figures import Interval, Page, scrape
from sealane.errors import Error


def interval(before: str, after: str) -> Interval:
    return Interval(Page.of(before, 100.0), Page.of(after, 102.0))


def counters(**values: int) -> str:
    lines = (f'sealane_things_total{{thing="{name}"}} {value}' for name, value in values.items())
    return "# TYPE sealane_things counter\n" + "\n".join(lines) + "\n"


def test_counters_rise_from_page_to_page() -> None:
    made = interval(counters(a=10, b=5), counters(a=14, b=6))
    assert made.rate("sealane_things_total", thing="a") == 2
    assert made.increase("sealane_things_total") == 5
    assert made.increase("sealane_things_total", thing="c") == 0
    assert made.after.sum("sealane_things_total") == 20


def test_a_counter_that_fell_began_again_and_a_new_one_has_not_risen() -> None:
    made = interval(counters(a=10), counters(a=3, b=1000))
    assert made.increase("sealane_things_total", thing="a") == 3
    assert made.increase("sealane_things_total", thing="b") == 0


def histogram(*counts: int) -> str:
    lines = [
        f'sealane_x_seconds_bucket{{le="{le}",operation="read"}} {count}'
        for le, count in zip(("1", "2", "4", "+Inf"), counts, strict=True)
    ]
    return "\n".join(["# TYPE sealane_x_seconds histogram", *lines, ""])


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0)],
)
def test_a_quantile_is_interpolated_within_its_bucket(share: float, expected: float) -> None:
    made = interval(histogram(7, 7, 7, 7), histogram(9, 11, 11, 11))
    assert made.quantile(share, "sealane_x_seconds", operation="read") == expected


def test_a_quantile_beyond_the_last_bound_is_that_bound_and_there_may_be_none() -> None:
    made = interval(histogram(0, 0, 0, 0), histogram(0, 0, 0, 5))
    assert made.quantile(0.5, "sealane_x_seconds", operation="read") == 4
    same = interval(histogram(3, 3, 3, 5), histogram(3, 3, 3, 5))
    assert same.quantile(0.5, "sealane_x_seconds", operation="read") is None
    assert same.quantile(0.5, "sealane_y_seconds") is None


@contextlib.contextmanager
def served(status: int, content: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def scraped(address: str | None) -> Page:
    async def status() -> Any:
        return SimpleNamespace(addresses={} if address is None else {"metrics": address})

    return asyncio.run(scrape(SimpleNamespace(status=status)))  # type: ignore[arg-type]


def test_a_page_is_read_where_the_daemon_says() -> None:
    with served(200, counters(a=1).encode()) as address:
        assert scraped(address).sum("sealane_things_total") == 1


def test_a_page_is_parsed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_by = []
    parse = figures.text_string_to_metric_families

    def parsing(text: str) -> Any:
        parsed_by.append(threading.current_thread())
        return parse(text)

    monkeypatch.setattr(figures, "text_string_to_metric_families", parsing)
    with served(200, counters(a=1).encode()) as address:
        scraped(address)
    assert len(parsed_by) == 1
    assert threading.main_thread() not in parsed_by


@pytest.mark.parametrize(
    ("status", "content", "reason"),
    [
        (200, b"<html>nothing</html>", "metrics.malformed"),
        (404, b"", "metrics.unavailable"),
        (200, b"#" * 100, "metrics.unavailable"),
    ],
)
def test_what_is_no_page_of_metrics_is_refused(
    status: int, content: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "PAGE_BYTES_MAX", 50)
    with served(status, content) as address, pytest.raises(Error) as caught:
        scraped(address)
    assert caught.value.reason == reason


def test_a_daemon_without_metrics_says_what_to_set() -> None:
    with pytest.raises(Error, match=r"set metrics\.listen") as caught:
        scraped(None)
    assert caught.value.reason == "metrics.absent"
    with pytest.raises(Error) as caught:
        scraped("127.0.0.1:1")
    assert caught.value.reason == "metrics.unavailable"
