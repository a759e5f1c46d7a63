"""Calls to the members of an etcd cluster: fail-over, timeouts, and detection of a rollback.

A call is tried at one member, then at the next, until one answers or time is up. Every answer is
linearizable and carries the cluster's revision. So an answer with a lower revision than was known
when the call was sent comes from a rolled-back cluster.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import grpc

from sealane.daemon.runtime.grpc_options import NO_PROXY
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.etcd import rpc_pb2, rpc_pb2_grpc

ATTEMPT_SECONDS: Final = 2.0
CALL_SECONDS: Final = 10.0

_PAUSE_SECONDS: Final = 0.05
# A member that has lost its cluster then reports that at once instead of letting calls wait.
_METADATA: Final = (("hasleader", "true"),)
_OPTIONS: Final = (
    NO_PROXY,
    # The outcome of a call that may have been executed is determined here; gRPC must not resend it.
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
# Refused before anything was done; any other call may have been executed, or may be later.
_REFUSED: Final = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}


class _Answer(Protocol):
    @property
    def header(self) -> rpc_pb2.ResponseHeader: ...


_A = TypeVar("_A", bound=_Answer)


class UnknownOutcomeError(Exception):
    """A call got no answer: it may have been executed, or may still be."""


@dataclass(frozen=True, slots=True)
class Member:
    """One endpoint and its calls."""

    endpoint: str
    channel: grpc.aio.Channel
    range: Any
    txn: Any
    watch: Any


class Cluster:
    """The members; calls go to the one that answered last."""

    def __init__(
        self, endpoints: Sequence[str], *, credentials: grpc.ChannelCredentials | None
    ) -> None:
        self._members = [_member(endpoint, credentials) for endpoint in endpoints]
        self._at = 0
        self._cluster_id = 0
        self._revision = 0
        self._failure: Error | None = None

    async def close(self) -> None:
        """Close the connections."""
        for member in self._members:
            await member.channel.close()

    @property
    def member(self) -> Member:
        """Member that the next call goes to."""
        return self._members[self._at]

    @property
    def failure(self) -> Error | None:
        """The error passed to `fail`."""
        return self._failure

    def leave(self, member: Member) -> None:
        """Send the next call to a member other than this one."""
        if self.member is member:
            self._at = (self._at + 1) % len(self._members)

    def fail(self, error: Error) -> Error:
        """Make all later calls fail with `error`."""
        self._failure = error
        return error

    def check(self) -> None:
        """Raise the error passed to `fail`."""
        if self._failure is not None:
            raise type(self._failure)(self._failure.reason, self._failure.args[0])

    async def range(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """Read from any member that answers; UnavailableError `broker.store.timeout`."""
        deadline = asyncio.get_running_loop().time() + CALL_SECONDS
        while True:
            try:
                answer: rpc_pb2.RangeResponse = await self._once("range", request)
            except UnknownOutcomeError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise _timed_out(error) from error
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                return answer

    async def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """Send a transaction to one member, once; UnknownOutcomeError if it doesn't answer."""
        answer: rpc_pb2.TxnResponse = await self._once("txn", request)
        return answer

    async def _once(self, method: str, request: Any) -> Any:
        self.check()
        member, known = self.member, self._revision
        try:
            answer = await getattr(member, method)(
                request, timeout=ATTEMPT_SECONDS, metadata=_METADATA
            )
        except grpc.aio.AioRpcError as error:
            raise self.explained(error, member) from error
        self._note(answer, known)
        return answer

    def explained(self, error: grpc.aio.AioRpcError, member: Member) -> Exception:
        """Return the error to raise for a failed call, and switch to another member."""
        text = f"etcd at {member.endpoint}: {error.details()}"
        if error.code() == grpc.StatusCode.OUT_OF_RANGE:
            return UnavailableError("broker.store.compacted", text)
        if error.code() in _REFUSED:
            return UnavailableError("broker.store.failed", text)
        self.leave(member)
        return UnknownOutcomeError(text)

    def watch(self, member: Member) -> Any:
        """Open a watch stream at a member."""
        self.check()
        return member.watch(metadata=_METADATA)

    def _note(self, answer: _A, known: int) -> None:
        header = answer.header
        if self._cluster_id not in {0, header.cluster_id}:
            raise self.fail(
                VerificationError(
                    "broker.store.rolled_back",
                    f"etcd cluster {header.cluster_id:x} answers instead of {self._cluster_id:x}",
                )
            )
        if header.revision < known:
            raise self.fail(
                VerificationError(
                    "broker.store.rolled_back",
                    f"etcd is at revision {header.revision}, but was at {known}: it was rolled "
                    "back",
                )
            )
        self._cluster_id = header.cluster_id
        self._revision = max(self._revision, header.revision)


def _member(endpoint: str, credentials: grpc.ChannelCredentials | None) -> Member:
    channel = (
        grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
        if credentials is None
        else grpc.aio.secure_channel(endpoint, credentials, options=_OPTIONS)
    )
    store = rpc_pb2_grpc.KVStub(channel)
    watch = rpc_pb2_grpc.WatchStub(channel)
    return Member(endpoint, channel, range=store.Range, txn=store.Txn, watch=watch.Watch)


def _timed_out(error: Exception) -> UnavailableError:
    return UnavailableError("broker.store.timeout", f"no answer in {CALL_SECONDS:.0f} s: {error}")
