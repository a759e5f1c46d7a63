"""Write the committed corpora, a file per case: `python tests/fuzz/seeds.py`."""

import dataclasses
import datetime as dt
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

sys.path.insert(0, str(Path(__file__).parent.parent))

from broker.policy_owners import new_keys, owners_of, signed_owners
from fuzz.admin import ENABLE, property_set
from fuzz.devices import DEVICE
from fuzz.evidence import TPM, TPM2_INTRODUCTION
from fuzz.listener import admin_bytes, connect_capsule
from sealane import _native
from sealane.crypto.attestation.runtime_data import KEM_KEY_BYTES, RuntimeData
from sealane.crypto.audit import Chain
from sealane.crypto.encoding import canonical_json, fields
from sealane.crypto.evidence.claims import Binding
from sealane.crypto.evidence.cmw import Item, encode_collection
from sealane.crypto.evidence.collateral import vendor_roots
from sealane.crypto.evidence.nvidia import EVIDENCE_LABEL
from sealane.crypto.evidence.snp_report import ASK_GUID, VCEK_GUID, VLEK_GUID
from sealane.daemon.device.anchors.anchor import CATALOGUE, U64_MAX, Anchored, volume_record
from sealane.daemon.device.anchors.record_file import Content, encode_content
from sealane.protocol.nvme.authentication import HashFunction, HostSecret
from sealane.protocol.nvme.command import encode_completion
from sealane.protocol.nvme.constants import (
    AdminOpcode,
    Feature,
    IdentifyStructure,
    LogPage,
)
from vendors.amd import ReportFields, certificate_table
from vendors.event_log import LOG
from vendors.intel import Quote
from vendors.nvidia import Report as NvidiaReport

CORPUS = Path(__file__).parent / "corpus"
_OPCODES = list(AdminOpcode)
_TRANSPORT = 8
_LENGTH_4096 = 4


def main() -> None:
    """Write all files."""
    for target, name, content in seeds():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def seeds() -> Iterator[tuple[str, str, bytes]]:
    """Yield target, name and bytes."""
    yield "connect", "connect", connect_capsule()[8:]
    yield from _attestation()
    yield from _devices()
    yield from (("admin_controller", *each) for each in _admin())
    for shape in (0, 4, 12, 13, 14):
        for groups in range(3):
            content = bytes([shape, groups, 0]) + bytes(8)
            yield "authentication_controller", f"{shape}-{groups}", content
            yield "authentication_host", f"{shape}-{groups}", content
    for transform in (None, *HashFunction):
        text = str(HostSecret(bytes(range(32)), transform=transform))
        yield "secret", f"transform-{int(transform or 0)}", text.encode()
    yield "nqn", "dated", b"nqn.2026-11.dev.sealane:volume:1"
    yield "nqn", "uuid", b"nqn.2014-08.org.nvmexpress:uuid:0f0f0f0f-0000-4000-8000-000000000001"
    yield "host_pages", "right", bytes(4) + bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0])
    for code in (0x02, 0x0302, 0xF002):
        yield (
            "host_pages",
            f"event-{code}",
            bytes(4) + bytes([5]) + struct.pack("<I", code) + bytes(4),
        )
    patch = bytes([0x40, 1, 0, 0, 4, 1, 2, 3, 4])
    yield "host_pages", "patched", bytes(4) + bytes([0]) + patch + bytes([1]) + patch
    yield "discovery_log", "right", bytes(8)
    yield "discovery_log", "patched", bytes([0]) + patch + bytes(6)
    yield from _streams()
    yield from _evidence()


