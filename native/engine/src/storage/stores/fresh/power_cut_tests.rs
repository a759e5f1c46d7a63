//! Power cuts at every write of a store out of place. Each image must open, and hold a complete
//! version of every block: the one last written before the last flush, or one written since.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::freshness::leaf::LeafFormat;
use sealane_proto::sector::BLOCK_BYTES;

use super::super::pages::{BlockFile, PAGE_BYTES, Page};
use super::super::served::Served;
use super::super::torn_disk::{Observer, TornDisk};
use super::anchor::{Anchor, AnchorPolicy, MemoryAnchor};
use super::checkpoint::Checkpoint;
use super::geometry::Geometry;
use super::keys::{Authority, StoreKeys};
use super::map::Map;
use super::placed::{Placed, PlacedEntry};
use super::superblock::Superblock;
use super::test_blocks::{block, version_of};

/// Four sets, few spare slots, a short log and a small table, so that all of them are reused.
const GEOMETRY: Geometry = Geometry {
    block_count: 250,
    leaf_entries: Placed::ENTRIES_PER_LEAF,
    slot_count: 310,
    log_pages: 8,
    pending_max: 40,
    earlier: Vec::new(),
};
const SUPERBLOCK: Superblock = Superblock { uuid: [1; 16], seed: [2; 32], geometry: GEOMETRY };
/// Most blocks of a write in the workload.
const WRITE_BLOCKS_MAX: u64 = 8;
/// Number of images made at each instant.
const IMAGES: u64 = 4;

/// A device and the anchor of its store at one instant.
struct Machine {
    disk: Arc<TornDisk>,
    anchor: Option<Arc<MemoryAnchor>>,
}

impl Machine {
    fn new(disk: TornDisk, anchor: Option<Arc<MemoryAnchor>>) -> Self {
        Self { disk: Arc::new(disk), anchor }
    }

    fn anchor(&self) -> Option<Arc<dyn Anchor>> {
        self.anchor.clone().map(|anchor| anchor as Arc<dyn Anchor>)
    }

    fn open(&self) -> io::Result<Map<Placed>> {
        let file = Arc::clone(&self.disk) as Arc<dyn BlockFile>;
        self.open_over(file)
    }

    fn open_over(&self, file: Arc<dyn BlockFile>) -> io::Result<Map<Placed>> {
        let keys = StoreKeys::new(&SUPERBLOCK.uuid, &SUPERBLOCK.seed, &Authority::Device);
        Map::open(file, &SUPERBLOCK, keys, self.anchor())
    }
}

/// A copy of the anchor.
fn copied(anchor: Option<&Arc<MemoryAnchor>>) -> Option<Arc<MemoryAnchor>> {
    anchor.map(|anchor| Arc::new(anchor.copy()))
}

/// Reads a block. Returns its version, or `None` if it is no complete version.
fn version(map: &Map<Placed>, disk: &TornDisk, lba: u64) -> Option<u64> {
    let (set, index) = (lba / Placed::ENTRIES_PER_LEAF, lba % Placed::ENTRIES_PER_LEAF);
    version_with(map.set_entries(set).expect("leaf page")[index as usize], disk, lba)
}

fn version_with(entry: Option<PlacedEntry>, disk: &TornDisk, lba: u64) -> Option<u64> {
    let Some(entry) = entry else { return Some(0) };
    let mut page = [Page::ZERO];
    disk.read(GEOMETRY.slot(entry.slot), &mut page).expect("read");
    version_of(lba, &page[0], &entry.metadata())
}

/// The versions that a block may have: the durable one, and those written since.
#[derive(Debug, Default)]
struct Oracle {
    durable: BTreeMap<u64, u64>,
    since: BTreeMap<u64, Vec<u64>>,
}

impl Oracle {
    fn changed(&mut self, lba: u64, version: u64) {
        self.since.entry(lba).or_default().push(version);
    }

    fn flushed(&mut self) {
        for (lba, versions) in std::mem::take(&mut self.since) {
            self.durable.extend(versions.last().map(|version| (lba, *version)));
        }
    }

