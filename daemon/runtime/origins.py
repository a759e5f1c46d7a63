"""Which user a gRPC call on a Unix socket comes from (decision 78).

gRPC gives its servers no peer credentials, but the address of its peer. That peer is the relay of a
door (`servers.local_door`), which binds its end to a name of 128 random bits in the abstract
namespace, used once, before it connects; here the name leads to the caller's user. A name is no
secret, any process can see it and take it once it is free: what counts is that only this process
can connect to gRPC's own socket, which has no name, so that every peer address there was chosen
here.
"""

import secrets
from typing import Any, Final

from sealane.daemon.runtime.door import Caller, relay
from sealane.errors import VerificationError

_ABSTRACT: Final = "unix-abstract:"
_NAME_BYTES: Final = 16


class Origins:
    """Users of the connections that are being relayed to one server."""

    def __init__(self) -> None:
        self._users: dict[str, int] = {}

    def relay(self, caller: Caller, address: str) -> None:
        """Relay a connection, as `door.relay`; its calls are the caller's until it ends."""
        name = f"sealane-{secrets.token_hex(_NAME_BYTES)}"
        self._users[name] = caller.user
        try:
            relay(caller, address, own_name=b"\0" + name.encode())
        finally:
            del self._users[name]

    def user_of(self, context: Any) -> int:
        """Return the uid that a call comes from.

        VerificationError `call.origin.unknown` if its connection has ended, or wasn't relayed.
        """
        peer = str(context.peer())
        user = self._users.get(peer.removeprefix(_ABSTRACT))
        if user is None or not peer.startswith(_ABSTRACT):
            raise VerificationError("call.origin.unknown", "the call's connection has ended")
        return user
