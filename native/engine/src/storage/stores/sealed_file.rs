//! Sealed 4160-byte blocks on pages without metadata (a sparse file, a block device, a namespace of
//! somebody else's), out of place: the data in slots, the metadata in leaf pages kept by `fresh`.
//!
//! A write that isn't durable ends when its data has reached the device; what was not flushed is
//! lost when the process is killed, as in any volatile write cache. Dropping the store flushes.

use std::io;
use std::path::Path;
use std::sync::Arc;

use sealane_proto::aead::Secret;
use sealane_proto::freshness::leaf::LeafFormat;

use super::super::store::{BLOCK_BYTES, BlockStore, METADATA_BYTES, StoreChannel, StoreCounters};
use super::device::Device;
use super::fresh::anchor::Anchor;
use super::fresh::geometry::Geometry;
use super::fresh::journal::Journal;
use super::fresh::keys::{Authority, StoreKeys};
use super::fresh::map::Map;
use super::fresh::placed::Placed;
use super::fresh::superblock::Superblock;
use super::pages::{DeviceFile, Page, random};
use super::queued_pages::QueuedPages;
use super::sealed_channel::SealedChannel;

/// What the channels of a store share.
#[derive(Debug)]
pub(super) struct Shared {
    pub device: Arc<dyn Device>,
    pub map: Arc<Map<Placed>>,
    pub counters: StoreCounters,
}

/// A file of sealed blocks.
#[derive(Debug)]
pub struct SealedFileStore {
    shared: Arc<Shared>,
    journal: Journal,
}

/// Who can make a store's pages, and who remembers how far it has come.
#[derive(Debug, Default)]
pub struct Trust<'a> {
    /// The store's secret; None: its keys lie on the device.
    pub secret: Option<&'a Secret>,
    /// Its anchor; None: a whole older state passes.
    pub anchor: Option<Arc<dyn Anchor>>,
}

impl Trust<'_> {
    pub(super) fn authority(&self) -> Authority<'_> {
        self.secret.map_or(Authority::Device, Authority::Secret)
    }
}

impl SealedFileStore {
    /// Lays out an empty store in a sparse file, which must not exist, or on a block device,
    /// whose contents are lost.
    pub fn create(path: &Path, block_count: u64, trust: &Trust<'_>) -> io::Result<Self> {
        let mut uuid: [u8; 16] = random()?;
        // RFC 9562: version 4, variant 10.
        uuid[6] = uuid[6] & 0x0F | 0x40;
        uuid[8] = uuid[8] & 0x3F | 0x80;
        let page_count = sizes(block_count).page_count();
        let device = Arc::new(DeviceFile::create(path, page_count)?);
        Self::lay_out(device, uuid, trust, block_count)
    }

    /// Opens a store and brings it to the state that its last flush, at least, left. An error with
    /// [`Refusal::RolledBack`](super::fresh::failure::Refusal) if its anchor knows of a later one.
    pub fn open(path: &Path, trust: &Trust<'_>) -> io::Result<Self> {
        let device = Arc::new(DeviceFile::open(path, 1)?);
        let (superblock, keys) = Superblock::read(&*device, &trust.authority())?;
        Self::take_up(device, &superblock, keys, trust)
    }

