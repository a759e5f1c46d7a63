"""Leased counters in and out of the engine's volume."""

from collections.abc import Iterable

from sealane import _native
from sealane.crypto.lease import CounterRange


def add_counters(native: _native.GatewayVolume, granted: Iterable[CounterRange]) -> None:
    """Give the volume more counters; used in this order, after those it has."""
    for counters in granted:
        native.add_counters(
            broker_instance=counters.broker_instance,
            start_epoch=counters.start_epoch,
            start=counters.counter_start,
            end=counters.counter_end,
        )


def take_counters(native: _native.GatewayVolume) -> list[CounterRange]:
    """Take what no queue was given back out of a volume whose queues are closed."""
    return [
        CounterRange(
            broker_instance=instance,
            start_epoch=start_epoch,
            counter_start=start,
            counter_end=end,
        )
        for instance, start_epoch, start, end in native.take_counters()
        if start < end
    ]
