"""Nodes with TPMs and a real broker: admissions, and refusals with their reasons."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from accelerators.cards import Maker, running_card
from control_plane import Daemon, Site, daemon, sealanectl, sealaned, short_directory
from sealane.client import connect
from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.certificates import Subject, verify_leaf
from sealane.crypto.evidence.tpm2 import Evidence, activation_proof
from sealane.crypto.evidence.tpm2_structures import parse_public
from sealane.crypto.kem import X25519KemKey
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node.enrolment import Enrolment
from sealane.daemon.node.identity import Keys
from sealane.daemon.node.kept_anchors import KeptAnchors
from sealane.daemon.runtime.clock import utc_now
from sealane.errors import VerificationError
from software_tpm import SoftwareTpm, software_tpm, with_attestation_key_of
from vendors.nvidia import gpu_command
from vendors.tpm import Manufacturer, SyntheticTpm

PCRS = (0, 7, 16)
HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"


@dataclass
class Trust:
    """A broker that accepts TPM evidence, and its policy."""

    site: Site
    hardware: dict[str, tuple[str, str]] = field(default_factory=dict)
    pcrs: dict[int, bytes] = field(default_factory=lambda: {i: bytes(32) for i in PCRS})
    flags: str = "ek_uncertified = true"
    secondary: str = "[]"
    broker: Daemon | None = None

    def allow(self, identifier: str, node: str, role: str) -> None:
        """List a TPM for one node in one role."""
        self.hardware[node] = (identifier, role)

    def write_policy(self) -> None:
        """Write the requirements for every node."""
        lines = ["version = 1"]
        for node, (identifier, role) in self.hardware.items():
            lines += [
                "[[hardware]]",
                f'id = "{identifier}"',
                f'nodes = ["{node}"]',
                f'roles = ["{role}"]',
                'tenant = "t"',
            ]
        values = ", ".join(f'pcr{i} = ["{value.hex()}"]' for i, value in self.pcrs.items())
        lines += [
            "[[reference]]",
            'name = "machines"',
            'evidence = "tpm2"',
            'product = "tpm2"',
            'roles = ["target", "gateway"]',
            f"measurements = {{ {values} }}",
            "tcb = { firmware = 0 }",
            "tcb_statuses = []",
            "advisories = []",
            "properties = {}",
            f"secondary = {self.secondary}",
            f"flags = {{ {self.flags} }}",
            'certified_keys = ["kem"]',
            'accepted_tier = "warning"',
        ]
        (self.site.root / "policy.toml").write_text("\n".join(lines) + "\n")

    def enrolment(self) -> dict[str, Any]:
        """Return the [enrolment] settings for the broker."""
        assert self.broker is not None
        return {
            "broker_address": self.broker.addresses["broker"],
            "attestation_address": self.broker.addresses["attestation"],
            "trust_anchor": str(self.site.root / "broker" / "trust-anchor.pem"),
            "evidence": "tpm2",
        }

    def refusals(self) -> list[str]:
        """Return the reasons of refusals in the audit log, oldest first."""
        lines = (self.site.root / "broker" / "audit.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [e["reason"] for e in events if e.get("reason", "").startswith("attestation.")]


@contextlib.contextmanager
def trusting(
    *nodes: tuple[str, str, str],
    maker: Manufacturer | None = None,
    policy: str | None = None,
    secondary: str = "[]",
) -> Iterator[Trust]:
    """Run a broker that lists hardware, node and role, and requires the maker's certificate."""
    with short_directory() as root:
        trust = Trust(Site(root), secondary=secondary)
        config = trust.site.broker_config()
        if maker is not None:
            trust.flags = ""
            roots = root / "roots.pem"
            roots.write_bytes(maker.root.public_bytes(Encoding.PEM))
            with config.open("a") as file:
                file.write(f'tpm_roots = "{roots}"\n')
        for node in nodes:
            trust.allow(*node)
        trust.write_policy()
        if policy is not None:
            (root / "policy.toml").write_text(policy)
        with daemon(config) as trust.broker:
            yield trust


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SoftwareTpm]:
    with software_tpm(tmp_path / "tpm") as tpm:
        yield tpm


