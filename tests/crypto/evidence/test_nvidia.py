"""The verifier of NVIDIA's reports, with a synthetic NVIDIA and one real report."""

import datetime as dt
from collections.abc import Sequence

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from sealane.crypto.encoding import fields
from sealane.crypto.evidence import nvidia as verifier
from sealane.crypto.evidence.chain import key_sha256
from sealane.crypto.evidence.claims import Binding, Claims
from sealane.crypto.evidence.collateral import Collateral, VendorRoots, vendor_roots
from sealane.errors import VerificationError
from vendors.authority import NOW, Authority, p256
from vendors.nvidia import FWID, Nvidia, nvidia
from vendors.vectors import Committed, utc, vector

BINDING = Binding(runtime_data=b"r", nonce=bytes(32), tls_public_key=b"t", kem_public_key=b"k")


@pytest.fixture(scope="module")
def vendor() -> Nvidia:
    return nvidia()


def collateral(
    vendor: Nvidia, *listed: Authority, serials: Sequence[int] = (), **options: object
) -> Collateral:
    others = vendor_roots()
    roots = VendorRoots(amd=others.amd, intel=others.intel, nvidia=vendor.root.certificate)
    lists = {key_sha256(each.certificate): each.revoke(*serials, **options) for each in listed}
    return Collateral(roots=roots, revocation_lists=lists)


def report(made: Nvidia, **changes: object) -> bytes:
    return made.report(**{"nonce": BINDING.device_nonce} | changes)


def verify(
    vendor: Nvidia,
    measured: bytes | None = None,
    *,
    chain: bytes | None = None,
    known: Collateral | None = None,
    now: dt.datetime = NOW,
    encoded: bytes | None = None,
) -> Claims:
    made = verifier.encode_evidence(
        report(vendor) if measured is None else measured,
        vendor.chain() if chain is None else chain,
    )
    return verifier.verify(
        made if encoded is None else encoded,
        binding=BINDING,
        collateral=known or collateral(vendor),
        now=now,
    )


def refused(fault: str, *arguments: object, **options: object) -> None:
    with pytest.raises(VerificationError) as caught:
        verify(*arguments, **options)
    assert caught.value.reason == f"attestation.nvidia.{fault}", caught.value


def test_a_genuine_report_gives_its_claims(vendor: Nvidia) -> None:
    claims = verify(vendor)
    assert (claims.evidence_type, claims.product) == ("nvidia", "GH100")
    assert claims.hardware_id == f"key-sha256:{key_sha256(vendor.device.certificate).hex()}"
    assert claims.measurements == {
        "block_1": bytes([1]) * 48,
        "block_2": bytes([2]) * 48,
        "block_64": bytes([64]) * 48,
        "fwid": FWID,
        "driver_version": b"580.95.05",
        "vbios_version": bytes.fromhex("007400961a"),
    }
    assert claims.properties == {"feature_flag": 0}
    assert claims.flags == {"revocation_checked": False}


def test_the_root_may_be_left_out(vendor: Nvidia) -> None:
    assert verify(vendor, chain=vendor.chain(without=["root"])) == verify(vendor)


@pytest.mark.parametrize("left_out", ["device", "provisioner", "identity"])
def test_a_gap_in_the_chain_is_refused(vendor: Nvidia, left_out: str) -> None:
    refused("chain", vendor, chain=vendor.chain(without=[left_out]))


def test_a_chain_without_attestation_key_is_refused(vendor: Nvidia) -> None:
    by_device = report(vendor, key=vendor.device)
    refused("certificate", vendor, by_device, chain=vendor.chain(without=["key"]))
    without = ["key", "device", "provisioner"]
    refused("chain", vendor, chain=vendor.chain(without=without))
    refused("chain", vendor, chain=vendor.root.pem)


def test_another_root_is_refused(vendor: Nvidia) -> None:
    refused("chain", vendor, known=Collateral())
    forger = Nvidia()
    refused("chain", vendor, report(forger), chain=forger.chain())


