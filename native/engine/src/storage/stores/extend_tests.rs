//! Growth of stores of every kind.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::fstatvfs;
use rustix::io::Errno;

use super::super::store::{BLOCK_BYTES, BlockStore, StoreChannel, StoreRequest};
use super::conformance;
use super::fresh_store::Trust;
use super::in_place_store::{InPlaceStore, raw_blocks};
use super::memory::MemoryStore;
use super::pages::{BlockFile, DeviceFile, PAGE_BYTES, check_free, reserve_by};
use super::scratch::Scratch;
use super::selection::{self, StoreOptions};

const BLOCKS: u64 = 300;

/// Options for creating an empty store of a kind.
fn options<'a>(kind: &'a str, path: &'a Path, trust: &'a Trust<'a>) -> StoreOptions<'a> {
    StoreOptions {
        kind,
        block_count: BLOCKS,
        is_sealed: true,
        path: matches!(kind, "file" | "inline").then_some(path),
        creates: true,
        drive: (kind == "emulated").then_some("9000000000,9000000,1:9000000000,9000000,1"),
        in_place: false,
        is_fresh: true,
        trust,
    }
}

fn write(channel: &mut dyn StoreChannel, lba: u64, count: u64, version: u64) {
    let buffer = conformance::blocks(BLOCK_BYTES, lba, count, version);
    let write = StoreRequest::Write { lba, buffer, durable: true };
    conformance::execute(channel, write).expect("write");
}

fn holds(channel: &mut dyn StoreChannel, lba: u64, count: u64, version: u64) -> bool {
    let expected = conformance::blocks(BLOCK_BYTES, lba, count, version);
    conformance::read(channel, BLOCK_BYTES, lba, count) == expected
}

#[test]
fn a_store_of_any_kind_that_grew_twice_behaves_as_a_store() {
    for kind in ["memory", "emulated", "file", "inline"] {
        let (scratch, trust) = (Scratch::new(), Trust::default());
        let path = scratch.file();
        let mut store = selection::open(&options(kind, &path, &trust)).expect("store");
        store.extend(700).expect("growth");
        store.extend(1000).expect("growth");
        assert_eq!(store.block_count(), 1000, "{kind}");
        conformance::check(&*store);
    }
}

#[test]
fn written_blocks_stay_and_new_ones_are_unwritten() {
    for kind in ["memory", "emulated", "file", "inline"] {
        let (scratch, trust) = (Scratch::new(), Trust::default());
        let path = scratch.file();
        let options = options(kind, &path, &trust);
        let mut store = selection::open(&options).expect("store");
        write(&mut *store.open().expect("channel"), 0, BLOCKS, 1);
        for (before, after) in [(BLOCKS, 700), (700, 1000)] {
            store.extend(after).expect("growth");
            let mut channel = store.open().expect("channel");
            assert!(holds(&mut *channel, 0, BLOCKS, 1), "{kind}");
            let zeros = vec![0; (after - before) as usize * BLOCK_BYTES];
            let new = conformance::read(&mut *channel, BLOCK_BYTES, before, after - before);
            assert_eq!(new, zeros, "{kind}");
            // Across the boundary, in one write and one read.
            write(&mut *channel, before - 20, 40, after);
            assert!(holds(&mut *channel, before - 20, 40, after), "{kind}");
            write(&mut *channel, before - 20, 20, 1);
            assert!(holds(&mut *channel, before, 20, after), "{kind}");
        }
        let is_kept = options.path.is_some();
        drop(store);
        if is_kept {
            let again = StoreOptions { creates: false, block_count: 1000, ..options };
            let store = selection::open(&again).expect("store");
            let mut channel = store.open().expect("channel");
            assert!(holds(&mut *channel, 0, BLOCKS, 1), "{kind}");
            assert!(holds(&mut *channel, 700, 20, 1000), "{kind}");
        }
    }
}

#[test]
fn a_store_in_use_does_not_grow() {
    for kind in ["memory", "emulated", "file", "inline"] {
        let (scratch, trust) = (Scratch::new(), Trust::default());
        let path = scratch.file();
        let mut store = selection::open(&options(kind, &path, &trust)).expect("store");
        let channel = store.open().expect("channel");
        let error = store.extend(700).expect_err("in use");
        assert_eq!((error.kind(), store.block_count()), (io::ErrorKind::ResourceBusy, BLOCKS));
        drop(channel);
        store.extend(700).expect("growth");
        store.extend(500).expect("it is larger already");
        assert_eq!(store.block_count(), 700, "{kind}");
    }
}

