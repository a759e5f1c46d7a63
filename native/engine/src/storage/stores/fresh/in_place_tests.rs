//! Power cuts of a store in place, at every write and sync of seeded workloads with several writes
//! in progress, some of which fail. Each image must open, and hold for every block a version that
//! an honest device may have left there; reading it must not be refused.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::freshness::leaf::{Iv, Ivs, LeafFormat};
use sealane_proto::sector::{
    BLOCK_BYTES, Block, DATA_BYTES, FORMAT_VERSION, METADATA_BYTES, field, metadata_mut,
};

use super::super::pages::{BlockFile, Page};
use super::super::torn_disk::{Observer, TornDisk};
use super::anchor::{Anchor, AnchorPolicy, MemoryAnchor};
use super::failure::Refusal;
use super::geometry::Geometry;
use super::keys::{Authority, StoreKeys};
use super::map::Map;
use super::superblock::Superblock;

/// Three sets, a short log and a small table, so that all of them are reused.
const GEOMETRY: Geometry = Geometry {
    block_count: 900,
    leaf_entries: Ivs::ENTRIES_PER_LEAF,
    slot_count: 0,
    log_pages: 12,
    pending_max: 80,
    earlier: Vec::new(),
};
const SUPERBLOCK: Superblock = Superblock { uuid: [1; 16], seed: [2; 32], geometry: GEOMETRY };
/// Blocks that the workload writes: few in each set, so that they are overwritten often.
const BLOCKS: [u64; 12] = [0, 1, 2, 3, 338, 339, 340, 341, 342, 680, 681, 899];

/// A torn disk whose pages start with their metadata, so that block and metadata change together.
#[derive(Debug)]
pub struct SectorDisk(pub TornDisk);

impl BlockFile for SectorDisk {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        self.0.read(page, pages)
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.0.write(page, pages)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn write_durably(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.0.write_durably(page, pages)
    }

    fn read_metadata(&self, page: u64) -> io::Result<[u8; METADATA_BYTES]> {
        let mut pages = [Page::ZERO];
        self.0.read(page, &mut pages)?;
        Ok(std::array::from_fn(|index| pages[0].0[index]))
    }
}

fn iv(version: u64) -> Iv {
    let mut iv = [0; 12];
    iv[..8].copy_from_slice(&version.to_le_bytes());
    iv
}

fn version_of(iv: &[u8]) -> u64 {
    u64::from_le_bytes(iv[..8].try_into().expect("8 bytes"))
}

fn block(version: u64) -> Block {
    let mut block = [0; BLOCK_BYTES];
    metadata_mut(&mut block, field::IV).copy_from_slice(&iv(version));
    metadata_mut(&mut block, field::VERSION).fill(FORMAT_VERSION);
    block
}

fn page(version: u64) -> Page {
    let mut page = Page::ZERO;
    page.0[..METADATA_BYTES].copy_from_slice(&block(version)[DATA_BYTES..]);
    page
}

/// A device and the anchor of its store at one instant.
struct Machine {
    disk: Arc<SectorDisk>,
    anchor: Option<Arc<MemoryAnchor>>,
}

impl Machine {
    fn new(disk: TornDisk, anchor: Option<Arc<MemoryAnchor>>) -> Self {
        Self { disk: Arc::new(SectorDisk(disk)), anchor }
    }

    fn anchor(&self) -> Option<Arc<dyn Anchor>> {
        self.anchor.clone().map(|anchor| anchor as Arc<dyn Anchor>)
    }

    fn file(&self) -> Arc<dyn BlockFile> {
        Arc::clone(&self.disk) as Arc<dyn BlockFile>
    }

    fn create(&self) -> Map<Ivs> {
        Map::create(self.file(), &SUPERBLOCK, &Authority::Device, self.anchor()).expect("create")
    }

    fn open(&self) -> io::Result<Map<Ivs>> {
        let keys = StoreKeys::new(&SUPERBLOCK.uuid, &SUPERBLOCK.seed, &Authority::Device);
        Map::open(self.file(), &SUPERBLOCK, keys, self.anchor())
    }

