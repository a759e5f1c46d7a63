//! Requirements on every store, checked against a map of blocks.

use std::collections::HashMap;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use sealane_proto::sector::{FORMAT_VERSION, field, metadata_mut};

use super::super::store::{BLOCK_BYTES, BlockStore, StoreChannel, StoreDone, StoreRequest};

/// Longest range of one operation.
const RANGE_MAX: u64 = 40;
/// Operations of the random part.
const OPERATIONS: u64 = 600;

/// The contents of `lba` in version `version`, all different. With metadata, they have the metadata
/// of a written sector.
pub fn block(block_bytes: usize, lba: u64, version: u64) -> Vec<u8> {
    let mut block = vec![0; block_bytes];
    let mut random = ChaCha8Rng::seed_from_u64(lba ^ version.rotate_left(32));
    random.fill_bytes(&mut block);
    if let Some(sector) = block.first_chunk_mut::<BLOCK_BYTES>() {
        metadata_mut(sector, field::MAC).fill(0);
        metadata_mut(sector, (field::SEQUENCE.0, field::CHECKSUM.1)).fill(0);
        metadata_mut(sector, field::VERSION).fill(FORMAT_VERSION);
        metadata_mut(sector, field::FLAGS).fill(0);
    }
    block
}

/// `count` blocks from `lba`, all in one version.
pub fn blocks(block_bytes: usize, lba: u64, count: u64, version: u64) -> Vec<u8> {
    (lba..lba + count).flat_map(|lba| block(block_bytes, lba, version)).collect()
}

/// Waits until `count` operations of the channel have completed, and returns their completions.
pub fn wait(channel: &mut dyn StoreChannel, count: usize) -> Vec<StoreDone> {
    let mut done = Vec::new();
    channel.poll(&mut done);
    while done.len() < count {
        if let Some(fd) = channel.as_fd() {
            let due = channel.due().map(|due| due.saturating_sub(crate::clock::now()));
            let limit = due.map_or(Duration::from_secs(20), Duration::from_nanos);
            let limit = Timespec::try_from(limit).expect("time-out");
            let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).expect("poll");
            assert!(ready == 1 || due.is_some(), "the descriptor never became readable");
        } else {
            let due = channel
                .due()
                .expect("operations that complete after submit need a descriptor or a due time");
            std::thread::sleep(Duration::from_nanos(due.saturating_sub(crate::clock::now())));
        }
        channel.poll(&mut done);
    }
    done
}

/// Executes one operation and returns its buffer.
pub fn execute(channel: &mut dyn StoreChannel, request: StoreRequest) -> std::io::Result<Vec<u8>> {
    channel.submit(77, request);
    assert_eq!(channel.in_flight(), 1);
    let mut done = wait(channel, 1);
    assert_eq!((done.len(), channel.in_flight()), (1, 0));
    let StoreDone { ticket, result, buffer } = done.remove(0);
    assert_eq!(ticket, 77);
    result.map(|()| buffer)
}

pub fn read(channel: &mut dyn StoreChannel, block_bytes: usize, lba: u64, count: u64) -> Vec<u8> {
    let buffer = vec![0xAA; count as usize * block_bytes];
    execute(channel, StoreRequest::Read { lba, buffer }).expect("read")
}

fn refuses_ranges_beyond_the_end(store: &dyn BlockStore, channel: &mut dyn StoreChannel) {
    let (size, count) = (store.block_bytes(), store.block_count());
    let write = |lba, bytes| StoreRequest::Write { lba, buffer: vec![1; bytes], durable: false };
    let requests = [
        StoreRequest::Read { lba: count, buffer: vec![0; size] },
        StoreRequest::Read { lba: u64::MAX, buffer: vec![0; size] },
        StoreRequest::Read { lba: 0, buffer: vec![0; size - 1] },
        StoreRequest::Read { lba: 0, buffer: Vec::new() },
        write(count - 1, 2 * size),
        write(0, size + 1),
        StoreRequest::Deallocate { lba: count - 1, blocks: 2 },
        StoreRequest::Deallocate { lba: 1, blocks: u64::MAX },
    ];
    for request in requests {
        assert!(execute(channel, request).is_err());
    }
    assert_eq!(read(channel, size, count - 1, 1), vec![0; size]);
}

