"""`sealanectl authority VERB`: the replacement of the brokers' authority, step by step."""

import argparse
import datetime as dt
import sys
from typing import Any

from sealane.cli.output import CALL_SECONDS, Output
from sealane.cli.verbs import confirm, destructive, verb, watched
from sealane.client import Client, translated
from sealane.protocol.kinds import AuthorityStage
from sealane.protocol.v1 import operator_pb2

_Request = operator_pb2.ReplaceAuthorityRequest


async def authority_announce(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Make a successor and let nodes trust it, beside the present authority."""
    present = await _authorities(client)
    confirm(
        options,
        "A new authority will be made, and every node will trust it and the present one, "
        f"{present.authority.hex()}.",
    )
    # Names the one that was shown: if that was replaced meanwhile, no other replacement begins.
    await _step(client, _Request(step=_Request.ANNOUNCE, authority=present.authority), output)


async def authority_switch(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Let the successor sign from now on."""
    confirm(
        options,
        "The successor will sign from now on, and all nodes will get new certificates. This can't "
        "be turned back.",
    )
    await _step(client, _Request(step=_Request.SWITCH), output)


async def authority_retire(client: Client, options: argparse.Namespace, output: Output) -> None:
    """End the trust in the authority before, and delete its key."""
    gone = f" Nodes {', '.join(options.gone)} can't attest until then." if options.gone else ""
    confirm(
        options,
        "The authority before will no longer be trusted, and its key will be deleted. A node that "
        f"knows only that one needs the new trust anchor by hand.{gone}",
    )
    await _step(client, _Request(step=_Request.RETIRE, gone_nodes=options.gone), output)


async def authority_status(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Print the authorities, and which nodes lag behind a replacement."""
    found = await _authorities(client)
    if options.pem:
        sys.stdout.write(found.trust_anchors_pem.decode("ascii"))
        return
    _show(found, output)


async def _authorities(client: Client) -> operator_pb2.Authorities:
    with translated():
        return await client.operator.GetAuthorities(
            operator_pb2.GetAuthoritiesRequest(), timeout=CALL_SECONDS
        )


async def _step(
    client: Client, request: operator_pb2.ReplaceAuthorityRequest, output: Output
) -> None:
    with translated():
        found = await client.operator.ReplaceAuthority(request, timeout=CALL_SECONDS)
    _show(found, output)


def _show(found: operator_pb2.Authorities, output: Output) -> None:
    changed = found.change_time.ToDatetime(tzinfo=dt.UTC) if found.stage else ""
    if output.is_data:
        output.show_one(
            {
                "authority": found.authority.hex(),
                "other": found.other.hex(),
                "stage": found.stage,
                "changed": changed,
                "nodes": [
                    {
                        "node": each.node,
                        "role": each.role,
                        "state": each.state,
                        "active": each.is_active,
                    }
                    for each in found.nodes
                ],
            }
        )
        return
    rows: dict[str, Any] = {"authority": found.authority.hex()}
    if found.stage:
        rows[_OTHER[AuthorityStage(found.stage)]] = found.other.hex()
        rows["stage"] = f"{found.stage}, since {changed:%Y-%m-%d %H:%M:%S} UTC"
        rows["next step"] = _NEXT[AuthorityStage(found.stage)]
    else:
        rows["stage"] = "none: it was never replaced"
    for each in found.nodes:
        rows[f"{each.role} {each.node}"] = each.state + ("" if each.is_active else ", away")
    output.show_one(rows)


_OTHER = {
    AuthorityStage.ANNOUNCED: "successor",
    AuthorityStage.SWITCHED: "authority before",
    AuthorityStage.RETIRED: "retired",
}
_NEXT = {
    AuthorityStage.ANNOUNCED: "sealanectl authority switch",
    AuthorityStage.SWITCHED: "sealanectl authority retire",
    AuthorityStage.RETIRED: "none: the replacement has ended",
}


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `authority`."""
    status = verb(
        verbs, "status", authority_status, "show the brokers' authority and its replacement"
    )
    status.add_argument(
        "--pem", action="store_true", help="print only what a new node should trust, as PEM"
    )
    watched(status)
    destructive(
        verb(
            verbs,
            "announce",
            authority_announce,
            "make a new authority, which nodes trust beside the present one",
        )
    )
    destructive(
        verb(verbs, "switch", authority_switch, "let the announced authority sign from now on")
    )
    retire = verb(
        verbs, "retire", authority_retire, "end the trust in the authority before, for good"
    )
    retire.add_argument(
        "--gone",
        action="append",
        default=[],
        metavar="NODE",
        help="a node that need not attest first; it gets the new trust anchor by hand; repeatable",
    )
    destructive(retire)
