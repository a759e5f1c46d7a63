//! Growing a store: adds an extent behind all others with one new checkpoint.
//!
//! Only the slot-map pages move, because their leaves are numbered behind those of all sets. Until
//! the new checkpoint is written, the last one is valid and nothing that it needs has been
//! overwritten: after a power cut, the store has its old size or the new one. The new checkpoint is
//! anchored like every other, so a smaller, older store is detected as rolled back.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::commit::{Writer, fits};
use super::geometry::{GROWTHS_MAX, Geometry};
use super::leaves::Written;
use super::map::{Layout, Map};
use super::nodes::Held;

impl<F: Layout> Map<F> {
    /// The store's geometry after growing to `block_count` blocks. `InvalidInput` if that isn't
    /// possible.
    pub fn grown_to(&self, block_count: u64) -> io::Result<Geometry> {
        let grown = self.geometry.grown_to(block_count).filter(fits::<F>);
        grown.ok_or_else(|| {
            let (found, times) = (self.geometry.block_count, self.geometry.earlier.len());
            let detail = format!(
                "a store of {found} blocks that grew {times} times can't have {block_count}: it \
                 only grows, and at most {GROWTHS_MAX} times"
            );
            io::Error::new(io::ErrorKind::InvalidInput, detail)
        })
    }

    /// Grows the store to a geometry from [`Map::grown_to`]. The device must have room for it. Also
    /// merges all changes so far. After an error of the anchor, the store may have either size when
    /// it is opened again.
    pub fn grow(&mut self, geometry: Geometry) -> io::Result<()> {
        self.merge()?;
        let sets_before = self.geometry.sets();
        let commits = self.leaves.root().commit;
        self.leaves.grow(geometry.clone());
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.slots.extend(geometry.slot_count);
        let writer = self.writer.get_mut().unwrap_or_else(PoisonError::into_inner);
        writer.slot_maps.extend(geometry.slot_maps());
        // Rebuilding the tree was no commit.
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
        // Failed writes must be announced in the log that starts at the checkpoint.
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

    /// Moves the slot-map pages to their new leaf numbers, and makes their old numbers void.
    fn moved_slot_maps(&self, writer: &Writer<F::Entry>, sets_before: u64) -> Vec<Written> {
        let sets = self.geometry.sets();
        let maps: Vec<_> = writer.slot_maps.all().collect();
        let leaves = maps.iter().map(|(index, _)| sets + index);
        let mut moved = Vec::new();
        for (current, (_, page)) in self.leaves.current(leaves).into_iter().zip(&maps) {
            let node = self.leaves.changed_node(current.leaf, None, page, page);
            // If an old and a new number coincide, the copy that the last checkpoint needs is kept.
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
