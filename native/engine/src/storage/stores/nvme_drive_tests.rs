//! Tests on a real or emulated drive formatted with 64 bytes of metadata, named by
//! `SEALANE_NVME_DEVICE`. Its contents are lost. `tests/kernel_lab/test_nvme_drive.py` runs them.
//!
//! QEMU 7.2 transfers the metadata of only the first blocks of a command (as `nvme io-passthru`
//! shows): 8 blocks work, 15 don't. `SEALANE_NVME_TRANSFER_BLOCKS=8` stays within that.

use std::io::Write;
use std::sync::Mutex;
use std::time::Duration;

use super::super::super::store::StoreChannel;
use super::super::conformance;
use super::super::fresh::anchor::{Anchor, AnchorError, AnchorPolicy, Anchored};
use super::super::fresh::failure::Refusal;
use super::super::fresh_store::Trust;
use super::super::in_place_store::{InPlaceStore, raw_blocks};
use super::*;

/// Blocks of the fresh store, and how many of them the tests write.
const BLOCKS: u64 = 1000;
const WRITTEN: u64 = 20;
/// Prefix of the line that prints the anchored record.
const MARK: &str = "ANCHORED ";

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn drive(block_count: u64, creates: bool) -> NvmeStore {
    let path = variable("SEALANE_NVME_DEVICE").expect("SEALANE_NVME_DEVICE");
    let path = Path::new(&path);
    let store = if creates {
        NvmeStore::create(path, block_count)
    } else {
        NvmeStore::open(path, block_count)
    };
    let mut store = store.expect("drive");
    if let Some(blocks) = variable("SEALANE_NVME_TRANSFER_BLOCKS") {
        let shared = Arc::get_mut(&mut store.shared).expect("no channel is open");
        shared.transfer_blocks = blocks.parse().expect("a number of blocks");
    }
    store
}

/// An anchor that outlives the machine: prints each record to the console, and starts with the one
/// in `SEALANE_ANCHORED`.
#[derive(Debug)]
struct ConsoleAnchor(Mutex<Option<Anchored>>);

impl ConsoleAnchor {
    fn new() -> Arc<Self> {
        let digit = |text: &str, at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hex");
        let told = variable("SEALANE_ANCHORED").map(|text| {
            let bytes: Vec<u8> = (0..text.len()).step_by(2).map(|at| digit(&text, at)).collect();
            Anchored::decode(&bytes).expect("what was anchored")
        });
        Arc::new(Self(Mutex::new(told)))
    }
}

impl Anchor for ConsoleAnchor {
    fn latest(&self) -> io::Result<Option<Anchored>> {
        Ok(*self.0.lock().expect("anchor"))
    }

    fn advance(&self, to: &Anchored) -> Result<(), AnchorError> {
        let text = crate::storage::target::namespace::hexadecimal(&to.encode());
        println!("{MARK}{text}");
        io::stdout().flush().expect("console");
        *self.0.lock().expect("anchor") = Some(*to);
        Ok(())
    }

    fn policy(&self) -> AnchorPolicy {
        AnchorPolicy::EveryCommit
    }
}

fn open(anchor: Arc<ConsoleAnchor>) -> io::Result<InPlaceStore> {
    let trust = Trust { anchor: Some(anchor), ..Trust::default() };
    InPlaceStore::open(Box::new(drive(raw_blocks(BLOCKS), false)), &trust)
}

fn write(channel: &mut dyn StoreChannel, version: u64) {
    for lba in 0..WRITTEN {
        let buffer = conformance::block(BLOCK_BYTES, lba, version);
        let write = StoreRequest::Write { lba, buffer, durable: false };
        conformance::execute(channel, write).expect("write");
    }
}

#[test]
#[ignore = "takes a drive formatted with 64 bytes of metadata"]
fn behaves_as_a_store() {
    let store = drive(BLOCKS, true);
    conformance::check(&store);
    let nsid = store.shared.nsid;
    drop(store);
    let found = drive(BLOCKS, false);
    assert_eq!((found.block_count(), found.shared.nsid), (BLOCKS, nsid));
}

#[test]
#[ignore = "takes a drive formatted with 64 bytes of metadata"]
fn behaves_as_a_store_that_keeps_freshness() {
    let raw = Box::new(drive(raw_blocks(BLOCKS), true));
    let trust = Trust { anchor: Some(ConsoleAnchor::new()), ..Trust::default() };
    conformance::check(&InPlaceStore::create(raw, BLOCKS, &trust).expect("store"));
}