    /// Checks an image. Returns the versions that it holds.
    fn check(&self, machine: &Machine) -> BTreeMap<u64, u64> {
        let map = machine.open().expect("an honest power cut");
        let disk = &machine.disk;
        let entries = (0..GEOMETRY.sets()).flat_map(|set| map.set_entries(set).expect("leaf page"));
        let versions = (0..).zip(entries).map(|(lba, entry)| {
            let version = version_with(entry, disk, lba);
            let version = version.unwrap_or_else(|| panic!("block {lba} is torn"));
            let durable = self.durable.get(&lba).copied().unwrap_or(0);
            let is_since = self.since.get(&lba).is_some_and(|since| since.contains(&version));
            assert!(version == durable || is_since, "block {lba}: {version}, durable {durable}");
            (lba, version)
        });
        versions.collect()
    }
}

/// A write that was given to the device but not committed.
struct InFlight {
    lba: u64,
    version: u64,
    entries: Vec<PlacedEntry>,
}

struct Run {
    machine: Machine,
    /// Device used by the map and for data.
    file: Arc<dyn BlockFile>,
    map: Map<Placed>,
    oracle: Arc<Mutex<Oracle>>,
    in_flight: Vec<InFlight>,
    version: u64,
}

impl Run {
    fn create(machine: Machine) -> Self {
        let file = Arc::clone(&machine.disk) as Arc<dyn BlockFile>;
        let anchor = machine.anchor();
        let map = Map::create(Arc::clone(&file), &SUPERBLOCK, &Authority::Device, anchor);
        Self::of(machine, file, map.expect("store"), Arc::default())
    }

    fn open(machine: Machine, oracle: Arc<Mutex<Oracle>>) -> Self {
        let file = Arc::clone(&machine.disk) as Arc<dyn BlockFile>;
        let map = machine.open().expect("store");
        Self::of(machine, file, map, oracle)
    }

    fn of(
        machine: Machine,
        file: Arc<dyn BlockFile>,
        map: Map<Placed>,
        oracle: Arc<Mutex<Oracle>>,
    ) -> Self {
        Self { machine, file, map, oracle, in_flight: Vec::new(), version: 0 }
    }

    fn simple() -> Self {
        Self::create(Machine::new(TornDisk::default(), None))
    }

    fn anchored(policy: AnchorPolicy) -> Self {
        let anchor = Some(Arc::new(MemoryAnchor::new(policy)));
        Self::create(Machine::new(TornDisk::default(), anchor))
    }

    fn disk(&self) -> &TornDisk {
        &self.machine.disk
    }

    /// The machine after a power cut that left this image.
    fn after(&self, image: TornDisk) -> Machine {
        Machine::new(image, copied(self.machine.anchor.as_ref()))
    }

    fn oracle(&self) -> MutexGuard<'_, Oracle> {
        self.oracle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Places a write and gives its data to the device.
    fn begin(&mut self, lba: u64, blocks: u64) {
        self.version += 1;
        let version = self.version;
        let data: Vec<_> = (lba..lba + blocks).flat_map(|lba| block(lba, version)).collect();
        let entries = loop {
            if let Some(entries) = self.map.place(&data).expect("place") {
                break entries;
            }
            self.end_all();
            self.map.make_room().expect("room");
            self.oracle().flushed();
        };
        for (entry, block) in entries.iter().zip(data.chunks_exact(BLOCK_BYTES)) {
            let mut page = Page::ZERO;
            page.0.copy_from_slice(&block[..PAGE_BYTES]);
            self.file.write(GEOMETRY.slot(entry.slot), &[page]).expect("write");
        }
        self.in_flight.push(InFlight { lba, version, entries });
    }

    fn end(&mut self, index: usize) {
        let InFlight { lba, version, entries } = self.in_flight.swap_remove(index);
        {
            let mut oracle = self.oracle();
            (lba..).zip(&entries).for_each(|(lba, _)| oracle.changed(lba, version));
        }
        self.map.commit(lba, &entries).expect("commit");
    }

