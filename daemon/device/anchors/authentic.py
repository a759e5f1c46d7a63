"""Anchor records that only the device's owner can have made.

Brokers accept changes from anyone with the TLS key of the owner's leaf, so a thief of that key
could talk to them. The device's secret is separate from that key: the broker seals it to the
owner's attested KEM key. A record is accepted only with a MAC under that secret. So a thief can
make no record, and can restore an older one only under its own number, which is taken.
"""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

from sealane.crypto.encoding import fields
from sealane.crypto.exchange import wipe
from sealane.crypto.keys import derive_anchor_key
from sealane.daemon.device.anchors.anchor import Anchor, Anchored, Change
from sealane.errors import VerificationError
from sealane.protocol.kinds import AnchorKind

FORGED: Final = "anchor.forged"
_LABEL = "sealane anchor record v1"


class AuthenticAnchor:
    """An anchor whose records carry the device's MAC, which is checked when it is opened."""

    def __init__(
        self, anchor: Anchor, *, device_id: UUID, kind: AnchorKind, secret: bytes | bytearray
    ) -> None:
        """Check the anchored records; `secret` (32 bytes) is the device's; the caller wipes it.

        VerificationError `anchor.forged`: a record isn't this device's, doesn't belong to this
        name, or was not made with the secret. The caller then closes `anchor`.
        """
        self._anchor = anchor
        self._device_id = device_id
        self._key = derive_anchor_key(secret, device_id=device_id, kind=kind)
        try:
            for name, record in anchor.records.items():
                self._check(name, record)
        except BaseException:
            wipe(self._key)
            raise

    @property
    def records(self) -> Mapping[str, Anchored]:
        """See `Anchor.records`; all were checked at the opening, or made here since then."""
        return self._anchor.records

    @property
    def floor(self) -> int:
        """See `Anchor.floor`."""
        return self._anchor.floor

    async def advance(self, changes: Sequence[Change]) -> None:
        """See `Anchor.advance`."""
        await self._anchor.advance([self._sealed(change) for change in changes])

    async def close(self) -> None:
        """Wipe the key and release the anchor."""
        wipe(self._key)
        await self._anchor.close()

    def _sealed(self, change: Change) -> Change:
        if change.record is None:
            return change
        mac = self._mac(change.name, change.record)
        return replace(change, record=replace(change.record, mac=mac))

    def _check(self, name: str, record: Anchored) -> None:
        if not hmac.compare_digest(record.mac, self._mac(name, record)):
            raise VerificationError(
                FORGED,
                f"record {name} of device {self._device_id} was not made by the device's owner: "
                "someone else wrote it to the anchor",
            )

    def _mac(self, name: str, record: Anchored) -> bytes:
        number = record.number.to_bytes(8, "big")
        content = fields(_LABEL, self._device_id.bytes, name.encode(), number, record.blob)
        return hmac.digest(bytes(self._key), content, "sha256")
