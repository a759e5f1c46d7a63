//! Sealed blocks in a sparse file, laid out as on a drive with 64-byte metadata: block *n* at byte
//! 4160·*n*, data and metadata side by side, in place.
//!
//! It replaces such a drive where there is none, above all in tests that attack the drive's
//! contents. It lacks the drive's power-fail atomicity: a power cut may tear a block that is being
//! overwritten, which then fails to open. Every operation completes inside `submit`.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use super::super::store::{BLOCK_BYTES, BlockStore, StoreChannel, StoreCounters, StoreRequest};
use super::fresh_store::in_use;
use super::immediate::{Immediate, ImmediateChannel};
use super::pages::{lock, reserve};

/// Number of zero blocks written at a time.
const BATCH_BLOCKS: u64 = 64;

#[derive(Debug)]
struct Shared {
    file: File,
    block_count: u64,
    counters: StoreCounters,
}

/// A sparse file of 4160-byte blocks.
#[derive(Debug)]
pub struct InlineFileStore {
    shared: Arc<Shared>,
}

impl InlineFileStore {
    /// Creates the file, which must not exist yet, with access for its owner only.
    pub fn create(path: &Path, block_count: u64) -> io::Result<Self> {
        let bytes = file_bytes(block_count)?;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
        lock(&file)?;
        file.set_len(bytes)?;
        Ok(Self::over(file, block_count))
    }

    /// Opens an existing file, which must have the right size.
    pub fn open(path: &Path, block_count: u64) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        lock(&file)?;
        let (found, expected) = (file.metadata()?.len(), file_bytes(block_count)?);
        if found != expected {
            let detail = format!("{} has {found} bytes of {expected}", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        }
        Ok(Self::over(file, block_count))
    }

    /// Opens an existing file with all of its blocks.
    pub fn open_whole(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        lock(&file)?;
        let block_count = file.metadata()?.len() / BLOCK_BYTES as u64;
        Ok(Self::over(file, block_count))
    }

    fn over(file: File, block_count: u64) -> Self {
        let counters = StoreCounters::default();
        Self { shared: Arc::new(Shared { file, block_count, counters }) }
    }
}

fn file_bytes(block_count: u64) -> io::Result<u64> {
    let bytes = block_count.checked_mul(BLOCK_BYTES as u64);
    bytes.ok_or_else(|| io::Error::other("store too large for a file"))
}

impl Immediate for Shared {
    fn execute(&self, request: &mut StoreRequest) -> io::Result<()> {
        request.check(BLOCK_BYTES, self.block_count)?;
        match request {
            StoreRequest::Read { lba, buffer } => {
                self.file.read_exact_at(buffer, *lba * BLOCK_BYTES as u64)?;
                self.counters.read(buffer.len());
            }
            StoreRequest::Write { lba, buffer, durable } => {
                self.file.write_all_at(buffer, *lba * BLOCK_BYTES as u64)?;
                if *durable {
                    self.file.sync_data()?;
                }
                self.counters.written(buffer.len());
            }
            StoreRequest::Flush => {
                self.file.sync_data()?;
                self.counters.flushed();
            }
            StoreRequest::Deallocate { lba, blocks } => {
                let zeros = vec![0; BATCH_BLOCKS as usize * BLOCK_BYTES];
                for first in (0..*blocks).step_by(BATCH_BLOCKS as usize) {
                    let count = BATCH_BLOCKS.min(*blocks - first) as usize;
                    let part = zeros.get(..count * BLOCK_BYTES).unwrap_or_default();
                    self.file.write_all_at(part, (*lba + first) * BLOCK_BYTES as u64)?;
                }
                self.counters.deallocated();
            }
        }
        Ok(())
    }

    fn counters(&self) -> &StoreCounters {
        &self.counters
    }
}

impl BlockStore for InlineFileStore {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn block_count(&self) -> u64 {
        self.shared.block_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        Ok(Box::new(ImmediateChannel::new(&self.shared)))
    }

    fn reserve(&self, blocks: Range<u64>) -> io::Result<()> {
        reserve(&self.shared.file, file_bytes(blocks.start)?..file_bytes(blocks.end)?)
    }

    fn extend(&mut self, block_count: u64) -> io::Result<()> {
        let shared = Arc::get_mut(&mut self.shared).ok_or_else(in_use)?;
        if shared.block_count < block_count {
            shared.file.set_len(file_bytes(block_count)?)?;
            shared.file.sync_all()?;
            shared.block_count = block_count;
        }
        Ok(())
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.shared.counters.by_name()
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::super::scratch::Scratch;
    use super::*;

    #[test]
    fn behaves_as_a_store() {
        let scratch = Scratch::new();
        conformance::check(&InlineFileStore::create(&scratch.file(), 1000).unwrap());
    }

    #[test]
    fn opens_only_a_file_of_the_right_size() {
        let scratch = Scratch::new();
        InlineFileStore::create(&scratch.file(), 10).unwrap();
        assert!(InlineFileStore::create(&scratch.file(), 10).is_err(), "it exists");
        assert!(InlineFileStore::open(&scratch.file(), 11).is_err());
        InlineFileStore::open(&scratch.file(), 10).unwrap();
    }
}