    fn found(&self, lba: u64) -> u64 {
        let metadata = self.disk.read_metadata(GEOMETRY.in_place_block(lba)).expect("read");
        version_of(&metadata[field::IV.0..field::IV.1])
    }

    /// The version that a read of a block returns; `None` if it is refused.
    fn read(&self, map: &Map<Ivs>, lba: u64) -> Option<u64> {
        let (set, index) = (lba / Ivs::ENTRIES_PER_LEAF, lba % Ivs::ENTRIES_PER_LEAF);
        match map.set_entries(set).expect("leaf page")[index as usize] {
            None => Some(0),
            Some(iv) => (version_of(&iv) == self.found(lba)).then(|| version_of(&iv)),
        }
    }

    fn put(&self, lba: u64, version: u64) {
        let place = GEOMETRY.in_place_block(lba);
        self.disk.write(place, &[page(version)]).expect("write");
    }
}

fn copied(anchor: Option<&Arc<MemoryAnchor>>) -> Option<Arc<MemoryAnchor>> {
    anchor.map(|anchor| Arc::new(anchor.copy()))
}

/// The versions that a block may have: the durable one, and those begun since, completed or not.
#[derive(Debug, Default)]
struct Oracle {
    durable: BTreeMap<u64, u64>,
    since: BTreeMap<u64, Vec<(u64, bool)>>,
}

impl Oracle {
    fn begun(&mut self, lba: u64, version: u64) {
        self.since.entry(lba).or_default().push((version, false));
    }

    /// Completes a write, and with it all earlier ones in doubt.
    fn ended(&mut self, lba: u64, version: u64) {
        let since = self.since.entry(lba).or_default();
        // If it was sent twice, the later one has completed.
        let until = since.iter().rposition(|(other, _)| *other == version).expect("begun");
        since[..=until].iter_mut().for_each(|(_, has_ended)| *has_ended = true);
    }

    fn flushed(&mut self) {
        for (lba, since) in &mut self.since {
            let last = since.iter().rfind(|(_, has_ended)| *has_ended);
            self.durable.extend(last.map(|(version, _)| (*lba, *version)));
            since.retain(|(_, has_ended)| !has_ended);
        }
    }

    fn check(&self, machine: &Machine) -> BTreeMap<u64, u64> {
        let map = machine.open().expect("an honest power cut");
        let versions = BLOCKS.map(|lba| {
            let version = machine.read(&map, lba);
            let version = version.unwrap_or_else(|| panic!("false alarm on block {lba}"));
            let durable = self.durable.get(&lba).copied().unwrap_or(0);
            let mut since = self.since.get(&lba).into_iter().flatten();
            let is_since = since.any(|(other, _)| *other == version);
            assert!(version == durable || is_since, "block {lba}: {version}, durable {durable}");
            (lba, version)
        });
        versions.into()
    }
}

struct Write {
    lba: u64,
    version: u64,
    is_announced: bool,
    is_made: bool,
}

/// One seeded life of a store, with power cuts at every instant.
struct Life {
    machine: Machine,
    map: Map<Ivs>,
    oracle: Arc<Mutex<Oracle>>,
    random: ChaCha8Rng,
    writes: Vec<Write>,
    /// Block and version of each write so far: any may be sent again unchanged.
    sent: Vec<(u64, u64)>,
    next_version: u64,
}

