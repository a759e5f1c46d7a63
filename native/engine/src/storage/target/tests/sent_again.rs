//! Changes that a gateway sends again after a restart of the target replace nothing newer.

use std::sync::Arc;

use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::operation::LbaRange;
use sealane_proto::sector::BLOCK_BYTES;

use super::hosts::{Host, controller, plain, sealed};
use super::store::ShuffledStore;
use crate::storage::target::Namespace;

fn world() -> (ShuffledStore, Arc<Namespace>) {
    let store = ShuffledStore::new(16, true, 22);
    let namespace = Namespace::new(Box::new(store.clone())).expect("namespace");
    (store, Arc::new(namespace))
}

/// Four sealed blocks.
fn four(iv: u64) -> Vec<u8> {
    (iv..iv + 4).flat_map(sealed).collect()
}

fn superseded(namespace: &Namespace) -> u64 {
    let named = namespace.statistics();
    named.iter().find(|(name, _)| *name == "superseded").expect("counter").1
}

#[test]
fn blocks_changed_since_the_restart_are_left_out_of_changes_sent_again() {
    let (store, namespace) = world();
    let [late, other] = [1, 2].map(|host| controller(host, &namespace));
    let mut late = Host::connect(&late, 1, true);
    let mut other = Host::connect(&other, 1, true);
    (0..16).for_each(|lba| store.put(lba, sealed(90)));
    assert!(other.write(5, sealed(70)).is_success());
    let ranges = vec![LbaRange { lba: 7, blocks: 1 }];
    assert!(other.status(HostCommand::Deallocate(ranges)).is_success());
    let again = HostCommand::WriteAgain { lba: 4, sectors: four(50).into() };
    assert!(late.status(again).is_success());
    assert_eq!(store.block(4), sealed(50));
    assert_eq!(store.block(5), sealed(70), "written by another gateway meanwhile");
    assert_eq!(store.block(6), sealed(52));
    assert_eq!(store.block(7), vec![0; BLOCK_BYTES], "deallocated meanwhile");
    assert_eq!(superseded(&namespace), 2);
    // If all blocks were changed, nothing is submitted to the store, and the answer is the same.
    let before = store.submitted();
    let again = HostCommand::WriteAgain { lba: 5, sectors: sealed(51).into() };
    assert!(late.status(again).is_success());
    assert_eq!((store.submitted(), superseded(&namespace)), (before, 3));
}

#[test]
fn a_deallocation_that_is_sent_again_spares_the_same_blocks() {
    let (store, namespace) = world();
    let [late, other] = [1, 2].map(|host| controller(host, &namespace));
    let mut late = Host::connect(&late, 1, true);
    let mut other = Host::connect(&other, 1, true);
    (0..16).for_each(|lba| store.put(lba, sealed(90)));
    for lba in [3, 8, 9] {
        assert!(other.write(lba, sealed(70)).is_success());
    }
    let ranges = [(2, 3), (8, 2), (12, 1)].map(|(lba, blocks)| LbaRange { lba, blocks });
    assert!(late.status(HostCommand::DeallocateAgain(ranges.to_vec())).is_success());
    let gone: Vec<usize> = (0..16).filter(|lba| store.block(*lba) == [0; BLOCK_BYTES]).collect();
    assert_eq!(gone, [2, 4, 12]);
    assert!([3, 8, 9].iter().all(|lba| store.block(*lba) == sealed(70)));
    assert_eq!(superseded(&namespace), 3);
}

#[test]
fn changes_sent_again_are_replaced_by_those_that_others_send_again() {
    let (store, namespace) = world();
    let [first, second] = [1, 2].map(|host| controller(host, &namespace));
    let mut first = Host::connect(&first, 1, true);
    let mut second = Host::connect(&second, 1, true);
    let again = |iv| HostCommand::WriteAgain { lba: 3, sectors: sealed(iv).into() };
    assert!(first.status(again(5)).is_success());
    assert!(second.status(again(6)).is_success());
    assert_eq!((store.block(3), superseded(&namespace)), (sealed(6), 0));
    let data = sealed(8);
    assert!(first.status(HostCommand::Write { lba: 3, data, is_forced: true }).is_success());
    assert!(second.status(again(6)).is_success());
    assert_eq!(store.block(3), sealed(8));
}

#[test]
fn a_failed_change_supersedes_nothing_and_a_failed_part_fails_its_command() {
    let (store, namespace) = world();
    let [late, other] = [1, 2].map(|host| controller(host, &namespace));
    let mut late = Host::connect(&late, 1, true);
    let mut other = Host::connect(&other, 1, true);
    store.fail(true);
    assert!(!other.write(6, sealed(70)).is_success());
    store.fail(false);
    assert!(
        late.status(HostCommand::WriteAgain { lba: 6, sectors: sealed(5).into() }).is_success()
    );
    assert_eq!((store.block(6), superseded(&namespace)), (sealed(5), 0));
    assert!(other.write(5, sealed(70)).is_success());
    // In whatever order the two parts end.
    store.roll_back(6);
    for _ in 0..16 {
        let again = HostCommand::WriteAgain { lba: 4, sectors: four(50).into() };
        assert!(!late.status(again).is_success());
    }
    assert_eq!(late.read(5, 1), sealed(70));
}

#[test]
fn a_plain_queue_ignores_the_mark_of_changes_sent_again() {
    let store = ShuffledStore::new(16, false, 23);
    let namespace = Arc::new(Namespace::new(Box::new(store.clone())).expect("namespace"));
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, false);
    assert!(host.write(3, plain(1, 1)).is_success());
    let again = HostCommand::WriteAgain { lba: 3, sectors: plain(2, 1).into() };
    assert!(host.status(again).is_success());
    assert_eq!(store.block(3), plain(2, 1), "the bit is reserved there, and ignored");
}
