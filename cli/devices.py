"""`sealanectl device VERB`: the store directories of targets, at this broker."""

import argparse
from collections.abc import Awaitable, Mapping
from typing import Any

from sealane.cli.output import CALL_SECONDS, Output, pages
from sealane.cli.verbs import confirm, destructive, verb
from sealane.client import Client, translated
from sealane.errors import UsageError
from sealane.protocol.v1 import devices_pb2


async def device_list(client: Client, options: argparse.Namespace, output: Output) -> None:  # noqa: ARG001
    """Print every device, and the nodes that ask for one."""

    def call(token: str) -> Awaitable[devices_pb2.ListDevicesResponse]:
        request = devices_pb2.ListDevicesRequest(page_token=token)
        return client.devices.ListDevices(request, timeout=CALL_SECONDS)

    with translated():
        output.show([_row(device) async for page in pages(call) for device in page.devices])


async def device_show(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Print a device, its volumes, and what this broker keeps of its anchor."""
    with translated():
        details = await _details(client, options.device)
    output.show_one(
        {
            **_row(details.device),
            "volumes": [f"volumes/{volume}" for volume in details.volumes],
            "anchored": {
                record.name: f"{record.number}: {record.blob.hex()}" for record in details.records
            },
        }
    )


def _details(client: Client, device_id: str) -> Awaitable[devices_pb2.DeviceDetails]:
    request = devices_pb2.GetDeviceRequest(device_id=device_id)
    return client.devices.GetDevice(request, timeout=CALL_SECONDS)


def _named(details: devices_pb2.DeviceDetails) -> str:
    return f"Device {details.device.device_id}, with {len(details.volumes)} volumes"


async def device_init(client: Client, options: argparse.Namespace, output: Output) -> None:  # noqa: ARG001
    """Authorize a device."""
    if (options.device is None) == (options.next is None):
        raise UsageError("device.request", "allowed: DEVICE, or --next NODE")
    request = devices_pb2.InitializeDeviceRequest(
        device_id=options.device, next_node=options.next, anew=options.anew
    )
    with translated():
        if options.anew and options.device is not None:
            known = await _details(client, options.device)
            confirm(
                options,
                f"{_named(known)}: its anchor is dropped, and whatever is found in it next is "
                "believed, put back or not.",
            )
        await client.devices.InitializeDevice(request, timeout=CALL_SECONDS)


async def device_move(client: Client, options: argparse.Namespace, output: Output) -> None:  # noqa: ARG001
    """Give a device to another node."""
    request = devices_pb2.MoveDeviceRequest(
        device_id=options.device, node=options.to, unseen=options.unseen
    )
    with translated():
        known = await _details(client, options.device)
        confirm(
            options,
            f"{_named(known)} goes from {known.device.owner} to {options.to}: its volumes are "
            f"offline until {options.to} serves them.",
        )
        await client.devices.MoveDevice(request, timeout=CALL_SECONDS)


async def device_forget(client: Client, options: argparse.Namespace, output: Output) -> None:  # noqa: ARG001
    """Refuse a device for ever."""
    request = devices_pb2.ForgetDeviceRequest(device_id=options.device)
    with translated():
        known = await _details(client, options.device)
        confirm(options, f"{_named(known)} is refused for ever, and its secret is destroyed.")
        await client.devices.ForgetDevice(request, timeout=CALL_SECONDS)


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `device`."""
    verb(verbs, "list", device_list, "show every device, and who asks for one")
    show = verb(verbs, "show", device_show, "show a device, its volumes and its anchor")
    init = verb(verbs, "init", device_init, "let in a new device: what is found in it is believed")
    init.add_argument("device", metavar="DEVICE", nargs="?", help="UUID of one that asks")
    init.add_argument("--next", metavar="NODE", help="whatever unknown device this node shows next")
    init.add_argument(
        "--anew",
        action="store_true",
        help="a known device: drop its anchor, and believe once more what is found. After a lost "
        "TPM, a damaged directory; never because a target says that its directory was put back",
    )
    move = verb(verbs, "move", device_move, "give a device and its volumes to another node")
    move.add_argument("--to", required=True, metavar="NODE")
    move.add_argument("--unseen", action="store_true", help="also to a node that never attested")
    forget = verb(verbs, "forget", device_forget, "refuse a device without volumes for ever")
    for parser in (init, move, forget):
        destructive(parser)
    for parser in (show, move, forget):
        parser.add_argument("device", metavar="DEVICE", help="UUID")


def _row(device: devices_pb2.Device) -> Mapping[str, Any]:
    opened = device.open_time.ToDatetime() if device.HasField("open_time") else ""
    return {
        "device": device.device_id,
        "is": "volume" if device.is_volume else "directory",
        "owner": device.owner,
        "state": device.state,
        "fencing epoch": device.fencing_epoch,
        "anchor": device.anchor,
        "opened": opened,
    }
