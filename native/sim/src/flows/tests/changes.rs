//! Flows and sessions whose network changes under them.

use sealane_proto::session::{SessionStatistics, Steering};

use super::super::run::run;
use super::super::sessions::Sessions;
use super::*;

/// Runs the product's sessions with its rules; returns also the statistics of the sending ends.
fn run_ours(cell: &Cell, setup: SessionsSetup) -> (CellOutcome, Vec<SessionStatistics>) {
    cell.validate().unwrap();
    let domain = cell.domain(0);
    let steering = Steering {
        congestion: Some((Algorithm::Uno(Rules::DEFAULT), domain)),
        marks: setup.marks,
        ..Steering::default()
    };
    let mut world = Sessions::new(cell, setup, steering, domain.line_bytes_per_second);
    let outcome = run(cell, &mut world);
    (outcome, world.statistics())
}

const MS: Nanos = 1_000_000;
/// Sessions are established and have credit by then.
const START: Nanos = 10 * MS;

fn ours(flows: Vec<FlowSetup>, changes: Vec<Change>) -> Cell {
    Cell {
        congestion: Congestion::Product(Algorithm::Uno(Rules::DEFAULT)),
        balance: Balance::Subflows,
        time_max: 300 * MS,
        changes,
        ..cell(flows)
    }
}

/// Far sessions with 50 MB each, which share no port except on links between the data centres.
fn four(changes: Vec<Change>) -> Cell {
    let far =
        |index: u16| FlowSetup { start: START, ..flow(20 * index, 140 + 20 * index, 50_000_000) };
    ours((0..4).map(far).collect(), changes)
}

fn on(from_site: u16, link: u16, effect: Effect, start: Nanos, end: Nanos) -> Change {
    Change { place: Place::Wan { from_site, link }, effect, start, end }
}

fn far_rtt() -> Nanos {
    four(Vec::new()).round_trip(true)
}

/// Packets that fill a far path: the largest window.
fn flight() -> u64 {
    LINE / 8 * far_rtt() / 1_000_000_000 / u64::from(PAYLOAD_BYTES)
}

fn longest(outcome: &CellOutcome) -> f64 {
    let all = millis(outcome);
    assert!(all.iter().all(|at| *at > 0.0), "{all:?}");
    all.into_iter().fold(0.0, f64::max) - START as f64 / MS as f64
}

fn round_trips(millis: f64) -> f64 {
    millis * MS as f64 / far_rtt() as f64
}

/// How flows follow the rate of the port that they share, which is an eighth for a time: round trips
/// until they send less than 1.5 of it together, and those from its end until they send 90 % of what
/// they sent before.
fn follow(flows: Vec<FlowSetup>, slow: Nanos) -> (f64, f64) {
    let every = far_rtt() / 10;
    let (start, end) = (30 * MS, 30 * MS + slow);
    let effect = Effect::Rate(LINE / 8);
    let change = Change { place: Place::ToHost(240), effect, start, end };
    let cell =
        Cell { sample_every: every, time_max: end + 42 * far_rtt(), ..ours(flows, vec![change]) };
    let samples = run_ours(&cell, product()).0.samples;
    let sent = |at: usize| samples[at].sent_packets.iter().sum::<u64>() as f64;
    // In the round trip from there on, as a share of the line.
    let wire_bits = f64::from(8 * (PAYLOAD_BYTES + HEADER_BYTES));
    let line = LINE as f64 / 1e9 * far_rtt() as f64 / wire_bits;
    let rate = |at: usize| (sent(at + 10) - sent(at)) / line;
    let at = |time: Nanos| (time / every) as usize;
    let passed = |found: usize, since: Nanos| {
        (((found as u64 + 1) * every) as f64 - since as f64) / far_rtt() as f64
    };
    let above = (at(start)..at(end) - 10).rfind(|found| rate(*found) > 1.5 / 8.0);
    let before = rate(at(start) - 11);
    assert!(before > 0.5, "{before} of the line before");
    let back = (at(end)..samples.len() - 10).find(|found| rate(*found) > 0.9 * before);
    (above.map_or(0.0, |found| passed(found, start)), back.map_or(f64::MAX, |at| passed(at, end)))
}

#[test]
fn an_eighth_of_the_rate_is_found_in_five_round_trips_and_the_rest_of_it_in_forty() {
    let (found, back) = follow(vec![flow(3, 240, 1_000_000_000)], 40 * MS);
    assert!(found < 5.0 && back < 40.0, "one far session: {found}, {back} far round trips");
    let far = incast(300_000_000)[..4].to_vec();
    let (found, back) = follow(far, 40 * MS);
    assert!(found < 5.0 && back < 40.0, "four far sessions: {found}, {back} far round trips");
}

#[test]
fn near_sessions_beside_far_ones_make_good_for_a_rate_at_once() {
    let (found, back) = follow(incast(300_000_000), 20 * MS);
    assert!(found < 1.0 && back < 3.0, "{found}, {back} far round trips");
}

