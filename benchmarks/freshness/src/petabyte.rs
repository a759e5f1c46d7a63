//! Deallocates a petabyte in the engine: a store in place of a quarter of a billion sets, with some written
//! blocks spread over it.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use sealane_engine::storage::stores::fresh::geometry::Geometry;
use sealane_engine::storage::stores::fresh::keys::Authority;
use sealane_engine::storage::stores::fresh::map::Map;
use sealane_engine::storage::stores::fresh::superblock::Superblock;
use sealane_engine::storage::stores::pages::{BlockFile, Page};
use sealane_proto::freshness::leaf::{Ivs, LeafFormat};
use sealane_proto::sector::{BLOCK_BYTES, Block, FORMAT_VERSION, field, metadata_mut};

use crate::sample::{Random, print};

const BLOCKS: u64 = 1_000_000_000_000_000 / 4096;
const WRITTEN: u64 = 20_000;

/// Pages kept in memory.
#[derive(Debug, Default)]
struct Pages(Mutex<HashMap<u64, Page>>);

impl BlockFile for Pages {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        let kept = self.0.lock().expect("pages");
        for (number, page) in (page..).zip(pages) {
            *page = kept.get(&number).copied().unwrap_or(Page::ZERO);
        }
        Ok(())
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.0.lock().expect("pages").extend((page..).zip(pages.iter().copied()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Measures the time until the host has its answer, until a flush, and until the change is merged.
pub fn run(rounds: u64) {
    let geometry = Geometry::in_place(BLOCKS, Ivs::ENTRIES_PER_LEAF);
    let superblock = Superblock { uuid: [1; 16], seed: [2; 32], geometry };
    let file = Arc::<Pages>::default();
    let map = Map::<Ivs>::create(file, &superblock, &Authority::Device, None).expect("store");
    let mut random = Random(7);
    for round in 0..rounds {
        for number in 1..=WRITTEN {
            let mut block: Block = [0; BLOCK_BYTES];
            let iv = round << 32 | number;
            metadata_mut(&mut block, field::IV)[..8].copy_from_slice(&iv.to_le_bytes());
            metadata_mut(&mut block, field::VERSION).fill(FORMAT_VERSION);
            let lba = random.below(BLOCKS);
            let ivs = map.intend(lba, &block).expect("intend").expect("room");
            map.announce().expect("announce");
            map.arrived(lba, &ivs).expect("arrived");
        }
        map.merge().expect("merge");
        let begun = Instant::now();
        assert!(map.deallocate(0, BLOCKS).expect("deallocate"), "there is room");
        let answered = begun.elapsed();
        map.flush().expect("flush");
        let flushed = begun.elapsed();
        map.merge().expect("merge");
        let merged = begun.elapsed();
        let figures = [("answered", answered), ("flushed", flushed), ("merged", merged)];
        print("petabyte", &figures.map(|(name, time)| (name, time.as_secs_f64())));
    }
}
