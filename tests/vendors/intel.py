"""A synthetic Intel: root, PCK, TCB information, QE identity, and TDX quotes of one platform."""

import dataclasses
import datetime as dt
import functools
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding

from vendors.authority import END, NOW, START, Authority, p256, root

SGX_OID = "1.2.840.113741.1.13.1"
PPID = bytes(range(16))
FMSPC = bytes.fromhex("50806f000000")
QE_VENDOR = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
QE_SIGNER = bytes([0xDC]) * 32
CPU_SVN = (5, 5, 2, 2, 3, 1, 0, 3, *([0] * 8))
TEE_TCB_SVN = (6, 1, 4, *([0] * 13))
PCE_SVN = 13
SEPT_VE_DISABLE = 1 << 28
ISSUED = NOW - dt.timedelta(days=3)
NEXT_UPDATE = NOW + dt.timedelta(days=27)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quote:
    """The fields of a quote and their honest values."""

    version: int = 5
    body_type: int = 3
    key_type: int = 2
    tee_type: int = 0x81
    vendor: bytes = QE_VENDOR
    tee_tcb_svn: Sequence[int] = TEE_TCB_SVN
    td_attributes: int = SEPT_VE_DISABLE
    xfam: bytes = bytes.fromhex("e702060000000000")
    mrtd: bytes = bytes([0xA1]) * 48
    rtmr: Sequence[bytes] = tuple(bytes([0xB0 + i]) * 48 for i in range(4))
    mrseam: bytes = bytes([0xC1]) * 48
    mrsignerseam: bytes = bytes(48)
    seam_attributes: bytes = bytes(8)
    mrservicetd: bytes = bytes(48)
    report_data: bytes = bytes(64)
    qe_signer: bytes = QE_SIGNER
    qe_svn: int = 6
    qe_attributes: bytes = bytes.fromhex("1100000000000000e700000000000000")
    qe_data: bytes = bytes(range(32))
    trailing: bytes = b""

    def body(self) -> bytes:
        """Return the TD report: 584 bytes, of type 3 648."""
        body = bytes(self.tee_tcb_svn) + self.mrseam + self.mrsignerseam + self.seam_attributes
        body += self.td_attributes.to_bytes(8, "little") + self.xfam + self.mrtd
        body += bytes([0xD1]) * 48 + bytes([0xD2]) * 48 + bytes([0xD3]) * 48 + b"".join(self.rtmr)
        body += self.report_data
        if self.body_type == 3:
            body += bytes(self.tee_tcb_svn) + self.mrservicetd
        return body

    def signed(self) -> bytes:
        """Return header and body, which the attestation key signs."""
        head = struct.pack("<HHIHH", self.version, self.key_type, self.tee_type, 0, 0)
        head += self.vendor + bytes(20)
        body = self.body()
        if self.version == 5:
            head += struct.pack("<HI", self.body_type, len(body))
        return head + body

    def qe_report(self, report_data: bytes) -> bytes:
        """Return the quoting enclave's report, 384 bytes."""
        report = bytearray(384)
        report[0:16] = bytes(CPU_SVN)
        report[48:64] = self.qe_attributes
        report[64:96] = bytes([0xE5]) * 32
        report[128:160] = self.qe_signer
        struct.pack_into("<HH", report, 256, 2, self.qe_svn)
        report[320:352] = report_data
        return bytes(report)


