"""`sealanectl report`: its page, and what must not be in it."""

import argparse
import asyncio
import datetime as dt
import html.parser
import shutil
import stat
import subprocess
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealane.cli import report, report_page
from sealane.cli.figures import Page
from sealane.cli.report_page import Plot
from sealane.client import NodeStatus
from sealane.errors import UsageError

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
BAD = "<script>document.title='broken'</script>\x1b[2J"
STATUS = NodeStatus(
    node="a",
    version="1",
    roles=("gateway",),
    evidence_driver="tpm2",
    is_development=False,
    certificate_expires=None,
    addresses={},
    started=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
)
CONFIG = (
    '[node]\nname = "{}"\n[broker]\npolicy_file = "/p"\nkey_file = "/k"\n'
    "allow_unsigned_policy = true\n"
)
TIMES = [10.0, 11.0, 12.0, 13.0]


class Reader(html.parser.HTMLParser):
    """Collects tags and text; fails at a tag that is closed without being open."""

    VOID = frozenset({"meta", "line"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def whole() -> str:
    plot = Plot(BAD, "ms", {BAD: [1.0, None, 3.0, 4.0], "still": [0.0] * 4})
    return report_page.page(
        BAD,
        [
            report_page.heading(BAD),
            report_page.paragraph(BAD, is_wrong=True),
            report_page.text_block(BAD),
            report_page.table([{"name": BAD}]),
            report_page.fields({BAD: BAD}),
            report_page.plot(plot, TIMES),
        ],
    )


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    reader = read(whole())
    names = {tag for tag, _ in reader.tags}
    assert not names & {"script", "link", "img", "iframe", "object"}
    for _, attributes in reader.tags:
        assert not {"src", "href"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    policies = [
        attributes["content"]
        for tag, attributes in reader.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert reader.text.count("<script>") == 11, "each of them is text"


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed (chromium)")
def test_a_browser_shows_the_page_and_no_name_becomes_a_script(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(whole())
    assert BROWSER is not None
    shown = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "<title>broken</title>" not in shown.stdout
    assert shown.stdout.count("<polyline") == 3


def lines(text: str) -> list[list[tuple[float, float]]]:
    return [
        [
            (float(x), float(y))
            for x, _, y in (point.partition(",") for point in (found["points"] or "").split())
        ]
        for tag, found in read(text).tags
        if tag == "polyline"
    ]


def test_a_plot_has_a_line_for_each_run_of_values_and_fits_its_frame() -> None:
    made = Plot("latency", "ms", {"a": [1.0, 2.0, None, 3.0]})
    first, second = lines(report_page.plot(made, TIMES))
    assert len(first) == 2
    assert second[0] == second[1], "a point alone"
    assert first[0][1] > first[1][1] > second[0][1], "larger is higher"
    assert first[0][0] < first[1][0] < second[0][0]
    for x, y in (*first, *second):
        assert report_page.LEFT <= x <= report_page.WIDTH
        assert report_page.TOP <= y <= report_page.HEIGHT - report_page.BOTTOM


def test_a_plot_of_nothing_is_none_and_of_much_the_largest() -> None:
    assert report_page.plot(Plot("t", "u", {"a": [None] * 4}), TIMES) == ""
    many = {f"line {n}": [float(n)] * 4 for n in range(20)}
    text = report_page.plot(Plot("t", "u", many), TIMES)
    assert "line 19" in text
    assert "line 3<" not in text
    assert "and 12 smaller" in text


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 1), (1, 1), (1.5, 2), (3, 4), (5, 10), (0.03, 0.04), (1e9, 1e9)]
)
def test_an_axis_ends_at_a_round_number(value: float, expected: float) -> None:
    assert report_page.ceiling(value) == pytest.approx(expected)


def test_a_configuration_shows_no_arguments_of_commands_and_no_passwords() -> None:
    config = {
        "enrolment": {
            "secondary": [{"label": "gpu", "command": ["/bin/gpu", "--pin", "hunter2"]}],
            "settings": {"password": "hunter2"},
        },
        "broker": {"etcd": {"endpoints": ["https://user:hunter2@192.0.2.1:2379"]}, "port": 3},
        "gateway": {"secret_file": "/etc/sealane/secret"},
    }
    shown = report.public(config)
    assert "hunter2" not in str(shown)
    assert shown["enrolment"]["secondary"][0]["command"] == ["/bin/gpu", "(left out)"]
    assert shown["broker"] == {
        "etcd": {"endpoints": ["https://(left out)@192.0.2.1:2379"]},
        "port": 3,
    }
    assert shown["gateway"] == config["gateway"]


def test_a_configuration_of_another_daemon_is_named(tmp_path: Path) -> None:
    config = tmp_path / "sealaned.toml"
    for name in ("a", "b"):
        config.write_text(CONFIG.format(name))
        shown = "".join(report.daemon_parts(STATUS, config))
        assert "as it is read now" in shown
        assert ("another daemon" in shown) == (name == "b")


def options(file: Path, **more: Any) -> argparse.Namespace:
    given = {"file": file, "overwrite": False, "seconds": 30.0, "interval": 1.0} | more
    return argparse.Namespace(**given)


def test_a_report_overwrites_nothing_unless_told_and_is_its_owner_s_alone(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    report.check(options(file))
    report.write(file, "one", is_overwriting=False)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(UsageError) as caught:
        report.check(options(file))
    assert caught.value.reason == "report.exists"
    with pytest.raises(UsageError) as caught:
        report.write(file, "two", is_overwriting=False)
    assert caught.value.reason == "report.unwritable"
    assert file.read_text() == "one"

    file.chmod(0o666)
    report.check(options(file, overwrite=True))
    report.write(file, "two", is_overwriting=True)
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("two", 0o600)


def test_a_report_that_can_not_be_written_is_refused_before_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        report.check(options(tmp_path / "absent" / "report.html"))
    assert caught.value.reason == "report.directory"
    (tmp_path / "link").symlink_to("absent")
    with pytest.raises(UsageError) as caught:
        report.check(options(tmp_path / "link"))
    assert caught.value.reason == "report.exists"
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError) as caught:
        report.write(tmp_path / "folder", "text", is_overwriting=True)
    assert caught.value.reason == "report.unwritable"


def test_of_the_pages_that_are_sampled_the_first_and_the_last_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages: list[weakref.ref[Page]] = []
    living = []

    async def scrape(_: object) -> Page:
        living.append(sum(page() is not None for page in pages))
        seconds = float(len(living))
        page = Page(seconds, {"process_cpu_seconds_total": {(): seconds}})
        pages.append(weakref.ref(page))
        return page

    monkeypatch.setattr(report, "scrape", scrape)
    given = options(Path("r.html"), seconds=10.0)
    samples = asyncio.run(report.sample(None, STATUS, given))  # type: ignore[arg-type]
    assert max(living) == 2
    assert len(living) == 11
    assert samples.times == [float(number) for number in range(2, 12)]
    assert [each["processor_cores"] for each in samples.records] == [1.0] * 10
    assert samples.whole.increase("process_cpu_seconds_total") == 10


@pytest.mark.parametrize(("seconds", "interval"), [(1.0, 2.0), (3601.0, 1.0)])
def test_a_report_has_some_samples_and_not_too_many(
    seconds: float, interval: float, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        report.check(options(tmp_path / "r.html", seconds=seconds, interval=interval))
    assert caught.value.reason == "report.samples"


def test_a_row_that_comes_or_goes_leaves_a_gap() -> None:
    def sample(*rows: tuple[str, float | None]) -> dict[str, Any]:
        found = [
            {
                "session": name,
                "sent_bits_per_second": 8e6,
                "lost": lost,
                "round_trip_seconds": 0.1,
            }
            for name, lost in rows
        ]
        return {
            "operations": [],
            "volumes": [],
            "sessions": found,
            "processor_cores": 1.0,
            "memory_bytes": 1 << 20,
        }

    made = {plot.title: plot for plot in report.plots([sample(("a", 0.5)), sample(("b", None))])}
    assert made["Packets lost"].lines == {"a": [50, None], "b": [None, None]}
    assert made["Messages sent"].lines == {"a": [8, None], "b": [None, 8]}
    assert made["Memory"].lines == {"daemon": [1, 1]}


async def test_a_daemon_that_fails_is_a_paragraph_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def made(*_: Any, is_first: bool) -> tuple[NodeStatus, int, list[str]]:
        assert is_first
        return STATUS, 3, ["<p>the first</p>"]

    monkeypatch.setattr(report, "_daemon_report", made)
    away = str(tmp_path / "away")
    options = argparse.Namespace(
        file=tmp_path / "r.html",
        also=[away, away],
        socket=str(tmp_path / "own"),
        every=None,
        overwrite=False,
        interval=1,
        seconds=3,
        is_endless=False,
    )
    shown: list[Any] = []
    output = SimpleNamespace(show_one=shown.append)
    await report.report(None, options, output)  # type: ignore[arg-type]
    text = read((tmp_path / "r.html").read_text()).text
    assert "the first" in text
    assert text.count(f"daemon {away}: {away}: no sealaned answers there") == 1
    assert shown[0]["samples"] == 3
