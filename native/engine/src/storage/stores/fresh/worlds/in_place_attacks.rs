//! Tests 17, 19, 21 and 28 of the reference's list, for blocks in place: attacks on the fast path,
//! and on writes in progress.

use std::sync::Arc;

use sealane_proto::freshness::fast_path::Included;
use sealane_proto::freshness::leaf::{Ivs, Leaf};
use sealane_proto::freshness::node::NodeKey;
use sealane_proto::sector::{Block, block_iv, field, metadata_mut};

use super::super::anchor::AnchorPolicy;
use super::super::failure::Refusal;
use super::super::keys::{Authority, StoreKeys};
use super::super::test_blocks::block;
use super::history::{History, UNWRITTEN, Version};
use super::life::Life;
use super::machine::Crash;
use super::workload::{Workload, refresh};
use super::{Kind, SUPERBLOCK_SEED, SUPERBLOCK_UUID, World};

/// Blocks of the first set.
const LBA: u64 = 7;
const SIBLING: u64 = 8;

/// A store with an anchor, on a hostile device.
struct Store {
    world: World<Ivs>,
    life: Life<Ivs>,
}

impl Store {
    fn new() -> Self {
        let kind = Kind { is_honest: false, policy: Some(AnchorPolicy::EveryCommit) };
        let mut world = World::of(1, kind);
        let life = world.create().expect("store");
        Self { world, life }
    }

    fn merged(&mut self, lba: u64, version: Version) {
        assert!(Ivs::begin(&mut self.life, lba, 1, version).expect("write"));
        self.life.end_all().expect("end");
        self.life.map.merge().expect("merge");
        self.life.map.leaves().forget_pages();
    }

    fn place(&self, lba: u64) -> u64 {
        self.life.map.geometry().in_place_block(lba)
    }

    fn held(&self, lba: u64) -> Block {
        self.world.device.read_block(self.place(lba)).expect("block")
    }

    fn put(&self, lba: u64, block: &Block) {
        self.world.device.lie(self.place(lba), Some(Arc::new(*block)), true);
    }

    fn read(&self, lba: u64) -> Result<Option<Version>, Refusal> {
        self.life.map.leaves().forget_pages();
        self.life.look(lba).map_err(|error| Refusal::of(&error).expect("a refusal").clone())
    }
}

/// The block with a MAC made from public data only: the superblock's seed.
fn forged(block: &Block, lba: u64) -> Block {
    let mut block = *block;
    let keys = StoreKeys::new(&SUPERBLOCK_UUID, &SUPERBLOCK_SEED, &Authority::Device);
    let mut leaf = Leaf::void(0);
    leaf.change::<Ivs>(&NodeKey::new(keys.tree()), [(lba as usize, Some(block_iv(&block)))]);
    let included = Included::of(&leaf, lba as usize).expect("written");
    metadata_mut(&mut block, field::MAC).copy_from_slice(&keys.fast_path().issue(&included));
    block
}

#[test]
fn test_17_a_forged_or_moved_fast_path_mac_is_not_accepted() {
    let mut store = Store::new();
    store.merged(LBA, 1);
    let old = store.held(LBA);
    store.merged(LBA, 2);
    store.merged(SIBLING, 3);
    assert!(refresh(&mut store.life, LBA, 2).expect("refresh"));
    store.put(LBA, &forged(&old, LBA));
    assert_eq!(store.read(LBA), Err(Refusal::Stale(LBA)));
    for from in [LBA, SIBLING] {
        store.world.device.repent();
        let current = store.held(from);
        let mut moved = old;
        let mac = &sealane_proto::sector::metadata(&current, field::MAC);
        metadata_mut(&mut moved, field::MAC).copy_from_slice(mac);
        store.put(LBA, &moved);
        assert_eq!(store.read(LBA), Err(Refusal::Stale(LBA)), "with the MAC of block {from}");
    }
}

#[test]
fn test_19_an_older_mac_is_not_accepted_after_a_sibling_changed_and_an_honest_block_still_reads() {
    let mut store = Store::new();
    store.merged(LBA, 1);
    assert!(refresh(&mut store.life, LBA, 1).expect("refresh"));
    let old = store.held(LBA);
    store.merged(SIBLING, 2);
    assert_eq!(store.read(LBA), Ok(Some(1)), "a full check");
    assert_eq!(store.life.vouched.get(), 0);
    store.merged(LBA, 3);
    store.put(LBA, &old);
    assert_eq!(store.read(LBA), Err(Refusal::Stale(LBA)));
}

#[test]
fn test_21_a_refresh_issues_no_mac_for_a_stale_block_and_afterwards_every_block_takes_the_fast_path()
 {
    let mut store = Store::new();
    for lba in 0..20 {
        store.merged(lba, lba + 1);
    }
    let old = store.held(LBA);
    store.merged(LBA, 50);
    store.put(LBA, &old);
    assert!(refresh(&mut store.life, 0, 20).expect("refresh"), "the other blocks get MACs");
    assert_eq!(store.held(LBA), old, "nothing was issued for it");
    assert_eq!(store.read(LBA), Err(Refusal::Stale(LBA)));
    store.world.device.repent();
    assert!(refresh(&mut store.life, LBA, 1).expect("refresh"));
    let before = store.life.vouched.get();
    for lba in 0..20 {
        assert_eq!(store.read(lba), Ok(Some(if lba == LBA { 50 } else { lba + 1 })));
    }
    assert_eq!(store.life.vouched.get(), before + 20);
}

#[test]
fn test_28_an_announced_write_may_be_there_or_not_and_the_flushed_one_may_not_be_older() {
    for is_made in [true, false] {
        let mut store = Store::new();
        for version in [1, 2] {
            store.merged(LBA, version);
        }
        let oldest = block(LBA, 1);
        assert!(Ivs::begin(&mut store.life, LBA, 1, 3).expect("write"));
        store.life.map.announce().expect("announced");
        store.world.device.crash(Crash::Kill, &mut store.world.random);
        if is_made {
            store.put(LBA, &block(LBA, 3));
        }
        let map = store.world.map().expect("an honest crash");
        let life = store.world.life(map, History::default());
        let expected = if is_made { 3 } else { 2 };
        assert_eq!(life.look(LBA).expect("block"), Some(expected));
        assert_eq!(life.look(LBA + 1).expect("block"), Some(UNWRITTEN));
        store.put(LBA, &oldest);
        assert!(matches!(
            Refusal::of(&life.look(LBA).expect_err("rolled back")),
            Some(Refusal::Stale(LBA))
        ));
    }
}
