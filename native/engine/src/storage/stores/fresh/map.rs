//! What a store that keeps freshness knows about its blocks: pending changes in memory, then the
//! leaf pages. `docs/formats/stores.md` §3 describes the order of steps.
//!
//! Changes go to the *active* table. A merge freezes that table and writes its changes into leaf
//! pages, while new changes go to a new table. This module doesn't read or write the blocks' data:
//! whoever does must call [`Map::place`] before and [`Map::commit`] after. Blocking functions are
//! for a single thread: see `commit.rs`, `merge.rs` and `recovery.rs`.

use std::fmt::Debug;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use sealane_proto::freshness::leaf::{LEAF_BYTES, LeafFormat, LeafPage};
use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::openings::Openings;
use sealane_proto::freshness::pending::{Known, Pending};
use sealane_proto::sector::BLOCK_BYTES;

use super::super::super::events::EventLog;
use super::super::pages::{BlockFile, Page};
use super::super::slots::Slots;
use super::anchor::Anchor;
use super::announcements::InFlight;
use super::commit::Writer;
use super::counters::{Counters, count};
use super::failure::Refusal;
use super::geometry::Geometry;
use super::intents::Intents;
use super::keys::StoreKeys;
use super::leaves::{Checked, Fetch, Found, Leaves};
use super::log::{Record, records_per_page};
use super::log_head::LogHead;
use super::passage::Passage;
use super::placed::{Placed, PlacedEntry};
use crate::clock;

/// A leaf format, with the properties of its entries that a map needs.
pub trait Layout: LeafFormat + Debug + Send + Sync {
    /// Whether blocks are overwritten in place. If so, writes are announced in the log before they
    /// are made, and until a flush a record only says what a block may contain.
    const IS_IN_PLACE: bool;
    /// The slot of an entry, if blocks are out of place.
    fn slot(entry: &Self::Entry) -> Option<u64>;
    /// Whether the write of an entry that no flush covers has reached the device.
    fn has_arrived(
        lba: u64,
        entry: &Self::Entry,
        file: &dyn BlockFile,
        geometry: &Geometry,
        keys: &StoreKeys,
    ) -> io::Result<bool>;
    /// Derives the leaf page of a set from its blocks on the device, if these contain their
    /// entries. The result is right only if it matches the leaf's node.
    fn derive(set: u64, file: &dyn BlockFile, geometry: &Geometry) -> io::Result<Option<LeafPage>>;
}

/// Pending changes and further state of a store that changes with them.
#[derive(Debug)]
pub(super) struct State<E> {
    pub active: Pending<E>,
    /// The table being merged, empty if none is. Its changes are older than those in the active
    /// table.
    pub frozen: Arc<Pending<E>>,
    pub slots: Slots,
    /// Number of blocks placed but neither committed nor abandoned.
    pub placed: u64,
    /// Writes in place in progress.
    pub intents: Intents<E>,
    /// Changes that aren't in the log yet.
    pub waiting: Vec<Record<E>>,
    /// All other changes are, or will be, in log pages before this one. Whoever logs the waiting
    /// changes updates it while holding the log's lock.
    pub log_taken: u64,
    /// Slots replaced by waiting changes.
    pub retired: Vec<u64>,
    /// Set if it is unknown what is durable.
    pub failure: Option<Refusal>,
    /// The openings that led here.
    pub passage: Passage,
    /// The milestone of the last flush that completed.
    pub reached: Milestone,
}

impl<E: Copy + PartialEq> State<E> {
    pub fn check(&self) -> io::Result<()> {
        match &self.failure {
            None => Ok(()),
            Some(failure) => Err(failure.clone().into()),
        }
    }

    /// Makes the active table the frozen one.
    pub fn freeze(&mut self) -> Arc<Pending<E>> {
        self.frozen = Arc::new(std::mem::take(&mut self.active));
        Arc::clone(&self.frozen)
    }

    /// Records that batches of this many records each get pages of the log from `log_next` on.
    pub fn take_pages<const N: usize>(
        &mut self,
        log_next: u64,
        records: [usize; N],
        per_page: usize,
    ) {
        let pages: usize = records.iter().map(|records| records.div_ceil(per_page)).sum();
        self.log_taken = log_next + pages as u64;
    }

