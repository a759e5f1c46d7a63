"""TPM structures made from keys in memory, with every field changeable, for tests of verifiers."""

import datetime as dt
import hashlib
import hmac
from dataclasses import dataclass, field, replace

from cryptography import x509
from cryptography.hazmat.decrepit.ciphers.modes import CFB
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from sealane.crypto.evidence.claims import Binding
from sealane.crypto.evidence.tpm2 import Evidence, Introduction, activation_proof

EK_ATTRIBUTES = 0x000300B2
AK_ATTRIBUTES = 0x00050072
KEM_ATTRIBUTES = 0x00020472
ECDSA_SHA256 = b"\x00\x18\x00\x0b"
RSASSA_SHA256 = b"\x00\x14\x00\x0b"
NULL = b"\x00\x10"
AES_128_CFB = b"\x00\x06\x00\x80\x00\x43"

ENDORSEMENT = b"\x40\x00\x00\x0b"

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def sized(content: bytes) -> bytes:
    return len(content).to_bytes(2, "big") + content


def p256() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def public_area(
    key: PrivateKey,
    attributes: int,
    *,
    symmetric: bytes = NULL,
    scheme: bytes = NULL,
    name_algorithm: int = 0x000B,
    curve: int = 3,
    policy: bytes = b"",
) -> bytes:
    """Return a TPMT_PUBLIC."""
    common = name_algorithm.to_bytes(2, "big") + attributes.to_bytes(4, "big") + sized(policy)
    if isinstance(key, rsa.RSAPrivateKey):
        modulus = key.public_key().public_numbers().n
        size = key.key_size.to_bytes(2, "big") + bytes(4)
        return (
            b"\x00\x01"
            + common
            + symmetric
            + scheme
            + size
            + sized(modulus.to_bytes(key.key_size // 8, "big"))
        )
    numbers = key.public_key().public_numbers()
    point = sized(numbers.x.to_bytes(32, "big")) + sized(numbers.y.to_bytes(32, "big"))
    return b"\x00\x23" + common + symmetric + scheme + curve.to_bytes(2, "big") + NULL + point


def name_of(public: bytes) -> bytes:
    return b"\x00\x0b" + hashlib.sha256(public).digest()


def qualified_name_of(public: bytes, parent: bytes = ENDORSEMENT) -> bytes:
    """Return the qualified name of a key below `parent`: a hierarchy's handle or a key's name."""
    return b"\x00\x0b" + hashlib.sha256(parent + name_of(public)).digest()


def sign(key: PrivateKey, content: bytes) -> bytes:
    """Return a TPMT_SIGNATURE."""
    if isinstance(key, rsa.RSAPrivateKey):
        return RSASSA_SHA256 + sized(key.sign(content, padding.PKCS1v15(), hashes.SHA256()))
    r, s = decode_dss_signature(key.sign(content, ec.ECDSA(hashes.SHA256())))
    return ECDSA_SHA256 + sized(r.to_bytes(32, "big")) + sized(s.to_bytes(32, "big"))


def attest(
    kind: int,
    body: bytes,
    extra_data: bytes,
    *,
    signer: bytes,
    magic: int = 0xFF544347,
    clock: int = 100_000,
    resets: int = 3,
    restarts: int = 1,
    safe: int = 1,
) -> bytes:
    """Return a TPMS_ATTEST."""
    return (
        magic.to_bytes(4, "big")
        + kind.to_bytes(2, "big")
        + sized(signer)
        + sized(extra_data)
        + clock.to_bytes(8, "big")
        + resets.to_bytes(4, "big")
        + restarts.to_bytes(4, "big")
        + bytes([safe])
        + (7).to_bytes(8, "big")
        + body
    )


def quote_body(indices: list[int], values: bytes, *, bank: int = 0x000B) -> bytes:
    bitmap = sum(1 << i for i in indices).to_bytes(3, "little")
    selection = (1).to_bytes(4, "big") + bank.to_bytes(2, "big") + b"\x03" + bitmap
    return selection + sized(hashlib.sha256(values).digest())


def certify_body(name: bytes) -> bytes:
    return sized(name) + sized(b"\x00\x0b" + bytes(32))


@dataclass
class SyntheticTpm:
    """A TPM. Replace a key or a public area to make it dishonest."""

    ek: PrivateKey = field(default_factory=p256)
    ak: PrivateKey = field(default_factory=p256)
    kem: ec.EllipticCurvePrivateKey = field(default_factory=p256)
    pcrs: dict[int, bytes] = field(
        default_factory=lambda: {i: bytes([i]) * 32 for i in (0, 2, 4, 7)}
    )
    event_log: bytes = b""
    ak_parent: bytes = ENDORSEMENT

    @property
    def ek_public(self) -> bytes:
        return public_area(self.ek, EK_ATTRIBUTES, symmetric=AES_128_CFB)

    @property
    def ak_public(self) -> bytes:
        scheme = RSASSA_SHA256 if isinstance(self.ak, rsa.RSAPrivateKey) else ECDSA_SHA256
        return public_area(self.ak, AK_ATTRIBUTES, scheme=scheme)

    @property
    def kem_public(self) -> bytes:
        return public_area(self.kem, KEM_ATTRIBUTES)

    @property
    def kem_point(self) -> bytes:
        return self.kem.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)

    @property
    def hardware_id(self) -> str:
        encoded = self.ek.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return f"ek-sha256:{hashlib.sha256(encoded).hexdigest()}"

    def introduction(self, certificates: list[x509.Certificate] | None = None) -> Introduction:
        return Introduction(
            endorsement_key=self.ek_public,
            attestation_key=self.ak_public,
            certificates=[c.public_bytes(Encoding.DER) for c in certificates or []],
        )

    def activate(self, activation: bytes) -> bytes:
        """Act as TPM2_ActivateCredential; raise AssertionError for another EK or AK."""
        blob, rest = split(activation)
        encrypted_seed, rest = split(rest)
        assert rest == b""
        integrity, identity = split(blob)
        seed = self._seed(encrypted_seed)
        name = name_of(self.ak_public)
        key = kdf_a(seed, b"INTEGRITY\0" + (256).to_bytes(4, "big"))
        assert hmac.digest(key, identity + name, "sha256") == integrity
        key = kdf_a(seed, b"STORAGE\0" + name + (128).to_bytes(4, "big"))[:16]
        decryptor = Cipher(AES(key), CFB(bytes(16))).decryptor()
        secret, rest = split(decryptor.update(identity) + decryptor.finalize())
        assert rest == b""
        return secret

    def _seed(self, encrypted: bytes) -> bytes:
        if isinstance(self.ek, rsa.RSAPrivateKey):
            oaep = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), b"IDENTITY\0")
            return self.ek.decrypt(encrypted, oaep)
        x, rest = split(encrypted)
        y, rest = split(rest)
        assert rest == b""
        peer = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), b"\4" + x + y)
        ours = self.ek.public_key().public_numbers().x.to_bytes(32, "big")
        agreed = self.ek.exchange(ec.ECDH(), peer)
        counter = (1).to_bytes(4, "big")
        return hashlib.sha256(counter + agreed + b"IDENTITY\0" + x + ours).digest()

    def evidence(self, binding: Binding, secret: bytes, **attested: int) -> Evidence:
        """Return evidence; `attested` changes fields of the quote."""
        values = b"".join(self.pcrs.values())
        data = binding.qualifying_data
        quote = self.attest(0x8018, quote_body(list(self.pcrs), values), data, **attested)
        certification = self.attest(0x8017, certify_body(name_of(self.kem_public)), data)
        return Evidence(
            proof=activation_proof(secret, data),
            quote=quote,
            quote_signature=sign(self.ak, quote),
            pcr_values=values,
            event_log=self.event_log,
            kem_public=self.kem_public,
            certification=certification,
            certification_signature=sign(self.ak, certification),
        )

    def attest(self, kind: int, body: bytes, extra_data: bytes, **attested: int) -> bytes:
        """Return a TPMS_ATTEST by this TPM's attestation key."""
        signer = qualified_name_of(self.ak_public, self.ak_parent)
        return attest(kind, body, extra_data, signer=signer, **attested)

    def requote(self, evidence: Evidence, quote: bytes) -> Evidence:
        """Return `evidence` with another quote, signed."""
        return replace(evidence, quote=quote, quote_signature=sign(self.ak, quote))

    def recertify(self, evidence: Evidence, public: bytes, certification: bytes) -> Evidence:
        """Return `evidence` with another certified key, signed."""
        return replace(
            evidence,
            kem_public=public,
            certification=certification,
            certification_signature=sign(self.ak, certification),
        )


