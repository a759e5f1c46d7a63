"""`sealanectl node drain`, `undrain` and `status`: this machine's daemon before maintenance."""

# ruff: noqa: ARG001 - every command has one signature

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any, Final

from sealane.cli.output import CALL_SECONDS, Output
from sealane.cli.verbs import confirm, destructive, verb, watched
from sealane.client import Client, translated
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.v1 import nodes_pb2

_POLL_SECONDS: Final = 0.5
_USES_SHOWN: Final = 3
_ENDING_SECONDS: Final = 60.0
_STATES: Final = nodes_pb2.NodeDrain


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `node` about this machine's daemon."""
    drain = verb(
        verbs,
        "drain",
        _node_drain,
        "prepare this machine's daemon for a stop: hosts use other paths, nothing new begins",
    )
    drain.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="time for hosts and gateways to leave by themselves (default: 30)",
    )
    destructive(drain)
    verb(verbs, "undrain", _node_undrain, "end a drain: this machine's daemon serves again")
    watched(
        verb(verbs, "status", _node_status, "show whether this machine's daemon may be stopped")
    )


async def _node_drain(client: Client, options: argparse.Namespace, output: Output) -> None:
    if options.timeout == 0:
        raise UsageError(
            "node.drain.range", "drain time 0 s; allowed: above 0 (stop the daemon to end it now)"
        )
    node = await client.node()
    if node.drain.state == _STATES.SERVING:
        confirm(
            options,
            f"Node {node.node} ({', '.join(node.roles)}) takes nothing new until it is restarted "
            "or undrained, and its hosts move to other paths: hosts without one wait.",
        )
    request = nodes_pb2.DrainNodeRequest(timeout_seconds=options.timeout or 0)
    with translated():
        drain = await client.nodes.DrainNode(request, timeout=CALL_SECONDS)
    shown, patience = None, _ENDING_SECONDS
    while drain.state != _STATES.DRAINED:
        row = _row(drain)
        if (row["state"], row["in_use"], row["uses"]) != shown:
            shown = row["state"], row["in_use"], row["uses"]
            output.line(row if output.is_data else _said(row))
        if drain.state == _STATES.OVERDUE:
            # What ends by itself then needs a moment: a gateway flushes, a fabric closes.
            patience -= _POLL_SECONDS
            if patience < 0 or not all(use.ends for use in drain.uses):
                raise UnavailableError("node.drain.overdue", _overdue(row))
        if drain.state == _STATES.SERVING:
            raise UnavailableError(
                "node.drain.ended", "the drain was ended meanwhile: the node serves again"
            )
        await asyncio.sleep(_POLL_SECONDS)
        drain = (await client.node()).drain
    row = _row(drain)
    output.line(row if output.is_data else {"state": "drained: the daemon may be stopped"})


async def _node_undrain(client: Client, options: argparse.Namespace, output: Output) -> None:
    with translated():
        await client.nodes.UndrainNode(nodes_pb2.UndrainNodeRequest(), timeout=CALL_SECONDS)


async def _node_status(client: Client, options: argparse.Namespace, output: Output) -> None:
    node = await client.node()
    row = {"node": node.node, "version": node.version, **_row(node.drain)}
    shown: dict[str, Any] = {"node": node.node, "version": node.version}
    shown["drain"] = drain_text(node.drain)
    for use in node.drain.uses:
        shown[f"{use.role} {use.name}"] = use.detail
    output.show_one(row, shown)


def drain_text(drain: nodes_pb2.NodeDrain) -> str:
    """Return a drain's state for people."""
    count = f"{drain.uses_total} in use"
    return {
        _STATES.DRAINING: f"draining, {count}, {drain.seconds_left:.0f} s left",
        _STATES.OVERDUE: f"overdue, {count}",
        _STATES.DRAINED: "drained: the daemon may be stopped",
    }.get(drain.state, "none: it serves")


def _overdue(row: Mapping[str, Any]) -> str:
    more = row["in_use"] - min(len(row["uses"]), _USES_SHOWN)
    return (
        f"still in use: {_uses_text(row)}{f'; {more} more' if more > 0 else ''}. "
        "The node goes on draining. Let these leave first "
        "(sealanectl node status shows who is left), stop the daemon anyway (gateways then wait "
        "for it, and their hosts with them), or end the drain with sealanectl node undrain"
    )


def _uses_text(row: Mapping[str, Any]) -> str:
    uses = row["uses"][:_USES_SHOWN]
    return "; ".join(f"{use['role']} {use['name']}: {use['detail']}" for use in uses)


def _row(drain: nodes_pb2.NodeDrain) -> dict[str, Any]:
    return {
        "state": _STATES.State.Name(drain.state).lower(),
        "seconds_left": round(drain.seconds_left, 1),
        "in_use": drain.uses_total,
        "uses": [
            {"role": use.role, "name": use.name, "detail": use.detail, "ends": use.ends}
            for use in drain.uses
        ],
    }


def _said(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a line of progress for people."""
    return {
        "state": row["state"],
        "left": f"{row['seconds_left']:.0f} s left",
        "in_use": f"{row['in_use']} in use",
        "uses": _uses_text(row),
    }
