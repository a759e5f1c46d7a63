"""gRPC servicer of a target's plain subsystems (`Subsystems`, Unix socket only)."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

from sealane.daemon.nvme.listener import Listener
from sealane.daemon.runtime.authorizers import Context
from sealane.daemon.target.plain_subsystem import PlainSubsystem
from sealane.daemon.target.subsystems import PlainSubsystems
from sealane.errors import UsageError
from sealane.protocol.v1 import subsystems_pb2, subsystems_pb2_grpc


class SubsystemsServicer(subsystems_pb2_grpc.SubsystemsServicer):
    """Answers `sealanectl subsystem`."""

    def __init__(self, subsystems: PlainSubsystems, listener: Listener) -> None:
        self._subsystems = subsystems
        self._listener = listener

    async def ListSubsystems(
        self, request: subsystems_pb2.ListSubsystemsRequest, context: Context
    ) -> subsystems_pb2.ListSubsystemsResponse:
        """Return every subsystem."""
        return subsystems_pb2.ListSubsystemsResponse(
            subsystems=[self._encode(each) for each in self._subsystems.subsystems]
        )

    async def GetSubsystem(
        self, request: subsystems_pb2.GetSubsystemRequest, context: Context
    ) -> subsystems_pb2.Subsystem:
        """Return one subsystem; UsageError `subsystem.not_found`."""
        for each in self._subsystems.subsystems:
            if each.config.nqn == request.nqn:
                return self._encode(each)
        raise UsageError(
            "subsystem.not_found", f"this target has no plain subsystem {request.nqn!r}"
        )

    def _encode(self, subsystem: PlainSubsystem) -> subsystems_pb2.Subsystem:
        config = subsystem.config
        answer = subsystems_pb2.Subsystem(
            nqn=config.nqn,
            serial=config.serial_number,
            host_nqns=[host.nqn for host in config.hosts],
        )
        for nsid, namespace in subsystem.namespaces.items():
            shown = namespace.config
            answer.namespaces.add(
                nsid=nsid,
                store=shown.store,
                size_bytes=shown.size_bytes,
                uuid=str(shown.name(config.nqn)),
                ana_state=shown.ana_state,
                host_nqns=shown.hosts or [],
                statistics=namespace.native.statistics(),
            )
        for association in self._listener.associations:
            if association.exported is subsystem:
                answer.controllers.add(
                    controller_id=association.controller_id,
                    host_nqn=association.host_nqn,
                    io_queues=len(association.queues),
                    authenticated=(
                        association.admin.is_authenticated
                        and subsystem.secrets_of(association.host_nqn) is not None
                    ),
                )
        return answer
