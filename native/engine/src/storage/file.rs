//! Sector store in one sparse file: slot *n*, at byte 4160·*n*, holds sector *n*.
//!
//! Data and metadata of a sector go out in one write. That alone doesn't make them atomic across a
//! power cut: a sector that was being overwritten then may be torn, and reads of it are refused.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use sealane_proto::sector::BLOCK_BYTES;

use super::store::SectorStore;

/// A sparse file of 4160-byte slots.
#[derive(Debug)]
pub struct FileStore {
    file: File,
}

impl FileStore {
    /// Creates the file, which must not exist, readable by its owner only.
    pub fn create(path: &Path, sector_count: u64) -> io::Result<Self> {
        let bytes = sector_count.checked_mul(BLOCK_BYTES as u64);
        let bytes = bytes.ok_or_else(|| io::Error::other("volume too large for a file"))?;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
        file.set_len(bytes)?;
        Ok(Self { file })
    }
}

impl FileStore {
    /// Opens the file of an earlier process, which must have the right size.
    pub fn open(path: &Path, sector_count: u64) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if Some(file.metadata()?.len()) != sector_count.checked_mul(BLOCK_BYTES as u64) {
            return Err(io::Error::other("the file has another size than the volume"));
        }
        Ok(Self { file })
    }
}

impl SectorStore for FileStore {
    fn read(&self, lba: u64, blocks: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(blocks, lba * BLOCK_BYTES as u64)
    }

    fn write(&self, lba: u64, blocks: &[u8]) -> io::Result<()> {
        self.file.write_all_at(blocks, lba * BLOCK_BYTES as u64)
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}
