//! Attacks by whoever controls the device but lacks the store's secret: everything forged, changed,
//! moved or mixed is refused. Without an anchor, a complete older state is accepted; with one,
//! nothing older than its record.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::time::Duration;

use sealane_proto::aead::Secret;
use sealane_proto::freshness::leaf::LeafFormat;
use sealane_proto::freshness::pending::Known;

use super::super::pages::{BlockFile, Page};
use super::super::torn_disk::TornDisk;
use super::anchor::{Anchor, AnchorError, AnchorPolicy, Anchored, MemoryAnchor};
use super::checkpoint::{Checkpoint, REGIONS};
use super::failure::Refusal;
use super::geometry::Geometry;
use super::keys::{Authority, StoreKeys};
use super::log::{LogPage, Record};
use super::map::{Map, check_orphans, take_leaf};
use super::placed::{Placed, PlacedEntry};
use super::superblock::Superblock;
use super::test_blocks::{block, version_of};

/// Three sets.
const GEOMETRY: Geometry = Geometry {
    block_count: 200,
    leaf_entries: Placed::ENTRIES_PER_LEAF,
    slot_count: 260,
    log_pages: 8,
    pending_max: 40,
    earlier: Vec::new(),
};
const SUPERBLOCK: Superblock = Superblock { uuid: [1; 16], seed: [2; 32], geometry: GEOMETRY };

fn secret() -> Secret {
    Secret::take(&mut [3; 32])
}

/// The keys of whoever has the secret.
fn keys() -> StoreKeys {
    StoreKeys::new(&SUPERBLOCK.uuid, &SUPERBLOCK.seed, &Authority::Secret(&secret()))
}

/// The keys of whoever knows everything on the device.
fn forger() -> StoreKeys {
    StoreKeys::new(&SUPERBLOCK.uuid, &SUPERBLOCK.seed, &Authority::Device)
}

/// A store on a device.
struct World {
    disk: Arc<TornDisk>,
    map: Map<Placed>,
}

impl World {
    fn create(anchor: Option<&Arc<MemoryAnchor>>) -> Self {
        let disk = Arc::new(TornDisk::default());
        let file = Arc::clone(&disk) as Arc<dyn BlockFile>;
        let authority = Authority::Secret(&secret());
        let map = Map::create(file, &SUPERBLOCK, &authority, shared(anchor)).expect("store");
        Self { disk, map }
    }

    fn open(image: TornDisk, anchor: Option<&Arc<MemoryAnchor>>) -> io::Result<Self> {
        let disk = Arc::new(image);
        let (superblock, keys) = Superblock::read(&*disk, &Authority::Secret(&secret()))?;
        let file = Arc::clone(&disk) as Arc<dyn BlockFile>;
        let map = Map::open(file, &superblock, keys, shared(anchor))?;
        Ok(Self { disk, map })
    }

    /// Writes a version of a block.
    fn note(&self, lba: u64, version: u64) -> io::Result<()> {
        let block = block(lba, version);
        let entries = self.map.place(&block)?.expect("room");
        let data = Page(*block.first_chunk().expect("a block is longer than a page"));
        self.disk.write(GEOMETRY.slot(entries[0].slot), &[data])?;
        self.map.commit(lba, &entries)
    }

    /// Writes a version of a block and flushes.
    fn write(&self, lba: u64, version: u64) {
        self.try_write(lba, version).expect("flush");
    }

    fn try_write(&self, lba: u64, version: u64) -> io::Result<()> {
        self.note(lba, version)?;
        self.map.flush()
    }

    fn entry(&self, lba: u64) -> io::Result<Option<PlacedEntry>> {
        let mut known = self.map.current(lba, 1);
        let set = lba / Placed::ENTRIES_PER_LEAF;
        if let Some(leaf) = self.map.leaf(set)? {
            take_leaf::<Placed>(&mut known, lba, set, &leaf);
        }
        check_orphans(&known, lba)?;
        Ok(if let Known::Entry(entry) = known[0] { Some(entry) } else { None })
    }

