"""Which card a volume uses when there are several, and one is lost, held, full or the same."""

import asyncio
import time
from pathlib import Path
from typing import cast

import pytest

from accelerators.fakes import Connection, Fleet, Kept, Volume, fleet, parsed
from sealane.daemon.gateway import accelerator, cards
from sealane.daemon.gateway.accelerator import CardState
from sealane.errors import UnavailableError

TWO = (("a", "1"), ("b", "2"))
IN_USE = CardState.IN_USE


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "RECHECK_SECONDS", 0.05)
    monkeypatch.setattr(accelerator, "parse_statement", parsed)
    monkeypatch.setattr(cards, "BALANCE_SECONDS", 0.05)


def volumes(made: Fleet, count: int) -> list[Volume]:
    """Attach volumes."""
    found = [Volume() for _ in range(count)]
    for volume in found:
        made.cards.add(volume.native)
    return found


def lose(made: Kept) -> None:
    """Let a volume give a card up, as the engine does."""
    cast("Connection", made.keeper.card).loss = "accelerator.wrong: a sector"
    made.cards.check_losses()


async def used(made: Fleet, volume: Volume) -> int:
    """Return which card a volume uses, once both cards are in use."""
    await made.wait(IN_USE, IN_USE)
    while (number := made.card_of(volume)) is None:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.01)
    return number


async def test_volumes_are_spread_evenly(tmp_path: Path) -> None:
    async with fleet(tmp_path, *TWO) as made:
        attached = volumes(made, 2)
        await made.wait(IN_USE, IN_USE)
        attached += volumes(made, 2)
        await made.wait_cards(*attached, cards=[0, 0, 1, 1])
        assert [made.keeper.volume_count for made in made.kept] == [2, 2]


async def test_a_lost_card_hands_its_volumes_to_the_other_and_gets_them_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, *TWO) as made:
        attached = volumes(made, 4)
        await made.wait(IN_USE, IN_USE)
        await made.wait_cards(*attached, cards=[0, 0, 1, 1])
        lose(made.kept[0])
        await made.wait(CardState.NOT_IN_USE, IN_USE)
        await made.wait_cards(*attached, cards=[1, 1, 1, 1])
        await made.wait(IN_USE, IN_USE)
        await asyncio.sleep(0.3)
        await made.wait_cards(*attached, cards=[1, 1, 1, 1])
        monkeypatch.setattr(accelerator, "GOOD_SECONDS", 0.0)
        await made.wait_cards(*attached, cards=[0, 0, 1, 1])
        assert any(volume.rested for volume in attached), "jobs under way are waited for"


async def test_a_loss_is_that_of_the_card_that_was_lost(tmp_path: Path) -> None:
    async with fleet(tmp_path, *TWO) as made:
        (volume,) = volumes(made, 1)
        old = await used(made, volume)
        new = 1 - old
        lost = made.kept[old].keeper.card
        lose(made.kept[old])
        await made.wait_cards(volume, cards=[new])
        # The event of another queue of the volume, which gave the first card up later.
        cast("Connection", lost).loss = "accelerator.late: a job"
        made.cards.check_losses()
        await asyncio.sleep(0.2)
        assert made.kept[new].keeper.state is IN_USE
        assert made.kept[new].keeper.failure is None


async def test_a_drained_card_ends_its_jobs_before_its_volumes_move(tmp_path: Path) -> None:
    async with fleet(tmp_path, *TWO) as made:
        attached = volumes(made, 2)
        await made.wait(IN_USE, IN_USE)
        await made.wait_cards(*attached, cards=[0, 1])
        (volume,) = (each for each in attached if made.card_of(each) == 0)
        volume.jobs = 1
        made.calls.drain("a")
        await asyncio.sleep(0.2)
        assert made.card_of(volume) == 0
        assert made.kept[0].keeper.state is CardState.DRAINING
        volume.jobs = 0
        await made.wait(CardState.DRAINED, IN_USE)
        await made.wait_cards(*attached, cards=[1, 1])
        assert made.kept[1].keeper.state is IN_USE, "it is not held"
        await made.calls.enable("a")
        await made.wait_cards(*attached, cards=[0, 1])


