"""The head of a broker's audit log, kept where who can truncate the log can't change it."""

from typing import Protocol

from sealane.crypto.audit import GENESIS, Head
from sealane.daemon.broker.records import AuditHeadRecord, instance_name
from sealane.daemon.broker.registry import Registry


class HeadKeeper(Protocol):
    """Stores the head of the log where someone who can truncate the log has no access."""

    async def read(self) -> Head:
        """Return the head stored last, or `GENESIS`."""

    async def keep(self, head: Head) -> None:
        """Store `head` durably."""


class RegistryHead:
    """Stores the head of a broker's log among the records of the broker's store."""

    def __init__(self, registry: Registry, *, instance: int) -> None:
        self._registry = registry
        self._name = instance_name(instance)

    async def read(self) -> Head:
        """Return the stored head."""
        stored = await self._registry.audit_heads.get(self._name)
        if stored is None:
            return GENESIS
        return Head(sequence=stored.record.sequence, digest=stored.record.digest)

    async def keep(self, head: Head) -> None:
        """Replace the stored head; it has a single writer."""
        record = AuditHeadRecord(sequence=head.sequence, digest=head.digest)
        await self._registry.commit((), self._registry.audit_heads.sealed(self._name, record))
