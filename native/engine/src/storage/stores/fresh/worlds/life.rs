//! One life of a store in a world: several writers, reads, flushes and merges, step by step.

use std::io;
use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_core::Rng;
use sealane_proto::freshness::leaf::LeafFormat;
use sealane_proto::sector::{BLOCK_BYTES, DATA_BYTES};

use super::super::super::pages::{BlockFile, Page};
use super::super::anchor::{Anchor, AnchorPolicy};
use super::super::failure::Refusal;
use super::super::map::Map;
use super::super::placed::{Placed, PlacedEntry};
use super::super::test_blocks::{block, version_of};
use super::history::{History, UNWRITTEN, Version};
use super::machine::{Device, PoweredAnchor};
use super::{Violation, chance, pick};

/// Blocks of a write.
const WRITE_BLOCKS_MAX: u64 = 6;
/// Writes under way at once.
const WRITERS_MAX: usize = 4;

/// A write whose data the device has.
struct Write {
    lba: u64,
    version: Version,
    entries: Vec<PlacedEntry>,
}

/// One life.
pub struct Life {
    pub map: Map<Placed>,
    pub history: History,
    device: Arc<Device>,
    anchor: Option<Arc<PoweredAnchor>>,
    is_honest: bool,
    writes: Vec<Write>,
    /// Reads that were answered, and refused.
    pub reads: [u64; 2],
    /// What happened, for who looks at one world.
    pub trace: Vec<String>,
}

impl Life {
    pub fn new(
        map: Map<Placed>,
        history: History,
        device: &Arc<Device>,
        anchor: Option<&Arc<PoweredAnchor>>,
        is_honest: bool,
    ) -> Self {
        Self {
            map,
            history,
            device: Arc::clone(device),
            anchor: anchor.cloned(),
            is_honest,
            writes: Vec::new(),
            reads: [0; 2],
            trace: Vec::new(),
        }
    }

    fn blocks(&self) -> u64 {
        self.map.geometry().block_count
    }

    /// The outcome of something that an honest device never refuses: None, if it was refused.
    fn accept<T>(&mut self, what: &str, outcome: io::Result<T>) -> Result<Option<T>, Violation> {
        match outcome {
            Ok(done) => Ok(Some(done)),
            Err(error) => {
                self.trace.push(format!("{what}: {error}"));
                let is_explained = !self.is_honest
                    || self.device.is_off()
                    || error.kind() == io::ErrorKind::TimedOut;
                if is_explained {
                    Ok(None)
                } else {
                    Err(Violation(format!("false alarm: {what}: {error}")))
                }
            }
        }
    }

    fn is_busy(&self, lba: u64, blocks: u64) -> bool {
        let ranges = self.writes.iter().map(|write| (write.lba, write.entries.len() as u64));
        ranges.into_iter().any(|(other, count)| lba < other + count && other < lba + blocks)
    }

    /// A range that is written often, or any.
    fn range(&self, random: &mut ChaCha8Rng) -> (u64, u64) {
        let blocks = 1 + random.next_u64() % WRITE_BLOCKS_MAX;
        let span = [self.blocks(), 16][pick(random, 2)];
        (random.next_u64() % (span - blocks + 1), blocks)
    }

    /// One step. False: the store takes nothing any more.
    pub fn step(
        &mut self,
        random: &mut ChaCha8Rng,
        version: &mut Version,
    ) -> Result<bool, Violation> {
        let (lba, blocks) = self.range(random);
        let is_free = !self.is_busy(lba, blocks);
        match pick(random, 32) {
            0..=10 if is_free && self.writes.len() < WRITERS_MAX => {
                *version += 1;
                self.begin(lba, blocks, *version)
            }
            11..=17 if !self.writes.is_empty() => {
                let write = self.writes.swap_remove(pick(random, self.writes.len()));
                self.end(&write)
            }
            18 if is_free => {
                // Now and then whole sets.
                let (lba, blocks) = if chance(random, 20) && self.writes.is_empty() {
                    (0, self.blocks())
                } else {
                    (lba, blocks)
                };
                self.deallocate(lba, blocks)
            }
            19 | 20 => self.flush(),
            21 => self.lose_an_answer(random),
            22 | 23 if self.map.is_merging() => {
                let stepped = self.map.merge_step();
                self.persisted("merge step", stepped)
            }
            22 if chance(random, 30) => {
                let begun = self.map.begin_merge();
                self.persisted("begin of a merge", begun)
            }
            23 if chance(random, 10) => {
                let merged = self.map.merge();
                self.persisted("merge", merged)
            }
            24 => {
                self.map.leaves().forget_pages();
                Ok(true)
            }
            25 => {
                let written = self.map.write_back();
                self.persisted("write-back", written)
            }
            26..=31 => self.read(lba).map(|()| true),
            _ => Ok(true),
        }
    }

    /// Writes nearly every block.
    pub fn fill(&mut self, version: &mut Version) -> Result<(), Violation> {
        for lba in (0..self.blocks() - WRITE_BLOCKS_MAX).step_by(WRITE_BLOCKS_MAX as usize) {
            *version += 1;
            self.begin(lba, WRITE_BLOCKS_MAX, *version)?;
            self.end_all()?;
        }
        Ok(())
    }