async def test_a_card_does_not_rest_a_volume_of_another(tmp_path: Path) -> None:
    async with fleet(tmp_path, *TWO) as made:
        (volume,) = volumes(made, 1)
        used_card = await used(made, volume)
        volume.jobs = 1
        await made.kept[1 - used_card].keeper.release(volume.native)
        assert volume.rested == []
        assert made.card_of(volume) == used_card


async def test_a_volume_that_moves_gets_no_new_queue_of_its_old_card(tmp_path: Path) -> None:
    async with fleet(tmp_path, *TWO) as made:
        made.calls.drain("b")
        attached = volumes(made, 2)
        await made.wait(IN_USE, CardState.DRAINED)
        await made.wait_cards(*attached, cards=[0, 0])
        for volume in attached:
            volume.jobs = 1
        await made.calls.enable("b")
        deadline = time.monotonic() + 10
        while not (moving := [volume for volume in attached if volume.rested]):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert len(moving) == 1
        given = moving[0].given
        for _ in range(5):
            made.kept[0].keeper.renew()
            await asyncio.sleep(0.02)
        assert moving[0].given == given
        assert made.card_of(moving[0]) == 0, "its jobs are waited for"
        moving[0].jobs = 0
        await made.wait_cards(*attached, cards=[0, 1])


async def test_each_card_is_stopped_by_its_own_label(tmp_path: Path) -> None:
    async with fleet(tmp_path, *TWO) as made:
        await made.wait(IN_USE, IN_USE)
        assert made.health[-1]
        made.kept[0].source.is_right = made.kept[0].source.is_there = False
        await made.wait(CardState.NOT_IN_USE, IN_USE)
        deadline = time.monotonic() + 10
        while made.health[-1]:
            assert time.monotonic() < deadline, "one that should be used is not"
            await asyncio.sleep(0.01)
        made.health.clear()
        await made.calls.disable("b")
        await made.wait(CardState.NOT_IN_USE, CardState.DISABLED)
        await asyncio.sleep(0.1)
        assert made.health, "told about the one that is held"
        assert not any(made.health), "the other is still not used"


async def test_a_card_without_a_free_place_gets_no_volume_while_another_has_one(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, *TWO) as made:
        made.kept[0].source.key_slots = 1
        attached = volumes(made, 4)
        await made.wait(IN_USE, IN_USE)
        await made.wait_cards(*attached, cards=[0, 1, 1, 1])
        attached += volumes(made, 1)
        await made.wait_cards(*attached, cards=[0, 1, 1, 1, 1])


async def test_a_volume_that_leaves_while_it_moves_gets_no_other_card(tmp_path: Path) -> None:
    async with fleet(tmp_path, *TWO) as made:
        made.kept[0].source.is_there = False
        (volume,) = volumes(made, 1)
        await made.wait_cards(volume, cards=[1])
        made.kept[0].source.is_there = True
        await made.wait(IN_USE, IN_USE)
        volume.seconds = 0.1
        lose(made.kept[1])
        await asyncio.sleep(0.05)
        await made.cards.remove(volume.native)
        assert volume.card is None
        await asyncio.sleep(0.4)
        assert volume.card is None
        assert not any(each.keeper.volume_count for each in made.kept)


async def test_one_card_is_not_used_under_two_labels(tmp_path: Path) -> None:
    async with fleet(tmp_path, ("a", "1"), ("b", "1")) as made:
        keepers = [each.keeper for each in made.kept]
        deadline = time.monotonic() + 10
        while not (failures := [each.failure for each in keepers if each.failure is not None]):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert [failure.reason for failure in failures] == ["accelerator.duplicate"]
        assert sorted(each.state for each in keepers) == [IN_USE, CardState.NOT_IN_USE]
        (used,) = (each for each in keepers if each.state is IN_USE)
        await made.calls.disable(used.source.label)
        await made.wait(CardState.DISABLED, CardState.DISABLED)


