//! The job's view of a landing receive: the bytes of its slot in the bitmap, in place.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::Layout;
use crate::shared_memory::SharedMemory;

/// The bitmap of one receive: a byte for each chunk, 1 once all bytes of the chunk are in the
/// region.
///
/// It lies in memory that the daemon writes and the job may only read. The bytes belong to a slot:
/// once the slot is posted again, they describe that slot's new receive. The mapping stays readable
/// after the end of the session.
#[derive(Debug, Clone)]
pub struct ChunkBitmap {
    completion: Arc<SharedMemory>,
    /// Offset of the slot's entry in the slot table.
    owner: u64,
    handle: u64,
    start: u64,
    length: u64,
}

impl ChunkBitmap {
    /// The first `chunk_count` bytes of a receive's slot. `None` while no slot belongs to the
    /// receive: it still waits for one, or its slot has gone to a later receive.
    pub(super) fn find(
        completion: &Arc<SharedMemory>,
        layout: &Layout,
        handle: u64,
        chunk_count: usize,
    ) -> Option<Self> {
        let per_slot = layout.chunks_per_slot();
        let of_slot = |slot: u64| Self {
            completion: Arc::clone(completion),
            owner: layout.slot_table() + 8 * slot,
            handle,
            start: layout.bitmap() + slot * per_slot,
            length: per_slot.min(chunk_count as u64),
        };
        (0..u64::from(layout.slots)).map(of_slot).find(Self::is_current)
    }

    /// Whether the slot still belongs to this receive. If so, all bytes read before are about it.
    pub fn is_current(&self) -> bool {
        self.owner().load(Ordering::Acquire) == self.handle + 1
    }

    /// The bytes; every chunk with a 1 is completely in the region. `None` once a later receive has
    /// the slot.
    pub fn read(&self) -> Option<Vec<u8>> {
        let bytes: Vec<u8> = (self.start..self.start + self.length)
            .map(|offset| self.completion.byte(offset).load(Ordering::Acquire))
            .collect();
        self.is_current().then_some(bytes)
    }

    /// Address of the first byte, for exporting the bytes in place. Read-only; they change at any
    /// time.
    pub fn as_ptr(&self) -> *const u8 {
        self.completion.as_mut_ptr().wrapping_add(self.start as usize)
    }

    /// Number of chunks in the receive's buffer.
    #[allow(clippy::len_without_is_empty)] // a receive with an empty buffer has length 0
    pub fn len(&self) -> usize {
        self.length as usize
    }

    fn owner(&self) -> &AtomicU64 {
        self.completion.word(self.owner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::ring::{DaemonRing, JobRing};
    use super::*;
    use crate::shared_memory::PeerAccess;

    fn rings() -> (DaemonRing, JobRing) {
        let layout = Layout { entries: 4, region_bytes: 1 << 20, slots: 4, chunk_bytes: 4096 };
        let created = |bytes, access| SharedMemory::create("test", bytes, access).unwrap();
        let attached = |memory: &SharedMemory, access| {
            SharedMemory::attach(memory.file().try_clone_to_owned().unwrap(), access).unwrap()
        };
        let submission = created(layout.submission_bytes(), PeerAccess::Writes);
        let completion = created(layout.completion_bytes(), PeerAccess::Reads);
        let of_job = attached(&submission, PeerAccess::Writes);
        let of_job = (of_job, attached(&completion, PeerAccess::Reads));
        let daemon = DaemonRing::new(layout, submission, completion);
        (daemon, JobRing::new(of_job.0, of_job.1).unwrap())
    }

    fn landed(bitmap: &ChunkBitmap) -> Option<Vec<usize>> {
        let bytes = bitmap.read()?;
        Some((0..bytes.len()).filter(|chunk| bytes[*chunk] == 1).collect())
    }

    #[test]
    fn chunks_show_as_they_land_in_the_slot_of_their_receive() {
        let (mut daemon, job) = rings();
        assert!(job.bitmap(7, 256).is_none(), "it has no slot yet");
        daemon.slot_posted(1, 7, 256);
        let bitmap = job.bitmap(7, 256).unwrap();
        assert_eq!((bitmap.len(), landed(&bitmap).unwrap().len()), (256, 0));
        daemon.chunk_landed(1, 3);
        daemon.chunk_landed(9, 3);
        daemon.chunk_landed(1, u32::MAX);
        assert_eq!(landed(&bitmap).unwrap(), [3]);
        // SAFETY: the fourth of 256 bytes of the mapping, which `bitmap` keeps.
        assert_eq!(unsafe { bitmap.as_ptr().add(3).read_volatile() }, 1);
        assert_eq!(job.bitmap(7, 2).unwrap().read().unwrap(), [0, 0]);
        assert_eq!(job.bitmap(7, usize::MAX).unwrap().len(), 256, "no further than the slot");
        daemon.slot_posted(2, 8, 256);
        assert!(landed(&job.bitmap(8, 256).unwrap()).unwrap().is_empty());
    }

    #[test]
    fn bitmap_is_void_once_its_slot_is_posted_again() {
        let (mut daemon, job) = rings();
        daemon.slot_posted(1, 7, 256);
        let bitmap = job.bitmap(7, 256).unwrap();
        daemon.chunk_landed(1, 3);
        daemon.slot_posted(1, 11, 256);
        assert!(!bitmap.is_current());
        assert_eq!(landed(&bitmap), None);
        assert!(job.bitmap(7, 256).is_none());
        assert!(landed(&job.bitmap(11, 256).unwrap()).unwrap().is_empty());
        drop(job);
        assert_eq!(landed(&bitmap), None, "readable without the ring");
    }
}