    /// Lays out an empty store on a device of which the first page must be zeros: anything else may
    /// be somebody's data.
    pub fn create_on(
        device: Arc<dyn Device>,
        uuid: [u8; 16],
        trust: &Trust<'_>,
        block_count: u64,
    ) -> io::Result<Self> {
        let mut first = [Page::ZERO];
        device.read(0, &mut first)?;
        if first != [Page::ZERO] {
            let detail = "the device holds something: its first 4096 bytes are not zeros";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, detail));
        }
        Self::lay_out(device, uuid, trust, block_count)
    }

    /// Opens the store of that name on a device.
    pub fn open_on(device: Arc<dyn Device>, uuid: [u8; 16], trust: &Trust<'_>) -> io::Result<Self> {
        check_name(&*device, uuid)?;
        let (superblock, keys) = Superblock::read(&*device, &trust.authority())?;
        Self::take_up(device, &superblock, keys, trust)
    }

    /// Takes the store of that name off a device, so that another one can be laid out; no key is
    /// needed to.
    pub fn erase_on(device: &dyn Device, uuid: [u8; 16]) -> io::Result<()> {
        check_name(device, uuid)?;
        device.write(0, &[Page::ZERO])?;
        device.sync()
    }

    fn lay_out(
        device: Arc<dyn Device>,
        uuid: [u8; 16],
        trust: &Trust<'_>,
        block_count: u64,
    ) -> io::Result<Self> {
        let superblock = Superblock { uuid, seed: random()?, geometry: sizes(block_count) };
        check_size(&*device, &superblock.geometry)?;
        let file = Arc::new(QueuedPages::new(Arc::clone(&device))?);
        let map = Map::create(file, &superblock, &trust.authority(), trust.anchor.clone())?;
        Self::start(device, map)
    }

    fn take_up(
        device: Arc<dyn Device>,
        superblock: &Superblock,
        keys: StoreKeys,
        trust: &Trust<'_>,
    ) -> io::Result<Self> {
        check_size(&*device, &superblock.geometry)?;
        let file = Arc::new(QueuedPages::new(Arc::clone(&device))?);
        let map = Map::open(file, superblock, keys, trust.anchor.clone())?;
        Self::start(device, map)
    }

    fn start(device: Arc<dyn Device>, map: Map<Placed>) -> io::Result<Self> {
        let map = Arc::new(map);
        let journal = Journal::start(Arc::clone(&map))?;
        let shared = Shared { device, map, counters: StoreCounters::default() };
        Ok(Self { shared: Arc::new(shared), journal })
    }
}

fn sizes(block_count: u64) -> Geometry {
    Geometry::placed(block_count, Placed::ENTRIES_PER_LEAF)
}

fn check_name(device: &dyn Device, uuid: [u8; 16]) -> io::Result<()> {
    if Superblock::read_claimed(device)?.uuid == uuid {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "the device holds another store"))
}

fn check_size(device: &dyn Device, geometry: &Geometry) -> io::Result<()> {
    let (found, needed) = (device.page_count(), geometry.page_count());
    if found < needed {
        let detail =
            format!("the device has {found} pages of 4096 bytes, the store takes {needed}");
        return Err(io::Error::new(io::ErrorKind::StorageFull, detail));
    }
    Ok(())
}

impl BlockStore for SealedFileStore {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn block_count(&self) -> u64 {
        self.shared.map.geometry().block_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        let channel = SealedChannel::new(Arc::clone(&self.shared), self.journal.requests())?;
        Ok(Box::new(channel))
    }

    fn keeps_freshness(&self) -> bool {
        true
    }

