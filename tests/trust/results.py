"""Certificates with the attestation results that go with them, as a verifier would issue them."""

import datetime as dt
from collections.abc import Mapping

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.attestation.appraisal import appraise
from sealane.crypto.attestation.ear import ResultSigner
from sealane.crypto.attestation.policy import Hardware, Policy, software_reference
from sealane.crypto.certificates import CertificateAuthority, Subject
from sealane.crypto.evidence.claims import Claims, Memory
from sealane.daemon.node.identity import Issued
from sealane.daemon.runtime.authorizers import RESULT_KEY, VERIFIER_KEY

Metadata = Mapping[str, str | bytes]


def result_for(
    authority: CertificateAuthority,
    subject: Subject,
    leaf: x509.Certificate,
    *,
    now: dt.datetime,
    policy_version: int = 1,
) -> Metadata:
    """Return the attestation result that a call by `leaf` carries."""
    machine = Hardware(
        hardware_id="key-sha256:00",
        nodes=frozenset({subject.node}),
        roles=frozenset({subject.role}),
        tenant=subject.tenant,
    )
    policy = Policy(
        version=policy_version,
        digest=bytes(32),
        hardware={machine.hardware_id: machine},
        references=(software_reference(frozenset({subject.role})),),
    )
    claims = Claims(
        evidence_type="software",
        memory=Memory.ISOLATED,
        hardware_id=machine.hardware_id,
        product="software",
        measurements={},
        tcb={},
        flags={},
        valid_until=now + dt.timedelta(days=1),
    )
    appraised = appraise(
        {"primary": claims}, policy=policy, node=subject.node, role=subject.role, safe_flags={}
    )
    signer = ResultSigner(authority, broker="b", now=now)
    token = signer.sign(appraised, leaf=leaf, subject=subject.spiffe_id, nonce=bytes(32), now=now)
    der = signer.certificate(now=now).public_bytes(Encoding.DER)
    return {RESULT_KEY: token, VERIFIER_KEY: der}


def issued(
    authority: CertificateAuthority, subject: Subject, leaf: x509.Certificate, *, now: dt.datetime
) -> Issued:
    """Return the leaf and the result of an attestation."""
    metadata = result_for(authority, subject, leaf, now=now)
    return Issued(leaf=leaf, metadata=tuple(metadata.items()))