#[test]
fn scrub_and_refresh_know_a_store_that_grew() {
    for kind in ["emulated", "file", "inline"] {
        let (scratch, trust) = (Scratch::new(), Trust::default());
        let path = scratch.file();
        let mut store = selection::open(&options(kind, &path, &trust)).expect("store");
        store.extend(700).expect("growth");
        let mut channel = store.open().expect("channel");
        write(&mut *channel, 0, 256, 1);
        write(&mut *channel, 280, 40, 1);
        drop(channel);
        // Growing merges: everything is in leaf pages now.
        store.extend(1000).expect("growth");
        let mut upkeep = store.upkeep().expect("upkeep").expect("upkeep");
        let (mut report, mut next) = (super::super::upkeep::Report::default(), 0);
        while let Some(piece) = upkeep.next_piece(next) {
            next = piece.end;
            upkeep.scrub(piece.clone(), &mut report).expect("scrub");
            if upkeep.has_fast_path() {
                upkeep.refresh(piece, &mut report).expect("refresh");
            }
        }
        assert_eq!((report.findings.len(), report.unchecked), (0, 0), "{kind}");
        let times = if upkeep.has_fast_path() { 2 } else { 1 };
        assert_eq!(report.checked, 296 * times, "{kind}");
        drop(upkeep);
        let mut channel = store.open().expect("channel");
        assert!(holds(&mut *channel, 280, 40, 1), "{kind}");
    }
}

/// A device that can't grow.
#[derive(Debug)]
struct Fixed(MemoryStore);

impl BlockStore for Fixed {
    fn block_bytes(&self) -> usize {
        self.0.block_bytes()
    }

    fn block_count(&self) -> u64 {
        self.0.block_count()
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        self.0.open()
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.0.statistics()
    }
}

#[test]
fn a_store_grows_as_far_as_a_device_that_does_not() {
    let raw = Box::new(Fixed(MemoryStore::new(raw_blocks(BLOCKS) + 2000, true)));
    let mut store = InPlaceStore::create(raw, BLOCKS, &Trust::default()).expect("store");
    write(&mut *store.open().expect("channel"), 7, 1, 1);
    store.extend(700).expect("the device has room");
    let error = store.extend(3000).expect_err("the device is full");
    assert_eq!((error.kind(), store.block_count()), (io::ErrorKind::StorageFull, 700));
    let mut channel = store.open().expect("channel");
    assert!(holds(&mut *channel, 7, 1, 1));
    write(&mut *channel, 699, 1, 1);
}

#[test]
fn a_file_for_which_there_is_no_room_stays_as_it_is() {
    let scratch = Scratch::new();
    let path = scratch.file();
    let file = DeviceFile::create(&path, 10).expect("create");
    // 4 PiB.
    let error = file.reserve(0..1 << 40).expect_err("there is no such disk");
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    let found = path.metadata().expect("metadata");
    assert_eq!((found.len(), found.blocks()), (10 * PAGE_BYTES as u64, 0));
    file.reserve(0..10).expect("reserve");
    assert_eq!(path.metadata().expect("metadata").blocks(), 10 * PAGE_BYTES as u64 / 512);
}

#[test]
fn an_allocation_that_fails_halfway_leaves_nothing() {
    let scratch = Scratch::new();
    let file = File::create(scratch.file()).expect("create");
    file.set_len(10 * PAGE_BYTES as u64).expect("length");
    let error = reserve_by(&file, 0..1 << 20, |_, length| {
        file.set_len(length / 2).expect("half");
        Err(Errno::NOSPC)
    });
    assert_eq!(error.expect_err("full").kind(), io::ErrorKind::StorageFull);
    assert_eq!(file.metadata().expect("metadata").len(), 10 * PAGE_BYTES as u64);
}

#[test]
fn a_file_system_that_counts_no_blocks_is_not_taken_for_full() {
    let scratch = Scratch::new();
    let file = File::create(scratch.file()).expect("create");
    let mut system = fstatvfs(&file).expect("file system");
    system.f_bavail = 0;
    check_free(&system, 1).expect_err("full");
    system.f_blocks = 0;
    check_free(&system, 1).expect("unknown");
}

#[test]
fn a_bare_store_does_not_grow() {
    let mut store = Fixed(MemoryStore::new(10, true));
    assert_eq!(store.extend(11).expect_err("fixed").kind(), io::ErrorKind::Unsupported);
}
