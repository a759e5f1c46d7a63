//! Making changes durable: log pages, checkpoints, the anchor. One thread at a time, beside queues that
//! announce writes in place by themselves.

use std::collections::BTreeMap;
use std::io;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use sealane_proto::freshness::milestone::Milestone;

use super::super::pages::{BlockFile, Page};
use super::anchor::{AnchorError, AnchorPolicy, Anchored};
use super::checkpoint::Checkpoint;
use super::counters::count;
use super::failure::Refusal;
use super::geometry::Geometry;
use super::keys::Tag;
use super::log::records_per_page;
use super::log_head::LogHead;
use super::map::{Layout, Map, State};
use super::merge::{Merge, Repair};
use super::slot_maps::SlotMaps;
use crate::clock;

/// Pages of nodes that are made at a time.
const ROUND_PAGES: usize = 256;

/// What the device has beside the log, and what of it the anchor knows.
#[derive(Debug)]
pub(super) struct Writer<E> {
    pub nonce: [u8; 16],
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

/// The log and the changes noted so far, taken in this order.
type Locked<'a, E> = (MutexGuard<'a, LogHead>, MutexGuard<'a, State<E>>);

impl<F: Layout> Map<F> {
    // Doors: each has the store fail for good if the device fails. After an error nobody knows what
    // it has.

    /// Makes everything durable that was noted so far, and has the anchor hear of it as its policy
    /// says.
    pub fn flush(&self) -> io::Result<()> {
        let mut writer = self.writer();
        let flushed = self.flush_with(&mut writer, false);
        let flushed = flushed.and_then(|()| self.commit_to_anchor(&mut writer));
        self.guard(flushed)?;
        self.pass_milestone(&writer);
        Ok(())
    }

    /// Notes how far the store has come, for who will ask. What the writer has done must be flushed,
    /// and an anchor must name its checkpoint: else an opening might go on from an earlier one.
    pub(super) fn pass_milestone(&self, writer: &Writer<F::Entry>) {
        let reached = writer.reached(self.log().flushed.0);
        self.state().reached = reached;
    }

    /// Writes what waits to the log for nobody who asked: it is flushed when the anchor hears of it
    /// with the next flush or checkpoint. A merge is due before the table is full, so a checkpoint
    /// is never far.
    pub fn write_back(&self) -> io::Result<()> {
        let mut writer = self.writer();
        let written = self.flush_with(&mut writer, false);
        self.guard(written)
    }

    /// Begins to merge the changes noted so far into leaf pages; also a write-back.
    pub fn begin_merge(&self) -> io::Result<()> {
        let mut writer = self.writer();
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
        let mut writer = self.writer();
        let checked = self.state().check();
        let stepped = checked.and_then(|()| self.step(&mut writer));
        self.guard(stepped)
    }

    /// Merges all changes noted so far; also a flush.
    pub fn merge(&self) -> io::Result<()> {
        let mut writer = self.writer();
        let merged = self.merge_all(&mut writer);
        self.guard(merged)
    }

    /// Makes room for further changes; also a write-back. An error if there is none before the
    /// anchor has answered.
    pub fn make_room(&self) -> io::Result<()> {
        {
            let mut writer = self.writer();
            let written = self.flush_with(&mut writer, false);
            // What only an older checkpoint needs is room too.
            let made = written.and_then(|()| self.settle(&mut writer));
            self.guard(made)?;
        }
        // The merge under way makes room of what it merges; what was noted since gathers on.
        if self.is_tight() {
            let mut writer = self.writer();
            let merged = self.merge_to_end(&mut writer);
            self.guard(merged)?;
        }
        if self.is_tight() { self.merge() } else { Ok(()) }
    }

    /// Whether a merge would make room that is short.
    fn is_tight(&self) -> bool {
        let state = self.state();
        let room = self.geometry.pending_max / 4;
        let on_their_way = state.placed + state.intents.count() as u64;
        let has_changes = state.pending() > on_their_way;
        let is_short = self.geometry.slot_count > 0 && state.slots.free() < room
            || state.pending() > self.geometry.pending_max - room;
        has_changes && is_short
    }

    /// Ends: everything durable, and anchored whatever the policy.
    pub fn finish(&self) -> io::Result<()> {
        let mut writer = self.writer();
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
        let mut writer = self.writer();
        let announced = self.announce_with(&mut writer);
        self.guard(announced)
    }

    fn announce_with(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        let room = self.with_log_room(writer)?;
        let (mut log, mut state) = if let Some(locked) = room {
            locked
        } else {
            self.merge_all(writer)?;
            (self.log(), self.state())
        };
        // What became unwritten before a write was announced comes before it in the log.
        let mut records = std::mem::take(&mut state.waiting);
        state.intents.announce_new(&mut records);
        state.take_pages(log.next, [records.len()], records_per_page::<F>());
        drop(state);
        let run = self.begin_run(&mut log, &records);
        drop(log);
        let written = self.write_run(&run, |place, pages| self.file.write_durably(place, pages));
        self.end_run(&run, written)
    }

