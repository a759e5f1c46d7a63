"""`sealanectl NOUN VERB`: command-line client of the daemon on this machine."""

# ruff: noqa: ARG001 - every command has one signature

import argparse
import asyncio
import dataclasses
import datetime as dt
import functools
import importlib
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from sealane import __version__
from sealane.cli.output import FORMS, Command, Output, size_text, text_of
from sealane.cli.traced import traced
from sealane.cli.verbs import sentence, watched
from sealane.client import (
    Client,
    NodeStatus,
    SpaceStatus,
    TargetStatus,
    connect,
)
from sealane.client.connection import DEFAULT_SOCKET, JOBS_SOCKET, SOCKET_VARIABLE
from sealane.daemon.runtime.arguments import OneLineParser, system_refused
from sealane.errors import Error, UnavailableError

NOUNS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "volume": ("sealed volumes of a gateway", ("volumes:add_verbs",)),
    "session": ("sessions between data centres", ("sessions:add_verbs",)),
    "subsystem": ("plain subsystems of a target", ("subsystems:add_verbs",)),
    "offload": ("accelerator cards of a gateway", ("offload:add_verbs",)),
    "node": (
        "this machine's daemon (drain, undrain, status) and a broker's nodes",
        ("drain:add_verbs", "nodes:add_verbs"),
    ),
    "device": ("store directories of targets, at a broker", ("devices:add_verbs",)),
    "key": (
        "key files (no daemon needed), and keys of volumes, tenants and brokers",
        (
            "keys:add_verbs",
            "broker:add_key_verbs",
            "encryption_keys:add_verbs",
            "tenant_keys:add_verbs",
        ),
    ),
    "broker": ("backups of a broker's store", ("backup:add_verbs",)),
    "authority": ("the brokers' authority and its replacement", ("authority:add_verbs",)),
    "lease": ("counter leases of a broker", ("broker:add_lease_verbs",)),
    "attest": (
        "evidence and attestation results",
        ("attest:add_verbs", "machine:add_verbs"),
    ),
    "policy": ("the verifier's policy", ("trust:add_policy_verbs",)),
    "owners": ("the policy's owners, who sign it", ("owners:add_verbs",)),
    "audit": ("the broker's audit log", ("trust:add_audit_verbs",)),
    "collateral": (
        "hardware vendors' certificates, revocation lists and TCB data",
        ("collateral:add_verbs",),
    ),
}
"""Help text of each noun, and the functions that add its verbs: imported when the noun is used."""

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "top": ("what the daemon does now: volumes, sessions, latencies", "top:add_arguments"),
    "report": ("write a report for a ticket: one HTML file with plots", "report:add_arguments"),
}
"""The same for commands without a noun, and the function that adds a command's arguments."""


ABSENT: Final = frozenset(
    f"{noun}.not_found"
    for noun in (
        "name",
        "volume",
        "volume.share",
        "session.name",
        "device",
        "node",
        "subsystem",
        "accelerator",
    )
)
"""Reasons that say that what was named doesn't exist."""