fn random_operation(
    random: &mut ChaCha8Rng,
    model: &mut HashMap<u64, u64>,
    (size, count): (usize, u64),
    version: u64,
) -> (StoreRequest, Option<Vec<u8>>) {
    let lba = random.next_u64() % count;
    let length = 1 + random.next_u64() % RANGE_MAX.min(count - lba);
    let range = lba..lba + length;
    match random.next_u32() % 10 {
        0..=3 => {
            model.extend(range.map(|lba| (lba, version)));
            let buffer = blocks(size, lba, length, version);
            let durable = random.next_u32().is_multiple_of(8);
            (StoreRequest::Write { lba, buffer, durable }, None)
        }
        4 => {
            model.retain(|lba, _| !range.contains(lba));
            (StoreRequest::Deallocate { lba, blocks: length }, None)
        }
        5 => (StoreRequest::Flush, None),
        _ => {
            let expected = range.flat_map(|lba| match model.get(&lba) {
                Some(&version) => block(size, lba, version),
                None => vec![0; size],
            });
            let buffer = vec![0xAA; length as usize * size];
            (StoreRequest::Read { lba, buffer }, Some(expected.collect()))
        }
    }
}

fn follows_the_model(store: &dyn BlockStore, channel: &mut dyn StoreChannel) {
    let size = (store.block_bytes(), store.block_count());
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let mut model = HashMap::new();
    for version in 1..OPERATIONS {
        let (request, expected) = random_operation(&mut random, &mut model, size, version);
        let buffer = execute(channel, request).expect("operation");
        assert!(expected.is_none_or(|expected| expected == buffer), "operation {version}");
    }
    if store.block_bytes() == BLOCK_BYTES {
        let statistics = store.statistics();
        let written = statistics.iter().find(|(name, _)| *name == "sectors_written");
        // Stores over leaf pages count overwritten blocks twice until they are merged.
        assert!(written.is_none_or(|(_, written)| *written >= model.len() as u64));
    }
}

fn keeps_many_in_flight(store: &dyn BlockStore) {
    let size = store.block_bytes();
    let mut channels = [store.open().expect("channel"), store.open().expect("channel")];
    let [first, second] = &mut channels;
    for round in 0..4 {
        for lba in 0..100 {
            let buffer = block(size, lba, 1000 + round);
            first.submit(lba, StoreRequest::Write { lba, buffer, durable: lba % 16 == 0 });
        }
        assert_eq!(first.in_flight(), 100);
        let ends = wait(&mut **first, 100);
        assert!(ends.iter().all(|end| end.result.is_ok() && end.buffer.len() == size));
        for lba in 0..100 {
            second.submit(lba, StoreRequest::Read { lba, buffer: vec![0; size] });
        }
        let mut ends = wait(&mut **second, 100);
        ends.sort_by_key(|end| end.ticket);
        for (lba, end) in (0..).zip(ends) {
            assert_eq!((end.ticket, end.result.is_ok()), (lba, true));
            assert_eq!(end.buffer, block(size, lba, 1000 + round));
        }
    }
}

fn counts_operations(store: &dyn BlockStore, channel: &mut dyn StoreChannel) {
    let counter = |name| {
        let statistics = store.statistics();
        statistics.iter().find(|(known, _)| *known == name).expect("counter").1
    };
    let names = ["device_reads", "device_writes", "device_flushes", "device_deallocations"];
    let before = names.map(counter);
    let failures = counter("device_failures");
    let bytes = counter("device_bytes_written");
    let size = store.block_bytes();
    let buffer = blocks(size, 5, 3, 9);
    execute(channel, StoreRequest::Write { lba: 5, buffer, durable: false }).expect("write");
    read(channel, size, 5, 1);
    execute(channel, StoreRequest::Flush).expect("flush");
    execute(channel, StoreRequest::Deallocate { lba: 5, blocks: 1 }).expect("deallocate");
    assert_eq!(names.map(counter), before.map(|count| count + 1));
    assert_eq!(counter("device_bytes_written"), bytes + 3 * size as u64);
    let beyond = StoreRequest::Deallocate { lba: store.block_count(), blocks: 1 };
    assert!(execute(channel, beyond).is_err());
    assert_eq!(counter("device_failures"), failures + 1);
}

/// Checks an empty store of at least 200 blocks.
pub fn check(store: &dyn BlockStore) {
    let mut channel = store.open().expect("channel");
    refuses_ranges_beyond_the_end(store, &mut *channel);
    follows_the_model(store, &mut *channel);
    keeps_many_in_flight(store);
    counts_operations(store, &mut *channel);
}
