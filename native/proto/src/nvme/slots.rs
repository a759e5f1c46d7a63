//! Numbered slots for outstanding commands.

/// A bounded table that finds a free number without a search.
#[derive(Debug)]
pub struct Slots<T> {
    entries: Vec<Option<T>>,
    /// The number freed last is used first, as its entry is in the processor's caches.
    free: Vec<u16>,
}

impl<T> Slots<T> {
    /// Creates a table of `count` free slots, used from 0 on.
    #[must_use]
    pub fn new(count: u16) -> Self {
        Self { entries: (0..count).map(|_| None).collect(), free: (0..count).rev().collect() }
    }

    /// Puts an entry into a free slot and returns its number; `None` if there is none.
    pub fn insert(&mut self, entry: T) -> Option<u16> {
        let number = self.free.pop()?;
        *self.entries.get_mut(usize::from(number))? = Some(entry);
        Some(number)
    }

    /// Removes an entry and frees its number.
    pub fn take(&mut self, number: u16) -> Option<T> {
        let entry = self.entries.get_mut(usize::from(number)).and_then(Option::take)?;
        self.free.push(number);
        Some(entry)
    }

    /// The entry with this number.
    #[must_use]
    pub fn get(&self, number: u16) -> Option<&T> {
        self.entries.get(usize::from(number)).and_then(Option::as_ref)
    }

    /// The entry with this number.
    pub fn get_mut(&mut self, number: u16) -> Option<&mut T> {
        self.entries.get_mut(usize::from(number)).and_then(Option::as_mut)
    }

    /// The lowest number whose entry fits.
    pub fn find(&self, fits: impl Fn(&T) -> bool) -> Option<u16> {
        let found = self.entries.iter().position(|entry| entry.as_ref().is_some_and(&fits));
        found.map(|index| index as u16)
    }

    /// The number that the next entry gets; `None` if no slot is free.
    #[must_use]
    pub fn next_free(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Number of entries.
    #[must_use]
    pub fn count(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Number of free slots.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_are_unique_while_taken_and_free_again_afterwards(
            count in 1u16..9,
            steps in proptest::collection::vec((any::<bool>(), 0u16..10), 1..80),
        ) {
            let mut slots = Slots::new(count);
            let mut model = BTreeMap::new();
            for (step, (inserts, number)) in steps.into_iter().enumerate() {
                if inserts {
                    let next = slots.next_free();
                    let number = slots.insert(step);
                    prop_assert_eq!(number, next);
                    prop_assert_eq!(number.is_none(), model.len() == usize::from(count));
                    if let Some(number) = number {
                        prop_assert!(number < count);
                        prop_assert_eq!(model.insert(number, step), None);
                    }
                } else {
                    prop_assert_eq!(slots.take(number), model.remove(&number));
                }
                prop_assert_eq!(slots.get(number), model.get(&number));
                prop_assert_eq!(slots.count(), model.len());
                prop_assert_eq!(slots.free(), usize::from(count) - model.len());
                let found = slots.find(|entry| entry.is_multiple_of(2));
                let first = model.iter().find(|(_, entry)| entry.is_multiple_of(2));
                prop_assert_eq!(found, first.map(|(number, _)| *number));
            }
        }
    }
}
