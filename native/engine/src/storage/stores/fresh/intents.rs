//! Writes in place on their way: announced in the log before they are made, because afterwards
//! nobody could tell them from what an adversary put there.
//!
//! A write that failed or was given up may be on the device or not. It stays announced until a later
//! change of its block settles the matter.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::log::Record;

/// A write on its way.
#[derive(Debug)]
struct Intent<E> {
    entries: Arc<[E]>,
    is_logged: bool,
}

/// Announced writes that have not ended well.
#[derive(Debug)]
pub(super) struct Intents<E> {
    /// By first block; no two have a block in common.
    on_their_way: BTreeMap<u64, Intent<E>>,
    blocks_on_their_way: usize,
    /// Failed or given up, by block.
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
    /// Adds a write of blocks from `lba`. An error if one of them has a write on its way: nobody
    /// could say which of the two is there in the end.
    pub fn add(&mut self, lba: u64, entries: &Arc<[E]>) -> io::Result<()> {
        let end = lba + entries.len() as u64;
        if let Some((first, other)) = self.on_their_way.range(..end).next_back()
            && first + other.entries.len() as u64 > lba
        {
            let detail = format!("block {} has a write on its way", lba.max(*first));
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, detail));
        }
        self.blocks_on_their_way += entries.len();
        let intent = Intent { entries: Arc::clone(entries), is_logged: false };
        self.on_their_way.insert(lba, intent);
        Ok(())
    }

    /// The write of blocks from `lba` has ended well: they are what it wrote, whatever failed before.
    pub fn settle(&mut self, lba: u64) {
        if let Some(intent) = self.take(lba) {
            self.void(lba..lba + intent.entries.len() as u64);
        }
    }

    /// The write of blocks from `lba` has failed, or is not made.
    pub fn give_up(&mut self, lba: u64) {
        let Some(intent) = self.take(lba) else { return };
        // What the log never had was never written.
        if intent.is_logged {
            for (lba, entry) in (lba..).zip(intent.entries.iter()) {
                let doubtful = self.doubtful.entry(lba).or_default();
                // The same sent again: one doubt.
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

    /// Blocks became unwritten, or others: it doesn't matter any more what failed there.
    pub fn void(&mut self, blocks: Range<u64>) {
        if self.doubtful.is_empty() {
            return;
        }
        let settled: Vec<u64> = self.doubtful.range(blocks).map(|(lba, _)| *lba).collect();
        for lba in settled {
            self.doubts -= self.doubtful.remove(&lba).map_or(0, |doubtful| doubtful.len());
        }
    }

    /// Blocks of these writes, by their first ones, that the log doesn't have.
    pub fn unlogged_blocks(&self, writes: &[u64]) -> usize {
        let unlogged = writes.iter().filter_map(|lba| self.on_their_way.get(lba));
        unlogged.filter(|intent| !intent.is_logged).map(|intent| intent.entries.len()).sum()
    }

    /// Adds records of those of these writes that the log doesn't have.
    pub fn announce(&mut self, writes: &[u64], records: &mut Vec<Record<E>>) {
        for lba in writes {
            if let Some(intent) = self.on_their_way.get_mut(lba)
                && !intent.is_logged
            {
                intent.record(*lba, &self.doubtful, records);
            }
        }
    }

    /// Adds records of all that the log doesn't have.
    pub fn announce_new(&mut self, records: &mut Vec<Record<E>>) {
        for (lba, intent) in &mut self.on_their_way {
            if !intent.is_logged {
                intent.record(*lba, &self.doubtful, records);
            }
        }
    }

    /// Records of all of them, behind the border of a flush: no part of it.
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

    /// How many blocks.
    pub fn count(&self) -> usize {
        self.blocks_on_their_way + self.doubts
    }

    /// How many of them nobody will end.
    pub fn doubts(&self) -> usize {
        self.doubts
    }
}

impl<E: Copy + PartialEq> Intent<E> {
    /// Adds its records; the log has it from then on.
    fn record(&mut self, lba: u64, doubtful: &BTreeMap<u64, Vec<E>>, records: &mut Vec<Record<E>>) {
        let is_logged = std::mem::replace(&mut self.is_logged, true);
        let entries = (lba..).zip(self.entries.iter());
        records.extend(entries.map(|(lba, entry)| {
            // What failed before and is sent again may still come from then.
            let is_doubtful = doubtful.get(&lba).is_some_and(|doubts| doubts.contains(entry));
            Record::Entry { lba, entry: *entry, is_carried: is_logged || is_doubtful }
        }));
    }
}
