//! Marks of a link's queues reach the sender, each counted once.

use sealane_proto::link::{PARTS, Phantom, Thresholds};

use super::{Outcome, Scenario, check};

/// Marks everything behind a queue of this length.
const THRESHOLDS: Thresholds =
    Thresholds { low_bytes: 4000, high_bytes: 8000, probability_max_parts: PARTS };

fn marked(change: impl FnOnce(&mut Scenario)) -> Outcome {
    let mut scenario = Scenario { count: 40, ..Scenario::small(21) };
    change(&mut scenario);
    let outcome = check(&scenario);
    assert_eq!((outcome.sender.is_ecn_capable, outcome.receiver.is_ecn_capable), (1, 1));
    // A mark after the last acknowledgement is not reported any more.
    assert!(outcome.sender.ce_echoed > 0 && outcome.receiver.ce_received > 0);
    assert!(outcome.sender.ce_echoed <= outcome.receiver.ce_received);
    assert!(outcome.receiver.ce_received <= outcome.forward.marked_packets);
    assert!(outcome.forward.marked_packets - outcome.receiver.ce_received <= 1);
    outcome
}

#[test]
fn marks_of_early_detection_are_echoed() {
    let outcome = marked(|scenario| scenario.forward.red = Some(THRESHOLDS));
    assert_eq!(outcome.backward.marked_packets, 0);
    assert_eq!(outcome.receiver.ce_echoed, 0);
}

#[test]
fn a_phantom_queue_marks_before_there_is_a_real_one() {
    // It drains at half the link's rate, so it fills although the link is never full.
    let phantom =
        Phantom { drain_parts_per_billion: PARTS / 2, cap_bytes: 1 << 20, thresholds: THRESHOLDS };
    let outcome = marked(|scenario| scenario.forward.phantom = Some(phantom));
    assert_eq!(outcome.forward.overflowed_packets, 0);
    assert!(outcome.sender.ce_echoed > 20, "{:?}", outcome.sender);
}

#[test]
fn a_link_without_queues_marks_nothing() {
    let outcome = check(&Scenario::small(22));
    assert_eq!((outcome.sender.ce_echoed, outcome.sender.is_ecn_capable), (0, 1));
}
