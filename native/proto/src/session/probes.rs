//! Probes after the last unit, which show the peer the losses before them
//! (docs/understand/sessions.md, "Recovery"): the tail loss probe of RFC 8985 §7, at first in
//! packets without data. If the peer stays silent, units go with them, so that the first packet to
//! get through brings data (decision 52).

use crate::link::Nanos;

/// First probe: directly after the last unit, to reveal the gap if that unit is lost.
const FIRST_SHARE: u64 = 64;
/// Probes before an answer is possible: each follows the last unit at a multiple of the previous
/// distance, to get past short loss bursts, and at most this fraction of a round trip after the
/// previous probe.
const EARLY_GROWTH: u64 = 4;
const EARLY_SHARE: u64 = 4;
/// Probes after that: their interval delays the use of a path that comes back, and each costs some
/// 100 bytes …
const SILENCE_SHARE: u64 = 16;
/// … and a unit follows every fourth: the first at the time when the repeated acknowledgement of a
/// message would arrive, too, a quarter of a round trip after the lost one.
const CARRYING_EVERY: u32 = 4;
/// Shortest intervals: for the early probes the length of a batch of packets, …
const EARLY_MIN: Nanos = 100_000;
/// … and for those during a silence.
const SILENCE_MIN: Nanos = 1_000_000;
/// An answer is expected after a round trip plus this fraction of it, …
const LATE_SHARE: u64 = 8;
/// … and not before this time.
const ANSWER_MIN: Nanos = 5_000_000;

/// The purpose of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// Its number reveals the packets missing before it.
    Quiet,
    /// The peer has to answer it.
    Asking,
    /// As before, and the oldest unit follows it, in case nothing else has arrived.
    Carrying,
}

/// Schedule of the probes.
#[derive(Debug, Default)]
pub struct Probes {
    /// Number of probes since the last unit …
    sent: u32,
    /// … and how many of them asked for an answer.
    asked: u32,
    /// When the last unit left, or when an answer for units became due.
    begun: Nanos,
    /// When the previous probe left.
    since: Nanos,
}

impl Probes {
    /// Restarts after a unit has left, or when an answer for units becomes due.
    pub fn restart(&mut self, now: Nanos) {
        *self = Self { sent: 0, asked: 0, begun: now, since: now };
    }

    /// When the next probe is due if nothing is heard before. `is_tail`: no unit follows that would
    /// show the losses before it.
    #[must_use]
    pub fn next_at(&self, srtt: Nanos, is_tail: bool) -> Nanos {
        let asked_at = self.asked_at(srtt);
        if !is_tail && self.since < asked_at {
            asked_at
        } else if self.sent == 0 {
            self.begun.saturating_add((srtt / FIRST_SHARE).max(EARLY_MIN))
        } else if self.since < asked_at {
            let behind = self.since.saturating_sub(self.begun);
            let pause = behind.saturating_mul(EARLY_GROWTH - 1).min(srtt / EARLY_SHARE);
            self.since.saturating_add(pause.max(EARLY_MIN)).min(asked_at)
        } else {
            self.since.saturating_add((srtt / SILENCE_SHARE).max(SILENCE_MIN))
        }
    }

    /// Records that a probe leaves and returns its purpose.
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

    /// The time from which probes ask for an answer, because the sent units could have been
    /// answered by then.
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
            let now = probes.next_at(srtt, true);
            ((now - 1_000) / 1000, probes.sent(srtt, now))
        };
        let found: Vec<_> = (0..6).map(|_| next(&mut probes)).collect();
        assert_eq!(found, [500, 2_000, 8_000, 16_000, 24_000, 32_000].map(|at| (at, Quiet)));
        // After 36 ms the first unit could have been answered.
        let found: Vec<_> = (0..9).map(|_| next(&mut probes)).collect();
        let kinds = [Asking, Asking, Asking, Carrying, Asking, Asking, Asking, Carrying, Asking];
        let expected = (0..9).map(|index| 36_000 + index * 2_000).zip(kinds);
        assert_eq!(found, expected.collect::<Vec<_>>());
        probes.restart(80_000_000);
        assert_eq!(probes.next_at(1_000, true) - 80_000_000, EARLY_MIN);
    }

    #[test]
    fn before_more_units_only_an_answer_is_asked_for() {
        let srtt = 32_000_000;
        let mut probes = Probes::default();
        probes.restart(0);
        let found = [(); 2].map(|()| {
            let now = probes.next_at(srtt, false);
            (now / 1_000_000, probes.sent(srtt, now))
        });
        assert_eq!(found, [(36, Probe::Asking), (38, Probe::Asking)]);
    }
}
