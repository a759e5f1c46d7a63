//! Making changes durable: log pages, checkpoints, the anchor. One thread at a time.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering;

use sealane_proto::freshness::milestone::Milestone;

use super::super::pages::{BlockFile, Page};
use super::anchor::{AnchorError, AnchorPolicy, Anchored};
use super::checkpoint::Checkpoint;
use super::counters::count;
use super::failure::Refusal;
use super::geometry::Geometry;
use super::keys::{PageKey, Tag};
use super::log::{LogPage, Record, records_per_page};
use super::map::{Layout, Map};
use super::merge::{Merge, Repair};
use super::slot_maps::SlotMaps;
use crate::clock;

/// Pages of nodes that are made at a time.
const ROUND_PAGES: usize = 256;

/// Where the log stands, and what of it is durable.
#[derive(Debug)]
pub(super) struct Writer<E> {
    pub epoch: u64,
    pub nonce: [u8; 16],
    pub log_key: PageKey,
    /// First log page that the last checkpoint goes on from, and the tag of the one before.
    pub log_start: (u64, Tag),
    /// The same of the oldest checkpoint that may still be wanted.
    pub log_kept: u64,
    pub log_next: u64,
    /// Tag of the last log page.
    pub log_tag: Tag,
    /// Log pages before this one are flushed; and the tag of the last of them.
    pub flushed: (u64, Tag),
    /// The last checkpoint's number and tag.
    pub checkpoint: u64,
    pub checkpoint_tag: Tag,
    /// Root commits before this opening.
    pub commits: u64,
    /// Slots of which leaf pages tell.
    pub slot_maps: SlotMaps,
    pub merge: Option<Merge<E>>,
    /// Leaves that the next merge writes again as they are, by number.
    pub repairs: BTreeMap<u64, Repair>,
    /// Whether the superblock is wrong on the device.
    pub rewrites_superblock: bool,
    /// Whether no checkpoint before the last one may still be wanted.
    pub is_settled: bool,
    /// Slots that no leaf page of the last checkpoint names any more: free as soon as no older
    /// checkpoint can be wanted.
    pub replaced: Vec<u64>,
    pub anchored: Option<Anchored>,
    /// A state that the anchor was to be advanced to, and gave no answer.
    pub unsettled: Option<Anchored>,
}

impl<F: Layout> Map<F> {
    // Doors: each has the store fail for good if the device fails. After an error nobody knows what
    // it has.

    /// Makes everything durable that was noted so far, and has the anchor hear of it as its policy
    /// says.
    pub fn flush(&self) -> io::Result<()> {
        let mut writer = self.writing();
        let flushed = self.flush_with(&mut writer, false);
        let flushed = flushed.and_then(|()| self.commit_to_anchor(&mut writer));
        self.guard(flushed)?;
        self.pass_milestone(&writer);
        Ok(())
    }

    /// Notes how far the store has come, for who will ask. What the writer has done must be flushed,
    /// and an anchor must name its checkpoint: else an opening might go on from an earlier one.
    pub(super) fn pass_milestone(&self, writer: &Writer<F::Entry>) {
        self.state().reached = writer.reached();
    }

    /// Writes what waits to the log for nobody who asked: it is flushed when the anchor hears of it
    /// with the next flush or checkpoint. A merge is due before the table is full, so a checkpoint
    /// is never far.
    pub fn write_back(&self) -> io::Result<()> {
        let mut writer = self.writing();
        let written = self.flush_with(&mut writer, false);
        self.guard(written)
    }

    /// Begins to merge the changes noted so far into leaf pages; also a write-back.
    pub fn begin_merge(&self) -> io::Result<()> {
        let mut writer = self.writing();
        let begun = self.flush_with(&mut writer, true);
        self.guard(begun)
    }

    /// Whether a merge has begun and not ended.
    #[must_use]
    pub fn is_merging(&self) -> bool {
        self.writer().merge.is_some() && self.state().failure.is_none()
    }

    /// Merges some changes; the last step ends with a checkpoint.
    pub fn merge_step(&self) -> io::Result<()> {
        let mut writer = self.writing();
        let checked = self.state().check();
        let stepped = checked.and_then(|()| self.step(&mut writer));
        self.guard(stepped)
    }

    /// Merges all changes noted so far; also a flush.
    pub fn merge(&self) -> io::Result<()> {
        let mut writer = self.writing();
        let merged = self.merge_all(&mut writer);
        self.guard(merged)
    }

