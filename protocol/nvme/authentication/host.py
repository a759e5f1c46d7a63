"""The host's side of DH-HMAC-CHAP on one queue."""

import hmac
from collections.abc import Callable, Sequence
from enum import Enum, auto

from sealane.protocol.nvme.authentication.errors import (
    REFUSED_BY_PEER,
    AuthenticationError,
    Explanation,
)
from sealane.protocol.nvme.authentication.groups import DhGroup, EphemeralKey
from sealane.protocol.nvme.authentication.messages import (
    Challenge,
    Failure,
    Negotiate,
    Reply,
    Success1,
    Success2,
    kind_of,
    known_group,
    known_hash,
    transaction_of,
)
from sealane.protocol.nvme.authentication.nonces import random_sequence, random_transaction
from sealane.protocol.nvme.authentication.proof import Exchange
from sealane.protocol.nvme.authentication.secret import HashFunction, HostSecret

HOST_HASHES = (HashFunction.SHA512, HashFunction.SHA384, HashFunction.SHA256)
# NULL comes last but is needed: stock controllers use it unless configured otherwise.
HOST_GROUPS = (
    DhGroup.FFDHE3072,
    DhGroup.FFDHE4096,
    DhGroup.FFDHE6144,
    DhGroup.FFDHE8192,
    DhGroup.FFDHE2048,
    DhGroup.NULL,
)


class _Step(Enum):
    """The next step."""

    NEGOTIATE = auto()
    AWAIT_CHALLENGE = auto()
    REPLY = auto()
    AWAIT_SUCCESS = auto()
    CONFIRM = auto()
    DONE = auto()
    FAILED = auto()


class HostAuthentication:
    """Authenticates a host to a controller and, given the controller's secret, the controller.

    While `has_message`, the owner sends `take()`; otherwise it fetches a message and calls
    `receive`, until `is_authenticated` or an error. After an error a message may be left to send.
    One object is for one transaction: reauthentication needs a new one.
    """

    def __init__(
        self,
        *,
        host_nqn: str,
        subsystem_nqn: str,
        secret: HostSecret,
        random: Callable[[int], bytes],
        controller_secret: HostSecret | None = None,
        hashes: Sequence[HashFunction] = HOST_HASHES,
        groups: Sequence[DhGroup] = HOST_GROUPS,
    ) -> None:
        self._names = (host_nqn, subsystem_nqn)
        self._key = secret.transformed(host_nqn)
        self._peer_key = (
            None if controller_secret is None else controller_secret.transformed(subsystem_nqn)
        )
        self._random = random
        self._offer = Negotiate(
            transaction=random_transaction(random), hashes=tuple(hashes), groups=tuple(groups)
        )
        self._step = _Step.NEGOTIATE
        self._message: bytes | None = self._offer.encode()
        self._hash = HashFunction.SHA256
        self._expected_response = b""

    @property
    def is_authenticated(self) -> bool:
        """Whether both sides have succeeded."""
        return self._step is _Step.DONE

    @property
    def has_failed(self) -> bool:
        """Whether the authentication has failed permanently."""
        return self._step is _Step.FAILED

    @property
    def has_message(self) -> bool:
        """Whether a message is to be sent; otherwise one is to be fetched."""
        return self._message is not None

    def take(self) -> bytes:
        """Return the next message for Authentication Send; ValueError if there is none."""
        message, self._message = self._message, None
        if message is None:
            raise ValueError("it is the controller's turn")
        following = {
            _Step.NEGOTIATE: _Step.AWAIT_CHALLENGE,
            _Step.REPLY: _Step.AWAIT_SUCCESS,
            _Step.CONFIRM: _Step.DONE,
        }
        self._step = following.get(self._step, self._step)
        return message

    def receive(self, data: bytes) -> None:
        """Process the data of Authentication Receive. AuthenticationError if it was a failure."""
        try:
            self._receive(data)
        except AuthenticationError as error:
            self._step = _Step.FAILED
            self._message = None
            if error.reason != REFUSED_BY_PEER:
                self._message = Failure(
                    kind=Failure.OF_HOST,
                    transaction=self._offer.transaction,
                    explanation=error.explanation,
                ).encode()
            raise

    def _receive(self, data: bytes) -> None:
        kind = kind_of(data)
        if kind == Failure.OF_CONTROLLER:
            explanation = Failure.decode(data).explanation
            raise AuthenticationError(
                Explanation.FAILED,
                f"the controller refused authentication with explanation {explanation:#04x}",
                reason=REFUSED_BY_PEER,
            )
        expected = {
            _Step.AWAIT_CHALLENGE: (Challenge.KIND, self._challenge),
            _Step.AWAIT_SUCCESS: (Success1.KIND, self._success),
        }.get(self._step)
        if expected is None or expected[0] != kind:
            raise AuthenticationError(
                Explanation.INCORRECT_MESSAGE,
                f"message {kind} is not expected in step {self._step.name.lower()}",
            )
        if transaction_of(data) != self._offer.transaction:
            raise AuthenticationError(
                Explanation.INCORRECT_PAYLOAD,
                f"transaction {transaction_of(data)}; allowed: {self._offer.transaction}",
            )
        expected[1](data)

    def _challenge(self, data: bytes) -> None:
        challenge = Challenge.decode(data)
        self._hash = known_hash(self._offer.hashes, [challenge.hash_function])
        group = known_group(self._offer.groups, [challenge.group])
        ephemeral = EphemeralKey(group, self._random)
        exchange = Exchange(
            hash_function=self._hash,
            transaction=self._offer.transaction,
            host_nqn=self._names[0],
            subsystem_nqn=self._names[1],
            shared=ephemeral.agree(challenge.public_value),
        )
        own, sequence = None, 0
        if self._peer_key is not None:
            own, sequence = self._random(self._hash.digest_bytes), random_sequence(self._random)
            self._expected_response = exchange.controller_response(
                self._peer_key, challenge=own, sequence=sequence
            )
        self._message = Reply(
            transaction=self._offer.transaction,
            response=exchange.host_response(
                self._key, challenge=challenge.challenge, sequence=challenge.sequence
            ),
            challenge=own,
            sequence=sequence,
            public_value=ephemeral.public_value,
        ).encode()
        self._step = _Step.REPLY

    def _success(self, data: bytes) -> None:
        success = Success1.decode(data, self._hash)
        if self._peer_key is None:
            if success.response is not None:
                raise AuthenticationError(
                    Explanation.INCORRECT_PAYLOAD,
                    "the controller sent a response that was not requested",
                )
            self._step = _Step.DONE
            return
        # A controller that sends no response has not authenticated.
        if not hmac.compare_digest(self._expected_response, success.response or b""):
            raise AuthenticationError(Explanation.FAILED, "the controller's response is wrong")
        self._message = Success2(transaction=self._offer.transaction).encode()
        self._step = _Step.CONFIRM
