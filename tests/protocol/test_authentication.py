"""DH-HMAC-CHAP: both roles against each other, known answers, and every field tampered with.

The transformed keys come from `nvme gen-dhchap-key` of nvme-cli 2.3; the first secret is the
example of NVMe Base 2.0 §8.13.5.8.
"""

import base64
import hashlib
import hmac
import itertools
import random
import warnings
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric import dh
from hypothesis import given, settings
from hypothesis import strategies as st

from sealane.errors import ProtocolError, UsageError
from sealane.protocol.nvme.authentication import (
    AuthenticationCommand,
    AuthenticationError,
    ControllerAuthentication,
    DhGroup,
    Explanation,
    HashFunction,
    HostAuthentication,
    HostSecret,
    decode_authentication,
)
from sealane.protocol.nvme.authentication.groups import EphemeralKey, prime
from sealane.protocol.nvme.authentication.messages import (
    Challenge,
    Failure,
    Negotiate,
    Reply,
    Success1,
    Success2,
)

HOST = "nqn.2014-08.org.example:host"
SUBSYSTEM = "nqn.2014-08.org.example:subsystem"
SPECIFICATION_SECRET = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"
SECRET = HostSecret(bytes(range(32)), transform=HashFunction.SHA256)
CONTROLLER_SECRET = HostSecret(bytes(range(100, 148)), transform=HashFunction.SHA384)
OTHER_SECRET = HostSecret(bytes(32), transform=HashFunction.SHA256)
ROOM = 4096
# Any one-bit change of a field a role must look at is refused by one side or the other.
PROOF_BITS = (0, 7)


def source(seed: int = 0) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def controller(**changes: object) -> ControllerAuthentication:
    fields: dict[str, object] = {
        "host_nqn": HOST,
        "subsystem_nqn": SUBSYSTEM,
        "secret": SECRET,
        "controller_secret": CONTROLLER_SECRET,
        "random": source(1),
        "hashes": (HashFunction.SHA256,),
        "groups": (DhGroup.NULL,),
    }
    return ControllerAuthentication(**(fields | changes))  # type: ignore[arg-type]


def host(**changes: object) -> HostAuthentication:
    fields: dict[str, object] = {
        "host_nqn": HOST,
        "subsystem_nqn": SUBSYSTEM,
        "secret": SECRET,
        "controller_secret": CONTROLLER_SECRET,
        "random": source(2),
    }
    return HostAuthentication(**(fields | changes))  # type: ignore[arg-type]


Mutation = Callable[[int, bytes], bytes]


def run(
    one: HostAuthentication, other: ControllerAuthentication, mutate: Mutation | None = None
) -> list[bytes]:
    """Exchange messages until somebody is content or fails; returns all that were sent."""
    sent: list[bytes] = []

    def carry(message: bytes) -> bytes:
        sent.append(message)
        return message if mutate is None else mutate(len(sent) - 1, message)

    while not one.is_authenticated:
        if one.has_message:
            other.send(carry(one.take()))
        else:
            one.receive(carry(other.receive(ROOM)))
    return sent


@pytest.mark.parametrize("is_mutual", [False, True])
@pytest.mark.parametrize("group", DhGroup)
@pytest.mark.parametrize("hash_function", HashFunction)
def test_roles_agree(hash_function: HashFunction, group: DhGroup, is_mutual: bool) -> None:
    one = host(controller_secret=CONTROLLER_SECRET if is_mutual else None)
    other = controller(hashes=(hash_function,), groups=(group,))

    sent = run(one, other)

    challenge = Challenge.decode(sent[1])
    assert (challenge.hash_function, challenge.group) == (hash_function, group)
    assert [len(message) for message in sent] == [
        72,
        16 + hash_function.digest_bytes + group.value_bytes,
        16 + 2 * hash_function.digest_bytes + group.value_bytes,
        16 + hash_function.digest_bytes,
        *([16] if is_mutual else []),
    ]
    assert one.is_authenticated
    assert other.is_authenticated
    assert not other.has_failed
    assert not other.has_message


def test_a_controller_chooses_what_it_likes_best() -> None:
    other = controller(
        hashes=(HashFunction.SHA384, HashFunction.SHA256), groups=(DhGroup.FFDHE2048, DhGroup.NULL)
    )
    sent = run(host(), other)
    challenge = Challenge.decode(sent[1])
    assert challenge.hash_function is HashFunction.SHA384
    assert challenge.group is DhGroup.FFDHE2048


def test_a_host_may_authenticate_again() -> None:
    other = controller()
    run(host(), other)
    sent = run(host(random=source(3)), other)
    assert other.is_authenticated
    assert Challenge.decode(sent[1]).challenge != Challenge.decode(run(host(), other)[1]).challenge