    /// Makes room for further changes; also a write-back. An error if there is none before the
    /// anchor has answered.
    pub fn make_room(&self) -> io::Result<()> {
        {
            let mut writer = self.writing();
            let written = self.flush_with(&mut writer, false);
            // What only an older checkpoint needs is room too.
            let made = written.and_then(|()| self.settle(&mut writer));
            self.guard(made)?;
        }
        let is_tight = {
            let state = self.state();
            let room = self.geometry.pending_max / 4;
            let on_their_way = state.placed + state.intents.count() as u64;
            let has_changes = state.pending() > on_their_way;
            let is_short = self.geometry.slot_count > 0 && state.slots.free() < room
                || state.pending() > self.geometry.pending_max - room;
            has_changes && is_short
        };
        if is_tight { self.merge() } else { Ok(()) }
    }

    /// Ends: everything durable, and anchored whatever the policy.
    pub fn finish(&self) -> io::Result<()> {
        let mut writer = self.writing();
        let ended = self.flush_with(&mut writer, false).and_then(|()| self.advance(&mut writer));
        self.guard(ended)
    }

    pub(super) fn guard<T>(&self, result: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &result
            && !matches!(Refusal::of(error), Some(Refusal::AnchorUnreachable(_)))
        {
            let failure = match Refusal::of(error) {
                Some(refusal) => refusal.clone(),
                None => Refusal::Failed(error.to_string()),
            };
            self.state().failure.get_or_insert(failure);
        }
        result
    }

    // The log.

    /// Announces the writes in place that wait for it: durable when it has ended, but no flush.
    pub fn announce(&self) -> io::Result<()> {
        let mut writer = self.writing();
        let announced = self.announce_with(&mut writer);
        self.guard(announced)
    }

    fn announce_with(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        let (voids, intents) = {
            let state = self.state();
            state.check()?;
            (state.waiting.len(), state.intents.count())
        };
        let per_page = records_per_page::<F>();
        let pages = voids.div_ceil(per_page) + intents.div_ceil(per_page);
        if !self.make_log_room(writer, pages as u64)? {
            self.merge_all(writer)?;
        }
        let records = {
            let mut state = self.state();
            // What became unwritten before a write was announced comes before it in the log.
            let mut records = std::mem::take(&mut state.waiting);
            state.intents.announce_new(&mut records);
            records
        };
        if records.is_empty() {
            return Ok(());
        }
        // All log pages before these are durable: whoever wrote one has synced since.
        self.append_by(writer, &records, |place, run| self.file.write_durably(place, run))
    }

    /// Makes durable what waits. With `freezes`, what is noted so far is what the next merge merges.
    pub(super) fn flush_with(
        &self,
        writer: &mut Writer<F::Entry>,
        freezes: bool,
    ) -> io::Result<()> {
        let pages = {
            let state = self.state();
            state.check()?;
            let per_page = records_per_page::<F>();
            state.waiting.len().div_ceil(per_page) + state.intents.count().div_ceil(per_page)
        };
        if !self.make_log_room(writer, pages as u64)? {
            return self.merge_unlogged(writer);
        }
        if freezes {
            // What an older checkpoint needs is about to be written over.
            self.settle(writer)?;
        }
        let (records, carried, retired, frozen) = {
            let mut state = self.state();
            let frozen = (freezes && writer.merge.is_none()).then(|| state.freeze());
            let (records, retired) =
                (std::mem::take(&mut state.waiting), std::mem::take(&mut state.retired));
            (records, state.intents.announce_all(), retired, frozen)
        };
        if !records.is_empty() {
            self.append(writer, &records)?;
        }
        let border = (writer.log_next, writer.log_tag);
        // Writes on their way are no part of the flush: they are announced again behind it.
        if !carried.is_empty() {
            self.append(writer, &carried)?;
        }
        if !records.is_empty() || F::IS_IN_PLACE {
            self.sync()?;
            writer.flushed = border;
            self.state().slots.release(retired);
        }
        if let Some(frozen) = frozen {
            writer.start_merge(Merge::new(frozen, border));
        }
        Ok(())
    }

    /// Whether the log has room for so many pages, if need be behind a merge that is under way.
    fn make_log_room(&self, writer: &mut Writer<F::Entry>, pages: u64) -> io::Result<bool> {
        if !self.has_log_room(writer, pages) {
            self.settle(writer)?;
        }
        if !self.has_log_room(writer, pages) && writer.merge.is_some() {
            self.merge_to_end(writer)?;
        }
        Ok(self.has_log_room(writer, pages))
    }

