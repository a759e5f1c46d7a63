"""`sealanectl top`: what it says of two pages of metrics."""

import datetime as dt
import io
import json
from typing import Any

import pytest

from sealane.cli import top
from sealane.cli.figures import Interval, Page
from sealane.cli.output import Output
from sealane.client import NodeStatus

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
NOW = 1_000_000.0
SECONDS = 2.0


def volume(name: str, *, reads: int, seconds: float, sectors: int, queues: int = 1) -> str:
    labels = f'{{mode="remote",volume="{name}"}}'
    prefix = "sealane_gateway_volume"
    return (
        f"{prefix}_queues_running{labels} {queues}\n"
        f"{prefix}_reads_total{labels} {reads}\n"
        f"{prefix}_writes_total{labels} 7\n"
        f"{prefix}_read_seconds_total{labels} {seconds}\n"
        f"{prefix}_write_seconds_total{labels} 1\n"
        f"{prefix}_sectors_opened_total{labels} {sectors}\n"
        f"{prefix}_sectors_sealed_total{labels} 0\n"
        f"{prefix}_journal_flushes_total{labels} {reads}\n"
        f"{prefix}_refusals_total{labels} {reads}\n"
    )


def session(*, loss_seconds: float, sent: int, lost: int) -> str:
    of = 'session="sessions/s"'
    return (
        f"sealane_session_rate_bytes_per_second{{{of}}} 1000\n"
        f"sealane_session_srtt_seconds{{{of}}} 0.02\n"
        f"sealane_session_packets_sent_total{{{of}}} {sent}\n"
        f"sealane_session_lost_packets_total{{{of}}} {lost}\n"
        f"sealane_session_payload_bytes_sent_total{{{of}}} {1000 * sent}\n"
        f"sealane_session_payload_bytes_received_total{{{of}}} 0\n"
        f'sealane_session_limited_seconds_total{{cause="loss",{of}}} {loss_seconds}\n'
        f'sealane_session_limited_seconds_total{{cause="pacing",{of}}} {loss_seconds / 3}\n'
    )


def figures(before: str, after: str) -> dict[str, Any]:
    interval = Interval(Page.of(before, 5.0), Page.of(after, 5.0 + SECONDS))
    return top.record(STATUS, interval, NOW)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(record: dict[str, Any], form: str = "table", *, file: io.StringIO | None = None) -> str:
    file = io.StringIO() if file is None else file
    top.show(record, Output(form, file))
    return file.getvalue()


def test_a_volume_has_rates_of_the_interval_and_the_mean_of_its_reads() -> None:
    record = figures(
        volume("v" * 36, reads=100, seconds=1.0, sectors=50),
        volume("v" * 36, reads=300, seconds=1.1, sectors=1050),
    )
    (row,) = record["volumes"]
    assert (row["reads_per_second"], row["writes_per_second"], row["queues"]) == (100, 0, 1)
    assert row["read_bytes_per_second"] == 500 * 4096
    assert row["read_seconds"] == pytest.approx(0.0005)
    assert row["write_seconds"] is None
    assert row["held_back_by"] == ["a full journal"]
    text = shown(record)
    assert "500 µs" in text
    assert "vvvvvvvv " in text
    assert "sectors or answers of the target were refused (mode remote, volume vvv" in text


def test_a_volume_that_was_idle_has_no_mean_of_reads_whose_time_is_not_known() -> None:
    before = volume("v", reads=100, seconds=1.0, sectors=50)
    idle = "".join(f"{line}\n" for line in before.splitlines() if "_seconds_total" not in line)
    (row,) = figures(idle, volume("v", reads=300, seconds=1.1, sectors=1050))["volumes"]
    assert row["reads_per_second"] == 100
    assert row["read_seconds"] is None


def test_the_busiest_volume_is_first() -> None:
    still = [volume(name, reads=1, seconds=0, sectors=0) for name in ("a", "b")]
    record = figures(
        "".join(still), still[0] + volume("b", reads=5, seconds=0.1, sectors=0, queues=2)
    )
    assert [row["volume"] for row in record["volumes"]] == ["b", "a"]


