//! Power cuts at every write of a sealed file store: each image must open, and hold for every
//! block a version that was written last before the last flush, or one written since, as a whole.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};

use super::super::store::BLOCK_BYTES;
use super::layout::{Authority, Checker, Checkpoint, Entry, Geometry, Superblock};
use super::pages::{BlockFile, PAGE_BYTES, Page};
use super::sealed_map::SealedMap;
use super::served::Served;
use super::torn_disk::TornDisk;

/// Three pages of table, few spare slots and a short log, so that all of them turn over.
const GEOMETRY: Geometry = Geometry { block_count: 100, slot_count: 124, log_pages: 8 };
const SUPERBLOCK: Superblock = Superblock { uuid: [1; 16], seed: [2; 32], geometry: GEOMETRY };
/// Largest write of the workload.
const WRITE_BLOCKS_MAX: u64 = 8;
/// Images made at one instant.
const IMAGES: u64 = 6;

fn open(file: Arc<dyn BlockFile>) -> std::io::Result<SealedMap> {
    SealedMap::open(file, GEOMETRY, Checker::new(&SUPERBLOCK, &Authority::Device))
}

/// A block of which every 64 bytes name LBA and version; version 0 is zeros.
fn block(lba: u64, version: u64) -> [u8; BLOCK_BYTES] {
    let mut block = [0; BLOCK_BYTES];
    if version > 0 {
        for (index, part) in (0u64..).zip(block.chunks_exact_mut(64)) {
            part[..8].copy_from_slice(&lba.to_le_bytes());
            part[8..16].copy_from_slice(&version.to_le_bytes());
            part[16..24].copy_from_slice(&index.to_le_bytes());
        }
    }
    block
}

/// Reads a block and says which version it is as a whole; None if it is none. Looks at the start
/// of each sector of 512 bytes: what lies between can't be of another write.
fn version(map: &SealedMap, disk: &TornDisk, lba: u64) -> Option<u64> {
    let entry = map.entries(lba, 1)[0];
    let Some(slot) = entry.slot else { return Some(0) };
    let mut page = [Page::ZERO];
    disk.read(GEOMETRY.slot(slot), &mut page).expect("read");
    let version = u64::from_le_bytes(page[0].0[8..16].try_into().expect("8 bytes"));
    let starts = page[0].0.chunks_exact(512).chain([&entry.metadata[..]]);
    let is_whole = (0u64..).step_by(8).zip(starts).all(|(index, start)| {
        let expected = [lba, version, index].map(u64::to_le_bytes);
        start[..24] == *expected.as_flattened()
    });
    is_whole.then_some(version)
}

/// What a block may read as: what was durable, and what was written since.
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

    /// Checks an image; returns what it holds.
    fn check(&self, disk: &Arc<TornDisk>) -> BTreeMap<u64, u64> {
        let file = Arc::clone(disk) as Arc<dyn BlockFile>;
        let map = open(file).expect("an honest power cut");
        let versions = (0..GEOMETRY.block_count).map(|lba| {
            let version = version(&map, disk, lba).unwrap_or_else(|| panic!("block {lba} is torn"));
            let durable = self.durable.get(&lba).copied().unwrap_or(0);
            let is_since = self.since.get(&lba).is_some_and(|since| since.contains(&version));
            assert!(version == durable || is_since, "block {lba}: {version}, durable {durable}");
            (lba, version)
        });
        versions.collect()
    }
}

/// A write whose data is on its way.
struct InFlight {
    lba: u64,
    version: u64,
    entries: Vec<Entry>,
}

struct Run {
    disk: Arc<TornDisk>,
    /// How map and data reach the disk.
    file: Arc<dyn BlockFile>,
    map: SealedMap,
    oracle: Arc<Mutex<Oracle>>,
    in_flight: Vec<InFlight>,
    version: u64,
}

impl Run {
    fn start(disk: TornDisk, oracle: Arc<Mutex<Oracle>>, is_new: bool) -> Self {
        let disk = Arc::new(disk);
        let file = Arc::clone(&disk) as Arc<dyn BlockFile>;
        Self::start_over(disk, file, oracle, is_new)
    }