    fn end_all(&mut self) {
        while !self.in_flight.is_empty() {
            self.end(0);
        }
    }

    fn write(&mut self, lba: u64, blocks: u64) {
        self.begin(lba, blocks);
        self.end(self.in_flight.len() - 1);
    }

    fn deallocate(&mut self, lba: u64, blocks: u64) {
        while !self.map.deallocate(lba, blocks).expect("deallocate") {
            self.end_all();
            self.map.make_room().expect("room");
            self.oracle().flushed();
        }
        let mut oracle = self.oracle();
        (lba..lba + blocks).for_each(|lba| oracle.changed(lba, 0));
    }

    fn flush(&mut self) {
        self.map.flush().expect("flush");
        self.oracle().flushed();
    }

    fn merge(&mut self) {
        self.map.merge().expect("merge");
        self.oracle().flushed();
    }

    /// Loses the anchor's next answer, whether or not the advance takes effect; afterwards
    /// everything must continue.
    fn lose_an_answer(&mut self, is_made: bool, merges: bool) {
        let Some(anchor) = &self.machine.anchor else { return };
        anchor.fail_next(is_made);
        let outcome = if merges { self.map.merge() } else { self.map.flush() };
        if let Err(error) = outcome {
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        }
        anchor.recover();
        self.flush();
    }

    fn is_busy(&self, lba: u64, blocks: u64) -> bool {
        let ranges = self.in_flight.iter().map(|write| (write.lba, write.entries.len() as u64));
        ranges.into_iter().any(|(other, count)| lba < other + count && other < lba + blocks)
    }

    /// Performs a step of the workload.
    fn step(&mut self, random: &mut ChaCha8Rng) {
        let blocks = 1 + random.next_u64() % WRITE_BLOCKS_MAX;
        // A small range is written much more often than the rest.
        let span = [GEOMETRY.block_count, 16][(random.next_u32() % 2) as usize];
        let lba = random.next_u64() % (span - blocks);
        match random.next_u32() % 20 {
            0..=8 if !self.is_busy(lba, blocks) => self.begin(lba, blocks),
            9..=15 if !self.in_flight.is_empty() => {
                self.end((random.next_u64() % self.in_flight.len() as u64) as usize);
            }
            16 if !self.is_busy(lba, blocks) => self.deallocate(lba, blocks),
            17 => self.flush(),
            18 if random.next_u32().is_multiple_of(4) => {
                let [is_made, merges] = [(); 2].map(|()| random.next_u32().is_multiple_of(2));
                self.lose_an_answer(is_made, merges);
            }
            18 if !self.map.is_merging() => {
                self.map.begin_merge().expect("merge");
                self.oracle().flushed();
            }
            18 | 19 if self.map.is_merging() => self.map.merge_step().expect("step"),
            19 if random.next_u32().is_multiple_of(8) => self.merge(),
            _ => {}
        }
    }

    fn check(&self, image: TornDisk) -> BTreeMap<u64, u64> {
        self.oracle().check(&self.after(image))
    }
}

/// Checks images at every instant at which the device is about to write or sync.
fn watcher(
    oracle: Arc<Mutex<Oracle>>,
    anchor: Option<Arc<MemoryAnchor>>,
    images: Arc<AtomicU64>,
    random: Mutex<ChaCha8Rng>,
    depth: u32,
) -> Observer {
    Box::new(move |disk| {
        let mut random = random.lock().unwrap_or_else(PoisonError::into_inner);
        let count = if depth == 0 { 1 } else { IMAGES };
        for number in 0..count {
            let image = match number {
                0 if depth > 0 => disk.lost(),
                1 => disk.whole(),
                _ => disk.random_image(&mut random),
            };
            images.fetch_add(1, Ordering::Relaxed);
            let anchor = copied(anchor.as_ref());
            // Some images lose power again while they are being opened.
            let image = if depth > 0 && random.next_u32().is_multiple_of(8) {
                let next = Mutex::new(ChaCha8Rng::seed_from_u64(random.next_u64()));
                let (oracle, images) = (Arc::clone(&oracle), Arc::clone(&images));
                image.observed(watcher(oracle, anchor.clone(), images, next, depth - 1))
            } else {
                image
            };
            let oracle = {
                let oracle = oracle.lock().unwrap_or_else(PoisonError::into_inner);
                Oracle { durable: oracle.durable.clone(), since: oracle.since.clone() }
            };
            oracle.check(&Machine::new(image, anchor));
        }
    })
}

