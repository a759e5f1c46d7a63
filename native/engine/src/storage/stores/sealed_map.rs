//! Which slot holds which block of a sealed file store, kept so that a power cut at any instant
//! leaves every block as one of its writes left it: data and metadata together.
//!
//! The order of things (`docs/stores.md` §3): a write goes to a free slot, then its record is
//! noted in memory, and it has ended. A flush writes the noted records to the log and makes log
//! and slots durable in one go; a record whose data is not whole is not taken by recovery. Only
//! then may the slots that those records replaced be written again. A checkpoint writes changed
//! pages of the table to their unused copies, and its own page last; only then may the log that it
//! replaced be written again.
//!
//! Nothing here reads or writes the blocks' data: whoever does calls [`SealedMap::place`] before
//! and [`SealedMap::commit`] after. Flush and checkpoint block, one caller at a time.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::store::BLOCK_BYTES;
use super::layout::{
    Authority, Checker, Checkpoint, Entry, Geometry, LogPage, RECORDS_PER_PAGE, Record, Superblock,
    TablePage,
};
use super::pages::{BlockFile, random};
use super::slots::Slots;
use super::table::Table;

/// Pages of the table that one round of a checkpoint copies: it bounds the memory for copies.
const ROUND_PAGES: usize = 1024;
/// Changed pages of the table at which a checkpoint is due (32 MiB to write).
const DIRTY_PAGES_DUE: usize = 8192;

#[derive(Debug)]
pub(super) struct State {
    pub(super) table: Table,
    pub(super) slots: Slots,
    /// Records not yet in the log.
    pub(super) pending: Vec<Record>,
    /// Slots that a record in `pending` replaced.
    pub(super) retired: Vec<u64>,
    /// The log or the table could not be written: what is durable isn't known any more.
    pub(super) failure: Option<io::ErrorKind>,
}

#[derive(Debug)]
pub(super) struct Writer {
    pub(super) generation: u64,
    pub(super) checkpoint: u64,
    pub(super) log_start: u64,
    pub(super) log_next: u64,
    /// Log pages before this one are durable.
    pub(super) durable: u64,
}

/// The map of a sealed file store.
#[derive(Debug)]
pub struct SealedMap {
    pub(super) file: Arc<dyn BlockFile>,
    pub(super) geometry: Geometry,
    pub(super) checker: Checker,
    pub(super) stamp: AtomicU64,
    pub(super) state: Mutex<State>,
    pub(super) writer: Mutex<Writer>,
}

impl State {
    fn check(&self) -> io::Result<()> {
        let detail = "the store's log failed earlier: it must be opened anew";
        self.failure.map_or(Ok(()), |kind| Err(io::Error::new(kind, detail)))
    }
}

impl SealedMap {
    /// Lays out an empty store. Everything that the file held before is void.
    pub fn create(
        file: Arc<dyn BlockFile>,
        superblock: &Superblock,
        authority: &Authority<'_>,
    ) -> io::Result<Self> {
        let checker = Checker::new(superblock, authority);
        let generation = u64::from_le_bytes(random()?);
        let writer = Writer { generation, checkpoint: 0, log_start: 0, log_next: 0, durable: 0 };
        let table = Table::new(superblock.geometry.table_pages());
        let slots = Slots::new(superblock.geometry.slot_count);
        let map = Self::assemble(file, superblock.geometry, checker, 0, (table, slots), writer);
        map.checkpoint()?;
        map.file.write(0, &[superblock.encode(&map.checker)])?;
        map.file.sync()?;
        Ok(map)
    }

