"""What each end of a session shows to the other: a leaf and an attestation result; and their check.

The initiator shows its leaf in TLS and its attestation result with the call, where both are checked
(`calls.py`). The responder's TLS end shows one of its pinned leaves, and gRPC doesn't say which:
its answer carries the attestation result that names the leaf.
"""

import datetime as dt
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import verify_leaf
from sealane.daemon.fabric.establishment import Result
from sealane.daemon.node.channels import Own
from sealane.daemon.runtime.authorizers import RESULT_KEY, VERIFIER_KEY, check_result
from sealane.transport.establish import Shown


def own_result(own: Own) -> tuple[bytes, Result]:
    """Return the thumbprint of this fabric's leaf (SHA-256, DER), and the result that names it."""
    metadata = dict(own.metadata)
    token, verifier = metadata[RESULT_KEY], metadata[VERIFIER_KEY]
    if not isinstance(token, str) or not isinstance(verifier, bytes):
        raise TypeError("the call metadata must hold a token and a certificate")
    return own.leaf.fingerprint(SHA256()), Result(token=token, verifier=verifier)


def own_shown(own: Own) -> Shown:
    """Return what this end shows as the initiator."""
    certificate, result = own_result(own)
    return Shown(certificate=certificate, token=result.thumbprint)


def responder_shown(
    result: Result, *, pins: Sequence[x509.Certificate], anchors: TrustAnchors, now: dt.datetime
) -> Shown:
    """Check the result in a responder's answer; return what the responder has shown.

    `pins` are the leaves that its end of the channel may show, at least one. VerificationError
    `token.…`, `certificate.…`: not from a trusted verifier, not valid now, or for none of the
    leaves.
    """
    found = check_result(result.token, result.verifier, anchors=anchors, now=now)
    named = (pin for pin in pins if pin.fingerprint(SHA256()) == found.certificate_sha256)
    leaf = next(named, pins[0])
    subject = anchors.checked(lambda anchor: verify_leaf(leaf, anchor=anchor, now=now))
    found.check(leaf=leaf, subject=subject.spiffe_id, now=now)
    return Shown(certificate=found.certificate_sha256, token=result.thumbprint)
