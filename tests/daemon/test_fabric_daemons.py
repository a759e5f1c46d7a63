"""Two fabric daemons as processes: a session between them over real mutual TLS and UDP."""

import ast
import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from control_plane import Daemon, sealanectl
from fabric_daemons import fabric_daemons
from patience import PATIENCE_SECONDS
from sealane.client import connect, sync
from sealane.client.collectives import Member
from sealane.client.grants import listen_session, open_session
from sealane.client.messages import SelectiveRepeat
from sealane.errors import Error, SessionError, UnavailableError

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from sealane.protocol.v1.sessions_pb2_grpc import SessionsAsyncStub

REGION = 4 << 20


@pytest.fixture(scope="module")
def fabrics() -> Iterator[tuple[Daemon, Daemon]]:
    with fabric_daemons() as made:
        near, far = made.fabrics
        yield near, far


async def test_message_crosses_between_two_daemons(fabrics: tuple[Daemon, Daemon]) -> None:
    near, far = fabrics
    data = secrets.token_bytes(1 << 20)
    async with connect(near.socket) as sender, connect(far.socket) as receiver:

        async def receive() -> bytes:
            async with listen_session(
                receiver.sessions, "gradients", region_bytes=REGION
            ) as session:
                got = await session.receive(offset=0, length=len(data))
                return bytes(session.region[: got.length])

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(receive())
            await _open_and_send(sender.sessions, far, data)
        assert receiving.result() == data


async def _open_and_send(sessions: "SessionsAsyncStub", far: Daemon, data: bytes) -> dict[str, int]:
    """Send a message and return the session's statistics."""
    # The listener starts in another task, so the peer may not have it yet.
    while True:
        try:
            async with open_session(
                sessions,
                "gradients",
                region_bytes=REGION,
                peer_node="b",
                peer_address=far.addresses["fabric_control"],
                rate_bits_per_second=500_000_000,
            ) as session:
                session.region[: len(data)] = data
                await session.send(offset=0, length=len(data), reliability=SelectiveRepeat())
                return session.statistics()
        except Error as error:
            if error.reason != "session.listener.absent":
                raise
        await asyncio.sleep(0.05)


UNO = """congestion = "uno"
marking = "phantom"
line_bits_per_second = 1000000000
near_rtt_micros = 500
far_rtt_micros = 25000
"""


async def test_daemons_steer_their_sessions_as_they_are_configured() -> None:
    data = secrets.token_bytes(1 << 20)
    with fabric_daemons(more=UNO) as made:
        near, far = made.fabrics
        async with (
            connect(near.socket) as sender,
            connect(far.socket) as receiver,
            asyncio.timeout(60),
            asyncio.TaskGroup() as tasks,
        ):
            listening = listen_session(receiver.sessions, "gradients", region_bytes=REGION)

            async def receive() -> bytes:
                async with listening as session:
                    got = await session.receive(offset=0, length=len(data))
                    return bytes(session.region[: got.length])

            receiving = tasks.create_task(receive())
            figures = await _open_and_send(sender.sessions, far, data)
        assert receiving.result() == data
        assert figures["window_bytes"] > 0
        assert figures["rtt_least_nanos"] > 0


async def test_peer_of_another_name_is_not_reached(fabrics: tuple[Daemon, Daemon]) -> None:
    near, far = fabrics
    async with connect(near.socket) as client:
        with pytest.raises(Error) as caught:
            async with open_session(
                client.sessions,
                "x",
                region_bytes=REGION,
                peer_node="c",
                peer_address=far.addresses["fabric_control"],
                rate_bits_per_second=1_000_000,
            ):
                pass
        assert caught.value.reason == "peer.unattested"


async def test_rate_above_the_operators_is_refused(fabrics: tuple[Daemon, Daemon]) -> None:
    near, far = fabrics
    async with connect(near.socket) as client:
        with pytest.raises(Error) as caught:
            async with open_session(
                client.sessions,
                "x",
                region_bytes=REGION,
                peer_node="b",
                peer_address=far.addresses["fabric_control"],
                rate_bits_per_second=2_000_000_000,
            ):
                pass
        assert caught.value.exit_code == 2


