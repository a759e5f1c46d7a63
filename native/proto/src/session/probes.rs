//! Probes behind the last unit, so that the peer sees what was lost before them (docs/sessions.md,
//! "Recovery"): the tail loss probe of RFC 8985 §7, in packets that carry nothing.

use crate::link::Nanos;

/// First probe: right behind the last unit, for the gap that it leaves if it is lost.
const FIRST_SHARE: u64 = 64;
/// Second: past a short burst of losses.
const SECOND_SHARE: u64 = 4;
/// Probes that are not to be answered.
const UNANSWERED: u32 = 2;
/// Shortest pauses: of the first probe a batch of packets, …
const FIRST_MIN: Nanos = 100_000;
/// … of the first that asks for an answer, …
const ANSWER_MIN: Nanos = 5_000_000;
/// … and of those into a silence.
const SILENCE_MIN: Nanos = 1_000_000;
/// Probes into a silence, in a round trip.
const SILENCE_SHARE: u64 = 8;

/// Which probe is next, and since when.
#[derive(Debug, Default)]
pub struct Probes {
    /// Probes since the last unit.
    sent: u32,
    /// When the next is due, counted from the last unit or the probe before.
    since: Nanos,
}

impl Probes {
    /// A unit has left, or units are owed an answer from now on.
    pub fn restart(&mut self, now: Nanos) {
        *self = Self { sent: 0, since: now };
    }

    /// When the next probe is due, if nothing is heard before.
    #[must_use]
    pub fn next_at(&self, srtt: Nanos) -> Nanos {
        let pause = match self.sent {
            0 => (srtt / FIRST_SHARE).max(FIRST_MIN),
            1 => (srtt / SECOND_SHARE).max(FIRST_MIN),
            // What was sent could have been answered: an acknowledgement may be late by this much.
            2 => (srtt + srtt / 8).max(ANSWER_MIN),
            // A path that comes back waits for the next one; one of them is some 100 bytes.
            _ => (srtt / SILENCE_SHARE).max(SILENCE_MIN),
        };
        self.since.saturating_add(pause)
    }

    /// A probe leaves; whether the peer is to answer it.
    pub fn sent(&mut self, now: Nanos) -> bool {
        self.sent = self.sent.saturating_add(1);
        self.since = now;
        self.sent > UNANSWERED
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
        let mut pauses = Vec::new();
        let mut answers = Vec::new();
        for _ in 0..5 {
            pauses.push(probes.next_at(srtt) - now);
            now = probes.next_at(srtt);
            answers.push(probes.sent(now));
        }
        assert_eq!(pauses, [500_000, 8_000_000, 36_000_000, 4_000_000, 4_000_000]);
        assert_eq!(answers, [false, false, true, true, true]);
        probes.restart(now);
        assert_eq!(probes.next_at(1_000) - now, FIRST_MIN);
    }
}