def test_the_challenge_is_answered(vendor: Nvidia) -> None:
    for nonce in (bytes(32), BINDING.nonce, BINDING.device_nonce[::-1]):
        refused("nonce", vendor, report(vendor, nonce=nonce))


def test_another_gpus_key_is_refused(vendor: Nvidia) -> None:
    other = vendor.endorse()
    refused("signature", vendor, report(vendor, key=other))


def test_a_key_of_other_firmware_is_refused(vendor: Nvidia) -> None:
    other = vendor.endorse(fwid=bytes([0xF2]) * 48)
    refused("fwid", vendor, report(vendor, key=other), chain=vendor.chain(key=other))
    refused("fwid", vendor, report(vendor, opaque=[(3, b"580")]))


@pytest.mark.parametrize(
    "changes",
    [
        {"hash_oid": bytes.fromhex("0609608648016503040201")},
        {"extension": b""},
        {"extension": b"\x30\x03\x02\x01\x01"},
    ],
    ids=["sha256", "empty", "short"],
)
def test_the_firmware_id_is_sha384_in_its_form(vendor: Nvidia, changes: dict[str, bytes]) -> None:
    other = vendor.endorse(**changes)
    refused("certificate", vendor, report(vendor, key=other), chain=vendor.chain(key=other))


def test_a_key_that_names_another_device_is_refused(vendor: Nvidia) -> None:
    other = vendor.endorse(names=vendor.provisioner)
    refused("certificate", vendor, report(vendor, key=other), chain=vendor.chain(key=other))


def test_a_key_on_another_curve_is_refused(vendor: Nvidia) -> None:
    for key in (p256(), rsa.generate_private_key(65537, 2048)):
        other = vendor.endorse(key=key)
        chain = vendor.chain(key=other)
        refused("certificate", vendor, report(vendor), chain=chain)


def test_revoked_authorities_are_refused(vendor: Nvidia) -> None:
    both = (vendor.root, vendor.identity)
    assert verify(vendor, known=collateral(vendor, *both)).flags["revocation_checked"]
    assert not verify(vendor, known=collateral(vendor, vendor.root)).flags["revocation_checked"]
    for revoked in (vendor.identity, vendor.provisioner):
        serial = revoked.certificate.serial_number
        refused("revoked", vendor, known=collateral(vendor, *both, serials=[serial]))


def test_a_list_out_of_its_time_is_refused(vendor: Nvidia) -> None:
    known = collateral(vendor, vendor.root, end=NOW - dt.timedelta(days=1))
    refused("collateral_expired", vendor, known=known)


def test_certificates_are_valid_at_the_time_given(vendor: Nvidia) -> None:
    refused("expired", vendor, now=NOW + dt.timedelta(days=400))


@pytest.mark.parametrize(
    "changes",
    [
        {"request": bytes.fromhex("10e001ff")},
        {"request": bytes.fromhex("118101ff")},
        {"request": bytes.fromhex("11e000ff")},
        {"request": bytes.fromhex("11e00101")},
        {"response": bytes.fromhex("12600000")},
        {"response": bytes.fromhex("117f0000")},
        {"response": bytes.fromhex("11600001")},
        {"slot": 8, "response": bytes.fromhex("11600008")},
        {"specification": 2},
        {"count": 2},
        {"count": 4},
        {"blocks": [(1, b"a"), (1, b"b")]},
        {"opaque": [(20, FWID), (20, FWID)]},
    ],
    ids=str,
)
def test_a_malformed_report_is_refused(vendor: Nvidia, changes: dict[str, object]) -> None:
    refused("malformed", vendor, report(vendor, **changes))


def test_the_slot_that_was_asked_answers(vendor: Nvidia) -> None:
    answered = report(vendor, slot=1, response=bytes.fromhex("11600001"))
    assert verify(vendor, answered).product == "GH100"


