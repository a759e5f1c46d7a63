//! Growing a store: one more extent behind all others, named by one more checkpoint.
//!
//! Nothing moves but the pages of the slot map, whose leaves are counted behind those of all sets.
//! Until that checkpoint is there the last one stands, of which nothing was written over: after a
//! power cut the store is what it was before or what it is after. The anchor hears of it as of
//! every checkpoint, so that a smaller store which is put back is a store that is rolled back.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::commit::{Writer, fits};
use super::geometry::{GROWTHS_MAX, Geometry};
use super::leaves::Written;
use super::map::{Layout, Map};
use super::nodes::Held;

impl<F: Layout> Map<F> {
    /// The geometry that the store would have with so many blocks. `InvalidInput` if it can't.
    pub fn grown_to(&self, block_count: u64) -> io::Result<Geometry> {
        let grown = self.geometry.grown_to(block_count).filter(fits::<F>);
        grown.ok_or_else(|| {
            let (found, times) = (self.geometry.block_count, self.geometry.earlier.len());
            let detail = format!(
                "a store of {found} blocks that grew {times} times can't have {block_count}: it \
                 only grows, and no more than {GROWTHS_MAX} times"
            );
            io::Error::new(io::ErrorKind::InvalidInput, detail)
        })
    }

    /// Makes the store what [`Map::grown_to`] said; its device must have room for that. Also a
    /// merge of all that was noted. After an error of the anchor the store may come up in either
    /// size when it is opened again.
    pub fn grow(&mut self, geometry: Geometry) -> io::Result<()> {
        self.merge()?;
        let sets_before = self.geometry.sets();
        let commits = self.leaves.root().commit;
        self.leaves.grow(geometry.clone());
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.slots.extend(geometry.slot_count);
        let writer = self.writer.get_mut().unwrap_or_else(PoisonError::into_inner);
        writer.slot_maps.extend(geometry.slot_maps());
        // Building the tree anew was no commit.
        let built = self.leaves.root().commit;
        writer.commits = writer.commits.wrapping_add(commits).wrapping_sub(built);
        self.counters.commits_before.store(writer.commits, Ordering::Relaxed);
        self.geometry = geometry;
        let mut writer = self.writer();
        let grown = self.write_grown(&mut writer, sets_before);
        self.guard(grown)
    }

    fn write_grown(&self, writer: &mut Writer<F::Entry>, sets_before: u64) -> io::Result<()> {
        if sets_before != self.geometry.sets() {
            let moved = self.moved_slot_maps(writer, sets_before);
            self.write_leaves(&moved, 1)?;
        }
        // The log of the checkpoint has what a write that failed may have left.
        let border = {
            let log = self.log();
            (log.next, log.tag)
        };
        let carried = self.state().intents.announce_all();
        if !carried.is_empty() {
            self.append(&carried)?;
        }
        self.write_checkpoint(writer, border)?;
        self.advance(writer)
    }

    /// Pages of the slot map under their new numbers, and the numbers that they had.
    fn moved_slot_maps(&self, writer: &Writer<F::Entry>, sets_before: u64) -> Vec<Written> {
        let sets = self.geometry.sets();
        let maps: Vec<_> = writer.slot_maps.all().collect();
        let leaves = maps.iter().map(|(index, _)| sets + index);
        let mut moved = Vec::new();
        for (current, (_, page)) in self.leaves.current(leaves).into_iter().zip(&maps) {
            let node = self.leaves.changed_node(current.leaf, None, page, page);
            // Of two numbers that share a place the copy that the last checkpoint needs is kept.
            let held = node.map(|node| Held { node, copy: current.spare_copy() });
            let page = held.map(|held| (page.clone(), held));
            moved.push(Written { leaf: current.leaf, page, growth: 0 });
        }
        let is_kept = |leaf: u64| moved.iter().any(|written| written.leaf == leaf);
        let left = maps.iter().map(|(index, _)| sets_before + index);
        let left: Vec<_> = left.filter(|leaf| !is_kept(*leaf)).collect();
        moved.extend(left.into_iter().map(|leaf| Written { leaf, page: None, growth: 0 }));
        moved.sort_unstable_by_key(|written| written.leaf);
        moved
    }
}
