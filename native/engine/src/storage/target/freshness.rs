//! Freshness by a flat table: the current IV of every sector, in memory, rebuilt from the store when
//! the process starts.
//!
//! A table entry is what makes a sector "written"; the stored bytes never say so themselves while
//! the process lives. Callers hold the range lock of what they look at or change, from before the
//! store's operation until the table knows of it: the locks in here only keep memory whole.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use sealane_proto::nvme::Reason;
use sealane_proto::sector::{BLOCK_BYTES, Block, IV_BYTES, block_iv, check_written, set_unwritten};

/// Sectors per lock and allocation.
const REGION_SECTORS: u64 = 1024;

/// The initialization vector of a sector.
pub type Iv = [u8; IV_BYTES];

/// No IV: the sector was never written, or deallocated. A lease never grants it.
pub const UNWRITTEN: Iv = [0; IV_BYTES];

/// Sectors from `lba` on and the region they are in; it ends where the region or the run does.
struct Part {
    region: usize,
    start: usize,
    end: usize,
}

/// Current IVs of one volume.
#[derive(Debug)]
pub struct FlatTable {
    regions: Vec<RwLock<Vec<Iv>>>,
    written: AtomicU64,
}

fn parts(lba: u64, sectors: u64) -> impl Iterator<Item = Part> {
    let (mut next, end) = (lba, lba.saturating_add(sectors));
    std::iter::from_fn(move || {
        if next >= end {
            return None;
        }
        let region = next / REGION_SECTORS;
        let first = region * REGION_SECTORS;
        let stop = end.min(first + REGION_SECTORS);
        let (start, end) = ((next - first) as usize, (stop - first) as usize);
        next = stop;
        Some(Part { region: region as usize, start, end })
    })
}

impl FlatTable {
    /// A table in which no sector is written.
    #[must_use]
    pub fn new(sector_count: u64) -> Self {
        let count = sector_count.div_ceil(REGION_SECTORS);
        Self { regions: (0..count).map(|_| RwLock::default()).collect(), written: 0.into() }
    }

    /// Sectors that are written.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Checks a run that came from the store: an error tells the first sector that isn't the one
    /// written last. Unwritten sectors are replaced by blocks that say so.
    pub fn check(&self, lba: u64, blocks: &mut [u8]) -> Result<(), (Reason, u64)> {
        let mut blocks = blocks.as_chunks_mut::<BLOCK_BYTES>().0;
        let mut lba = lba;
        for part in parts(lba, blocks.len() as u64) {
            let region = self.regions.get(part.region);
            let region = region.map(|region| region.read().unwrap_or_else(PoisonError::into_inner));
            let (run, rest) = blocks.split_at_mut(part.end - part.start);
            for (index, block) in (part.start..).zip(run) {
                let current = region.as_ref().and_then(|region| region.get(index));
                check(block, current.unwrap_or(&UNWRITTEN)).map_err(|reason| (reason, lba))?;
                lba += 1;
            }
            blocks = rest;
        }
        Ok(())
    }

    /// Whether the current IVs from `lba` on are these ([`UNWRITTEN`]: none).
    #[must_use]
    pub fn matches(&self, lba: u64, expected: &[Iv]) -> bool {
        let mut expected = expected;
        parts(lba, expected.len() as u64).all(|part| {
            let (run, rest) = expected.split_at(part.end - part.start);
            expected = rest;
            let Some(region) = self.regions.get(part.region) else { return false };
            let region = region.read().unwrap_or_else(PoisonError::into_inner);
            (part.start..).zip(run).all(|(index, iv)| region.get(index).unwrap_or(&UNWRITTEN) == iv)
        })
    }

    /// Makes the IVs of a run that was stored the current ones. After a failed write the old ones
    /// stay, so that a sector that was half changed is refused.
    pub fn stored(&self, lba: u64, blocks: &[u8]) {
        let mut blocks = blocks.as_chunks::<BLOCK_BYTES>().0;
        for part in parts(lba, blocks.len() as u64) {
            let (run, rest) = blocks.split_at(part.end - part.start);
            self.set(&part, run.iter().map(block_iv));
            blocks = rest;
        }
    }

    /// Notes the IV of one sector, found in the store at start-up.
    pub fn found(&self, lba: u64, iv: Iv) {
        parts(lba, 1).for_each(|part| self.set(&part, std::iter::once(iv)));
    }

    /// Makes sectors unwritten.
    pub fn forget(&self, lba: u64, sectors: u64) {
        for part in parts(lba, sectors) {
            let Some(region) = self.regions.get(part.region) else { return };
            let mut region = region.write().unwrap_or_else(PoisonError::into_inner);
            let Some(run) = region.get_mut(part.start..part.end) else { continue };
            let gone = run.iter().filter(|iv| **iv != UNWRITTEN).count();
            self.written.fetch_sub(gone as u64, Ordering::Relaxed);
            if part.end - part.start == REGION_SECTORS as usize {
                *region = Vec::new();
            } else {
                run.fill(UNWRITTEN);
            }
        }
    }

