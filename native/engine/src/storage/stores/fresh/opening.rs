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

    /// Adds to the number of processed items.
    pub fn pass(&self, count: u64) {
        self.done.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns the number of processed items and of all items.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        // Reading them in this order never yields more than the total.
        let done = self.done.load(Ordering::Relaxed);
        (done, self.total.load(Ordering::Relaxed))
    }
}
