"""Operators probe, enable, disable and drain a gateway's card: real daemons, an emulated card."""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from subprocess import Popen

import pytest

from accelerators.cards import LABEL, World, running_card, world
from accelerators.test_cards import Contents, disk
from control_plane import daemon, sealanectl, short_directory
from patience import PATIENCE_SECONDS
from sealane.client import Client, connect, translated
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.v1 import offload_pb2

pytestmark = pytest.mark.slow

STATES = offload_pb2.Accelerator
BOUND_SECONDS = 15.0
"""No call takes longer, whatever the card does."""


class Operator:
    """An operator's calls about the card."""

    def __init__(self, client: Client) -> None:
        self._calls = client.offload

    async def get(self) -> offload_pb2.Accelerator:
        with translated():
            return await self._calls.GetAccelerator(
                offload_pb2.GetAcceleratorRequest(label=LABEL), timeout=5
            )

    async def probe(self) -> offload_pb2.Accelerator:
        with translated():
            return await self._calls.ProbeAccelerator(
                offload_pb2.ProbeAcceleratorRequest(label=LABEL), timeout=BOUND_SECONDS
            )

    async def enable(self) -> offload_pb2.Accelerator:
        with translated():
            return await self._calls.EnableAccelerator(
                offload_pb2.EnableAcceleratorRequest(label=LABEL), timeout=2 * BOUND_SECONDS
            )

    async def disable(self) -> offload_pb2.Accelerator:
        with translated():
            return await self._calls.DisableAccelerator(
                offload_pb2.DisableAcceleratorRequest(label=LABEL), timeout=5
            )

    async def drain(self) -> offload_pb2.Accelerator:
        with translated():
            return await self._calls.DrainAccelerator(
                offload_pb2.DrainAcceleratorRequest(label=LABEL), timeout=5
            )

    async def wait(self, state: int, seconds: float = PATIENCE_SECONDS) -> offload_pb2.Accelerator:
        deadline = time.monotonic() + seconds
        while (card := await self.get()).state != state:
            assert time.monotonic() < deadline, card
            await asyncio.sleep(0.02)
        return card


@contextlib.asynccontextmanager
async def operator(site: World) -> AsyncIterator[Operator]:
    async with connect(site.gateway.socket) as client:
        yield Operator(client)


@contextlib.asynccontextmanager
async def in_use(site: World, *arguments: str) -> AsyncIterator[tuple[Operator, Popen[str]]]:
    """Run the card until the end of the block; it is in use, whatever an earlier test left."""
    with site.card(*arguments) as process:
        async with operator(site) as calls:
            if (await calls.get()).state == STATES.NOT_IN_USE:
                await calls.wait(STATES.IN_USE)
            else:
                await calls.enable()
            yield calls, process


@pytest.fixture(scope="module")
def site() -> Iterator[World]:
    with short_directory() as root, world(root) as made:
        yield made


async def sealed_by_card(site: World, contents: Contents) -> int:
    """Write; return how many sectors the card sealed of it."""
    before = len(site.nonces())
    await contents.write(2)
    return len(site.nonces()) - before


@pytest.mark.parametrize("verb", ["disable", "drain"])
async def test_a_stopped_card_gets_nothing_until_it_is_enabled(site: World, verb: str) -> None:
    ended = STATES.DISABLED if verb == "disable" else STATES.DRAINED
    async with in_use(site, "--keys", "1") as (calls, _), disk(site) as opened:
        contents = Contents(opened, seed=21)
        while not await sealed_by_card(site, contents):
            pass
        writing = asyncio.ensure_future(contents.write(8))
        await asyncio.sleep(0.01)
        assert (await getattr(calls, verb)()).state in {ended, ended - 1}
        await calls.wait(ended)
        await writing
        assert await sealed_by_card(site, contents) == 0
        # Its only place for a key is free: the key was unloaded.
        assert (await calls.probe()).state == ended
        assert await sealed_by_card(site, contents) == 0, "a probe doesn't use it"
        assert (await getattr(calls, verb)()).state == ended, "idempotent"
        assert (await calls.enable()).state == STATES.IN_USE
        while not await sealed_by_card(site, contents):
            pass
        await contents.check()
        card = await calls.get()
        assert card.sectors_sealed
        # On a busy machine it may have been late, which is a loss.
        assert card.refusals == 0


async def test_jobs_under_way_are_waited_for_and_not_sealed_again(site: World) -> None:
    async with in_use(site, "--fault", "latency=1") as (calls, _), disk(site) as opened:
        contents = Contents(opened, seed=22)
        while not await sealed_by_card(site, contents):
            pass
        writing = asyncio.ensure_future(contents.write(8))
        await asyncio.sleep(0.05)
        await calls.drain()
        await calls.wait(STATES.DRAINED)
        await writing
        card = await calls.get()
        assert card.jobs == card.sectors_sealed, "each job counted"
        await contents.check()


async def test_a_disabled_card_is_drained_no_further(site: World) -> None:
    async with in_use(site) as (calls, _):
        await calls.disable()
        await calls.wait(STATES.DISABLED)
        assert (await calls.drain()).state == STATES.DISABLED


async def test_the_last_decision_to_stop_wins_over_an_enable_under_way(site: World) -> None:
    async with in_use(site) as (calls, _):
        await calls.disable()
        enabling = asyncio.ensure_future(calls.enable())
        await asyncio.sleep(0.1)
        await calls.disable()
        with pytest.raises(UnavailableError) as caught:
            await enabling
        assert caught.value.reason == "accelerator.stopped"
        await calls.wait(STATES.DISABLED)


