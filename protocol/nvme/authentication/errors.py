"""Authentication failures: the codes in AUTH_Failure, and the error for logs."""

from enum import IntEnum
from typing import Final

from sealane.errors import VerificationError
from sealane.reasons import ReasonId


class Explanation(IntEnum):
    """Reason code explanation of AUTH_Failure1 and AUTH_Failure2."""

    FAILED = 0x01
    PROTOCOL_NOT_USABLE = 0x02
    CONCATENATION_MISMATCH = 0x03
    HASH_NOT_USABLE = 0x04
    GROUP_NOT_USABLE = 0x05
    INCORRECT_PAYLOAD = 0x06
    INCORRECT_MESSAGE = 0x07


_REASONS: Final[dict[Explanation, ReasonId]] = {
    Explanation.FAILED: "authentication.failed",
    Explanation.PROTOCOL_NOT_USABLE: "authentication.protocol",
    Explanation.CONCATENATION_MISMATCH: "authentication.concatenation",
    Explanation.HASH_NOT_USABLE: "authentication.hash",
    Explanation.GROUP_NOT_USABLE: "authentication.group",
    Explanation.INCORRECT_PAYLOAD: "authentication.payload",
    Explanation.INCORRECT_MESSAGE: "authentication.message",
}
REFUSED_BY_PEER: Final = "authentication.refused"


class AuthenticationError(VerificationError):
    """An authentication failed; `explanation` is what the peer is sent, or has sent."""

    def __init__(
        self, explanation: Explanation, message: str, *, reason: ReasonId | None = None
    ) -> None:
        super().__init__(reason or _REASONS[explanation], message)
        self.explanation = explanation
