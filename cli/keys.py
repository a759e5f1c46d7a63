"""`sealanectl key VERB`: key files and keys in a token, which need no daemon."""

import argparse
import secrets
from pathlib import Path
from typing import Any

from sealane.cli.output import Output
from sealane.crypto.evidence.software import SoftwareKey
from sealane.crypto.keys import KEY_BYTES, WrappingKey
from sealane.crypto.snapshot import RecipientKey, digest_of
from sealane.daemon.broker.kek import make_hsm_key
from sealane.daemon.config import HsmConfig
from sealane.daemon.runtime.files import read_bounded, write_new, write_secret
from sealane.errors import UsageError


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `key` that need no broker."""
    for verb, run, text in (
        ("attestation", _key_attestation, "create a software attestation key"),
        ("encryption", _key_encryption, "create a broker's key encryption key"),
        (
            "recipient",
            _key_recipient,
            "create the key pair that snapshots of a broker are sealed to",
        ),
        ("fingerprint", _key_fingerprint, "print an attestation key's name in policies"),
    ):
        made = verbs.add_parser(verb, help=text)
        made.add_argument("path", type=Path, metavar="PATH", help="the key's file")
        made.set_defaults(run=run, is_offline=True)
    made = verbs.add_parser("hsm", help="create a broker's key encryption key in a PKCS #11 token")
    for option, text in (
        ("module", "the token's PKCS #11 library"),
        ("token", "label of the token"),
        ("label", "label of the new key"),
        ("pin-file", "file with the user PIN"),
    ):
        made.add_argument(f"--{option}", required=True, help=text)
    made.set_defaults(run=_key_hsm, is_offline=True)


def _key_attestation(options: argparse.Namespace, output: Output) -> None:
    key = SoftwareKey.create()
    write_secret(options.path, key.pem())
    output.show_one({"path": str(options.path), "fingerprint": key.fingerprint})


def _key_encryption(options: argparse.Namespace, output: Output) -> None:
    key = secrets.token_bytes(KEY_BYTES)
    write_secret(options.path, key)
    output.show_one({"path": str(options.path), "key id": WrappingKey(key).key_id.hex()})


def _key_recipient(options: argparse.Namespace, output: Output) -> None:
    key = RecipientKey.create()
    public = options.path.with_name(f"{options.path.name}.pub")
    write_secret(options.path, key.pem())
    try:
        write_new(public, key.public_pem(), mode=0o644)
    except UsageError:
        # It has no public half, and would be in the way of the next attempt.
        options.path.unlink()
        raise
    output.show_one(
        {
            "path": str(options.path),
            "public key": str(public),
            "recipient": digest_of(key.kem.public_key),
        }
    )


def _key_hsm(options: argparse.Namespace, output: Output) -> None:
    place = HsmConfig(
        module=options.module, token=options.token, label=options.label, pin_file=options.pin_file
    )
    key_id = make_hsm_key(place)
    output.show_one({"token": place.token, "label": place.label, "key id": key_id.hex()})


def _key_fingerprint(options: argparse.Namespace, output: Output) -> None:
    try:
        pem = read_bounded(options.path)
    except OSError as error:
        raise UsageError("key.unreadable", f"{options.path}: {error.strerror}") from error
    key = SoftwareKey.parse(pem, source=str(options.path))
    output.show_one({"path": str(options.path), "fingerprint": key.fingerprint})
