//! Scrub and refresh in both layouts, against an adversary who writes to the device behind the
//! store's back.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use sealane_proto::freshness::leaf::{Ivs, LeafFormat};
use sealane_proto::freshness::pending::Known;
use sealane_proto::nvme::Reason;
use sealane_proto::sector::{BLOCK_BYTES, DATA_BYTES, field, metadata_mut};

use super::super::events::EventLog;
use super::super::store::{BlockStore, StoreRequest};
use super::super::upkeep::{PIECE_BLOCKS, Report};
use super::conformance;
use super::fresh::failure::Refusal;
use super::fresh::placed::Placed;
use super::fresh::upkeep::read_each;
use super::fresh_store::{FreshStore, Place, Trust};
use super::in_place_store::{InPlaceStore, raw_blocks};
use super::inline_file::InlineFileStore;
use super::pages::PAGE_BYTES;
use super::scratch::Scratch;
use super::sealed_file::SealedFileStore;

const BLOCKS: u64 = 1000;

struct World<S> {
    store: S,
    device: File,
    scratch: Scratch,
}

type InPlace = World<InPlaceStore>;
type OutOfPlace = World<SealedFileStore>;

impl<S: BlockStore> World<S> {
    fn over(scratch: Scratch, store: S) -> Self {
        let mut options = std::fs::OpenOptions::new();
        let device = options.read(true).write(true).open(scratch.file()).expect("device");
        Self { store, device, scratch }
    }

    fn write(&self, lba: u64, blocks: u64, version: u64) {
        let mut channel = self.store.open().expect("channel");
        let buffer = conformance::blocks(BLOCK_BYTES, lba, blocks, version);
        let write = StoreRequest::Write { lba, buffer, durable: true };
        conformance::execute(&mut *channel, write).expect("write");
    }

    fn try_read(&self, lba: u64) -> io::Result<Vec<u8>> {
        let mut channel = self.store.open()?;
        let buffer = vec![0xAA; BLOCK_BYTES];
        conformance::execute(&mut *channel, StoreRequest::Read { lba, buffer })
    }

    fn deallocate(&self, lba: u64, blocks: u64) {
        let mut channel = self.store.open().expect("channel");
        let deallocate = StoreRequest::Deallocate { lba, blocks };
        conformance::execute(&mut *channel, deallocate).expect("deallocate");
    }

    fn scrub(&self) -> Report {
        let mut upkeep = self.store.upkeep().expect("upkeep").expect("upkeep");
        let (mut report, mut next) = (Report::default(), 0);
        while upkeep.scrub_structure(&mut report).expect("structure") {}
        while let Some(piece) = upkeep.next_piece(next) {
            assert!(piece.start >= next && piece.end > piece.start && piece.end <= BLOCKS);
            assert!(piece.end - piece.start <= PIECE_BLOCKS);
            next = piece.end;
            upkeep.scrub(piece, &mut report).expect("scrub");
        }
        report
    }

    /// Scrubs and repairs. Returns the number of findings, and how many of them can be repaired.
    fn repair(&self) -> (usize, usize) {
        let report = self.scrub();
        self.store.upkeep().expect("upkeep").expect("upkeep").repair().expect("repair");
        let known = report.findings.iter().filter(|found| found.is_known).count();
        (report.findings.len(), known)
    }

    fn flip(&self, place: u64) {
        let mut byte = [0];
        self.device.read_exact_at(&mut byte, place).expect("read");
        self.device.write_all_at(&[byte[0] ^ 1], place).expect("write");
    }
}

impl InPlace {
    fn in_place() -> Self {
        let scratch = Scratch::new();
        let raw = InlineFileStore::create(&scratch.file(), raw_blocks(BLOCKS)).expect("raw");
        let store = InPlaceStore::create(Box::new(raw), BLOCKS, &Trust::default());
        Self::over(scratch, store.expect("store"))
    }

    fn place(&self, lba: u64) -> u64 {
        self.store.map().geometry().in_place_block(lba) * BLOCK_BYTES as u64
    }

    /// Byte offset of a set's leaf page.
    fn leaf_place(&self, set: u64) -> u64 {
        self.store.map().leaves().fetch(set).expect("not void").place * BLOCK_BYTES as u64
    }

    fn reopened(self) -> Self {
        let Self { store, device, scratch } = self;
        drop(store);
        let raw = InlineFileStore::open(&scratch.file(), raw_blocks(BLOCKS)).expect("raw");
        let store = InPlaceStore::open(Box::new(raw), &Trust::default()).expect("it opens");
        Self { store, device, scratch }
    }
}

