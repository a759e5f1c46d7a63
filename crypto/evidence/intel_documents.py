"""Intel's documents about platforms: TCB information and QE identity, signed JSON.

Intel SGX and TDX Provisioning Certification Service, API version 4. A bundle is the JSON object in
which dcap-qvl and Intel's quote verification library keep all documents for one FMSPC.
"""

import datetime as dt
import json
import re
from dataclasses import dataclass
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from sealane.crypto.evidence.chain import (
    RevocationLists,
    common_name,
    parse_certificates,
    verify_chain,
)
from sealane.crypto.evidence.collateral import SignedDocument, TcbInfo
from sealane.errors import VerificationError
from sealane.reasons import ReasonId

_KIND: Final = "collateral"
_SIGNER: Final = "Intel SGX TCB Signing"
_FIELDS: Final = {
    "pck_crl_issuer_chain",
    "root_ca_crl",
    "pck_crl",
    "tcb_info_issuer_chain",
    "tcb_info",
    "tcb_info_signature",
    "qe_identity_issuer_chain",
    "qe_identity",
    "qe_identity_signature",
}
# May remain in a bundle from the tool that fetched it; not needed, because quotes carry their own.
_IGNORED: Final = {"pck_certificate_chain"}
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnverifiedDocument:
    """A text, its claimed signature by Intel, and its issuer chain in PEM."""

    text: str
    signature: bytes
    issuer_chain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The parts of a bundle, unverified. Lists are DER."""

    tcb_info: UnverifiedDocument
    qe_identity: UnverifiedDocument
    root_list: bytes
    pck_list: bytes
    pck_issuer_chain: bytes


def parse_bundle(encoded: bytes) -> Bundle:
    """Split a bundle into its parts; VerificationError `attestation.collateral.malformed`."""
    values = _parse_object(encoded)
    if values.keys() - _IGNORED != _FIELDS or not all(
        isinstance(each, str) for each in values.values()
    ):
        raise _malformed(f"a bundle needs the texts {sorted(_FIELDS)}")

    def document(name: str) -> UnverifiedDocument:
        return UnverifiedDocument(
            text=values[name],
            signature=_from_hex(values[f"{name}_signature"]),
            issuer_chain=values[f"{name}_issuer_chain"],
        )

    return Bundle(
        tcb_info=document("tcb_info"),
        qe_identity=document("qe_identity"),
        root_list=_from_hex(values["root_ca_crl"]),
        pck_list=_from_hex(values["pck_crl"]),
        pck_issuer_chain=values["pck_crl_issuer_chain"].encode(),
    )


def verify_tcb_info(
    document: UnverifiedDocument,
    *,
    root: x509.Certificate,
    revocation_lists: RevocationLists,
    now: dt.datetime,
) -> TcbInfo:
    """Return TCB information for TDX; VerificationError `attestation.collateral.<fault>`."""
    _verify_signature(document, root, revocation_lists, now)
    values = _parse_object(document.text.encode())
    if (values.get("id"), values.get("version")) != ("TDX", 3):
        raise _malformed("the TCB information is not for TDX, version 3")
    fmspc, pce_id = (_from_hex(_field(values, name, str)) for name in ("fmspc", "pceId"))
    if (len(fmspc), len(pce_id)) != (6, 2):
        raise _malformed("FMSPC must have 6 bytes, PCEID 2")
    return TcbInfo(
        **_common(document, values, name=f"TCB information of FMSPC {fmspc.hex()}", now=now),
        fmspc=fmspc,
        pce_id=pce_id,
    )


def verify_qe_identity(
    document: UnverifiedDocument,
    *,
    root: x509.Certificate,
    revocation_lists: RevocationLists,
    now: dt.datetime,
) -> SignedDocument:
    """Return the identity of TDX's quoting enclave; VerificationError as for TCB information."""
    _verify_signature(document, root, revocation_lists, now)
    values = _parse_object(document.text.encode())
    if (values.get("id"), values.get("version")) != ("TD_QE", 2):
        raise _malformed("the identity is not of TD_QE, version 2")
    return SignedDocument(**_common(document, values, name="QE identity", now=now))


def _verify_signature(
    document: UnverifiedDocument,
    root: x509.Certificate,
    revocation_lists: RevocationLists,
    now: dt.datetime,
) -> None:
    chain = parse_certificates(document.issuer_chain.encode(), kind=_KIND)
    if len(chain) != 2:
        raise _fault(
            "attestation.collateral.chain",
            "the chain of a document must be its signer and Intel's root",
        )
    signer = chain[0]
    verified = verify_chain(
        [signer], root=root, revocation_lists=revocation_lists, kind=_KIND, now=now
    )
    # The same root also issues the authorities of PCK certificates.
    if common_name(signer.subject) != _SIGNER:
        raise _fault(
            "attestation.collateral.chain", f"{common_name(signer.subject)} does not sign TCB data"
        )
    if not verified.revocation_checked:
        raise _fault(
            "attestation.collateral.revocation_list",
            "Intel's revocation list for the signer is missing",
        )
    key = signer.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or len(document.signature) != 64:
        raise _fault(
            "attestation.collateral.signature", "a document must be signed with ECDSA, 64 bytes"
        )
    r, s = (int.from_bytes(document.signature[i : i + 32], "big") for i in (0, 32))
    try:
        key.verify(encode_dss_signature(r, s), document.text.encode(), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise _fault(
            "attestation.collateral.signature", "Intel did not sign this document"
        ) from error


def _common(
    document: UnverifiedDocument, values: dict[str, Any], *, name: str, now: dt.datetime
) -> dict[str, Any]:
    issue_date, next_update = (_time(values, each) for each in ("issueDate", "nextUpdate"))
    if not issue_date <= now <= next_update:
        raise _fault(
            "attestation.collateral.expired",
            f"{name} is valid from {issue_date} to {next_update}; the time is {now}",
        )
    return {
        "name": name,
        "text": document.text,
        "signature": document.signature,
        "issuer_chain": document.issuer_chain,
        "issue_date": issue_date,
        "next_update": next_update,
        "tcb_evaluation_data_number": _field(values, "tcbEvaluationDataNumber", int),
    }


def _parse_object(encoded: bytes) -> dict[str, Any]:
    try:
        value = json.loads(encoded, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _malformed("not a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Parsers differ in which of two duplicates they use.
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return dict(pairs)


def _field(values: dict[str, Any], name: str, kind: type) -> Any:
    value = values.get(name)
    if type(value) is not kind:
        raise _malformed(f"{name} is not {kind.__name__}")
    return value


def _time(values: dict[str, Any], name: str) -> dt.datetime:
    text = _field(values, name, str)
    try:
        if _TIME.fullmatch(text) is not None:
            return dt.datetime.fromisoformat(text)
    except ValueError:
        pass
    raise _malformed(f"{name} is not a time of the form 2026-01-31T23:59:59Z")


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise _malformed("a field is not hexadecimal") from error


def _malformed(message: str) -> VerificationError:
    return _fault("attestation.collateral.malformed", message)


def _fault(reason: ReasonId, message: str) -> VerificationError:
    return VerificationError(reason, message)
