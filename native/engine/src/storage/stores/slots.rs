//! The bitmap of used slots of an out-of-place store.

/// Slots per word of the bitmap.
const WORD: u64 = 64;

/// Free and used slots. Consecutive free slots are preferred, so that a large write stays one write
/// on the device.
#[derive(Debug)]
pub struct Slots {
    used: Vec<u64>,
    count: u64,
    free: u64,
    cursor: u64,
}

impl Slots {
    /// `count` free slots.
    #[must_use]
    pub fn new(count: u64) -> Self {
        let mut used = vec![0; count.div_ceil(WORD) as usize];
        if let Some(last) = used.last_mut()
            && !count.is_multiple_of(WORD)
        {
            *last = u64::MAX << (count % WORD);
        }
        Self { used, count, free: count, cursor: 0 }
    }

    /// Free slots.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Extends the bitmap to `count` slots; the new ones are free.
    ///
    /// # Panics
    /// If `count` is smaller than before.
    pub fn extend(&mut self, count: u64) {
        assert!(count >= self.count, "slots are never taken away");
        let beyond = |count: u64| u64::MAX << (count % WORD);
        if let Some(last) = self.used.last_mut()
            && !self.count.is_multiple_of(WORD)
        {
            *last &= !beyond(self.count);
        }
        self.used.resize(count.div_ceil(WORD) as usize, 0);
        if let Some(last) = self.used.last_mut()
            && !count.is_multiple_of(WORD)
        {
            *last |= beyond(count);
        }
        self.free += count - self.count;
        self.count = count;
    }

    /// Marks a slot that a recovered map refers to. Returns false if the slot is beyond the store
    /// or already used.
    pub fn claim(&mut self, slot: u64) -> bool {
        let Some(word) = self.used.get_mut((slot / WORD) as usize) else { return false };
        let bit = 1 << (slot % WORD);
        let is_free = *word & bit == 0;
        *word |= bit;
        self.free -= u64::from(is_free);
        is_free
    }

    /// Takes `count` free slots, or none if there are fewer.
    pub fn take(&mut self, count: u64) -> Option<Vec<u64>> {
        if count > self.free {
            return None;
        }
        let mut taken = Vec::with_capacity(count as usize);
        while (taken.len() as u64) < count {
            let index = (self.cursor / WORD) as usize;
            let Some(word) = self.used.get_mut(index) else {
                self.cursor = 0;
                continue;
            };
            let offset = self.cursor % WORD;
            // Used slots in this word from the cursor on.
            let run = (*word >> offset).trailing_ones();
            if run > 0 {
                self.cursor += u64::from(run).min(WORD - offset);
                continue;
            }
            *word |= 1 << offset;
            taken.push(self.cursor);
            self.cursor += 1;
        }
        self.free -= count;
        Some(taken)
    }

    /// Frees slots.
    ///
    /// # Panics
    /// If a slot isn't in use: two blocks would share it.
    pub fn release(&mut self, slots: impl IntoIterator<Item = u64>) {
        for slot in slots {
            let bit = 1 << (slot % WORD);
            let word = &mut self.used[(slot / WORD) as usize];
            assert!(*word & bit != 0 && slot < self.count, "slot {slot} isn't taken");
            *word &= !bit;
            self.free += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn consecutive_slots_come_first() {
        let mut slots = Slots::new(200);
        assert_eq!(slots.take(100), Some((0..100).collect()));
        slots.release(20..40);
        assert_eq!(slots.take(100), Some((100..200).collect()));
        assert_eq!(slots.take(21), None);
        assert_eq!(slots.take(20), Some((20..40).collect()));
    }

    #[test]
    fn claims_are_refused_twice_and_beyond_the_end() {
        let mut slots = Slots::new(70);
        assert!(slots.claim(69));
        assert!(!slots.claim(69) && !slots.claim(70) && !slots.claim(u64::MAX));
        assert_eq!(slots.free(), 69);
    }

    #[test]
    fn slots_that_are_added_are_free_and_the_others_stay_taken() {
        for (before, after) in [(70, 70), (70, 100), (64, 65), (60, 300), (130, 192)] {
            let mut slots = Slots::new(before);
            slots.take(before).expect("all");
            slots.extend(after);
            assert_eq!(slots.free(), after - before);
            assert_eq!(slots.take(after - before), Some((before..after).collect()));
            assert_eq!(slots.take(1), None);
        }
    }

    #[test]
    #[should_panic(expected = "isn't taken")]
    fn releasing_a_free_slot_is_a_defect() {
        Slots::new(70).release([3]);
    }

    proptest! {
        #[test]
        fn no_slot_has_two_owners(
            count in 1u64..300, steps in prop::collection::vec((any::<bool>(), 1u64..40), 1..60)
        ) {
            let mut slots = Slots::new(count);
            let mut taken = HashSet::new();
            for (is_take, number) in steps {
                if is_take {
                    match slots.take(number) {
                        Some(fresh) => for slot in fresh {
                            prop_assert!(slot < count && taken.insert(slot));
                        },
                        None => prop_assert!(number > count - taken.len() as u64),
                    }
                } else {
                    let back: Vec<_> = taken.iter().copied().take(number as usize).collect();
                    for slot in &back { taken.remove(slot); }
                    slots.release(back);
                }
                prop_assert_eq!(slots.free(), count - taken.len() as u64);
            }
        }
    }
}
