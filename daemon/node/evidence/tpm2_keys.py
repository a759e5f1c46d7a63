"""The keys of one TPM: endorsement, attestation, storage, and KEM keys of this start.

A TPM has room for three objects. So each key is kept as a saved context, which the TPM has
encrypted and which is valid until its next reset; `loaded` loads it for one command. All methods
except `TpmKemKey.exchange` run on the connection's thread.
"""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal

from cryptography.hazmat.primitives.asymmetric import ec
from tpm2_pytss import (
    ESAPI,
    TPM2B_ECC_POINT,
    TPM2B_ENCRYPTED_SECRET,
    TPM2B_ID_OBJECT,
    TPM2B_PUBLIC,
    TPM2B_SENSITIVE_CREATE,
    TPML_PCR_SELECTION,
    TPMS_ECC_POINT,
    TPMS_SENSITIVE_CREATE,
    TPMT_SIG_SCHEME,
    TPMT_SYM_DEF,
)
from tpm2_pytss.constants import ESYS_TR, TPM2_ALG, TPM2_SE, TPMA_OBJECT, TPMA_SESSION
from tpm2_pytss.utils import NVReadEK, create_ek_template

from sealane.crypto.kem import P256
from sealane.daemon.node.tpm import Tpm
from sealane.errors import UnavailableError

PCR_BYTES: Final = 32
EK_TEMPLATES: Final = {"ecc": "EK-ECC256", "rsa": "EK-RSA2048"}

_PCRS_PER_READ_MAX: Final = 8  # TPML_DIGEST
# Retries if a register is extended between quote and read.
_QUOTE_ATTEMPTS_MAX: Final = 4
_BORN_HERE: Final = (
    TPMA_OBJECT.FIXEDTPM
    | TPMA_OBJECT.FIXEDPARENT
    | TPMA_OBJECT.SENSITIVEDATAORIGIN
    | TPMA_OBJECT.USERWITHAUTH
    | TPMA_OBJECT.NODA
)
_AK_ATTRIBUTES: Final = _BORN_HERE | TPMA_OBJECT.RESTRICTED | TPMA_OBJECT.SIGN_ENCRYPT
_STORAGE_ATTRIBUTES: Final = _BORN_HERE | TPMA_OBJECT.RESTRICTED | TPMA_OBJECT.DECRYPT
_KEM_ATTRIBUTES: Final = _BORN_HERE | TPMA_OBJECT.DECRYPT


class TpmKemKey:
    """A P-256 key that this TPM created; it derives shared secrets and can't be extracted."""

    algorithm = P256

    def __init__(
        self, tpm: Tpm, keys: "TpmKeys", *, context: Any, auth: bytes, public: Any
    ) -> None:
        self._tpm = tpm
        self._keys = keys
        self.context = context
        self.auth = auth
        self.encoded_public = bytes(public.publicArea.marshal())
        point = public.publicArea.unique.ecc
        self.public_key = b"\4" + _coordinate(point.x) + _coordinate(point.y)

    def exchange(self, peer_public_key: bytes) -> bytearray:
        """Run TPM2_ECDH_ZGen; ValueError if the peer's point is not on the curve. Blocking."""
        # The TPM checks this, too; checked here to distinguish it from a failing TPM.
        ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), peer_public_key)
        return self._tpm.call(lambda esapi: self._keys.agree(esapi, self, peer_public_key))


