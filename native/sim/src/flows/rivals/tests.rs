//! The rivals behave as their specifications say.

use sealane_proto::congestion::{Domain, Report, Start, whole};

use super::bbr::State;
use super::cubic::{KEPT, SCALE};
use super::*;

const MILLISECOND: Nanos = 1_000_000;

fn setup(base_rtt: Nanos) -> Setup {
    let domain = Domain {
        line_bytes_per_second: 1_250_000_000,
        near_rtt: MILLISECOND,
        far_rtt: 20 * MILLISECOND,
        packet_bytes: 4096,
    };
    Setup {
        domain,
        rate_bytes_per_second: u64::MAX,
        base_rtt,
        timeout: 2 * base_rtt,
        start: Start::Unknown,
    }
}

/// Drives a flow over a path of this rate without a queue for some round trips.
fn drive(flow: &mut dyn Controller, setup: &Setup, rate: f64, round_trips: u64, start: Nanos) {
    const STEPS: u64 = 32;
    let step = setup.base_rtt / STEPS;
    let mut sent = vec![0.0; STEPS as usize];
    for index in 0..round_trips * STEPS {
        let now = start + index * step;
        let allowed = flow.allowance();
        let pace = (allowed.rate_bytes_per_second as f64).min(rate);
        let window = allowed.window_bytes as f64 / STEPS as f64;
        let leaving = (pace * step as f64 / NANOS_PER_SECOND as f64).min(window);
        let slot = (index % STEPS) as usize;
        let arrived = std::mem::replace(&mut sent[slot], leaving);
        flow.sent(whole(leaving), now);
        let report = Report {
            bytes: whole(arrived),
            sent_at: now.saturating_sub(setup.base_rtt),
            rtt: setup.base_rtt,
            rtt_least: setup.base_rtt,
            is_limited: true,
            ..Report::default()
        };
        flow.reported(&report, now);
    }
}

#[test]
fn bbr_finds_the_rate_of_the_path() {
    let setup = setup(20 * MILLISECOND);
    let rate = 200e6;
    let mut flow = Bbr::new(&setup);
    drive(&mut flow, &setup, rate, 40, 0);
    let found = flow.rate() / rate;
    assert!((0.9..1.1).contains(&found), "{found} of the path's rate");
    assert!(matches!(flow.state, State::Cruise { .. }), "{:?}", flow.state);
}

#[test]
fn mprdma_yields_part_of_a_packet_for_each_mark() {
    let setup = setup(MILLISECOND);
    let mut flow = Mprdma::new(&setup, 50);
    let before = flow.allowance().window_bytes;
    let marked = Report { bytes: 40_960, marked_bytes: 40_960, ..Report::default() };
    flow.reported(&marked, 0);
    assert_eq!(before - flow.allowance().window_bytes, 20_480);
}

#[test]
fn cubic_doubles_yields_three_tenths_to_a_loss_and_returns_to_where_it_was() {
    let setup = setup(20 * MILLISECOND);
    let mut flow = Cubic::new(&setup);
    drive(&mut flow, &setup, 1e12, 6, 0);
    let before = flow.window;
    assert!(before > 100.0, "{before} packets after six round trips");
    let at = 120 * MILLISECOND;
    let lost = Report { lost_packets: 1, ..Report::default() };
    flow.reported(&lost, at);
    assert!((flow.window / before - KEPT).abs() < 1e-9);
    flow.reported(&lost, at + 1);
    assert!((flow.window / before - KEPT).abs() < 1e-9, "one cut in a round trip");
    let plateau = (before * (1.0 - KEPT) / SCALE).cbrt();
    let round_trips = whole(plateau * 50.0) + 1;
    drive(&mut flow, &setup, 1e12, round_trips, at);
    let back = flow.window / before;
    // A window as small as this one is soon overtaken by that of RFC 5681.
    assert!((0.9..1.6).contains(&back), "{back} of the window before the loss");
}
