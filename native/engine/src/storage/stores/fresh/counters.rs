//! Counters of a store that keeps freshness.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters; device I/O is counted in pages, without the data of blocks.
#[derive(Debug, Default)]
pub struct Counters {
    /// Leaf pages found in the cache.
    pub leaf_hits: AtomicU64,
    /// Leaf pages that had to be read.
    pub leaf_misses: AtomicU64,
    /// Leaf pages read.
    pub leaf_reads: AtomicU64,
    /// Leaf pages written.
    pub leaf_writes: AtomicU64,
    /// Pages of nodes written.
    pub node_writes: AtomicU64,
    /// Log pages written.
    pub log_pages: AtomicU64,
    /// Syncs of the device.
    pub syncs: AtomicU64,
    /// Merges completed.
    pub merges: AtomicU64,
    /// Checkpoints written.
    pub checkpoints: AtomicU64,
    /// Advances of the anchor.
    pub anchors: AtomicU64,
    /// Log pages found by the last opening.
    pub recovered_log_pages: AtomicU64,
    /// Changes recovered from them.
    pub recovered_changes: AtomicU64,
    /// Duration of the last opening in milliseconds.
    pub recovery_millis: AtomicU64,
    /// Epoch of this opening.
    pub epoch: AtomicU64,
    /// Root commits before this opening. It may have wrapped: adding those since gives the right
    /// number.
    pub commits_before: AtomicU64,
    /// Leaf pages that merges found wrong, orphaning their blocks.
    pub orphaned_sets: AtomicU64,
    /// Blocks with entries in leaf pages, including orphaned ones.
    pub written: AtomicU64,
    /// Whether the store is anchored: 0 or 1.
    pub is_anchored: AtomicU64,
    /// Number of the last advance of the anchor.
    pub anchor_number: AtomicU64,
    /// When that was, on the engine's clock; 0 if not in this opening.
    pub anchored_at: AtomicU64,
    /// Log pages that may not be overwritten yet.
    pub log_used: AtomicU64,
}

/// Adds to a counter.
pub fn count(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

impl Counters {
    /// The counts by name.
    #[must_use]
    pub fn by_name(&self) -> Vec<(&'static str, u64)> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        vec![
            ("leaf_cache_hits", read(&self.leaf_hits)),
            ("leaf_cache_misses", read(&self.leaf_misses)),
            ("leaf_pages_read", read(&self.leaf_reads)),
            ("leaf_pages_written", read(&self.leaf_writes)),
            ("node_pages_written", read(&self.node_writes)),
            ("log_pages_written", read(&self.log_pages)),
            ("device_syncs", read(&self.syncs)),
            ("merges", read(&self.merges)),
            ("checkpoints", read(&self.checkpoints)),
            ("anchors", read(&self.anchors)),
            ("recovered_log_pages", read(&self.recovered_log_pages)),
            ("recovered_changes", read(&self.recovered_changes)),
            ("recovery_ms", read(&self.recovery_millis)),
            ("epoch", read(&self.epoch)),
            ("anchored", read(&self.is_anchored)),
            ("anchor_number", read(&self.anchor_number)),
            ("log_pages_used", read(&self.log_used)),
            ("orphaned_sets", read(&self.orphaned_sets)),
        ]
    }
}