class Intel:
    """Authorities, one platform's PCK, and its published collateral."""

    def __init__(self) -> None:
        self.root = root("Intel SGX Root CA", p256(), hash_=hashes.SHA256())
        options = {"is_listed": True}
        self.tcb_signer = self.root.issue("Intel SGX TCB Signing", p256(), **options)
        self.pck_authority = self.root.issue(
            "Intel SGX PCK Platform CA", p256(), is_authority=True, path_length=0, **options
        )
        self.pck = self.certify()
        self.attestation_key = p256()

    def certify(
        self,
        *,
        fmspc: bytes = FMSPC,
        cpu_svn: Sequence[int] = CPU_SVN,
        pce_svn: int = PCE_SVN,
        ppid: bytes = PPID,
        key: ec.EllipticCurvePrivateKey | None = None,
        **options: object,
    ) -> Authority:
        """Issue a PCK certificate."""
        extension = sgx_extension(fmspc=fmspc, cpu_svn=cpu_svn, pce_svn=pce_svn, ppid=ppid)
        return self.pck_authority.issue(
            "Intel SGX PCK Certificate",
            key or p256(),
            extensions=[(SGX_OID, extension)],
            is_listed=True,
            **options,
        )

    def quote(
        self,
        *,
        pck: Authority | None = None,
        chain: bytes | None = None,
        hidden: bytes = b"",
        **changes: object,
    ) -> bytes:
        """Return a signed quote of this platform; `hidden` ends the authentication data."""
        pck = pck or self.pck
        fields = Quote(**changes)
        numbers = self.attestation_key.public_key().public_numbers()
        key = numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")
        qe_report = fields.qe_report(hashlib.sha256(key + fields.qe_data).digest())
        if chain is None:
            chain = pck.pem + self.pck_authority.pem + self.root.pem
        inner = qe_report + _sign(pck.key, qe_report)
        inner += struct.pack("<H", len(fields.qe_data)) + fields.qe_data
        inner += struct.pack("<HI", 5, len(chain)) + chain
        signed = fields.signed()
        auth = _sign(self.attestation_key, signed) + key + struct.pack("<HI", 6, len(inner)) + inner
        auth += hidden
        return signed + struct.pack("<I", len(auth)) + auth + fields.trailing

    def tcb_info(self, **changes: object) -> dict[str, object]:
        """Return TCB information of the platform, up to date at these versions."""
        identity = {"mrsigner": "00" * 48, "attributes": "00" * 8, "attributesMask": "FF" * 8}
        module = identity | {
            "id": "TDX_01",
            "tcbLevels": [
                level({"isvsvn": 6}, "UpToDate"),
                level({"isvsvn": 4}, "OutOfDate", ["INTEL-SA-01397"]),
            ],
        }
        return {
            "id": "TDX",
            "version": 3,
            "issueDate": stamp(ISSUED),
            "nextUpdate": stamp(NEXT_UPDATE),
            "fmspc": FMSPC.hex(),
            "pceId": "0000",
            "tcbType": 0,
            "tcbEvaluationDataNumber": 17,
            "tdxModule": identity,
            "tdxModuleIdentities": [module],
            "tcbLevels": [
                level(tcb(), "UpToDate"),
                level(tcb(sgx=3, pce=11), "SWHardeningNeeded", ["INTEL-SA-00615"]),
                level(tcb(sgx=2, pce=5), "OutOfDate", ["INTEL-SA-00828"]),
            ],
        } | changes

    def qe_identity(self, **changes: object) -> dict[str, object]:
        """Return the identity of the TD quoting enclave."""
        return {
            "id": "TD_QE",
            "version": 2,
            "issueDate": stamp(ISSUED),
            "nextUpdate": stamp(NEXT_UPDATE),
            "tcbEvaluationDataNumber": 17,
            "miscselect": "00000000",
            "miscselectMask": "FFFFFFFF",
            "attributes": "11000000000000000000000000000000",
            "attributesMask": "FBFFFFFFFFFFFFFF0000000000000000",
            "mrsigner": QE_SIGNER.hex(),
            "isvprodid": 2,
            "tcbLevels": [
                level({"isvsvn": 4}, "UpToDate"),
                level({"isvsvn": 2}, "OutOfDate", ["INTEL-SA-00837"]),
            ],
        } | changes

    def collateral(
        self,
        *,
        tcb_info: Mapping[str, object] | str | None = None,
        qe_identity: Mapping[str, object] | str | None = None,
        root_revoked: Sequence[int] = (),
        pck_revoked: Sequence[int] = (),
        number: int = 1,
        list_end: dt.datetime = END,
        tcb_signer: Authority | None = None,
    ) -> bytes:
        """Return the collateral of one FMSPC as JSON."""
        info = _text(tcb_info if tcb_info is not None else self.tcb_info())
        identity = _text(qe_identity if qe_identity is not None else self.qe_identity())
        signer = tcb_signer or self.tcb_signer
        signers = (signer.pem + self.root.pem).decode()
        lists = {
            "root_ca_crl": self.root.revoke(*root_revoked, number=number, end=list_end),
            "pck_crl": self.pck_authority.revoke(*pck_revoked, number=number, end=list_end),
        }
        return json.dumps(
            {
                "pck_crl_issuer_chain": (self.pck_authority.pem + self.root.pem).decode(),
                **{n: made.public_bytes(Encoding.DER).hex() for n, made in lists.items()},
                "tcb_info_issuer_chain": signers,
                "tcb_info": info,
                "tcb_info_signature": _sign(signer.key, info.encode()).hex(),
                "qe_identity_issuer_chain": signers,
                "qe_identity": identity,
                "qe_identity_signature": _sign(signer.key, identity.encode()).hex(),
            }
        ).encode()


