"""What the two ends of a session show of themselves, and what of it is checked.

The initiator shows its leaf to TLS and its attestation result with the call, where both are checked
(`calls.py`). The responder's TLS end shows one of the leaves that are pinned, and gRPC does not say
which: its answer brings the attestation result that names it.
"""

import datetime as dt
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from sealane.crypto.certificates import verify_leaf
from sealane.daemon.fabric.establishment import Result
from sealane.daemon.node.channels import Own
from sealane.daemon.runtime.calls import RESULT_KEY, VERIFIER_KEY, check_result
from sealane.transport.establish import Shown


def own_result(own: Own) -> tuple[bytes, Result]:
    """Return the thumbprint of our leaf (SHA-256, DER), and the result that names it."""
    metadata = dict(own.metadata)
    token, verifier = metadata[RESULT_KEY], metadata[VERIFIER_KEY]
    if not isinstance(token, str) or not isinstance(verifier, bytes):
        raise TypeError("the call metadata must hold a token and a certificate")
    return own.leaf.fingerprint(SHA256()), Result(token=token, verifier=verifier)


def own_shown(own: Own) -> Shown:
    """Return what we show as the initiator."""
    certificate, result = own_result(own)
    return Shown(certificate=certificate, token=result.thumbprint)


def responder_shown(
    result: Result, *, pins: Sequence[x509.Certificate], anchor: x509.Certificate, now: dt.datetime
) -> Shown:
    """Check the result that a responder answered with; return what it has shown.

    `pins` are the leaves that its end of the channel may show, one at least. VerificationError
    `token.…`, `certificate.…`: not of a verifier of ours, not in its time, or for none of them.
    """
    found = check_result(result.token, result.verifier, anchor=anchor, now=now)
    named = (pin for pin in pins if pin.fingerprint(SHA256()) == found.certificate_sha256)
    leaf = next(named, pins[0])
    subject = verify_leaf(leaf, anchor=anchor, now=now)
    found.check(leaf=leaf, subject=subject.spiffe_id, now=now)
    return Shown(certificate=found.certificate_sha256, token=result.thumbprint)