impl OutOfPlace {
    fn out_of_place() -> Self {
        let scratch = Scratch::new();
        let store = SealedFileStore::create(&scratch.file(), BLOCKS, &Trust::default());
        Self::over(scratch, store.expect("store"))
    }

    /// Byte offset of the data of a block with a pending change.
    fn place(&self, lba: u64) -> u64 {
        let map = self.store.map();
        let Known::Entry(entry) = map.current(lba, 1)[0] else { panic!("it waits in memory") };
        map.geometry().slot(entry.slot) * PAGE_BYTES as u64
    }

    /// Byte offset of a leaf page of a set or of the slot map.
    fn leaf_place(&self, leaf: u64) -> u64 {
        self.store.map().leaves().fetch(leaf).expect("not void").place * PAGE_BYTES as u64
    }

    fn reopened(self) -> Self {
        let Self { store, device, scratch } = self;
        drop(store);
        let store = SealedFileStore::open(&scratch.file(), &Trust::default()).expect("it opens");
        Self { store, device, scratch }
    }
}

fn lbas(report: &Report) -> Vec<Option<u64>> {
    report.findings.iter().map(|finding| finding.lba).collect()
}

/// Damages a leaf page whose contents nobody knows while changes of its set are merged. Checks what
/// hosts, event watchers and a scrub see of it, and that it heals. The device has pages of
/// `page_bytes`.
fn assert_orphans<P: Place>(
    world: World<FreshStore<P>>,
    page_bytes: usize,
    reopen: impl Fn(World<FreshStore<P>>) -> World<FreshStore<P>>,
) {
    let size = P::Layout::ENTRIES_PER_LEAF;
    let events = Arc::new(EventLog::new().expect("events"));
    world.store.tell_events(&events);
    world.write(0, 2 * size + 10, 1);
    world.store.map().merge().expect("merge");
    let place = world.store.map().leaves().fetch(1).expect("not void").place;
    world.flip(place * page_bytes as u64);
    world.store.map().leaves().forget_pages();
    world.write(size + 5, 1, 2);
    world.deallocate(size + 7, 1);
    world.store.map().merge().expect("the store survives");
    let told: Vec<_> = events.take().into_iter().map(|it| (it.kind, it.reason, it.lba)).collect();
    assert_eq!(told, [("found", "sector.stale", Some(size))]);

    let world = reopen(world);
    let read = |world: &World<_>, lba| world.try_read(lba).map_err(|it| Refusal::of(&it).cloned());
    let refused = |lba| Err(Some(Refusal::Orphaned(lba)));
    let block = |lba, version| Ok(conformance::block(BLOCK_BYTES, lba, version));
    assert_eq!(read(&world, size - 1), block(size - 1, 1), "other sets are unaffected");
    assert_eq!(read(&world, 2 * size), block(2 * size, 1));
    assert_eq!(read(&world, size + 5), block(size + 5, 2));
    assert_eq!(read(&world, size + 7), Ok(vec![0; BLOCK_BYTES]));
    for lba in [size, size + 6, 2 * size - 1] {
        assert_eq!(read(&world, lba), refused(lba));
    }
    let report = world.scrub();
    assert!(report.findings.iter().all(|it| it.reason == Reason::SectorStale && !it.is_known));
    let orphaned = (size..2 * size).filter(|lba| ![size + 5, size + 7].contains(lba));
    assert_eq!(lbas(&report), orphaned.map(Some).collect::<Vec<_>>());

    // Each block heals on its own; all are healed once all are written or deallocated.
    world.write(size, 1, 3);
    assert_eq!(read(&world, size), block(size, 3));
    world.deallocate(size + 1, size - 1);
    world.store.map().merge().expect("merge");
    assert_eq!(world.scrub().findings, []);
    assert_eq!(read(&world, 2 * size - 1), Ok(vec![0; BLOCK_BYTES]));
}

#[test]
fn blocks_in_place_whose_leaf_page_is_lost_are_errors_until_they_are_written_again() {
    assert_orphans(World::in_place(), BLOCK_BYTES, World::<InPlaceStore>::reopened);
}

#[test]
fn blocks_out_of_place_whose_leaf_page_is_lost_are_errors_until_they_are_written_again() {
    assert_orphans(World::out_of_place(), PAGE_BYTES, World::<SealedFileStore>::reopened);
}

