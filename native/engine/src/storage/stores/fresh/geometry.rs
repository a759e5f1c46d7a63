//! Sizes of a store, and where its pages are (`docs/stores.md` §2).

use super::checkpoint::REGIONS;
use super::nodes::NODES_PER_PAGE;

/// Slots that one slot-map page tells of: a bit each.
pub const SLOTS_PER_MAP: u64 = 8 * 4096;
/// Pages of the superblock and the two checkpoints, before the log.
const LOG_START: u64 = 3;
/// Most changes that may wait to be merged: 1 Mi, about 100 MiB of memory.
const PENDING_MAX: u64 = 1 << 20;
/// Fewest, so that small stores merge in bulk too.
const PENDING_MIN: u64 = 4096;
/// Changes per page of the log at which both are full together: a flush after every 16 writes.
const CHANGES_PER_LOG_PAGE: u64 = 16;
/// Fewest pages of the log (16 MiB): so many flushes between two merges of a small store.
const LOG_PAGES_MIN: u64 = 4096;

/// Sizes of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks that the store offers.
    pub block_count: u64,
    /// Entries of a leaf page.
    pub leaf_entries: u64,
    /// Slots for the data of blocks; the spare ones take new versions. None if blocks are written
    /// in place.
    pub slot_count: u64,
    /// Pages of the log.
    pub log_pages: u64,
    /// Most changes, of entries and of ranges, that may wait to be merged into leaf pages.
    pub pending_max: u64,
}

impl Geometry {
    /// The sizes for so many blocks, out of place: a slot more for every change that may wait, and
    /// some for those on their way.
    #[must_use]
    pub fn placed(block_count: u64, leaf_entries: u64) -> Self {
        let pending_max = (block_count / 4).clamp(PENDING_MIN, PENDING_MAX);
        let slot_count = block_count + pending_max + pending_max / 4;
        let log_pages = (pending_max / CHANGES_PER_LOG_PAGE).max(LOG_PAGES_MIN);
        Self { block_count, leaf_entries, slot_count, log_pages, pending_max }
    }

    /// The sizes for so many blocks, in place.
    #[must_use]
    pub fn in_place(block_count: u64, leaf_entries: u64) -> Self {
        Self { slot_count: 0, ..Self::placed(block_count, leaf_entries) }
    }

    /// Blocks of a device that a store of so many blocks in place takes, its own pages among them.
    #[must_use]
    pub fn device_blocks(&self) -> u64 {
        self.in_place_block(self.block_count)
    }

    /// Where a block written in place is.
    #[must_use]
    pub fn in_place_block(&self, lba: u64) -> u64 {
        self.page_count() + lba
    }

    /// Most writes in place that may be announced and not ended.
    #[must_use]
    pub fn intents_max(&self) -> u64 {
        self.pending_max / 4
    }

    /// Pages of the log that are kept for announcing again what is on its way when a checkpoint
    /// has the log begin anew.
    #[must_use]
    pub fn carry_reserve(&self, records_per_page: u64) -> u64 {
        self.intents_max().div_ceil(records_per_page)
    }

    /// Sets of blocks: each has one leaf page.
    #[must_use]
    pub fn sets(&self) -> u64 {
        self.block_count.div_ceil(self.leaf_entries)
    }

    /// Pages of the slot map.
    #[must_use]
    pub fn slot_maps(&self) -> u64 {
        self.slot_count.div_ceil(SLOTS_PER_MAP)
    }

    /// Leaves of the tree: leaf pages of the sets, then pages of the slot map.
    #[must_use]
    pub fn leaves(&self) -> u64 {
        self.sets() + self.slot_maps()
    }

    /// Pages of nodes.
    #[must_use]
    pub fn node_pages(&self) -> u64 {
        self.leaves().div_ceil(NODES_PER_PAGE)
    }

    /// Pages of nodes per region.
    #[must_use]
    pub fn region_pages(&self) -> u64 {
        self.node_pages().div_ceil(REGIONS as u64)
    }

    /// Where a checkpoint goes, by its number.
    #[must_use]
    pub fn checkpoint(&self, number: u64) -> u64 {
        1 + number % 2
    }

    /// Where a log page goes, by its number.
    #[must_use]
    pub fn log(&self, number: u64) -> u64 {
        LOG_START + number % self.log_pages
    }

    /// Where one of the two copies of a page of nodes is.
    #[must_use]
    pub fn nodes(&self, index: u64, copy: u8) -> u64 {
        LOG_START + self.log_pages + u64::from(copy) * self.node_pages() + index
    }

    /// Where one of the two copies of a leaf is.
    #[must_use]
    pub fn leaf(&self, leaf: u64, copy: u8) -> u64 {
        self.nodes(0, 2) + u64::from(copy) * self.leaves() + leaf
    }

    /// Where a slot is.
    #[must_use]
    pub fn slot(&self, slot: u64) -> u64 {
        self.leaf(0, 2) + slot
    }

    /// Pages of the whole store.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.slot(self.slot_count)
    }

    /// Whether a store can have these sizes with so many records in a log page.
    #[must_use]
    pub fn is_sound(&self, records_per_page: u64) -> bool {
        // Far above any device, and far from overflow in the sums above.
        const COUNT_MAX: u64 = 1 << 47;
        let has_counts = [self.block_count, self.leaf_entries, self.log_pages, self.pending_max]
            .iter()
            .all(|count| (1..COUNT_MAX).contains(count));
        has_counts
            && (self.slot_count == 0 || (self.block_count..COUNT_MAX).contains(&self.slot_count))
            && self.pending_max <= 1 << 32
            && self.log_pages > self.log_reserve(records_per_page) + 1
    }

    /// Pages of the log that are kept for the next opening, which logs anew what waits.
    #[must_use]
    pub fn log_reserve(&self, records_per_page: u64) -> u64 {
        self.pending_max.div_ceil(records_per_page)
    }
}