async def test_a_card_that_is_drained_is_not_used_under_another_label(tmp_path: Path) -> None:
    async with fleet(tmp_path, ("a", "1"), ("b", "1")) as made:
        (volume,) = volumes(made, 1)
        deadline = time.monotonic() + 10
        while (number := made.card_of(volume)) is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        used_card, other = made.kept[number], made.kept[1 - number]
        made.calls.drain(used_card.source.label)
        await used_card.wait(CardState.DRAINED)
        # As often as it tries in some seconds.
        for _ in range(5):
            other.keeper.renew()
            with pytest.raises(UnavailableError) as caught:
                await other.keeper._use()
            assert caught.value.reason == "accelerator.duplicate"
        assert volume.card is None
        await made.calls.enable(used_card.source.label)
        await used_card.wait(IN_USE)
        for label in ("a", "b"):
            await made.calls.disable(label)
        await made.wait(CardState.DISABLED, CardState.DISABLED)
        await made.calls.enable(other.source.label)
        await other.wait(IN_USE)
        lose(other)
        await other.wait(CardState.NOT_IN_USE)
        await other.wait(IN_USE)


async def test_a_card_is_no_longer_unproven_once_it_is_enabled(tmp_path: Path) -> None:
    async with fleet(tmp_path, *TWO) as made:
        await made.wait(IN_USE, IN_USE)
        lose(made.kept[0])
        await made.wait(CardState.NOT_IN_USE, IN_USE)
        await made.wait(IN_USE, IN_USE)
        assert not made.kept[0].keeper.is_proven
        made.calls.drain("a")
        await made.wait(CardState.DRAINED, IN_USE)
        await made.calls.enable("a")
        assert made.kept[0].keeper.is_proven


async def test_a_card_without_an_attestation_for_a_while_was_not_lost(tmp_path: Path) -> None:
    async with fleet(tmp_path, *TWO) as made:
        await made.wait(IN_USE, IN_USE)
        made.kept[0].is_attested = False
        await made.wait(CardState.NOT_IN_USE, IN_USE)
        made.kept[0].is_attested = True
        await made.wait(IN_USE, IN_USE)
        assert made.kept[0].keeper.is_proven


async def test_a_loss_is_forgotten_after_a_good_while_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, *TWO) as made:
        await made.wait(IN_USE, IN_USE)
        lose(made.kept[0])
        await made.wait(CardState.NOT_IN_USE, IN_USE)
        await made.wait(IN_USE, IN_USE)
        monkeypatch.setattr(accelerator, "GOOD_SECONDS", 0.0)
        made.kept[0].is_attested = False
        await made.wait(CardState.NOT_IN_USE, IN_USE)
        monkeypatch.setattr(accelerator, "GOOD_SECONDS", 60.0)
        made.kept[0].is_attested = True
        await made.wait(IN_USE, IN_USE)
        assert made.kept[0].keeper.is_proven


async def test_figures_are_the_cards_own_over_its_connections(tmp_path: Path) -> None:
    async with fleet(tmp_path, *TWO) as made:
        await made.wait(IN_USE, IN_USE)
        first = made.kept[0].keeper
        cast("Connection", first.card).record.jobs = 3
        assert first.figures()["jobs"] == 3
        lose(made.kept[0])
        await made.wait(CardState.NOT_IN_USE, IN_USE)
        assert first.figures()["jobs"] == 3
        await made.wait(IN_USE, IN_USE)
        cast("Connection", first.card).record.jobs = 4
        assert first.figures()["jobs"] == 7
        assert not made.kept[1].keeper.figures()["jobs"]
