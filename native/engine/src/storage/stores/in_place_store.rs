//! Sealed 4160-byte blocks in place, on a store whose blocks have metadata and change as a whole:
//! a drive formatted 4096 + 64, or what stands for one. Freshness is kept by `fresh`, in blocks of
//! the same store in front of the others (`docs/stores.md` §2a).

use std::io;
use std::sync::Arc;

use sealane_proto::freshness::fast_path::FastPathKey;
use sealane_proto::freshness::leaf::{Ivs, LeafFormat};
use sealane_proto::sector::field;

use super::super::store::{BLOCK_BYTES, BlockStore, METADATA_BYTES, StoreChannel, StoreCounters};
use super::super::upkeep::Upkeep;
use super::fresh::failure::Refusal;
use super::fresh::geometry::Geometry;
use super::fresh::journal::Journal;
use super::fresh::map::Map;
use super::fresh::superblock::Superblock;
use super::in_place_channel::InPlaceChannel;
use super::in_place_upkeep::InPlaceUpkeep;
use super::pages::{BlockFile, Page, random};
use super::raw_pages::RawPages;
use super::sealed_file::Trust;

/// What the channels of a store share.
#[derive(Debug)]
pub(super) struct Shared {
    pub raw: Arc<RawPages>,
    pub map: Arc<Map<Ivs>>,
    pub fast_path: FastPathKey,
    pub counters: StoreCounters,
}

/// The store.
#[derive(Debug)]
pub struct InPlaceStore {
    shared: Arc<Shared>,
    journal: Journal,
}

/// Blocks that a raw store must have for so many sealed ones.
#[must_use]
pub fn raw_blocks(block_count: u64) -> u64 {
    Geometry::in_place(block_count, Ivs::ENTRIES_PER_LEAF).device_blocks()
}

impl InPlaceStore {
    /// Lays out an empty store of `block_count` blocks; the first block of the raw one must be
    /// zeros: anything else may be somebody's data.
    pub fn create(
        raw: Box<dyn BlockStore>,
        block_count: u64,
        trust: &Trust<'_>,
    ) -> io::Result<Self> {
        let pages = Arc::new(RawPages::new(raw.into())?);
        let mut first = [Page::ZERO];
        pages.read(0, &mut first)?;
        if first != [Page::ZERO] {
            let detail = "the device holds something: its first 4096 bytes are not zeros";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, detail));
        }
        let mut uuid: [u8; 16] = random()?;
        // RFC 9562: version 4, variant 10.
        uuid[6] = uuid[6] & 0x0F | 0x40;
        uuid[8] = uuid[8] & 0x3F | 0x80;
        let geometry = Geometry::in_place(block_count, Ivs::ENTRIES_PER_LEAF);
        let superblock = Superblock { uuid, seed: random()?, geometry };
        check_size(&pages, &superblock.geometry)?;
        let file = Arc::clone(&pages) as Arc<dyn BlockFile>;
        let map = Map::create(file, &superblock, &trust.authority(), trust.anchor.clone())?;
        Self::start(pages, map)
    }

    /// Opens a store and brings it to the state that its last flush, at least, left. An error with
    /// [`Refusal::RolledBack`](super::fresh::failure::Refusal) if its anchor knows of a later one.
    pub fn open(raw: Box<dyn BlockStore>, trust: &Trust<'_>) -> io::Result<Self> {
        let pages = Arc::new(RawPages::new(raw.into())?);
        let (superblock, keys) = Superblock::read(&*pages, &trust.authority())?;
        check_size(&pages, &superblock.geometry)?;
        let file = Arc::clone(&pages) as Arc<dyn BlockFile>;
        let map = Map::open(file, &superblock, keys, trust.anchor.clone())?;
        Self::start(pages, map)
    }

    /// Its map, for tests.
    #[cfg(test)]
    pub(super) fn map(&self) -> &Map<Ivs> {
        &self.shared.map
    }

    fn start(raw: Arc<RawPages>, map: Map<Ivs>) -> io::Result<Self> {
        let map = Arc::new(map);
        let journal = Journal::start(Arc::clone(&map))?;
        let fast_path = map.fast_path();
        let shared = Shared { raw, map, fast_path, counters: StoreCounters::default() };
        Ok(Self { shared: Arc::new(shared), journal })
    }
}

