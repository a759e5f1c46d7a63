//! Every command on plain and on sealed namespaces, one at a time.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use sealane_proto::nvme::Reason;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::operation::LbaRange;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{
    BLOCK_BYTES, FLAG_UNWRITTEN, IV_BYTES, block_iv, field, is_unwritten, metadata_mut,
    set_expected_iv,
};

use super::hosts::{Host, controller, plain, sealed};
use super::store::ShuffledStore;
use crate::storage::target::{AnaState, Controller, Namespace};

fn world(is_sealed: bool) -> (ShuffledStore, Arc<Namespace>) {
    let store = ShuffledStore::new(64, is_sealed, 1);
    let namespace = Namespace::new(Box::new(store.clone())).unwrap();
    (store, Arc::new(namespace))
}

fn statistic(namespace: &Namespace, name: &str) -> u64 {
    let statistics = namespace.statistics();
    statistics.iter().find(|(known, _)| *known == name).expect("a known name").1
}

#[test]
fn reads_writes_and_flushes_are_measured() {
    let (_, namespace) = world(false);
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, false);
    let names = ["host_read_nanos", "host_write_nanos", "flush_nanos"];
    assert_eq!(names.map(|name| statistic(&namespace, name)), [0; 3]);
    host.read(2, 3);
    assert!(statistic(&namespace, "host_read_nanos") > 0);
    assert_eq!(statistic(&namespace, "host_write_nanos"), 0);
    assert_eq!(host.write(3, plain(5, 4)), Status::SUCCESS);
    assert!(statistic(&namespace, "host_write_nanos") > 0);
    assert_eq!(statistic(&namespace, "flush_nanos"), 0);
    assert_eq!(host.status(HostCommand::Flush), Status::SUCCESS);
    assert!(names.map(|name| statistic(&namespace, name)).into_iter().all(|nanos| nanos > 0));
}

#[test]
fn time_in_which_a_command_waits_for_the_queue_s_room_is_measured() {
    let (store, namespace) = world(false);
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, false);
    store.hold(true);
    let reads: Vec<u64> =
        (0..6).map(|_| host.submit(HostCommand::Read { lba: 0, blocks: 64 })).collect();
    let held = Duration::from_millis(400);
    thread::sleep(held);
    assert_eq!(store.submitted(), 2, "of 256 KiB each, the others wait");
    store.hold(false);
    for tag in reads {
        assert_eq!(host.finish(tag).0, Status::SUCCESS);
    }
    let measured = Duration::from_nanos(statistic(&namespace, "host_read_nanos"));
    assert!(measured > 5 * held, "{measured:?} of six reads");
}

#[test]
fn a_plain_namespace_executes_every_command() {
    let (store, namespace) = world(false);
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, false);
    assert_eq!(host.write(3, plain(5, 4)), Status::SUCCESS);
    assert!(host.read(2, 3) == [plain(0, 1), plain(5, 2)].concat());
    assert_eq!(host.status(HostCommand::Flush), Status::SUCCESS);
    assert_eq!(store.flushes(), 1);
    assert_eq!(host.status(HostCommand::Verify { lba: 3, blocks: 4 }), Status::SUCCESS);

    let compare = |byte| HostCommand::Compare { lba: 3, data: plain(byte, 4) };
    assert_eq!(host.status(compare(5)), Status::SUCCESS);
    assert_eq!(host.status(compare(6)), Status::COMPARE_FAILURE.final_());

    let exchange = |expected, new| HostCommand::CompareAndWrite {
        lba: 3,
        expected: plain(expected, 1),
        data: plain(new, 1),
    };
    assert_eq!(host.status(exchange(4, 9)), Status::COMPARE_FAILURE.final_());
    assert!(store.block(3) == plain(5, 1));
    assert_eq!(host.status(exchange(5, 9)), Status::SUCCESS);
    assert!(store.block(3) == plain(9, 1));

    let zeroes = HostCommand::WriteZeroes { lba: 3, blocks: 1, deallocate: false };
    assert_eq!(host.status(zeroes), Status::SUCCESS);
    let ranges = vec![LbaRange { lba: 4, blocks: 1 }, LbaRange { lba: 6, blocks: 1 }];
    assert_eq!(host.status(HostCommand::Deallocate(ranges)), Status::SUCCESS);
    let expected = [plain(0, 2), plain(5, 1), plain(0, 1)].concat();
    assert!(host.read(3, 4) == expected);

    assert_eq!(statistic(&namespace, "host_writes"), 2);
    assert_eq!(statistic(&namespace, "host_reads"), 4);
    assert_eq!(statistic(&namespace, "sectors_stored"), 5);
    assert_eq!(statistic(&namespace, "deallocations"), 3);
    assert_eq!(statistic(&namespace, "media_errors"), 0);
}

