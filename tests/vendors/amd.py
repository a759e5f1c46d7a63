"""A synthetic AMD: roots, signing keys, chips and their reports for every product."""

import dataclasses
import functools
import struct
import uuid
from collections.abc import Mapping

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from sealane.crypto.evidence.snp_report import ASK_GUID, VCEK_GUID, VLEK_GUID
from vendors.authority import Authority, p384, root, rsa_key

CPUID = {"Milan": (0x19, 1, 1), "Genoa": (0x19, 0x11, 1), "Turin": (0x1A, 2, 1)}
TCB = {"fmc": 1, "bootloader": 4, "tee": 2, "snp": 23, "microcode": 200}
CHIP_ID = bytes(range(1, 65))
TURIN_CHIP_ID = bytes(range(1, 9)).ljust(64, b"\0")
CSP_ID = "CN=cc-test.example"
_OIDS = {"bootloader": "3.1", "tee": "3.2", "snp": "3.3", "microcode": "3.8", "fmc": "3.9"}
_LAYOUT = {
    "Milan": ("bootloader", "tee", None, None, None, None, "snp", "microcode"),
    "Genoa": ("bootloader", "tee", None, None, None, None, "snp", "microcode"),
    "Turin": ("fmc", "bootloader", "tee", "snp", None, None, None, "microcode"),
}


def tcb_version(product: str, tcb: Mapping[str, int] = TCB) -> bytes:
    return bytes(tcb[component] if component else 0 for component in _LAYOUT[product])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportFields:
    """The fields of a report and their honest values."""

    version: int = 3
    guest_svn: int = 7
    policy: int = 1 << 17 | 1 << 16
    vmpl: int = 0
    algorithm: int = 1
    platform_info: int = 1 << 5
    flags: int = 0
    report_data: bytes = bytes(64)
    measurement: bytes = bytes([0xAA]) * 48
    host_data: bytes = bytes([0xBB]) * 32
    chip_id: bytes = CHIP_ID
    cpuid: tuple[int, int, int] = CPUID["Genoa"]
    current: bytes = tcb_version("Genoa")
    reported: bytes = tcb_version("Genoa")
    committed: bytes = tcb_version("Genoa")
    launch: bytes = tcb_version("Genoa")

    def encode(self) -> bytes:
        """Return the signed part, 0x2A0 bytes."""
        report = bytearray(0x2A0)
        struct.pack_into("<IIQ", report, 0, self.version, self.guest_svn, self.policy)
        struct.pack_into("<II", report, 0x30, self.vmpl, self.algorithm)
        struct.pack_into("<8sQI", report, 0x38, self.current, self.platform_info, self.flags)
        report[0x50:0x90] = self.report_data
        report[0x90:0xC0] = self.measurement
        report[0xC0:0xE0] = self.host_data
        report[0x140:0x180] = bytes([0x11]) * 64
        report[0x180:0x188] = self.reported
        if self.version >= 3:
            report[0x188:0x18B] = bytes(self.cpuid)
        report[0x1A0:0x1E0] = self.chip_id
        report[0x1E0:0x1EB] = self.committed + bytes([1, 55, 1])
        report[0x1EC:0x1EF] = bytes([1, 55, 1])
        report[0x1F0:0x1F8] = self.launch
        if self.version >= 5:
            report[0x1F8:0x208] = bytes([1, 0, 0, 0, 0, 0, 0, 0]) * 2
        return bytes(report)


