"""A temporarily full disk: operators' actions are still recorded, unknown callers wait."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane import Daemon, Site, daemon, sealanectl, short_directory
from patience import PATIENCE_SECONDS
from sealane.crypto.certificates import server_name
from sealane.protocol.v1 import attestation_pb2, attestation_pb2_grpc

AUDIT = "sealane.v1.AuditLog"
DISK_BYTES = 64 << 20


@pytest.fixture
def site() -> Iterator[Site]:
    with short_directory() as root:
        (root / "broker").mkdir(mode=0o700)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs"]
        made = subprocess.run([*mount, root / "broker"], capture_output=True, check=False)
        if made.returncode:
            pytest.skip("only root can mount a small file system")
        try:
            yield Site(root)
        finally:
            subprocess.run(["umount", root / "broker"], check=True)


def _records(site: Site) -> list[dict[str, object]]:
    lines = (site.root / "broker" / "audit.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _wait_for_record(site: Site, kind: str) -> dict[str, object]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        found = [record for record in _records(site) if record["kind"] == kind]
        if found:
            return found[-1]
    raise TimeoutError(kind)


def _apply_policy(site: Site, broker: Daemon) -> None:
    path = site.write_policy({"g": ["gateway"]})
    ended = sealanectl("--socket", broker.socket, "policy", "apply", path)
    assert ended.returncode == 0, ended.stderr


def _is_refused(site: Site, broker: Daemon, role: str) -> None:
    """Request a challenge, which is refused."""
    anchor = (site.root / "broker" / "trust-anchor.pem").read_bytes()
    options = (("grpc.ssl_target_name_override", server_name("broker", "broker")),)
    credentials = grpc.ssl_channel_credentials(anchor)
    address = broker.addresses["attestation"]
    with grpc.secure_channel(address, credentials, options=options) as channel:
        request = attestation_pb2.GetChallengeRequest(
            node="g", role=role, evidence_types=["software"]
        )
        with pytest.raises(grpc.RpcError) as caught:
            attestation_pb2_grpc.AttestationStub(channel).GetChallenge(
                request, timeout=PATIENCE_SECONDS
            )
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value


def _is_low(broker: Daemon) -> bool:
    with urllib.request.urlopen(f"http://{broker.addresses['metrics']}/metrics") as answer:
        text = answer.read().decode()
    return "sealane_broker_audit_log_low 1.0" in text


def _fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        block = bytes(1 << 16)
        while True:
            try:
                file.write(block)
            except OSError:
                if len(block) == 1:
                    return
                block = block[: len(block) // 2]


def test_killed_broker_restarts_and_serves_on_a_full_disk(site: Site) -> None:
    site.write_policy({"g": ["gateway"]})
    config = site.broker_config()
    with daemon(config) as broker:
        _apply_policy(site, broker)
        broker.kill()
    for _ in range(2):
        # What the last process gave back is taken, too.
        _fill(site.root / "broker" / "fill")
        with daemon(config) as broker:
            _apply_policy(site, broker)
            broker.kill()


@pytest.mark.slow
def test_full_disk_is_an_alarm_and_stops_nothing_but_the_record_of_strangers(site: Site) -> None:
    site.write_policy({"g": ["gateway"]})
    config = site.broker_config()
    more = 'head_seconds = 1\n[metrics]\nlisten = "127.0.0.1:0"\n'
    config.write_text(config.read_text() + more)
    fill = site.root / "broker" / "fill"
    with daemon(config) as broker, grpc.insecure_channel(f"unix:{broker.socket}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=AUDIT), timeout=PATIENCE_SECONDS
        )
        states = (answer.status for answer in watch)
        assert next(states) == health_pb2.HealthCheckResponse.SERVING
        assert not _is_low(broker)
        _fill(fill)
        _apply_policy(site, broker)
        assert next(states) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert _is_low(broker)
        before = len(_records(site))
        for _ in range(5):
            _is_refused(site, broker, "nonsense")
            _apply_policy(site, broker)
        assert [r["kind"] for r in _records(site)[before:]] == 5 * ["policy.apply"]
        fill.unlink()
        assert next(states) == health_pb2.HealthCheckResponse.SERVING
        assert not _is_low(broker)
        watch.cancel()
        # Health is reported before the record of it is in the file.
        last = _wait_for_record(site, "audit.reserve")
        # The first of several equal refusals; the others are summed up.
        assert last["detail"] == {"refusals_not_recorded": 1}
