//! Growing with power cuts at each of its writes and syncs: each image opens in the old or the new
//! size, with every block that was flushed before. A smaller store that is restored afterwards is
//! refused.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rand_chacha::ChaCha8Rng;
use rand_core::SeedableRng;
use sealane_proto::freshness::leaf::{Iv, Ivs, LeafFormat};
use sealane_proto::sector::{DATA_BYTES, field};

use super::super::pages::{BlockFile, Page};
use super::super::torn_disk::TornDisk;
use super::anchor::{Anchor, AnchorPolicy, MemoryAnchor};
use super::failure::Refusal;
use super::geometry::{Geometry, Sizes};
use super::in_place_tests::SectorDisk;
use super::keys::{Authority, StoreKeys};
use super::map::{Layout, Map};
use super::placed::{Placed, PlacedEntry};
use super::superblock::Superblock;
use super::test_blocks::{block, version_of};

/// What the tests need from a layout.
trait Blocks: Layout + Sized {
    /// Sizes of a small store before and after growing.
    const SIZES: [Sizes; 2];
    /// Writes a block without flushing.
    fn write(world: &World<Self>, lba: u64, version: u64);
    /// The version of a block with this entry; `None` if it is refused.
    fn version(world: &World<Self>, lba: u64, entry: &Self::Entry) -> Option<u64>;
}

const fn sizes(block_count: u64, slot_count: u64, log_pages: u64, pending_max: u64) -> Sizes {
    Sizes { block_count, slot_count, log_pages, pending_max }
}

impl Blocks for Placed {
    const SIZES: [Sizes; 2] = [sizes(250, 310, 8, 40), sizes(700, 900, 16, 80)];

    fn write(world: &World<Self>, lba: u64, version: u64) {
        let entries = world.map.place(&block(lba, version)).expect("place").expect("room");
        let page = Page(*block(lba, version).first_chunk().expect("data"));
        world.disk.write(world.map.geometry().slot(entries[0].slot), &[page]).expect("write");
        world.map.commit(lba, &entries).expect("commit");
    }

    fn version(world: &World<Self>, lba: u64, entry: &PlacedEntry) -> Option<u64> {
        let mut page = [Page::ZERO];
        world.disk.read(world.map.geometry().slot(entry.slot), &mut page).expect("read");
        version_of(lba, &page[0], &entry.metadata())
    }
}

/// A page on the disk of a store in place, which starts with its metadata.
fn sector(lba: u64, version: u64) -> Page {
    let mut page = Page::ZERO;
    let metadata = &block(lba, version)[DATA_BYTES..];
    page.0[..metadata.len()].copy_from_slice(metadata);
    page
}

impl Blocks for Ivs {
    const SIZES: [Sizes; 2] = [sizes(900, 0, 12, 80), sizes(2100, 0, 24, 160)];

    fn write(world: &World<Self>, lba: u64, version: u64) {
        let ivs = world.map.intend(lba, &block(lba, version)).expect("intent").expect("room");
        world.map.announce().expect("announcement");
        let place = world.map.geometry().in_place_block(lba);
        world.disk.write(place, &[sector(lba, version)]).expect("write");
        world.map.arrived(lba, &ivs).expect("arrived");
    }

    fn version(world: &World<Self>, lba: u64, iv: &Iv) -> Option<u64> {
        let place = world.map.geometry().in_place_block(lba);
        let found = world.disk.read_metadata(place).expect("read");
        let version = u64::from_le_bytes(iv[..8].try_into().expect("8 bytes"));
        (found[field::IV.0..field::IV.1] == *iv).then_some(version)
    }
}

struct World<F: Layout> {
    disk: Arc<SectorDisk>,
    anchor: Option<Arc<MemoryAnchor>>,
    superblock: Superblock,
    map: Map<F>,
}

fn file(disk: &Arc<SectorDisk>) -> Arc<dyn BlockFile> {
    Arc::clone(disk) as Arc<dyn BlockFile>
}

fn dynamic(anchor: Option<&Arc<MemoryAnchor>>) -> Option<Arc<dyn Anchor>> {
    anchor.map(|anchor| Arc::clone(anchor) as Arc<dyn Anchor>)
}

