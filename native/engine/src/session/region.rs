//! A job's region: the memory that holds its messages, shared with one or several of its sessions.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::endpoint::EndpointError;
use crate::shared_memory::{PeerAccess, SharedMemory};

/// A region. Clones are the same memory, which is freed with the last of them.
///
/// Sessions of one job may share it. Each checks its job's ranges against its length; what lands in
/// it is disjoint, over all sessions.
#[derive(Debug, Clone)]
pub struct Region {
    pub(super) memory: Arc<SharedMemory>,
    pub(super) landing: Arc<Landing>,
}

impl Region {
    /// Creates one of `size_bytes`. Fails for no bytes, and if the system has no memory or
    /// descriptor for it.
    pub fn new(size_bytes: u64) -> Result<Self, EndpointError> {
        let size = usize::try_from(size_bytes).unwrap_or(0);
        if size == 0 {
            let message = format!("a region of {size_bytes} bytes is out of range");
            return Err(EndpointError::Invalid(message));
        }
        let memory = SharedMemory::create("sealane-region", size, PeerAccess::Writes)?;
        Ok(Self { memory: Arc::new(memory), landing: Arc::default() })
    }

    /// Its length in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.memory.len() as u64
    }
}

/// Ranges of a region that receives use, of all its sessions: start to end. None is empty, no two
/// overlap.
#[derive(Debug, Default)]
pub(super) struct Landing(Mutex<BTreeMap<u64, u64>>);

impl Landing {
    fn ranges(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves `offset..offset + length` for a receive; false if another one uses a byte of it: a
    /// mixture of two messages would land there, and each receive would be reported as complete.
    pub(super) fn reserve(&self, offset: u64, length: u64) -> bool {
        if length == 0 {
            return true;
        }
        let end = offset + length;
        let mut ranges = self.ranges();
        let is_free = ranges.range(..end).next_back().is_none_or(|(_, other)| *other <= offset);
        if is_free {
            ranges.insert(offset, end);
        }
        is_free
    }

    /// Gives back a range that was reserved.
    pub(super) fn release(&self, offset: u64, length: u64) {
        if length > 0 {
            self.ranges().remove(&offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reserved_is_disjoint_and_can_be_given_back() {
        let landing = Landing::default();
        assert!(landing.reserve(10, 10) && landing.reserve(20, 1) && landing.reserve(0, 10));
        assert!(landing.reserve(15, 0));
        for (offset, length) in [(10, 10), (19, 1), (9, 2), (0, 100), (20, 5)] {
            assert!(!landing.reserve(offset, length), "{offset} {length}");
        }
        landing.release(15, 0);
        landing.release(10, 10);
        assert!(!landing.reserve(9, 5));
        assert!(landing.reserve(12, 8));
    }

    #[test]
    fn clones_are_one_memory() {
        let region = Region::new(4096).unwrap();
        let other = region.clone();
        region.memory.copy_in(7, b"same");
        let mut read = [0; 4];
        other.memory.copy_out(7, &mut read);
        assert_eq!((&read, other.size_bytes()), (b"same", 4096));
    }
}
