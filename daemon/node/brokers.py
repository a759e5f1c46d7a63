"""A node's brokers: calls go to the one that answered last, and to the next one if it doesn't.

All brokers of one authority answer alike from one store, so any of them will do. Asking twice is
harmless: what registers or grants carries a request id. A lease is granted by one broker alone; if
its answer is lost, another grants another one, and the first is burned.
"""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import grpc

from sealane.crypto.roles import Role
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node.identity import POLICY_CHANGED, Identity
from sealane.daemon.runtime.calls import ATTEST_AGAIN_KEY
from sealane.errors import UnavailableError, VerificationError

RENEWAL_SECONDS: Final = 10.0
"""How long a call waits for this node to attest under a new policy."""

_Result = TypeVar("_Result")


class Brokers:
    """The brokers that the configuration names, called as one role of this node."""

    def __init__(self, config: EnrolmentConfig, identity: Identity) -> None:
        self._brokers = config.brokers
        self._identity = identity
        self._preferred = 0

    async def call(self, call: Callable[[grpc.aio.Channel], Awaitable[_Result]]) -> _Result:
        """Make `call` at one broker after the other until one can answer it.

        When none can, the UnavailableError of the first that was asked is raised. A call that a new
        policy refuses is made once more when this node has attested under it.
        """
        leaf = self._identity.certificate
        try:
            return await self._call(call)
        except VerificationError as error:
            is_ours = error.reason == POLICY_CHANGED
            if not is_ours or not await self._identity.wait_replaced(leaf, seconds=RENEWAL_SECONDS):
                raise
        return await self._call(call)

    async def _call(self, call: Callable[[grpc.aio.Channel], Awaitable[_Result]]) -> _Result:
        failures = []
        for i in range(len(self._brokers)):
            which = (self._preferred + i) % len(self._brokers)
            broker = self._brokers[which]
            try:
                async with self._identity.channel(
                    broker.address, broker.node, Role.BROKER
                ) as channel:
                    made = call(channel)
                    answer = await made
                    await self._heed(made)
            except UnavailableError as error:
                failures.append(error)
                continue
            self._preferred = which
            return answer
        raise failures[0]

    async def _heed(self, made: object) -> None:
        """Attest again if the broker says that it will soon have to be."""
        if isinstance(made, grpc.aio.Call):
            metadata = dict(await made.trailing_metadata() or ())
            if ATTEST_AGAIN_KEY in metadata:
                self._identity.outdate()
