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
        self._service.put_aside.forget()
        self._gateway.set_access(AnaState.INACCESSIBLE)
        for volume_id in self._service.attachments:
            self._service.events.report(volume_id, "draining")

    def uses(self) -> list[Use]:
        """Return the volumes that are exported or being changed."""
        service = self._service
        changing = [
            Use(
                role=Role.GATEWAY,
                name=f"volumes/{volume_id}",
                detail="is being flushed" if volume_id in service.put_aside else "is being changed",
                ends=True,
            )
            for volume_id in service.changing
        ]
        exported = [
            self._use(volume_id, attached)
            for volume_id, attached in service.attachments.items()
            if volume_id not in service.changing
        ]
        return exported + changing

    async def drain(self, seconds_left: Callable[[], float]) -> None:
        """Put each volume aside once its host is silent, busy ones when the time is over."""
        service = self._service
        await asyncio.sleep(min(SETTLE_SECONDS, seconds_left()))
        while service.attachments or service.changing:
            for volume_id, attached in service.attachments.items():
                is_silent = not self._is_busy(attached)
                may_end = not self._is_stuck(attached) and (is_silent or not seconds_left())
                if may_end and volume_id not in service.changing:
                    service.put_aside.start(volume_id)
            await asyncio.sleep(POLL_SECONDS)

    async def end_drain(self) -> None:
        """Export the volumes again that were put aside, and take attachments."""
        await self._service.put_aside.ended()
        self._gateway.set_access(AnaState.OPTIMIZED)
        self._service.serving.set()

    def _is_busy(self, attached: Attached) -> bool:
        idle = self._gateway.idle_seconds(attached.port)
        return idle is not None and idle < SETTLE_SECONDS

    def _is_stuck(self, attached: Attached) -> bool:
        """Return whether commands of a silent host are unanswered.

        The host would repeat them on another path, and the target could still carry them out
        afterwards.
        """
        return not self._is_busy(attached) and self._gateway.unanswered(attached.port) > 0

    def _use(self, volume_id: str, attached: Attached) -> Use:
        problem = self._service.put_aside.problem(volume_id)
        is_stuck = self._is_stuck(attached)
        if is_stuck:
            state = "waits for the target"
        else:
            state = "still does I/O" if self._is_busy(attached) else "is silent"
        return Use(
            role=Role.GATEWAY,
            name=f"volumes/{volume_id}",
            detail=problem or f"host {attached.host_nqn} {state}",
            ends=not problem and not is_stuck,
        )
