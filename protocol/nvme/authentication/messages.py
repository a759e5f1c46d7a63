"""Messages of DH-HMAC-CHAP, byte by byte (NVMe Base 2.0 §8.13.4 and §8.13.5).

Bytes after a message must be zero, because controllers may fill the host's buffer. Reserved fields
are not checked. Any other malformed message raises AuthenticationError.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sealane.protocol.nvme.authentication.command import MESSAGE_BYTES_MAX
from sealane.protocol.nvme.authentication.errors import AuthenticationError, Explanation
from sealane.protocol.nvme.authentication.groups import DhGroup
from sealane.protocol.nvme.authentication.secret import HashFunction

COMMON = 0x00
DH_HMAC_CHAP = 0x01

_HEADER = struct.Struct("<BBxxH")  # type, identifier, transaction
_DESCRIPTOR_BYTES = 64
_LIST_MAX = 30  # room for identifiers of hashes, and of groups, in a descriptor
_PROTOCOL = 0x01  # DH-HMAC-CHAP among authentication protocols
_NEGOTIATE = struct.Struct("<BBxxHBB")
# type, identifier, transaction, hash length, hash, group, public value's length, sequence
_CHALLENGE = struct.Struct("<BBxxHBxBBHI")
# …, hash length, whether there is a challenge, public value's length, sequence
_REPLY = struct.Struct("<BBxxHBxBxHI")
_SUCCESS1 = struct.Struct("<BBxxHBxB7x")
_SUCCESS2 = struct.Struct("<BBxxH10x")
_FAILURE = struct.Struct("<BBxxHBB")
_REASON_FAILED = 0x01


@dataclass(frozen=True, slots=True, kw_only=True)
class Negotiate:
    """AUTH_Negotiate: the host's hashes and groups, in order of preference."""

    KIND: ClassVar[tuple[int, int]] = (COMMON, 0x00)

    transaction: int
    hashes: tuple[int, ...]
    groups: tuple[int, ...]

    def encode(self) -> bytes:
        """Encode."""
        descriptor = bytearray(_DESCRIPTOR_BYTES)
        descriptor[0:4] = bytes([_PROTOCOL, 0, len(self.hashes), len(self.groups)])
        descriptor[4 : 4 + len(self.hashes)] = bytes(self.hashes)
        descriptor[34 : 34 + len(self.groups)] = bytes(self.groups)
        return _NEGOTIATE.pack(*self.KIND, self.transaction, 0, 1) + descriptor

    @classmethod
    def decode(cls, data: bytes) -> "Negotiate":
        """Decode; unknown identifiers stay in the lists."""
        _need(data, _NEGOTIATE.size)
        _, _, transaction, concatenation, count = _NEGOTIATE.unpack_from(data)
        _need(data, _NEGOTIATE.size + count * _DESCRIPTOR_BYTES, exact=True)
        if concatenation:
            raise AuthenticationError(
                Explanation.CONCATENATION_MISMATCH, "secure channel concatenation is not offered"
            )
        for index in range(count):
            start = _NEGOTIATE.size + index * _DESCRIPTOR_BYTES
            descriptor = data[start : start + _DESCRIPTOR_BYTES]
            if descriptor[0] != _PROTOCOL:
                continue
            hash_count, group_count = descriptor[2], descriptor[3]
            if not (0 < hash_count <= _LIST_MAX and 0 < group_count <= _LIST_MAX):
                raise _incorrect(f"lists of {hash_count} hashes and {group_count} groups")
            return cls(
                transaction=transaction,
                hashes=tuple(descriptor[4 : 4 + hash_count]),
                groups=tuple(descriptor[34 : 34 + group_count]),
            )
        raise AuthenticationError(
            Explanation.PROTOCOL_NOT_USABLE, "the host doesn't offer DH-HMAC-CHAP"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """DH-HMAC-CHAP_Challenge: the controller's choice, challenge C1 and public value."""

    KIND: ClassVar[tuple[int, int]] = (DH_HMAC_CHAP, 0x01)

    transaction: int
    hash_function: HashFunction
    group: DhGroup
    sequence: int
    challenge: bytes
    public_value: bytes

    def encode(self) -> bytes:
        """Encode."""
        fields = (len(self.challenge), self.hash_function, self.group, len(self.public_value))
        header = _CHALLENGE.pack(*self.KIND, self.transaction, *fields, self.sequence)
        return header + self.challenge + self.public_value

    @classmethod
    def decode(cls, data: bytes) -> "Challenge":
        """Decode. The group checks the public value when it is used."""
        _need(data, _CHALLENGE.size)
        _, _, transaction, length, hash_id, group_id, value_length, sequence = (
            _CHALLENGE.unpack_from(data)
        )
        hash_function = known_hash([hash_id])
        group = known_group([group_id])
        _check_length(hash_function, length)
        end = _CHALLENGE.size + length
        _need(data, end + value_length, exact=True)
        _check_sequence(sequence)
        return cls(
            transaction=transaction,
            hash_function=hash_function,
            group=group,
            sequence=sequence,
            challenge=data[_CHALLENGE.size : end],
            public_value=data[end : end + value_length],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """DH-HMAC-CHAP_Reply: response R1, public value and, if mutual, challenge C2."""

    KIND: ClassVar[tuple[int, int]] = (DH_HMAC_CHAP, 0x02)

    transaction: int
    response: bytes
    challenge: bytes | None
    sequence: int
    public_value: bytes

    def encode(self) -> bytes:
        """Encode."""
        length, is_mutual = len(self.response), self.challenge is not None
        fields = (length, is_mutual, len(self.public_value), self.sequence)
        header = _REPLY.pack(*self.KIND, self.transaction, *fields)
        return header + self.response + (self.challenge or bytes(length)) + self.public_value

    @classmethod
    def decode(cls, data: bytes, hash_function: HashFunction) -> "Reply":
        """Decode a reply to a challenge with this hash."""
        _need(data, _REPLY.size)
        _, _, transaction, length, is_mutual, value_length, sequence = _REPLY.unpack_from(data)
        _check_length(hash_function, length)
        _need(data, _REPLY.size + 2 * length + value_length, exact=True)
        if is_mutual not in {0, 1}:
            raise _incorrect(f"CVALID is {is_mutual}")
        if is_mutual:
            _check_sequence(sequence)
        challenge = data[_REPLY.size + length : _REPLY.size + 2 * length]
        if not is_mutual and any(challenge):
            raise _incorrect("an invalid challenge (CVALID 0) has a nonzero value")
        return cls(
            transaction=transaction,
            response=data[_REPLY.size : _REPLY.size + length],
            challenge=challenge if is_mutual else None,
            sequence=sequence,
            public_value=data[_REPLY.size + 2 * length : _REPLY.size + 2 * length + value_length],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Success1:
    """DH-HMAC-CHAP_Success1: the host is authenticated; response R2 if the host asked for it."""

    KIND: ClassVar[tuple[int, int]] = (DH_HMAC_CHAP, 0x03)

    transaction: int
    hash_function: HashFunction
    response: bytes | None

    def encode(self) -> bytes:
        """Encode."""
        length = self.hash_function.digest_bytes
        fields = (self.transaction, length, self.response is not None)
        return _SUCCESS1.pack(*self.KIND, *fields) + (self.response or bytes(length))

    @classmethod
    def decode(cls, data: bytes, hash_function: HashFunction) -> "Success1":
        """Decode. A controller may omit the response if there is none."""
        _need(data, _SUCCESS1.size)
        _, _, transaction, length, is_mutual = _SUCCESS1.unpack_from(data)
        _check_length(hash_function, length)
        if is_mutual not in {0, 1}:
            raise _incorrect(f"RVALID is {is_mutual}")
        _need(data, _SUCCESS1.size + length * is_mutual, exact=True)
        response = data[_SUCCESS1.size : _SUCCESS1.size + length] if is_mutual else None
        return cls(transaction=transaction, hash_function=hash_function, response=response)


@dataclass(frozen=True, slots=True, kw_only=True)
class Success2:
    """DH-HMAC-CHAP_Success2: the controller is authenticated."""

    KIND: ClassVar[tuple[int, int]] = (DH_HMAC_CHAP, 0x04)

    transaction: int

    def encode(self) -> bytes:
        """Encode."""
        return _SUCCESS2.pack(*self.KIND, self.transaction)

    @classmethod
    def decode(cls, data: bytes) -> "Success2":
        """Decode."""
        _need(data, _SUCCESS2.size, exact=True)
        return cls(transaction=_SUCCESS2.unpack_from(data)[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """AUTH_Failure1 from a controller, AUTH_Failure2 from a host."""

    OF_CONTROLLER: ClassVar[tuple[int, int]] = (COMMON, 0xF1)
    OF_HOST: ClassVar[tuple[int, int]] = (COMMON, 0xF0)

    kind: tuple[int, int]
    transaction: int
    explanation: int

    def encode(self) -> bytes:
        """Encode."""
        return _FAILURE.pack(*self.kind, self.transaction, _REASON_FAILED, self.explanation)

    @classmethod
    def decode(cls, data: bytes) -> "Failure":
        """Decode either of them, with any reason."""
        _need(data, _FAILURE.size, exact=True)
        kind, identifier, transaction, _, explanation = _FAILURE.unpack_from(data)
        return cls(kind=(kind, identifier), transaction=transaction, explanation=explanation)


def kind_of(data: bytes) -> tuple[int, int]:
    """Return type and identifier of a message."""
    if not _HEADER.size <= len(data) <= MESSAGE_BYTES_MAX:
        raise _incorrect(
            f"a message of {len(data)} bytes; allowed: {_HEADER.size} to {MESSAGE_BYTES_MAX}"
        )
    return data[0], data[1]


def transaction_of(data: bytes) -> int:
    """Return the transaction of a message; 0 if it is too short to have one."""
    return int(_HEADER.unpack_from(data)[2]) if len(data) >= _HEADER.size else 0


def known_hash(
    offered: Sequence[int], allowed: Sequence[HashFunction] = tuple(HashFunction)
) -> HashFunction:
    """Return the first of `allowed` that is offered."""
    for one in allowed:
        if one in offered:
            return one
    raise AuthenticationError(
        Explanation.HASH_NOT_USABLE, f"hash functions {list(offered)} can't be used"
    )


def known_group(offered: Sequence[int], allowed: Sequence[DhGroup] = tuple(DhGroup)) -> DhGroup:
    """Return the first of `allowed` that is offered."""
    for one in allowed:
        if one in offered:
            return one
    raise AuthenticationError(
        Explanation.GROUP_NOT_USABLE, f"Diffie-Hellman groups {list(offered)} can't be used"
    )


def _need(data: bytes, length: int, *, exact: bool = False) -> None:
    if len(data) < length:
        raise _incorrect(f"a message of {len(data)} bytes; needed: {length}")
    if exact and any(data[length:]):
        raise _incorrect(f"a message of {length} bytes is followed by more data")


def _check_length(hash_function: HashFunction, length: int) -> None:
    if length != hash_function.digest_bytes:
        raise _incorrect(f"hash length {length}; allowed: {hash_function.digest_bytes}")


def _check_sequence(sequence: int) -> None:
    if sequence == 0:
        raise _incorrect("a challenge's sequence number is 0")


def _incorrect(text: str) -> AuthenticationError:
    return AuthenticationError(Explanation.INCORRECT_PAYLOAD, text)