def main(arguments: list[str] | None = None) -> int:
    """Run `sealanectl`; return 0 ok, 1 failed, 2 usage, 3 not verified, 4 unavailable or absent."""
    options = command_line().parse_args(arguments)
    output = Output(options.output)
    try:
        if options.is_offline:
            options.run(options, output)
        else:
            asyncio.run(_call(options, output))
        sys.stdout.flush()
    except Error as error:
        print(f"sealanectl: {error}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        return system_refused("sealanectl", error)
    return 0


def exit_code_of(error: Error) -> int:
    """Return an error's exit code: 4, too, if what was named doesn't exist."""
    return UnavailableError.exit_code if error.reason in ABSENT else error.exit_code


async def _call(options: argparse.Namespace, output: "Output") -> None:
    async with (
        traced(options) as traceparent,
        connect(options.socket, traceparent=traceparent) as client,
    ):
        run: Command = options.run
        if options.finds is not None:
            argument, find = options.finds
            called = getattr(options, argument)
            if called is not None:
                setattr(options, argument, await find(client, called))
        await run(client, options, output)
        while options.every is not None:
            output.file.flush()
            await asyncio.sleep(options.every)
            output.begin_again()
            await run(client, options, output)


async def _status(client: Client, options: argparse.Namespace, output: Output) -> None:
    status = await client.status()
    output.show_one(dataclasses.asdict(status), _status_rows(status, dt.datetime.now(dt.UTC)))


def _status_rows(status: NodeStatus, now: dt.datetime) -> Mapping[str, Any]:
    evidence = status.evidence_driver or "none (the broker's own certificates)"
    rows: dict[str, Any] = {
        "node": status.node,
        "version": status.version,
        "roles": status.roles,
        "evidence": evidence,
    }
    if status.is_development:
        rows["WARNING"] = (
            "DEVELOPMENT ONLY: software evidence proves a key file, nothing about the machine"
        )
    expires = status.certificate_expires
    if expires is not None:
        left = int((expires - now).total_seconds())
        rows["certificate"] = (
            f"until {text_of(expires)}, {left} s left"
            if left > 0
            else f"EXPIRED at {text_of(expires)}"
        )
    rows["started"] = status.started
    if status.drain not in {"", "serving"}:
        rows["drain"] = f"{status.drain} (sealanectl node status)"
    wrong = [target for target in status.targets if target.state in {"away", "unhealthy"}]
    if wrong:
        named = "; ".join(
            f"target {target.node} is {target.state}"
            + (f": {target.detail} [{target.reason}]" if target.reason else "")
            for target in wrong
        )
        rows["health"] = f"DEGRADED: {named}"
    rows |= {f"target {target.node}": _target_text(target) for target in status.targets}
    rows |= {f"space of {space.place}": _space_text(space) for space in status.spaces}
    rows |= {f"address of {name}": a for name, a in sorted(status.addresses.items())}
    return rows


def _space_text(space: SpaceStatus) -> str:
    text = (
        f"{size_text(space.free_bytes)} of {size_text(space.capacity_bytes)} free, "
        f"{size_text(space.reserve_bytes)} in reserve"
    )
    if space.promised_bytes:
        text += f", {size_text(space.promised_bytes)} promised to thin volumes"
    warning = {"low": "LOW: ", "full": "FULL: ", "unknown": "UNKNOWN: "}.get(space.state, "")
    return f"{warning}{text}, {space.directory}"


def _target_text(target: TargetStatus) -> str:
    text = f"{target.state}, {target.address}"
    if target.free_bytes is None or target.state == "away":
        return text
    free = f"{size_text(target.free_bytes)} of {size_text(target.capacity_bytes)} free"
    return f"{text}, {free}"


def command_line() -> OneLineParser:
    """Return the parser of the program's arguments."""
    parser = OneLineParser(
        prog="sealanectl", description="Command-line client of the sealaned on this machine."
    )
    parser.set_defaults(is_offline=False, is_endless=False, every=None, finds=None)
    _add_shared(parser, socket=None, output="table")
    parser.add_argument("--version", action="version", version=f"sealanectl {__version__}")
    nouns = parser.add_subparsers(dest="noun", required=True, metavar="NOUN")

    for noun, (text, sources) in NOUNS.items():
        nouns.add_parser(
            noun, help=text, description=sentence(text), fill=functools.partial(_fill, sources)
        )
    for command, (text, source) in COMMANDS.items():
        fill = functools.partial(_fill_command, source)
        nouns.add_parser(command, help=text, description=sentence(text), fill=fill)
    text = "the daemon's roles, evidence and addresses"
    status = watched(nouns.add_parser("status", help=text, description=sentence(text)))
    status.set_defaults(run=_status)
    _add_shared(status)
    return parser


def _add_shared(
    parser: argparse.ArgumentParser,
    *,
    socket: str | None = argparse.SUPPRESS,
    output: str = argparse.SUPPRESS,
) -> None:
    """Add the options of every command, allowed before its noun and after its verb."""
    parser.add_argument(
        "--socket",
        default=socket,
        metavar="PATH",
        help=f"the daemon's socket (default: that of ${SOCKET_VARIABLE}, else {DEFAULT_SOCKET}, "
        f"else {JOBS_SOCKET} for users who may not open that)",
    )
    parser.add_argument(
        *("-o", "--output"),
        choices=FORMS,
        default=output,
        help="format of the output (default: table)",
    )


def _fill(sources: tuple[str, ...], parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for source in sources:
        _function(source)(verbs)
    for parser_of_verb in verbs.choices.values():
        _add_shared(parser_of_verb)


def _fill_command(source: str, parser: argparse.ArgumentParser) -> None:
    _function(source)(parser)
    _add_shared(parser)


def _function(source: str) -> Callable[[Any], None]:
    """Import "module:function" of this package."""
    module, _, name = source.partition(":")
    function: Callable[[Any], None] = getattr(
        importlib.import_module(f"sealane.cli.{module}"), name
    )
    return function


if __name__ == "__main__":
    sys.exit(main())
