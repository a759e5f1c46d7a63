import dataclasses
import datetime as dt
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealane.crypto.evidence.claims import Binding, Claims, HardwareClock
from sealane.crypto.evidence.tpm2 import Evidence, Introduction, Tpm2Verifier
from sealane.crypto.evidence.verifier import NOT_INTRODUCED, Introduced
from sealane.errors import VerificationError
from vendors.event_log import FIRMWARE, LOADER, LOG, LOGGED, event, header
from vendors.tpm import (
    AES_128_CFB,
    AK_ATTRIBUTES,
    ECDSA_SHA256,
    EK_ATTRIBUTES,
    KEM_ATTRIBUTES,
    Manufacturer,
    SyntheticTpm,
    certify_body,
    name_of,
    p256,
    public_area,
    quote_body,
)

NOW = dt.datetime(2026, 11, 22, 12, tzinfo=dt.UTC)
RSA_KEY = rsa.generate_private_key(65537, 2048)
SHORT_RSA_KEY = rsa.generate_private_key(65537, 1024)  # noqa: S505 - to be refused


@pytest.fixture(scope="module")
def manufacturer() -> Manufacturer:
    return Manufacturer(NOW)


@pytest.fixture
def tpm() -> SyntheticTpm:
    return SyntheticTpm()


def binding_of(tpm: SyntheticTpm, runtime_data: bytes = b"runtime data") -> Binding:
    return Binding(
        runtime_data=runtime_data,
        nonce=bytes(32),
        tls_public_key=b"tls",
        kem_public_key=tpm.kem_point,
    )


def introduce(tpm: SyntheticTpm) -> Introduced:
    return Tpm2Verifier().introduce(tpm.introduction().encode(), now=NOW)


def verify(evidence: Evidence | bytes, introduced: Introduced, binding: Binding) -> Claims:
    encoded = evidence if isinstance(evidence, bytes) else evidence.encode()
    return Tpm2Verifier().verify(
        encoded, binding=binding, introduced=introduced, endorsements=b"", now=NOW
    )


def attested(tpm: SyntheticTpm) -> tuple[Evidence, Introduced, Binding]:
    """Return an honest TPM's evidence and the data to verify it with."""
    introduced, binding = introduce(tpm), binding_of(tpm)
    return tpm.evidence(binding, tpm.activate(introduced.activation)), introduced, binding


@pytest.mark.parametrize("ek", [p256(), RSA_KEY], ids=["ek-p256", "ek-rsa"])
@pytest.mark.parametrize("ak", [p256(), RSA_KEY], ids=["ak-p256", "ak-rsa"])
def test_evidence_of_an_honest_tpm_is_read(ek: ec.EllipticCurvePrivateKey, ak: object) -> None:
    tpm = SyntheticTpm(ek=ek, ak=ak)  # type: ignore[arg-type]
    claims = verify(*attested(tpm))
    assert claims.hardware_id == tpm.hardware_id
    assert claims.measurements == {f"pcr{i}": bytes([i]) * 32 for i in (0, 2, 4, 7)}
    assert claims.certified_keys == {"kem"}
    assert claims.flags == {"ek_uncertified": True, "clock_unsafe": False}
    assert claims.clock == HardwareClock(reset_count=3, restart_count=1, millis=100_000)
    assert claims.tcb == {"firmware": 7}


def test_evidence_without_a_certified_key_certifies_none(tpm: SyntheticTpm) -> None:
    evidence, introduced, binding = attested(tpm)
    bare = dataclasses.replace(
        evidence, kem_public=b"", certification=b"", certification_signature=b""
    )
    assert verify(bare, introduced, binding).certified_keys == frozenset()
    # The certification must name the key.
    with pytest.raises(VerificationError, match=r"tpm2\.malformed"):
        verify(dataclasses.replace(evidence, kem_public=b""), introduced, binding)


def test_unsafe_clock_is_a_claim(tpm: SyntheticTpm) -> None:
    evidence, introduced, binding = attested(tpm)
    values = evidence.pcr_values
    unsafe = tpm.attest(0x8018, quote_body(list(tpm.pcrs), values), binding.qualifying_data, safe=0)
    assert verify(tpm.requote(evidence, unsafe), introduced, binding).flags["clock_unsafe"]


