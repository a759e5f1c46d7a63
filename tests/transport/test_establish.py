from dataclasses import fields, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from sealane.crypto.certificates import Subject
from sealane.crypto.exchange import Exchange
from sealane.errors import UsageError, VerificationError
from sealane.transport.establish import (
    VERSION,
    VERSIONS,
    Established,
    SessionOffer,
    Shown,
    Transcript,
    check_secret,
    confirm,
    derive,
    prove_secret,
    session_secret,
)

SHARES = (b"i" * 32, b"r" * 32)


def subject(node: str) -> Subject:
    return Subject(
        node=node, role="fabric", tenant="t", incarnation=b"n" * 16, kem_public_key=b"k" * 32
    )


def make(initiator: Exchange, responder: Exchange) -> Transcript:
    offer = SessionOffer(
        version=VERSION,
        display_name="gradients",
        initiator=subject("fabric-a"),
        responder=subject("fabric-b"),
        initiator_shown=Shown(certificate=b"c" * 32, token=b"t" * 32),
        connection_id=bytes(range(8)),
        public_key=initiator.public_key,
        nonce=b"i" * 32,
        units=(8896, 1408),
        rate_bits_per_second=200_000_000,
        addresses=("127.0.0.1:1000", "127.0.0.1:1001"),
    )
    return Transcript(
        offer=offer,
        responder_shown=Shown(certificate=b"d" * 32, token=b"u" * 32),
        connection_id=bytes(range(8, 16)),
        public_key=responder.public_key,
        nonce=b"r" * 32,
        units=(1408,),
        addresses=("127.0.0.1:2000",),
    )


def derived(
    exchange: Exchange,
    transcript: Transcript,
    *,
    is_initiator: bool,
    shares: tuple[bytes, bytes] = SHARES,
    secret: bytearray | None = None,
) -> Established:
    return derive(
        exchange,
        transcript,
        initiator_share=bytearray(shares[0]),
        responder_share=bytearray(shares[1]),
        secret=secret,
        is_initiator=is_initiator,
    )


def test_both_sides_get_mirrored_keys_and_the_same_confirmation() -> None:
    left, right = Exchange(), Exchange()
    transcript = make(left, right)

    initiator = derived(left, transcript, is_initiator=True)
    responder = derived(right, transcript, is_initiator=False)
    keys = confirm(initiator, responder.confirmation)

    assert keys.send == responder.keys.receive
    assert keys.receive == responder.keys.send
    assert keys.send != keys.receive
    assert responder.confirmation not in (bytes(keys.send), bytes(keys.receive))


def test_no_two_exchanges_give_the_same_keys() -> None:
    """Packet numbers start at 0 in each session, so a restarted fabric needs other keys."""
    seen = set()
    for _ in range(50):
        left, right = Exchange(), Exchange()
        # Everything else is as before the restart.
        established = derived(left, make(left, right), is_initiator=True)
        seen |= {bytes(established.keys.send), bytes(established.keys.receive)}

    assert len(seen) == 100


def test_shares_are_wiped_and_count() -> None:
    left, right = Exchange(), Exchange()
    transcript = make(left, right)
    ours, theirs = bytearray(SHARES[0]), bytearray(SHARES[1])
    initiator = derive(
        left,
        transcript,
        initiator_share=ours,
        responder_share=theirs,
        secret=None,
        is_initiator=True,
    )
    assert ours == theirs == bytes(32)
    for shares in ((b"x" * 32, SHARES[1]), (SHARES[0], b"x" * 32), SHARES[::-1]):
        other = derived(right, transcript, is_initiator=False, shares=shares)
        assert other.confirmation != initiator.confirmation
        assert other.keys.send != initiator.keys.receive


def test_a_secret_of_the_jobs_is_part_of_the_keys_and_proved_for_one_offer() -> None:
    left, right = Exchange(), Exchange()
    transcript = make(left, right)
    ours, other = session_secret(b"s" * 16), session_secret(b"t" * 16)
    initiator = derived(left, transcript, is_initiator=True, secret=ours)
    assert confirm(
        initiator, derived(right, transcript, is_initiator=False, secret=ours).confirmation
    )
    for theirs in (other, None):
        established = derived(right, transcript, is_initiator=False, secret=theirs)
        assert established.confirmation != initiator.confirmation
    proof = prove_secret(ours, transcript.offer)
    check_secret(ours, transcript.offer, proof)
    for secret, offer, shown in (
        (other, transcript.offer, proof),
        (ours, replace(transcript.offer, nonce=b"j" * 32), proof),
        (ours, transcript.offer, b""),
    ):
        with pytest.raises(VerificationError) as caught:
            check_secret(secret, offer, shown)
        assert caught.value.reason == "session.secret.mismatch"


def changed(value: Any, name: str) -> Any:
    if isinstance(value, Subject):
        return replace(value, incarnation=b"m" * 16)
    if isinstance(value, Shown):
        return replace(value, token=b"v" * 32)
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str | tuple):
        return value[1:]
    if name == "public_key":
        return Exchange().public_key
    return bytes([value[0] ^ 1]) + value[1:]


OFFERED = [field.name for field in fields(SessionOffer) if field.name != "version"]
ADDED = [field.name for field in fields(Transcript) if field.name != "offer"]


