//! Memory shared by the journals of all volumes of a gateway.
//!
//! Each journal has [`JOURNAL_BYTES_MIN`](super::journal::JOURNAL_BYTES_MIN) of its own, so every
//! volume makes progress even if the pool is exhausted. Bytes beyond that come from the pool; they
//! are returned when they are flushed and other volumes need them, or when the volume is closed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug)]
struct Shared {
    bytes_max: usize,
    taken: AtomicUsize,
    journals: AtomicUsize,
}

/// Handle on a pool; clones refer to the same pool.
#[derive(Debug, Clone)]
pub struct JournalPool {
    shared: Arc<Shared>,
}

impl JournalPool {
    /// Creates a pool of at most `bytes_max` bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        let (taken, journals) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { shared: Arc::new(Shared { bytes_max, taken, journals }) }
    }

    /// Bytes that journals have taken from the pool.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.shared.taken.load(Ordering::Relaxed)
    }

    /// Number of journals: one for each open volume.
    #[must_use]
    pub fn journals(&self) -> usize {
        self.shared.journals.load(Ordering::Relaxed)
    }

    /// Whether more than half of it is taken: then journals flush earlier and return unneeded room.
    pub(super) fn is_scarce(&self) -> bool {
        self.taken() > self.shared.bytes_max / 2
    }

    /// Takes `bytes` if they are available; otherwise none.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let within =
            |taken: usize| taken.checked_add(bytes).filter(|taken| *taken <= self.shared.bytes_max);
        self.shared.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok()
    }

    /// Returns bytes taken earlier.
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
    /// An unbounded pool, for a single volume.
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}
