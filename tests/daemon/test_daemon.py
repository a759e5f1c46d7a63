"""sealaned and sealanectl as processes: start, stop, and every way a start fails."""

import json
import signal
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane import (
    Daemon,
    Site,
    daemon,
    sealanectl,
    sealaned,
    short_directory,
    start,
    wait_for_log,
    write_key,
)
from patience import PATIENCE_SECONDS
from sealane.client import connect
from sealane.crypto.audit import Record
from sealane.crypto.evidence.software import SoftwareKey

pytestmark = pytest.mark.slow

FABRIC = '[fabric]\ncontrol_listen = "127.0.0.1:0"\nrate_max_bits_per_second = 100000000\n'


@pytest.fixture
def site() -> Iterator[Site]:
    with short_directory() as root:
        yield Site(root)


@pytest.fixture
def broker(site: Site) -> Iterator[Daemon]:
    site.write_policy({"f": ["fabric"]})
    with daemon(site.broker_config()) as running:
        yield running


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_cleanly_and_leaves_no_socket(site: Site, number: int) -> None:
    site.write_policy({})
    with daemon(site.broker_config()) as running:
        assert running.stop(number) == 0
        assert not (running.run_dir / "ready.json").exists()
        assert not (running.run_dir / "sealaned.sock").exists()
        events = [line["event"] for line in running.log_lines()]
        assert events[-3:] == ["ready", "stopping", "stopped"]


def test_ready_file_and_log_name_the_actual_addresses(broker: Daemon) -> None:
    ready = json.loads((broker.run_dir / "ready.json").read_text())
    assert ready["pid"] == broker.process.pid
    logged = next(line for line in broker.log_lines() if line["event"] == "ready")
    assert logged["addresses"] == ready["addresses"]
    for name in ("broker", "attestation"):
        host, _, port = ready["addresses"][name].rpartition(":")
        socket.create_connection((host, int(port))).close()


def test_socket_and_directories_are_closed_to_others(site: Site, broker: Daemon) -> None:
    assert Path(broker.socket).stat().st_mode & 0o777 == 0o600
    assert broker.run_dir.stat().st_mode & 0o777 == 0o700
    assert (site.root / "broker").stat().st_mode & 0o777 == 0o700


def test_software_evidence_is_announced_at_every_start(broker: Daemon) -> None:
    announced = [line for line in broker.log_lines() if line["event"] == "development_policy"]
    assert len(announced) == 1


def test_second_start_in_one_run_directory_is_refused(site: Site, broker: Daemon) -> None:
    ended = sealaned("--config", site.root / "broker.toml")
    assert ended.returncode == 4
    assert ended.stderr == (
        f"sealaned: {broker.socket}: in use by a running sealaned; "
        "configure another node.run_dir [daemon.running]\n"
    )
    assert sealanectl("--socket", broker.socket, "status").returncode == 0


def test_second_daemon_of_a_state_directory_is_refused_before_it_enrols(
    site: Site, broker: Daemon
) -> None:
    config = site.root / "second.toml"
    first = (site.root / "broker.toml").read_text()
    config.write_text(first.replace(str(broker.run_dir), str(site.root / "second-run")))
    ended = sealaned("--config", config)
    assert ended.returncode == 4
    assert ended.stderr == (
        f"sealaned: {site.root / 'broker'}: in use by a running sealaned; "
        "configure another node.state_dir [daemon.running]\n"
    )


def test_start_after_a_kill_takes_the_stale_socket_over(site: Site) -> None:
    site.write_policy({})
    config = site.broker_config()
    with daemon(config, exit_code=-signal.SIGKILL) as running:
        running.process.kill()
    assert (site.root / "broker-run" / "sealaned.sock").exists()
    with daemon(config) as running:
        assert sealanectl("--socket", running.socket, "status").returncode == 0


def test_port_in_use_is_one_line(site: Site) -> None:
    site.write_policy({})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = sealaned("--config", site.broker_config(listen=listen))
    assert ended.returncode == 4
    assert _error(ended.stderr) == (
        f"sealaned: broker.listen {listen}: Address already in use [listen.refused]"
    )


def test_address_of_another_machine_is_one_line(site: Site) -> None:
    site.write_policy({})
    ended = sealaned("--config", site.broker_config(listen="192.0.2.77:0"))
    assert ended.returncode == 4
    assert _error(ended.stderr) == (
        "sealaned: broker.listen 192.0.2.77:0: Cannot assign requested address [listen.refused]"
    )


