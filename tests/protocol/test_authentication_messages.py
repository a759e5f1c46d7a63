"""Messages of DH-HMAC-CHAP that are changed, cut, out of turn or too long."""

import itertools
import warnings

import pytest
from cryptography.hazmat.primitives.asymmetric import dh
from hypothesis import given
from hypothesis import strategies as st

from authentication_roles import PROOF_BITS, ROOM, controller, host, run, source
from sealane.protocol.nvme.authentication import (
    AuthenticationError,
    DhGroup,
    Explanation,
    HashFunction,
)
from sealane.protocol.nvme.authentication.groups import EphemeralKey, prime
from sealane.protocol.nvme.authentication.messages import (
    Challenge,
    Failure,
)


def _fields() -> list[tuple[int, int]]:
    """Return (message, byte) of every field that a receiver has to check."""
    heads = {
        0: [0, 1, 6, 7, 8],
        1: [0, 1, 4, 5, 6, 8, 9, 10, 11, *range(12, 16), 16, 47],
        2: [0, 1, 4, 5, 6, 8, 10, 11, *range(12, 16), 16, 47, 48, 79],
        3: [0, 1, 4, 5, 6, 8, 16, 47],
        4: [0, 1, 4, 5],
    }
    return [(message, byte) for message, offsets in heads.items() for byte in offsets]


@pytest.mark.parametrize("bit", PROOF_BITS)
@pytest.mark.parametrize(("message", "byte"), _fields())
def test_every_field_counts(message: int, byte: int, bit: int) -> None:
    def flip(index: int, data: bytes) -> bytes:
        if index != message:
            return data
        changed = bytearray(data)
        changed[byte] ^= 1 << bit
        return bytes(changed)

    one, other = host(), controller()
    with pytest.raises(AuthenticationError):
        run(one, other, flip)
    # Only Success2 comes after the host has succeeded.
    assert not one.is_authenticated or message == 4
    assert not other.is_authenticated


@pytest.mark.parametrize("message", range(5))
def test_every_truncation_is_refused(message: int) -> None:
    lengths = [len(data) for data in run(host(), controller())]
    for length in range(lengths[message]):
        one, other = host(), controller()

        def cut(index: int, data: bytes, length: int = length) -> bytes:
            return data[:length] if index == message else data

        with pytest.raises(AuthenticationError) as caught:
            run(one, other, cut)
        assert caught.value.explanation is Explanation.INCORRECT_PAYLOAD
        assert not other.is_authenticated


@pytest.mark.parametrize("message", range(5))
def test_bytes_behind_a_message_are_refused(message: int) -> None:
    def longer(index: int, data: bytes) -> bytes:
        return data + b"\1" if index == message else data

    with pytest.raises(AuthenticationError) as caught:
        run(host(), controller(), longer)
    assert caught.value.reason == "authentication.payload"


@pytest.mark.parametrize(
    ("offset", "value", "explanation"),
    [
        (6, 1, Explanation.CONCATENATION_MISMATCH),
        (7, 0, Explanation.INCORRECT_PAYLOAD),
        (7, 2, Explanation.INCORRECT_PAYLOAD),
        (8, 9, Explanation.PROTOCOL_NOT_USABLE),
        (10, 0, Explanation.INCORRECT_PAYLOAD),
        (10, 31, Explanation.INCORRECT_PAYLOAD),
        (11, 0, Explanation.INCORRECT_PAYLOAD),
        (11, 31, Explanation.INCORRECT_PAYLOAD),
        (14, 9, Explanation.HASH_NOT_USABLE),
        (47, 9, Explanation.GROUP_NOT_USABLE),
    ],
)
def test_a_bad_offer_is_answered_with_its_explanation(
    offset: int, value: int, explanation: Explanation
) -> None:
    other = controller()
    offer = bytearray(host().take())
    offer[offset] = value
    with pytest.raises(AuthenticationError) as caught:
        other.send(bytes(offer))
    assert caught.value.explanation is explanation
    failure = Failure.decode(other.receive(ROOM))
    assert failure.kind == Failure.OF_CONTROLLER
    assert failure.explanation == explanation
    assert failure.transaction == int.from_bytes(offer[4:6], "little")


def test_a_second_protocol_in_an_offer_is_skipped() -> None:
    offer = host(controller_secret=None).take()
    other = controller()
    other.send(offer[:7] + b"\2" + b"\x77" + bytes(63) + offer[8:])
    assert Challenge.decode(other.receive(ROOM)).hash_function is HashFunction.SHA256


