use super::super::super::target::Namespace;
use super::super::conformance;
use super::super::fresh_store::Trust;
use super::super::in_place_store::{InPlaceStore, raw_blocks};
use super::super::memory::MemoryStore;
use super::super::served::Link as Served;
use super::*;

const UUID: [u8; 16] = [7; 16];
const BLOCKS: u64 = 500;

fn key() -> Secret {
    Secret::take(&mut [3; 32])
}

/// A third party's namespace with metadata.
fn namespace() -> Arc<Namespace> {
    namespace_of(BLOCKS)
}

fn namespace_of(block_count: u64) -> Arc<Namespace> {
    let store = Box::new(MemoryStore::new(block_count, true));
    Arc::new(Namespace::plain(store).expect("namespace"))
}

fn connect(namespace: &Arc<Namespace>) -> (RemoteBlocks, Served) {
    let (host, limits, served) = Served::connect(namespace, BLOCK_BYTES);
    let timeout = Duration::from_secs(20);
    let blocks = RemoteBlocks::start(host, limits, namespace.block_count(), timeout);
    (blocks.expect("blocks"), served)
}

fn write(channel: &mut dyn StoreChannel, lba: u64, count: u64, version: u64) {
    let buffer = conformance::blocks(BLOCK_BYTES, lba, count, version);
    let write = StoreRequest::Write { lba, buffer, durable: false };
    conformance::execute(channel, write).expect("write");
}

#[test]
fn sectors_come_back_with_their_metadata_through_another_association() {
    let namespace = namespace();
    let (blocks, _served) = connect(&namespace);
    let store = RemoteSectorStore::create(blocks, UUID, &key(), BLOCKS - 1).expect("store");
    let mut channel = BlockStore::open(&store).expect("channel");
    // More blocks than one command may have.
    write(&mut *channel, 3, 200, 1);
    write(&mut *channel, BLOCKS - 2, 1, 1);
    conformance::execute(&mut *channel, StoreRequest::Flush).expect("flush");
    let found = conformance::read(&mut *channel, BLOCK_BYTES, 3, 200);
    assert_eq!(found, conformance::blocks(BLOCK_BYTES, 3, 200, 1));
    drop((channel, store));
    let (blocks, _served) = connect(&namespace);
    let store = RemoteSectorStore::open(blocks, UUID, &key()).expect("store");
    let mut channel = BlockStore::open(&store).expect("channel");
    for (lba, count) in [(3, 200), (BLOCKS - 2, 1)] {
        let found = conformance::read(&mut *channel, BLOCK_BYTES, lba, count);
        assert_eq!(found, conformance::blocks(BLOCK_BYTES, lba, count, 1));
    }
}

#[test]
fn behaves_as_a_store_under_one_that_keeps_it_fresh() {
    let size = raw_blocks(200);
    let namespace = namespace_of(size);
    let (blocks, _served) = connect(&namespace);
    let trust = Trust { secret: Some(&key()), ..Trust::default() };
    let store = InPlaceStore::create_on(Box::new(blocks.raw()), UUID, &trust, 200).expect("store");
    conformance::check(&store);
    let mut channel = BlockStore::open(&store).expect("channel");
    write(&mut *channel, 3, 100, 1);
    drop((channel, store));
    let open = |uuid| {
        let (blocks, served) = connect(&namespace);
        InPlaceStore::open_on(Box::new(blocks.raw()), uuid, &trust).map(|store| (store, served))
    };
    assert!(open([8; 16]).expect_err("another").to_string().contains("another store"));
    let (store, served) = open(UUID).expect("store");
    let mut channel = BlockStore::open(&store).expect("channel");
    let found = conformance::read(&mut *channel, BLOCK_BYTES, 3, 100);
    assert_eq!(found, conformance::blocks(BLOCK_BYTES, 3, 100, 1));
    drop((channel, store, served));
    assert!(connect(&namespace).0.erase([8; 16]).is_err());
    connect(&namespace).0.erase(UUID).expect("erased");
    assert!(open(UUID).is_err());
}

#[test]
fn operations_beyond_its_end_and_deallocation_are_refused() {
    let (blocks, _served) = connect(&namespace());
    let store = RemoteSectorStore::create(blocks, UUID, &key(), 100).expect("store");
    let mut channel = BlockStore::open(&store).expect("channel");
    let beyond = StoreRequest::Read { lba: 100, buffer: vec![0; BLOCK_BYTES] };
    let error = conformance::execute(&mut *channel, beyond).expect_err("beyond");
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    let deallocate = StoreRequest::Deallocate { lba: 0, blocks: 1 };
    assert!(conformance::execute(&mut *channel, deallocate).is_err());
    assert_eq!(channel.in_flight(), 0);
}

#[test]
fn a_namespace_holds_one_store_until_that_is_erased() {
    let namespace = namespace();
    let create = |uuid| RemoteSectorStore::create(connect(&namespace).0, uuid, &key(), 100);
    drop(create(UUID).expect("store"));
    let other = [8; 16];
    assert_eq!(create(other).expect_err("taken").kind(), io::ErrorKind::AlreadyExists);
    assert!(connect(&namespace).0.erase(other).is_err());
    let open = |uuid, key: &Secret| RemoteSectorStore::open(connect(&namespace).0, uuid, key);
    let error = open(other, &key()).expect_err("another").to_string();
    assert!(error.contains("another store"), "{error}");
    let error = open(UUID, &Secret::take(&mut [4; 32])).expect_err("forged").to_string();
    assert!(error.contains("forged"), "{error}");
    drop(open(UUID, &key()).expect("still there"));
    connect(&namespace).0.erase(UUID).expect("erased");
    drop(create(other).expect("the namespace is free again"));
}

#[test]
fn a_namespace_without_room_for_label_and_sectors_is_refused() {
    let error = RemoteSectorStore::create(connect(&namespace()).0, UUID, &key(), BLOCKS);
    assert_eq!(error.expect_err("too small").kind(), io::ErrorKind::StorageFull);
}

#[test]
fn a_lost_connection_ends_every_operation_as_unknown() {
    let (blocks, served) = connect(&namespace());
    let store = RemoteSectorStore::create(blocks, UUID, &key(), 100).expect("store");
    let mut channel = BlockStore::open(&store).expect("channel");
    served.cut();
    let read = StoreRequest::Read { lba: 0, buffer: vec![0; BLOCK_BYTES] };
    let error = conformance::execute(&mut *channel, read).expect_err("cut");
    assert_eq!(error.kind(), io::ErrorKind::NotConnected);
}
