"""Drain of a target: plain namespaces become inaccessible, gateways keep what they have open.

A gateway that has a queue when the drain begins goes on, since its hosts have no other way to the
volume; it is waited for. Another gateway, and another volume, is refused.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from sealane.crypto.roles import Role
from sealane.daemon.node.drain import POLL_SECONDS, Use
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.target.control import StorageService
from sealane.daemon.target.data_path import Target
from sealane.daemon.target.subsystems import PlainSubsystems

SETTLE_SECONDS: Final = 1.0
"""How long a host must be silent on its I/O queues to count as gone."""
_FLUSH_RETRY_SECONDS: Final = 1.0


class TargetDrain:
    """The drain of one target."""

    services: Sequence[str] = ("sealane.v1.Subsystems",)

    def __init__(self, service: StorageService, target: Target, plain: PlainSubsystems) -> None:
        self._service = service
        self._target = target
        self._plain = plain
        self._unflushed = ""

    def begin_drain(self) -> None:
        """Refuse volumes and gateways that aren't here yet; tell hosts of plain namespaces."""
        self._service.admission.known = self._target.users()
        self._service.is_draining = True
        self._plain.set_draining(is_draining=True)
        self._unflushed = "not flushed yet"

    def uses(self) -> list[Use]:
        """Return volumes that gateways have open, busy plain namespaces, and unflushed stores."""
        volumes = [
            Use(role=Role.TARGET, name=f"volumes/{volume_id}", detail=f"open at {host_nqn}")
            for volume_id, host_nqn in sorted(self._target.users())
        ]
        plain = [
            Use(role=Role.TARGET, name=nqn, detail=f"host {host_nqn} still does I/O")
            for nqn, host_nqn in self._plain.busy(SETTLE_SECONDS)
        ]
        if self._unflushed and not volumes and not plain:
            return [Use(role=Role.TARGET, name="stores", detail=self._unflushed)]
        return volumes + plain

    async def drain(self, seconds_left: Callable[[], float]) -> None:
        """Wait until gateways and hosts have left, whatever time is left; then flush the stores."""
        await asyncio.sleep(min(SETTLE_SECONDS, seconds_left()))
        while True:
            while self._target.users() or self._plain.busy(SETTLE_SECONDS):  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(POLL_SECONDS)
            # From here on, nobody comes back.
            self._service.admission.known = set()
            try:
                await self._target.flush()
                await self._plain.flush()
            except OSError as error:
                self._unflushed = f"can't be flushed: {error}"
                get_logger().warning("stores_not_flushed", detail=str(error))
                await asyncio.sleep(_FLUSH_RETRY_SECONDS)
            else:
                self._unflushed = ""
                return

    async def end_drain(self) -> None:
        """Serve everybody again."""
        self._service.admission.known = None
        self._service.is_draining = False
        self._plain.set_draining(is_draining=False)
        self._unflushed = ""
