"""`sealaned --set-up`: the keys and the policy of a development configuration."""

import os
from pathlib import Path

import pytest

from control_plane import sealaned
from sealane.daemon.config import load_config
from sealane.daemon.runtime.directories import claimed_state
from sealane.daemon.set_up import set_up
from sealane.errors import UsageError

NODE = """
[node]
name = "node-1"
state_dir = "{root}/state"
run_dir = "{root}/run"
"""
BROKER = """
[broker]
policy_file = "{root}/policy.toml"
key_file = "{root}/keys/kek"
allow_unsigned_policy = true
"""
SIGNED = """
[broker]
policy_file = "{root}/policy.toml"
key_file = "{root}/keys/kek"
policy_owner_key = "{root}/owner.pem"
"""
CLUSTER = (
    BROKER
    + """store = "etcd"
[broker.etcd]
endpoints = ["127.0.0.1:2379"]
"""
)
ENROLMENT = """
[enrolment]
broker_address = "127.0.0.1:7440"
attestation_address = "127.0.0.1:7441"
trust_anchor = "{root}/state/trust-anchor.pem"
"""
SOFTWARE = ENROLMENT + 'evidence = "software"\nkey_file = "{root}/keys/attestation"\n'
TPM = ENROLMENT + 'evidence = "tpm2"\n'
ROLES = '[target]\n[gateway]\ntarget_node = "node-1"\ntarget_address = "127.0.0.1:7442"\n'


def written(root: Path, *parts: str) -> Path:
    path = root / "sealaned.toml"
    path.write_text("".join((NODE, *parts)).replace("{root}", str(root)))
    return path


def made(root: Path) -> set[str]:
    found = {str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()}
    return found - {"sealaned.toml"}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((BROKER, SOFTWARE, ROLES), {"keys/kek", "keys/attestation", "policy.toml"}),
        ((SIGNED, SOFTWARE, ROLES), {"keys/attestation"}),
        ((CLUSTER,), set()),
        ((BROKER,), {"keys/kek"}),
        ((SOFTWARE, ROLES), {"keys/attestation"}),
        ((TPM, ROLES), set()),
    ],
)
def test_it_makes_what_development_needs_and_no_more(
    tmp_path: Path, parts: tuple[str, ...], expected: set[str]
) -> None:
    config = load_config(written(tmp_path, *parts))
    assert len(list(set_up(config))) == len(expected)
    assert made(tmp_path) == expected
    for name in expected - {"policy.toml"}:
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert list(set_up(config)) == []


def test_with_what_it_made_the_check_passes(tmp_path: Path) -> None:
    path = written(tmp_path, BROKER, SOFTWARE, ROLES)
    done = sealaned("--config", path, "--set-up")
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 3)
    checked = sealaned("--config", path, "--check")
    assert (checked.returncode, checked.stderr) == (0, "")


CARD = '[[enrolment.secondary]]\nlabel = "{label}"\ntype = "card"\nsocket = "/run/card"\n'


@pytest.mark.parametrize("label", ["card0", "other"])
def test_the_check_refuses_an_accelerator_that_no_card_is(tmp_path: Path, label: str) -> None:
    card = CARD.replace("{label}", label)
    path = written(tmp_path, BROKER, SOFTWARE, card, ROLES, 'accelerator = "card0"\n')
    assert sealaned("--config", path, "--set-up").returncode == 0
    checked = sealaned("--config", path, "--check")
    if label == "card0":
        assert (checked.returncode, checked.stderr) == (0, "")
    else:
        assert checked.returncode == 2
        assert checked.stderr == (
            "sealaned: gateway.accelerator 'card0'; allowed: the label of an enrolment.secondary "
            'of type "card" [config.value]\n'
        )


def test_two_accelerators_need_a_socket_each(tmp_path: Path) -> None:
    cards = CARD.replace("{label}", "card0") + CARD.replace("{label}", "card1")
    labels = 'accelerator = ["card0", "card1"]\n'
    path = written(tmp_path, BROKER, SOFTWARE, cards, ROLES, labels)
    assert sealaned("--config", path, "--set-up").returncode == 0
    checked = sealaned("--config", path, "--check")
    assert checked.returncode == 2
    assert checked.stderr == (
        "sealaned: gateway.accelerator card0, card1; allowed: cards with a socket each "
        "[config.value]\n"
    )


def test_what_exists_stays_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path, BROKER, SOFTWARE, ROLES)
    (tmp_path / "keys").mkdir()
    for name in ("keys/kek", "policy.toml"):
        (tmp_path / name).write_text("mine")
    config = load_config(path)
    (line,) = set_up(config)
    assert "attestation" in line
    assert {(tmp_path / name).read_text() for name in ("keys/kek", "policy.toml")} == {"mine"}


def test_a_lost_key_is_not_replaced(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, BROKER, SOFTWARE, ROLES))
    with claimed_state(tmp_path / "state"):
        pass
    assert list(set_up(config)) == []
    assert made(tmp_path) == {"state/state.lock"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_makes_is_the_daemons(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    os.chown(tmp_path / "state", 65534, 65534)
    path = written(tmp_path, BROKER, SOFTWARE, ROLES)
    with pytest.raises(UsageError, match="Permission denied"):
        list(set_up(load_config(path)))  # nobody enters a directory that root keeps to itself
    (tmp_path / "keys").chmod(0o755)
    for each in (tmp_path, *tmp_path.parents):
        if each.owner() == "root" and each != Path("/"):
            each.chmod(each.stat().st_mode | 0o011)
    list(set_up(load_config(path)))
    for name in ("keys/kek", "keys/attestation"):
        status = (tmp_path / name).stat()
        assert (status.st_uid, status.st_mode & 0o777) == (65534, 0o600)
    path.chmod(0o666)
    refused = sealaned("--config", path, "--set-up")
    assert (refused.returncode, "[config.writable]" in refused.stderr) == (2, True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_is_not_ours_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o500)
    done = sealaned("--config", written(tmp_path, BROKER), "--set-up")
    assert (done.returncode, "[key.unwritable]" in done.stderr) == (2, True)
