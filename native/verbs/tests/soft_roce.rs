//! Queue pairs over soft-RoCE, in the kernel lab's guest (`make lab-verbs`): SEALANE_VERBS_HERE and
//! SEALANE_VERBS_THERE are addresses of two devices that reach each other, and
//! SEALANE_VERBS_MODE is `send` or `write`.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use sealane_verbs::{Mode, QueuePair, QueuePairAddress, Unavailable};

const PATIENCE: Duration = Duration::from_secs(30);

fn address(name: &str) -> IpAddr {
    std::env::var(name).expect(name).parse().expect(name)
}

fn mode() -> Mode {
    match std::env::var("SEALANE_VERBS_MODE").as_deref() {
        Ok("send") => Mode::Send,
        Ok("write") => Mode::Write,
        other => panic!("SEALANE_VERBS_MODE is {other:?}"),
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn pair() -> [QueuePair; 2] {
    let [mut here, mut there] = ["SEALANE_VERBS_HERE", "SEALANE_VERBS_THERE"]
        .map(|name| QueuePair::new(address(name), mode()).unwrap());
    here.set_peer(there.local());
    there.set_peer(here.local());
    until("a connection", || here.tend() & there.tend());
    [here, there]
}

/// A datagram that shows what it should hold.
fn datagram(number: u32, length: usize) -> Vec<u8> {
    let mut bytes: Vec<_> = (0..length).map(|at| (number as usize * 31 + at) as u8).collect();
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// The datagrams' numbers, each of which must be whole.
fn take(from: &mut QueuePair, into: &mut Vec<u32>) {
    from.receive(|bytes| {
        let number = u32::from_be_bytes(bytes[..4].try_into().unwrap());
        assert_eq!(bytes, datagram(number, bytes.len()), "a damaged datagram");
        into.push(number);
    });
}

/// Sends a datagram; what has arrived at the other end stays there.
fn send_unheard(from: &mut QueuePair, number: u32, length: usize) {
    until("room to send", || {
        let is_sent = from.send(&datagram(number, length), length).unwrap();
        from.receive(|_| unreachable!("nothing is sent this way"));
        is_sent
    });
}

/// Waits for an event, as a worker does; returns whether there was one.
fn poll(pair: &QueuePair, longest: Duration) -> bool {
    let timeout = Timespec::try_from(longest).unwrap();
    let mut fds = [PollFd::from_borrowed_fd(pair.event(), PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&timeout)).unwrap() == 1
}

fn send(from: &mut QueuePair, to: &mut QueuePair, number: u32, taken: &mut Vec<u32>) {
    until("room to send", || {
        let is_sent = from.send(&datagram(number, 4000), 4000).unwrap();
        from.receive(|_| unreachable!("nothing is sent this way"));
        take(to, taken);
        is_sent
    });
}

#[test]
#[ignore = "needs RDMA devices: make lab-verbs"]
fn datagrams_arrive_whole_in_both_directions_and_sizes() {
    let [mut here, mut there] = pair();
    for length in [4, 5, 100, 4095, 4096] {
        for swapped in [false, true] {
            let (from, to) =
                if swapped { (&mut there, &mut here) } else { (&mut here, &mut there) };
            let batch: Vec<u8> = (0..5).flat_map(|number| datagram(number, length)).collect();
            assert!(from.send(&batch, length).unwrap());
            let mut taken = Vec::new();
            until("the datagrams", || {
                take(to, &mut taken);
                taken.len() == 5
            });
            assert_eq!(taken, [0, 1, 2, 3, 4]);
        }
    }
    let short = [datagram(1, 4096), datagram(2, 10)].concat();
    assert!(here.send(&short, 4096).unwrap());
    let mut taken = Vec::new();
    until("a batch whose last is short", || {
        take(&mut there, &mut taken);
        taken.len() == 2
    });
    assert!(here.send(&[0; 4097], 4097).is_err(), "larger than a packet");
    assert_eq!((here.failures(), there.failures()), (0, 0));
}

#[test]
#[ignore = "needs RDMA devices: make lab-verbs"]
fn a_lossy_network_loses_datagrams_and_damages_none() {
    let [mut here, mut there] = pair();
    let mut taken = Vec::new();
    for number in 0..1000 {
        send(&mut here, &mut there, number, &mut taken);
    }
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        take(&mut there, &mut taken);
    }
    let unique: HashSet<_> = taken.iter().collect();
    let sorted = taken.is_sorted();
    println!(
        "{} of 1000 arrived, {} twice, in order: {sorted}",
        unique.len(),
        taken.len() - unique.len()
    );
    assert!(unique.len() > 500, "only {} arrived", unique.len());
    assert_eq!((here.failures(), there.failures()), (0, 0));
}

#[test]
#[ignore = "needs RDMA devices: make lab-verbs"]
fn a_receiver_that_does_not_look_loses_datagrams_and_goes_on() {
    let [mut here, mut there] = pair();
    for number in 0..1200 {
        send_unheard(&mut here, number, 1000);
    }
    std::thread::sleep(Duration::from_millis(500));
    let mut taken = Vec::new();
    let mut is_all = false;
    while !is_all {
        let number = |bytes: &mut [u8]| u32::from_be_bytes(bytes[..4].try_into().unwrap());
        is_all = there.receive(|bytes| taken.push(number(bytes))).is_all;
    }
    assert!((300..=512).contains(&taken.len()), "{} fitted the slots", taken.len());
    let mut later = Vec::new();
    send(&mut here, &mut there, 5000, &mut later);
    until("a datagram after them", || {
        take(&mut there, &mut later);
        later.contains(&5000)
    });
    assert_eq!((here.failures(), there.failures()), (0, 0), "losing is no failure");
}

#[test]
#[ignore = "needs RDMA devices: make lab-verbs"]
fn a_sleeper_goes_on_after_a_failure_without_being_asked() {
    let [mut here, mut there] = pair();
    let mut taken = Vec::new();
    let end = Instant::now() + PATIENCE;
    let mut failed = 0;
    // As a worker: it looks only after an event, or when something is due.
    while taken.len() < 4 {
        assert!(Instant::now() < end, "{taken:?} after {failed} failures");
        here.send(&datagram(failed, 64), 64).unwrap();
        here.receive(|_| unreachable!("nothing is sent this way"));
        if there.is_up() && failed < 4 && taken.len() == failed as usize {
            there.fail().unwrap();
            failed += 1;
        }
        let sleeps = there.fall_asleep(true);
        let most = Duration::from_secs(10);
        let nap = if sleeps { there.due_in().unwrap_or(most).min(most) } else { Duration::ZERO };
        let nap = if there.is_up() { nap.min(Duration::from_millis(20)) } else { nap };
        poll(&there, nap);
        there.woken(false);
        take(&mut there, &mut taken);
        taken.dedup();
    }
    assert_eq!(there.failures(), 4);
}

#[test]
#[ignore = "needs RDMA devices: make lab-verbs"]
fn a_pair_in_error_is_made_again_with_the_same_address() {
    let [mut here, mut there] = pair();
    let (before, mut taken) = (there.local(), Vec::new());
    send(&mut here, &mut there, 1, &mut taken);
    until("the first", || {
        take(&mut there, &mut taken);
        taken.contains(&1)
    });
    there.fail().unwrap();
    until("notice of the failure", || {
        take(&mut there, &mut taken);
        there.failures() == 1
    });
    // What is sent meanwhile is lost, and does no harm.
    send(&mut here, &mut there, 2, &mut taken);
    until("a connection again", || there.tend());
    assert_eq!(there.local(), before);
    let mut number = 3;
    until("a datagram in each direction", || {
        number += 1;
        send(&mut here, &mut there, number, &mut taken);
        take(&mut there, &mut taken);
        taken.iter().any(|taken| *taken > 3)
    });
    there.send(&datagram(7, 50), 50).unwrap();
    let mut back = Vec::new();
    until("a datagram back", || {
        take(&mut here, &mut back);
        back == [7]
    });
    assert_eq!(here.failures(), 0);
}

#[test]
#[ignore = "needs RDMA devices: make lab-verbs"]
fn a_sleeper_is_woken_by_what_arrives_and_by_nothing_else() {
    let [mut here, mut there] = pair();
    there.woken(false);
    assert!(there.fall_asleep(true));
    assert!(!poll(&there, Duration::from_millis(200)));
    for number in 0..3 {
        here.send(&datagram(number, 64), 64).unwrap();
        until("the event", || poll(&there, Duration::from_millis(100)));
        there.woken(false);
        assert!(!there.fall_asleep(true), "what woke it has not been taken");
        let mut taken = Vec::new();
        take(&mut there, &mut taken);
        assert_eq!(taken, [number]);
        there.woken(false);
        assert!(there.fall_asleep(true));
        assert!(!poll(&there, Duration::ZERO));
    }
}

#[test]
#[ignore = "needs RDMA devices: make lab-verbs"]
fn a_peer_that_names_others_addresses_gets_nothing_through() {
    let [mut here, mut there] = pair();
    // To a queue pair that does not exist, and to a host that does not answer.
    for address in [
        QueuePairAddress { number: 0xff_fff0, ..there.local() },
        QueuePairAddress { ip: "10.99.0.99".parse().unwrap(), ..there.local() },
    ] {
        here.set_peer(address);
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            // It may be refused, or lost.
            drop(here.send(&datagram(1, 100), 100));
            here.receive(|_| unreachable!("nothing is sent this way"));
            there.receive(|_| panic!("something came through"));
        }
    }
    // A datagram from a pair that it is not connected to.
    let mut third = QueuePair::new(here.local().ip, mode()).unwrap();
    third.set_peer(there.local());
    until("a connection", || third.tend());
    third.send(&datagram(1, 100), 100).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    // UC does not check the sender's number: a session's packets are sealed for that reason.
    let received = there.receive(|bytes| assert_eq!(bytes.len(), 100));
    assert_eq!(received.datagrams, 1);
}

#[test]
#[ignore = "needs RDMA devices: make lab-verbs"]
fn many_pairs_come_and_go() {
    for _ in 0..20 {
        let [mut here, mut there] = pair();
        let mut taken = Vec::new();
        send(&mut here, &mut there, 1, &mut taken);
    }
    let address = "192.0.2.1".parse().unwrap();
    let error = QueuePair::new(address, mode()).expect_err("nobody has this address");
    assert!(matches!(error, Unavailable::Device(found) if found == address), "{error}");
}

#[test]
#[ignore = "needs RDMA devices: make lab-verbs"]
fn late_packets_and_those_with_a_wrong_key_end_in_the_device() {
    let [mut here, there] = pair();
    let gone = there.local();
    // Its successor has another number, and in mode `write` another key.
    drop(there);
    let mut there = QueuePair::new(gone.ip, mode()).unwrap();
    assert_ne!((there.local().number, there.local().rkey), (gone.number, gone.rkey));
    there.set_peer(here.local());
    until("a connection", || there.tend());
    let successor = there.local();
    let mut send = |here: &mut QueuePair, what: &str| {
        for number in 0..100 {
            send_unheard(here, number, 100);
        }
        std::thread::sleep(Duration::from_millis(300));
        there.receive(|_| panic!("{what} came through"));
        assert_eq!(there.failures(), 0, "{what} is no failure");
    };
    send(&mut here, "a late packet");
    if let Some(rkey) = gone.rkey {
        here.set_peer(QueuePairAddress { rkey: Some(rkey), ..successor });
        until("a connection", || here.tend());
        send(&mut here, "a packet with an old key");
    }
}

#[test]
#[ignore = "needs an RDMA device whose interface has an MTU of 1500 bytes: make lab-verbs"]
fn small_mtu_is_refused_by_name() {
    let error = QueuePair::new(address("SEALANE_VERBS_HERE"), mode()).expect_err("it is too small");
    assert!(matches!(error, Unavailable::Mtu { mtu: 1024, .. }), "{error}");
    assert!(error.to_string().contains("give its network interface an MTU of 4200"), "{error}");
}
