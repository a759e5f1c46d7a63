"""A node's brokers: calls go to the one that answered last, and to the next one if it doesn't.

All brokers of one authority answer alike from one store, so any of them will do. Asking twice is
harmless: what registers or grants carries a request id. A lease is granted by one broker alone; if
its answer is lost, another grants another one, and the first is burned.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.identity import Identity
from sealane.errors import UnavailableError

_Result = TypeVar("_Result")


class Brokers:
    """The brokers that the configuration names, called as one role of this node."""

    def __init__(self, config: EnrolmentConfig, identity: Identity) -> None:
        self._brokers = config.brokers
        self._identity = identity
        self._preferred = 0

    async def call(self, call: Callable[[grpc.aio.Channel], Awaitable[_Result]]) -> _Result:
        """Make `call` at one broker after the other until one can answer it.

        When none can, the UnavailableError of the first that was asked is raised.
        """
        failures = []
        for i in range(len(self._brokers)):
            which = (self._preferred + i) % len(self._brokers)
            broker = self._brokers[which]
            try:
                async with self._identity.channel(broker.address, broker.node, "broker") as channel:
                    answer = await call(channel)
            except UnavailableError as error:
                failures.append(error)
                continue
            self._preferred = which
            return answer
        raise failures[0]
