//! Replay window of one (key epoch, channel), like RFC 6479: a ring of words that only moves
//! forward.

/// Words of the ring, a power of two.
const WORDS: u64 = 128;
/// Width of the window below the newest packet number; older numbers are refused. Enough for the
/// reordering of two paths that differ by 40 ms at 2 Gbit/s.
pub const REPLAY_WINDOW_PACKETS: u64 = (WORDS - 1) * 64;

/// The packet numbers seen.
#[derive(Debug)]
pub struct ReplayWindow {
    words: [u64; WORDS as usize],
    /// One more than the newest number seen.
    end: u64,
}

impl Default for ReplayWindow {
    /// Starts with no number seen.
    fn default() -> Self {
        Self { words: [0; WORDS as usize], end: 0 }
    }
}

impl ReplayWindow {
    /// Whether this packet number may still be accepted. It changes nothing, so it may be used for
    /// packets that are not authenticated yet.
    #[must_use]
    pub fn is_fresh(&self, number: u64) -> bool {
        if number >= self.end {
            return true;
        }
        if self.end - number > REPLAY_WINDOW_PACKETS {
            return false;
        }
        self.words[(number / 64 % WORDS) as usize] & (1 << (number % 64)) == 0
    }

    /// Marks an authentic packet's number as seen; false if it was not fresh.
    pub fn accept(&mut self, number: u64) -> bool {
        if number == u64::MAX || !self.is_fresh(number) {
            return false;
        }
        if number >= self.end {
            // The word of `end` itself is partly used, so clearing starts with the next one.
            let first = self.end.div_ceil(64);
            let last = number / 64;
            for word in first..=last.min(first + WORDS - 1) {
                self.words[(word % WORDS) as usize] = 0;
            }
            self.end = number + 1;
        }
        self.words[(number / 64 % WORDS) as usize] |= 1 << (number % 64);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// The definition: a set of all numbers, and the newest.
    #[derive(Default)]
    struct Naive(BTreeSet<u64>);

    impl Naive {
        fn accept(&mut self, number: u64) -> bool {
            let end = self.0.last().map_or(0, |newest| newest + 1);
            number + REPLAY_WINDOW_PACKETS >= end && self.0.insert(number)
        }
    }

    proptest! {
        #[test]
        fn agrees_with_the_naive_model(
            steps in proptest::collection::vec((any::<bool>(), 0_u64..20_000), 1..300),
        ) {
            let mut window = ReplayWindow::default();
            let mut naive = Naive::default();
            let mut newest = 0_u64;
            for (is_forward, distance) in steps {
                let number = if is_forward {
                    newest + distance % 300 * (1 + distance % 3 * 40)
                } else {
                    newest.saturating_sub(distance / 2)
                };
                let expected = naive.accept(number);
                prop_assert_eq!(window.is_fresh(number), expected);
                prop_assert_eq!(window.accept(number), expected);
                prop_assert!(!window.is_fresh(number));
                newest = newest.max(number);
            }
        }
    }

    #[test]
    fn the_window_is_as_wide_as_promised() {
        const { assert!(REPLAY_WINDOW_PACKETS >= 4096) };
        let mut window = ReplayWindow::default();
        assert!(window.accept(1_000_000));
        assert!(window.is_fresh(1_000_001 - REPLAY_WINDOW_PACKETS));
        assert!(!window.is_fresh(1_000_000 - REPLAY_WINDOW_PACKETS));
        assert!(!window.accept(u64::MAX));
    }
}