async def test_examples_of_the_documentation_run(fabrics: tuple[Daemon, Daemon]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "start" / "client-sessions.md").read_text()
    near, far = fabrics
    names = {
        "near_socket": near.socket,
        "far_socket": far.socket,
        "far_node": "b",
        "far_address": far.addresses["fabric_control"],
    }

    async def run(example: str) -> None:
        code = compile(example, "client-sessions.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        await eval(code, {**names})  # noqa: S307 - our own documentation

    async def receive_numbers() -> None:
        async with (
            connect(far.socket) as client,
            listen_session(client.sessions, "numbers", region_bytes=REGION) as session,
        ):
            for number in range(4):
                await session.receive(row := session.empty(1000, "int64"))
                assert (np.from_dlpack(row) == number).all()

    async def receive_ones(name: str) -> None:
        async with (
            connect(far.socket) as client,
            listen_session(client.sessions, name, region_bytes=REGION) as session,
        ):
            await session.receive(row := session.empty(1000, "float32"))
            assert (np.from_dlpack(row) == 1).all()

    async def visit() -> None:
        async with connect(near.socket) as client:
            while True:
                # Either job may have left before the other one takes its end.
                with contextlib.suppress(UnavailableError):
                    async with client.open_session(
                        "parameters",
                        region_bytes=REGION,
                        peer_node="b",
                        peer_address=far.addresses["fabric_control"],
                        rate_bits_per_second=500_000_000,
                        wait_seconds=PATIENCE_SECONDS,
                    ):
                        pass

    *waiting, blocking = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(waiting) == 4
    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
        visiting = tasks.create_task(visit())
        await asyncio.gather(
            *(run(example) for example in waiting),
            receive_numbers(),
            receive_ones("left"),
            receive_ones("right"),
            asyncio.to_thread(exec, blocking, {**names}),
        )
        visiting.cancel()


async def test_examples_of_collectives_run(fabrics: tuple[Daemon, Daemon]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "start" / "collectives.md").read_text()
    waiting, blocking = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    names = {
        "near_address": fabrics[0].addresses["fabric_control"],
        "far_address": fabrics[1].addresses["fabric_control"],
    }

    async def wait(rank: int, socket: str, gradients: object) -> None:
        own = {**names, "rank": rank, "socket": socket, "gradients": gradients}
        code = compile(waiting, "collectives.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        await eval(code, own)  # noqa: S307 - our own documentation

    def block(rank: int, socket: str, gradients: object) -> None:
        exec(blocking, {**names, "rank": rank, "socket": socket, "gradients": gradients})  # noqa: S102

    arrays = [np.full(1000, rank + 1.0, np.float32) for rank in range(2)]
    async with asyncio.timeout(60):
        ranks = [(n, fabric.socket, arrays[n]) for n, fabric in enumerate(fabrics)]
        await asyncio.gather(*(wait(*one) for one in ranks))
        assert all((array == 3).all() for array in arrays)
        await asyncio.gather(*(asyncio.to_thread(block, *one) for one in ranks))
        assert all((array == 3).all() for array in arrays), "the mean of two threes"


def test_group_that_a_thread_leaves_by_an_error_ends_at_all_ranks(
    fabrics: tuple[Daemon, Daemon],
) -> None:
    members = [
        Member(node=name, address=fabric.addresses["fabric_control"])
        for name, fabric in zip("ab", fabrics, strict=True)
    ]

    def be(rank: int) -> str:
        with pytest.raises((SessionError, ValueError)) as ended:  # noqa: PT012, SIM117
            with (
                sync.connect(fabrics[rank].socket) as client,
                client.join(
                    "fails", rank=rank, members=members, rate_bits_per_second=10**8
                ) as group,
            ):
                group.barrier()
                if rank == 1:
                    raise ValueError("this rank has failed")
                group.all_reduce(np.zeros(1000), timeout_seconds=30)
        return getattr(ended.value, "reason", str(ended.value))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(be, range(2))) == ["group.aborted", "this rank has failed"]


def test_threads_without_asyncio_use_sessions(fabrics: tuple[Daemon, Daemon]) -> None:
    near, far = fabrics

    def listen() -> list[int | None]:
        with (
            sync.connect(far.socket) as client,
            client.listen_session("threads", region_bytes=REGION) as session,
        ):
            rooms = [session.empty(1000, "int64") for _ in range(4)]
            posted = [session.post_receive(room) for room in rooms]
            posted[3].wait_chunks(timeout_seconds=30)
            received = sync.wait(posted, timeout_seconds=30)
            assert all((np.from_dlpack(rooms[n]) == n).all() for n in range(4))
            assert posted[3].chunks() == b"\x01"
            session.send(rooms[3])
            session.drain(timeout_seconds=30)
            return [one.immediate for one in received]

    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        sync.connect(near.socket) as client,
    ):
        listening = pool.submit(listen)
        with client.open_session(
            "threads",
            region_bytes=REGION,
            peer_node="b",
            peer_address=far.addresses["fabric_control"],
            rate_bits_per_second=500_000_000,
            wait_seconds=30,
        ) as session:
            answer = session.post_receive(session.empty(1000, "int64"))
            for number in range(4):
                array = session.empty(1000, "int64")
                np.from_dlpack(array)[:] = number
                session.send(array, immediate=number)
            assert answer.wait(timeout_seconds=30).length == 8000
            assert session.statistics()["sends_completed"] == 4
            name = session.session.name
            shown = sealanectl("--socket", near.socket, "session", "stat", name)
            assert shown.returncode == 0, shown.stderr
            assert "threads with b, " in shown.stdout
            assert "nothing to send" in shown.stdout
            told = sealanectl("--socket", near.socket, "--output", "json", "session", "stat", name)
            assert json.loads(told.stdout)["statistics"]["sends_completed"] == 4
            told = sealanectl("--socket", near.socket, "--output", "json", "session", "get", name)
            found = json.loads(told.stdout)
            assert found["state"] in {"established", "closed"}
            assert (found["side"], found["unit_bytes"]) == ("initiator", 1408)
            assert found["statistics"]["sends_completed"] == 4
            shown = sealanectl("--socket", near.socket, "session", "get", name)
            assert f"sealanectl session stat {name}" in shown.stdout
            assert "sends_completed" not in shown.stdout
            told = sealanectl("--socket", near.socket, "session", "limits")
            assert told.stdout.splitlines()[2].split()[:7] == [
                "(each", "job)", "16", "1", "GiB", "4096", "4096",
            ]  # fmt: skip
            told = sealanectl("--socket", near.socket, "--output", "json", "session", "limits")
            every, each, *jobs = json.loads(told.stdout)
            assert every["rate_bits_per_second"] == each["rate_bits_per_second"] == 1_000_000_000
            (ours,) = (job for job in jobs if job["job"].startswith(f"jobs/{os.getpid()}-"))
            assert ours["wire_bytes_sent"] > 4 * 8000
        assert listening.result(30) == [0, 1, 2, 3]
    assert name not in sealanectl("--socket", near.socket, "session", "list").stdout
    listed = sealanectl("--socket", near.socket, "session", "list", "--all").stdout.splitlines()
    (line,) = (line for line in listed if line.startswith(name))
    *shown, reason = line.split()
    assert shown == [name, "threads", "closed", "b", "500"]
    assert reason in {"session.job.gone", "session.peer_closed.requested"}
    told = sealanectl("--socket", near.socket, "--output", "json", "session", "watch", name)
    (line,) = map(json.loads, told.stdout.splitlines())
    assert (line["state"], line["close_reason"]) == ("closed", reason)


