"""`sealanectl session VERB`: inter-datacenter sessions of a fabric."""

# ruff: noqa: ARG001 - every command has one signature

import argparse
import importlib
from collections.abc import Awaitable, Mapping
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from sealane.client import Client, translated
from sealane.daemon.ctl_output import CALL_SECONDS, Output, pages
from sealane.daemon.ctl_verbs import named, verb
from sealane.protocol.v1 import sessions_pb2

_NO_USE: Final = {"wire_bytes_sent": "", "waited_seconds": "", "refused_operations": ""}


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `session`."""
    verb(verbs, "list", _session_list, "show every session")
    named(verbs, "get", _session_get, "show a session")
    named(verbs, "close", _session_close, "close a session")
    verb(verbs, "limits", _session_limits, "what each job may use, and uses")
    verbs.add_parser("stat", help="what a session does and what limits it", fill=_fill_stat)
    verbs.add_parser(
        "plan",
        help="which scheme suits messages on a path, by the completion-time model",
        fill=_fill_plan,
    )


def _fill_plan(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("sealane.daemon.ctl_plan").add_arguments(parser)


def _fill_stat(parser: argparse.ArgumentParser) -> None:
    stat = importlib.import_module("sealane.daemon.ctl_session_stat")
    stat.add_arguments(parser)
    parser.set_defaults(run=stat.session_stat)


async def _session_list(client: Client, options: argparse.Namespace, output: Output) -> None:
    def call(token: str) -> Awaitable[sessions_pb2.ListSessionsResponse]:
        request = sessions_pb2.ListSessionsRequest(page_token=token)
        return client.sessions.ListSessions(request, timeout=CALL_SECONDS)

    with translated():
        output.show([_session_row(s) async for page in pages(call) for s in page.sessions])


async def _session_get(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = sessions_pb2.GetSessionRequest(name=options.name)
    with translated():
        session = await client.sessions.GetSession(request, timeout=CALL_SECONDS)
    row = MessageToDict(
        session, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    output.show_one(row)


async def _session_close(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = sessions_pb2.CloseSessionRequest(name=options.name)
    with translated():
        await client.sessions.CloseSession(request, timeout=CALL_SECONDS)


async def _session_limits(client: Client, options: argparse.Namespace, output: Output) -> None:
    with translated():
        fabric = await client.sessions.GetFabric(
            sessions_pb2.GetFabricRequest(), timeout=CALL_SECONDS
        )
    limits = fabric.limits
    most = {
        "sessions": limits.sessions,
        "region_bytes": limits.region_bytes,
        "receives": limits.receives,
        "sends": limits.sends,
        "rate_bits_per_second": limits.rate_bits_per_second,
    }
    every = {
        "sessions": fabric.sessions_max,
        "rate_bits_per_second": fabric.rate_max_bits_per_second,
    }
    rows: list[Mapping[str, Any]] = [
        {"job": "(all together)", **{name: every.get(name, "") for name in most}, **_NO_USE},
        {"job": "(each job)", **most, **_NO_USE},
    ]
    output.show(rows + [_job_row(job, most) for job in fabric.jobs])


def _job_row(job: sessions_pb2.Job, limits: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "job": job.name,
        **{name: job.usage.get(name, "") for name in limits},
        "wire_bytes_sent": job.usage["wire_bytes_sent"],
        "waited_seconds": job.usage["waited_nanos"] / 1e9,
        "refused_operations": job.usage["refused_operations"],
    }


def _session_row(session: sessions_pb2.Session) -> Mapping[str, Any]:
    return {
        "name": session.name,
        "display_name": session.display_name,
        "state": sessions_pb2.Session.State.Name(session.state).lower(),
        "peer": session.peer_node,
        "side": session.side,
        "rate_bits_per_second": session.rate_bits_per_second,
        "packets_sent": session.statistics["packets_sent"],
        "retransmitted_packets": session.statistics["retransmitted_packets"],
        "close_reason": session.close_reason,
    }