    /// Number of pending changes, including writes in progress.
    pub fn pending(&self) -> u64 {
        let tables = [&self.active, &*self.frozen];
        let changes: usize = tables.iter().map(|table| table.entries() + table.voids()).sum();
        (changes + self.intents.count()) as u64 + self.placed
    }
}

/// Sets the blocks from `lba` on that are still absent to what their set's leaf page says.
pub fn take_leaf<F: LeafFormat>(
    known: &mut [Known<F::Entry>],
    lba: u64,
    set: u64,
    page: &LeafPage,
) {
    let start = set * F::ENTRIES_PER_LEAF;
    for (lba, known) in (lba..).zip(known) {
        let index = lba.checked_sub(start).filter(|index| *index < F::ENTRIES_PER_LEAF);
        if let (Some(index), Known::Absent) = (index, *known) {
            *known = F::known(page, index as usize);
        }
    }
}

/// Fails if one of the blocks from `lba` on is orphaned.
pub fn check_orphans<E: Copy>(known: &[Known<E>], lba: u64) -> io::Result<()> {
    match (lba..).zip(known).find(|(_, known)| matches!(known, Known::Orphaned)) {
        Some((lba, _)) => Err(Refusal::Orphaned(lba).into()),
        None => Ok(()),
    }
}

/// The map of a store.
#[derive(Debug)]
pub struct Map<F: Layout> {
    pub(super) file: Arc<dyn BlockFile>,
    pub(super) geometry: Geometry,
    /// Its first page, as written at its creation.
    pub(super) superblock: Box<Page>,
    pub(super) keys: StoreKeys,
    pub(super) anchor: Option<Arc<dyn Anchor>>,
    pub(super) leaves: Leaves,
    pub(super) sequence: AtomicU64,
    pub(super) state: Mutex<State<F::Entry>>,
    pub(super) writer: Mutex<Writer<F::Entry>>,
    pub(super) log_head: Mutex<LogHead>,
    pub(super) log_in_flight: InFlight,
    pub(super) counters: Arc<Counters>,
    /// Receives errors that merges find, once it is set.
    pub(super) events: OnceLock<Arc<EventLog>>,
}

impl<F: Layout> Map<F> {
    pub(super) fn state(&self) -> MutexGuard<'_, State<F::Entry>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn writer(&self) -> MutexGuard<'_, Writer<F::Entry>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Questions.

    /// Sizes of the store.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The leaf pages.
    #[must_use]
    pub fn leaves(&self) -> &Leaves {
        &self.leaves
    }

    /// What is known about blocks from `lba` on without reading. `Absent` means that the leaf page
    /// has the answer.
    #[must_use]
    pub fn current(&self, lba: u64, blocks: u64) -> Vec<Known<F::Entry>> {
        let mut current = Vec::with_capacity(blocks as usize);
        let state = self.state();
        state.active.get_run(lba..lba + blocks, |lba, known| {
            current.push(match known {
                Known::Absent => state.frozen.get(lba),
                known => known,
            });
        });
        drop(state);
        current
    }

    /// The first block from `lba` on with a pending entry.
    #[must_use]
    pub fn next_changed(&self, lba: u64) -> Option<u64> {
        let state = self.state();
        let next = [state.active.next_entry(lba), state.frozen.next_entry(lba)];
        next.into_iter().flatten().min()
    }

    /// Sets absent blocks from `lba` on to what cached leaf pages say. Returns the pages to fetch
    /// for the others.
    pub fn look_up(&self, known: &mut [Known<F::Entry>], lba: u64) -> Vec<Fetch> {
        let size = F::ENTRIES_PER_LEAF;
        let sets = lba / size..(lba + known.len() as u64).div_ceil(size);
        let find = |set: u64| {
            let start = (set * size).saturating_sub(lba) as usize;
            let end = (((set + 1) * size - lba) as usize).min(known.len());
            if !known[start..end].contains(&Known::Absent) {
                return None;
            }
            match self.leaves.find(set) {
                Found::Void => take_leaf::<F>(known, lba, set, &[0; LEAF_BYTES]),
                Found::Cached(page) => take_leaf::<F>(known, lba, set, &page),
                Found::At(fetch) => return Some(fetch),
            }
            None
        };
        sets.filter_map(find).collect()
    }

