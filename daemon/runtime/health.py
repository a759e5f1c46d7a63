"""gRPC health of a daemon and its services."""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

OPTIONAL = frozenset({"sealane.v1.Offload", "targets"})
"""Services whose state isn't the daemon's: another start of it would change nothing for them."""

_STATUS = health_pb2.HealthCheckResponse


class Health:
    """The health service; the daemon itself ("") is healthy if the others but `OPTIONAL` are."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()
        self._unhealthy: set[str] = set()

    async def serve(self, server: grpc.aio.Server, services: Sequence[str]) -> None:
        """Add the service to `server`, with the health of `services`."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        for name in services:
            await self._set(name, is_healthy=name not in self._unhealthy)
        await self._set("", is_healthy=self._unhealthy <= OPTIONAL)

    async def report(self, services: Sequence[str], is_healthy: bool) -> None:
        """Set the health of `services`."""
        if is_healthy:
            self._unhealthy.difference_update(services)
        else:
            self._unhealthy.update(services)
        for name in services:
            await self._set(name, is_healthy=is_healthy)
        await self._set("", is_healthy=self._unhealthy <= OPTIONAL)

    async def stop(self) -> None:
        """Report NOT_SERVING for everything from now on."""
        await self._servicer.enter_graceful_shutdown()

    async def _set(self, name: str, *, is_healthy: bool) -> None:
        await self._servicer.set(name, _STATUS.SERVING if is_healthy else _STATUS.NOT_SERVING)
