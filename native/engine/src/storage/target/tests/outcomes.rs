//! A gateway that lost a queue asks for the outcomes of its changes.

use std::sync::Arc;
use std::thread;

use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::operation::LbaRange;
use sealane_proto::nvme::outcomes::{Ended, decode};
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{BLOCK_BYTES, set_expected_iv};

use super::hosts::{Host, controller, sealed, secure};
use super::store::ShuffledStore;
use crate::storage::target::Namespace;

fn world() -> (ShuffledStore, Arc<Namespace>) {
    let store = ShuffledStore::new(16, true, 21);
    let namespace = Namespace::new(Box::new(store.clone())).unwrap();
    (store, Arc::new(namespace))
}

/// Asks, on another queue, for the outcomes of queue 1.
fn outcomes(namespace: &Arc<Namespace>) -> Option<Vec<Ended>> {
    let asking = controller(2, namespace);
    let mut host = Host::connect(&asking, 2, true);
    let (status, data) = host.run(HostCommand::Outcomes { queue: secure(1).name(), epoch: 1 });
    assert_eq!(status, Status::SUCCESS);
    decode(&data)
}

fn made(number: u64) -> Ended {
    Ended { number, status: Status::SUCCESS, ranges: 0, mark: 0 }
}

#[test]
fn changes_made_are_reported_and_refused_commands_and_reads_are_not() {
    let (store, namespace) = world();
    let first = controller(1, &namespace);
    let mut host = Host::connect(&first, 1, true);
    // All are in flight together, so none of them reuses another's command id.
    let mut other_than_stored = sealed(8);
    set_expected_iv(other_than_stored.first_chunk_mut::<BLOCK_BYTES>().unwrap(), &[7; 12]);
    let commands = [
        HostCommand::Write { lba: 3, data: sealed(5), is_forced: false },
        HostCommand::Read { lba: 9, blocks: 1 },
        HostCommand::WriteIf { lba: 4, data: other_than_stored, is_forced: false },
        HostCommand::WriteIf { lba: 5, data: sealed(6), is_forced: true },
        HostCommand::FlushMilestone,
        HostCommand::Deallocate(vec![
            LbaRange { lba: 6, blocks: 1 },
            LbaRange { lba: 8, blocks: 2 },
        ]),
        HostCommand::Write { lba: 16, data: sealed(5), is_forced: false },
    ];
    let [answered, others @ ..] = commands.map(|command| host.submit(command));
    // The target knows a queue that has answered.
    host.finish(answered);
    assert_eq!(outcomes(&namespace), None, "the queue hasn't ended");
    for tag in others {
        host.finish(tag);
    }
    first.close();
    assert_eq!(outcomes(&namespace), Some(vec![made(1), made(4), made(6)]));
    store.fail(true);
    let third = controller(3, &namespace);
    let mut host = Host::connect(&third, 1, true);
    assert!(!host.write(3, sealed(9)).is_success());
    third.close();
    store.fail(false);
    let failed = outcomes(&namespace).expect("known");
    assert_eq!((failed.len(), failed[0].number, failed[0].status.is_success()), (1, 1, false));
}

#[test]
fn a_change_in_flight_at_the_store_when_its_queue_ends_is_reported_with_its_outcome() {
    let (store, namespace) = world();
    let first = controller(1, &namespace);
    let mut host = Host::connect(&first, 1, true);
    store.hold(true);
    // The second one waits for the range of the first, and is dropped with the queue.
    host.submit(HostCommand::Write { lba: 3, data: sealed(5), is_forced: false });
    host.submit(HostCommand::Write { lba: 3, data: sealed(6), is_forced: false });
    while store.submitted() < 1 {
        thread::yield_now();
    }
    thread::scope(|scope| {
        let closing = scope.spawn(|| first.close());
        drop(host);
        store.hold(false);
        closing.join().unwrap();
    });
    let told = outcomes(&namespace).expect("known");
    let has_second = store.block(3) == sealed(6);
    assert_eq!(told.contains(&made(2)), has_second, "the report must agree with the block");
    assert!(told.contains(&made(1)));
}

#[test]
fn the_number_of_finished_ranges_of_a_deallocation_is_reported() {
    let mut partly = 0;
    for attempt in 0..200 {
        let (store, namespace) = world();
        let first = controller(1, &namespace);
        let mut host = Host::connect(&first, 1, true);
        for lba in 0..16 {
            store.put(lba, sealed(5));
        }
        let ranges = (0..16).map(|lba| LbaRange { lba, blocks: 1 }).collect();
        store.hold(true);
        host.submit(HostCommand::Deallocate(ranges));
        while store.submitted() < 1 {
            thread::yield_now();
        }
        thread::scope(|scope| {
            let closing = scope.spawn(|| first.close());
            // Increasing delays, until the queue is stopped before the store continues.
            (0..attempt * 10).for_each(|_| thread::yield_now());
            store.hold(false);
            closing.join().unwrap();
        });
        let done = (0..16).filter(|lba| store.block(*lba) == vec![0; BLOCK_BYTES]).count();
        let [told] = outcomes(&namespace).expect("known")[..] else { panic!("one command") };
        if told.status.is_success() {
            assert_eq!((told, done), (made(1), 16));
        } else {
            partly += 1;
            let expected =
                Ended { number: 1, status: Status::ABORTED, ranges: done as u16, mark: 0 };
            assert_eq!(told, expected);
        }
        if partly == 3 {
            break;
        }
    }
    assert!(partly > 0, "the queue never ended between two ranges");
}