    fn start_over(
        disk: Arc<TornDisk>,
        file: Arc<dyn BlockFile>,
        oracle: Arc<Mutex<Oracle>>,
        is_new: bool,
    ) -> Self {
        let map = if is_new {
            SealedMap::create(Arc::clone(&file), &SUPERBLOCK, &Authority::Device)
        } else {
            open(Arc::clone(&file))
        };
        Self { disk, file, map: map.expect("store"), oracle, in_flight: Vec::new(), version: 0 }
    }

    fn simple() -> Self {
        Self::start(TornDisk::default(), Arc::default(), true)
    }

    fn oracle(&self) -> std::sync::MutexGuard<'_, Oracle> {
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
            self.flush();
        };
        for (entry, block) in entries.iter().zip(data.chunks_exact(BLOCK_BYTES)) {
            let mut page = Page::ZERO;
            page.0.copy_from_slice(&block[..PAGE_BYTES]);
            let slot = entry.slot.expect("a placed block has a slot");
            self.file.write(GEOMETRY.slot(slot), &[page]).expect("write");
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
            self.flush();
        }
        let mut oracle = self.oracle();
        (lba..lba + blocks).for_each(|lba| oracle.changed(lba, 0));
    }

    fn flush(&mut self) {
        self.map.flush().expect("flush");
        self.oracle().flushed();
    }

    fn checkpoint(&mut self) {
        self.map.checkpoint().expect("checkpoint");
        self.oracle().flushed();
    }

    fn is_busy(&self, lba: u64, blocks: u64) -> bool {
        let ranges = self.in_flight.iter().map(|write| (write.lba, write.entries.len() as u64));
        ranges.into_iter().any(|(other, count)| lba < other + count && other < lba + blocks)
    }

    /// One step of the workload.
    fn step(&mut self, random: &mut ChaCha8Rng) {
        let blocks = 1 + random.next_u64() % WRITE_BLOCKS_MAX;
        // Some blocks are written much more often than others.
        let span = [GEOMETRY.block_count, 16][(random.next_u32() % 2) as usize];
        let lba = random.next_u64() % (span - blocks);
        match random.next_u32() % 20 {
            0..=8 if !self.is_busy(lba, blocks) => self.begin(lba, blocks),
            9..=15 if !self.in_flight.is_empty() => {
                self.end((random.next_u64() % self.in_flight.len() as u64) as usize);
            }
            16 if !self.is_busy(lba, blocks) => self.deallocate(lba, blocks),
            17 | 18 => self.flush(),
            19 if random.next_u32().is_multiple_of(4) => self.checkpoint(),
            _ => {}
        }
    }

    fn check(&self, disk: TornDisk) -> BTreeMap<u64, u64> {
        self.oracle().check(&Arc::new(disk))
    }
}

/// Checks images of every instant at which the device is about to write or sync.
fn watcher(
    oracle: Arc<Mutex<Oracle>>,
    images: Arc<AtomicU64>,
    random: Mutex<ChaCha8Rng>,
    depth: u32,
) -> super::torn_disk::Observer {
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
            // One image in some loses power again while it is opened.
            let image = if depth > 0 && random.next_u32().is_multiple_of(8) {
                let next = Mutex::new(ChaCha8Rng::seed_from_u64(random.next_u64()));
                let oracle = Arc::clone(&oracle);
                image.observed(watcher(oracle, Arc::clone(&images), next, depth - 1))
            } else {
                image
            };
            let oracle = {
                let oracle = oracle.lock().unwrap_or_else(PoisonError::into_inner);
                Oracle { durable: oracle.durable.clone(), since: oracle.since.clone() }
            };
            oracle.check(&Arc::new(image));
        }
    })
}

/// Opens the image and tells what it holds.
fn reopen(image: TornDisk) -> std::io::Result<(Arc<TornDisk>, SealedMap)> {
    let disk = Arc::new(image);
    let map = open(Arc::clone(&disk) as Arc<dyn BlockFile>)?;
    Ok((disk, map))
}

