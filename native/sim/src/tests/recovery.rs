//! Detection and recovery of losses: within a round trip, and without repeating anything that was
//! not lost.

use sealane_proto::link::{GilbertElliott, LinkConfig, Loss, PARTS};
use sealane_proto::session::{Detection, Reliability};

use super::{CODED, MILLISECOND, Outcome, PERCENT, Scenario, check};
use crate::Pauses;

const RTT: u64 = 25 * MILLISECOND;
/// Number of outages in a test, each 3.7 % longer than the one before: 10 ms to 59 s.
const OUTAGES: u64 = 240;
/// Time to send 600 kB at 200 Mbit/s, including headers and parity.
const INJECTION: u64 = 36 * MILLISECOND;

fn sized(seed: u64, bytes: u64, count: u32) -> Scenario {
    Scenario {
        message_bytes_min: bytes,
        message_bytes_max: bytes,
        count,
        depth: 1,
        ..Scenario::small(seed)
    }
}

fn longest(outcome: &Outcome) -> u64 {
    outcome.completion_nanos.iter().flatten().copied().max().expect("messages")
}

fn mean(outcome: &Outcome) -> u64 {
    outcome.completion_nanos.iter().flatten().sum::<u64>() / outcome.completion_nanos.len() as u64
}

/// Time from an instant to the acknowledgement of the next message, with messages sent one after
/// another.
fn acknowledged_after(outcome: &Outcome, units: u64, instant: u64) -> u64 {
    let mut messages = outcome.completion_nanos.iter().flatten();
    // The first message starts when its credit arrives, or if it is longer when the path is
    // validated, too.
    let mut ended = if units <= 10 { RTT / 2 } else { RTT };
    while ended <= instant {
        ended += messages.next().expect("a message after the outage");
    }
    ended - instant
}

#[test]
fn losses_are_found_by_report_counted_alike_and_nothing_is_repeated_in_vain() {
    let mut scenario = sized(3, 2_000_000, 6);
    scenario.forward.loss = Loss::Independent(PERCENT);
    let outcome = check(&scenario);
    let (sender, receiver) = (&outcome.sender, &outcome.receiver);
    assert!(outcome.forward.lost_packets > 50, "{:?}", outcome.forward);
    assert_eq!((sender.timeouts, sender.spurious_retransmissions), (0, 0));
    assert_eq!(sender.retransmitted_packets, sender.reported_losses);
    assert_eq!(receiver.duplicates + receiver.late, 0);
    assert_eq!(sender.lost_packets, receiver.missing_packets);
    assert_eq!(sender.lost_runs, receiver.missing_runs);
    // All except possibly the session's last packet, which no packet followed.
    assert!(outcome.forward.lost_packets - receiver.missing_packets <= 1);
    assert!(receiver.missing_runs <= receiver.missing_packets);
}

#[test]
fn a_lost_unit_costs_one_round_trip_wherever_it_is() {
    // At most one unit of 20 is lost per message, in any position including the last.
    let mut scenario = sized(8, 20 * 1408, 400);
    scenario.forward.loss = Loss::Independent(PERCENT / 2);
    let reported = check(&scenario);
    let lossless = longest(&check(&sized(8, 20 * 1408, 1)));
    let repeated =
        reported.completion_nanos.iter().flatten().filter(|at| **at > lossless + RTT / 2);
    assert!(repeated.count() > 20, "losses are there");
    let slow = reported.completion_nanos.iter().flatten();
    let slow = slow.filter(|at| **at > lossless + RTT + RTT / 16).count();
    // A probe or a second transmission may be lost, too.
    assert!(slow <= 6, "{slow} of {}", reported.sender.retransmitted_packets);
    let timed = check(&Scenario { detection: Detection::Timeout, ..scenario });
    assert_eq!((timed.sender.reported_losses, timed.sender.probes_sent), (0, 0));
    assert!(mean(&timed) > mean(&reported) + RTT / 10, "{} {}", mean(&timed), mean(&reported));
}

