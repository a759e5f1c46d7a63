//! The last part of test 16 in the reference's list: the memory of two sessions is bounded by the
//! data in flight, regardless of losses and of the length of the message.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use sealane_proto::link::Loss;
use sealane_proto::session::Reliability;
use sealane_sim::{Scenario, run};

/// The system's allocator, which also records the highest number of bytes allocated at any time.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller fulfils the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above; the block comes from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const RATE: u64 = 2_500_000_000;
/// Rate times round-trip time.
const IN_FLIGHT_BYTES: u64 = RATE / 8 / 40;
const UNIT_BYTES: u64 = 4096;

/// Most bytes held at any time by a world with one message of `message_bytes`.
fn most_held(message_bytes: u64, reliability: Reliability) -> usize {
    let fast = Scenario::fast(16);
    let mut link = fast.forward;
    link.rate_bits_per_second = RATE;
    link.loss = Loss::Independent(100_000_000);
    let scenario = Scenario {
        reliability,
        count: 1,
        message_bytes_min: message_bytes,
        message_bytes_max: message_bytes,
        rate_bytes_per_second: RATE / 8,
        forward: link,
        backward: link,
        ..fast
    };
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let outcome = run(&scenario).expect("a valid scenario");
    assert_eq!(outcome.violations, []);
    assert!(outcome.forward.lost_packets > 1000 && outcome.backward.lost_packets > 10);
    MOST.load(Ordering::Relaxed) - before
}

#[test]
fn memory_is_bounded_by_the_data_in_flight() {
    let coded = Reliability::ErasureCoded { k: 32, m: 8, depth: 1 };
    // Bytes for each unit kept by the checkers: blocks and arrived units.
    for (reliability, checkers) in [(Reliability::SelectiveRepeat, 14), (coded, 3)] {
        let [short, long] = [8, 24].map(|times| most_held(times * IN_FLIGHT_BYTES, reliability));
        let units = (24 - 8) * IN_FLIGHT_BYTES / UNIT_BYTES;
        let in_flight = IN_FLIGHT_BYTES / UNIT_BYTES;
        println!("{reliability:?}: {short} and {long} bytes; {in_flight} units in flight");
        // Arrived and acknowledged units: bits, in tables that grow by doubling.
        let allowed = (checkers + 2) * units;
        assert!(long.saturating_sub(short) as u64 <= allowed, "{short} {long}, {allowed}");
        // Unacknowledged units, and the packets on the link: headers without payload.
        assert!(short as u64 <= 1000 * in_flight, "{short}");
    }
}