def _attestation() -> Iterator[tuple[str, str, bytes]]:
    for name, digests, algorithm in (
        ("plain", (), "x25519"),
        ("with-devices", (bytes(32), bytes(range(32))), "p256"),
    ):
        data = RuntimeData(
            nonce=bytes(32),
            audience="spiffe://sealane/broker/b",
            node="g",
            role="gateway",
            incarnation=bytes(16),
            tls_public_key=bytes(91),
            kem_public_key=bytes(KEM_KEY_BYTES[algorithm]),
            verifier_key_sha256=bytes(32),
            evidence_type="software",
            kem_algorithm=algorithm,
            secondary_evidence_sha256=digests,
        )
        yield "runtime_data", name, data.encode()
    yield (
        "attestation_result",
        "unsigned",
        b"eyJhbGciOiJFUzM4NCIsInR5cCI6IkpXVCJ9.e30." + b"A" * 128,
    )
    for keys in (new_keys(1), new_keys(3)):
        owners = owners_of(*keys, threshold=len(keys), version=1)
        document, signatures = signed_owners(owners, *keys)
        yield "policy_owners", f"{len(keys)}", document
        yield "policy_signatures", f"{len(keys)}", signatures
    yield "policy_signatures", "single", bytes(64)
    yield (
        "policy_document",
        "software",
        b"""version = 1
[software]
allowed = true
[[software.key]]
fingerprint = "sha256:"""
        + b"0" * 64
        + b""""
nodes = ["g"]
roles = ["gateway"]
tenant = "t"
""",
    )
    yield (
        "policy_document",
        "hardware",
        b"""version = 2
[[hardware]]
id = "chip-id:00"
nodes = ["g"]
roles = ["gateway"]
tenant = "t"
devices = ["key-sha256:00"]
[[reference]]
name = "n"
evidence = "snp"
product = "Milan"
roles = ["gateway"]
measurements = { measurement = ["00"], host_data = "any", pcr4 = "events" }
events = { pcr4 = ["00"] }
tcb = { snp = 8 }
tcb_statuses = ["UpToDate"]
advisories = ["a"]
properties = { vmpl = [0] }
flags = { debug = true }
certified_keys = ["kem"]
secondary = ["nvidia"]
accepted_tier = "warning"
""",
    )
    chain = Chain()
    now = dt.datetime(2026, 11, 1, tzinfo=dt.UTC)
    line = chain.append(
        "lease.grant", subject="s", outcome="granted", reason="", detail={"ranges": ["1"]}, now=now
    )
    yield "audit_record", "grant", line.removesuffix(b"\n")


def _admin() -> Iterator[tuple[str, bytes]]:
    for subsystem in range(3):
        start = bytes([subsystem, 0, 0, 1, 6])
        for opcode, among in (
            (AdminOpcode.GET_LOG_PAGE, LogPage),
            (AdminOpcode.IDENTIFY, IdentifyStructure),
            (AdminOpcode.SET_FEATURES, Feature),
            (AdminOpcode.GET_FEATURES, Feature),
        ):
            for index, selector in enumerate(among):
                words = struct.pack("<II", 0x7F_0000 * (opcode == 2), 0)
                shape = bytes([1 | 4 | _TRANSPORT]) + words + bytes([index])
                command = bytes([7, _OPCODES.index(opcode)]) + shape
                command += bytes([_LENGTH_4096, 9, 1])
                yield f"{opcode.name.lower()}-{subsystem}-{int(selector):02x}", start + command
        park = (
            bytes([7, _OPCODES.index(AdminOpcode.ASYNC_EVENT_REQUEST), 8])
            + bytes(8)
            + bytes([0, 5, 0])
        )
        change = bytes([1, 2, 1, 2, 3, 4])
        yield f"event-{subsystem}", start + park + change + bytes([2, 1, 1])
        yield f"reset-{subsystem}", start + park + bytes([5, 0, 0, 0, 0]) + bytes([6])


def _streams() -> Iterator[tuple[str, str, bytes]]:
    response = _native.encode_capsule_resp(encode_completion(1))
    data = _native.encode_c2h_data(2, bytes(4096))
    answers = response + data + _native.encode_capsule_resp(encode_completion(2))
    yield "initiator_stream", "answers", bytes([1]) + answers
    ready = _native.encode_ic_resp(8192)
    connected = _native.encode_capsule_resp(encode_completion(0, result=1))
    yield "initiator_stream", "handshake", bytes([0]) + ready + connected + response
    asked = _native.encode_capsule_resp(encode_completion(0, result=1 | 1 << 17))
    yield "initiator_stream", "authentication", bytes([8]) + ready + asked + connected
    for header in (False, True):
        for check in (False, True):
            used = {"header_digest": header, "data_digest": check}
            pdus = [
                _native.encode_capsule_cmd(property_set(ENABLE), bytes(40), **used),
                _native.encode_capsule_resp(encode_completion(1), header_digest=header),
                _native.encode_c2h_data(2, bytes(64), **used),
            ]
            shape = bytes([header | check << 1, 0, 16])
            yield "pdu_stream", f"digests-{int(header)}{int(check)}", shape + b"".join(pdus)
    yield "pdu_stream", "start", bytes([0, 0, 16]) + admin_bytes()
    identify = bytes([AdminOpcode.IDENTIFY, 0x40, 7]).ljust(39, b"\0") + b"\x5a\x01"
    identify = bytearray(identify.ljust(64, b"\0"))
    identify[32:36] = (4096).to_bytes(4, "little")
    admin = admin_bytes() + _native.encode_capsule_cmd(bytes(identify), b"")
    queue = _native.encode_ic_req() + connect_capsule(queue_id=1, controller_id=1)
    for shape in range(4):
        yield "listener", f"admin-{shape}", bytes([shape]) + admin
        yield "listener", f"queue-{shape}", bytes([shape | 4]) + queue
    yield "listener", "garbage", b"\0GET / HTTP/1.1\r\n\r\n"


