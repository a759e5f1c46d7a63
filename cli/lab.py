"""`sealane lab`: hosts and long links on this machine (docs/operate/lab.md)."""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from sealane.cli.output import Output
from sealane.daemon.runtime.arguments import OneLineParser, bounded, system_refused
from sealane.daemon.runtime.sections import load_section
from sealane.errors import Error, UsageError
from sealane.lab.control import LabConnection, launch, run_inside, the_only_lab
from sealane.lab.measure import SHARE_MAX, measure
from sealane.lab.names import lab_names
from sealane.lab.report import RunReport, Way, nothing, run_report
from sealane.lab.topology import Topology, check_name

VOID: Final = 3
_ARROWS: Final = {"forward": "→", "backward": "←"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the lab; return its exit code (3: the run is void)."""
    options = command_line().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except Error as error:
        print(f"sealane lab: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        return system_refused("sealane lab", error)
    return code


def _up(options: argparse.Namespace) -> int:
    topology = load_section(Topology, options.topology)
    name = check_name(options.name or options.topology.stem)
    relays = options.relays or os.geteuid() != 0
    if relays:
        for wan in topology.wan:
            if wan.forward_to is None:
                raise UsageError(
                    "lab.relay",
                    f"{options.topology}: wan {wan.name}: forward_to: missing; without root, or "
                    "with --relays, each link needs a UDP address to forward to",
                )
    status = launch(name, topology, relays=relays, unmeasured=options.unmeasured)
    _show_status(status, Output(options.output))
    return 0


def _exec(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("lab.command", "no command; allowed: sealane lab exec HOST -- COMMAND …")
    with LabConnection(options.lab or the_only_lab()) as connection:
        topology = Topology.model_validate(connection.ask("status")["topology"])
        if options.report is not None:
            # Fail before the run, not after it, if the report can't be written.
            options.report.touch()
        if options.restart_schedule:
            connection.ask("schedule")
        before = connection.ask("report")
        started = time.monotonic()
        code = run_inside(connection, options.host, command)
        seconds = time.monotonic() - started
        report = run_report(topology, before, connection.ask("report"))
    result = {"lab": connection.name, "host": options.host, "seconds": seconds, "exit_code": code}
    if options.report is not None:
        options.report.write_text(json.dumps(result | report.to_dict(), indent=2) + "\n")
    # Standard output is the command's own.
    output = Output(options.output, sys.stderr)
    if options.output == "json":
        output.show_one(result | report.to_dict())
    else:
        print(f"{options.host} in lab {connection.name}: {seconds:.2f} s", file=sys.stderr)
        _show_report(report, output)
    return code or (VOID if report.void else 0)


def _status(options: argparse.Namespace) -> int:
    output = Output(options.output)
    if options.lab is None:
        rows = []
        for name in lab_names(os.geteuid()):
            # A lab that ends meanwhile is not listed.
            with contextlib.suppress(Error), LabConnection(name) as connection:
                rows.append(_row(connection.ask("status")))
        output.show(rows)
        return 0
    with LabConnection(options.lab) as connection:
        status, reports = connection.ask("status"), connection.ask("report")
    report = run_report(Topology.model_validate(status["topology"]), nothing(reports), reports)
    if options.output == "json":
        output.show_one(status | {"report": report.to_dict()})
    else:
        _show_status(status, output)
        print()
        _show_report(report, output)
    return 0


def _down(options: argparse.Namespace) -> int:
    running = lab_names(os.geteuid())
    if options.lab is not None:
        wanted = [options.lab] if options.lab in running else []
    else:
        wanted = running if options.all or len(running) == 0 else [the_only_lab()]
    for name in wanted:
        with LabConnection(name) as connection:
            connection.end()
    Output(options.output).show_one({"ended": wanted})
    return 0


def _measure(options: argparse.Namespace) -> int:
    relays = options.relays or os.geteuid() != 0
    rows = []
    for mtu in options.mtu or (1500, 9000):
        capacity = asdict(asyncio.run(measure(mtu=mtu, relays=relays)))
        allowed = int(SHARE_MAX * capacity["packets_per_second"])
        rows.append(
            capacity | {"allowed_packets_per_second": allowed, "allowed_mbit": allowed * mtu * 8e-6}
        )
    if options.output == "table":
        rows = [{key: _figure(value) for key, value in row.items()} for row in rows]
    Output(options.output).show(rows)
    return 0


def _figure(value: int | float) -> str:  # noqa: PYI041 - which of the two decides
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _row(status: dict[str, Any]) -> dict[str, Any]:
    topology = status["topology"]
    measured = status["capacity"]
    return {
        "name": status["name"],
        "kind": "relays" if status["relays"] else "namespaces",
        "hosts": len(status["hosts"]),
        "links": [wan["name"] for wan in topology["wan"]],
        "packets_per_second": status["packets_per_second"],
        "measured": "not measured" if measured is None else measured["packets_per_second"],
    }


def _show_status(status: dict[str, Any], output: Output) -> None:
    if output.is_data:
        output.show_one(status)
        return
    output.show_one(_row(status))
    print()
    if relays := status["relays"]:
        output.show(
            [
                {"link": wan["name"], "send to": relays[wan["name"]], "leads to": wan["forward_to"]}
                for wan in status["topology"]["wan"]
            ]
        )
    else:
        output.show(
            [
                {"host": host, "link": wan, "addresses": addresses}
                for host, links in status["hosts"].items()
                for wan, addresses in links.items()
            ]
        )


def _show_report(report: RunReport, output: Output) -> None:
    """Print each direction's counts and delay error, and why the run is void if it is."""
    output.show([_way_row(way) for way in report.ways])
    for reason in report.void:
        print(f"VOID  {reason}", file=output.file)


def _way_row(way: Way) -> dict[str, Any]:
    dropped = way.overflowed + way.dropped_early + way.down
    return {
        "link": f"{way.wan} {_ARROWS[way.direction]}",
        "packets": way.packets,
        "bytes": way.bytes,
        "lost": way.lost,
        "dropped": dropped,
        "marked": way.marked,
        "late": way.late,
        "added delay p50": f"{way.slip_p50_micros:.0f} µs",
        "p99": f"{way.slip_p99_micros:.0f} µs",
        "max": f"{way.slip_max_micros:.0f} µs",
    }


def command_line() -> OneLineParser:
    """Return the parser of the program's arguments."""
    parser = OneLineParser(
        prog="sealane lab",
        description=(
            "Hosts in network namespaces and emulated long links between them. Without root, the "
            "links are UDP relays between loopback ports."
        ),
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, summary: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        command.add_argument(
            "--output", choices=("table", "json"), default="table", help="default: %(default)s"
        )
        command.set_defaults(run=run)
        return command

    up = add("up", _up, "start the lab of a topology file, if this machine is fast enough for it")
    up.add_argument("topology", type=Path, metavar="TOPOLOGY.toml", help="see docs/operate/lab.md")
    up.add_argument("--name", help="name of the lab (default: the file's, without ending)")
    _add_relays(up)
    up.add_argument(
        "--unmeasured",
        action="store_true",
        help="start any topology, without measuring how fast this machine is",
    )

    execute = add("exec", _exec, "run a command on a host and report what the links did meanwhile")
    execute.add_argument("host", metavar="HOST", help="name of a host")
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …")
    execute.add_argument("--lab", metavar="NAME", help="name of the lab (default: the only one)")
    execute.add_argument(
        "--restart-schedule",
        action="store_true",
        help="start the schedule of outages and detours now instead of at `up`",
    )
    execute.add_argument("--report", type=Path, metavar="FILE", help="write the report as JSON")

    status = add("status", _status, "list the running labs, or show one with its counters")
    status.add_argument("lab", nargs="?", metavar="NAME", help="default: list all")

    down = add("down", _down, "end a lab and all processes in it; succeeds if none is running")
    down.add_argument("lab", nargs="?", metavar="NAME", help="default: the only one")
    down.add_argument("--all", action="store_true", help="end all labs of this user")

    capacity = add("measure", _measure, "measure how many packets per second a link carries here")
    capacity.add_argument(
        "--mtu",
        type=bounded(1280, 9000),
        action="append",
        help="packet size in bytes; may be repeated (default: 1500 and 9000)",
    )
    _add_relays(capacity)
    return parser


def _add_relays(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--relays",
        action="store_true",
        help="use relays between loopback ports, not namespaces (always the case without root)",
    )
