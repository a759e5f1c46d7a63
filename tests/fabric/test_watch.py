"""A watcher of a session gets its states."""

import asyncio
from typing import Any

from patience import PATIENCE_SECONDS
from sealane.protocol.v1 import sessions_pb2
from session_pairs import connected

ORDER = ("LISTENING", "ESTABLISHING", "ESTABLISHED", "CLOSED")


async def test_a_watcher_is_told_of_each_state_until_the_session_is_closed(
    fabrics: tuple[Any, Any],
) -> None:
    left, right = fabrics
    told: list[sessions_pb2.Session] = []

    def states() -> list[str]:
        return [sessions_pb2.Session.State.Name(session.state) for session in told]

    async def watch() -> None:
        (session,) = right.service.sessions()
        request = sessions_pb2.WatchSessionRequest(name=session.identity.name)
        async for session in right.sessions.WatchSession(request):
            told.append(session)  # noqa: PERF401 - read meanwhile

    def begin_to_watch(addresses: list[str]) -> list[str]:
        tasks.create_task(watch())
        return []

    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        asyncio.TaskGroup() as tasks,
        connected(left, right, via=begin_to_watch) as (_, far),
    ):
        while "ESTABLISHED" not in states():  # noqa: ASYNC110 - the test is about the events themselves
            await asyncio.sleep(0.001)
        right.service.close(far.session.name)

    assert states() == sorted(set(states()), key=ORDER.index), "each once, in order"
    assert states()[-2:] == ["ESTABLISHED", "CLOSED"]
    assert told[-1].close_reason == "session.closed.requested"
    assert told[-2].unit_bytes == far.session.unit_bytes