/// A copy of the anchor.
fn copied(anchor: Option<&Arc<MemoryAnchor>>) -> Option<Arc<MemoryAnchor>> {
    anchor.map(|anchor| Arc::new(anchor.copy()))
}

fn superblock_of<F: Blocks>(sizes: Sizes) -> Superblock {
    let Sizes { block_count, slot_count, log_pages, pending_max } = sizes;
    let (leaf_entries, earlier) = (F::ENTRIES_PER_LEAF, Vec::new());
    let geometry =
        Geometry { block_count, leaf_entries, slot_count, log_pages, pending_max, earlier };
    Superblock { uuid: [1; 16], seed: [2; 32], geometry }
}

impl<F: Blocks> World<F> {
    fn create(policy: Option<AnchorPolicy>, sizes: Sizes) -> Self {
        let superblock = superblock_of::<F>(sizes);
        let disk = Arc::new(SectorDisk(TornDisk::default()));
        let anchor = policy.map(|policy| Arc::new(MemoryAnchor::new(policy)));
        let map =
            Map::create(file(&disk), &superblock, &Authority::Device, dynamic(anchor.as_ref()));
        Self { disk, anchor, superblock, map: map.expect("store") }
    }

    fn open(
        disk: TornDisk,
        anchor: Option<Arc<MemoryAnchor>>,
        superblock: &Superblock,
    ) -> io::Result<Self> {
        let disk = Arc::new(SectorDisk(disk));
        let keys = StoreKeys::new(&superblock.uuid, &superblock.seed, &Authority::Device);
        let map = Map::open(file(&disk), superblock, keys, dynamic(anchor.as_ref()))?;
        Ok(Self { disk, anchor, superblock: superblock.clone(), map })
    }

    /// The store after a power cut that left this image.
    fn after(&self, image: TornDisk) -> io::Result<Self> {
        Self::open(image, copied(self.anchor.as_ref()), &self.superblock)
    }

    fn entry(&self, lba: u64) -> Option<F::Entry> {
        let (set, index) = (lba / F::ENTRIES_PER_LEAF, lba % F::ENTRIES_PER_LEAF);
        self.map.set_entries(set).expect("leaf page")[index as usize]
    }

    /// The version of a block; 0 if unwritten, `None` if refused.
    fn read(&self, lba: u64) -> Option<u64> {
        self.entry(lba).map_or(Some(0), |entry| F::version(self, lba, &entry))
    }

    /// The versions of all blocks.
    fn read_all(&self) -> Vec<Option<u64>> {
        let sets = 0..self.map.geometry().sets();
        let entries = sets.flat_map(|set| self.map.set_entries(set).expect("leaf page"));
        let version = |(lba, entry): (u64, Option<F::Entry>)| {
            entry.map_or(Some(0), |entry| F::version(self, lba, &entry))
        };
        (0..).zip(entries).map(version).collect()
    }

    fn blocks(&self) -> u64 {
        self.map.geometry().block_count
    }

    fn grow(&mut self, sizes: Sizes) -> io::Result<()> {
        let geometry = self.map.geometry().with_extent(sizes).expect("a growth");
        self.map.grow(geometry)
    }

    /// Writes some blocks that end up in leaf pages, some that stay in the log, overwrites some and
    /// deallocates one.
    fn fill(&self) {
        for lba in (0..self.blocks()).step_by(20) {
            F::write(self, lba, 1);
        }
        F::write(self, self.blocks() - 1, 1);
        self.map.merge().expect("merge");
        for lba in [0, 40, self.blocks() - 1] {
            F::write(self, lba, 2);
        }
        assert!(self.map.deallocate(20, 1).expect("deallocate"));
        self.map.flush().expect("flush");
    }

    /// Checks that the first `count` blocks are as [`World::fill`] left them, and the others
    /// unwritten.
    fn check(&self, count: u64) {
        for (lba, found) in (0..).zip(self.read_all()) {
            let expected = match lba {
                // Never written.
                _ if lba >= count => 0,
                20 => 0,
                0 | 40 => 2,
                _ if lba == count - 1 => 2,
                _ => u64::from(lba.is_multiple_of(20)),
            };
            assert_eq!(found, Some(expected), "block {lba}");
        }
    }
}

