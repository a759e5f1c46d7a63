"""A target's catalogue, whose list of volumes is anchored: what counts is what the anchor says.

Volumes come and go one at a time. A volume that comes is on the list once the anchor has it, and
its descriptor is renamed after that; one that goes is renamed first, and counts until the anchor no
longer has it. A descriptor that takes another's place lies beside it until the anchor has it. So a
crash leaves at most one volume whose descriptor's name is wrong, and the anchor
tells which way. The list also has the number of the device's opening: a directory that is put back
from before the last start doesn't fit, whatever volumes it holds.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sealane.crypto.encoding import fields
from sealane.daemon.device.anchors.anchor import CATALOGUE, volume_record
from sealane.daemon.device.anchors.device_anchors import DeviceAnchors
from sealane.daemon.device.catalogue import Catalogue, Found
from sealane.daemon.device.directory import DeviceFile
from sealane.daemon.device.openings import MISMATCH
from sealane.errors import UsageError, VerificationError

_LABEL: Final = "sealane catalogue v1"
# More than one were left by discards that failed. Brokers are told up to 1024 states: two of each.
_UNFINISHED_MAX: Final = 256
_REPLACEMENTS_MAX: Final = 128

Listing = Mapping[uuid.UUID, bytes]
"""SHA-256 of the descriptor file of each volume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What may be anchored: `to_finish` is on the list and its descriptor isn't renamed yet.

    `to_replace` is on it with its next descriptor.
    """

    openings: int
    listing: Listing
    to_finish: uuid.UUID | None
    to_replace: uuid.UUID | None
    blob: bytes


class AnchoredCatalogue:
    """`adopt` once the anchor is open; then volumes may come and go, by one caller at a time."""

    def __init__(self, catalogue: Catalogue, *, file: DeviceFile) -> None:
        self._catalogue = catalogue
        self._file = file
        self._anchors: DeviceAnchors | None = None
        self._listed: dict[uuid.UUID, bytes] = {}
        self._begun: dict[uuid.UUID, bytes] = {}
        # Not served, not on our list, and the anchor may still have them on its.
        self._unsettled: set[uuid.UUID] = set()
        self._openings = 0
        self._number = 0

    async def states(self) -> list[bytes]:
        """Return every blob that the anchor may have if nobody touched the directory."""
        return [state.blob for state in await asyncio.to_thread(self._states)]

    async def adopt(self, anchors: DeviceAnchors, *, is_believed: bool) -> None:
        """Take the list that is anchored, finish what a crash left, and anchor this opening.

        `is_believed`: take what is found. VerificationError `device.anchor.mismatch`: it is not
        what is anchored.
        """
        self._anchors = anchors
        self._begun.clear()
        self._unsettled.clear()
        kept = anchors.current(CATALOGUE)
        self._number = anchors.base(CATALOGUE)
        states = await asyncio.to_thread(self._states)
        matching = [s for s in states if is_believed or (kept is not None and s.blob == kept[1])]
        if not matching:
            raise VerificationError(
                MISMATCH,
                f"what was found on device {self._file.device_id} is not what was anchored: its "
                "list of volumes was changed or rolled back",
            )
        state = matching[0]
        if state.to_finish is not None:
            await asyncio.to_thread(self._catalogue.finish, state.to_finish)
        if state.to_replace is not None:
            await asyncio.to_thread(self._catalogue.finish_replacement, state.to_replace)
        for volume_id, _ in (await self.scan()).replacements:
            await asyncio.to_thread(self._catalogue.drop_replacement, volume_id)
        self._listed = dict(state.listing)
        self._openings = state.openings + 1
        # First here, then there: a directory that has counted less is an older one.
        await asyncio.to_thread(self._file.write, self._openings)
        await self._anchor(self._listed)

    async def scan(self) -> Found:
        """See `Catalogue.scan`."""
        return await asyncio.to_thread(self._catalogue.scan)

    async def begin(self, volume_id: uuid.UUID, content: bytes) -> None:
        """Note a volume that is about to be made; see `Catalogue.begin`."""
        await asyncio.to_thread(self._catalogue.begin, volume_id, content)
        self._begun[volume_id] = _digest(content)

    async def finish(self, volume_id: uuid.UUID) -> None:
        """Put a volume on the list, whose store is there; an error leaves it to `settle`."""
        listed = {**self._listed, volume_id: self._begun.pop(volume_id)}
        self._unsettled.add(volume_id)
        await self._anchor(listed)
        await asyncio.to_thread(self._catalogue.finish, volume_id)
        self._unsettled.remove(volume_id)
        self._listed = listed

    async def replace(self, volume_id: uuid.UUID, content: bytes) -> None:
        """Put another descriptor in the place of a listed volume's; may be tried again."""
        await asyncio.to_thread(self._catalogue.begin_replacement, volume_id, content)
        listed = {**self._listed, volume_id: _digest(content)}
        await self._anchor(listed)
        await asyncio.to_thread(self._catalogue.finish_replacement, volume_id)
        self._listed = listed

    def leave(self, volume_id: uuid.UUID) -> None:
        """Leave a volume that didn't come to be to `settle`."""
        self._begun.pop(volume_id, None)
        self._unsettled.add(volume_id)

    async def begin_removal(self, volume_id: uuid.UUID) -> None:
        """Take a volume off the list; once it is served no more, `settle` takes it off for good."""
        await asyncio.to_thread(self._catalogue.begin_removal, volume_id)
        self._unsettled.add(volume_id)
        del self._listed[volume_id]

    async def settle(self) -> Sequence[uuid.UUID]:
        """Return the volumes that have left the list for good: their stores can go."""
        if self._unsettled:
            await self._anchor(self._listed)
        settled = [*self._unsettled]
        self._unsettled.clear()
        return settled

    async def forget(self, volume_id: uuid.UUID) -> None:
        """Forget an unfinished volume, whose store is gone, and its own anchor."""
        self._begun.pop(volume_id, None)
        name = volume_record(volume_id)
        if self._open_anchors.current(name) is not None:
            await self._open_anchors.forget(name)
        await asyncio.to_thread(self._catalogue.forget, volume_id)

    @property
    def _open_anchors(self) -> DeviceAnchors:
        if self._anchors is None:
            raise UsageError("device.state", f"device {self._file.device_id} is not open")
        return self._anchors

    async def _anchor(self, listing: Listing) -> None:
        self._number += 1
        blob = _blob(self._file.device_id, self._openings, listing)
        await self._open_anchors.advance(CATALOGUE, self._number, blob, at_once=True)

    def _states(self) -> list[_State]:
        """Return what may be anchored, beginning with what stands in the files."""
        found = self._catalogue.scan()
        listing = {volume_id: _digest(content) for volume_id, content in found.volumes}
        listings: list[tuple[Listing, uuid.UUID | None, uuid.UUID | None]] = [(listing, None, None)]
        for volume_id, content in self._catalogue.unfinished(found, limit=_UNFINISHED_MAX):
            listings.append(({**listing, volume_id: _digest(content)}, volume_id, None))
        for volume_id, content in found.replacements[:_REPLACEMENTS_MAX]:
            listings.append(({**listing, volume_id: _digest(content)}, None, volume_id))
        openings = self._file.openings
        # The last opening may have been counted here and not there.
        counts = [openings, openings - 1] if openings else [openings]
        return [
            _State(
                openings=count,
                listing=each,
                to_finish=to_finish,
                to_replace=to_replace,
                blob=_blob(self._file.device_id, count, each),
            )
            for count in counts
            for each, to_finish, to_replace in listings
        ]


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _blob(device_id: uuid.UUID, openings: int, listing: Listing) -> bytes:
    """Return SHA-256 of F(label, device id (16), openings (8), id (16) ‖ digest (32) of each)."""
    volumes = sorted(volume_id.bytes + digest for volume_id, digest in listing.items())
    content = fields(_LABEL, device_id.bytes, openings.to_bytes(8, "big"), *volumes)
    return hashlib.sha256(content).digest()