    /// Makes durable what waits. With `freezes`, what is noted so far is what the next merge merges.
    pub(super) fn flush_with(
        &self,
        writer: &mut Writer<F::Entry>,
        freezes: bool,
    ) -> io::Result<()> {
        if freezes {
            // What an older checkpoint needs is about to be written over.
            self.settle(writer)?;
        }
        let Some((mut log, mut state)) = self.with_log_room(writer)? else {
            return self.merge_unlogged(writer);
        };
        let frozen = (freezes && writer.merge.is_none()).then(|| state.freeze());
        let (records, retired) =
            (std::mem::take(&mut state.waiting), std::mem::take(&mut state.retired));
        let carried = state.intents.announce_all();
        let taken = [records.len(), carried.len()];
        state.take_pages(log.next, taken, records_per_page::<F>());
        drop(state);
        let mut run = self.begin_run(&mut log, &records);
        let border = (log.next, log.tag);
        // Writes on their way are no part of the flush: they are announced again behind it.
        run.pages.extend(self.next_pages(&mut log, &carried));
        drop(log);
        let flushes = !records.is_empty() || F::IS_IN_PLACE;
        let written = self.write_run(&run, |place, pages| self.file.write(place, pages));
        let synced = written.and_then(|()| if flushes { self.sync() } else { Ok(()) });
        self.end_run(&run, synced)?;
        if flushes {
            self.log().flushed = border;
            self.state().slots.release(retired);
        }
        if let Some(frozen) = frozen {
            writer.start_merge(Merge::new(frozen, border));
        }
        Ok(())
    }

    /// The log and the changes noted so far, with room in the log for those. None: it has none, also
    /// behind a merge.
    fn with_log_room(
        &self,
        writer: &mut Writer<F::Entry>,
    ) -> io::Result<Option<Locked<'_, F::Entry>>> {
        let wanted = |state: &State<F::Entry>| {
            let per_page = records_per_page::<F>();
            let pages =
                state.waiting.len().div_ceil(per_page) + state.intents.count().div_ceil(per_page);
            pages as u64
        };
        loop {
            let pages = {
                let state = self.state();
                state.check()?;
                wanted(&state)
            };
            if !self.make_log_room(writer, pages)? {
                return Ok(None);
            }
            let (log, state) = (self.log(), self.state());
            // A queue may have taken it meanwhile.
            if self.has_log_room(&log, wanted(&state)) {
                return Ok(Some((log, state)));
            }
        }
    }

    /// Whether the log has room for so many pages, if need be behind a merge that is under way.
    fn make_log_room(&self, writer: &mut Writer<F::Entry>, pages: u64) -> io::Result<bool> {
        let has_room = || self.has_log_room(&self.log(), pages);
        if !has_room() {
            self.settle(writer)?;
        }
        if !has_room() && writer.merge.is_some() {
            self.merge_to_end(writer)?;
        }
        Ok(has_room())
    }

    /// Merges all changes noted so far, those that the log has no room for among them.
    fn merge_unlogged(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        self.settle(writer)?;
        let (mut log, mut state) = (self.log(), self.state());
        let unlogged = std::mem::take(&mut state.waiting);
        // The pages that they would have had are left out, by whole rounds of the log, so that no
        // page comes to another place: marks are the same whether changes are logged or not. Until
        // the checkpoint is there the log has no room for anybody.
        let pages = unlogged.len().div_ceil(records_per_page::<F>()) as u64;
        log.next += pages.next_multiple_of(self.geometry.log_pages);
        let retired = std::mem::take(&mut state.retired);
        let (frozen, carried) = (state.freeze(), state.intents.announce_all());
        state.take_pages(log.next, [carried.len()], records_per_page::<F>());
        drop(state);
        let mut merge = Merge::new(frozen, (log.next, log.tag));
        // The log that the checkpoint begins must have them; there is room kept for that.
        let run = self.begin_run(&mut log, &carried);
        drop(log);
        let written = self.write_run(&run, |place, pages| self.file.write(place, pages));
        // Who announces a write behind them must not do so before they are durable.
        let is_empty = run.pages.is_empty();
        let synced = written.and_then(|()| if is_empty { Ok(()) } else { self.sync() });
        self.end_run(&run, synced)?;
        merge.retired = retired;
        writer.start_merge(merge);
        self.merge_to_end(writer)
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
        let (epoch, log_flushed) = {
            let mut log = self.log();
            if !F::IS_IN_PLACE {
                log.flushed = (log.next, log.tag);
            } else if log.flushed.0 < log_start {
                // What came before is in leaf pages.
                log.flushed = (log_start, log_tag);
            }
            (log.epoch, log.flushed.0)
        };
        let root = self.leaves.root();
        let checkpoint = Checkpoint {
            number,
            epoch,
            nonce: writer.nonce,
            log_start,
            log_tag,
            log_flushed,
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
        self.log().start = (log_start, log_tag);
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
            let next = writer.next_anchored(&self.log());
            for to in unsettled.into_iter().chain(next) {
                let last = writer.anchored.map_or(anchor.base(), |last| last.number);
                let to = Anchored { number: last + 1, ..to };
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
        writer.is_settled = true;
        let mut log = self.log();
        log.kept = log.start.0;
        self.note_log_used(&log);
        Ok(())
    }

    /// Has the anchor name the last checkpoint, if it doesn't: what the one before needs may then be
    /// written over.
    pub(super) fn settle(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        if writer.is_settled { Ok(()) } else { self.advance(writer) }
    }
}

impl<E> Writer<E> {
    /// How far the store has come on the device, with the log flushed before this page.
    pub(super) fn reached(&self, log_flushed: u64) -> Milestone {
        let Self { nonce, checkpoint, .. } = *self;
        Milestone { opening: nonce, checkpoint, log_flushed }
    }

    /// What the anchor must be advanced to, if it isn't there and isn't on its way there.
    fn next_anchored(&self, log: &LogHead) -> Option<Anchored> {
        let number = 0;
        let next = Anchored {
            number,
            epoch: log.epoch,
            checkpoint: self.checkpoint,
            checkpoint_tag: self.checkpoint_tag,
            log_flushed: log.flushed.0,
            log_tag: log.flushed.1,
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
