//! Who answers for the device without the store's secret: what he makes, changes, moves or mixes is
//! refused. Only a whole older state, as one checkpoint and its log had it, passes.

use std::io;
use std::sync::Arc;

use sealane_proto::aead::Secret;

use super::super::store::{BLOCK_BYTES, DATA_BYTES};
use super::layout::{Authority, Checker, Checkpoint, Entry, Geometry, LogPage, Record, Superblock};
use super::pages::{BlockFile, Page};
use super::recovery;
use super::sealed_map::SealedMap;
use super::torn_disk::TornDisk;

/// Two pages of table.
const GEOMETRY: Geometry = Geometry { block_count: 60, slot_count: 80, log_pages: 8 };
const SUPERBLOCK: Superblock = Superblock { uuid: [1; 16], seed: [2; 32], geometry: GEOMETRY };

fn secret() -> Secret {
    Secret::take(&mut [3; 32])
}

fn create() -> (Arc<TornDisk>, SealedMap) {
    let disk = Arc::new(TornDisk::default());
    let file = Arc::clone(&disk) as Arc<dyn BlockFile>;
    let map = SealedMap::create(file, &SUPERBLOCK, &Authority::Secret(&secret()));
    (disk, map.expect("store"))
}

fn open(image: TornDisk) -> io::Result<(Arc<TornDisk>, SealedMap)> {
    let disk = Arc::new(image);
    let (superblock, checker) = recovery::superblock(&*disk, &Authority::Secret(&secret()))?;
    let file = Arc::clone(&disk) as Arc<dyn BlockFile>;
    let map = SealedMap::open(file, superblock.geometry, checker)?;
    Ok((disk, map))
}

