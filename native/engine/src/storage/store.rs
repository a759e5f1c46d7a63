//! Where a target keeps its sectors: runs of 4160-byte blocks, data and metadata together.

use std::fmt::Debug;
use std::io;

/// A store of 4160-byte blocks, addressed by LBA. Callers check bounds against the volume.
pub trait SectorStore: Debug + Send + Sync {
    /// Reads as many blocks as the buffer holds, from `lba`. Never-written blocks read as zeros.
    fn read(&self, lba: u64, blocks: &mut [u8]) -> io::Result<()>;
    /// Writes whole blocks at `lba`.
    fn write(&self, lba: u64, blocks: &[u8]) -> io::Result<()>;
    /// Makes completed writes durable, if the store is durable at all.
    fn flush(&self) -> io::Result<()>;
}