fn lock(oracle: &Mutex<Oracle>) -> MutexGuard<'_, Oracle> {
    oracle.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Life {
    fn step(&mut self) {
        match self.random.next_u32() % 16 {
            0..=4 => self.begin(),
            5 => {
                self.map.announce().expect("announce");
                self.writes.iter_mut().for_each(|write| write.is_announced = true);
            }
            6..=8 => self.make(),
            9..=11 => self.end(),
            12 => self.flush(),
            13 => {
                let lba = BLOCKS[self.random.next_u32() as usize % BLOCKS.len()];
                if self.writes.iter().all(|write| write.lba != lba)
                    && self.map.deallocate(lba, 1).expect("deallocate")
                {
                    let mut oracle = lock(&self.oracle);
                    oracle.begun(lba, 0);
                    oracle.ended(lba, 0);
                }
            }
            14 => {
                self.map.begin_merge().expect("merge");
                self.writes.iter_mut().for_each(|write| write.is_announced = true);
            }
            _ => self.map.merge_step().expect("merge"),
        }
    }

    fn begin(&mut self) {
        let lba = BLOCKS[self.random.next_u32() as usize % BLOCKS.len()];
        let is_again = !self.sent.is_empty() && self.random.next_u32().is_multiple_of(4);
        let (lba, version) = if is_again {
            self.sent[self.random.next_u32() as usize % self.sent.len()]
        } else {
            (lba, self.next_version)
        };
        if self.writes.iter().any(|write| write.lba == lba) {
            return;
        }
        if self.map.intend(lba, &block(version)).expect("intend").is_none() {
            self.map.make_room().expect("room");
            self.writes.iter_mut().for_each(|write| write.is_announced = true);
            return;
        }
        if is_again {
            // The device may have it from before, so it counts as soon as it is logged.
            lock(&self.oracle).begun(lba, version);
        }
        self.next_version += u64::from(!is_again);
        self.sent.push((lba, version));
        self.writes.push(Write { lba, version, is_announced: false, is_made: false });
    }

    fn make(&mut self) {
        let write = self.writes.iter_mut().find(|write| write.is_announced && !write.is_made);
        if let Some(write) = write {
            write.is_made = true;
            lock(&self.oracle).begun(write.lba, write.version);
            self.machine.put(write.lba, write.version);
        }
    }

    fn end(&mut self) {
        let Some(index) = self.writes.iter().position(|write| write.is_made) else { return };
        let write = self.writes.remove(index);
        if self.random.next_u32().is_multiple_of(5) {
            self.map.give_up(write.lba);
        } else {
            self.map.arrived(write.lba, &[iv(write.version)]).expect("arrived");
            lock(&self.oracle).ended(write.lba, write.version);
        }
        // Some writes are abandoned before they are made.
        if self.random.next_u32().is_multiple_of(8)
            && let Some(index) = self.writes.iter().position(|write| !write.is_made)
        {
            let write = self.writes.remove(index);
            self.map.give_up(write.lba);
        }
    }

    fn flush(&mut self) {
        self.map.flush().expect("flush");
        self.writes.iter_mut().for_each(|write| write.is_announced = true);
        lock(&self.oracle).flushed();
    }
}

/// Runs a life with power cuts before and after each of its writes and syncs. Returns the number of
/// images.
fn live(seed: u64, policy: Option<AnchorPolicy>) -> u64 {
    let anchor = policy.map(|policy| Arc::new(MemoryAnchor::new(policy)));
    let oracle = Arc::new(Mutex::new(Oracle::default()));
    let images = Arc::new(AtomicU64::new(0));
    let is_laid_out = Arc::new(AtomicU64::new(0));
    let observer: Observer = {
        let (oracle, images, anchor) = (Arc::clone(&oracle), Arc::clone(&images), anchor.clone());
        let is_laid_out = Arc::clone(&is_laid_out);
        Box::new(move |disk: &TornDisk| {
            if is_laid_out.load(Ordering::Relaxed) == 0 {
                return;
            }
            let number = images.fetch_add(1, Ordering::Relaxed);
            let mut random = ChaCha8Rng::seed_from_u64(seed ^ number.rotate_left(32));
            let image = match number % 3 {
                0 => disk.lost(),
                1 => disk.whole(),
                _ => disk.random_image(&mut random),
            };
            let machine = Machine::new(image, copied(anchor.as_ref()));
            let found = lock(&oracle).check(&machine);
            // A second opening must return the same versions as the first.
            let again = Machine::new(machine.disk.0.lost(), copied(machine.anchor.as_ref()));
            let map = again.open().expect("a second opening");
            for (lba, version) in found {
                assert_eq!(again.read(&map, lba), Some(version), "block {lba}, second opening");
            }
        })
    };
    let machine = Machine::new(TornDisk::default().observed(observer), anchor);
    let map = machine.create();
    is_laid_out.store(1, Ordering::Relaxed);
    let random = ChaCha8Rng::seed_from_u64(seed);
    let (writes, sent) = (Vec::new(), Vec::new());
    let mut life = Life { machine, map, oracle, random, writes, sent, next_version: 1 };
    (0..160).for_each(|_| life.step());
    images.load(Ordering::Relaxed)
}

