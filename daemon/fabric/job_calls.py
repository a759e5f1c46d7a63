"""Which calls jobs may make: this table is all that their socket answers."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import VerificationError
from sealane.protocol.status import REASON_KEY, status_of

JOB_CALLS: Final = frozenset(
    {
        "/sealane.v1.Sessions/ListenSession",
        "/sealane.v1.Sessions/OpenSession",
        "/sealane.v1.Sessions/GetSession",
        "/sealane.v1.Sessions/ListSessions",
        "/sealane.v1.Sessions/WatchSession",
        "/sealane.v1.Sessions/CloseSession",
        "/sealane.v1.Sessions/GetFabric",
        "/sealane.v1.Nodes/GetNode",
    }
)


class JobCalls(grpc.aio.ServerInterceptor):
    """Refuses every other call, whatever else the server could answer."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler, or one that refuses."""
        method = handler_call_details.method
        if method in JOB_CALLS:
            return await continuation(handler_call_details)

        async def refuse(_request: bytes, context: Any) -> None:
            error = VerificationError(
                "call.operator.refused",
                "this call is not served to jobs: use the daemon's own socket",
            )
            self._metrics.refusals.labels(error.reason).inc()
            get_logger().warning("call_refused", reason=error.reason)
            await context.abort(
                status_of(error),
                error.args[0],
                trailing_metadata=((REASON_KEY, error.reason),),
            )

        return grpc.unary_unary_rpc_method_handler(refuse)
