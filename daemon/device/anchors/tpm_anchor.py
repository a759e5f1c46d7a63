"""The `tpm2` anchor: a file that only this TPM can authenticate, kept current by an NV counter.

The file holds all records of the device; one counter serves all volumes. "Record" below means the
whole file. `count` is the counter's next value when the record is written, and the counter's value
once it is valid. The order is always: make the record durable, then increment. A record that is
ahead by one is therefore one whose increment was prevented by a crash. No one was told of it, so it
may be accepted or not.

That freedom must end before anything new is acknowledged: an attacker could keep such a record and
present it when another increment brings the counter there. So opening writes the found record
again, under the next count, and increments past any copy that was kept. From then on each count has
one record. decisions/0022-anchors.md has the argument.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from uuid import UUID

from tpm2_pytss import ESAPI, TPM2B_PUBLIC, TPM2B_SENSITIVE_CREATE
from tpm2_pytss.constants import ESYS_TR, TPM2_ALG, TPMA_OBJECT

from sealane.crypto.encoding import fields
from sealane.crypto.exchange import wipe
from sealane.daemon.device.anchors.anchor import (
    Anchored,
    Change,
    changed,
    failed,
    missing,
)
from sealane.daemon.device.anchors.lock import OwnerLock
from sealane.daemon.device.anchors.record_file import Content, RecordFile, RecordKeeper
from sealane.daemon.device.anchors.tpm_counter import TpmCounter
from sealane.daemon.node.tpm import Tpm
from sealane.errors import UsageError, VerificationError

_KEY_LABEL: Final = "sealane anchor key v1"
_KEY_ATTRIBUTES: Final = (
    TPMA_OBJECT.FIXEDTPM
    | TPMA_OBJECT.FIXEDPARENT
    | TPMA_OBJECT.SENSITIVEDATAORIGIN
    | TPMA_OBJECT.USERWITHAUTH
    | TPMA_OBJECT.NODA
    | TPMA_OBJECT.SIGN_ENCRYPT
)


class TpmAnchor(RecordKeeper):
    """Use `initialise` once in the life of a device on this machine, then `open`; both block."""

    def __init__(self, tpm: Tpm, path: Path, *, device_id: UUID, index: int) -> None:
        self._lock = OwnerLock(path.with_name(path.name + ".lock"))
        self._device_id = device_id
        self._counter = TpmCounter(tpm, index=index)
        self._content: Content | None = None
        try:
            self._key = tpm.call(lambda esapi: _derive_key(esapi, device_id, index))
        except BaseException:
            self._lock.release()
            raise
        self._file = RecordFile(path, device_id=device_id, key=self._key)

    @classmethod
    def initialise(cls, tpm: Tpm, path: Path, *, device_id: UUID, index: int) -> "TpmAnchor":
        """Create it without records; UsageError `anchor.exists` if there is a file.

        The caller has made sure that the device may be initialised here.
        """
        anchor = cls(tpm, path, device_id=device_id, index=index)
        with contextlib.ExitStack() as stack:
            stack.callback(anchor.release)
            if path.exists():
                raise UsageError(
                    "anchor.exists", f"{path}: device {device_id} already has an anchor"
                )
            anchor._commit({}, count=anchor._counter.increment() + 1, floor=0)
            stack.pop_all()
        return anchor

    @classmethod
    def open(cls, tpm: Tpm, path: Path, *, device_id: UUID, index: int) -> "TpmAnchor":
        """Find the current content.

        VerificationError `anchor.missing`; `anchor.record` (changed, or from another or a cleared
        TPM); `counter.missing`, `counter.kind`; `anchor.rolled_back` (an older record);
        `anchor.counter` (a counter that never reached this record).
        """
        anchor = cls(tpm, path, device_id=device_id, index=index)
        with contextlib.ExitStack() as stack:
            stack.callback(anchor.release)
            anchor._recover()
            stack.pop_all()
        return anchor

    @property
    def records(self) -> Mapping[str, Anchored]:
        """See `Anchor.records`."""
        return self._current().records

    @property
    def floor(self) -> int:
        """See `Anchor.floor`."""
        return self._current().floor

    async def advance(self, changes: Sequence[Change]) -> None:
        """Write the file, then increment the counter."""
        current = self._current()
        records, floor = changed(current.records, changes, floor=current.floor)
        await asyncio.to_thread(self._commit, records, count=current.count + 1, floor=floor)

    async def close(self) -> None:
        """Wipe the key and release the anchor; the caller closes the TPM connection."""
        self.release()

    def release(self) -> None:
        """Wipe the key and release the anchor; the caller closes the TPM connection."""
        wipe(self._key)
        self._lock.release()

    def _recover(self) -> None:
        content = self._file.read()
        if content is None:
            raise missing(self._device_id)
        count = self._counter.read()
        if content.count < count:
            raise VerificationError(
                "anchor.rolled_back",
                f"the record of device {self._device_id} has count {content.count}, but the TPM "
                f"counter is at {count}: the record was replaced by an older one",
            )
        if content.count > count + 1:
            raise VerificationError(
                "anchor.counter",
                f"the record of device {self._device_id} has count {content.count}, but the TPM "
                f"counter is at {count}: it is not this record's counter",
            )
        if content.count == count + 1:
            self._increment_to(content.count)
        self._commit(content.records, count=content.count + 1, floor=content.floor)

    def _commit(self, records: Mapping[str, Anchored], *, count: int, floor: int) -> None:
        # Until the counter is known to have reached it, the anchor's state is unknown.
        content = Content(count=count, records=records, floor=floor)
        self._replace(content)
        self._increment_to(count)
        self._content = content

    def _increment_to(self, count: int) -> None:
        found = self._counter.increment()
        if found != count:
            raise VerificationError(
                "anchor.counter",
                f"the counter of device {self._device_id} went to {found} instead of {count}: "
                "another process increments it",
            )

    def _current(self) -> Content:
        if self._content is None:
            raise failed(self._device_id)
        return self._content


def _derive_key(esapi: ESAPI, device_id: UUID, index: int) -> bytearray:
    """Return the key of a device's records, from a primary key that only this TPM can derive.

    Clearing the TPM destroys it, because that replaces the seed.
    """
    template = TPM2B_PUBLIC.parse("hmac:sha256", objectAttributes=_KEY_ATTRIBUTES)
    handle, *_ = esapi.create_primary(TPM2B_SENSITIVE_CREATE(), template, ESYS_TR.OWNER)
    try:
        what = fields(_KEY_LABEL, device_id.bytes, index.to_bytes(4, "big"))
        return bytearray(bytes(esapi.hmac(handle, what, TPM2_ALG.SHA256)))
    finally:
        esapi.flush_context(handle)
