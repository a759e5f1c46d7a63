"""What a door of a daemon answers a caller that it doesn't admit, before it ends the connection.

One line, on a Unix socket: `sealane-refused`, the reason id, and a text, separated by blanks. gRPC
never begins so (a frame of HTTP/2 that long would have to be of an unknown type), nor do the
answers of the ring socket (docs/formats/ring-abi.md).
"""

from typing import Final

from sealane.errors import Error, VerificationError, foreign_reason, is_reason

REFUSED: Final = b"sealane-refused "
LINE_BYTES_MAX: Final = 512


def refusal(error: Error) -> bytes:
    """Return the line that tells a caller why it isn't admitted."""
    line = REFUSED + f"{error.reason} {error.args[0]}".encode()
    return line[: LINE_BYTES_MAX - 1] + b"\n"


def refusal_of(answer: bytes) -> VerificationError | None:
    """Return the error that such a line stands for; None for any other answer."""
    if not answer.startswith(REFUSED):
        return None
    line = answer[len(REFUSED) :].partition(b"\n")[0].decode(errors="replace")
    reason, _, text = line.partition(" ")
    if not is_reason(reason):
        return None
    return VerificationError(foreign_reason(reason), text)
