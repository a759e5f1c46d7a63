"""Parsers of evidence and collateral: arbitrary input must only lead to a refusal."""

import contextlib
import datetime as dt
from types import MappingProxyType
from typing import Final

import dcap_qvl
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.encoding import fields, parse_fields
from sealane.crypto.evidence import nvidia, snp, tdx_quote
from sealane.crypto.evidence.chain import parse_certificates
from sealane.crypto.evidence.claims import Binding
from sealane.crypto.evidence.cmw import decode_collection, encode_collection
from sealane.crypto.evidence.collateral import Collateral, vendor_roots
from sealane.crypto.evidence.collateral_loader import load_collateral
from sealane.crypto.evidence.snp_report import REPORT_BYTES
from sealane.crypto.evidence.tpm2 import Tpm2Verifier
from sealane.crypto.evidence.tpm2_event_log import explain
from sealane.crypto.evidence.tpm2_structures import (
    parse_certification,
    parse_public,
    parse_quote,
    verify_signature,
)
from sealane.errors import VerificationError
from vendors.tpm import SyntheticTpm

NOW: Final = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
_BINDING: Final = Binding(runtime_data=b"", nonce=b"", tls_public_key=b"", kem_public_key=b"")
_KNOWN: Final = Collateral()
TPM2_LABEL: Final = "sealane tpm2 evidence v1"
TPM: Final = SyntheticTpm(*(ec.derive_private_key(number, ec.SECP256R1()) for number in (2, 3, 5)))
TPM2_INTRODUCTION: Final = TPM.introduction().encode()
_TPM2_KEY: Final = TPM.ak.public_key()


def evidence_collection(data: bytes) -> None:
    """A decoded collection has a single encoding: the input."""
    with contextlib.suppress(VerificationError):
        assert encode_collection(decode_collection(data)) == data


def snp_evidence(data: bytes) -> None:
    """A report, then the host's certificate table; never accepted without AMD's keys."""
    accepted = False
    with contextlib.suppress(VerificationError):
        snp.verify(
            data[:REPORT_BYTES],
            binding=_BINDING,
            collateral=_KNOWN,
            now=NOW,
            endorsements=data[REPORT_BYTES:],
        )
        accepted = True
    assert not accepted


def tdx_evidence(data: bytes) -> None:
    """Everything our parser accepts, the engine's accepts with the same result."""
    try:
        ours = tdx_quote.parse_quote(data)
    except VerificationError:
        with contextlib.suppress(ValueError):
            dcap_qvl.parse_quote(data)
        return
    theirs = dcap_qvl.parse_quote(data)
    assert theirs.header.version == ours.version
    for name, attribute in (
        ("mrtd", "mr_td"),
        ("rtmr0", "rt_mr0"),
        ("rtmr3", "rt_mr3"),
        ("td_attributes", "td_attributes"),
        ("report_data", "report_data"),
    ):
        assert bytes(getattr(theirs.report, attribute)) == ours.body[name]
    assert data.startswith(ours.unpadded)
    assert ours.unpadded.startswith(ours.signed)
    assert not any(data[len(ours.unpadded) :])


def nvidia_evidence(data: bytes) -> None:
    """A report alone, and as evidence with the root as its chain."""
    with contextlib.suppress(VerificationError):
        report = nvidia.parse_report(data)
        assert data.startswith(report.signed + report.signature)
    for evidence in (data, fields(nvidia.EVIDENCE_LABEL, data, data)):
        accepted = False
        with contextlib.suppress(VerificationError):
            nvidia.verify(evidence, binding=_BINDING, collateral=_KNOWN, now=NOW)
            accepted = True
        assert not accepted


def tpm2_introduction(data: bytes) -> None:
    """An introduction is refused, or has a credential made for it."""
    with contextlib.suppress(VerificationError):
        assert Tpm2Verifier().introduce(data, now=NOW).activation


def tpm2_evidence(data: bytes) -> None:
    """Evidence for a challenge with an unknown secret, and each of its structures alone."""
    introduced = Tpm2Verifier().introduce(TPM2_INTRODUCTION, now=NOW)
    accepted = False
    with contextlib.suppress(VerificationError):
        Tpm2Verifier().verify(
            data, binding=_BINDING, introduced=introduced, endorsements=b"", now=NOW
        )
        accepted = True
    assert not accepted
    for part in parse_fields(TPM2_LABEL, data, count_max=8) or [data]:
        for parse in (parse_quote, parse_certification, parse_public):
            with contextlib.suppress(VerificationError):
                parse(part)
        accepted = False
        with contextlib.suppress(VerificationError):
            verify_signature(_TPM2_KEY, part, b"")
            accepted = True
        assert not accepted


def tpm2_event_log(data: bytes) -> None:
    """A log without events gives no value; registers with events have one."""
    quoted = {index: bytes([index + 1]) * 32 for index in range(24)}
    with contextlib.suppress(VerificationError):
        assert not explain(data, quoted)


def certificates(data: bytes) -> None:
    """Certificates in DER or PEM, and every field read later."""
    with contextlib.suppress(VerificationError):
        for certificate in parse_certificates(data, kind="snp"):
            certificate.subject.rfc4514_string()
            certificate.issuer.rfc4514_string()
            assert certificate.serial_number is not None
            with contextlib.suppress(VerificationError):
                snp.parse_vcek(certificate)


def collateral_item(data: bytes) -> None:
    """Loading raises nothing and accepts nothing unsigned."""
    loaded = load_collateral(
        {"item": data}, roots=vendor_roots(), high_water=MappingProxyType({}), now=NOW
    )
    assert not loaded.high_water
    assert not loaded.collateral.tcb_infos
