"""The Prometheus endpoint: bounded in time, and true while volumes come and go."""

import shutil
import socket
import subprocess
import urllib.request

import pytest
from prometheus_client import generate_latest

from patience import PATIENCE_SECONDS
from sealane._native import latency_bounds
from sealane.daemon.runtime import metrics
from sealane.daemon.runtime.metrics import Metrics, MetricsServer
from sealane.daemon.runtime.statistics import CATALOGUE, LATENCIES, GatewayVolumeState, only_in
from sealane.errors import UnavailableError

IDLE_SERIES_MAX = 10


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_endpoint_serves_on_either_family(host: str) -> None:
    made = Metrics()
    made.add_statistics(
        "target_volume", ("volume", "mode"), lambda: {("v", "off"): {"host_reads": 3}}
    )
    server = MetricsServer(made, f"{host}:0")
    try:
        with urllib.request.urlopen(
            f"http://{server.address}/metrics", timeout=PATIENCE_SECONDS
        ) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert 'sealane_target_volume_host_reads_total{mode="off",volume="v"} 3.0' in text
    assert "# HELP sealane_target_volume_host_reads_total Reads served." in text
    assert "process_cpu_seconds_total" in text


def test_brokers_alone_export_what_brokers_count() -> None:
    broker, other = (generate_latest(Metrics(is_broker=b).registry).decode() for b in (True, False))
    assert "sealane_broker_policy_version 0.0" in broker
    assert "sealane_broker_keys_released_total 0.0" in broker
    assert "sealane_broker_keys_released_created" not in broker
    assert not [line for line in other.splitlines() if line.startswith("sealane_broker_")]


def test_scraper_that_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics._Handler, "timeout", 0.1)
    server = MetricsServer(Metrics(), "127.0.0.1:0")
    try:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as silent:
            assert silent.recv(1) == b""
    finally:
        server.close()


def test_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UnavailableError) as caught:
            MetricsServer(Metrics(), listen)
    assert str(caught.value) == (
        f"metrics.listen {listen}: Address already in use [listen.refused]"
    )


def exported(statistics: dict[str, int], *, prefix: str = "target_volume") -> str:
    made = Metrics(is_broker=False)
    labels = {"session_path": ("session", "path"), "target_volume": ("volume", "mode")}
    names = labels.get(prefix, ("volume",))
    made.add_statistics(prefix, names, lambda: {tuple("v" for _ in names): statistics})
    text = generate_latest(made.registry).decode()
    return "".join(line for line in text.splitlines(True) if f"sealane_{prefix}_" in line)


def test_a_figure_has_its_base_unit_and_its_type() -> None:
    text = exported({"busy_ms": 1500, "anchor_age_ms": 20, "anchors": 2})
    assert 'busy_seconds_total{mode="v",volume="v"} 1.5' in text
    assert 'anchor_age_seconds{mode="v",volume="v"} 0.02' in text
    assert "# TYPE sealane_target_volume_anchors_total counter" in text
    assert "# TYPE sealane_target_volume_anchor_age_seconds gauge" in text


def test_what_adds_up_is_one_metric() -> None:
    text = exported({"limited_loss_nanos": 10**9, "limited_pacing_nanos": 5}, prefix="session")
    assert 'sealane_session_limited_seconds_total{cause="loss",volume="v"} 1.0' in text
    assert text.count("# TYPE") == 1


@pytest.mark.parametrize("prefix", ["target_volume", "gateway_volume"])
def test_an_idle_volume_has_few_series(prefix: str) -> None:
    figures = dict.fromkeys(CATALOGUE[prefix], 1)
    assert exported(figures, prefix=prefix).count("{") == len(figures)
    # It is in one state at a time.
    for state in [*GatewayVolumeState][1:]:
        figures.pop(state.figure, None)
    assert exported(figures | {"queues_running": 0}, prefix=prefix).count("{") <= IDLE_SERIES_MAX


def test_a_volume_has_one_series_for_its_state() -> None:
    text = exported({**only_in(GatewayVolumeState.REATTACHING)}, prefix="gateway_volume")
    assert 'sealane_gateway_volume_state{state="reattaching",volume="v"} 1.0' in text
    assert text.count("{") == 1


def test_a_histogram_is_cumulative_and_in_seconds() -> None:
    made = Metrics(is_broker=False)
    counts = [0] * (len(latency_bounds()) + 1)
    counts[0], counts[2], counts[-1] = 3, 2, 1
    made.add_latencies("fabric", lambda: {"fabric": {"send": (counts, 1_500_000_000)}})
    text = generate_latest(made.registry).decode()
    name = 'sealane_fabric_message_seconds_bucket{le="%s",operation="send"}'
    for bound, count in [("1.6e-05", 3), ("3.2e-05", 3), ("6.4e-05", 5), ("16.777216", 5)]:
        assert f"{name % bound} {count}.0" in text
    assert f"{name % '+Inf'} 6.0" in text
    assert 'sealane_fabric_message_seconds_count{operation="send"} 6.0' in text
    assert 'sealane_fabric_message_seconds_sum{operation="send"} 1.5' in text


@pytest.mark.parametrize("role", LATENCIES)
def test_each_histogram_is_one_of_the_engine_s(role: str) -> None:
    made = Metrics(is_broker=False)
    made.add_latencies(role)
    assert f"{LATENCIES[role][0]}_count{{" in generate_latest(made.registry).decode()


def test_a_figure_that_is_not_described_ends_no_scrape() -> None:
    assert 'sealane_target_volume_new_one{mode="v",volume="v"} 1.0' in exported({"new_one": 1})


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (make packages)"
)
def test_the_ecosystem_s_checker_has_nothing_to_say() -> None:
    made = Metrics()
    for prefix, statistics in CATALOGUE.items():
        figures = dict.fromkeys(statistics, 1)
        made.add_statistics(prefix, ("volume",), lambda figures=figures: {("v",): figures})
    for role in LATENCIES:
        made.add_latencies(role)
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=generate_latest(made.registry),
        capture_output=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