def test_failing_to_authenticate_again_ends_it() -> None:
    other = controller()
    run(host(), other)
    with pytest.raises(AuthenticationError):
        run(host(secret=OTHER_SECRET), other)
    assert not other.is_authenticated


def test_bytes_are_those_of_the_specification() -> None:
    """Written out by hand from the figures of NVMe Base 2.0 §8.13.4 and §8.13.5."""
    one, other = host(random=source(5)), controller(random=source(6))
    negotiate, challenge, reply, success1, success2 = run(one, other)

    transaction = negotiate[4:6]
    identifiers = bytes([3, 2, 1]) + bytes(27) + bytes([2, 3, 4, 5, 1, 0]) + bytes(24)
    assert negotiate == b"\0\0\0\0" + transaction + b"\0\1" + b"\1\0\3\6" + identifiers
    assert challenge[:12] == b"\1\1\0\0" + transaction + b"\x20\0\1\0\0\0"
    assert challenge[12:16] != bytes(4)
    assert reply[:12] == b"\1\2\0\0" + transaction + b"\x20\0\1\0\0\0"
    assert success1[:16] == b"\1\3\0\0" + transaction + b"\x20\0\1" + bytes(7)
    assert success2 == b"\1\4\0\0" + transaction + bytes(10)

    key = hmac.digest(bytes(range(32)), HOST.encode() + b"NVMe-over-Fabrics", "sha256")
    proof = challenge[16:48] + challenge[12:16] + transaction + b"\0" + b"HostHost"
    proof += HOST.encode() + b"\0" + SUBSYSTEM.encode()
    assert reply[16:48] == hmac.digest(key, proof, "sha256")
    key = hmac.digest(bytes(range(100, 148)), SUBSYSTEM.encode() + b"NVMe-over-Fabrics", "sha384")
    proof = reply[48:80] + reply[12:16] + transaction + b"\0" + b"Controller"
    proof += SUBSYSTEM.encode() + b"\0" + HOST.encode()
    assert success1[16:] == hmac.digest(key, proof, "sha256")


def test_a_group_augments_the_challenge() -> None:
    other = controller(groups=(DhGroup.FFDHE2048,))
    one = host(controller_secret=None)
    _, challenge, reply, _ = run(one, other)

    exponent = source(1)
    # The controller draws its exponent first.
    secret_exponent = int.from_bytes(exponent(29)) | 1 << 231
    modulus = prime(DhGroup.FFDHE2048)
    assert int.from_bytes(challenge[48:]) == pow(2, secret_exponent, modulus)
    shared = pow(int.from_bytes(reply[80:]), secret_exponent, modulus).to_bytes(256)
    augmented = hmac.digest(hashlib.sha256(shared).digest(), challenge[16:48], "sha256")
    key = SECRET.transformed(HOST)
    proof = augmented + challenge[12:16] + challenge[4:6] + b"\0" + b"HostHost"
    proof += HOST.encode() + b"\0" + SUBSYSTEM.encode()
    assert reply[16:48] == hmac.digest(key, proof, "sha256")


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"secret": OTHER_SECRET}, "controller"),
        ({"controller_secret": OTHER_SECRET}, "host"),
        ({"host_nqn": "nqn.2014-08.org.example:somebody"}, "controller"),
        ({"subsystem_nqn": "nqn.2014-08.org.example:else"}, "controller"),
    ],
)
def test_a_wrong_secret_or_name_is_refused(changes: dict[str, object], culprit: str) -> None:
    one, other = host(**changes), controller()
    with pytest.raises(AuthenticationError) as caught:
        run(one, other)
    assert caught.value.reason == "authentication.failed"
    assert caught.value.explanation is Explanation.FAILED
    refusing, refused = (other, one) if culprit == "controller" else (one, other)
    assert refusing.has_failed
    assert not refused.is_authenticated


def test_the_refused_host_learns_of_it() -> None:
    one, other = host(secret=OTHER_SECRET), controller()
    with pytest.raises(AuthenticationError):
        run(one, other)
    assert other.has_message
    failure = other.receive(ROOM)
    assert failure[:4] + failure[6:] == b"\0\xf1\0\0\1\1"
    with pytest.raises(AuthenticationError) as caught:
        one.receive(failure)
    assert caught.value.reason == "authentication.refused"
    assert not one.has_message
    assert not other.has_message


def test_the_refused_controller_learns_of_it() -> None:
    one, other = host(controller_secret=OTHER_SECRET), controller()
    with pytest.raises(AuthenticationError):
        run(one, other)
    failure = one.take()
    assert failure[:4] + failure[6:] == b"\0\xf0\0\0\1\1"
    with pytest.raises(AuthenticationError) as caught:
        other.send(failure)
    assert caught.value.reason == "authentication.refused"
    assert not other.has_message
    assert not other.is_authenticated


