//! Probes behind the last unit, so that the peer sees what was lost before them (docs/understand/sessions.md,
//! "Recovery"): the tail loss probe of RFC 8985 §7, at first in packets that carry nothing. Into a
//! silence units go with them, so that the first to get through brings data (decision 52).

use crate::link::Nanos;

/// First probe: right behind the last unit, for the gap that it leaves if it is lost.
const FIRST_SHARE: u64 = 64;
/// Those until an answer could be here: each this many times as far behind the unit as the one
/// before, past short bursts of losses, and no further apart than this share of a round trip.
const EARLY_GROWTH: u64 = 4;
const EARLY_SHARE: u64 = 4;
/// Those into a silence: a path that comes back waits for the next one, which is some 100 bytes …
const SILENCE_SHARE: u64 = 16;
/// … and every so many of them have a unit behind them: the first when the repeated acknowledgement
/// of a message would be here, too, a quarter of a round trip behind the lost one.
const CARRYING_EVERY: u32 = 4;
/// Shortest pauses: of the early ones a batch of packets, …
const EARLY_MIN: Nanos = 100_000;
/// … and of those into a silence.
const SILENCE_MIN: Nanos = 1_000_000;
/// An answer is here after a round trip, unless it is late by this share of one, …
const LATE_SHARE: u64 = 8;
/// … and not before this.
const ANSWER_MIN: Nanos = 5_000_000;

/// What a probe is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// Its number shows what is missing before it.
    Quiet,
    /// The peer is to answer it.
    Asking,
    /// The same, and the oldest unit follows it: nothing else may have arrived.
    Carrying,
}

/// Which probe is next, and since when.
#[derive(Debug, Default)]
pub struct Probes {
    /// Probes since the last unit …
    sent: u32,
    /// … and those of them that asked for an answer.
    asked: u32,
    /// When the last unit left, or units were owed an answer.
    begun: Nanos,
    /// When the probe before left.
    since: Nanos,
}

impl Probes {
    /// A unit has left, or units are owed an answer from now on.
    pub fn restart(&mut self, now: Nanos) {
        *self = Self { sent: 0, asked: 0, begun: now, since: now };
    }

    /// When the next probe is due, if nothing is heard before.
    #[must_use]
    pub fn next_at(&self, srtt: Nanos) -> Nanos {
        let asked_at = self.asked_at(srtt);
        if self.sent == 0 {
            self.begun.saturating_add((srtt / FIRST_SHARE).max(EARLY_MIN))
        } else if self.since < asked_at {
            let behind = self.since.saturating_sub(self.begun);
            let pause = behind.saturating_mul(EARLY_GROWTH - 1).min(srtt / EARLY_SHARE);
            self.since.saturating_add(pause.max(EARLY_MIN)).min(asked_at)
        } else {
            self.since.saturating_add((srtt / SILENCE_SHARE).max(SILENCE_MIN))
        }
    }

    /// A probe leaves; which one it is.
    pub fn sent(&mut self, srtt: Nanos, now: Nanos) -> Probe {
        self.sent = self.sent.saturating_add(1);
        self.since = now;
        if now < self.asked_at(srtt) {
            return Probe::Quiet;
        }
        self.asked = self.asked.wrapping_add(1);
        let is_carrying = self.asked.is_multiple_of(CARRYING_EVERY);
        if is_carrying { Probe::Carrying } else { Probe::Asking }
    }

    /// From when on probes ask for an answer: what was sent could have been answered.
    fn asked_at(&self, srtt: Nanos) -> Nanos {
        self.begun.saturating_add((srtt + srtt / LATE_SHARE).max(ANSWER_MIN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_follow_the_last_unit_ever_later_and_then_ask_and_carry() {
        use Probe::{Asking, Carrying, Quiet};
        let srtt = 32_000_000;
        let mut probes = Probes::default();
        probes.restart(1_000);
        let next = |probes: &mut Probes| {
            let now = probes.next_at(srtt);
            ((now - 1_000) / 1000, probes.sent(srtt, now))
        };
        let found: Vec<_> = (0..6).map(|_| next(&mut probes)).collect();
        assert_eq!(found, [500, 2_000, 8_000, 16_000, 24_000, 32_000].map(|at| (at, Quiet)));
        // After 36 ms what was sent first could have been answered.
        let found: Vec<_> = (0..9).map(|_| next(&mut probes)).collect();
        let kinds = [Asking, Asking, Asking, Carrying, Asking, Asking, Asking, Carrying, Asking];
        let expected = (0..9).map(|index| 36_000 + index * 2_000).zip(kinds);
        assert_eq!(found, expected.collect::<Vec<_>>());
        probes.restart(80_000_000);
        assert_eq!(probes.next_at(1_000) - 80_000_000, EARLY_MIN);
    }
}