@pytest.mark.parametrize("key", [p256(), RSA_KEY], ids=["p256", "rsa"])
def test_certified_endorsement_key_is_traced_to_its_maker(
    manufacturer: Manufacturer, key: ec.EllipticCurvePrivateKey
) -> None:
    tpm = SyntheticTpm(ek=key)
    verifier = Tpm2Verifier([Manufacturer(NOW).root, manufacturer.root])
    introduction = tpm.introduction(manufacturer.certify(key.public_key())).encode()
    introduced = verifier.introduce(introduction, now=NOW)
    evidence = tpm.evidence(binding_of(tpm), tpm.activate(introduced.activation))
    claims = verify(evidence, introduced, binding_of(tpm))
    assert not claims.flags["ek_uncertified"]
    assert claims.valid_until == NOW + dt.timedelta(days=1)


def test_certificates_that_prove_nothing_are_refused(
    manufacturer: Manufacturer, tpm: SyntheticTpm
) -> None:
    key = tpm.ek.public_key()
    good = manufacturer.certify(key)
    other_maker = Manufacturer(NOW)
    cases = {
        "chain": [
            other_maker.certify(key),
            [good[0], other_maker.issuer],
            good[:1],
        ],
        "endorsement_key": [
            manufacturer.certify(p256().public_key()),
            manufacturer.certify(RSA_KEY.public_key()),
            manufacturer.certify(Ed25519PrivateKey.generate().public_key()),
            manufacturer.certify(key, usage="1.3.6.1.5.5.7.3.2"),
        ],
    }
    verifier = Tpm2Verifier([manufacturer.root])
    for fault, chains in cases.items():
        for chain in chains:
            with pytest.raises(VerificationError) as caught:
                verifier.introduce(tpm.introduction(chain).encode(), now=NOW)
            assert caught.value.reason == f"attestation.tpm2.{fault}"
    for now in (NOW - dt.timedelta(days=2), NOW + dt.timedelta(days=2)):
        with pytest.raises(VerificationError, match=r"tpm2\.expired"):
            verifier.introduce(tpm.introduction(good).encode(), now=now)


@pytest.mark.parametrize("bit", [1, 4, 5, 16, 17, 18])
def test_endorsement_key_must_be_a_storage_key_of_the_tpm(tpm: SyntheticTpm, bit: int) -> None:
    public = public_area(tpm.ek, EK_ATTRIBUTES ^ 1 << bit, symmetric=AES_128_CFB)
    with pytest.raises(VerificationError, match=r"tpm2\.endorsement_key"):
        introduce_keys(public, tpm.ak_public)


def test_endorsement_key_of_another_cipher_is_refused(tpm: SyntheticTpm) -> None:
    for symmetric in (b"\x00\x06\x01\x00\x00\x43", b"\x00\x06\x00\x80\x00\x44", b"\x00\x10"):
        public = public_area(tpm.ek, EK_ATTRIBUTES, symmetric=symmetric)
        with pytest.raises(VerificationError, match=r"tpm2\.endorsement_key"):
            introduce_keys(public, tpm.ak_public)


@pytest.mark.parametrize("bit", [1, 4, 5, 16, 17, 18])
def test_attestation_key_must_be_restricted_and_the_tpms_own(tpm: SyntheticTpm, bit: int) -> None:
    public = public_area(tpm.ak, AK_ATTRIBUTES ^ 1 << bit, scheme=ECDSA_SHA256)
    with pytest.raises(VerificationError, match=r"tpm2\.attestation_key"):
        introduce_keys(tpm.ek_public, public)


@pytest.mark.parametrize("scheme", [b"\x00\x10", b"\x00\x18\x00\x04", b"\x00\x1a\x00\x0b\x00\x00"])
def test_attestation_key_of_another_scheme_is_refused(tpm: SyntheticTpm, scheme: bytes) -> None:
    with pytest.raises(VerificationError, match=r"tpm2\.attestation_key"):
        introduce_keys(tpm.ek_public, public_area(tpm.ak, AK_ATTRIBUTES, scheme=scheme))


