"""The `broker` anchor: compare-and-set in the brokers' store; and `none`, which stores nothing."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from sealane.daemon.device.anchors.anchor import Anchored, Change, changed

Advance = Callable[[Sequence[Change]], Awaitable[None]]
"""Changes records at the brokers, on behalf of one opening of the device."""


class BrokerAnchor:
    """Anchors at every group commit. Created with the broker's answer to OpenDevice."""

    def __init__(
        self, records: Mapping[str, Anchored], *, floor: int = 0, advance: Advance
    ) -> None:
        self._records = dict(records)
        self._floor = floor
        self._advance = advance

    @property
    def records(self) -> Mapping[str, Anchored]:
        """Return the anchored records, as far as brokers have confirmed them."""
        return self._records

    @property
    def floor(self) -> int:
        """See `Anchor.floor`."""
        return self._floor

    async def advance(self, changes: Sequence[Change]) -> None:
        """See `Anchor.advance`; VerificationError `device.…` if the caller lost the device."""
        after = changed(self._records, changes, floor=self._floor)
        await self._advance(changes)
        self._records, self._floor = after

    async def close(self) -> None:
        """Do nothing: no resource is held."""


class NoAnchor(BrokerAnchor):
    """The anchor `none`: records last as long as the process."""

    def __init__(self) -> None:
        super().__init__({}, advance=_nowhere)


async def _nowhere(changes: Sequence[Change]) -> None:
    """Send nothing."""
