//! Several queues on the same blocks, on a store that executes everything piecemeal and out of
//! order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::operation::LbaRange;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{
    BLOCK_BYTES, Block, DATA_BYTES, block_iv, is_unwritten, set_expected_iv,
};

use super::hosts::{Host, controller, plain, sealed};
use super::store::ShuffledStore;
use crate::storage::target::{Namespace, QosLimits};

const QUEUES: u8 = 4;

fn world(is_sealed: bool, seed: u64) -> Arc<Namespace> {
    let store = ShuffledStore::new(16, is_sealed, seed);
    Arc::new(Namespace::new(Box::new(store)).unwrap())
}

/// Runs `body` concurrently for [`QUEUES`] hosts, each with a queue of its own.
fn together(namespace: &Arc<Namespace>, is_sealed: bool, body: impl Fn(u8, &mut Host) + Sync) {
    thread::scope(|scope| {
        for index in 0..QUEUES {
            let body = &body;
            scope.spawn(move || {
                let controller = controller(index, namespace);
                body(index, &mut Host::connect(&controller, u16::from(index) + 1, is_sealed));
            });
        }
    });
}

#[test]
fn a_write_of_several_blocks_is_atomic_to_readers() {
    let namespace = world(false, 11);
    together(&namespace, false, |index, host| {
        for round in 0..60 {
            let value = index * 60 + round + 1;
            let writes: Vec<_> = [(0, 8), (4, 4), (0, 4)]
                .into_iter()
                .map(|(lba, blocks)| {
                    let data = plain(value, blocks);
                    host.submit(HostCommand::Write { lba, data, is_forced: false })
                })
                .collect();
            let reads: Vec<_> = [(0, 4), (4, 4)]
                .into_iter()
                .map(|(lba, blocks)| host.submit(HostCommand::Read { lba, blocks }))
                .collect();
            for tag in writes {
                assert_eq!(host.finish(tag).0, Status::SUCCESS);
            }
            for tag in reads {
                let (status, data) = host.finish(tag);
                assert_eq!(status, Status::SUCCESS);
                assert!(data.iter().all(|byte| *byte == data[0]), "a mixture");
            }
        }
    });
    assert!(namespace.statistics().iter().any(|(name, count)| *name == "contended" && *count > 0));
}

#[test]
fn no_increment_by_compare_and_write_is_lost() {
    let namespace = world(false, 12);
    let (increments, tries) = (40u64, AtomicU64::new(0));
    together(&namespace, false, |_, host| {
        let mut value = 0u64;
        for _ in 0..increments {
            loop {
                tries.fetch_add(1, Ordering::Relaxed);
                let block = |value: u64| value.to_le_bytes().repeat(DATA_BYTES / 8);
                let (expected, data) = (block(value), block(value + 1));
                match host.status(HostCommand::CompareAndWrite { lba: 3, expected, data }) {
                    Status::SUCCESS => break value += 1,
                    status => assert_eq!(status.code(), Status::COMPARE_FAILURE.code()),
                }
                value = u64::from_le_bytes(host.read(3, 1)[..8].try_into().unwrap());
            }
        }
    });
    let controller = controller(9, &namespace);
    let last = Host::connect(&controller, 1, false).read(3, 1);
    assert_eq!(last[..8], (u64::from(QUEUES) * increments).to_le_bytes());
    assert!(
        tries.into_inner() > u64::from(QUEUES) * increments,
        "no attempt ever failed, so nothing was tested"
    );
}

