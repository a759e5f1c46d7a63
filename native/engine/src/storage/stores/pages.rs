//! Pages of 4096 bytes, aligned for direct I/O, and the file or block device that holds them.

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{
    FallocateFlags, FlockOperation, OFlags, SeekFrom, StatVfs, fallocate, flock, fstatvfs, seek,
};
use rustix::io::Errno;
use sealane_proto::link::Nanos;
use sealane_proto::sector::METADATA_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::device::check_room;
use crate::clock;

/// Bytes of a page: the data of one block, and the unit of all I/O of stores.
pub const PAGE_BYTES: usize = 4096;
/// Pages of the largest read or write: 1 MiB.
pub const IO_PAGES_MAX: usize = 256;

/// How long an opening waits for I/O of the previous one to end.
const LOCK_WAIT: Nanos = 5_000_000_000;
/// How often it tries.
const LOCK_LOOK: Duration = Duration::from_millis(10);

/// One page, at an address that direct I/O accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
pub struct Page(pub [u8; PAGE_BYTES]);

impl Page {
    /// A page of zeros.
    pub const ZERO: Self = Self([0; PAGE_BYTES]);
}

/// Where a store keeps its map and log. Writes may reach the medium in any order, partially, or not
/// at all, until `sync` has returned.
pub trait BlockFile: Debug + Send + Sync {
    /// Reads whole pages from page number `page`.
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()>;
    /// Writes whole pages at page number `page`.
    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()>;
    /// Makes every completed write durable.
    fn sync(&self) -> io::Result<()>;
    /// Writes whole pages at page number `page`, durable on return. Earlier writes need not be.
    fn write_durably(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.write(page, pages)?;
        self.sync()
    }
    /// Reads one page from each of the ascending places, as many at a time as the device accepts.
    fn read_each(&self, places: &[u64], pages: &mut [Page]) -> io::Result<()> {
        let mut rest = pages;
        for run in runs(places) {
            let (pages, others) = rest.split_at_mut(run.len());
            self.read(run[0], pages)?;
            rest = others;
        }
        Ok(())
    }
    /// Writes one page to each of the ascending places, as many at a time as the device accepts.
    fn write_each(&self, places: &[u64], pages: &[Page]) -> io::Result<()> {
        let mut rest = pages;
        for run in runs(places) {
            let (pages, others) = rest.split_at(run.len());
            self.write(run[0], pages)?;
            rest = others;
        }
        Ok(())
    }
    /// Makes the device reserve room for these pages, so that writing them can't find it full.
    /// `StorageFull` if there is no room. Does nothing if the pages have their room already, or if
    /// the device can't reserve any.
    fn reserve(&self, _pages: Range<u64>) -> io::Result<()> {
        Ok(())
    }
    /// Reads the metadata of a page, on devices that have metadata.
    fn read_metadata(&self, page: u64) -> io::Result<[u8; METADATA_BYTES]> {
        let detail = format!("page {page} has no metadata");
        Err(io::Error::new(io::ErrorKind::Unsupported, detail))
    }
}

/// Splits ascending places into runs of neighbours, each small enough for one operation.
pub fn runs(places: &[u64]) -> impl Iterator<Item = &[u64]> {
    let together = places.chunk_by(|left, right| left + 1 == *right);
    together.flat_map(|run| run.chunks(IO_PAGES_MAX))
}

/// A file or block device, opened with direct I/O if its file system supports that.
#[derive(Debug)]
pub struct DeviceFile {
    file: File,
    page_count: AtomicU64,
}

impl DeviceFile {
    /// Creates a sparse file of `page_count` pages, which must not exist yet, with access for its
    /// owner only. A block device keeps its contents and must be large enough.
    pub fn create(path: &Path, page_count: u64) -> io::Result<Self> {
        if path.metadata().is_ok_and(|found| found.file_type().is_block_device()) {
            return Self::open(path, page_count);
        }
        let bytes = file_bytes(page_count)?;
        let file = open_direct(path, OpenOptions::new().create_new(true).mode(0o600))?;
        lock(&file)?;
        file.set_len(bytes)?;
        file.sync_all()?;
        // The name is durable once the directory is.
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()?;
        Ok(Self { file, page_count: page_count.into() })
    }