fn check_size(pages: &RawPages, geometry: &Geometry) -> io::Result<()> {
    let (found, needed) = (pages.store().block_count(), geometry.device_blocks());
    if found < needed {
        let detail = format!("the device has {found} blocks, the store takes {needed}");
        return Err(io::Error::new(io::ErrorKind::StorageFull, detail));
    }
    Ok(())
}

impl BlockStore for InPlaceStore {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn block_count(&self) -> u64 {
        self.shared.map.geometry().block_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        let channel = InPlaceChannel::new(Arc::clone(&self.shared), self.journal.requests())?;
        Ok(Box::new(channel))
    }

    fn keeps_freshness(&self) -> bool {
        true
    }

    fn layout(&self) -> &'static str {
        "in place"
    }

    fn upkeep(&self) -> io::Result<Option<Box<dyn Upkeep>>> {
        Ok(Some(Box::new(InPlaceUpkeep::new(Arc::clone(&self.shared))?)))
    }

    fn scan(&self, visit: &mut dyn FnMut(u64, &[u8; METADATA_BYTES])) -> io::Result<()> {
        let map = &self.shared.map;
        for set in 0..map.geometry().sets() {
            let start = set * Ivs::ENTRIES_PER_LEAF;
            for (lba, iv) in (start..).zip(map.set_entries(set)?) {
                let Some(iv) = iv else { continue };
                let place = map.geometry().in_place_block(lba);
                let mut metadata = self.shared.raw.read_metadata(place)?;
                if metadata[field::IV.0..field::IV.1] != iv {
                    return Err(Refusal::Stale(lba).into());
                }
                metadata[field::MAC.0..field::MAC.1].fill(0);
                visit(lba, &metadata);
            }
        }
        Ok(())
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        let mut named = self.shared.counters.by_name();
        named.extend(self.shared.map.statistics());
        named
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use sealane_proto::sector::DATA_BYTES;

    use super::super::super::store::StoreRequest;
    use super::super::super::upkeep::Report;
    use super::super::conformance;
    use super::super::emulated::{EmulatedStore, Profile};
    use super::super::inline_file::InlineFileStore;
    use super::super::memory::MemoryStore;
    use super::super::scratch::Scratch;
    use super::*;

    const BLOCKS: u64 = 1000;

    #[test]
    fn behaves_as_a_store_in_memory() {
        let raw = Box::new(MemoryStore::new(raw_blocks(BLOCKS), true));
        conformance::check(&InPlaceStore::create(raw, BLOCKS, &Trust::default()).expect("store"));
    }

    #[test]
    fn behaves_as_a_store_on_an_emulated_drive() {
        let profile = Profile::parse("sn655").expect("profile");
        let raw = Box::new(EmulatedStore::new(raw_blocks(BLOCKS), true, &profile));
        conformance::check(&InPlaceStore::create(raw, BLOCKS, &Trust::default()).expect("store"));
    }

    #[test]
    fn behaves_as_a_store_on_a_file_that_has_metadata() {
        let scratch = Scratch::new();
        let raw = InlineFileStore::create(&scratch.file(), raw_blocks(BLOCKS)).expect("raw");
        let store = InPlaceStore::create(Box::new(raw), BLOCKS, &Trust::default());
        conformance::check(&store.expect("store"));
    }

    #[test]
    fn keeps_what_was_written_from_one_opening_to_the_next() {
        let scratch = Scratch::new();
        let raw = InlineFileStore::create(&scratch.file(), raw_blocks(BLOCKS)).expect("raw");
        let store = InPlaceStore::create(Box::new(raw), BLOCKS, &Trust::default()).expect("store");
        let mut channel = store.open().expect("channel");
        let buffer = conformance::blocks(BLOCK_BYTES, 100, 300, 1);
        let write = StoreRequest::Write { lba: 100, buffer, durable: false };
        conformance::execute(&mut *channel, write).expect("write");
        drop((channel, store));
        let raw =
            Box::new(InlineFileStore::open(&scratch.file(), raw_blocks(BLOCKS)).expect("raw"));
        let store = InPlaceStore::open(raw, &Trust::default()).expect("store");
        assert_eq!(store.block_count(), BLOCKS);
        let mut channel = store.open().expect("channel");
        let found = conformance::read(&mut *channel, BLOCK_BYTES, 100, 300);
        assert_eq!(found, conformance::blocks(BLOCK_BYTES, 100, 300, 1));
    }

    /// A store on a file that an adversary can write to behind its back.
    struct World {
        store: InPlaceStore,
        device: std::fs::File,
        _scratch: Scratch,
    }

    impl World {
        fn new() -> Self {
            let scratch = Scratch::new();
            let raw = InlineFileStore::create(&scratch.file(), raw_blocks(BLOCKS)).expect("raw");
            let store = InPlaceStore::create(Box::new(raw), BLOCKS, &Trust::default());
            let mut options = std::fs::OpenOptions::new();
            let device = options.read(true).write(true).open(scratch.file()).expect("device");
            Self { store: store.expect("store"), device, _scratch: scratch }
        }

        fn write(&self, lba: u64, version: u64) {
            let mut channel = self.store.open().expect("channel");
            let buffer = conformance::block(BLOCK_BYTES, lba, version);
            let write = StoreRequest::Write { lba, buffer, durable: true };
            conformance::execute(&mut *channel, write).expect("write");
        }

        fn read(&self, lba: u64) -> io::Result<Vec<u8>> {
            let mut channel = self.store.open().expect("channel");
            let read = StoreRequest::Read { lba, buffer: vec![0; BLOCK_BYTES] };
            conformance::execute(&mut *channel, read)
        }

        fn reads_as(&self, lba: u64, version: u64) -> bool {
            self.read(lba).expect("read") == conformance::block(BLOCK_BYTES, lba, version)
        }

        fn place(&self, lba: u64) -> u64 {
            self.store.shared.map.geometry().in_place_block(lba)
        }

        fn raw(&self, place: u64) -> Vec<u8> {
            let mut block = vec![0; BLOCK_BYTES];
            self.device.read_exact_at(&mut block, place * BLOCK_BYTES as u64).expect("read");
            block
        }

        fn put(&self, place: u64, block: &[u8]) {
            self.device.write_all_at(block, place * BLOCK_BYTES as u64).expect("write");
        }

        fn merge(&self) {
            self.store.shared.map.merge().expect("merge");
        }

        /// Has nothing in memory but the tree.
        fn forget(&self) {
            self.store.shared.map.leaves().forget_pages();
        }

        fn leaf_reads(&self) -> u64 {
            let named = self.store.statistics();
            named.iter().find(|(name, _)| *name == "leaf_pages_read").expect("counter").1
        }

        /// Refreshes all: how many blocks have a MAC now, and what was found wrong.
        fn refresh(&self) -> (u64, Vec<Option<u64>>) {
            let mut upkeep = self.store.upkeep().expect("upkeep").expect("upkeep");
            let (mut report, mut next) = (Report::default(), 0);
            while let Some(piece) = upkeep.next_piece(next) {
                next = piece.end;
                upkeep.refresh(piece, &mut report).expect("refresh");
            }
            (report.refreshed, report.findings.iter().map(|finding| finding.lba).collect())
        }

        fn refusal(&self, lba: u64) -> Option<Refusal> {
            self.read(lba).err().and_then(|error| Refusal::of(&error).cloned())
        }
    }

    #[test]
    fn an_older_version_of_a_block_is_refused_wherever_the_current_one_is_known_from() {
        let world = World::new();
        world.write(7, 1);
        let old = world.raw(world.place(7));
        world.write(7, 2);
        world.put(world.place(7), &old);
        assert_eq!(world.refusal(7), Some(Refusal::Stale(7)), "pending");
        world.merge();
        assert_eq!(world.refusal(7), Some(Refusal::Stale(7)), "leaf page in memory");
        world.forget();
        assert_eq!(world.refusal(7), Some(Refusal::Stale(7)), "leaf page on the device");
        world.write(7, 3);
        assert!(world.reads_as(7, 3));
    }

    #[test]
    fn another_block_and_one_that_was_never_written_are_refused_and_ghosts_are_unwritten() {
        let world = World::new();
        world.write(7, 1);
        world.write(8, 1);
        world.put(world.place(7), &world.raw(world.place(8)));
        assert_eq!(world.refusal(7), Some(Refusal::Stale(7)));
        world.put(world.place(8), &[0; BLOCK_BYTES]);
        assert_eq!(world.refusal(8), Some(Refusal::Stale(8)));
        world.put(world.place(9), &world.raw(world.place(7)));
        assert_eq!(world.read(9).expect("read"), vec![0; BLOCK_BYTES]);
    }

    #[test]
    fn an_older_leaf_page_is_refused_also_with_the_block_that_it_names() {
        let world = World::new();
        world.write(7, 1);
        world.merge();
        let geometry = *world.store.shared.map.geometry();
        let places = [0, 1].map(|copy| geometry.leaf(0, copy));
        let (old, old_block) = (world.raw(places[0]), world.raw(world.place(7)));
        world.write(7, 2);
        world.merge();
        for place in places {
            world.put(place, &old);
        }
        world.forget();
        assert_eq!(world.refusal(7), Some(Refusal::StaleLeaf(0)));
        world.put(world.place(7), &old_block);
        assert_eq!(world.refusal(7), Some(Refusal::StaleLeaf(0)));
    }

    #[test]
    fn a_refreshed_block_needs_no_leaf_page_until_a_sibling_changes() {
        let world = World::new();
        world.write(7, 1);
        world.write(8, 1);
        assert_eq!(world.refresh().0, 0, "nothing is merged");
        world.merge();
        assert_eq!(world.refresh().0, 2);
        world.forget();
        let before = world.leaf_reads();
        assert!(world.reads_as(7, 1));
        assert_eq!(world.leaf_reads(), before);
        let old = world.raw(world.place(7));
        world.write(8, 2);
        world.merge();
        world.forget();
        let before = world.leaf_reads();
        assert!(world.reads_as(7, 1));
        assert_eq!(world.leaf_reads(), before + 1, "a sibling changed");
        world.write(7, 3);
        world.merge();
        world.put(world.place(7), &old);
        world.forget();
        assert_eq!(world.refusal(7), Some(Refusal::Stale(7)), "with its own old MAC");
    }

    #[test]
    fn a_mac_of_another_block_or_made_up_vouches_for_nothing() {
        let world = World::new();
        world.write(7, 1);
        let old = world.raw(world.place(7));
        world.write(7, 2);
        world.write(8, 1);
        world.merge();
        world.refresh();
        for place in [7, 8] {
            let mut forged = old.clone();
            let mac = DATA_BYTES + field::MAC.0..DATA_BYTES + field::MAC.1;
            forged[mac.clone()].copy_from_slice(&world.raw(world.place(place))[mac]);
            world.put(world.place(7), &forged);
            world.forget();
            assert_eq!(world.refusal(7), Some(Refusal::Stale(7)));
        }
    }

    #[test]
    fn a_refresh_does_not_launder_what_is_stale() {
        let world = World::new();
        world.write(7, 1);
        let old = world.raw(world.place(7));
        world.write(7, 2);
        world.merge();
        world.put(world.place(7), &old);
        assert_eq!(world.refresh(), (0, Vec::from_iter([Some(7)])));
        assert_eq!(world.raw(world.place(7)), old);
    }
}
