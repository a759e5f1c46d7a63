"""A synthetic NVIDIA: the chain of one GPU and its measurement reports."""

import dataclasses
import functools
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from vendors.authority import Authority, Key, p384, root

FWID = bytes([0xF1]) * 48
DICE_OID = "2.23.133.5.4.1"
SHA384_OID = bytes.fromhex("0609608648016503040202")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The fields of a report and their honest values."""

    nonce: bytes = bytes(32)
    request: bytes = bytes.fromhex("11e001ff")
    slot: int = 0
    response: bytes = bytes.fromhex("11600000")
    blocks: Sequence[tuple[int, bytes]] = tuple((i, bytes([i]) * 48) for i in (1, 2, 64))
    specification: int = 1
    count: int | None = None
    opaque: Sequence[tuple[int, bytes]] = (
        (3, b"580.95.05\0"),
        (6, bytes.fromhex("007400961a000000")),
        (20, FWID),
        (36, bytes(2)),
    )

    def signed(self) -> bytes:
        """Return the bytes that the attestation key signs."""
        record = b"".join(
            struct.pack("<BBHBH", index, self.specification, len(value) + 3, 1, len(value)) + value
            for index, value in self.blocks
        )
        opaque = b"".join(
            struct.pack("<HH", kind, len(value)) + value for kind, value in self.opaque
        )
        count = len(self.blocks) if self.count is None else self.count
        head = self.request + self.nonce + bytes([self.slot]) + self.response
        head += bytes([count]) + len(record).to_bytes(3, "little") + record
        return head + bytes([0x77]) * 32 + len(opaque).to_bytes(2, "little") + opaque


class Nvidia:
    """The authorities, and one GPU."""

    def __init__(self) -> None:
        self.root = root("NVIDIA Device Identity CA", p384())
        options = {"is_authority": True, "is_listed": True}
        self.identity = self.root.issue("NVIDIA GH100 Identity", p384(), **options)
        self.provisioner = self.identity.issue("NVIDIA GH100 Provisioner", p384(), **options)
        self.device = self.provisioner.issue("GH100 A01 GSP BROM", p384(), is_authority=True)
        self.key = self.endorse()

    def endorse(
        self,
        *,
        device: Authority | None = None,
        names: Authority | None = None,
        fwid: bytes = FWID,
        hash_oid: bytes = SHA384_OID,
        key: Key | None = None,
        extension: bytes | None = None,
    ) -> Authority:
        """Certify an attestation key of the firmware `fwid`."""
        issuer = device or self.device
        named = (names or issuer).key.public_key()
        info = named.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if extension is None:
            firmware = hash_oid + bytes([4, len(fwid)]) + fwid
            inner = b"\x02\x01\x01" + info + bytes([0x30, len(firmware)]) + firmware
            extension = b"\x30\x81" + bytes([len(inner)]) + inner
        return issuer.issue(
            "GH100 A01 GSP FMC LF", key or p384(), extensions=[(DICE_OID, extension)]
        )

    def report(self, *, key: Authority | None = None, **changes: object) -> bytes:
        """Return a signed report."""
        signed = Report(**changes).signed()
        private = (key or self.key).key
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        r, s = decode_dss_signature(private.sign(signed, ec.ECDSA(hashes.SHA384())))
        return signed + r.to_bytes(48, "big") + s.to_bytes(48, "big")

    def chain(self, *, key: Authority | None = None, without: Sequence[str] = ()) -> bytes:
        """Return the chain in PEM, leaf first."""
        members: Mapping[str, Authority] = {
            "key": key or self.key,
            "device": self.device,
            "provisioner": self.provisioner,
            "identity": self.identity,
            "root": self.root,
        }
        return b"".join(each.pem for name, each in members.items() if name not in without)


def gpu_command(directory: Path) -> list[str]:
    """Return the command of the synthetic GPU (`enrolment.secondary`)."""
    key = nvidia().key.key
    (directory / "gpu.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    (directory / "chain.pem").write_bytes(nvidia().chain())
    program = Path(__file__).with_name("gpu.py")
    files = (program, directory / "gpu.pem", directory / "chain.pem")
    return [sys.executable, *map(str, files)]


@functools.cache
def nvidia() -> Nvidia:
    """Return this process's synthetic NVIDIA."""
    return Nvidia()