/// Opens the image of a store without an anchor.
fn reopen(image: TornDisk) -> io::Result<(Arc<TornDisk>, Map<Placed>)> {
    let machine = Machine::new(image, None);
    let map = machine.open()?;
    Ok((machine.disk, map))
}

fn versions(image: TornDisk, lbas: std::ops::Range<u64>) -> Vec<Option<u64>> {
    let (disk, map) = reopen(image).expect("store");
    lbas.map(|lba| version(&map, &disk, lba)).collect()
}

#[test]
fn a_flush_makes_data_and_log_durable() {
    let mut run = Run::simple();
    run.write(3, 2);
    assert_eq!(versions(run.disk().lost(), 3..5), [Some(0), Some(0)]);
    run.flush();
    assert_eq!(versions(run.disk().lost(), 3..5), [Some(1), Some(1)]);
    run.deallocate(4, 1);
    assert_eq!(versions(run.disk().lost(), 3..5), [Some(1), Some(1)]);
    run.flush();
    assert_eq!(versions(run.disk().lost(), 3..5), [Some(1), Some(0)]);
}

#[test]
fn a_flush_of_nothing_costs_no_sync() {
    let mut run = Run::simple();
    run.write(3, 2);
    run.flush();
    let syncs = run.disk().syncs();
    run.flush();
    assert_eq!(run.disk().syncs(), syncs);
}

#[test]
fn a_slot_is_not_written_again_before_the_record_that_replaces_it_is_durable() {
    let mut run = Run::simple();
    run.write(0, 1);
    run.flush();
    // Every free slot is taken in turn. If the first version's slot were free, its data would be
    // overwritten.
    let mut taken = Vec::new();
    run.write(0, 1);
    while run.map.free_slots() > 0 {
        let Some(entries) = run.map.place(&block(9, 9)).expect("place") else { break };
        run.file.write(GEOMETRY.slot(entries[0].slot), &[Page([9; PAGE_BYTES])]).expect("write");
        taken.extend(entries);
    }
    assert_eq!(versions(run.disk().whole(), 0..1), [Some(1)]);
    let before = run.map.free_slots();
    run.flush();
    assert_eq!(run.map.free_slots(), before + 1, "the first version's slot is free");
    run.map.abandon(&taken);
}

#[test]
fn a_slot_of_a_leaf_page_is_kept_until_the_next_checkpoint() {
    let mut run = Run::simple();
    run.write(0, 1);
    run.merge();
    let free = run.map.free_slots();
    run.write(0, 1);
    run.flush();
    assert_eq!(run.map.free_slots(), free - 1);
    run.map.begin_merge().expect("merge");
    run.map.merge_step().expect("the leaf page");
    assert_eq!(run.map.free_slots(), free - 1);
    run.map.merge_step().expect("the checkpoint");
    assert!(!run.map.is_merging());
    assert_eq!(run.map.free_slots(), free);
}

/// Makes images at every instant. Returns the version of block 5 in each of them.
fn instants(
    disk: TornDisk,
    images: impl Fn(&TornDisk) -> Vec<TornDisk> + Send + Sync + 'static,
    act: impl FnOnce(&mut Run),
) -> (Run, Vec<Option<u64>>) {
    let seen: Arc<Mutex<Vec<_>>> = Arc::default();
    let (for_observer, is_on) = (Arc::clone(&seen), Arc::new(AtomicU64::new(0)));
    let is_watching = Arc::clone(&is_on);
    let observer = move |disk: &TornDisk| {
        if is_watching.load(Ordering::Relaxed) == 1 {
            let found = images(disk).into_iter().map(|image| versions(image, 5..6)[0]);
            for_observer.lock().expect("seen").extend(found);
        }
    };
    let machine = Machine::new(disk.observed(Box::new(observer)), None);
    let mut run = Run::open(machine, Arc::default());
    is_on.store(1, Ordering::Relaxed);
    run.version = 7;
    act(&mut run);
    is_on.store(0, Ordering::Relaxed);
    let seen = seen.lock().expect("seen").clone();
    (run, seen)
}

