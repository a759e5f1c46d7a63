"""`sealanectl broker snapshot` and `restore`: backups of a broker's store."""

import argparse
import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from cryptography import x509

from sealane.cli.output import Output
from sealane.cli.verbs import confirm, destructive, offline, verb
from sealane.client import Client, translated
from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.snapshot import RecipientKey, parse_recipient
from sealane.daemon.broker.restore import Restore, broker_of, check_empty, filled, prepared
from sealane.daemon.broker.restored import Accepted
from sealane.daemon.config import load_config
from sealane.daemon.runtime.directories import as_daemon, claimed_state
from sealane.daemon.runtime.files import new_file, read_file, read_secret
from sealane.daemon.runtime.logs import set_up_logs
from sealane.errors import UsageError
from sealane.protocol.v1 import operator_pb2

_SNAPSHOT_SECONDS: Final = 3600.0


async def broker_snapshot(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Write a snapshot to a new file; a snapshot that fails leaves none."""
    recipient = parse_recipient(read_file(str(options.to), key="--to"), source=str(options.to))
    request = operator_pb2.TakeSnapshotRequest(recipient=recipient)
    with _new_file(options.file) as file, translated():
        async for part in client.operator.TakeSnapshot(request, timeout=_SNAPSHOT_SECONDS):
            file.write(part.content)
    output.show_one({"path": str(options.file), "bytes": options.file.stat().st_size})


def broker_restore(options: argparse.Namespace, output: Output) -> None:
    """Restore a snapshot into the empty store of a configured broker that doesn't run."""
    key = RecipientKey.parse(read_secret(str(options.key), key="--key"), source=str(options.key))
    anchors = TrustAnchors.parse(
        read_file(str(options.trust_anchor), key="--trust-anchor"), source=str(options.trust_anchor)
    )
    accepted = Accepted(nodes=options.accept, devices=options.accept_device)
    config = load_config(options.config)
    set_up_logs("error", node=config.node.name)
    broker_of(config)
    try:
        file = options.file.open("rb")
    except OSError as error:
        raise UsageError("config.unreadable", f"{options.file}: {error.strerror}") from error
    state_dir = Path(config.node.state_dir)
    with file, as_daemon(state_dir), claimed_state(state_dir):

        def prepare(anchor: x509.Certificate) -> Restore:
            file.seek(0)
            return prepared(
                file,
                config,
                key=key,
                anchor=anchor,
                accepted=accepted,
                restored_before=options.restored_before,
            )

        restore = anchors.checked(prepare)
        asyncio.run(check_empty(config))
        confirm(options, _consequence(restore))
        asyncio.run(filled(restore, config))
    output.show_one(_outcome(restore))


def _consequence(restore: Restore) -> str:
    revision = restore.revision
    return (
        f"This is restore {revision.ordinal} of these brokers; a lower number than the true one "
        "can give a revoked node a key in use. "
        "It rolls the brokers' state back to "
        f"{restore.header.created_at:%Y-%m-%d %H:%M:%S} UTC. What was created, deleted, shared, "
        "moved or revoked since is forgotten. The store will be under key encryption key "
        f"{_key_ids(restore)}, even if that was retired since; tenants' keys that were replaced "
        "since are in use again. No broker of the old store may run again. "
        f"{len(revision.held_nodes)} nodes stay revoked until sealanectl node restore, "
        f"{len(revision.held_devices)} devices are refused until sealanectl device init --anew."
    )


def _key_ids(restore: Restore) -> str:
    return " and, in the middle of a rotation, ".join(each.hex() for each in restore.key_ids)


def _outcome(restore: Restore) -> dict[str, Any]:
    revision = restore.revision
    return {
        "snapshot": restore.header.created_at,
        "of broker": restore.header.node,
        "revision": restore.header.revision,
        "records": len(revision.entries),
        "key encryption keys": [each.hex() for each in restore.key_ids],
        "restore": revision.ordinal,
        "base of start epochs": revision.epoch_base,
        "broker instance": restore.instance,
        "retired instances": [*revision.retired],
        "revoked nodes": [*revision.held_nodes],
        "refused devices": [str(each) for each in revision.held_devices],
        "read-only volumes": [str(each) for each in revision.unwritable_volumes],
    }


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a new file; UsageError `broker.snapshot.unwritable`."""
    try:
        with new_file(path) as file:
            yield file
    except OSError as error:
        raise UsageError("broker.snapshot.unwritable", f"{path}: {error.strerror}") from error


def _device(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a UUID") from None


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `broker`."""
    snapshot = verb(
        verbs,
        "snapshot",
        broker_snapshot,
        "write an encrypted backup of the brokers' store, while they run",
    )
    snapshot.add_argument("file", type=Path, metavar="FILE", help="new file")
    snapshot.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="FILE",
        help="public key of the recipient (sealanectl key recipient makes it)",
    )
    restore = offline(
        verbs,
        "restore",
        broker_restore,
        "restore a backup into the empty store of a broker that doesn't run",
        file="snapshot to restore",
    )
    for option, text in (
        ("config", "configuration of the broker's daemon"),
        ("key", "the recipient's private key"),
        ("trust-anchor", "trust anchor of the brokers, as every node has it"),
    ):
        restore.add_argument(f"--{option}", type=Path, required=True, metavar="FILE", help=text)
    restore.add_argument(
        "--restored-before",
        type=int,
        required=True,
        metavar="N",
        help="how often any snapshot of these brokers was restored before, interrupted ones "
        "included; if unsure, more: each costs 16 of a volume's 256 key epochs",
    )
    restore.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="NODE",
        help="trust this node as before; others stay revoked; repeat the option for several nodes",
    )
    restore.add_argument(
        "--accept-device",
        action="append",
        type=_device,
        default=[],
        metavar="DEVICE",
        help="accept this device as it is found, if brokers keep its anchor; repeatable",
    )
    destructive(restore)