def test_state_directory_open_to_others_is_refused(site: Site) -> None:
    site.write_policy({})
    config = site.broker_config()
    (site.root / "broker").mkdir(mode=0o755)
    ended = sealaned("--config", config)
    assert ended.returncode == 2
    assert _error(ended.stderr) == (
        f"sealaned: node.state_dir {site.root / 'broker'}: mode 0755; allowed: 0700 "
        "[directory.mode]"
    )


@pytest.mark.parametrize("arguments", [("--check",), ()])
def test_state_of_a_later_release_is_refused_in_one_line(
    site: Site, arguments: tuple[str, ...]
) -> None:
    site.write_policy({})
    config = site.broker_config()
    (site.root / "broker").mkdir(mode=0o700)
    (site.root / "broker" / "format").write_text("2\n")
    ended = sealaned("--config", config, *arguments)
    assert ended.returncode == 2
    assert _error(ended.stderr) == (
        f"sealaned: {site.root / 'broker'}: state of format 2, and this release reads up to 1: "
        "start the release that wrote it, or a later one [directory.format]"
    )
    assert [path.name for path in (site.root / "broker").iterdir()] == ["format"]


def test_check_refuses_a_device_of_a_later_format(site: Site) -> None:
    site.write_policy({})
    volumes = site.root / "broker" / "volumes"
    volumes.mkdir(mode=0o700, parents=True)
    volumes.parent.chmod(0o700)
    (volumes / "device").write_text('{"format":2}')
    config = site.broker_config()
    config.write_text(
        config.read_text()
        + '[enrolment]\nbroker_address = "127.0.0.1:1"\nattestation_address = "127.0.0.1:1"\n'
        + f'trust_anchor = "{site.root / "broker" / "trust-anchor.pem"}"\nevidence = "software"\n'
        + f'key_file = "{site.root / "broker.pem"}"\n'
        + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\nstore = "file"\n'
    )
    site.key("broker")
    ended = sealaned("--config", config, "--check")
    assert (ended.returncode, ended.stderr) == (
        2,
        (
            f"sealaned: {volumes / 'device'}: a device of format 2, and this release reads 1: "
            "start the release that wrote it, or a later one [device.format]\n"
        ),
    )


def test_unusable_run_directory_is_refused(site: Site) -> None:
    site.write_policy({})
    config = site.broker_config()
    (site.root / "broker-run").write_text("a file")
    ended = sealaned("--config", config)
    assert ended.returncode == 2
    assert _error(ended.stderr).endswith("is not a directory [directory.unusable]")


def test_wrong_key_encryption_key_is_refused(site: Site) -> None:
    site.write_policy({})
    config = site.broker_config()
    with daemon(config):
        pass
    write_key(site.root / "kek", b"\1" * 32)
    ended = sealaned("--config", config)
    assert ended.returncode == 3
    assert "[key.wrap.invalid]" in _error(ended.stderr)


def test_key_file_of_wrong_size_or_open_to_others_is_one_line(site: Site) -> None:
    site.write_policy({})
    config = site.broker_config()
    kek = site.root / "kek"
    write_key(kek, b"short")
    ended = sealaned("--config", config)
    assert ended.returncode == 2
    assert _error(ended.stderr) == (
        f"sealaned: broker.key_file {kek}: 5 bytes; allowed: 32 (sealanectl key encryption "
        "makes one) [key.size]"
    )
    kek.chmod(0o644)
    ended = sealaned("--config", config)
    assert ended.returncode == 2
    assert _error(ended.stderr).endswith("mode 0644; allowed: 0600 or 0400 [key.file.mode]")


@pytest.mark.parametrize("name", ["sealaned.lock", "sealaned.sock", "ready.json"])
def test_what_stands_in_the_way_in_the_run_directory_is_named(site: Site, name: str) -> None:
    site.write_policy({})
    config = site.broker_config()
    (site.root / "broker-run").mkdir(mode=0o700)
    (site.root / "broker-run" / name).mkdir()
    ended = sealaned("--config", config)
    assert ended.returncode == 2
    assert _error(ended.stderr).startswith(f"sealaned: {site.root / 'broker-run' / name}: ")
    assert _error(ended.stderr).endswith("[directory.unusable]")


def test_daemon_leaves_no_core_file(broker: Daemon) -> None:
    limits = Path(f"/proc/{broker.process.pid}/limits").read_text()
    (core,) = (line for line in limits.splitlines() if line.startswith("Max core file size"))
    assert core.split()[4:6] == ["0", "0"]


