"""The sockets of a fabric for jobs of other users: calls and rings (docs/operate/jobs.md).

Both are open to the users of `fabric.jobs`, whom their doors tell apart by the kernel's word. Calls
reach a gRPC server of their own that has no operator's call, each as a call of its user.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from sealane.daemon.config import JobsConfig
from sealane.daemon.fabric import ring_socket
from sealane.daemon.fabric.admitted import AdmittedUsers, RefusedCallers
from sealane.daemon.fabric.job_calls import JobCalls
from sealane.daemon.fabric.service import FabricService
from sealane.daemon.fabric.servicer import SessionsServicer
from sealane.daemon.node.servicer import NodesServicer
from sealane.daemon.runtime.directories import JobsDirectory
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.origins import Origins
from sealane.daemon.runtime.servers import local_door, new_job_server, running
from sealane.protocol.v1 import nodes_pb2_grpc, sessions_pb2_grpc

ANY_USER = 0o666
"""Mode of both sockets: their doors decide, and the directory, where the operator narrowed it."""


@contextlib.asynccontextmanager
async def job_sockets(
    config: JobsConfig,
    service: FabricService,
    node: NodesServicer,
    *,
    inner: Path,
    metrics: Metrics,
) -> AsyncIterator[JobsDirectory]:
    """Serve jobs until the block is left; `inner` is a path in a directory closed to them.

    Raises UsageError or UnavailableError if the directory or a path in it can't be served.
    """
    directory = JobsDirectory(Path(config.run_dir))
    directory.prepare()
    users = AdmittedUsers(uids=config.uids, groups=config.groups)
    refused = RefusedCallers(metrics)
    origins = Origins()
    server = new_job_server(metrics, JobCalls(metrics))
    sessions_pb2_grpc.add_SessionsServicer_to_server(
        # A relative path: a container may have the directory elsewhere.
        SessionsServicer(service, ring_socket=directory.ring_socket.name, user_of=origins.user_of),
        server,
    )
    nodes_pb2_grpc.add_NodesServicer_to_server(node, server)
    async with (
        ring_socket.serve(
            directory.ring_socket,
            service.grants.claim,
            service.jobs.introduce,
            admit=users.admit,
            note_refused=refused.note,
            mode=ANY_USER,
        ),
        local_door(
            server,
            directory.socket,
            inner=inner,
            admit=users.admit,
            note_refused=refused.note,
            mode=ANY_USER,
            relayed=origins.relay,
        ),
        running(server),
    ):
        yield directory
