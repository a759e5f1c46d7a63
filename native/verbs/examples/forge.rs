//! Sends datagrams to somebody else's queue pair, for the kernel lab:
//! `forge verbs:10.9.0.2,qpn=17,psn=0,mtu=4096 COUNT`, from the device at SEALANE_VERBS_HERE.

use std::time::{Duration, Instant};

use sealane_verbs::QueuePair;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let peer = arguments.next().expect("an address").parse().expect("a queue pair's address");
    let count: u32 = arguments.next().expect("a count").parse().expect("a number");
    let here = std::env::var("SEALANE_VERBS_HERE").expect("SEALANE_VERBS_HERE");
    let mut pair = QueuePair::new(here.parse().expect("an address")).expect("a queue pair");
    pair.set_peer(peer);
    let end = Instant::now() + Duration::from_secs(20);
    while !pair.tend() {
        assert!(Instant::now() < end, "not connected");
        std::thread::sleep(Duration::from_millis(1));
    }
    for number in 0..count {
        let length = 60 + (number as usize * 97) % 1900;
        let bytes: Vec<u8> = (0..length).map(|at| (at * 31) as u8 ^ number as u8).collect();
        while !pair.send(&bytes, length).expect("a send") {
            assert!(Instant::now() < end, "no room");
            pair.receive(|_| {});
        }
    }
    // Let the last ones leave.
    std::thread::sleep(Duration::from_millis(200));
    println!("sent {count}");
}