def introduce_keys(endorsement_key: bytes, attestation_key: bytes) -> Introduced:
    introduction = Introduction(endorsement_key=endorsement_key, attestation_key=attestation_key)
    return Tpm2Verifier().introduce(introduction.encode(), now=NOW)


def test_bytes_behind_a_key_are_refused(tpm: SyntheticTpm) -> None:
    for public in ((tpm.ek_public + b"\0", tpm.ak_public), (tpm.ek_public, tpm.ak_public + b"\0")):
        with pytest.raises(VerificationError, match=r"tpm2\.malformed"):
            introduce_keys(*public)


def test_bytes_behind_a_certification_or_a_signature_are_refused() -> None:
    for ak in (p256(), RSA_KEY):
        tpm = SyntheticTpm(ak=ak)
        evidence, introduced, binding = attested(tpm)
        longer = tpm.recertify(evidence, evidence.kem_public, evidence.certification + b"\0")
        with pytest.raises(VerificationError, match=r"tpm2\.malformed"):
            verify(longer, introduced, binding)
        signed = dataclasses.replace(evidence, quote_signature=evidence.quote_signature + b"\0")
        with pytest.raises(VerificationError, match=r"tpm2\.malformed"):
            verify(signed, introduced, binding)


def test_keys_of_other_kinds_are_refused(tpm: SyntheticTpm) -> None:
    good = tpm.ak_public
    off_curve = good[:-1] + bytes([good[-1] ^ 1])
    rsa_public = public_area(RSA_KEY, AK_ATTRIBUTES)
    exponent_at = rsa_public.index((2048).to_bytes(2, "big") + bytes(4)) + 2
    cases = [
        public_area(tpm.ak, AK_ATTRIBUTES, name_algorithm=0x0004),
        public_area(tpm.ak, AK_ATTRIBUTES, curve=4),
        off_curve,
        b"\x00\x08" + good[2:],
        rsa_public[:exponent_at] + (3).to_bytes(4, "big") + rsa_public[exponent_at + 4 :],
        rsa_public.replace((2048).to_bytes(2, "big"), (3072).to_bytes(2, "big"), 1),
        public_area(SHORT_RSA_KEY, AK_ATTRIBUTES),
        public_area(tpm.ak, AK_ATTRIBUTES, scheme=ECDSA_SHA256, policy=bytes(1024)),
    ]
    for public in cases:
        with pytest.raises(VerificationError, match=r"tpm2\.malformed"):
            introduce_keys(tpm.ek_public, public)


def test_truncated_or_extended_introductions_are_refused(tpm: SyntheticTpm) -> None:
    encoded = tpm.introduction().encode()
    for case in (*(encoded[:n] for n in range(len(encoded))), encoded + b"\0", encoded + bytes(4)):
        with pytest.raises(VerificationError, match=r"tpm2\.(malformed|certificate)"):
            Tpm2Verifier().introduce(case, now=NOW)


def test_other_tpm_can_not_answer(tpm: SyntheticTpm) -> None:
    """A TPM's credential is useless to another, and so is a proof of its secret for other data."""
    evidence, introduced, binding = attested(tpm)
    other = SyntheticTpm(ek=tpm.ek)
    for liar in (other, SyntheticTpm(ak=tpm.ak)):
        with pytest.raises(AssertionError):
            liar.activate(introduced.activation)
    for proof in (bytes(32), b"", evidence.proof[:-1]):
        with pytest.raises(VerificationError, match=r"tpm2\.not_activated"):
            verify(dataclasses.replace(evidence, proof=proof), introduced, binding)
    with pytest.raises(VerificationError, match=r"tpm2\.not_activated"):
        verify(evidence, introduce(tpm), binding)
    with pytest.raises(VerificationError, match=r"tpm2\.not_activated"):
        verify(evidence, NOT_INTRODUCED, binding)


def test_quote_of_another_attestation_key_is_refused(tpm: SyntheticTpm) -> None:
    _, introduced, binding = attested(tpm)
    secret = tpm.activate(introduced.activation)
    evidence = tpm.evidence(binding, secret)
    other = SyntheticTpm(ek=tpm.ek, kem=tpm.kem)
    with pytest.raises(VerificationError, match=r"tpm2\.signature"):
        verify(other.requote(evidence, evidence.quote), introduced, binding)