    pub(super) fn assemble(
        file: Arc<dyn BlockFile>,
        geometry: Geometry,
        checker: Checker,
        stamp: u64,
        (table, slots): (Table, Slots),
        writer: Writer,
    ) -> Self {
        let (pending, retired) = (Vec::new(), Vec::new());
        let state = State { table, slots, pending, retired, failure: None };
        Self {
            file,
            geometry,
            checker,
            stamp: AtomicU64::new(stamp),
            state: Mutex::new(state),
            writer: Mutex::new(writer),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_stamp(&self) -> u64 {
        self.stamp.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Sizes of the store.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Records that may wait for the log: half of it.
    fn pending_max(&self) -> usize {
        self.geometry.log_pages as usize / 2 * RECORDS_PER_PAGE
    }

    /// Takes a slot for each of the blocks about to be written. None: a flush must come first.
    /// A block that two writes place at once ends as the one placed last.
    ///
    /// # Panics
    /// Never: a block is longer than its metadata.
    pub fn place(&self, blocks: &[u8]) -> io::Result<Option<Vec<Entry>>> {
        let count = blocks.len() / BLOCK_BYTES;
        let spare = self.geometry.slot_count - self.geometry.block_count;
        if count as u64 > spare.min(self.pending_max() as u64) {
            let detail = format!("{count} blocks are more than the store takes in one write");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
        let slots = {
            let mut state = self.state();
            state.check()?;
            if state.pending.len() + count > self.pending_max() {
                return Ok(None);
            }
            state.slots.take(count as u64)
        };
        let Some(slots) = slots else { return Ok(None) };
        let entries =
            slots.into_iter().zip(blocks.chunks_exact(BLOCK_BYTES)).map(|(slot, block)| {
                let stamp = self.next_stamp();
                let checksum = self.checker.block(stamp, block);
                let metadata = *block.last_chunk().expect("a block is longer than its metadata");
                Entry { slot: Some(slot), stamp, checksum, metadata }
            });
        Ok(Some(entries.collect()))
    }

    /// Notes blocks from `lba` whose data is written to the slots of their entries.
    pub fn commit(&self, lba: u64, entries: &[Entry]) -> io::Result<()> {
        let mut state = self.state();
        state.check()?;
        for (lba, entry) in (lba..).zip(entries) {
            // A later write of the block that ended first stands.
            let replaced = match state.table.set(lba, *entry) {
                Some(before) => before.slot,
                None => entry.slot,
            };
            state.retired.extend(replaced);
            state.pending.push(Record { lba, blocks: 1, entry: *entry });
        }
        Ok(())
    }

    /// Gives back the slots of blocks that could not be written.
    pub fn abandon(&self, entries: &[Entry]) {
        self.state().slots.release(entries.iter().filter_map(|entry| entry.slot));
    }

    /// Makes blocks unwritten. False: a flush must come first.
    pub fn deallocate(&self, lba: u64, blocks: u64) -> io::Result<bool> {
        let mut state = self.state();
        state.check()?;
        if state.pending.len() >= self.pending_max() {
            return Ok(false);
        }
        let entry = Entry::deallocated(self.next_stamp());
        let State { table, retired, .. } = &mut *state;
        table.deallocate(lba, lba + blocks, entry.stamp, retired);
        state.pending.push(Record { lba, blocks, entry });
        Ok(true)
    }

    /// What is known of blocks from `lba`.
    #[must_use]
    pub fn entries(&self, lba: u64, count: u64) -> Vec<Entry> {
        let state = self.state();
        (lba..lba + count).map(|lba| state.table.entry(lba)).collect()
    }

    /// Whether a block is what was written with its entry.
    #[must_use]
    pub fn is_whole(&self, entry: &Entry, block: &[u8]) -> bool {
        self.checker.block(entry.stamp, block) == entry.checksum
    }

    /// Slots that a write may take now.
    #[must_use]
    pub fn free_slots(&self) -> u64 {
        self.state().slots.free()
    }

    /// Shows the metadata of every written block.
    pub fn scan(&self, visit: &mut dyn FnMut(u64, &[u8; 64])) {
        let state = self.state();
        state.table.written_blocks().for_each(|(lba, entry)| visit(lba, &entry.metadata));
    }

    /// Whether so much waits for the log that a flush in the background is worth it.
    #[must_use]
    pub fn is_flush_due(&self) -> bool {
        self.state().pending.len() > self.pending_max() / 2
    }

    /// Whether log or table have grown so much that a checkpoint is due.
    #[must_use]
    pub fn is_checkpoint_due(&self) -> bool {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.log_next - writer.log_start > self.geometry.log_pages / 2
            || self.state().table.dirty() > DIRTY_PAGES_DUE
    }

    /// Makes everything noted so far durable.
    pub fn flush(&self) -> io::Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let records = {
            let mut state = self.state();
            state.check()?;
            let pages = state.pending.len().div_ceil(RECORDS_PER_PAGE) as u64;
            let used = writer.log_next - writer.log_start;
            let has_room = used + pages <= self.geometry.log_pages;
            has_room
                .then(|| (std::mem::take(&mut state.pending), std::mem::take(&mut state.retired)))
        };
        let result = match records {
            Some((records, _)) if records.is_empty() => return Ok(()),
            Some((records, retired)) => self.log(&mut writer, &records).map(|()| retired),
            None => self.write_checkpoint(&mut writer),
        };
        self.end(result)
    }

    /// Writes the changed part of the table, so that the log can start anew; also a flush.
    pub fn checkpoint(&self) -> io::Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        self.state().check()?;
        let result = self.write_checkpoint(&mut writer);
        self.end(result)
    }

    /// Frees the slots that durable records replaced, or has the store fail for good: after an
    /// error nobody knows what the device has.
    fn end(&self, retired: io::Result<Vec<u64>>) -> io::Result<()> {
        let mut state = self.state();
        match retired {
            Ok(retired) => state.slots.release(retired),
            Err(error) => {
                state.failure = Some(error.kind());
                return Err(error);
            }
        }
        Ok(())
    }

    fn log(&self, writer: &mut Writer, records: &[Record]) -> io::Result<()> {
        for records in records.chunks(RECORDS_PER_PAGE) {
            let (generation, number, durable) =
                (writer.generation, writer.log_next, writer.durable);
            let (stamp, records) = (self.next_stamp(), records.to_vec());
            let page = LogPage { stamp, generation, number, durable, records };
            self.file.write(self.geometry.log(number), &[page.encode(&self.checker)])?;
            writer.log_next += 1;
        }
        self.file.sync()?;
        writer.durable = writer.log_next;
        Ok(())
    }

    fn write_checkpoint(&self, writer: &mut Writer) -> io::Result<Vec<u64>> {
        let (dirty, retired) = {
            let mut state = self.state();
            // What they say is in the table, so the checkpoint makes it durable.
            state.pending.clear();
            (state.table.take_dirty(), std::mem::take(&mut state.retired))
        };
        for round in dirty.chunks(ROUND_PAGES) {
            let snapshots: Vec<_> = {
                let mut state = self.state();
                round.iter().filter_map(|index| state.table.snapshot(*index)).collect()
            };
            for snapshot in snapshots {
                let (stamp, index) = (self.next_stamp(), snapshot.index);
                let page = TablePage { stamp, index, entries: snapshot.entries };
                let (page, sum) = page.encode(&self.checker);
                self.file.write(self.geometry.table(index, snapshot.copy), &[page])?;
                self.state().table.written(&snapshot, sum);
            }
        }
        let stamp = self.next_stamp();
        let checkpoint = Checkpoint {
            number: writer.checkpoint + 1,
            stamp,
            generation: writer.generation,
            log_start: writer.log_next,
            table_proof: self.checker.table_proof(stamp, self.state().table.sum()),
        };
        // The checkpoint's own page names table pages, and they data, without proof.
        self.file.sync()?;
        let place = self.geometry.checkpoint(checkpoint.number);
        self.file.write(place, &[checkpoint.encode(&self.checker)])?;
        self.file.sync()?;
        writer.checkpoint = checkpoint.number;
        writer.log_start = checkpoint.log_start;
        writer.durable = checkpoint.log_start;
        Ok(retired)
    }
}
