"""A node's brokers: each call goes to the one that answered last, or else to the next one.

All brokers of an authority answer from the same store, so any of them will do. Repeating a call is
safe: registrations and grants carry a request id. A lease is granted by a single broker; if the
answer is lost, another broker grants a new lease, and the first one is burned.
"""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import grpc

from sealane.crypto.roles import Role
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node.identity import POLICY_CHANGED, Identity
from sealane.daemon.runtime.authorizers import ATTEST_AGAIN_KEY
from sealane.errors import UnavailableError, VerificationError

RENEWAL_SECONDS: Final = 10.0
"""How long a call waits for this node to attest under a new policy."""

_Result = TypeVar("_Result")


class Brokers:
    """The configured brokers, called as one role of this node."""

    def __init__(self, config: EnrolmentConfig, identity: Identity) -> None:
        self._brokers = config.brokers
        self._identity = identity
        self._preferred = 0

    async def call(self, call: Callable[[grpc.aio.Channel], Awaitable[_Result]]) -> _Result:
        """Make `call` at one broker after another until one can answer it.

        If none can, raise UnavailableError with what each said. A call that is refused because of
        a new policy is repeated once this node has attested under that policy.
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
                    await self._attest_if_due(made)
            except UnavailableError as error:
                failures.append(error)
                continue
            self._preferred = which
            return answer
        if len(failures) == 1:
            raise failures[0]
        first = failures[0]
        raise type(first)(first.reason, "; ".join(map(str, failures))) from first

    async def _attest_if_due(self, made: object) -> None:
        """Attest again if the broker reports that this will soon be necessary."""
        if isinstance(made, grpc.aio.Call):
            metadata = dict(await made.trailing_metadata() or ())
            if ATTEST_AGAIN_KEY in metadata:
                self._identity.outdate()