def test_evidence_for_other_runtime_data_is_refused(tpm: SyntheticTpm) -> None:
    """A quote is replayed in another session, whose credential was activated."""
    introduced = introduce(tpm)
    secret = tpm.activate(introduced.activation)
    old = tpm.evidence(binding_of(tpm, b"another challenge"), secret)
    current = binding_of(tpm)
    fresh = tpm.evidence(current, secret)
    replayed = dataclasses.replace(
        fresh, quote=old.quote, quote_signature=old.quote_signature, pcr_values=old.pcr_values
    )
    with pytest.raises(VerificationError, match=r"tpm2\.binding"):
        verify(replayed, introduced, current)
    recertified = dataclasses.replace(
        fresh,
        certification=old.certification,
        certification_signature=old.certification_signature,
    )
    with pytest.raises(VerificationError, match=r"tpm2\.binding"):
        verify(recertified, introduced, current)


@pytest.mark.parametrize(
    ("parent", "told"),
    [
        (b"\x40\x00\x00\x01", "owner hierarchy"),
        (b"\x40\x00\x00\x0c", "platform hierarchy"),
        (b"\x40\x00\x00\x07", "null hierarchy"),
        (b"\x00\x0b" + bytes(32), "not a primary key"),
        (b"", "not a primary key"),
    ],
    ids=["owner", "platform", "null", "child", "none"],
)
def test_attestation_key_outside_the_endorsement_hierarchy_is_refused(
    tpm: SyntheticTpm, parent: bytes, told: str
) -> None:
    """Detected by its quote, and by its certification alone."""
    elsewhere = dataclasses.replace(tpm, ak_parent=parent)
    with pytest.raises(VerificationError, match=told) as caught:
        verify(*attested(elsewhere))
    assert caught.value.reason == "attestation.tpm2.hierarchy"
    evidence, introduced, binding = attested(tpm)
    body = certify_body(name_of(tpm.kem_public))
    certification = elsewhere.attest(0x8017, body, binding.qualifying_data)
    with pytest.raises(VerificationError, match=told):
        verify(tpm.recertify(evidence, tpm.kem_public, certification), introduced, binding)


@pytest.mark.parametrize("extra_data", [b"", bytes(32), b"short", "truncated", "padded"])
def test_quote_that_binds_nothing_is_refused(tpm: SyntheticTpm, extra_data: bytes | str) -> None:
    evidence, introduced, binding = attested(tpm)
    if extra_data == "truncated":
        extra_data = binding.qualifying_data[:-1]
    elif extra_data == "padded":
        extra_data = binding.qualifying_data + b"\0"
    assert isinstance(extra_data, bytes)
    quote = tpm.attest(0x8018, quote_body(list(tpm.pcrs), evidence.pcr_values), extra_data)
    with pytest.raises(VerificationError, match=r"tpm2\.binding"):
        verify(tpm.requote(evidence, quote), introduced, binding)


Forge = Callable[[SyntheticTpm, bytes, list[int], bytes], bytes]


@pytest.mark.parametrize(
    "forge",
    [
        lambda tpm, d, i, v: tpm.attest(0x8018, quote_body(i, v), d, magic=0xFF544346),
        lambda tpm, d, i, v: tpm.attest(0x8017, quote_body(i, v), d),
        lambda tpm, d, i, v: tpm.attest(0x8018, quote_body(i, v), d, safe=2),
        lambda tpm, d, i, v: tpm.attest(0x8018, quote_body(i, v, bank=0x0004), d),
        lambda tpm, d, i, v: tpm.attest(0x8018, quote_body(i, v) + b"\0", d),
        lambda tpm, d, i, v: tpm.attest(0x8018, bytes(4) + quote_body(i, v)[-34:], d),
        lambda tpm, d, i, v: tpm.attest(
            0x8018, quote_body(i, v).replace(b"\x0b\x03", b"\x0b\x04\0", 1), d
        ),
    ],
    ids=["magic", "type", "safe", "bank", "trailing", "no-selection", "wide-selection"],
)
def test_quote_of_another_shape_is_refused(tpm: SyntheticTpm, forge: Forge) -> None:
    evidence, introduced, binding = attested(tpm)
    quote = forge(tpm, binding.qualifying_data, list(tpm.pcrs), evidence.pcr_values)
    with pytest.raises(VerificationError, match=r"tpm2\.malformed"):
        verify(tpm.requote(evidence, quote), introduced, binding)


