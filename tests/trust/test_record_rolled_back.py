"""An adversary with write access rolls back a record in the store: real brokers stop."""

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from control_plane import Site, daemon, sealanectl, sealaned, short_directory
from etcd_server import Cluster, etcd_cluster
from patience import PATIENCE_SECONDS
from sealane.protocol.etcd import rpc_pb2, rpc_pb2_grpc

EXIT_NOT_VERIFIED = 3
NODE = b"/sealane/data/nodes/gateway/g"
BROKER = (
    '[broker]\nlisten = "127.0.0.1:0"\nattestation_listen = "127.0.0.1:0"\n'
    "allow_unsigned_policy = true\n"
)
TARGET = '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\nstore = "memory"\n'


class Adversary:
    """An adversary who can write to etcd but has no key of a broker."""

    def __init__(self, etcd: Cluster) -> None:
        self._channel = grpc.insecure_channel(etcd.endpoints[0])
        self._store = rpc_pb2_grpc.KVStub(self._channel)

    def get(self, key: bytes) -> bytes:
        return bytes(self._store.Range(rpc_pb2.RangeRequest(key=key)).kvs[0].value)

    def put(self, key: bytes, value: bytes) -> None:
        put = rpc_pb2.PutRequest(key=key, value=value)
        operation = rpc_pb2.RequestOp(request_put=put)
        self._store.Txn(rpc_pb2.TxnRequest(success=[operation]))

    def close(self) -> None:
        self._channel.close()


def _broker(site: Site, etcd: Cluster, name: str, instance: int) -> Path:
    return site.write_config(
        name,
        # Long, so that the watch detects the change, not the periodic check.
        f'{BROKER}instance = {instance}\nstore = "etcd"\nhead_seconds = 3600\n'
        f'policy_file = "{site.root / "policy.toml"}"\nkey_file = "{site.root / "kek"}"\n'
        f"[broker.etcd]\nendpoints = {json.dumps(etcd.endpoints)}\n",
    )


def _records(site: Site, name: str) -> list[dict[str, object]]:
    lines = (site.root / name / "audit.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def site() -> Iterator[Site]:
    with short_directory() as root:
        yield Site(root)


@pytest.mark.slow
@pytest.mark.parametrize("running", [True, False])
def test_revoked_node_whose_old_record_is_put_back_gets_no_key_of_the_new_epoch(
    site: Site, running: bool
) -> None:
    site.write_policy({"s": ["target"], "g": ["gateway"]})
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(etcd_cluster())
        adversary = Adversary(etcd)
        stack.callback(adversary.close)
        configs = {
            "broker": _broker(site, etcd, "broker", 1),
            "b2": _broker(site, etcd, "b2", 2),
        }
        brokers = {n: stack.enter_context(daemon(c)) for n, c in configs.items()}
        broker = brokers["broker"]
        enrolment = site.enrolment("s", broker)
        target = stack.enter_context(daemon(site.write_config("s", enrolment + TARGET)))
        gateway = stack.enter_context(
            daemon(
                site.write_config(
                    "g",
                    site.enrolment("g", broker)
                    + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
                    + f'target_address = "{target.addresses["target_control"]}"\n',
                )
            )
        )
        ctl = ("--socket", gateway.socket, "--output", "json")
        made = sealanectl(*ctl, "volume", "create", "--size", "1MiB")
        assert made.returncode == 0, made.stderr
        name = json.loads(made.stdout)["name"]
        host = "nqn.2014-08.org.nvmexpress:uuid:33333333-2222-4333-8444-555555555555"
        attached = sealanectl(*ctl, "volume", "attach", name, "--host-nqn", host)
        assert attached.returncode == 0, attached.stderr
        before = adversary.get(NODE)
        revoked = sealanectl("--socket", broker.socket, "node", "revoke", "g", "--yes")
        assert revoked.returncode == 0, revoked.stderr
        if not running:
            for each in brokers.values():
                assert each.stop() == 0
        adversary.put(NODE, before)
        for name, each in brokers.items():
            if running:
                assert each.process.wait(PATIENCE_SECONDS) == EXIT_NOT_VERIFIED
            each.was_killed = True
            again = sealaned("--config", configs[name])
            assert again.returncode == EXIT_NOT_VERIFIED
            assert "broker.store.rolled_back" in again.stderr
        kinds = [record["kind"] for each in brokers for record in _records(site, each)]
        released = [
            record["detail"]["key_epoch"]  # type: ignore[index]
            for each in brokers
            for record in _records(site, each)
            if record["kind"] == "key.release" and record["outcome"] == "granted"
        ]
        assert "node.revoked" in kinds
        assert set(released) == {1}


def _save(state: Path) -> dict[str, tuple[bytes, int]]:
    with contextlib.closing(sqlite3.connect(state / "broker.sqlite")) as database:
        rows = database.execute("SELECT key, value, revision FROM entries").fetchall()
    return {key: (value, revision) for key, value, revision in rows}


@pytest.mark.slow
def test_audit_log_that_was_cut_with_its_row_put_back_is_noticed(site: Site) -> None:
    site.write_policy({"g": ["gateway"]})
    config, state = site.broker_config(), site.root / "broker"
    log = state / "audit.jsonl"

    def restart() -> None:
        with daemon(config) as broker:
            ended = sealanectl("--socket", broker.socket, "audit", "verify", log)
            assert ended.returncode == 0, ended.stderr

    restart()
    older, rows = log.read_bytes(), _save(state)
    site.write_policy({"g": ["gateway"], "h": ["gateway"]})
    restart()
    assert log.read_bytes().startswith(older)
    assert len(log.read_bytes()) > len(older)
    key = "audit/00001"
    with contextlib.closing(sqlite3.connect(state / "broker.sqlite")) as database:
        database.execute(
            "UPDATE entries SET value = ?, revision = ? WHERE key = ?", (*rows[key], key)
        )
        database.commit()
    log.write_bytes(older)
    ended = sealaned("--config", config)
    assert ended.returncode == EXIT_NOT_VERIFIED
    assert "broker.store.rolled_back" in ended.stderr
    # Its chain is intact, which alone proves nothing.
    assert sealanectl("audit", "verify", log, "--chain-only").returncode == 0
    socket = site.root / "broker-run" / "control.sock"
    assert sealanectl("--socket", socket, "audit", "verify", log).returncode == 4


def test_audit_log_that_is_cut_under_a_running_broker_ends_it(site: Site) -> None:
    site.write_policy({"g": ["gateway"]})
    config = site.broker_config()
    config.write_text(config.read_text() + "head_seconds = 1\n")
    with daemon(config) as broker:
        log = site.root / "broker" / "audit.jsonl"
        deadline = time.monotonic() + PATIENCE_SECONDS
        assert log.stat().st_size
        log.write_bytes(b"")
        assert broker.process.wait(deadline - time.monotonic()) == EXIT_NOT_VERIFIED
        broker.was_killed = True
        assert "audit.truncated" in broker.log.read_text()
