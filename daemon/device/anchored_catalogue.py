"""A target's catalogue whose list of volumes is anchored: the anchor decides which volumes exist.

Volumes are added and removed one at a time. A new volume is on the list once the anchor has it; its
descriptor is renamed after that. A volume to be removed is renamed first, and stays on the list
until the anchor no longer has it. A replacement descriptor lies beside the old one until the anchor
has it. So after a crash at most one volume has a descriptor with the wrong name, and the anchor
tells which state is right. The list also includes the number of the device's opening, so a
directory rolled back to before the last start doesn't match, whatever its volumes.
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
# More than one remain after failed discards. Brokers accept up to 1024 states: up to two for each.
_UNFINISHED_MAX: Final = 256
_REPLACEMENTS_MAX: Final = 128

Listing = Mapping[uuid.UUID, bytes]
"""SHA-256 of each volume's descriptor file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """A possible anchored state: `to_finish` is on the list, but its descriptor isn't renamed yet.

    `to_replace` is on the list with its next descriptor.
    """

    openings: int
    listing: Listing
    to_finish: uuid.UUID | None
    to_replace: uuid.UUID | None
    blob: bytes


class AnchoredCatalogue:
    """Call `adopt` once the anchor is open; after that volumes may change, one at a time."""

    def __init__(self, catalogue: Catalogue, *, file: DeviceFile) -> None:
        self._catalogue = catalogue
        self._file = file
        self._anchors: DeviceAnchors | None = None
        self._listed: dict[uuid.UUID, bytes] = {}
        self._begun: dict[uuid.UUID, bytes] = {}
        # Not served and not on this list, but possibly still on the anchor's.
        self._unsettled: set[uuid.UUID] = set()
        # The anchor may have this list or the one that it was last asked to keep.
        self._is_in_doubt = False
        self._openings = 0
        self._number = 0

    async def states(self) -> list[bytes]:
        """Return all blobs that the anchor may hold if the directory was not tampered with."""
        return [state.blob for state in await asyncio.to_thread(self._states)]

    async def adopt(self, anchors: DeviceAnchors, *, is_believed: bool) -> None:
        """Adopt the anchored list, complete what a crash interrupted, and anchor this opening.

        `is_believed`: accept the list as found. VerificationError `device.anchor.mismatch` if the
        list found is not the anchored one.
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
        # The file first, then the anchor: a directory with a lower count is an older one.
        await asyncio.to_thread(self._file.write, self._openings)
        await self._anchor(self._listed)

    async def scan(self) -> Found:
        """See `Catalogue.scan`."""
        return await asyncio.to_thread(self._catalogue.scan)

    def check_listed(self, volume_id: uuid.UUID, content: bytes) -> None:
        """Raise VerificationError unless this is the descriptor on the list that was adopted."""
        if self._listed.get(volume_id) != _digest(content):
            raise VerificationError(
                MISMATCH,
                f"the descriptor file of volume {volume_id} was changed since the device was "
                "opened",
            )

    async def begin(self, volume_id: uuid.UUID, content: bytes) -> None:
        """Begin to create a volume; see `Catalogue.begin`."""
        await asyncio.to_thread(self._catalogue.begin, volume_id, content)
        self._begun[volume_id] = _digest(content)

    async def finish(self, volume_id: uuid.UUID) -> None:
        """Put a volume on the list once its store exists; after an error `settle` removes it."""
        listed = {**self._listed, volume_id: self._begun.pop(volume_id)}
        self._unsettled.add(volume_id)
        await self._anchor(listed)
        await asyncio.to_thread(self._catalogue.finish, volume_id)
        self._unsettled.remove(volume_id)
        self._listed = listed

    async def replace(self, volume_id: uuid.UUID, content: bytes) -> None:
        """Replace the descriptor of a listed volume; may be repeated."""
        await asyncio.to_thread(self._catalogue.begin_replacement, volume_id, content)
        listed = {**self._listed, volume_id: _digest(content)}
        await self._anchor(listed)
        await asyncio.to_thread(self._catalogue.finish_replacement, volume_id)
        self._listed = listed

    def leave(self, volume_id: uuid.UUID) -> None:
        """Leave it to `settle` to remove a volume whose creation failed."""
        self._begun.pop(volume_id, None)
        self._unsettled.add(volume_id)

    async def begin_removal(self, volume_id: uuid.UUID) -> None:
        """Take a volume off the list; later `settle` takes it off the anchored one."""
        await asyncio.to_thread(self._catalogue.begin_removal, volume_id)
        self._unsettled.add(volume_id)
        del self._listed[volume_id]

    async def settle(self) -> Sequence[uuid.UUID]:
        """Return the volumes that are off the anchored list: their stores can be deleted.

        Each is returned again until it is forgotten.
        """
        if self._unsettled or self._is_in_doubt:
            await self._anchor(self._listed)
        return [*self._unsettled]

    async def forget(self, volume_id: uuid.UUID) -> None:
        """Forget an unfinished volume whose store was deleted, and its own anchor record."""
        self._begun.pop(volume_id, None)
        name = volume_record(volume_id)
        if self._open_anchors.current(name) is not None:
            await self._open_anchors.forget(name)
        await asyncio.to_thread(self._catalogue.forget, volume_id)
        self._unsettled.discard(volume_id)

    @property
    def _open_anchors(self) -> DeviceAnchors:
        if self._anchors is None:
            raise UsageError("device.state", f"device {self._file.device_id} is not open")
        return self._anchors

    async def _anchor(self, listing: Listing) -> None:
        self._number += 1
        blob = _blob(self._file.device_id, self._openings, listing)
        self._is_in_doubt = True
        await self._open_anchors.advance(CATALOGUE, self._number, blob, at_once=True)
        self._is_in_doubt = False

    def _states(self) -> list[_State]:
        """Return the states that may be anchored, the one in the files first."""
        found = self._catalogue.scan()
        listing = {volume_id: _digest(content) for volume_id, content in found.volumes}
        listings: list[tuple[Listing, uuid.UUID | None, uuid.UUID | None]] = [(listing, None, None)]
        for volume_id, content in self._catalogue.unfinished(found, limit=_UNFINISHED_MAX):
            listings.append(({**listing, volume_id: _digest(content)}, volume_id, None))
        for volume_id, content in found.replacements[:_REPLACEMENTS_MAX]:
            listings.append(({**listing, volume_id: _digest(content)}, None, volume_id))
        openings = self._file.openings
        # The last opening may have been counted in the file but not in the anchor.
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
