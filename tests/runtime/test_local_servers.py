"""Connections to the shared socket when the lists change, and streams that nobody reads."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from patience import PATIENCE_SECONDS
from sealane.daemon.runtime import call_completion, stream_limit
from sealane.daemon.runtime.access import Access, RefusedCallers
from sealane.daemon.runtime.directories import RunDirectory, SharedDirectory
from sealane.daemon.runtime.line_limit import LINES_MAX
from sealane.daemon.runtime.local_servers import LocalServers, Shared
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.parties import Members, MembersOf, Party
from sealane.daemon.runtime.traces import PASSED_ON

STREAM = "/sealane.v1.Volumes/WatchVolume"
CHANGE = "/sealane.v1.Volumes/DeleteVolume"
US = Members(uids=frozenset({os.geteuid()}))
OTHERS = Members(uids=frozenset({54_999}))


class Served:
    """A service with a stream of large messages, and a change that takes its time."""

    def __init__(self) -> None:
        self.has_begun, self.has_ended, self.may_go_on = (asyncio.Event() for _ in range(3))
        self.sent = 0
        self.changed = False

    async def stream(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                self.has_begun.set()
                yield bytes(1 << 18)
                self.sent += 1
        finally:
            self.has_ended.set()

    async def change(self, _request: bytes, _context: Any) -> bytes:
        self.has_begun.set()
        await self.may_go_on.wait()
        self.changed = True
        return b""

    @property
    def handlers(self) -> dict[str, Any]:
        return {
            "WatchVolume": grpc.unary_stream_rpc_method_handler(self.stream),
            "DeleteVolume": grpc.unary_unary_rpc_method_handler(self.change),
        }


@pytest.fixture
def above(tmp_path: Path) -> Path:
    for each in (tmp_path, *tmp_path.parents):
        if each.stat().st_mode & 0o011 == 0:
            each.chmod(0o711)
    return tmp_path


@contextlib.asynccontextmanager
async def serving(above: Path, members: MembersOf) -> AsyncIterator[tuple[Served, LocalServers]]:
    directory = SharedDirectory(above / "jobs", key="access.run_dir")
    directory.prepare()
    metrics = Metrics()
    shared = Shared(
        access=Access(members, overflow=lambda: (65_534, 65_534)),
        directory=directory,
        refused=RefusedCallers(metrics),
    )
    servers = LocalServers(metrics, PASSED_ON, shared=shared)
    served = Served()
    handler = grpc.method_handlers_generic_handler("sealane.v1.Volumes", served.handlers)
    servers.add_generic_rpc_handlers((handler,))
    run_directory = RunDirectory(above / "run")
    with run_directory.claimed():
        async with asyncio.timeout(PATIENCE_SECONDS), servers.serving(run_directory):
            yield served, servers


def channel(above: Path) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(f"unix:{above}/jobs/jobs.sock", options=options)


async def rest_of(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({Party.READER: US}, {Party.READER: OTHERS}),
        ({Party.OPERATOR: US}, {Party.READER: US}),
        ({Party.READER: US}, {Party.READER: US, Party.OPERATOR: US}),
    ],
)
async def test_a_reload_ends_the_connections_of_whom_it_changes_also_if_they_read_nothing(
    above: Path, before: MembersOf, after: MembersOf
) -> None:
    async with serving(above, before) as (served, servers), channel(above) as client:
        call = client.unary_stream(STREAM)(b"")
        await served.has_begun.wait()
        await asyncio.sleep(0.1)
        servers.replace_members(before)
        await asyncio.sleep(0.1)
        assert not served.has_ended.is_set()
        servers.replace_members(after)
        await served.has_ended.wait()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await rest_of(call)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_reload_ends_a_call_that_waits_for_its_turn(
    above: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_completion, "RUNNING_MAX", 0)
    async with serving(above, {Party.OPERATOR: US}) as (served, servers), channel(above) as client:
        call = client.unary_unary(CHANGE)(b"")
        await asyncio.sleep(0.5)
        assert not call.done()
        servers.replace_members({Party.OPERATOR: OTHERS})
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert not served.has_begun.is_set()


async def test_a_stream_whose_caller_takes_nothing_ends(
    above: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_limit, "STREAM_WRITE_SECONDS", 1.0)
    async with serving(above, {Party.READER: US}) as (served, _), channel(above) as client:
        call = client.unary_stream(STREAM)(b"")
        # Whoever reads keeps its stream for longer than the limit of a message.
        for _ in range(30):
            assert len(await call.read()) == 1 << 18
            await asyncio.sleep(0.05)
        assert not served.has_ended.is_set()
        await served.has_ended.wait()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await rest_of(call)
        reason = dict(ended.value.trailing_metadata() or ()).get("sealane-reason")
        assert reason == "call.stream.unread"


async def test_calls_that_are_refused_fill_no_log_and_each_has_one_line_with_its_ids(
    above: Path,
) -> None:
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as lines:
        async with serving(above, {Party.JOB: US}), channel(above) as client:
            for _ in range(LINES_MAX + 10):
                call = client.unary_stream(STREAM)(
                    b"", metadata=(("sealane-correlation-id", "abc-1"),)
                )
                with pytest.raises(grpc.aio.AioRpcError):
                    await call.read()
    refused = [line for line in lines if line["event"] == "call_refused"]
    assert len(refused) == LINES_MAX
    assert {line["uid"] for line in refused} == {os.geteuid()}
    assert {line["correlation_id"] for line in refused} == {"abc-1"}
    assert {line["method"] for line in refused} == {STREAM}
