//! Replay window of one (key epoch, channel), like RFC 6479: a ring of words that only moves
//! forward.

/// Fewest and most words of the ring, powers of two: 1 KiB and 128 KiB.
const WORDS_MIN: u64 = 128;
const WORDS_MAX: u64 = 1 << 14;

/// The packet numbers seen.
#[derive(Debug)]
pub struct ReplayWindow {
    /// The length is a power of two.
    words: Box<[u64]>,
    /// One more than the newest number seen.
    end: u64,
}

impl ReplayWindow {
    /// Starts with no number seen. The window is at least `packets` wide, up to a million; older
    /// numbers are refused.
    #[must_use]
    pub fn new(packets: u64) -> Self {
        let words = (packets.div_ceil(64) + 1).clamp(WORDS_MIN, WORDS_MAX).next_power_of_two();
        Self { words: vec![0; words as usize].into(), end: 0 }
    }

    /// Width of the window below the newest packet number.
    #[must_use]
    pub fn packets(&self) -> u64 {
        (self.words.len() as u64 - 1) * 64
    }

    fn word(&mut self, word: u64) -> &mut u64 {
        let mask = self.words.len() - 1;
        &mut self.words[word as usize & mask]
    }

    /// Whether this packet number may still be accepted. It changes nothing, so it may be used for
    /// packets that are not authenticated yet.
    #[must_use]
    pub fn is_fresh(&self, number: u64) -> bool {
        if number >= self.end {
            return true;
        }
        if self.end - number > self.packets() {
            return false;
        }
        let mask = self.words.len() - 1;
        self.words[(number / 64) as usize & mask] & (1 << (number % 64)) == 0
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
            for word in first..=last.min(first + self.words.len() as u64 - 1) {
                *self.word(word) = 0;
            }
            self.end = number + 1;
        }
        *self.word(number / 64) |= 1 << (number % 64);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// The definition: a set of all numbers, and the newest; and how far below it one may be.
    struct Naive(BTreeSet<u64>, u64);

    impl Naive {
        fn accept(&mut self, number: u64) -> bool {
            let end = self.0.last().map_or(0, |newest| newest + 1);
            number + self.1 >= end && self.0.insert(number)
        }
    }

    proptest! {
        #[test]
        fn agrees_with_the_naive_model(
            steps in proptest::collection::vec((any::<bool>(), 0_u64..20_000), 1..300),
            packets in 0_u64..20_000,
        ) {
            let mut window = ReplayWindow::new(packets);
            prop_assert!(window.packets() >= packets);
            let mut naive = Naive(BTreeSet::new(), window.packets());
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
        let widths = [0, 8128, 8129, 100_000, u64::MAX].map(|packets| {
            let mut window = ReplayWindow::new(packets);
            let width = window.packets();
            assert!(window.accept(10_000_000));
            assert!(window.is_fresh(10_000_001 - width));
            assert!(!window.is_fresh(10_000_000 - width));
            assert!(!window.accept(u64::MAX));
            width
        });
        assert_eq!(widths, [8128, 8128, 16_320, 131_008, 1_048_512]);
    }
}
