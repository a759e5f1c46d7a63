"""Key hierarchy, wrapping and HPKE: the wrong key, purpose or context opens nothing."""

import dataclasses
import hmac
import uuid

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from sealane.crypto.encoding import fields
from sealane.crypto.hpke import Context, SignedSecret, open_signed, seal_signed
from sealane.crypto.kem import X25519KemKey
from sealane.crypto.keys import WrappingKey, derive_tree_secret, derive_volume_key, new_key
from sealane.errors import UsageError, VerificationError

VOLUME = uuid.UUID("01234567-89ab-cdef-0123-456789abcdef")
CONTEXT = Context(
    purpose="volume key",
    recipient="spiffe://sealane/gateway/g",
    incarnation=bytes(16),
    request_id=bytes(range(16)),
    volume_id=str(VOLUME),
    key_epoch=1,
    arena=(1, 1),
)


def test_volume_key_is_a_function_of_tenant_key_volume_and_epoch() -> None:
    tenant = bytes(range(32))
    key = derive_volume_key(tenant, volume_id=VOLUME, key_epoch=1)
    others = [
        derive_volume_key(tenant, volume_id=VOLUME, key_epoch=2),
        derive_volume_key(tenant, volume_id=uuid.UUID(int=7), key_epoch=1),
        derive_volume_key(bytes(32), volume_id=VOLUME, key_epoch=1),
    ]
    assert key == derive_volume_key(tenant, volume_id=VOLUME, key_epoch=1)
    assert all(key != other for other in others)
    assert len(key) == 32


@pytest.mark.parametrize("key_epoch", [0, 1 << 32])
def test_key_epoch_out_of_range_is_refused(key_epoch: int) -> None:
    with pytest.raises(UsageError, match="key epoch"):
        derive_volume_key(bytes(32), volume_id=VOLUME, key_epoch=key_epoch)


def test_tree_secret_is_a_function_of_device_secret_volume_and_generation() -> None:
    device = bytes(range(32))
    secret = derive_tree_secret(device, volume_id=VOLUME, generation=1)
    # RFC 5869 by hand: one block is enough for 32 bytes.
    label, what = b"sealane hmt v1", VOLUME.bytes + bytes((0, 0, 0, 1))
    info = b"".join(len(part).to_bytes(4, "big") + part for part in (label, what))
    extracted = hmac.digest(bytes(32), device, "sha256")
    assert secret == hmac.digest(extracted, info + b"\1", "sha256")
    others = [
        derive_tree_secret(device, volume_id=VOLUME, generation=2),
        derive_tree_secret(device, volume_id=uuid.UUID(int=7), generation=1),
        derive_tree_secret(bytes(32), volume_id=VOLUME, generation=1),
        derive_volume_key(device, volume_id=VOLUME, key_epoch=1),
    ]
    assert all(secret != other for other in others)


def test_tree_secret_of_what_is_no_device_secret_is_refused() -> None:
    for secret, generation in ((bytes(31), 1), (bytes(32), 0), (bytes(32), 1 << 32)):
        with pytest.raises(UsageError, match=r"key\.(size|generation)"):
            derive_tree_secret(secret, volume_id=VOLUME, generation=generation)


def test_wrapped_key_opens_only_for_its_purpose_owner_and_key() -> None:
    wrapping = WrappingKey(bytes(32))
    secret = new_key()
    wrapped = wrapping.wrap(secret, purpose="tenant key", owner="a")
    assert wrapping.unwrap(wrapped, purpose="tenant key", owner="a") == secret
    flipped = bytes([wrapped[0] ^ 1]) + wrapped[1:]
    for stored, key, purpose, owner in (
        (wrapped, bytes(32), "tenant key", "b"),
        (wrapped, bytes(32), "broker key", "a"),
        (wrapped, b"\1" * 32, "tenant key", "a"),
        (flipped, bytes(32), "tenant key", "a"),
        (wrapped[:11], bytes(32), "tenant key", "a"),
    ):
        with pytest.raises(VerificationError) as caught:
            WrappingKey(key).unwrap(stored, purpose=purpose, owner=owner)
        assert caught.value.reason == "key.wrap.invalid"


def test_wrapping_key_of_wrong_size_is_refused() -> None:
    with pytest.raises(UsageError, match="31 bytes; needed: 32"):
        WrappingKey(bytes(31))


@pytest.mark.parametrize(
    "change",
    [
        {"purpose": "lease"},
        {"recipient": "spiffe://sealane/gateway/h"},
        {"incarnation": b"\1" + bytes(15)},
        {"request_id": bytes(16)},
        {"volume_id": str(uuid.UUID(int=1))},
        {"key_epoch": 2},
        {"arena": (1, 2)},
        {"arena": (2, 1)},
        {"arena": None},
    ],
)
def test_sealed_secret_is_bound_to_every_field_of_its_context(change: dict[str, object]) -> None:
    broker, recipient = ec.generate_private_key(ec.SECP256R1()), X25519KemKey.create()
    public = recipient.public_key
    other = dataclasses.replace(CONTEXT, **change)  # type: ignore[arg-type]
    message = seal_signed(b"s" * 32, recipient_key=public, context=CONTEXT, signing_key=broker)
    assert (
        open_signed(message, private_key=recipient, context=CONTEXT, signer=broker.public_key())
        == b"s" * 32
    )
    with pytest.raises(VerificationError) as caught:
        open_signed(message, private_key=recipient, context=other, signer=broker.public_key())
    assert caught.value.reason == "secret.signature"
    # A broker signs another context with the same ciphertext: HPKE itself refuses.
    resigned = seal_signed(b"x", recipient_key=public, context=other, signing_key=broker)
    spliced = SignedSecret(
        sealed=message.sealed, signature=_sign_over(message.sealed, other, broker)
    )
    assert resigned.sealed != spliced.sealed
    with pytest.raises(VerificationError) as caught:
        open_signed(spliced, private_key=recipient, context=other, signer=broker.public_key())
    assert caught.value.reason == "secret.sealed"


def test_secret_signed_by_another_broker_or_sealed_to_another_node_is_refused() -> None:
    broker, recipient = ec.generate_private_key(ec.SECP256R1()), X25519KemKey.create()
    public = recipient.public_key
    message = seal_signed(b"s", recipient_key=public, context=CONTEXT, signing_key=broker)
    stranger = ec.generate_private_key(ec.SECP256R1()).public_key()
    with pytest.raises(VerificationError, match="not signed by the broker"):
        open_signed(message, private_key=recipient, context=CONTEXT, signer=stranger)
    with pytest.raises(VerificationError, match="can't be opened with this node"):
        open_signed(
            message,
            private_key=X25519KemKey.create(),
            context=CONTEXT,
            signer=broker.public_key(),
        )


@pytest.mark.parametrize("size", [0, 15, 17])
def test_request_id_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=r"request\.id\.size"):
        dataclasses.replace(CONTEXT, request_id=bytes(size))


def test_low_order_kem_key_is_refused() -> None:
    broker = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(VerificationError) as caught:
        seal_signed(b"s", recipient_key=bytes(32), context=CONTEXT, signing_key=broker)
    assert caught.value.reason == "key.kem.invalid"


def _sign_over(sealed: bytes, context: Context, key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.sign(fields("sealane sealed secret v1", context.info(), sealed), ec.ECDSA(SHA256()))
