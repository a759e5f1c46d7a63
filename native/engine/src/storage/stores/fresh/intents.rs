//! Writes in place that are in progress: each is announced in the log before it is made, because
//! afterwards it could not be distinguished from a block that an adversary put there.
//!
//! A failed or abandoned write may or may not have reached the device. It stays announced until a
//! later change of its block settles that.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::log::Record;

/// A write in progress.
#[derive(Debug)]
struct Intent<E> {
    entries: Arc<[E]>,
    is_logged: bool,
}

/// Announced writes that have not succeeded.
#[derive(Debug)]
pub(super) struct Intents<E> {
    /// By first block; no two overlap.
    on_their_way: BTreeMap<u64, Intent<E>>,
    blocks_on_their_way: usize,
    /// Failed or abandoned writes, by block.
    doubtful: BTreeMap<u64, Vec<E>>,
    doubts: usize,
}

impl<E> Default for Intents<E> {
    fn default() -> Self {
        Self {
            on_their_way: BTreeMap::new(),
            blocks_on_their_way: 0,
            doubtful: BTreeMap::new(),
            doubts: 0,
        }
    }
}

impl<E: Copy + PartialEq> Intents<E> {
    /// Adds a write of blocks from `lba` on. Fails if one of them is being written: it would be
    /// undefined which of the two writes prevails.
    pub fn add(&mut self, lba: u64, entries: &Arc<[E]>) -> io::Result<()> {
        let end = lba + entries.len() as u64;
        if let Some((first, other)) = self.on_their_way.range(..end).next_back()
            && first + other.entries.len() as u64 > lba
        {
            let detail = format!("block {} is already being written", lba.max(*first));
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, detail));
        }
        self.blocks_on_their_way += entries.len();
        let intent = Intent { entries: Arc::clone(entries), is_logged: false };
        self.on_their_way.insert(lba, intent);
        Ok(())
    }

    /// The write from `lba` on has succeeded: it supersedes earlier failed writes of its blocks.
    pub fn settle(&mut self, lba: u64) {
        if let Some(intent) = self.take(lba) {
            self.void(lba..lba + intent.entries.len() as u64);
        }
    }

    /// The write from `lba` on has failed, or is not made.
    pub fn give_up(&mut self, lba: u64) {
        let Some(intent) = self.take(lba) else { return };
        // A write that was never logged was never made.
        if intent.is_logged {
            for (lba, entry) in (lba..).zip(intent.entries.iter()) {
                let doubtful = self.doubtful.entry(lba).or_default();
                // A repeated write of the same entry adds no doubt.
                if !doubtful.contains(entry) {
                    doubtful.push(*entry);
                    self.doubts += 1;
                }
            }
        }
    }

    fn take(&mut self, lba: u64) -> Option<Intent<E>> {
        let intent = self.on_their_way.remove(&lba)?;
        self.blocks_on_their_way -= intent.entries.len();
        Some(intent)
    }

    /// Blocks were deallocated or overwritten: earlier failed writes don't matter any more.
    pub fn void(&mut self, blocks: Range<u64>) {
        if self.doubtful.is_empty() {
            return;
        }
        let settled: Vec<u64> = self.doubtful.range(blocks).map(|(lba, _)| *lba).collect();
        for lba in settled {
            self.doubts -= self.doubtful.remove(&lba).map_or(0, |doubtful| doubtful.len());
        }
    }

    /// Number of blocks of these writes, given by first block, that aren't in the log.
    pub fn unlogged_blocks(&self, writes: &[u64]) -> usize {
        let unlogged = writes.iter().filter_map(|lba| self.on_their_way.get(lba));
        unlogged.filter(|intent| !intent.is_logged).map(|intent| intent.entries.len()).sum()
    }

    /// Adds records of these writes, except those already in the log.
    pub fn announce(&mut self, writes: &[u64], records: &mut Vec<Record<E>>) {
        for lba in writes {
            if let Some(intent) = self.on_their_way.get_mut(lba)
                && !intent.is_logged
            {
                intent.record(*lba, &self.doubtful, records);
            }
        }
    }

    /// Adds records of all writes that aren't in the log.
    pub fn announce_new(&mut self, records: &mut Vec<Record<E>>) {
        for (lba, intent) in &mut self.on_their_way {
            if !intent.is_logged {
                intent.record(*lba, &self.doubtful, records);
            }
        }
    }

    /// Returns records of all writes, to be logged behind a flush that they are not part of.
    pub fn announce_all(&mut self) -> Vec<Record<E>> {
        let doubtful = self.doubtful.iter();
        let doubtful =
            doubtful.flat_map(|(lba, entries)| entries.iter().map(|entry| (*lba, *entry)));
        let carried = |(lba, entry)| Record::Entry { lba, entry, is_carried: true };
        let mut records = doubtful.map(carried).collect();
        for (lba, intent) in &mut self.on_their_way {
            intent.record(*lba, &self.doubtful, &mut records);
        }
        records
    }

    /// Number of blocks in all writes.
    pub fn count(&self) -> usize {
        self.blocks_on_their_way + self.doubts
    }

    /// Number of blocks of failed or abandoned writes.
    pub fn doubts(&self) -> usize {
        self.doubts
    }
}

impl<E: Copy + PartialEq> Intent<E> {
    /// Adds the write's records to be logged.
    fn record(&mut self, lba: u64, doubtful: &BTreeMap<u64, Vec<E>>, records: &mut Vec<Record<E>>) {
        let is_logged = std::mem::replace(&mut self.is_logged, true);
        let entries = (lba..).zip(self.entries.iter());
        records.extend(entries.map(|(lba, entry)| {
            // An earlier failed write of the same entry may still reach the device.
            let is_doubtful = doubtful.get(&lba).is_some_and(|doubts| doubts.contains(entry));
            Record::Entry { lba, entry: *entry, is_carried: is_logged || is_doubtful }
        }));
    }
}
