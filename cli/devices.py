"""`sealanectl device VERB`: the targets' store directories, at this broker."""

import argparse
from collections.abc import Awaitable, Mapping
from typing import Any

from sealane.cli.names import find_device, list_devices, list_members
from sealane.cli.output import CALL_SECONDS, Output
from sealane.cli.verbs import CALLED, confirm, destructive, finds, verb, watched
from sealane.client import Client, translated
from sealane.crypto.roles import Role
from sealane.errors import UsageError
from sealane.protocol.v1 import devices_pb2


async def device_list(client: Client, options: argparse.Namespace, output: Output) -> None:  # noqa: ARG001
    """Print every device, including those that await `device init`."""
    rows = [_row(device) for device in await list_devices(client)]
    output.show(rows, things="devices")


async def device_show(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Print a device, its volumes, and the anchor records that this broker keeps."""
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
    count = len(details.volumes)
    return f"Device {details.device.device_id}, with {count} volume{'' if count == 1 else 's'},"


async def device_init(client: Client, options: argparse.Namespace, output: Output) -> None:  # noqa: ARG001
    """Authorize a device."""
    if (options.device is None) == (options.next is None):
        raise UsageError("device.request", "allowed: either DEVICE or --next NODE")
    request = devices_pb2.InitializeDeviceRequest(
        device_id=options.device, next_node=options.next, anew=options.anew
    )
    with translated():
        if options.anew and options.device is not None:
            known = await _details(client, options.device)
            confirm(
                options,
                f"{_named(known)} will lose its anchor, and the contents found next will be "
                "accepted, even if they are an old copy.",
            )
        elif options.device is not None:
            # A device that no target has asked for is refused by the broker.
            for device in await list_devices(client):
                if (device.device_id, device.state) == (options.device, "asking"):
                    confirm(
                        options,
                        f"Device {device.device_id}, which {device.owner} presents, will be "
                        "accepted with the contents found, even if they are an old copy.",
                    )
        await client.devices.InitializeDevice(request, timeout=CALL_SECONDS)


async def device_move(client: Client, options: argparse.Namespace, output: Output) -> None:  # noqa: ARG001
    """Give a device to another node."""
    request = devices_pb2.MoveDeviceRequest(
        device_id=options.device, node=options.to, unseen=options.unseen
    )
    with translated():
        known = await _details(client, options.device)
        is_known = options.unseen or await _has_attested(client, options.to, known.device)
        # To its owner, it only completes a move; to an unknown node, the broker refuses it.
        if is_known and options.to != known.device.owner:
            confirm(
                options,
                f"{_named(known)} will move from {known.device.owner} to {options.to}: its "
                f"volumes are offline until {options.to} serves them.",
            )
        await client.devices.MoveDevice(request, timeout=CALL_SECONDS)


async def _has_attested(client: Client, node: str, device: devices_pb2.Device) -> bool:
    """Return whether a node has attested in the role that opens the device."""
    role = Role.GATEWAY if device.is_volume else Role.TARGET
    return any((member.node, member.role) == (node, role) for member in await list_members(client))


async def device_forget(client: Client, options: argparse.Namespace, output: Output) -> None:  # noqa: ARG001
    """Refuse a device permanently."""
    request = devices_pb2.ForgetDeviceRequest(device_id=options.device)
    with translated():
        known = await _details(client, options.device)
        # With volumes, the broker refuses it.
        if not known.volumes:
            confirm(
                options, f"{_named(known)} will be refused permanently, and its secret destroyed."
            )
        await client.devices.ForgetDevice(request, timeout=CALL_SECONDS)


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `device`."""
    watched(verb(verbs, "list", device_list, "list every device, including those awaiting init"))
    show = verb(verbs, "show", device_show, "show a device, its volumes and its anchor")
    init = verb(verbs, "init", device_init, "accept a new device, trusting the contents found")
    finds(init, "device", find_device, metavar="DEVICE", nargs="?", help=CALLED)
    init.add_argument(
        "--next", metavar="NODE", help="accept the next unknown device that this node presents"
    )
    init.add_argument(
        "--anew",
        action="store_true",
        help="for a known device: drop its anchor, and trust the contents found once more. For use "
        "after a lost TPM or a damaged directory; never because a target reports that its "
        "directory was rolled back",
    )
    move = verb(verbs, "move", device_move, "give a device and its volumes to another node")
    move.add_argument("--to", required=True, metavar="NODE", help="the new owner")
    move.add_argument("--unseen", action="store_true", help="allow a node that has never attested")
    forget = verb(verbs, "forget", device_forget, "permanently refuse a device that has no volumes")
    for parser in (init, move, forget):
        destructive(parser)
    for parser in (show, move, forget):
        finds(parser, "device", find_device, metavar="DEVICE", help=CALLED)


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
