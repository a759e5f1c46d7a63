//! Acceptance tests of the reference (docs/sessions.md, "Acceptance tests") that need a path of a
//! certain kind. Every run checks payload, chunks, memory, credit and rate of every message.

use sealane_proto::link::Loss;
use sealane_proto::session::{Detection, Reliability};

use super::{CODED, MILLISECOND, PERCENT, Scenario, check};

/// Test 1.
#[test]
fn every_size_in_chunks_of_any_grain_arrives_whole() {
    for chunk_units in [1, 16, 64] {
        for reliability in [Reliability::SelectiveRepeat, CODED] {
            let chunk = u64::from(chunk_units) * 256;
            for bytes in [chunk, 3 * chunk, 1 << 20] {
                let scenario = Scenario {
                    reliability,
                    chunk_units,
                    unit_bytes: 256,
                    message_bytes_min: bytes,
                    message_bytes_max: bytes,
                    count: 3,
                    slots: 2,
                    depth: 2,
                    ..Scenario::small(1)
                };
                assert_eq!(check(&scenario).sender.retransmitted_packets, 0);
            }
        }
    }
}

/// Test 6: 97 generations of 1024 slots and a bit, every third message a stream.
#[test]
fn a_hundred_thousand_messages_meet_their_receives_in_order() {
    let scenario = Scenario {
        streams: true,
        unit_bytes: 256,
        message_bytes_min: 0,
        message_bytes_max: 16,
        count: 100_000,
        slots: 1024,
        depth: 1024,
        rate_bytes_per_second: 1_250_000_000,
        ..Scenario::small(61)
    };
    let mut scenario = scenario;
    scenario.forward.rate_bits_per_second = 10_000_000_000;
    scenario.backward.rate_bits_per_second = 10_000_000_000;
    scenario.forward.loss = Loss::Independent(PERCENT / 100);
    let outcome = check(&scenario);
    assert_eq!(outcome.sender.sends_completed, 100_000);
    assert!(outcome.sender.retransmitted_packets > 0);
}

/// Test 16, sizes to eight bandwidth-delay products and beyond: 6 MB at 200 Mbit/s and 25 ms.
#[test]
fn any_loss_at_any_size_ends_with_everything_delivered() {
    for loss in [0, PERCENT / 10_000, PERCENT / 100, PERCENT, 10 * PERCENT] {
        for (bytes, count) in [(1408, 20), (200_000, 4), (6_000_000, 1)] {
            for reliability in [Reliability::SelectiveRepeat, CODED] {
                let mut scenario = Scenario {
                    reliability,
                    streams: true,
                    message_bytes_min: bytes,
                    message_bytes_max: bytes,
                    count,
                    slots: 4,
                    depth: 2,
                    ..Scenario::small(16)
                };
                scenario.forward.loss = Loss::Independent(loss);
                scenario.backward.loss = Loss::Independent(loss);
                check(&scenario);
            }
        }
    }
}

/// Test 18: a time-out below the path's jitter repeats in vain, and both ends count it alike.
#[test]
fn repetitions_in_vain_are_counted() {
    let mut scenario = Scenario {
        detection: Detection::Timeout,
        message_bytes_min: 400_000,
        message_bytes_max: 400_000,
        count: 4,
        depth: 1,
        ..Scenario::small(18)
    };
    scenario.forward.reorder_parts_per_billion = 5 * PERCENT;
    scenario.forward.reorder_nanos_max = 300 * MILLISECOND;
    let outcome = check(&scenario);
    let spurious = outcome.receiver.duplicates + outcome.receiver.late;
    assert!(spurious > 5, "{spurious}");
    let known = outcome.sender.spurious_retransmissions;
    assert!(known <= spurious && spurious - known <= 5, "{known} of {spurious}");
    assert_eq!(outcome.sender.retransmitted_packets, outcome.sender.timeouts);
}
