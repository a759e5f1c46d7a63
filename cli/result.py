"""Attestation results and their certificates, as `sealanectl attest show` prints them."""

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cryptography import x509

from sealane.cli.output import Output
from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.attestation.ar4si import tier_of
from sealane.crypto.attestation.ear import AttestationResult, read_unverified
from sealane.crypto.certificates import verify_leaf, verify_verifier
from sealane.daemon.runtime.authorizers import verified_result
from sealane.errors import VerificationError
from sealane.protocol.v1 import nodes_pb2

_JWS_START = b"eyJ"  # base64url of the beginning of a JSON object


def token_in(content: bytes) -> str | None:
    """Return a file's content if it is an attestation result, else None."""
    text = content.strip()
    return text.decode() if text.startswith(_JWS_START) and text.isascii() else None


def show_token(token: str, now: dt.datetime, output: Output) -> None:
    """Print what a result says; VerificationError `token.malformed`."""
    result = read_unverified(token)
    rows = {
        "signature": "NOT CHECKED: a file doesn't say which key to trust",
        **_result_rows(result, now),
    }
    _print([rows], [result], output)


def show_identities(
    identities: Iterable[nodes_pb2.RoleIdentity], now: dt.datetime, output: Output
) -> None:
    """Print each role's certificate and result, and whether they are valid."""
    rows, results = [], []
    for identity in identities:
        certificate = x509.load_der_x509_certificate(identity.certificate)
        result = read_unverified(identity.token) if identity.token else None
        rows.append(
            {
                "role": identity.role,
                **_certificate_rows(identity, certificate, now),
                **({} if result is None else _verdict(identity, certificate, now)),
                **({} if result is None else _result_rows(result, now)),
            }
        )
        results.append(result)
    _print(rows, results, output)


def _print(
    rows: list[dict[str, Any]], results: list[AttestationResult | None], output: Output
) -> None:
    if output.is_data:
        output.show(
            [
                {**row, "submodules": [] if result is None else [*_submodule_rows(result)]}
                for row, result in zip(rows, results, strict=True)
            ]
        )
        return
    for row, result in zip(rows, results, strict=True):
        output.show_one(row)
        print()
        if result is not None:
            output.show([*_claim_rows(result)])
            print()


def _certificate_rows(
    identity: nodes_pb2.RoleIdentity, certificate: x509.Certificate, now: dt.datetime
) -> dict[str, Any]:
    anchors = _anchors(identity)
    start = certificate.not_valid_before_utc
    try:
        # Checked as of its own start: an expired one is shown, too.
        subject = anchors.checked(lambda anchor: verify_leaf(certificate, anchor=anchor, now=start))
    except VerificationError as error:
        return {"certificate": f"REFUSED: {error}"}
    return {
        "SPIFFE id": subject.spiffe_id,
        "tenant": subject.tenant,
        "incarnation": subject.incarnation.hex(),
        "KEM key": f"{subject.kem_algorithm} {subject.kem_public_key.hex()}",
        "certificate serial": f"{certificate.serial_number:x}",
        "certificate until": _until(certificate.not_valid_after_utc, now),
        "trust anchors until": ", ".join(
            _until(anchor.not_valid_after_utc, now) for anchor in anchors.certificates
        ),
    }


def _anchors(identity: nodes_pb2.RoleIdentity) -> TrustAnchors:
    return TrustAnchors(*map(x509.load_der_x509_certificate, identity.trust_anchors))


def _verdict(
    identity: nodes_pb2.RoleIdentity, certificate: x509.Certificate, now: dt.datetime
) -> dict[str, Any]:
    """Check the result as a peer would at a call."""
    anchors = _anchors(identity)
    try:
        verifier = x509.load_der_x509_certificate(identity.verifier_certificate)
        anchors.checked(lambda anchor: verify_verifier(verifier, anchor=anchor, now=now))
        subject = anchors.checked(lambda anchor: verify_leaf(certificate, anchor=anchor, now=now))
        verified_result(identity.token, identity.verifier_certificate).check(
            leaf=certificate, subject=subject.spiffe_id, now=now
        )
    except VerificationError as error:
        return {"signature": f"REFUSED: {error}"}
    return {"signature": "verified, and for this certificate"}


def _result_rows(result: AttestationResult, now: dt.datetime) -> dict[str, Any]:
    return {
        "result": result.token_id,
        "subject": result.subject,
        "status": result.status.label,
        "policy version": result.policy_version,
        "policy": result.policy_id,
        "issued": result.issued_at,
        "result until": _until(result.expires_at, now),
        "nonce": result.nonce.hex(),
        "certificate sha256": result.certificate_sha256.hex(),
    }


def _submodule_rows(result: AttestationResult) -> Iterator[Mapping[str, Any]]:
    for label, item in result.submodules.items():
        yield {
            "item": label,
            "evidence": item.evidence_type,
            "reference": item.reference,
            "status": item.status.label,
            "hardware id sha256": item.hardware_id_sha256.hex(),
            "vector": dict(item.vector),
        }


def _claim_rows(result: AttestationResult) -> Iterator[Mapping[str, Any]]:
    for label, item in result.submodules.items():
        for claim, value in item.vector.items():
            yield {
                "item": label,
                "evidence": item.evidence_type,
                "reference": item.reference,
                "claim": claim,
                "value": value,
                "tier": tier_of(value).label,
            }


def _until(moment: dt.datetime, now: dt.datetime) -> str:
    left = int((moment - now).total_seconds())
    when = f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    return f"{when}, {left} s left" if left > 0 else f"EXPIRED at {when}"