#[test]
fn a_refresh_issues_no_mac_for_an_orphaned_block() {
    let world = World::in_place();
    world.write(0, 10, 1);
    world.store.map().merge().expect("merge");
    world.flip(world.leaf_place(0));
    world.store.map().leaves().forget_pages();
    world.write(3, 1, 2);
    world.store.map().merge().expect("merge");
    let (mut report, mut upkeep) = (Report::default(), world.store.upkeep().unwrap().unwrap());
    upkeep.refresh(0..10, &mut report).expect("refresh");
    assert_eq!(report.refreshed, 1);
    assert_eq!(report.findings.len(), 9);
    // Neither for a forged block with the IV that marks an orphaned entry.
    let mut forged = [0; BLOCK_BYTES];
    forged.copy_from_slice(&conformance::block(BLOCK_BYTES, 4, 9));
    metadata_mut(&mut forged, field::IV).fill(0xFF);
    let vouched = world.store.map().vouch(0, [(4, &mut forged)]).expect("leaf page").remove(0);
    assert_eq!(vouched.expect("no error"), None);
}

/// Writes blocks, some of them twice with a merge in between, and deallocates some.
fn fill<S: BlockStore>(world: &World<S>, merge: impl Fn()) {
    world.write(0, 40, 1);
    world.write(330, 100, 1);
    merge();
    world.write(20, 40, 2);
    world.deallocate(340, 10);
    world.write(999, 1, 1);
}

#[test]
fn an_honest_store_is_read_whole_and_found_right() {
    let world = World::in_place();
    fill(&world, || world.store.map().merge().expect("merge"));
    for _ in 0..2 {
        let report = world.scrub();
        assert_eq!((report.checked, report.unchecked), (60 + 90 + 1, 0));
        assert_eq!(report.findings, []);
        world.store.map().merge().expect("merge");
    }
    let world = World::out_of_place();
    fill(&world, || world.store.map().merge().expect("merge"));
    for _ in 0..2 {
        let report = world.scrub();
        assert_eq!((report.checked, report.unchecked), (60 + 90 + 1, 0));
        assert_eq!(report.findings, []);
        world.store.map().merge().expect("merge");
    }
}

#[test]
fn each_changed_sector_is_found_and_none_hides_another() {
    let world = World::out_of_place();
    world.write(100, 300, 1);
    let changed = [100, 101, 174, 175, 399];
    for lba in changed {
        world.flip(world.place(lba) + lba);
    }
    for _ in 0..2 {
        let report = world.scrub();
        assert_eq!(lbas(&report), changed.map(Some));
        assert!(report.findings.iter().all(|found| found.reason == Reason::SectorStale));
        assert_eq!(report.checked, 300);
        world.store.map().merge().expect("merge");
    }
}

#[test]
fn older_sectors_in_place_are_found_before_anybody_reads_them() {
    let world = World::in_place();
    world.write(7, 3, 1);
    let mut old = [0; BLOCK_BYTES];
    world.device.read_exact_at(&mut old, world.place(8)).expect("read");
    world.write(7, 3, 2);
    world.device.write_all_at(&old, world.place(8)).expect("write");
    // A block with the right IV but an invalid sector format.
    world.flip(world.place(9) + (DATA_BYTES + field::VERSION.0) as u64);
    for _ in 0..2 {
        let report = world.scrub();
        let found: Vec<_> = report.findings.iter().map(|found| (found.lba, found.reason)).collect();
        assert_eq!(found, [(Some(8), Reason::SectorStale), (Some(9), Reason::SectorFormat)]);
        world.store.map().merge().expect("merge");
    }
}

#[test]
fn a_wrong_leaf_page_is_found_also_while_memory_has_the_right_one() {
    let world = World::in_place();
    world.write(300, 100, 1);
    world.store.map().merge().expect("merge");
    let geometry = world.store.map().geometry().clone();
    for copy in [0, 1] {
        world.flip(geometry.leaf(0, copy) * BLOCK_BYTES as u64);
    }
    let report = world.scrub();
    assert_eq!(lbas(&report), [Some(0)]);
    assert_eq!(
        (report.checked, report.unchecked),
        (100, 0),
        "entries in memory still cover its sectors"
    );
}

#[test]
fn sectors_of_an_unknown_leaf_page_cannot_be_checked() {
    let world = World::in_place();
    world.write(300, 100, 1);
    world.store.map().merge().expect("merge");
    world.flip(world.leaf_place(0));
    world.store.map().leaves().forget_pages();
    world.write(310, 1, 2);
    let report = world.scrub();
    assert_eq!(lbas(&report), [Some(0)]);
    // Only pending blocks and those of the other set can be checked.
    assert_eq!((report.checked, report.unchecked), (1 + 60, Ivs::ENTRIES_PER_LEAF - 1));
}

