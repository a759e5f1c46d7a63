//! Makes changes durable: log pages, checkpoints, the anchor. One thread at a time does this, while
//! queues announce writes in place by themselves.

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

/// Pages of nodes encoded at a time.
const ROUND_PAGES: usize = 256;

/// The device's state other than the log, and how much of it is anchored.
#[derive(Debug)]
pub(super) struct Writer<E> {
    pub nonce: [u8; 16],
    /// The last checkpoint's number and tag.
    pub checkpoint: u64,
    pub checkpoint_tag: Tag,
    /// Root commits before this opening.
    pub commits: u64,
    /// Slots that leaf pages refer to.
    pub slot_maps: SlotMaps,
    pub merge: Option<Merge<E>>,
    /// Leaves that the next merge rewrites unchanged, by number.
    pub repairs: BTreeMap<u64, Repair>,
    /// Whether the superblock is wrong on the device.
    pub rewrites_superblock: bool,
    /// Whether only the last checkpoint may still be needed.
    pub is_settled: bool,
    /// Slots that no leaf page of the last checkpoint refers to: free once no older checkpoint can
    /// be needed.
    pub replaced: Vec<u64>,
    pub anchored: Option<Anchored>,
    /// A record that the anchor was asked for and has not acknowledged.
    pub unsettled: Option<Anchored>,
}

/// The log and the pending changes, locked in this order.
type Locked<'a, E> = (MutexGuard<'a, LogHead>, MutexGuard<'a, State<E>>);

impl<F: Layout> Map<F> {
    // Entry points: each fails the store permanently if the device fails, because the device's
    // contents are unknown after an error.

    /// Makes all changes so far durable, and advances the anchor if its policy requires that.
    pub fn flush(&self) -> io::Result<()> {
        let mut writer = self.writer();
        let flushed = self.flush_with(&mut writer, false);
        let flushed = flushed.and_then(|()| self.commit_to_anchor(&mut writer));
        self.guard(flushed)?;
        self.pass_milestone(&writer);
        Ok(())
    }

    /// Updates the milestone to report. The writer's work must be flushed, and the anchor, if any,
    /// must name the last checkpoint: otherwise an opening might start from an earlier one.
    pub(super) fn pass_milestone(&self, writer: &Writer<F::Entry>) {
        let reached = writer.reached(self.log().flushed.0);
        self.state().reached = reached;
    }

    /// Writes waiting changes to the log although nobody asked for a flush. They are flushed when
    /// the next flush or checkpoint is anchored. A merge is due before the table is full, so that a
    /// checkpoint follows soon.
    pub fn write_back(&self) -> io::Result<()> {
        let mut writer = self.writer();
        let written = self.flush_with(&mut writer, false);
        self.guard(written)
    }

    /// Begins to merge all changes so far into leaf pages; also writes them to the log.
    pub fn begin_merge(&self) -> io::Result<()> {
        let mut writer = self.writer();
        let begun = self.flush_with(&mut writer, true);
        self.guard(begun)
    }

    /// Whether a merge is running.
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

    /// Merges all changes so far; also a flush.
    pub fn merge(&self) -> io::Result<()> {
        let mut writer = self.writer();
        let merged = self.merge_all(&mut writer);
        self.guard(merged)
    }

    /// Makes room for further changes; also writes waiting changes to the log. Fails if there is no
    /// room before the anchor has answered.
    pub fn make_room(&self) -> io::Result<()> {
        {
            let mut writer = self.writer();
            let written = self.flush_with(&mut writer, false);
            // Settling frees what only an older checkpoint needs.
            let made = written.and_then(|()| self.settle(&mut writer));
            self.guard(made)?;
        }
        // A running merge frees room; later changes stay pending.
        if self.is_tight() {
            let mut writer = self.writer();
            let merged = self.merge_to_end(&mut writer);
            self.guard(merged)?;
        }
        if self.is_tight() { self.merge() } else { Ok(()) }
    }

    /// Whether room is short and a merge would free some.
    fn is_tight(&self) -> bool {
        let state = self.state();
        let room = self.geometry.pending_max / 4;
        let on_their_way = state.placed + state.intents.count() as u64;
        let has_changes = state.pending() > on_their_way;
        let is_short = self.geometry.slot_count > 0 && state.slots.free() < room
            || state.pending() > self.geometry.pending_max - room;
        has_changes && is_short
    }

    /// Makes everything durable and anchors it, regardless of the policy.
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

