//! A bitmap with one bit for each unit of a message.

use std::ops::Range;

/// Longest gap of clear words inside a piece: it costs no more than the header of another slice.
const GAP_WORDS: usize = 2;

/// A fixed number of bits with the count of set bits and the position of the first clear one.
#[derive(Debug, Clone)]
pub struct Bitmap {
    words: Vec<u64>,
    length: u32,
    set_count: u32,
    first_clear: u32,
}

impl Bitmap {
    /// Creates a bitmap of `length` bits, all clear.
    #[must_use]
    pub fn new(length: u32) -> Self {
        let words = vec![0; length.div_ceil(64) as usize];
        Self { words, length, set_count: 0, first_clear: 0 }
    }

    /// Whether all bits are set.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.set_count == self.length
    }

    /// Number of set bits.
    #[must_use]
    pub fn set_count(&self) -> u32 {
        self.set_count
    }

    /// Index of the first clear bit.
    #[must_use]
    pub fn first_clear(&self) -> u32 {
        self.first_clear
    }

    /// Whether a bit is set; false past the end.
    #[must_use]
    pub fn get(&self, index: u32) -> bool {
        let word = self.words.get((index / 64) as usize);
        word.is_some_and(|word| word & (1 << (index % 64)) != 0)
    }

    /// Sets a bit; returns whether this call changed it.
    pub fn set(&mut self, index: u32) -> bool {
        if index >= self.length || self.get(index) {
            return false;
        }
        self.words[(index / 64) as usize] |= 1 << (index % 64);
        self.set_count += 1;
        if index == self.first_clear {
            self.advance();
        }
        true
    }

    /// Clears a bit.
    pub fn clear(&mut self, index: u32) {
        if self.get(index) {
            self.words[(index / 64) as usize] &= !(1 << (index % 64));
            self.set_count -= 1;
            self.first_clear = self.first_clear.min(index);
        }
    }

    /// Sets all bits below `end`.
    pub fn set_below(&mut self, end: u32) {
        for index in self.first_clear..end.min(self.length) {
            self.set(index);
        }
    }

    /// Sets the bits that are set in `bytes`, starting at bit `start` (a multiple of 8).
    pub fn merge(&mut self, start: u32, bytes: &[u8]) {
        for (byte, at) in bytes.iter().zip((start..self.length).step_by(8)) {
            let word = &mut self.words[(at / 64) as usize];
            let valid = if self.length - at < 8 { (1 << (self.length - at)) - 1 } else { 0xff };
            let fresh = (u64::from(byte & valid) << (at % 64)) & !*word;
            *word |= fresh;
            self.set_count += fresh.count_ones();
        }
        self.advance();
    }

    /// Appends up to `count` bytes, starting at bit `start` (a multiple of 8), in the format of
    /// [`Self::merge`].
    pub fn extract(&self, start: u32, count: usize, out: &mut Vec<u8>) {
        let positions = (start..self.length).step_by(8).take(count);
        out.extend(positions.map(|at| (self.words[(at / 64) as usize] >> (at % 64)) as u8));
    }

    /// Number of set bits in `start..end`.
    #[must_use]
    pub fn count(&self, start: u32, end: u32) -> u32 {
        self.count_with(start, end, |_, word| word)
    }

    /// Number of bits in `start..end` that are set here and clear in `other` (of equal length).
    #[must_use]
    pub fn count_without(&self, other: &Self, start: u32, end: u32) -> u32 {
        self.count_with(start, end, |index, word| word & !other.words[index])
    }

    /// The first piece at or after bit `start` (a multiple of 8): it begins at a multiple of 8, ends
    /// after a set bit, and has gaps of at most [`GAP_WORDS`] clear words. `None` if no bit is set
    /// there. The length of all pieces together grows with the number of set bits, not with their
    /// positions.
    #[must_use]
    pub fn piece(&self, start: u32) -> Option<Range<u32>> {
        let first = (start / 64) as usize;
        let word = |index: usize| {
            let mask = if index == first { u64::MAX << (start % 64) } else { u64::MAX };
            self.words[index] & mask
        };
        let begin = (first..self.words.len()).find(|index| word(*index) != 0)?;
        let mut last = begin;
        for index in begin + 1..self.words.len() {
            if self.words[index] != 0 {
                last = index;
            } else if index - last > GAP_WORDS {
                break;
            }
        }
        let set_at = begin as u32 * 64 + (word(begin).trailing_zeros() & !7);
        Some(set_at..last as u32 * 64 + 64 - word(last).leading_zeros())
    }

    fn count_with(&self, start: u32, end: u32, pick: impl Fn(usize, u64) -> u64) -> u32 {
        let end = end.min(self.length);
        let mut count = 0;
        let mut at = start;
        while at < end {
            let index = (at / 64) as usize;
            let stop = end.min((at / 64 + 1) * 64);
            let width = stop - at;
            let mask = if width == 64 { u64::MAX } else { ((1 << width) - 1) << (at % 64) };
            count += (pick(index, self.words[index]) & mask).count_ones();
            at = stop;
        }
        count
    }

    fn advance(&mut self) {
        while self.first_clear < self.length {
            let word = self.words[(self.first_clear / 64) as usize] >> (self.first_clear % 64);
            let run = (!word).trailing_zeros().min(64 - self.first_clear % 64);
            if run == 0 {
                return;
            }
            self.first_clear = (self.first_clear + run).min(self.length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Operation {
        Set(u32),
        Clear(u32),
        SetBelow(u32),
        Merge(u32, Vec<u8>),
    }

    fn operations() -> impl Strategy<Value = Vec<Operation>> {
        let bytes = proptest::collection::vec(any::<u8>(), 0..12);
        let one = prop_oneof![
            4 => (0_u32..320).prop_map(Operation::Set),
            1 => (0_u32..320).prop_map(Operation::Clear),
            1 => (0_u32..320).prop_map(Operation::SetBelow),
            1 => (0_u32..40, bytes).prop_map(|(start, bytes)| Operation::Merge(start * 8, bytes)),
        ];
        proptest::collection::vec(one, 0..60)
    }

    proptest! {
        #[test]
        fn agrees_with_a_vector_of_booleans(
            length in 0_u32..300, operations in operations(), range in (0_u32..300, 0_u32..300),
        ) {
            let mut bitmap = Bitmap::new(length);
            let mut naive = vec![false; length as usize];
            for operation in operations {
                match operation {
                    Operation::Set(at) => {
                        let expected = naive.get(at as usize).is_some_and(|bit| !bit);
                        prop_assert_eq!(bitmap.set(at), expected);
                        if expected { naive[at as usize] = true; }
                    }
                    Operation::Clear(at) => {
                        bitmap.clear(at);
                        if let Some(bit) = naive.get_mut(at as usize) { *bit = false; }
                    }
                    Operation::SetBelow(end) => {
                        bitmap.set_below(end);
                        naive.iter_mut().take(end as usize).for_each(|bit| *bit = true);
                    }
                    Operation::Merge(start, bytes) => {
                        bitmap.merge(start, &bytes);
                        for (i, bit) in naive.iter_mut().enumerate().skip(start as usize) {
                            let j = i - start as usize;
                            *bit |= bytes.get(j / 8).is_some_and(|byte| byte >> (j % 8) & 1 == 1);
                        }
                    }
                }
            }
            let ones = naive.iter().filter(|bit| **bit).count();
            prop_assert_eq!(bitmap.is_full(), ones == naive.len());
            let first = naive.iter().position(|bit| !bit).unwrap_or(naive.len());
            prop_assert_eq!(bitmap.first_clear() as usize, first);
            let (start, end) = (range.0.min(range.1), range.0.max(range.1));
            let inside = |i: &usize| (start as usize..end as usize).contains(i);
            let expected = (0..naive.len()).filter(inside).filter(|i| naive[*i]).count();
            prop_assert_eq!(bitmap.count(start, end) as usize, expected);
            prop_assert_eq!(bitmap.count_without(&bitmap, start, end), 0);
            let mut bytes = Vec::new();
            bitmap.extract(0, usize::MAX, &mut bytes);
            let mut copy = Bitmap::new(length);
            copy.merge(0, &bytes);
            prop_assert_eq!(copy.words, bitmap.words);
            prop_assert_eq!(copy.set_count, bitmap.set_count);
        }
    }

    proptest! {
        #[test]
        fn pieces_have_every_set_bit_once_and_cost_what_is_set(
            set in proptest::collection::btree_set(0_u32..100_000, 0..40), start in 0_u32..12_500,
        ) {
            let start = start * 8;
            let mut bitmap = Bitmap::new(100_000);
            let mut again = Bitmap::new(100_000);
            for index in &set {
                bitmap.set(*index);
            }
            let (mut at, mut bytes) = (start, 0);
            while let Some(piece) = bitmap.piece(at) {
                prop_assert!(piece.start >= at && piece.start.is_multiple_of(8));
                let mut told = Vec::new();
                let count = (piece.end - piece.start).div_ceil(8) as usize;
                bitmap.extract(piece.start, count, &mut told);
                again.merge(piece.start, &told);
                bytes += told.len();
                at = piece.start + 8 * count as u32;
            }
            let expected: Vec<u32> = set.range(start..).copied().collect();
            let found: Vec<u32> = (0..100_000).filter(|index| again.get(*index)).collect();
            prop_assert_eq!(found, expected);
            prop_assert!(bytes <= 8 * (GAP_WORDS + 2) * set.len());
        }
    }
}
