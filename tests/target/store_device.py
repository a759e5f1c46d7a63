"""A target's directory as a device, without a broker to decide who serves it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from sealane.daemon.device.anchored_catalogue import AnchoredCatalogue
from sealane.daemon.device.anchors.anchor import Anchor
from sealane.daemon.device.anchors.broker import NoAnchor
from sealane.daemon.device.catalogue import Catalogue, make_directory
from sealane.daemon.device.directory import DEVICE_FILES, Device, DeviceFile
from sealane.daemon.node.peers import ServedDevice


@contextlib.asynccontextmanager
async def open_device(
    directory: Path, anchor: Anchor | None = None, *, is_believed: bool = True
) -> AsyncIterator[tuple[Device, AnchoredCatalogue]]:
    """Open `directory` with this anchor; default: none."""
    make_directory(directory)
    file = DeviceFile(directory)
    device = Device(
        ServedDevice(device_id=file.device_id, fencing_epoch=1),
        file=file,
        secret=bytearray(range(32)),
        anchor=anchor or NoAnchor(),
    )
    try:
        catalogue = AnchoredCatalogue(Catalogue(directory), file=file)
        await catalogue.adopt(device.anchors, is_believed=is_believed)
        yield device, catalogue
    finally:
        await device.close()


def volume_files(directory: Path) -> set[Path]:
    """Return the files of volumes in `directory`, without the device's own."""
    return {path for path in directory.iterdir() if path.name not in DEVICE_FILES}
