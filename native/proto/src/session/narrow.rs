//! Detects that a path may have become too narrow: full-size packets vanish while others arrive
//! (the black hole of RFC 8899 §4.3). Challenges then find out (`challenges.rs`).

use crate::link::Nanos;

/// Number of consecutive full-size packets that must have vanished …
const VANISHED_MIN: u64 = 16;
/// … over at least this many time-outs.
const TIMEOUTS: u64 = 6;

/// State of the full-size packets on one path.
#[derive(Debug, Default)]
pub struct Narrow {
    /// Number of smaller packets sent.
    small_sent: u64,
    /// Number of full-size packets that must have arrived, given the peer's total count …
    arrived: u64,
    /// … which is this.
    counted: u64,
    /// Full-size packets sent since one arrived, and when the first of them left.
    vanished: u64,
    since: Nanos,
}

impl Narrow {
    /// Records that a packet leaves.
    pub fn sent(&mut self, is_full: bool, now: Nanos) {
        if !is_full {
            self.small_sent += 1;
            return;
        }
        if self.vanished == 0 {
            self.since = now;
        }
        self.vanished += 1;
    }

    /// Records how many packets the peer has received: more than all small ones prove that a
    /// full-size one arrived.
    pub fn received(&mut self, count: u64) {
        self.counted = self.counted.max(count);
        let arrived = count.saturating_sub(self.small_sent);
        if arrived > self.arrived {
            self.arrived = arrived;
            self.vanished = 0;
        }
    }

    /// Discards the suspicion: the path answers at full size, or nothing answers at all. Small
    /// packets lost meanwhile must not hide later arrivals.
    pub fn forget(&mut self) {
        self.vanished = 0;
        self.small_sent = self.counted.saturating_sub(self.arrived);
    }

    /// Whether the path should be challenged.
    #[must_use]
    pub fn is_suspected(&self, timeout: Nanos, now: Nanos) -> bool {
        self.vanished >= VANISHED_MIN
            && now.saturating_sub(self.since) >= timeout.saturating_mul(TIMEOUTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_full_size_packets_that_vanish_for_long_are_suspect() {
        let mut narrow = Narrow::default();
        for number in 0..VANISHED_MIN {
            narrow.sent(true, 100 + number);
            narrow.sent(false, 100 + number);
        }
        assert!(!narrow.is_suspected(10, 100 + 10 * TIMEOUTS - 1));
        assert!(narrow.is_suspected(10, 100 + 10 * TIMEOUTS));
        narrow.received(VANISHED_MIN);
        assert!(narrow.is_suspected(10, 1000), "those were the small ones");
        narrow.received(VANISHED_MIN + 1);
        assert!(!narrow.is_suspected(10, 1000));
    }

    #[test]
    fn few_are_no_reason_and_an_outage_is_none() {
        let mut narrow = Narrow::default();
        (1..VANISHED_MIN).for_each(|_| narrow.sent(true, 0));
        assert!(!narrow.is_suspected(1, 1000));
        narrow.sent(true, 0);
        assert!(narrow.is_suspected(1, 1000));
        narrow.forget();
        assert!(!narrow.is_suspected(1, 1000));
    }

    #[test]
    fn small_packets_that_an_outage_took_hide_no_arrival_after_it() {
        let mut narrow = Narrow::default();
        (0..1000).for_each(|_| narrow.sent(false, 0));
        narrow.received(10);
        narrow.forget();
        (0..VANISHED_MIN).for_each(|_| narrow.sent(true, 0));
        narrow.received(10 + VANISHED_MIN);
        assert!(!narrow.is_suspected(1, 1000));
    }
}
