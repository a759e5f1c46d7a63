"""The `tpm2` driver with a software TPM, checked by the verifier."""

import asyncio
import datetime as dt
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.evidence.claims import Claims
from sealane.crypto.evidence.tpm2 import Tpm2Verifier
from sealane.crypto.evidence.tpm2_structures import parse_public
from sealane.crypto.kem import seal, unseal
from sealane.errors import UnavailableError, UsageError, VerificationError
from software_tpm import SoftwareTpm, software_tpm, with_attestation_key_of
from vendors.tpm import Manufacturer

NOW = dt.datetime(2026, 11, 22, 12, tzinfo=dt.UTC)
PCRS = (0, 7, 16)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SoftwareTpm]:
    with software_tpm(tmp_path / "tpm") as tpm:
        yield tpm


@pytest.fixture
def other_machine(tmp_path: Path) -> Iterator[SoftwareTpm]:
    with software_tpm(tmp_path / "other") as tpm:
        yield tpm


def connect(machine: SoftwareTpm) -> Any:
    from sealane.daemon.node.tpm import Tpm

    return Tpm(machine.tcti)


def open_driver(machine: SoftwareTpm, **options: Any) -> Any:
    from sealane.daemon.node.evidence.tpm2 import Tpm2Driver

    return Tpm2Driver(connect(machine), **{"pcrs": PCRS, **options})


def runtime_data(kem_public_key: bytes, *, nonce: bytes = bytes(32)) -> RuntimeData:
    return RuntimeData(
        nonce=nonce,
        audience="spiffe://sealane/broker/b",
        node="n",
        role="gateway",
        incarnation=bytes(16),
        tls_public_key=b"tls",
        kem_public_key=kem_public_key,
        verifier_key_sha256=bytes(32),
        evidence_type="tpm2",
        kem_algorithm="p256",
    )


def attest(driver: Any, verifier: Tpm2Verifier | None = None) -> Claims:
    """Attest with `driver` and a new key."""
    verifier = verifier or Tpm2Verifier()

    async def run() -> tuple[RuntimeData, Any, bytes]:
        key = await driver.create_kem_key()
        introduced = verifier.introduce(await driver.introduction(), now=NOW)
        data = runtime_data(key.public_key)
        return data, introduced, await driver.collect(data, activation=introduced.activation)

    data, introduced, evidence = asyncio.run(run())
    return verifier.verify(
        evidence, binding=data.binding(), introduced=introduced, endorsements=b"", now=NOW
    )


@pytest.mark.parametrize("ek_kind", ["ecc", "rsa"])
def test_tpm_proves_its_registers_and_its_key(
    machine: SoftwareTpm, ek_kind: Literal["ecc", "rsa"]
) -> None:
    driver = open_driver(machine, ek_kind=ek_kind)
    claims = attest(driver)
    driver.close()
    assert claims.measurements == {f"pcr{i}": bytes(32) for i in PCRS}
    assert claims.certified_keys == {"kem"}
    assert claims.hardware_id.startswith("ek-sha256:")
    assert claims.flags["ek_uncertified"]


def test_every_pcr_can_be_quoted(machine: SoftwareTpm) -> None:
    driver = open_driver(machine, pcrs=range(24))
    assert len(attest(driver).measurements) == 24
    driver.close()


def test_tpm_is_the_same_after_a_reset_and_counts_it(machine: SoftwareTpm) -> None:
    driver = open_driver(machine)
    before = attest(driver)
    driver.close()
    machine.restart()
    driver = open_driver(machine)
    after = attest(driver)
    driver.close()
    assert after.hardware_id == before.hardware_id
    assert before.clock is not None
    assert after.clock is not None
    assert before.clock.has_gone_back(after.clock)
    assert not after.clock.has_gone_back(before.clock)


def test_extended_register_shows(machine: SoftwareTpm) -> None:
    driver = open_driver(machine)
    digest = hashlib.sha256(b"something else ran").digest()
    driver._tpm.call(lambda e: extend(e, 16, digest))
    claims = attest(driver)
    driver.close()
    assert claims.measurements["pcr16"] == hashlib.sha256(bytes(32) + digest).digest()


def extend(esapi: Any, index: int, digest: bytes) -> None:
    from tpm2_pytss import TPML_DIGEST_VALUES, TPMT_HA, TPMU_HA
    from tpm2_pytss.constants import ESYS_TR, TPM2_ALG

    entry = TPMT_HA(hashAlg=TPM2_ALG.SHA256, digest=TPMU_HA(sha256=digest))
    esapi.pcr_extend(ESYS_TR(index), TPML_DIGEST_VALUES(digests=[entry]))