def tcb(*, sgx: int = 5, pce: int = PCE_SVN, tdx: Sequence[int] = TEE_TCB_SVN) -> dict[str, object]:
    """Return the versions of one TCB level; `sgx` is the first component's."""
    return {
        "sgxtcbcomponents": [{"svn": svn} for svn in (sgx, *CPU_SVN[1:])]
        if sgx == CPU_SVN[0]
        else [{"svn": min(sgx, svn)} for svn in CPU_SVN],
        "pcesvn": pce,
        "tdxtcbcomponents": [{"svn": svn if i > 1 else 0} for i, svn in enumerate(tdx)],
    }


def level(tcb: object, status: str, advisories: Sequence[str] = ()) -> dict[str, object]:
    """Return one TCB level."""
    return {
        "tcb": tcb,
        "tcbDate": "2025-03-12T00:00:00Z",
        "tcbStatus": status,
        "advisoryIDs": list(advisories),
    }


def stamp(time: dt.datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def sgx_extension(*, fmspc: bytes, cpu_svn: Sequence[int], pce_svn: int, ppid: bytes) -> bytes:
    """Encode the SGX extension of a PCK certificate."""
    versions = [_pair(f"2.{i + 1}", _integer(svn)) for i, svn in enumerate(cpu_svn)]
    versions += [_pair("2.17", _integer(pce_svn)), _pair("2.18", _der(4, bytes(cpu_svn)))]
    configuration = [_pair(f"7.{i}", _der(1, b"\xff")) for i in (1, 2, 3)]
    return _der(
        0x30,
        _pair("1", _der(4, ppid))
        + _pair("2", _der(0x30, b"".join(versions)))
        + _pair("3", _der(4, bytes(2)))
        + _pair("4", _der(4, fmspc))
        + _pair("5", _der(0x0A, b"\1"))
        + _pair("6", _der(4, bytes(range(16, 32))))
        + _pair("7", _der(0x30, b"".join(configuration))),
    )


@functools.cache
def intel() -> Intel:
    """Return this process's synthetic Intel."""
    return Intel()


def _pair(arc: str, value: bytes) -> bytes:
    # The prefix of the arc is 1.2.840.113741.1.13.1.
    prefix = bytes([0x2A, 0x86, 0x48, 0x86, 0xF8, 0x4D, 0x01, 0x0D, 0x01])
    return _der(0x30, _der(6, prefix + bytes(map(int, arc.split(".")))) + value)


def _integer(value: int) -> bytes:
    return _der(2, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _der(tag: int, content: bytes) -> bytes:
    length = len(content)
    if length < 128:
        return bytes([tag, length]) + content
    size = (length.bit_length() + 7) // 8
    return bytes([tag, 0x80 | size]) + length.to_bytes(size, "big") + content


def _sign(key: object, content: bytes) -> bytes:
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    r, s = decode_dss_signature(key.sign(content, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def _text(value: Mapping[str, object] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


__all__ = ["START", "Intel", "Quote", "intel", "level", "stamp", "tcb", "x509"]
