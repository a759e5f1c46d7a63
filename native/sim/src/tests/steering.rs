//! Sessions with a congestion controller on one path.

use sealane_proto::congestion::{Algorithm, Domain, GeminiRules, Rules};
use sealane_proto::link::{LinkConfig, PARTS, Phantom, Thresholds};
use sealane_proto::session::{Marks, PayloadMode, Steering, Version};

use super::{Outcome, Scenario, check};

const LINK: u64 = 100_000_000;
const MILLISECOND: u64 = 1_000_000;
/// Ten times what the link carries.
const LINE_BYTES_PER_SECOND: u64 = 125_000_000;

fn steering(algorithm: Algorithm) -> Steering {
    let domain = Domain {
        line_bytes_per_second: LINE_BYTES_PER_SECOND,
        near_rtt: MILLISECOND,
        far_rtt: 25 * MILLISECOND,
        packet_bytes: 0,
    };
    Steering {
        congestion: Some((algorithm, domain)),
        marks: Marks::PhantomQueues,
        ..Steering::default()
    }
}

/// A link that marks by a phantom queue of a tenth of a second.
fn marked(delay: u64) -> LinkConfig {
    let cap_bytes = LINK / 8 / 10;
    let thresholds = Thresholds {
        low_bytes: cap_bytes / 50,
        high_bytes: cap_bytes / 5 * 3,
        probability_max_parts: PARTS,
    };
    let phantom = Phantom { drain_parts_per_billion: 952_380_952, cap_bytes, thresholds };
    LinkConfig { phantom: Some(phantom), ..LinkConfig::clean(LINK, delay, 250_000) }
}

fn scenario(forward: LinkConfig, steering: Steering) -> Scenario {
    let length = 2_000_000;
    Scenario {
        count: 20,
        message_bytes_min: length,
        message_bytes_max: length,
        rate_bytes_per_second: LINE_BYTES_PER_SECOND,
        forward,
        backward: LinkConfig { phantom: None, ..forward },
        steering,
        ..Scenario::small(5)
    }
}

fn share_of_link(outcome: &Outcome) -> f64 {
    40e6 * 8.0 / (outcome.elapsed_nanos as f64 / 1e9) / LINK as f64
}

#[test]
fn a_session_with_uno_fills_a_link_far_slower_than_its_line_without_a_queue() {
    for delay in [MILLISECOND / 2, 12 * MILLISECOND] {
        let outcome = check(&scenario(marked(delay), steering(Algorithm::Uno(Rules::DEFAULT))));
        let share = share_of_link(&outcome);
        assert!(share > 0.75, "{share} of the link at {delay} ns");
        let lost = outcome.forward.overflowed_packets;
        assert!(lost * 50 < outcome.sender.packets_sent, "{lost} packets lost at {delay} ns");
        assert_eq!(outcome.sender.breaker_trips, 0);
        assert!(outcome.sender.window_bytes > 0);
    }
}

#[test]
fn without_a_controller_the_same_session_loses_most_of_what_it_sends() {
    let outcome = check(&scenario(marked(12 * MILLISECOND), Steering::default()));
    let lost = outcome.forward.overflowed_packets;
    assert!(lost * 3 > outcome.sender.packets_sent, "{lost} of {}", outcome.sender.packets_sent);
    assert_eq!(outcome.sender.window_bytes, 0);
}

#[test]
fn every_controller_delivers_everything_with_losses_and_without_marks() {
    for algorithm in [
        Algorithm::Uno(Rules::DEFAULT),
        Algorithm::Uno(Rules::REAL_QUEUES),
        Algorithm::Gemini(GeminiRules::DEFAULT),
        Algorithm::Gemini(GeminiRules::NO_MARKS),
        Algorithm::Dctcp,
    ] {
        let clean = LinkConfig::clean(LINK, 12 * MILLISECOND, 250_000);
        for forward in [
            LinkConfig { loss: sealane_proto::link::Loss::Independent(PARTS / 100), ..clean },
            LinkConfig {
                jitter_nanos: MILLISECOND,
                reorder_parts_per_billion: PARTS / 50,
                reorder_nanos_max: 3 * MILLISECOND,
                duplicate_parts_per_billion: PARTS / 50,
                ..marked(12 * MILLISECOND)
            },
        ] {
            let outcome = check(&Scenario { count: 4, ..scenario(forward, steering(algorithm)) });
            assert_eq!(outcome.receiver.receives_completed, 4, "{algorithm:?}");
        }
    }
}

#[test]
fn losses_on_the_wire_slow_no_session_with_uno() {
    let mut lossy = scenario(marked(12 * MILLISECOND), steering(Algorithm::Uno(Rules::DEFAULT)));
    lossy.forward.loss = sealane_proto::link::Loss::Independent(PARTS / 50);
    let outcome = check(&lossy);
    let share = share_of_link(&outcome);
    assert!(share > 0.7, "{share} of the link with 2 % of loss");
}