def open_driver(machine: SoftwareTpm, **options: Any) -> Any:
    from sealane.daemon.node.evidence.tpm2 import Tpm2Driver
    from sealane.daemon.node.tpm import Tpm

    return Tpm2Driver(Tpm(machine.tcti), pcrs=PCRS, **options)


def identifier_of(driver: Any) -> str:
    return str(driver.hardware_id)


def enrol(
    trust: Trust, driver: Any, *, node: str = "g", role: str = "gateway", keys: Keys | None = None
) -> tuple[Keys, Subject]:
    """Enrol with a node's driver."""

    async def run() -> tuple[Keys, x509.Certificate, x509.Certificate]:
        mine = keys or Keys.create(kem=await driver.create_kem_key())
        config = EnrolmentConfig(**trust.enrolment())
        kept = KeptAnchors.open(config, Path(config.trust_anchor).parent)
        enrolment = Enrolment(config, node=node, role=role, driver=driver, kept=kept)
        obtained: Any = await enrolment.obtain(mine)
        return mine, getattr(obtained, "leaf", obtained), kept.anchors.certificates[0]

    mine, leaf, anchor = asyncio.run(run())
    return mine, verify_leaf(leaf, anchor=anchor, now=utc_now())


def refused(trust: Trust, driver: Any, **arguments: Any) -> str:
    """Expect an enrolment to fail; return the reason, which only the audit log contains."""
    with pytest.raises(VerificationError) as caught:
        enrol(trust, driver, **arguments)
    assert caught.value.reason == "attestation.refused"
    return trust.refusals()[-1]


def test_node_is_certified_for_the_key_in_its_tpm(machine: SoftwareTpm) -> None:
    driver = open_driver(machine)
    with trusting((identifier_of(driver), "g", "gateway")) as trust:
        keys, subject = enrol(trust, driver)
        assert subject.kem_algorithm == "p256"
        assert subject.kem_public_key == keys.kem_public
        # The same keys again: a renewal.
        assert enrol(trust, driver, keys=keys)[1] == subject
    driver.close()


def test_machine_that_booted_something_else_is_refused(machine: SoftwareTpm) -> None:
    driver = open_driver(machine)
    with trusting((identifier_of(driver), "g", "gateway")) as trust:
        enrol(trust, driver)
        driver._tpm.call(lambda esapi: extend(esapi, 7))
        assert refused(trust, driver) == "attestation.measurement.unknown"
    driver.close()


def extend(esapi: Any, index: int) -> None:
    from tpm2_pytss import TPML_DIGEST_VALUES, TPMT_HA, TPMU_HA
    from tpm2_pytss.constants import ESYS_TR, TPM2_ALG

    digest = hashlib.sha256(b"something else").digest()
    entry = TPMT_HA(hashAlg=TPM2_ALG.SHA256, digest=TPMU_HA(sha256=digest))
    esapi.pcr_extend(ESYS_TR(index), TPML_DIGEST_VALUES(digests=[entry]))


def test_tpm_that_is_not_listed_or_listed_otherwise_is_refused(machine: SoftwareTpm) -> None:
    driver = open_driver(machine)
    with trusting(("ek-sha256:" + "0" * 64, "g", "gateway")) as trust:
        assert refused(trust, driver) == "attestation.hardware.not_listed"
    with trusting((identifier_of(driver), "g", "gateway")) as trust:
        assert refused(trust, driver, node="h") == "attestation.node.refused"
        assert refused(trust, driver, role="target") == "attestation.role.refused"
    driver.close()


