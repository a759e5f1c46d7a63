//! Room for the journals of all volumes of a gateway together.
//!
//! Each journal has [`JOURNAL_BYTES_MIN`](super::journal::JOURNAL_BYTES_MIN) of its own, so every
//! volume gets on however full the pool is. What it needs beyond that comes from the pool, and is
//! given back when it is flushed and others need it, or the volume is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug)]
struct Shared {
    bytes_max: usize,
    taken: AtomicUsize,
    journals: AtomicUsize,
}

/// The pool; clones are the same one.
#[derive(Debug, Clone)]
pub struct JournalPool {
    shared: Arc<Shared>,
}

impl JournalPool {
    /// A pool of at most `bytes_max` bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        let (taken, journals) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { shared: Arc::new(Shared { bytes_max, taken, journals }) }
    }

    /// Bytes that journals have of the pool now.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.shared.taken.load(Ordering::Relaxed)
    }

    /// Journals there are: one for each open volume.
    #[must_use]
    pub fn journals(&self) -> usize {
        self.shared.journals.load(Ordering::Relaxed)
    }

    /// Whether more than half of it is taken: then journals flush earlier and keep nothing spare.
    pub(super) fn is_scarce(&self) -> bool {
        self.taken() > self.shared.bytes_max / 2
    }

    /// Takes so many bytes, or none of them.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let within =
            |taken: usize| taken.checked_add(bytes).filter(|taken| *taken <= self.shared.bytes_max);
        self.shared.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok()
    }

    /// Gives bytes back that were taken.
    pub(super) fn give(&self, bytes: usize) {
        self.shared.taken.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn join(&self) {
        self.shared.journals.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn leave(&self) {
        self.shared.journals.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for JournalPool {
    /// A pool without a bound, for a volume by itself.
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}
