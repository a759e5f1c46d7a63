//! Writes in place on their way: announced in the log before they are made, because afterwards
//! nobody could tell them from what an adversary put there.
//!
//! A write that failed or was given up may be on the device or not. It stays announced until a later
//! change of its block settles the matter.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Debug;
use std::io;
use std::ops::Range;

use super::keys::Tag;
use super::log::{LogPage, Record};

/// Announced writes that have not ended well.
#[derive(Debug)]
pub(super) struct Intents<E> {
    on_their_way: BTreeMap<u64, E>,
    /// Failed or given up, by block.
    doubtful: BTreeMap<u64, Vec<E>>,
    doubts: usize,
    /// On their way and not in the log yet.
    unlogged: BTreeSet<u64>,
}

impl<E> Default for Intents<E> {
    fn default() -> Self {
        Self {
            on_their_way: BTreeMap::new(),
            doubtful: BTreeMap::new(),
            doubts: 0,
            unlogged: BTreeSet::new(),
        }
    }
}

impl<E: Copy> Intents<E> {
    /// Adds writes of blocks from `lba`. An error if one of them has a write on its way: nobody
    /// could say which of the two is there in the end.
    pub fn add(&mut self, lba: u64, entries: &[E]) -> io::Result<()> {
        let range = lba..lba + entries.len() as u64;
        if let Some((busy, _)) = self.on_their_way.range(range).next() {
            let detail = format!("block {busy} has a write on its way");
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, detail));
        }
        for (lba, entry) in (lba..).zip(entries) {
            self.on_their_way.insert(lba, *entry);
            self.unlogged.insert(lba);
        }
        Ok(())
    }

    /// A write has ended well: its block is what it wrote, whatever failed before.
    pub fn settle(&mut self, lba: u64) {
        self.on_their_way.remove(&lba);
        self.unlogged.remove(&lba);
        self.doubts -= self.doubtful.remove(&lba).map_or(0, |doubtful| doubtful.len());
    }

    /// A write has failed, or is not made.
    pub fn give_up(&mut self, lba: u64) {
        let Some(entry) = self.on_their_way.remove(&lba) else { return };
        // What the log never had was never written.
        if !self.unlogged.remove(&lba) {
            self.doubtful.entry(lba).or_default().push(entry);
            self.doubts += 1;
        }
    }

    /// Blocks became unwritten: it doesn't matter any more what is there.
    pub fn void(&mut self, blocks: Range<u64>) {
        let settled: Vec<u64> = self.doubtful.range(blocks).map(|(lba, _)| *lba).collect();
        for lba in settled {
            self.doubts -= self.doubtful.remove(&lba).map_or(0, |doubtful| doubtful.len());
        }
    }

    /// Records of those that the log doesn't have.
    pub fn announce_new(&mut self) -> Vec<Record<E>> {
        let new = std::mem::take(&mut self.unlogged);
        let record = |lba| Some(Record::Entry { lba, entry: *self.on_their_way.get(&lba)? });
        new.into_iter().filter_map(record).collect()
    }

    /// Records of all of them.
    pub fn announce_all(&mut self) -> Vec<Record<E>> {
        self.unlogged.clear();
        let doubtful = self.doubtful.iter();
        let doubtful =
            doubtful.flat_map(|(lba, entries)| entries.iter().map(|entry| (*lba, *entry)));
        let all = doubtful.chain(self.on_their_way.iter().map(|(lba, entry)| (*lba, *entry)));
        all.map(|(lba, entry)| Record::Entry { lba, entry }).collect()
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.on_their_way.len() + self.doubts
    }

    /// How many of them nobody will end.
    pub fn doubts(&self) -> usize {
        self.doubts
    }
}

/// Entries that pages of the log name.
#[derive(Debug)]
pub(super) struct Announced<E>(HashMap<u64, Vec<E>>);

/// The entries that these pages name.
pub(super) fn announced<'a, E: Copy + 'a>(
    pages: impl Iterator<Item = &'a (LogPage<E>, Tag)>,
) -> Announced<E> {
    let mut found: HashMap<u64, Vec<E>> = HashMap::new();
    for record in pages.flat_map(|(page, _)| &page.records) {
        if let Record::Entry { lba, entry } = record {
            found.entry(*lba).or_default().push(*entry);
        }
    }
    Announced(found)
}

impl<E: PartialEq> Announced<E> {
    /// Whether a record's entry is among them.
    pub fn contains(&self, record: &Record<E>) -> bool {
        let Record::Entry { lba, entry } = record else { return false };
        self.0.get(lba).is_some_and(|entries| entries.contains(entry))
    }
}
