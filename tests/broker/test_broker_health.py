"""Broker health: if its store fails, it reports so at once, stops, and serves after a restart."""

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from brokers import Count, start_broker
from control_plane import Daemon, Site, daemon, sealanectl, short_directory
from patience import PATIENCE_SECONDS
from sealane.daemon.broker import health
from sealane.daemon.broker.health import end_with, keep_health
from sealane.daemon.broker.store.contract import Entry
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.errors import UnavailableError

EXIT_UNAVAILABLE = 4
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def site() -> Iterator[Site]:
    with short_directory() as root:
        yield Site(root)


def _apply_policies(site: Site, broker: Daemon, count: int) -> int:
    """Apply `count` policies, a commit each; return how many succeeded."""
    for applied in range(count):
        path = site.write_policy({"g": ["gateway"]})
        if sealanectl("--socket", broker.socket, "policy", "apply", path).returncode:
            return applied
    return count


@pytest.mark.slow
def test_broker_whose_disk_is_full_says_so_ends_and_serves_once_there_is_room(site: Site) -> None:
    site.write_policy({"g": ["gateway"]})
    config = site.broker_config()
    with daemon(config, exit_code=EXIT_UNAVAILABLE) as broker:
        with grpc.insecure_channel(f"unix:{broker.socket}") as channel:
            request = health_pb2.HealthCheckRequest(service="")
            watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=PATIENCE_SECONDS)
            assert next(watch).status == SERVING
            # Limit file sizes to the current size of the store's log, as on a full disk.
            size = (site.root / "broker" / "broker.sqlite-wal").stat().st_size
            resource.prlimit(broker.process.pid, resource.RLIMIT_FSIZE, (size, size))
            assert _apply_policies(site, broker, 20) < 20
            seen = []
            with contextlib.suppress(grpc.RpcError):
                for answer in watch:
                    seen.append(answer.status)  # noqa: PERF401 - the stream ends with an error
        assert seen[:1] == [NOT_SERVING]
        assert broker.process.wait(PATIENCE_SECONDS) == EXIT_UNAVAILABLE
        assert "broker.store.outcome_unknown" in broker.log.read_text()
    with daemon(config) as broker:
        assert _apply_policies(site, broker, 3) == 3


class Silent(SqliteStore):
    """A store that doesn't answer while `is_silent`."""

    is_silent = False

    async def get(self, key: str) -> Entry | None:
        if self.is_silent:
            raise UnavailableError("broker.store.timeout", "no answer")
        return await super().get(key)


async def test_health_is_that_of_the_store_from_the_first_call_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "RETRY_SECONDS", 0.01)
    inner = Silent(tmp_path / "b.sqlite")
    _, _, registry = await start_broker(inner, starts=Count(), heads=Count())
    reports: asyncio.Queue[bool] = asyncio.Queue()
    keeping = asyncio.ensure_future(keep_health(registry.store, reports.put))
    inner.is_silent = True
    with pytest.raises(UnavailableError):
        await registry.tenants.get("t")
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await reports.get() is False
        inner.is_silent = False
        assert await reports.get() is True
    keeping.cancel()
    await registry.close()


async def test_store_that_will_never_answer_again_ends_the_broker(tmp_path: Path) -> None:
    inner = SqliteStore(tmp_path / "b.sqlite")
    _, _, registry = await start_broker(inner, starts=Count(), heads=Count())
    ending = asyncio.ensure_future(end_with(registry.store))
    inner._failure = UnavailableError("broker.store.outcome_unknown", "the disk is full")
    with pytest.raises(UnavailableError):
        await registry.tenant_key("t", 0)
    with pytest.raises(UnavailableError) as caught:
        await asyncio.wait_for(ending, PATIENCE_SECONDS)
    assert caught.value.reason == "broker.store.outcome_unknown"
    await registry.close()
