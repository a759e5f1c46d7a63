//! Changes that the target has acknowledged and may still lose; they are sent again when it
//! restarts.
//!
//! The journal is in order of acknowledgement. Overlapping changes never run concurrently (see
//! [`super::ranges`]), so the target made them in this order. Only the newest version of each block
//! is sent again: an older one would temporarily undo a change that was acknowledged as durable
//! (FUA) or that another gateway has flushed.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use sealane_proto::freshness::openings::Made;
use sealane_proto::nvme::operation::RANGES_MAX;
use sealane_proto::sector::BLOCK_BYTES;

use super::journal_pool::JournalPool;
use super::ranges::{BlockRanges, BlockSet};
use super::request::Sent;

/// Bytes counted for an entry in addition to its sectors.
const ENTRY_BYTES: usize = 128;
/// Minimum bound: less wouldn't hold the longest command of one or two queues.
pub const JOURNAL_BYTES_MIN: usize = 1024 * 1024;
/// Bytes that a journal takes from the pool at a time.
const GRAIN_BYTES: usize = 1024 * 1024;

/// A change in the form in which it was sent and can be sent again.
#[derive(Debug, Clone)]
pub(super) enum Change {
    /// Sealed sectors from `lba` on, MAC fields zero.
    Write {
        /// First LBA.
        lba: u64,
        /// Whole blocks: the identical ciphertext, never sealed again. Queues send from it, so it
        /// isn't changed; its memory is used again once nobody else holds it.
        blocks: Arc<Vec<u8>>,
    },
    /// Blocks to deallocate.
    Deallocate(BlockRanges),
}

impl Change {
    /// What a write of `bytes` sealed bytes counts against the journal's bound.
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

/// An acknowledged change, or the part of it that no newer entry replaces.
#[derive(Debug)]
struct Entry {
    change: Change,
    /// Of a write: its first block and number of blocks; otherwise 0.
    lba: u64,
    blocks: u32,
    /// Its opening and mark, if its target keeps marks.
    made: Option<Made>,
    /// What it counts against the bound.
    cost: usize,
}

impl Entry {
    fn ranges(&self) -> BlockRanges {
        match &self.change {
            Change::Write { .. } => BlockRanges::one(self.lba, self.blocks.into()),
            Change::Deallocate(ranges) => ranges.clone(),
        }
    }
}

/// A part of a change that is to be sent again: blocks without a newer version in the journal.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    /// Its position in the journal.
    pub(super) place: u64,
    /// The opening and mark of the change.
    pub(super) made: Option<Made>,
    /// The whole write, or a deallocation of just these blocks.
    pub(super) change: Change,
    /// Of a write: the first block and number of blocks to send; otherwise 0.
    pub(super) lba: u64,
    pub(super) blocks: u32,
    /// Where it was last sent, if there was no answer.
    pub(super) sent: Option<Sent>,
    /// Number of the deallocation's ranges that are done.
    pub(super) ranges_done: usize,
}

/// Position in the journal: everything before it was acknowledged earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark(u64);

/// Changes acknowledged since the last flush, bounded in bytes.
#[derive(Debug)]
pub(super) struct Journal {
    entries: VecDeque<Entry>,
    /// Position of the first entry.
    first: u64,
    bytes: usize,
    /// Bytes reserved for changes in flight.
    reserved: usize,
    bytes_max: usize,
    /// Limit on the bytes now held, reserved and kept as spares; what exceeds [`JOURNAL_BYTES_MIN`]
    /// is taken from the pool.
    room: usize,
    pool: JournalPool,
    spares: Spares,
}

