"""Records with their owner's MAC: a thief's records in an anchor are refused."""

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from device.memory_anchor import MemoryAnchor
from sealane.daemon.device.anchors.anchor import CATALOGUE, Anchored, Change, volume_record
from sealane.daemon.device.anchors.authentic import AuthenticAnchor
from sealane.daemon.device.anchors.device_anchors import DeviceAnchors
from sealane.errors import VerificationError
from sealane.protocol.kinds import AnchorKind

DEVICE = UUID(int=7)
SECRET = bytes(range(32))
A, B = (volume_record(UUID(int=n)) for n in (1, 2))


def opened(
    anchor: MemoryAnchor,
    *,
    device_id: UUID = DEVICE,
    kind: AnchorKind = "broker",
    secret: bytes = SECRET,
) -> AuthenticAnchor:
    return AuthenticAnchor(anchor, device_id=device_id, kind=kind, secret=secret)


def change(name: str, expected: int, number: int, blob: bytes) -> Change:
    return Change(name=name, expected=expected, record=Anchored(number=number, blob=blob))


@pytest.fixture
async def anchor() -> MemoryAnchor:
    """Return an anchor with a record for each of two volumes."""
    anchor = MemoryAnchor()
    changes = [change(A, 0, 5, b"a"), change(B, 0, 6, b"b"), change(CATALOGUE, 0, 1, b"c")]
    await opened(anchor).advance(changes)
    return anchor


async def test_what_the_owner_made_is_believed(anchor: MemoryAnchor) -> None:
    found = opened(anchor)
    assert {name: (r.number, r.blob) for name, r in found.records.items()} == {
        A: (5, b"a"),
        B: (6, b"b"),
        CATALOGUE: (1, b"c"),
    }
    await found.advance([change(A, 5, 6, b"next")])
    assert opened(anchor).records[A].blob == b"next"


@pytest.mark.parametrize("what", ["number", "blob", "name", "mac", "none", "moved"])
async def test_a_record_that_its_owner_did_not_make_is_refused(
    anchor: MemoryAnchor, what: str
) -> None:
    records = dict(anchor.records)
    mine = records[A]
    if what == "number":
        records[A] = replace(mine, number=6)
    elif what == "blob":
        records[A] = replace(mine, blob=b"old")
    elif what == "name":
        records[A] = records[B]
    elif what == "mac":
        records[A] = replace(mine, mac=bytes(32))
    elif what == "none":
        records[A] = replace(mine, mac=b"")
    else:
        records[volume_record(UUID(int=3))] = records.pop(A)
    anchor.records = records
    with pytest.raises(VerificationError) as caught:
        opened(anchor)
    assert caught.value.reason == "anchor.forged"


@pytest.mark.parametrize(
    "other",
    [{"device_id": UUID(int=8)}, {"kind": "file"}, {"secret": bytes(32)}],
    ids=["device", "kind", "secret"],
)
async def test_records_of_another_device_kind_or_secret_are_refused(
    anchor: MemoryAnchor, other: dict[str, object]
) -> None:
    with pytest.raises(VerificationError) as caught:
        opened(anchor, **other)  # type: ignore[arg-type]
    assert caught.value.reason == "anchor.forged"


async def test_a_device_begins_new_records_above_all_that_are_gone_or_about_to_go(
    anchor: MemoryAnchor,
) -> None:
    anchors = DeviceAnchors(opened(anchor), timeout_seconds=5)
    assert [anchors.base(name) for name in (A, B, CATALOGUE)] == [5, 6, 1]
    new = volume_record(UUID(int=4))
    assert anchors.base(new) == 0
    await anchors.forget(A)
    assert [anchors.base(name) for name in (A, new)] == [5, 5]
    held = await anchor.hold(anchors, B, 7)
    going = asyncio.ensure_future(anchors.forget(B))
    await asyncio.sleep(0)
    # Its last state is in flight when it is closed.
    assert anchors.base(new) == 7
    anchor.open.set()
    await held
    await going
    assert anchors.base(new) == 7
    await anchors.advance(new, 8, b"n")
    await anchors.close()
