//! Cells of Uno's evaluation, beside what the released code gave for them (`uno.md`, section 8).

use sealane_proto::congestion::{Algorithm, GeminiRules, Rules};
use sealane_proto::fabric::Sites;
use sealane_proto::link::{LinkConfig, Nanos, Phantom, Thresholds};
use sealane_proto::session::Marks;

use super::*;

mod chains;
mod changes;
mod joining;

const LINE: u64 = 100_000_000_000;
const MICROSECOND: Nanos = 1_000;

/// The network of Uno's evaluation: 100 Gbit/s, 1 MB a port, 8 links of 886.5 µs.
fn sites(phantom: bool) -> Sites {
    let plain = LinkConfig::clean(LINE, MICROSECOND, 1_000_000);
    let cap_bytes = 22_400_515;
    let phantom = phantom.then(|| Phantom {
        drain_parts_per_billion: 952_380_952,
        cap_bytes,
        thresholds: Thresholds {
            low_bytes: cap_bytes / 50,
            high_bytes: cap_bytes / 5 * 3,
            probability_max_parts: 1_000_000_000,
        },
    });
    let marked = LinkConfig { phantom, ..plain };
    Sites {
        near: marked,
        host: LinkConfig { buffer_bytes: 1 << 40, ..plain },
        border: marked,
        wan: LinkConfig { delay_nanos: 886_500, ..marked },
        wan_links: 8,
    }
}

/// Gemini's network: marks from real queues, and only within a data centre.
fn gemini_sites() -> Sites {
    let plain = sites(false);
    let red = Some(Thresholds {
        low_bytes: 250_000,
        high_bytes: 750_000,
        probability_max_parts: 1_000_000_000,
    });
    Sites { near: LinkConfig { red, ..plain.near }, ..plain }
}

fn cell(flows: Vec<FlowSetup>) -> Cell {
    Cell {
        seed: 215,
        sites: sites(true),
        flows,
        congestion: Congestion::Product(Algorithm::Uno(Rules::RELEASED)),
        balance: Balance::Spray,
        code: None,
        chains: Vec::new(),
        changes: Vec::new(),
        sample_every: 0,
        sample_host: 240,
        time_max: 10_000_000_000,
    }
}

fn flow(from: u16, to: u16, bytes: u64) -> FlowSetup {
    FlowSetup { from, to, start: 0, bytes }
}