def test_values_that_were_not_quoted_are_refused(tpm: SyntheticTpm) -> None:
    evidence, introduced, binding = attested(tpm)
    values = evidence.pcr_values
    for other in (values[:-1], values + bytes(32), bytes(len(values)), b"", values[::-1]):
        with pytest.raises(VerificationError, match=r"tpm2\.pcrs"):
            verify(dataclasses.replace(evidence, pcr_values=other), introduced, binding)
    # As many values as were quoted, but fewer registers.
    quote = tpm.attest(0x8018, quote_body([0, 2, 4], values), binding.qualifying_data)
    with pytest.raises(VerificationError, match=r"tpm2\.pcrs"):
        verify(tpm.requote(evidence, quote), introduced, binding)


@pytest.mark.parametrize("bit", [1, 4, 5, 16, 17, 18])
def test_kem_key_must_be_born_in_the_tpm(tpm: SyntheticTpm, bit: int) -> None:
    evidence, introduced, binding = attested(tpm)
    public = public_area(tpm.kem, KEM_ATTRIBUTES ^ 1 << bit)
    certification = tpm.attest(0x8017, certify_body(name_of(public)), binding.qualifying_data)
    with pytest.raises(VerificationError, match=r"tpm2\.kem_key"):
        verify(tpm.recertify(evidence, public, certification), introduced, binding)


def test_certification_must_name_the_kem_key_of_the_runtime_data(tpm: SyntheticTpm) -> None:
    evidence, introduced, binding = attested(tpm)
    data = binding.qualifying_data
    other = public_area(p256(), KEM_ATTRIBUTES)
    scheme = public_area(tpm.kem, KEM_ATTRIBUTES, scheme=b"\x00\x19\x00\x0b")
    cases = [
        # the right key with the name of another, and the other way round
        (tpm.kem_public, tpm.attest(0x8017, certify_body(name_of(other)), data)),
        (other, tpm.attest(0x8017, certify_body(name_of(other)), data)),
        (other, evidence.certification),
        (scheme, tpm.attest(0x8017, certify_body(name_of(scheme)), data)),
        (tpm.ak_public, tpm.attest(0x8017, certify_body(name_of(tpm.ak_public)), data)),
    ]
    for public, certification in cases:
        with pytest.raises(VerificationError, match=r"tpm2\.kem_key"):
            verify(tpm.recertify(evidence, public, certification), introduced, binding)
    quote_as_certification = tpm.attest(0x8018, certify_body(name_of(tpm.kem_public)), data)
    with pytest.raises(VerificationError, match=r"tpm2\.malformed"):
        verify(tpm.recertify(evidence, tpm.kem_public, quote_as_certification), introduced, binding)


def test_certification_by_another_key_is_refused(tpm: SyntheticTpm) -> None:
    evidence, introduced, binding = attested(tpm)
    other = SyntheticTpm(kem=tpm.kem)
    forged = other.recertify(evidence, evidence.kem_public, evidence.certification)
    with pytest.raises(VerificationError, match=r"tpm2\.signature"):
        verify(forged, introduced, binding)


@pytest.mark.parametrize("ak", [p256(), RSA_KEY], ids=["p256", "rsa"])
def test_every_truncation_and_every_flipped_byte_is_refused(ak: ec.EllipticCurvePrivateKey) -> None:
    evidence, introduced, binding = attested(SyntheticTpm(ak=ak))
    encoded = evidence.encode()
    for end in range(len(encoded)):
        with pytest.raises(VerificationError):
            verify(encoded[:end], introduced, binding)
    for at in range(len(encoded)):
        flipped = encoded[:at] + bytes([encoded[at] ^ 0x10]) + encoded[at + 1 :]
        with pytest.raises(VerificationError):
            verify(flipped, introduced, binding)
    for trailing in (b"\0", bytes(4)):
        with pytest.raises(VerificationError, match=r"tpm2\.malformed"):
            verify(encoded + trailing, introduced, binding)