def test_policy_can_want_the_makers_certificate(machine: SoftwareTpm) -> None:
    driver = open_driver(machine)
    identifier = identifier_of(driver)
    key: Any = parse_public(driver._keys.endorsement_key).key
    maker, other = Manufacturer(utc_now()), Manufacturer(utc_now())
    with trusting((identifier, "g", "gateway"), maker=maker) as trust:
        assert refused(trust, driver) == "attestation.flag.refused"
        driver.close()
        for certifier in (maker, other):
            certificates = [c.public_bytes(Encoding.DER) for c in certifier.certify(key)]
            driver = open_driver(machine, ek_certificates=certificates)
            if certifier is maker:
                enrol(trust, driver)
            else:
                assert refused(trust, driver) == "attestation.tpm2.chain"
            driver.close()


class Hostile:
    """A node with a listed TPM that modifies the messages to and from the verifier."""

    def __init__(self, driver: Any, **replaced: Callable[..., Any]) -> None:
        self._driver = driver
        self.evidence_type, self.media_type = driver.evidence_type, driver.media_type
        self.is_development = False
        for name, function in replaced.items():
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


def test_evidence_of_another_attestation_key_is_refused(machine: SoftwareTpm) -> None:
    """The listed TPM's endorsement key with an attestation key made in software."""
    driver, liar = open_driver(machine), SyntheticTpm(pcrs={i: bytes(32) for i in PCRS})

    async def introduction() -> bytes:
        mixed = replace(liar.introduction(), endorsement_key=driver._keys.endorsement_key)
        return mixed.encode()

    async def collect(data: RuntimeData, *, activation: bytes) -> bytes:
        return liar.evidence(data.binding(), bytes(32)).encode()

    with trusting((identifier_of(driver), "g", "gateway")) as trust:
        hostile = Hostile(driver, introduction=introduction, collect=collect)
        assert refused(trust, hostile) == "attestation.tpm2.not_activated"
    driver.close()


def test_replayed_evidence_is_refused(machine: SoftwareTpm) -> None:
    driver, kept = open_driver(machine), []

    async def record(data: RuntimeData, *, activation: bytes) -> bytes:
        kept.append(await driver.collect(data, activation=activation))
        return bytes(kept[-1])

    async def replay(data: RuntimeData, *, activation: bytes) -> bytes:
        return bytes(kept[0])

    with trusting((identifier_of(driver), "g", "gateway")) as trust:
        keys, _ = enrol(trust, Hostile(driver, collect=record))
        hostile = Hostile(driver, collect=replay)
        assert refused(trust, hostile, keys=keys) == "attestation.tpm2.not_activated"
        # Even if the fresh credential is activated and proved.
        hostile = Hostile(driver, collect=lambda *a, **k: proved_again(driver, kept[0], *a, **k))
        assert refused(trust, hostile, keys=keys) == "attestation.tpm2.binding"
    driver.close()


async def proved_again(driver: Any, old: bytes, data: RuntimeData, *, activation: bytes) -> bytes:
    from sealane.crypto.encoding import parse_fields

    parts = parse_fields("sealane tpm2 evidence v1", old, count_max=8)
    assert parts is not None
    secret = await driver._tpm.run(lambda esapi: driver._keys.activate(esapi, activation))
    proof = activation_proof(secret, data.binding().qualifying_data)
    return _rebuilt(proof, parts)


def _rebuilt(proof: bytes, parts: list[bytes]) -> bytes:
    return Evidence(
        proof=proof,
        quote=parts[1],
        quote_signature=parts[2],
        pcr_values=parts[3],
        event_log=parts[4],
        kem_public=parts[5],
        certification=parts[6],
        certification_signature=parts[7],
    ).encode()


