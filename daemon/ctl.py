"""`sealanectl NOUN VERB`: command-line client of the daemon on this machine."""

# ruff: noqa: ARG001 - every command has one signature

import argparse
import asyncio
import dataclasses
import datetime as dt
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from sealane import __version__
from sealane.client import (
    Client,
    NodeStatus,
    connect,
)
from sealane.client.connection import DEFAULT_SOCKET
from sealane.daemon.arguments import OneLineParser
from sealane.daemon.ctl_attest import add_attest_noun
from sealane.daemon.ctl_broker import add_broker_verbs
from sealane.daemon.ctl_collateral import add_collateral_verbs
from sealane.daemon.ctl_devices import add_device_verbs
from sealane.daemon.ctl_keys import add_key_verbs
from sealane.daemon.ctl_machine import add_machine_verb
from sealane.daemon.ctl_nodes import add_node_verbs
from sealane.daemon.ctl_output import Command, Output, text_of
from sealane.daemon.ctl_sessions import add_session_verbs
from sealane.daemon.ctl_subsystems import add_subsystem_verbs
from sealane.daemon.ctl_trust import add_trust_nouns
from sealane.daemon.ctl_volumes import add_volume_verbs
from sealane.errors import Error


def main(arguments: list[str] | None = None) -> int:
    """Run `sealanectl`; returns 0 ok, 1 failed, 2 usage, 3 not verified, 4 unavailable."""
    options = _parser().parse_args(arguments)
    output = Output(options.output)
    try:
        if options.is_offline:
            options.run(options, output)
        else:
            asyncio.run(_call(options, output))
    except Error as error:
        print(f"sealanectl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output went away; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


async def _call(options: argparse.Namespace, output: "Output") -> None:
    async with connect(options.socket) as client:
        run: Command = options.run
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
            "DEVELOPMENT ONLY: software evidence proves a key file and nothing about a machine"
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
    rows |= {f"address of {name}": a for name, a in sorted(status.addresses.items())}
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="sealanectl", description="Talks to the sealaned on this machine.")
    parser.set_defaults(is_offline=False)
    parser.add_argument(
        "--socket", default=DEFAULT_SOCKET, metavar="PATH", help="default: %(default)s"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--version", action="version", version=f"sealanectl {__version__}")
    nouns = parser.add_subparsers(dest="noun", required=True, metavar="NOUN")

    add_volume_verbs(_noun(nouns, "volume", "attested volumes"), _verb, _named)
    add_session_verbs(_noun(nouns, "session", "inter-datacenter sessions"), _verb, _named)
    add_subsystem_verbs(_noun(nouns, "subsystem", "plain subsystems of a target"), _verb, _named)
    add_node_verbs(_noun(nouns, "node", "nodes of a broker: who attested, who is revoked"), _verb)

    add_device_verbs(_noun(nouns, "device", "store directories of targets, at a broker"), _verb)

    status = nouns.add_parser("status", help="what the daemon is")
    status.set_defaults(run=_status)

    verbs = _noun(nouns, "key", "key files, which need no daemon, and keys of volumes")
    add_key_verbs(verbs)
    leases = _noun(nouns, "lease", "counter leases of a broker")
    add_broker_verbs(verbs, leases, _verb)
    add_machine_verb(add_attest_noun(nouns, _noun))
    add_trust_nouns(nouns, _noun, _verb)
    collateral = _noun(nouns, "collateral", "what vendors publish of their hardware")
    add_collateral_verbs(collateral)
    return parser


def _noun(nouns: Any, name: str, text: str) -> Any:
    return nouns.add_parser(name, help=text).add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )


def _verb(verbs: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    parser.set_defaults(run=run)
    return parser


def _named(verbs: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    parser = _verb(verbs, name, run, text)
    parser.add_argument("name", metavar="NAME", help="resource name, as create prints it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