class TpmKeys:
    """Opened on a connection; `endorsement_key` and `attestation_key` are TPMT_PUBLIC."""

    def __init__(self, tpm: Tpm, *, ek_kind: Literal["ecc", "rsa"] = "ecc") -> None:
        self._tpm = tpm
        tpm.call(lambda esapi: self._open(esapi, EK_TEMPLATES[ek_kind]))

    def _open(self, esapi: ESAPI, ek_template: str) -> None:
        certificate, template = create_ek_template(ek_template, NVReadEK(esapi))
        self.ek_certificate = _unpadded(bytes(certificate)) if certificate is not None else b""
        self._ek, self.endorsement_key = _primary(esapi, ESYS_TR.ENDORSEMENT, template)
        ak = TPM2B_PUBLIC.parse("ecc256:ecdsa-sha256:null", objectAttributes=_AK_ATTRIBUTES)
        self._ak, self.attestation_key = _primary(esapi, ESYS_TR.ENDORSEMENT, ak)
        storage = TPM2B_PUBLIC.parse("ecc256:aes128cfb", objectAttributes=_STORAGE_ATTRIBUTES)
        self._storage, _ = _primary(esapi, ESYS_TR.OWNER, storage)

    def create_kem_key(self, esapi: ESAPI) -> TpmKemKey:
        """Create a new key; no other user of the TPM has its authorisation value."""
        template = TPM2B_PUBLIC.parse("ecc256:null:null", objectAttributes=_KEM_ATTRIBUTES)
        auth = secrets.token_bytes(32)
        sensitive = TPM2B_SENSITIVE_CREATE(TPMS_SENSITIVE_CREATE(userAuth=auth))
        with self._loaded(esapi, self._storage) as parent:
            with self._session(esapi, parent, TPMA_SESSION.DECRYPT) as session:
                private, public, *_ = esapi.create(parent, sensitive, template, session1=session)
            handle = esapi.load(parent, private, public)
            context = _saved(esapi, handle)
        return TpmKemKey(self._tpm, self, context=context, auth=auth, public=public)

    def activate(self, esapi: ESAPI, activation: bytes) -> bytes:
        """Open a credential made for this EK and AK (TPM2_ActivateCredential)."""
        blob, rest = TPM2B_ID_OBJECT.unmarshal(activation)
        secret, _ = TPM2B_ENCRYPTED_SECRET.unmarshal(activation[rest:])
        with ExitStack() as stack:
            ak = stack.enter_context(self._loaded(esapi, self._ak))
            ek = stack.enter_context(self._loaded(esapi, self._ek))
            # The EK's policy: its users must be authorised for the endorsement hierarchy.
            policy = stack.enter_context(_started(esapi, TPM2_SE.POLICY))
            esapi.policy_secret(ESYS_TR.ENDORSEMENT, policy, b"", b"", b"", 0)
            opened = esapi.activate_credential(ak, ek, blob, secret, session2=policy)
        return bytes(opened)

    def quote(
        self, esapi: ESAPI, indices: tuple[int, ...], qualifying_data: bytes
    ) -> tuple[bytes, bytes, bytes]:
        """Return TPMS_ATTEST, TPMT_SIGNATURE and the quoted values, lowest index first."""
        selection = TPML_PCR_SELECTION.parse("sha256:" + ",".join(map(str, indices)))
        scheme = TPMT_SIG_SCHEME(scheme=TPM2_ALG.NULL)
        with self._loaded(esapi, self._ak) as ak:
            for _ in range(_QUOTE_ATTEMPTS_MAX):
                before = _pcr_values(esapi, indices)
                quote, signature = esapi.quote(ak, selection, qualifying_data, scheme)
                if before == _pcr_values(esapi, indices):
                    return bytes(quote), bytes(signature.marshal()), before
        raise UnavailableError(
            "evidence.pcrs.changing", "the PCRs change faster than the TPM can quote them"
        )

    def certify(self, esapi: ESAPI, key: TpmKemKey, qualifying_data: bytes) -> tuple[bytes, bytes]:
        """Return TPMS_ATTEST and TPMT_SIGNATURE of the AK over a KEM key (TPM2_Certify)."""
        scheme = TPMT_SIG_SCHEME(scheme=TPM2_ALG.NULL)
        with self._loaded(esapi, self._ak) as ak, self._loaded(esapi, key.context, key.auth) as kem:
            certification, signature = esapi.certify(kem, ak, qualifying_data, scheme)
        return bytes(certification), bytes(signature.marshal())

    def agree(self, esapi: ESAPI, key: TpmKemKey, peer_public_key: bytes) -> bytearray:
        """Return the Diffie-Hellman secret's x coordinate, sent encrypted by the TPM."""
        peer = TPM2B_ECC_POINT(TPMS_ECC_POINT(x=peer_public_key[1:33], y=peer_public_key[33:65]))
        with ExitStack() as stack:
            storage = stack.enter_context(self._loaded(esapi, self._storage))
            kem = stack.enter_context(self._loaded(esapi, key.context, key.auth))
            session = stack.enter_context(self._session(esapi, storage, TPMA_SESSION.ENCRYPT))
            point = esapi.ecdh_zgen(kem, peer, session1=session)
        return bytearray(_coordinate(point.point.x))

    @contextmanager
    def _loaded(self, esapi: ESAPI, context: Any, auth: bytes = b"") -> Iterator[Any]:
        handle = esapi.context_load(context)
        try:
            if auth:
                esapi.tr_set_auth(handle, auth)
            yield handle
        finally:
            esapi.flush_context(handle)

    @contextmanager
    def _session(self, esapi: ESAPI, salt_key: Any, direction: Any) -> Iterator[Any]:
        """Open a session that encrypts the first parameter of a command or its response."""
        with _started(esapi, TPM2_SE.HMAC, salt_key=salt_key) as session:
            esapi.trsess_set_attributes(session, TPMA_SESSION.CONTINUESESSION | direction)
            yield session


@contextmanager
def _started(esapi: ESAPI, kind: Any, *, salt_key: Any = ESYS_TR.NONE) -> Iterator[Any]:
    symmetric = TPMT_SYM_DEF.parse("aes128cfb")
    session = esapi.start_auth_session(salt_key, ESYS_TR.NONE, kind, symmetric, TPM2_ALG.SHA256)
    try:
        yield session
    finally:
        esapi.flush_context(session)


def _primary(esapi: ESAPI, hierarchy: Any, template: TPM2B_PUBLIC) -> tuple[Any, bytes]:
    """Create a primary key, the same at every start; return its saved context and TPMT_PUBLIC."""
    handle, public, *_ = esapi.create_primary(TPM2B_SENSITIVE_CREATE(), template, hierarchy)
    return _saved(esapi, handle), bytes(public.publicArea.marshal())


def _saved(esapi: ESAPI, handle: Any) -> Any:
    try:
        return esapi.context_save(handle)
    finally:
        esapi.flush_context(handle)


def _unpadded(certificate: bytes) -> bytes:
    """Remove what the TPM's maker left after the certificate in its NV index.

    A certificate is a DER sequence with a two-byte length (30 82 …); anything else is returned
    unchanged.
    """
    if certificate[:2] != b"\x30\x82":
        return certificate
    return certificate[: 4 + int.from_bytes(certificate[2:4], "big")]


def _pcr_values(esapi: ESAPI, indices: tuple[int, ...]) -> bytes:
    values = []
    for start in range(0, len(indices), _PCRS_PER_READ_MAX):
        part = ",".join(map(str, indices[start : start + _PCRS_PER_READ_MAX]))
        _, _, digests = esapi.pcr_read(TPML_PCR_SELECTION.parse(f"sha256:{part}"))
        values += [bytes(digest) for digest in digests]
    return b"".join(values)


def _coordinate(value: Any) -> bytes:
    return bytes(value).rjust(PCR_BYTES, b"\0")