/// A store in which block 5 is written and durable.
fn durable_block_5() -> TornDisk {
    let mut run = Run::simple();
    run.write(5, 1);
    run.flush();
    run.disk().whole()
}

#[test]
fn a_record_without_its_data_is_not_taken() {
    // The first write that isn't durable is the block's data: lost in one image, torn in the other.
    // Everything else is kept.
    let images = |disk: &TornDisk| {
        vec![
            disk.image(|write, _| write != 0),
            disk.image(|write, sector| write != 0 || sector < 4),
        ]
    };
    let (_, seen) = instants(durable_block_5(), images, |run| {
        run.write(5, 1);
        run.flush();
    });
    let (before, after) = seen.split_at(seen.len() - 2);
    assert!(before.len() >= 4 && before.iter().all(|version| *version == Some(1)), "{seen:?}");
    assert_eq!(after, [Some(8), Some(8)]);
}

#[test]
fn a_checkpoint_names_no_data_that_is_not_durable() {
    let images = |disk: &TornDisk| vec![disk.lost(), disk.image(|write, _| write != 0)];
    let (_, seen) = instants(durable_block_5(), images, |run| {
        run.write(5, 1);
        run.merge();
    });
    assert!(seen.iter().all(Option::is_some), "{seen:?}");
    assert_eq!(seen.last(), Some(&Some(8)));
}

#[test]
fn a_checkpoint_counts_only_when_its_pages_do() {
    // Keeps only the last write. A checkpoint's page without the node pages that it refers to would
    // be a damaged store.
    let images = |disk: &TornDisk| {
        let last = disk.volatile().saturating_sub(1);
        vec![disk.image(|write, _| write == last)]
    };
    let (_, seen) = instants(durable_block_5(), images, |run| {
        run.write(5, 1);
        run.flush();
        run.merge();
    });
    assert!(seen.iter().all(Option::is_some), "{seen:?}");
}

#[test]
fn pages_of_an_uncompleted_checkpoint_are_never_taken_later() {
    // The entire checkpoint except its own page: its node pages are complete but void.
    let found: Arc<Mutex<Vec<TornDisk>>> = Arc::default();
    let images = Arc::clone(&found);
    let keep = move |disk: &TornDisk| {
        images.lock().expect("found").push(disk.whole());
        Vec::new()
    };
    instants(durable_block_5(), keep, |run| {
        run.write(5, 1);
        run.merge();
    });
    for image in found.lock().expect("found").drain(..) {
        let (mut disk, map) = reopen(image).expect("store");
        let first = version(&map, &disk, 5);
        assert!(first == Some(1) || first == Some(8));
        for _ in 0..3 {
            let (next, map) = reopen(disk.whole()).expect("store");
            assert_eq!(version(&map, &next, 5), first);
            disk = next;
        }
    }
}

/// A store that has block 5 only in its log, with its checkpoint changed and sealed again.
fn with_checkpoint(change: impl FnOnce(&mut Checkpoint)) -> TornDisk {
    let mut run = Run::simple();
    run.write(5, 1);
    run.flush();
    let disk = run.disk().whole();
    let keys = StoreKeys::new(&SUPERBLOCK.uuid, &SUPERBLOCK.seed, &Authority::Device);
    let mut pages = [Page::ZERO; 2];
    disk.read(GEOMETRY.checkpoint(0), &mut pages).expect("read");
    let whole = pages.iter().filter_map(|page| Checkpoint::decode(page, &keys));
    let (mut last, _) = whole.max_by_key(|(last, _)| last.number).expect("a checkpoint");
    disk.write(GEOMETRY.checkpoint(0), &[Page::ZERO; 2]).expect("write");
    change(&mut last);
    let place = GEOMETRY.checkpoint(last.number);
    disk.write(place, &[last.encode(&keys).0]).expect("write");
    disk.sync().expect("sync");
    disk.whole()
}

