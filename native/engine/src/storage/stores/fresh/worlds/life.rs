//! One life of a store in a world: several writers, reads, flushes and merges, step by step.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_core::Rng;
use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::pending::Known;

use super::super::super::super::upkeep::Report;
use super::super::super::pages::Page;
use super::super::super::ring::event;
use super::super::anchor::{Anchor, AnchorPolicy};
use super::super::announcements::Announcement;
use super::super::journal::Mailbox;
use super::super::map::{Map, take_leaf};
use super::super::upkeep::Walk;
use super::history::{History, Sent, UNWRITTEN, Version};
use super::machine::{Device, PoweredAnchor};
use super::workload::Workload;
use super::{Violation, chance, grown, pick};

/// Most blocks of a write.
const WRITE_BLOCKS_MAX: u64 = 6;
/// Most writes, and most reads, in progress at a time.
const AT_ONCE_MAX: usize = 4;

/// A write in progress.
pub struct Write<S> {
    pub lba: u64,
    pub blocks: u64,
    pub version: Version,
    /// Whether it is acknowledged only after a flush.
    pub is_durable: bool,
    pub stage: S,
}

/// A read that has looked up what is known without reading, and continues later.
struct Read<E> {
    lba: u64,
    known: Known<E>,
}

/// One life of a store.
pub struct Life<F: Workload> {
    pub map: Arc<Map<F>>,
    pub history: History,
    pub device: Arc<Device>,
    anchor: Option<Arc<PoweredAnchor>>,
    is_honest: bool,
    pub writes: Vec<Write<F::Stage>>,
    slow_reads: Vec<Read<F::Entry>>,
    /// Blocks of failed writes that may still arrive at the device.
    pub late: Vec<(u64, Version)>,
    /// Blocks whose last write failed: reads may be refused.
    pub doubtful: BTreeSet<u64>,
    /// Announcements in flight that a queue writes by itself, and the number of announcements so
    /// far.
    pub in_flight: Vec<Announcement>,
    pub announcements: u64,
    pub mailbox: Arc<Mailbox>,
    /// Number of writes completed concurrently with the store's thread.
    pub beside: u64,
    /// Numbers of writes that were sent again: those not current, and those already current.
    pub sent_again: [u64; 2],
    /// Number of acknowledged durable writes.
    pub durable: u64,
    /// Whether a durable write that completed concurrently with the store's thread waits for its
    /// flush.
    pub owes_flush: bool,
    /// Number of reads verified by a fast-path MAC.
    pub vouched: Cell<u64>,
    /// Number of errors found by scrubs.
    pub found_by_scrubs: u64,
    /// Number of completed growths.
    pub growths: u64,
    /// Numbers of reads that were answered, and that were refused.
    pub reads: [u64; 2],
    /// The milestone that a living gateway got with its last flush, or when it connected.
    pub told: Milestone,
    /// Whether that milestone is from this life and still current.
    pub is_told_anew: bool,
    /// A log of events, shown for single worlds.
    pub trace: Vec<String>,
}

impl<F: Workload> Life<F> {
    pub fn new(
        map: Map<F>,
        mut history: History,
        device: &Arc<Device>,
        anchor: Option<&Arc<PoweredAnchor>>,
        is_honest: bool,
    ) -> Self {
        let told = map.milestone();
        history.opening = map.openings().now.opening;
        Self {
            told,
            is_told_anew: false,
            map: Arc::new(map),
            history,
            device: Arc::clone(device),
            anchor: anchor.cloned(),
            is_honest,
            writes: Vec::new(),
            slow_reads: Vec::new(),
            late: Vec::new(),
            doubtful: BTreeSet::new(),
            in_flight: Vec::new(),
            announcements: 0,
            mailbox: Arc::new(Mailbox::new(event().expect("event"))),
            beside: 0,
            sent_again: [0; 2],
            durable: 0,
            owes_flush: false,
            vouched: Cell::new(0),
            found_by_scrubs: 0,
            growths: 0,
            reads: [0; 2],
            trace: Vec::new(),
        }
    }

    fn blocks(&self) -> u64 {
        self.map.geometry().block_count
    }

    /// Checks the result of an operation that an honest device never refuses. `None` if it was
    /// refused.
    pub fn accept<T>(
        &mut self,
        what: &str,
        outcome: io::Result<T>,
    ) -> Result<Option<T>, Violation> {
        self.accept_where(!self.is_honest, what, outcome)
    }

    /// Checks the result of an operation on one block, whose last write may have failed.
    pub fn accept_of<T>(
        &mut self,
        lba: u64,
        what: &str,
        outcome: io::Result<T>,
    ) -> Result<Option<T>, Violation> {
        self.accept_where(!self.is_honest || self.doubtful.contains(&lba), what, outcome)
    }