/// Opens images at every instant at which a growth is about to write or sync. Returns how many had
/// the old size and how many the new one.
fn cut_everywhere<F: Blocks>(policy: Option<AnchorPolicy>) -> [u64; 2] {
    let [before, after] = F::SIZES;
    let small = World::<F>::create(policy, before);
    small.fill();
    let (is_on, found) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new([0, 0])));
    let (anchor, superblock) = (copied(small.anchor.as_ref()), small.superblock.clone());
    let (is_watching, counts, for_images) =
        (Arc::clone(&is_on), Arc::clone(&found), anchor.clone());
    let random = Mutex::new(ChaCha8Rng::seed_from_u64(7));
    let observer = move |disk: &TornDisk| {
        if !is_watching.load(Ordering::Relaxed) {
            return;
        }
        let mut random = random.lock().expect("random");
        let mut images = vec![disk.lost(), disk.whole()];
        images.extend((0..3).map(|_| disk.random_image(&mut random)));
        for image in images {
            let world = World::<F>::open(image, copied(for_images.as_ref()), &superblock);
            let world = world.expect("an honest power cut");
            let is_new = world.blocks() == after.block_count;
            assert!(is_new || world.blocks() == before.block_count, "{}", world.blocks());
            world.check(before.block_count);
            counts.lock().expect("counts")[usize::from(is_new)] += 1;
        }
    };
    let observed = small.disk.0.whole().observed(Box::new(observer));
    let mut world = World::<F>::open(observed, anchor, &small.superblock).expect("store");
    is_on.store(true, Ordering::Relaxed);
    world.grow(after).expect("growth");
    is_on.store(false, Ordering::Relaxed);
    let [old, new] = *found.lock().expect("counts");
    let grown = world.after(world.disk.0.lost()).expect("store");
    assert_eq!(grown.blocks(), after.block_count, "the growth has completed");
    [old, new]
}

#[test]
fn a_power_cut_leaves_the_old_size_or_the_new_one_and_every_block() {
    for policy in [None, Some(AnchorPolicy::EveryCommit), Some(AnchorPolicy::Checkpoints)] {
        for [old, new] in [cut_everywhere::<Placed>(policy), cut_everywhere::<Ivs>(policy)] {
            assert!(old > 25, "{old} images of the old size");
            // An anchored store has the new size once it is anchored, which is after the last sync.
            assert!(new > 0 || policy.is_some(), "no image of the new size");
        }
    }
}

fn lives_on<F: Blocks>() {
    let [before, after] = F::SIZES;
    let mut world = World::<F>::create(Some(AnchorPolicy::EveryCommit), before);
    world.fill();
    world.grow(after).expect("growth");
    world.check(before.block_count);
    let last = after.block_count - 1;
    for version in 3..40 {
        // Blocks on both sides of the boundary, repeatedly, so that slots and log pages are reused.
        for lba in [before.block_count - 2, before.block_count, last - 300, last] {
            F::write(&world, lba, version);
        }
        world.map.flush().expect("flush");
        if version % 8 == 0 {
            world.map.merge().expect("merge");
            world.map.leaves().forget_pages();
        }
    }
    let again = Sizes { block_count: after.block_count + 1000, ..after };
    let again = Sizes { slot_count: after.slot_count * 2, ..again };
    world.grow(again).expect("another growth");
    let mut world = world.after(world.disk.0.lost()).expect("store");
    assert_eq!(world.blocks(), again.block_count);
    for lba in [before.block_count - 2, before.block_count, last - 300, last] {
        assert_eq!(world.read(lba), Some(39));
    }
    assert_eq!(world.read(40), Some(2));
    assert_eq!(world.read(last + 1), Some(0));
    F::write(&world, last + 1, 1);
    world.map.merge().expect("merge");
    let statistics = world.map.statistics();
    let counter = |name| statistics.iter().find(|(known, _)| *known == name).expect("counter").1;
    let written = world.read_all().into_iter().filter(|version| *version != Some(0)).count();
    assert_eq!(counter("sectors_written"), written as u64);
    assert!(world.map.deallocate(0, again.block_count).expect("deallocate"));
    world.map.merge().expect("merge");
    world = world.after(world.disk.0.lost()).expect("store");
    assert!(world.read_all().into_iter().all(|version| version == Some(0)));
}

