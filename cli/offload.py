"""`sealanectl offload VERB`: accelerator cards of this machine's gateway."""

# ruff: noqa: ARG001 - every command has one signature

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any, Final

from sealane.cli.output import CALL_SECONDS, Output, size_text
from sealane.cli.verbs import verb, watched
from sealane.client import Client, translated
from sealane.errors import UnavailableError
from sealane.protocol.sector import SECTOR_BYTES
from sealane.protocol.v1 import offload_pb2

_STATES = offload_pb2.Accelerator
_POLL_SECONDS: Final = 0.1
_STOP_SECONDS: Final = 60.0
"""How long a card may take to stop: a silent one takes a second for each volume and queue."""


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `offload`."""
    watched(verb(verbs, "list", _offload_list, "list the accelerator cards"))
    texts = {
        "get": (_offload_get, "show a card, what it attested, and what it did"),
        "probe": (
            _offload_probe,
            "have a card's evidence appraised and let it seal known sectors, without using it",
        ),
        "enable": (_offload_enable, "use a card again, if it passes what probe checks"),
        "disable": (
            _offload_disable,
            "stop the use of a card, also after a restart, and wait until it has no keys",
        ),
        "drain": (
            _offload_drain,
            "stop the use of a card until the daemon's next start, and wait until it has no keys",
        ),
    }
    for name, (run, text) in texts.items():
        parser = verb(verbs, name, run, text)
        parser.add_argument("label", metavar="LABEL", help="the card's label, as list prints it")
        if name == "get":
            watched(parser)


async def _offload_list(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = offload_pb2.ListAcceleratorsRequest()
    with translated():
        answer = await client.offload.ListAccelerators(request, timeout=CALL_SECONDS)
    output.show(
        [_row(card) for card in answer.accelerators],
        [
            {
                "label": card.label,
                "state": _state(card),
                "product": card.product or "-",
                "volumes": card.volumes,
                "sealed": size_text(card.sectors_sealed * SECTOR_BYTES),
                "refusals": card.refusals,
                "losses": card.losses,
                "reason": card.reason or "-",
            }
            for card in answer.accelerators
        ],
        things="accelerator cards",
    )


async def _offload_get(client: Client, options: argparse.Namespace, output: Output) -> None:
    _show(await _card(client, options.label), output)


async def _offload_probe(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = offload_pb2.ProbeAcceleratorRequest(label=options.label)
    with translated():
        card = await client.offload.ProbeAccelerator(request, timeout=CALL_SECONDS)
    _show(card, output)


async def _offload_enable(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = offload_pb2.EnableAcceleratorRequest(label=options.label)
    with translated():
        card = await client.offload.EnableAccelerator(request, timeout=2 * CALL_SECONDS)
    _show(card, output)


async def _offload_disable(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = offload_pb2.DisableAcceleratorRequest(label=options.label)
    with translated():
        card = await client.offload.DisableAccelerator(request, timeout=CALL_SECONDS)
    await _show_stopped(client, card, output)


async def _offload_drain(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = offload_pb2.DrainAcceleratorRequest(label=options.label)
    with translated():
        card = await client.offload.DrainAccelerator(request, timeout=CALL_SECONDS)
    await _show_stopped(client, card, output)


async def _show_stopped(client: Client, card: offload_pb2.Accelerator, output: Output) -> None:
    """Show a card once it has stopped; UnavailableError if it doesn't, or is enabled meanwhile."""
    left = _STOP_SECONDS
    while card.state in {_STATES.DRAINING, _STATES.DISABLING}:
        if left <= 0:
            raise UnavailableError(
                "accelerator.busy", f"{card.label} is still {_state(card)} after {_STOP_SECONDS} s"
            )
        await asyncio.sleep(_POLL_SECONDS)
        left -= _POLL_SECONDS
        card = await _card(client, card.label)
    if card.state not in {_STATES.DRAINED, _STATES.DISABLED}:
        raise UnavailableError(
            "accelerator.enabled", f"{card.label} was enabled by another call meanwhile"
        )
    _show(card, output)


async def _card(client: Client, label: str) -> offload_pb2.Accelerator:
    request = offload_pb2.GetAcceleratorRequest(label=label)
    with translated():
        return await client.offload.GetAccelerator(request, timeout=CALL_SECONDS)


def _state(card: offload_pb2.Accelerator) -> str:
    return _STATES.State.Name(card.state).lower()


def _show(card: offload_pb2.Accelerator, output: Output) -> None:
    row = _row(card)
    shown: dict[str, Any] = {"label": card.label, "state": _state(card)}
    if card.reason:
        shown["reason"] = f"{card.reason}: {card.message}"
    shown["socket"] = card.socket
    if card.hardware_id:
        shown["hardware"] = card.hardware_id
        shown["product"] = card.product
        shown["firmware"] = row["firmware_sha256"]
        shown["bus"] = "protected" if card.protected_bus else "not protected"
    if card.depth:
        shown["limits"] = f"{card.depth} jobs a queue, {card.key_slots} keys"
    shown["volumes"] = card.volumes
    shown["jobs"] = f"{card.jobs}, {row['job_micros']:.0f} µs each on average"
    shown["sealed"] = f"{card.sectors_sealed} sectors, {size_text(row['bytes_sealed'])}"
    shown["inline"] = f"{card.sectors_inline} sectors by the processor, as the card was full"
    shown["refusals"] = card.refusals
    shown["losses"] = card.losses
    output.show_one(row, shown)


def _row(card: offload_pb2.Accelerator) -> Mapping[str, Any]:
    return {
        "label": card.label,
        "socket": card.socket,
        "state": _state(card),
        "reason": card.reason,
        "message": card.message,
        "hardware_id": card.hardware_id,
        "product": card.product,
        "firmware_sha256": card.firmware_sha256.hex(),
        "protected_bus": card.protected_bus,
        "depth": card.depth,
        "key_slots": card.key_slots,
        "volumes": card.volumes,
        "jobs": card.jobs,
        "job_micros": 1e6 * card.job_seconds / card.jobs if card.jobs else 0.0,
        "sectors_sealed": card.sectors_sealed,
        "bytes_sealed": card.sectors_sealed * SECTOR_BYTES,
        "sectors_inline": card.sectors_inline,
        "refusals": card.refusals,
        "losses": card.losses,
    }