    fn accept_where<T>(
        &mut self,
        may_fail: bool,
        what: &str,
        outcome: io::Result<T>,
    ) -> Result<Option<T>, Violation> {
        match outcome {
            Ok(done) => Ok(Some(done)),
            Err(error) => {
                self.trace.push(format!("{what}: {error}"));
                let is_explained =
                    may_fail || self.device.is_off() || error.kind() == io::ErrorKind::TimedOut;
                if is_explained {
                    Ok(None)
                } else {
                    Err(Violation(format!("false alarm: {what}: {error}")))
                }
            }
        }
    }

    /// Whether blocks are being written or read.
    pub fn is_busy(&self, lba: u64, blocks: u64) -> bool {
        let writes = self.writes.iter().map(|write| (write.lba, write.blocks));
        let reads = self.slow_reads.iter().map(|read| (read.lba, 1));
        writes.chain(reads).any(|(other, count)| lba < other + count && other < lba + blocks)
    }

    /// A random range, often from those that are written frequently.
    pub fn range(&self, random: &mut ChaCha8Rng) -> (u64, u64) {
        let blocks = 1 + random.next_u64() % WRITE_BLOCKS_MAX;
        let (start, span) =
            if chance(random, 50) { (0, self.blocks()) } else { (F::spot(random), 16) };
        (start + random.next_u64() % (span - blocks + 1), blocks)
    }

    /// Performs a step. Returns false if the store has stopped accepting changes.
    pub fn step(
        &mut self,
        random: &mut ChaCha8Rng,
        version: &mut Version,
    ) -> Result<bool, Violation> {
        if std::mem::take(&mut self.owes_flush) {
            return self.flush_durable();
        }
        let (lba, blocks) = self.range(random);
        let is_free = !self.is_busy(lba, blocks);
        match pick(random, 41) {
            0..=10 if self.writes.len() < AT_ONCE_MAX && chance(random, 30) => {
                self.send_again(random)
            }
            0..=10 if is_free && self.writes.len() < AT_ONCE_MAX => {
                *version += 1;
                self.send(random, Sent { lba, blocks, version: *version })
            }
            11..=17 if !self.writes.is_empty() => F::go_on(self, pick(random, self.writes.len())),
            18 if is_free => {
                // Occasionally all blocks.
                let is_all = chance(random, 20) && !self.is_busy(0, self.blocks());
                let (lba, blocks) = if is_all { (0, self.blocks()) } else { (lba, blocks) };
                self.deallocate(lba, blocks)
            }
            19 | 20 => self.flush(),
            21 => self.lose_an_answer(random),
            22 | 23 if self.map.is_merging() => self.persist("merge step", Map::merge_step),
            22 if chance(random, 30) => self.persist("beginning of a merge", Map::begin_merge),
            23 if chance(random, 10) => self.persist("merge", Map::merge),
            24 => {
                self.map.leaves().forget_pages();
                Ok(true)
            }
            25 => self.persist("write-back", Map::write_back),
            26..=31 if self.writes.iter().all(|write| !write.has(lba)) => {
                if chance(random, 30) {
                    self.map.leaves().forget_pages();
                }
                self.read(lba).map(|()| true)
            }
            32 if is_free && self.slow_reads.len() < AT_ONCE_MAX => {
                let known = self.map.current(lba, 1)[0];
                self.slow_reads.push(Read { lba, known });
                Ok(true)
            }
            33 | 34 if !self.slow_reads.is_empty() => {
                let read = self.slow_reads.swap_remove(pick(random, self.slow_reads.len()));
                let found = self.finish_read(read.lba, read.known);
                self.found(read.lba, found).map(|()| true)
            }
            35 if self.writes.is_empty() && self.slow_reads.is_empty() && chance(random, 50) => {
                self.grow()
            }
            35..=39 => F::other(self, random),
            40 => self.scrub(chance(random, 50)),
            _ => Ok(true),
        }
    }

    /// Sends a write; some are durable.
    fn send(&mut self, random: &mut ChaCha8Rng, sent: Sent) -> Result<bool, Violation> {
        let before = self.writes.len();
        let goes_on = F::begin(self, sent.lba, sent.blocks, sent.version)?;
        if self.writes.len() > before
            && let Some(write) = self.writes.last_mut()
        {
            write.is_durable = chance(random, 25);
            self.history.sent(sent);
        }
        Ok(goes_on)
    }

