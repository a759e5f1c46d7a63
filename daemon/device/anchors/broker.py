"""The `broker` anchor: compare-and-set in the brokers' store; and `none`, which keeps nothing."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from sealane.daemon.device.anchors.anchor import Anchored, Change, changed

Advance = Callable[[Sequence[Change]], Awaitable[None]]
"""Changes records at the brokers, in the name of one opening of the device."""


class BrokerAnchor:
    """Anchors at every group commit. Made with what the brokers said when the device was opened."""

    def __init__(
        self, records: Mapping[str, Anchored], *, floor: int = 0, advance: Advance
    ) -> None:
        self._records = dict(records)
        self._floor = floor
        self._advance = advance

    @property
    def records(self) -> Mapping[str, Anchored]:
        """What is anchored, as far as it was answered."""
        return self._records

    @property
    def floor(self) -> int:
        """See `Anchor.floor`."""
        return self._floor

    async def advance(self, changes: Sequence[Change]) -> None:
        """See `Anchor.advance`; whoever lost the device gets VerificationError `device.…`."""
        after = changed(self._records, changes, floor=self._floor)
        await self._advance(changes)
        self._records, self._floor = after

    async def close(self) -> None:
        """Nothing is held."""


class NoAnchor(BrokerAnchor):
    """The anchor `none`: what is told lasts as long as the process."""

    def __init__(self) -> None:
        super().__init__({}, advance=_nowhere)


async def _nowhere(changes: Sequence[Change]) -> None:
    """Tell nobody."""
