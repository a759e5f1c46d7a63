//! Sizes of a store, and the places of its pages (`docs/formats/stores.md` §2).
//!
//! Each growth of a store adds an *extent*: new areas behind all existing ones, so that nothing
//! moves. Sets, slots and blocks are numbered continuously across extents.

use std::ops::Range;

use super::checkpoint::REGIONS;
use super::nodes::NODES_PER_PAGE;

/// Number of slots that one slot-map page covers, one bit each.
pub const SLOTS_PER_MAP: u64 = 8 * 4096;
/// Number of pages before the log: the superblock and two checkpoints.
const LOG_START: u64 = 3;
/// Largest limit for pending changes: 1 Mi, about 100 MiB of memory.
const PENDING_MAX: u64 = 1 << 20;
/// Smallest limit, so that small stores merge in bulk, too.
const PENDING_MIN: u64 = 4096;
/// Changes per page of the log when both fill up together: a flush after every 16 writes.
const CHANGES_PER_LOG_PAGE: u64 = 16;
/// Fewest pages of the log (16 MiB): the number of flushes between two merges of a small store.
const LOG_PAGES_MIN: u64 = 4096;
/// Far above any device's size, and small enough that sums of pages can't overflow.
const COUNT_MAX: u64 = 1 << 47;
/// Most growths of a store: its checkpoint page has room for this many sizes.
pub const GROWTHS_MAX: usize = 10;

/// Sizes of all kinds of a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Blocks that the store offers.
    pub block_count: u64,
    /// Slots for the data of blocks; the spare ones take new versions. 0 if blocks are written in
    /// place.
    pub slot_count: u64,
    /// Pages of the log.
    pub log_pages: u64,
    /// Most changes, of entries and of ranges, that may be pending.
    pub pending_max: u64,
}

/// An extent that is followed by others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The store's sizes when it was the last extent.
    sizes: Sizes,
    /// The first page behind it.
    end: u64,
}

/// Sizes of a store, and its extents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks that the store offers.
    pub block_count: u64,
    /// Entries of a leaf page.
    pub leaf_entries: u64,
    /// Slots for the data of blocks; the spare ones take new versions. 0 if blocks are written in
    /// place.
    pub slot_count: u64,
    /// Pages of the log.
    pub log_pages: u64,
    /// Most changes, of entries and of ranges, that may be pending.
    pub pending_max: u64,
    /// All extents but the last; none in a store that never grew.
    pub earlier: Vec<Extent>,
}

/// Items of one kind in one extent, one page each, and their place.
struct Area {
    first: u64,
    count: u64,
    place: u64,
}

impl Area {
    fn behind(&self, items: Range<u64>, copies: u64) -> Self {
        Self {
            first: items.start,
            count: items.end - items.start,
            place: self.place + self.count * copies,
        }
    }
}

/// The areas of one extent, in order.
struct Areas {
    log: Area,
    nodes: Area,
    leaves: Area,
    slots: Area,
    blocks: Area,
}

impl Sizes {
    fn sets(&self, leaf_entries: u64) -> u64 {
        self.block_count.div_ceil(leaf_entries)
    }

    fn slot_maps(&self) -> u64 {
        self.slot_count.div_ceil(SLOTS_PER_MAP)
    }

    fn leaves(&self, leaf_entries: u64) -> u64 {
        self.sets(leaf_entries) + self.slot_maps()
    }

    fn node_pages(&self, leaf_entries: u64) -> u64 {
        self.leaves(leaf_entries).div_ceil(NODES_PER_PAGE)
    }

    /// Number of blocks with pages of their own.
    fn in_place_blocks(&self) -> u64 {
        if self.slot_count == 0 { self.block_count } else { 0 }
    }
}

impl Geometry {
    /// Sizes for a number of blocks, out of place: with spare slots for all pending changes, and
    /// some for writes in flight.
    #[must_use]
    pub fn placed(block_count: u64, leaf_entries: u64) -> Self {
        let pending_max = (block_count / 4).clamp(PENDING_MIN, PENDING_MAX);
        let slot_count = block_count + pending_max + pending_max / 4;
        let log_pages = (pending_max / CHANGES_PER_LOG_PAGE).max(LOG_PAGES_MIN);
        let earlier = Vec::new();
        Self { block_count, leaf_entries, slot_count, log_pages, pending_max, earlier }
    }