/// Writes a block of one byte and flushes.
fn write(disk: &TornDisk, map: &SealedMap, lba: u64, byte: u8) {
    let block = [byte; BLOCK_BYTES];
    let entries = map.place(&block).expect("slots").expect("room");
    let slot = entries[0].slot.expect("slot");
    let mut page = [Page::ZERO];
    page[0].0.copy_from_slice(&block[..DATA_BYTES]);
    disk.write(GEOMETRY.slot(slot), &page).expect("write");
    map.commit(lba, &entries).expect("commit");
    map.flush().expect("flush");
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

/// What a block says; None if it is unwritten.
fn held(map: &SealedMap, lba: u64) -> Option<u8> {
    let entry = map.entries(lba, 1)[0];
    entry.slot.map(|_| entry.metadata[0])
}

/// The keys of who knows all that lies on the device.
fn forger() -> Checker {
    Checker::new(&SUPERBLOCK, &Authority::Device)
}

#[test]
fn who_has_another_secret_opens_nothing() {
    let (disk, map) = create();
    write(&disk, &map, 5, 1);
    let other = Secret::take(&mut [4; 32]);
    for authority in [Authority::Secret(&other), Authority::Device] {
        let error = recovery::superblock(&*disk, &authority).expect_err("another secret");
        assert!(error.to_string().contains("superblock"), "{error}");
    }
    let (_, map) = open(disk.whole()).expect("store");
    assert_eq!(held(&map, 5), Some(1));
}

#[test]
fn a_forged_superblock_is_refused() {
    let (disk, _map) = create();
    let other = Superblock { geometry: Geometry { log_pages: 9, ..GEOMETRY }, ..SUPERBLOCK };
    put(&disk, 0, &other.encode(&forger()));
    let error = open(disk.whole()).expect_err("forged").to_string();
    assert!(error.contains("forged"), "{error}");
    // Somebody else's authentic superblock, of the same secret and another layout.
    let other = Superblock { seed: [9; 32], ..SUPERBLOCK };
    put(&disk, 0, &other.encode(&Checker::new(&other, &Authority::Secret(&secret()))));
    let error = open(disk.whole()).expect_err("another layout's keys").to_string();
    assert!(error.contains("no checkpoint is whole"), "{error}");
}

#[test]
fn a_forged_checkpoint_is_passed_over() {
    let (disk, map) = create();
    write(&disk, &map, 5, 1);
    let genuine = [1, 2].map(|place| page(&disk, place));
    let newest = Checkpoint {
        number: u64::MAX,
        stamp: u64::MAX / 2,
        generation: 0,
        log_start: 0,
        table_proof: forger().table_proof(u64::MAX / 2, 0),
    };
    put(&disk, 2, &newest.encode(&forger()));
    if let Ok((_, map)) = open(disk.whole()) {
        assert_eq!(held(&map, 5), Some(1));
    }
    put(&disk, 1, &newest.encode(&forger()));
    let error = open(disk.whole()).expect_err("none is left").to_string();
    assert!(error.contains("no checkpoint is whole"), "{error}");
    for (place, page) in [(1, genuine[0]), (2, genuine[1])] {
        put(&disk, place, &page);
    }
    assert_eq!(held(&open(disk.whole()).expect("store").1, 5), Some(1));
}

#[test]
fn a_forged_log_record_is_never_applied() {
    let (disk, map) = create();
    write(&disk, &map, 5, 1);
    let (slot, stamp) = (GEOMETRY.slot_count - 1, 1 << 40);
    let block = [66; BLOCK_BYTES];
    let mut data = Page::ZERO;
    data.0.copy_from_slice(&block[..DATA_BYTES]);
    put(&disk, GEOMETRY.slot(slot), &data);
    let checker = forger();
    let checksum = checker.block(stamp, &block);
    let entry = Entry { slot: Some(slot), stamp, checksum, metadata: [66; 64] };
    // The real log's first page tells generation and number.
    let keys = Checker::new(&SUPERBLOCK, &Authority::Secret(&secret()));
    let genuine = LogPage::decode(&page(&disk, GEOMETRY.log(0)), &keys).expect("a log page");
    for entry in [entry, Entry::deallocated(stamp)] {
        let records = vec![Record { lba: 5, blocks: 1, entry }];
        let forged = LogPage { number: 1, durable: 2, records, ..genuine.clone() };
        put(&disk, GEOMETRY.log(1), &forged.encode(&checker));
        let (_, map) = open(disk.whole()).expect("store");
        assert_eq!(held(&map, 5), Some(1));
        // By who has the secret it would be: the record is right in everything else.
        put(&disk, GEOMETRY.log(1), &forged.encode(&keys));
        let (_, map) = open(disk.whole()).expect("store");
        assert_ne!(held(&map, 5), Some(1));
    }
}

#[test]
fn a_log_page_of_another_opening_is_not_spliced_in() {
    let (disk, map) = create();
    write(&disk, &map, 5, 1);
    drop(map);
    let base = disk.whole();
    // Two lives that the device gave the same state: their log pages have the same numbers.
    let (mut first, map) = open(base.whole()).expect("store");
    write(&first, &map, 6, 2);
    drop(map);
    let (second, map) = open(base.whole()).expect("store");
    write(&second, &map, 6, 3);
    drop(map);
    let moved = (0..GEOMETRY.log_pages).map(|number| GEOMETRY.log(number));
    let slots = (0..GEOMETRY.slot_count).map(|slot| GEOMETRY.slot(slot));
    for place in moved.chain(slots) {
        put(&first, place, &page(&second, place));
    }
    if let Ok((_, map)) = open(first.whole()) {
        assert_ne!(held(&map, 6), Some(3), "a record of another life");
    }
    // A page of the first life that was moved to another place of it.
    let (again, map) = open(base.whole()).expect("store");
    first = again;
    write(&first, &map, 6, 2);
    write(&first, &map, 7, 2);
    drop(map);
    let place = |map: &SealedMap, lba| held(map, lba);
    let swapped = first.whole();
    let log = (0..GEOMETRY.log_pages).map(|number| page(&first, GEOMETRY.log(number)));
    let log: Vec<Page> = log.collect();
    for (number, page) in (0..).zip(log.into_iter().rev()) {
        put(&swapped, GEOMETRY.log(number), &page);
    }
    if let Ok((_, map)) = open(swapped) {
        assert_eq!((place(&map, 6), place(&map, 7)), (None, None));
    }
}

#[test]
fn older_pages_of_the_table_are_not_mixed_with_newer_ones() {
    let (disk, map) = create();
    // Blocks of both pages, in two checkpoints: each page has an older copy that is authentic.
    for byte in [1, 2] {
        write(&disk, &map, 5, byte);
        write(&disk, &map, 50, byte);
        map.checkpoint().expect("checkpoint");
    }
    assert_eq!(held(&open(disk.whole()).expect("store").1, 5), Some(2));
    for index in [0, 1] {
        for copy in [0, 1] {
            let image = disk.whole();
            let other = page(&image, GEOMETRY.table(index, 1 - copy));
            put(&image, GEOMETRY.table(index, copy), &other);
            if let Ok((_, map)) = open(image) {
                assert_eq!((held(&map, 5), held(&map, 50)), (Some(2), Some(2)));
            }
        }
        let moved = disk.whole();
        put(&moved, GEOMETRY.table(1 - index, 0), &page(&disk, GEOMETRY.table(index, 0)));
        put(&moved, GEOMETRY.table(1 - index, 1), &page(&disk, GEOMETRY.table(index, 1)));
        assert!(open(moved).is_err(), "page {index} twice");
    }
}

#[test]
fn a_checkpoint_does_not_tell_the_sum_over_the_table() {
    // Who knew what each page adds could look for older pages with the same sum.
    let keys = Checker::new(&SUPERBLOCK, &Authority::Secret(&secret()));
    assert_ne!(keys.table_proof(1, 7), keys.table_proof(2, 7));
    assert_ne!(keys.table_proof(1, 7), keys.table_proof(1, 8));
    assert_ne!(keys.table_proof(1, 7), forger().table_proof(1, 7));
}

#[test]
fn a_whole_older_state_still_passes_and_nobody_promises_otherwise() {
    let (disk, map) = create();
    write(&disk, &map, 5, 1);
    let old = disk.whole();
    write(&disk, &map, 5, 2);
    // docs/third-party.md: only an anchor could tell.
    assert_eq!(held(&open(old).expect("store").1, 5), Some(1));
}