@pytest.mark.slow
@pytest.mark.parametrize("parent", ["owner", "null", "child"])
def test_chosen_attestation_key_forges_no_state_and_bars_nobody(
    machine: SoftwareTpm, parent: str
) -> None:
    """An attacker with root next to a listed TPM tries keys until counts and versions match."""
    driver = open_driver(machine)
    with trusting((identifier_of(driver), "g", "gateway")) as trust:
        for attempt in range(3):
            with_attestation_key_of(driver, parent, attempt=attempt)
            assert refused(trust, driver) == "attestation.tpm2.hierarchy"
        driver.close()
        driver = open_driver(machine)
        enrol(trust, driver)
    driver.close()


def test_key_that_the_tpm_did_not_make_is_refused(machine: SoftwareTpm) -> None:
    """Made in software, without certification or with that of another key."""
    driver = open_driver(machine)
    foreign = Keys.create(kem=X25519KemKey.create())

    async def with_own(data: RuntimeData, *, activation: bytes) -> bytes:
        key = await driver.create_kem_key()
        driver._kem_keys[data.kem_public_key] = key
        return bytes(await driver.collect(data, activation=activation))

    async def with_none(data: RuntimeData, *, activation: bytes) -> bytes:
        from sealane.crypto.encoding import parse_fields

        whole = await with_own(data, activation=activation)
        parts = parse_fields("sealane tpm2 evidence v1", whole, count_max=8)
        assert parts is not None
        return _rebuilt(parts[0], [*parts[:5], b"", b"", b""])

    with trusting((identifier_of(driver), "g", "gateway")) as trust:
        for collect, reason in (
            (with_own, "attestation.tpm2.kem_key"),
            (with_none, "attestation.key.uncertified"),
        ):
            hostile = Hostile(driver, collect=collect)
            assert refused(trust, hostile, keys=foreign) == reason
    driver.close()


def test_tpm_whose_state_was_put_back_is_refused(machine: SoftwareTpm) -> None:
    driver = open_driver(machine)
    identifier = identifier_of(driver)
    driver.close()
    machine.stop()
    saved = {p: p.read_bytes() for p in machine.directory.iterdir() if p.is_file()}
    for _ in range(3):
        machine.start()
        driver = open_driver(machine)
        driver.close()
        machine.stop()
    machine.start()
    with trusting((identifier, "g", "gateway")) as trust:
        driver = open_driver(machine)
        enrol(trust, driver)
        driver.close()
        machine.stop()
        for path, content in saved.items():
            path.write_bytes(content)
        machine.start()
        driver = open_driver(machine)
        assert refused(trust, driver) == "attestation.clock.went_back"
        driver.close()


def test_machine_says_what_a_policy_needs_of_it(machine: SoftwareTpm) -> None:
    with trusting() as trust:
        role = "[target]\n"
        config = node_config(trust, "s", machine, role)
        arguments = ("--node", "s", "--role", "target", "--tenant", "t")
        said = sealanectl("attest", "machine", config, *arguments)
        assert said.returncode == 0, said.stderr
        entries = said.stdout
    driver = open_driver(machine)
    assert f'id = "{identifier_of(driver)}"' in entries
    assert "flags = { ek_uncertified = true }" in entries
    with trusting(policy="version = 1\n" + entries) as trust:
        enrol(trust, driver, node="s", role="target")
        driver._tpm.call(lambda esapi: extend(esapi, 0))
        assert refused(trust, driver, node="s", role="target") == "attestation.measurement.unknown"
    driver.close()


def test_machine_names_its_card_if_the_card_has_a_trusted_maker(
    machine: SoftwareTpm, tmp_path: Path
) -> None:
    maker = Maker(tmp_path / "maker")
    arguments, hardware_id = maker.card("1")
    with trusting() as trust, running_card(trust.site.root / "card", arguments):
        card = f'label = "card0"\ntype = "card"\nsocket = "{trust.site.root / "card"}"\n'
        role = '[gateway]\ntarget_node = "s"\ntarget_address = "127.0.0.1:1"\n'
        config = node_config(trust, "g", machine, f"[[enrolment.secondary]]\n{card}{role}")
        call = ("attest", "machine", config, "--node", "g", "--role", "gateway", "--tenant", "t")
        refused = sealanectl(*call)
        assert (refused.returncode, refused.stdout) == (3, "")
        assert "[attestation.card.chain]" in refused.stderr
        said = sealanectl(*call, "--card-roots", maker.path)
        assert said.returncode == 0, said.stderr
    assert f'devices = ["{hardware_id}"]' in said.stdout
    assert "protected_bus = false" in said.stdout


