"""The evidence collection: a single encoding, no trailing bytes, everything else refused."""

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealane.crypto.evidence.cmw import (
    EVIDENCE_BYTES_MAX,
    ITEMS_MAX,
    PRIMARY,
    Item,
    decode_collection,
    encode_collection,
    secondary_digests,
)
from sealane.errors import VerificationError

LABELS = st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True)
ITEM = st.builds(
    Item, st.sampled_from(["a/b", "application/vnd.x+cbor"]), st.binary(min_size=1, max_size=300)
)
COLLECTIONS = st.dictionaries(LABELS, ITEM, max_size=ITEMS_MAX - 1).map(
    lambda items: {**items, PRIMARY: Item("x/y", b"z")}
)


def refused(encoded: bytes) -> str:
    with pytest.raises(VerificationError) as caught:
        decode_collection(encoded)
    return caught.value.reason


@given(COLLECTIONS)
def test_collection_is_what_a_general_encoder_makes_of_it(items: dict[str, Item]) -> None:
    encoded = encode_collection(items)
    plain = {label: [item.media_type, item.value] for label, item in items.items()}
    assert encoded == cbor2.dumps(plain, canonical=True)
    assert decode_collection(encoded) == items


SMALL = encode_collection({PRIMARY: Item("a/b", bytes(300)), "gpu0": Item("c/d", b"e" * 24)})


def test_every_truncation_is_refused() -> None:
    assert {refused(SMALL[:end]) for end in range(len(SMALL))} == {"attestation.evidence.malformed"}


@given(st.integers(0, len(SMALL) - 1), st.integers(1, 255))
def test_a_changed_byte_gives_another_collection_or_none(position: int, change: int) -> None:
    changed = bytearray(SMALL)
    changed[position] ^= change
    try:
        decoded = decode_collection(bytes(changed))
    except VerificationError:
        return
    assert encode_collection(decoded) == changed
    assert decoded != decode_collection(SMALL)


@pytest.mark.parametrize(
    "encoded",
    [
        SMALL + b"\0",
        cbor2.dumps({"primary": ["a/b", b"x"], "a": ["a/b", b"x"]}),  # keys not in order
        b"\xa2" + 2 * (b"\x67primary\x82\x63a/b\x41x"),  # a key twice
        b"\xbf\x67primary\x82\x63a/b\x41x\xff",  # indefinite length
        b"\xb8\x01\x67primary\x82\x63a/b\x41x",  # a head longer than needed
        b"\xa1\x67primary\x83\x63a/b\x41x\x00",  # three members
        b"\xa1\x67primary\x82\x63a/b\x61x",  # text for bytes
        b"\xa1\x67primary\xc0\x82\x63a/b\x41x",  # a tag
        b"\xa1\x67primary\x82\x62ab\x41x",  # no media type
        b"\xa1\x67primarY\x82\x63a/b\x41x",
        cbor2.dumps({"gpu_0": ["a/b", b"x"], PRIMARY: ["a/b", b"x"]}, canonical=True),
        cbor2.dumps({PRIMARY: ["a/" + "b" * 254, b"x"]}, canonical=True),
        b"\xa1\x64gpu0\x82\x63a/b\x41x",  # no primary
        b"\xa1\x67primary\x82\x63a/b\x40",  # an empty value
        b"\xa1\x67primary\x82\x63a/b\x5b" + b"\xff" * 8,  # longer than all memory
        b"\xbb" + b"\xff" * 8,
        b"\xbc" + b"\xff" * 16,  # a head of a reserved form
        b"\xa0",
        b"",
        b"\x81" * 10_000,
        cbor2.dumps(
            {f"label{n:02}": ["a/b", b"x"] for n in range(ITEMS_MAX)} | {PRIMARY: ["a/b", b"x"]},
            canonical=True,
        ),
    ],
)
def test_other_encodings_are_refused(encoded: bytes) -> None:
    assert refused(encoded) == "attestation.evidence.malformed"


def test_size_is_looked_at_first() -> None:
    full = encode_collection({PRIMARY: Item("a/b", bytes(EVIDENCE_BYTES_MAX - 19))})
    assert len(full) == EVIDENCE_BYTES_MAX
    assert decode_collection(full)
    assert refused(b"\0" * (EVIDENCE_BYTES_MAX + 1)) == "attestation.evidence.size"


def test_digests_cover_label_type_and_value() -> None:
    base = {PRIMARY: Item("a/b", b"p"), "gpu0": Item("c/d", b"x"), "gpu1": Item("c/d", b"y")}
    digests = secondary_digests(base)
    assert len(set(digests)) == 2
    assert secondary_digests({**base, PRIMARY: Item("a/b", b"q")}) == digests
    for changed in (Item("c/e", b"x"), Item("c/d", b"z"), Item("c/d", b"y")):
        assert secondary_digests({**base, "gpu0": changed}) != digests
    swapped = {**base, "gpu0": base["gpu1"], "gpu1": base["gpu0"]}
    assert set(secondary_digests(swapped)).isdisjoint(digests)
