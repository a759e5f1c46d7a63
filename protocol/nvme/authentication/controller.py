"""The controller's side of DH-HMAC-CHAP on one queue."""

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
from sealane.protocol.nvme.authentication.nonces import random_sequence
from sealane.protocol.nvme.authentication.proof import Exchange
from sealane.protocol.nvme.authentication.secret import HashFunction, HostSecret

# In order of preference. A host's secret is random, so NULL only lacks forward secrecy; stock hosts
# support all of these.
CONTROLLER_HASHES = (HashFunction.SHA256, HashFunction.SHA384, HashFunction.SHA512)
CONTROLLER_GROUPS = (
    DhGroup.FFDHE3072,
    DhGroup.FFDHE2048,
    DhGroup.FFDHE4096,
    DhGroup.FFDHE6144,
    DhGroup.FFDHE8192,
    DhGroup.NULL,
)


class _Step(Enum):
    """The next step; the names say which side acts."""

    HOST_NEGOTIATES = auto()
    HOST_FETCHES_CHALLENGE = auto()
    HOST_REPLIES = auto()
    HOST_FETCHES_SUCCESS = auto()
    HOST_CONFIRMS = auto()
    FAILED = auto()


class ControllerAuthentication:
    """Authenticates the host of one queue, and this side to the host if the host asks for that.

    The owner passes the data of Authentication Send to `send`, and answers Authentication Receive
    with the result of `receive`. Once `has_failed` and not `has_message`, it closes the connection.
    After a success the host may start again (reauthentication).
    """

    def __init__(
        self,
        *,
        host_nqn: str,
        subsystem_nqn: str,
        secret: HostSecret,
        random: Callable[[int], bytes],
        controller_secret: HostSecret | None = None,
        hashes: Sequence[HashFunction] = CONTROLLER_HASHES,
        groups: Sequence[DhGroup] = CONTROLLER_GROUPS,
    ) -> None:
        self._names = (host_nqn, subsystem_nqn)
        self._key = secret.transformed(host_nqn)
        self._own_key = (
            None if controller_secret is None else controller_secret.transformed(subsystem_nqn)
        )
        self._allowed = (tuple(hashes), tuple(groups))
        self._random = random
        self._step = _Step.HOST_NEGOTIATES
        self._is_authenticated = False
        self._failure: AuthenticationError | None = None
        self._message: bytes | None = None
        self._sent: Challenge | None = None
        self._ephemeral: EphemeralKey | None = None
        self._transaction = 0
        self._is_mutual = False

    @property
    def is_authenticated(self) -> bool:
        """Whether the host has authenticated; stays true during reauthentication."""
        return self._is_authenticated

    @property
    def has_failed(self) -> bool:
        """Whether the authentication has failed permanently."""
        return self._failure is not None

    @property
    def failure(self) -> AuthenticationError | None:
        """Reason of the failure."""
        return self._failure

    @property
    def has_message(self) -> bool:
        """Whether the host is expected to fetch a message."""
        return self._message is not None

    def send(self, data: bytes) -> None:
        """Process the data of Authentication Send. AuthenticationError if authentication failed.

        The command itself succeeds even then: the host fetches the failure if `has_message`.
        """
        if self._failure is not None:
            self._message = None
            raise self._failure
        try:
            self._take(data)
        except AuthenticationError as error:
            has_answer = error.reason != REFUSED_BY_PEER
            self._fail(error, transaction_of(data) if has_answer else None)
            raise

    def receive(self, length: int) -> bytes:
        """Return the message for an Authentication Receive with room for `length` bytes.

        If there is no message, or it doesn't fit, the authentication fails and a failure message is
        returned; empty if not even that fits.
        """
        if self._message is None and self._failure is None:
            text = "the host asked for a message before it sent one"
            error = AuthenticationError(Explanation.INCORRECT_MESSAGE, text)
            self._fail(error, self._transaction)
        elif self._message is not None and len(self._message) > length:
            text = f"room for {length} bytes; the message has {len(self._message)}"
            error = AuthenticationError(Explanation.INCORRECT_PAYLOAD, text)
            self._fail(error, self._transaction)
        message, self._message = self._message or b"", None
        if self._step is _Step.HOST_FETCHES_CHALLENGE:
            self._step = _Step.HOST_REPLIES
        elif self._step is _Step.HOST_FETCHES_SUCCESS:
            self._is_authenticated = self._is_authenticated or not self._is_mutual
            self._step = _Step.HOST_CONFIRMS if self._is_mutual else _Step.HOST_NEGOTIATES
        return message if len(message) <= length else b""

    def _take(self, data: bytes) -> None:
        kind = kind_of(data)
        if kind == Failure.OF_HOST:
            explanation = Failure.decode(data).explanation
            raise AuthenticationError(
                Explanation.FAILED,
                f"the host aborted authentication with explanation {explanation:#04x}",
                reason=REFUSED_BY_PEER,
            )
        expected = {
            _Step.HOST_NEGOTIATES: (Negotiate.KIND, self._negotiate),
            _Step.HOST_REPLIES: (Reply.KIND, self._reply),
            _Step.HOST_CONFIRMS: (Success2.KIND, self._confirm),
        }.get(self._step)
        if expected is None or expected[0] != kind:
            raise AuthenticationError(
                Explanation.INCORRECT_MESSAGE,
                f"message {kind} is not expected in step {self._step.name.lower()}",
            )
        expected[1](data)

    def _negotiate(self, data: bytes) -> None:
        negotiate = Negotiate.decode(data)
        hashes, groups = self._allowed
        hash_function = known_hash(negotiate.hashes, hashes)
        group = known_group(negotiate.groups, groups)
        self._transaction = negotiate.transaction
        self._ephemeral = EphemeralKey(group, self._random)
        self._sent = Challenge(
            transaction=negotiate.transaction,
            hash_function=hash_function,
            group=group,
            sequence=random_sequence(self._random),
            challenge=self._random(hash_function.digest_bytes),
            public_value=self._ephemeral.public_value,
        )
        self._message = self._sent.encode()
        self._step = _Step.HOST_FETCHES_CHALLENGE

    def _reply(self, data: bytes) -> None:
        # Whatever the result, this challenge and this key are used up.
        sent, self._sent = self._sent, None
        ephemeral, self._ephemeral = self._ephemeral, None
        if sent is None or ephemeral is None:
            raise AuthenticationError(Explanation.INCORRECT_MESSAGE, "a Reply without a challenge")
        reply = Reply.decode(data, sent.hash_function)
        self._check_transaction(reply.transaction)
        exchange = Exchange(
            hash_function=sent.hash_function,
            transaction=sent.transaction,
            host_nqn=self._names[0],
            subsystem_nqn=self._names[1],
            shared=ephemeral.agree(reply.public_value),
        )
        right = exchange.host_response(self._key, challenge=sent.challenge, sequence=sent.sequence)
        if not hmac.compare_digest(right, reply.response):
            raise AuthenticationError(Explanation.FAILED, "the host's response is wrong")
        self._is_mutual = reply.challenge is not None
        self._message = Success1(
            transaction=sent.transaction,
            hash_function=sent.hash_function,
            response=self._prove(exchange, sent, reply),
        ).encode()
        self._step = _Step.HOST_FETCHES_SUCCESS

    def _prove(self, exchange: Exchange, sent: Challenge, reply: Reply) -> bytes | None:
        if reply.challenge is None:
            return None
        if self._own_key is None:
            raise AuthenticationError(
                Explanation.FAILED,
                "the host wants the controller to authenticate, but the controller has no secret",
            )
        if reply.challenge == sent.challenge:
            raise AuthenticationError(
                Explanation.FAILED, "the host sent the controller's own challenge back"
            )
        return exchange.controller_response(
            self._own_key, challenge=reply.challenge, sequence=reply.sequence
        )

    def _confirm(self, data: bytes) -> None:
        self._check_transaction(Success2.decode(data).transaction)
        self._is_authenticated = True
        self._step = _Step.HOST_NEGOTIATES

    def _check_transaction(self, transaction: int) -> None:
        if transaction != self._transaction:
            raise AuthenticationError(
                Explanation.INCORRECT_PAYLOAD,
                f"transaction {transaction}; allowed: {self._transaction}",
            )

    def _fail(self, error: AuthenticationError, transaction: int | None) -> None:
        self._failure, self._step = error, _Step.FAILED
        self._is_authenticated = False
        self._sent = self._ephemeral = self._message = None
        if transaction is not None:
            self._message = Failure(
                kind=Failure.OF_CONTROLLER,
                transaction=transaction,
                explanation=error.explanation,
            ).encode()
