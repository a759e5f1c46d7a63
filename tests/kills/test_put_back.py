"""Rollback of etcd under a running and under a stopped broker, with real daemons."""

import json

import pytest

from control_plane import Site, daemon, sealaned, short_directory
from etcd_server import etcd_cluster

pytestmark = pytest.mark.slow

EXIT_NOT_VERIFIED = 3


def test_broker_ends_and_stays_down_when_its_store_was_put_back() -> None:
    with short_directory() as root, etcd_cluster() as etcd:
        site = Site(root)
        site.write_policy({"g": ["gateway"]})
        config = site.write_config(
            "b",
            '[broker]\nlisten = "127.0.0.1:0"\nattestation_listen = "127.0.0.1:0"\n'
            f'policy_file = "{root / "policy.toml"}"\nkey_file = "{root / "kek"}"\n'
            'allow_unsigned_policy = true\nstore = "etcd"\nhead_seconds = 1\n'
            f"[broker.etcd]\nendpoints = {json.dumps(etcd.endpoints)}\n",
        )
        with daemon(config):
            pass
        etcd.stop()
        etcd.save("old")
        etcd.start()
        with daemon(config) as broker:
            etcd.stop()
            etcd.put_back("old")
            etcd.start()
            assert broker.process.wait(60) == EXIT_NOT_VERIFIED
            broker.was_killed = True
            assert "broker.store.rolled_back" in broker.log.read_text()
        again = sealaned("--config", config)
        assert again.returncode == EXIT_NOT_VERIFIED
        assert "broker.store.rolled_back" in again.stderr
        # The procedure of docs/understand/broker-store.md for a deliberate restore.
        for counter in ("starts.counter", "heads.counter"):
            (root / "b" / counter).unlink()
        config.write_text(config.read_text().replace("[broker]\n", "[broker]\ninstance = 2\n"))
        with daemon(config):
            pass
