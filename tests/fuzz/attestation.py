"""Arbitrary runtime data, attestation results, policies, their owners, and audit records."""

import contextlib
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.attestation.ear import verify_result
from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.audit import Record
from sealane.daemon.broker.owners import (
    SIGNATURES_MAX,
    owners_document,
    parse_owners,
    parse_signatures,
)
from sealane.daemon.broker.policy import cautions, parse_policy
from sealane.errors import UsageError, VerificationError

_KEY: Final = ec.derive_private_key(7, ec.SECP384R1()).public_key()


def runtime_data(data: bytes) -> None:
    """Decoded data has a single encoding: the input."""
    with contextlib.suppress(VerificationError):
        assert RuntimeData.decode(data).encode() == data


def attestation_result(data: bytes) -> None:
    """No result is accepted, because the input isn't signed with the verifier's key."""
    accepted = False
    with contextlib.suppress(VerificationError):
        verify_result(data.decode("latin-1"), verifier_key=_KEY)
        accepted = True
    assert not accepted


def policy_document(data: bytes) -> None:
    """A document is refused in one line, or is a policy that can be read."""
    texts = []
    try:
        policy = parse_policy(data, source="p")
        texts = cautions(policy, safe_flags={})
    except UsageError as error:
        texts = [str(error)]
    assert all("\n" not in text for text in texts)


def policy_owners(data: bytes) -> None:
    """A document is refused in one line, or names owners who are the same in their own document."""
    refusal = ""
    try:
        owners = parse_owners(data, source="o")
        again = parse_owners(owners_document(owners), source="o")
        assert (again.digest, again.version) == (owners.digest, owners.version)
    except UsageError as error:
        refusal = str(error)
    assert "\n" not in refusal


def policy_signatures(data: bytes) -> None:
    """A file is refused in one line, or has at most SIGNATURES_MAX signatures."""
    refusal, count = "", 0
    try:
        count = len(parse_signatures(data, source="s"))
    except VerificationError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert count <= SIGNATURES_MAX


def audit_record(data: bytes) -> None:
    """A line is a record or is refused."""
    with contextlib.suppress(VerificationError):
        assert Record.decode(data).sequence is not None
