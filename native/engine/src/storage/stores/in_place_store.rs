//! Sealed 4160-byte blocks in place, on a store whose blocks have metadata and change as a whole: a
//! drive formatted with 4096 + 64 bytes, or a replacement for one. `fresh` keeps them fresh, in
//! blocks of the same store in front of them (`docs/formats/stores.md` §2a).

use std::io;
use std::sync::Arc;

use sealane_proto::freshness::leaf::{Ivs, LeafFormat};

use super::super::store::{BlockStore, StoreChannel};
use super::super::upkeep::Upkeep;
use super::fresh::geometry::Geometry;
use super::fresh::journal::Requests;
use super::fresh_store::{FreshStore, Place, Shared, Trust, check_empty, check_name, new_uuid};
use super::in_place_channel::InPlaceChannel;
use super::in_place_upkeep::InPlaceUpkeep;
use super::pages::BlockFile;
use super::raw_pages::RawPages;

/// A store of sealed blocks in place.
pub type InPlaceStore = FreshStore<InPlace>;

/// Blocks of a raw store, behind the pages that keep them fresh.
#[derive(Debug)]
pub struct InPlace {
    /// The raw store.
    pub(super) raw: Arc<RawPages>,
}

/// Number of raw blocks that a store of `block_count` sealed blocks needs.
#[must_use]
pub fn raw_blocks(block_count: u64) -> u64 {
    sizes(block_count).device_pages()
}

fn sizes(block_count: u64) -> Geometry {
    Geometry::in_place(block_count, Ivs::ENTRIES_PER_LEAF)
}

impl Place for InPlace {
    type Layout = Ivs;
    const LAYOUT: &'static str = "in place";

    fn file(&self) -> io::Result<Arc<dyn BlockFile>> {
        Ok(Arc::clone(&self.raw) as Arc<dyn BlockFile>)
    }

    fn check_size(&self, geometry: &Geometry) -> io::Result<()> {
        let (found, needed) = (self.raw.block_count(), geometry.device_pages());
        if found < needed {
            let detail = format!("the device has {found} blocks, the store takes {needed}");
            return Err(io::Error::new(io::ErrorKind::StorageFull, detail));
        }
        Ok(())
    }

    fn extend(&self, geometry: &Geometry) -> io::Result<()> {
        if self.raw.block_count() < geometry.device_pages() {
            match self.raw.extend(geometry.device_pages()) {
                // A store that can't grow must be large enough already.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                extended => extended?,
            }
        }
        self.check_size(geometry)
    }

    fn channel(
        shared: &Arc<Shared<Self>>,
        requests: &Arc<Requests>,
    ) -> io::Result<Box<dyn StoreChannel>> {
        Ok(Box::new(InPlaceChannel::new(Arc::clone(shared), requests)?))
    }

    fn upkeep(shared: &Arc<Shared<Self>>) -> io::Result<Box<dyn Upkeep>> {
        Ok(Box::new(InPlaceUpkeep::new(Arc::clone(shared))?))
    }
}

impl InPlaceStore {
    /// Creates an empty store of `block_count` blocks. The first raw block must be zeros: anything
    /// else may be somebody's data.
    pub fn create(
        raw: Box<dyn BlockStore>,
        block_count: u64,
        trust: &Trust<'_>,
    ) -> io::Result<Self> {
        Self::create_on(raw, new_uuid()?, trust, block_count)
    }

    /// Creates a store as [`Self::create`] does, with a given UUID.
    pub fn create_on(
        raw: Box<dyn BlockStore>,
        uuid: [u8; 16],
        trust: &Trust<'_>,
        block_count: u64,
    ) -> io::Result<Self> {
        let raw = Arc::new(RawPages::new(raw)?);
        check_empty(&*raw)?;
        Self::lay_out(InPlace { raw }, uuid, sizes(block_count), trust)
    }

    /// Opens a store and recovers the state of its last flush or a later one. Fails with
    /// [`Refusal::RolledBack`](super::fresh::failure::Refusal) if the anchor has recorded a later
    /// state.
    pub fn open(raw: Box<dyn BlockStore>, trust: &Trust<'_>) -> io::Result<Self> {
        let raw = Arc::new(RawPages::new(raw)?);
        Self::take_up(InPlace { raw }, trust)
    }