#[test]
fn the_log_of_another_opening_stays_unknown() {
    let changes: [fn(&mut Checkpoint); 3] =
        [|last| last.epoch += 1, |last| last.nonce[0] ^= 1, |last| last.log_tag[0] ^= 1];
    for change in changes {
        let (disk, map) = reopen(with_checkpoint(change)).expect("store");
        assert_eq!(version(&map, &disk, 5), Some(0));
        drop(map);
        let (disk, map) = reopen(disk.whole()).expect("store");
        assert_eq!(version(&map, &disk, 5), Some(0));
    }
}

#[test]
fn impossible_numbers_are_damage() {
    let changes: [fn(&mut Checkpoint); 5] = [
        |last| last.number = u64::MAX,
        |last| last.epoch = u64::MAX,
        |last| last.log_start = u64::MAX,
        |last| last.log_flushed = u64::MAX,
        |last| last.sequence = u64::MAX,
    ];
    for change in changes {
        let error = reopen(with_checkpoint(change)).expect_err("a refusal");
        assert!(error.to_string().contains("impossible"), "{error}");
    }
}

#[test]
fn a_checkpoint_of_another_tree_is_damage() {
    let error = reopen(with_checkpoint(|last| last.root[0] ^= 1)).expect_err("a refusal");
    assert!(error.to_string().contains("tree are missing"), "{error}");
}

#[test]
fn log_pages_that_overtook_a_lost_one_do_not_continue_a_later_log() {
    // Two flushes of one page each; only the second reaches the device.
    let kept = Arc::new(Mutex::new(None));
    let keep = Arc::clone(&kept);
    let images = move |disk: &TornDisk| {
        if disk.volatile() == 4 {
            *keep.lock().expect("image") = Some(disk.image(|write, _| write != 1));
        }
        Vec::new()
    };
    let mut run = Run::simple();
    run.write(40, 1);
    run.merge();
    instants(run.disk().whole(), images, |run| {
        // The device reports a sync that it didn't make.
        run.write(41, 1);
        run.machine.disk.lie_once();
        run.flush();
        run.write(42, 1);
        run.flush();
    });
    let image = kept.lock().expect("image").take().expect("the sync after the second log page");
    let error = reopen(image.whole()).expect_err("a page that was called flushed is missing");
    assert!(error.to_string().contains("log are missing"), "{error}");
}

#[test]
fn of_two_concurrent_writes_the_one_committed_last_prevails() {
    let mut run = Run::simple();
    run.begin(5, 1);
    run.begin(5, 1);
    let free = run.map.free_slots();
    run.end(1);
    run.end(0);
    run.flush();
    assert_eq!(version(&run.map, run.disk(), 5), Some(1));
    assert_eq!(versions(run.disk().lost(), 5..6), [Some(1)]);
    assert_eq!(run.map.free_slots(), free + 1);
}

#[test]
fn the_log_is_not_written_over_before_a_checkpoint_replaced_it() {
    let mut run = Run::simple();
    for round in 0..20 * GEOMETRY.log_pages {
        run.write(round % 90, 1);
        run.flush();
        let (disk, map) = reopen(run.disk().lost()).expect("store");
        assert_eq!(version(&map, &disk, round % 90), Some(round + 1));
    }
}

