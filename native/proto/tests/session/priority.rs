//! Messages that leave before others: which packets are ahead of them, also among losses.

use sealane_proto::session::packet::{Header, Kind};
use sealane_proto::session::{
    CompletionStatus, Detection, PRIORITIES, PostError, Reliability, SendRequest, SessionConfig,
    StreamPart, StreamRequest,
};

use crate::pair::{DELAY, MILLISECOND, Pair, UNIT, config, end_with, receive, send};
use crate::statuses;

const LONG: u64 = 200 * UNIT;
const SHORT: u64 = 4 * UNIT;

/// The message and unit of a datagram, if it is one.
fn unit_of(datagram: &[u8]) -> Option<(u64, u32)> {
    match Header::decode(datagram) {
        Ok((Header { kind: Kind::Unit { message, unit, .. }, .. }, _)) => Some((message, unit)),
        _ => None,
    }
}

fn with_priority(offset: u64, length: u64, priority: u8) -> SendRequest {
    SendRequest { priority, ..send(offset, length) }
}

/// A long message that has begun to leave, and receives for three more.
fn amid_a_long_message() -> Pair {
    let config = |index| SessionConfig { slots: 8, ..config(index) };
    let mut pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index)))).establish();
    for index in 0..4 {
        pair.ends[1].post_receive(receive(index * LONG, LONG), pair.now).unwrap();
    }
    pair.run(20 * MILLISECOND);
    pair.ends[0].post_send(send(0, LONG), pair.now).unwrap();
    pair.run(2 * MILLISECOND);
    pair
}

/// The units that leave, in order, until nothing more may leave at this time.
fn leaving(pair: &mut Pair) -> Vec<(u64, u32)> {
    let mut units = Vec::new();
    let mut datagram = Vec::new();
    while pair.ends[0].next_transmit(&pair.memory[0], pair.now, &mut datagram) {
        units.extend(unit_of(&datagram));
        pair.under_way[1].push(std::mem::take(&mut datagram));
    }
    units
}

#[test]
fn a_short_message_is_the_next_to_leave_and_arrives_long_before_the_one_ahead() {
    let mut pair = amid_a_long_message();
    let urgent = pair.ends[0].post_send(with_priority(LONG, SHORT, 1), pair.now).unwrap();
    assert!(pair.ends[0].is_urgent());
    pair.now += MILLISECOND;
    let units = leaving(&mut pair);
    let expected: Vec<_> = (0..4).map(|unit| (urgent, unit)).collect();
    assert_eq!(units[..4], expected, "no packet is ahead of it");
    assert!(units[4..].iter().all(|(message, _)| *message == 0) && !pair.ends[0].is_urgent());
    pair.run(2_000 * MILLISECOND);
    let ended = statuses(&pair.events[1]);
    assert_eq!(ended, [(urgent, CompletionStatus::Ok), (0, CompletionStatus::Ok)]);
    let (from, to) = (LONG as usize, LONG as usize);
    let length = SHORT as usize;
    assert_eq!(pair.memory[0].bytes[from..from + length], pair.memory[1].bytes[to..to + length]);
}

#[test]
fn priorities_leave_from_the_highest_and_each_by_number() {
    let mut pair = amid_a_long_message();
    for priority in [2, 7, 2] {
        pair.ends[0].post_send(with_priority(0, UNIT, priority), pair.now).unwrap();
    }
    pair.now += MILLISECOND;
    let messages: Vec<u64> = leaving(&mut pair).iter().map(|(message, _)| *message).collect();
    assert_eq!(messages[..4], [2, 1, 3, 0]);
}

#[test]
fn lost_units_of_a_long_message_are_not_ahead_of_a_short_one_but_its_own_are() {
    let mut pair = amid_a_long_message();
    // Much of the long message is lost, and reported as lost.
    for _ in 0..2 {
        pair.now += MILLISECOND;
        leaving(&mut pair);
    }
    pair.now += DELAY;
    for (at, datagram) in std::mem::take(&mut pair.under_way[1]).into_iter().enumerate() {
        if at % 2 == 0 {
            pair.deliver(1, datagram);
        }
    }
    while pair.ends[0].statistics().reported_losses < 10 {
        assert!(pair.now < 10_000 * MILLISECOND);
        pair.now += MILLISECOND;
        pair.ends[1].handle_timeout(pair.now);
        let mut datagram = Vec::new();
        while pair.ends[1].next_transmit(&pair.memory[1], pair.now, &mut datagram) {
            pair.deliver(0, std::mem::take(&mut datagram));
        }
    }
    let urgent = pair.ends[0].post_send(with_priority(LONG, SHORT, 3), pair.now).unwrap();
    pair.now += 2 * MILLISECOND;
    let units = leaving(&mut pair);
    assert!(units[..4].iter().all(|(message, _)| *message == urgent), "{units:?}");
    // Of the urgent one, everything is lost as well, and more of the long one.
    pair.under_way = [Vec::new(), Vec::new()];
    let mut order = Vec::new();
    pair.run_filtered(200 * MILLISECOND, |index, datagram| {
        order.extend(unit_of(datagram).filter(|_| index == 1));
        true
    });
    let repeated = order.iter().position(|(message, _)| *message == urgent).unwrap();
    assert!(order[repeated..repeated + 4].iter().all(|(message, _)| *message == urgent));
    let lost_too = order.iter().position(|unit| units[4..].contains(unit)).unwrap();
    assert!(repeated < lost_too, "{order:?}");
    pair.run(2_000 * MILLISECOND);
    let mut ended = statuses(&pair.events[1]);
    ended.sort_by_key(|(message, _)| *message);
    assert_eq!(ended, [(0, CompletionStatus::Ok), (urgent, CompletionStatus::Ok)]);
}

