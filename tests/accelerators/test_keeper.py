"""What becomes of a card and its keys when an operator's decision meets something else."""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from accelerators.fakes import LABEL, Kept, Source, Volume, attached, kept, parsed
from sealane import _native
from sealane.crypto.evidence.cmw import Item
from sealane.daemon.gateway import accelerator, hold
from sealane.daemon.gateway.accelerator import CardState
from sealane.daemon.gateway.data_path import AttachedVolume, Gateway
from sealane.daemon.gateway.hold import DisabledCard, Hold
from sealane.daemon.nvme.exported import Exported
from sealane.errors import Error


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "RECHECK_SECONDS", 0.05)
    monkeypatch.setattr(accelerator, "parse_statement", parsed)


async def test_a_volume_uses_the_card_until_its_queues_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, volume = Gateway(traddr="127.0.0.1", trsvcid=0), Volume()
    ended = asyncio.Event()

    async def end_export(exported: Exported) -> None:
        await ended.wait()

    monkeypatch.setattr(gateway.listener, "end_export", end_export)
    async with kept(tmp_path) as made:
        gateway.cards = made.cards
        made.cards.add(volume.native)
        await made.wait(CardState.IN_USE)
        async with asyncio.TaskGroup() as group:
            group.create_task(gateway.detach(cast("AttachedVolume", attached(volume))))
            await asyncio.sleep(0.1)
            volume.jobs = 1
            await made.calls.disable(LABEL)
            await asyncio.sleep(0.1)
            assert made.keeper.state is CardState.DISABLING, "a leaving volume still has a job"
            volume.jobs = 0
            await made.wait(CardState.DISABLED)
            assert volume.card is None
            ended.set()
        assert not made.keeper.volume_count


async def test_a_volume_that_has_left_has_no_keys_at_the_card(tmp_path: Path) -> None:
    gateway, volume = Gateway(traddr="127.0.0.1", trsvcid=0), Volume()
    async with kept(tmp_path) as made:
        gateway.cards = made.cards
        made.cards.add(volume.native)
        await made.wait(CardState.IN_USE)
        await asyncio.sleep(0.1)
        assert volume.card is not None
        await gateway.detach(cast("AttachedVolume", attached(volume)))
        assert volume.card is None, "it may stay open, suspended, while the card is disabled"
        await asyncio.sleep(0.2)
        assert volume.card is None, "the card in use is not given to it again"


async def test_a_volume_that_leaves_while_others_get_the_card_does_not_get_it(
    tmp_path: Path,
) -> None:
    volumes = [Volume(), Volume()]
    for volume in volumes:
        volume.seconds = 0.1
    async with kept(tmp_path) as made:
        for volume in volumes:
            made.keeper.add(volume.native)
        await made.wait(CardState.IN_USE)
        # Both are about to get it: one is first, the other waits.
        await asyncio.sleep(0.05)
        await asyncio.gather(*(made.keeper.remove(volume.native) for volume in volumes))
        await asyncio.sleep(0.3)
        assert [volume.card for volume in volumes] == [None, None]


@pytest.mark.parametrize("verb", ["drain", "disable"])
async def test_a_disabled_card_that_is_stopped_while_it_is_enabled_stays_disabled(
    tmp_path: Path, verb: str
) -> None:
    async with kept(tmp_path) as made:
        await made.calls.disable(LABEL)
        await made.wait(CardState.DISABLED)
        made.attest_seconds = 0.1
        async with asyncio.TaskGroup() as group:
            group.create_task(_refused(made, "accelerator.stopped"))
            await asyncio.sleep(0.05)
            if verb == "drain":
                made.calls.drain(LABEL)
            else:
                await made.calls.disable(LABEL)
        assert made.keeper.state is CardState.DISABLED
        assert made.file.read() is Hold.DISABLED


async def test_a_lost_card_that_is_stopped_has_no_connection(tmp_path: Path) -> None:
    async with kept(tmp_path) as made:
        await made.wait(CardState.IN_USE)
        assert made.source.connections == 1
        made.source.is_right = made.source.is_there = False
        await made.wait(CardState.NOT_IN_USE)
        await made.calls.disable(LABEL)
        await asyncio.sleep(0.05)
        assert made.keeper.failure is not None
        await made.source.wait_connections(0)


async def test_an_enable_of_a_card_that_recovers_by_itself_returns_at_once(tmp_path: Path) -> None:
    async with kept(tmp_path) as made:
        made.source.is_there = False
        await asyncio.sleep(0.1)
        assert made.keeper.state is CardState.NOT_IN_USE
        made.source.is_there, made.attest_seconds = True, 1
        async with asyncio.timeout(5):
            await made.calls.enable(LABEL)
        assert made.keeper.state is CardState.IN_USE
        await made.source.wait_connections(1)
        # As another call may find it, which did not see that.
        made.keeper.decide(Hold.NONE)
        async with asyncio.timeout(5):
            await made.keeper.settled()