#[test]
fn a_store_that_grew_lives_on_in_its_new_size_and_grows_again() {
    lives_on::<Placed>();
    lives_on::<Ivs>();
}

#[test]
fn root_commits_count_on_and_nothing_is_forgotten_by_growing() {
    let [before, after] = Placed::SIZES;
    let mut world = World::<Placed>::create(None, before);
    world.fill();
    let commits = |world: &World<Placed>| {
        let statistics = world.map.statistics();
        statistics.iter().find(|(name, _)| *name == "root_commits").expect("counter").1
    };
    let before = commits(&world);
    world.grow(after).expect("growth");
    let grown = commits(&world);
    // Commits for the merge, for its slot maps, and for the slot maps' new numbers.
    assert!((before + 1..before + 10).contains(&grown), "{before} and then {grown}");
}

fn check_rollback<F: Blocks>() {
    let [before, after] = F::SIZES;
    let mut world = World::<F>::create(Some(AnchorPolicy::EveryCommit), before);
    world.fill();
    let smaller = world.disk.0.whole();
    world.grow(after).expect("growth");
    let error = world.after(smaller).map(|_| ()).expect_err("an older, smaller store");
    assert!(matches!(Refusal::of(&error), Some(Refusal::RolledBack(_))), "{error}");
    // Swaps the checkpoint pages: each is valid in either place.
    let image = world.disk.0.whole();
    let pages: [Page; 2] = [1, 2].map(|place| {
        let mut page = [Page::ZERO];
        image.read(place, &mut page).expect("read");
        page[0]
    });
    image.write(1, &[pages[1], pages[0]]).expect("write");
    let swapped = world.after(image.whole()).expect("valid in either place").blocks();
    assert_eq!(swapped, after.block_count);
}

#[test]
fn a_smaller_older_store_is_refused_as_rolled_back() {
    check_rollback::<Placed>();
    check_rollback::<Ivs>();
}

#[test]
fn an_anchor_that_does_not_answer_is_asked_again() {
    for is_made in [false, true] {
        let [before, after] = Placed::SIZES;
        let mut world = World::<Placed>::create(Some(AnchorPolicy::EveryCommit), before);
        world.fill();
        let geometry = world.map.geometry().with_extent(after).expect("a growth");
        let anchor = world.anchor.clone().expect("anchored");
        anchor.fail_next(is_made);
        let error = world.map.grow(geometry.clone()).expect_err("no answer");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(world.blocks(), before.block_count, "the merge asked the anchor");
        anchor.recover();
        world.map.grow(geometry).expect("growth");
        world.map.finish().expect("answered");
        let grown = world.after(world.disk.0.lost()).expect("store");
        assert_eq!(grown.blocks(), after.block_count);
        grown.check(before.block_count);
    }
}

#[test]
fn a_device_that_fails_leaves_the_old_size() {
    let [before, after] = Placed::SIZES;
    for writes in 0..4 {
        let mut world = World::<Placed>::create(None, before);
        world.fill();
        world.disk.0.fail_after(writes);
        assert!(world.grow(after).is_err());
        assert!(world.map.flush().is_err(), "the failure is permanent");
        let grown = world.after(world.disk.0.lost()).expect("store");
        assert_eq!(grown.blocks(), before.block_count);
        grown.check(before.block_count);
    }
}

#[test]
fn a_write_in_place_that_failed_before_may_still_be_there_afterwards() {
    let [before, after] = Ivs::SIZES;
    let mut world = World::<Ivs>::create(None, before);
    world.fill();
    world.map.intend(60, &block(60, 9)).expect("intent").expect("room");
    world.map.announce().expect("announcement");
    world.map.give_up(60);
    world.grow(after).expect("growth");
    // The failed write arrives late.
    let place = world.map.geometry().in_place_block(60);
    world.disk.write(place, &[sector(60, 9)]).expect("write");
    let grown = world.after(world.disk.0.whole()).expect("store");
    assert_eq!(grown.read(60), Some(9));
}

