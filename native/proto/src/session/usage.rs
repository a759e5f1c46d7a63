//! How much of the congestion window was used of late: whether it is the window that limits.
//!
//! What limits at the very moment of a report says little: units wait for their turn or for the
//! pacer most of the time, also when the window decides how many leave in a round trip. So what
//! counts is how many were in flight at most (as in RFC 7661, section 4.2).

use crate::link::Nanos;

/// Part of the window that has to be in flight, as its divisor: while a window doubles, three
/// quarters are.
const USED_SHARE: u64 = 2;

/// Most units in flight in this round trip and in the last one.
#[derive(Debug, Default)]
pub struct Usage {
    began: Nanos,
    most: u64,
    before: u64,
}

impl Usage {
    /// Records how many units are in flight after one has left. `rtt`: the round trip.
    pub fn note(&mut self, units: u64, rtt: Nanos, now: Nanos) {
        let age = now.saturating_sub(self.began);
        if age >= rtt {
            self.before = if age < rtt.saturating_mul(2) { self.most } else { 0 };
            (self.began, self.most) = (now, 0);
        }
        self.most = self.most.max(units);
    }

    /// Whether a window of this many units has been used.
    #[must_use]
    pub fn is_filled(&self, window: u64) -> bool {
        self.most.max(self.before).saturating_mul(USED_SHARE) >= window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Nanos = 1000;

    #[test]
    fn a_window_is_filled_by_what_was_in_flight_in_this_round_trip_or_the_last() {
        let mut usage = Usage::default();
        usage.note(10, RTT, 5000);
        assert!(usage.is_filled(20) && !usage.is_filled(21));
        usage.note(1, RTT, 5999);
        assert!(usage.is_filled(20));
        usage.note(2, RTT, 6500);
        assert!(usage.is_filled(20), "the last round trip counts");
        usage.note(2, RTT, 7600);
        assert!(usage.is_filled(4) && !usage.is_filled(20));
    }

    #[test]
    fn what_was_in_flight_before_a_pause_counts_no_more() {
        let mut usage = Usage::default();
        usage.note(10, RTT, 5000);
        usage.note(1, RTT, 5000 + 2 * RTT);
        assert!(!usage.is_filled(20));
    }
}
