"""Volumes of all tenants, as a broker's registry has them."""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from sealane.cli.output import Output, size_text
from sealane.protocol.kinds import VolumeMode
from sealane.protocol.sector import SECTOR_BYTES
from sealane.protocol.v1 import broker_pb2


def show_registered(volumes: Sequence[broker_pb2.VolumeDescriptor], output: Output) -> None:
    """Print volumes in the form that was asked for."""
    output.show(
        [{"name": f"volumes/{v.volume_id}", **_plain(v)} for v in volumes],
        [_brief(v) for v in volumes],
        wide=[_wide(v) for v in volumes],
        things="volumes",
    )


def _plain(volume: broker_pb2.VolumeDescriptor) -> Mapping[str, Any]:
    return {
        **MessageToDict(
            volume, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        ),
        "sector_count": volume.sector_count,  # MessageToDict makes a string of it
        "size_bytes": volume.sector_count * SECTOR_BYTES,
    }


def _brief(volume: broker_pb2.VolumeDescriptor) -> Mapping[str, Any]:
    return {
        "name": f"volumes/{volume.volume_id}",
        "display name": volume.display_name,
        "size": size_text(volume.sector_count * SECTOR_BYTES),
        "tenant": volume.tenant,
        "target": volume.third_party or volume.target_node,
        "mode": volume.mode or VolumeMode.REMOTE,
        "state": f"filling by {volume.filling_gateway}" if volume.filling_gateway else "registered",
    }


def _wide(volume: broker_pb2.VolumeDescriptor) -> Mapping[str, Any]:
    oldest = volume.oldest_key_epoch or volume.key_epoch
    return {
        **_brief(volume),
        "key epochs": f"{oldest}…{volume.key_epoch}" if oldest < volume.key_epoch else str(oldest),
        "shared with": ", ".join(
            f"{share.tenant} (read only)" if share.read_only else share.tenant
            for share in volume.shares
        ),
        "device": volume.device_id,
    }
