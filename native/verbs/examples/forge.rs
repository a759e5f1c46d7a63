//! Sends messages to somebody else's queue pair, for the kernel lab: `forge ADDRESS COUNT FILE`, from
//! the device at SEALANE_VERBS_HERE. In turn: what the file holds, the same with one bit changed, and
//! bytes of any kind.

use std::time::{Duration, Instant};

use sealane_verbs::{Mode, QueuePair};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let peer = arguments.next().expect("an address").parse().expect("a queue pair's address");
    let count: u32 = arguments.next().expect("a count").parse().expect("a number");
    let heard = std::fs::read(arguments.next().expect("a file")).expect("a message");
    let here = std::env::var("SEALANE_VERBS_HERE").expect("SEALANE_VERBS_HERE");
    let mut pair =
        QueuePair::new(here.parse().expect("an address"), Mode::Send).expect("a queue pair");
    pair.set_peer(peer);
    let end = Instant::now() + Duration::from_secs(20);
    while !pair.tend() {
        assert!(Instant::now() < end, "not connected");
        std::thread::sleep(Duration::from_millis(1));
    }
    for number in 0..count {
        let mut bytes = heard.clone();
        let length = bytes.len();
        match number % 3 {
            0 => {}
            1 => bytes[number as usize % length] ^= 1 << (number % 8),
            _ => bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 31) as u8),
        }
        while !pair.send(&bytes, length).expect("a send") {
            assert!(Instant::now() < end, "no room");
            pair.receive(|_| {});
        }
    }
    // Let the last ones leave.
    std::thread::sleep(Duration::from_millis(200));
    println!("sent {count}");
}
