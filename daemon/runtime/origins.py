"""Which user a gRPC call on a Unix socket comes from (decision 78).

gRPC gives its servers no peer credentials, but the address of its peer. That peer is the relay of a
door (`servers.local_door`), which binds its end to a name of 128 random bits in the abstract
namespace, used once, before it connects; here the name leads to the caller's user. A name is no
secret, any process can see it and take it once it is free: what counts is that only this process
can connect to gRPC's own socket, which has no name, so that every peer address there was chosen
here.
"""

import secrets
from dataclasses import dataclass
from typing import Any, Final

from sealane.daemon.runtime.access import PartiesNow, only_operators
from sealane.daemon.runtime.door import Caller, relay
from sealane.daemon.runtime.parties import Party
from sealane.errors import VerificationError

_ABSTRACT: Final = "unix-abstract:"
_NAME_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The process at the other end of a connection, as it was when it connected."""

    user: int
    """Effective uid."""
    parties: PartiesNow

    @property
    def is_own_socket(self) -> bool:
        """Whether it connected to the daemon's own socket, not to the shared one."""
        return self.parties is only_operators


class Origins:
    """Users of the connections that are being relayed to servers of this daemon."""

    def __init__(self) -> None:
        self._origins: dict[str, Origin] = {}

    def relay(self, caller: Caller, address: str, *, parties: PartiesNow = only_operators) -> None:
        """Relay a connection, as `door.relay`; its calls are the caller's until it ends."""
        name = f"sealane-{secrets.token_hex(_NAME_BYTES)}"
        self._origins[name] = Origin(user=caller.user, parties=parties)
        try:
            relay(caller, address, own_name=b"\0" + name.encode())
        finally:
            del self._origins[name]

    def of(self, context: Any) -> Origin:
        """Return where a call comes from.

        VerificationError `call.origin.unknown` if its connection has ended, or wasn't relayed.
        """
        peer = str(context.peer())
        origin = self._origins.get(peer.removeprefix(_ABSTRACT))
        if origin is None or not peer.startswith(_ABSTRACT):
            raise VerificationError("call.origin.unknown", "the call's connection has ended")
        return origin

    def is_own_socket(self, context: Any) -> bool:
        """Return whether a call came by the daemon's own socket.

        VerificationError `call.origin.unknown`.
        """
        return self.of(context).is_own_socket

    def user_of(self, context: Any) -> int | None:
        """Return the uid as which a call acts: that of a job; None for operators.

        VerificationError `call.origin.unknown`.
        """
        origin = self.of(context)
        return None if Party.OPERATOR in origin.parties() else origin.user

    def seen_by(self, context: Any) -> int | None:
        """Return the uid whose objects a call may see; None (all) for operators and readers.

        VerificationError `call.origin.unknown`.
        """
        origin = self.of(context)
        sees_all = origin.parties() & {Party.OPERATOR, Party.READER}
        return None if sees_all else origin.user
