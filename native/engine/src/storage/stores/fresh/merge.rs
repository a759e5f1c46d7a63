//! Merging: writes the changes of the frozen table into leaf pages, set by set. Each leaf page is
//! read at most once, and written to the copy that the last checkpoint doesn't need. Its old
//! contents show which slots the changes have replaced.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use sealane_proto::freshness::leaf::{LEAF_BYTES, LeafPage};
use sealane_proto::freshness::node::Node;
use sealane_proto::freshness::pending::{Pending, Step};

use super::super::super::events::StorageEvent;
use super::super::pages::Page;
use super::commit::{Writer, write_sorted};
use super::counters::count;
use super::failure::Refusal;
use super::hashers::{each, hashers};
use super::keys::Tag;
use super::leaves::{Current, Written};
use super::map::{Layout, Map};
use super::nodes::{Held, NODES_PER_PAGE};
use super::slot_maps::SlotMaps;

/// Most sets merged in one step while others may need the thread: it bounds their wait.
const STEP_SETS: usize = 128;
/// Most sets merged in one step if everybody waits for the merge anyway: reads and writes 8 MiB
/// each.
const LONG_STEP_SETS: usize = 2048;

/// A leaf that is wrong on the device, as of when that was found.
#[derive(Debug, Clone)]
pub(super) struct Repair {
    /// Its correct contents.
    pub page: Arc<LeafPage>,
    /// Its node, and which copy is wrong.
    pub held: Held,
}

/// A running merge.
#[derive(Debug)]
pub(super) struct Merge<E> {
    frozen: Arc<Pending<E>>,
    /// First set not yet processed.
    next_set: u64,
    /// Slots that leaf pages no longer refer to.
    replaced: Vec<u64>,
    /// Slots of replaced changes that are in no log.
    pub retired: Vec<u64>,
    /// Leaves to rewrite, unless changes rewrite them anyway.
    pub repairs: BTreeMap<u64, Repair>,
    /// Where the log starts once everything is merged.
    log_start: (u64, Tag),
}

impl<E> Merge<E> {
    pub fn new(frozen: Arc<Pending<E>>, log_start: (u64, Tag)) -> Self {
        let (replaced, retired) = (Vec::new(), Vec::new());
        Self { frozen, next_set: 0, replaced, retired, repairs: BTreeMap::new(), log_start }
    }
}

/// Changes of one set by index in the set: blocks to deallocate, then entries to set.
struct Change<E> {
    set: u64,
    voids: Vec<Range<usize>>,
    entries: Vec<(usize, E)>,
}

/// A set that is being merged.
struct Merging<E> {
    change: Change<E>,
    current: Current,
    /// Its leaf page before and after the changes.
    before: Arc<LeafPage>,
    after: Arc<LeafPage>,
    /// Whether `before` matches the node of `current`.
    is_right: bool,
    growth: i32,
    node: Option<Node>,
}

impl<E> Merging<E> {
    fn into_written(self) -> Written {
        let copy = self.current.spare_copy();
        let page = self.node.map(|node| (self.after, Held { node, copy }));
        Written { leaf: self.change.set, page, growth: self.growth }
    }
}

/// Applies changes to the page of their set, and updates the slots in use. Returns by how many the
/// number of entries has grown.
fn apply<F: Layout>(
    change: &Change<F::Entry>,
    page: &mut LeafPage,
    slot_maps: &mut SlotMaps,
    replaced: &mut Vec<u64>,
) -> i32 {
    let mut growth = 0;
    let mut set = |index: usize, entry: Option<&F::Entry>| {
        let before = F::get(page, index).filter(|entry| *entry != F::ORPHAN);
        growth += i32::from(entry.is_some()) - i32::from(before.is_some());
        if let Some(slot) = before.as_ref().and_then(F::slot) {
            slot_maps.set(slot, false);
            replaced.push(slot);
        }
        if let Some(slot) = entry.and_then(F::slot) {
            slot_maps.set(slot, true);
        }
        F::set(page, index, entry);
    };
    change.voids.iter().cloned().flatten().for_each(|index| set(index, None));
    change.entries.iter().for_each(|(index, entry)| set(*index, Some(entry)));
    growth
}

impl<E> Writer<E> {
    /// Begins a merge. The last checkpoint is settled, and no leaf was written since, so each leaf
    /// may be written once until the next checkpoint. That includes leaves to repair.
    pub(super) fn start_merge(&mut self, merge: Merge<E>) {
        let repairs = std::mem::take(&mut self.repairs);
        self.merge = Some(Merge { repairs, ..merge });
    }
}

impl<F: Layout> Map<F> {
    /// Completes the running merge, and merges all changes since.
    pub(super) fn merge_all(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        self.merge_to_end(writer)?;
        self.flush_with(writer, true)?;
        self.merge_to_end(writer)
    }