fn versions(image: TornDisk, lbas: std::ops::Range<u64>) -> Vec<Option<u64>> {
    let (disk, map) = reopen(image).expect("store");
    lbas.map(|lba| version(&map, &disk, lba)).collect()
}

#[test]
fn a_flush_makes_data_and_log_durable() {
    let mut run = Run::simple();
    run.write(3, 2);
    assert_eq!(versions(run.disk.lost(), 3..5), [Some(0), Some(0)]);
    run.flush();
    assert_eq!(versions(run.disk.lost(), 3..5), [Some(1), Some(1)]);
    run.deallocate(4, 1);
    assert_eq!(versions(run.disk.lost(), 3..5), [Some(1), Some(1)]);
    run.flush();
    assert_eq!(versions(run.disk.lost(), 3..5), [Some(1), Some(0)]);
}

#[test]
fn a_flush_of_nothing_costs_no_sync() {
    let mut run = Run::simple();
    run.write(3, 2);
    run.flush();
    let syncs = run.disk.syncs();
    run.flush();
    assert_eq!(run.disk.syncs(), syncs);
}

#[test]
fn a_slot_is_not_written_again_before_the_record_that_replaces_it_is_durable() {
    let mut run = Run::simple();
    let spare = GEOMETRY.slot_count - GEOMETRY.block_count;
    run.write(0, 1);
    run.flush();
    // Every slot is taken in turn, the first version's too were it free; its data stays.
    for _ in 0..GEOMETRY.slot_count - 1 {
        let before = run.map.free_slots();
        run.write(0, 1);
        assert!(run.map.free_slots() < before || before == 0);
        if run.map.free_slots() == 0 {
            break;
        }
    }
    assert!(run.map.free_slots() < spare);
    assert_eq!(run.map.place(&block(0, 9)).expect("place"), None, "no slot before a flush");
    assert_eq!(versions(run.disk.lost(), 0..1), [Some(1)]);
    run.flush();
    assert!(run.map.place(&block(0, 9)).expect("place").is_some());
}

/// Has `images` make images at every instant, and returns what block 5 was in each of them.
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
    let mut run = Run::start(disk.observed(Box::new(observer)), Arc::default(), false);
    is_on.store(1, Ordering::Relaxed);
    run.version = 7;
    act(&mut run);
    is_on.store(0, Ordering::Relaxed);
    let seen = seen.lock().expect("seen").clone();
    (run, seen)
}

/// A store in which block 5 was written, and is durable.
fn durable_block_5() -> TornDisk {
    let mut run = Run::simple();
    run.write(5, 1);
    run.flush();
    run.disk.whole()
}

#[test]
fn a_record_without_its_data_is_not_taken() {
    // The first write not yet durable is the block's data: lost, and torn. All else is kept.
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
        run.checkpoint();
    });
    assert!(seen.iter().all(Option::is_some), "{seen:?}");
    assert_eq!(seen.last(), Some(&Some(8)));
}

#[test]
fn a_checkpoint_counts_only_when_its_pages_do() {
    // Whatever was written last is kept, all before it lost: a checkpoint's page without those of
    // the table would have the store damaged.
    let images = |disk: &TornDisk| {
        let last = disk.volatile().saturating_sub(1);
        vec![disk.image(|write, _| write == last)]
    };
    let (_, seen) = instants(durable_block_5(), images, |run| {
        run.write(5, 1);
        run.flush();
        run.checkpoint();
    });
    assert!(seen.iter().all(Option::is_some), "{seen:?}");
}

