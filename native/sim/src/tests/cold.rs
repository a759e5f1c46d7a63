//! How long a message takes on a session that has just begun.

use super::*;

const ROUND_TRIP: u64 = 25 * MILLISECOND;
const WORLDS: usize = 1000;

/// Time from the start of a session to its end after one message of 64 KiB, at a loss of one packet
/// in `one_in` in each direction: in ascending order, of many worlds.
fn cold(one_in: u32) -> Vec<u64> {
    let loss = Loss::Independent(1_000_000_000 / one_in);
    let time = |seed| {
        let mut scenario = Scenario { count: 1, depth: 1, ..Scenario::small(seed) };
        (scenario.message_bytes_min, scenario.message_bytes_max) = (65_536, 65_536);
        scenario.payload = PayloadMode::LengthsOnly;
        scenario.forward.loss = loss;
        scenario.backward.loss = loss;
        check(&scenario).elapsed_nanos
    };
    let mut times: Vec<u64> = (0..WORLDS as u64).map(time).collect();
    times.sort_unstable();
    times
}

/// The initial time-out of 300 ms showed in one message of a hundred.
#[test]
fn a_lost_challenge_delays_a_cold_message_by_less_than_two_round_trips() {
    let clean = cold(1_000_000_000)[0];
    let at = |times: &[u64], share: usize| times[times.len() * share / 100] - clean;
    let times = cold(100);
    assert!(at(&times, 50) < ROUND_TRIP, "{times:?}");
    assert!(at(&times, 99) < 2 * ROUND_TRIP, "{times:?}");
    assert!(at(&times, 99) > ROUND_TRIP / 2, "losses are really there");
}