/// Buffers of flushed changes, kept for later changes: allocating the whole journal again after
/// each flush costs more than filling it. Sorted by length, so that no buffer has more memory than
/// is counted for its change.
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

    /// Frees buffers until at most `bytes_max` bytes are kept.
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
    /// Creates an empty journal of at most `bytes_max` bytes, but no less than
    /// [`JOURNAL_BYTES_MIN`]; beyond this minimum it takes bytes from `pool`.
    pub(super) fn new(bytes_max: usize, pool: JournalPool) -> Self {
        pool.join();
        Self {
            entries: VecDeque::new(),
            first: 0,
            bytes: 0,
            reserved: 0,
            bytes_max: bytes_max.max(JOURNAL_BYTES_MIN),
            room: JOURNAL_BYTES_MIN,
            pool,
            spares: Spares::default(),
        }
    }

    /// Reserves room for a change that is about to be sent. False if the journal must be flushed
    /// first.
    pub(super) fn reserve(&mut self, cost: usize) -> bool {
        let fits = self.has_room(self.bytes + self.reserved + cost);
        if fits {
            self.reserved += cost;
        }
        fits
    }

    /// Whether it may hold `bytes` in total; takes more from the pool if necessary.
    fn has_room(&mut self, bytes: usize) -> bool {
        if bytes > self.room && bytes <= self.bytes_max {
            let wanted = bytes.next_multiple_of(GRAIN_BYTES).min(self.bytes_max);
            if self.pool.take(wanted - self.room) {
                self.room = wanted;
            }
        }
        bytes <= self.room
    }

    /// Whether acknowledged changes fill half of the bound, or half of its current room if other
    /// volumes need the pool.
    pub(super) fn is_half_full(&self) -> bool {
        let bound = if self.pool.is_scarce() { self.room } else { self.bytes_max };
        self.bytes >= bound / 2
    }

    /// Releases the room of a change that failed and so need not be sent again.
    pub(super) fn release(&mut self, cost: usize) {
        self.reserved -= cost;
    }

    /// Adds an acknowledged change whose room was reserved; `made` is its opening and mark.
    pub(super) fn push(&mut self, change: Change, made: Option<Made>) {
        let cost = change.cost();
        self.reserved -= cost;
        self.bytes += cost;
        let (lba, blocks) = match &change {
            Change::Write { lba, blocks } => (*lba, (blocks.len() / BLOCK_BYTES) as u32),
            Change::Deallocate(_) => (0, 0),
        };
        self.entries.push_back(Entry { change, lba, blocks, made, cost });
        self.trim();
    }

    /// Frees spare buffers for which there is no room.
    fn trim(&mut self) {
        self.spares.shrink(self.room.saturating_sub(self.bytes + self.reserved));
    }

    /// Returns unneeded room to the pool if other volumes may need it.
    fn yield_room(&mut self) {
        if !self.pool.is_scarce() {
            return;
        }
        let needed = (self.bytes + self.reserved).next_multiple_of(GRAIN_BYTES);
        let kept = needed.clamp(JOURNAL_BYTES_MIN, self.room);
        self.pool.give(self.room - kept);
        self.room = kept;
        self.trim();
    }

    /// The current end of the journal: a flush submitted from now on covers everything before it.
    pub(super) fn mark(&self) -> Mark {
        Mark(self.first + self.entries.len() as u64)
    }

    /// A flush submitted at `mark` succeeded: drops exactly the changes acknowledged before it.
    pub(super) fn flushed(&mut self, mark: Mark) {
        while self.first < mark.0
            && let Some(entry) = self.entries.pop_front()
        {
            self.first += 1;
            self.bytes -= entry.cost;
            if let Change::Write { blocks, .. } = entry.change
                && let Ok(buffer) = Arc::try_unwrap(blocks)
            {
                self.spares.keep(buffer);
            }
        }
        self.yield_room();
    }

    /// A buffer of `bytes` for a change whose room is reserved; reuses a spare one if possible. Its
    /// contents are unspecified. Held, reserved and spare bytes together stay within the bound.
    pub(super) fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        self.spares.take(bytes).unwrap_or_else(|| {
            self.trim();
            vec![0; bytes]
        })
    }

    /// The pieces to send again to a target that has lost unflushed changes: the newest version of
    /// each block, once. The journal drops everything else.
    pub(super) fn pieces(&mut self) -> Vec<Piece> {
        self.leave_newest();
        let places = self.first..;
        let piece = |(place, entry): (u64, &Entry)| {
            let Entry { change, lba, blocks, made, .. } = entry;
            let (change, sent, ranges_done) = (change.clone(), None, 0);
            Piece { place, made: *made, change, lba: *lba, blocks: *blocks, sent, ranges_done }
        };
        let mut pieces: Vec<Piece> = places.zip(&self.entries).map(piece).collect();
        pieces.reverse();
        pieces
    }

    /// Replaces each change by entries for those of its blocks that have no newer version. A flush
    /// that was submitted earlier drops none of these entries.
    fn leave_newest(&mut self) {
        let mut newer = BlockSet::default();
        self.first += self.entries.len() as u64;
        for entry in std::mem::take(&mut self.entries).into_iter().rev() {
            let left: Vec<Range<u64>> =
                entry.ranges().iter().flat_map(|range| newer.add(range.clone())).collect();
            self.bytes -= entry.cost;
            let parts: Vec<(Change, u64, u32)> = match &entry.change {
                Change::Write { .. } => left
                    .into_iter()
                    .map(|range| {
                        let blocks = (range.end - range.start) as u32;
                        (entry.change.clone(), range.start, blocks)
                    })
                    .collect(),
                Change::Deallocate(_) => left
                    .chunks(RANGES_MAX)
                    .map(|ranges| (Change::Deallocate(BlockRanges::Many(ranges.into())), 0, 0))
                    .collect(),
            };
            // All parts share one buffer, which is counted once.
            let mut cost = entry.cost;
            for (change, lba, blocks) in parts {
                self.bytes += cost;
                self.entries.push_front(Entry { change, lba, blocks, made: entry.made, cost });
                cost = ENTRY_BYTES;
            }
        }
    }

    /// Sets the opening and mark of the entry at `place`, whose change was made again.
    pub(super) fn made_again(&mut self, place: u64, made: Option<Made>) {
        let index = place.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        if let Some(entry) = index.and_then(|index| self.entries.get_mut(index)) {
            entry.made = made;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes held, without reserved ones.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.pool.give(self.room - JOURNAL_BYTES_MIN);
        self.pool.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sealane_proto::nvme::transmit::SharedBytes;

    fn write(lba: u64, bytes: usize) -> Change {
        Change::Write { lba, blocks: Arc::new(vec![1; bytes]) }
    }

    fn add(journal: &mut Journal, change: Change) -> bool {
        let fits = journal.reserve(change.cost());
        if fits {
            journal.push(change, None);
        }
        fits
    }

    fn lbas(journal: &Journal) -> Vec<u64> {
        journal.entries.iter().map(|entry| entry.lba).collect()
    }

    #[test]
    fn a_flush_drops_exactly_the_changes_acknowledged_before_its_submission() {
        let mut journal = Journal::new(0, JournalPool::default());
        assert!(add(&mut journal, write(1, 10)) && add(&mut journal, write(2, 10)));
        let in_flight = write(3, 10);
        assert!(journal.reserve(in_flight.cost()));
        let mark = journal.mark();
        journal.push(in_flight, None);
        journal.flushed(mark);
        assert_eq!(lbas(&journal), [3]);
        journal.flushed(mark);
        assert_eq!(lbas(&journal), [3], "an earlier flush drops nothing else");
        journal.flushed(journal.mark());
        assert!(journal.is_empty());
        assert_eq!(journal.bytes(), 0);
    }

    #[test]
    fn the_bound_counts_held_and_reserved_bytes() {
        let mut journal = Journal::new(0, JournalPool::default());
        let half = write(1, JOURNAL_BYTES_MIN / 2 - ENTRY_BYTES);
        assert!(add(&mut journal, half.clone()));
        assert!(journal.reserve(half.cost()));
        assert!(!journal.reserve(1));
        journal.release(half.cost());
        assert!(journal.reserve(half.cost()));
        journal.push(half, None);
        assert!(!journal.reserve(1));
        journal.flushed(journal.mark());
        assert!(journal.reserve(JOURNAL_BYTES_MIN));
    }

    #[test]
    fn flushed_buffers_are_reused_and_count_against_the_bound() {
        let mut journal = Journal::new(0, JournalPool::default());
        let bytes = JOURNAL_BYTES_MIN / 4;
        let mut kept = Vec::new();
        for lba in 0..3 {
            assert!(journal.reserve(Change::write_cost(bytes)));
            let blocks = journal.buffer(bytes);
            kept.push(blocks.as_ptr());
            journal.push(Change::Write { lba, blocks: Arc::new(blocks) }, None);
        }
        journal.flushed(journal.mark());
        assert_eq!(journal.spares.bytes, 3 * bytes);
        let reused = journal.buffer(bytes);
        assert!(kept.contains(&reused.as_ptr()));
        // There is no spare of another length, and a new buffer must fit beside the spares.
        assert!(journal.reserve(Change::write_cost(3 * bytes)));
        assert_eq!(journal.buffer(3 * bytes).len(), 3 * bytes);
        assert!(journal.spares.bytes + journal.reserved <= JOURNAL_BYTES_MIN);
    }

    #[test]
    fn a_flushed_buffer_that_is_still_being_sent_is_not_reused() {
        let mut journal = Journal::new(0, JournalPool::default());
        let blocks = Arc::new(vec![7; BLOCK_BYTES]);
        let sent = SharedBytes::new(Arc::clone(&blocks), 0..BLOCK_BYTES);
        assert!(add(&mut journal, Change::Write { lba: 1, blocks }));
        journal.flushed(journal.mark());
        assert_eq!((journal.bytes(), journal.spares.bytes), (0, 0));
        journal.buffer(BLOCK_BYTES).fill(9);
        assert!(sent.bytes().iter().all(|byte| *byte == 7));
    }

    #[test]
    fn the_newest_version_keeps_its_mark_until_made_again_and_its_room_until_flushed() {
        let made = |mark| Some(Made { opening: [1; 16], before: None, mark });
        let mut journal = Journal::new(0, JournalPool::default());
        for (lba, blocks, mark) in [(0, 8, 5), (2, 1, 6), (5, 3, 7), (2, 1, 8)] {
            let change = write(lba, blocks * BLOCK_BYTES);
            assert!(journal.reserve(change.cost()));
            journal.push(change, made(mark));
        }
        let before = journal.mark();
        let held = journal.bytes();
        let look = |journal: &mut Journal| -> Vec<_> {
            let piece = |piece: Piece| (piece.lba, piece.blocks, piece.made.map(|made| made.mark));
            journal.pieces().into_iter().map(piece).collect()
        };
        let newest = [(2, 1, Some(8)), (5, 3, Some(7)), (0, 2, Some(5)), (3, 2, Some(5))];
        assert_eq!(look(&mut journal), newest);
        // One entry is gone, and one has become two.
        assert_eq!(journal.bytes(), held - write(2, BLOCK_BYTES).cost() + ENTRY_BYTES);
        journal.flushed(before);
        assert_eq!(look(&mut journal), newest, "an earlier flush doesn't affect the new entries");
        let place = journal.pieces()[0].place;
        journal.made_again(place, made(99));
        assert_eq!(look(&mut journal)[0], (2, 1, Some(99)));
        journal.made_again(0, made(1));
        journal.flushed(journal.mark());
        assert_eq!((journal.is_empty(), journal.bytes()), (true, 0));
    }

    /// Fills the journal with writes of a quarter of [`JOURNAL_BYTES_MIN`]; returns the bytes it
    /// holds.
    fn fill(journal: &mut Journal) -> usize {
        while add(journal, write(0, JOURNAL_BYTES_MIN / 4 - ENTRY_BYTES)) {}
        journal.bytes()
    }

    #[test]
    fn journals_share_the_pool_and_each_has_its_own_minimum() {
        let pool = JournalPool::new(4 * GRAIN_BYTES);
        let new = || Journal::new(8 * JOURNAL_BYTES_MIN, pool.clone());
        let (mut greedy, mut other, mut third) = (new(), new(), new());
        assert_eq!(fill(&mut greedy), JOURNAL_BYTES_MIN + 4 * GRAIN_BYTES);
        assert_eq!(
            fill(&mut other),
            JOURNAL_BYTES_MIN,
            "the pool is empty, so only its minimum is left"
        );
        assert!(other.is_half_full(), "it flushes by its current room, not by its bound");
        greedy.flushed(greedy.mark());
        assert_eq!((pool.taken(), greedy.room), (0, JOURNAL_BYTES_MIN), "others may need it");
        assert!(
            greedy.spares.bytes <= greedy.room,
            "nor does it keep flushed buffers beyond its room"
        );
        assert_eq!(fill(&mut third), JOURNAL_BYTES_MIN + 4 * GRAIN_BYTES);
        assert_eq!(pool.journals(), 3);
        drop(third);
        assert_eq!((pool.taken(), pool.journals()), (0, 2), "a dropped journal holds nothing");
        drop((greedy, other));
        assert_eq!((pool.taken(), pool.journals()), (0, 0));
    }

    #[test]
    fn a_journal_without_competitors_keeps_its_buffers() {
        let pool = JournalPool::new(64 * GRAIN_BYTES);
        let mut journal = Journal::new(4 * JOURNAL_BYTES_MIN, pool.clone());
        let held = fill(&mut journal);
        assert_eq!(held, 4 * JOURNAL_BYTES_MIN, "no more than a volume's own bound");
        journal.flushed(journal.mark());
        assert_eq!(pool.taken(), held - JOURNAL_BYTES_MIN);
        assert!(journal.spares.bytes > 3 * JOURNAL_BYTES_MIN);
    }

    proptest! {
        #[test]
        fn bytes_are_those_of_the_entries(steps in proptest::collection::vec((0u8..3, 1usize..9000), 1..80)) {
            let mut journal = Journal::new(0, JournalPool::default());
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
