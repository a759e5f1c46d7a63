//! Sealed 4160-byte blocks, out of place, on pages without metadata (a sparse file, a block device,
//! or a third party's namespace): the data lies in slots, the metadata in leaf pages kept by
//! `fresh`.
//!
//! A write that isn't durable completes when its data has reached the device. If the process is
//! killed, writes since the last flush are lost, as in any volatile write cache. Dropping the store
//! flushes.

use std::io;
use std::path::Path;
use std::sync::Arc;

use sealane_proto::freshness::leaf::LeafFormat;

use super::super::store::StoreChannel;
use super::super::upkeep::Upkeep;
use super::device::{Device, check_room};
use super::fresh::geometry::Geometry;
use super::fresh::journal::Requests;
use super::fresh::placed::Placed;
use super::fresh_store::{FreshStore, Place, Shared, Trust, check_empty, check_name, new_uuid};
use super::pages::{BlockFile, DeviceFile, Page};
use super::queued_pages::QueuedPages;
use super::sealed_channel::SealedChannel;
use super::sealed_upkeep::SealedUpkeep;

/// A store of sealed blocks out of place.
pub type SealedFileStore = FreshStore<Slots>;

/// Slots on a device.
#[derive(Debug)]
pub struct Slots {
    /// The device.
    pub device: Arc<dyn Device>,
}

impl Place for Slots {
    type Layout = Placed;
    const LAYOUT: &'static str = "out of place";

    fn file(&self) -> io::Result<Arc<dyn BlockFile>> {
        Ok(Arc::new(QueuedPages::new(Arc::clone(&self.device))?))
    }

    fn check_size(&self, geometry: &Geometry) -> io::Result<()> {
        check_room(self.device.page_count(), geometry.device_pages())
    }

    fn extend(&self, geometry: &Geometry) -> io::Result<()> {
        self.device.extend(geometry.device_pages())
    }

    fn channel(
        shared: &Arc<Shared<Self>>,
        requests: &Arc<Requests>,
    ) -> io::Result<Box<dyn StoreChannel>> {
        Ok(Box::new(SealedChannel::new(Arc::clone(shared), requests)?))
    }

    fn upkeep(shared: &Arc<Shared<Self>>) -> io::Result<Box<dyn Upkeep>> {
        Ok(Box::new(SealedUpkeep::new(Arc::clone(shared))))
    }
}

impl SealedFileStore {
    /// Creates an empty store in a sparse file, which must not exist yet, or on a block device,
    /// whose contents are lost.
    pub fn create(path: &Path, block_count: u64, trust: &Trust<'_>) -> io::Result<Self> {
        let geometry = sizes(block_count);
        let device = Arc::new(DeviceFile::create(path, geometry.device_pages())?);
        Self::lay_out(Slots { device }, new_uuid()?, geometry, trust)
    }

    /// Opens a store and recovers the state of its last flush or a later one. Fails with
    /// [`Refusal::RolledBack`](super::fresh::failure::Refusal) if the anchor has recorded a later
    /// state.
    pub fn open(path: &Path, trust: &Trust<'_>) -> io::Result<Self> {
        let device = Arc::new(DeviceFile::open(path, 1)?);
        Self::take_up(Slots { device }, trust)
    }

    /// Creates an empty store on a device. The first page must be zeros: anything else may be
    /// somebody's data.
    pub fn create_on(
        device: Arc<dyn Device>,
        uuid: [u8; 16],
        trust: &Trust<'_>,
        block_count: u64,
    ) -> io::Result<Self> {
        check_empty(&*device)?;
        Self::lay_out(Slots { device }, uuid, sizes(block_count), trust)
    }

    /// Opens the store with this UUID on a device.
    pub fn open_on(device: Arc<dyn Device>, uuid: [u8; 16], trust: &Trust<'_>) -> io::Result<Self> {
        check_name(&*device, uuid)?;
        Self::take_up(Slots { device }, trust)
    }

    /// Erases the store with this UUID, so that another one can be created on the device. Needs no
    /// key.
    pub fn erase_on(device: &dyn Device, uuid: [u8; 16]) -> io::Result<()> {
        check_name(device, uuid)?;
        device.write(0, &[Page::ZERO])?;
        device.sync()
    }
}

fn sizes(block_count: u64) -> Geometry {
    Geometry::placed(block_count, Placed::ENTRIES_PER_LEAF)
}

#[cfg(test)]
mod tests {
    use sealane_proto::freshness::pending::Known;

    use super::super::super::store::{BLOCK_BYTES, BlockStore, StoreRequest};
    use super::super::conformance;
    use super::super::fresh::opening::Opening;
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
        let statistics = store.statistics();
        assert!(statistics.contains(&("sectors_written", 300)), "{statistics:?}");
        assert_eq!(store.block_count(), 1000);
        let mut channel = store.open().expect("channel");
        let found = conformance::read(&mut *channel, BLOCK_BYTES, 100, 300);
        assert_eq!(found, conformance::blocks(BLOCK_BYTES, 100, 300, 1));
    }

    #[test]
    fn an_opening_reports_its_progress() {
        let scratch = Scratch::new();
        let store =
            SealedFileStore::create(&scratch.file(), 1000, &Trust::default()).expect("store");
        let geometry = store.map().geometry().clone();
        let mut channel = store.open().expect("channel");
        write(&mut *channel, 100, 300, 1);
        conformance::execute(&mut *channel, StoreRequest::Flush).expect("flush");
        drop((channel, store));
        let opening = Opening::default();
        assert_eq!(opening.progress(), (0, 0));
        let trust = Trust { opening: Some(&opening), ..Trust::default() };
        drop(SealedFileStore::open(&scratch.file(), &trust).expect("store"));
        let pages = geometry.node_pages() + geometry.log_pages + geometry.slot_maps();
        assert_eq!(opening.progress(), (pages + 300, pages + 300));
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
        let Known::Entry(entry) = map.current(7, 1)[0] else { panic!("not pending") };
        let mut page = [Page::ZERO];
        let place = map.geometry().slot(entry.slot);
        store.shared.place.device.read(place, &mut page).expect("read");
        page[0].0[1000] ^= 1;
        store.shared.place.device.write(place, &page).expect("write");
        let request = StoreRequest::Read { lba: 7, buffer: vec![0; BLOCK_BYTES] };
        let error = conformance::execute(&mut *channel, request).expect_err("damaged");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_file_that_is_no_store_is_refused() {
        let scratch = Scratch::new();
        std::fs::write(scratch.file(), vec![7; 8192]).expect("file");
        let error =
            SealedFileStore::open(&scratch.file(), &Trust::default()).expect_err("no store");
        assert!(error.to_string().contains("not a Sealane store"), "{error}");
        let store = SealedFileStore::create(&scratch.file(), 10, &Trust::default());
        assert_eq!(store.expect_err("the file exists").kind(), io::ErrorKind::AlreadyExists);
    }
}