#[test]
fn an_outage_costs_a_session_with_uno_little_more_than_its_time() {
    let time = |blackout| {
        let uno = steering(Algorithm::Uno(Rules::DEFAULT));
        let scenario = scenario(marked(12 * MILLISECOND), uno);
        check(&Scenario { blackout, count: 40, ..scenario }).elapsed_nanos
    };
    let start = 2_000 * MILLISECOND;
    let outage = 1_500 * MILLISECOND;
    let slower = time(Some((start, start + outage))) - time(None);
    assert!(slower < outage + 1_000 * MILLISECOND, "{slower} ns for an outage of {outage}");
}

#[test]
fn lost_acknowledgements_stop_no_session() {
    let forward = marked(12 * MILLISECOND);
    let mut lossy = scenario(forward, steering(Algorithm::Uno(Rules::DEFAULT)));
    lossy.backward.loss = sealane_proto::link::Loss::Independent(PARTS / 10);
    let all = share_of_link(&check(&scenario(forward, lossy.steering)));
    let share = share_of_link(&check(&lossy));
    assert!(share > 0.7 && share > 0.95 * all, "{share} of the link instead of {all}");
}

#[test]
fn a_window_of_one_packet_recovers_when_its_packet_is_lost() {
    // Half of everything is lost, so Quick Adapt takes the window to its least.
    let mut lossy = scenario(marked(MILLISECOND), steering(Algorithm::Uno(Rules::DEFAULT)));
    lossy.forward.loss = sealane_proto::link::Loss::Independent(PARTS / 2);
    lossy.backward.loss = lossy.forward.loss;
    lossy.count = 1;
    lossy.message_bytes_min = 100_000;
    lossy.message_bytes_max = 100_000;
    // The end of the session may be lost as well: the peer then waits until it is idle.
    let taken = check(&lossy).completion_nanos[0].unwrap();
    assert!(taken < 2_000 * MILLISECOND, "{taken} ns");
}

#[test]
fn losses_under_a_phantom_queue_do_not_trip_the_breaker() {
    let lossy = |marks| {
        let mut scenario = scenario(marked(12 * MILLISECOND), Steering::default());
        scenario.rate_bytes_per_second = LINK / 8 / 100 * 98;
        scenario.steering.marks = marks;
        scenario.forward.loss = sealane_proto::link::Loss::Independent(PARTS / 100 * 7);
        scenario.count = 60;
        check(&scenario).sender.breaker_trips
    };
    assert_eq!(lossy(Marks::PhantomQueues), 0);
    assert!(lossy(Marks::Queues) > 0, "where marks mean a queue, the same losses are congestion");
}

/// Share that a session with `uno` gets of a line of 100 Gbit/s within a data centre of 14 µs, and
/// how often a receiver without a controller acknowledges it.
fn share_within(version: Version, near_rtt_at_receiver: Option<u64>) -> (f64, u64) {
    let (line, near_rtt, far_rtt) = (12_500_000_000, 14_000, 1_792_000);
    let domain = Domain { line_bytes_per_second: line, near_rtt, far_rtt, packet_bytes: 0 };
    let clean = LinkConfig::clean(line * 8, near_rtt / 2, 1 << 20);
    let cap_bytes = line * far_rtt / 1_000_000_000;
    let thresholds = Thresholds {
        low_bytes: cap_bytes / 50,
        high_bytes: cap_bytes / 5 * 3,
        probability_max_parts: PARTS,
    };
    let phantom = Phantom { drain_parts_per_billion: 952_380_952, cap_bytes, thresholds };
    let length = 100_000_000;
    let outcome = check(&Scenario {
        version,
        steering: Steering {
            congestion: Some((Algorithm::Uno(Rules::DEFAULT), domain)),
            marks: Marks::PhantomQueues,
            ..Steering::default()
        },
        receiver_steering: Some(Steering { near_rtt: near_rtt_at_receiver, ..Steering::default() }),
        rate_bytes_per_second: line,
        forward: LinkConfig { phantom: Some(phantom), ..clean },
        backward: clean,
        payload: PayloadMode::LengthsOnly,
        count: 1,
        message_bytes_min: length,
        message_bytes_max: length,
        ..Scenario::small(5)
    });
    let seconds = outcome.completion_nanos[0].unwrap() as f64 / 1e9;
    (length as f64 / seconds / line as f64, outcome.receiver.control_packets_sent)
}

#[test]
fn a_controller_gets_the_reports_that_it_needs_from_a_receiver_without_one() {
    let near = Some(14_000);
    let [before, refused, agreed] = [(Version::V5, near), (Version::V6, None), (Version::V6, near)]
        .map(|(version, near_rtt)| share_within(version, near_rtt));
    let found = format!("{before:?} in version 5; {refused:?} and {agreed:?}");
    // The sender takes its receiver for one that acknowledges as it would.
    assert!(before.0 < 0.25, "{found}");
    // It knows that the reports are late, …
    assert!(refused.0 > 0.85 && refused.1 < 150, "{found}");
    // … or gets them in time.
    assert!(agreed.0 > 0.85 && agreed.1 > 2000, "{found}");
}