async def test_an_enable_whose_first_use_fails_changes_nothing(tmp_path: Path) -> None:
    volume = Volume()
    volume.is_refused = True
    async with kept(tmp_path) as made:
        made.keeper.add(volume.native)
        await made.calls.disable(LABEL)
        await made.wait(CardState.DISABLED)
        await _refused(made, "accelerator.unavailable")
        await made.wait(CardState.DISABLED)
        assert made.file.read() is Hold.DISABLED
        await made.source.wait_connections(0)


async def test_an_enable_whose_first_use_fails_leaves_a_drained_card_drained(
    tmp_path: Path,
) -> None:
    volume = Volume()
    volume.is_refused = True
    async with kept(tmp_path) as made:
        made.keeper.add(volume.native)
        made.calls.drain(LABEL)
        await made.wait(CardState.DRAINED)
        await _refused(made, "accelerator.unavailable")
        await made.wait(CardState.DRAINED)
        assert made.keeper.hold is Hold.DRAINED


async def test_a_card_is_disabled_at_a_start_until_its_enable_has_succeeded(tmp_path: Path) -> None:
    volume = Volume()
    volume.seconds = 0.2
    async with kept(tmp_path) as made:
        made.keeper.add(volume.native)
        await made.calls.disable(LABEL)
        await made.wait(CardState.DISABLED)
        async with asyncio.TaskGroup() as group:
            group.create_task(_refused(made, "accelerator.stopped"))
            await made.wait(CardState.IN_USE)
            assert made.file.read() is Hold.DISABLED
            made.calls.drain(LABEL)
        await made.wait(CardState.DISABLED)
        assert made.file.read() is Hold.DISABLED
        await made.calls.enable(LABEL)
        assert made.file.read() is Hold.NONE


async def test_a_card_whose_enable_cannot_be_kept_is_disabled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kept(tmp_path) as made:
        await made.calls.disable(LABEL)
        await made.wait(CardState.DISABLED)
        path = tmp_path / "accelerators"
        with monkeypatch.context() as patched:
            patched.setattr(hold, "sync_directory", _fail_once(patched, path))
            await _refused(made, "accelerator.state")
        await made.wait(CardState.DISABLED)
        assert made.file.read() is Hold.DISABLED


async def test_a_disabled_card_is_disabled_under_any_label_until_it_is_enabled(
    tmp_path: Path,
) -> None:
    async with kept(tmp_path) as made:
        await made.wait(CardState.IN_USE)
        await made.calls.disable(LABEL)
        await made.wait(CardState.DISABLED)
    async with kept(tmp_path, label="other", card="2") as made:
        await made.wait(CardState.IN_USE)
    async with kept(tmp_path, label="other") as made:
        await made.wait(CardState.DISABLED)
        assert made.keeper.failure is not None
        assert made.keeper.failure.reason == "accelerator.disabled"
        await made.calls.enable("other")
        made.source.is_right = False
        await made.wait(CardState.NOT_IN_USE)
        made.source.is_right = True
        await made.wait(CardState.IN_USE)
    async with kept(tmp_path, label="other") as made:
        await made.wait(CardState.IN_USE)
    async with kept(tmp_path, card="2") as made:
        assert made.keeper.state is CardState.DISABLED, "its label still is"


async def test_a_card_that_is_disabled_while_it_is_connected_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Source.connect

    def disabled_meanwhile(source: Source, accepted: Item) -> _native.Accelerator:
        connected = connect(source, accepted)
        DisabledCard(tmp_path, "another").write(is_disabled=True, card_id="key-sha256:1")
        return connected

    monkeypatch.setattr(Source, "connect", disabled_meanwhile)
    volume = Volume()
    async with kept(tmp_path) as made:
        made.cards.add(volume.native)
        await made.wait(CardState.DISABLED)
        assert volume.given == 0
        await made.source.wait_connections(0)


async def test_a_card_that_was_silent_at_two_attestations_is_attested_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "ATTEST_SECONDS", 0.05)
    async with kept(tmp_path) as made:
        await made.wait(CardState.IN_USE)
        made.is_attested = made.answers_attestation = False
        await made.wait(CardState.NOT_IN_USE)
        # It answers the keeper, but not in the attestation that follows.
        await asyncio.sleep(0.8)
        assert made.keeper.state is CardState.NOT_IN_USE
        made.answers_attestation = True
        await made.wait(CardState.IN_USE)


@pytest.mark.parametrize("number", [errno.ENOTDIR, errno.ELOOP])
async def test_a_card_is_disabled_if_it_cannot_be_read_whether_it_is(
    tmp_path: Path, number: int
) -> None:
    directory = tmp_path / "accelerators"
    if number == errno.ENOTDIR:
        directory.write_bytes(b"")
    else:
        directory.symlink_to(directory)
    async with kept(tmp_path) as made:
        assert made.keeper.state is CardState.DISABLED
        await _refused(made, "accelerator.state")
        await made.wait(CardState.DISABLED)


def _fail_once(patched: pytest.MonkeyPatch, path: Path) -> Callable[[Path], None]:
    def sync(directory: Path) -> None:
        assert directory == path
        patched.undo()
        raise OSError(errno.EIO, "it is not durable")

    return sync


async def _refused(made: Kept, reason: str) -> None:
    with pytest.raises(Error) as caught:
        await made.calls.enable(LABEL)
    assert caught.value.reason == reason
