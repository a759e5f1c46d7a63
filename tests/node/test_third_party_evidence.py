"""Kinds of evidence from other distributions: found by entry points, used when they are named."""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sealane.crypto.attestation.policy import Policy, software_reference
from sealane.crypto.attestation.verifier import Verifier
from sealane.crypto.evidence.kinds import Trusted, verifiers
from sealane.crypto.evidence.software import SoftwareVerifier
from sealane.daemon.broker.assembly import find_verifier
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node.evidence.choose import check_driver, open_driver
from sealane.daemon.runtime.sections import parse_toml
from sealane.daemon.runtime.third_party_evidence import GROUP, installed_verifier, load, names
from sealane.errors import UsageError, VerificationError

MODULE = """
from sealane.crypto.evidence.software import SoftwareVerifier
from sealane.daemon.node.evidence.software import SoftwareDriver
from sealane.crypto.evidence.software import SoftwareKey


class OwnVerifier(SoftwareVerifier):
    evidence_type = "{type}"
    media_type = "{media_type}"


def verifier():
    return OwnVerifier()


def open_driver(settings):
    driver = SoftwareDriver(SoftwareKey.create())
    driver.hardware_id = settings["machine"]
    return driver
"""
CONFIG = """
broker_address = "h:1"
attestation_address = "h:2"
trust_anchor = "/t"
evidence = "{kind}"
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution that offers a kind."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(
        kind: str,
        *,
        distribution: str = "vendor",
        says: str = "",
        media_type: str = "application/vnd.vendor.evidence",
        text: str = "",
    ) -> None:
        name = f"sealane_test_{distribution}_{kind}"
        module = text or MODULE.format(type=says or kind, media_type=media_type)
        (tmp_path / f"{name}.py").write_text(module)
        about = tmp_path / f"{distribution}_{kind}-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: {distribution}-{kind}\nVersion: 1\n")
        (about / "entry_points.txt").write_text(f"[{GROUP}]\n{kind} = {name}\n")
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)

    return make


def policy_of(*kinds: str) -> Policy:
    reference = software_reference(frozenset({"target"}))
    return Policy(references=tuple(dataclasses.replace(reference, evidence_type=k) for k in kinds))


def verifier_of(policy: Policy) -> Verifier:
    return Verifier(
        policy=policy,
        evidence_verifiers=verifiers(Trusted()),
        audience="spiffe://a/broker/b",
        verifier_key_sha256=bytes(32),
        find=find_verifier,
    )


def is_taken(verifier: Verifier, kind: str) -> bool:
    try:
        verifier.prepare(
            node="n",
            role="target",
            evidence_types=[kind],
            introduction=b"",
            now=None,  # type: ignore[arg-type]
        )
    except VerificationError as error:
        return error.reason != "attestation.type.refused"
    return True


def test_a_kind_is_used_only_while_the_policy_names_it(install: Install) -> None:
    install("acme")
    assert "acme" in names()
    verifier = verifier_of(policy_of("software"))
    assert not is_taken(verifier, "acme")
    assert "sealane_test_vendor_acme" not in sys.modules
    verifier.policy = policy_of("software", "acme")
    assert is_taken(verifier, "acme")
    verifier.policy = policy_of("software")
    assert not is_taken(verifier, "acme")


def test_a_kind_that_nothing_offers_is_refused() -> None:
    verifier = verifier_of(policy_of("nowhere"))
    assert not is_taken(verifier, "nowhere")
    assert installed_verifier("nowhere") is None
    with pytest.raises(UsageError) as caught:
        load("nowhere")
    assert caught.value.reason == "evidence.kind.unknown"


def test_a_kind_never_replaces_one_of_ours(install: Install) -> None:
    install("snp")
    install("acme", media_type=SoftwareVerifier.media_type)
    verifier = verifier_of(policy_of("snp", "acme"))
    assert "sealane_test_vendor_snp" not in sys.modules
    assert not is_taken(verifier, "acme")


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ([{"says": "other"}], "evidence.kind.failed"),
        ([{"text": "raise RuntimeError('no library')"}], "evidence.kind.failed"),
        ([{"text": "def verifier(): raise RuntimeError"}], "evidence.kind.failed"),
        ([{"distribution": "a"}, {"distribution": "b"}], "evidence.kind.ambiguous"),
    ],
)
def test_a_kind_that_cannot_be_used_is_left_out(
    install: Install, installed: list[dict[str, str]], reason: str
) -> None:
    for each in installed:
        install("acme", **each)
    assert not is_taken(verifier_of(policy_of("acme")), "acme")
    with pytest.raises(UsageError) as caught:
        installed_verifier("acme")
    assert caught.value.reason == reason


def test_a_node_opens_the_driver_that_its_configuration_names(install: Install) -> None:
    install("acme")
    text = CONFIG.format(kind="acme") + '[settings]\nmachine = "rack-7"\n'
    config = parse_toml(EnrolmentConfig, text.encode(), source="file")
    check_driver(config)
    assert open_driver(config, tcti="").hardware_id == "rack-7"


def test_a_configuration_names_kinds_that_exist(install: Install) -> None:
    with pytest.raises(UsageError, match="allowed: 'software', 'tpm2' or 'tsm'"):
        parse_toml(EnrolmentConfig, CONFIG.format(kind="acme").encode(), source="file")
    text = CONFIG.format(kind="tsm") + '[settings]\na = "b"\n'
    with pytest.raises(UsageError, match="settings only for evidence kinds of other distributions"):
        parse_toml(EnrolmentConfig, text.encode(), source="file")
