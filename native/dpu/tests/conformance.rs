//! What every device must do right: the processor, and the emulated card in each profile.

mod running;

use std::collections::HashSet;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sealane_engine::accelerator::processor::Processor;
use sealane_engine::accelerator::{Cookie, Device, Done, Queue, SealJob, probe};
use sealane_proto::aead::{AeadKey, Secret, TAG_BYTES};
use sealane_proto::sector::DATA_BYTES;

use running::Running;

const AAD: &[u8] = &[9; 33];

fn secret() -> Secret {
    Secret::take(&mut [7; 32])
}

/// What the job with this nonce must become.
fn expected(nonce: u8) -> (Box<[u8; DATA_BYTES]>, [u8; TAG_BYTES]) {
    let mut data = plain(nonce);
    let tag = AeadKey::new(&secret()).seal([nonce; 12], AAD, &mut data[..]);
    (data, tag)
}

fn plain(nonce: u8) -> Box<[u8; DATA_BYTES]> {
    Box::new([nonce; DATA_BYTES])
}

/// Waits for `count` jobs.
fn wait(queue: &mut dyn Queue, count: usize) -> Vec<Done> {
    let mut done = Vec::new();
    while done.len() < count {
        let mut bell = [PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)];
        let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(poll(&mut bell, Some(&patience)), Ok(1), "no completion in time");
        queue.hear();
        queue.poll(&mut done).unwrap();
    }
    done
}

/// The suite.
fn conforms(device: &dyn Device) {
    probe(device).unwrap();
    let depth = usize::from(device.capabilities().depth);
    let key = device.load(&secret()).unwrap();
    let mut queue = device.queue().unwrap();
    let mut used = HashSet::new();
    for round in 0..3 {
        let mut cookies: Vec<(Cookie, u8)> = Vec::new();
        let mut count = 0_usize;
        loop {
            let nonce = (round * 50 + count % 50) as u8;
            let plain = plain(nonce);
            let job = SealJob { key, nonce: [nonce; 12], aad: AAD, plain: &plain };
            let Some(cookie) = queue.submit(&job) else { break };
            assert!(used.insert(cookie), "a job's name is used once");
            cookies.push((cookie, nonce));
            count += 1;
        }
        assert_eq!(count, depth, "full at its depth");
        queue.ring();
        let done = wait(&mut *queue, count);
        for (cookie, nonce) in cookies {
            assert!(done.contains(&Done { cookie, is_sealed: true }));
            let mut made = [0; DATA_BYTES];
            let tag = queue.take(cookie, &mut made);
            assert!((Box::new(made), tag) == expected(nonce), "nonce {nonce}");
        }
    }
    // A second thread has a queue of its own.
    let mut other = device.queue().unwrap();
    let (first, second) = (plain(1), plain(2));
    let one = queue.submit(&SealJob { key, nonce: [1; 12], aad: AAD, plain: &first }).unwrap();
    let two = other.submit(&SealJob { key, nonce: [2; 12], aad: AAD, plain: &second }).unwrap();
    queue.ring();
    other.ring();
    for (queue, cookie, nonce) in [(&mut queue, one, 1), (&mut other, two, 2)] {
        assert_eq!(wait(&mut **queue, 1), [Done { cookie, is_sealed: true }]);
        let mut made = [0; DATA_BYTES];
        let tag = queue.take(cookie, &mut made);
        assert!((Box::new(made), tag) == expected(nonce));
    }
    device.unload(key).unwrap();
    let cookie = queue.submit(&SealJob { key, nonce: [3; 12], aad: AAD, plain: &first }).unwrap();
    queue.ring();
    assert_eq!(wait(&mut *queue, 1), [Done { cookie, is_sealed: false }], "its key is gone");
    // The place is free again.
    device.load(&secret()).unwrap();
}

#[test]
fn the_processor_conforms() {
    conforms(&Processor::default());
}

#[test]
fn the_emulated_card_conforms_in_each_profile() {
    for profile in ["bf3-doca", "bf3-dpdk", "tiny"] {
        let card = Running::start(&["--profile", profile]);
        let device = card.connect();
        assert_eq!(device.capabilities().profile, profile);
        conforms(&device);
    }
}

#[test]
#[ignore = "needs SEALANE_CARD, the arguments of a card: make test-accelerators"]
fn another_card_conforms() {
    let arguments = std::env::var("SEALANE_CARD").expect("SEALANE_CARD has a card's arguments");
    let card = Running::start(&arguments.split(' ').collect::<Vec<_>>());
    conforms(&card.connect());
}

#[test]
fn a_card_that_has_no_place_left_says_so() {
    let card = Running::start(&["--profile", "tiny"]);
    let device = card.connect();
    let key = device.load(&secret()).unwrap();
    assert_eq!(device.load(&secret()).unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    // Another daemon's keys count, and go with its connection.
    let other = card.connect();
    assert!(other.load(&secret()).is_err());
    device.unload(key).unwrap();
    other.load(&secret()).unwrap();
    drop(other);
    let loaded = (0..100).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        device.load(&secret()).is_ok()
    });
    assert!(loaded, "the keys of a closed connection are gone");
}

#[test]
fn a_probe_finds_what_is_wrong() {
    for (fault, complaint) in [
        ("wrong-tag", "sealed a probe wrongly"),
        ("wrong-ciphertext", "sealed a probe wrongly"),
        ("wrong-plaintext", "sealed a probe wrongly"),
        ("refused", "refused a probe"),
        ("dead", "not answered"),
        ("lost", "not answered"),
        ("invented", "not in flight"),
        ("duplicate", "not in flight"),
        ("overrun", "more completions than there are jobs"),
    ] {
        let card = Running::start(&["--fault", fault]);
        let error = probe(&card.connect()).unwrap_err().to_string();
        let is_named = error.contains(complaint)
            || (fault == "duplicate" && error.contains("more completions"))
            || (fault == "invented" && error.contains("more completions"));
        assert!(is_named, "{fault}: {error}");
    }
}