async def test_enrolment_over_tls_1_2_is_refused(broker: Daemon) -> None:
    host, _, port = broker.addresses["attestation"].rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    # HTTP/2 by hand, because gRPC's client has no option for an old TLS: preface, settings, and the
    # headers and empty body of one call. The answer contains the reason of the refusal.
    call = _h2_call("/sealane.v1.Attestation/GetChallenge")
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as plain,
        context.wrap_socket(plain) as secured,
    ):
        secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
        secured.sendall(call)
        answer = b""
        while b"call.tls.unauthenticated" not in answer:
            piece = secured.recv(4096)
            assert piece, answer
            answer += piece


def _h2_call(path: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": path,
        ":authority": "b",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    # HPACK, literal without indexing, new name, no Huffman (RFC 7541 section 6.2.2).
    block = b"".join(
        b"\0" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode()
        for k, v in fields.items()
    )
    headers = len(block).to_bytes(3, "big") + bytes([1, 4]) + (1).to_bytes(4, "big") + block
    body = bytes(5)
    return headers + len(body).to_bytes(3, "big") + bytes([0, 1]) + (1).to_bytes(4, "big") + body


def test_unreachable_broker_is_one_line_and_exit_4(site: Site, broker: Daemon) -> None:
    section = site.enrolment("f", broker, timeout_seconds=1)
    assert broker.stop() == 0
    ended = sealaned("--config", site.write_config("f", section + FABRIC))
    assert ended.returncode == 4
    assert _error(ended.stderr).startswith("sealaned: enrolment.attestation_address 127.0.0.1:")
    assert "no answer from the broker within 1 s" in _error(ended.stderr)


def test_signal_while_a_start_waits_for_the_broker_stops_it(site: Site, broker: Daemon) -> None:
    config = site.write_config("f", site.enrolment("f", broker, timeout_seconds=600) + FABRIC)
    assert broker.stop() == 0
    with start(config) as process:
        wait_for_log(process, config, "software_evidence")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert not (site.root / "f-run" / "ready.json").exists()


def test_wrong_option_is_one_line() -> None:
    for ended in (sealaned("--confg", "x"), sealanectl("volume", "create", "--size", "5000")):
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1
        assert ended.stdout == ""


def _refusals(site: Site) -> list[str]:
    """Return the reasons of refusals in the broker's audit log."""
    lines = (site.root / "broker" / "audit.jsonl").read_bytes().splitlines()
    return [record.reason for line in lines if (record := Record.decode(line)).outcome == "refused"]


def test_node_with_another_key_is_not_verified(site: Site, broker: Daemon) -> None:
    config = site.write_config("f", site.enrolment("f", broker) + FABRIC)
    (site.root / "f.pem").write_bytes(SoftwareKey.create().pem())
    ended = sealaned("--config", config)
    assert ended.returncode == 3
    assert _error(ended.stderr).endswith("[attestation.refused]")
    assert _refusals(site) == ["attestation.hardware.not_listed"]


def test_attestation_key_open_to_others_is_refused(site: Site, broker: Daemon) -> None:
    config = site.write_config("f", site.enrolment("f", broker) + FABRIC)
    (site.root / "f.pem").chmod(0o640)
    ended = sealaned("--config", config)
    assert ended.returncode == 2
    assert _error(ended.stderr) == (
        f"sealaned: enrolment.key_file {site.root / 'f.pem'}: mode 0640; allowed: 0600 or 0400 "
        "[key.file.mode]"
    )


def test_node_of_another_name_is_not_verified(site: Site, broker: Daemon) -> None:
    ended = sealaned("--config", site.write_config("h", site.enrolment("f", broker) + FABRIC))
    assert ended.returncode == 3
    assert _error(ended.stderr).endswith("[attestation.refused]")
    assert _refusals(site) == ["attestation.node.refused"]


def test_policy_without_software_refuses_the_driver(site: Site) -> None:
    site.write_policy({"f": ["fabric"]}, allowed=False)
    with daemon(site.broker_config()) as broker:
        ended = sealaned("--config", site.write_config("f", site.enrolment("f", broker) + FABRIC))
        assert ended.returncode == 3
        assert _error(ended.stderr).endswith("[attestation.refused]")
    assert _refusals(site) == ["attestation.type.refused"]


def test_wrong_trust_anchor_reaches_no_broker(site: Site, broker: Daemon) -> None:
    with short_directory() as other_root:
        other = Site(other_root)
        other.write_policy({})
        with daemon(other.broker_config()):
            anchor = (other_root / "broker" / "trust-anchor.pem").read_bytes()
    config = site.write_config("f", site.enrolment("f", broker, timeout_seconds=1) + FABRIC)
    config.write_text(
        config.read_text().replace(
            str(site.root / "broker" / "trust-anchor.pem"), str(site.root / "other.pem")
        )
    )
    (site.root / "other.pem").write_bytes(anchor)
    ended = sealaned("--config", config)
    assert ended.returncode == 3
    assert "is not issued by the trust anchor" in _error(ended.stderr)
    assert _error(ended.stderr).endswith("[peer.certificate]")
    (site.root / "other.pem").write_bytes(b"nonsense")
    ended = sealaned("--config", config)
    assert ended.returncode == 3
    assert _error(ended.stderr).startswith(
        f"sealaned: enrolment.trust_anchor {site.root / 'other.pem'}: not a trust"
    )


async def test_enrolled_node_says_what_it_is(site: Site, broker: Daemon) -> None:
    with daemon(site.write_config("f", site.enrolment("f", broker) + FABRIC)) as node:
        async with connect(node.socket) as client:
            status = await client.status()
        assert (status.node, status.roles) == ("f", ("fabric",))
        assert status.is_development
        assert status.certificate_expires is not None
        assert any(line["event"] == "software_evidence" for line in node.log_lines())
        shown = sealanectl("--socket", node.socket, "--output", "json", "status")
        assert json.loads(shown.stdout)["roles"] == ["fabric"]
        listed = sealanectl("--socket", node.socket, "session", "list")
        assert (listed.returncode, listed.stdout) == (0, "")


def test_command_without_a_daemon_is_one_line_and_exit_4(site: Site) -> None:
    path = site.root / "none.sock"
    for command in (["status"], ["volume", "list"], ["session", "list"]):
        ended = sealanectl("--socket", path, *command)
        assert ended.returncode == 4
        assert ended.stderr == (
            f"sealanectl: {path}: no sealaned answers there: No such file or directory "
            "[daemon.unreachable]\n"
        )


def test_call_to_a_role_that_is_not_there_is_one_line(broker: Daemon) -> None:
    ended = sealanectl("--socket", broker.socket, "session", "list")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert ended.stderr == (
        "sealanectl: sealaned does not run the role that offers this call [peer.unimplemented]\n"
    )


def test_metrics_are_served(site: Site) -> None:
    site.write_policy({})
    config = site.broker_config()
    config.write_text(config.read_text() + '[metrics]\nlisten = "127.0.0.1:0"\n')
    with daemon(config) as running:
        address = running.addresses["metrics"]
        with urllib.request.urlopen(f"http://{address}/metrics") as answer:
            text = answer.read().decode()
    assert 'sealane_build_info{version="' in text
    # One for each of its servers.
    assert 'sealane_enrolments_total{result="succeeded"} 2.0' in text
    assert 'sealane_certificate_expiry_timestamp_seconds{role="broker"}' in text


def test_readiness_is_told_to_the_service_manager(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write_policy({})
    path = site.root / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(PATIENCE_SECONDS)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        with daemon(site.broker_config()):
            said = [manager.recv(4096) for _ in range(3)]
        while b"STOPPING=1\nEXTEND_TIMEOUT_USEC=20000000" not in said:
            said.append(manager.recv(4096))
    assert any(message.startswith(b"READY=1\n") for message in said)
    assert said.count(b"WATCHDOG=1") >= 2


def test_key_files_are_made_once_and_only_for_their_owner(site: Site) -> None:
    path = site.root / "new.pem"
    made = sealanectl("--output", "json", "key", "attestation", path)
    assert made.returncode == 0
    assert path.stat().st_mode & 0o777 == 0o600
    fingerprint = json.loads(made.stdout)["fingerprint"]
    shown = sealanectl("--output", "json", "key", "fingerprint", path)
    assert json.loads(shown.stdout)["fingerprint"] == fingerprint
    again = sealanectl("key", "attestation", path)
    assert (again.returncode, again.stderr) == (
        2,
        f"sealanectl: {path}: File exists [key.unwritable]\n",
    )
    assert sealanectl("key", "encryption", site.root / "kek2").returncode == 0
    assert (site.root / "kek2").stat().st_size == 32


def _error(stderr: str) -> str:
    """Return the only line that isn't a log line."""
    lines = [line for line in stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, stderr
    return lines[0]
