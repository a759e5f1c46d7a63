"""One job that accepts sessions from many peers."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from sealane.client.grants import listen_sessions
from sealane.client.session import Session
from sealane.daemon.fabric import responder
from sealane.daemon.fabric.key_making import made_in_thread
from sealane.errors import Error, SessionError, UnavailableError, UsageError
from sealane.protocol.v1 import sessions_pb2
from session_pairs import opening, wait_listening

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
REGION = 1 << 20
PEERS = 6


def opened(
    left: Any, right: Any, *, wait_seconds: float = PATIENCE_SECONDS, secret: bytes = b""
) -> contextlib.AbstractAsyncContextManager[Session]:
    return opening(left, right, region_bytes=REGION, wait_seconds=wait_seconds, secret=secret)


async def names(fabric: Any) -> list[str]:
    page = await fabric.sessions.ListSessions(sessions_pb2.ListSessionsRequest())
    open_states = {sessions_pb2.Session.LISTENING, sessions_pb2.Session.ESTABLISHED}
    return [one.name for one in page.sessions if one.state in open_states]


async def test_many_peers_get_a_session_each(make_fabric: MakeFabric) -> None:
    async with (
        make_fabric("fabric-a", sessions_max=2 * PEERS) as left,
        make_fabric("fabric-b", sessions_max=2 * PEERS) as right,
    ):
        assert await answers(left, right) == [2 * number for number in range(PEERS)]


async def answers(left: Any, right: Any) -> list[int]:
    async def ask(number: int) -> int:
        async with opened(left, right) as session:
            session.region[0] = number
            await session.send(offset=0, length=1)
            await session.receive(offset=1, length=1)
            return session.region[1]

    async def answer(session: Session) -> None:
        with contextlib.closing(session):
            await session.receive(offset=0, length=1)
            session.region[1] = 2 * session.region[0]
            await session.send(offset=1, length=1)

    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        listen_sessions(right.sessions, "data", region_bytes=REGION, backlog=2) as listener,
        asyncio.TaskGroup() as tasks,
    ):
        asked = [tasks.create_task(ask(number)) for number in range(PEERS)]
        for _ in range(PEERS):
            session = await listener.accept()
            assert session.session.peer_node == "fabric-a"
            tasks.create_task(answer(session))
    return [task.result() for task in asked]


async def test_nothing_is_left_of_a_listener_that_ends(fabrics: tuple[Any, Any]) -> None:
    left, right = fabrics
    async with listen_sessions(right.sessions, "data", region_bytes=REGION, backlog=3) as listener:
        await wait_listening(right)
        with pytest.raises(SessionError) as late:
            await listener.accept(timeout_seconds=0.01)
        assert late.value.reason == "session.wait.timeout"
        async with opened(left, right) as unaccepted:
            pass
        assert unaccepted is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await names(right):  # noqa: ASYNC110 - the fabric ends them
            await asyncio.sleep(0.01)


async def test_accept_raises_why_nobody_can_come_and_listens_again(
    make_fabric: MakeFabric,
) -> None:
    async with make_fabric("fabric-a") as left, make_fabric("fabric-b", sessions_max=1) as right:
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            listen_sessions(right.sessions, "data", region_bytes=REGION, backlog=1) as listener,
            opened(left, right),
        ):
            with contextlib.closing(await listener.accept()):
                # The fabric has no place for another listener until this session ends.
                with pytest.raises(UnavailableError) as full:
                    await listener.accept()
                assert full.value.reason == "session.count.limit"
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            listen_sessions(right.sessions, "data", region_bytes=REGION, backlog=1) as listener,
            asyncio.TaskGroup() as tasks,
        ):
            accepting = tasks.create_task(listener.accept())
            async with opened(left, right):
                (await accepting).close()


@pytest.mark.parametrize("backlog", [0, 65])
async def test_a_backlog_that_is_none_is_refused(fabrics: tuple[Any, Any], backlog: int) -> None:
    with pytest.raises(UsageError) as refused:
        async with listen_sessions(
            fabrics[1].sessions, "data", region_bytes=REGION, backlog=backlog
        ):
            pass
    assert refused.value.reason == "session.listener.backlog"


async def test_peers_that_leave_at_once_end_no_listener(fabrics: tuple[Any, Any]) -> None:
    left, right = fabrics
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        listen_sessions(right.sessions, "data", region_bytes=REGION, backlog=1) as listener,
        asyncio.TaskGroup() as tasks,
    ):

        async def come_and_go() -> None:
            for _ in range(5):
                async with opened(left, right):
                    pass
            async with opened(left, right) as session:
                await session.send(offset=0, length=1)

        tasks.create_task(come_and_go())
        while True:
            session = await listener.accept()
            with contextlib.closing(session), contextlib.suppress(SessionError):
                received = await session.receive(offset=0, length=1)
                break
    assert received.length == 1


@pytest.fixture
def slow_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to offers take long enough for another offer to come meanwhile."""
    respond = responder.respond

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return respond(*args, **options)

    monkeypatch.setattr(responder, "respond", slow)


