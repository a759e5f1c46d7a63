//! Tracks which bytes of a region are in use; only the job's process does so, not the daemon.

use std::collections::BTreeMap;

/// First-fit allocator over the free ranges, none of which are adjacent.
#[derive(Debug)]
pub struct Allocator {
    /// Start of each free range to its length, which is never 0.
    free: BTreeMap<u64, u64>,
}

impl Allocator {
    /// Creates an allocator with `0..size_bytes` free.
    #[must_use]
    pub fn new(size_bytes: u64) -> Self {
        Self { free: BTreeMap::from_iter((size_bytes > 0).then_some((0, size_bytes))) }
    }

    /// Allocates `length` bytes at a multiple of `alignment`, a power of two. `None` if no free
    /// range is large enough. A length of 0 takes nothing.
    pub fn allocate(&mut self, length: u64, alignment: u64) -> Option<u64> {
        if length == 0 {
            return Some(0);
        }
        let fits = |(start, free): (&u64, &u64)| {
            let aligned = start.checked_next_multiple_of(alignment)?;
            let end = aligned.checked_add(length)?;
            (end <= start + free).then_some((*start, *free, aligned))
        };
        let (start, free, aligned) = self.free.iter().find_map(fits)?;
        self.free.remove(&start);
        if aligned > start {
            self.free.insert(start, aligned - start);
        }
        let (end, free_end) = (aligned + length, start + free);
        if end < free_end {
            self.free.insert(end, free_end - end);
        }
        Some(aligned)
    }

    /// Frees a range that `allocate` returned.
    pub fn release(&mut self, offset: u64, length: u64) {
        if length == 0 {
            return;
        }
        let (mut start, mut end) = (offset, offset + length);
        if let Some((before, free)) = self.free.range(..offset).next_back()
            && before + free == offset
        {
            start = *before;
        }
        if let Some(free) = self.free.remove(&end) {
            end += free;
        }
        self.free.insert(start, end - start);
    }

    /// Total free bytes, and the length of the longest free range.
    #[must_use]
    pub fn free_bytes(&self) -> (u64, u64) {
        (self.free.values().sum(), self.free.values().copied().max().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_given_back_is_whole_again() {
        let mut allocator = Allocator::new(100);
        let parts: Vec<u64> = (0..4).map(|_| allocator.allocate(25, 1).unwrap()).collect();
        assert_eq!(allocator.allocate(1, 1), None);
        assert_eq!(allocator.allocate(0, 64), Some(0));
        for part in [1, 3, 0, 2] {
            allocator.release(parts[part], 25);
        }
        assert_eq!(allocator.free_bytes(), (100, 100));
        assert_eq!(allocator.allocate(100, 64), Some(0));
    }

    #[test]
    fn alignment_leaves_the_bytes_before_free() {
        let mut allocator = Allocator::new(256);
        allocator.allocate(1, 1).unwrap();
        assert_eq!(allocator.allocate(10, 64), Some(64));
        assert_eq!(allocator.allocate(63, 1), Some(1));
        assert_eq!(allocator.allocate(u64::MAX, 1), None);
        assert_eq!(Allocator::new(0).allocate(1, 1), None);
    }

    proptest! {
        /// For any order of allocations and releases, ranges lie inside, are aligned, and do not
        /// overlap.
        #[test]
        fn ranges_never_overlap(
            steps in prop::collection::vec((1_u64..300, 0_u32..8, any::<prop::sample::Index>(), any::<bool>()), 1..80)
        ) {
            let mut allocator = Allocator::new(2000);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (length, power, index, gives_back) in steps {
                if gives_back && !taken.is_empty() {
                    let (offset, length) = taken.swap_remove(index.index(taken.len()));
                    allocator.release(offset, length);
                } else if let Some(offset) = allocator.allocate(length, 1 << power) {
                    prop_assert!(offset.is_multiple_of(1 << power) && offset + length <= 2000);
                    prop_assert!(taken.iter().all(|(o, l)| offset + length <= *o || o + l <= offset));
                    taken.push((offset, length));
                } else {
                    let (free, longest) = allocator.free_bytes();
                    prop_assert!(longest < length + (1 << power) && longest <= free);
                }
                let used: u64 = taken.iter().map(|(_, length)| length).sum();
                prop_assert_eq!(allocator.free_bytes().0, 2000 - used);
            }
        }
    }
}