    /// The entries of all blocks of a set. Blocks if it must read the leaf page. Fails if one of
    /// the blocks is orphaned.
    pub fn set_entries(&self, set: u64) -> io::Result<Vec<Option<F::Entry>>> {
        let start = set * F::ENTRIES_PER_LEAF;
        let end = (start + F::ENTRIES_PER_LEAF).min(self.geometry.block_count);
        let mut known = self.current(start, end - start);
        let leaf = self.leaf(set)?;
        take_leaf::<F>(&mut known, start, set, leaf.as_deref().unwrap_or(&[0; LEAF_BYTES]));
        check_orphans(&known, start)?;
        let entry = |known| if let Known::Entry(entry) = known { Some(entry) } else { None };
        Ok(known.into_iter().map(entry).collect())
    }

    /// A leaf; `None` if it is void. Blocks if it must read the leaf.
    pub fn leaf(&self, leaf: u64) -> io::Result<Option<Arc<LeafPage>>> {
        loop {
            let fetch = match self.leaves.find(leaf) {
                Found::Void => return Ok(None),
                Found::Cached(page) => return Ok(Some(page)),
                Found::At(fetch) => fetch,
            };
            let mut page = [Page::ZERO];
            self.file.read(fetch.place, &mut page)?;
            self.count_leaf_reads(1);
            if let Checked::Right(page) = self.leaves.check(&fetch, &page[0].0)? {
                return Ok(Some(page));
            }
        }
    }

    /// Counts leaf pages that were read.
    pub fn count_leaf_reads(&self, pages: u64) {
        count(&self.counters.leaf_reads, pages);
    }

    /// Whether enough changes wait for the log that writing them is worthwhile.
    #[must_use]
    pub fn is_write_back_due(&self) -> bool {
        let state = self.state();
        state.failure.is_none() && state.waiting.len() as u64 > self.geometry.pending_max / 8
    }

    /// Whether the table or the log is so full that a merge is due.
    #[must_use]
    pub fn is_merge_due(&self) -> bool {
        let log = self.log();
        self.wants_merge(&log, &self.state())
    }

    pub(super) fn wants_merge(&self, log: &LogHead, state: &State<F::Entry>) -> bool {
        let changes = (state.active.entries() + state.active.voids()) as u64;
        let is_merging = state.frozen.entries() + state.frozen.voids() > 0;
        let log_used = log.next - log.start.0;
        state.failure.is_none()
            && changes > 0
            && !is_merging
            && (changes > self.geometry.pending_max / 4 * 3 || log_used > self.log_usable() / 2)
    }

    /// Number of log pages that may be used between checkpoints.
    pub(super) fn log_usable(&self) -> u64 {
        let per_page = records_per_page::<F>() as u64;
        let carried = if F::IS_IN_PLACE { self.geometry.carry_reserve(per_page) } else { 0 };
        self.geometry.log_pages - self.geometry.log_reserve(per_page) - carried
    }

    /// Number of free slots.
    #[must_use]
    pub fn free_slots(&self) -> u64 {
        self.state().slots.free()
    }

    /// Counters and sizes by name. Never waits for a flush: the caller may be the one who advances
    /// the anchor.
    #[must_use]
    pub fn statistics(&self) -> Vec<(&'static str, u64)> {
        let mut named = self.counters.by_name();
        let commits = self.counters.commits_before.load(Ordering::Relaxed);
        let written = self.counters.written.load(Ordering::Relaxed);
        named.push(("root_commits", commits.wrapping_add(self.leaves.root().commit)));
        named.push(("leaf_cache_pages", self.leaves.cached_pages()));
        named.push(("log_pages_max", self.log_usable()));
        named.push(("pending_max", self.geometry.pending_max));
        let anchored_at = self.counters.anchored_at.load(Ordering::Relaxed);
        if anchored_at > 0 {
            let age = clock::now().saturating_sub(anchored_at);
            named.push(("anchor_age_ms", age / 1_000_000));
        }
        let state = self.state();
        named.push(("pending_entries", state.pending()));
        named.push(("failed", u64::from(state.failure.is_some())));
        // Blocks that are overwritten count twice until their changes are merged.
        let waiting = (state.active.entries() + state.frozen.entries()) as u64;
        named.push(("sectors_written", written + waiting));
        named
    }

    /// Makes merges report the errors that they find.
    pub fn tell_events(&self, events: &Arc<EventLog>) {
        self.events.get_or_init(|| Arc::clone(events));
    }

