//! Freshness by a flat table: the current IV of every sector, in memory, lost with the process.
//!
//! A table entry is what makes a sector "written"; the stored bytes never say so themselves.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use sealane_proto::nvme::Reason;
use sealane_proto::sector::{BLOCK_BYTES, Block, IV_BYTES, block_iv, check_written, set_unwritten};

use super::store::SectorStore;

/// Sectors per lock and allocation; a run of one command crosses at most one boundary.
const REGION_SECTORS: u64 = 1024;

type Region = Vec<[u8; IV_BYTES]>;

/// No IV: the sector was never written. A lease never grants it.
const UNWRITTEN: [u8; IV_BYTES] = [0; IV_BYTES];

/// Why a run couldn't be read.
#[derive(Debug)]
pub enum ReadError {
    /// A sector isn't what it must be.
    Refused {
        /// Which check failed.
        reason: Reason,
        /// Which sector.
        lba: u64,
    },
    /// The store failed.
    Store(io::Error),
}

/// Current IVs of one volume.
#[derive(Debug)]
pub struct FlatTable {
    regions: Vec<RwLock<Region>>,
    written: AtomicU64,
}

impl FlatTable {
    /// A table in which no sector is written.
    #[must_use]
    pub fn new(sector_count: u64) -> Self {
        let count = sector_count.div_ceil(REGION_SECTORS);
        Self { regions: (0..count).map(|_| RwLock::default()).collect(), written: 0.into() }
    }

    /// Sectors that were written at least once.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    fn regions_of(&self, lba: u64, blocks: usize) -> &[RwLock<Region>] {
        let first = (lba / REGION_SECTORS) as usize;
        let last = ((lba + blocks as u64).saturating_sub(1) / REGION_SECTORS) as usize;
        self.regions.get(first..=last).unwrap_or_default()
    }

    /// Reads a run from `store` and refuses it unless each sector is the one written last.
    /// Never-written sectors are replaced by blocks that say so. Writes to the run wait.
    pub fn read(
        &self,
        store: &dyn SectorStore,
        lba: u64,
        blocks: &mut [u8],
    ) -> Result<(), ReadError> {
        let run = blocks.len() / BLOCK_BYTES;
        let regions: Vec<_> = self
            .regions_of(lba, run)
            .iter()
            .map(|region| region.read().unwrap_or_else(PoisonError::into_inner))
            .collect();
        store.read(lba, blocks).map_err(ReadError::Store)?;
        let first = lba / REGION_SECTORS;
        for (lba, block) in (lba..).zip(blocks.as_chunks_mut::<BLOCK_BYTES>().0) {
            let region = regions.get((lba / REGION_SECTORS - first) as usize);
            let current = region
                .and_then(|region| region.get((lba % REGION_SECTORS) as usize))
                .copied()
                .unwrap_or(UNWRITTEN);
            check(block, &current).map_err(|reason| ReadError::Refused { reason, lba })?;
        }
        Ok(())
    }

    /// Writes a run to `store`, then makes its IVs the current ones. Other users of the run wait.
    /// After a store error the old IVs stay current, so a half-written sector is refused.
    pub fn write(&self, store: &dyn SectorStore, lba: u64, blocks: &[u8]) -> io::Result<()> {
        let run = blocks.len() / BLOCK_BYTES;
        // Locks are taken in ascending order everywhere, so two runs can't wait for each other.
        let mut regions: Vec<_> = self
            .regions_of(lba, run)
            .iter()
            .map(|region| region.write().unwrap_or_else(PoisonError::into_inner))
            .collect();
        store.write(lba, blocks)?;
        let first = lba / REGION_SECTORS;
        for (lba, block) in (lba..).zip(blocks.as_chunks::<BLOCK_BYTES>().0) {
            let Some(region) = regions.get_mut((lba / REGION_SECTORS - first) as usize) else {
                continue;
            };
            if region.is_empty() {
                region.resize(REGION_SECTORS as usize, UNWRITTEN);
            }
            if let Some(current) = region.get_mut((lba % REGION_SECTORS) as usize) {
                if *current == UNWRITTEN {
                    self.written.fetch_add(1, Ordering::Relaxed);
                }
                *current = block_iv(block);
            }
        }
        Ok(())
    }
}