def test_signatures_of_other_algorithms_are_refused(tpm: SyntheticTpm) -> None:
    evidence, introduced, binding = attested(tpm)
    good = evidence.quote_signature
    for signature in (b"\x00\x18\x00\x04" + good[4:], b"\x00\x14" + good[2:], good + b"\0"):
        forged = dataclasses.replace(evidence, quote_signature=signature)
        with pytest.raises(VerificationError, match=r"tpm2\.malformed"):
            verify(forged, introduced, binding)


def test_hardware_clock_knows_when_it_was_put_back() -> None:
    last = HardwareClock(reset_count=5, restart_count=2, millis=1_000_000)

    def clock(resets: int, restarts: int, millis: int) -> HardwareClock:
        return HardwareClock(reset_count=resets, restart_count=restarts, millis=millis)

    for ahead in ((5, 2, 1_000_000), (5, 2, 940_000), (5, 3, 0), (6, 0, 0)):
        assert not clock(*ahead).has_gone_back(last)
    for behind in ((5, 2, 939_999), (5, 1, 2_000_000), (4, 9, 2_000_000)):
        assert clock(*behind).has_gone_back(last)


# Event log


def test_event_log_that_leads_to_the_quote_names_what_was_measured() -> None:
    tpm = SyntheticTpm(pcrs={**LOGGED, 7: bytes(32), 12: b"\1" * 32}, event_log=LOG)
    claims = verify(*attested(tpm))
    # PCR 12 was extended by more than the firmware's log.
    assert claims.events == {"pcr0": (FIRMWARE,), "pcr4": (FIRMWARE, LOADER)}


def test_event_log_that_leads_elsewhere_is_refused() -> None:
    for index in LOGGED:
        tpm = SyntheticTpm(pcrs={**LOGGED, index: bytes(32)}, event_log=LOG)
        with pytest.raises(VerificationError, match=r"tpm2\.event_log"):
            verify(*attested(tpm))
    omitted = header() + LOG[len(header()) :].replace(event(4, 0x80000003, b"loader"), b"")
    with pytest.raises(VerificationError, match=r"tpm2\.event_log"):
        verify(*attested(SyntheticTpm(pcrs=LOGGED, event_log=omitted)))


@pytest.mark.parametrize(
    "log",
    [
        LOG[:-1],
        LOG + b"\0",
        b"x",
        header()[:-1],
        header().replace(b"Event03", b"Event02") + event(0, 8, b""),
        header(b"\x0b\x00\x14\x00"),
        header(kind=8),
        header(rest=b"\0"),
        header() + event(0, 3, bytes(1 << 16), bytes(32)) * 2,
        header(b"\x04\x00\x14\x00"),
        header(b"", count=0),
        header(b"\x0b\x00\x20\x00" * 9, count=9),
        header(b"\x0b\x00\x20\x00\x0c\x00\x41\x00", count=2),
        header() + event(24, 8, b""),
        header() + event(0, 8, b"") + event(0, 3, b"StartupLocality\0\3", bytes(32)),
        header() + event(0, 3, b"StartupLocality\0\3\3", bytes(32)),
        header() + event(0, 8, b"").replace(b"\1\0\0\0\x0b\0", b"\1\0\0\0\x0c\0"),
        header() + event(0, 8, b"").replace(b"\1\0\0\0\x0b\0", b"\0\0\0\0\x0b\0"),
        header() + event(0, 8, b"").replace(b"\1\0\0\0\x0b\0", b"\2\0\0\0\x0b\0"),
        header() + event(0, 8, b"") * 4096,
        header()
        + event(0, 8, b"").replace(b"\1\0\0\0\x0b\0", b"\2\0\0\0\x0b\0" + bytes(32) + b"\x0b\0"),
    ],
)
def test_malformed_event_log_is_refused(log: bytes) -> None:
    with pytest.raises(VerificationError, match=r"tpm2\.malformed"):
        verify(*attested(SyntheticTpm(event_log=log)))