@pytest.mark.parametrize("name", [*(f"offer.{name}" for name in OFFERED), *ADDED])
def test_any_changed_field_breaks_the_confirmation(name: str) -> None:
    left, right = Exchange(), Exchange()
    transcript = make(left, right)
    offered, _, inner = name.rpartition(".")
    part: Any = transcript.offer if offered else transcript
    other = replace(part, **{inner: changed(getattr(part, inner), inner)})

    initiator = derived(left, transcript, is_initiator=True)
    seen = replace(transcript, offer=other) if offered else other
    responder = derived(right, seen, is_initiator=False)

    with pytest.raises(VerificationError) as refused:
        confirm(initiator, responder.confirmation)
    assert refused.value.reason == "session.establish.confirmation"
    assert initiator.keys.send == bytes(32), "keys of a failed exchange are wiped"


@pytest.mark.parametrize(
    "change",
    [
        {"node": "fabric-c"},
        {"role": "gateway"},
        {"tenant": "u"},
        {"incarnation": b"m" * 16},
        {"kem_public_key": b"l" * 32},
        {"kem_algorithm": "p256"},
    ],
)
def test_everything_that_a_certificate_says_is_in_the_offer(change: dict[str, Any]) -> None:
    offer = make(Exchange(), Exchange()).offer
    encoded = offer.encode()

    assert replace(offer, initiator=replace(offer.initiator, **change)).encode() != encoded
    assert replace(offer, responder=replace(offer.responder, **change)).encode() != encoded


@pytest.mark.parametrize("name", ["certificate", "token"])
def test_what_both_ends_have_shown_is_in_the_transcript(name: str) -> None:
    transcript = make(Exchange(), Exchange())
    offer, encoded = transcript.offer, transcript.encode()

    shown = replace(transcript.responder_shown, **{name: b"v" * 32})
    assert replace(transcript, responder_shown=shown).encode() != encoded
    shown = replace(offer.initiator_shown, **{name: b"v" * 32})
    assert replace(offer, initiator_shown=shown).encode() != offer.encode()
    with pytest.raises(VerificationError) as refused:
        replace(shown, **{name: b"short"})
    assert refused.value.reason == "session.establish.malformed"


def test_another_version_is_refused() -> None:
    offer = make(Exchange(), Exchange()).offer

    for version in (VERSION + 1, VERSIONS[-1] - 1):
        with pytest.raises(UsageError) as refused:
            replace(offer, version=version)
        assert refused.value.reason == "session.establish.version"


def test_each_version_has_keys_of_its_own() -> None:
    left, right = Exchange(), Exchange()
    transcript = make(left, right)
    earlier = replace(transcript, offer=replace(transcript.offer, version=VERSIONS[-1]))
    keys = [derived(left, one, is_initiator=True) for one in (transcript, earlier)]
    assert keys[0].confirmation != keys[1].confirmation
    assert keys[0].keys.send != keys[1].keys.send


def fixed(private: bytes) -> Exchange:
    exchange = Exchange()
    exchange._private = X25519PrivateKey.from_private_bytes(private)
    exchange.public_key = exchange._private.public_key().public_bytes_raw()
    return exchange


@pytest.mark.parametrize(
    ("version", "send", "receive", "confirmation"),
    [
        (
            5,
            "51b6bd6f499d09bfa491b5193e79ac2c67832ae99a531bc89964ded99d8cc79a",
            "bd97bebf9cb6c3709b3e95ea29d83b9063626102712ee1284d1c3c757708c0e8",
            "29a428b12dfd2c3be95eeddacb87fcdec03fa9cb1de168bb387738b432feb854",
        ),
        (
            6,
            "a8c70a8e03da9edcb579e40710d20cef491092b3d859babb31da01d84a981cea",
            "ee4a44af5dd10c9e2ba456654b9981f3eb6f6b7baa9e333aa4542bbd10da6d05",
            "f7c817e4794505a709d364302ae3ab1b5de1bd4826ed96c60b5678441f9c44a2",
        ),
    ],
)
def test_the_keys_of_a_version_stay_as_they_are(
    version: int, send: str, receive: str, confirmation: str
) -> None:
    """A fabric of another release derives the same; checked by HKDF written out with HMAC."""
    left, right = fixed(b"\x01" * 32), fixed(b"\x02" * 32)
    transcript = make(left, right)
    transcript = replace(transcript, offer=replace(transcript.offer, version=version))
    established = derived(left, transcript, is_initiator=True)
    assert established.keys.send.hex() == send
    assert established.keys.receive.hex() == receive
    assert established.confirmation.hex() == confirmation


def test_fields_can_not_run_into_each_other() -> None:
    offer = make(Exchange(), Exchange()).offer

    shifted = replace(
        offer, display_name="gradientss", initiator=replace(offer.initiator, tenant="")
    )

    assert shifted.encode() != offer.encode()


@pytest.mark.parametrize("name", ["connection_id", "public_key", "nonce"])
def test_values_of_wrong_length_are_refused(name: str) -> None:
    transcript = make(Exchange(), Exchange())

    with pytest.raises(VerificationError) as refused:
        replace(transcript.offer, **{name: b"short"})
    assert refused.value.reason == "session.establish.malformed"
    with pytest.raises(VerificationError):
        replace(transcript, **{name: b"short"})
