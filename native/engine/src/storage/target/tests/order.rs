//! The store is flushed before a gateway changes blocks that another gateway changed.

use std::sync::Arc;

use sealane_proto::freshness::openings::{Openings, Verdict};
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::operation::LbaRange;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{BLOCK_BYTES, set_expected_iv};

use super::hosts::{Host, controller, sealed};
use super::store::ShuffledStore;
use crate::storage::stores::fresh_store::Trust;
use crate::storage::stores::in_place_store::{InPlaceStore, raw_blocks};
use crate::storage::stores::memory::MemoryStore;
use crate::storage::target::{Controller, Namespace};

fn world() -> (ShuffledStore, [Controller; 2]) {
    let store = ShuffledStore::new(16, true, 31);
    let namespace = Arc::new(Namespace::new(Box::new(store.clone())).expect("namespace"));
    (store, [1, 2].map(|host| controller(host, &namespace)))
}

fn deallocate(lbas: &[u64]) -> HostCommand {
    HostCommand::Deallocate(lbas.iter().map(|lba| LbaRange { lba: *lba, blocks: 1 }).collect())
}

#[test]
fn a_single_gateway_causes_no_flushes() {
    let (store, [first, second]) = world();
    let mut queues = [&first, &second].map(|controller| Host::gateway(controller, "a"));
    for lba in [3, 3, 4] {
        for queue in &mut queues {
            assert!(queue.write(lba, sealed(lba + 50)).is_success());
        }
    }
    assert!(queues[0].status(deallocate(&[3, 4])).is_success());
    assert_eq!(store.flushes(), 0);
}

#[test]
fn changes_of_another_gateway_are_flushed_before_their_blocks_are_changed_again() {
    let (store, [first, second]) = world();
    let mut a = Host::gateway(&first, "a");
    assert!(a.write(9, sealed(1)).is_success());
    let mut b = Host::gateway(&second, "b");
    assert!(b.write(3, sealed(2)).is_success());
    assert_eq!(store.flushes(), 1, "the first gateway's earlier changes");
    assert!(a.write(4, sealed(3)).is_success() && a.write(4, sealed(4)).is_success());
    assert!(b.write(5, sealed(5)).is_success() && b.write(3, sealed(5)).is_success());
    assert_eq!(b.read(4, 1), sealed(4));
    assert_eq!(store.flushes(), 1, "no block is changed by both");
    assert!(b.write(4, sealed(6)).is_success());
    assert_eq!(store.flushes(), 2);
    assert!(a.status(deallocate(&[4])).is_success());
    assert_eq!(store.flushes(), 3);
    let mut data = sealed(7);
    set_expected_iv(data.first_chunk_mut::<BLOCK_BYTES>().expect("a block"), &[0; 12]);
    let write_if = HostCommand::WriteIf { lba: 4, data, is_forced: false };
    assert!(b.status(write_if).is_success());
    assert_eq!((store.flushes(), store.block(4)), (4, sealed(7)));
    // After a gateway's own flush, all blocks may be changed.
    assert!(b.status(HostCommand::FlushMilestone).is_success());
    assert!((3..6).all(|lba| a.write(lba, sealed(8)).is_success()));
    assert_eq!(store.flushes(), 5);
}

#[test]
fn a_change_is_not_made_if_the_flush_before_it_fails() {
    let (store, [first, second]) = world();
    let [mut a, mut b] = [Host::gateway(&first, "a"), Host::gateway(&second, "b")];
    assert!(a.status(HostCommand::FlushMilestone).is_success());
    assert!(a.write(4, sealed(3)).is_success());
    store.fail_flushes(true);
    assert_eq!(b.write(4, sealed(4)), Status::WRITE_FAULT);
    store.fail_flushes(false);
    assert_eq!(store.block(4), sealed(3));
    assert!(b.write(4, sealed(4)).is_success());
    assert_eq!((store.flushes(), store.block(4)), (2, sealed(4)));
}

#[test]
fn changes_that_one_mark_cannot_express_are_flushed_if_there_are_several_gateways() {
    let (store, [first, second]) = world();
    let [mut a, mut b] = [Host::gateway(&first, "a"), Host::gateway(&second, "b")];
    // Both have joined once they have done something.
    for host in [&mut a, &mut b] {
        assert!(host.status(HostCommand::FlushMilestone).is_success());
    }
    assert!(a.status(deallocate(&[4])).is_success());
    assert_eq!(store.flushes(), 2);
    assert!(a.status(deallocate(&[5, 7])).is_success());
    assert_eq!(store.flushes(), 3, "two ranges");
    assert!(b.write(9, sealed(3)).is_success() && b.write(10, sealed(3)).is_success());
    let again = |lba, data: Vec<u8>| HostCommand::WriteAgain { lba, sectors: data.into() };
    assert!(b.status(again(8, sealed(1))).is_success());
    assert_eq!(store.flushes(), 3);
    assert!(b.status(again(9, sealed(1))).is_success());
    assert_eq!((store.flushes(), store.block(9)), (4, sealed(3)), "it was left out");
}

#[test]
fn a_store_without_marks_is_never_flushed_between_gateways() {
    let store = Box::new(MemoryStore::new(16, true));
    let namespace = Arc::new(Namespace::new(store).expect("namespace"));
    let [first, second] = [1, 2].map(|host| controller(host, &namespace));
    let [mut a, mut b] = [Host::gateway(&first, "a"), Host::gateway(&second, "b")];
    assert!([&mut a, &mut b].iter_mut().all(|host| host.write(4, sealed(3)).is_success()));
    let flushes = |(name, count): &(&str, u64)| name.contains("flushes") && *count > 0;
    assert!(!namespace.statistics().iter().any(flushes));
    let (status, data) = a.run(HostCommand::Openings);
    assert_eq!((status, Openings::decode(&data), a.mark), (Status::SUCCESS, None, 0));
}

#[test]
fn completions_carry_marks_and_openings_show_how_far_they_had_come() {
    let raw = Box::new(MemoryStore::new(raw_blocks(16), true));
    let store = InPlaceStore::create(raw, 16, &Trust::default()).expect("store");
    let namespace = Arc::new(Namespace::new(Box::new(store)).expect("namespace"));
    let controller = controller(1, &namespace);
    let mut host = Host::gateway(&controller, "a");
    let mut openings = || {
        let (status, data) = host.run(HostCommand::Openings);
        assert!(status.is_success());
        Openings::decode(&data).expect("it keeps marks")
    };
    let before = openings();
    assert!(before.earlier.is_empty());
    let mut host = Host::gateway(&controller, "b");
    assert!(host.write(3, sealed(5)).is_success());
    let mark = host.mark;
    assert!(mark > before.now.log_flushed, "{mark} {before:?}");
    assert!(host.status(HostCommand::FlushMilestone).is_success());
    let milestone = namespace.milestone().expect("it keeps some");
    assert_eq!(milestone.opening, before.now.opening);
    assert!(milestone.log_flushed >= mark, "the flush covers it");
    assert_eq!(before.judge(&before.made(mark), true), Verdict::Contained);
}
