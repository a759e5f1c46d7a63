"""Parsers of evidence and collateral: whatever comes, a refusal is all that may come of it."""

import contextlib
import datetime as dt
from types import MappingProxyType
from typing import Final

import dcap_qvl

from sealane.crypto.encoding import fields
from sealane.crypto.evidence import nvidia, snp, tdx_quote
from sealane.crypto.evidence.chain import parse_certificates
from sealane.crypto.evidence.claims import Binding
from sealane.crypto.evidence.cmw import decode_collection, encode_collection
from sealane.crypto.evidence.collateral import Collateral, vendor_roots
from sealane.crypto.evidence.collateral_loader import load_collateral
from sealane.crypto.evidence.snp_report import REPORT_BYTES
from sealane.errors import VerificationError

NOW: Final = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
_BINDING: Final = Binding(runtime_data=b"", nonce=b"", tls_public_key=b"", kem_public_key=b"")
_KNOWN: Final = Collateral()


def evidence_collection(data: bytes) -> None:
    """What is read as a collection has one encoding: the one it came in."""
    with contextlib.suppress(VerificationError):
        assert encode_collection(decode_collection(data)) == data


def snp_evidence(data: bytes) -> None:
    """A report and, behind it, the host's certificate table. Nobody has AMD's keys."""
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
    """What the own parser reads, the engine's reads too, and the same."""
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
    """A report alone, and as evidence with the root for a chain."""
    with contextlib.suppress(VerificationError):
        report = nvidia.parse_report(data)
        assert data.startswith(report.signed + report.signature)
    for evidence in (data, fields(nvidia.EVIDENCE_LABEL, data, data)):
        accepted = False
        with contextlib.suppress(VerificationError):
            nvidia.verify(evidence, binding=_BINDING, collateral=_KNOWN, now=NOW)
            accepted = True
        assert not accepted


def certificates(data: bytes) -> None:
    """Certificates in DER or PEM, and all that is read of them later."""
    with contextlib.suppress(VerificationError):
        for certificate in parse_certificates(data, kind="fuzz"):
            certificate.subject.rfc4514_string()
            certificate.issuer.rfc4514_string()
            assert certificate.serial_number is not None
            with contextlib.suppress(VerificationError):
                snp.parse_vcek(certificate)


def collateral_item(data: bytes) -> None:
    """Loading raises nothing, and nothing unsigned is taken."""
    loaded = load_collateral(
        {"item": data}, roots=vendor_roots(), high_water=MappingProxyType({}), now=NOW
    )
    assert not loaded.high_water
    assert not loaded.collateral.tcb_infos
