"""Volume descriptors, signed by the broker: the only source of a volume's properties."""

from google.protobuf.message import DecodeError

from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import verify_descriptor
from sealane.errors import VerificationError
from sealane.protocol.v1 import broker_pb2


def lasting(descriptor: broker_pb2.VolumeDescriptor) -> broker_pb2.VolumeDescriptor:
    """Return a descriptor without the fields that a change of size, key or name touches."""
    lasting = broker_pb2.VolumeDescriptor.FromString(descriptor.SerializeToString())
    for changing in ("sector_count", "key_epoch", "oldest_key_epoch", "display_name"):
        lasting.ClearField(changing)
    return lasting


def open_descriptor(
    anchors: TrustAnchors, signed: broker_pb2.SignedVolumeDescriptor
) -> broker_pb2.VolumeDescriptor:
    """Verify and parse a descriptor; VerificationError `volume.descriptor.…`."""
    anchors.checked(
        lambda anchor: verify_descriptor(
            anchor, descriptor=signed.descriptor, signature=signed.signature
        )
    )
    try:
        return broker_pb2.VolumeDescriptor.FromString(signed.descriptor)
    except DecodeError as error:
        raise VerificationError(
            "volume.descriptor.malformed", "the volume descriptor can't be parsed"
        ) from error