#[test]
fn conditional_writes_of_one_sector_are_serialised() {
    let namespace = world(true, 13);
    let writes = 40u64;
    together(&namespace, true, |_, host| {
        let mut value = 0u64;
        for _ in 0..writes {
            loop {
                let mut block: Block = sealed(value + 1).try_into().unwrap();
                let mut current = [0; 12];
                current[..8].copy_from_slice(&value.to_le_bytes());
                set_expected_iv(&mut block, &current);
                let data = block.to_vec();
                match host.status(HostCommand::WriteIf { lba: 3, data, is_forced: false }) {
                    Status::SUCCESS => break value += 1,
                    status => assert_eq!(status.code(), Status::COMPARE_FAILURE.code()),
                }
                let iv = block_iv(host.read(3, 1).as_slice().try_into().unwrap());
                value = u64::from_le_bytes(iv[..8].try_into().unwrap());
            }
        }
    });
    let controller = controller(9, &namespace);
    let last = Host::connect(&controller, 1, true).read(3, 1);
    assert!(last == sealed_like(u64::from(QUEUES) * writes, &last));
}

/// The sealed block with this IV and the sector MAC of `other`, which differs for each answer.
fn sealed_like(iv: u64, other: &[u8]) -> Vec<u8> {
    let mut block = sealed(iv);
    block[4096 + 28..4096 + 44].copy_from_slice(&other[4096 + 28..4096 + 44]);
    block
}

/// Reads are never stale despite concurrent writes and deallocations, as table and store change
/// together under the lock. A read returns a version between the last one completed before it and
/// the last one begun before its end.
#[test]
fn readers_of_sealed_sectors_get_no_false_error_and_no_older_version() {
    let namespace = world(true, 14);
    let (begun, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    together(&namespace, true, |index, host| {
        for round in 1..=120u64 {
            if index == 0 {
                begun.store(round, Ordering::SeqCst);
                let data = [sealed(round), sealed(round)].concat();
                assert_eq!(host.write(5, data), Status::SUCCESS);
                ended.store(round, Ordering::SeqCst);
                let ranges = vec![LbaRange { lba: 8, blocks: 2 }];
                assert_eq!(host.status(HostCommand::Deallocate(ranges)), Status::SUCCESS);
                assert_eq!(host.write(9, sealed(round)), Status::SUCCESS);
            } else {
                let before = ended.load(Ordering::SeqCst);
                let data = host.read(4, 6);
                let blocks = data.as_chunks::<BLOCK_BYTES>().0;
                let value = |block: &Block| u64::from(block_iv(block)[0]);
                assert!(is_unwritten(&blocks[0]) && is_unwritten(&blocks[4]));
                assert_eq!(value(&blocks[1]), value(&blocks[2]), "a mixture");
                let after = begun.load(Ordering::SeqCst);
                let seen = value(&blocks[1]);
                assert!((before..=after).contains(&seen), "{before} {seen} {after}");
            }
        }
    });
}

#[test]
fn limits_delay_commands_and_release_them_when_they_are_lifted() {
    let namespace = world(false, 15);
    namespace.set_limits(QosLimits { write_iops: 1, ..QosLimits::default() });
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, false);
    let write = |lba| HostCommand::Write { lba, data: plain(1, 1), is_forced: false };
    assert_eq!(host.status(write(0)), Status::SUCCESS);
    let held: Vec<_> = (1..9).map(|lba| host.submit(write(lba))).collect();
    // Reads continue meanwhile, and show that nothing was written.
    assert!(host.read(8, 1) == plain(0, 1), "not written yet");
    namespace.set_limits(QosLimits::default());
    for tag in held {
        assert_eq!(host.finish(tag).0, Status::SUCCESS);
    }
    let throttled = namespace.statistics().into_iter().find(|(name, _)| *name == "throttled");
    assert!(throttled.is_some_and(|(_, count)| count >= 1));
}

#[test]
fn a_limit_is_enforced_by_the_queues_own_timer() {
    let namespace = world(false, 16);
    namespace.set_limits(QosLimits { iops: 2000, ..QosLimits::default() });
    together(&namespace, false, |_, host| {
        let tags: Vec<_> =
            (0..25).map(|_| host.submit(HostCommand::Read { lba: 0, blocks: 1 })).collect();
        for tag in tags {
            assert_eq!(host.finish(tag).0, Status::SUCCESS);
        }
    });
}