def test_zeros_may_follow_and_nothing_else(vendor: Nvidia) -> None:
    good = report(vendor)
    most = verifier.TRAILING_ZEROS_MAX
    assert verify(vendor, good + bytes(most)) == verify(vendor, good)
    refused("malformed", vendor, good + bytes(most + 1))
    refused("malformed", vendor, good + b"\1")
    refused("malformed", vendor, good.ljust(verifier.REPORT_BYTES_MAX + 1, b"\0"))


def test_a_report_is_bounded(vendor: Nvidia) -> None:
    blocks = [(index, bytes(40_000)) for index in (1, 2)]
    refused("malformed", vendor, report(vendor, blocks=blocks))


def test_block_lengths_fit_each_other(vendor: Nvidia) -> None:
    good = bytearray(report(vendor))
    place = 37 + 8 + 2  # the size of the first block
    good[place] += 1
    refused("malformed", vendor, bytes(good))


def test_cut_anywhere_it_is_refused(vendor: Nvidia) -> None:
    good = report(vendor)
    for length in range(len(good)):
        with pytest.raises(VerificationError):
            verify(vendor, good[:length])
    whole = verifier.encode_evidence(good, vendor.chain())
    for length in range(0, len(whole), 11):
        with pytest.raises(VerificationError):
            verify(vendor, encoded=whole[:length])


def test_flipped_anywhere_it_is_refused(vendor: Nvidia) -> None:
    good = report(vendor)
    for place in range(len(good)):
        changed = bytearray(good)
        changed[place] ^= 1 << place % 8
        with pytest.raises(VerificationError):
            verify(vendor, bytes(changed))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_evidence_is_a_report_and_its_chain(vendor: Nvidia, count: int) -> None:
    parts = [report(vendor), vendor.chain(), b"more"][:count]
    refused("malformed", vendor, encoded=fields(verifier.EVIDENCE_LABEL, *parts))
    refused("malformed", vendor, encoded=fields("other", report(vendor), vendor.chain()))


def test_nine_certificates_are_too_many(vendor: Nvidia) -> None:
    refused("certificate", vendor, chain=vendor.chain() + vendor.root.pem * 4)


HOPPER_NONCE = "87d8e24ab336adafe228d49e83d745f6dba4ae505372b6a5704820856b343fec"


def hopper(
    chain: str = "hopper-1/certs.pem", *, nonce: str = HOPPER_NONCE, flip: int = -1
) -> Claims:
    measured = bytearray(vector("nvidia/hopper-1/report.hex"))
    if flip >= 0:
        measured[flip] ^= 1
    return verifier.verify(
        verifier.encode_evidence(bytes(measured), vector(f"nvidia/{chain}")),
        binding=Committed(device_nonce=bytes.fromhex(nonce)),
        collateral=Collateral(),
        now=utc("2026-11-21"),
    )


def test_a_real_hopper_is_good() -> None:
    claims = hopper()
    assert claims.product == "GH100"
    assert claims.measurements["driver_version"] == b"580.95.05"
    assert len([name for name in claims.measurements if name.startswith("block_")]) == 64
    assert claims.flags == {"revocation_checked": False}


@pytest.mark.parametrize("place", [4, 40, 100, 2000, 4000, 4128])
def test_a_changed_hopper_is_refused(place: int) -> None:
    with pytest.raises(VerificationError):
        hopper(flip=place)


@pytest.mark.parametrize(
    ("chain", "fault"),
    [
        ("chain-cases/case1.pem", "signature"),  # another GPU's
        ("chain-cases/case2.pem", "chain"),  # only the root
        ("chain-cases/case3.pem", "chain"),  # without provisioner
        ("chain-cases/case4.pem", "signature"),  # without attestation key
    ],
)
def test_other_real_chains_are_refused(chain: str, fault: str) -> None:
    with pytest.raises(VerificationError) as caught:
        hopper(chain)
    assert caught.value.reason == f"attestation.nvidia.{fault}"


def test_a_real_report_answers_its_own_nonce_only() -> None:
    with pytest.raises(VerificationError, match=r"attestation\.nvidia\.nonce"):
        hopper(nonce="00" * 32)