/// A verify moves no blocks, so its length isn't limited by the maximum transfer size.
#[test]
fn verifies_of_any_length_read_all_blocks_a_few_at_a_time() {
    const BLOCKS: usize = 300;
    let store = ShuffledStore::new(BLOCKS, true, 1);
    let namespace = Arc::new(Namespace::new(Box::new(store.clone())).unwrap());
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, true);
    let verify = || HostCommand::Verify { lba: 0, blocks: BLOCKS as u32 };
    let tags = [(); 8].map(|()| host.submit(verify()));
    for tag in tags {
        assert_eq!(host.finish(tag).0, Status::SUCCESS);
    }
    assert_eq!(store.largest_read(), 32 * BLOCK_BYTES as u64);
    assert_eq!(store.submitted(), 8 * (BLOCKS as u64).div_ceil(32));
    // The last blocks are checked as well.
    store.roll_back(288);
    assert_eq!(host.status(verify()), Status::REFERENCE_TAG_CHECK.final_());
}

#[test]
fn a_sealed_namespace_marks_unwritten_sectors_and_refuses_stale_ones() {
    let (store, namespace) = world(true);
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, true);
    let unwritten = |data: Vec<u8>| is_unwritten(data.as_slice().try_into().unwrap());
    assert!(unwritten(host.read(7, 1)));
    assert_eq!(host.write(7, sealed(1)), Status::SUCCESS);
    assert_eq!(block_iv(host.read(7, 1).as_slice().try_into().unwrap())[0], 1);

    store.roll_back(7);
    let stale = Status::REFERENCE_TAG_CHECK.final_();
    assert_eq!(host.status(HostCommand::Read { lba: 7, blocks: 1 }), stale);
    assert_eq!(host.status(HostCommand::Verify { lba: 7, blocks: 1 }), stale);
    let data = sealed(2);
    assert_eq!(host.status(HostCommand::WriteIf { lba: 7, data, is_forced: false }), stale);
    assert_eq!(statistic(&namespace, "refusals"), 3);
    let events = namespace.events().take();
    assert!(events.iter().all(|event| event.reason == "sector.stale" && event.lba == Some(7)));
    store.roll_back(u64::MAX);
    assert_eq!(host.status(HostCommand::Verify { lba: 7, blocks: 1 }), Status::SUCCESS);

    let ranges = vec![LbaRange { lba: 7, blocks: 1 }];
    assert_eq!(host.status(HostCommand::Deallocate(ranges)), Status::SUCCESS);
    assert!(unwritten(host.read(7, 1)));
    assert_eq!(host.write(7, sealed(3)), Status::SUCCESS);
    let zeroes = HostCommand::WriteZeroes { lba: 7, blocks: 1, deallocate: true };
    assert_eq!(host.status(zeroes), Status::SUCCESS);
    assert!(unwritten(host.read(7, 1)));
}

#[test]
fn a_stored_sector_that_is_marked_as_unwritten_is_refused() {
    let (store, namespace) = world(true);
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, true);
    let mut forged: [u8; 4160] = sealed(1).try_into().unwrap();
    metadata_mut(&mut forged, field::FLAGS).fill(FLAG_UNWRITTEN);
    store.put(7, forged.to_vec());
    let read = HostCommand::Read { lba: 7, blocks: 1 };
    assert_eq!(host.status(read), Status::from(Reason::SectorFormat));
}

#[test]
fn a_conditional_write_needs_the_current_iv_of_every_block() {
    let (store, namespace) = world(true);
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, true);
    let mut write_if = |lba: u64, blocks: &[(u64, u64)]| {
        let data: Vec<u8> = blocks
            .iter()
            .flat_map(|(expected, iv)| {
                let mut block: [u8; 4160] = sealed(*iv).try_into().unwrap();
                let mut current = [0; IV_BYTES];
                current[..8].copy_from_slice(&expected.to_le_bytes());
                set_expected_iv(&mut block, &current);
                block.to_vec()
            })
            .collect();
        host.status(HostCommand::WriteIf { lba, data, is_forced: false })
    };
    let failure = Status::COMPARE_FAILURE.final_();
    assert_eq!(write_if(7, &[(9, 1)]), failure, "an unwritten sector has no IV");
    assert_eq!(write_if(7, &[(0, 1), (0, 2)]), Status::SUCCESS);
    assert_eq!(write_if(7, &[(0, 3)]), failure);
    assert_eq!(write_if(7, &[(1, 3), (1, 4)]), failure, "only one of two blocks fits");
    assert!(store.block(7) == sealed(1) && store.block(8) == sealed(2), "nothing is stored");
    assert_eq!(write_if(7, &[(1, 3), (2, 4)]), Status::SUCCESS);
    assert!(store.block(7) == sealed(3) && store.block(8) == sealed(4), "without expected IVs");
}