#[test]
fn a_wrong_page_of_the_slot_map_is_found() {
    let world = World::out_of_place();
    world.write(500, 1, 1);
    world.store.map().merge().expect("merge");
    let geometry = world.store.map().geometry().clone();
    assert_eq!(world.scrub().findings, []);
    for copy in [0, 1] {
        world.flip(geometry.leaf(geometry.sets(), copy) * PAGE_BYTES as u64);
    }
    let report = world.scrub();
    assert_eq!(lbas(&report), [None]);
    assert_eq!(report.checked, 1);
}

#[test]
fn a_scrub_reads_leaves_from_the_device_and_keeps_none_in_memory() {
    let world = World::out_of_place();
    world.write(0, Placed::ENTRIES_PER_LEAF * 2, 1);
    world.store.map().merge().expect("merge");
    let read = || {
        let named = world.store.statistics();
        named.iter().find(|(name, _)| *name == "leaf_pages_read").expect("counter").1
    };
    let before = read();
    world.scrub();
    assert_eq!(read() - before, 2 + 1, "two sets and the slot map");
    world.store.map().leaves().forget_pages();
    world.scrub();
    assert!(world.store.map().leaves().cached(0).is_none());
}

#[test]
fn void_blocks_are_skipped() {
    let world = World::in_place();
    let mut upkeep = world.store.upkeep().expect("upkeep").expect("upkeep");
    assert_eq!(upkeep.next_piece(0), None);
    world.write(700, 1, 1);
    assert_eq!(upkeep.next_piece(0), Some(680..712));
    assert_eq!(upkeep.next_piece(712), None);
    world.store.map().merge().expect("merge");
    assert_eq!(upkeep.next_piece(712), Some(712..744), "the rest of the set");
    assert_eq!(upkeep.next_piece(BLOCKS), None);
}

#[test]
fn blocks_that_cannot_be_read_together_are_read_one_by_one() {
    let bad = || io::Error::from_raw_os_error(5);
    let read = |kind: Option<io::ErrorKind>| {
        let mut reads = 0;
        let each = read_each(3, 1, |run| {
            reads += 1;
            match kind {
                Some(kind) => Err(kind.into()),
                None if run.contains(&1) => Err(bad()),
                None => Ok(vec![run.start as u8; run.len()]),
            }
        });
        let each: Vec<_> = each.into_iter().map(Result::ok).collect();
        (each, reads)
    };
    assert_eq!(read(None), (vec![Some(vec![0]), None, Some(vec![2])], 4));
    assert_eq!(read(Some(io::ErrorKind::NotConnected)), (vec![None], 1), "the device is gone");
}

#[test]
fn wrong_pages_of_nodes_checkpoint_and_log_are_found_and_written_again() {
    let world = World::out_of_place();
    fill(&world, || world.store.map().merge().expect("merge"));
    let geometry = world.store.map().geometry().clone();
    let page = |page: u64| page * PAGE_BYTES as u64;
    for copy in [0, 1] {
        world.flip(page(geometry.nodes(0, copy)) + 100);
        world.flip(page(geometry.checkpoint(copy.into())) + 20);
    }
    world.flip(page(0) + 40);
    // The log page behind the checkpoint, which creation and the merge have written.
    world.flip(page(geometry.log(world.store.map().log_start())));
    let report = world.scrub();
    assert!(report.findings.iter().all(|it| it.reason == Reason::StoreDamaged && it.is_known));
    let what: Vec<_> = report.findings.iter().map(|it| it.detail.split(':').next()).collect();
    let log = format!("page {} of the log", world.store.map().log_start());
    let wanted = ["superblock", "checkpoint 2", "page 0 of nodes", &log].map(Some);
    assert_eq!(what, wanted);
    assert_eq!(report.checked, 60 + 90 + 1);
    assert_eq!(world.repair(), (4, 4));
    assert_eq!(world.scrub().findings, []);
    let world = world.reopened();
    assert_eq!(world.scrub().findings, []);
}