#[test]
fn each_flap_of_a_path_costs_less_than_a_flight_of_it() {
    let undisturbed = longest(&run_ours(&four(Vec::new()), product()).0);
    for half in [far_rtt() / 2, 2 * far_rtt()] {
        let start = |number: u64| START + 2 * MS + 2 * number * half;
        let flaps: Vec<Change> =
            (0..100).map(|flap| Change::outage(0, start(flap), start(flap) + half)).collect();
        let (outcome, _) = run_ours(&four(flaps), product());
        let took = longest(&outcome);
        assert!(took < 1.3 * undisturbed, "{took} ms instead of {undisturbed}");
        let last = outcome.flows.iter().map(|flow| flow.finished_at).max().unwrap();
        let seen = (last - START) / (2 * half) + 1;
        for flow in &outcome.flows {
            let repeated = flow.repeated_packets;
            assert!(repeated <= seen * flight() / 8, "{repeated} packets in {seen} flaps");
        }
        let repeated: u64 = outcome.flows.iter().map(|flow| flow.repeated_packets).sum();
        assert!(repeated > 0 && repeated * 4 <= outcome.down_packets * 5, "{repeated} packets");
    }
}

#[test]
fn a_dead_link_costs_two_or_three_round_trips_whenever_and_in_whichever_direction_it_dies() {
    let undisturbed = longest(&run_ours(&four(Vec::new()), product()).0);
    let later = START + 3 * MS;
    for (what, sites, from, is_repeated, most) in [
        ("from the start", [0].as_slice(), 0, false, 2.0),
        ("for data", &[0], later, true, 2.0),
        ("for reports", &[1], later, false, 2.0),
        ("in both directions", &[0, 1], later, true, 3.0),
    ] {
        let dead = sites.iter().map(|site| on(*site, 0, Effect::Down, from, Nanos::MAX)).collect();
        let (outcome, statistics) = run_ours(&four(dead), product());
        let slower = round_trips(longest(&outcome) - undisturbed);
        assert!(slower < most, "{slower} round trips, dead {what}");
        for one in &statistics {
            let repeated = one.retransmitted_packets;
            assert!(repeated <= flight() / 8, "{repeated} packets, dead {what}");
            assert!(is_repeated || repeated == 0, "{repeated} packets, dead {what}");
            assert_eq!(one.stalls, 0, "dead {what}");
        }
    }
}

#[test]
fn a_path_that_becomes_narrow_while_another_is_replaced_costs_less_than_a_flight() {
    for paths in [10, 16] {
        let dies = START + 3 * MS;
        let changes = vec![
            on(0, 0, Effect::Down, dies, Nanos::MAX),
            on(0, 1, Effect::Narrow(1500), dies + far_rtt(), Nanos::MAX),
        ];
        let (outcome, _) = run_ours(&four(changes), SessionsSetup { paths, ..product() });
        let took = longest(&outcome);
        assert!(took < 200.0, "{took} ms with {paths} paths");
        for flow in &outcome.flows {
            assert!(flow.repeated_packets < flight(), "{flow:?} with {paths} paths");
        }
    }
}

#[test]
fn reordered_and_copied_packets_make_no_path_silent() {
    let parts = 50_000_000;
    let wan = LinkConfig {
        reorder_parts_per_billion: parts,
        reorder_nanos_max: 200_000,
        duplicate_parts_per_billion: parts,
        ..sites(true).wan
    };
    let cell = Cell { sites: Sites { wan, ..sites(true) }, ..four(Vec::new()) };
    let (outcome, statistics) = run_ours(&cell, product());
    let undisturbed = longest(&run_ours(&four(Vec::new()), product()).0);
    let took = longest(&outcome);
    assert!(took < 1.1 * undisturbed, "{took} ms instead of {undisturbed}");
    for one in &statistics {
        assert_eq!((one.path_silences, one.stalls, one.timeouts), (0, 0, 0));
        assert!(one.retransmitted_packets * 100 < one.data_packets_sent, "{one:?}");
    }
}

#[test]
fn a_round_trip_that_doubles_costs_its_time_and_nothing_more() {
    let undisturbed = longest(&run_ours(&four(Vec::new()), product()).0);
    let start = START + 10 * MS;
    let longer = Effect::Longer(far_rtt());
    let changes = (0..8).map(|link| on(0, link, longer, start, Nanos::MAX)).collect();
    let (outcome, statistics) = run_ours(&four(changes), product());
    let slower = round_trips(longest(&outcome) - undisturbed);
    assert!(slower < 3.0, "{slower} round trips");
    for one in &statistics {
        let packets = one.window_bytes / u64::from(PAYLOAD_BYTES);
        assert!(packets * 10 > flight() * 9, "a window of {packets} packets");
        assert_eq!((one.retransmitted_packets, one.stalls), (0, 0));
    }
}
