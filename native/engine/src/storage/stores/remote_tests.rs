use std::sync::atomic::{AtomicU64, Ordering};

use super::super::super::store::{BLOCK_BYTES, BlockStore, StoreRequest};
use super::super::super::target::Namespace;
use super::super::conformance;
use super::super::fresh::geometry::Geometry;
use super::super::fresh::placed::Placed;
use super::super::fresh_store::Trust;
use super::super::memory::MemoryStore;
use super::super::sealed_file::SealedFileStore;
use super::super::served::{Served, cut, device};
use super::super::torn_disk::TornDisk;
use sealane_proto::aead::Secret;
use sealane_proto::freshness::leaf::LeafFormat;

use super::*;

const UUID: [u8; 16] = [7; 16];

fn key() -> Secret {
    Secret::take(&mut [7; 32])
}

fn trust(key: &Secret) -> Trust<'_> {
    Trust { secret: Some(key), ..Trust::default() }
}

fn plain(pages: u64) -> Arc<Namespace> {
    Arc::new(Namespace::new(Box::new(MemoryStore::new(pages, false))).expect("namespace"))
}

fn pages(block_count: u64) -> u64 {
    Geometry::placed(block_count, Placed::ENTRIES_PER_LEAF).device_pages()
}

#[test]
fn a_store_on_a_third_partys_namespace_behaves_as_a_store() {
    let served = Served::over(&plain(pages(1000)));
    conformance::check(
        &SealedFileStore::create_on(device(&served), UUID, &trust(&key()), 1000).expect("store"),
    );
}

#[test]
fn flushed_blocks_are_there_in_the_next_association() {
    let namespace = plain(pages(100));
    let served = Served::over(&namespace);
    let store =
        SealedFileStore::create_on(device(&served), UUID, &trust(&key()), 100).expect("store");
    let mut channel = store.open().expect("channel");
    let buffer = conformance::blocks(BLOCK_BYTES, 0, 100, 1);
    let write = StoreRequest::Write { lba: 0, buffer, durable: true };
    conformance::execute(&mut *channel, write).expect("write");
    served.cut();
    drop((channel, store, served));
    let served = Served::over(&namespace);
    let store = SealedFileStore::open_on(device(&served), UUID, &trust(&key())).expect("store");
    let mut channel = store.open().expect("channel");
    let found = conformance::read(&mut *channel, BLOCK_BYTES, 0, 100);
    assert_eq!(found, conformance::blocks(BLOCK_BYTES, 0, 100, 1));
}

#[test]
fn a_namespace_that_holds_something_is_not_taken() {
    let namespace = plain(pages(100));
    let served = Served::over(&namespace);
    let mut page = Page::ZERO;
    page.0[1080] = 0x53;
    served.write(0, &[page]).expect("write");
    let error =
        SealedFileStore::create_on(device(&served), UUID, &trust(&key()), 100).expect_err("ext4");
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    let error =
        SealedFileStore::open_on(device(&served), UUID, &trust(&key())).expect_err("no store");
    assert!(error.to_string().contains("not a Sealane store"), "{error}");
}

#[test]
fn only_the_store_of_that_name_is_opened_or_erased() {
    let served = Served::over(&plain(pages(100)));
    drop(SealedFileStore::create_on(device(&served), UUID, &trust(&key()), 100).expect("store"));
    let error = SealedFileStore::create_on(device(&served), UUID, &trust(&key()), 100)
        .expect_err("not empty");
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    let other = [8; 16];
    assert!(SealedFileStore::open_on(device(&served), other, &trust(&key())).is_err());
    assert!(SealedFileStore::erase_on(&*served.device, other).is_err());
    drop(SealedFileStore::open_on(device(&served), UUID, &trust(&key())).expect("still there"));
    SealedFileStore::erase_on(&*served.device, UUID).expect("erased");
    SealedFileStore::create_on(device(&served), other, &trust(&key()), 100)
        .expect("the namespace is free again");
}

#[test]
fn a_namespace_that_is_too_small_is_refused_with_both_sizes() {
    let served = Served::over(&plain(pages(100) - 1));
    let error = SealedFileStore::create_on(device(&served), UUID, &trust(&key()), 100)
        .expect_err("too small");
    let expected =
        format!("{} pages of 4096 bytes, the store takes {}", pages(100) - 1, pages(100));
    assert!(error.to_string().contains(&expected), "{error}");
}