#[test]
fn every_image_of_a_power_cut_opens_and_holds_what_it_may() {
    let policies = [None, Some(AnchorPolicy::EveryCommit), Some(AnchorPolicy::Checkpoints)];
    let images: u64 =
        (0..24).map(|seed| live(seed, policies[seed as usize % policies.len()])).sum();
    assert!(images > 1500, "{images} images");
}

/// A store with an anchor that is advanced with every flush.
fn world() -> (Machine, Map<Ivs>) {
    let anchor = Some(Arc::new(MemoryAnchor::new(AnchorPolicy::EveryCommit)));
    let machine = Machine::new(TornDisk::default(), anchor);
    let map = machine.create();
    (machine, map)
}

fn write(machine: &Machine, map: &Map<Ivs>, lba: u64, version: u64) {
    map.intend(lba, &block(version)).expect("intend").expect("room");
    map.announce().expect("announce");
    machine.put(lba, version);
    map.arrived(lba, &[iv(version)]).expect("arrived");
}

#[test]
fn a_flushed_block_rolled_back_while_the_store_is_closed_is_refused() {
    let (machine, map) = world();
    write(&machine, &map, 5, 1);
    map.flush().expect("flush");
    write(&machine, &map, 5, 2);
    map.flush().expect("flush");
    drop(map);
    machine.put(5, 1);
    let map = machine.open().expect("open");
    assert_eq!(machine.read(&map, 5), None);
    machine.put(5, 2);
    assert_eq!(machine.read(&map, 5), Some(2));
}

#[test]
fn a_flushed_block_that_is_sent_again_stays_flushed() {
    for (ends, flushes) in [(true, false), (false, false), (false, true)] {
        let (machine, map) = world();
        write(&machine, &map, 5, 1);
        map.flush().expect("flush");
        write(&machine, &map, 5, 2);
        map.flush().expect("flush");
        let told = map.milestone();
        // The same sector once more, as sent by a gateway that got no answer.
        map.intend(5, &block(2)).expect("intend").expect("room");
        map.announce().expect("announce");
        if ends {
            machine.put(5, 2);
            map.arrived(5, &[iv(2)]).expect("arrived");
        }
        if flushes {
            write(&machine, &map, 6, 3);
            map.flush().expect("flush");
        }
        drop(map);
        machine.put(5, 1);
        let map = machine.open().expect("open");
        let case = format!("ends {ends}, flushes {flushes}");
        assert_eq!(machine.read(&map, 5), None, "the flush is undone: {case}");
        machine.put(5, 2);
        assert_eq!(machine.read(&map, 5), Some(2), "{case}");
        assert!(map.contains(&told), "{case}");
    }
}

/// Without an anchor, only a living gateway knows of the flush.
#[test]
fn a_gateway_refuses_a_store_that_lost_a_flushed_block_sent_again_since() {
    let machine = Machine::new(TornDisk::default(), None);
    let map = machine.create();
    write(&machine, &map, 5, 1);
    map.flush().expect("flush");
    write(&machine, &map, 5, 2);
    map.flush().expect("flush");
    let told = map.milestone();
    map.intend(5, &block(2)).expect("intend").expect("room");
    map.announce().expect("announce");
    drop(map);
    machine.put(5, 1);
    let map = machine.open().expect("open");
    let is_refused = machine.read(&map, 5).is_none() || !map.contains(&told);
    assert!(is_refused, "an older version passed unnoticed");
}

#[test]
fn a_failed_write_that_is_sent_again_is_one_write_in_doubt() {
    let (machine, map) = world();
    write(&machine, &map, 5, 1);
    map.flush().expect("flush");
    for _ in 0..2 {
        map.intend(5, &block(2)).expect("intend").expect("room");
        map.announce().expect("announce");
        map.give_up(5);
    }
    assert_eq!(map.state().intents.doubts(), 1);
    map.flush().expect("flush");
    drop(map);
    let map = machine.open().expect("open");
    assert_eq!(machine.read(&map, 5), Some(1), "it never came to be made");
}