    /// Version of a block; 0 if unwritten.
    fn read(&self, lba: u64) -> io::Result<u64> {
        let Some(entry) = self.entry(lba)? else { return Ok(0) };
        let data = page(&self.disk, GEOMETRY.slot(entry.slot));
        let mut block = data.0.to_vec();
        block.extend(entry.metadata());
        if !self.map.is_whole(&entry, &block) {
            return Err(Refusal::Stale(lba).into());
        }
        Ok(version_of(lba, &data, &entry.metadata()).expect("a whole block"))
    }
}

fn shared(anchor: Option<&Arc<MemoryAnchor>>) -> Option<Arc<dyn Anchor>> {
    anchor.map(|anchor| Arc::clone(anchor) as Arc<dyn Anchor>)
}

fn every_commit() -> Arc<MemoryAnchor> {
    Arc::new(MemoryAnchor::new(AnchorPolicy::EveryCommit))
}

fn page(disk: &TornDisk, number: u64) -> Page {
    let mut page = [Page::ZERO];
    disk.read(number, &mut page).expect("read");
    page[0]
}

fn put(disk: &TornDisk, number: u64, page: &Page) {
    disk.write(number, &[*page]).expect("write");
    disk.sync().expect("sync");
}

fn is_rolled_back<T>(result: io::Result<T>) -> bool {
    let error = result.err();
    let refusal = error.as_ref().and_then(|error| Refusal::of(error));
    matches!(refusal, Some(Refusal::RolledBack(_)))
}

fn is_stale<T>(result: io::Result<T>) -> bool {
    let error = result.err();
    let refusal = error.as_ref().and_then(|error| Refusal::of(error));
    matches!(refusal, Some(Refusal::Stale(_) | Refusal::StaleLeaf(_) | Refusal::Orphaned(_)))
}

/// The valid checkpoint with the highest number.
fn last_checkpoint(disk: &TornDisk) -> Checkpoint {
    let pages = [0, 1].map(|number| page(disk, GEOMETRY.checkpoint(number)));
    let whole = pages.iter().filter_map(|page| Checkpoint::decode(page, &keys()));
    whole.map(|(checkpoint, _)| checkpoint).max_by_key(|last| last.number).expect("a checkpoint")
}

#[test]
fn another_secret_opens_nothing() {
    let world = World::create(None);
    world.write(5, 1);
    let other = Secret::take(&mut [4; 32]);
    for authority in [Authority::Secret(&other), Authority::Device] {
        let error = Superblock::read(&*world.disk, &authority).expect_err("another secret");
        assert!(error.to_string().contains("superblock"), "{error}");
    }
    assert_eq!(World::open(world.disk.whole(), None).expect("store").read(5).expect("read"), 1);
}

#[test]
fn a_forged_superblock_is_refused() {
    let world = World::create(None);
    let other = Superblock { geometry: Geometry { log_pages: 9, ..GEOMETRY }, ..SUPERBLOCK };
    put(&world.disk, 0, &other.encode(&forger()));
    let error = World::open(world.disk.whole(), None).err().expect("forged").to_string();
    assert!(error.contains("forged"), "{error}");
    // Another authentic superblock of the same secret, with another seed.
    let other = Superblock { seed: [9; 32], ..SUPERBLOCK };
    let keys = StoreKeys::new(&other.uuid, &other.seed, &Authority::Secret(&secret()));
    put(&world.disk, 0, &other.encode(&keys));
    let error = World::open(world.disk.whole(), None).err().expect("other keys").to_string();
    assert!(error.contains("no checkpoint is whole"), "{error}");
}

#[test]
fn a_store_of_another_version_is_refused_by_number_and_with_what_to_do() {
    for (version, way_out) in [(4, "copy its volume"), (6, "start the release that wrote it")] {
        let world = World::create(None);
        let mut first = page(&world.disk, 0);
        first.0[8] = version;
        put(&world.disk, 0, &first);
        let error = World::open(world.disk.whole(), None).err().expect("another version");
        let wanted = format!(
            "a Sealane store of version {version}, and this release has version 5: {way_out}"
        );
        assert!(error.to_string().starts_with(&wanted), "{error}");
    }
}