#[test]
fn bursts_of_losses_on_both_ways_are_survived_and_no_time_out_is_needed_for_most() {
    let mut scenario = sized(5, 500_000, 40);
    // Bursts of ten.
    let bursts = GilbertElliott { p: PERCENT / 10, r: 10 * PERCENT, loss_bad: PARTS, loss_good: 0 };
    let loss = Loss::GilbertElliott(bursts);
    scenario.forward.loss = loss;
    scenario.backward.loss = loss;
    let outcome = check(&scenario);
    assert!(outcome.receiver.missing_packets > 2 * outcome.receiver.missing_runs);
    assert!(outcome.sender.timeouts * 20 <= outcome.sender.reported_losses);
}

#[test]
fn reordering_within_the_known_skew_costs_nothing() {
    let mut scenario = sized(4, 1_000_000, 4);
    scenario.forward.reorder_parts_per_billion = 30 * PERCENT;
    scenario.forward.reorder_nanos_max = 3 * MILLISECOND;
    scenario.reordering = 3 * MILLISECOND;
    let outcome = check(&scenario);
    assert!(outcome.forward.reordered_packets > 100, "{:?}", outcome.forward);
    assert_eq!(outcome.sender.retransmitted_packets, 0);
    assert_eq!(outcome.receiver.missing_packets + outcome.receiver.reordered_packets, 0);
    // Unknown skew is learnt.
    scenario.reordering = 0;
    let learnt = check(&scenario);
    assert!(learnt.receiver.reordered_packets > 0);
    let repeated = learnt.sender.retransmitted_packets;
    assert_eq!(learnt.sender.spurious_retransmissions, repeated);
    assert!((1..100).contains(&repeated), "{repeated} of {}", learnt.forward.reordered_packets);
}

#[test]
fn acknowledgements_leave_each_sixteenth_of_a_round_trip_however_many_packets_arrive() {
    let outcome = check(&sized(9, 5_000_000, 1));
    let round_trips = longest(&outcome) / RTT + 1;
    let sent = outcome.receiver.control_packets_sent;
    assert!(sent <= 16 * round_trips + 8, "{sent} in {round_trips} round trips");
    assert!(outcome.receiver.packets_received > 3000);
}

#[test]
fn lost_acknowledgements_delay_little_and_the_last_one_too() {
    let mut scenario = sized(9, 10_000, 300);
    scenario.backward.loss = Loss::Independent(10 * PERCENT);
    let outcome = check(&scenario);
    assert_eq!(outcome.sender.timeouts, 0);
    // In one of a hundred messages the second acknowledgement is lost, too; then units follow the
    // probes until one of them is answered, at most four.
    assert!(outcome.sender.retransmitted_packets <= 2 * 4 * 3);
    assert!(longest(&outcome) < 3 * RTT, "{}", longest(&outcome));
    assert!(mean(&outcome) < RTT + RTT / 8, "{}", mean(&outcome));
}

#[test]
fn a_path_that_comes_back_is_used_within_two_round_trips() {
    for reliability in [Reliability::SelectiveRepeat, CODED] {
        for outage in [RTT, 3 * RTT, 5 * RTT, 40 * RTT, 800 * RTT] {
            for phase in 0..4 {
                let start = 40 * MILLISECOND + phase * RTT / 4;
                let blackout = Some((start, start + outage));
                let scenario = Scenario { reliability, blackout, ..sized(6, 600_000, 1) };
                let outcome = check(&scenario);
                // First the path is validated and credit arrives; then the message starts.
                let ended = RTT + longest(&outcome);
                let healed = ended - start - outage;
                // A probe, its answer, what was lost, and its acknowledgement: two round trips,
                // plus the time until the next probe and until its gap counts as lost.
                let allowed = 2 * RTT + RTT / 16 + RTT / 32 + INJECTION;
                assert!(healed <= allowed, "{reliability:?} {outage} {phase}: {healed}");
                // Twenty seconds of silence at the full rate would be 500 MB.
                assert!(outcome.sender.wire_bytes_sent < 10_000_000);
                let stalled = outcome.sender.stalled_nanos;
                let expected = outage.saturating_sub(4 * 3 * RTT);
                assert!(stalled <= outage && stalled + 3 * RTT >= expected, "{stalled} {outage}");
            }
        }
    }
}