def _tpm2() -> Iterator[tuple[str, str, bytes]]:
    yield "tpm2_introduction", "bare", TPM2_INTRODUCTION
    certified = TPM.introduction([vendor_roots().nvidia]).encode()
    yield "tpm2_introduction", "certified", certified
    binding = Binding(runtime_data=b"", nonce=b"", tls_public_key=b"", kem_public_key=b"")
    signature = b"\0\x18\0\x0b" + (b"\0\x20" + bytes(31) + b"\1") * 2
    evidence = dataclasses.replace(
        TPM.evidence(binding, bytes(32)),
        event_log=LOG,
        quote_signature=signature,
        certification_signature=signature,
    )
    yield "tpm2_evidence", "evidence", evidence.encode()
    for name in ("quote", "certification", "kem_public", "quote_signature"):
        yield "tpm2_evidence", name, getattr(evidence, name)
    yield "tpm2_event_log", "log", LOG


def _evidence() -> Iterator[tuple[str, str, bytes]]:
    """Yield evidence with honest fields but no signatures, which would differ in each run."""
    item = Item("application/vnd.sealane.snp-report", b"report")
    yield "evidence_collection", "primary", encode_collection({"primary": item})
    several = {"primary": item, "gpu0": item, "collateral": Item("text/plain", bytes(300))}
    yield "evidence_collection", "several", encode_collection(several)
    roots = vendor_roots()
    root = roots.nvidia.public_bytes(Encoding.PEM)
    for version in (2, 3, 5):
        report = ReportFields(version=version).encode() + bytes(512)
        table = certificate_table((VCEK_GUID, root), (ASK_GUID, root), (VLEK_GUID, root))
        yield "snp_evidence", f"version-{version}", report + table
    vlek = ReportFields(flags=1 << 2).encode() + bytes(512)
    yield "snp_evidence", "vlek", vlek + certificate_table((VLEK_GUID, root))
    for version, body_type in ((4, 2), (5, 2), (5, 3)):
        signed = Quote(version=version, body_type=body_type).signed()
        inner = bytes(384 + 64) + struct.pack("<H4sHI3s", 4, b"data", 5, 3, b"PCK")
        auth = bytes(128) + struct.pack("<HI", 6, len(inner)) + inner
        quote = signed + struct.pack("<I", len(auth)) + auth
        yield "tdx_evidence", f"version-{version}-{body_type}", quote
        yield "tdx_evidence", f"zeros-{version}-{body_type}", quote + bytes(70)
    report = NvidiaReport().signed() + bytes(96)
    yield "nvidia_evidence", "report", report
    yield "nvidia_evidence", "zero", report + b"\0"
    yield "nvidia_evidence", "evidence", fields(EVIDENCE_LABEL, report, root)
    yield from _tpm2()
    for name, certificate in (("intel", roots.intel), ("nvidia", roots.nvidia), *roots.amd.items()):
        for form, encoding in (("der", Encoding.DER), ("pem", Encoding.PEM)):
            encoded = certificate.public_bytes(encoding)
            yield "certificates", f"{name.lower()}-{form}", encoded
            yield "collateral_item", f"{name.lower()}-{form}", encoded
    names = ("tcb_info", "qe_identity", "pck_crl")
    bundle = {
        f"{name}_issuer_chain": roots.intel.public_bytes(Encoding.PEM).decode() for name in names
    }
    bundle |= {"root_ca_crl": "00", "pck_crl": "00"}
    for name in names[:2]:
        bundle |= {name: '{"id":"TDX","version":3}', f"{name}_signature": "00" * 64}
    yield "collateral_item", "bundle", json.dumps(bundle).encode()


def _devices() -> Iterator[tuple[str, str, bytes]]:
    device = {"device_id": str(DEVICE), "openings": 7}
    yield "device_file", "device", canonical_json(device)
    one = Anchored(number=1, blob=b"x")
    full = Anchored(number=U64_MAX, blob=bytes(range(128)), mac=bytes(32))
    for name, records in (
        ("empty", {}),
        ("catalogue", {CATALOGUE: one}),
        ("volumes", {CATALOGUE: full, volume_record(DEVICE): one}),
    ):
        content = Content(count=3, records=records, floor=len(records))
        yield "anchor_file", name, encode_content(content, device_id=DEVICE)


if __name__ == "__main__":
    main()
