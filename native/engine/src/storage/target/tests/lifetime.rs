//! Queues that end while their commands are in flight, waiting or throttled.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::status::Status;

use super::hosts::{Host, controller, limits, plain, sealed};
use super::store::ShuffledStore;
use crate::storage::target::{Namespace, QosLimits};

fn world(is_sealed: bool) -> (ShuffledStore, Arc<Namespace>) {
    let store = ShuffledStore::new(16, is_sealed, 21);
    let namespace = Namespace::new(Box::new(store.clone())).unwrap();
    (store, Arc::new(namespace))
}

/// Waits until this many operations were submitted to the store.
fn submitted(store: &ShuffledStore, count: u64) {
    while store.submitted() < count {
        thread::yield_now();
    }
}

#[test]
fn closing_waits_for_store_operations_and_their_freshness_is_recorded() {
    let (store, namespace) = world(true);
    let first = controller(1, &namespace);
    let mut host = Host::connect(&first, 1, true);
    store.hold(true);
    let _ = host.submit(HostCommand::Write { lba: 3, data: sealed(5), is_forced: false });
    submitted(&store, 1);
    let (report, reports) = channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            first.close();
            report.send(()).unwrap();
        });
        let early = reports.recv_timeout(Duration::from_millis(50));
        store.hold(false);
        assert_eq!(early, Err(RecvTimeoutError::Timeout));
    });
    assert_eq!(first.queues_running(), 0);
    assert!(store.block(3) == sealed(5));
    let second = controller(2, &namespace);
    let data = Host::connect(&second, 1, true).read(3, 1);
    assert_eq!(data[4096 + 16], 5, "written, and not refused as stale");
}

#[test]
fn a_queue_that_ends_releases_the_ranges_it_held_and_withdraws_its_requests() {
    let (store, namespace) = world(false);
    let (first, second, third) =
        (controller(1, &namespace), controller(2, &namespace), controller(3, &namespace));
    let mut holder = Host::connect(&first, 1, false);
    let mut waiter = Host::connect(&second, 1, false);
    let mut last = Host::connect(&third, 1, false);
    store.hold(true);
    let held = holder.submit(HostCommand::Write { lba: 3, data: plain(1, 2), is_forced: false });
    submitted(&store, 1);
    // This write waits for the holder, and the last one for this; a flush shows when each was
    // received.
    waiter.submit(HostCommand::Write { lba: 4, data: plain(2, 2), is_forced: false });
    waiter.submit(HostCommand::Flush);
    submitted(&store, 2);
    let behind = last.submit(HostCommand::Write { lba: 5, data: plain(3, 1), is_forced: false });
    last.submit(HostCommand::Flush);
    submitted(&store, 3);
    thread::scope(|scope| {
        // It waits for its flush at the store, but withdraws its request at once.
        let closing = scope.spawn(|| second.close());
        submitted(&store, 4);
        store.hold(false);
        closing.join().unwrap();
    });
    assert_eq!(holder.finish(held).0, Status::SUCCESS);
    assert_eq!(last.finish(behind).0, Status::SUCCESS);
    assert!(store.block(4) == plain(1, 1), "the dropped write was never made");
    assert_eq!(last.write(3, plain(4, 4)), Status::SUCCESS, "nothing is left locked");
}

#[test]
fn a_queue_that_ends_leaves_no_throttled_command_behind() {
    let (store, namespace) = world(false);
    namespace.set_limits(QosLimits { write_iops: 1, ..QosLimits::default() });
    let first = controller(1, &namespace);
    let mut host = Host::connect(&first, 1, false);
    let write = || HostCommand::Write { lba: 3, data: plain(1, 1), is_forced: false };
    assert_eq!(host.status(write()), Status::SUCCESS);
    host.submit(write());
    // A read behind it shows that the write has been processed.
    host.read(0, 1);
    first.close();
    assert_eq!(store.submitted(), 2);
    namespace.set_limits(QosLimits::default());
    let second = controller(2, &namespace);
    assert_eq!(Host::connect(&second, 1, false).write(3, plain(2, 1)), Status::SUCCESS);
}

#[test]
fn a_peer_that_goes_away_ends_its_queue() {
    let (_, namespace) = world(false);
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, false);
    host.write(0, plain(1, 1));
    drop(host);
    let mut kinds = Vec::new();
    while !kinds.contains(&"queue_closed") {
        kinds.extend(controller.events().take().into_iter().map(|event| event.kind));
        thread::yield_now();
    }
    assert_eq!(kinds, ["queue_opened", "queue_closed"]);
    controller.close();
    assert_eq!(controller.queues_running(), 0);
}

#[test]
fn a_queue_that_is_stopped_does_not_reset_the_connection_of_its_host() {
    let (_, namespace) = world(false);
    let first = controller(1, &namespace);
    let (mut near, far) = UnixStream::pair().unwrap();
    first.start_queue(far.into(), 1, limits(32), None).unwrap();
    thread::scope(|scope| {
        let closing = scope.spawn(|| first.close());
        assert_eq!(near.read_to_end(&mut Vec::new()).unwrap(), 0, "an orderly end, no answer");
        let sent = near.write_all(&[0; 8]);
        drop(near);
        closing.join().unwrap();
        assert!(sent.is_ok(), "closed under its host: {sent:?}");
    });
}

#[test]
fn a_closed_namespace_takes_no_new_queue() {
    let (_, namespace) = world(false);
    namespace.sync().unwrap();
    namespace.close();
    assert!(namespace.sync().is_err());
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, false);
    assert_eq!(host.write(0, plain(1, 1)), Status::INVALID_NAMESPACE.final_());
}

#[test]
fn abort_finds_no_command_that_was_executed() {
    let (_, namespace) = world(false);
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, false);
    host.write(0, plain(1, 1));
    assert!(!controller.abort(1, 0));
    assert!(!controller.abort(7, 0), "no such queue");
    assert!(controller.idle() < 60_000_000_000);
}
