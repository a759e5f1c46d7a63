"""A monotonic counter in the non-volatile memory of a TPM 2.0 (TPM 2.0 Library, Part 3 §31)."""

from typing import Any, Final

from tpm2_pytss import ESAPI, TPM2B_NV_PUBLIC, TPMS_NV_PUBLIC, TSS2_Exception
from tpm2_pytss.constants import TPM2_ALG, TPM2_NT, TPM2_RC, TPMA_NV

from sealane.daemon.node.tpm import Tpm
from sealane.errors import UnavailableError, VerificationError

_VALUE_BYTES: Final = 8
_ATTRIBUTES: Final = (
    TPMA_NV.AUTHREAD | TPMA_NV.AUTHWRITE | TPMA_NV.NO_DA | TPM2_NT.COUNTER << TPMA_NV.TPM2_NT_SHIFT
)

# Another process that increments the same counter causes a retry; this many in a row are an error.
_ATTEMPTS_MAX: Final = 16


class TpmCounter:
    """An NV index of type counter, defined at its first increment.

    A TPM starts a new counter above every value that any of its counters ever had: not even the
    TPM's owner can repeat a value by deleting and redefining the index.
    """

    def __init__(self, tpm: Tpm, *, index: int) -> None:
        self._tpm = tpm
        self._handle: Any = None
        self.index = index

    def read(self) -> int:
        """Return the current value.

        VerificationError `counter.missing` (never defined: another TPM, or one that was cleared) or
        `counter.kind` (the index is not a counter); UnavailableError `tpm.command`.
        """
        return self._tpm.call(self._read)

    def increment(self) -> int:
        """Increment and return the new value, which no other call ever returns."""
        return self._tpm.call(self._increment)

    def _read(self, esapi: ESAPI) -> int:
        handle = self._find(esapi)
        if handle is None:
            raise VerificationError(
                "counter.missing",
                f"the TPM has no counter at {self.index:#010x}: it was cleared, or is another TPM",
            )
        return _value(esapi, handle)

    def _increment(self, esapi: ESAPI) -> int:
        handle = self._find(esapi)
        if handle is None:
            public = TPMS_NV_PUBLIC(
                nvIndex=self.index,
                nameAlg=TPM2_ALG.SHA256,
                attributes=_ATTRIBUTES,
                dataSize=_VALUE_BYTES,
            )
            handle = self._handle = esapi.nv_define_space(None, TPM2B_NV_PUBLIC(public))
        if not _is_written(esapi, handle):
            esapi.nv_increment(handle)
        for _ in range(_ATTEMPTS_MAX):
            # Incrementing doesn't return the new value. Each value is left by exactly one
            # increment: if two reads show a difference of one, the increment between them was this
            # process's.
            before = _value(esapi, handle)
            esapi.nv_increment(handle)
            after = _value(esapi, handle)
            if after == before + 1:
                return after
        raise UnavailableError(
            "counter.contended", f"counter {self.index:#010x}: other processes keep incrementing it"
        )

    def _find(self, esapi: ESAPI) -> Any:
        """Return a handle of the index, or None if it is not defined."""
        if self._handle is not None:
            return self._handle
        try:
            handle = esapi.tr_from_tpmpublic(self.index)
        except TSS2_Exception as error:
            if error.error == int(TPM2_RC.HANDLE):
                return None
            raise
        found = esapi.nv_read_public(handle)[0].nvPublic
        if int(found.attributes) & ~int(TPMA_NV.WRITTEN) != int(_ATTRIBUTES):
            raise VerificationError(
                "counter.kind",
                f"NV index {self.index:#010x} has attributes {found.attributes}; allowed: "
                f"{_ATTRIBUTES}, those of a Sealane counter",
            )
        self._handle = handle
        return handle


def _is_written(esapi: ESAPI, handle: Any) -> bool:
    return bool(esapi.nv_read_public(handle)[0].nvPublic.attributes & TPMA_NV.WRITTEN)


def _value(esapi: ESAPI, handle: Any) -> int:
    """Return the value; 0 if power failed between definition and first increment."""
    if not _is_written(esapi, handle):
        return 0
    return int.from_bytes(bytes(esapi.nv_read(handle, _VALUE_BYTES)), "big")