fn check(block: &mut Block, current: &[u8; IV_BYTES]) -> Result<(), Reason> {
    if *current == UNWRITTEN {
        set_unwritten(block);
        return Ok(());
    }
    if block_iv(block) != *current {
        return Err(Reason::SectorStale);
    }
    // Also keeps a stored "unwritten" flag from turning a written sector into zeros.
    check_written(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::memory::MemoryStore;
    use sealane_proto::sector::{FLAG_UNWRITTEN, field, is_unwritten, metadata_mut};

    fn block(iv: u8) -> Vec<u8> {
        let mut block = [7; BLOCK_BYTES];
        metadata_mut(&mut block, (0, 64)).fill(0);
        metadata_mut(&mut block, field::IV).fill(iv);
        metadata_mut(&mut block, field::VERSION).fill(1);
        block.to_vec()
    }

    fn refusal(table: &FlatTable, store: &MemoryStore, lba: u64) -> Option<(Reason, u64)> {
        let mut out = vec![0; BLOCK_BYTES];
        match table.read(store, lba, &mut out) {
            Err(ReadError::Refused { reason, lba }) => Some((reason, lba)),
            _ => None,
        }
    }

    fn world() -> (FlatTable, MemoryStore) {
        let (table, store) = (FlatTable::new(3000), MemoryStore::new(3000));
        table.write(&store, 1023, &[block(1), block(2)].concat()).unwrap();
        (table, store)
    }

    #[test]
    fn current_sectors_read_back_across_regions_and_others_as_unwritten() {
        let (table, store) = world();
        let mut out = vec![0; 3 * BLOCK_BYTES];
        table.read(&store, 1023, &mut out).unwrap();
        let blocks = out.as_chunks::<BLOCK_BYTES>().0;
        assert_eq!((blocks[0].to_vec(), blocks[1].to_vec()), (block(1), block(2)));
        assert!(is_unwritten(&blocks[2]));
        assert_eq!(table.written(), 2);
    }

    #[test]
    fn older_and_swapped_sectors_are_stale() {
        let (table, store) = world();
        table.write(&store, 1023, &block(3)).unwrap();
        store.write(1023, &block(1)).unwrap();
        assert_eq!(refusal(&table, &store, 1023), Some((Reason::SectorStale, 1023)));
        store.write(1023, &block(2)).unwrap();
        assert_eq!(refusal(&table, &store, 1023), Some((Reason::SectorStale, 1023)));
        store.write(1023, &block(3)).unwrap();
        assert_eq!(refusal(&table, &store, 1023), None);
    }

    #[test]
    fn a_stored_sector_cannot_say_that_it_is_unwritten() {
        let (table, store) = world();
        let mut forged: [u8; BLOCK_BYTES] = block(1).try_into().unwrap();
        metadata_mut(&mut forged, field::FLAGS).fill(FLAG_UNWRITTEN);
        store.write(1023, &forged).unwrap();
        assert_eq!(refusal(&table, &store, 1023), Some((Reason::SectorFormat, 1023)));
        store.write(1023, &[0; BLOCK_BYTES]).unwrap();
        assert_eq!(refusal(&table, &store, 1023), Some((Reason::SectorStale, 1023)));
    }

    #[test]
    fn a_ghost_sector_in_an_unwritten_place_is_not_shown() {
        let (table, store) = world();
        store.write(5, &block(9)).unwrap();
        let mut out = vec![1; BLOCK_BYTES];
        table.read(&store, 5, &mut out).unwrap();
        assert!(is_unwritten(out.as_slice().try_into().unwrap()));
    }
}
