//! Power cuts at every write of a sealed file store: each image must open, and hold for every
//! block a version that was written last before the last flush, or one written since, as a whole.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};

use super::super::store::{BLOCK_BYTES, DATA_BYTES};
use super::layout::{Entry, Geometry, Superblock};
use super::pages::{BlockFile, PAGE_BYTES, Page};
use super::sealed_map::SealedMap;
use super::torn_disk::TornDisk;

/// Three pages of table, few spare slots and a short log, so that all of them turn over.
const GEOMETRY: Geometry = Geometry { block_count: 100, slot_count: 124, log_pages: 8 };
const SUPERBLOCK: Superblock = Superblock { uuid: [1; 16], key: [2; 32], geometry: GEOMETRY };
/// Largest write of the workload.
const WRITE_BLOCKS_MAX: u64 = 8;
/// Images made at one instant.
const IMAGES: u64 = 6;

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

/// Reads a block and says which version it is as a whole; None if it is none.
fn version(map: &SealedMap, disk: &TornDisk, lba: u64) -> Option<u64> {
    let entry = map.entries(lba, 1)[0];
    let mut found = [0; BLOCK_BYTES];
    if let Some(slot) = entry.slot {
        let mut page = [Page::ZERO];
        disk.read(GEOMETRY.slot(slot), &mut page).expect("read");
        found[..DATA_BYTES].copy_from_slice(&page[0].0);
        found[DATA_BYTES..].copy_from_slice(&entry.metadata);
    }
    let version = u64::from_le_bytes(found[8..16].try_into().expect("8 bytes"));
    (found == block(lba, version)).then_some(version)
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
    fn check(&self, disk: Arc<TornDisk>) -> BTreeMap<u64, u64> {
        let file = Arc::clone(&disk) as Arc<dyn BlockFile>;
        let map = SealedMap::open(file, &SUPERBLOCK).expect("an honest power cut");
        let versions = (0..GEOMETRY.block_count).map(|lba| {
            let version =
                version(&map, &disk, lba).unwrap_or_else(|| panic!("block {lba} is torn"));
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
    map: SealedMap,
    oracle: Arc<Mutex<Oracle>>,
    in_flight: Vec<InFlight>,
    version: u64,
}

impl Run {
    fn start(disk: TornDisk, oracle: Arc<Mutex<Oracle>>, is_new: bool) -> Self {
        let disk = Arc::new(disk);
        let file = Arc::clone(&disk) as Arc<dyn BlockFile>;
        let map = if is_new {
            SealedMap::create(file, &SUPERBLOCK)
        } else {
            SealedMap::open(file, &SUPERBLOCK)
        };
        Self { disk, map: map.expect("store"), oracle, in_flight: Vec::new(), version: 0 }
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
            self.disk.write(GEOMETRY.slot(slot), &[page]).expect("write");
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
        self.oracle().check(Arc::new(disk))
    }
}

/// Checks images of every instant at which the device is about to write or sync.
fn watch(oracle: Arc<Mutex<Oracle>>, images: Arc<AtomicU64>, seed: u64, depth: u32) -> TornDisk {
    let random = Mutex::new(ChaCha8Rng::seed_from_u64(seed));
    TornDisk::default().observed(watcher(oracle, images, random, depth))
}

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
            oracle.check(Arc::new(image));
        }
    })
}

#[test]
fn every_power_cut_leaves_each_block_whole_and_flushed_writes_in_place() {
    let images = Arc::new(AtomicU64::new(0));
    for seed in 0..6 {
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
