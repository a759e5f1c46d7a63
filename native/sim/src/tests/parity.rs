//! When parity leaves, and what it costs.

use sealane_proto::link::Loss;
use sealane_proto::session::{BURST_PACKETS, Reliability};

use super::{CODED, MILLISECOND, PERCENT, Scenario, check};

fn sized(bytes: u64, reliability: Reliability) -> Scenario {
    Scenario {
        reliability,
        message_bytes_min: bytes,
        message_bytes_max: bytes,
        count: 1,
        ..Scenario::small(2)
    }
}

#[test]
fn without_losses_parity_costs_no_time() {
    let deep = Reliability::ErasureCoded { k: 8, m: 3, depth: 4 };
    for bytes in [1000, 40 * 1408, 600_000, 3_000_000] {
        let plain = check(&sized(bytes, Reliability::SelectiveRepeat));
        for code in [CODED, deep] {
            let coded = check(&sized(bytes, code));
            assert!(coded.sender.parity_packets_sent > 0);
            assert_eq!(coded.completion_nanos, plain.completion_nanos, "{bytes}");
        }
    }
}

#[test]
fn of_a_long_message_only_what_may_be_missing_gets_parity() {
    // Ten round trips of data in blocks of 8; only those of the last round trip are not
    // acknowledged yet. It is longer by the burst with which the session began: the rate is the
    // path's own, so that stays in the path's queue.
    let clean = check(&sized(6_000_000, CODED)).sender;
    let unit_nanos = (1408 + 83) * 40;
    let round_trip = 25 * MILLISECOND + BURST_PACKETS * unit_nanos;
    let unknown_blocks = round_trip / unit_nanos / 8;
    let allowed = 3 * unknown_blocks * 11 / 10;
    assert!((unknown_blocks..allowed).contains(&clean.parity_packets_sent), "{clean:?}");
    // Earlier losses are repeated at once, so parity has little left to do.
    let mut lossy = sized(6_000_000, CODED);
    lossy.forward.loss = Loss::Independent(PERCENT);
    let lossy = check(&lossy).sender;
    assert!(lossy.parity_packets_sent < 2 * clean.parity_packets_sent, "{lossy:?}");
    assert!(lossy.retransmitted_packets > 20, "{lossy:?}");
    assert_eq!(lossy.fallbacks, 0);
}