    fn scan(&self, visit: &mut dyn FnMut(u64, &[u8; METADATA_BYTES])) -> io::Result<()> {
        let map = &self.shared.map;
        for set in 0..map.geometry().sets() {
            let start = set * Placed::ENTRIES_PER_LEAF;
            for (lba, entry) in (start..).zip(map.set_entries(set)?) {
                if let Some(entry) = entry {
                    visit(lba, &entry.metadata());
                }
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
    use sealane_proto::freshness::pending::Known;

    use super::super::super::store::StoreRequest;
    use super::super::conformance;
    use super::super::scratch::Scratch;
    use super::*;

    #[test]
    fn behaves_as_a_store() {
        let scratch = Scratch::new();
        conformance::check(
            &SealedFileStore::create(&scratch.file(), 1000, &Trust::default()).expect("store"),
        );
    }

    fn write(channel: &mut dyn StoreChannel, lba: u64, count: u64, version: u64) {
        let buffer = conformance::blocks(BLOCK_BYTES, lba, count, version);
        let write = StoreRequest::Write { lba, buffer, durable: false };
        conformance::execute(channel, write).expect("write");
    }

    #[test]
    fn keeps_what_was_flushed_from_one_opening_to_the_next() {
        let scratch = Scratch::new();
        let store =
            SealedFileStore::create(&scratch.file(), 1000, &Trust::default()).expect("store");
        let mut channel = store.open().expect("channel");
        write(&mut *channel, 100, 300, 1);
        conformance::execute(&mut *channel, StoreRequest::Flush).expect("flush");
        drop((channel, store));
        let store = SealedFileStore::open(&scratch.file(), &Trust::default()).expect("store");
        let mut written = 0;
        store.scan(&mut |_, _| written += 1).expect("scan");
        assert_eq!((written, store.block_count()), (300, 1000));
        let mut channel = store.open().expect("channel");
        let found = conformance::read(&mut *channel, BLOCK_BYTES, 100, 300);
        assert_eq!(found, conformance::blocks(BLOCK_BYTES, 100, 300, 1));
    }

    #[test]
    fn an_orderly_end_loses_nothing() {
        let scratch = Scratch::new();
        let store =
            SealedFileStore::create(&scratch.file(), 1000, &Trust::default()).expect("store");
        let mut channel = store.open().expect("channel");
        write(&mut *channel, 100, 30, 1);
        drop((channel, store));
        let store = SealedFileStore::open(&scratch.file(), &Trust::default()).expect("store");
        let mut channel = store.open().expect("channel");
        let found = conformance::read(&mut *channel, BLOCK_BYTES, 100, 30);
        assert_eq!(found, conformance::blocks(BLOCK_BYTES, 100, 30, 1));
    }

    #[test]
    fn overwriting_more_than_the_spare_slots_waits_for_flushes() {
        let scratch = Scratch::new();
        let store =
            SealedFileStore::create(&scratch.file(), 500, &Trust::default()).expect("store");
        let mut channel = store.open().expect("channel");
        let rounds = 20;
        for round in 0..rounds {
            for lba in (0..500).step_by(50) {
                let buffer = conformance::blocks(BLOCK_BYTES, lba, 50, round);
                channel.submit(lba, StoreRequest::Write { lba, buffer, durable: false });
            }
            let ends = conformance::wait(&mut *channel, 10);
            assert!(ends.iter().all(|end| end.result.is_ok()));
        }
        let found = conformance::read(&mut *channel, BLOCK_BYTES, 0, 500);
        assert_eq!(found, conformance::blocks(BLOCK_BYTES, 0, 500, rounds - 1));
    }

    #[test]
    fn a_dropped_channel_gives_its_slots_back() {
        let scratch = Scratch::new();
        let store =
            SealedFileStore::create(&scratch.file(), 100, &Trust::default()).expect("store");
        let free = || store.shared.map.free_slots();
        let before = free();
        let mut channel = store.open().expect("channel");
        for lba in 0..100 {
            let buffer = conformance::block(BLOCK_BYTES, lba, 1);
            channel.submit(lba, StoreRequest::Write { lba, buffer, durable: false });
        }
        assert_eq!(free(), before - 100);
        drop(channel);
        assert_eq!(free(), before);
    }

    #[test]
    fn a_changed_byte_in_a_slot_is_an_error_not_data() {
        let scratch = Scratch::new();
        let store =
            SealedFileStore::create(&scratch.file(), 100, &Trust::default()).expect("store");
        let mut channel = store.open().expect("channel");
        write(&mut *channel, 7, 1, 1);
        let map = &store.shared.map;
        let Known::Entry(entry) = map.current(7, 1)[0] else { panic!("it waits in memory") };
        let mut page = [Page::ZERO];
        let place = map.geometry().slot(entry.slot);
        store.shared.device.read(place, &mut page).expect("read");
        page[0].0[1000] ^= 1;
        store.shared.device.write(place, &page).expect("write");
        let request = StoreRequest::Read { lba: 7, buffer: vec![0; BLOCK_BYTES] };
        let error = conformance::execute(&mut *channel, request).expect_err("damaged");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn what_is_no_store_is_refused() {
        let scratch = Scratch::new();
        std::fs::write(scratch.file(), vec![7; 8192]).expect("file");
        let error =
            SealedFileStore::open(&scratch.file(), &Trust::default()).expect_err("no store");
        assert!(error.to_string().contains("not a Sealane store"), "{error}");
        let store = SealedFileStore::create(&scratch.file(), 10, &Trust::default());
        assert_eq!(store.expect_err("it exists").kind(), io::ErrorKind::AlreadyExists);
    }
}