    /// Announces waiting writes in place durably, without a flush.
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
        // Blocks deallocated before a write was announced come before it in the log.
        let mut records = std::mem::take(&mut state.waiting);
        state.intents.announce_new(&mut records);
        state.take_pages(log.next, [records.len()], records_per_page::<F>());
        drop(state);
        let run = self.begin_run(&mut log, &records);
        drop(log);
        let written = self.write_run(&run, |place, pages| self.file.write_durably(place, pages));
        self.end_run(&run, written)
    }

    /// Makes waiting changes durable. With `freezes`, the next merge merges all changes so far.
    pub(super) fn flush_with(
        &self,
        writer: &mut Writer<F::Entry>,
        freezes: bool,
    ) -> io::Result<()> {
        if freezes {
            // The merge will overwrite what an older checkpoint needs.
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
        // Writes in flight aren't part of the flush: they are announced again behind it.
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

    /// Locks the log and the pending changes once the log has room for those. `None` if it has none
    /// even after completing a running merge.
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
            // A queue may have used the room in the meantime.
            if self.has_log_room(&log, wanted(&state)) {
                return Ok(Some((log, state)));
            }
        }
    }

    /// Whether the log has room for `pages` more, if necessary after completing a running merge.
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

    /// Merges all changes so far, including those that the log has no room for.
    fn merge_unlogged(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        self.settle(writer)?;
        let (mut log, mut state) = (self.log(), self.state());
        let unlogged = std::mem::take(&mut state.waiting);
        // Skips the pages that these changes would have taken, rounded up to whole cycles of the
        // log so that all pages keep their places. Thus marks don't depend on whether changes are
        // logged. Until the checkpoint is written, the log has no room for anybody.
        let pages = unlogged.len().div_ceil(records_per_page::<F>()) as u64;
        log.next += pages.next_multiple_of(self.geometry.log_pages);
        let retired = std::mem::take(&mut state.retired);
        let (frozen, carried) = (state.freeze(), state.intents.announce_all());
        state.take_pages(log.next, [carried.len()], records_per_page::<F>());
        drop(state);
        let mut merge = Merge::new(frozen, (log.next, log.tag));
        // These records must be in the log that starts at the checkpoint; room is reserved for
        // them.
        let run = self.begin_run(&mut log, &carried);
        drop(log);
        let written = self.write_run(&run, |place, pages| self.file.write(place, pages));
        // Writes announced behind them must wait until they are durable.
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

    /// Writes a checkpoint of the tree, with the log starting at `log_start`. What only older
    /// checkpoints need becomes free once [`Map::advance`] has anchored this one.
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
        // The checkpoint refers to pages of nodes, these to leaf pages, and those to slots. All of
        // them must be durable before it is written. The sync also covers all log pages so far.
        self.sync()?;
        let (epoch, log_flushed) = {
            let mut log = self.log();
            if !F::IS_IN_PLACE {
                log.flushed = (log.next, log.tag);
            } else if log.flushed.0 < log_start {
                // Earlier changes are in leaf pages.
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

    /// Advances the anchor after a flush, if its policy requires that.
    fn commit_to_anchor(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        let policy = self.anchor.as_ref().map(|anchor| anchor.policy());
        match policy {
            Some(AnchorPolicy::EveryCommit) => self.advance(writer),
            // Changes that the log had no room for are only in the last checkpoint.
            Some(AnchorPolicy::Checkpoints) => self.settle(writer),
            None => Ok(()),
        }
    }

    /// Advances the anchor to the store's current state, and frees what older checkpoints needed.
    pub(super) fn advance(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        if let Some(anchor) = &self.anchor {
            // First repeats an unacknowledged advance until its outcome is known.
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

    /// Anchors the last checkpoint if necessary: afterwards, what earlier ones need may be
    /// overwritten.
    pub(super) fn settle(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        if writer.is_settled { Ok(()) } else { self.advance(writer) }
    }
}

impl<E> Writer<E> {
    /// The state on the device as a milestone, with the log flushed before the given page.
    pub(super) fn reached(&self, log_flushed: u64) -> Milestone {
        let Self { nonce, checkpoint, .. } = *self;
        Milestone { opening: nonce, checkpoint, log_flushed }
    }

    /// The next record for the anchor, or `None` if the last acknowledged or requested one is up to
    /// date.
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

/// Writes pages to their places in parallel. Returns how many.
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

/// Whether the store's sizes fit its format.
pub(super) fn fits<F: Layout>(geometry: &Geometry) -> bool {
    geometry.leaf_entries == F::ENTRIES_PER_LEAF
        && geometry.is_sound(records_per_page::<F>() as u64)
}
