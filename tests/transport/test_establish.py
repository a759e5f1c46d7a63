from dataclasses import fields, replace

import pytest

from sealane.crypto.exchange import Exchange
from sealane.errors import VerificationError
from sealane.transport.establish import Transcript, confirm, derive


def make(initiator: Exchange, responder: Exchange) -> Transcript:
    return Transcript(
        version=1,
        display_name="gradients",
        initiator_node="fabric-a",
        responder_node="fabric-b",
        initiator_certificate=b"c" * 32,
        initiator_connection_id=bytes(range(8)),
        responder_connection_id=bytes(range(8, 16)),
        initiator_public_key=initiator.public_key,
        responder_public_key=responder.public_key,
        initiator_nonce=b"i" * 32,
        responder_nonce=b"r" * 32,
        unit_bytes=1408,
        rate_bits_per_second=200_000_000,
        initiator_address="127.0.0.1:1000",
        responder_address="127.0.0.1:2000",
    )


def test_both_sides_get_mirrored_keys_and_the_same_confirmation() -> None:
    left, right = Exchange(), Exchange()
    transcript = make(left, right)

    initiator = derive(left, transcript, is_initiator=True)
    responder = derive(right, transcript, is_initiator=False)
    keys = confirm(initiator, responder.confirmation)

    assert keys.send == responder.keys.receive
    assert keys.receive == responder.keys.send
    assert keys.send != keys.receive
    assert responder.confirmation not in (bytes(keys.send), bytes(keys.receive))


@pytest.mark.parametrize("name", [field.name for field in fields(Transcript)])
def test_any_changed_field_breaks_the_confirmation(name: str) -> None:
    left, right = Exchange(), Exchange()
    transcript = make(left, right)
    value = getattr(transcript, name)
    if name == "version":
        with pytest.raises(VerificationError):
            derive(left, replace(transcript, version=2), is_initiator=True)
        return
    if isinstance(value, int):
        changed = replace(transcript, **{name: value + 1})
    elif isinstance(value, str):
        changed = replace(transcript, **{name: value + "x"})
    elif name.endswith("public_key"):
        changed = replace(transcript, **{name: Exchange().public_key})
    else:
        changed = replace(transcript, **{name: bytes([value[0] ^ 1]) + value[1:]})

    initiator = derive(left, transcript, is_initiator=True)
    responder = derive(right, changed, is_initiator=False)

    with pytest.raises(VerificationError) as refused:
        confirm(initiator, responder.confirmation)
    assert refused.value.reason == "session.establish.confirmation"
    assert initiator.keys.send == bytes(32), "keys of a failed exchange are wiped"


def test_fields_can_not_run_into_each_other() -> None:
    left, right = Exchange(), Exchange()
    transcript = make(left, right)

    shifted = replace(transcript, display_name="gradientsf", initiator_node="abric-a")

    assert shifted.encode() != transcript.encode()


@pytest.mark.parametrize(
    "name",
    [
        "initiator_certificate",
        "initiator_connection_id",
        "responder_connection_id",
        "initiator_nonce",
        "responder_nonce",
    ],
)
def test_values_of_wrong_length_are_refused(name: str) -> None:
    transcript = make(Exchange(), Exchange())

    with pytest.raises(VerificationError) as refused:
        replace(transcript, **{name: b"short"})

    assert refused.value.reason == "session.establish.malformed"