/// The store's slot map has two pages, both with slots in use.
#[test]
fn slot_map_pages_that_swap_numbers_survive_a_power_cut() {
    let before = sizes(250, 40_000, 800, 40_000);
    let small = World::<Placed>::create(None, before);
    Placed::write(&small, 1, 1);
    let mut held = Vec::new();
    let many: Vec<u8> = (0..200).flat_map(|lba| block(lba, 1)).collect();
    while held.len() < 33_000 {
        held.extend(small.map.place(&many).expect("place").expect("room"));
    }
    Placed::write(&small, 2, 1);
    small.map.abandon(&held);
    assert!(small.entry(2).expect("written").slot > super::geometry::SLOTS_PER_MAP);
    small.map.merge().expect("merge");
    // With one more set, the second page takes a new number, and the first takes the second's.
    let after = Sizes { block_count: 301, ..before };
    let (is_on, superblock) = (Arc::new(AtomicBool::new(false)), small.superblock.clone());
    let is_watching = Arc::clone(&is_on);
    let observer = move |disk: &TornDisk| {
        if is_watching.load(Ordering::Relaxed) {
            for image in [disk.lost(), disk.whole()] {
                let world = World::<Placed>::open(image, None, &superblock).expect("store");
                assert_eq!([1, 2].map(|lba| world.read(lba)), [Some(1); 2]);
                assert_eq!(world.map.free_slots(), before.slot_count - 2);
            }
        }
    };
    let observed = small.disk.0.whole().observed(Box::new(observer));
    let mut world = World::<Placed>::open(observed, None, &small.superblock).expect("store");
    is_on.store(true, Ordering::Relaxed);
    world.grow(after).expect("growth");
}

#[test]
fn slots_beyond_the_first_page_of_the_map_are_kept_after_a_growth() {
    let before = sizes(250, 20_000, 800, 40_000);
    let mut world = World::<Placed>::create(None, before);
    world.grow(Sizes { block_count: 300, slot_count: 40_000, ..before }).expect("growth");
    let mut held = Vec::new();
    let many: Vec<u8> = (0..200).flat_map(|lba| block(lba, 1)).collect();
    while held.len() < 33_000 {
        held.extend(world.map.place(&many).expect("place").expect("room"));
    }
    Placed::write(&world, 299, 1);
    world.map.abandon(&held);
    world.map.merge().expect("merge");
    let world = world.after(world.disk.0.lost()).expect("store");
    assert!(world.entry(299).expect("written").slot > super::geometry::SLOTS_PER_MAP);
    assert_eq!(world.read(299), Some(1));
    assert_eq!(world.map.free_slots(), 40_000 - 1);
}

#[test]
fn pages_of_a_growth_that_was_cut_short_are_void_after_another_one() {
    let before = Placed::SIZES[0];
    let small = World::<Placed>::create(None, before);
    small.fill();
    // In each size, the slot map's leaf belongs to another page of nodes.
    let to = |sets: u64| {
        let block_count = sets * Placed::ENTRIES_PER_LEAF;
        Sizes { block_count, slot_count: 70_000, ..before }
    };
    let (is_on, images) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let (is_watching, found) = (Arc::clone(&is_on), Arc::clone(&images));
    let observer = move |disk: &TornDisk| {
        if is_watching.load(Ordering::Relaxed) {
            found.lock().expect("images").push(disk.whole());
        }
    };
    let observed = small.disk.0.whole().observed(Box::new(observer));
    let mut world = World::<Placed>::open(observed, None, &small.superblock).expect("store");
    is_on.store(true, Ordering::Relaxed);
    world.grow(to(300)).expect("growth");
    let mut cut_short = 0;
    for image in images.lock().expect("images").drain(..) {
        let mut world = World::<Placed>::open(image, None, &small.superblock).expect("store");
        if world.blocks() == before.block_count {
            cut_short += 1;
            world.grow(to(600)).expect("growth");
            world.after(world.disk.0.lost()).expect("store").check(before.block_count);
            world.grow(to(900)).expect("growth");
            world.after(world.disk.0.lost()).expect("store").check(before.block_count);
        }
    }
    assert!(cut_short > 5, "{cut_short}");
}

#[test]
fn a_size_that_no_store_can_have_is_refused() {
    let world = World::<Placed>::create(None, Placed::SIZES[0]);
    for block_count in [0, 249, 250, u64::MAX] {
        let error = world.map.grown_to(block_count).expect_err("refused");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{block_count}");
    }
    assert_eq!(world.map.grown_to(251).expect("larger").block_count, 251);
}
