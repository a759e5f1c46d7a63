"""`sealaned --set-up`: makes the keys and the policy that a development configuration names.

A machine whose evidence is a key on disk and whose broker accepts an unsigned policy then starts as
configured. What exists stays as it is. A TPM's keys, a token's and a signed policy aren't made
here: they take decisions that only their owners can make.
"""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

from sealane.crypto.evidence.software import SoftwareKey
from sealane.crypto.keys import KEY_BYTES
from sealane.crypto.roles import NODE_ROLES
from sealane.daemon.config import Config
from sealane.daemon.runtime.files import read_secret, write_new, write_secret

DEFAULT_TENANT = "default"


def set_up(config: Config) -> Iterator[str]:
    """Make what is missing; yield a line about each file made.

    UsageError `key.unwritable` if a file can't be written, or as for a key file that can't be used.
    """
    broker, enrolment = config.broker, config.enrolment
    if broker is not None and broker.key_file is not None and not Path(broker.key_file).exists():
        write_secret(_place(broker.key_file), secrets.token_bytes(KEY_BYTES))
        yield (
            f"made {broker.key_file}, the broker's key encryption key: back it up, because without "
            "it nothing that the broker stores can be read"
        )
    if enrolment is None or enrolment.key_file is None:
        return
    if not Path(enrolment.key_file).exists():
        write_secret(_place(enrolment.key_file), SoftwareKey.create().pem())
        yield f"made {enrolment.key_file}, the key with which this node attests"
    if broker is None or not broker.allow_unsigned_policy or Path(broker.policy_file).exists():
        return
    pem = read_secret(enrolment.key_file, key="enrolment.key_file")
    key = SoftwareKey.parse(pem, source=f"enrolment.key_file {enrolment.key_file}")
    write_new(_place(broker.policy_file), policy_of(config, key.fingerprint).encode(), mode=0o644)
    yield f"made {broker.policy_file}, the policy: it admits this node only"


def policy_of(config: Config, fingerprint: str) -> str:
    """Return a policy that admits this node with the roles it has."""
    roles = [role for role in NODE_ROLES if role in config.roles]
    return (
        "# Made by sealaned --set-up, for development: software evidence proves a key file, and\n"
        "# nothing about the machine. Increase version with each change.\n"
        "version = 1\n\n[software]\nallowed = true\n\n[[software.key]]\n"
        f'fingerprint = "{fingerprint}"\nnodes = ["{config.node.name}"]\n'
        f'roles = {json.dumps(roles)}\ntenant = "{DEFAULT_TENANT}"\n'
    )


def _place(path: str) -> Path:
    """Return the path, after making its directory, which only its owner can enter."""
    Path(path).parent.mkdir(mode=0o700, exist_ok=True)
    return Path(path)
