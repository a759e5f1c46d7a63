//! Merging: changes of the frozen table go into leaf pages, set by set. Each leaf page is read once
//! at most and goes to the copy that the last checkpoint doesn't need; what its changes replaced is
//! found in it.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use sealane_proto::freshness::pending::{Pending, Step};

use super::super::pages::Page;
use super::commit::{Writer, write_runs};
use super::counters::count;
use super::failure::Refusal;
use super::keys::Tag;
use super::leaves::{Checked, Fetch, Found, Written};
use super::map::{Layout, Map};
use super::slot_maps::SlotMaps;

/// Sets merged in one step: flushes wait no longer than that.
const STEP_SETS: usize = 256;
/// Pages read at once.
const READ_PAGES_MAX: u64 = 256;

/// A merge under way.
#[derive(Debug)]
pub(super) struct Merge<E> {
    frozen: Arc<Pending<E>>,
    /// First set that wasn't looked at.
    next_set: u64,
    /// Slots that leaf pages no longer tell of.
    replaced: Vec<u64>,
    /// Slots that changes replaced which are in no log.
    pub retired: Vec<u64>,
    /// The log goes on from here when all is merged.
    log_start: (u64, Tag),
}

impl<E> Merge<E> {
    pub fn new(frozen: Arc<Pending<E>>, log_start: (u64, Tag)) -> Self {
        let (replaced, retired) = (Vec::new(), Vec::new());
        Self { frozen, next_set: 0, replaced, retired, log_start }
    }
}

/// What becomes of one set: blocks that become unwritten, then entries, by index in the set.
struct Change<E> {
    set: u64,
    voids: Vec<Range<usize>>,
    entries: Vec<(usize, E)>,
}

/// Applies changes to the page of their set, and notes which slots it tells of from now on.
fn apply<F: Layout>(
    change: &Change<F::Entry>,
    page: &mut Page,
    slot_maps: &mut SlotMaps,
    replaced: &mut Vec<u64>,
    written: &mut u64,
) {
    let mut set = |index: usize, entry: Option<&F::Entry>| {
        let before = F::get(&page.0, index);
        *written += u64::from(entry.is_some());
        *written -= u64::from(before.is_some());
        if let Some(slot) = before.as_ref().and_then(F::slot) {
            slot_maps.set(slot, false);
            replaced.push(slot);
        }
        if let Some(slot) = entry.and_then(F::slot) {
            slot_maps.set(slot, true);
        }
        F::set(&mut page.0, index, entry);
    };
    change.voids.iter().cloned().flatten().for_each(|index| set(index, None));
    change.entries.iter().for_each(|(index, entry)| set(*index, Some(entry)));
}

impl<F: Layout> Map<F> {
    /// Ends the merge under way, and merges what was noted since.
    pub(super) fn merge_all(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        self.merge_to_end(writer)?;
        self.flush_with(writer, true)?;
        self.merge_to_end(writer)
    }

    pub(super) fn merge_to_end(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        while writer.merge.is_some() {
            self.step(writer)?;
        }
        Ok(())
    }

    pub(super) fn step(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        let Some(mut merge) = writer.merge.take() else { return Ok(()) };
        let changes = self.next_changes(&mut merge);
        if changes.is_empty() {
            return self.end_merge(writer, merge);
        }
        let pages = self.leaf_pages(&changes)?;
        let merged = changes.iter().zip(pages).map(|(change, mut page)| {
            let Writer { slot_maps, written, .. } = &mut *writer;
            apply::<F>(change, &mut page, slot_maps, &mut merge.replaced, written);
            (change.set, (page != Page::ZERO).then_some(page))
        });
        let merged: Vec<_> = merged.collect();
        self.counters.written.store(writer.written, Ordering::Relaxed);
        self.write_leaves(merged)?;
        writer.merge = Some(merge);
        Ok(())
    }

    /// What to do with the next sets; those that become void and are void already are passed over.
    fn next_changes(&self, merge: &mut Merge<F::Entry>) -> Vec<Change<F::Entry>> {
        let (size, block_count) = (F::ENTRIES_PER_LEAF, self.geometry.block_count);
        let mut changes = Vec::with_capacity(STEP_SETS);
        while changes.len() < STEP_SETS
            && let Some(step) = merge.frozen.next_step(merge.next_set, size, block_count)
        {
            match step {
                Step::Change { set, voids, entries } => {
                    changes.push(Change { set, voids, entries });
                    merge.next_set = set + 1;
                }
                Step::Void(sets) => {
                    let held = self.leaves.next_held(sets.start, sets.end);
                    let all = 0..size as usize;
                    changes.extend(held.map(|set| Change {
                        set,
                        voids: Vec::from_iter([all]),
                        entries: Vec::new(),
                    }));
                    merge.next_set = held.map_or(sets.end, |held| held + 1);
                }
            }
        }
        changes
    }

    /// Leaf pages as they are now.
    fn leaf_pages(&self, changes: &[Change<F::Entry>]) -> io::Result<Vec<Page>> {
        let mut pages = vec![Page::ZERO; changes.len()];
        let mut fetches: Vec<(Fetch, usize)> = Vec::new();
        for (index, change) in changes.iter().enumerate() {
            match self.leaves.find(change.set) {
                Found::Void => {}
                Found::Cached(page) => pages[index] = *page,
                Found::At(fetch) => fetches.push((fetch, index)),
            }
        }
        fetches.sort_unstable_by_key(|(fetch, _)| fetch.place);
        for run in fetches.chunk_by(|(left, _), (right, _)| left.place + 1 == right.place) {
            for run in run.chunks(READ_PAGES_MAX as usize) {
                let mut found = vec![Page::ZERO; run.len()];
                self.file.read(run[0].0.place, &mut found)?;
                count(&self.counters.leaf_reads, run.len() as u64);
                for ((fetch, index), page) in run.iter().zip(found) {
                    match self.leaves.check(fetch, page)? {
                        Checked::Right(page) => pages[*index] = *page,
                        // Only merges write leaf pages, and this is the only one.
                        Checked::Changed => return Err(Refusal::StaleLeaf(fetch.leaf).into()),
                    }
                }
            }
        }
        Ok(pages)
    }

    /// Writes leaves, sorted, to their spare copies and takes them over.
    fn write_leaves(&self, leaves: Vec<(u64, Option<Page>)>) -> io::Result<()> {
        let written = leaves.into_iter().map(|(leaf, page)| {
            let page = page.map(|page| (Arc::new(page), self.leaves.spare_copy(leaf)));
            Written { leaf, page }
        });
        let written: Vec<_> = written.collect();
        let pages = written.iter().filter_map(|Written { leaf, page }| {
            let (page, copy) = page.as_ref()?;
            Some((self.geometry.leaf(*leaf, *copy), **page))
        });
        count(&self.counters.leaf_writes, write_runs(&*self.file, pages)?);
        self.leaves.written(&written);
        Ok(())
    }

    fn end_merge(&self, writer: &mut Writer<F::Entry>, merge: Merge<F::Entry>) -> io::Result<()> {
        let sets = self.geometry.sets();
        let maps = writer.slot_maps.take_dirty().into_iter();
        self.write_leaves(maps.map(|(index, page)| (sets + index, page)).collect())?;
        writer.replaced.extend(merge.replaced);
        writer.replaced.extend(merge.retired);
        {
            let mut state = self.state();
            state.frozen = Arc::default();
        }
        count(&self.counters.merges, 1);
        self.write_checkpoint(writer, merge.log_start)?;
        self.advance(writer)
    }
}
