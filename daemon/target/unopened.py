"""Volumes of an earlier process that a target couldn't open, each with the reason."""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sealane.errors import Error, UnavailableError
from sealane.protocol.kinds import VolumeMode
from sealane.protocol.v1 import broker_pb2


@dataclass(frozen=True, slots=True)
class _Unopened:
    error: Error
    descriptor: broker_pb2.VolumeDescriptor | None

    @property
    def may_pass(self) -> bool:
        """True if opening it again may succeed: it is neither damaged nor rolled back."""
        return isinstance(self.error, UnavailableError)


class Unopened:
    """The volumes by their ids; read from any thread."""

    def __init__(self, report: Callable[[str, Error], None]) -> None:
        """Call `report` with each volume, and each new reason of one."""
        self._report = report
        self._volumes: dict[str, _Unopened] = {}

    @contextlib.contextmanager
    def kept(
        self, volume_id: str, descriptor: broker_pb2.VolumeDescriptor | None = None
    ) -> Iterator[None]:
        """Keep the volume if the block, which opens it, raises an Error; otherwise forget it."""
        try:
            yield
        except Error as error:
            before = self._volumes.get(volume_id)
            self._volumes[volume_id] = _Unopened(error, descriptor)
            if before is None or before.error.reason != error.reason:
                self._report(volume_id, error)
        else:
            self.forget(volume_id)

    def forget(self, volume_id: str) -> None:
        """Forget a volume: it is open, or deleted."""
        self._volumes.pop(volume_id, None)

    def clear(self) -> None:
        """Forget all volumes."""
        self._volumes.clear()

    def ids(self) -> Sequence[uuid.UUID]:
        """Return the ids of all volumes."""
        return [uuid.UUID(volume_id) for volume_id in [*self._volumes]]

    def passing(self) -> Mapping[str, broker_pb2.VolumeDescriptor]:
        """Return the volumes that may be opened later."""
        return {
            volume_id: unopened.descriptor
            for volume_id, unopened in self._volumes.items()
            if unopened.descriptor is not None and unopened.may_pass
        }

    def is_of(self, tenant: str, volume_id: str) -> bool:
        """Return whether the volume is here and belongs to the tenant."""
        found = self._volumes.get(volume_id)
        return (
            found is not None and found.descriptor is not None and found.descriptor.tenant == tenant
        )

    def check(self, tenant: str, volume_id: str) -> None:
        """Raise why a tenant's volume isn't open, if that may pass."""
        found = self._volumes.get(volume_id)
        if found is not None and self.is_of(tenant, volume_id) and found.may_pass:
            raise UnavailableError(found.error.reason, str(found.error.args[0]))

    def statistics(self) -> dict[tuple[str, ...], dict[str, int]]:
        """Return that these volumes failed, by volume and mode, for the metrics."""
        found: dict[tuple[str, ...], dict[str, int]] = {}
        for volume_id, unopened in [*self._volumes.items()]:
            mode = "" if unopened.descriptor is None else unopened.descriptor.mode
            found[volume_id, mode or VolumeMode.REMOTE] = {"failed": 1}
        return found