    /// Opens an existing file or device, which must have at least `page_count` pages.
    pub fn open(path: &Path, page_count: u64) -> io::Result<Self> {
        let file = open_direct(path, &mut OpenOptions::new())?;
        lock(&file)?;
        let found = seek(&file, SeekFrom::End(0))? / PAGE_BYTES as u64;
        if found < page_count {
            let detail = format!("{} has {found} pages of {page_count}", path.display());
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, detail));
        }
        Ok(Self { file, page_count: found.into() })
    }

    /// Number of pages.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.page_count.load(Ordering::Relaxed)
    }

    /// Extends a file to at least `page_count` pages; a block device must have them already.
    pub fn extend(&self, page_count: u64) -> io::Result<()> {
        if self.file.metadata()?.is_file() && page_count > self.page_count() {
            self.file.set_len(file_bytes(page_count)?)?;
            self.file.sync_all()?;
        }
        let found = seek(&self.file, SeekFrom::End(0))? / PAGE_BYTES as u64;
        self.page_count.store(found, Ordering::Relaxed);
        check_room(found, page_count)
    }
}

fn file_bytes(page_count: u64) -> io::Result<u64> {
    let bytes = page_count.checked_mul(PAGE_BYTES as u64);
    bytes.ok_or_else(|| io::Error::other("store too large for a file"))
}

/// Locks the file for this opening. The lock lasts until all I/O on the file has ended, which can
/// be after the end of the process that started it. I/O of a killed predecessor ends within
/// seconds.
pub fn lock(file: &File) -> io::Result<()> {
    let until = clock::now() + LOCK_WAIT;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if clock::now() < until => {
                std::thread::sleep(LOCK_LOOK);
            }
            Err(Errno::WOULDBLOCK) => {
                let detail = "another process has the store open";
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, detail));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Opens for reading and writing with O_DIRECT, or without it if the file system doesn't support it
/// (open(2): EINVAL).
fn open_direct(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let options = options.read(true).write(true);
    let direct = OFlags::DIRECT.bits().cast_signed();
    match options.custom_flags(direct).open(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            // The failed attempt may have created the file: it is ours, and empty.
            options.custom_flags(0).create_new(false).create(true).open(path)
        }
        opened => opened,
    }
}

impl AsFd for DeviceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl BlockFile for DeviceFile {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        self.file.read_exact_at(pages.as_mut_bytes(), page * PAGE_BYTES as u64)
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.file.write_all_at(pages.as_bytes(), page * PAGE_BYTES as u64)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn reserve(&self, pages: Range<u64>) -> io::Result<()> {
        reserve(&self.file, pages.start * PAGE_BYTES as u64..pages.end * PAGE_BYTES as u64)
    }
}

/// Reserves room for these bytes of a file. Does nothing for a device, or if the file system
/// doesn't support it. `StorageFull` if there isn't enough room; a failure leaves the file as long
/// as it was, without what a call got that failed halfway.
pub fn reserve(file: &File, bytes: Range<u64>) -> io::Result<()> {
    reserve_by(file, bytes, |start, length| fallocate(file, FallocateFlags::empty(), start, length))
}

pub(super) fn reserve_by(
    file: &File,
    bytes: Range<u64>,
    allocate: impl FnOnce(u64, u64) -> Result<(), Errno>,
) -> io::Result<()> {
    let metadata = file.metadata()?;
    if bytes.is_empty() || !metadata.is_file() {
        return Ok(());
    }
    let needed = bytes.end.saturating_sub(metadata.blocks() * 512).min(bytes.end - bytes.start);
    check_free(&fstatvfs(file)?, needed)?;
    match allocate(bytes.start, bytes.end - bytes.start) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        Err(error) => {
            // Also releases blocks behind the end of the file.
            file.set_len(metadata.len())?;
            Err(error.into())
        }
    }
}

/// Fails with `StorageFull` if a file system has less free space than is needed. One that counts no
/// blocks (network file systems, FUSE) doesn't know.
pub(super) fn check_free(system: &StatVfs, needed: u64) -> io::Result<()> {
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    if system.f_blocks != 0 && needed > free {
        let detail = format!("no space: {needed} bytes more are needed, {free} are free");
        return Err(io::Error::new(io::ErrorKind::StorageFull, detail));
    }
    Ok(())
}

/// Cryptographically secure random bytes.
pub fn random<const BYTES: usize>() -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    let length = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    if length == BYTES { Ok(bytes) } else { Err(io::Error::other("too few random bytes")) }
}
