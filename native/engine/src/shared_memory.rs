//! Memory shared with a peer, a job or an accelerator: memfds created, sized, sealed and mapped by
//! the daemon.
//!
//! The other side is hostile. It can change any byte it may write at any moment, so all access goes
//! through raw pointers or atomics, never through a Rust reference to plain bytes. Seals keep it
//! from shrinking a file under our mapping (SIGBUS) and from writing to memory that it may only
//! read (memfd_create(2), fcntl(2) `F_ADD_SEALS`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate};

/// The peer's access to a shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerAccess {
    /// The peer reads and writes.
    Writes,
    /// The peer only reads; the kernel refuses to give it a writable mapping.
    Reads,
}

/// One shared mapping and the file behind it.
#[derive(Debug)]
pub struct SharedMemory {
    map: Arc<MmapRaw>,
    file: OwnedFd,
}

impl SharedMemory {
    /// Creates, sizes, maps and seals a memory of `size_bytes` for a peer.
    pub fn create(name: &str, size_bytes: usize, access: PeerAccess) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(name, flags)?;
        ftruncate(&file, size_bytes as u64)?;
        let map = MmapOptions::new().len(size_bytes).map_raw(&file)?;
        let mut seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        if access == PeerAccess::Reads {
            // Our own writable mapping exists already; the seal forbids all later ones.
            seals |= SealFlags::FUTURE_WRITE;
        }
        fcntl_add_seals(&file, seals)?;
        Ok(Self { map: Arc::new(map), file })
    }

    /// Maps a memory created by the daemon, on the peer's side.
    ///
    /// Returns `InvalidInput` for a file that can still shrink, and with `Reads` for a writable
    /// one.
    pub fn attach(file: OwnedFd, access: PeerAccess) -> io::Result<Self> {
        let seals = fcntl_get_seals(&file)?;
        let mut needed = SealFlags::SHRINK | SealFlags::GROW;
        if access == PeerAccess::Reads {
            needed |= SealFlags::FUTURE_WRITE;
        }
        if !seals.contains(needed) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the shared memory is not sealed",
            ));
        }
        let options = MmapOptions::new();
        let map = match access {
            PeerAccess::Writes => options.map_raw(&file)?,
            PeerAccess::Reads => options.map_raw_read_only(&file)?,
        };
        Ok(Self { map: Arc::new(map), file })
    }

    /// The same mapping again. ThreadSanitizer goes by addresses, so two mappings of one file would
    /// be different memory for it.
    #[cfg(test)]
    pub fn alias(&self) -> io::Result<Self> {
        Ok(Self { map: Arc::clone(&self.map), file: self.file.try_clone()? })
    }

    /// Size of the memory.
    #[allow(clippy::len_without_is_empty)] // a mapping is never empty
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Start of the mapping, for exporting it (the job's own view of its region).
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// The file to pass to the peer.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Return whether a descriptor refers to this memory.
    pub fn is_of(&self, file: &OwnedFd) -> io::Result<bool> {
        let (ours, theirs) = (rustix::fs::fstat(&self.file)?, rustix::fs::fstat(file)?);
        Ok((ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino))
    }

    /// Whether `offset..offset + length` lies inside.
    pub fn contains(&self, offset: u64, length: u64) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.len() as u64)
    }

    /// Copies bytes to private memory.
    ///
    /// # Panics
    /// If the range is not inside: ranges are validated when a submission is accepted.
    pub fn copy_out(&self, offset: u64, into: &mut [u8]) {
        assert!(self.contains(offset, into.len() as u64), "range was validated at submission");
        // SAFETY: the range lies inside the mapping (asserted), which lives as long as `self`;
        // `into` is private memory and can't overlap it. The peer may write at the same time, and so
        // may another session's thread if a job sends from where it receives: any mixture of bytes
        // is acceptable, and only this private copy is used afterwards.
        unsafe {
            let from = self.map.as_ptr().add(offset as usize);
            std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len());
        }
    }

    /// Appends a copy to private memory, without writing that memory twice.
    ///
    /// # Panics
    /// If the range is not inside: ranges are validated when a submission is accepted.
    pub fn append_out(&self, offset: u64, length: usize, out: &mut Vec<u8>) {
        assert!(self.contains(offset, length as u64), "range was validated at submission");
        out.reserve(length);
        // SAFETY: as in `copy_out`; `length` bytes are reserved after the vector's end and are all
        // written before its length includes them.
        unsafe {
            let from = self.map.as_ptr().add(offset as usize);
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr().add(out.len()), length);
            out.set_len(out.len() + length);
        }
    }

    /// Copies bytes from private memory.
    ///
    /// # Panics
    /// If the range is not inside: ranges are validated when a submission is accepted.
    pub fn copy_in(&self, offset: u64, from: &[u8]) {
        assert!(self.contains(offset, from.len() as u64), "range was validated at submission");
        // SAFETY: as in `copy_out`, in the other direction; callers hold a writable mapping.
        unsafe {
            let into = self.map.as_mut_ptr().add(offset as usize);
            std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len());
        }
    }

    /// A 64-bit index or counter at `offset`, a multiple of 8.
    ///
    /// # Panics
    /// If it is not inside or not aligned: offsets come from the layout, never from the peer.
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        assert!(
            self.contains(offset, 8) && offset.is_multiple_of(8),
            "offsets come from the layout"
        );
        // SAFETY: inside the mapping and aligned (asserted; mappings are page-aligned). Both sides
        // access this word only through atomics; atomic loads work on read-only mappings.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(offset as usize).cast()) }
    }

    /// A byte published atomically.
    ///
    /// # Panics
    /// If it is not inside: offsets come from the layout, never from the peer.
    pub fn byte(&self, offset: u64) -> &AtomicU8 {
        assert!(self.contains(offset, 1), "offsets come from the layout");
        // SAFETY: inside the mapping (asserted); accessed only through atomics.
        unsafe { AtomicU8::from_ptr(self.map.as_mut_ptr().add(offset as usize)) }
    }
}

