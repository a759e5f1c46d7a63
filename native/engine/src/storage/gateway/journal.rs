//! Changes that the target acknowledged and may still lose: sent again when it restarts.
//!
//! In the order of their acknowledgement. Overlapping changes never run at the same time (see
//! [`super::ranges`]), so that order is the order in which the target made them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use sealane_proto::sector::BLOCK_BYTES;

/// What one entry costs besides its sectors.
const ENTRY_BYTES: usize = 128;
/// Least bound: less wouldn't hold the longest command of a queue or two.
pub const JOURNAL_BYTES_MIN: usize = 1024 * 1024;
/// Buffers kept for the next writes.
const SPARE_BUFFERS: usize = 64;

/// A change as it was sent and can be sent again.
#[derive(Debug, Clone)]
pub(super) enum Change {
    /// Sealed sectors from `lba` on, MAC fields zero.
    Write {
        /// First LBA.
        lba: u64,
        /// Whole blocks: the identical ciphertext, never sealed anew.
        blocks: Arc<Vec<u8>>,
    },
    /// Blocks that are no longer written.
    Deallocate(Arc<[Range<u64>]>),
}

impl Change {
    /// What a write of so many sealed bytes counts against the journal's bound.
    pub(super) fn write_cost(bytes: usize) -> usize {
        ENTRY_BYTES + bytes
    }

    /// The blocks it changes.
    pub(super) fn ranges(&self) -> Arc<[Range<u64>]> {
        match self {
            Self::Write { lba, blocks } => {
                let range = *lba..*lba + (blocks.len() / BLOCK_BYTES) as u64;
                Arc::new([range])
            }
            Self::Deallocate(ranges) => Arc::clone(ranges),
        }
    }

    /// What the change counts against the journal's bound.
    pub(super) fn cost(&self) -> usize {
        match self {
            Self::Write { blocks, .. } => Self::write_cost(blocks.len()),
            Self::Deallocate(ranges) => ENTRY_BYTES + ranges.len().max(1) * size_of::<Range<u64>>(),
        }
    }
}

/// Position in the journal: everything acknowledged before it is older.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark(u64);

/// Changes acknowledged since the last flush, bounded in bytes.
#[derive(Debug)]
pub(super) struct Journal {
    entries: VecDeque<Change>,
    /// Position of the first entry.
    first: u64,
    bytes: usize,
    /// Room promised to changes that are on their way.
    reserved: usize,
    bytes_max: usize,
    spare: Vec<Vec<u8>>,
}

impl Journal {
    /// An empty journal of at most `bytes_max` bytes, but at least [`JOURNAL_BYTES_MIN`].
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            entries: VecDeque::new(),
            first: 0,
            bytes: 0,
            reserved: 0,
            bytes_max: bytes_max.max(JOURNAL_BYTES_MIN),
            spare: Vec::new(),
        }
    }

    /// Promises room to a change that is about to be sent. False: flush first.
    pub(super) fn reserve(&mut self, cost: usize) -> bool {
        let fits = self.bytes + self.reserved + cost <= self.bytes_max;
        if fits {
            self.reserved += cost;
        }
        fits
    }

    /// The change failed: nothing of it needs to be sent again.
    pub(super) fn release(&mut self, cost: usize) {
        self.reserved -= cost;
    }

    /// The change, whose room is reserved, is acknowledged.
    pub(super) fn push(&mut self, change: Change) {
        let cost = change.cost();
        self.reserved -= cost;
        self.bytes += cost;
        self.entries.push_back(change);
    }

    /// Where the journal ends now: a flush that is submitted from here on covers what is before.
    pub(super) fn mark(&self) -> Mark {
        Mark(self.first + self.entries.len() as u64)
    }

    /// A flush submitted at `mark` succeeded: exactly what was acknowledged before is durable.
    pub(super) fn flushed(&mut self, mark: Mark) {
        while self.first < mark.0
            && let Some(change) = self.entries.pop_front()
        {
            self.first += 1;
            self.bytes -= change.cost();
            if let Change::Write { blocks, .. } = change
                && self.spare.len() < SPARE_BUFFERS
                && let Ok(buffer) = Arc::try_unwrap(blocks)
            {
                self.spare.push(buffer);
            }
        }
    }

    /// A buffer of `bytes` for a change, reused if there is one; contents unspecified.
    pub(super) fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.resize(bytes, 0);
        buffer
    }

    /// The entries from position `from` on, oldest first.
    pub(super) fn since(&self, from: u64) -> Option<(u64, &Change)> {
        let index = from.max(self.first) - self.first;
        self.entries.get(index as usize).map(|change| (self.first + index, change))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes held, without what is only promised.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn write(lba: u64, bytes: usize) -> Change {
        Change::Write { lba, blocks: Arc::new(vec![1; bytes]) }
    }

    fn add(journal: &mut Journal, change: Change) -> bool {
        let fits = journal.reserve(change.cost());
        if fits {
            journal.push(change);
        }
        fits
    }

    fn lbas(journal: &Journal) -> Vec<u64> {
        let (mut found, mut from) = (Vec::new(), 0);
        while let Some((position, change)) = journal.since(from) {
            let Change::Write { lba, .. } = change else { panic!("only writes here") };
            found.push(*lba);
            from = position + 1;
        }
        found
    }

    #[test]
    fn a_flush_drops_what_was_acknowledged_before_it_was_submitted_and_nothing_else() {
        let mut journal = Journal::new(0);
        assert!(add(&mut journal, write(1, 10)) && add(&mut journal, write(2, 10)));
        let on_its_way = write(3, 10);
        assert!(journal.reserve(on_its_way.cost()));
        let mark = journal.mark();
        journal.push(on_its_way);
        journal.flushed(mark);
        assert_eq!(lbas(&journal), [3]);
        journal.flushed(mark);
        assert_eq!(lbas(&journal), [3], "an old flush drops nothing twice");
        journal.flushed(journal.mark());
        assert!(journal.is_empty());
        assert_eq!(journal.bytes(), 0);
    }

    #[test]
    fn the_bound_counts_what_is_held_and_what_is_promised() {
        let mut journal = Journal::new(0);
        let half = write(1, JOURNAL_BYTES_MIN / 2 - ENTRY_BYTES);
        assert!(add(&mut journal, half.clone()));
        assert!(journal.reserve(half.cost()));
        assert!(!journal.reserve(1));
        journal.release(half.cost());
        assert!(journal.reserve(half.cost()));
        journal.push(half);
        assert!(!journal.reserve(1));
        journal.flushed(journal.mark());
        assert!(journal.reserve(JOURNAL_BYTES_MIN));
    }

    proptest! {
        #[test]
        fn bytes_are_those_of_the_entries(steps in proptest::collection::vec((0u8..3, 1usize..9000), 1..80)) {
            let mut journal = Journal::new(0);
            let mut model: VecDeque<usize> = VecDeque::new();
            for (step, size) in steps {
                if step == 0 {
                    journal.flushed(journal.mark());
                } else {
                    let change = write(0, size);
                    let cost = change.cost();
                    let fits = model.iter().sum::<usize>() + cost <= JOURNAL_BYTES_MIN;
                    prop_assert_eq!(add(&mut journal, change), fits);
                    if fits { model.push_back(cost) }
                }
                if step == 0 { model.clear() }
                prop_assert_eq!(journal.bytes(), model.iter().sum::<usize>());
            }
        }
    }
}