    /// Sizes for a number of blocks, in place.
    #[must_use]
    pub fn in_place(block_count: u64, leaf_entries: u64) -> Self {
        Self { slot_count: 0, ..Self::placed(block_count, leaf_entries) }
    }

    // Growing.

    /// The store's current sizes.
    #[must_use]
    pub fn sizes(&self) -> Sizes {
        let Self { block_count, slot_count, log_pages, pending_max, .. } = *self;
        Sizes { block_count, slot_count, log_pages, pending_max }
    }

    /// The store with one more extent, for `block_count` blocks in total: sizes as for a new store,
    /// but none shrinks. `None` if it isn't larger or has grown too often.
    #[must_use]
    pub fn grown_to(&self, block_count: u64) -> Option<Self> {
        if block_count >= COUNT_MAX {
            return None;
        }
        let new = Self::placed(block_count, self.leaf_entries);
        let is_in_place = self.slot_count == 0;
        self.with_extent(Sizes {
            block_count,
            slot_count: if is_in_place { 0 } else { new.slot_count.max(self.slot_count) },
            log_pages: new.log_pages.max(self.log_pages),
            pending_max: new.pending_max.max(self.pending_max),
        })
    }

    /// The store with one more extent, after which it has these sizes. `None` if they are no
    /// growth.
    #[must_use]
    pub fn with_extent(&self, sizes: Sizes) -> Option<Self> {
        let before = self.sizes();
        let grows = before.block_count < sizes.block_count
            && before.slot_count <= sizes.slot_count
            && before.log_pages <= sizes.log_pages
            && before.pending_max <= sizes.pending_max
            && (before.slot_count == 0) == (sizes.slot_count == 0);
        let is_sane = [sizes.block_count, sizes.slot_count, sizes.log_pages, sizes.pending_max]
            .iter()
            .all(|count| *count < COUNT_MAX)
            && u32::try_from(sizes.log_pages.max(sizes.pending_max)).is_ok();
        if !grows || !is_sane || self.earlier.len() == GROWTHS_MAX {
            return None;
        }
        let mut earlier = self.earlier.clone();
        earlier.push(Extent { sizes: before, end: self.device_pages() });
        let Sizes { block_count, slot_count, log_pages, pending_max } = sizes;
        let leaf_entries = self.leaf_entries;
        Some(Self { block_count, leaf_entries, slot_count, log_pages, pending_max, earlier })
    }