    fn set(&self, part: &Part, ivs: impl Iterator<Item = Iv>) {
        let Some(region) = self.regions.get(part.region) else { return };
        let mut region = region.write().unwrap_or_else(PoisonError::into_inner);
        if region.is_empty() {
            region.resize(REGION_SECTORS as usize, UNWRITTEN);
        }
        let run = region.get_mut(part.start..part.end).unwrap_or_default();
        for (current, iv) in run.iter_mut().zip(ivs) {
            if *current == UNWRITTEN && iv != UNWRITTEN {
                self.written.fetch_add(1, Ordering::Relaxed);
            }
            *current = iv;
        }
    }
}

fn check(block: &mut Block, current: &Iv) -> Result<(), Reason> {
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
    use sealane_proto::sector::{FLAG_UNWRITTEN, field, is_unwritten, metadata_mut};

    fn block(iv: u8) -> Vec<u8> {
        let mut block = [7; BLOCK_BYTES];
        metadata_mut(&mut block, (0, 64)).fill(0);
        metadata_mut(&mut block, field::IV).fill(iv);
        metadata_mut(&mut block, field::VERSION).fill(1);
        block.to_vec()
    }

    fn checked(table: &FlatTable, lba: u64, stored: &[u8]) -> Result<(), (Reason, u64)> {
        table.check(lba, &mut stored.to_vec())
    }

    /// Sectors 1023 and 1024, on both sides of a region's border, hold the IVs 1 and 2.
    fn world() -> FlatTable {
        let table = FlatTable::new(3000);
        table.stored(1023, &[block(1), block(2)].concat());
        table
    }

    #[test]
    fn current_sectors_pass_across_regions_and_others_become_unwritten() {
        let table = world();
        let mut run = [block(1), block(2), block(9)].concat();
        table.check(1023, &mut run).unwrap();
        let blocks = run.as_chunks::<BLOCK_BYTES>().0;
        assert_eq!((blocks[0].to_vec(), blocks[1].to_vec()), (block(1), block(2)));
        assert!(is_unwritten(&blocks[2]), "a ghost sector in an unwritten place");
        assert_eq!(table.written(), 2);
    }

    #[test]
    fn older_and_swapped_sectors_are_stale() {
        let table = world();
        table.stored(1023, &block(3));
        assert_eq!(checked(&table, 1023, &block(1)), Err((Reason::SectorStale, 1023)));
        let run = [block(3), block(3)].concat();
        assert_eq!(checked(&table, 1023, &run), Err((Reason::SectorStale, 1024)));
        assert_eq!(checked(&table, 1023, &block(3)), Ok(()));
        assert_eq!(table.written(), 2);
    }

    #[test]
    fn a_stored_sector_cannot_say_that_it_is_unwritten() {
        let table = world();
        let mut forged: [u8; BLOCK_BYTES] = block(1).try_into().unwrap();
        metadata_mut(&mut forged, field::FLAGS).fill(FLAG_UNWRITTEN);
        assert_eq!(checked(&table, 1023, &forged), Err((Reason::SectorFormat, 1023)));
        assert_eq!(checked(&table, 1023, &[0; BLOCK_BYTES]), Err((Reason::SectorStale, 1023)));
    }

    #[test]
    fn forgotten_sectors_are_unwritten_and_others_are_not() {
        let table = FlatTable::new(5000);
        for lba in [0, 1023, 1024, 2047, 2048, 2049] {
            table.found(lba, [lba as u8 | 1; IV_BYTES]);
        }
        assert_eq!(table.written(), 6);
        // The end of one region, all of the next, the beginning of a third.
        table.forget(1, 2048);
        assert_eq!(table.written(), 2);
        assert!(table.matches(0, &[[1; IV_BYTES]]) && table.matches(2049, &[[1; IV_BYTES]]));
        assert!(table.matches(1, &vec![UNWRITTEN; 2048]));
        table.forget(0, 5000);
        assert_eq!(table.written(), 0);
    }

    #[test]
    fn a_run_matches_only_if_each_of_its_ivs_does() {
        let table = world();
        let (first, second) = ([1; IV_BYTES], [2; IV_BYTES]);
        assert!(table.matches(1022, &[UNWRITTEN, first, second, UNWRITTEN]));
        assert!(!table.matches(1023, &[first, first]));
        assert!(!table.matches(1023, &[UNWRITTEN]));
        assert!(!table.matches(2999, &[first]));
    }
}
