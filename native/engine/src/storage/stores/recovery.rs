//! Opening a sealed file store: its last checkpoint, then what of its log is whole.

use std::io;
use std::sync::Arc;

use super::super::store::{BLOCK_BYTES, DATA_BYTES};
use super::layout::{
    Authority, Checker, Checkpoint, Entry, Geometry, LogPage, Record, Superblock, TablePage,
};
use super::pages::{BlockFile, Page, random};
use super::sealed_map::{SealedMap, Writer};
use super::slots::Slots;
use super::table::Table;

/// Pages read at once.
const READ_PAGES: u64 = 256;
/// How far stamps leap when a store is opened. More than ever were given out and not found
/// again: those of what was in flight, or waited for the log.
const STAMP_LEAP: u64 = 1 << 32;
/// Stamps and positions beyond this are forged: no store lives that long.
const NUMBER_MAX: u64 = 1 << 62;

fn damaged(detail: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("damaged store: {}", detail.into()))
}

/// Reads the superblock of a store, and the keys of the rest.
pub fn superblock(
    file: &dyn BlockFile,
    authority: &Authority<'_>,
) -> io::Result<(Superblock, Checker)> {
    let mut page = [Page::ZERO];
    file.read(0, &mut page)?;
    Superblock::decode(&page[0], authority)
}

/// Reads what a store's superblock claims, which nothing vouches for.
pub fn claimed(file: &dyn BlockFile) -> io::Result<Superblock> {
    let mut page = [Page::ZERO];
    file.read(0, &mut page)?;
    Superblock::claimed(&page[0])
}

struct Recovery<'a> {
    file: &'a dyn BlockFile,
    geometry: &'a Geometry,
    checker: &'a Checker,
    /// The latest stamp seen.
    stamp: u64,
}

