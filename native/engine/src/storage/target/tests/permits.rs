//! Queues whose host loses its permit while the control plane doesn't stop them.

use std::sync::Arc;
use std::thread;

use sealane_proto::link::Nanos;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::status::Status;

use super::hosts::{Host, permitted, plain};
use super::store::ShuffledStore;
use crate::clock;
use crate::permit::{Permit, STALE};
use crate::storage::target::{Controller, Namespace};

const HOUR: Nanos = 3_600_000_000_000;

fn world() -> (ShuffledStore, Arc<Permit>, Controller) {
    let store = ShuffledStore::new(16, false, 5);
    let namespace = Arc::new(Namespace::new(Box::new(store.clone())).unwrap());
    let permit = Arc::new(Permit::default());
    permit.extend(clock::boot_time() + HOUR);
    let controller = permitted(1, &namespace, &permit);
    (store, permit, controller)
}

fn write(byte: u8) -> HostCommand {
    HostCommand::Write { lba: 3, data: plain(byte, 1), is_forced: false }
}

/// Waits until the queue has ended and returns the reason in its event.
fn ended(controller: &Controller) -> &'static str {
    while controller.queues_running() > 0 {
        thread::yield_now();
    }
    let events = controller.events().take();
    events.iter().find(|event| event.kind == "queue_closed").expect("it ended").reason
}

#[test]
fn nothing_is_begun_after_the_permit_is_revoked() {
    let (store, permit, controller) = world();
    let mut host = Host::connect(&controller, 1, false);
    assert_eq!(host.status(write(1)), Status::SUCCESS);
    let before = store.submitted();
    permit.take_back("node.revoked");
    host.submit(write(2));
    host.wait_cut();
    assert_eq!(ended(&controller), "node.revoked");
    assert_eq!(store.submitted(), before);
    assert!(store.block(3) == plain(1, 1));
}

#[test]
fn nothing_is_begun_after_the_permit_expires() {
    let (store, _, _) = world();
    let namespace = Arc::new(Namespace::new(Box::new(store.clone())).unwrap());
    let permit = Arc::new(Permit::default());
    let controller = permitted(2, &namespace, &permit);
    permit.extend(clock::boot_time() + 1);
    let mut host = Host::connect(&controller, 1, false);
    host.submit(write(2));
    host.wait_cut();
    assert_eq!(ended(&controller), STALE);
    assert_eq!(store.submitted(), 0);
}

#[test]
fn operations_at_a_store_are_completed_but_not_answered() {
    let (store, permit, controller) = world();
    let mut host = Host::connect(&controller, 1, false);
    store.end_when_done(&permit);
    host.submit(write(2));
    host.wait_cut();
    assert_eq!(ended(&controller), "node.revoked");
    assert!(store.block(3) == plain(2, 1));
}
