"""The `tpm2` anchor: a record on disk that only this TPM can vouch for, current by an NV counter.

`count` is the next value of the counter when a record is written, and the counter's value when it
counts. The order is always: record durable, then increment. A record ahead by one is therefore one
whose increment a crash prevented; nobody was told of it, and it may be accepted or not.

That freedom must end before anything new is told: somebody could keep such a record and bring it
when the counter gets there by another one. So opening writes what was found once more, under the
next count, and increments past whatever was kept. From then on each count has one record.
decisions/0022-anchors.md has the argument.
"""

from pathlib import Path
from typing import Final
from uuid import UUID

from tpm2_pytss import ESAPI, TPM2B_PUBLIC, TPM2B_SENSITIVE_CREATE
from tpm2_pytss.constants import ESYS_TR, TPM2_ALG, TPMA_OBJECT

from sealane.crypto.encoding import fields
from sealane.crypto.exchange import wipe
from sealane.daemon.anchors.anchor import (
    Anchored,
    Record,
    RecordFile,
    closed_on_failure,
    failed,
    missing,
)
from sealane.daemon.anchors.lock import OwnerLock
from sealane.daemon.anchors.tpm_counter import TpmCounter
from sealane.daemon.tpm import Tpm
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


class TpmAnchor:
    """Use `initialise` once in the life of a device on this machine, then `open`."""

    def __init__(self, tpm: Tpm, path: Path, *, device_id: UUID, index: int) -> None:
        self._lock = OwnerLock(path.with_name(path.name + ".lock"))
        self._device_id = device_id
        self._counter = TpmCounter(tpm, index=index)
        self._record: Record | None = None
        try:
            self._key = tpm.call(lambda esapi: _derive_key(esapi, device_id, index))
        except BaseException:
            self._lock.release()
            raise
        self._file = RecordFile(path, device_id=device_id, key=self._key)

    @classmethod
    def initialise(
        cls, tpm: Tpm, path: Path, *, device_id: UUID, index: int, state: Anchored
    ) -> "TpmAnchor":
        """Anchor a new device's first state; UsageError `anchor.exists` if there is a record.

        The caller has seen to it that the device may be initialised here.
        """
        anchor = cls(tpm, path, device_id=device_id, index=index)
        with closed_on_failure(anchor):
            if path.exists():
                raise UsageError("anchor.exists", f"{path}: device {device_id} has an anchor")
            anchor._commit(state, count=anchor._counter.increment() + 1)
        return anchor

    @classmethod
    def open(cls, tpm: Tpm, path: Path, *, device_id: UUID, index: int) -> "TpmAnchor":
        """Find the one current state.

        VerificationError `anchor.missing`; `anchor.record` (changed, or of another or a cleared
        TPM); `counter.missing`, `counter.kind`; `anchor.rolled_back` (an older record);
        `anchor.counter` (a counter that never counted this record).
        """
        anchor = cls(tpm, path, device_id=device_id, index=index)
        with closed_on_failure(anchor):
            anchor._recover()
        return anchor

    @property
    def state(self) -> Anchored:
        """What is anchored."""
        return self._current().state

    def advance(self, state: Anchored) -> None:
        """Write the record, then increment."""
        current = self._current()
        current.state.check_successor(state)
        self._commit(state, count=current.count + 1)

    def close(self) -> None:
        """Wipe the key and let the next owner have it; the TPM's connection is the caller's."""
        wipe(self._key)
        self._lock.release()

    def _recover(self) -> None:
        record = self._file.read()
        if record is None:
            raise missing(self._device_id)
        count = self._counter.read()
        if record.count < count:
            raise VerificationError(
                "anchor.rolled_back",
                f"the record of device {self._device_id} is the {record.count}th, the counter is "
                f"at {count}: an older record was put in place",
            )
        if record.count > count + 1:
            raise VerificationError(
                "anchor.counter",
                f"the record of device {self._device_id} is the {record.count}th, the counter is "
                f"at {count}: it is not the counter of this record",
            )
        if record.count == count + 1:
            self._increment_to(record.count)
        self._commit(record.state, count=record.count + 1)

    def _commit(self, state: Anchored, *, count: int) -> None:
        # Until the counter is known to have got there, the anchor is in neither state.
        self._record = None
        record = Record(count=count, state=state)
        self._file.write(record)
        self._increment_to(count)
        self._record = record

    def _increment_to(self, count: int) -> None:
        found = self._counter.increment()
        if found != count:
            raise VerificationError(
                "anchor.counter",
                f"the counter of device {self._device_id} went to {found} instead of {count}: "
                "somebody else increments it",
            )

    def _current(self) -> Record:
        if self._record is None:
            raise failed(self._device_id)
        return self._record


def _derive_key(esapi: ESAPI, device_id: UUID, index: int) -> bytearray:
    """Return the key of one device's records, from a primary key that no other TPM can make.

    It goes when the TPM is cleared: the seed it is made from does.
    """
    template = TPM2B_PUBLIC.parse("hmac:sha256", objectAttributes=_KEY_ATTRIBUTES)
    handle, *_ = esapi.create_primary(TPM2B_SENSITIVE_CREATE(), template, ESYS_TR.OWNER)
    try:
        what = fields(_KEY_LABEL, device_id.bytes, index.to_bytes(4, "big"))
        return bytearray(bytes(esapi.hmac(handle, what, TPM2_ALG.SHA256)))
    finally:
        esapi.flush_context(handle)
