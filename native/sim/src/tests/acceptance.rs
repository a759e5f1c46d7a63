//! Acceptance tests of the reference (docs/understand/sessions.md, "Acceptance tests") that need a
//! certain kind of path. Every run checks payload, chunks, memory, credit and rate for every
//! message.

use sealane_proto::link::{GilbertElliott, Loss, PARTS};
use sealane_proto::session::{Detection, MESSAGE_BYTES_MAX, Reliability, UNIT_BYTES_MAX};

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

/// Test 1, the longest possible message: over a million units.
#[test]
fn the_longest_message_arrives_whole() {
    let scenario = Scenario {
        unit_bytes: UNIT_BYTES_MAX,
        message_bytes_min: MESSAGE_BYTES_MAX,
        message_bytes_max: MESSAGE_BYTES_MAX,
        count: 1,
        ..Scenario::fast(1)
    };
    let outcome = check(&scenario);
    assert_eq!(outcome.receiver.payload_bytes_received, MESSAGE_BYTES_MAX);
    assert_eq!(outcome.sender.retransmitted_packets, 0);
}

/// Test 6: somewhat more than 97 generations of 1024 slots; every third message is a stream.
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

/// Test 16, up to eight bandwidth-delay products and more: 6 MB at 200 Mbit/s and 25 ms.
#[test]
fn any_loss_at_any_size_ends_with_everything_delivered() {
    let decades = [10_000, 1000, 100, 10, 1].map(|part| PERCENT / part);
    for loss in [0].into_iter().chain(decades).chain([10 * PERCENT]) {
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

/// Test 18: with a time-out above every delay of the path, only lost units are repeated.
#[test]
fn what_is_repeated_is_what_was_lost() {
    for detection in [Detection::Timeout, Detection::Reports] {
        let mut scenario = Scenario {
            detection,
            message_bytes_min: 1_000_000,
            message_bytes_max: 1_000_000,
            count: 6,
            depth: 2,
            ..Scenario::small(19)
        };
        scenario.forward.loss = Loss::Independent(2 * PERCENT);
        scenario.forward.reorder_parts_per_billion = 10 * PERCENT;
        scenario.forward.reorder_nanos_max = MILLISECOND;
        scenario.reordering = MILLISECOND;
        let outcome = check(&scenario);
        assert!(outcome.sender.retransmitted_packets > 50, "{:?}", outcome.sender);
        assert_eq!(outcome.sender.spurious_retransmissions, 0);
        assert_eq!(outcome.receiver.duplicates + outcome.receiver.late, 0);
    }
}

/// Test 18: a time-out below the path's jitter causes unnecessary repetitions, and both ends count
/// the same number.
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

/// Test 23: at equal loss rates, a code recovers all isolated losses. Bursts exceed it unless
/// blocks are interleaved.
#[test]
fn bursts_defeat_a_code_and_interleaving_helps_it() {
    const MESSAGES: u64 = 40;
    let fallbacks = |burst: u32, depth: u8| {
        let mut scenario = Scenario {
            reliability: Reliability::ErasureCoded { k: 32, m: 8, depth },
            message_bytes_min: 8 << 20,
            message_bytes_max: 8 << 20,
            count: MESSAGES as u32,
            ..Scenario::fast(23)
        };
        scenario.forward.loss = Loss::GilbertElliott(GilbertElliott {
            p: PERCENT / burst,
            r: PARTS / burst,
            loss_bad: PARTS,
            loss_good: 0,
        });
        let outcome = check(&scenario);
        let share = outcome.forward.lost_packets * 1000 / outcome.forward.offered_packets;
        assert!((7..14).contains(&share), "{share} of a thousand");
        outcome.sender.fallbacks
    };
    assert_eq!(fallbacks(1, 1), 0);
    for burst in [8, 64] {
        let (plain, deep) = (fallbacks(burst, 1), fallbacks(burst, 32));
        println!("bursts of {burst}: {plain} of {MESSAGES} fall back, interleaved {deep}");
        assert!(plain > MESSAGES / 8 && deep * 4 < plain, "{burst}: {plain}, {deep}");
    }
}
