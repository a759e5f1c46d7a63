"""The demo's results: plain values, written as JSON and shown as tables."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeProof:
    """Results of writing the input to a sealed volume and reading it back."""

    input_bytes: int
    write_seconds: float
    read_seconds: float
    sectors_written: int
    counters_used: int
    counters_leased: int
    sha256_written: str
    sha256_read: str
    pieces_sampled: int
    pieces_found_in_input: int
    pieces_found_in_store: int

    @property
    def holds(self) -> bool:
        """True if the bytes read equal those written and none of them is in the store."""
        return (
            self.sha256_written == self.sha256_read
            and self.pieces_found_in_input == self.pieces_sampled
            and self.pieces_found_in_store == 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackResult:
    """One attack, and the refusal that it met."""

    name: str
    expected_reason: str
    found_reason: str
    refused_by: str
    host_saw: str
    refused: bool
    """True if the expected daemon refused it for the expected reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRun:
    """One reliability scheme over the emulated link."""

    scheme: str
    input_bytes: int
    transfer_seconds: float
    sha256_sent: str
    sha256_received: str
    message_bytes: int
    completion_seconds: tuple[float, ...]
    model_seconds: tuple[float, ...]
    ideal_seconds: float
    packets_sent: int
    packets_retransmitted: int
    packets_parity: int
    units_decoded: int
    link_packets_lost: int

    @property
    def holds(self) -> bool:
        """True if the receiver got the sender's bytes."""
        return self.sha256_sent == self.sha256_received

    def quantiles(self) -> dict[str, float]:
        """Return mean, p50, p95 and maximum of the measured completion times, in seconds."""
        return quantiles(np.asarray(self.completion_seconds))

    def model_quantiles(self) -> dict[str, float]:
        """Return the same of the model's samples."""
        return quantiles(np.asarray(self.model_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceRun:
    """Repeated sums of all sites' arrays over the emulated links."""

    sites: int
    array_bytes: int
    seconds: tuple[float, ...]
    model_seconds: tuple[float, ...]
    ideal_seconds: float
    sha256_expected: str
    sha256_found: tuple[str, ...]
    """The distinct digests that sites held after the sums."""

    @property
    def holds(self) -> bool:
        """True if all sites got the right sum each time."""
        return self.sha256_found == (self.sha256_expected,)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRun:
    """Writes that an accelerator card sealed until it was killed, and the processor after that."""

    product: str
    written_bytes: int
    sectors_by_card: int
    sectors_by_card_before: int
    """Of these, those before the writes under which it was killed."""
    sectors_by_processor: int
    losses: int
    """Times that the gateway gave the card up, once for each queue."""
    reason: str
    """Why the gateway doesn't use the card now."""
    sha256_written: str
    sha256_read: str

    @property
    def holds(self) -> bool:
        """True if the card sealed, its death was noticed, and nothing was lost."""
        return (
            self.sha256_written == self.sha256_read
            and self.sectors_by_card_before > 0
            and self.sectors_by_processor > 0
            and self.losses > 0
        )


def quantiles(seconds: NDArray[np.float64]) -> dict[str, float]:
    """Return mean, p50, p95 and maximum."""
    return {
        "mean": float(seconds.mean()),
        "p50": float(np.quantile(seconds, 0.5)),
        "p95": float(np.quantile(seconds, 0.95)),
        "max": float(seconds.max()),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResults:
    """Everything the demo measured in one run."""

    source_name: str
    link: dict[str, float]
    seed: int
    volume: VolumeProof
    attacks: tuple[AttackResult, ...]
    sessions: tuple[SessionRun, ...]
    all_reduce: AllReduceRun | None = None
    """None unless `--all-reduce` was given."""
    card: CardRun | None = None
    """None unless `--accelerator` was given."""

    @property
    def holds(self) -> bool:
        """True if every check held."""
        return (
            self.volume.holds
            and all(attack.refused for attack in self.attacks)
            and all(session.holds for session in self.sessions)
            and (self.all_reduce is None or self.all_reduce.holds)
            and (self.card is None or self.card.holds)
        )

    def as_json(self) -> dict[str, Any]:
        """Return a dictionary for JSON, with quantiles instead of the model's many samples."""
        document = asdict(self)
        for record, session in zip(document["sessions"], self.sessions, strict=True):
            del record["model_seconds"]
            record["measured"] = session.quantiles()
            record["model"] = session.model_quantiles()
        if self.all_reduce is not None:
            record = document["all_reduce"]
            del record["model_seconds"]
            record["measured"] = quantiles(np.asarray(self.all_reduce.seconds))
            record["model"] = quantiles(np.asarray(self.all_reduce.model_seconds))
        document["holds"] = self.holds
        return document
