from dataclasses import dataclass

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealane.crypto.kem import P256, KemKey, X25519KemKey, decapsulate, seal, unseal
from sealane.errors import VerificationError


class P256MemoryKey:
    """A key in memory that, like a TPM, only agrees on a secret."""

    algorithm = P256

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes(
            Encoding.X962, PublicFormat.UncompressedPoint
        )

    def exchange(self, peer_public_key: bytes) -> bytearray:
        peer = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), peer_public_key)
        return bytearray(self._key.exchange(ec.ECDH(), peer))


@dataclass(frozen=True)
class Vector:
    """RFC 9180, appendix A: base mode."""

    private_key: KemKey
    enc: bytes
    shared_secret: bytes


VECTORS = {
    "A.1.1": Vector(
        X25519KemKey(
            X25519PrivateKey.from_private_bytes(
                bytes.fromhex("4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8")
            )
        ),
        bytes.fromhex("37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431"),
        bytes.fromhex("fe0e18c9f024ce43799ae393c7e8fe8fce9d218875e8227b0187c04e7d2ea1fc"),
    ),
    "A.3.1": Vector(
        P256MemoryKey(
            ec.derive_private_key(
                0xF3CE7FDAE57E1A310D87F1EBBDE6F328BE0A99CDBCADF4D6589CF29DE4B8FFD2, ec.SECP256R1()
            )
        ),
        bytes.fromhex(
            "04a92719c6195d5085104f469a8b9814d5838ff72b60501e2c4466e5e67b325ac98536d7b61a1af4b"
            "78e5b7f951c0900be863c403ce65c9bfcb9382657222d18c4"
        ),
        bytes.fromhex("c0d26aeab536609a572b07695d933b589dcf363ff9d93c93adea537aeabb8cb8"),
    ),
}


def make_key(algorithm: str) -> KemKey:
    if algorithm == P256:
        return P256MemoryKey(ec.generate_private_key(ec.SECP256R1()))
    return X25519KemKey.create()


@pytest.mark.parametrize("name", VECTORS)
def test_decapsulation_follows_the_vectors_of_the_rfc(name: str) -> None:
    vector = VECTORS[name]
    assert decapsulate(vector.enc, key=vector.private_key) == vector.shared_secret


def test_encapsulated_key_has_one_encoding() -> None:
    vector = VECTORS["A.3.1"]
    compressed = bytes([2 + (vector.enc[-1] & 1)]) + vector.enc[1:33]
    for enc in (compressed, vector.enc[:-1], b""):
        with pytest.raises(ValueError, match="needed: 65"):
            decapsulate(enc, key=vector.private_key)


@pytest.mark.parametrize("algorithm", ["x25519", "p256"])
@pytest.mark.parametrize("length", [0, 1, 32, 4096])
def test_key_opens_what_the_library_sealed(algorithm: str, length: int) -> None:
    key = make_key(algorithm)
    sealed = seal(bytes(length), algorithm=algorithm, public_key=key.public_key, info=b"why")
    assert unseal(sealed, key=key, info=b"why") == bytes(length)


@pytest.mark.parametrize("algorithm", ["x25519", "p256"])
def test_truncated_changed_or_foreign_secret_is_refused(algorithm: str) -> None:
    key = make_key(algorithm)
    sealed = seal(b"secret", algorithm=algorithm, public_key=key.public_key, info=b"why")
    forged = [sealed[:n] for n in range(len(sealed))]
    forged += [bytes(b ^ (n == i) for n, b in enumerate(sealed)) for i in range(len(sealed))]
    forged.append(sealed + b"\0")
    # RFC 7748: the highest bit of an X25519 coordinate is masked, so flipping it would be the same
    # key, but DHKEM's context holds the bytes as sent.
    for case in forged:
        with pytest.raises(VerificationError, match=r"secret\.sealed"):
            unseal(case, key=key, info=b"why")
    for other_key, info in ((make_key(algorithm), b"why"), (key, b"why not")):
        with pytest.raises(VerificationError, match=r"secret\.sealed"):
            unseal(sealed, key=other_key, info=info)


@pytest.mark.parametrize(
    ("algorithm", "public_key"),
    [
        ("x25519", bytes(31)),
        ("x25519", bytes(32)),
        ("x25519", bytes(65)),
        ("p256", bytes(32)),
        ("p256", b"\4" + bytes(64)),
        ("p256", b"\2" + bytes(32)),
        ("p384", b"\4" + bytes(96)),
    ],
)
def test_nothing_is_sealed_to_what_is_no_key(algorithm: str, public_key: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller names recipient and reason
        seal(b"secret", algorithm=algorithm, public_key=public_key, info=b"")