class Amd:
    """A product's authorities, and one chip."""

    def __init__(self, product: str) -> None:
        self.product = product
        self.ark = root(f"ARK-{product}", rsa_key())
        options = {"is_authority": True, "path_length": 0, "is_listed": True}
        self.ask = self.ark.issue(f"SEV-{product}", rsa_key(), **options)
        self.asvk = self.ark.issue(f"SEV-VLEK-{product}", rsa_key(), **options)
        self.chip_id = TURIN_CHIP_ID if product == "Turin" else CHIP_ID
        self.vcek = self.endorse()
        self.vlek = self.endorse(signer=self.asvk, common_name="SEV-VLEK", csp_id=CSP_ID)

    def endorse(
        self,
        *,
        signer: Authority | None = None,
        common_name: str = "SEV-VCEK",
        tcb: Mapping[str, int] = TCB,
        hwid: bytes | None = None,
        csp_id: str | None = None,
        key: ec.EllipticCurvePrivateKey | None = None,
        leave_out: tuple[str, ...] = (),
        **options: object,
    ) -> Authority:
        """Issue an endorsement key, by default the chip's VCEK at its TCB."""
        components = [c for c in _LAYOUT[self.product] if c]
        values = {f"1.3.6.1.4.1.3704.1.{_OIDS[c]}": _integer(tcb[c]) for c in components}
        if csp_id is None:
            length = 8 if self.product == "Turin" else 64
            values["1.3.6.1.4.1.3704.1.4"] = hwid if hwid is not None else self.chip_id[:length]
        else:
            values["1.3.6.1.4.1.3704.1.5"] = b"\x16" + bytes([len(csp_id)]) + csp_id.encode()
        return (signer or self.ask).issue(
            common_name,
            key or p384(),
            extensions=[(oid, value) for oid, value in values.items() if oid not in leave_out],
            **options,
        )

    def report(self, *, key: Authority | None = None, **changes: object) -> bytes:
        """Return a report of this chip, signed by its VCEK."""
        tcb = tcb_version(self.product)
        honest = {
            "chip_id": self.chip_id,
            "cpuid": CPUID[self.product],
            **dict.fromkeys(("current", "reported", "committed", "launch"), tcb),
        }
        fields = ReportFields(**honest | changes)
        return sign(fields.encode(), (key or self.vcek).key)

    def table(self, *, key: Authority | None = None, signer: Authority | None = None) -> bytes:
        """Return the table that a host supplies with a report signed by the VCEK."""
        return certificate_table(
            (VCEK_GUID, (key or self.vcek).der), (ASK_GUID, (signer or self.ask).der)
        )

    def vlek_table(self) -> bytes:
        return certificate_table((VLEK_GUID, self.vlek.der), (ASK_GUID, self.asvk.der))


def sign(signed: bytes, key: object) -> bytes:
    """Append the signature block of a report."""
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    r, s = decode_dss_signature(key.sign(signed, ec.ECDSA(hashes.SHA384())))
    return signed + r.to_bytes(72, "little") + s.to_bytes(72, "little") + bytes(368)


def certificate_table(*entries: tuple[uuid.UUID, bytes]) -> bytes:
    heads, body = b"", b""
    start = 24 * (len(entries) + 1)
    for guid, certificate in entries:
        heads += guid.bytes + struct.pack("<II", start + len(body), len(certificate))
        body += certificate
    return heads + bytes(24) + body


def with_serial_zero(authority: Authority, signer: Authority) -> bytes:
    """Return a certificate with serial number 0 instead of 1, as AMD's endorsement keys have.

    The builder refuses 0, so the DER is changed and signed again.
    """
    tbs = bytearray(authority.certificate.tbs_certificate_bytes)
    place = tbs.index(b"\x02\x01\x01\x30")  # serial number 1, before the signature algorithm
    tbs[place + 2] = 0
    assert signer.padding is not None
    signature = signer.key.sign(bytes(tbs), signer.padding, signer.hash)  # type: ignore[call-arg]
    old = authority.der
    algorithm_start = old.index(bytes(authority.certificate.tbs_certificate_bytes)) + len(tbs)
    end = len(old) - len(signature)
    return old[: algorithm_start - len(tbs)] + bytes(tbs) + old[algorithm_start:end] + signature


@functools.cache
def amd(product: str) -> Amd:
    """Return this process's synthetic AMD for `product`, cached because keys take time."""
    return Amd(product)


def _integer(value: int) -> bytes:
    return b"\x02\x01" + bytes([value]) if value < 128 else b"\x02\x02\0" + bytes([value])