@pytest.mark.usefixtures("slow_answers")
async def test_offers_at_the_same_time_get_a_listener_each(
    fabrics: tuple[Any, Any], make_fabric: MakeFabric
) -> None:
    left, right = fabrics

    async def come(fabric: Any) -> int:
        async with opened(fabric, right, wait_seconds=0) as session:
            return session.session.state

    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        make_fabric("fabric-c") as other,
        listen_sessions(right.sessions, "data", region_bytes=REGION, backlog=2),
    ):
        while len(await names(right)) < 2:  # noqa: ASYNC110 - the fabric makes them
            await asyncio.sleep(0.01)
        states = await asyncio.gather(come(left), come(other))
    assert states == [sessions_pb2.Session.ESTABLISHED] * 2


@pytest.mark.usefixtures("slow_answers")
async def test_an_offer_that_is_refused_keeps_none_from_the_listener(
    fabrics: tuple[Any, Any], make_fabric: MakeFabric
) -> None:
    left, right = fabrics
    secret = bytes(range(16))

    async def come_without_it() -> None:
        async with opened(left, right, wait_seconds=0, secret=secret[::-1]):
            pass

    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        make_fabric("fabric-c") as other,
        listen_sessions(
            right.sessions, "data", region_bytes=REGION, backlog=1, secret=secret
        ) as listener,
        asyncio.TaskGroup() as tasks,
    ):
        await wait_listening(right)
        refused = tasks.create_task(reason_of(come_without_it()))
        await asyncio.sleep(0.1)
        async with opened(other, right, wait_seconds=0, secret=secret):
            (await listener.accept()).close()
        assert await refused == "session.secret.mismatch"


async def test_accept_ends_with_its_block(fabrics: tuple[Any, Any]) -> None:
    _, right = fabrics
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        asyncio.TaskGroup() as tasks,
    ):
        async with listen_sessions(
            right.sessions, "data", region_bytes=REGION, backlog=2
        ) as listener:
            accepting = tasks.create_task(reason_of(listener.accept()))
            await wait_listening(right)
        assert await accepting == "session.listener.closed"
        assert await reason_of(listener.accept()) == "session.listener.closed"
        while await names(right):  # noqa: ASYNC110 - the fabric ends them
            await asyncio.sleep(0.01)


async def reason_of(call: Awaitable[object]) -> str:
    try:
        await call
    except Error as error:
        return error.reason
    return ""


@pytest.mark.usefixtures("slow_answers")
async def test_a_peer_with_many_bad_offers_does_not_keep_others_from_a_listener(
    make_fabric: MakeFabric,
) -> None:
    secret = bytes(range(16))
    async with (
        make_fabric("fabric-a", sessions_max=64) as left,
        make_fabric("fabric-b") as right,
        make_fabric("fabric-c") as other,
        listen_sessions(right.sessions, "data", region_bytes=REGION, backlog=1, secret=secret),
        asyncio.TaskGroup() as tasks,
    ):

        async def come(fabric: Any, known: bytes) -> str:
            async def enter() -> None:
                async with opened(fabric, right, wait_seconds=0, secret=known):
                    pass

            return await reason_of(enter())

        await wait_listening(right)
        bad = [tasks.create_task(come(left, secret[::-1])) for _ in range(40)]
        await asyncio.sleep(0.3)
        assert await come(other, secret) == ""
        answered = [await one for one in bad].count("session.secret.mismatch")
        assert answered < 8, "it did not wait for all of them"


async def test_what_a_thread_has_made_for_a_caller_that_left_is_wiped() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    abandoned: list[object] = []

    def make() -> str:
        begun.set()
        goes_on.wait(PATIENCE_SECONDS)
        return "keys"

    making = asyncio.ensure_future(made_in_thread(make, abandon=abandoned.append))
    await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert abandoned == []
    goes_on.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not abandoned:  # noqa: ASYNC110 - a thread ends
            await asyncio.sleep(0.01)
    assert abandoned == ["keys"]