def split(content: bytes) -> tuple[bytes, bytes]:
    """Split a TPM2B off the front."""
    length = int.from_bytes(content[:2], "big")
    assert len(content) >= 2 + length
    return content[2 : 2 + length], content[2 + length :]


def kdf_a(key: bytes, fixed: bytes) -> bytes:
    """Return the first block of KDFa, which suffices with SHA-256."""
    return hmac.digest(key, (1).to_bytes(4, "big") + fixed, "sha256")


@dataclass
class Manufacturer:
    """A TPM manufacturer's authorities: a root and an issuer of EK certificates."""

    now: dt.datetime
    root_key: ec.EllipticCurvePrivateKey = field(default_factory=p256)
    issuer_key: ec.EllipticCurvePrivateKey = field(default_factory=p256)

    def __post_init__(self) -> None:
        self.root = self._authority("Synthetic TPM Root", self.root_key, None)
        self.issuer = self._authority("Synthetic TPM Issuing CA", self.issuer_key, self.root)

    def _authority(
        self, name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Certificate | None
    ) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        return (
            self._builder()
            .subject_name(subject)
            .issuer_name(issuer.subject if issuer else subject)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .sign(self.root_key, hashes.SHA256())
        )

    def _builder(self) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.now - dt.timedelta(days=1))
            .not_valid_after(self.now + dt.timedelta(days=1))
        )

    def certify(
        self,
        key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey,
        *,
        usage: str = "2.23.133.8.1",
    ) -> list[x509.Certificate]:
        """Return an EK certificate of the TCG's profile, and its issuer's."""
        directory = x509.DirectoryName(
            x509.Name([x509.NameAttribute(x509.ObjectIdentifier("2.23.133.2.1"), "id:00000000")])
        )
        leaf = (
            self._builder()
            .subject_name(x509.Name([]))
            .issuer_name(self.issuer.subject)
            .public_key(key)
            .add_extension(x509.SubjectAlternativeName([directory]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([x509.ObjectIdentifier(usage)]), critical=False)
            .sign(self.issuer_key, hashes.SHA256())
        )
        return [leaf, self.issuer]
