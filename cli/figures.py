"""The daemon's metrics, and what happened between two looks at them."""

import asyncio
import http.client
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from sealane.client import Client
from sealane.errors import UnavailableError, UsageError, VerificationError

SCRAPE_SECONDS: Final = 10.0
PAGE_BYTES_MAX: Final = 64 << 20
"""Some ten thousand volumes in use."""

Labels = Mapping[str, str]
Key = tuple[tuple[str, str], ...]
"""The labels of a series, sorted."""
Series = Mapping[Key, float]


@dataclass(frozen=True)
class Page:
    """All metrics of a daemon at one moment."""

    seconds: float
    """When, on the monotonic clock."""
    series: Mapping[str, Series]
    """By name of the sample, such as `…_total`, and labels."""

    @classmethod
    def of(cls, text: str, seconds: float) -> "Page":
        """Parse an exposition; VerificationError `metrics.malformed`."""
        series: dict[str, dict[Key, float]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    labels = tuple(sorted(sample.labels.items()))
                    series.setdefault(sample.name, {})[labels] = sample.value
        except (ValueError, IndexError, KeyError) as error:
            raise VerificationError(
                "metrics.malformed", f"the metrics can't be read: {error}"
            ) from error
        return cls(seconds, series)

    def each(self, name: str) -> Iterator[tuple[Labels, float]]:
        """Yield the labels and the value of each series of a sample."""
        for labels, value in self.series.get(name, {}).items():
            yield dict(labels), value

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of the series that have these labels."""
        return sum(self.series[name][key] for key in self.keys(name, labels))

    def keys(self, name: str, labels: Labels) -> Iterator[Key]:
        """Yield the keys of the series of a sample that have these labels."""
        series = self.series.get(name, {})
        whole = tuple(sorted(labels.items()))
        first = next(iter(series), ())
        if len(first) == len(whole):
            # All series of a sample have the same names: this is the only one.
            yield from [whole] if whole in series else []
        else:
            yield from (key for key in series if labels.items() <= dict(key).items())


@dataclass(frozen=True)
class Interval:
    """Two pages of one daemon."""

    before: Page
    after: Page

    @property
    def seconds(self) -> float:
        """The time between them."""
        return self.after.seconds - self.before.seconds

    def increase(self, name: str, **labels: str) -> float:
        """Return how much counters rose; one that fell began again with its volume or session.

        As in PromQL, a series that was absent before hasn't risen.
        """
        earlier = self.before.series.get(name, {})
        rose = 0.0
        for key in self.after.keys(name, labels):
            value = self.after.series[name][key]
            before = earlier.get(key, value)
            rose += value - before if value >= before else value
        return rose

    def rate(self, name: str, **labels: str) -> float:
        """Return the same for each second."""
        return self.increase(name, **labels) / self.seconds if self.seconds > 0 else 0.0

    def quantile(self, share: float, name: str, **labels: str) -> float | None:
        """Return a quantile of a histogram's new values, as PromQL does; None without any.

        It is interpolated within its bucket. Beyond the last bound, it is that bound.
        """
        bounds = {has["le"]: 0.0 for has, _ in self.after.each(f"{name}_bucket")}
        counts = sorted(
            (float(le), self.increase(f"{name}_bucket", le=le, **labels)) for le in bounds
        )
        if not counts or not counts[-1][1]:
            return None
        rank = share * counts[-1][1]
        below, count_below = 0.0, 0.0
        for bound, count in counts[:-1]:
            if count >= rank:
                return below + (bound - below) * (rank - count_below) / (count - count_below)
            below, count_below = bound, count
        return below


async def scrape(client: Client) -> Page:
    """Read the metrics of the daemon that `client` is connected to.

    UsageError `metrics.absent` if it exports none, UnavailableError `metrics.unavailable`.
    """
    address = (await client.status()).addresses.get("metrics")
    if address is None:
        raise UsageError(
            "metrics.absent",
            "the daemon exports no metrics; set metrics.listen in its configuration",
        )
    # Parsing takes seconds with thousands of volumes, so the thread does that, too.
    return await asyncio.to_thread(_read, address)


def _read(address: str) -> Page:
    host, _, port = address.rpartition(":")
    # Not urllib's: that would ask a proxy of the environment.
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=SCRAPE_SECONDS)
    try:
        connection.request("GET", "/metrics")
        with connection.getresponse() as answer:
            content = answer.read(PAGE_BYTES_MAX + 1)
        seconds = time.monotonic()
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError("metrics.unavailable", f"metrics at {address}: {error}") from error
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK or len(content) > PAGE_BYTES_MAX:
        raise UnavailableError(
            "metrics.unavailable",
            f"metrics at {address}: status {answer.status}, {len(content)} bytes",
        )
    return Page.of(content.decode(errors="replace"), seconds)
