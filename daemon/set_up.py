"""`sealaned --set-up`: makes the keys and the policy that a development configuration names.

A machine whose evidence is a key on disk and whose broker accepts an unsigned policy then starts as
configured. What exists stays as it is. A TPM's keys, a token's and a signed policy aren't made
here: they take decisions that only their owners can make.
"""

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

from sealane.crypto.evidence.software import SoftwareKey
from sealane.crypto.keys import KEY_BYTES
from sealane.crypto.roles import NODE_ROLES
from sealane.daemon.config import Config
from sealane.daemon.runtime.credentials import is_stored
from sealane.daemon.runtime.directories import as_daemon, daemon_user, has_started
from sealane.daemon.runtime.files import read_secret, write_new

DEFAULT_TENANT = "default"


def set_up(config: Config) -> Iterator[str]:
    """Make what is missing for a first start; yield a line about each file made.

    Nothing once a daemon has started with this state: a key that is missing then was lost, and
    another one opens nothing. UsageError `key.unwritable` if a file can't be written, or as for a
    key file that can't be used.
    """
    state_dir = Path(config.node.state_dir)
    if has_started(state_dir):
        return
    owner = daemon_user(state_dir)
    broker, enrolment = config.broker, config.enrolment
    is_development = broker is not None and broker.allow_unsigned_policy
    key_file = broker.key_file if broker is not None and is_development else None
    # Brokers of a cluster share one key, which the operator gives to each.
    is_alone = broker is not None and broker.store == "sqlite"
    if key_file is not None and is_alone and not Path(key_file).exists():
        _write_key(key_file, secrets.token_bytes(KEY_BYTES), owner)
        yield (
            f"made {key_file}, the broker's key encryption key: back it up, because without it "
            "nothing that the broker stores can be read"
        )
    if enrolment is None or enrolment.key_file is None:
        return
    if not Path(enrolment.key_file).exists():
        _write_key(enrolment.key_file, SoftwareKey.create().pem(), owner)
        yield f"made {enrolment.key_file}, the key with which this node attests"
    if broker is None or not is_development or Path(broker.policy_file).exists():
        return
    # A key in a credential store is root's, any other the daemon's.
    with contextlib.nullcontext() if is_stored(enrolment.key_file) else as_daemon(state_dir):
        pem = read_secret(enrolment.key_file, key="enrolment.key_file")
    key = SoftwareKey.parse(pem, source=f"enrolment.key_file {enrolment.key_file}")
    policy = Path(broker.policy_file)
    policy.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_new(policy, policy_of(config, key.fingerprint).encode(), mode=0o644)
    yield f"made {broker.policy_file}, the policy: it admits this node only"


def _write_key(path: str, content: bytes, owner: tuple[int, int]) -> None:
    """Write a key file for the daemon; those in a credential store stay the service manager's."""
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_new(Path(path), content, mode=0o600, owner=None if is_stored(path) else owner)


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