def test_a_controller_without_a_secret_can_not_prove_itself() -> None:
    with pytest.raises(AuthenticationError, match="no secret"):
        run(host(), controller(controller_secret=None))


def test_a_controller_that_gives_no_proof_is_refused() -> None:
    """Linux's host takes it for an answer; it would make the controller's secret pointless."""

    def without_proof(index: int, message: bytes) -> bytes:
        if index != 3:
            return message
        return Success1(
            transaction=int.from_bytes(message[4:6], "little"),
            hash_function=HashFunction.SHA256,
            response=None,
        ).encode()

    one = host()
    with pytest.raises(AuthenticationError, match="controller's response"):
        run(one, controller(), without_proof)
    assert not one.is_authenticated


@pytest.mark.parametrize("index", [1, 2])
def test_a_challenge_without_a_number_is_refused(index: int) -> None:
    def unnumbered(at: int, message: bytes) -> bytes:
        return message[:12] + bytes(4) + message[16:] if at == index else message

    with pytest.raises(AuthenticationError, match="sequence number"):
        run(host(), controller(), unnumbered)


def test_a_proof_is_there_or_not() -> None:
    def neither(index: int, message: bytes) -> bytes:
        return (message[:8] + b"\2" + message[9:]).ljust(200, b"\0") if index == 3 else message

    with pytest.raises(AuthenticationError, match="RVALID"):
        run(host(), controller(), neither)


@pytest.mark.parametrize("length", [0, 255, 257])
def test_a_public_value_of_another_group_is_refused(length: int) -> None:
    def replaced(index: int, message: bytes) -> bytes:
        if index != 2:
            return message
        return message[:10] + length.to_bytes(2, "little") + message[12:80] + b"\2" * length

    other = controller(groups=(DhGroup.FFDHE2048,))
    with pytest.raises(AuthenticationError, match=f"{length} bytes; allowed: 256"):
        run(host(), other, replaced)
    assert not other.is_authenticated


def test_a_proof_that_nobody_asked_for_is_refused() -> None:
    def with_proof(index: int, message: bytes) -> bytes:
        return message[:8] + b"\1" + message[9:] if index == 3 else message

    one = host(controller_secret=None)
    with pytest.raises(AuthenticationError, match="nobody asked"):
        run(one, controller(), with_proof)
    assert not one.is_authenticated


def test_a_short_success_without_proof_is_accepted_when_none_was_asked() -> None:
    def shortened(index: int, message: bytes) -> bytes:
        return message[:16] if index == 3 else message

    one = host(controller_secret=None)
    run(one, controller(), shortened)
    assert one.is_authenticated


def test_messages_may_be_filled_up_with_zeros() -> None:
    one = host()
    run(one, controller(), lambda _, message: message.ljust(2048, b"\0"))
    assert one.is_authenticated


def test_a_reflected_challenge_is_refused() -> None:
    """The host's own proof is no proof of the controller: labels and names differ."""
    shared = HostSecret(bytes(range(32)))
    one = host(secret=shared, controller_secret=shared)
    other = controller(secret=shared, controller_secret=shared)
    reply = b""

    def reflect(index: int, message: bytes) -> bytes:
        nonlocal reply
        reply = message if index == 2 else reply
        return message[:16] + reply[16:48] if index == 3 else message

    with pytest.raises(AuthenticationError, match="controller's response"):
        run(one, other, reflect)


def test_a_host_that_hands_back_the_controllers_challenge_is_refused() -> None:
    challenge = b""

    def reflect(index: int, message: bytes) -> bytes:
        nonlocal challenge
        challenge = message[16:48] if index == 1 else challenge
        return message[:48] + challenge if index == 2 else message

    with pytest.raises(AuthenticationError, match="reflected"):
        run(host(), controller(), reflect)


def test_replayed_messages_prove_nothing() -> None:
    recorded = run(host(), controller(random=source(11)))
    other = controller(random=source(12))
    other.send(recorded[0])
    other.receive(ROOM)
    with pytest.raises(AuthenticationError) as caught:
        other.send(recorded[2])
    assert caught.value.reason == "authentication.failed"


def _fields() -> list[tuple[int, int]]:
    """(message, byte) of every field that a receiver has to look at."""
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
    # Success2 alone comes after the host is content.
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
    with pytest.raises(ValueError, match="used once"):
        key.agree(value)