#[test]
fn a_failing_store_is_reported_and_changes_neither_contents_nor_freshness() {
    let (store, namespace) = world(true);
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, true);
    assert_eq!(host.write(7, sealed(1)), Status::SUCCESS);
    store.fail(true);
    assert_eq!(host.write(7, sealed(2)), Status::WRITE_FAULT);
    assert_eq!(host.status(HostCommand::Flush), Status::WRITE_FAULT);
    let read = HostCommand::Read { lba: 7, blocks: 1 };
    assert_eq!(host.status(read), Status::UNRECOVERED_READ);
    let ranges = vec![LbaRange { lba: 7, blocks: 1 }, LbaRange { lba: 8, blocks: 1 }];
    assert_eq!(host.status(HostCommand::Deallocate(ranges)), Status::WRITE_FAULT);
    store.fail(false);
    assert_eq!(block_iv(host.read(7, 1).as_slice().try_into().unwrap())[0], 1);
    assert_eq!(statistic(&namespace, "media_errors"), 4);
    let logged = controller.errors();
    let counts: Vec<_> = logged.iter().map(|entry| (entry.count, entry.queue_id)).collect();
    assert_eq!(counts, [(4, 1), (3, 1), (2, 1), (1, 1)]);
    assert_eq!(logged[3].error.status, Status::WRITE_FAULT);
    assert_eq!((logged[3].error.lba, logged[3].error.nsid), (7, 1));
}

#[test]
fn sealed_namespaces_are_not_seen_by_plain_queues_nor_plain_ones_by_secure_queues() {
    for is_sealed in [false, true] {
        let (_, namespace) = world(is_sealed);
        let controller = controller(1, &namespace);
        let mut host = Host::connect(&controller, 1, !is_sealed);
        let data = if is_sealed { plain(1, 1) } else { sealed(1) };
        assert_eq!(host.write(0, data), Status::INVALID_NAMESPACE.final_());
    }
}

#[test]
fn namespaces_and_their_states_change_while_the_queue_runs() {
    let (_, first) = world(false);
    let (_, second) = world(false);
    let controller = controller(1, &first);
    let mut host = Host::connect(&controller, 1, false);
    assert_eq!(host.write(0, plain(1, 1)), Status::SUCCESS);
    let mut until = |wanted: Status| {
        // The queue's thread adopts the change at some later time.
        let read = || HostCommand::Read { lba: 0, blocks: 1 };
        while host.status(read()).code() != wanted.code() {}
        host.run(read())
    };
    let states = [
        (AnaState::Inaccessible, Status::ANA_INACCESSIBLE),
        (AnaState::PersistentLoss, Status::ANA_PERSISTENT_LOSS),
        (AnaState::Change, Status::ANA_TRANSITION),
        (AnaState::NonOptimized, Status::SUCCESS),
    ];
    for (state, status) in states {
        controller.set_namespaces(vec![(1, Arc::clone(&first), state)]);
        until(status);
    }
    controller.set_namespaces(vec![]);
    until(Status::INVALID_NAMESPACE);
    controller.set_namespaces(vec![(1, Arc::clone(&second), AnaState::Optimized)]);
    assert!(until(Status::SUCCESS).1 == plain(0, 1), "the other namespace");
}

#[test]
fn a_read_only_host_reads_and_changes_nothing() {
    let (_, namespace) = world(true);
    let owner = controller(1, &namespace);
    assert_eq!(Host::connect(&owner, 1, true).write(0, sealed(1)), Status::SUCCESS);
    let reader = Controller::new(2, [2; 16]).unwrap().read_only();
    reader.set_namespaces(vec![(1, Arc::clone(&namespace), AnaState::Optimized)]);
    let mut host = Host::connect(&reader, 1, true);
    let protected = Status::NAMESPACE_WRITE_PROTECTED.final_();
    assert_eq!(host.write(0, sealed(2)), protected);
    let deallocate = HostCommand::WriteZeroes { lba: 0, blocks: 1, deallocate: true };
    assert_eq!(host.status(deallocate), protected);
    assert_eq!(host.status(HostCommand::Flush), Status::SUCCESS);
    assert_eq!(host.read(0, 1), sealed(1));
    // The ANA state takes precedence: if the namespace is inaccessible, the host gets that status.
    reader.set_namespaces(vec![(1, Arc::clone(&namespace), AnaState::Inaccessible)]);
    while host.write(0, sealed(2)) == protected {}
    assert_eq!(host.write(0, sealed(2)).code(), Status::ANA_INACCESSIBLE.code());
}
