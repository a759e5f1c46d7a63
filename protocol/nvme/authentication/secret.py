"""Secrets in their standard form: `DHHC-1:hh:base64(secret, CRC-32):` (NVMe Base 2.0 §8.13.5.8)."""

import base64
import binascii
import hmac
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Self

from sealane.errors import UsageError

_VERSION = "DHHC-1"
_LENGTHS = (32, 48, 64)
_CHECKSUM_BYTES = 4
_TRANSFORM_LABEL = b"NVMe-over-Fabrics"


class HashFunction(IntEnum):
    """Hash functions of DH-HMAC-CHAP by their identifier."""

    SHA256 = 0x01
    SHA384 = 0x02
    SHA512 = 0x03

    @property
    def algorithm(self) -> str:
        """Name for `hashlib`."""
        return self.name.lower()

    @property
    def digest_bytes(self) -> int:
        """Length of a digest, a challenge and a response."""
        return 16 + 16 * self.value


class HostSecret:
    """Secret of a host or a controller: 32, 48 or 64 bytes, and the hash that binds it to a name.

    `str()` gives the standard form, for configuring a peer. `repr()` and formatting into another
    string don't reveal it.
    """

    __slots__ = ("_secret", "_transform")

    def __init__(self, secret: bytes, *, transform: HashFunction | None = None) -> None:
        if len(secret) not in _LENGTHS:
            raise UsageError(
                "secret.length", f"a secret of {len(secret)} bytes; allowed: 32, 48 or 64"
            )
        self._secret = bytes(secret)
        self._transform = transform

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the standard form. UsageError, which never contains the secret."""
        parts = text.split(":")
        if len(parts) != 4 or parts[0] != _VERSION or parts[3]:
            raise UsageError(
                "secret.format", f"the secret does not have the form {_VERSION}:hh:base64:"
            )
        if parts[1] not in {"00", "01", "02", "03"}:
            raise UsageError(
                "secret.hash", "the secret names an unknown hash; allowed: 00, 01, 02, 03"
            )
        try:
            content = base64.b64decode(parts[2], validate=True)
        except (binascii.Error, ValueError):
            raise UsageError("secret.format", "the secret is not base64") from None
        secret, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        identifier = int(parts[1])
        made = cls(secret, transform=HashFunction(identifier) if identifier else None)
        if zlib.crc32(secret).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
            raise UsageError(
                "secret.checksum", "the secret's checksum is wrong: is the secret complete?"
            )
        return made

    @classmethod
    def generate(
        cls, random: Callable[[int], bytes], *, transform: HashFunction | None = HashFunction.SHA256
    ) -> Self:
        """Create a secret as long as a digest of `transform`, 32 bytes for None."""
        length = HashFunction.SHA256.digest_bytes if transform is None else transform.digest_bytes
        return cls(random(length), transform=transform)

    def transformed(self, nqn: str) -> bytes:
        """Return the key for the name `nqn`: useless under any other name."""
        if self._transform is None:
            return self._secret
        return hmac.digest(self._secret, nqn.encode() + _TRANSFORM_LABEL, self._transform.algorithm)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostSecret):
            return NotImplemented
        same = hmac.compare_digest(self._secret, other._secret)
        return same and self._transform == other._transform

    def __hash__(self) -> int:
        return hash((self._secret, self._transform))

    def __str__(self) -> str:
        checksum = zlib.crc32(self._secret).to_bytes(_CHECKSUM_BYTES, "little")
        content = base64.b64encode(self._secret + checksum).decode()
        return f"{_VERSION}:{int(self._transform or 0):02}:{content}:"

    def __repr__(self) -> str:
        return f"HostSecret({len(self._secret)} bytes)"

    def __format__(self, specification: str) -> str:
        return format(repr(self), specification)

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a secret can't be pickled")
