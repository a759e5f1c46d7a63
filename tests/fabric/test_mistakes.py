"""Mistakes of a job: it gets a typed error whose message names what is allowed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from sealane.client import ErasureCoded, Session
from sealane.client.grants import listen_session, open_session
from sealane.daemon.fabric.limits import Limits
from sealane.errors import Error, SessionError, UsageError
from session_pairs import RATE, REGION, connected

Act = Callable[[Session], Awaitable[Any]]

POSTS: dict[str, tuple[Act, str, str]] = {
    "beyond the region": (
        lambda s: s.send(offset=8, length=REGION),
        "session.post.range",
        f"bytes 8 to {REGION + 8}; the region has {REGION}",
    ),
    "before the region": (
        lambda s: s.receive(offset=-1, length=8),
        "session.post.range",
        "bytes -1 to 7",
    ),
    "of no length": (
        lambda s: s.post_receive(offset=0, length=-1),
        "session.post.range",
        "bytes 0 to -1",
    ),
    "elsewhere": (lambda s: s.send(b"12345678"), "session.post.elsewhere", "does not lie in"),
    "of nothing": (lambda s: s.send(), "session.post.range", "is needed"),
    "with a long immediate": (
        lambda s: s.post_send(offset=0, length=8, immediate=1 << 32),
        "session.post.immediate",
        "allowed: 0 to 2",
    ),
    "of a priority that is none": (
        lambda s: s.post_send(offset=0, length=8, priority=8),
        "session.post.priority",
        "allowed: 0 to 7",
    ),
    "due at once": (
        lambda s: s.send(offset=0, length=8, deadline_seconds=0),
        "session.post.deadline",
        "allowed: above 0",
    ),
    "due at no time": (
        lambda s: s.post_stream(8, deadline_seconds=float("nan")),
        "session.post.deadline",
        "allowed: above 0",
    ),
    "stream with a negative immediate": (
        lambda s: s.post_stream(8, immediate=-1),
        "session.post.immediate",
        "allowed: 0 to 2",
    ),
}


@pytest.mark.parametrize("name", POSTS)
async def test_post_that_can_not_be_names_what_can(fabrics: tuple[Any, Any], name: str) -> None:
    act, reason, text = POSTS[name]
    async with connected(*fabrics) as (left, _):
        with pytest.raises(UsageError, match=text) as refused:
            await act(left)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "code", [{"k": 0}, {"m": 0}, {"k": 250, "m": 6}, {"depth": 0}, {"depth": 256}]
)
def test_code_that_can_not_be_is_refused_where_it_is_made(code: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="allowed: ") as refused:
        ErasureCoded(**code)
    assert refused.value.reason == "session.post.reliability"
    ErasureCoded(k=247, m=8, depth=255)


async def test_chunks_that_are_not_there_are_named(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, _):
        receiving = await left.post_receive(offset=0, length=REGION)
        for chunk in (-1, receiving.chunk_count, 1 << 40):
            with pytest.raises(UsageError, match=f"there are {receiving.chunk_count}") as refused:
                await receiving.packet_map(chunk)
            assert refused.value.reason == "session.chunks.range"


async def test_end_of_a_message_is_said_in_words(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        room = await right.post_receive(offset=0, length=8)
        with pytest.raises(SessionError, match="send: the message is longer than the receiver"):
            await left.send(offset=0, length=9)
        with pytest.raises(SessionError, match="receive: the message is longer than the receiver"):
            await room.wait(timeout_seconds=PATIENCE_SECONDS)
        sending = await left.post_send(offset=0, length=8)
        await sending.cancel()
        with pytest.raises(SessionError, match="send: it was cancelled"):
            await sending


async def end_of(session: Session) -> SessionError:
    """Return the error of a job that goes on using an ended session."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await session.receive(offset=0, length=8)
            except SessionError as error:
                if error.reason == "session.closed":
                    return error


async def test_job_hears_why_its_session_has_ended(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        waiting = await right.post_receive(offset=0, length=8)
        left.close()
        with pytest.raises(SessionError, match="receive: the session ended before"):
            await waiting.wait(timeout_seconds=PATIENCE_SECONDS)
        assert "has ended: session.peer_closed.requested" in str(await end_of(right))
        assert "was closed here" in str(await end_of(left))
        with pytest.raises(SessionError, match="was closed here"):
            left.statistics()


@pytest.mark.parametrize(
    "address",
    [
        *("", "x", "127.0.0.1", ":80", "127.0.0.1:0", "127.0.0.1:99999", "::1:80", "host:port"),
        *("unix:/run/x.sock", "unix:x:80", "dns:///a:80", "http://a:80", "a b:80", "\0:80"),
        "x" * 5000 + ":80",
    ],
)
def test_fabric_calls_no_address_but_a_host_and_port(address: str) -> None:
    limits = Limits(settings=None)  # type: ignore[arg-type] # addresses have no settings
    with pytest.raises(UsageError, match="allowed: host:port") as refused:
        limits.check_peer_address(address)
    assert refused.value.reason == "session.peer_address.malformed"
    assert len(str(refused.value)) < 300
    for good in ("127.0.0.1:1", "[::1]:65535", "fabric-2.example.org:7443", "[fe80::1%eth0]:9"):
        limits.check_peer_address(good)


async def test_request_that_can_not_be_said_is_refused_here(fabrics: tuple[Any, Any]) -> None:
    left, right = fabrics
    listening = listen_session(left.sessions, "data", region_bytes=-1)
    terms = {"region_bytes": REGION, "peer_node": right.name, "rate_bits_per_second": RATE}
    opening = open_session(left.sessions, "\udc80", peer_address=right.address, **terms)
    for entering in (listening, opening):
        with pytest.raises(UsageError) as refused:
            await entering.__aenter__()
        assert refused.value.reason == "session.request.range"
    elsewhere = open_session(left.sessions, "data", peer_address="unix:/run/x.sock", **terms)
    with pytest.raises(Error) as called:
        await elsewhere.__aenter__()
    assert called.value.reason == "session.peer_address.malformed"


@pytest.mark.parametrize("offset", [0, 7, 8, 15])
async def test_receives_under_way_never_share_a_byte(fabrics: tuple[Any, Any], offset: int) -> None:
    async with connected(*fabrics) as (left, right):
        first = await left.post_receive(offset=8, length=8)
        apart = [await left.post_receive(offset=at, length=8) for at in (0, 16)]
        nothing = await left.post_receive(offset=12, length=0)
        overlapping = await left.post_receive(offset=offset, length=10)
        await right.send(offset=0, length=8)
        await first
        # It was read from the ring before the first one ended.
        with pytest.raises(SessionError, match="another receive") as refused:
            overlapping.result()
        assert refused.value.reason == "session.message.overlap"
        # Once the first has ended, its bytes are free; the refused one used no message number.
        again = await left.post_receive(offset=8, length=8)
        lengths = (8, 8, 0, 8)
        sends = [right.send(offset=0, length=length) for length in lengths]
        await asyncio.gather(*sends, *apart, nothing, again)
