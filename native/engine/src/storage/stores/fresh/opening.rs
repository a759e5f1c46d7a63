//! How far the opening of a store is, for who waits for it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Pages and records that an opening has gone through, of those that there are as far as is known.
/// Another thread may look.
#[derive(Debug, Default)]
pub struct Opening {
    done: AtomicU64,
    total: AtomicU64,
}

impl Opening {
    /// So many more are to be gone through.
    pub fn expect(&self, count: u64) {
        self.total.fetch_add(count, Ordering::Relaxed);
    }

    /// So many more were gone through.
    pub fn pass(&self, count: u64) {
        self.done.fetch_add(count, Ordering::Relaxed);
    }

    /// How many were gone through, and of how many.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        // In this order it never says more than all.
        let done = self.done.load(Ordering::Relaxed);
        (done, self.total.load(Ordering::Relaxed))
    }
}