    /// Whether the log has room for so many pages, and one more: changes may come while this looks.
    pub(super) fn has_log_room(&self, writer: &Writer<F::Entry>, pages: u64) -> bool {
        writer.log_next - writer.log_kept + pages < self.log_usable()
    }

    /// Merges all changes noted so far, those that the log has no room for among them.
    fn merge_unlogged(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        self.settle(writer)?;
        let (frozen, carried, retired) = {
            let mut state = self.state();
            state.waiting.clear();
            let retired = std::mem::take(&mut state.retired);
            (state.freeze(), state.intents.announce_all(), retired)
        };
        let mut merge = Merge::new(frozen, (writer.log_next, writer.log_tag));
        // The log that the checkpoint begins must have them; there is room kept for that.
        if !carried.is_empty() {
            self.append(writer, &carried)?;
        }
        merge.retired = retired;
        writer.start_merge(merge);
        self.merge_to_end(writer)
    }

    /// Writes log pages, which a sync must follow.
    pub(super) fn append(
        &self,
        writer: &mut Writer<F::Entry>,
        records: &[Record<F::Entry>],
    ) -> io::Result<()> {
        self.append_by(writer, records, |place, run| self.file.write(place, run))
    }

    fn append_by(
        &self,
        writer: &mut Writer<F::Entry>,
        records: &[Record<F::Entry>],
        write: impl Fn(u64, &[Page]) -> io::Result<()>,
    ) -> io::Result<()> {
        let first = writer.log_next;
        let pages = self.next_pages(writer, records);
        let to_wrap = (self.geometry.log_pages - first % self.geometry.log_pages) as usize;
        let (run, wrapped) = pages.split_at(to_wrap.min(pages.len()));
        write(self.geometry.log(first), run)?;
        if wrapped.is_empty() { Ok(()) } else { write(self.geometry.log(0), wrapped) }
    }

    /// The next pages of the log, which have these records.
    pub(super) fn next_pages(
        &self,
        writer: &mut Writer<F::Entry>,
        records: &[Record<F::Entry>],
    ) -> Vec<Page> {
        let sequence = self.sequence.load(Ordering::Relaxed);
        let next = |records: &[Record<F::Entry>]| {
            let page = LogPage {
                epoch: writer.epoch,
                number: writer.log_next,
                flushed: writer.flushed.0,
                sequence,
                previous: writer.log_tag,
                records: records.to_vec(),
            };
            let (page, tag) = page.encode::<F>(&writer.log_key);
            writer.log_tag = tag;
            writer.log_next += 1;
            page
        };
        let pages: Vec<Page> = records.chunks(records_per_page::<F>()).map(next).collect();
        count(&self.counters.log_pages, pages.len() as u64);
        self.note_log_used(writer);
        pages
    }

    /// For who asks without waiting for the writer.
    fn note_log_used(&self, writer: &Writer<F::Entry>) {
        let used = writer.log_next - writer.log_kept;
        self.counters.log_used.store(used, Ordering::Relaxed);
    }

    pub(super) fn sync(&self) -> io::Result<()> {
        count(&self.counters.syncs, 1);
        self.file.sync()
    }

    // Checkpoints.

    /// Writes a checkpoint of the tree, from which the log goes on at `log_start`. What only older
    /// checkpoints need is free once [`Map::advance`] has had the anchor name this one.
    pub(super) fn write_checkpoint(
        &self,
        writer: &mut Writer<F::Entry>,
        (log_start, log_tag): (u64, Tag),
    ) -> io::Result<()> {
        let number = writer.checkpoint + 1;
        for round in self.leaves.begin_checkpoint(number).chunks(ROUND_PAGES) {
            let page = |index: &u64| self.leaves.node_page(number, *index, &self.keys);
            let pages = round.iter().filter_map(page).collect();
            let written = write_sorted(&*self.file, pages, |page| *page)?;
            count(&self.counters.node_writes, written);
        }
        // The checkpoint's page names pages of nodes, they leaf pages, and those slots: all of them
        // must be there before it is, and so are the log pages written so far.
        self.sync()?;
        if !F::IS_IN_PLACE {
            writer.flushed = (writer.log_next, writer.log_tag);
        } else if writer.flushed.0 < log_start {
            // What came before is in leaf pages.
            writer.flushed = (log_start, log_tag);
        }
        let root = self.leaves.root();
        let checkpoint = Checkpoint {
            number,
            epoch: writer.epoch,
            nonce: writer.nonce,
            log_start,
            log_tag,
            log_flushed: writer.flushed.0,
            sequence: self.sequence.load(Ordering::Relaxed),
            commits: writer.commits.wrapping_add(root.commit),
            is_anchored: writer.anchored.is_some(),
            root: root.tag,
            void_since: self.leaves.void_since(),
            passage: self.state().passage.clone(),
            growths: self.geometry.growths().collect(),
        };
        let (page, tag) = checkpoint.encode(&self.keys);
        self.file.write(self.geometry.checkpoint(number), &[page])?;
        self.sync()?;
        count(&self.counters.checkpoints, 1);
        writer.checkpoint = number;
        writer.checkpoint_tag = tag;
        writer.log_start = (log_start, log_tag);
        writer.is_settled = false;
        Ok(())
    }