@contextlib.contextmanager
def two_machines(directory: Path) -> Iterator[tuple[SoftwareTpm, SoftwareTpm]]:
    with software_tpm(directory / "s") as target, software_tpm(directory / "g") as gateway:
        yield target, gateway


def node_config(trust: Trust, name: str, machine: SoftwareTpm, role: str) -> Path:
    pairs = "".join(f'{key} = "{value}"\n' for key, value in trust.enrolment().items())
    return trust.site.write_config(
        name,
        f'[tpm]\ntcti = "{machine.tcti}"\n[enrolment]\n{pairs}'
        f"[enrolment.tpm2]\npcrs = {list(PCRS)}\n{role}",
    )


@pytest.mark.slow
def test_volume_lives_on_nodes_with_tpms_until_one_is_changed(tmp_path: Path) -> None:
    with two_machines(tmp_path) as (storage, compute):
        drivers = [open_driver(storage), open_driver(compute)]
        listed = [
            (identifier_of(driver), node, role)
            for driver, node, role in zip(drivers, "sg", ("target", "gateway"), strict=True)
        ]
        for driver in drivers:
            driver.close()
        with trusting(*listed) as trust, contextlib.ExitStack() as stack:
            role = '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
            config = node_config(trust, "s", storage, role + 'store = "memory"\n')
            target = stack.enter_context(daemon(config))
            control = target.addresses["target_control"]
            role = '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
            role += f'target_address = "{control}"\n'
            config = node_config(trust, "g", compute, role)
            with daemon(config) as gateway:
                asyncio.run(write_and_read(gateway))
                assert any(line["event"] == "evidence_opened" for line in gateway.log_lines())
            driver = open_driver(compute)
            driver._tpm.call(lambda esapi: extend(esapi, 16))
            driver.close()
            ended = sealaned("--config", config)
            assert ended.returncode == 3, ended.stderr
            assert trust.refusals()[-1] == "attestation.measurement.unknown"


def test_daemon_sends_what_its_devices_say(machine: SoftwareTpm) -> None:
    """Untrusted vendor of a GPU: the refusal proves that the broker read the command's output."""
    driver = open_driver(machine)
    identifier = identifier_of(driver)
    driver.close()
    with trusting((identifier, "s", "target"), secondary='["nvidia"]') as trust:
        role = '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
        config = node_config(trust, "s", machine, role)
        ended = sealaned("--config", config)
        assert ended.returncode == 3, ended.stderr
        assert trust.refusals()[-1] == "attestation.secondary.missing"
        assert '"event": "secondary_evidence_missing"' in ended.stderr
        command = json.dumps(gpu_command(trust.site.root))
        with config.open("a") as file:
            file.write('[[enrolment.secondary]]\nlabel = "gpu0"\ntype = "nvidia"\n')
            file.write(f"command = {command}\ntimeout_seconds = 30\n")
        ended = sealaned("--config", config)
        assert ended.returncode == 3, ended.stderr
        assert trust.refusals()[-1] == "attestation.nvidia.chain"


async def write_and_read(gateway: Daemon) -> None:
    async with connect(gateway.socket) as client:
        created = await client.volumes.create(size_bytes=1 << 20)
        volume = await client.volumes.attach(created.name, host_nqn=HOST)
        async with client.open(volume) as disk:
            await disk.write(0, b"secret" * 1000)
            assert await disk.read(0, 6000) == b"secret" * 1000
        await client.volumes.detach(volume.name)