#[test]
fn a_forged_checkpoint_is_passed_over() {
    let world = World::create(None);
    world.write(5, 1);
    let forged = Checkpoint {
        number: 1 << 40,
        log_start: 0,
        void_since: Box::new([u64::MAX; REGIONS]),
        ..last_checkpoint(&world.disk)
    };
    put(&world.disk, GEOMETRY.checkpoint(0), &forged.encode(&forger()).0);
    let opened = World::open(world.disk.whole(), None);
    assert_eq!(opened.map(|world| world.read(5).expect("read")).ok(), Some(1));
    put(&world.disk, GEOMETRY.checkpoint(1), &forged.encode(&forger()).0);
    let error = World::open(world.disk.whole(), None).err().expect("none is left").to_string();
    assert!(error.contains("no checkpoint is whole"), "{error}");
}

#[test]
fn a_forged_log_record_is_never_applied() {
    let world = World::create(None);
    world.write(5, 1);
    let checkpoint = last_checkpoint(&world.disk);
    let key = |keys: &StoreKeys| keys.log(checkpoint.epoch, &checkpoint.nonce);
    let id = (checkpoint.epoch, checkpoint.log_start);
    let first = page(&world.disk, GEOMETRY.log(checkpoint.log_start));
    let (genuine, tag) = LogPage::decode::<Placed>(&first, id, &key(&keys())).expect("a page");
    for records in [genuine.records.clone(), vec![Record::Void { lba: 5, blocks: 1 }]] {
        let mut forged = LogPage { number: id.1 + 1, previous: tag, records, ..genuine.clone() };
        if let Some(Record::Entry { entry, .. }) = forged.records.first_mut() {
            entry.slot = GEOMETRY.slot_count - 1;
        }
        forged.flushed = id.1 + 2;
        let place = GEOMETRY.log(forged.number);
        put(&world.disk, place, &forged.encode::<Placed>(&key(&forger())).0);
        let opened = World::open(world.disk.whole(), None).expect("store");
        assert_eq!(opened.read(5).expect("read"), 1);
        // If made with the secret, the record is applied: it is right in everything else.
        put(&world.disk, place, &forged.encode::<Placed>(&key(&keys())).0);
        let opened = World::open(world.disk.whole(), None).expect("store");
        assert!(opened.read(5).ok() != Some(1));
        // But not if it doesn't continue the log.
        forged.previous[0] ^= 1;
        forged.flushed = 0;
        put(&world.disk, place, &forged.encode::<Placed>(&key(&keys())).0);
        let opened = World::open(world.disk.whole(), None).expect("store");
        assert_eq!(opened.read(5).expect("read"), 1);
    }
}

#[test]
fn log_pages_of_another_opening_are_not_spliced_in() {
    let world = World::create(None);
    world.write(5, 1);
    let base = world.disk.whole();
    // Two lives opened from the same device state: their log pages have the same numbers.
    let first = World::open(base.whole(), None).expect("store");
    first.write(6, 2);
    let second = World::open(base.whole(), None).expect("store");
    second.write(6, 3);
    for number in 0..GEOMETRY.log_pages {
        put(&first.disk, GEOMETRY.log(number), &page(&second.disk, GEOMETRY.log(number)));
    }
    for slot in 0..GEOMETRY.slot_count {
        put(&first.disk, GEOMETRY.slot(slot), &page(&second.disk, GEOMETRY.slot(slot)));
    }
    if let Ok(opened) = World::open(first.disk.whole(), None) {
        assert_ne!(opened.read(6).ok(), Some(3), "a record of another opening");
    }
}

