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
GATEWAY_AWAY_SECONDS: Final = 6.0
"""How long a gateway must have no queue to count as gone: one that lost them retries before."""
_FLUSH_RETRY_SECONDS: Final = 1.0
_NOT_FLUSHED: Final = "not flushed yet"


class TargetDrain:
    """The drain of one target."""

    services: Sequence[str] = ("sealane.v1.Subsystems",)

    def __init__(
        self, service: StorageService, target: Target, plain: PlainSubsystems, *, own_nqn: str
    ) -> None:
        """Drain `target`; `own_nqn` is how a gateway of the same daemon calls itself."""
        self._service = service
        self._target = target
        self._plain = plain
        self._own_nqn = own_nqn
        self._unflushed = ""

    def begin_drain(self) -> None:
        """Refuse volumes and gateways that aren't here yet; tell hosts of plain namespaces."""
        self._service.admission.known = self._target.users()
        self._service.is_draining = True
        self._plain.set_draining(is_draining=True)
        self._unflushed = _NOT_FLUSHED

    def uses(self) -> list[Use]:
        """Return volumes that gateways have open, busy plain namespaces, and unflushed stores."""
        volumes = [
            Use(
                role=Role.TARGET,
                name=f"volumes/{volume_id}",
                detail=f"open at {host_nqn}",
                # What keeps that gateway is a use of its own.
                ends=host_nqn == self._own_nqn,
            )
            for volume_id, host_nqn in sorted(self._target.users())
        ]
        plain = [
            Use(
                role=Role.TARGET,
                name=nqn,
                detail=f"host {host_nqn} still does I/O",
                ends=False,
            )
            for nqn, host_nqn in self._plain.busy(SETTLE_SECONDS)
        ]
        if self._unflushed and not volumes and not plain:
            ends = not self._is_failing
            return [Use(role=Role.TARGET, name="stores", detail=self._unflushed, ends=ends)]
        return volumes + plain

    async def drain(self, seconds_left: Callable[[], float]) -> None:
        """Wait until gateways and hosts have left, whatever time is left; then flush the stores.

        Gateways that were here may come back, whatever it has returned.
        """
        self._unflushed = _NOT_FLUSHED
        await asyncio.sleep(min(SETTLE_SECONDS, seconds_left()))
        clock = asyncio.get_running_loop().time
        is_used, left_at = bool(self._target.volume_ids), clock()
        while self._unflushed:
            if self._target.users() or self._plain.busy(SETTLE_SECONDS):
                is_used, left_at = True, clock()
            elif not is_used or clock() - left_at > GATEWAY_AWAY_SECONDS:
                await self._flush()
            await asyncio.sleep(_FLUSH_RETRY_SECONDS if self._is_failing else POLL_SECONDS)

    @property
    def _is_failing(self) -> bool:
        return self._unflushed not in {"", _NOT_FLUSHED}

    async def _flush(self) -> None:
        errors = {**await self._target.flush(), **await self._plain.flush()}
        problems = "; ".join(f"{name} can't be flushed: {why}" for name, why in errors.items())
        if problems and problems != self._unflushed:
            get_logger().warning("stores_not_flushed", detail=problems)
        self._unflushed = problems

    async def end_drain(self) -> None:
        """Serve everybody again."""
        self._service.admission.known = None
        self._service.is_draining = False
        self._plain.set_draining(is_draining=False)
        self._unflushed = ""