    /// Sends a write, or part of it, again unchanged, as a gateway does that got no answer or finds
    /// the store in another life. The write may be current, outdated, or have failed.
    fn send_again(&mut self, random: &mut ChaCha8Rng) -> Result<bool, Violation> {
        let sent = &self.history.sent;
        if sent.is_empty() {
            return Ok(true);
        }
        let latest = chance(random, 50).then(|| sent.len() - 1);
        let mut again = sent[latest.unwrap_or_else(|| pick(random, sent.len()))];
        if again.blocks > 1 && chance(random, 30) {
            again = Sent { lba: again.lba + 1, blocks: again.blocks - 1, ..again };
        }
        if self.is_busy(again.lba, again.blocks) || again.lba + again.blocks > self.blocks() {
            return Ok(true);
        }
        self.trace.push("sent again:".into());
        let is_current = self.history.is_latest(again.lba, again.version);
        self.sent_again[usize::from(is_current)] += 1;
        self.send(random, again)
    }

    /// Checks everything except blocks, including cached leaves, and repairs what is known.
    fn scrub(&mut self, repairs: bool) -> Result<bool, Violation> {
        if !F::quiesce(self)? {
            return Ok(false);
        }
        let (mut walk, mut report) = (Walk::new(Arc::clone(&self.map)), Report::default());
        let looked = (|| {
            while walk.scrub_structure(&mut report)? {}
            let leaves = 0..self.map.geometry().leaves();
            leaves.into_iter().try_for_each(|leaf| walk.leaf(leaf, &mut report).map(drop))
        })();
        if self.accept("scrub", looked)?.is_none() {
            return Ok(false);
        }
        let found = report.findings.into_iter().map(|found| found.detail);
        self.scrubbed(&found.collect::<Vec<_>>())?;
        if !repairs {
            return Ok(true);
        }
        self.persist("repair", Map::repair)
    }

    fn scrubbed(&mut self, found: &[String]) -> Result<(), Violation> {
        self.trace.push(format!("a scrub finds {found:?}"));
        self.found_by_scrubs += found.len() as u64;
        if self.is_honest && !self.device.is_off() && !found.is_empty() {
            return Err(Violation(format!("false alarm: a scrub finds {found:?}")));
        }
        Ok(())
    }

    /// Writes nearly every block.
    pub fn fill(&mut self, version: &mut Version) -> Result<(), Violation> {
        for lba in (0..self.blocks() - WRITE_BLOCKS_MAX).step_by(WRITE_BLOCKS_MAX as usize) {
            *version += 1;
            F::begin(self, lba, WRITE_BLOCKS_MAX, *version)?;
            self.end_all()?;
        }
        Ok(())
    }

    /// Records a completed write, and flushes before acknowledging a durable one.
    pub fn ended(&mut self, write: &Write<F::Stage>) -> Result<bool, Violation> {
        self.acknowledged(write);
        if write.is_durable { self.flush_durable() } else { Ok(true) }
    }

    /// Flushes for a durable write.
    pub fn flush_durable(&mut self) -> Result<bool, Violation> {
        let is_flushed = self.flush()?;
        self.durable += u64::from(is_flushed);
        Ok(is_flushed)
    }

    /// Completes the writes in progress.
    pub fn end_all(&mut self) -> Result<(), Violation> {
        while !self.writes.is_empty() {
            F::go_on(self, 0)?;
        }
        Ok(())
    }

    /// Records the beginning of a write.
    pub fn begun(&mut self, lba: u64, blocks: u64, version: Version) {
        self.trace.push(format!("version {version}: blocks {lba} to {}", lba + blocks - 1));
    }

    /// Records an acknowledged write.
    pub fn acknowledged(&mut self, write: &Write<F::Stage>) {
        self.trace.push(format!("version {} is acknowledged", write.version));
        let mark = self.map.mark();
        for lba in write.lba..write.lba + write.blocks {
            self.history.acknowledged(lba, write.version, mark);
            self.doubtful.remove(&lba);
        }
    }

    /// Makes room for changes.
    pub fn make_room(&mut self) -> Result<bool, Violation> {
        self.persist("room", Map::make_room)
    }

    fn deallocate(&mut self, lba: u64, blocks: u64) -> Result<bool, Violation> {
        let deallocated = self.map.deallocate(lba, blocks);
        match self.accept("deallocate", deallocated)? {
            None => Ok(false),
            Some(false) => self.make_room(),
            Some(true) => {
                self.trace.push(format!("blocks {lba} to {} are deallocated", lba + blocks - 1));
                let mark = self.map.mark();
                for lba in lba..lba + blocks {
                    self.history.acknowledged(lba, UNWRITTEN, mark);
                    self.doubtful.remove(&lba);
                }
                Ok(true)
            }
        }
    }

    /// Runs work of the store's thread, concurrently with that of the queues.
    pub fn persist(
        &mut self,
        what: &str,
        work: impl FnOnce(&Map<F>) -> io::Result<()>,
    ) -> Result<bool, Violation> {
        let queues = F::begin_beside(self);
        let map = Arc::clone(&self.map);
        let outcome = work(&map);
        drop(map);
        if let Some(queues) = queues {
            F::end_beside(self, &queues)?;
        }
        self.persisted(what, outcome)
    }