#[test]
fn an_older_leaf_page_is_refused_when_it_is_read_and_when_it_is_merged() {
    let world = World::create(None);
    world.write(5, 1);
    world.map.merge().expect("merge");
    let copy = 1 - world.map.leaves().current([0])[0].spare_copy();
    let older = page(&world.disk, GEOMETRY.leaf(0, copy));
    world.write(5, 2);
    world.map.merge().expect("merge");
    let image = world.disk.whole();
    put(&image, GEOMETRY.leaf(0, 1 - copy), &older);
    let opened = World::open(image, None).expect("leaf pages are read only when needed");
    assert!(is_stale(opened.read(5)));
    assert!(is_stale(opened.read(6)), "every block of the page");
    assert_eq!(opened.read(100).expect("another set"), 0);
    opened.write(6, 3);
    opened.map.merge().expect("the store survives");
    assert!(is_stale(opened.read(5)), "a merge must not make an old version current");
    assert!(is_stale(opened.read(74)), "nor make an unknown block unwritten");
    assert_eq!(opened.read(6).expect("written since"), 3);
    opened.write(100, 4);
    opened.write(5, 5);
    opened.map.deallocate(7, 1).expect("deallocate");
    opened.map.merge().expect("merge");
    let found = [5, 6, 7, 100].map(|lba| opened.read(lba).expect("later changes are known"));
    assert_eq!(found, [5, 3, 0, 4]);
    assert!(is_stale(opened.read(8)));
}

/// A device that once returns zeros for one page.
#[derive(Debug)]
struct Glitch {
    disk: Arc<TornDisk>,
    page: Mutex<Option<u64>>,
}

impl BlockFile for Glitch {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        self.disk.read(page, pages)?;
        let hit = self.page.lock().expect("page").take_if(|hit| *hit == page);
        if hit.is_some() {
            pages[0] = Page::ZERO;
        }
        Ok(())
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.disk.write(page, pages)
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.sync()
    }
}

#[test]
fn a_leaf_page_that_was_misread_once_is_read_again() {
    let disk = Arc::new(TornDisk::default());
    let glitch = Arc::new(Glitch { disk: Arc::clone(&disk), page: Mutex::default() });
    let file = Arc::clone(&glitch) as Arc<dyn BlockFile>;
    let map = Map::create(file, &SUPERBLOCK, &Authority::Device, None).expect("store");
    let world = World { disk, map };
    world.write(5, 1);
    world.map.merge().expect("merge");
    let place = world.map.leaves().fetch(0).expect("not void").place;
    world.map.leaves().forget_pages();
    world.write(6, 2);
    *glitch.page.lock().expect("page") = Some(place);
    world.map.merge().expect("merge");
    assert_eq!(*glitch.page.lock().expect("page"), None, "the page was misread");
    assert_eq!([5, 6].map(|lba| world.read(lba).expect("known")), [1, 2]);
}

#[test]
fn blocks_beyond_the_end_of_a_store_are_not_orphaned() {
    let world = World::create(None);
    world.write(199, 1);
    world.map.merge().expect("merge");
    let held = world.map.leaves().fetch(2).expect("not void");
    world.map.leaves().forget_pages();
    put(&world.disk, held.place, &Page::ZERO);
    world.write(198, 2);
    world.map.merge().expect("merge");
    let leaf = world.map.leaf(2).expect("leaf").expect("not void");
    let known = (0..Placed::ENTRIES_PER_LEAF as usize).map(|index| Placed::known(&leaf, index));
    let orphaned = known.filter(|known| *known == Known::Orphaned).count();
    assert_eq!(orphaned, 200 - 2 * Placed::ENTRIES_PER_LEAF as usize - 1);
}

#[test]
fn an_older_version_in_a_slot_is_refused() {
    let world = World::create(None);
    world.write(5, 1);
    let slot = world.entry(5).expect("entry").expect("written").slot;
    let older = page(&world.disk, GEOMETRY.slot(slot));
    world.write(5, 2);
    let slot = world.entry(5).expect("entry").expect("written").slot;
    put(&world.disk, GEOMETRY.slot(slot), &older);
    assert!(is_stale(world.read(5)));
}