#[test]
fn a_refused_command_fails_its_operation_and_no_other() {
    let served = Served::over(&plain(10));
    let error = served.write(10, &[Page::ZERO]).expect_err("out of range");
    assert_eq!(error.kind(), io::ErrorKind::Other);
    assert!(error.to_string().contains("LBA Out of Range"), "{error}");
    served.write(9, &[Page([5; PAGE_BYTES])]).expect("write");
    let mut found = [Page::ZERO];
    served.read(9, &mut found).expect("read");
    assert_eq!(found, [Page([5; PAGE_BYTES])]);
}

#[test]
fn a_silent_controller_ends_the_device() {
    let (host, _silent) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .expect("sockets");
    let limits = HostLimits {
        queue_depth: 2,
        h2c_data_max: 4096,
        transfer_max: 4096,
        in_capsule_max: 4096,
        block_bytes: 512,
        nsid: 1,
        digests: sealane_proto::nvme::pdu::Digests::default(),
    };
    let device = RemoteDevice::start(host, limits, 64, Duration::from_millis(1)).expect("device");
    assert_eq!(device.page_count(), 8);
    for _ in 0..2 {
        let error = device.sync().expect_err("no answer");
        assert_eq!(error.kind(), io::ErrorKind::NotConnected);
    }
}

/// Writes blocks in turn, some durably, until the connection is lost or `rounds` writes are done.
/// Returns the flushed version of each block, and the versions that each may have.
fn write_until_cut(store: &SealedFileStore, rounds: u64) -> (Vec<u64>, Vec<Vec<u64>>) {
    let (mut flushed, mut possible) = (vec![0; 8], vec![vec![0]; 8]);
    let Ok(mut channel) = store.open() else { return (flushed, possible) };
    for version in 1..=rounds {
        let lba = version * 3 % 8;
        possible[lba as usize].push(version);
        let buffer = conformance::block(BLOCK_BYTES, lba, version);
        let durable = version.is_multiple_of(5);
        let write = StoreRequest::Write { lba, buffer, durable };
        if let Err(error) = conformance::execute(&mut *channel, write) {
            assert_eq!(error.kind(), io::ErrorKind::NotConnected);
            return (flushed, possible);
        }
        if durable {
            for (flushed, possible) in flushed.iter_mut().zip(&possible) {
                *flushed = *possible.last().expect("never empty");
            }
        }
    }
    (flushed, possible)
}

#[test]
fn a_connection_cut_at_any_write_loses_nothing_that_was_flushed_and_tears_nothing() {
    let mut cuts = 0;
    for at in 0.. {
        let left = Arc::new(AtomicU64::new(u64::MAX));
        let link: Arc<Mutex<Option<OwnedFd>>> = Arc::default();
        let (for_disk, link_for_disk) = (Arc::clone(&left), Arc::clone(&link));
        let disk = Arc::new(TornDisk::default().observed(Box::new(move |_| {
            if for_disk.fetch_sub(1, Ordering::SeqCst) == 0
                && let Some(link) = &*link_for_disk.lock().expect("link")
            {
                cut(link);
            }
        })));
        let served = Served::disk(&disk, pages(8));
        let store =
            SealedFileStore::create_on(device(&served), UUID, &trust(&key()), 8).expect("store");
        *link.lock().expect("link") = Some(served.link());
        left.store(at, Ordering::SeqCst);
        let (flushed, possible) = write_until_cut(&store, 20);
        let is_over = left.load(Ordering::SeqCst) < u64::MAX / 2;
        *link.lock().expect("link") = None;
        drop((store, served));
        let served = Served::disk(&Arc::new(disk.whole()), pages(8));
        let store =
            SealedFileStore::open_on(device(&served), UUID, &trust(&key())).expect("after a cut");
        let mut channel = store.open().expect("channel");
        for lba in 0..8 {
            let found = conformance::read(&mut *channel, BLOCK_BYTES, lba, 1);
            let versions = &possible[lba as usize];
            let is_of = |version: &u64| match version {
                0 => found == vec![0; BLOCK_BYTES],
                version => found == conformance::block(BLOCK_BYTES, lba, *version),
            };
            let version = versions.iter().find(|version| is_of(version)).expect("torn");
            assert!(*version >= flushed[lba as usize], "cut {at}, block {lba}: {version}");
        }
        cuts += 1;
        if is_over {
            break;
        }
    }
    assert!(cuts > 25, "only {cuts} cuts");
}
