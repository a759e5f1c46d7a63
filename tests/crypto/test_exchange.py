import hashlib
import hmac

import pytest

from sealane.crypto.exchange import Exchange, wipe
from sealane.errors import VerificationError

LOW_ORDER = [
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
]


def test_both_sides_derive_the_same_secret() -> None:
    left, right = Exchange(), Exchange()

    secret = left.derive(right.public_key, b"transcript", "sealane test")

    assert secret == right.derive(left.public_key, b"transcript", "sealane test")
    assert len(secret) == 32
    assert isinstance(secret, bytearray)


def test_transcript_label_and_shares_all_separate_secrets() -> None:
    left, right = Exchange(), Exchange()

    secrets = {
        bytes(left.derive(right.public_key, b"transcript", "a")),
        bytes(left.derive(right.public_key, b"transcript", "b")),
        bytes(left.derive(right.public_key, b"transcripT", "a")),
        bytes(left.derive(Exchange().public_key, b"transcript", "a")),
    }

    assert len(secrets) == 4


def test_derivation_is_rfc_5869_with_the_hashed_transcript_as_salt() -> None:
    left, right = Exchange(), Exchange()
    shared = left._private.exchange(right._private.public_key())
    salt = hashlib.sha256(b"transcript").digest()
    extracted = hmac.digest(salt, shared, "sha256")
    expected = hmac.digest(extracted, b"label\x01", "sha256")

    assert right.derive(left.public_key, b"transcript", "label") == expected


@pytest.mark.parametrize("share", LOW_ORDER)
def test_low_order_share_is_refused(share: bytes) -> None:
    with pytest.raises(VerificationError) as refused:
        Exchange().derive(share, b"transcript", "label")

    assert refused.value.reason == "exchange.share.low_order"


@pytest.mark.parametrize("length", [0, 31, 33])
def test_share_of_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(VerificationError) as refused:
        Exchange().derive(b"\x09" * length, b"transcript", "label")

    assert refused.value.reason == "exchange.share.malformed"


def test_wipe_leaves_zeros_in_place() -> None:
    secret = bytearray(b"secret")

    wipe(secret)

    assert secret == bytes(6)