#[test]
fn pages_of_the_tree_and_of_the_slot_map_are_not_mixed_with_older_ones() {
    let world = World::create(None);
    let mut images = Vec::new();
    for version in 1..5 {
        world.write(5, version);
        world.map.merge().expect("merge");
        images.push(world.disk.whole());
    }
    let [older, .., last] = &images[..] else { unreachable!() };
    let maps = GEOMETRY.sets();
    for copy in [0, 1] {
        for place in [GEOMETRY.nodes(0, copy), GEOMETRY.leaf(maps, copy)] {
            let image = last.whole();
            put(&image, place, &page(older, place));
            if let Ok(opened) = World::open(image, None) {
                assert_eq!(opened.read(5).expect("the unused copy"), 4);
            }
        }
    }
    let image = last.whole();
    for copy in [0, 1] {
        put(&image, GEOMETRY.nodes(0, copy), &page(older, GEOMETRY.nodes(0, copy)));
    }
    assert!(World::open(image, None).is_err());
}

#[test]
fn a_whole_older_state_passes_without_an_anchor() {
    let world = World::create(None);
    world.write(5, 1);
    let old = world.disk.whole();
    world.write(5, 2);
    assert_eq!(World::open(old, None).expect("store").read(5).expect("read"), 1);
}

#[test]
fn a_device_rolled_back_behind_a_flush_is_refused() {
    let anchor = every_commit();
    let world = World::create(Some(&anchor));
    let mut older = Vec::new();
    for version in 1..4 {
        older.push(world.disk.whole());
        world.write(5, version);
    }
    older.push(world.disk.whole());
    world.map.merge().expect("merge");
    let last = world.disk.whole();
    for image in older {
        let copy = Arc::new(anchor.copy());
        assert!(is_rolled_back(World::open(image, Some(&copy))));
    }
    let opened = World::open(last, Some(&anchor)).expect("the last state");
    assert_eq!(opened.read(5).expect("read"), 3);
}

#[test]
fn a_write_back_is_durable_at_once_and_anchored_by_the_next_flush() {
    let anchor = every_commit();
    let world = World::create(Some(&anchor));
    world.write(5, 1);
    let before = anchor.latest().expect("anchor");
    let old = world.disk.whole();
    world.note(5, 2).expect("note");
    world.map.write_back().expect("write-back");
    assert_eq!((anchor.latest().expect("anchor"), world.disk.volatile()), (before, 0));
    let opened = World::open(world.disk.lost(), Some(&Arc::new(anchor.copy()))).expect("store");
    assert_eq!(opened.read(5).expect("read"), 2);
    world.map.flush().expect("flush");
    assert!(is_rolled_back(World::open(old, Some(&anchor))));
}

#[test]
fn the_end_of_the_log_cannot_be_cut_off_behind_the_anchor() {
    let anchor = every_commit();
    let world = World::create(Some(&anchor));
    world.write(5, 1);
    world.write(5, 2);
    let cut = world.disk.whole();
    let last = last_checkpoint(&cut).log_start + 1;
    put(&cut, GEOMETRY.log(last), &Page::ZERO);
    assert!(is_rolled_back(World::open(cut, Some(&anchor))));
}

#[test]
fn with_rare_anchors_no_anchored_state_is_rolled_back() {
    let anchor = Arc::new(MemoryAnchor::new(AnchorPolicy::Checkpoints));
    let world = World::create(Some(&anchor));
    world.write(5, 1);
    let before = world.disk.whole();
    world.map.merge().expect("merge");
    world.write(5, 2);
    let since = world.disk.whole();
    let copy = Arc::new(anchor.copy());
    assert!(is_rolled_back(World::open(before, Some(&copy))));
    let opened = World::open(since, Some(&anchor)).expect("store");
    assert_eq!(opened.read(5).expect("log pages beyond the anchor's record are valid"), 2);
}

