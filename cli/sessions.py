"""`sealanectl session VERB`: a fabric's sessions between data centres."""

# ruff: noqa: ARG001 - every command has one signature

import argparse
import importlib
from collections.abc import Mapping
from typing import Any

from sealane.cli.names import find_session, list_sessions
from sealane.cli.output import CALL_SECONDS, Output
from sealane.cli.session_stat import LIMITS, limits, record
from sealane.cli.verbs import named, sentence, verb, watched
from sealane.client import Client, translated
from sealane.daemon.runtime.clock import utc_now
from sealane.protocol.v1 import sessions_pb2


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `session`."""
    every = watched(
        verb(verbs, "list", _session_list, "list the sessions that are open or awaited")
    )
    every.add_argument("--all", action="store_true", help="include recently closed sessions")
    named(verbs, "get", _session_get, "show a session", find=find_session)
    named(
        verbs,
        "watch",
        _session_watch,
        "print a session's state changes until it is closed",
        find=find_session,
    )
    named(verbs, "close", _session_close, "close a session", find=find_session)
    for name, fill, text in (
        ("limits", _fill_limits, "show the limits and the usage of jobs"),
        ("drain", _fill_drain, "refuse new sessions and end existing ones cleanly"),
        ("stat", _fill_stat, "show a session's rates and what limits it"),
        ("plan", _fill_plan, "choose the scheme for messages on a path, by a model of completion"),
    ):
        verbs.add_parser(name, help=text, description=sentence(text), fill=fill)


def _fill_plan(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("sealane.cli.plan").add_arguments(parser)


def _fill_limits(parser: argparse.ArgumentParser) -> None:
    fabric = importlib.import_module("sealane.cli.fabric")
    watched(parser).set_defaults(run=fabric.session_limits)


def _fill_drain(parser: argparse.ArgumentParser) -> None:
    fabric = importlib.import_module("sealane.cli.fabric")
    fabric.add_drain_arguments(parser)
    parser.set_defaults(run=fabric.session_drain)


def _fill_stat(parser: argparse.ArgumentParser) -> None:
    stat = importlib.import_module("sealane.cli.session_stat")
    stat.add_arguments(parser)
    parser.set_defaults(run=stat.session_stat)


async def _session_list(client: Client, options: argparse.Namespace, output: Output) -> None:
    found = await list_sessions(client)
    shown = [s for s in found if options.all or s.state != sessions_pb2.Session.CLOSED]
    rows = [_session_row(s) for s in shown]
    output.show(rows, [_line(s) for s in shown], wide=rows, things="sessions")


async def _session_get(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = sessions_pb2.GetSessionRequest(name=options.name)
    with translated():
        session = await client.sessions.GetSession(request, timeout=CALL_SECONDS)
    shown = _description(session)
    output.show_one(
        record(session, session.statistics) | shown,
        {name: value for name, value in shown.items() if value}
        | {"figures": f"sealanectl session stat {session.name}"},
    )


async def _session_watch(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = sessions_pb2.WatchSessionRequest(name=options.name)
    with translated():
        async for session in client.sessions.WatchSession(request):
            output.line(_state_row(session))


async def _session_close(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = sessions_pb2.CloseSessionRequest(name=options.name)
    with translated():
        await client.sessions.CloseSession(request, timeout=CALL_SECONDS)


def _description(session: sessions_pb2.Session) -> dict[str, Any]:
    """Return a session's attributes; `session stat` has its figures."""
    return {
        "name": session.name,
        "uid": session.uid,
        "display_name": session.display_name,
        "state": _state(session),
        "peer": session.peer_node,
        "side": session.side,
        "unit_bytes": session.unit_bytes,
        "rate_bits_per_second": session.rate_bits_per_second,
        "congestion": session.congestion,
        "data_addresses": list(session.data_addresses),
        "close_reason": session.close_reason,
    }


def _state_row(session: sessions_pb2.Session) -> Mapping[str, Any]:
    return {
        "time": utc_now().isoformat(timespec="milliseconds"),
        "state": _state(session),
        "peer": session.peer_node,
        "close_reason": session.close_reason,
    }


def _state(session: sessions_pb2.Session) -> str:
    return sessions_pb2.Session.State.Name(session.state).lower()


def _session_row(session: sessions_pb2.Session) -> Mapping[str, Any]:
    return {
        "name": session.name,
        "uid": session.uid,
        "display_name": session.display_name,
        "state": _state(session),
        "peer": session.peer_node,
        "side": session.side,
        "rate_bits_per_second": session.rate_bits_per_second,
        "packets_sent": session.statistics["packets_sent"],
        "retransmitted_packets": session.statistics["retransmitted_packets"],
        "close_reason": session.close_reason,
    }


def _line(session: sessions_pb2.Session) -> Mapping[str, Any]:
    """Return a session's row in a table that fits 80 columns."""
    rate = session.rate_bits_per_second / 1e6
    limit = next(iter(limits(session.statistics)), None)
    return {
        "name": session.name,
        "display_name": session.display_name,
        "state": _state(session),
        "peer": session.peer_node,
        "Mbit/s": f"{rate:,.7g}" if rate else "",
        "limited_by": session.close_reason or (LIMITS[limit] if limit else ""),
    }
