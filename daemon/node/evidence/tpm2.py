"""The `tpm2` driver: quotes and certified KEM keys from the machine's TPM (or its hypervisor's)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tpm2_pytss import ESAPI

from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.evidence.cmw import Item
from sealane.crypto.evidence.tpm2 import (
    MEDIA_TYPE,
    TPM2,
    Evidence,
    Introduction,
    activation_proof,
    hardware_id,
)
from sealane.crypto.evidence.tpm2_event_log import LOG_BYTES_MAX
from sealane.crypto.kem import KemKey
from sealane.daemon.node.evidence.tpm2_keys import TpmKemKey, TpmKeys
from sealane.daemon.node.tpm import Tpm
from sealane.errors import UnavailableError, UsageError


class Tpm2Driver:
    """Driver for one TPM, which the caller closes."""

    evidence_type = TPM2
    media_type = MEDIA_TYPE
    is_development = False

    def __init__(
        self,
        tpm: Tpm,
        *,
        pcrs: Sequence[int],
        event_log: Path | None = None,
        ek_kind: Literal["ecc", "rsa"] = "ecc",
        ek_certificates: Sequence[bytes] = (),
    ) -> None:
        """Create the keys; blocking. UnavailableError `tpm.command`.

        `pcrs` are quoted from the SHA-256 bank. `ek_certificates` (DER, the EK's own first) replace
        the one that the TPM may hold in its memory.
        """
        self._tpm = tpm
        self._pcrs = tuple(sorted(set(pcrs)))
        self._event_log = event_log
        self._keys = TpmKeys(tpm, ek_kind=ek_kind)
        self.hardware_id = hardware_id(self._keys.endorsement_key)
        self._kem_keys: dict[bytes, TpmKemKey] = {}
        own = [self._keys.ek_certificate] if self._keys.ek_certificate else []
        self._introduction = Introduction(
            endorsement_key=self._keys.endorsement_key,
            attestation_key=self._keys.attestation_key,
            certificates=tuple(ek_certificates or own),
        ).encode()

    async def create_kem_key(self) -> KemKey:
        """Create a key in the TPM."""
        key = await self._tpm.run(self._keys.create_kem_key)
        self._kem_keys[key.public_key] = key
        return key

    async def introduction(self) -> bytes:
        """Return EK, its certificates, and AK."""
        return self._introduction

    async def endorsements(self) -> Item | None:
        """Return nothing: the EK's certificates are in the introduction."""
        return None

    async def collect(self, runtime_data: RuntimeData, *, activation: bytes) -> bytes:
        """Open the credential, quote, and certify the KEM key that the runtime data name."""
        key = self._kem_keys.get(runtime_data.kem_public_key)
        if key is None:
            raise UsageError(
                "evidence.key.foreign",
                "the runtime data names a KEM key that this TPM did not create",
            )
        data = runtime_data.binding().qualifying_data
        return await self._tpm.run(lambda esapi: self._collect(esapi, key, data, activation))

    def close(self) -> None:
        """Release the TPM; the KEM keys are lost with the connection."""
        self._tpm.close()

    def _collect(self, esapi: ESAPI, key: TpmKemKey, data: bytes, activation: bytes) -> bytes:
        secret = self._keys.activate(esapi, activation)
        quote, quote_signature, values = self._keys.quote(esapi, self._pcrs, data)
        certification, certification_signature = self._keys.certify(esapi, key, data)
        return Evidence(
            proof=activation_proof(secret, data),
            quote=quote,
            quote_signature=quote_signature,
            pcr_values=values,
            event_log=self._read_event_log(),
            kem_public=key.encoded_public,
            certification=certification,
            certification_signature=certification_signature,
        ).encode()

    def _read_event_log(self) -> bytes:
        if self._event_log is None:
            return b""
        try:
            with self._event_log.open("rb") as file:
                content = file.read(LOG_BYTES_MAX + 1)
        except OSError as error:
            raise UnavailableError(
                "evidence.event_log", f"event log {self._event_log}: {error.strerror}"
            ) from error
        if len(content) > LOG_BYTES_MAX:
            raise UnavailableError(
                "evidence.event_log",
                f"event log {self._event_log}: more than {LOG_BYTES_MAX} bytes, the most that "
                "verifiers accept",
            )
        return content
