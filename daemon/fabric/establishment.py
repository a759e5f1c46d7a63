"""Key exchange between two fabrics over the control channel, both sides.

Blocks as long as the KEM key does (milliseconds with a TPM): call it on a separate thread.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from sealane.crypto.certificates import Subject
from sealane.crypto.exchange import Exchange, wipe
from sealane.crypto.kem import KemKey
from sealane.crypto.share import new_share, open_share, seal_share
from sealane.errors import UsageError
from sealane.transport.establish import (
    CONNECTION_ID_BYTES,
    NONCE_BYTES,
    VERSION,
    VERSIONS,
    SessionKeys,
    SessionOffer,
    Shown,
    Transcript,
    check_not_lowered,
    check_secret,
    confirm,
    derive,
    prove_secret,
    responder_nonce,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The initiator's proposal, as sent over the control channel."""

    version: int
    display_name: str
    connection_id: bytes
    public_key: bytes
    nonce: bytes
    units: tuple[int, ...]
    rate_bits_per_second: int
    data_addresses: tuple[str, ...]
    sealed_share: bytes
    """Sealed to the responder's KEM key; bound to all of the above and both ends' identities."""
    secret_proof: bytes
    """MAC over the offer under the secret of both jobs; empty if they have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An attestation result and its signer."""

    token: str
    """Compact JWS."""
    verifier: bytes
    """Certificate of the signer (DER)."""

    @property
    def thumbprint(self) -> bytes:
        """Return SHA-256 of the token, 32 bytes."""
        return hashlib.sha256(self.token.encode()).digest()


CheckResult = Callable[[Result], Shown]
"""Returns what a responder with this result has shown. VerificationError `token.…` unless the
result is the peer's, valid, and for a leaf that its end of the channel may show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The responder's answer, with its proof that it derived the same keys."""

    result: Result
    """The responder's; the initiator has sent its own with the call."""

    connection_id: bytes
    public_key: bytes
    nonce: bytes
    units: tuple[int, ...]
    """Accepted candidates."""
    data_addresses: tuple[str, ...]
    sealed_share: bytes
    """Sealed to the initiator's KEM key; bound to the whole transcript."""
    confirmation: bytes


class Initiation:
    """The initiator's side of one exchange: send `offer`, pass the answer to `keys`, once.

    `shown` is what this end shows on the channel, `responder` the subject of the leaf that the peer
    shows there, `check_result` the check of its attestation result.
    """

    def __init__(
        self,
        *,
        display_name: str,
        own: Subject,
        responder: Subject,
        shown: Shown,
        check_result: CheckResult,
        kem: KemKey,
        units: tuple[int, ...],
        rate_bits_per_second: int,
        data_addresses: tuple[str, ...],
        secret: bytearray | None,
        version: int = VERSION,
    ) -> None:
        self._exchange = Exchange()
        self._kem = kem
        self._secret = secret
        self._check_result = check_result
        self._share = new_share()
        self._signed = SessionOffer(
            version=version,
            display_name=display_name,
            initiator=own,
            responder=responder,
            initiator_shown=shown,
            connection_id=secrets.token_bytes(CONNECTION_ID_BYTES),
            public_key=self._exchange.public_key,
            nonce=secrets.token_bytes(NONCE_BYTES),
            units=units,
            rate_bits_per_second=rate_bits_per_second,
            addresses=data_addresses,
        )
        self.offer = Offer(
            version=version,
            display_name=display_name,
            connection_id=self._signed.connection_id,
            public_key=self._signed.public_key,
            nonce=self._signed.nonce,
            units=units,
            rate_bits_per_second=rate_bits_per_second,
            data_addresses=data_addresses,
            sealed_share=_sealed_to(responder, self._share, self._signed),
            secret_proof=b"" if secret is None else prove_secret(secret, self._signed),
        )

    def wipe(self) -> None:
        """Overwrite this end's share, if the exchange ends without keys."""
        wipe(self._share)

    def keys(self, answer: Answer) -> SessionKeys:
        """Derive the session's keys; wipes this end's share.

        VerificationError: `session.establish.lowered` for a version that is not the newest of both,
        `token.…` for an attestation result that isn't the responder's,
        `secret.sealed` for a share that it didn't seal to this fabric for this exchange,
        `session.establish.confirmation` if it derived other keys.
        """
        try:
            check_not_lowered(self._signed.version, answer.nonce)
            shown = self._check_result(answer.result)
            transcript = _transcript(self._signed, shown, answer)
            established = derive(
                self._exchange,
                transcript,
                initiator_share=self._share,
                responder_share=open_share(answer.sealed_share, transcript, key=self._kem),
                secret=self._secret,
                is_initiator=True,
            )
        finally:
            wipe(self._share)
        return confirm(established, answer.confirmation)


