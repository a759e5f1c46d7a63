"""Diffie-Hellman groups of DH-HMAC-CHAP: none, and the safe primes of RFC 7919.

Python's integers compute the powers, because libraries are removing finite-field groups
(docs/decisions/0009). Their running time depends on the exponent, so an exponent is used for one
exchange only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from sealane.protocol.nvme.authentication.errors import AuthenticationError, Explanation

_GENERATOR = 2


@dataclass(frozen=True, slots=True)
class _Parameters:
    """RFC 7919 appendix A: the constant in the prime's formula, and the length of an exponent."""

    bits: int
    constant: int
    exponent_bytes: int  # minimum in the RFC, in whole bytes


_PARAMETERS = {
    0x01: _Parameters(2048, 560_316, 29),
    0x02: _Parameters(3072, 2_625_351, 35),
    0x03: _Parameters(4096, 5_736_041, 41),
    0x04: _Parameters(6144, 15_705_020, 47),
    0x05: _Parameters(8192, 10_965_728, 50),
}


class DhGroup(IntEnum):
    """Groups by their identifier. NULL leaves the challenge unchanged: no forward secrecy."""

    NULL = 0x00
    FFDHE2048 = 0x01
    FFDHE3072 = 0x02
    FFDHE4096 = 0x03
    FFDHE6144 = 0x04
    FFDHE8192 = 0x05

    @property
    def value_bytes(self) -> int:
        """Length of a public value; 0 for NULL."""
        return 0 if self is DhGroup.NULL else _PARAMETERS[self].bits // 8


class EphemeralKey:
    """A key in one group, for one agreement. A key in the NULL group agrees on the empty value."""

    def __init__(self, group: DhGroup, random: Callable[[int], bytes]) -> None:
        self._group = group
        self._exponent: int | None = 0
        self.public_value = b""
        if group is not DhGroup.NULL:
            length = _PARAMETERS[group].exponent_bytes
            # The highest bit is set, so the exponent has its full length.
            self._exponent = int.from_bytes(random(length)) | 1 << (8 * length - 1)
            value = pow(_GENERATOR, self._exponent, prime(group))
            self.public_value = value.to_bytes(group.value_bytes)

    def agree(self, public_value: bytes) -> bytes:
        """Return the shared value, as long as the prime. AuthenticationError if out of range.

        The exponent is discarded in any case.
        """
        exponent, self._exponent = self._exponent, None
        if exponent is None:
            raise ValueError("an ephemeral key can be used only once")
        if len(public_value) != self._group.value_bytes:
            raise AuthenticationError(
                Explanation.INCORRECT_PAYLOAD,
                f"a public value of {self._group.name} has {len(public_value)} bytes; "
                f"allowed: {self._group.value_bytes}",
            )
        if self._group is DhGroup.NULL:
            return b""
        value, modulus = int.from_bytes(public_value), prime(self._group)
        if not 1 < value < modulus - 1:
            raise AuthenticationError(
                Explanation.INCORRECT_PAYLOAD,
                "the peer's public value makes the shared secret predictable",
            )
        return pow(value, exponent, modulus).to_bytes(self._group.value_bytes)


@lru_cache
def prime(group: DhGroup) -> int:
    """Return the safe prime: 2^b - 2^(b-64) + (floor(2^(b-130) e) + constant) 2^64 - 1."""
    parameters = _PARAMETERS[group]
    guard = 64
    euler, term, divisor = 0, 1 << (parameters.bits - 130 + guard), 1
    while term:
        euler += term
        term //= divisor
        divisor += 1
    high = (1 << parameters.bits) - (1 << (parameters.bits - 64))
    return high + (((euler >> guard) + parameters.constant) << 64) - 1
