"""The call keys that a server has issued to its callers.

Keys are created on request, in memory, and end with the server. `sealane.crypto.call_proof`
explains their purpose; `sealane.daemon.runtime.calls` checks each call.
"""

# ruff: noqa: N802 - names and arguments are those of the generated base class

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import grpc

from sealane.crypto.call_proof import CallKey, unknown_key
from sealane.crypto.certificates import Subject
from sealane.errors import VerificationError
from sealane.protocol.v1 import calls_pb2, calls_pb2_grpc

CALLERS_MAX: Final = 4096
"""Callers with a key; beyond that, the one that called least recently must request a new key."""

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class CallKeys:
    """The keys of one life of the server with SPIFFE id `server`: one for each role of a node.

    A role's new incarnation replaces the previous one, whose process has ended.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._keys: OrderedDict[str, tuple[Subject, CallKey]] = OrderedDict()

    def key_for(self, caller: Subject) -> CallKey:
        """Return the caller's key, the same at each request; create it if there is none."""
        known = self._keys.get(caller.spiffe_id)
        if known is not None and known[0] == caller:
            self._keys.move_to_end(caller.spiffe_id)
            return known[1]
        key = CallKey(caller, server=self._server)
        if known is not None:
            known[1].close()
        self._keys[caller.spiffe_id] = (caller, key)
        self._keys.move_to_end(caller.spiffe_id)
        if len(self._keys) > CALLERS_MAX:
            _, (_, oldest) = self._keys.popitem(last=False)
            oldest.close()
        return key

    def check(self, caller: Subject, proof: object, *, method: str, request_digest: bytes) -> None:
        """Raise VerificationError `call.proof.…` unless `proof` is for this call and unused."""
        if not isinstance(proof, bytes):
            raise VerificationError(
                "call.proof.missing", f"{caller.spiffe_id} called {method} without a proof"
            )
        known = self._keys.get(caller.spiffe_id)
        if known is None or known[0] != caller:
            raise unknown_key(caller.spiffe_id)
        known[1].check(proof, method=method, request_digest=request_digest)
        self._keys.move_to_end(caller.spiffe_id)

    def close(self) -> None:
        """Wipe all keys."""
        while self._keys:
            _, (_, key) = self._keys.popitem()
            key.close()


class CallKeysServicer(calls_pb2_grpc.CallKeysServicer):
    """Issues keys to attested callers."""

    def __init__(self, keys: CallKeys, caller: Callable[[_Context], Subject]) -> None:
        self._keys = keys
        self._caller = caller

    async def GetCallKey(
        self,
        request: calls_pb2.GetCallKeyRequest,  # noqa: ARG002
        context: _Context,
    ) -> calls_pb2.SealedCallKey:
        """Return the caller's key, sealed to the caller's KEM key."""
        key = self._keys.key_for(self._caller(context))
        return calls_pb2.SealedCallKey(key_id=key.key_id, sealed=key.sealed)
