//! Probes behind the last unit, so that the peer sees what was lost before them (docs/sessions.md,
//! "Recovery"): the tail loss probe of RFC 8985 §7, in packets that carry nothing.

use crate::link::Nanos;

/// First probe: right behind the last unit, for the gap that it leaves if it is lost.
const FIRST_SHARE: u64 = 64;
/// Those until an answer could be here: past short bursts of losses.
const EARLY_SHARE: u64 = 4;
/// Those into a silence: a path that comes back waits for the next one, which is some 100 bytes.
const SILENCE_SHARE: u64 = 8;
/// Shortest pauses: of the early ones a batch of packets, …
const EARLY_MIN: Nanos = 100_000;
/// … and of those into a silence.
const SILENCE_MIN: Nanos = 1_000_000;
/// An answer is here after a round trip, unless it is late by this share of one, …
const LATE_SHARE: u64 = 8;
/// … and not before this.
const ANSWER_MIN: Nanos = 5_000_000;

/// Which probe is next, and since when.
#[derive(Debug, Default)]
pub struct Probes {
    /// Probes since the last unit.
    sent: u32,
    /// When the last unit left, or units were owed an answer.
    begun: Nanos,
    /// When the next is due, counted from that or from the probe before.
    since: Nanos,
}

impl Probes {
    /// A unit has left, or units are owed an answer from now on.
    pub fn restart(&mut self, now: Nanos) {
        *self = Self { sent: 0, begun: now, since: now };
    }

    /// When the next probe is due, if nothing is heard before.
    #[must_use]
    pub fn next_at(&self, srtt: Nanos) -> Nanos {
        let early = (srtt / EARLY_SHARE).max(EARLY_MIN);
        let asked_at = self.asked_at(srtt);
        if self.sent == 0 {
            self.since.saturating_add((srtt / FIRST_SHARE).max(EARLY_MIN))
        } else if self.since < asked_at {
            self.since.saturating_add(early).min(asked_at)
        } else {
            self.since.saturating_add((srtt / SILENCE_SHARE).max(SILENCE_MIN))
        }
    }

    /// A probe leaves; whether the peer is to answer it.
    pub fn sent(&mut self, srtt: Nanos, now: Nanos) -> bool {
        self.sent = self.sent.saturating_add(1);
        self.since = now;
        now >= self.asked_at(srtt)
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
    fn probes_follow_the_last_unit_and_then_go_on_eight_times_a_round_trip() {
        let srtt = 32_000_000;
        let mut probes = Probes::default();
        probes.restart(1_000);
        let mut now = 1_000;
        let mut next = |probes: &mut Probes| {
            let pause = probes.next_at(srtt) - now;
            now = probes.next_at(srtt);
            (pause / 1000, probes.sent(srtt, now))
        };
        let found: Vec<_> = (0..8).map(|_| next(&mut probes)).collect();
        let early = [500, 8_000, 8_000, 8_000, 8_000].map(|pause| (pause, false));
        assert_eq!(found[..5], early);
        // After 36 ms what was sent first could have been answered.
        assert_eq!(found[5..], [(3_500, true), (4_000, true), (4_000, true)]);
        probes.restart(80_000_000);
        assert_eq!(probes.next_at(1_000) - 80_000_000, EARLY_MIN);
    }
}
