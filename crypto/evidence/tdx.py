"""The verifier of Intel TDX quotes: `dcap_qvl` verifies, and a second parser cross-checks.

The engine checks the quote's signatures, the quoting enclave and the TCB level against Intel's TCB
information and QE identity. What it leaves open is checked here: trailing bytes, PCEID, the PCK
chain (with reasons of its own), that both parsers read the same quote, and the binding.
"""

import datetime as dt
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import dcap_qvl
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.evidence import media_types
from sealane.crypto.evidence.chain import key_sha256, parse_certificates, verify_chain
from sealane.crypto.evidence.claims import Binding, Claims, Memory
from sealane.crypto.evidence.collateral import Collateral, SignedDocument
from sealane.crypto.evidence.tdx_quote import Quote, parse_quote
from sealane.errors import VerificationError
from sealane.reasons import ReasonId

EVIDENCE_TYPE: Final = "tdx"
MEDIA_TYPE: Final = media_types.TDX_QUOTE
ENDORSEMENTS_MEDIA_TYPE: Final = ""

# Required value of each flag unless the policy allows the other one by name; other flags only
# inform. The engine also refuses the other value of each of these.
SAFE_FLAGS: Final[Mapping[str, bool]] = {
    "debug": False,
    "migratable": False,
    "revocation_checked": True,
    "sept_ve_disable": True,
    "service_td": False,
}

# Fault for each error of the engine, by how its text begins; the error contains the text itself.
_REFUSALS: Final[tuple[tuple[str, ReasonId], ...]] = (
    ("No matching TCB level", "attestation.tdx.tcb_level"),
    ("TCB status is invalid", "attestation.tdx.tcb_level"),
    ("TDX module", "attestation.tdx.module"),
    ("QE ", "attestation.tdx.quoting_enclave"),
    ("ISV enclave report signature", "attestation.tdx.signature"),
    ("Signature is invalid for qe_report", "attestation.tdx.signature"),
)
_ENGINE_NAMES: Final[Mapping[str, str]] = {
    "mrseam": "mr_seam",
    "mrsignerseam": "mr_signer_seam",
    "mrtd": "mr_td",
    "mrconfigid": "mr_config_id",
    "mrowner": "mr_owner",
    "mrownerconfig": "mr_owner_config",
    "mrservicetd": "mr_service_td",
    "rtmr0": "rt_mr0",
    "rtmr1": "rt_mr1",
    "rtmr2": "rt_mr2",
    "rtmr3": "rt_mr3",
    "tee_tcb_svn_2": "tee_tcb_svn2",
}
_MEASUREMENTS: Final = (
    *("mrtd", "rtmr0", "rtmr1", "rtmr2", "rtmr3", "mrseam", "mrsignerseam"),
    *("mrconfigid", "mrowner", "mrownerconfig", "xfam"),
)


def verify(
    evidence: bytes,
    *,
    binding: Binding,
    collateral: Collateral,
    now: dt.datetime,
    endorsements: bytes = b"",  # noqa: ARG001 - a quote comes with its chain
) -> Claims:
    """Return the claims of a genuine quote; VerificationError `attestation.tdx.<fault>`."""
    quote = parse_quote(evidence)
    _check_attributes(quote)
    chain = parse_certificates(quote.certificates, kind=EVIDENCE_TYPE)
    if len(chain) != 3 or chain[-1] != collateral.roots.intel:
        raise _fault(
            "attestation.tdx.chain",
            "the PCK chain does not consist of three certificates that end at Intel's root",
        )
    verified = verify_chain(
        chain[:-1],
        root=collateral.roots.intel,
        revocation_lists=collateral.revocation_lists,
        kind=EVIDENCE_TYPE,
        now=now,
    )
    if not verified.revocation_checked:
        raise _fault(
            "attestation.tdx.collateral_missing", "Intel's two revocation lists are missing"
        )
    documents = _documents(chain[0], collateral, now)
    result = _run_engine(quote, chain, collateral, documents=documents, now=now)
    _check_same(quote, result)
    if not secrets.compare_digest(quote.body["report_data"], binding.report_data):
        raise _fault(
            "attestation.tdx.report_data", "the quote does not commit to this runtime data"
        )
    return _claims(
        quote,
        result,
        valid_until=min(verified.valid_until, *(each.next_update for each in documents)),
    )


def _check_attributes(quote: Quote) -> None:
    """Refuse attributes that no TDX verifier accepts, each with its own reason."""
    attributes = quote.attributes
    if attributes["debug"]:
        raise _fault("attestation.tdx.debug", "the TD can be debugged")
    if not attributes["sept_ve_disable"]:
        raise _fault(
            "attestation.tdx.sept_ve", "SEPT_VE_DISABLE is 0: the host can inject exceptions"
        )
    if attributes["migratable"] or any(quote.body.get("mrservicetd", b"")):
        raise _fault("attestation.tdx.service_td", "the TD can be migrated, or uses a service TD")