def test_a_session_says_what_limits_it_and_what_it_loses() -> None:
    record = figures(
        session(loss_seconds=1, sent=100, lost=0), session(loss_seconds=2.5, sent=200, lost=10)
    )
    (row,) = record["sessions"]
    assert row["lost"] == pytest.approx(0.1)
    assert row["limits"] == {"loss": pytest.approx(0.75), "pacing": pytest.approx(0.25)}
    assert row["sent_bits_per_second"] == 400_000
    assert "lost packets 75%" in shown(record)


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ('sealane_space_is_low{place="volumes"} 1\n', "the disk is nearly full"),
        ('sealane_broker_away{role="gateway"} 1\n', "no broker answers"),
        ('sealane_target_volume_failed{mode="remote",volume="v"} 1\n', "accepts no writes"),
        ('sealane_plain_namespace_failed{namespace="volume v"} 1\n', "accepts no writes"),
        (
            f'sealane_certificate_expiry_timestamp_seconds{{role="gateway"}} {NOW + 60}\n',
            "certificate expires in 60 s",
        ),
    ],
)
def test_health_names_what_is_wrong_now(page: str, wrong: str) -> None:
    (found,) = figures(page, page)["health"]
    assert wrong in found["wrong"]
    assert found["where"].rpartition(", ")[2] in {
        "role gateway",
        "volume v",
        "place volumes",
        "namespace volume v",
    }


def test_health_names_failing_drives_of_plain_namespaces() -> None:
    count = 'sealane_plain_namespace_media_errors_total{{namespace="nqn/1"}} {}\n'.format
    (found,) = figures(count(1), count(2))["health"]
    assert found == {"wrong": "the drive fails reads or writes", "where": "namespace nqn/1"}


def test_health_is_of_the_interval_and_not_of_long_ago() -> None:
    old = volume("v", reads=100, seconds=1.0, sectors=50)
    old += 'sealane_space_is_low{place="volumes"} 0\n'
    away = 'sealane_broker_away{role="gateway"} 0\n'
    expiry = f'sealane_certificate_expiry_timestamp_seconds{{role="gateway"}} {NOW + 600}\n'
    assert figures(old + away + expiry, old + away + expiry)["health"] == []
    assert "nothing wrong seen" in shown(figures(old, old))


def test_json_has_every_field_and_a_table_of_a_terminal_as_many_rows_as_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = "".join(volume(f"{n:02}", reads=1, seconds=0, sectors=0) for n in range(50))
    record = figures(page, page)
    assert len(json.loads(shown(record, "json"))["volumes"]) == 50
    assert shown(record).count("gateway") > 50

    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("COLUMNS", "100")
    text = shown(record, file=Terminal())
    assert len(text.splitlines()) <= 24
    assert "more volumes" in text


def test_a_thousand_volumes_take_no_time() -> None:
    page = "".join(volume(f"{n:04}", reads=n, seconds=0, sectors=0) for n in range(1000))
    interval = Interval(Page.of(page, 5.0), Page.of(page, 7.0))
    looked = 0
    keys = Page.keys

    def counted(self: Page, name: str, labels: Any) -> Any:
        nonlocal looked
        for key in keys(self, name, labels):
            looked += 1
            yield key

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Page, "keys", counted)
        record = top.record(STATUS, interval, NOW)
    assert len(record["volumes"]) == 1000
    assert looked < 20 * 1000


def test_several_daemons_are_told_apart_by_a_column() -> None:
    one = figures(
        volume("v" * 36, reads=0, seconds=0, sectors=0),
        volume("v" * 36, reads=10, seconds=1, sectors=10),
    )
    other = {**figures("", session(loss_seconds=1, sent=10, lost=1)), "node": "b"}
    file = io.StringIO()
    top.show_all([one, other], Output("table", file))
    blocks = [block.splitlines() for block in file.getvalue().split("\n\n")]
    assert [line.split()[0].rstrip(",") for line in blocks[0]] == ["node", "a", "b"]
    (volumes,) = (block for block in blocks if "volume" in block[0])
    (sessions,) = (block for block in blocks if "session" in block[0])
    assert [volumes[1].split()[0], sessions[1].split()[0]] == ["a", "b"]
    file = io.StringIO()
    top.show_all([one, other], Output("json", file))
    assert [record["node"] for record in json.loads(file.getvalue())] == ["a", "b"]
