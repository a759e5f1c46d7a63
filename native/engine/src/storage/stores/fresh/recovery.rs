//! Creates and opens stores: finds the checkpoint that the anchor names, then the valid part of its
//! log.
//!
//! An opening counts only from its own first checkpoint on, which has a new epoch. Until that is
//! anchored, everything that the previous checkpoint needs stays unchanged.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::node::NodeKey;
use sealane_proto::freshness::pending::Pending;

use super::super::pages::{BlockFile, Page, random};
use super::super::slots::Slots;
use super::anchor::{Anchor, Anchored};
use super::announcements::InFlight;
use super::carried::unfinished;
use super::checkpoint::Checkpoint;
use super::commit::{Writer, fits};
use super::counters::{Counters, count};
use super::failure::{Refusal, damaged};
use super::geometry::{Geometry, Sizes};
use super::intents::Intents;
use super::keys::{Authority, StoreKeys, Tag};
use super::leaves::Leaves;
use super::log::{LogPage, Record};
use super::log_head::LogHead;
use super::lost::Lost;
use super::map::{Layout, Map, State};
use super::nodes::NodePage;
use super::opening::Opening;
use super::passage::Passage;
use super::slot_maps::{SlotMaps, slots_of};
use super::superblock::Superblock;
use crate::clock;

/// Pages read at a time.
const READ_PAGES: u64 = 256;
/// Increment of the write sequence at each opening. It exceeds the number of sequences that can
/// have been used and lost: those of writes in flight or waiting for the log.
const SEQUENCE_LEAP: u64 = 1 << 32;
/// Larger numbers are forged: no store lives that long.
const NUMBER_MAX: u64 = 1 << 62;

/// The state of a store according to its last checkpoint and its log.
struct Recovered<F: Layout> {
    checkpoint: Checkpoint,
    tag: Tag,
    pending: Pending<F::Entry>,
    log_next: u64,
    sequence: u64,
    /// How far the previous opening had come, as far as all of it was found.
    found: Milestone,
}

fn rolled_back(detail: impl Into<String>) -> io::Error {
    Refusal::RolledBack(detail.into()).into()
}

/// Finds the checkpoint to start from: exactly the anchored one if there is an anchor, otherwise
/// the last one.
fn find_checkpoint(
    file: &dyn BlockFile,
    superblock: &Superblock,
    keys: &StoreKeys,
    anchored: Option<&Anchored>,
) -> io::Result<(Checkpoint, Tag)> {
    let mut pages = [Page::ZERO; 2];
    file.read(superblock.geometry.checkpoint(0), &mut pages)?;
    let mut whole = pages.iter().filter_map(|page| Checkpoint::decode(page, keys));
    let found = match anchored {
        None => whole.max_by_key(|(checkpoint, _)| checkpoint.number),
        Some(anchored) => {
            let wanted = (anchored.checkpoint, anchored.checkpoint_tag);
            let found = whole.find(|(checkpoint, tag)| (checkpoint.number, *tag) == wanted);
            if found.is_none() {
                return Err(rolled_back("the checkpoint that its anchor names is missing"));
            }
            found
        }
    };
    let found = found.ok_or_else(|| damaged("no checkpoint is whole"))?;
    let last = &found.0;
    let numbers = [last.number, last.log_start, last.log_flushed, last.sequence, last.epoch];
    if numbers.iter().any(|number| *number > NUMBER_MAX) {
        return Err(damaged("its checkpoint has an impossible number"));
    }
    Ok(found)
}

/// The store's current sizes, after all its growths.
fn grown<F: Layout>(created: &Geometry, growths: &[Sizes]) -> io::Result<Geometry> {
    let unknown = || damaged("it has impossible sizes");
    if !fits::<F>(created) {
        return Err(unknown());
    }
    let all = growths.iter().try_fold(created.clone(), |geometry, sizes| {
        geometry.with_extent(*sizes).filter(fits::<F>)
    });
    all.ok_or_else(unknown)
}

