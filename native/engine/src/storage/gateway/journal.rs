//! Changes that the target acknowledged and may still lose: sent again when it restarts.
//!
//! In the order of their acknowledgement. Overlapping changes never run at the same time (see
//! [`super::ranges`]), so that order is the order in which the target made them. Of each block only
//! the newest version is sent again: an older one would undo, until the newer one follows, what was
//! acknowledged as durable (FUA) or what another gateway has flushed.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use sealane_proto::nvme::operation::RANGES_MAX;
use sealane_proto::sector::BLOCK_BYTES;

use super::ranges::{BlockRanges, Cover};
use super::request::Sent;

/// What one entry costs besides its sectors.
const ENTRY_BYTES: usize = 128;
/// Least bound: less wouldn't hold the longest command of a queue or two.
pub const JOURNAL_BYTES_MIN: usize = 1024 * 1024;

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
    Deallocate(BlockRanges),
}

impl Change {
    /// What a write of so many sealed bytes counts against the journal's bound.
    pub(super) fn write_cost(bytes: usize) -> usize {
        ENTRY_BYTES + bytes
    }

    /// The blocks it changes.
    pub(super) fn ranges(&self) -> BlockRanges {
        match self {
            Self::Write { lba, blocks } => {
                BlockRanges::one(*lba, (blocks.len() / BLOCK_BYTES) as u64)
            }
            Self::Deallocate(ranges) => ranges.clone(),
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

/// A part of a change that is sent again: blocks of which the journal has nothing newer.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    /// A write in whole, or a deallocation of these blocks only.
    pub(super) change: Change,
    /// Of a write: the first of the blocks, and how many they are; else 0.
    pub(super) lba: u64,
    pub(super) blocks: u32,
    /// Where it was sent last, if it has no answer.
    pub(super) sent: Option<Sent>,
    /// Ranges of the deallocation that are done.
    pub(super) ranges_done: usize,
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
    spares: Spares,
}

/// Buffers of flushed changes, kept for the next ones: asking the allocator for the whole journal
/// anew after each flush costs more than what is written to them. By length, so that no buffer
/// holds more memory than its change counts.
#[derive(Debug, Default)]
struct Spares {
    by_length: BTreeMap<usize, Vec<Vec<u8>>>,
    bytes: usize,
}

impl Spares {
    fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        let buffer = self.by_length.get_mut(&length)?.pop()?;
        self.bytes -= length;
        Some(buffer)
    }

    fn keep(&mut self, buffer: Vec<u8>) {
        self.bytes += buffer.len();
        self.by_length.entry(buffer.len()).or_default().push(buffer);
    }

    /// Lets buffers go until those kept have at most `bytes_max`.
    fn shrink(&mut self, bytes_max: usize) {
        while self.bytes > bytes_max
            && let Some(mut entry) = self.by_length.first_entry()
        {
            match entry.get_mut().pop() {
                Some(buffer) => self.bytes -= buffer.len(),
                None => drop(entry.remove()),
            }
        }
    }
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
            spares: Spares::default(),
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

    /// Whether what a flush would drop takes half of the bound.
    pub(super) fn is_half_full(&self) -> bool {
        self.bytes >= self.bytes_max / 2
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
        self.trim();
    }

    /// Lets spare buffers go that there is no room for.
    fn trim(&mut self) {
        self.spares.shrink(self.bytes_max.saturating_sub(self.bytes + self.reserved));
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
                && let Ok(buffer) = Arc::try_unwrap(blocks)
            {
                self.spares.keep(buffer);
            }
        }
    }

    /// A buffer of `bytes` for a change whose room is reserved, reused if there is one; contents
    /// unspecified. What is held, promised and spare is within the bound together.
    pub(super) fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        self.spares.take(bytes).unwrap_or_else(|| {
            self.trim();
            vec![0; bytes]
        })
    }

    /// What must be sent again to a target that has lost what wasn't flushed: the newest version of
    /// each block, once.
    pub(super) fn pieces(&self) -> Vec<Piece> {
        let mut newer = Cover::default();
        let mut pieces = Vec::new();
        for change in self.entries.iter().rev() {
            let left: Vec<Range<u64>> =
                change.ranges().iter().flat_map(|range| newer.add(range.clone())).collect();
            let piece = |change, lba, blocks| {
                let (sent, ranges_done) = (None, 0);
                Piece { change, lba, blocks, sent, ranges_done }
            };
            match change {
                Change::Write { .. } => pieces.extend(left.into_iter().map(|range| {
                    piece(change.clone(), range.start, (range.end - range.start) as u32)
                })),
                Change::Deallocate(_) => pieces.extend(left.chunks(RANGES_MAX).map(|ranges| {
                    piece(Change::Deallocate(BlockRanges::Many(ranges.into())), 0, 0)
                })),
            }
        }
        pieces
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
        let lba = |change: &Change| {
            let Change::Write { lba, .. } = change else { panic!("only writes here") };
            *lba
        };
        journal.entries.iter().map(lba).collect()
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

    #[test]
    fn flushed_buffers_are_used_again_and_count_against_the_bound() {
        let mut journal = Journal::new(0);
        let bytes = JOURNAL_BYTES_MIN / 4;
        let mut kept = Vec::new();
        for lba in 0..3 {
            assert!(journal.reserve(Change::write_cost(bytes)));
            let blocks = journal.buffer(bytes);
            kept.push(blocks.as_ptr());
            journal.push(Change::Write { lba, blocks: Arc::new(blocks) });
        }
        journal.flushed(journal.mark());
        assert_eq!(journal.spares.bytes, 3 * bytes);
        let reused = journal.buffer(bytes);
        assert!(kept.contains(&reused.as_ptr()));
        // Another length finds none, and may only have what the spare ones leave it.
        assert!(journal.reserve(Change::write_cost(3 * bytes)));
        assert_eq!(journal.buffer(3 * bytes).len(), 3 * bytes);
        assert!(journal.spares.bytes + journal.reserved <= JOURNAL_BYTES_MIN);
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
