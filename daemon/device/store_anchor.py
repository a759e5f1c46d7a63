"""Connects the anchor requests of one store to its device's anchors (anchors.md)."""

import asyncio
import uuid
from typing import Final

from sealane import _native
from sealane.daemon.device.anchors.anchor import volume_record
from sealane.daemon.device.anchors.device_anchors import ANCHOR_SECONDS, DeviceAnchors
from sealane.daemon.device.openings import GIVEN_AWAY
from sealane.errors import Error, VerificationError, foreign_reason
from sealane.transport.tasks import TaskOwner

_MARGIN_SECONDS: Final = 1.0
"""The engine waits this much longer than the device's anchors, because their error says more."""


class StoreAnchor:
    """Answers one store's requests until it is closed; created on a running event loop."""

    def __init__(
        self, anchors: DeviceAnchors, volume_id: uuid.UUID, *, rarely: bool, believed: bool
    ) -> None:
        """Start from the volume's record in the device's anchors.

        `rarely`: the anchor wears out, so only checkpoints are anchored, not every flush.
        `believed`: the operator accepts the state as found where none is anchored.
        VerificationError `store.rolled_back` if the anchored state and its number don't belong
        together.
        """
        self._anchors = anchors
        self._name = volume_record(volume_id)
        latest = self._anchors.current(self._name)
        try:
            self.native = _native.StoreAnchor(
                latest=latest,
                base=self._anchors.base(self._name),
                every_commit=not rarely,
                timeout_seconds=ANCHOR_SECONDS + _MARGIN_SECONDS,
                believed=believed,
            )
        except _native.StoreRefusedError as error:
            reason, text = foreign_reason(error.args[0]), error.args[1]
            raise VerificationError(reason, f"{self._name}: {text}") from error
        self._tasks = TaskOwner()
        self._fd = self.native.fd()
        asyncio.get_running_loop().add_reader(self._fd, self._look)

    async def close(self) -> None:
        """Stop answering; the store must be closed before."""
        asyncio.get_running_loop().remove_reader(self._fd)
        await self._tasks.close()

    def _look(self) -> None:
        # Always read, or the descriptor stays readable.
        wanted = self.native.take()
        if wanted is not None:
            self._tasks.start(self._answer(*wanted), name="store-anchor")

    async def _answer(self, number: int, blob: bytes) -> None:
        try:
            await self._anchors.reach(self._name, number, blob)
        except Error as error:
            said = f"{error.reason}: {error.args[0]}"
            if isinstance(error, VerificationError) and error.reason not in GIVEN_AWAY:
                self.native.answer(number, lost=said)
            else:
                # A move says nothing about what is stored: hosts wait for the next opening.
                self.native.answer(number, unreachable=said)
        else:
            self.native.answer(number)