    /// Gives a write's data to the device.
    pub fn begin(&mut self, lba: u64, blocks: u64, version: Version) -> Result<bool, Violation> {
        let data: Vec<_> = (lba..lba + blocks).flat_map(|lba| block(lba, version)).collect();
        let placed = self.map.place(&data);
        let entries = match self.accept("place", placed)? {
            None => return Ok(false),
            Some(Some(entries)) => entries,
            Some(None) => {
                let made = self.map.make_room();
                return self.persisted("room", made);
            }
        };
        self.trace.push(format!("version {version}: blocks {lba} to {}", lba + blocks - 1));
        for ((lba, entry), block) in (lba..).zip(&entries).zip(data.chunks_exact(BLOCK_BYTES)) {
            let mut page = Page::ZERO;
            page.0.copy_from_slice(&block[..DATA_BYTES]);
            self.history.issued(lba, version);
            let written = self.device.write(self.map.geometry().slot(entry.slot), &[page]);
            if self.accept("write", written)?.is_none() {
                return Ok(false);
            }
        }
        self.writes.push(Write { lba, version, entries });
        Ok(true)
    }

    /// Acknowledges the writes that are under way.
    pub fn end_all(&mut self) -> Result<(), Violation> {
        while let Some(write) = self.writes.pop() {
            self.end(&write)?;
        }
        Ok(())
    }

    fn end(&mut self, write: &Write) -> Result<bool, Violation> {
        let committed = self.map.commit(write.lba, &write.entries);
        let is_committed = self.accept("commit", committed)?.is_some();
        if is_committed {
            self.trace.push(format!("version {} is acknowledged", write.version));
            for (lba, _) in (write.lba..).zip(&write.entries) {
                self.history.acknowledged(lba, write.version);
            }
        }
        Ok(is_committed)
    }

    fn deallocate(&mut self, lba: u64, blocks: u64) -> Result<bool, Violation> {
        let deallocated = self.map.deallocate(lba, blocks);
        match self.accept("deallocate", deallocated)? {
            None => Ok(false),
            Some(false) => {
                let made = self.map.make_room();
                self.persisted("room", made)
            }
            Some(true) => {
                self.trace.push(format!("blocks {lba} to {} are deallocated", lba + blocks - 1));
                (lba..lba + blocks).for_each(|lba| self.history.acknowledged(lba, UNWRITTEN));
                Ok(true)
            }
        }
    }

    /// After something that may have advanced the anchor.
    fn persisted(&mut self, what: &str, outcome: io::Result<()>) -> Result<bool, Violation> {
        let is_done = self.accept(what, outcome)?.is_some();
        if is_done {
            self.trace.push(what.to_owned());
        }
        Ok(is_done)
    }

    /// A flush that is acknowledged counts: at once, or when the anchor knows of it.
    pub fn flush(&mut self) -> Result<bool, Violation> {
        let began = self.history.now();
        let advances = |life: &Self| life.anchor.as_ref().map_or(0, |anchor| anchor.advances());
        let before = advances(self);
        let flushed = self.map.flush();
        if !self.persisted("flush", flushed)? {
            return Ok(false);
        }
        let policy = self.anchor.as_ref().map(|anchor| anchor.policy());
        let is_rare = policy == Some(AnchorPolicy::Checkpoints) && !self.is_honest;
        if is_rare && advances(self) != before {
            self.history.settle();
        }
        self.history.flushed(began);
        if !is_rare {
            self.history.settle();
        }
        Ok(true)
    }

    /// An orderly end, which the anchor always hears of.
    pub fn finish(&mut self) -> Result<(), Violation> {
        self.end_all()?;
        let began = self.history.now();
        let finished = self.map.finish();
        if self.persisted("end", finished)? {
            self.history.flushed(began);
            self.history.settle();
        }
        Ok(())
    }

    /// The anchor doesn't answer for once; then the store goes on, or settles it first.
    fn lose_an_answer(&mut self, random: &mut ChaCha8Rng) -> Result<bool, Violation> {
        let Some(anchor) = self.anchor.clone() else { return Ok(true) };
        anchor.lose_an_answer(chance(random, 50));
        let merges = chance(random, 50);
        let flushed = if merges { self.map.merge() } else { self.map.flush() };
        self.persisted("flush or merge whose anchor's answer is lost", flushed)?;
        anchor.recover();
        if chance(random, 50) { self.flush() } else { Ok(true) }
    }

    /// The version of a block, all the way from the device; None: it is of no one version.
    pub fn look(&self, lba: u64) -> io::Result<Option<Version>> {
        let (set, index) = (lba / Placed::ENTRIES_PER_LEAF, lba % Placed::ENTRIES_PER_LEAF);
        let Some(entry) = self.map.set_entries(set)?[index as usize] else {
            return Ok(Some(UNWRITTEN));
        };
        let mut pages = [Page::ZERO];
        self.device.read(self.map.geometry().slot(entry.slot), &mut pages)?;
        let block = [&pages[0].0[..], &entry.metadata()].concat();
        if !self.map.is_whole(&entry, &block) {
            return Err(Refusal::Stale(lba).into());
        }
        Ok(version_of(lba, &pages[0], &entry.metadata()))
    }

    /// Reads a block.
    pub fn read(&mut self, lba: u64) -> Result<(), Violation> {
        let found = self.look(lba);
        match self.accept(&format!("read of block {lba}"), found)? {
            Some(Some(version)) => self.returned(lba, version),
            Some(None) => Err(Violation(format!("mixed: block {lba} is of no one version"))),
            None => {
                self.reads[1] += 1;
                Ok(())
            }
        }
    }

    fn returned(&mut self, lba: u64, version: Version) -> Result<(), Violation> {
        self.reads[0] += 1;
        self.trace.push(format!("block {lba} reads as version {version}"));
        self.history.returned(lba, version).map_err(Violation)
    }

    /// Reads every block that was ever changed.
    pub fn read_all(&mut self) -> Result<(), Violation> {
        self.history.changed().into_iter().try_for_each(|lba| self.read(lba))
    }
}