#[test]
fn an_older_page_of_nodes_and_an_older_end_of_the_log_are_wrong() {
    let world = World::out_of_place();
    let geometry = world.store.map().geometry().clone();
    world.write(0, 10, 1);
    world.store.map().merge().expect("merge");
    let nodes = |copy| geometry.nodes(0, copy) * PAGE_BYTES as u64;
    let mut older = [[0; PAGE_BYTES]; 2];
    for (copy, page) in (0..).zip(&mut older) {
        world.device.read_exact_at(page, nodes(copy)).expect("read");
    }
    world.write(0, 10, 2);
    let end = geometry.log(world.store.map().log_start()) * PAGE_BYTES as u64;
    let mut written = [0; PAGE_BYTES];
    world.device.read_exact_at(&mut written, end).expect("read");
    world.device.write_all_at(&[0; PAGE_BYTES], end).expect("write");
    assert_eq!(world.scrub().findings.len(), 1, "the log ends too early");
    world.device.write_all_at(&written, end).expect("write");
    world.store.map().merge().expect("merge");
    assert_eq!(world.scrub().findings, []);
    for (copy, page) in (0..).zip(&older) {
        world.device.write_all_at(page, nodes(copy)).expect("write");
    }
    assert_eq!(world.repair(), (1, 1));
    let world = world.reopened();
    assert_eq!(world.scrub().findings, []);
}

#[test]
fn leaf_pages_that_memory_knows_are_written_again() {
    let world = World::out_of_place();
    world.write(0, 200, 1);
    world.store.map().merge().expect("merge");
    let sets = world.store.map().geometry().sets();
    for leaf in [0, 2, sets] {
        world.flip(world.leaf_place(leaf));
    }
    assert_eq!(world.repair(), (3, 3));
    world.store.map().leaves().forget_pages();
    assert_eq!(world.scrub().findings, []);
    let world = world.reopened();
    assert_eq!(world.scrub().findings, []);
}

#[test]
fn a_leaf_page_in_place_is_derived_from_its_blocks_if_they_match_its_node() {
    let world = World::in_place();
    world.write(300, 100, 1);
    world.store.map().merge().expect("merge");
    world.flip(world.leaf_place(0));
    world.flip(world.leaf_place(1));
    world.store.map().leaves().forget_pages();
    // After this write, nothing on the device shows the block's IV in the leaf page.
    world.write(350, 1, 2);
    let report = world.scrub();
    let known: Vec<_> = report.findings.iter().map(|it| (it.lba, it.is_known)).collect();
    assert_eq!(known, [(Some(0), true), (Some(Ivs::ENTRIES_PER_LEAF), false)]);
    assert_eq!(report.checked, 40 + 1);
    let world = world.reopened();
    assert_eq!(world.scrub().findings.len(), 2);
}

#[test]
fn changes_are_merged_into_a_leaf_page_that_is_wrong_on_the_device_and_known() {
    let world = World::out_of_place();
    world.write(0, 10, 1);
    world.store.map().merge().expect("merge");
    world.flip(world.leaf_place(0));
    assert_eq!(world.scrub().findings.len(), 1);
    world.store.map().leaves().forget_pages();
    world.write(3, 1, 2);
    world.store.map().merge().expect("merge");
    assert_eq!(world.scrub().findings, []);
    let world = world.reopened();
    assert_eq!(world.scrub().checked, 10);
}

#[test]
fn an_unknown_leaf_page_is_not_made_up() {
    let world = World::out_of_place();
    world.write(0, 200, 1);
    world.store.map().merge().expect("merge");
    world.flip(world.leaf_place(0));
    world.store.map().leaves().forget_pages();
    assert_eq!(world.repair(), (1, 0));
    assert_eq!(world.repair(), (1, 0));
}

#[test]
fn a_leaf_page_that_a_merge_has_written_already_is_not_written_over_what_the_checkpoint_needs() {
    let world = World::in_place();
    let map = world.store.map();
    world.write(0, 10, 1);
    map.merge().expect("merge");
    let needed = world.leaf_place(0);
    let mut before = [0; BLOCK_BYTES];
    world.device.read_exact_at(&mut before, needed).expect("read");
    world.write(0, 10, 2);
    map.begin_merge().expect("begin");
    map.merge_step().expect("step");
    assert_ne!(world.leaf_place(0), needed);
    world.flip(world.leaf_place(0));
    assert_eq!(world.scrub().findings.len(), 1);
    map.merge_step().expect("the last step, with the checkpoint");
    assert!(!map.is_merging());
    let mut after = [0; BLOCK_BYTES];
    world.device.read_exact_at(&mut after, needed).expect("read");
    assert_eq!(before, after);
    assert_eq!(world.repair(), (1, 1));
    assert_eq!(world.scrub().findings, []);
}
