//! Several paths: a late packet on one is not lost, and other paths carry what one loses.

use sealane_proto::link::{LinkConfig, Loss};
use sealane_proto::session::{PathState, Reliability};

use super::{CODED, MILLISECOND, Outcome, PERCENT, Scenario, check};
use crate::PathLinks;

/// One-way delay of each path: the slowest takes four times as long as the fastest.
const DELAYS: [u64; 4] = [5 * MILLISECOND, 8 * MILLISECOND, 12 * MILLISECOND, 20 * MILLISECOND];
/// Time after which a path counts as silent while three others are heard of.
const SILENCE: u64 = 2 * DELAYS[3] / 4 * 5;

fn link(delay: u64) -> LinkConfig {
    LinkConfig::clean(200_000_000, delay, 1 << 20)
}

/// Messages of 600 kB over four paths, together at the rate of one.
fn scenario(seed: u64, count: u32) -> Scenario {
    let path = |delay| PathLinks { forward: link(delay), backward: link(delay), blackout: None };
    Scenario {
        message_bytes_min: 600_000,
        message_bytes_max: 600_000,
        count,
        depth: 2,
        forward: link(DELAYS[0]),
        backward: link(DELAYS[0]),
        more_paths: DELAYS[1..].iter().copied().map(path).collect(),
        ..Scenario::small(seed)
    }
}

fn with_blackout(mut scenario: Scenario, broken: usize, start: u64, time: u64) -> Scenario {
    let blackout = match broken {
        0 => &mut scenario.blackout,
        other => &mut scenario.more_paths[other - 1].blackout,
    };
    *blackout = Some((start, start + time));
    scenario
}

fn longest(outcome: &Outcome) -> u64 {
    outcome.completion_nanos.iter().flatten().copied().max().expect("messages")
}

#[test]
fn paths_of_different_delays_share_the_units_and_nothing_counts_as_lost() {
    for reliability in [Reliability::SelectiveRepeat, CODED] {
        let outcome = check(&Scenario { reliability, ..scenario(1, 8) });
        let (sender, receiver) = (&outcome.sender, &outcome.receiver);
        assert_eq!((sender.retransmitted_packets, sender.timeouts), (0, 0));
        assert_eq!((receiver.missing_packets, receiver.reordered_packets), (0, 0));
        // Parity after a complete block is late, but not a repetition.
        assert_eq!(receiver.duplicates, 0);
        assert_eq!(sender.spurious_retransmissions, 0);
        assert_eq!((sender.paths_validated, sender.path_silences), (4, 0));
        let units = sender.data_packets_sent + sender.parity_packets_sent;
        for (path, delay) in outcome.paths.iter().zip(DELAYS) {
            assert_eq!(path.state, PathState::Validated);
            assert!(path.packets_sent > units / 5, "{path:?}");
            assert!((2 * delay..2 * delay + MILLISECOND).contains(&path.srtt), "{path:?}");
            // All except the packets after the last report.
            assert!(path.received.received + 64 > path.packets_sent, "{path:?}");
            assert!(path.in_flight_bytes < 64 * 1500, "{path:?}");
        }
    }
}

#[test]
fn losses_are_told_apart_by_path() {
    let mut scenario = scenario(2, 12);
    scenario.more_paths[1].forward.loss = Loss::Independent(3 * PERCENT);
    let outcome = check(&scenario);
    let lost: Vec<u64> = outcome.paths.iter().map(|path| path.lost_packets).collect();
    assert!(lost[2] > 20 && lost[0] + lost[1] + lost[3] == 0, "{lost:?}");
    assert_eq!(outcome.sender.spurious_retransmissions, 0);
    assert_eq!(outcome.sender.retransmitted_packets, outcome.sender.reported_losses);
    assert_eq!(outcome.sender.timeouts, 0);
}

#[test]
fn a_path_that_goes_down_is_passed_over_as_soon_as_others_are_heard_and_comes_back() {
    let undisturbed = longest(&check(&scenario(3, 30)));
    for broken in 0..4 {
        let start = 150 * MILLISECOND + broken as u64 * 7 * MILLISECOND;
        let outcome = check(&with_blackout(scenario(3, 30), broken, start, 250 * MILLISECOND));
        assert_eq!((outcome.sender.path_silences, outcome.sender.stalls), (1, 0), "{broken}");
        assert_eq!(outcome.sender.paths_validated, 4);
        // Until it counts as silent, plus the delay of what is sent again.
        let slower = longest(&outcome).saturating_sub(undisturbed);
        assert!(slower < SILENCE + 2 * DELAYS[3], "{broken}: {slower}");
        // It carries units again once it is back.
        let carried: Vec<u64> = outcome.paths.iter().map(|path| path.packets_sent).collect();
        let before = start * 25 / 1500 / 1000 / 4;
        assert!(carried[broken] > before + carried.iter().sum::<u64>() / 20, "{carried:?}");
    }
}

#[test]
fn a_path_that_is_down_from_the_start_delays_nobody() {
    for broken in 0..4 {
        let outcome = check(&with_blackout(scenario(4, 4), broken, 0, 100_000 * MILLISECOND));
        assert_eq!(outcome.sender.paths_validated, 3);
        assert_eq!(outcome.sender.retransmitted_packets, 0);
        // Only challenges were sent on it.
        assert!(outcome.paths[broken].packets_sent < 40, "{:?}", outcome.paths[broken]);
    }
}

#[test]
fn with_two_paths_only_a_time_out_shows_that_one_is_down() {
    let two = |seed| {
        let mut two = scenario(seed, 30);
        two.more_paths.truncate(1);
        two
    };
    let outcome = check(&with_blackout(two(6), 1, 150 * MILLISECOND, 250 * MILLISECOND));
    assert_eq!((outcome.sender.path_silences, outcome.sender.stalls), (1, 0));
    let undisturbed = longest(&check(&two(6)));
    let slower = longest(&outcome).saturating_sub(undisturbed);
    // Less than a time-out of the slower path, more than its silence would be with others.
    assert!((2 * DELAYS[1]..3 * 2 * DELAYS[1] + 4 * DELAYS[1]).contains(&slower), "{slower}");
}

#[test]
fn a_host_that_pauses_makes_no_path_silent() {
    let pauses = Some(crate::Pauses { every: 100 * MILLISECOND, length: 30 * MILLISECOND });
    let outcome = check(&Scenario { pauses, ..scenario(7, 12) });
    assert_eq!(outcome.sender.path_silences, 0, "{:?}", outcome.sender);
}

#[test]
fn a_path_that_goes_down_costs_little_more_than_a_round_trip_if_others_are_heard_of() {
    let delay = DELAYS[3];
    let equal = || {
        let path = PathLinks { forward: link(delay), backward: link(delay), blackout: None };
        let more_paths = vec![path; 4];
        Scenario { forward: link(delay), backward: link(delay), more_paths, ..scenario(8, 12) }
    };
    let broken = with_blackout(equal(), 2, 200 * MILLISECOND, 400 * MILLISECOND);
    let outcome = check(&broken);
    assert_eq!((outcome.sender.path_silences, outcome.sender.stalls), (1, 0));
    let slower = longest(&outcome) - longest(&check(&equal()));
    // Silence of 1.25 round trips, instead of a time-out of three.
    assert!(slower < SILENCE + delay, "{slower}");
}
