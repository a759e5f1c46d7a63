//! Compares leaves with a simple model: ranges made void in place, in trees with several pages of
//! nodes per region. Checks that the root doesn't depend on the number of hashing threads.

use std::collections::BTreeMap;
use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::aead::Secret;
use sealane_proto::freshness::leaf::{Iv, Ivs, LEAF_BYTES, LeafFormat};
use sealane_proto::freshness::node::NodeKey;
use sealane_proto::sector::{BLOCK_BYTES, Block, FORMAT_VERSION, field, metadata_mut};

use super::super::pages::BlockFile;
use super::checkpoint::REGIONS;
use super::cost_tests::Counted;
use super::counters::Counters;
use super::geometry::Geometry;
use super::keys::{Authority, StoreKeys};
use super::leaves::{Leaves, Written};
use super::map::Map;
use super::nodes::{Held, NODES_PER_PAGE};
use super::superblock::Superblock;

/// Number of blocks that one page of nodes covers.
const PAGE_BLOCKS: u64 = NODES_PER_PAGE * Ivs::ENTRIES_PER_LEAF;
/// Three pages of nodes per region, except in the last.
const BLOCKS: u64 = PAGE_BLOCKS * (REGIONS as u64 * 3 - 2) - 1000;

fn superblock() -> Superblock {
    let geometry = Geometry::in_place(BLOCKS, Ivs::ENTRIES_PER_LEAF);
    Superblock { uuid: [1; 16], seed: [2; 32], geometry }
}

fn open(device: &Arc<Counted>) -> Map<Ivs> {
    let superblock = superblock();
    let keys = StoreKeys::new(&superblock.uuid, &superblock.seed, &Authority::Device);
    Map::open(Arc::clone(device) as Arc<dyn BlockFile>, &superblock, keys, None).expect("open")
}

fn write(map: &Map<Ivs>, written: &mut BTreeMap<u64, Iv>, lba: u64, number: u64) {
    let mut block: Block = [0; BLOCK_BYTES];
    metadata_mut(&mut block, field::IV)[..8].copy_from_slice(&number.to_le_bytes());
    metadata_mut(&mut block, field::VERSION).fill(FORMAT_VERSION);
    let ivs = map.intend(lba, &block).expect("intend").expect("room");
    map.announce().expect("announce");
    map.arrived(lba, &ivs).expect("arrived");
    written.insert(lba, ivs[0]);
}

fn make_void(map: &Map<Ivs>, written: &mut BTreeMap<u64, Iv>, start: u64, end: u64) {
    assert!(map.deallocate(start, end - start).expect("deallocate"));
    written.retain(|lba, _| !(start..end).contains(lba));
}

fn statistic(map: &Map<Ivs>, wanted: &str) -> u64 {
    let statistics = map.statistics();
    statistics.iter().find(|(name, _)| *name == wanted).expect("a statistic").1
}

/// Checks the entries of all sets ever written, and the number of written blocks.
fn check(map: &Map<Ivs>, written: &BTreeMap<u64, Iv>, touched: &[u64]) {
    for lba in touched {
        let set = lba / Ivs::ENTRIES_PER_LEAF;
        let start = set * Ivs::ENTRIES_PER_LEAF;
        for (lba, entry) in (start..).zip(map.set_entries(set).expect("set")) {
            assert_eq!(entry, written.get(&lba).copied(), "block {lba}");
        }
    }
    assert_eq!(statistic(map, "sectors_written"), written.len() as u64);
}

#[test]
fn ranges_of_any_size_become_void_in_place_without_reading_what_they_cover() {
    let device = Arc::new(Counted::default());
    let file = Arc::clone(&device) as Arc<dyn BlockFile>;
    let map = Map::<Ivs>::create(file, &superblock(), &Authority::Device, None).expect("store");
    let (mut map, mut written, mut touched) = (map, BTreeMap::new(), Vec::new());
    let mut random = ChaCha8Rng::seed_from_u64(3);
    for round in 0..12 {
        for number in 1..150 {
            // Every other block lies near a boundary between pages of nodes.
            let lba = match number % 2 {
                0 => random.next_u64() % BLOCKS,
                _ => (random.next_u64() % 6 * PAGE_BLOCKS + random.next_u64() % 3).min(BLOCKS - 1),
            };
            write(&map, &mut written, lba, round * 1000 + number);
            touched.push(lba);
        }
        map.merge().expect("merge");
        check(&map, &written, &touched);
        let before = statistic(&map, "leaf_pages_read");
        let [one, other] = [(); 2].map(|()| random.next_u64() % (BLOCKS + 1));
        let (start, end) = match round % 4 {
            0 => (0, BLOCKS),
            1 => (one.min(other), one.max(other)),
            2 => (PAGE_BLOCKS - 1, 5 * PAGE_BLOCKS),
            _ => (one.min(BLOCKS - PAGE_BLOCKS), BLOCKS),
        };
        make_void(&map, &mut written, start, end);
        // One block is written again before the merge.
        write(&map, &mut written, start.min(BLOCKS - 1), round * 1000 + 500);
        touched.push(start.min(BLOCKS - 1));
        map.leaves().forget_pages();
        map.merge().expect("merge");
        let read = statistic(&map, "leaf_pages_read") - before;
        assert!(read <= 20, "{read} leaf pages were read to make {start} to {end} void");
        check(&map, &written, &touched);
        if round % 3 == 2 {
            drop(map);
            map = open(&device);
            check(&map, &written, &touched);
        }
    }
}

#[test]
fn the_root_is_the_same_however_many_threads_hash() {
    let superblock = superblock();
    let mut random = ChaCha8Rng::seed_from_u64(4);
    let leaf_count = superblock.geometry.leaves();
    let mut batch: Vec<u64> = (0..3000).map(|_| random.next_u64() % leaf_count).collect();
    batch.sort_unstable();
    batch.dedup();
    let root = |hashers| {
        let key = NodeKey::new(&Secret::take(&mut [5; 32]));
        let leaves = Leaves::new(superblock.geometry.clone(), key, Arc::<Counters>::default());
        let written: Vec<Written> = batch
            .iter()
            .map(|leaf| {
                let page = Arc::new([*leaf as u8; LEAF_BYTES]);
                let node = leaves.changed_node(*leaf, None, &page, &page);
                let page = node.map(|node| (page, Held { node, copy: 0 }));
                Written { leaf: *leaf, page, growth: 1 }
            })
            .collect();
        leaves.written(&written, hashers);
        leaves.root()
    };
    let alone = root(1);
    assert!((2..=16).all(|hashers| root(hashers) == alone));
}