/// Outages of 10 ms to just below the idle timeout, at any phase of a transfer. A message has
/// recovered when all of it is at its receiver, half a round trip before the acknowledgement.
#[test]
fn what_is_under_way_when_a_path_goes_heals_within_two_round_trips_of_its_return() {
    let injection_of = |units: u64| units * 1491 * 8 * 5;
    let reported = 9 * RTT / 4 + RTT / 32;
    let cases = [
        // With messages of one unit, the first unit to get through usually completes the message.
        (1, 2 * RTT + RTT / 3, 5 * RTT / 4),
        (4, reported, 3 * RTT / 2),
        (100, reported, 2 * RTT),
    ];
    for (units, acknowledged_max, mean_max) in cases {
        let (mut sum, mut outage) = (0, 10 * MILLISECOND);
        for seed in 0..OUTAGES {
            let start = 200 * MILLISECOND + (seed * 7_919_777) % (2 * RTT);
            let blackout = Some((start, start + outage));
            let count = 14 + (outage / RTT).min(20) as u32;
            let outcome =
                check(&Scenario { blackout, depth: 1, ..sized(seed, units * 1408, count) });
            let healed = acknowledged_after(&outcome, units, start + outage);
            assert!(healed <= acknowledged_max + injection_of(units), "{outage} {start}: {healed}");
            assert!(healed.saturating_sub(RTT / 2) <= 2 * RTT, "{outage} {start}: {healed}");
            sum += healed;
            outage += outage * 37 / 1000;
        }
        assert!(sum / OUTAGES < mean_max, "{units}: {}", sum / OUTAGES);
    }
}

/// Hosts that pause for less and for more than a time-out: a late packet is not lost.
#[test]
fn a_host_that_is_late_looks_like_no_loss() {
    for length in [5, 50, 150] {
        for reliability in [Reliability::SelectiveRepeat, CODED] {
            // Rare enough for the round-trip time to be measured in between.
            let pauses = Some(Pauses { every: 900 * MILLISECOND, length: length * MILLISECOND });
            let mut scenario = Scenario { reliability, pauses, ..sized(length, 60_000, 60) };
            let outcome = check(&scenario);
            let sender = &outcome.sender;
            assert_eq!(sender.timeouts, 0, "{length} ms, {reliability:?}");
            // Units that accompany probes during a silence: four per round trip, never everything
            // in flight. Each end may pause during the same message.
            let quiet = 2 * (length * MILLISECOND).saturating_sub(RTT / 4);
            let carried = outcome.elapsed_nanos / (900 * MILLISECOND) * quiet.div_ceil(RTT / 4);
            let repeated = sender.retransmitted_packets;
            assert!(repeated <= carried, "{length} ms, {reliability:?}: {repeated} of {carried}");
            // Real losses are still detected.
            scenario.forward.loss = Loss::Independent(PERCENT);
            scenario.backward.loss = Loss::Independent(PERCENT);
            let sender = check(&scenario).sender;
            let spurious = sender.spurious_retransmissions;
            assert!(spurious <= carried, "{length} ms: {spurious} of {carried}");
        }
    }
}

#[test]
fn an_outage_is_no_measure_of_the_path() {
    let scenario = Scenario {
        blackout: Some((60 * MILLISECOND, 9_000 * MILLISECOND)),
        ..sized(6, 600_000, 2)
    };
    let outcome = check(&scenario);
    assert!(outcome.forward.down_packets > 400, "{:?}", outcome.forward);
    assert_eq!(outcome.receiver.missing_packets, 0);
}

#[test]
fn a_block_beyond_its_parity_is_mended_one_round_trip_later() {
    let path = LinkConfig { loss: Loss::Independent(30 * PERCENT), ..Scenario::small(0).forward };
    let reliability = Reliability::ErasureCoded { k: 4, m: 2, depth: 1 };
    let scenario = Scenario { reliability, forward: path, ..sized(11, 4 * 1408, 200) };
    let reported = check(&scenario);
    assert!(reported.sender.fallbacks > 20, "{}", reported.sender.fallbacks);
    let timed = check(&Scenario { detection: Detection::Timeout, ..scenario });
    let extra = |outcome: &Outcome| mean(outcome) - RTT;
    assert!(extra(&reported) * 2 < extra(&timed), "{} {}", mean(&reported), mean(&timed));
}