    // The anchor.

    /// After a flush: advances the anchor, if it wants to hear of every one.
    fn commit_to_anchor(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        let policy = self.anchor.as_ref().map(|anchor| anchor.policy());
        match policy {
            Some(AnchorPolicy::EveryCommit) => self.advance(writer),
            // What had no room in the log is only in the last checkpoint.
            Some(AnchorPolicy::Checkpoints) => self.settle(writer),
            None => Ok(()),
        }
    }

    /// Advances the anchor to where the store stands, and frees what older checkpoints needed.
    pub(super) fn advance(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        if let Some(anchor) = &self.anchor {
            // The same once more, until its outcome is known.
            let unsettled = writer.unsettled;
            let next = writer.next_anchored();
            for to in unsettled.into_iter().chain(next) {
                let to =
                    Anchored { number: writer.anchored.map_or(0, |last| last.number) + 1, ..to };
                writer.unsettled = Some(to);
                anchor.advance(&to).map_err(|error| match error {
                    AnchorError::Unreachable(detail) => Refusal::AnchorUnreachable(detail),
                    AnchorError::Lost(detail) => Refusal::RolledBack(detail),
                })?;
                count(&self.counters.anchors, 1);
                writer.anchored = Some(to);
                self.counters.is_anchored.store(1, Ordering::Relaxed);
                self.counters.anchor_number.store(to.number, Ordering::Relaxed);
                self.counters.anchored_at.store(clock::now(), Ordering::Relaxed);
                writer.unsettled = None;
            }
        }
        let replaced = std::mem::take(&mut writer.replaced);
        self.state().slots.release(replaced);
        writer.log_kept = writer.log_start.0;
        writer.is_settled = true;
        self.note_log_used(writer);
        Ok(())
    }

    /// Has the anchor name the last checkpoint, if it doesn't: what the one before needs may then be
    /// written over.
    pub(super) fn settle(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        if writer.is_settled { Ok(()) } else { self.advance(writer) }
    }
}

impl<E> Writer<E> {
    /// How far the store has come on the device.
    pub(super) fn reached(&self) -> Milestone {
        let Self { nonce, checkpoint, flushed: (log_flushed, _), .. } = *self;
        Milestone { opening: nonce, checkpoint, log_flushed }
    }

    /// What the anchor must be advanced to, if it isn't there and isn't on its way there.
    fn next_anchored(&self) -> Option<Anchored> {
        let number = 0;
        let next = Anchored {
            number,
            epoch: self.epoch,
            checkpoint: self.checkpoint,
            checkpoint_tag: self.checkpoint_tag,
            log_flushed: self.flushed.0,
            log_tag: self.flushed.1,
        };
        let last = self.unsettled.or(self.anchored);
        last.is_none_or(|last| Anchored { number, ..last } != next).then_some(next)
    }
}

/// Writes pages to their places, side by side. Returns how many.
pub(super) fn write_sorted<T>(
    file: &dyn BlockFile,
    mut pages: Vec<(u64, T)>,
    encode: impl Fn(&T) -> Page,
) -> io::Result<u64> {
    pages.sort_unstable_by_key(|(place, _)| *place);
    let places: Vec<u64> = pages.iter().map(|(place, _)| *place).collect();
    let pages: Vec<Page> = pages.iter().map(|(_, page)| encode(page)).collect();
    file.write_each(&places, &pages)?;
    Ok(places.len() as u64)
}

/// Sizes of a store that is consistent with its format.
pub(super) fn fits<F: Layout>(geometry: &Geometry) -> bool {
    geometry.leaf_entries == F::ENTRIES_PER_LEAF
        && geometry.is_sound(records_per_page::<F>() as u64)
}