def test_certificate_of_the_endorsement_key_is_used(machine: SoftwareTpm) -> None:
    manufacturer = Manufacturer(NOW)
    driver = open_driver(machine)
    key = parse_public(driver._keys.endorsement_key).key
    driver.close()
    certificates = [c.public_bytes(serialization.Encoding.DER) for c in manufacturer.certify(key)]
    driver = open_driver(machine, ek_certificates=certificates)
    claims = attest(driver, Tpm2Verifier([manufacturer.root]))
    assert not claims.flags["ek_uncertified"]
    with pytest.raises(VerificationError, match=r"tpm2\.chain"):
        attest(driver, Tpm2Verifier())
    driver.close()


def write_nv(esapi: Any, index: int, content: bytes) -> None:
    from tpm2_pytss import TPM2B_NV_PUBLIC, TPMS_NV_PUBLIC
    from tpm2_pytss.constants import TPM2_ALG, TPMA_NV

    public = TPMS_NV_PUBLIC(
        nvIndex=index,
        nameAlg=TPM2_ALG.SHA256,
        attributes=TPMA_NV.AUTHREAD | TPMA_NV.AUTHWRITE | TPMA_NV.NO_DA,
        dataSize=len(content),
    )
    handle = esapi.nv_define_space(None, TPM2B_NV_PUBLIC(public))
    for start in range(0, len(content), 512):
        esapi.nv_write(handle, content[start : start + 512], start)


@pytest.mark.parametrize("padding", [b"", bytes(100), b"\xff" * 100])
def test_certificate_in_the_tpms_memory_is_found(machine: SoftwareTpm, padding: bytes) -> None:
    manufacturer = Manufacturer(NOW)
    driver = open_driver(machine)
    key: Any = parse_public(driver._keys.endorsement_key).key
    certificate = manufacturer.certify(key)[0].public_bytes(serialization.Encoding.DER)
    # NV index of the P-256 key's certificate in the TCG's EK credential profile.
    driver._tpm.call(lambda e: write_nv(e, 0x01C0000A, certificate + padding))
    driver.close()
    driver = open_driver(machine)
    claims = attest(driver, Tpm2Verifier([manufacturer.issuer]))
    driver.close()
    assert not claims.flags["ek_uncertified"]


def test_other_tpm_can_not_answer_in_its_place(
    machine: SoftwareTpm, other_machine: SoftwareTpm
) -> None:
    """Its endorsement key can't open this TPM's credential, nor this TPM's one made for its AK."""
    from sealane.crypto.evidence.tpm2 import Introduction

    driver, other = open_driver(machine), open_driver(other_machine)
    mixed = Introduction(
        endorsement_key=driver._keys.endorsement_key, attestation_key=other._keys.attestation_key
    )
    activation = Tpm2Verifier().introduce(mixed.encode(), now=NOW).activation

    async def answer(liar: Any) -> None:
        key = await liar.create_kem_key()
        await liar.collect(runtime_data(key.public_key), activation=activation)

    for liar in (driver, other):
        with pytest.raises(UnavailableError, match=r"tpm\.command"):
            asyncio.run(answer(liar))
        liar.close()


def test_evidence_of_an_earlier_challenge_is_refused(machine: SoftwareTpm) -> None:
    driver, verifier = open_driver(machine), Tpm2Verifier()

    async def run() -> None:
        key = await driver.create_kem_key()
        introduction = await driver.introduction()
        first, second = (verifier.introduce(introduction, now=NOW) for _ in range(2))
        data = runtime_data(key.public_key)
        old = await driver.collect(data, activation=first.activation)
        for introduced, answered in (
            (second, data),
            (first, replace(data, nonce=b"\1" * 32)),
        ):
            with pytest.raises(VerificationError, match=r"tpm2\.not_activated"):
                verifier.verify(
                    old,
                    binding=answered.binding(),
                    introduced=introduced,
                    endorsements=b"",
                    now=NOW,
                )

    asyncio.run(run())
    driver.close()


def test_driver_speaks_for_no_key_but_those_of_its_tpm(machine: SoftwareTpm) -> None:
    driver = open_driver(machine)
    foreign = ec.generate_private_key(ec.SECP256R1()).public_key()
    point = foreign.public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )
    with pytest.raises(UsageError, match=r"evidence\.key\.foreign"):
        asyncio.run(driver.collect(runtime_data(point), activation=b""))
    driver.close()


