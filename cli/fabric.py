"""`sealanectl session limits` and `session drain`: the fabric as a whole."""

import argparse
import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from sealane.cli.output import CALL_SECONDS, Output, size_text
from sealane.client import Client, translated
from sealane.protocol.v1 import sessions_pb2

POLL_SECONDS: Final = 0.5
_NO_USE: Final = {"wire_bytes_sent": "", "waited_seconds": "", "refused_operations": ""}


def add_drain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `session drain`."""
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        default=0.0,
        help="time for messages in flight (default and maximum: fabric.drain_timeout_seconds)",
    )


async def session_drain(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Make the fabric refuse new sessions, and print its progress until none is left."""
    request = sessions_pb2.DrainFabricRequest(timeout_seconds=options.timeout)
    with translated():
        fabric = await client.sessions.DrainFabric(request, timeout=CALL_SECONDS)
        while True:
            output.line(
                {
                    "sessions_left": fabric.drain.sessions_left,
                    "seconds_left": round(fabric.drain.seconds_left, 1),
                }
            )
            if not fabric.drain.sessions_left:
                return
            await asyncio.sleep(POLL_SECONDS)
            fabric = await client.sessions.GetFabric(
                sessions_pb2.GetFabricRequest(), timeout=CALL_SECONDS
            )


async def session_limits(
    client: Client,
    options: argparse.Namespace,  # noqa: ARG001 - every command has one signature
    output: Output,
) -> None:
    """Show the limits of all jobs together and of each job, and each job's usage."""
    with translated():
        fabric = await client.sessions.GetFabric(
            sessions_pb2.GetFabricRequest(), timeout=CALL_SECONDS
        )
    most = _most(fabric.limits)
    every = {
        "sessions": fabric.sessions_max,
        "rate_bits_per_second": fabric.rate_max_bits_per_second,
    }
    rows: list[Mapping[str, Any]] = [
        {"job": "(all together)", **{name: every.get(name, "") for name in most}, **_NO_USE},
        {"job": "(each job)", **most, **_NO_USE},
    ]
    if fabric.HasField("user_limits"):
        rows.insert(1, {"job": "(each user)", **_most(fabric.user_limits), **_NO_USE})
    rows += [_job_row(job, most) for job in fabric.jobs]
    output.show(rows, [_shown(row) for row in rows])


def _most(limits: sessions_pb2.JobLimits) -> dict[str, int]:
    return {
        "sessions": limits.sessions,
        "region_bytes": limits.region_bytes,
        "receives": limits.receives,
        "sends": limits.sends,
        "rate_bits_per_second": limits.rate_bits_per_second,
    }


def _shown(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with units for people."""

    def text(name: str, unit: Callable[[Any], str]) -> str:
        return "" if row[name] == "" else unit(row[name])

    return {
        "job": row["job"],
        "uid": row.get("uid", ""),
        "sessions": row["sessions"],
        "memory": text("region_bytes", size_text),
        "receives": row["receives"],
        "sends": row["sends"],
        "Mbit/s": text("rate_bits_per_second", lambda rate: f"{rate / 1e6:,.7g}"),
        "sent": text("wire_bytes_sent", size_text),
        "waited": text("waited_seconds", lambda seconds: f"{seconds:.3g} s"),
        "refused": row["refused_operations"],
    }


def _job_row(job: sessions_pb2.Job, limits: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "job": job.name,
        "uid": job.uid,
        **{name: job.usage.get(name, "") for name in limits},
        "wire_bytes_sent": job.usage["wire_bytes_sent"],
        "waited_seconds": job.usage["waited_nanos"] / 1e9,
        "refused_operations": job.usage["refused_operations"],
    }