    pub(super) fn merge_to_end(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        while writer.merge.is_some() {
            self.merge_some(writer, LONG_STEP_SETS)?;
        }
        Ok(())
    }

    pub(super) fn step(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        self.merge_some(writer, STEP_SETS)
    }

    /// Merges some sets. Reads and writes their leaf pages in parallel.
    fn merge_some(&self, writer: &mut Writer<F::Entry>, sets_max: usize) -> io::Result<()> {
        let Some(mut merge) = writer.merge.take() else { return Ok(()) };
        let Some(changes) = self.next_changes(&mut merge, sets_max) else {
            return self.end_merge(writer, merge);
        };
        let hashers = hashers(changes.len());
        let mut merging = self.take_pages(changes, &merge.repairs, hashers)?;
        for set in &mut merging {
            let page = Arc::make_mut(&mut set.after);
            set.growth = apply::<F>(&set.change, page, &mut writer.slot_maps, &mut merge.replaced);
        }
        each(hashers, &mut merging, |set| {
            let Merging { current, before, after, is_right, .. } = &*set;
            let node = current.held.filter(|_| *is_right).map(|held| held.node);
            set.node = self.leaves.changed_node(current.leaf, node, before, after);
        });
        let written: Vec<_> = merging.into_iter().map(Merging::into_written).collect();
        self.write_leaves(&written, hashers)?;
        writer.merge = Some(merge);
        Ok(())
    }

