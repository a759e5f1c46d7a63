"""The Prometheus endpoint: bounded in time, and true while volumes come and go."""

import socket
import urllib.request

import pytest
from prometheus_client import generate_latest

from patience import PATIENCE_SECONDS
from sealane.daemon.runtime import metrics
from sealane.daemon.runtime.metrics import Metrics, MetricsServer
from sealane.errors import UnavailableError


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_endpoint_serves_on_either_family(host: str) -> None:
    made = Metrics()
    made.add_statistics("target_volume", ("volume", "mode"), lambda: {("v", "off"): {"reads": 3}})
    server = MetricsServer(made, f"{host}:0")
    try:
        with urllib.request.urlopen(
            f"http://{server.address}/metrics", timeout=PATIENCE_SECONDS
        ) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert 'sealane_target_volume_reads{mode="off",volume="v"} 3.0' in text
    assert "# HELP sealane_target_volume_reads Reads, by volume." in text


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