@pytest.mark.parametrize(
    ("changes", "explanation"),
    [
        ({"hashes": (HashFunction.SHA512,)}, Explanation.HASH_NOT_USABLE),
        ({"groups": (DhGroup.FFDHE2048,)}, Explanation.GROUP_NOT_USABLE),
    ],
)
def test_a_host_takes_only_what_it_offered(
    changes: dict[str, object], explanation: Explanation
) -> None:
    one, other = host(**changes), controller()
    one.take()
    other.send(host().take()[:4] + b"\0\0" + host().take()[6:])
    challenge = bytearray(other.receive(ROOM))
    challenge[4:6] = host(**changes).take()[4:6]
    with pytest.raises(AuthenticationError) as caught:
        one.receive(bytes(challenge))
    assert caught.value.explanation is explanation


@pytest.mark.parametrize("value", [0, 1, -1, 0xFF])
def test_predictable_public_values_are_refused(value: int) -> None:
    modulus = prime(DhGroup.FFDHE2048)
    number = {0: 0, 1: 1, -1: modulus - 1, 0xFF: modulus}[value]
    key = EphemeralKey(DhGroup.FFDHE2048, source())
    with pytest.raises(AuthenticationError, match="predictable"):
        key.agree(number.to_bytes(256))


def test_a_public_value_of_another_length_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="allowed: 256"):
        EphemeralKey(DhGroup.FFDHE2048, source()).agree(b"\2" * 255)


def test_an_ephemeral_key_serves_once() -> None:
    key = EphemeralKey(DhGroup.FFDHE2048, source())
    value = EphemeralKey(DhGroup.FFDHE2048, source(1)).public_value
    key.agree(value)
    with pytest.raises(ValueError, match="used only once"):
        key.agree(value)


@pytest.mark.parametrize("group", [group for group in DhGroup if group])
def test_primes_are_the_ones_that_others_know(group: DhGroup) -> None:
    """OpenSSL computes the same shared value and confirms the prime."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it deprecates finite fields
        parameters = dh.DHParameterNumbers(prime(group), 2).parameters()
        theirs = parameters.generate_private_key()
        ours = EphemeralKey(group, source())
        number = dh.DHPublicNumbers(
            int.from_bytes(ours.public_value), parameters.parameter_numbers()
        )
        value = theirs.public_key().public_numbers().y.to_bytes(group.value_bytes)
        assert ours.agree(value) == theirs.exchange(number.public_key())
    # Fermat's test of prime and (prime - 1) / 2 with the generator's square.
    half = (prime(group) - 1) // 2
    assert pow(4, half, prime(group)) == 1


def test_messages_out_of_turn_are_refused() -> None:
    sent = run(host(), controller())
    for first, second in itertools.product([None, 0], [2, 4]):
        other = controller()
        if first is not None:
            other.send(sent[first])
        with pytest.raises(AuthenticationError) as caught:
            other.send(sent[second])
        assert caught.value.explanation is Explanation.INCORRECT_MESSAGE


def test_a_second_offer_within_a_transaction_is_refused() -> None:
    other = controller()
    offer = host().take()
    other.send(offer)
    other.receive(ROOM)
    with pytest.raises(AuthenticationError) as caught:
        other.send(offer)
    assert caught.value.explanation is Explanation.INCORRECT_MESSAGE


def test_fetching_before_sending_fails() -> None:
    other = controller()
    failure = Failure.decode(other.receive(ROOM))
    assert failure.explanation == Explanation.INCORRECT_MESSAGE
    assert other.has_failed
    with pytest.raises(AuthenticationError):
        other.send(host().take())
    assert other.receive(ROOM) == b""


def test_a_message_that_does_not_fit_is_not_cut() -> None:
    other = controller()
    other.send(host().take())
    failure = Failure.decode(other.receive(47))
    assert failure.explanation == Explanation.INCORRECT_PAYLOAD
    assert other.has_failed


def test_not_even_the_failure_fits() -> None:
    other = controller()
    other.send(host().take())
    assert other.receive(4) == b""
    assert other.has_failed


def test_nothing_counts_before_it_is_fetched() -> None:
    one, other = host(controller_secret=None), controller()
    other.send(one.take())
    one.receive(other.receive(ROOM))
    other.send(one.take())
    assert not other.is_authenticated
    other.receive(ROOM)
    assert other.is_authenticated


def test_oversized_messages_are_refused() -> None:
    with pytest.raises(AuthenticationError, match="4097 bytes"):
        controller().send(bytes(4097))


@given(data=st.binary(max_size=200), step=st.integers(0, 2))
def test_noise_gets_a_failure_and_nothing_else(data: bytes, step: int) -> None:
    one, other = host(), controller()
    if step:
        other.send(one.take())
    if step == 2:
        other.receive(ROOM)
    with pytest.raises(AuthenticationError):
        other.send(data)
    assert not other.is_authenticated