    /// The store's sizes after each growth, including the last one.
    pub fn growths(&self) -> impl Iterator<Item = Sizes> + '_ {
        let all = self.earlier.iter().map(|extent| extent.sizes);
        all.chain([self.sizes()]).skip(1)
    }

    // Counts.

    /// Most writes in place in progress.
    #[must_use]
    pub fn intents_max(&self) -> u64 {
        self.pending_max / 4
    }

    /// Pages of the log reserved for announcing writes in progress again when a checkpoint restarts
    /// the log.
    #[must_use]
    pub fn carry_reserve(&self, records_per_page: u64) -> u64 {
        self.intents_max().div_ceil(records_per_page)
    }

    /// Pages of the log reserved for the next opening, which logs all pending changes again.
    #[must_use]
    pub fn log_reserve(&self, records_per_page: u64) -> u64 {
        self.pending_max.div_ceil(records_per_page)
    }

    /// Number of sets of blocks; each has one leaf page.
    #[must_use]
    pub fn sets(&self) -> u64 {
        self.sizes().sets(self.leaf_entries)
    }

    /// Number of slot-map pages.
    #[must_use]
    pub fn slot_maps(&self) -> u64 {
        self.sizes().slot_maps()
    }

    /// Number of leaves of the tree: leaf pages of the sets, then slot-map pages.
    #[must_use]
    pub fn leaves(&self) -> u64 {
        self.sizes().leaves(self.leaf_entries)
    }

    /// Number of pages of nodes.
    #[must_use]
    pub fn node_pages(&self) -> u64 {
        self.sizes().node_pages(self.leaf_entries)
    }

    /// Number of pages of nodes per region.
    #[must_use]
    pub fn region_pages(&self) -> u64 {
        self.node_pages().div_ceil(REGIONS as u64)
    }

    /// Whether a store can have these sizes, given the number of records in a log page.
    #[must_use]
    pub fn is_sound(&self, records_per_page: u64) -> bool {
        let has_counts = [self.block_count, self.leaf_entries, self.log_pages, self.pending_max]
            .iter()
            .all(|count| (1..COUNT_MAX).contains(count));
        has_counts
            && (self.slot_count == 0 || (self.block_count..COUNT_MAX).contains(&self.slot_count))
            && self.pending_max <= 1 << 32
            && self.log_pages > self.log_reserve(records_per_page) + 1
    }

    // Places.

    /// Place of a checkpoint, by its number.
    #[must_use]
    pub fn checkpoint(&self, number: u64) -> u64 {
        1 + number % 2
    }

    /// Place of a log page, by its number, in the last extent that has a log.
    #[must_use]
    pub fn log(&self, number: u64) -> u64 {
        let mut logs = self.extents().map(|areas| areas.log);
        let log = logs.find(|log| log.count > 0).unwrap_or_else(|| self.areas(0).log);
        log.place + number % self.log_pages
    }

    /// Place of one of the two copies of a page of nodes.
    #[must_use]
    pub fn nodes(&self, index: u64, copy: u8) -> u64 {
        self.place(|areas| areas.nodes, index, copy)
    }

    /// Place of one of the two copies of a leaf.
    #[must_use]
    pub fn leaf(&self, leaf: u64, copy: u8) -> u64 {
        self.place(|areas| areas.leaves, leaf, copy)
    }

    /// Place of a slot.
    #[must_use]
    pub fn slot(&self, slot: u64) -> u64 {
        self.place(|areas| areas.slots, slot, 0)
    }

    /// Place of a block written in place.
    #[must_use]
    pub fn in_place_block(&self, lba: u64) -> u64 {
        self.place(|areas| areas.blocks, lba, 0)
    }

    /// Number of pages of nodes, from this one on, that lie in consecutive places.
    #[must_use]
    pub fn nodes_together(&self, index: u64) -> u64 {
        let area = self.area(|areas| areas.nodes, index);
        area.first + area.count - index
    }

    /// Number of blocks in place, from this one on, that lie in consecutive places.
    #[must_use]
    pub fn blocks_together(&self, lba: u64) -> u64 {
        let area = self.area(|areas| areas.blocks, lba);
        area.first + area.count - lba
    }

    /// Number of pages that the store needs on its device; blocks in place count as pages.
    #[must_use]
    pub fn device_pages(&self) -> u64 {
        let blocks = self.areas(self.earlier.len()).blocks;
        blocks.place + blocks.count
    }

    /// Pages of the last extent before its slots or blocks: every change, even a deallocation, and
    /// every opening needs room for them.
    #[must_use]
    pub fn own_pages(&self) -> Range<u64> {
        let start = self.earlier.last().map_or(0, |earlier| earlier.end);
        start..self.areas(self.earlier.len()).slots.place
    }

    fn place(&self, kind: impl Fn(Areas) -> Area, index: u64, copy: u8) -> u64 {
        let area = self.area(kind, index);
        area.place + u64::from(copy) * area.count + (index - area.first)
    }

    fn area(&self, kind: impl Fn(Areas) -> Area, index: u64) -> Area {
        let mut areas = self.extents().map(&kind);
        areas.find(|area| area.first <= index).unwrap_or_else(|| kind(self.areas(0)))
    }

    /// The areas of the extents, starting with the last one.
    fn extents(&self) -> impl Iterator<Item = Areas> + '_ {
        (0..=self.earlier.len()).rev().map(|extent| self.areas(extent))
    }

    fn areas(&self, extent: usize) -> Areas {
        let earlier = extent.checked_sub(1).map(|before| self.earlier[before]);
        let before = earlier.map_or_else(Sizes::default, |earlier| earlier.sizes);
        let after = self.earlier.get(extent).map_or_else(|| self.sizes(), |extent| extent.sizes);
        let place = earlier.map_or(LOG_START, |earlier| earlier.end);
        // A log that grew moves to the new extent.
        let log_pages = if after.log_pages > before.log_pages { after.log_pages } else { 0 };
        let range = |count: &dyn Fn(&Sizes) -> u64| count(&before)..count(&after);
        let log = Area { first: 0, count: log_pages, place };
        let nodes = log.behind(range(&|sizes| sizes.node_pages(self.leaf_entries)), 1);
        let leaves = nodes.behind(range(&|sizes| sizes.leaves(self.leaf_entries)), 2);
        let slots = leaves.behind(range(&|sizes| sizes.slot_count), 2);
        let blocks = slots.behind(range(&Sizes::in_place_blocks), 1);
        Areas { log, nodes, leaves, slots, blocks }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn places(geometry: &Geometry) -> Vec<u64> {
        let mut places = vec![0, geometry.checkpoint(0), geometry.checkpoint(1)];
        places.extend((0..geometry.log_pages).map(|number| geometry.log(number)));
        for copy in 0..2 {
            places.extend((0..geometry.node_pages()).map(|index| geometry.nodes(index, copy)));
            places.extend((0..geometry.leaves()).map(|leaf| geometry.leaf(leaf, copy)));
        }
        places.extend((0..geometry.slot_count).map(|slot| geometry.slot(slot)));
        if geometry.slot_count == 0 {
            places.extend((0..geometry.block_count).map(|lba| geometry.in_place_block(lba)));
        }
        places
    }

    #[test]
    fn every_page_has_a_place_of_its_own_and_growing_moves_none() {
        for first in [Geometry::placed(100, 75), Geometry::in_place(100, 340)] {
            let mut geometry = first;
            for block_count in [101, 40_000, 90_000] {
                let grown = geometry.grown_to(block_count).expect("larger");
                let found = places(&grown);
                let distinct: HashSet<_> = found.iter().collect();
                assert_eq!(distinct.len(), found.len());
                assert!(found.iter().all(|place| *place < grown.device_pages()));
                assert!((0..geometry.leaves()).all(|l| geometry.leaf(l, 1) == grown.leaf(l, 1)));
                assert!(
                    (0..geometry.node_pages())
                        .all(|index| geometry.nodes(index, 1) == grown.nodes(index, 1))
                );
                assert!((0..geometry.slot_count).all(|s| geometry.slot(s) == grown.slot(s)));
                let first_new = geometry.device_pages();
                assert!(grown.leaf(grown.leaves() - 1, 0) >= first_new || block_count == 101);
                geometry = grown;
            }
            assert_eq!(geometry.growths().count(), 3);
            let sizes: Vec<_> = geometry.growths().collect();
            assert_eq!(sizes[2], geometry.sizes());
        }
    }

    #[test]
    fn a_log_that_does_not_become_larger_stays() {
        let geometry = Geometry::placed(100, 75);
        let grown = geometry.grown_to(50_000).expect("larger");
        assert_eq!(grown.log(7), geometry.log(7));
        let larger = grown.grown_to(1 << 20).expect("larger");
        assert!(larger.log_pages > grown.log_pages);
        assert!(larger.log(0) >= grown.device_pages());
    }

    #[test]
    fn only_growths_are_accepted_and_only_so_many() {
        let mut geometry = Geometry::placed(100, 75);
        assert_eq!(geometry.grown_to(100), None);
        assert_eq!(geometry.grown_to(99), None);
        assert_eq!(geometry.with_extent(Sizes { slot_count: 0, ..geometry.sizes() }), None);
        let overflowing = Sizes { block_count: u64::MAX, ..geometry.sizes() };
        assert_eq!(geometry.with_extent(overflowing), None);
        for growth in 1..=GROWTHS_MAX as u64 {
            geometry = geometry.grown_to(100 + growth).expect("larger");
        }
        assert_eq!(geometry.grown_to(1000), None);
    }

    #[test]
    fn neighbours_end_with_their_extent() {
        let geometry = Geometry::in_place(100, 340).grown_to(1000).expect("larger");
        assert_eq!(geometry.blocks_together(90), 10);
        assert_eq!(geometry.blocks_together(100), 900);
        assert_eq!(geometry.nodes_together(0), 1);
    }
}