    /// The changes of the next sets. Skips sets to be made void that are void already. `None` if
    /// nothing is left.
    fn next_changes(
        &self,
        merge: &mut Merge<F::Entry>,
        sets_max: usize,
    ) -> Option<Vec<Change<F::Entry>>> {
        let (size, block_count) = (F::ENTRIES_PER_LEAF, self.geometry.block_count);
        let mut changes = Vec::with_capacity(sets_max);
        while changes.len() < sets_max {
            let Some(step) = merge.frozen.next_step(merge.next_set, size, block_count) else {
                return (!changes.is_empty()).then_some(changes);
            };
            match step {
                Step::Change { set, voids, entries } => {
                    changes.push(Change { set, voids, entries });
                    merge.next_set = set + 1;
                }
                Step::Void(sets) => {
                    let sets = self.make_void(sets);
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
        Some(changes)
    }

    /// Makes leading sets void without reading them, which is possible in place, where nothing else
    /// refers to their entries. Handles only whole pages of nodes. Returns the next sets to handle
    /// one by one.
    fn make_void(&self, sets: Range<u64>) -> Range<u64> {
        let border = sets.start.next_multiple_of(NODES_PER_PAGE);
        let is_to_the_end = sets.end == self.geometry.sets();
        let end =
            if is_to_the_end { self.geometry.node_pages() } else { sets.end / NODES_PER_PAGE };
        let pages = border / NODES_PER_PAGE..end;
        if !F::IS_IN_PLACE || pages.is_empty() {
            return sets;
        }
        if border > sets.start {
            return sets.start..border;
        }
        let end = sets.end.min(pages.end * NODES_PER_PAGE);
        self.leaves.void(pages);
        end..end
    }

    /// Returns the sets with their current leaf pages, reading those that aren't cached. All blocks
    /// of a page that is wrong on the device become orphaned.
    fn take_pages(
        &self,
        changes: Vec<Change<F::Entry>>,
        repairs: &BTreeMap<u64, Repair>,
        hashers: usize,
    ) -> io::Result<Vec<Merging<F::Entry>>> {
        let mut currents = self.leaves.current(changes.iter().map(|change| change.set));
        for current in currents.iter_mut().filter(|current| current.page.is_none()) {
            let repair = repairs.get(&current.leaf).filter(|it| current.held == Some(it.held));
            current.page = repair.map(|repair| Arc::clone(&repair.page));
        }
        let place = |(index, current): (usize, &Current)| {
            let held = current.held.filter(|_| current.page.is_none())?;
            Some((self.geometry.leaf(current.leaf, held.copy), index))
        };
        let mut missing: Vec<_> = currents.iter().enumerate().filter_map(place).collect();
        missing.sort_unstable();
        let places: Vec<u64> = missing.iter().map(|(place, _)| *place).collect();
        let mut found = vec![Page::ZERO; places.len()];
        self.file.read_each(&places, &mut found)?;
        count(&self.counters.leaf_reads, places.len() as u64);
        let void = Arc::new([0; LEAF_BYTES]);
        let begin = |(change, mut current): (_, Current)| {
            let before = current.page.take().unwrap_or_else(|| Arc::clone(&void));
            let (after, node) = (Arc::clone(&before), None);
            Merging { change, current, before, after, is_right: true, growth: 0, node }
        };
        let mut merging: Vec<_> = changes.into_iter().zip(currents).map(begin).collect();
        for ((_, index), page) in missing.iter().zip(&found) {
            let set = &mut merging[*index];
            (set.before, set.is_right) = (Arc::new(page.0), false);
        }
        // Only merges write leaf pages and only one merge runs at a time, so these pages are still
        // current.
        each(hashers, &mut merging, |set| {
            if let Some(held) = set.current.held.filter(|_| !set.is_right) {
                set.is_right = self.leaves.is_page_of(set.current.leaf, held.node, &set.before);
                set.after = Arc::clone(&set.before);
            }
        });
        for set in merging.iter_mut().filter(|set| !set.is_right) {
            self.take_wrong_page(set)?;
        }
        Ok(merging)
    }

    /// Reads a wrong leaf page once more. If it is still wrong, the current versions of its blocks
    /// are unknown, and no version found on the device may become current: all blocks are orphaned.
    /// Their slots are unknown, too, and stay in use.
    fn take_wrong_page(&self, set: &mut Merging<F::Entry>) -> io::Result<()> {
        let Some(held) = set.current.held else { return Ok(()) };
        let leaf = set.current.leaf;
        let mut page = [Page::ZERO];
        self.file.read(self.geometry.leaf(leaf, held.copy), &mut page)?;
        count(&self.counters.leaf_reads, 1);
        set.is_right = self.leaves.is_page_of(leaf, held.node, &page[0].0);
        if set.is_right {
            set.before = Arc::new(page[0].0);
        } else {
            let start = leaf * F::ENTRIES_PER_LEAF;
            let blocks = F::ENTRIES_PER_LEAF.min(self.geometry.block_count - start);
            set.before = Arc::new(F::orphaned(blocks));
            self.tell_orphaned(leaf, start..start + blocks);
        }
        set.after = Arc::clone(&set.before);
        Ok(())
    }

    /// Counts and reports blocks that became orphaned.
    fn tell_orphaned(&self, leaf: u64, blocks: Range<u64>) {
        count(&self.counters.orphaned_sets, 1);
        let Some(events) = self.events.get() else { return };
        let wrong = Refusal::StaleLeaf(leaf);
        events.push(StorageEvent {
            kind: "found",
            reason: wrong.reason().id(),
            lba: Some(blocks.start),
            association: 0,
            queue_id: 0,
            detail: format!(
                "merge: {wrong}: sectors {}..{} can't be read until each is written again",
                blocks.start, blocks.end
            ),
        });
    }

    /// Writes leaves, which must be sorted, to their spare copies, and updates the tree.
    pub(super) fn write_leaves(&self, leaves: &[Written], hashers: usize) -> io::Result<()> {
        let page = |Written { leaf, page, .. }: &Written| {
            let (page, held) = page.as_ref()?;
            Some((self.geometry.leaf(*leaf, held.copy), Arc::clone(page)))
        };
        let pages: Vec<_> = leaves.iter().filter_map(page).collect();
        let written = write_sorted(&*self.file, pages, |page| Page(**page))?;
        count(&self.counters.leaf_writes, written);
        self.leaves.written(leaves, hashers);
        Ok(())
    }

    /// Leaves to repair that were neither changed nor made void since.
    fn rewritten(&self, repairs: &BTreeMap<u64, Repair>) -> Vec<Written> {
        let currents = self.leaves.current(repairs.keys().copied());
        let rewritten =
            currents.into_iter().zip(repairs.values()).filter_map(|(current, repair)| {
                let held = current.held.filter(|held| *held == repair.held)?;
                let page = (Arc::clone(&repair.page), Held { copy: current.spare_copy(), ..held });
                Some(Written { leaf: current.leaf, page: Some(page), growth: 0 })
            });
        rewritten.collect()
    }

    fn end_merge(&self, writer: &mut Writer<F::Entry>, merge: Merge<F::Entry>) -> io::Result<()> {
        let maps = writer.slot_maps.take_dirty();
        let leaves = maps.iter().map(|(index, _)| self.geometry.sets() + index);
        let written =
            self.leaves.current(leaves).into_iter().zip(maps).map(|(current, (_, page))| {
                let node =
                    |page: &Arc<LeafPage>| self.leaves.changed_node(current.leaf, None, page, page);
                let page = page.and_then(|page| {
                    let held = Held { node: node(&page)?, copy: current.spare_copy() };
                    Some((page, held))
                });
                Written { leaf: current.leaf, page, growth: 0 }
            });
        let mut written: Vec<_> = written.collect();
        written.splice(..0, self.rewritten(&merge.repairs));
        self.write_leaves(&written, 1)?;
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