#[test]
fn a_block_that_was_written_and_not_flushed_may_be_either_and_is_settled_by_opening() {
    let (machine, map) = world();
    write(&machine, &map, 5, 1);
    map.flush().expect("flush");
    write(&machine, &map, 5, 2);
    drop(map);
    machine.put(5, 1);
    let map = machine.open().expect("open");
    assert_eq!(machine.read(&map, 5), Some(1));
    drop(map);
    // A version that was returned must not change to another one that an attacker restores.
    machine.put(5, 2);
    let map = machine.open().expect("open");
    assert_eq!(machine.read(&map, 5), None);
}

#[test]
fn a_write_in_progress_at_a_flush_is_not_part_of_it() {
    let (machine, map) = world();
    write(&machine, &map, 5, 1);
    map.intend(5, &block(2)).expect("intend").expect("room");
    map.announce().expect("announce");
    write(&machine, &map, 6, 3);
    map.flush().expect("flush");
    drop(map);
    let map = machine.open().expect("open");
    assert_eq!(machine.read(&map, 5), Some(1), "it never came to be made");
    assert_eq!(machine.read(&map, 6), Some(3));
}

#[test]
fn a_write_in_progress_at_a_checkpoint_is_announced_again_behind_it() {
    let (machine, map) = world();
    write(&machine, &map, 5, 1);
    map.intend(5, &block(2)).expect("intend").expect("room");
    map.announce().expect("announce");
    map.merge().expect("merge");
    machine.put(5, 2);
    map.arrived(5, &[iv(2)]).expect("arrived");
    map.flush().expect("flush");
    drop(map);
    let map = machine.open().expect("open");
    assert_eq!(machine.read(&map, 5), Some(2));
    drop(map);
    machine.put(5, 1);
    let map = machine.open().expect("open");
    assert_eq!(machine.read(&map, 5), None, "it was flushed");
}

#[test]
fn a_failed_write_may_be_there_until_the_next_one_has_ended() {
    let (machine, map) = world();
    write(&machine, &map, 5, 1);
    map.intend(5, &block(2)).expect("intend").expect("room");
    map.announce().expect("announce");
    map.give_up(5);
    map.flush().expect("flush");
    map.merge().expect("merge");
    machine.put(5, 2);
    let later = Machine::new(machine.disk.0.whole(), copied(machine.anchor.as_ref()));
    let reopened = later.open().expect("open");
    assert_eq!(later.read(&reopened, 5), Some(2), "it arrived late");
    write(&machine, &map, 5, 3);
    map.flush().expect("flush");
    drop(map);
    machine.put(5, 2);
    let map = machine.open().expect("open");
    assert_eq!(machine.read(&map, 5), None, "a later one was flushed");
}

#[test]
fn a_second_write_of_a_block_waits_for_the_first() {
    let (_, map) = world();
    map.intend(4, &[block(1), block(2)].concat()).expect("intend").expect("room");
    let error = map.intend(5, &block(3)).expect_err("busy");
    assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
    map.give_up(4);
    assert!(map.intend(5, &block(3)).expect("intend").is_some());
}

#[test]
fn announcements_are_bounded_and_failed_writes_end_in_an_error() {
    let (_, map) = world();
    for lba in 0..GEOMETRY.intents_max() {
        map.intend(lba, &block(lba + 1)).expect("intend").expect("room");
    }
    assert_eq!(map.intend(800, &block(99)).expect("intend"), None);
    map.announce().expect("announce");
    (0..GEOMETRY.intents_max()).for_each(|lba| map.give_up(lba));
    let error = map.intend(800, &block(99)).expect_err("nothing is ever written");
    assert!(matches!(Refusal::of(&error), Some(Refusal::Failed(_))));
    let many = vec![block(1); GEOMETRY.intents_max() as usize + 1].concat();
    assert_eq!(map.intend(0, &many).expect_err("long").kind(), io::ErrorKind::InvalidInput);
}