#[test]
fn of_two_forks_one_fails_for_good() {
    let anchor = every_commit();
    let world = World::create(Some(&anchor));
    world.write(5, 1);
    let clone = world.disk.whole();
    let other = World::open(clone, Some(&anchor)).expect("the clone is opened first");
    assert!(is_rolled_back(world.try_write(5, 2)));
    assert!(is_rolled_back(world.try_write(5, 3)), "the failure is permanent");
    other.write(5, 4);
    assert_eq!(other.read(5).expect("read"), 4);
}

#[test]
fn a_store_whose_anchor_was_lost_or_is_anothers_is_refused() {
    let anchor = every_commit();
    let world = World::create(Some(&anchor));
    world.write(5, 1);
    world.map.merge().expect("merge");
    assert!(is_rolled_back(World::open(world.disk.whole(), Some(&every_commit()))));
    let other = every_commit();
    World::create(Some(&other)).write(5, 1);
    assert!(is_rolled_back(World::open(world.disk.whole(), Some(&other))));
    let file = Arc::new(TornDisk::default()) as Arc<dyn BlockFile>;
    let created =
        Map::<Placed>::create(file, &SUPERBLOCK, &Authority::Device, shared(Some(&other)));
    assert!(is_rolled_back(created), "no second store under one anchor");
}

#[test]
fn a_store_from_before_its_first_anchor_is_refused() {
    // A drive as of between the first checkpoint and the first anchor: the store says that it was
    // never anchored. The anchor's record was removed by somebody with write access to it.
    let world = World::create(None);
    world.write(5, 1);
    let anchor = every_commit();
    assert!(is_rolled_back(World::open(world.disk.whole(), Some(&anchor))));
    let forgotten = Arc::new(anchor.forgotten());
    assert!(is_rolled_back(World::open(world.disk.whole(), Some(&forgotten))));
}

#[test]
fn a_store_begins_above_the_numbers_that_are_taken() {
    let anchor = Arc::new(MemoryAnchor::above(AnchorPolicy::EveryCommit, 41));
    let world = World::create(Some(&anchor));
    assert_eq!(anchor.latest().expect("latest").expect("a state").number, 42);
    world.write(5, 1);
    world.map.flush().expect("flush");
    let last = anchor.latest().expect("latest").expect("a state").number;
    // Created again after its record was removed, a store continues above that number.
    let again = Arc::new(anchor.forgotten());
    World::create(Some(&again));
    assert_eq!(again.latest().expect("latest").expect("a state").number, last + 1);
}

#[test]
fn an_anchor_without_answer_fails_the_flush_and_the_next_one_tries_again() {
    for is_made in [false, true] {
        let anchor = every_commit();
        let world = World::create(Some(&anchor));
        world.write(5, 1);
        anchor.fail_next(is_made);
        let error = world.try_write(5, 2).expect_err("no answer");
        let refusal = Refusal::of(&error).expect("a refusal");
        assert!(matches!(refusal, Refusal::AnchorUnreachable(_)), "{refusal}");
        // After an honest crash now, the store must open, whatever the anchor's record.
        let copy = Arc::new(anchor.copy());
        let opened = World::open(world.disk.whole(), Some(&copy)).expect("store");
        assert_eq!(opened.read(5).expect("read"), 2);
        world.map.flush().expect("the anchor answers again");
    }
}

/// An anchor that queries the store's statistics before it answers, as a target's anchor may.
#[derive(Debug)]
struct Curious {
    anchor: MemoryAnchor,
    map: OnceLock<Weak<Map<Placed>>>,
}

impl Anchor for Curious {
    fn latest(&self) -> io::Result<Option<Anchored>> {
        self.anchor.latest()
    }

    fn advance(&self, to: &Anchored) -> Result<(), AnchorError> {
        if let Some(map) = self.map.get().and_then(Weak::upgrade) {
            let (told, heard) = mpsc::channel();
            std::thread::spawn(move || told.send(map.statistics()));
            heard.recv_timeout(Duration::from_secs(20)).expect("statistics wait for the anchor");
        }
        self.anchor.advance(to)
    }