#[test]
fn a_store_that_lost_what_was_durable_is_refused() {
    let mut run = Run::simple();
    run.write(5, 1);
    run.merge();
    for lba in 0..3 {
        run.write(lba, 1);
        run.flush();
    }
    let refused = |page, expected: &str| {
        let image = run.disk().lost();
        image.damage(page);
        let error = reopen(image).expect_err("damaged").to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(GEOMETRY.nodes(0, 0), "tree are missing");
    // The first page of the epoch, and one that a later page calls flushed.
    refused(GEOMETRY.log(1), "log are missing");
    refused(GEOMETRY.log(2), "log are missing");
    let image = run.disk().lost();
    image.damage(0);
    let error = Superblock::read(&image, &Authority::Device).expect_err("damaged").to_string();
    assert!(error.contains("superblock"), "{error}");
    let whole = Superblock::read(&run.disk().lost(), &Authority::Device);
    assert_eq!(whole.expect("superblock").0, SUPERBLOCK);
}

#[test]
fn a_store_whose_log_fails_takes_nothing_more() {
    let mut run = Run::simple();
    run.write(5, 1);
    run.flush();
    run.write(5, 1);
    run.disk().fail_after(0);
    assert!(run.map.flush().is_err());
    assert!(run.map.flush().is_err() && run.map.merge().is_err());
    assert!(run.map.place(&block(5, 9)).is_err() && run.map.deallocate(5, 1).is_err());
    assert_eq!(version(&run.map, run.disk(), 5), Some(2), "reads continue");
    assert_eq!(versions(run.disk().lost(), 5..6), [Some(1)]);
}

/// Runs a seeded workload through three lives, each ending in a power cut, with images at every
/// instant.
fn live(seed: u64, first: Run, images: &Arc<AtomicU64>) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut run = first;
    for life in 0..3 {
        let image = run.disk().random_image(&mut random);
        // Whatever the image holds is durable once it was opened.
        let durable = run.check(image.whole());
        let oracle = Arc::new(Mutex::new(Oracle { durable, since: BTreeMap::new() }));
        let next = Mutex::new(ChaCha8Rng::seed_from_u64(seed << 8 | life));
        let anchor = copied(run.machine.anchor.as_ref());
        let watcher = watcher(Arc::clone(&oracle), anchor.clone(), Arc::clone(images), next, 1);
        let version = run.version;
        run = Run::open(Machine::new(image.observed(watcher), anchor), oracle);
        run.version = version;
        for _ in 0..80 {
            run.step(&mut random);
        }
    }
}

#[test]
fn every_power_cut_leaves_each_block_whole_and_flushed_writes_in_place() {
    let images = Arc::new(AtomicU64::new(0));
    for seed in 0..2 {
        live(seed, Run::simple(), &images);
    }
    let images = images.load(Ordering::Relaxed);
    println!("{images} images");
    assert!(images > 4_000, "only {images} images");
}

#[test]
fn no_honest_power_cut_is_called_a_roll_back_whenever_the_anchor_is_advanced() {
    let images = Arc::new(AtomicU64::new(0));
    for (seed, policy) in [(2, AnchorPolicy::EveryCommit), (3, AnchorPolicy::Checkpoints)] {
        live(seed, Run::anchored(policy), &images);
    }
    let images = images.load(Ordering::Relaxed);
    println!("{images} images");
    assert!(images > 4_000, "only {images} images");
}

#[test]
fn every_power_cut_of_a_third_party_leaves_each_block_whole() {
    let images = Arc::new(AtomicU64::new(0));
    let oracle = Arc::<Mutex<Oracle>>::default();
    let mut random = ChaCha8Rng::seed_from_u64(9);
    let next = Mutex::new(ChaCha8Rng::seed_from_u64(10));
    let watcher = watcher(Arc::clone(&oracle), None, Arc::clone(&images), next, 1);
    let machine = Machine::new(Run::simple().disk().whole().observed(watcher), None);
    let served = Arc::new(Served::disk(&machine.disk, GEOMETRY.device_pages()));
    let map = machine.open_over(Arc::clone(&served) as Arc<dyn BlockFile>).expect("store");
    let mut run = Run::of(machine, served, map, oracle);
    for _ in 0..60 {
        run.step(&mut random);
    }
    let images = images.load(Ordering::Relaxed);
    assert!(images > 400, "only {images} images");
}