    /// Handles the result of work that may have advanced the anchor.
    fn persisted(&mut self, what: &str, outcome: io::Result<()>) -> Result<bool, Violation> {
        let is_done = self.accept(what, outcome)?.is_some();
        if is_done {
            self.trace.push(what.to_owned());
        }
        Ok(is_done)
    }

    /// An acknowledged flush counts immediately, or once it is anchored if anchors are rare.
    pub fn flush(&mut self) -> Result<bool, Violation> {
        let began = self.history.now();
        let advances = |life: &Self| life.anchor.as_ref().map_or(0, |anchor| anchor.advances());
        let before = advances(self);
        if !self.persist("flush", Map::flush)? {
            return Ok(false);
        }
        let policy = self.anchor.as_ref().map(|anchor| anchor.policy());
        let is_rare = policy == Some(AnchorPolicy::Checkpoints) && !self.is_honest;
        self.is_told_anew |= self.told != self.map.milestone();
        self.told = self.map.milestone();
        if is_rare && advances(self) != before {
            self.history.settle();
        }
        self.history.flushed(began);
        if !is_rare {
            self.history.settle();
        }
        Ok(true)
    }

    /// An orderly end, which is always anchored.
    pub fn finish(&mut self) -> Result<(), Violation> {
        self.end_all()?;
        let began = self.history.now();
        if self.persist("end", Map::finish)? {
            self.is_told_anew = false;
            self.history.flushed(began);
            self.history.settle();
        }
        Ok(())
    }

    /// Grows the store, if possible.
    fn grow(&mut self) -> Result<bool, Violation> {
        let Some(geometry) = grown(self.map.geometry()) else { return Ok(true) };
        if !F::quiesce(self)? {
            return Ok(false);
        }
        let began = self.history.now();
        let block_count = geometry.block_count;
        let map = Arc::get_mut(&mut self.map).expect("no scrub is running");
        let outcome = map.grow(geometry);
        if !self.persisted("growth", outcome)? {
            return Ok(false);
        }
        self.growths += 1;
        // The target is trusted for its size, and no gateway gets a milestone.
        self.is_told_anew = false;
        self.history.block_count = block_count;
        self.history.flushed(began);
        self.history.settle();
        Ok(true)
    }

    /// Loses one of the anchor's answers; then the store continues, or flushes first.
    fn lose_an_answer(&mut self, random: &mut ChaCha8Rng) -> Result<bool, Violation> {
        let Some(anchor) = self.anchor.clone() else { return Ok(true) };
        anchor.lose_an_answer(chance(random, 50));
        let merges = chance(random, 50);
        let work = if merges { Map::merge } else { Map::flush };
        self.persist("flush or merge whose anchor's answer is lost", work)?;
        anchor.recover();
        if chance(random, 50) { self.flush() } else { Ok(true) }
    }

    /// The version of a block, read from the device; `None` if it is no complete version.
    pub fn look(&self, lba: u64) -> io::Result<Option<Version>> {
        self.finish_read(lba, self.map.current(lba, 1)[0])
    }

    fn finish_read(&self, lba: u64, known: Known<F::Entry>) -> io::Result<Option<Version>> {
        F::read(self, lba, known)
    }

    /// Looks up absent blocks in leaf pages.
    pub fn resolve(&self, known: &mut [Known<F::Entry>], lba: u64) -> io::Result<()> {
        for set in lba / F::ENTRIES_PER_LEAF..=(lba + known.len() as u64 - 1) / F::ENTRIES_PER_LEAF
        {
            let page = self.map.leaf(set)?;
            take_leaf::<F>(known, lba, set, page.as_deref().unwrap_or(&Page::ZERO.0));
        }
        Ok(())
    }

    /// Reads a block.
    pub fn read(&mut self, lba: u64) -> Result<(), Violation> {
        let found = self.look(lba);
        self.found(lba, found)
    }

    fn found(&mut self, lba: u64, found: io::Result<Option<Version>>) -> Result<(), Violation> {
        match self.accept_of(lba, &format!("read of block {lba}"), found)? {
            Some(Some(version)) => self.returned(lba, version),
            Some(None) if F::IS_IN_PLACE && !self.is_honest => {
                // Its seal doesn't match: the gateway refuses it.
                self.reads[1] += 1;
                Ok(())
            }
            Some(None) => Err(Violation(format!("mixed: block {lba} is no complete version"))),
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

impl<S> Write<S> {
    fn has(&self, lba: u64) -> bool {
        (self.lba..self.lba + self.blocks).contains(&lba)
    }
}