    fn policy(&self) -> AnchorPolicy {
        AnchorPolicy::EveryCommit
    }
}

#[test]
fn statistics_never_wait_for_the_anchor() {
    let anchor = MemoryAnchor::new(AnchorPolicy::EveryCommit);
    let anchor = Arc::new(Curious { anchor, map: OnceLock::new() });
    let file = Arc::new(TornDisk::default()) as Arc<dyn BlockFile>;
    let shared = Some(Arc::clone(&anchor) as Arc<dyn Anchor>);
    let map = Map::create(file, &SUPERBLOCK, &Authority::Device, shared).expect("store");
    let map = Arc::new(map);
    anchor.map.set(Arc::downgrade(&map)).expect("once");
    assert!(map.deallocate(3, 1).expect("room"));
    map.flush().expect("flush");
    map.merge().expect("merge");
    let statistics = map.statistics();
    let named = |name| statistics.iter().find(|(known, _)| *known == name).expect("a name").1;
    assert_eq!((named("anchored"), named("epoch")), (1, 1));
}

#[test]
fn nothing_that_the_anchored_checkpoint_needs_is_written_over_while_the_anchor_is_silent() {
    let anchor = every_commit();
    let world = World::create(Some(&anchor));
    world.write(5, 1);
    anchor.fail_next(false);
    assert!(world.map.merge().is_err());
    for _ in 0..3 {
        anchor.fail_next(false);
        assert!(world.map.merge().is_err());
        let copy = Arc::new(anchor.copy());
        let opened = World::open(world.disk.whole(), Some(&copy)).expect("an honest store");
        assert_eq!(opened.read(5).expect("read"), 1);
    }
}

#[test]
fn making_room_asks_the_anchor_and_reports_its_silence() {
    let anchor = every_commit();
    let world = World::create(Some(&anchor));
    for version in 1..3 {
        for lba in 0..30 {
            world.write(lba, version);
        }
        anchor.fail_next(false);
        assert!(world.map.merge().is_err());
    }
    let free = world.map.free_slots();
    anchor.fail_next(false);
    let error = world.map.make_room().expect_err("no answer");
    assert!(matches!(Refusal::of(&error), Some(Refusal::AnchorUnreachable(_))));
    world.map.make_room().expect("an answer");
    assert!(world.map.free_slots() > free, "room without a merge");
}

#[test]
fn making_room_completes_the_running_merge_and_keeps_later_changes_pending() {
    let world = World::create(None);
    let statistic = |wanted: &str| {
        let statistics = world.map.statistics();
        statistics.iter().find(|(name, _)| *name == wanted).expect("a statistic").1
    };
    (0..25).for_each(|lba| world.note(lba, 1).expect("note"));
    world.map.begin_merge().expect("merge");
    (100..108).for_each(|lba| world.note(lba, 1).expect("note"));
    world.map.make_room().expect("room");
    assert!(!world.map.is_merging());
    assert_eq!((statistic("merges"), world.map.state().pending()), (1, 8));
    (108..131).for_each(|lba| world.note(lba, 1).expect("note"));
    world.map.make_room().expect("room");
    assert_eq!((statistic("merges"), world.map.state().pending()), (2, 0), "no merge was running");
}

#[test]
fn slots_of_the_anchored_checkpoint_stay_taken_until_the_next_one_is_anchored() {
    let anchor = every_commit();
    let world = World::create(Some(&anchor));
    (0..2).for_each(|lba| world.write(lba, 1));
    world.map.merge().expect("merge");
    let free = world.map.free_slots();
    (0..2).for_each(|lba| world.write(lba, 2));
    assert_eq!(world.map.free_slots(), free - 2);
    anchor.fail_next(false);
    world.map.merge().expect_err("no answer");
    assert_eq!(
        world.map.free_slots(),
        free - 2,
        "the anchored checkpoint refers to the older slots"
    );
    world.map.flush().expect("flush");
    world.map.merge().expect("merge");
    assert_eq!(world.map.free_slots(), free);
}
