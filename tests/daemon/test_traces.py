"""Traces of a broker, a target and a gateway as processes, sent to a collector."""

import contextlib
import time
import urllib.request
import uuid
from collections.abc import Iterator

import pytest

from collector import collecting
from control_plane import Daemon, Site, daemon, sealanectl, sealaned, short_directory

pytestmark = pytest.mark.slow

HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"
CALLER = "00f067aa0ba902b7"


@contextlib.contextmanager
def _gateway(endpoint: str, *, has_traces: bool = True) -> Iterator[Daemon]:
    """Run broker, target and gateway; the last one sends spans only if it `has_traces`."""
    traces = f'[traces]\nendpoint = "{endpoint}"\n'
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        site.write_policy({"s": ["target"], "g": ["gateway"]})
        at = site.broker_config()
        at.write_text(at.read_text() + traces)
        broker = stack.enter_context(daemon(at))
        section = '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
        config = site.enrolment("s", broker) + section + traces
        target = stack.enter_context(daemon(site.write_config("s", config)))
        section = (
            '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
            f'target_address = "{target.addresses["target_control"]}"\n'
            '[metrics]\nlisten = "127.0.0.1:0"\n'
        )
        config = site.enrolment("g", broker) + section + (traces if has_traces else "")
        yield stack.enter_context(daemon(site.write_config("g", config)))


def _attach(at: Daemon, monkeypatch: pytest.MonkeyPatch, *, endpoint: str = "") -> str:
    """Create a volume and attach it; return the id of the attach's trace.

    With an `endpoint` that is a span of sealanectl, too.
    """
    made = sealanectl("volume", "create", "--size", "8MiB", "--socket", at.socket, "-o", "name")
    assert made.returncode == 0, made.stderr
    trace = uuid.uuid4().hex
    monkeypatch.setenv("TRACEPARENT", f"00-{trace}-{CALLER}-01")
    monkeypatch.setenv("SEALANE_TRACES_ENDPOINT", endpoint)
    name = made.stdout.strip()
    attached = sealanectl("volume", "attach", name, "--host-nqn", HOST, "--socket", at.socket)
    assert attached.returncode == 0, attached.stderr
    assert not attached.stderr
    return trace


@pytest.mark.parametrize("has_traces", [True, False])
def test_an_attach_is_one_trace_to_the_target(
    has_traces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        gateway = _gateway(collector.endpoint, has_traces=has_traces)
        with gateway as running:
            trace = _attach(running, monkeypatch)
    spans = [taken for taken in collector.taken if taken.trace == trace]
    assert {taken.node for taken in spans} == {"broker", "s"} | ({"g"} if has_traces else set())
    assert "sealane.v1.Storage/GetNamespace" in {s.span.name for s in spans if s.node == "s"}
    # Also of a gateway that sends none: it passes its caller's on.
    parent = CALLER
    if has_traces:
        (attach,) = (taken.span for taken in spans if taken.node == "g")
        assert attach.name == "sealane.v1.Volumes/AttachVolume"
        assert attach.parent_span_id.hex() == CALLER
        parent = attach.span_id.hex()
    others = [taken for taken in spans if taken.node != "g"]
    assert {taken.span.parent_span_id.hex() for taken in others} == {parent}
    assert len({taken.attributes["sealane.correlation_id"] for taken in spans}) == 1


def test_sealanectl_is_the_first_span_if_the_environment_names_a_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as collector, _gateway(collector.endpoint) as running:
        trace = _attach(running, monkeypatch, endpoint=collector.endpoint)
        socket = ("--socket", running.socket)
        volume = sealanectl("volume", "get", "nothing", *socket)
        repeated = sealanectl("top", "--once", "--interval", "0.1", *socket)
    assert (volume.returncode, repeated.returncode) == (4, 0)
    spans = [taken for taken in collector.taken if taken.trace == trace]
    command, refused = (
        next(each for each in spans if each.span.name == f"sealanectl volume {verb}")
        for verb in ("attach", "get")
    )
    assert command.span.parent_span_id.hex() == CALLER
    assert refused.attributes["sealane.reason"] == "name.not_found"
    (call,) = (
        each
        for each in spans
        if each.node == "sealanectl" and each.span.name == "sealane.v1.Volumes/AttachVolume"
    )
    assert call.span.parent_span_id == command.span.span_id
    (served,) = (each for each in spans if each.node == "g" and each.span.name == call.span.name)
    assert served.span.parent_span_id == call.span.span_id
    below = {each.node for each in spans if each.span.parent_span_id == served.span.span_id}
    assert below == {"broker", "s"}
    assert "secret" not in str(spans).lower()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("SEALANE_TRACES_ENDPOINT", "http://192.0.2.1:4317", "config.value"),
        ("SEALANE_TRACES_CA_FILE", "/nowhere/ca.pem", "config.unreadable"),
    ],
)
def test_sealanectl_refuses_a_collector_that_a_daemon_would_refuse(
    name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEALANE_TRACES_ENDPOINT", "https://192.0.2.1:4317")
    monkeypatch.setenv(name, value)
    refused = sealanectl("status", "--socket", "/nowhere/s")
    assert refused.returncode == 2
    assert f"[{reason}]" in refused.stderr
    assert "SEALANE_TRACES" in refused.stderr


def test_a_command_says_that_its_collector_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        endpoint = collector.endpoint
    monkeypatch.setenv("SEALANE_TRACES_ENDPOINT", endpoint)
    absent = sealanectl("status", "--socket", "/nowhere/s")
    assert absent.returncode == 4
    assert f"the collector {endpoint} did not take 1 spans" in absent.stderr
    # A command that repeats belongs to no trace.
    repeated = sealanectl("status", "--watch", "--socket", "/nowhere/s")
    assert repeated.returncode == 4
    assert "collector" not in repeated.stderr


def test_a_collector_that_is_gone_costs_spans_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as collector:
        endpoint = collector.endpoint
    with _gateway(endpoint) as gateway:
        _attach(gateway, monkeypatch)
        url = f"http://{gateway.addresses['metrics']}/metrics"
        lost = 0.0
        while not lost:
            with urllib.request.urlopen(url) as answer:
                lines = answer.read().decode().splitlines()
            (line,) = (line for line in lines if line.startswith("sealane_spans_lost_total "))
            lost = float(line.split()[1])
            time.sleep(0.1)
        assert gateway.stop() == 0
        told = [line for line in gateway.log_lines() if line["event"] == "spans_lost"]
    assert [line["endpoint"] for line in told] == [endpoint]


def test_certificates_for_the_collector_are_checked_before_a_start() -> None:
    with short_directory() as root:
        site = Site(root)
        site.write_policy({})
        at = site.broker_config()
        roots = root / "roots"
        section = f'[traces]\nendpoint = "https://127.0.0.1:1"\nca_file = "{roots}"\n'
        at.write_text(at.read_text() + section)
        for content, reason in ((None, "config.unreadable"), (b"none", "config.value")):
            if content is not None:
                roots.write_bytes(content)
            checked = sealaned("--config", at, "--check")
            assert checked.returncode == 2
            assert "traces.ca_file" in checked.stderr
            assert f"[{reason}]" in checked.stderr