impl AsRawFd for SharedMemory {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.file.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_may_not_map_for_writing_what_it_may_only_read() {
        let memory = SharedMemory::create("test", 4096, PeerAccess::Reads).unwrap();
        let job = memory.file().try_clone_to_owned().unwrap();
        assert!(MmapOptions::new().map_raw(&job).is_err());
        assert!(rustix::io::write(&job, b"x").is_err());
        let view = SharedMemory::attach(job, PeerAccess::Reads).unwrap();
        memory.copy_in(7, b"seen");
        let mut seen = [0; 4];
        view.copy_out(7, &mut seen);
        assert_eq!(&seen, b"seen");
    }

    #[test]
    fn job_may_not_resize_or_unseal() {
        let memory = SharedMemory::create("test", 8192, PeerAccess::Writes).unwrap();
        let job = memory.file().try_clone_to_owned().unwrap();
        assert!(ftruncate(&job, 4096).is_err());
        assert!(ftruncate(&job, 16384).is_err());
        assert!(fcntl_add_seals(&job, SealFlags::WRITE).is_err());
    }

    #[test]
    fn unsealed_memory_is_not_attached() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("test", flags).unwrap();
        ftruncate(&file, 4096).unwrap();
        assert!(SharedMemory::attach(file, PeerAccess::Writes).is_err());
        let writable = SharedMemory::create("test", 4096, PeerAccess::Writes).unwrap();
        let file = writable.file().try_clone_to_owned().unwrap();
        assert!(SharedMemory::attach(file, PeerAccess::Reads).is_err());
    }

    #[test]
    fn only_its_own_file_is_of_a_memory() {
        let memory = SharedMemory::create("test", 4096, PeerAccess::Writes).unwrap();
        let other = SharedMemory::create("test", 4096, PeerAccess::Writes).unwrap();
        assert!(memory.is_of(&memory.file().try_clone_to_owned().unwrap()).unwrap());
        assert!(!memory.is_of(&other.file().try_clone_to_owned().unwrap()).unwrap());
    }

    #[test]
    fn what_is_appended_is_what_is_read() {
        let memory = SharedMemory::create("test", 4096, PeerAccess::Writes).unwrap();
        memory.copy_in(4092, b"last");
        let mut bytes = b"the ".to_vec();
        memory.append_out(4092, 4, &mut bytes);
        memory.append_out(4096, 0, &mut bytes);
        assert_eq!(bytes, b"the last");
        let append = |offset, length| {
            let outcome =
                std::panic::catch_unwind(|| memory.append_out(offset, length, &mut vec![]));
            outcome.is_err()
        };
        assert!(append(4093, 4) && append(u64::MAX, 2) && append(0, usize::MAX));
    }

    #[test]
    fn ranges_near_the_end_of_the_number_space_are_outside() {
        let memory = SharedMemory::create("test", 4096, PeerAccess::Writes).unwrap();
        assert!(memory.contains(4096, 0) && memory.contains(0, 4096));
        assert!(!memory.contains(4096, 1) && !memory.contains(u64::MAX, 2));
    }
}
