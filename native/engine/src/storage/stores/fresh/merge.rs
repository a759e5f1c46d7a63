//! Merging: changes of the frozen table go into leaf pages, set by set. Each leaf page is read once
//! at most and goes to the copy that the last checkpoint doesn't need; what its changes replaced is
//! found in it.

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

/// Sets merged in one step while others may want the thread: they wait no longer than that.
const STEP_SETS: usize = 128;
/// Sets merged in one step when all others wait for the merge anyway: 8 MiB read and 8 written.
const LONG_STEP_SETS: usize = 2048;

/// A leaf that is wrong on the device, as it was when that was found.
#[derive(Debug, Clone)]
pub(super) struct Repair {
    /// What is right.
    pub page: Arc<LeafPage>,
    /// Its node, and the copy that is wrong.
    pub held: Held,
}

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
    /// Leaves to write again, unless changes have them written anyway.
    pub repairs: BTreeMap<u64, Repair>,
    /// The log goes on from here when all is merged.
    log_start: (u64, Tag),
}

impl<E> Merge<E> {
    pub fn new(frozen: Arc<Pending<E>>, log_start: (u64, Tag)) -> Self {
        let (replaced, retired) = (Vec::new(), Vec::new());
        Self { frozen, next_set: 0, replaced, retired, repairs: BTreeMap::new(), log_start }
    }
}

/// What becomes of one set: blocks that become unwritten, then entries, by index in the set.
struct Change<E> {
    set: u64,
    voids: Vec<Range<usize>>,
    entries: Vec<(usize, E)>,
}

/// One set being merged.
struct Merging<E> {
    change: Change<E>,
    current: Current,
    /// Its leaf page before and after.
    before: Arc<LeafPage>,
    after: Arc<LeafPage>,
    /// Whether `before` is what the node of `current` stands for.
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

/// Applies changes to the page of their set, and notes which slots it tells of from now on.
/// Returns by how many more blocks it has entries of.
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
    /// Begins a merge. The last checkpoint is settled, and no leaf was written since: so each may be
    /// written once until the next, those that are wrong on the device among them.
    pub(super) fn start_merge(&mut self, merge: Merge<E>) {
        let repairs = std::mem::take(&mut self.repairs);
        self.merge = Some(Merge { repairs, ..merge });
    }
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
            self.merge_some(writer, LONG_STEP_SETS)?;
        }
        Ok(())
    }

    pub(super) fn step(&self, writer: &mut Writer<F::Entry>) -> io::Result<()> {
        self.merge_some(writer, STEP_SETS)
    }

    /// Merges some sets. Their leaf pages are read, and written, side by side.
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

    /// What to do with the next sets; those that become void and are void already are passed over.
    /// None: nothing is left.
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

    /// Makes sets void, from the first on, that nobody has to look at for that: in place nothing else
    /// knows of their entries. Only whole pages of nodes; returns those to look at, one by one, before
    /// it goes on.
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

    /// Leaf pages as they are now, of which those not in memory are read. One that is wrong on the
    /// device knows nothing any more: its blocks are orphaned.
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
        // Only merges write leaf pages, and this is the only one: what was to be read still is.
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

    /// Reads a leaf page that is wrong once more. If it still is, nothing tells which versions of its
    /// blocks are current, and none is to become so by being shown: all are orphaned. Where they lay
    /// isn't known either, so their slots stay taken.
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

    /// Counts and tells blocks that became orphaned.
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

    /// Writes leaves, sorted, to their spare copies and takes them over.
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

    /// Leaf pages of sets that are wrong on the device, and were neither changed nor made void since.
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