async def test_of_two_operators_who_enable_one_is_told_so(site: World) -> None:
    async with in_use(site) as (calls, _):
        await calls.disable()
        outcomes = await asyncio.gather(calls.enable(), calls.enable(), return_exceptions=True)
        refused = [each for each in outcomes if isinstance(each, Error)]
        assert [each.reason for each in refused] == ["accelerator.busy"]
        assert (await calls.get()).state == STATES.IN_USE
        await asyncio.gather(calls.disable(), calls.drain(), calls.disable())
        await calls.wait(STATES.DISABLED)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_card_that_dies_while_it_is_drained_holds_nothing_up(
    site: World, number: signal.Signals
) -> None:
    async with in_use(site) as (calls, process), disk(site) as opened:
        contents = Contents(opened, seed=23)
        while not await sealed_by_card(site, contents):
            pass
        writing = asyncio.ensure_future(contents.write(8))
        await asyncio.sleep(0.02)
        process.send_signal(number)
        await calls.drain()
        await calls.wait(STATES.DRAINED, BOUND_SECONDS)
        await writing
        await contents.check()
        with pytest.raises(UnavailableError) as caught:
            await calls.enable()
        assert caught.value.reason == "evidence.secondary.failed"
        assert (await calls.get()).state == STATES.DRAINED, "a refused enable changes nothing"


@pytest.mark.parametrize("verb", ["probe", "enable"])
async def test_a_card_that_is_absent_another_or_wrong_is_refused_in_a_line(
    site: World, verb: str
) -> None:
    async with in_use(site) as (calls, _):
        await calls.disable()
        await calls.wait(STATES.DISABLED)
    async with operator(site) as calls:
        call: Callable[[], Awaitable[offload_pb2.Accelerator]] = getattr(calls, verb)
        with pytest.raises(UnavailableError) as absent:
            await call()
        assert absent.value.reason == "evidence.secondary.failed"
        other, _ = site.maker.card(f"another for {verb}")
        with running_card(site.socket, other), pytest.raises(VerificationError) as refused:
            await call()
        assert refused.value.reason == "accelerator.refused"
        with (
            site.card("--fault", "wrong-tag=1"),
            pytest.raises(UnavailableError) as wrong,
        ):
            await call()
        assert wrong.value.reason == "accelerator.unavailable"
        assert all("\n" not in str(each.value) for each in (absent, refused, wrong))
        assert (await calls.get()).state == STATES.DISABLED


async def test_a_card_in_use_is_probed_beside_its_work(site: World) -> None:
    async with in_use(site) as (calls, _):
        card = await calls.probe()
        assert card.state == STATES.IN_USE
        assert card.product == "bf3-dpdk"
        assert not card.protected_bus
        assert card.hardware_id.startswith("key-sha256:")
        assert card.key_slots == 64


async def test_sealanectl_shows_and_stops_a_card(site: World) -> None:
    async with in_use(site):
        calls = ("--socket", site.gateway.socket, "offload")

        async def ran(*arguments: str) -> tuple[int, str]:
            done = await asyncio.to_thread(sealanectl, *calls, *arguments)
            return done.returncode, done.stdout + done.stderr

        code, said = await ran("list", "-o", "json")
        assert code == 0
        assert [row["state"] for row in json.loads(said)] == ["in_use"]
        assert await ran("list", "-o", "name") == (0, f"{LABEL}\n")
        assert (await ran("probe", LABEL))[0] == 0
        code, said = await ran("disable", LABEL, "-o", "json")
        assert (code, json.loads(said)["state"]) == (0, "disabled")
        code, said = await ran("enable", LABEL, "-o", "yaml")
        assert code == 0
        assert "state: in_use" in said
        code, said = await ran("drain", LABEL)
        assert code == 0
        assert "drained" in said
        code, said = await ran("get", "other")
        assert code == 4
        assert said == (
            f"sealanectl: no accelerator 'other'; this gateway has: {LABEL} "
            "[accelerator.not_found]\n"
        )


@pytest.fixture
def own_site() -> Iterator[World]:
    with short_directory() as root, world(root) as made:
        yield made


async def test_a_disabled_card_stays_so_over_a_restart_and_a_drained_one_does_not(
    own_site: World,
) -> None:
    site = own_site
    async with in_use(site) as (calls, _):
        await calls.disable()
        # It ends while the card is being stopped.
        assert site.gateway.stop() == 0
        with daemon(site.config) as site.gateway:
            async with operator(site) as later:
                assert (await later.get()).state == STATES.DISABLED
                await asyncio.sleep(1)
                assert (await later.get()).state == STATES.DISABLED
                assert (await later.enable()).state == STATES.IN_USE
                await later.drain()
                await later.wait(STATES.DRAINED)
        with daemon(site.config) as site.gateway:
            async with operator(site) as later:
                await later.wait(STATES.IN_USE)


async def test_a_card_that_was_silent_at_the_start_is_attested_once_it_answers(
    own_site: World,
) -> None:
    site = own_site
    assert site.gateway.stop() == 0
    with daemon(site.config) as site.gateway:
        site.wait_for_log("device_silent")
        async with operator(site) as calls:
            await calls.wait(STATES.NOT_IN_USE)
            assert not (await calls.get()).hardware_id, "attested without it"
            with site.card():
                card = await calls.wait(STATES.IN_USE)
                assert card.hardware_id


async def test_a_daemon_ends_although_its_card_is_silent_and_being_drained(own_site: World) -> None:
    site = own_site
    async with in_use(site) as (calls, process):
        async with disk(site) as opened:
            await Contents(opened, seed=24).write(1)
        process.send_signal(signal.SIGSTOP)
        await calls.drain()
        began = time.monotonic()
        assert site.gateway.stop() == 0
        assert time.monotonic() < began + BOUND_SECONDS
