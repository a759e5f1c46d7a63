"""Proof that a call comes from the attested process, not just from a holder of its TLS key.

A server gives each caller a call key, HPKE-sealed to the KEM key in the caller's certificate. Each
call then carries a proof: an HMAC under that key over everything that must not be replaced
(docs/understand/channels.md, "Call proofs"). Each counter value is valid for one call.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final

from sealane.crypto.certificates import Subject
from sealane.crypto.encoding import fields
from sealane.crypto.exchange import wipe
from sealane.crypto.kem import KemKey, seal, unseal
from sealane.errors import UsageError, VerificationError

KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 16
WINDOW: Final = 1024
"""Counters below the highest one seen that are still accepted, each once."""

_COUNTER_BYTES: Final = 8
_MAC_BYTES: Final = 32
PROOF_BYTES: Final = KEY_ID_BYTES + _COUNTER_BYTES + _MAC_BYTES
_KEY_LABEL: Final = "sealane call key v1"
_PROOF_LABEL: Final = "sealane call proof v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnds:
    """The two ends that a call key is for: their SPIFFE ids, and the caller's incarnation."""

    server: str
    caller: str
    incarnation: bytes

    def key_info(self, key_id: bytes) -> bytes:
        """Return HPKE's `info` for the call key with that id."""
        return fields(
            _KEY_LABEL, self.server.encode(), self.caller.encode(), self.incarnation, key_id
        )

    def message(self, method: str, request_digest: bytes, counter: int) -> bytes:
        """Return the bytes that the MAC of one call covers."""
        return fields(
            _PROOF_LABEL,
            method.encode(),
            self.server.encode(),
            self.caller.encode(),
            self.incarnation,
            counter.to_bytes(_COUNTER_BYTES, "big"),
            request_digest,
        )


def request_digest(request: bytes) -> bytes:
    """Return SHA-256 of a serialized request, which the proof covers."""
    return hashlib.sha256(request).digest()


class CallProver:
    """The caller's end of one call key. It owns the key, and counts its calls."""

    __slots__ = ("_ends", "_key", "counter", "key_id")

    def __init__(self, key_id: bytes, key: bytearray, *, ends: CallEnds) -> None:
        self.key_id = key_id
        self._key = key
        self._ends = ends
        self.counter = 0
        """Counter of the last call; it may be raised, never lowered."""

    @classmethod
    def open(cls, key_id: bytes, sealed: bytes, *, ends: CallEnds, kem: KemKey) -> "CallProver":
        """Open a call key that a server has sealed for `ends`. Blocks as long as the KEM key does.

        VerificationError `call.key.malformed`, or `secret.sealed`: it is not sealed to this caller,
        or not for these ends.
        """
        malformed = VerificationError(
            "call.key.malformed", f"{ends.server} sent a malformed call key"
        )
        if len(key_id) != KEY_ID_BYTES:
            raise malformed
        key = unseal(sealed, key=kem, info=ends.key_info(key_id))
        if len(key) != KEY_BYTES:
            wipe(key)
            raise malformed
        return cls(key_id, key, ends=ends)

    def prove(self, method: str, request: bytes) -> bytes:
        """Return the proof of the next call; a retry needs a new one, with its own counter value.

        UsageError `call.key.closed` after `close`.
        """
        if not self._key:
            raise UsageError("call.key.closed", "the call key is closed")
        self.counter += 1
        message = self._ends.message(method, request_digest(request), self.counter)
        mac = hmac.digest(self._key, message, "sha256")
        return self.key_id + self.counter.to_bytes(_COUNTER_BYTES, "big") + mac

    def close(self) -> None:
        """Wipe the key."""
        wipe(self._key)
        self._key.clear()


class CallKey:
    """The server's end of one call key: for one incarnation of a caller, in memory only."""

    __slots__ = ("_ends", "_key", "_window", "key_id", "sealed")

    def __init__(self, caller: Subject, *, server: str) -> None:
        """Create a key; VerificationError `key.kem.invalid` if it can't be sealed to the caller."""
        self._ends = CallEnds(
            server=server, caller=caller.spiffe_id, incarnation=caller.incarnation
        )
        self._key = bytearray(secrets.token_bytes(KEY_BYTES))
        self._window = ReplayWindow()
        self.key_id = secrets.token_bytes(KEY_ID_BYTES)
        try:
            self.sealed = seal(
                self._key,
                algorithm=caller.kem_algorithm,
                public_key=caller.kem_public_key,
                info=self._ends.key_info(self.key_id),
            )
        except ValueError as error:
            wipe(self._key)
            raise VerificationError(
                "key.kem.invalid", f"the KEM key of {caller.spiffe_id} is not usable"
            ) from error

    def check(self, proof: bytes, *, method: str, request_digest: bytes) -> None:
        """Check a proof and use up its counter value; VerificationError `call.proof.…`.

        `.malformed`; `.unknown_key`: made with another key; `.mismatch`: not of this call;
        `.replayed`; `.stale`: too old to rule out a replay.
        """
        if len(proof) != PROOF_BYTES:
            raise VerificationError(
                "call.proof.malformed", f"a proof of {len(proof)} bytes; allowed: {PROOF_BYTES}"
            )
        key_id, encoded = proof[:KEY_ID_BYTES], proof[KEY_ID_BYTES:-_MAC_BYTES]
        if key_id != self.key_id:
            raise unknown_key(self._ends.caller)
        counter = int.from_bytes(encoded, "big")
        message = self._ends.message(method, request_digest, counter)
        mac = hmac.digest(self._key, message, "sha256")
        if not hmac.compare_digest(mac, proof[-_MAC_BYTES:]):
            raise VerificationError(
                "call.proof.mismatch", f"the proof does not match this call by {self._ends.caller}"
            )
        self._window.spend(counter)

    def close(self) -> None:
        """Wipe the key."""
        wipe(self._key)


def unknown_key(caller: str) -> VerificationError:
    """Return the error for a proof under a key that this server does not have."""
    return VerificationError(
        "call.proof.unknown_key",
        f"{caller} uses a call key that is not known here: it must request a new one",
    )


class ReplayWindow:
    """The counter values that were used; all below the window count as used."""

    __slots__ = ("_highest", "_spent")

    def __init__(self) -> None:
        self._highest = 0
        # Bit i: `_highest` - i was used.
        self._spent = 0

    def spend(self, counter: int) -> None:
        """Use up a counter value; VerificationError `call.proof.replayed`, `call.proof.stale`."""
        if counter > self._highest:
            ahead = min(counter - self._highest, WINDOW)
            self._spent = (self._spent << ahead | 1) & ((1 << WINDOW) - 1)
            self._highest = counter
            return
        behind = self._highest - counter
        if counter < 1 or behind >= WINDOW:
            raise VerificationError(
                "call.proof.stale",
                f"counter {counter} is {behind} behind the highest; allowed: less than {WINDOW}",
            )
        if self._spent >> behind & 1:
            raise VerificationError("call.proof.replayed", f"counter {counter} was used before")
        self._spent |= 1 << behind