def test_imported_key_is_certified_by_the_tpm_and_refused_by_the_verifier(
    machine: SoftwareTpm,
) -> None:
    """A hostile agent makes the TPM certify a key whose private half it created itself."""
    from tpm2_pytss import TPM2B_PUBLIC, TPM2B_SENSITIVE
    from tpm2_pytss.constants import ESYS_TR, TPMA_OBJECT

    driver, verifier = open_driver(machine), Tpm2Verifier()
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    attributes = TPMA_OBJECT.DECRYPT | TPMA_OBJECT.USERWITHAUTH
    public = TPM2B_PUBLIC.from_pem(pem, objectAttributes=attributes)
    sensitive = TPM2B_SENSITIVE.from_pem(pem)

    async def run() -> None:
        genuine = await driver.create_kem_key()
        handle = driver._tpm.call(lambda e: e.load_external(public, sensitive, ESYS_TR.NULL))
        context = driver._tpm.call(lambda e: e.context_save(handle))
        driver._tpm.call(lambda e: e.flush_context(handle))
        point = key.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        )
        genuine.context, genuine.auth = context, b""
        genuine.encoded_public = bytes(public.publicArea.marshal())
        driver._kem_keys[point] = genuine
        introduced = verifier.introduce(await driver.introduction(), now=NOW)
        data = runtime_data(point)
        evidence = await driver.collect(data, activation=introduced.activation)
        with pytest.raises(VerificationError, match=r"tpm2\.kem_key"):
            verifier.verify(
                evidence,
                binding=data.binding(),
                introduced=introduced,
                endorsements=b"",
                now=NOW,
            )

    asyncio.run(run())
    driver.close()


@pytest.mark.parametrize(
    ("parent", "told"),
    [
        ("owner", "owner hierarchy"),
        ("platform", "platform hierarchy"),
        ("null", "null hierarchy"),
        ("child", "not a primary key"),
    ],
)
def test_attestation_key_that_its_owner_chose_elsewhere_is_refused(
    machine: SoftwareTpm, parent: str, told: str
) -> None:
    """A hostile agent's TPM opens the credential but signs with a key of another hierarchy."""
    driver = open_driver(machine)
    with_attestation_key_of(driver, parent)
    with pytest.raises(VerificationError, match=told) as caught:
        attest(driver)
    assert caught.value.reason == "attestation.tpm2.hierarchy"
    driver.close()


def test_every_key_of_the_endorsement_hierarchy_attests_the_same_state(
    machine: SoftwareTpm,
) -> None:
    """So the choice of a key changes neither the firmware's version nor the counts."""
    driver = open_driver(machine)
    honest = attest(driver)
    for attempt in range(1, 4):
        with_attestation_key_of(driver, "endorsement", attempt=attempt)
        claims = attest(driver)
        assert claims.tcb == honest.tcb
        assert claims.clock is not None
        assert honest.clock is not None
        assert claims.clock.reset_count == honest.clock.reset_count
        assert claims.clock.restart_count == honest.clock.restart_count
    driver.close()


def test_secret_opens_with_the_key_in_the_tpm_only(machine: SoftwareTpm) -> None:
    driver = open_driver(machine)

    async def keys() -> list[Any]:
        return [await driver.create_kem_key() for _ in range(5)]

    made = asyncio.run(keys())
    assert len({key.public_key for key in made}) == 5
    for key in made:
        sealed = seal(b"secret", algorithm="p256", public_key=key.public_key, info=b"")
        assert unseal(sealed, key=key, info=b"") == b"secret"
        with pytest.raises(VerificationError, match=r"secret\.sealed"):
            unseal(b"\4" + bytes(64) + sealed[65:], key=key, info=b"")
    with pytest.raises(VerificationError, match=r"secret\.sealed"):
        unseal(sealed, key=made[0], info=b"")
    driver.close()


def test_key_is_gone_after_a_reset(machine: SoftwareTpm) -> None:
    driver = open_driver(machine)
    key = asyncio.run(driver.create_kem_key())
    sealed = seal(b"secret", algorithm="p256", public_key=key.public_key, info=b"")
    driver.close()
    machine.restart()
    driver = open_driver(machine)
    key._tpm = driver._tpm
    with pytest.raises(UnavailableError, match=r"tpm\.command"):
        unseal(sealed, key=key, info=b"")
    driver.close()


def test_event_log_goes_along_or_the_driver_says_why(machine: SoftwareTpm, tmp_path: Path) -> None:
    path = tmp_path / "log"
    driver = open_driver(machine, event_log=path)
    with pytest.raises(UnavailableError, match=r"evidence\.event_log"):
        attest(driver)
    path.write_bytes(bytes((128 << 10) + 1))
    with pytest.raises(UnavailableError, match="more than"):
        attest(driver)
    path.write_bytes(b"no log")
    with pytest.raises(VerificationError, match=r"tpm2\.malformed"):
        attest(driver)
    driver.close()


def test_register_that_changes_while_it_is_quoted_is_read_again(machine: SoftwareTpm) -> None:
    driver = open_driver(machine)
    esapi, changes = driver._tpm._esapi, 2
    quote = esapi.quote

    def extending(*args: Any) -> Any:
        nonlocal changes
        quoted = quote(*args)
        if changes:
            changes -= 1
            extend(esapi, 16, b"\1" * 32)
        return quoted

    esapi.quote = extending
    assert attest(driver).measurements["pcr16"] != bytes(32)
    changes = 100
    with pytest.raises(UnavailableError, match=r"evidence\.pcrs\.changing"):
        attest(driver)
    driver.close()
