//! The pause between data and parity that a plan may ask for.

use sealane_proto::link::Nanos;
use sealane_proto::session::{
    CompletionStatus, PARITY_GAP_MAX, Plan, PlanError, PlanRow, Reliability, SendRequest,
};

use super::pair::{DELAY, MILLISECOND, Pair, UNIT, receive, send};
use super::{statuses, unit_of};

const CODED: Reliability = Reliability::ErasureCoded { k: 4, m: 4, depth: 1 };
const LENGTH: u64 = 4 * UNIT;

/// A pair whose first end pauses before parity, and has posted one message.
fn pausing(parity_gap: Nanos) -> Pair {
    let mut pair = Pair::established(4);
    let row = PlanRow { length_max: LENGTH, reliability: CODED, parity_gap };
    pair.ends[0].install_plan(Plan::new(&[row], UNIT as u16).unwrap());
    for offset in [0, 4096] {
        pair.ends[1].post_receive(receive(offset, LENGTH), pair.now).unwrap();
    }
    pair.run(3 * DELAY);
    let request = SendRequest { reliability: Reliability::Auto, ..send(0, LENGTH) };
    pair.ends[0].post_send(request, pair.now).unwrap();
    pair
}

/// Lets both ends send for a time, and loses all of it.
fn lose(pair: &mut Pair, time: Nanos) {
    let until = pair.now + time;
    while pair.now < until {
        pair.pump();
        pair.now += MILLISECOND / 10;
    }
    pair.under_way = [Vec::new(), Vec::new()];
}

/// Units of parity sent, and units sent again, when the first two milliseconds are lost.
fn through_a_burst(parity_gap: Nanos) -> (u64, u64) {
    let mut pair = pausing(parity_gap);
    lose(&mut pair, 2 * MILLISECOND);
    pair.run(100 * MILLISECOND);
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Ok)]);
    assert_eq!(pair.memory[1].bytes[..1024], pair.memory[0].bytes[..1024]);
    let statistics = pair.ends[0].statistics();
    (statistics.parity_packets_sent, statistics.retransmitted_packets)
}

#[test]
fn parity_leaves_after_the_pause_and_outlives_a_burst() {
    let (_, repeated) = through_a_burst(0);
    assert!(repeated > 0, "a burst hits data and parity");
    assert_eq!(through_a_burst(8 * MILLISECOND), (4, 0));
}

#[test]
fn parity_that_is_not_needed_after_the_pause_does_not_leave() {
    let mut pair = pausing(3 * DELAY);
    let posted = pair.now;
    pair.run_filtered(200 * MILLISECOND, |_, datagram| {
        assert!(unit_of(datagram).is_none_or(|unit| unit < 4));
        true
    });
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)]);
    assert_eq!(pair.ends[0].statistics().parity_packets_sent, 0);
    assert!(pair.ends[0].next_timeout().is_none_or(|at| at > posted + 200 * MILLISECOND));
}

#[test]
fn other_messages_leave_during_the_pause() {
    let mut pair = pausing(4 * MILLISECOND);
    pair.ends[0].post_send(send(4096, UNIT), pair.now).unwrap();
    let until = pair.now + 3 * MILLISECOND;
    while pair.now < until {
        pair.pump();
        pair.now += MILLISECOND / 10;
    }
    let statistics = pair.ends[0].statistics();
    assert_eq!((statistics.data_packets_sent, statistics.parity_packets_sent), (5, 0));
    pair.run(100 * MILLISECOND);
    assert_eq!(statuses(&pair.events[0]).len(), 2);
}

#[test]
fn a_message_that_ends_in_its_pause_leaves_no_timer() {
    let mut pair = pausing(500 * MILLISECOND);
    pair.run_filtered(2 * MILLISECOND, |_, _| false);
    pair.ends[0].cancel_send(0, pair.now).unwrap();
    pair.run(2_000 * MILLISECOND);
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Cancelled)]);
    assert_eq!(pair.ends[0].statistics().parity_packets_sent, 0);
}

#[test]
fn a_pause_is_no_longer_than_a_second() {
    let row = |parity_gap| PlanRow { length_max: LENGTH, reliability: CODED, parity_gap };
    assert!(Plan::new(&[row(PARITY_GAP_MAX)], UNIT as u16).is_ok());
    let refused = Plan::new(&[row(PARITY_GAP_MAX + 1)], UNIT as u16);
    assert_eq!(refused, Err(PlanError::Gap(0)));
}