fn millis(outcome: &CellOutcome) -> Vec<f64> {
    outcome.flows.iter().map(|flow| flow.finished_at as f64 / 1e6).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Jain's index: 1 if all have the same, 1/n if one has everything.
fn jain(rates: &[f64]) -> f64 {
    let squares: f64 = rates.iter().map(|rate| rate * rate).sum();
    rates.iter().sum::<f64>().powi(2) / (rates.len() as f64 * squares)
}

fn incast(bytes: u64) -> Vec<FlowSetup> {
    let far = [3, 20, 40, 77].map(|from| flow(from, 240, bytes));
    let near = [130, 150, 170, 200].map(|from| flow(from, 240, bytes));
    far.into_iter().chain(near).collect()
}

/// Compares with what the released code gave.
fn assert_near(what: &str, found: f64, expected: f64, tolerance: f64) {
    let share = found / expected;
    assert!((share - 1.0).abs() <= tolerance, "{what}: {found} instead of {expected}");
}

#[test]
fn a_lone_message_takes_as_long_as_with_the_released_code() {
    let plain = millis(&run_cell(&cell(vec![flow(3, 240, 5_000_000)])).unwrap());
    assert_near("plain", plain[0], 2.1984, 0.001);
    let code = Some(Code { data: 8, parity: 2 });
    let coded = Cell { code, balance: Balance::Subflows, ..cell(vec![flow(3, 240, 5_000_000)]) };
    let coded = run_cell(&coded).unwrap();
    assert_near("coded", millis(&coded)[0], 2.3006, 0.001);
    assert_eq!(coded.flows[0].repeated_packets, 0);
}

#[test]
fn a_mixed_incast_takes_as_long_as_with_the_released_code() {
    let outcome = run_cell(&cell(incast(100_000_000))).unwrap();
    let all = millis(&outcome);
    assert_near("mean", mean(&all), 56.6, 0.02);
    assert_near("far", mean(&all[..4]), 44.4, 0.02);
    assert_near("near", mean(&all[4..]), 68.9, 0.02);
    let gemini = Cell {
        sites: gemini_sites(),
        congestion: Congestion::Product(Algorithm::Gemini(GeminiRules::RELEASED)),
        ..cell(incast(100_000_000))
    };
    let all = millis(&run_cell(&gemini).unwrap());
    assert_near("Gemini's mean", mean(&all), 62.9, 0.02);
    assert_near("Gemini, far", mean(&all[..4]), 68.5, 0.02);
    assert_near("Gemini, near", mean(&all[4..]), 57.4, 0.02);
}

/// 140 Mbit/s, 16 and 170 ms, 1 MB a port.
fn slow_sites() -> Sites {
    let rate = 140_000_000;
    let plain = LinkConfig::clean(rate, 1_250 * MICROSECOND, 1_000_000);
    let cap_bytes = rate / 8 * 160 / 1000;
    let thresholds = Thresholds {
        low_bytes: cap_bytes / 50,
        high_bytes: cap_bytes / 5 * 3,
        probability_max_parts: 1_000_000_000,
    };
    let phantom = Some(Phantom { drain_parts_per_billion: 952_380_952, cap_bytes, thresholds });
    let marked = LinkConfig { phantom, ..plain };
    Sites {
        near: marked,
        host: LinkConfig { buffer_bytes: 1 << 40, ..plain },
        border: marked,
        wan: LinkConfig { delay_nanos: 73_750 * MICROSECOND, ..marked },
        wan_links: 8,
    }
}

#[test]
fn a_pause_after_a_cut_is_not_a_collapse() {
    let far = (0..8).map(|index| flow(16 * index, 240, 5_600_000)).collect();
    let ours = Cell {
        sites: slow_sites(),
        congestion: Congestion::Product(Algorithm::Uno(Rules::DEFAULT)),
        balance: Balance::Subflows,
        ..cell(far)
    };
    // The line takes 2.6 s for all. They overflow its buffer at the start, cut their windows below
    // what is in flight, and are silent for a round trip.
    let all = millis(&run_cell(&ours).unwrap());
    assert!(all.iter().all(|end| *end > 0.0) && mean(&all) < 3500.0, "{all:?}");
}

/// Jain's index of the rates from 200 to 300 ms, near by far rate, the longest queue, and packets
/// that were dropped.
fn shares(cell: Cell) -> (f64, f64, u64, u64) {
    let cell = Cell { sample_every: 100_000_000, time_max: 300_100_000, ..cell };
    let outcome = run_cell(&cell).unwrap();
    let [_, from, to] = &outcome.samples[..] else { panic!("{} samples", outcome.samples.len()) };
    let rates = to.acked_bytes.iter().zip(&from.acked_bytes).map(|(to, from)| (to - from) as f64);
    let rates: Vec<f64> = rates.collect();
    let queue = from.queued_bytes.max(to.queued_bytes);
    (jain(&rates), mean(&rates[4..]) / mean(&rates[..4]), queue, outcome.overflowed_packets)
}

fn uno(rules: Rules) -> Cell {
    Cell { congestion: Congestion::Product(Algorithm::Uno(rules)), ..cell(incast(1_000_000_000)) }
}

#[test]
fn near_and_far_flows_share_a_port_fairly_with_a_short_queue() {
    for rules in [Rules::RELEASED, Rules::DEFAULT] {
        let found = [1, 2, 3].map(|seed| shares(Cell { seed, ..uno(rules) }));
        let ratios = found.map(|(_, near_by_far, ..)| near_by_far);
        assert!((0.7..1.33).contains(&mean(&ratios)), "{ratios:?} with {rules:?}");
        for (jain, _, queue, _) in found {
            assert!(jain >= 0.95, "{jain} with {rules:?}");
            assert!(queue < 50_000, "{queue} bytes with {rules:?}");
        }
    }
}

#[test]
fn a_small_start_loses_almost_nothing() {
    let (.., released) = shares(uno(Rules::RELEASED));
    let (.., ours) = shares(uno(Rules::DEFAULT));
    assert!(ours * 20 < released, "{ours} and {released} packets dropped");
}

#[test]
fn fairness_needs_the_shared_threshold_equal_epochs_and_the_phantom_queue() {
    let (jain, near_by_far, ..) = shares(uno(Rules::RELEASED.without("shared_threshold").unwrap()));
    assert!(jain < 0.65 && near_by_far > 5.0, "a threshold of its own: {jain}, {near_by_far}");
    let (jain, near_by_far, ..) = shares(uno(Rules::RELEASED.without("equal_epochs").unwrap()));
    assert!(jain < 0.75 && near_by_far < 0.3, "epochs of its own: {jain}, {near_by_far}");
    let red = gemini_sites().near.red;
    let marked = |link: LinkConfig| LinkConfig { red, phantom: None, ..link };
    let Sites { near, border, wan, .. } = sites(true);
    let sites =
        Sites { near: marked(near), border: marked(border), wan: marked(wan), ..sites(true) };
    let (jain, ..) = shares(Cell { sites, ..uno(Rules::RELEASED) });
    assert!(jain < 0.75, "real queues that mark: {jain}");
}

#[test]
fn each_of_the_other_rules_takes_a_little_from_near_flows() {
    let (_, all, ..) = shares(uno(Rules::RELEASED));
    for rule in ["gradient", "discount", "quick_adapt"] {
        let (jain, near_by_far, ..) = shares(uno(Rules::RELEASED.without(rule).unwrap()));
        assert!(near_by_far > all && jain > 0.95, "{jain}, {near_by_far} without {rule}; {all}");
    }
}

/// Mean over seeds of the messages' mean time, in ms, with one of the eight links dead.
fn with_a_dead_link(balance: Balance, code: Option<Code>) -> f64 {
    let senders = [15, 0, 87, 40, 61, 99, 110, 126];
    let flows: Vec<FlowSetup> =
        (0..).zip(senders).map(|(index, from)| flow(from, 130 + 13 * index, 5_000_000)).collect();
    let means = (1..=20).map(|seed| {
        let changes = vec![Change::outage(0, 0, Nanos::MAX)];
        let cell = Cell { seed, balance, code, changes, ..cell(flows.clone()) };
        mean(&millis(&run_cell(&cell).unwrap()))
    });
    mean(&means.collect::<Vec<_>>())
}

#[test]
fn subflows_and_a_code_mask_a_dead_link() {
    let code = Some(Code { data: 8, parity: 2 });
    let [both, subflows, spray] = [
        with_a_dead_link(Balance::Subflows, code),
        with_a_dead_link(Balance::Subflows, None),
        with_a_dead_link(Balance::Spray, None),
    ];
    assert!(both <= 0.75 * subflows, "{both} and {subflows} ms");
    assert!(both <= 0.36 * spray, "{both} and {spray} ms");
}

#[test]
fn a_run_is_determined_by_its_cell() {
    let small = || Cell { balance: Balance::Plb, ..cell(incast(2_000_000)) };
    assert_eq!(run_cell(&small()), run_cell(&small()));
    assert_ne!(run_cell(&small()), run_cell(&Cell { seed: 1, ..small() }));
}

#[test]
fn cells_that_cannot_be_run_are_refused() {
    let refused = |cell: &Cell| run_cell(cell).expect_err("refused");
    assert_eq!(refused(&cell(Vec::new())), CellError::Flows(0));
    for bad in [flow(3, 3, 1), flow(3, 256, 1), flow(256, 3, 1), flow(3, 4, 0)] {
        assert_eq!(refused(&cell(vec![flow(1, 2, 1), bad])), CellError::Flow(1), "{bad:?}");
    }
    let code = Some(Code { data: 0, parity: 2 });
    assert_eq!(refused(&Cell { code, ..cell(vec![flow(1, 2, 1)]) }), CellError::Code);
    for place in [
        Place::Wan { from_site: 0, link: 8 },
        Place::Wan { from_site: 2, link: 0 },
        Place::ToHost(256),
    ] {
        let changes = vec![Change { place, ..Change::outage(0, 0, 1) }];
        let absent = Cell { changes, ..cell(vec![flow(1, 2, 1)]) };
        assert_eq!(refused(&absent), CellError::Place(place));
    }
}

/// Sessions as the product configures them.
fn product() -> SessionsSetup {
    SessionsSetup {
        paths: 10,
        marks: Marks::PhantomQueues,
        control_first: true,
        code: None,
        tampering: None,
    }
}

/// Mean times of the same flows as lean models and as the product's sessions, in ms.
fn modelled_and_real(flows: &[FlowSetup], rules: Rules) -> (f64, f64) {
    // Sessions are established and have credit by then.
    let start = 10_000_000;
    let flows = flows.iter().map(|flow| FlowSetup { start, ..*flow }).collect();
    let congestion = Congestion::Product(Algorithm::Uno(rules));
    let cell = Cell { congestion, balance: Balance::Subflows, ..cell(flows) };
    let setup = product();
    let of = |outcome: &CellOutcome| mean(&millis(outcome)) - start as f64 / 1e6;
    (of(&run_cell(&cell).unwrap()), of(&run_sessions(&cell, setup).unwrap()))
}

#[test]
fn the_products_sessions_take_as_long_as_the_lean_model() {
    let far = |bytes| vec![flow(3, 240, bytes)];
    let eight = |site: u16| -> Vec<FlowSetup> {
        (0..8).map(|index| flow(site + 13 * index, 240, 100_000_000)).collect()
    };
    for (what, flows, rules) in [
        ("a message", far(5_000_000), Rules::RELEASED),
        ("a message, small start", far(5_000_000), Rules::DEFAULT),
        ("a long flow, small start", far(200_000_000), Rules::DEFAULT),
        ("eight far flows, small start", eight(0), Rules::DEFAULT),
        ("eight near flows, small start", eight(128), Rules::DEFAULT),
    ] {
        let (modelled, real) = modelled_and_real(&flows, rules);
        assert_near(what, real, modelled, 0.05);
    }
}

#[test]
fn sessions_survive_a_link_that_dies_under_them() {
    let flows = (0..4).map(|index| flow(20 * index, 140 + 20 * index, 5_000_000)).collect();
    let changes =
        vec![Change::outage(0, 11_000_000, Nanos::MAX), Change::outage(1, 12_000_000, 13_000_000)];
    let cell = Cell {
        changes,
        congestion: Congestion::Product(Algorithm::Uno(Rules::DEFAULT)),
        ..cell(flows)
    };
    for code in [None, Some((8, 2))] {
        let setup = SessionsSetup { code, ..product() };
        let outcome = run_sessions(&cell, setup).unwrap();
        let all = millis(&outcome);
        assert!(all.iter().all(|at| *at > 0.0 && *at < 200.0), "{all:?} with {code:?}");
    }
}

/// Bytes of each of four far and four near flows in a period, as shares of what is fair, and the
/// longest queue at its samples.
fn shares_of_sessions(
    tampering: Option<(Tampering, Victims, Nanos)>,
    period: std::ops::Range<usize>,
) -> (Vec<f64>, u64) {
    let every = 1_000_000;
    let cell = Cell {
        sample_every: every,
        time_max: (period.end as u64 + 1) * every,
        balance: Balance::Subflows,
        ..uno(Rules::DEFAULT)
    };
    // The first flow is a near one: what it takes, it takes at once.
    let mut flows = cell.flows.clone();
    flows.rotate_right(4);
    let cell = Cell { flows, ..cell };
    let outcome = run_sessions(&cell, SessionsSetup { tampering, ..product() }).unwrap();
    let [from, to] = [period.start, period.end].map(|at| &outcome.samples[at - 1].acked_bytes);
    let bytes: Vec<f64> = to.iter().zip(from).map(|(to, from)| (to - from) as f64).collect();
    let fair = LINE as f64 / 8.0 * period.len() as f64 * every as f64 / 1e9 / 8.0;
    let queued = outcome.samples[period].iter().map(|sample| sample.queued_bytes).max();
    (bytes.iter().map(|bytes| bytes / fair).collect(), queued.unwrap())
}

/// Mean time of far messages of sessions over 16 paths, one of whose eight links dies just after the
/// start, in ms.
fn sessions_with_a_dead_link(code: Option<(u8, u8)>) -> f64 {
    let start = 10_000_000;
    let senders = [15, 0, 87, 40, 61, 99, 110, 126];
    let setup =
        |(index, from): (u16, u16)| FlowSetup { start, ..flow(from, 130 + 13 * index, 5_000_000) };
    let flows: Vec<FlowSetup> = (0..).zip(senders).map(setup).collect();
    let means = (1..=10).map(|seed| {
        let changes = vec![Change::outage(0, start + start / 20, Nanos::MAX)];
        let cell = Cell { seed, changes, ..cell(flows.clone()) };
        let setup = SessionsSetup { code, paths: 16, ..product() };
        mean(&millis(&run_sessions(&cell, setup).unwrap())) - start as f64 / 1e6
    });
    mean(&means.collect::<Vec<_>>())
}

#[test]
fn a_code_masks_a_link_that_dies_under_sessions() {
    let [coded, plain] = [Some((8, 2)), None].map(sessions_with_a_dead_link);
    assert!(coded <= 0.75 * plain, "{coded} and {plain} ms");
}

#[test]
fn a_network_that_erases_marks_is_found_and_gets_no_queues() {
    for from in [0, 20_000_000] {
        let bleaching = Some((Tampering::Bleaches, Victims::All, from));
        // The canary of 8192 packets has found it by then. The port's buffer has 1 MB.
        let (shares, queued) = shares_of_sessions(bleaching, 45..60);
        assert!(queued < 300_000, "{queued} bytes queued, erased from {from} ns");
        let used = mean(&shares);
        assert!((0.5..1.0).contains(&used), "{shares:.2?}, erased from {from} ns");
    }
}

#[test]
fn a_peer_that_hides_marks_takes_no_more_than_its_share() {
    for from in [0, 20_000_000] {
        let hiding = Some((Tampering::Bleaches, Victims::First, from));
        let (shares, _) = shares_of_sessions(hiding, 40..60);
        assert!(shares[0] <= 1.2, "{shares:.2?}, hidden from {from} ns");
    }
}

#[test]
fn a_peer_that_reports_marks_for_everything_harms_only_itself() {
    let (shares, _) = shares_of_sessions(Some((Tampering::MarksAll, Victims::First, 0)), 40..60);
    assert!(shares[0] < 0.5 && mean(&shares[1..]) > 0.9, "{shares:.2?}");
}
