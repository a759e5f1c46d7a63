//! Sector store in memory, for tests and benchmarks. Lost with the process.

use std::io;
use std::sync::{PoisonError, RwLock};

use sealane_proto::sector::BLOCK_BYTES;

use super::store::SectorStore;

/// Sectors per region; a region is allocated by its first write.
const REGION_SECTORS: u64 = 256;

/// Blocks in memory, allocated 1 MiB at a time.
#[derive(Debug)]
pub struct MemoryStore {
    regions: Vec<RwLock<Vec<u8>>>,
}

impl MemoryStore {
    /// An empty store of `sector_count` sectors.
    #[must_use]
    pub fn new(sector_count: u64) -> Self {
        let count = sector_count.div_ceil(REGION_SECTORS);
        Self { regions: (0..count).map(|_| RwLock::default()).collect() }
    }

    fn region(&self, lba: u64) -> io::Result<(&RwLock<Vec<u8>>, usize)> {
        let region = self.regions.get((lba / REGION_SECTORS) as usize);
        let region = region.ok_or_else(|| io::Error::other("sector beyond the store"))?;
        Ok((region, (lba % REGION_SECTORS) as usize * BLOCK_BYTES))
    }
}

impl SectorStore for MemoryStore {
    fn read(&self, lba: u64, blocks: &mut [u8]) -> io::Result<()> {
        for (lba, block) in (lba..).zip(blocks.chunks_exact_mut(BLOCK_BYTES)) {
            let (region, start) = self.region(lba)?;
            let region = region.read().unwrap_or_else(PoisonError::into_inner);
            match region.get(start..start + BLOCK_BYTES) {
                Some(stored) => block.copy_from_slice(stored),
                None => block.fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, lba: u64, blocks: &[u8]) -> io::Result<()> {
        for (lba, block) in (lba..).zip(blocks.chunks_exact(BLOCK_BYTES)) {
            let (region, start) = self.region(lba)?;
            let mut region = region.write().unwrap_or_else(PoisonError::into_inner);
            if region.is_empty() {
                region.resize(REGION_SECTORS as usize * BLOCK_BYTES, 0);
            }
            if let Some(stored) = region.get_mut(start..start + BLOCK_BYTES) {
                stored.copy_from_slice(block);
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}