def test_operator_drains_a_fabric() -> None:
    with fabric_daemons(["a"]) as made, contextlib.ExitStack() as stack:
        (near,) = made.fabrics
        drained = sealanectl("--socket", near.socket, "--output", "json", "session", "drain")
        assert drained.returncode == 0, drained.stderr
        assert json.loads(drained.stdout.splitlines()[-1])["sessions_left"] == 0
        client = stack.enter_context(sync.connect(near.socket))
        with pytest.raises(Error) as refused:
            stack.enter_context(client.listen_session("late", region_bytes=REGION))
        assert refused.value.reason == "fabric.draining"


METRICS = '[metrics]\nlisten = "127.0.0.1:0"\n'


async def test_top_and_a_report_show_a_session_and_what_limits_it(tmp_path: Path) -> None:
    length = 64 << 10
    file = tmp_path / "report.html"
    with fabric_daemons(each_more=lambda _: METRICS) as made:
        near, far = made.fabrics
        socket = ("--socket", near.socket)
        seconds = ("--interval", "1")
        has_sent, over = asyncio.Event(), asyncio.Event()
        async with (
            connect(near.socket) as sender,
            connect(far.socket) as receiver,
            asyncio.timeout(PATIENCE_SECONDS),
            asyncio.TaskGroup() as tasks,
        ):

            async def receive() -> None:
                listening = listen_session(receiver.sessions, "gradients", region_bytes=REGION)
                with contextlib.suppress(SessionError):
                    async with listening as session:
                        while True:
                            await session.receive(offset=0, length=length)

            async def send() -> None:
                async with open_session(
                    sender.sessions,
                    "gradients",
                    region_bytes=REGION,
                    peer_node="b",
                    peer_address=far.addresses["fabric_control"],
                    rate_bits_per_second=500_000_000,
                ) as session:
                    while not over.is_set():
                        await session.send(offset=0, length=length)
                        has_sent.set()

            tasks.create_task(receive())
            await _has_session(far)
            tasks.create_task(send())
            # A session that begins between two looks has no rate yet.
            await has_sent.wait()
            top, report = await asyncio.gather(
                asyncio.to_thread(sealanectl, *socket, "top", "--once", *seconds, "-o", "json"),
                asyncio.to_thread(sealanectl, *socket, "report", file, "--seconds", "3", *seconds),
            )
            over.set()
    assert (top.returncode, report.returncode) == (0, 0), top.stderr + report.stderr
    shown = json.loads(top.stdout)
    (session,) = shown["sessions"]
    assert session["sent_bits_per_second"] > 0
    assert session["round_trip_seconds"] > 0
    assert sum(session["limits"].values()) == pytest.approx(1)
    (operation,) = shown["operations"]
    assert (operation["role"], operation["operation"]) == ("fabric", "send")
    assert 0 < operation["p50_seconds"] <= operation["p99_seconds"]
    text = file.read_text()
    assert "<figcaption>Messages sent, Mbit/s" in text
    assert "gradients with b" in text


async def _has_session(fabric: Daemon) -> None:
    """Wait until the fabric has a session or a listener."""
    arguments = ("--socket", fabric.socket, "session", "list", "-o", "name")
    while not (await asyncio.to_thread(sealanectl, *arguments)).stdout:  # noqa: ASYNC110 - no event announces it
        await asyncio.sleep(0.05)
