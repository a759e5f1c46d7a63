"""`sealanectl node VERB`: the nodes that attested at this broker, and their revocation."""

import argparse
import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import timestamp_pb2

from sealane.cli.names import list_members
from sealane.cli.output import CALL_SECONDS, Output
from sealane.cli.verbs import confirm, destructive, verb, watched
from sealane.client import Client, translated
from sealane.crypto.roles import NODE_ROLES
from sealane.protocol.v1 import trust_pb2

_ROLES: Final = tuple(map(str, NODE_ROLES))
_WIDE: Final = {"called_from", "addresses"}


async def node_list(client: Client, options: argparse.Namespace, output: Output) -> None:  # noqa: ARG001
    """Print every node that attested or was revoked."""
    rows = [_row(member) for member in await list_members(client)]
    table = [_shown(row) for row in rows]
    output.show(rows, [_narrow(row) for row in table], wide=table, things="nodes")


async def node_revoke(client: Client, options: argparse.Namespace, output: Output) -> None:  # noqa: ARG001
    """Revoke a node."""
    request = trust_pb2.RevokeNodeRequest(
        node=options.node, role=options.role, reason=options.reason, unseen=options.unseen
    )
    with translated():
        roles = [
            member.role
            for member in await list_members(client)
            if member.node == options.node and options.role in {"", member.role}
        ]
        if roles or options.unseen:
            confirm(
                options,
                f"Node {options.node} ({', '.join(roles) or 'every role'}) will be refused at "
                "once: its volumes, queues and sessions end within 30 s.",
            )
        await client.membership.RevokeNode(request, timeout=CALL_SECONDS)


async def node_restore(client: Client, options: argparse.Namespace, output: Output) -> None:  # noqa: ARG001
    """Undo a revocation."""
    request = trust_pb2.RestoreNodeRequest(node=options.node, role=options.role)
    with translated():
        await client.membership.RestoreNode(request, timeout=CALL_SECONDS)


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `node`."""
    watched(verb(verbs, "list", node_list, "list every node that attested or was revoked"))
    revoke = verb(
        verbs, "revoke", node_revoke, "refuse a node from now on; its I/O ends within 30 s"
    )
    restore = verb(verbs, "restore", node_restore, "let a revoked node attest again")
    revoke.add_argument("--reason", default="", metavar="TEXT", help="reason to keep on record")
    revoke.add_argument(
        "--unseen", action="store_true", help="allow a node that has never attested"
    )
    destructive(revoke)
    for parser in (revoke, restore):
        parser.add_argument("node", metavar="NODE", help="name of the node")
        parser.add_argument("--role", choices=_ROLES, default="", help="default: every role")


def _row(member: trust_pb2.Member) -> Mapping[str, Any]:
    return {
        "node": member.node,
        "role": member.role,
        "tenant": member.tenant,
        "state": member.state,
        "version": member.version,
        "clock_skew_seconds": member.clock_skew_ms / 1000
        if member.HasField("clock_skew_ms")
        else "",
        "called_from": member.call_address,
        "addresses": dict(sorted(member.addresses.items())),
        "attested": _time(member, "attest_time"),
        "expires": _time(member, "expire_time"),
        "revoked": _time(member, "revoke_time"),
        "reason": member.reason,
    }


def _shown(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row for people."""
    skew = row["clock_skew_seconds"]
    shown = {**row, "clock_skew_seconds": "" if skew == "" else f"{skew:+.3f} s"}
    return {"clock skew" if name == "clock_skew_seconds" else name: shown[name] for name in shown}


def _narrow(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row without what only a wide table shows."""
    return {name: value for name, value in row.items() if name not in _WIDE}


def _time(member: trust_pb2.Member, name: str) -> dt.datetime | str:
    moment: timestamp_pb2.Timestamp = getattr(member, name)
    return moment.ToDatetime(tzinfo=dt.UTC) if member.HasField(name) else ""  # type: ignore[arg-type]
