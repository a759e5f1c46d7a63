"""Drain of a gateway: hosts are told to use another path, then its volumes are put aside.

A volume that is put aside is flushed and closed, and stays attached: its host is asked to connect
later, as after a restart.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from sealane.crypto.roles import Role
from sealane.daemon.gateway.attached import Attached
from sealane.daemon.gateway.data_path import Gateway
from sealane.daemon.gateway.volumes import VolumeService
from sealane.daemon.node.drain import POLL_SECONDS, Use
from sealane.protocol.nvme.constants import AnaState

SETTLE_SECONDS: Final = 1.0
"""How long a host must be silent on its I/O queues: so long it may take to act on an event."""


class GatewayDrain:
    """The drain of one gateway."""

    services: Sequence[str] = ("sealane.v1.Volumes",)

    def __init__(self, service: VolumeService, gateway: Gateway) -> None:
        self._service = service
        self._gateway = gateway

    def begin_drain(self) -> None:
        """Refuse attachments, and tell all hosts that their namespace is inaccessible here."""
        self._service.serving.clear()
        self._gateway.set_access(AnaState.INACCESSIBLE)
        for volume_id in self._service.attachments:
            self._service.events.report(volume_id, "draining")

    def uses(self) -> list[Use]:
        """Return the volumes that are exported or being changed."""
        service = self._service
        exported = [
            Use(role=Role.GATEWAY, name=f"volumes/{volume_id}", detail=self._detail(attached))
            for volume_id, attached in service.attachments.items()
        ]
        changing = [
            Use(role=Role.GATEWAY, name=f"volumes/{volume_id}", detail="is being changed")
            for volume_id in service.changing
            if volume_id not in service.attachments
        ]
        return exported + changing

    async def drain(self, seconds_left: Callable[[], float]) -> None:
        """Put each volume aside once its host is silent, all of them when the time is over."""
        await asyncio.sleep(min(SETTLE_SECONDS, seconds_left()))
        while self._service.attachments or self._service.changing:
            ready = [
                volume_id
                for volume_id, attached in self._service.attachments.items()
                if not self._is_busy(attached) or not seconds_left()
            ]
            await asyncio.gather(*map(self._service.put_aside, ready))
            await asyncio.sleep(POLL_SECONDS)

    async def end_drain(self) -> None:
        """Export the volumes again that were put aside, and take attachments."""
        self._gateway.set_access(AnaState.OPTIMIZED)
        self._service.serving.set()

    def _is_busy(self, attached: Attached) -> bool:
        idle = self._gateway.idle_seconds(attached.port)
        return idle is not None and idle < SETTLE_SECONDS

    def _detail(self, attached: Attached) -> str:
        state = "still does I/O" if self._is_busy(attached) else "is silent"
        return f"host {attached.host_nqn} {state}"
