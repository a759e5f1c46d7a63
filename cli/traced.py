"""A command of `sealanectl` as a span, if the environment names an OpenTelemetry collector."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Final

from sealane.client.trace_context import current, told_traceparent
from sealane.errors import Error

if TYPE_CHECKING:
    from sealane.daemon.runtime.traces_config import TracesConfig

ENDPOINT_VARIABLE: Final = "SEALANE_TRACES_ENDPOINT"
CA_FILE_VARIABLE: Final = "SEALANE_TRACES_CA_FILE"
SPAN_SECONDS: Final = 600.0
"""The longest span of a command: `volume watch` may run for days."""


@contextlib.asynccontextmanager
async def traced(options: argparse.Namespace) -> AsyncIterator[str]:
    """Run a command in its trace; yields the `traceparent` of calls that have no span.

    A command that repeats until it is interrupted belongs to no trace. UsageError `config.…` for
    what the environment says of the collector.
    """
    told = traceparent_of(options)
    if _repeats(options) or (config := collector(os.environ)) is None:
        yield told
        return
    async with _span(config, options, told):
        yield told


def traceparent_of(options: argparse.Namespace) -> str:
    """Return the trace that the calls of a command belong to, if any."""
    return "" if _repeats(options) else told_traceparent()


def _repeats(options: argparse.Namespace) -> bool:
    return options.is_endless or options.every is not None


def collector(environment: Mapping[str, str]) -> "TracesConfig | None":
    """Return the collector that the environment names, None if none; UsageError `config.…`."""
    endpoint = environment.get(ENDPOINT_VARIABLE)
    if not endpoint:
        return None
    # Loaded only here: pydantic and OpenTelemetry take longer than most commands.
    from sealane.daemon.runtime.certificate_files import read_certificates  # noqa: PLC0415
    from sealane.daemon.runtime.sections import parse_section  # noqa: PLC0415
    from sealane.daemon.runtime.traces_config import TracesConfig  # noqa: PLC0415

    named = {"endpoint": endpoint, "ca_file": environment.get(CA_FILE_VARIABLE) or None}
    source = f"{ENDPOINT_VARIABLE}, {CA_FILE_VARIABLE}"
    config = parse_section(TracesConfig, named, source=source)
    read_certificates(config.ca_file, CA_FILE_VARIABLE)
    return config


@contextlib.asynccontextmanager
async def _span(
    config: "TracesConfig", options: argparse.Namespace, told: str
) -> AsyncIterator[None]:
    from opentelemetry import trace  # noqa: PLC0415

    from sealane.daemon.runtime.span_export import SpanExport  # noqa: PLC0415

    lost: list[int] = []
    export = SpanExport(
        config, {"service.name": "sealanectl"}, lost=lost.append, changed=lambda _: None
    )
    # Calls of the client are spans of this process, too.
    trace.set_tracer_provider(export.provider)
    words = (options.noun, getattr(options, "verb", None))
    span = export.tracer.start_span(
        " ".join(["sealanectl", *filter(None, words)]),
        context=trace.set_span_in_context(current(trace, told)),
    )
    timer = asyncio.get_running_loop().call_later(SPAN_SECONDS, span.end)
    reason = "failed"
    try:
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield
        reason = ""
    except Error as error:
        reason = error.reason
        raise
    except asyncio.CancelledError:
        reason = "cancelled"
        raise
    finally:
        timer.cancel()
        if span.is_recording():
            if reason:
                span.set_attribute("sealane.reason", reason)
                span.set_status(trace.StatusCode.ERROR, reason)
            span.end()
        await asyncio.to_thread(export.close)
        if lost:
            text = f"the collector {config.endpoint} did not take {sum(lost)} spans"
            print(f"sealanectl: {text}", file=sys.stderr)
