//! Progress of a store's opening, for whoever waits for it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the pages and records that an opening has processed, and how many are known to be needed.
/// Other threads may read it.
#[derive(Debug, Default)]
pub struct Opening {
    done: AtomicU64,
    total: AtomicU64,
}

impl Opening {
    /// Adds to the number of items to process.
    pub fn expect(&self, count: u64) {
        self.total.fetch_add(count, Ordering::Relaxed);
    }

    /// Adds to the number of processed items, which the caller has expected before.
    pub fn pass(&self, count: u64) {
        self.done.fetch_add(count, Ordering::Release);
    }

    /// Returns the number of processed items and of all items.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        // Read in this order, and in no other, they never yield more than the total.
        let done = self.done.load(Ordering::Acquire);
        (done, self.total.load(Ordering::Relaxed))
    }
}
