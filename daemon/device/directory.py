"""A target's store directory as a device: its id, its secret, its anchors (devices.md)."""

import asyncio
import uuid
from pathlib import Path
from typing import Final

from sealane.crypto.encoding import canonical_json, parse_canonical_json
from sealane.crypto.exchange import wipe
from sealane.crypto.keys import derive_tree_secret
from sealane.daemon.device.anchors.anchor import Anchor
from sealane.daemon.device.anchors.broker import NoAnchor
from sealane.daemon.device.anchors.device_anchors import DeviceAnchors
from sealane.daemon.device.anchors.lock import OwnerLock
from sealane.daemon.node.peers import ServedDevice
from sealane.daemon.runtime.files import read_bounded, write_durably
from sealane.daemon.runtime.reserve_file import RESERVE_NAME
from sealane.daemon.runtime.state_format import NEWER
from sealane.errors import Error, UnavailableError, UsageError, VerificationError

DEVICE_NAME: Final = "device"
DEVICE_FILES: Final = frozenset(
    {DEVICE_NAME, f"{DEVICE_NAME}.lock", f"{DEVICE_NAME}.new", RESERVE_NAME}
)
_BYTES_MAX: Final = 256
_OPENINGS_MAX: Final = (1 << 53) - 1


class DeviceFile:
    """`<directory>/device`: the device's UUID, and how often it was opened. Its calls block.

    One process holds it from creation to `release`. It is neither secret nor authentic: changing it
    presents another device, or one whose anchor doesn't match.
    """

    def __init__(self, directory: Path) -> None:
        """Read the file, or create it with a new UUID.

        UnavailableError `anchor.in_use`, `device.failed`; errors of `parse_device`.
        """
        self._path = directory / DEVICE_NAME
        self._lock_path = directory / f"{DEVICE_NAME}.lock"
        self._lock = OwnerLock(self._lock_path)
        try:
            self.device_id, self.openings = self._read() or (uuid.uuid4(), 0)
            self.write(self.openings)
        except BaseException:
            self._lock.release()
            raise

    def hold_again(self) -> None:
        """Hold the file again after `release`; errors as for the first time.

        VerificationError `device.malformed` also if it now names another device.
        """
        self._lock = OwnerLock(self._lock_path)
        try:
            self.openings = self._read_again()
        except BaseException:
            self._lock.release()
            raise

    def write(self, openings: int) -> None:
        """Write how often the device was opened, durably."""
        content = canonical_json({"device_id": str(self.device_id), "openings": openings})
        try:
            write_durably(self._path, content)
        except OSError as error:
            raise self._failed(error) from error
        self.openings = openings

    def release(self) -> None:
        """Release the file for the next process."""
        self._lock.release()

    def _read_again(self) -> int:
        found = self._read()
        if found is None or found[0] != self.device_id:
            raise VerificationError("device.malformed", f"{self._path}: names a different device")
        return found[1]

    def _read(self) -> tuple[uuid.UUID, int] | None:
        return _read_device(self._path)

    def _failed(self, error: OSError) -> UnavailableError:
        return _failed(self._path, error)


def check_device(directory: Path) -> None:
    """Raise as `DeviceFile` would if the directory's file names no device; changes nothing."""
    _read_device(directory / DEVICE_NAME)


def _read_device(path: Path) -> tuple[uuid.UUID, int] | None:
    try:
        content = read_bounded(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _failed(path, error) from error
    return parse_device(content, source=str(path))


def _failed(path: Path, error: OSError) -> UnavailableError:
    return UnavailableError("device.failed", f"{path}: {error.strerror}")


def parse_device(content: bytes, *, source: str) -> tuple[uuid.UUID, int]:
    """Return UUID and number of openings; UsageError `device.format` for those of a later release.

    VerificationError `device.malformed`.
    """
    found = parse_canonical_json(
        content, bytes_max=_BYTES_MAX, what=source, reason="device.malformed"
    )
    name, openings, newer = (found.get(key) for key in ("device_id", "openings", "format"))
    # Format 1 doesn't name itself.
    if isinstance(newer, int) and newer > 1:
        raise UsageError(
            "device.format",
            f"{source}: a device of format {newer}, and this release reads 1: {NEWER}",
        )
    try:
        device_id = uuid.UUID(name) if isinstance(name, str) else None
    except ValueError:
        device_id = None
    if (
        device_id is None
        or str(device_id) != name
        or not isinstance(openings, int)
        or isinstance(openings, bool)
        or not 0 <= openings < _OPENINGS_MAX
        or found.keys() != {"device_id", "openings"}
    ):
        raise VerificationError("device.malformed", f"{source}: does not name a device")
    return device_id, openings


class Device:
    """A device that this process may serve until it is lost or closed."""

    def __init__(
        self,
        served: ServedDevice,
        *,
        file: DeviceFile,
        secret: bytearray,
        anchor: Anchor,
        anchor_seconds: float = 0.0,
        is_believed: bool = False,
    ) -> None:
        """Take over `file`, `secret` (32 bytes) and `anchor`; `close` releases them.

        See `DeviceAnchors` for `anchor_seconds`. `is_believed`: the operator accepts the state as
        found.
        """
        self.file = file
        self.anchors_rarely = anchor_seconds > 0
        """Whether the anchor wears out: then only checkpoints are anchored, not every flush."""
        self._anchor_seconds = anchor_seconds
        self._open(served, secret=secret, anchor=anchor, is_believed=is_believed)

    def reopen(
        self, served: ServedDevice, *, secret: bytearray, anchor: Anchor, is_believed: bool
    ) -> None:
        """Open the device again after `close`, with its file held; takes over the arguments."""
        if not self._is_closed:
            raise UsageError("device.state", f"device {self.device_id} is already open")
        self._open(served, secret=secret, anchor=anchor, is_believed=is_believed)

    def _open(
        self, served: ServedDevice, *, secret: bytearray, anchor: Anchor, is_believed: bool
    ) -> None:
        self.is_believed = is_believed
        self.served = served
        self.is_anchored = not isinstance(anchor, NoAnchor)
        self._loss: asyncio.Future[Error] = asyncio.get_running_loop().create_future()
        self.anchors = DeviceAnchors(anchor, spacing_seconds=self._anchor_seconds, lost=self.lose)
        self._secret = secret
        self._is_closed = False

    @property
    def device_id(self) -> uuid.UUID:
        """Id of the device."""
        return self.served.device_id

    def tree_secret(self, volume_id: uuid.UUID, *, generation: int) -> bytearray:
        """Return the 32-byte secret for a volume's tree, MAC and log keys; the caller wipes it.

        UnavailableError `device.closed`.
        """
        if self._is_closed:
            raise UnavailableError("device.closed", f"device {self.device_id} is closed")
        return derive_tree_secret(self._secret, volume_id=volume_id, generation=generation)

    def lose(self, error: Error) -> None:
        """Record that another process has the device, or that it can't be anchored any longer."""
        if not self._loss.done():
            self._loss.set_result(error)

    @property
    def loss(self) -> Error | None:
        """Reason for which it was lost, or None."""
        return self._loss.result() if self._loss.done() else None

    async def wait_lost(self) -> Error:
        """Wait until it is lost; return the reason."""
        return await asyncio.shield(self._loss)

    async def close(self) -> None:
        """Anchor requested states if possible, wipe the secret, and release the directory."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self.anchors.close()
        finally:
            wipe(self._secret)
            self.file.release()
