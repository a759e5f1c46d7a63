"""Conversion of leased counters to and from the engine's volume."""

from collections.abc import Iterable, Sequence

from sealane import _native
from sealane.crypto.lease import CounterRange


def add_counters(native: _native.GatewayVolume, granted: Iterable[CounterRange]) -> None:
    """Give the volume more counters; it uses them in this order, after those it has."""
    for counters in granted:
        native.add_counters(
            broker_instance=counters.broker_instance,
            start_epoch=counters.start_epoch,
            start=counters.counter_start,
            end=counters.counter_end,
        )


def replace_counters(
    native: _native.GatewayVolume, granted: Sequence[CounterRange] = ()
) -> list[CounterRange]:
    """Replace the counters that no queue has been given yet; return the old ones."""
    new = [(*c.arena, c.counter_start, c.counter_end) for c in granted]
    return [
        CounterRange(
            broker_instance=instance,
            start_epoch=start_epoch,
            counter_start=start,
            counter_end=end,
        )
        for instance, start_epoch, start, end in native.replace_counters(new)
        if start < end
    ]
