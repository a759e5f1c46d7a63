"""Proofs of the calls that a role of this node makes (sealane.crypto.call_proof).

A server is asked for the call key once per channel. The key is opened only if it differs from the
known one, because a KEM key in a TPM takes tens of milliseconds. A server that has restarted, or
has forgotten the key, reports that; the key is then requested and the call repeated once. The first
call was refused before it did anything, so the repetition needs no request id.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc

from sealane.crypto.call_proof import CallEnds, CallProver
from sealane.crypto.kem import KemKey
from sealane.daemon.runtime.authorizers import PROOF_KEY, UNPROVED
from sealane.errors import UnavailableError
from sealane.protocol.status import REASON_KEY, error_of
from sealane.protocol.v1 import calls_pb2
from sealane.protocol.v1.calls_pb2_grpc import CallKeysStub

SERVERS_MAX: Final = 1024
"""Servers whose keys are kept; beyond that, the least recently called one is asked again."""
KEY_SECONDS: Final = 10.0
"""How long a call without a timeout of its own waits for a key."""
_REPEATED: Final = {"call.proof.unknown_key", "call.proof.stale"}


class _Server:
    """State of one server. One call at a time asks it, for all calls that wait."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.prover: CallProver | None = None
        # Numbers of the last question begun, and of the last one answered.
        self.begun = 0
        self.answered = 0


class CallProofs:
    """The call keys of one role, `caller` (SPIFFE id), in the process `incarnation`."""

    def __init__(self, *, caller: str, incarnation: bytes, kem: KemKey) -> None:
        self._caller = caller
        self._incarnation = incarnation
        self._kem = kem
        self._servers: OrderedDict[str, _Server] = OrderedDict()
        # A key that is forgotten and opened again must not be used with an earlier counter value.
        self._counted = 0

    def interceptors(self, server: str) -> "ChannelProofs":
        """Return the interceptors that prove the calls of a new channel to `server` (SPIFFE id)."""
        return ChannelProofs(self, server)

    async def prover(
        self, server: str, channel: grpc.aio.Channel, *, is_confirmed: bool
    ) -> CallProver:
        """Return the key for `server`, which is asked over `channel` unless `is_confirmed`."""
        known = self._servers.setdefault(server, _Server())
        self._servers.move_to_end(server)
        if len(self._servers) > SERVERS_MAX:
            self._forget(self._servers.popitem(last=False)[1])
        if is_confirmed and known.prover is not None:
            return known.prover
        arrived = known.begun
        async with known.turn:
            # A question begun after this call arrived answers this call, too.
            if known.answered > arrived and known.prover is not None:
                return known.prover
            known.begun += 1
            prover = await self._asked(server, known, channel)
            known.answered = known.begun
            return prover

    async def _asked(self, server: str, known: _Server, channel: grpc.aio.Channel) -> CallProver:
        try:
            answer = await CallKeysStub(channel).GetCallKey(calls_pb2.GetCallKeyRequest())
        except grpc.aio.AioRpcError as error:
            raise error_of(error, peer=server) from error
        if known.prover is not None and known.prover.key_id == answer.key_id:
            return known.prover
        ends = CallEnds(server=server, caller=self._caller, incarnation=self._incarnation)
        opened = await asyncio.to_thread(
            CallProver.open, answer.key_id, answer.sealed, ends=ends, kem=self._kem
        )
        self._forget(known)
        if self._servers.get(server) is not known:
            # Closed or displaced meanwhile: two provers of one key would use a counter value twice.
            opened.close()
            raise UnavailableError("peer.closed", f"the call key of {server} was discarded")
        opened.counter = self._counted
        known.prover = opened
        return opened

    def close(self) -> None:
        """Wipe all keys."""
        while self._servers:
            self._forget(self._servers.popitem()[1])

    def _forget(self, known: _Server) -> None:
        if known.prover is not None:
            self._counted = max(self._counted, known.prover.counter)
            known.prover.close()
            known.prover = None


class ChannelProofs:
    """Interceptors of one channel; set `channel` once it exists."""

    def __init__(self, proofs: CallProofs, server: str) -> None:
        self.channel: grpc.aio.Channel | None = None
        self._proofs = proofs
        self._server = server
        self._is_confirmed = False

    def both(self) -> Sequence[grpc.aio.ClientInterceptor]:
        """Return the interceptors for unary and for streamed responses."""
        return [_UnaryProofs(self), _StreamProofs(self)]

    def doubt(self) -> None:
        """Ask the server for its key again before the next call."""
        self._is_confirmed = False

    async def proved(self, details: Any, request: Any) -> Any:
        """Return the details of a call with its proof added."""
        if self.channel is None:
            raise UnavailableError("peer.closed", f"the channel to {self._server} is not open")
        prover = await self._proofs.prover(
            self._server, self.channel, is_confirmed=self._is_confirmed
        )
        self._is_confirmed = True
        # No await in between: the key is wiped when another one replaces it.
        proof = prover.prove(_method(details), request.SerializeToString())
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata[PROOF_KEY] = proof
        return details._replace(metadata=metadata)

    @contextlib.asynccontextmanager
    async def in_time(self, seconds: float) -> AsyncIterator[None]:
        """Limit the time of the block; UnavailableError `peer.deadline_exceeded`."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise UnavailableError(
                "peer.deadline_exceeded", f"{self._server} gave no call key in time"
            ) from error


class _UnaryProofs(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, channel: ChannelProofs) -> None:
        self._channel = channel

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        if _method(client_call_details) in UNPROVED:
            return await continuation(client_call_details, request)
        deadline = _Deadline(client_call_details.timeout)
        call = await self._made(continuation, client_call_details, request, deadline)
        if await _is_repeated(call) and not deadline.is_over:
            self._channel.doubt()
            call = await self._made(continuation, client_call_details, request, deadline)
        return call

    async def _made(
        self, continuation: Any, details: Any, request: Any, deadline: "_Deadline"
    ) -> Any:
        async with self._channel.in_time(deadline.left or KEY_SECONDS):
            proved = await self._channel.proved(details, request)
        return await continuation(proved._replace(timeout=deadline.left), request)


class _StreamProofs(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, channel: ChannelProofs) -> None:
        self._channel = channel

    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        async with self._channel.in_time(client_call_details.timeout or KEY_SECONDS):
            proved = await self._channel.proved(client_call_details, request)
        call = await continuation(proved, request)
        # A reader opens a new stream when one ends; it must not use a key that may be forgotten.
        call.add_done_callback(lambda _: self._channel.doubt())
        return call


class _Deadline:
    """Remaining time of a call's timeout, which covers all steps of the call."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else asyncio.get_running_loop().time() + seconds

    @property
    def left(self) -> float | None:
        """Return the remaining seconds, at least 0.001; None: no limit."""
        if self._end is None:
            return None
        return max(self._end - asyncio.get_running_loop().time(), 0.001)

    @property
    def is_over(self) -> bool:
        """Return whether no time is left."""
        return self._end is not None and asyncio.get_running_loop().time() >= self._end


async def _is_repeated(call: grpc.aio.Call) -> bool:
    """Wait for the end of a call; True: it was refused because its proof was out of date."""
    try:
        if await call.code() is not grpc.StatusCode.PERMISSION_DENIED:
            return False
        trailers = dict(await call.trailing_metadata() or ())
    except asyncio.CancelledError:
        # gRPC doesn't cancel the call when its waiter is cancelled here.
        call.cancel()
        raise
    return trailers.get(REASON_KEY) in _REPEATED


def _method(details: Any) -> str:
    method = details.method
    return method.decode() if isinstance(method, bytes) else str(method)
