"""DH-HMAC-CHAP: both roles against each other, known answers, and every field tampered with."""

import hashlib
import hmac

import pytest

from authentication_roles import (
    CONTROLLER_SECRET,
    HOST,
    OTHER_SECRET,
    ROOM,
    SECRET,
    SUBSYSTEM,
    controller,
    host,
    run,
    source,
)
from sealane.protocol.nvme.authentication import (
    AuthenticationError,
    DhGroup,
    Explanation,
    HashFunction,
    HostSecret,
)
from sealane.protocol.nvme.authentication.groups import prime
from sealane.protocol.nvme.authentication.messages import (
    Challenge,
    Success1,
)


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
    """The expected bytes follow the figures of NVMe Base 2.0 §8.13.4 and §8.13.5."""
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
    """Linux's host accepts this, which would make the controller's secret pointless."""

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
    with pytest.raises(AuthenticationError, match="not requested"):
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
    """The host's own proof doesn't prove the controller: labels and names differ."""
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

    with pytest.raises(AuthenticationError, match="own challenge back"):
        run(host(), controller(), reflect)


def test_replayed_messages_prove_nothing() -> None:
    recorded = run(host(), controller(random=source(11)))
    other = controller(random=source(12))
    other.send(recorded[0])
    other.receive(ROOM)
    with pytest.raises(AuthenticationError) as caught:
        other.send(recorded[2])
    assert caught.value.reason == "authentication.failed"
