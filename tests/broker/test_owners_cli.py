"""Signing as an owner at the command line: what is shown, what is kept."""

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from broker.policy_owners import new_keys
from control_plane import sealanectl
from sealane.crypto.private_keys import private_key_pem


def write_keys(directory: Path) -> None:
    for name, key in zip("ab", new_keys(2), strict=True):
        private = directory / f"{name}.key"
        private.write_bytes(private_key_pem(key))
        private.chmod(0o600)
        (directory / f"{name}.pem").write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )


def run(*arguments: str | Path, code: int = 0) -> str:
    ended = sealanectl(*arguments)
    assert ended.returncode == code, ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_signing_says_what_it_replaces_and_keeps_other_files(tmp_path: Path) -> None:
    write_keys(tmp_path)
    policy = tmp_path / "policy.toml"
    policy.write_text("version = 1\n")
    draft = tmp_path / "policy.toml.new"
    draft.write_text("the next policy")
    for _ in range(2):
        assert "replaced" not in run("policy", "sign", policy, "--key", tmp_path / "a.key")
    assert "kept" in run("policy", "sign", policy, "--key", tmp_path / "b.key", "--add")
    keys = ("--owner-key", tmp_path / "a.pem", "--owner-key", tmp_path / "b.pem")
    assert "[policy.owners.threshold]" in run("policy", "check", policy, *keys, code=2)
    run("policy", "check", policy, *keys, "--threshold", "2")
    policy.with_name("policy.toml.sig").unlink()
    run("policy", "sign", policy, "--key", tmp_path / "a.key")
    assert "replaced" in run("policy", "sign", policy, "--key", tmp_path / "b.key")
    assert draft.read_text() == "the next policy"


def test_who_signs_owners_is_shown_their_keys(tmp_path: Path) -> None:
    write_keys(tmp_path)
    owners = tmp_path / "owners.toml"
    key = ("--key", tmp_path / "b.pem")
    made = json.loads(
        run(
            "--output", "json", "owners", "make", owners, *key, "--version", "1", "--threshold", "1"
        )
    )
    assert made[0]["key_id"] in run("owners", "sign", owners, "--key", tmp_path / "a.key")