/// Creates a store, writes version 1 and flushes.
#[test]
#[ignore = "takes a drive formatted with 64 bytes of metadata"]
fn lay_out() {
    let raw = Box::new(drive(raw_blocks(BLOCKS), true));
    let trust = Trust { anchor: Some(ConsoleAnchor::new()), ..Trust::default() };
    let store = InPlaceStore::create(raw, BLOCKS, &trust).expect("store");
    write(&mut *store.open().expect("channel"), 1);
}

/// Creates a store on an empty namespace, extends it up to the size of the namespace, and erases
/// it.
#[test]
#[ignore = "takes a drive formatted with 64 bytes of metadata"]
fn grows_as_far_as_the_namespace() {
    let path = variable("SEALANE_NVME_DEVICE").expect("SEALANE_NVME_DEVICE");
    let path = Path::new(&path);
    NvmeStore::erase(path).expect("erase");
    let (found, is_empty) = NvmeStore::examine(path).expect("examine");
    assert!(is_empty && found > raw_blocks(BLOCKS) + 5000, "{found} blocks");
    let raw = Box::new(drive(raw_blocks(BLOCKS), false));
    let mut store = InPlaceStore::create(raw, BLOCKS, &Trust::default()).expect("store");
    write(&mut *store.open().expect("channel"), 1);
    store.extend(2 * BLOCKS).expect("growth");
    let error = store.extend(found).expect_err("no room for the store's own pages");
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    let buffer = conformance::blocks(BLOCK_BYTES, BLOCKS - 4, 8, 2);
    let across = StoreRequest::Write { lba: BLOCKS - 4, buffer, durable: true };
    conformance::execute(&mut *store.open().expect("channel"), across).expect("write");
    drop(store);
    let whole = drive(found, false);
    let store = InPlaceStore::open(Box::new(whole), &Trust::default()).expect("store");
    assert_eq!(store.block_count(), 2 * BLOCKS);
    let mut channel = store.open().expect("channel");
    let read = conformance::read(&mut *channel, BLOCK_BYTES, BLOCKS - 4, 8);
    assert_eq!(read, conformance::blocks(BLOCK_BYTES, BLOCKS - 4, 8, 2));
    let first = conformance::read(&mut *channel, BLOCK_BYTES, 0, 1);
    assert_eq!(first, conformance::block(BLOCK_BYTES, 0, 1));
    drop((channel, store));
    assert_eq!(NvmeStore::examine(path).expect("examine"), (found, false));
    let error = InPlaceStore::create(Box::new(drive(found, false)), BLOCKS, &Trust::default());
    assert_eq!(error.expect_err("not empty").kind(), io::ErrorKind::AlreadyExists);
    NvmeStore::erase(path).expect("erase");
    assert_eq!(NvmeStore::examine(path).expect("examine"), (found, true));
}

/// Flushes version 2, then writes further versions until the machine loses power.
#[test]
#[ignore = "takes a drive formatted with 64 bytes of metadata"]
fn write_until_power_is_cut() {
    let store = open(ConsoleAnchor::new()).expect("store");
    let mut channel = store.open().expect("channel");
    write(&mut *channel, 2);
    conformance::execute(&mut *channel, StoreRequest::Flush).expect("flush");
    println!("FLUSHED");
    // Few enough that the log doesn't fill up, which would make the store flush on its own.
    (3..20).for_each(|version| write(&mut *channel, version));
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Every block has version 2 or one that was being written when power failed.
#[test]
#[ignore = "takes a drive formatted with 64 bytes of metadata"]
fn has_what_was_flushed() {
    let store = open(ConsoleAnchor::new()).expect("store");
    let mut channel = store.open().expect("channel");
    for lba in 0..WRITTEN {
        let found = conformance::read(&mut *channel, BLOCK_BYTES, lba, 1);
        let mut versions = 2..20;
        let is_one = versions.any(|version| found == conformance::block(BLOCK_BYTES, lba, version));
        assert!(is_one, "block {lba}");
    }
    assert_eq!(conformance::read(&mut *channel, BLOCK_BYTES, WRITTEN, 1), vec![0; BLOCK_BYTES]);
}

/// The drive was rolled back to a state before the last one that its anchor recorded.
#[test]
#[ignore = "takes a drive formatted with 64 bytes of metadata"]
fn is_refused() {
    let error = open(ConsoleAnchor::new()).expect_err("rolled back");
    assert!(matches!(Refusal::of(&error), Some(Refusal::RolledBack(_))), "{error}");
}