    /// Opens the store with this UUID.
    pub fn open_on(
        raw: Box<dyn BlockStore>,
        uuid: [u8; 16],
        trust: &Trust<'_>,
    ) -> io::Result<Self> {
        let raw = Arc::new(RawPages::new(raw)?);
        check_name(&*raw, uuid)?;
        Self::take_up(InPlace { raw }, trust)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, channel};

    use sealane_proto::sector::{BLOCK_BYTES, DATA_BYTES, field};

    use super::super::super::store::StoreRequest;
    use super::super::super::upkeep::Report;
    use super::super::conformance;
    use super::super::emulated::{EmulatedStore, Profile};
    use super::super::fresh::anchor::{Anchor, AnchorError, AnchorPolicy, Anchored, MemoryAnchor};
    use super::super::fresh::failure::Refusal;
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

    /// A store on a file to which an adversary can write behind the store's back.
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

        /// Drops all cached leaf pages; only the tree stays in memory.
        fn forget(&self) {
            self.store.shared.map.leaves().forget_pages();
        }

        fn leaf_reads(&self) -> u64 {
            let named = self.store.statistics();
            named.iter().find(|(name, _)| *name == "leaf_pages_read").expect("counter").1
        }

        /// Refreshes all blocks. Returns how many have a current MAC, and the findings.
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
    fn an_older_version_of_a_block_is_refused_wherever_the_current_iv_is_found() {
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
    fn a_block_from_another_place_is_refused_and_an_unwritten_block_stays_unwritten() {
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
        let geometry = world.store.shared.map.geometry().clone();
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
        assert_eq!(world.refresh().0, 0, "nothing is merged yet");
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
    fn the_fast_path_mac_of_another_block_or_version_is_not_accepted() {
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
    fn a_refresh_issues_no_mac_for_a_stale_block() {
        let world = World::new();
        world.write(7, 1);
        let old = world.raw(world.place(7));
        world.write(7, 2);
        world.merge();
        world.put(world.place(7), &old);
        assert_eq!(world.refresh(), (0, Vec::from_iter([Some(7)])));
        assert_eq!(world.raw(world.place(7)), old);
    }

    /// An anchor that answers one advance for each message it receives.
    #[derive(Debug)]
    struct SlowAnchor {
        memory: MemoryAnchor,
        answers: Mutex<Receiver<()>>,
        asked: Mutex<u64>,
    }

    impl Anchor for SlowAnchor {
        fn latest(&self) -> io::Result<Option<Anchored>> {
            self.memory.latest()
        }

        fn advance(&self, to: &Anchored) -> Result<(), AnchorError> {
            *self.asked.lock().expect("asked") += 1;
            // Once the sender is dropped, it answers all.
            let _ = self.answers.lock().expect("answers").recv();
            self.memory.advance(to)
        }

        fn policy(&self) -> AnchorPolicy {
            self.memory.policy()
        }
    }

    #[test]
    fn writes_go_on_while_the_anchor_of_a_flush_gives_no_answer() {
        let (answer, answers) = channel();
        answer.send(()).expect("for the creation");
        let memory = MemoryAnchor::new(AnchorPolicy::EveryCommit);
        let (answers, asked) = (Mutex::new(answers), Mutex::default());
        let anchor = Arc::new(SlowAnchor { memory, answers, asked });
        let trust = Trust { anchor: Some(Arc::clone(&anchor) as _), ..Trust::default() };
        let raw = Box::new(MemoryStore::new(raw_blocks(BLOCKS), true));
        let store = InPlaceStore::create(raw, BLOCKS, &trust).expect("store");
        let mut flushing = store.open().expect("channel");
        let mut writing = store.open().expect("channel");
        let write = |lba, version| {
            let buffer = conformance::block(BLOCK_BYTES, lba, version);
            StoreRequest::Write { lba, buffer, durable: false }
        };
        conformance::execute(&mut *writing, write(1, 1)).expect("write");
        flushing.submit(1, StoreRequest::Flush);
        while *anchor.asked.lock().expect("asked") < 2 {
            std::thread::yield_now();
        }
        for version in 2..50 {
            conformance::execute(&mut *writing, write(1, version)).expect("write");
        }
        let mut done = Vec::new();
        flushing.poll(&mut done);
        assert_eq!(done.len(), 0, "the anchor gave no answer");
        drop(answer);
        assert_eq!(conformance::wait(&mut *flushing, 1).len(), 1);
        let found = conformance::read(&mut *writing, BLOCK_BYTES, 1, 1);
        assert_eq!(found, conformance::block(BLOCK_BYTES, 1, 49));
    }
}
