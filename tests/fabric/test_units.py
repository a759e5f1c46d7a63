"""Units of unspecified size are as large as the path permits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fabrics import fabric, settings
from sealane.daemon.fabric.establishment import Answer
from sealane.daemon.fabric.limits import Limits
from sealane.daemon.fabric.session import State
from sealane.daemon.fabric.units import (
    IP_UDP_BYTES,
    UNIT_BYTES_MAX,
    UNIT_BYTES_MIN,
    UNIT_OVERHEAD_BYTES,
    candidates,
    route_mtu,
    unit_bytes_for,
)
from sealane.errors import UsageError
from session_pairs import RATE, REGION, Narrow, connected, wait_listening


@pytest.mark.parametrize(
    ("ip_version", "mtu", "units"),
    [
        (4, 9000, [8896, 1408, 1152]),
        (6, 9000, [8832, 1344, 1152]),
        (4, 65_536, [8896, 1408, 1152]),
        (4, 1500, [1408, 1152]),
        (6, 1500, [1344, 1152]),
        (4, 1420, [1280, 1152]),
        (6, 1280, [1152]),
        (4, 600, [1152]),
    ],
)
def test_candidates_fit_the_mtu_of_either_ip(ip_version: int, mtu: int, units: list[int]) -> None:
    assert candidates(ip_version, mtu) == units
    overhead = UNIT_OVERHEAD_BYTES + IP_UDP_BYTES[ip_version]
    assert all(unit + overhead <= max(mtu, 1280) for unit in units)


def test_bounds_are_those_of_the_candidates() -> None:
    assert unit_bytes_for(9000, 4) == UNIT_BYTES_MAX
    assert unit_bytes_for(1280, 6) == UNIT_BYTES_MIN


def test_a_route_that_nobody_knows_bounds_nothing() -> None:
    assert route_mtu("localhost:1") == 9000
    assert route_mtu("127.0.0.1:1") > 9000


@contextlib.asynccontextmanager
async def pair(
    directory: Path, left: int | None, right: int | None
) -> AsyncIterator[tuple[Any, Any]]:
    async with contextlib.AsyncExitStack() as stack:
        near, far = [
            await stack.enter_async_context(
                fabric(replace(settings(directory, name), unit_bytes=unit_bytes), name)
            )
            for name, unit_bytes in (("fabric-a", left), ("fabric-b", right))
        ]
        yield near, far


async def open_directly(near: Any, far: Any, **options: Any) -> Any:
    return await near.service.open(
        job_token=near.job_token,
        display_name="data",
        region_bytes=REGION,
        peer_node="fabric-b",
        peer_address=far.address,
        rate_bits_per_second=RATE,
        **options,
    )


def units_of(made: Any) -> list[tuple[int, State]]:
    return [(s.identity.unit_bytes, s.state) for s in made.service.sessions()]


@pytest.mark.parametrize(
    ("left", "right", "agreed"),
    [
        pytest.param(None, None, 8896, id="both search"),
        pytest.param(None, 1408, 1408, id="a fixed responder"),
        pytest.param(4032, None, 4032, id="a fixed initiator"),
    ],
)
async def test_ends_agree_on_the_largest_unit_that_both_take(
    tmp_path: Path, left: int | None, right: int | None, agreed: int
) -> None:
    async with pair(tmp_path, left, right) as (near, far), connected(near, far) as (ours, theirs):
        assert [ours.session.unit_bytes, theirs.session.unit_bytes] == [agreed, agreed]
        assert ours.chunk_bytes == theirs.chunk_bytes == 16 * agreed
        sent, received = ours.empty((300_000,), "uint8"), theirs.empty((300_000,), "uint8")
        memoryview(sent)[:] = bytes(index % 251 for index in range(300_000))
        await asyncio.gather(theirs.receive(received), ours.send(sent))
        assert bytes(memoryview(received)) == bytes(memoryview(sent))


@pytest.mark.parametrize("unit_bytes", [UNIT_BYTES_MIN - 64, UNIT_BYTES_MAX + 64])
async def test_a_responder_refuses_units_beyond_the_candidates(
    tmp_path: Path, unit_bytes: int
) -> None:
    async with pair(tmp_path, unit_bytes, None) as (near, far), asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(
            far.service.listen(job_token=far.job_token, display_name="data", region_bytes=REGION)
        )
        await wait_listening(far)
        with pytest.raises(UsageError) as refused:
            await open_directly(near, far)
        assert refused.value.reason == "session.unit.range"
        listening.cancel()


@pytest.mark.parametrize("units", [(), (1408, 1408), (1152, 1408), (9, 8, 7, 6, 5)])
async def test_candidates_that_can_not_be_are_refused(
    tmp_path: Path, units: tuple[int, ...]
) -> None:
    config = replace(settings(tmp_path, "b"), unit_bytes=None)
    with pytest.raises(UsageError) as refused:
        Limits(settings=config).units_among(units, UNIT_BYTES_MAX)
    assert refused.value.reason == "session.establish.malformed"


async def test_a_responder_takes_no_unit_that_was_not_offered(tmp_path: Path) -> None:
    def change(answer: Answer) -> Answer:
        return replace(answer, units=(4032,))

    async with (
        fabric(settings(tmp_path, "a"), "fabric-a", change_answer=change) as near,
        fabric(settings(tmp_path, "b"), "fabric-b") as far,
        asyncio.TaskGroup() as tasks,
    ):
        listening = tasks.create_task(
            far.service.listen(job_token=far.job_token, display_name="data", region_bytes=REGION)
        )
        await wait_listening(far)
        with pytest.raises(UsageError) as refused:
            await open_directly(near, far)
        assert refused.value.reason == "session.establish.malformed"
        listening.cancel()


async def test_a_path_that_is_narrower_than_its_route_gets_its_unit_in_one_establishment(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, None, None) as (near, far), asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(
            far.service.listen(job_token=far.job_token, display_name="data", region_bytes=REGION)
        )
        (address,) = await wait_listening(far)
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: Narrow(address, 1500 - 28), local_addr=("127.0.0.1", 0)
        )
        via = f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"
        try:
            grants = [await open_directly(near, far, via_addresses=(via,)), await listening]
        finally:
            transport.close()
        assert [grant.session.identity.unit_bytes for grant in grants] == [1408, 1408]
        assert units_of(near) == [(1408, State.ESTABLISHED)], "in one establishment"


async def test_units_are_found_over_ipv6_whose_headers_are_larger(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        near, far = [
            await stack.enter_async_context(
                fabric(
                    replace(settings(tmp_path, name), unit_bytes=None, listen_data=("::1",)), name
                )
            )
            for name in ("fabric-a", "fabric-b")
        ]
        async with connected(near, far) as (ours, theirs):
            assert [ours.session.unit_bytes, theirs.session.unit_bytes] == [8832, 8832]
            ours.region[:300_000] = bytes(index % 251 for index in range(300_000))
            await asyncio.gather(
                theirs.receive(offset=0, length=300_000), ours.send(offset=0, length=300_000)
            )
            assert theirs.region[:300_000] == ours.region[:300_000]
            (path,) = near.service.get(ours.session.name).paths()
            assert path.peer_address.startswith("[::1]:")
