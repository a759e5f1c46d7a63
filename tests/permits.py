"""Permits for tests without revocations."""

import uuid
from dataclasses import replace

from sealane import _native
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.runtime.clock import monotonic_ns

OWN = PeerIncarnation(spiffe_id="spiffe://sealane/gateway/g", incarnation=bytes(16))
_LONG_NS = 3600 * 10**9


def permitted() -> _native.Permit:
    """Return a permit that outlasts every test."""
    permit = _native.Permit()
    permit.extend(monotonic_ns() + _LONG_NS)
    return permit


async def own_authorized(volume_id: uuid.UUID) -> tuple[PeerIncarnation, _native.Permit]:
    """Authorize the gateway itself, as a broker without revocations."""
    return replace(OWN, volume_id=str(volume_id)), permitted()