impl<F: Layout> Map<F> {
    /// Creates an empty store. The previous contents of the file become void.
    pub fn create(
        file: Arc<dyn BlockFile>,
        superblock: &Superblock,
        authority: &Authority<'_>,
        anchor: Option<Arc<dyn Anchor>>,
    ) -> io::Result<Self> {
        let geometry = superblock.geometry.clone();
        if !fits::<F>(&geometry) {
            let detail = format!("a store can't have these sizes: {geometry:?}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
        if anchor.as_ref().map(|anchor| anchor.latest()).transpose()?.flatten().is_some() {
            return Err(rolled_back("its anchor has a record of an earlier store"));
        }
        let keys = StoreKeys::new(&superblock.uuid, &superblock.seed, authority);
        // Pages of an earlier store can't be mistaken for parts of this one, because its keys
        // differ.
        let map = Self::assemble(file, superblock, geometry, keys, anchor);
        map.begin_epoch(0, &Pending::default())?;
        map.write_superblock()?;
        // The anchor must never name a store that doesn't exist.
        {
            let mut writer = map.writer();
            map.advance(&mut writer)?;
            map.pass_milestone(&writer);
        }
        Ok(map)
    }

    /// Opens a store after a power cut or an orderly end. Fails with [`Refusal::RolledBack`] if the
    /// anchor has a record of a later state.
    pub fn open(
        file: Arc<dyn BlockFile>,
        superblock: &Superblock,
        keys: StoreKeys,
        anchor: Option<Arc<dyn Anchor>>,
    ) -> io::Result<Self> {
        Self::open_watched(file, superblock, keys, anchor, &Opening::default(), |_| Ok(()))
    }

    /// Opens a store and reports progress to `opening`. `check_size` refuses sizes that the device
    /// has no room for.
    pub fn open_watched(
        file: Arc<dyn BlockFile>,
        superblock: &Superblock,
        keys: StoreKeys,
        anchor: Option<Arc<dyn Anchor>>,
        opening: &Opening,
        check_size: impl FnOnce(&Geometry) -> io::Result<()>,
    ) -> io::Result<Self> {
        let begun = clock::now();
        let anchored = anchor.as_ref().map(|anchor| anchor.latest()).transpose()?.flatten();
        let found = find_checkpoint(&*file, superblock, &keys, anchored.as_ref());
        let (checkpoint, tag) = found?;
        // Regardless of what the store says: it may be from before it was first anchored.
        let is_lost = |anchor: &Arc<dyn Anchor>| anchored.is_none() && !anchor.is_believed();
        if anchor.as_ref().is_some_and(is_lost) {
            return Err(rolled_back("its anchor has no record of it"));
        }
        let geometry = grown::<F>(&superblock.geometry, &checkpoint.growths)?;
        check_size(&geometry)?;
        opening.expect(geometry.node_pages() + geometry.log_pages + geometry.slot_maps());
        let mut map = Self::assemble(file, superblock, geometry, keys, anchor);
        map.load_leaves(&checkpoint, opening)?;
        let recovered = map.replay(checkpoint, tag, anchored.as_ref(), opening)?;
        let claimed = map.claim_slots(&recovered.pending, opening)?;
        map.take_over(&recovered, claimed, anchored);
        map.begin_epoch(recovered.log_next, &recovered.pending)?;
        {
            let mut writer = map.writer();
            map.advance(&mut writer)?;
            map.pass_milestone(&writer);
        }
        map.state().active = recovered.pending;
        let millis = clock::now().saturating_sub(begun) / 1_000_000;
        count(&map.counters.recovery_millis, millis);
        Ok(map)
    }

    fn assemble(
        file: Arc<dyn BlockFile>,
        superblock: &Superblock,
        geometry: Geometry,
        keys: StoreKeys,
        anchor: Option<Arc<dyn Anchor>>,
    ) -> Self {
        let counters = Arc::<Counters>::default();
        let log = LogHead {
            epoch: 0,
            key: keys.log(0, &[0; 16]),
            start: (0, Tag::default()),
            kept: 0,
            next: 0,
            tag: Tag::default(),
            flushed: (0, Tag::default()),
        };
        let writer = Writer {
            nonce: [0; 16],
            checkpoint: 0,
            checkpoint_tag: Tag::default(),
            commits: 0,
            slot_maps: SlotMaps::new(geometry.slot_maps()),
            merge: None,
            repairs: BTreeMap::new(),
            rewrites_superblock: false,
            is_settled: true,
            replaced: Vec::new(),
            anchored: None,
            unsettled: None,
        };
        let state = State {
            active: Pending::default(),
            frozen: Arc::default(),
            slots: Slots::new(geometry.slot_count),
            placed: 0,
            intents: Intents::default(),
            waiting: Vec::new(),
            log_taken: 0,
            retired: Vec::new(),
            failure: None,
            passage: Passage::default(),
            reached: Milestone { opening: [0; 16], checkpoint: 0, log_flushed: 0 },
        };
        let leaves =
            Leaves::new(geometry.clone(), NodeKey::new(keys.tree()), Arc::clone(&counters));
        Self {
            file,
            geometry,
            superblock: Box::new(superblock.encode(&keys)),
            keys,
            anchor,
            leaves,
            sequence: AtomicU64::new(0),
            state: Mutex::new(state),
            writer: Mutex::new(writer),
            log_head: Mutex::new(log),
            log_in_flight: InFlight::default(),
            counters,
            events: OnceLock::new(),
        }
    }

    fn load_leaves(&mut self, checkpoint: &Checkpoint, opening: &Opening) -> io::Result<()> {
        self.leaves.load_regions(&checkpoint.void_since);
        let count = self.geometry.node_pages();
        let mut copies = [0, 1].map(|_| vec![Page::ZERO; READ_PAGES.min(count) as usize]);
        let mut first = 0;
        while first < count {
            let part = READ_PAGES.min(self.geometry.nodes_together(first)) as usize;
            for (copy, pages) in (0..).zip(&mut copies) {
                self.file.read(self.geometry.nodes(first, copy), &mut pages[..part])?;
            }
            for (index, offset) in (first..).zip(0..part) {
                let pages = [0, 1].map(|copy| NodePage::decode(&copies[copy][offset], &self.keys));
                self.leaves.load(checkpoint.number, index, pages);
            }
            opening.pass(part as u64);
            first += part as u64;
        }
        if self.leaves.root().tag != checkpoint.root {
            return Err(damaged("pages of its tree are missing or outdated"));
        }
        Ok(())
    }

    /// Reads the log from the checkpoint on, up to the first page that doesn't continue the one
    /// before. Returns the pages with their tags.
    fn read_log(
        &self,
        checkpoint: &Checkpoint,
        opening: &Opening,
    ) -> io::Result<Vec<(LogPage<F::Entry>, Tag)>> {
        let key = self.keys.log(checkpoint.epoch, &checkpoint.nonce);
        let mut log: Vec<(LogPage<F::Entry>, Tag)> = Vec::new();
        let mut is_whole = true;
        let mut pages = vec![Page::ZERO; READ_PAGES.min(self.geometry.log_pages) as usize];
        let mut number = checkpoint.log_start;
        let end = checkpoint.log_start + self.geometry.log_pages;
        while number < end {
            let to_wrap = self.geometry.log_pages - number % self.geometry.log_pages;
            let part = READ_PAGES.min(end - number).min(to_wrap) as usize;
            self.file.read(self.geometry.log(number), &mut pages[..part])?;
            opening.pass(part as u64);
            for page in &pages[..part] {
                let previous = log.last().map_or(checkpoint.log_tag, |(_, tag)| *tag);
                match LogPage::decode::<F>(page, (checkpoint.epoch, number), &key) {
                    Some((page, tag)) if is_whole && page.previous == previous => {
                        log.push((page, tag));
                    }
                    // Pages beyond the end of the log may have been written before a page that was
                    // lost. But a page that a later one calls flushed can't have been lost.
                    Some((page, _)) if page.flushed > checkpoint.log_start + log.len() as u64 => {
                        return Err(damaged("pages of its log are missing"));
                    }
                    _ => is_whole = false,
                }
                number += 1;
            }
        }
        if checkpoint.log_flushed > checkpoint.log_start + log.len() as u64 {
            return Err(damaged("pages of its log are missing"));
        }
        Ok(log)
    }

    fn replay(
        &self,
        checkpoint: Checkpoint,
        tag: Tag,
        anchored: Option<&Anchored>,
        opening: &Opening,
    ) -> io::Result<Recovered<F>> {
        let log = self.read_log(&checkpoint, opening)?;
        if let Some(anchored) = anchored {
            let tags = log.iter().map(|(page, tag)| (page.number + 1, *tag));
            let mut heads = std::iter::once((checkpoint.log_start, checkpoint.log_tag)).chain(tags);
            if !heads.any(|head| head == (anchored.log_flushed, anchored.log_tag)) {
                return Err(rolled_back("its log lacks the page that its anchor names"));
            }
        }
        let flushed = log.iter().map(|(page, _)| page.flushed).max();
        let flushed = flushed.max(anchored.map(|anchored| anchored.log_flushed));
        let flushed = flushed.unwrap_or(0).max(checkpoint.log_flushed);
        let unfinished = unfinished(&log, flushed);
        let mut pending = Pending::default();
        let mut lost = Lost::default();
        let mut changes = 0;
        opening.expect(log.iter().map(|(page, _)| page.records.len() as u64).sum());
        for (page, _) in &log {
            for (place, record) in page.records.iter().enumerate() {
                changes += 1;
                // A write in progress at the flush isn't part of it.
                let is_on_its_way = unfinished.contains(&(page.number, place));
                let is_flushed = page.number < flushed && !is_on_its_way;
                let is_applied = self.apply_record(&mut pending, record, is_flushed)?;
                lost.note(page.number, record, is_applied);
            }
            opening.pass(page.records.len() as u64);
        }
        count(&self.counters.recovered_log_pages, log.len() as u64);
        count(&self.counters.recovered_changes, changes);
        let sequence = log.iter().map(|(page, _)| page.sequence).max().unwrap_or(0);
        let sequence = sequence.max(checkpoint.sequence);
        if sequence > NUMBER_MAX {
            return Err(damaged("it has an impossible write sequence"));
        }
        let log_next = checkpoint.log_start + log.len() as u64;
        let found = Milestone {
            opening: checkpoint.nonce,
            checkpoint: checkpoint.number,
            log_flushed: lost.first_page().unwrap_or(log_next),
        };
        let sequence = sequence + SEQUENCE_LEAP;
        Ok(Recovered { checkpoint, tag, pending, log_next, sequence, found })
    }

    /// Applies a record, if it counts. Returns whether it does.
    fn apply_record(
        &self,
        pending: &mut Pending<F::Entry>,
        record: &Record<F::Entry>,
        is_flushed: bool,
    ) -> io::Result<bool> {
        let (lba, blocks) = record.range();
        let end = lba.checked_add(blocks).filter(|end| *end <= self.geometry.block_count);
        let Some(end) = end.filter(|_| blocks > 0) else {
            return Err(damaged("a log record refers to blocks beyond its end"));
        };
        let Record::Entry { entry, .. } = record else {
            // Slots of these blocks are free because nothing refers to them.
            pending.void(lba..end, &mut Vec::new());
            return Ok(true);
        };
        if F::slot(entry).is_some_and(|slot| slot >= self.geometry.slot_count) {
            return Err(damaged("a log record refers to a slot beyond its end"));
        }
        let is_there =
            is_flushed || F::has_arrived(lba, entry, &*self.file, &self.geometry, &self.keys)?;
        if is_there {
            pending.insert(lba, *entry);
        }
        Ok(is_there)
    }

    /// Marks slots of leaf pages and of pending changes as used.
    fn claim_slots(
        &self,
        pending: &Pending<F::Entry>,
        opening: &Opening,
    ) -> io::Result<(Slots, SlotMaps)> {
        let mut slots = Slots::new(self.geometry.slot_count);
        let mut slot_maps = SlotMaps::new(self.geometry.slot_maps());
        let taken = |slot| damaged(format!("slot {slot} is used twice or beyond its end"));
        for index in 0..self.geometry.slot_maps() {
            opening.pass(1);
            let Some(page) = self.leaf(self.geometry.sets() + index)? else { continue };
            for slot in slots_of(index, &page) {
                if !slots.claim(slot) {
                    return Err(taken(slot));
                }
            }
            slot_maps.load(index, &page);
        }
        for (_, entry) in pending.all_entries() {
            if let Some(slot) = F::slot(&entry)
                && !slots.claim(slot)
            {
                return Err(taken(slot));
            }
        }
        Ok((slots, slot_maps))
    }

    fn take_over(
        &mut self,
        recovered: &Recovered<F>,
        (slots, slot_maps): (Slots, SlotMaps),
        anchored: Option<Anchored>,
    ) {
        let checkpoint = &recovered.checkpoint;
        self.sequence.store(recovered.sequence, Ordering::Relaxed);
        {
            let mut state = self.state();
            state.slots = slots;
            state.passage = checkpoint.passage.clone();
            state.passage.end(recovered.found, recovered.log_next);
        }
        let mut writer = self.writer();
        writer.checkpoint = checkpoint.number;
        writer.checkpoint_tag = recovered.tag;
        // Later commits are counted from here: loading the tree was none.
        writer.commits = checkpoint.commits.wrapping_sub(self.leaves.root().commit);
        writer.slot_maps = slot_maps;
        writer.anchored = anchored;
        let mut log = self.log();
        log.epoch = checkpoint.epoch;
        log.start = (checkpoint.log_start, checkpoint.log_tag);
        log.kept = checkpoint.log_start;
    }

    /// Begins an epoch: logs pending changes again, with the epoch's own key, behind the previous
    /// log, and writes a checkpoint with the log starting there.
    fn begin_epoch(&self, log_next: u64, pending: &Pending<F::Entry>) -> io::Result<()> {
        let mut writer = self.writer();
        writer.nonce = random()?;
        self.counters.commits_before.store(writer.commits, Ordering::Relaxed);
        {
            let mut log = self.log();
            log.epoch += 1;
            self.counters.epoch.store(log.epoch, Ordering::Relaxed);
            log.key = self.keys.log(log.epoch, &writer.nonce);
            (log.next, log.tag) = (log_next, Tag::default());
            log.flushed = (log.next, log.tag);
        }
        let voids = pending.all_voids();
        let voids =
            voids.map(|void| Record::Void { lba: void.start, blocks: void.end - void.start });
        let entries = pending.all_entries();
        let entries = entries.map(|(lba, entry)| Record::written(lba, entry));
        let records: Vec<_> = voids.chain(entries).collect();
        if !records.is_empty() {
            self.append(&records)?;
        }
        // The recovered changes are durable once the checkpoint is, which is written after a sync.
        let flushed = {
            let mut log = self.log();
            log.flushed = (log.next, log.tag);
            self.state().log_taken = log.next;
            log.flushed.0
        };
        let start = Milestone { checkpoint: writer.checkpoint + 1, ..writer.reached(flushed) };
        self.state().passage.begin(start);
        self.write_checkpoint(&mut writer, (log_next, Tag::default()))
    }
}
