//! Counts device I/O per random write of one block, in pages, without timing.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::freshness::leaf::LeafFormat;

use super::super::pages::{BlockFile, Page};
use super::geometry::Geometry;
use super::keys::{Authority, StoreKeys};
use super::map::Map;
use super::placed::Placed;
use super::superblock::Superblock;
use super::test_blocks::block;

/// Writes between two flushes.
const FLUSH_WRITES: u64 = 32;

/// A device that counts pages read and written; a sync counts as one.
#[derive(Debug, Default)]
pub struct Counted {
    pages: Mutex<HashMap<u64, Page>>,
    ios: Mutex<u64>,
}

impl Counted {
    fn count(&self, ios: u64) {
        *self.ios.lock().unwrap_or_else(PoisonError::into_inner) += ios;
    }

    fn take_ios(&self) -> u64 {
        std::mem::take(&mut self.ios.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl BlockFile for Counted {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        self.count(pages.len() as u64);
        let held = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        for (number, page) in (page..).zip(pages) {
            *page = held.get(&number).copied().unwrap_or(Page::ZERO);
        }
        Ok(())
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.count(pages.len() as u64);
        let mut held = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        held.extend((page..).zip(pages.iter().copied()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.count(1);
        Ok(())
    }
}

/// Overwrites random blocks of a full store the way the journal would. Returns I/Os per write.
fn ios_per_write(map: &Map<Placed>, device: &Counted, writes: u64, random: &mut ChaCha8Rng) -> f64 {
    device.take_ios();
    for number in 0..writes {
        let lba = random.next_u64() % map.geometry().block_count;
        write(map, device, lba, number + 2);
        if number % FLUSH_WRITES == 0 {
            map.flush().expect("flush");
            if map.is_merging() {
                map.merge_step().expect("step");
            } else if map.is_merge_due() {
                map.begin_merge().expect("merge");
            }
        }
    }
    device.take_ios() as f64 / writes as f64
}

/// Writes a block. Its data is counted but not stored.
fn write(map: &Map<Placed>, device: &Counted, lba: u64, version: u64) {
    let block = block(lba, version);
    let entries = loop {
        match map.place(&block).expect("place") {
            Some(entries) => break entries,
            None => map.make_room().expect("room"),
        }
    };
    device.count(1);
    map.commit(lba, &entries).expect("commit");
}

#[test]
fn a_random_write_costs_at_most_1_2_device_ios_in_steady_state() {
    let geometry = Geometry::placed(40_000, Placed::ENTRIES_PER_LEAF);
    let superblock = Superblock { uuid: [1; 16], seed: [2; 32], geometry };
    let device = Arc::new(Counted::default());
    let file = Arc::clone(&device) as Arc<dyn BlockFile>;
    let map = Map::create(Arc::clone(&file), &superblock, &Authority::Device, None).expect("store");
    for lba in 0..superblock.geometry.block_count {
        write(&map, &device, lba, 1);
    }
    map.merge().expect("merge");
    drop(map);
    // After reopening, no leaf page is cached, so each is read at its first merge.
    let keys = StoreKeys::new(&superblock.uuid, &superblock.seed, &Authority::Device);
    let map = Map::open(file, &superblock, keys, None).expect("store");
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let cold = ios_per_write(&map, &device, 20_000, &mut random);
    let steady = ios_per_write(&map, &device, 60_000, &mut random);
    println!("cold {cold:.3}, steady {steady:.3} device I/Os per random write");
    assert!(steady <= 1.2, "{steady} device I/Os per random write");
    assert!(cold <= 1.25, "{cold} device I/Os per random write, leaf pages read");
}