def _documents(
    pck: x509.Certificate, collateral: Collateral, now: dt.datetime
) -> tuple[SignedDocument, SignedDocument]:
    """Return the platform's TCB information and the QE identity, both current."""
    try:
        with _engine_answers():
            platform = dcap_qvl.parse_pck_extension_from_pem(pck.public_bytes(Encoding.PEM))
    except ValueError as error:
        raise _fault(
            "attestation.tdx.certificate", f"the PCK certificate has no SGX extension: {error}"
        ) from error
    fmspc, pce_id = bytes(platform.fmspc), bytes(platform.pce_id)
    tcb_info, qe_identity = collateral.tcb_infos.get(fmspc), collateral.qe_identity
    if tcb_info is None or qe_identity is None:
        raise _fault(
            "attestation.tdx.collateral_missing",
            f"the TCB information for FMSPC {fmspc.hex()} is missing",
        )
    if tcb_info.pce_id != pce_id:
        raise _fault(
            "attestation.tdx.collateral_missing",
            f"the TCB information for PCEID {pce_id.hex()} is missing",
        )
    for document in (tcb_info, qe_identity):
        if not document.issue_date <= now <= document.next_update:
            raise _fault(
                "attestation.tdx.collateral_expired",
                f"{document.name} is valid from {document.issue_date} to {document.next_update}; "
                f"the time is {now}",
            )
    return tcb_info, qe_identity


@contextmanager
def _engine_answers() -> Iterator[None]:
    """Convert a panic of the engine, which is not an Exception, to a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the engine panicked: {error}") from error


def _run_engine(
    quote: Quote,
    chain: list[x509.Certificate],
    collateral: Collateral,
    *,
    documents: tuple[SignedDocument, SignedDocument],
    now: dt.datetime,
) -> dict[str, Any]:
    lists = collateral.revocation_lists
    tcb_info, qe_identity = documents
    seconds = int(now.timestamp())
    issuers = b"".join(each.public_bytes(Encoding.PEM) for each in chain[1:])
    known = dcap_qvl.QuoteCollateralV3(
        pck_crl_issuer_chain=issuers.decode(),
        root_ca_crl=lists[key_sha256(chain[2])].public_bytes(Encoding.DER),
        pck_crl=lists[key_sha256(chain[1])].public_bytes(Encoding.DER),
        tcb_info_issuer_chain=tcb_info.issuer_chain,
        tcb_info=tcb_info.text,
        tcb_info_signature=tcb_info.signature,
        qe_identity_issuer_chain=qe_identity.issuer_chain,
        qe_identity=qe_identity.text,
        qe_identity_signature=qe_identity.signature,
    )
    verifier = dcap_qvl.QuoteVerifier(collateral.roots.intel.public_bytes(Encoding.DER))
    # Whether a level is acceptable is for Sealane's policy to decide.
    everything = dcap_qvl.QuotePolicy.claims_only(seconds)
    try:
        with _engine_answers():
            claims = verifier.verify_with_policy(quote.unpadded, known, seconds, everything)
    except ValueError as error:
        text = str(error).removeprefix("Verification failed: ")
        reasons = (reason for start, reason in _REFUSALS if text.startswith(start))
        raise _fault(
            next(reasons, "attestation.tdx.refused"), f"the quote is refused: {text}"
        ) from error
    result: dict[str, Any] = json.loads(claims.to_json())
    return result


def _check_same(quote: Quote, result: dict[str, Any]) -> None:
    """Compare the results of the engine and of this parser."""
    ((kind, report),) = result["report"].items()
    fields = report.get("base", {}) | report
    theirs = {name: fields.get(_ENGINE_NAMES.get(name, name)) for name in quote.body}
    ours = {name: value.hex() for name, value in quote.body.items()}
    is_same_kind = (kind == "TD15") == ("mrservicetd" in quote.body)
    if not is_same_kind or result["header"]["version"] != quote.version or theirs != ours:
        raise _fault(
            "attestation.tdx.ambiguous", "two parsers read different quotes in the same bytes"
        )


def _claims(quote: Quote, result: dict[str, Any], *, valid_until: dt.datetime) -> Claims:
    platform = result["platform"]["pck"]
    return Claims(
        evidence_type=EVIDENCE_TYPE,
        memory=Memory.ENCRYPTED,
        hardware_id=f"ppid:{bytes(platform['ppid']).hex()}",
        product="TDX",
        measurements={name: quote.body[name] for name in _MEASUREMENTS}
        | {"fmspc": bytes(platform["fmspc"])},
        # Intel's TCB level rates the age of each component; a policy may require higher versions of
        # these.
        tcb={
            "tdx_module": quote.body["tee_tcb_svn"][0],
            "pce_svn": platform["pce_svn"],
            "qe_svn": result["qe"]["report"]["isv_svn"],
            "tcb_evaluation_data_number": result["tcb"]["eval_data_number"],
        },
        tcb_status=result["tcb"]["status"],
        advisories=tuple(result["tcb"]["advisory_ids"]),
        flags=quote.attributes
        | {
            "service_td": any(quote.body.get("mrservicetd", b"")),
            "dynamic_platform": platform["dynamic_platform"] == "True",
            "cached_keys": platform["cached_keys"] == "True",
            "smt_enabled": platform["smt_enabled"] == "True",
            "revocation_checked": True,
        },
        properties={"quote_version": quote.version},
        valid_until=valid_until,
    )


def _fault(reason: ReasonId, message: str) -> VerificationError:
    return VerificationError(reason, message)