async def offer_newest(
    initiate: Callable[..., Initiation], establish: Callable[[Offer], Awaitable[Answer]]
) -> tuple[Initiation, Answer]:
    """Offer the newest version, and each earlier one if the peer refuses the one before.

    `initiate` makes an initiation of a `version`. Somebody between the ends can refuse a version,
    too: `Initiation.keys` finds that out.
    """

    async def offered(version: int) -> tuple[Initiation, Answer]:
        initiation = await asyncio.to_thread(initiate, version=version)
        with contextlib.ExitStack() as unanswered:
            unanswered.callback(initiation.wipe)
            answer = await establish(initiation.offer)
            unanswered.pop_all()
        return initiation, answer

    for version in VERSIONS[:-1]:
        try:
            return await offered(version)
        except UsageError as error:
            if error.reason != "session.establish.version":
                raise
    return await offered(VERSIONS[-1])


def respond(
    offer: Offer,
    *,
    initiator: Subject,
    initiator_shown: Shown,
    own: Subject,
    own_certificate: bytes,
    own_result: Result,
    kem: KemKey,
    units: tuple[int, ...],
    data_addresses: tuple[str, ...],
    secret: bytearray | None,
) -> tuple[Answer, SessionKeys]:
    """Answer an offer of `initiator`, which showed `initiator_shown`.

    `own_certificate` is the thumbprint of this fabric's leaf, SHA-256 (DER), which `own_result`
    names; `secret` is the key derived from the job's secret, if it has one.

    VerificationError: `session.secret.mismatch` if the initiator's job doesn't know the secret,
    `secret.sealed` for a share that the initiator did not seal to this fabric for this exchange,
    `session.establish.version` or `.malformed`, `exchange.share.low_order`.
    """
    signed = SessionOffer(
        version=offer.version,
        display_name=offer.display_name,
        initiator=initiator,
        responder=own,
        initiator_shown=initiator_shown,
        connection_id=offer.connection_id,
        public_key=offer.public_key,
        nonce=offer.nonce,
        units=offer.units,
        rate_bits_per_second=offer.rate_bits_per_second,
        addresses=offer.data_addresses,
    )
    # First: a peer that doesn't know the secret costs no private-key operation.
    if secret is not None:
        check_secret(secret, signed, offer.secret_proof)
    initiator_share = open_share(offer.sealed_share, signed, key=kem)
    responder_share = new_share()
    try:
        exchange = Exchange()
        unsealed = Answer(
            result=own_result,
            connection_id=secrets.token_bytes(CONNECTION_ID_BYTES),
            public_key=exchange.public_key,
            nonce=responder_nonce(offer.version),
            units=units,
            data_addresses=data_addresses,
            sealed_share=b"",
            confirmation=b"",
        )
        shown = Shown(certificate=own_certificate, token=own_result.thumbprint)
        transcript = _transcript(signed, shown, unsealed)
        sealed_share = _sealed_to(initiator, responder_share, transcript)
        established = derive(
            exchange,
            transcript,
            initiator_share=initiator_share,
            responder_share=responder_share,
            secret=secret,
            is_initiator=False,
        )
    finally:
        wipe(initiator_share)
        wipe(responder_share)
    confirmation = established.confirmation
    answer = replace(unsealed, sealed_share=sealed_share, confirmation=confirmation)
    return answer, established.keys


def _sealed_to(peer: Subject, share: bytearray, bound: SessionOffer | Transcript) -> bytes:
    return seal_share(
        share, bound, kem_algorithm=peer.kem_algorithm, public_key=peer.kem_public_key
    )


def _transcript(offer: SessionOffer, responder_shown: Shown, answer: Answer) -> Transcript:
    return Transcript(
        offer=offer,
        responder_shown=responder_shown,
        connection_id=answer.connection_id,
        public_key=answer.public_key,
        nonce=answer.nonce,
        units=answer.units,
        addresses=answer.data_addresses,
    )