    /// The store's milestone: of the last completed flush, or of its opening.
    #[must_use]
    pub fn milestone(&self) -> Milestone {
        let state = self.state();
        state.passage.milestone(state.reached)
    }

    /// Whether the store contains everything that was flushed when this milestone was returned, by
    /// this opening or an earlier one that led to it. Also false if that was too many openings ago.
    #[must_use]
    pub fn contains(&self, told: &Milestone) -> bool {
        let state = self.state();
        state.passage.contains(state.reached, told)
    }

    /// The log page behind all those that contain, or will contain, the changes so far. Any flush
    /// that begins from now on reaches at least this page.
    #[must_use]
    pub fn mark(&self) -> u64 {
        let state = self.state();
        state.log_taken + state.waiting.len().div_ceil(records_per_page::<F>()) as u64
    }

    /// This opening, and how far the earlier ones had come.
    #[must_use]
    pub fn openings(&self) -> Openings {
        let log_flushed = self.mark();
        let state = self.state();
        let now = Milestone { log_flushed, ..state.reached };
        Openings { now, earlier: state.passage.earlier().to_vec() }
    }

    // Changes.

    /// Deallocates blocks. Returns false if changes must be merged first.
    pub fn deallocate(&self, lba: u64, blocks: u64) -> io::Result<bool> {
        let mut state = self.state();
        state.check()?;
        if state.pending() >= self.geometry.pending_max {
            return Ok(false);
        }
        let mut removed = Vec::new();
        state.active.void(lba..lba + blocks, &mut removed);
        state.retired.extend(removed.iter().filter_map(F::slot));
        state.intents.void(lba..lba + blocks);
        state.waiting.push(Record::Void { lba, blocks });
        Ok(true)
    }
}

impl Map<Placed> {
    /// Most blocks of a write: room is made for this many at once.
    #[must_use]
    pub fn write_blocks_max(&self) -> u64 {
        self.geometry.pending_max / 4
    }

    /// Takes a slot for each of the blocks to be written. Returns `None` if room must be made
    /// first. Of two concurrent writes of a block, the one committed last prevails.
    pub fn place(&self, blocks: &[u8]) -> io::Result<Option<Vec<PlacedEntry>>> {
        let blocks = blocks.as_chunks::<BLOCK_BYTES>().0;
        let count = blocks.len() as u64;
        if count > self.write_blocks_max() {
            let detail = format!("{count} blocks are more than the store takes in one write");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
        let slots = {
            let mut state = self.state();
            state.check()?;
            if state.pending() + count > self.geometry.pending_max {
                return Ok(None);
            }
            let slots = state.slots.take(count);
            state.placed += slots.as_ref().map_or(0, |_| count);
            slots
        };
        let Some(slots) = slots else { return Ok(None) };
        let entries = slots.iter().zip(blocks).map(|(slot, block)| {
            let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
            let checksum = self.keys.block(sequence, block);
            PlacedEntry::new(*slot, sequence, checksum, block)
        });
        match entries.collect() {
            Ok(entries) => Ok(Some(entries)),
            Err(reason) => {
                let mut state = self.state();
                state.placed -= count;
                state.slots.release(slots);
                Err(io::Error::new(io::ErrorKind::InvalidInput, reason.id()))
            }
        }
    }

    /// Records blocks from `lba` on whose data was written to the slots of their entries.
    pub fn commit<'a>(
        &self,
        lba: u64,
        entries: impl IntoIterator<Item = &'a PlacedEntry>,
    ) -> io::Result<()> {
        let mut state = self.state();
        let checked = state.check();
        for (lba, entry) in (lba..).zip(entries) {
            state.placed -= 1;
            if checked.is_err() {
                continue;
            }
            let replaced = state.active.insert(lba, *entry);
            state.retired.extend(replaced.map(|replaced| replaced.slot));
            state.waiting.push(Record::written(lba, *entry));
        }
        checked
    }

    /// Frees the slots of blocks that could not be written.
    pub fn abandon<'a>(&self, entries: impl IntoIterator<Item = &'a PlacedEntry>) {
        let mut state = self.state();
        for entry in entries {
            state.placed -= 1;
            state.slots.release([entry.slot]);
        }
    }

    /// Whether a block matches the checksum in its entry.
    #[must_use]
    pub fn is_whole(&self, entry: &PlacedEntry, block: &[u8]) -> bool {
        self.keys.block(entry.sequence, block) == entry.checksum
    }
}
