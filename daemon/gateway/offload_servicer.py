"""gRPC service `Offload` of the gateway, on the Unix socket: for operators."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

from typing import Final

from sealane.daemon.gateway.accelerator import CardKeeper, CardState
from sealane.daemon.gateway.offload import OffloadService
from sealane.daemon.runtime.authorizers import Context
from sealane.protocol.v1 import offload_pb2, offload_pb2_grpc

_STATES: Final = {
    CardState.IN_USE: offload_pb2.Accelerator.IN_USE,
    CardState.NOT_IN_USE: offload_pb2.Accelerator.NOT_IN_USE,
    CardState.DRAINING: offload_pb2.Accelerator.DRAINING,
    CardState.DRAINED: offload_pb2.Accelerator.DRAINED,
    CardState.DISABLING: offload_pb2.Accelerator.DISABLING,
    CardState.DISABLED: offload_pb2.Accelerator.DISABLED,
}


class OffloadServicer(offload_pb2_grpc.OffloadServicer):
    """Converts between gRPC messages and `OffloadService`."""

    def __init__(self, service: OffloadService) -> None:
        self._service = service

    async def ListAccelerators(
        self, request: offload_pb2.ListAcceleratorsRequest, context: Context
    ) -> offload_pb2.ListAcceleratorsResponse:
        """Return all cards."""
        return offload_pb2.ListAcceleratorsResponse(
            accelerators=map(_accelerator, self._service.list())
        )

    async def GetAccelerator(
        self, request: offload_pb2.GetAcceleratorRequest, context: Context
    ) -> offload_pb2.Accelerator:
        """Return a card."""
        return _accelerator(self._service.get(request.label))

    async def ProbeAccelerator(
        self, request: offload_pb2.ProbeAcceleratorRequest, context: Context
    ) -> offload_pb2.Accelerator:
        """Check a card without using it."""
        return _accelerator(await self._service.probe(request.label))

    async def EnableAccelerator(
        self, request: offload_pb2.EnableAcceleratorRequest, context: Context
    ) -> offload_pb2.Accelerator:
        """Use a card again."""
        return _accelerator(await self._service.enable(request.label))

    async def DisableAccelerator(
        self, request: offload_pb2.DisableAcceleratorRequest, context: Context
    ) -> offload_pb2.Accelerator:
        """Begin to disable a card."""
        return _accelerator(await self._service.disable(request.label))

    async def DrainAccelerator(
        self, request: offload_pb2.DrainAcceleratorRequest, context: Context
    ) -> offload_pb2.Accelerator:
        """Begin to drain a card."""
        return _accelerator(self._service.drain(request.label))


def _accelerator(keeper: CardKeeper) -> offload_pb2.Accelerator:
    figures = keeper.figures()
    answer = offload_pb2.Accelerator(
        label=keeper.source.label,
        socket=keeper.source.socket,
        state=_STATES[keeper.state],
        volumes=keeper.volume_count,
        jobs=figures["jobs"],
        sectors_sealed=figures["sealed"],
        sectors_inline=figures["inline"],
        refusals=figures["refusals"],
        losses=figures["losses"],
        job_seconds=figures["nanos"] / 1e9,
    )
    if (failure := keeper.failure) is not None:
        answer.reason = failure.reason
        answer.message = str(failure.args[0])
    if (statement := keeper.statement) is not None:
        answer.hardware_id = statement.card_id
        answer.product = statement.product
        answer.firmware_sha256 = statement.firmware
        answer.protected_bus = statement.has_protected_bus
    if (card := keeper.card) is not None:
        answer.depth = card.depth
        answer.key_slots = card.key_slots
    return answer
