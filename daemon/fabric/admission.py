"""Admission of the peer of a session: by tenant, node, and a secret that both jobs know.

Tenant and node are taken from the peer's certificate. The secret belongs to the jobs; it separates
what certificates can't: two jobs of one tenant on one node, or the members of a group.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from sealane.crypto.certificates import NAME_PATTERN, Subject
from sealane.crypto.exchange import wipe
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Reason, UsageError
from sealane.transport.establish import session_secret

NAMES_MAX: Final = 1024
"""Limit of the nodes, and of the tenants, that one listener may name."""
SECRET_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = 64
STRANGERS_LOGGED_MAX: Final = 64
"""Limit of refused peers that one listener logs; further refusals are silent."""
_SHOWN_MAX: Final = 80


class Admission:
    """Peers that one call to open or listen admits. Use `admission()`: it wipes the secret."""

    def __init__(
        self, *, tenants: Iterable[str], nodes: Iterable[str], secret: bytearray | None
    ) -> None:
        self._tenants = frozenset(tenants)
        self._nodes = frozenset(nodes)
        self.secret = secret
        """Key derived from the jobs' secret (32 bytes); None if there is no secret."""
        self._strangers: set[tuple[str, str]] = set()

    def admits(self, peer: Subject) -> bool:
        """Return whether a peer with this certificate may be the other end."""
        return peer.tenant in self._tenants and (not self._nodes or peer.node in self._nodes)

    def takes(self, peer: Subject, *, display_name: str) -> bool:
        """Return whether a peer that offers this session is admitted; log it if not."""
        is_admitted = self.admits(peer)
        if not is_admitted:
            self.note_stranger(peer, display_name=display_name, reason="session.peer.refused")
        return is_admitted

    def note_stranger(self, peer: Subject, *, display_name: str, reason: Reason) -> None:
        """Log a refusal: once per peer and reason, at most STRANGERS_LOGGED_MAX in all."""
        stranger = (peer.spiffe_id, reason)
        if stranger in self._strangers or len(self._strangers) >= STRANGERS_LOGGED_MAX:
            return
        self._strangers.add(stranger)
        get_logger().warning(
            "session_offer_refused",
            peer=peer.spiffe_id,
            tenant=peer.tenant,
            display_name=display_name,
            reason=reason,
        )


@contextmanager
def admission(
    *, own_tenant: str, tenants: Iterable[str], nodes: Iterable[str], secret: bytes
) -> Iterator[Admission]:
    """Admit `nodes` (empty: all) of `tenants` (empty: this fabric's) whose job knows `secret`.

    UsageError `session.peers.malformed`, `session.secret.length`.
    """
    tenants, nodes = [*tenants], [*nodes]
    for what, names in (("tenants", tenants), ("nodes", nodes)):
        if len(names) > NAMES_MAX:
            raise UsageError(
                "session.peers.malformed", f"{len(names)} {what}; allowed: {NAMES_MAX}"
            )
        for name in names:
            if NAME_PATTERN.fullmatch(name) is None:
                raise UsageError(
                    "session.peers.malformed", f"{name[:_SHOWN_MAX]!r} can't be one of the {what}"
                )
    if secret and not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise UsageError(
            "session.secret.length",
            f"a secret of {len(secret)} bytes; allowed: none, or {SECRET_BYTES_MIN} to "
            f"{SECRET_BYTES_MAX} bytes",
        )
    made = Admission(
        tenants=tenants or [own_tenant],
        nodes=nodes,
        secret=session_secret(secret) if secret else None,
    )
    try:
        yield made
    finally:
        if made.secret is not None:
            wipe(made.secret)