#[test]
fn pages_of_an_uncompleted_checkpoint_are_never_taken_later() {
    // All of the checkpoint but its own page: its table pages are whole, and void.
    let found: Arc<Mutex<Vec<TornDisk>>> = Arc::default();
    let images = Arc::clone(&found);
    let keep = move |disk: &TornDisk| {
        images.lock().expect("found").push(disk.whole());
        Vec::new()
    };
    instants(durable_block_5(), keep, |run| {
        run.write(5, 1);
        run.checkpoint();
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

/// A store that holds block 5 by its log alone, with its checkpoint changed and sealed again.
fn with_checkpoint(change: impl FnOnce(&mut Checkpoint)) -> TornDisk {
    let mut run = Run::simple();
    run.write(5, 1);
    run.flush();
    let disk = run.disk.whole();
    let checker = Checker::new(&SUPERBLOCK, &Authority::Device);
    let mut pages = [Page::ZERO; 2];
    disk.read(GEOMETRY.checkpoint(0), &mut pages).expect("read");
    let whole = pages.iter().filter_map(|page| Checkpoint::decode(page, &checker));
    let mut last = whole.max_by_key(|checkpoint| checkpoint.number).expect("a checkpoint");
    disk.write(GEOMETRY.checkpoint(0), &[Page::ZERO; 2]).expect("write");
    change(&mut last);
    let place = GEOMETRY.checkpoint(last.number);
    disk.write(place, &[last.encode(&checker)]).expect("write");
    disk.sync().expect("sync");
    disk.whole()
}

#[test]
fn a_log_that_another_checkpoint_does_not_know_stays_unknown() {
    let (disk, map) = reopen(with_checkpoint(|last| last.generation ^= 1)).expect("store");
    assert_eq!(version(&map, &disk, 5), Some(0));
    drop(map);
    let (disk, map) = reopen(disk.whole()).expect("store");
    assert_eq!(version(&map, &disk, 5), Some(0));
}

#[test]
fn numbers_that_no_store_reaches_are_damage() {
    let changes: [fn(&mut Checkpoint); 3] = [
        |last| last.number = u64::MAX,
        |last| last.log_start = u64::MAX,
        |last| last.stamp = u64::MAX,
    ];
    for change in changes {
        let error = reopen(with_checkpoint(change)).expect_err("a refusal");
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    }
}

#[test]
fn log_pages_that_overtook_a_lost_one_do_not_continue_a_later_log() {
    let mut run = Run::simple();
    // Two pages of log, the first lost with the data that it tells of; then one page again.
    for lba in 0..6 {
        run.write(lba * 8, 8);
    }
    let first = Arc::new(Mutex::new(None));
    let keep = Arc::clone(&first);
    let images = move |disk: &TornDisk| {
        // 48 writes of data, then the two pages.
        if disk.volatile() == 50 {
            *keep.lock().expect("image") = Some(disk.image(|write, _| write != 48));
        }
        Vec::new()
    };
    instants(run.disk.whole(), images, |run| {
        for lba in 0..6 {
            run.write(lba * 8, 8);
        }
        run.flush();
    });
    let image = first.lock().expect("image").take().expect("the sync after two log pages");
    let (disk, map) = reopen(image).expect("store");
    assert_eq!(version(&map, &disk, 47), Some(0));
    drop(map);
    let mut run = Run::start(disk.whole(), Arc::default(), false);
    run.version = 70;
    run.write(60, 1);
    run.flush();
    assert_eq!(versions(run.disk.lost(), 47..48), [Some(0)]);
    assert_eq!(versions(run.disk.lost(), 60..61), [Some(71)]);
}

#[test]
fn of_two_writes_at_once_the_one_placed_last_stands() {
    let mut run = Run::simple();
    run.begin(5, 1);
    run.begin(5, 1);
    let free = run.map.free_slots();
    run.end(1);
    run.end(0);
    run.flush();
    assert_eq!(version(&run.map, &run.disk, 5), Some(2));
    assert_eq!(versions(run.disk.lost(), 5..6), [Some(2)]);
    assert_eq!(run.map.free_slots(), free + 1);
}

#[test]
fn the_log_is_not_written_over_before_a_checkpoint_replaced_it() {
    let mut run = Run::simple();
    for round in 0..20 * GEOMETRY.log_pages {
        run.write(round % 90, 1);
        run.flush();
        let (disk, map) = reopen(run.disk.lost()).expect("store");
        assert_eq!(version(&map, &disk, round % 90), Some(round + 1));
    }
}

#[test]
fn a_store_that_lost_what_was_durable_is_refused() {
    let mut run = Run::simple();
    run.write(5, 1);
    run.checkpoint();
    for lba in 0..3 {
        run.write(lba, 1);
        run.flush();
    }
    let refused = |page, expected: &str| {
        let image = run.disk.lost();
        image.damage(page);
        let error = reopen(image).expect_err("damaged").to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(GEOMETRY.table(0, 0), "table are missing");
    refused(GEOMETRY.log(0), "log are missing");
    refused(GEOMETRY.log(1), "log are missing");
    let image = run.disk.lost();
    image.damage(0);
    let error =
        super::recovery::superblock(&image, &Authority::Device).expect_err("damaged").to_string();
    assert!(error.contains("superblock"), "{error}");
    let whole = super::recovery::superblock(&run.disk.lost(), &Authority::Device);
    assert_eq!(whole.expect("superblock").0, SUPERBLOCK);
}

#[test]
fn a_store_whose_log_fails_takes_nothing_more() {
    let mut run = Run::simple();
    run.write(5, 1);
    run.flush();
    run.write(5, 1);
    run.disk.fail_after(0);
    assert!(run.map.flush().is_err());
    assert!(run.map.flush().is_err() && run.map.checkpoint().is_err());
    assert!(run.map.place(&block(5, 9)).is_err() && run.map.deallocate(5, 1).is_err());
    assert_eq!(version(&run.map, &run.disk, 5), Some(2), "reads go on");
    assert_eq!(versions(run.disk.lost(), 5..6), [Some(1)]);
}

#[test]
fn every_power_cut_leaves_each_block_whole_and_flushed_writes_in_place() {
    let images = Arc::new(AtomicU64::new(0));
    for seed in 0..3 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut oracle = Arc::<Mutex<Oracle>>::default();
        let mut run: Option<Run> = None;
        for life in 0..4 {
            let disk = match &run {
                None => TornDisk::default(),
                Some(run) => {
                    let image = run.disk.random_image(&mut random);
                    // What the image holds is durable from its opening on.
                    let durable = run.check(image.whole());
                    oracle = Arc::new(Mutex::new(Oracle { durable, since: BTreeMap::new() }));
                    image
                }
            };
            let next = Mutex::new(ChaCha8Rng::seed_from_u64(seed << 8 | life));
            let version = run.as_ref().map_or(0, |run| run.version);
            let fresh = run.is_none();
            let mut started = if fresh {
                // Until it is created there is no store to open.
                let created = Run::start(disk, Arc::clone(&oracle), true);
                let watched = created.disk.whole();
                let watched =
                    watched.observed(watcher(Arc::clone(&oracle), Arc::clone(&images), next, 1));
                Run::start(watched, Arc::clone(&oracle), false)
            } else {
                let watched =
                    disk.observed(watcher(Arc::clone(&oracle), Arc::clone(&images), next, 1));
                Run::start(watched, Arc::clone(&oracle), false)
            };
            started.version = version;
            for _ in 0..120 {
                started.step(&mut random);
            }
            run = Some(started);
        }
    }
    let images = images.load(Ordering::Relaxed);
    println!("{images} images");
    assert!(images > 20_000, "only {images} images");
}

#[test]
fn every_power_cut_of_somebody_elses_target_leaves_each_block_whole() {
    let images = Arc::new(AtomicU64::new(0));
    let oracle = Arc::<Mutex<Oracle>>::default();
    let mut random = ChaCha8Rng::seed_from_u64(9);
    let created = Run::start(TornDisk::default(), Arc::clone(&oracle), true);
    let next = Mutex::new(ChaCha8Rng::seed_from_u64(10));
    let disk =
        created.disk.whole().observed(watcher(Arc::clone(&oracle), Arc::clone(&images), next, 1));
    let disk = Arc::new(disk);
    let served = Arc::new(Served::disk(&disk, GEOMETRY.page_count()));
    let mut run = Run::start_over(disk, served, oracle, false);
    for _ in 0..200 {
        run.step(&mut random);
    }
    let images = images.load(Ordering::Relaxed);
    assert!(images > 1000, "only {images} images");
}