@pytest.mark.parametrize("group", [group for group in DhGroup if group])
def test_primes_are_the_ones_that_others_know(group: DhGroup) -> None:
    """OpenSSL agrees with us on the shared value, and says that the prime is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces that it gives finite fields up
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


@settings(deadline=None)  # time is not the subject, and the machine may be busy
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


def test_a_challenge_is_numbered_from_1() -> None:
    other = controller(random=bytes)  # nothing but zeros
    other.send(host().take())
    assert Challenge.decode(other.receive(ROOM)).sequence == 1


def test_messages_survive_the_wire() -> None:
    value = bytes(256)
    for message in (
        Negotiate(transaction=1, hashes=(1, 2), groups=(0,)),
        Success2(transaction=0xFFFF),
        Failure(kind=Failure.OF_HOST, transaction=2, explanation=7),
        Challenge(
            transaction=3,
            hash_function=HashFunction.SHA384,
            group=DhGroup.FFDHE2048,
            sequence=0xFFFF_FFFF,
            challenge=bytes(48),
            public_value=value,
        ),
    ):
        assert type(message).decode(message.encode()) == message
    reply = Reply(
        transaction=4, response=b"r" * 64, challenge=b"c" * 64, sequence=9, public_value=value
    )
    assert Reply.decode(reply.encode(), HashFunction.SHA512) == reply


@pytest.mark.parametrize(
    ("length", "transform", "transformed"),
    [
        (32, 1, "eGOjOSJAEO/H5bDhWMzHdMAz5kyhHZlbqU1HWBl05iU="),
        (48, 2, "OSFRps5xBlJdGYl/2Q2ky5ZJh7qP0Jm4ohTgY1XEoBTafULsd2tno2kh2U1D6F9M"),
        (
            64,
            3,
            "8F8lKumik69AkegfLCoXtKLOoohOebSUeYCrZ8OPiUBcjUK/ucQbSbOuYIao01rK4fDtbsyIE0OrKDbtGAOh2A==",
        ),
    ],
)
def test_keys_are_transformed_as_others_do(length: int, transform: int, transformed: str) -> None:
    secret = HostSecret(bytes(range(length)), transform=HashFunction(transform))
    assert base64.b64encode(secret.transformed(HOST)).decode() == transformed


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (32, "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:"),
        (
            48,
            "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:",
        ),
    ],
)
def test_secrets_are_written_as_others_do(length: int, text: str) -> None:
    secret = HostSecret(bytes(range(length)))
    assert str(secret) == text
    assert HostSecret.parse(text) == secret
    assert secret.transformed(HOST) == bytes(range(length))


def test_the_specifications_example_is_read() -> None:
    assert str(HostSecret.parse(SPECIFICATION_SECRET)) == SPECIFICATION_SECRET


@pytest.mark.parametrize("transform", [None, *HashFunction])
def test_made_secrets_survive_their_text(transform: HashFunction | None) -> None:
    secret = HostSecret.generate(source(), transform=transform)
    assert HostSecret.parse(str(secret)) == secret
    assert secret != HostSecret.generate(source(1), transform=transform)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "secret.format"),
        (SPECIFICATION_SECRET[:-1], "secret.format"),
        (SPECIFICATION_SECRET + "x", "secret.format"),
        (SPECIFICATION_SECRET.replace("DHHC-1", "DHHC-2"), "secret.format"),
        (SPECIFICATION_SECRET.replace(":00:", ":04:"), "secret.hash"),
        (SPECIFICATION_SECRET.replace(":00:", ":0:"), "secret.hash"),
        (SPECIFICATION_SECRET.replace("ia6z", "ia6!"), "secret.format"),
        (SPECIFICATION_SECRET.replace("ia6z", "ia7z"), "secret.checksum"),
        ("DHHC-1:00:AAAA:", "secret.length"),
        ("DHHC-1:00:é:", "secret.format"),
    ],
)
def test_bad_secrets_are_refused_without_being_shown(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        HostSecret.parse(text)
    assert caught.value.reason == reason
    assert "ia6" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_secret_does_not_show_itself() -> None:
    secret = HostSecret.parse(SPECIFICATION_SECRET)
    shown = f"{secret} {secret!r} {[secret]} {secret:>40}"
    assert "ia6z" not in shown
    assert "HostSecret(32 bytes)" in shown


@pytest.mark.parametrize("kind", [AuthenticationCommand.SEND, AuthenticationCommand.RECEIVE])
def test_commands_survive_the_wire(kind: int) -> None:
    command = AuthenticationCommand(command_id=77, kind=kind, length=1168)
    entry = command.encode()
    assert decode_authentication(entry) == command
    assert (entry[0], entry[4], entry[41:48]) == (0x7F, kind, b"\1\1\xe9\x90\4\0\0")


@pytest.mark.parametrize(
    ("offset", "value"), [(0, 2), (4, 0), (41, 0), (42, 2), (43, 0), (44, 0), (47, 1)]
)
def test_bad_commands_are_refused(offset: int, value: int) -> None:
    entry = bytearray(AuthenticationCommand(command_id=1, kind=5, length=72).encode())
    entry[offset] = value
    with pytest.raises(ProtocolError):
        decode_authentication(bytes(entry))