impl Recovery<'_> {
    fn checkpoint(&mut self) -> io::Result<Checkpoint> {
        let mut pages = [Page::ZERO; 2];
        self.file.read(self.geometry.checkpoint(0), &mut pages)?;
        let whole = pages.iter().filter_map(|page| Checkpoint::decode(page, self.checker));
        let last = whole.max_by_key(|checkpoint| checkpoint.number);
        let last = last.ok_or_else(|| damaged("no checkpoint is whole"))?;
        if last.number.max(last.log_start) > NUMBER_MAX {
            return Err(damaged("its checkpoint has a number that no store reaches"));
        }
        Ok(last)
    }

    fn table(&mut self, checkpoint: &Checkpoint) -> io::Result<Table> {
        let count = self.geometry.table_pages();
        let mut table = Table::new(count);
        let mut pages = vec![Page::ZERO; (2 * READ_PAGES.min(count)) as usize];
        for first in (0..count).step_by(READ_PAGES as usize) {
            let part = READ_PAGES.min(count - first);
            let pages = &mut pages[..(2 * part) as usize];
            self.file.read(self.geometry.table(first, 0), pages)?;
            for (index, copies) in (first..).zip(pages.chunks_exact(2)) {
                self.table_page(checkpoint, &mut table, index, copies);
            }
        }
        if self.checker.table_proof(checkpoint.stamp, table.sum()) != checkpoint.table_proof {
            return Err(damaged("pages of its table are missing or older"));
        }
        Ok(table)
    }

    fn table_page(
        &mut self,
        checkpoint: &Checkpoint,
        table: &mut Table,
        index: u64,
        copies: &[Page],
    ) {
        let mut last: Option<(u8, TablePage, u64)> = None;
        let mut is_stale = false;
        for (copy, page) in (0..).zip(copies) {
            let Some((page, sum)) = TablePage::decode(page, self.checker) else { continue };
            if page.index != index {
                continue;
            }
            self.stamp = self.stamp.max(page.stamp);
            if page.stamp > checkpoint.stamp {
                is_stale = true;
            } else if last.as_ref().is_none_or(|(_, last, _)| last.stamp < page.stamp) {
                last = Some((copy, page, sum));
            }
        }
        if let Some((copy, page, sum)) = last {
            let stamps = page.entries.iter().map(|entry| entry.stamp);
            self.stamp = stamps.fold(self.stamp, u64::max);
            table.load(index, (copy, sum), page.entries);
        }
        if is_stale {
            // A copy of a checkpoint that was not completed is written over, or a later opening
            // would take it for one that was.
            table.touch(index);
        }
    }

    /// Whole log pages from the checkpoint on, up to the first that isn't.
    fn log(&mut self, checkpoint: &Checkpoint) -> io::Result<Vec<LogPage>> {
        let mut log = Vec::new();
        let mut is_whole = true;
        let mut pages = [Page::ZERO];
        for number in checkpoint.log_start..checkpoint.log_start + self.geometry.log_pages {
            self.file.read(self.geometry.log(number), &mut pages)?;
            let page = LogPage::decode(&pages[0], self.checker);
            let page = page
                .filter(|page| (page.generation, page.number) == (checkpoint.generation, number));
            match page {
                Some(page) if is_whole => {
                    let stamps = page.records.iter().map(|record| record.entry.stamp);
                    self.stamp = stamps.fold(self.stamp.max(page.stamp), u64::max);
                    log.push(page);
                }
                // Behind the end of the log there may be pages that overtook a lost one. But none
                // was lost that a later one calls durable.
                Some(page) if page.durable > checkpoint.log_start + log.len() as u64 => {
                    return Err(damaged("pages of its log are missing"));
                }
                _ => is_whole = false,
            }
        }
        Ok(log)
    }

    fn replay(&self, table: &mut Table, log: &[LogPage]) -> io::Result<()> {
        let durable = log.iter().map(|page| page.durable).max().unwrap_or(0);
        for page in log {
            let is_durable = page.number < durable;
            for record in &page.records {
                self.apply(table, record, is_durable)?;
            }
        }
        Ok(())
    }

    fn apply(&self, table: &mut Table, record: &Record, is_durable: bool) -> io::Result<()> {
        let Record { lba, blocks, entry } = record;
        let end = lba.checked_add(*blocks);
        if end.is_none_or(|end| end > self.geometry.block_count) {
            return Err(damaged("a record beyond its end"));
        }
        if entry.slot.is_some() {
            if is_durable || self.is_whole(entry)? {
                table.set(*lba, *entry);
            }
            return Ok(());
        }
        // Their slots are free because nothing in the table has them.
        table.deallocate(*lba, *lba + *blocks, entry.stamp, &mut Vec::new());
        Ok(())
    }

    fn is_whole(&self, entry: &Entry) -> io::Result<bool> {
        let Some(slot) = entry.slot.filter(|slot| *slot < self.geometry.slot_count) else {
            return Ok(false);
        };
        let mut pages = [Page::ZERO];
        self.file.read(self.geometry.slot(slot), &mut pages)?;
        let mut block = [0; BLOCK_BYTES];
        block[..DATA_BYTES].copy_from_slice(&pages[0].0);
        block[DATA_BYTES..].copy_from_slice(&entry.metadata);
        Ok(self.checker.block(entry.stamp, &block) == entry.checksum)
    }

    fn slots(&self, table: &Table) -> io::Result<Slots> {
        let mut slots = Slots::new(self.geometry.slot_count);
        for (lba, entry) in table.written_blocks() {
            if !entry.slot.is_some_and(|slot| slots.claim(slot)) {
                return Err(damaged(format!("the slot of block {lba} is not its own")));
            }
        }
        Ok(slots)
    }
}

impl SealedMap {
    /// Opens a store as the last power cut, or the last orderly end, left it.
    pub fn open(
        file: Arc<dyn BlockFile>,
        geometry: Geometry,
        checker: Checker,
    ) -> io::Result<Self> {
        let mut recovery =
            Recovery { file: &*file, geometry: &geometry, checker: &checker, stamp: 0 };
        let checkpoint = recovery.checkpoint()?;
        recovery.stamp = checkpoint.stamp;
        let mut table = recovery.table(&checkpoint)?;
        let log = recovery.log(&checkpoint)?;
        recovery.replay(&mut table, &log)?;
        let slots = recovery.slots(&table)?;
        if recovery.stamp > NUMBER_MAX {
            return Err(damaged("it has a stamp that no store reaches"));
        }
        let stamp = recovery.stamp + STAMP_LEAP;
        let log_next = checkpoint.log_start + log.len() as u64;
        let writer = Writer {
            // Pages that overtook the end of the log must not continue the new one.
            generation: u64::from_le_bytes(random()?),
            checkpoint: checkpoint.number,
            log_start: checkpoint.log_start,
            log_next,
            durable: log_next,
        };
        let map = Self::assemble(file, geometry, checker, stamp, (table, slots), writer);
        map.checkpoint()?;
        Ok(map)
    }
}
