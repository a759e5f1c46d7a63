"""Responses of DH-HMAC-CHAP (NVMe Base 2.0 §8.13.5.4 and §8.13.5.5)."""

import hashlib
import hmac
from dataclasses import dataclass

from sealane.protocol.nvme.authentication.secret import HashFunction

_HOST = b"HostHost"
_CONTROLLER = b"Controller"
_NO_CONCATENATION = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Values that both responses of a transaction are bound to. `shared`: empty in group NULL."""

    hash_function: HashFunction
    transaction: int
    host_nqn: str
    subsystem_nqn: str
    shared: bytes

    def host_response(self, key: bytes, *, challenge: bytes, sequence: int) -> bytes:
        """Return R1: proof of the host's key for the controller's challenge."""
        names = (_HOST, self.host_nqn, self.subsystem_nqn)
        return self._response(key, challenge, sequence, names)

    def controller_response(self, key: bytes, *, challenge: bytes, sequence: int) -> bytes:
        """Return R2: proof of the controller's key for the host's challenge."""
        names = (_CONTROLLER, self.subsystem_nqn, self.host_nqn)
        return self._response(key, challenge, sequence, names)

    def _response(
        self, key: bytes, challenge: bytes, sequence: int, names: tuple[bytes, str, str]
    ) -> bytes:
        label, first, second = names
        message = b"".join(
            (
                self._augmented(challenge),
                sequence.to_bytes(4, "little"),
                self.transaction.to_bytes(2, "little"),
                bytes([_NO_CONCATENATION]),
                label,
                first.encode(),
                b"\0",
                second.encode(),
            )
        )
        return hmac.digest(key, message, self.hash_function.algorithm)

    def _augmented(self, challenge: bytes) -> bytes:
        if not self.shared:
            return challenge
        algorithm = self.hash_function.algorithm
        session_key = hashlib.new(algorithm, self.shared).digest()
        return hmac.digest(session_key, challenge, algorithm)