#[test]
fn a_stream_has_a_priority_too() {
    let mut pair = amid_a_long_message();
    let request = StreamRequest {
        length: SHORT,
        reliability: Reliability::SelectiveRepeat,
        immediate: None,
        priority: 1,
        user_data: 0,
    };
    let stream = pair.ends[0].post_stream(request, pair.now).unwrap();
    pair.now += MILLISECOND;
    let before = leaving(&mut pair);
    assert!(before.iter().all(|(message, _)| *message == 0), "it has nothing to send");
    let part = StreamPart { offset: 0, remote_offset: 0, length: 2 * UNIT };
    pair.ends[0].continue_stream(stream, part, pair.now).unwrap();
    assert!(!pair.ends[0].is_urgent(), "nobody knows how long it will be");
    pair.now += MILLISECOND;
    assert_eq!(leaving(&mut pair)[..2], [(stream, 0), (stream, 1)]);
}

#[test]
fn a_long_message_of_high_priority_does_not_cost_a_wake_up_a_packet() {
    let mut pair = amid_a_long_message();
    pair.ends[0].post_send(with_priority(0, LONG, 7), pair.now).unwrap();
    assert!(!pair.ends[0].is_urgent());
    pair.now += MILLISECOND;
    assert_eq!(leaving(&mut pair)[0], (1, 0));
}

#[test]
fn a_cancelled_message_that_waits_behind_others_is_told_to_the_peer_at_once() {
    let mut pair = amid_a_long_message();
    let waiting = pair.ends[0].post_send(send(0, UNIT), pair.now).unwrap();
    pair.ends[0].cancel_send(waiting, pair.now).unwrap();
    pair.run(2 * DELAY + 2 * MILLISECOND);
    assert_eq!(statuses(&pair.events[1]), [(waiting, CompletionStatus::Cancelled)]);
}

#[test]
fn there_are_no_more_priorities() {
    let mut pair = amid_a_long_message();
    let refused = pair.ends[0].post_send(with_priority(0, UNIT, PRIORITIES), pair.now);
    assert_eq!(refused, Err(PostError::InvalidPriority(PRIORITIES)));
}

#[test]
fn a_unit_that_nobody_reports_is_repeated_ahead_of_new_units_of_lower_priority() {
    let config = |index| SessionConfig { slots: 8, detection: Detection::Timeout, ..config(index) };
    let mut pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index)))).establish();
    let many = 20 * LONG;
    for length in [UNIT, many] {
        pair.ends[1].post_receive(receive(0, length.min(1 << 15)), pair.now).unwrap();
    }
    pair.ends[1].post_receive(receive(0, 1 << 15), pair.now).unwrap();
    pair.run(20 * MILLISECOND);
    let urgent = pair.ends[0].post_send(with_priority(0, UNIT, 7), pair.now).unwrap();
    pair.pump();
    pair.under_way[1].clear();
    // New units of a lower priority wait at any time.
    let later = pair.ends[0].post_stream(
        StreamRequest {
            length: 1 << 15,
            reliability: Reliability::Unreliable,
            immediate: None,
            priority: 1,
            user_data: 0,
        },
        pair.now,
    );
    let later = later.unwrap();
    let lost_at = pair.now;
    let mut is_repeated = false;
    while !is_repeated && pair.now < lost_at + 500 * MILLISECOND {
        for _ in 0..8 {
            let part = StreamPart { offset: 0, remote_offset: 0, length: 100 * UNIT };
            let _ = pair.ends[0].continue_stream(later, part, pair.now);
        }
        pair.run_filtered(10 * MILLISECOND, |index, datagram| {
            is_repeated |=
                index == 1 && unit_of(datagram).is_some_and(|(number, _)| number == urgent);
            true
        });
    }
    assert!(is_repeated && pair.ends[0].statistics().timeouts > 0);
}
