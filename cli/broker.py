"""`sealanectl key rotate` and `lease list`: keys and leases at this broker."""

import argparse
from collections.abc import Awaitable, Mapping
from typing import Any, Final

from sealane.cli.names import find_registered
from sealane.cli.output import CALL_SECONDS, Output, pages
from sealane.cli.verbs import named, verb, watched
from sealane.client import Client, translated
from sealane.protocol.kinds import LeaseState
from sealane.protocol.v1 import operator_pb2

_BLOCK_BYTES: Final = 16


async def key_rotate(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Start a volume's next key epoch."""
    request = operator_pb2.RotateVolumeKeyRequest(volume_id=options.name)
    with translated():
        answer = await client.operator.RotateVolumeKey(request, timeout=CALL_SECONDS)
    output.show_one(
        {
            "volume": f"volumes/{answer.volume_id}",
            "key epoch": answer.key_epoch,
            "oldest key epoch": answer.oldest_key_epoch,
        }
    )


async def lease_list(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Print the broker's records of leases."""
    volume = await find_registered(client, options.volume) if options.volume else ""

    def call(token: str) -> Awaitable[operator_pb2.ListLeasesResponse]:
        request = operator_pb2.ListLeasesRequest(page_token=token, volume_id=volume)
        return client.operator.ListLeases(request, timeout=CALL_SECONDS)

    with translated():
        rows = [
            _row(lease)
            async for page in pages(call)
            for lease in page.leases
            if options.state in {None, lease.state}
        ]
    output.show(rows, [_named(row) for row in rows], things="leases")


def add_key_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `key` that need a broker."""
    text = "start a volume's next key epoch, at the broker"
    named(verbs, "rotate", key_rotate, text, find=find_registered)


def add_lease_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `lease`."""
    listing = watched(verb(verbs, "list", lease_list, "list every lease ever granted"))
    listing.add_argument("--volume", default="", metavar="NAME", help="only this volume's leases")
    listing.add_argument(
        "--state", choices=tuple(map(str, LeaseState)), help="only leases in this state"
    )


def _named(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of a table: a lease's number is its own in its arena only."""
    others = {name: value for name, value in row.items() if name != "arena"}
    return {**others, "lease": f"{row['arena']}/{row['lease']}"}


def _row(lease: operator_pb2.LeaseEntry) -> Mapping[str, Any]:
    return {
        "arena": f"{lease.broker_instance}/{lease.start_epoch}",
        "lease": lease.lease_id,
        "volume": f"volumes/{lease.volume_id}",
        "key epoch": lease.key_epoch,
        "holder": lease.recipient,
        "granted": lease.grant_time.ToDatetime(),
        "GiB": round(lease.counters * _BLOCK_BYTES / (1 << 30)),
        "GiB returned": round(lease.returned * _BLOCK_BYTES / (1 << 30)),
        "state": lease.state,
    }
