//! Streams, unreliable sends, cancellation, and receives completed early.

use proptest::prelude::*;
use sealane_proto::session::{
    CompletionStatus, Event, MESSAGE_BYTES_MAX, PostError, Reliability, STREAM_PARTS_MAX,
    SendRequest, StreamPart, StreamRequest,
};

use crate::pair::{MILLISECOND, Pair, UNIT, receive, send};
use crate::{statuses, unit_of};

const SECOND: u64 = 1000 * MILLISECOND;
/// Contents of a buffer before anything lands in it.
const CANARY: u8 = 0xa5;

fn stream(units: u64) -> StreamRequest {
    let reliability = Reliability::SelectiveRepeat;
    StreamRequest {
        length: units * UNIT,
        reliability,
        immediate: Some(77),
        priority: 0,
        user_data: 5,
    }
}

/// Units `unit..unit + count` from the same positions in memory.
fn part(unit: u64, count: u64) -> StreamPart {
    StreamPart { offset: unit * UNIT, remote_offset: unit * UNIT, length: count * UNIT }
}

fn unreliable(offset: u64, length: u64) -> SendRequest {
    SendRequest { reliability: Reliability::Unreliable, ..send(offset, length) }
}

/// By unit: true if the receiving end has it as sent, false if it is untouched.
fn landed(pair: &Pair, units: u64) -> Vec<bool> {
    let [source, sink] = [&pair.memory[0].bytes, &pair.memory[1].bytes];
    let unit_landed = |unit: u64| {
        let range = (unit * UNIT) as usize..((unit + 1) * UNIT) as usize;
        let is_equal = source[range.clone()] == sink[range.clone()];
        assert!(is_equal || sink[range].iter().all(|byte| *byte == CANARY), "unit {unit}");
        is_equal
    };
    (0..units).map(unit_landed).collect()
}

#[test]
fn a_stream_lands_exactly_the_parts_that_were_named() {
    let mut pair = Pair::established(2);
    pair.ends[1].post_receive(receive(0, 16 * UNIT), pair.now).unwrap();
    let message = pair.ends[0].post_stream(stream(12), pair.now).unwrap();
    for parts in [part(6, 3), part(0, 2), part(1, 2), part(7, 1)] {
        pair.ends[0].continue_stream(message, parts, pair.now).unwrap();
    }
    pair.run(SECOND);
    assert_eq!(statuses(&pair.events[0]), [], "the stream is open");
    let expected: Vec<bool> = (0..12).map(|unit| matches!(unit, 0..3 | 6..9)).collect();
    assert_eq!(landed(&pair, 12), expected);
    // Chunks of two units: units 8 and 2 have no neighbour.
    assert_eq!(pair.memory[1].chunks, [(0, 3), (0, 0)]);
    assert_eq!(pair.ends[1].packet_map(message, 1), Some(vec![0b01]));
    assert_eq!(pair.ends[1].packet_map(message, 3), Some(vec![0b11]));
    assert_eq!(pair.ends[1].packet_map(message, 5), Some(vec![0]));
    assert_eq!(pair.ends[1].packet_map(message, 6), None);
    assert_eq!(pair.ends[1].immediate(message), Some(77));
    pair.ends[0].continue_stream(message, part(3, 1), pair.now).unwrap();
    pair.ends[0].end_stream(message, pair.now).unwrap();
    pair.run(SECOND);
    assert_eq!(statuses(&pair.events[0]), [(message, CompletionStatus::Ok)]);
    let (status, immediate) = (CompletionStatus::Partial, Some(77));
    let (user_data, length) = (0, 12 * UNIT);
    let event = Event::ReceiveCompleted { user_data, message, length, immediate, status };
    assert_eq!(pair.events[1], [event]);
    assert!(landed(&pair, 12)[3]);
    let sent = pair.ends[0].statistics();
    assert_eq!(sent.data_packets_sent, 7, "a unit named twice is sent once");
    assert_eq!(sent.payload_bytes_sent, 7 * UNIT);
    assert_eq!(pair.ends[1].statistics().payload_bytes_received, 7 * UNIT);
}

#[test]
fn units_that_are_held_back_wait_and_control_packets_do_not() {
    let mut pair = Pair::established(2);
    pair.ends[0].hold_units(true);
    assert!(!pair.ends[0].has_held_units(pair.now), "nothing is posted");
    pair.ends[1].post_receive(receive(0, 4 * UNIT), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 4 * UNIT), pair.now).unwrap();
    let before = pair.ends[0].statistics().control_packets_sent;
    pair.run(SECOND);
    assert!(pair.ends[0].has_held_units(pair.now));
    let held = pair.ends[0].statistics();
    assert_eq!(held.data_packets_sent, 0);
    assert!(held.control_packets_sent > before, "credit is acknowledged");
    assert_eq!((held.stalls, held.timeouts), (0, 0));
    pair.ends[0].hold_units(false);
    pair.run(SECOND);
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)]);
}

#[test]
fn a_reliable_stream_survives_loss_and_a_lost_end() {
    let mut pair = Pair::established(2);
    pair.ends[1].post_receive(receive(0, 16 * UNIT), pair.now).unwrap();
    let message = pair.ends[0].post_stream(stream(16), pair.now).unwrap();
    for unit in [9, 3, 15, 0, 4] {
        // Each from the place of another unit; yet the same bytes are sent again.
        let offset = (unit + 20) * UNIT;
        pair.ends[0]
            .continue_stream(message, StreamPart { offset, ..part(unit, 1) }, pair.now)
            .unwrap();
    }
    pair.ends[0].end_stream(message, pair.now).unwrap();
    let mut losses = 0;
    pair.run_filtered(5 * SECOND, |index, _| {
        losses += u32::from(index == 1);
        index == 0 || losses > 7
    });
    assert_eq!(statuses(&pair.events[0]), [(message, CompletionStatus::Ok)]);
    assert_eq!(statuses(&pair.events[1]), [(message, CompletionStatus::Partial)]);
    for unit in [9, 3, 15, 0, 4] {
        let (from, to) = (((unit + 20) * UNIT) as usize, (unit * UNIT) as usize);
        let size = UNIT as usize;
        assert_eq!(pair.memory[0].bytes[from..from + size], pair.memory[1].bytes[to..to + size]);
    }
    assert!(pair.ends[0].statistics().retransmitted_packets > 0);
}

#[test]
fn an_open_stream_stops_no_later_message() {
    let mut pair = Pair::established(4);
    for index in 0..3 {
        pair.ends[1].post_receive(receive(index * 4 * UNIT, 4 * UNIT), pair.now).unwrap();
    }
    let open = pair.ends[0].post_stream(stream(4), pair.now).unwrap();
    let empty = pair.ends[0].post_stream(stream(4), pair.now).unwrap();
    pair.ends[0].end_stream(empty, pair.now).unwrap();
    let later = pair.ends[0].post_send(send(8 * UNIT, 4 * UNIT), pair.now).unwrap();
    pair.run(SECOND);
    for (events, of_empty) in
        pair.events.iter().zip([CompletionStatus::Ok, CompletionStatus::Partial])
    {
        let mut found = statuses(events);
        found.sort_by_key(|(message, _)| *message);
        assert_eq!(found, [(empty, of_empty), (later, CompletionStatus::Ok)]);
    }
    pair.ends[0].continue_stream(open, part(0, 4), pair.now).unwrap();
    pair.ends[0].end_stream(open, pair.now).unwrap();
    pair.run(SECOND);
    for events in &pair.events {
        assert_eq!(statuses(events).last(), Some(&(open, CompletionStatus::Ok)), "without gaps");
    }
}

#[test]
fn a_stream_posted_before_its_credit_waits_for_it() {
    let mut pair = Pair::established(2);
    let message = pair.ends[0].post_stream(stream(4), pair.now).unwrap();
    pair.ends[0].continue_stream(message, part(1, 2), pair.now).unwrap();
    pair.ends[0].end_stream(message, pair.now).unwrap();
    pair.run_filtered(SECOND, |_, datagram| {
        assert_eq!(unit_of(datagram), None);
        true
    });
    pair.ends[1].post_receive(receive(0, 4 * UNIT), pair.now).unwrap();
    pair.run(SECOND);
    assert_eq!(statuses(&pair.events[1]), [(message, CompletionStatus::Partial)]);
    assert_eq!(landed(&pair, 4), [false, true, true, false]);
}

#[test]
fn parts_that_are_none_are_refused() {
    let mut pair = Pair::established(4);
    let now = pair.now;
    let end = &mut pair.ends[0];
    let coded = Reliability::ErasureCoded { k: 4, m: 2, depth: 1 };
    let refused = end.post_stream(StreamRequest { reliability: coded, ..stream(4) }, now);
    assert_eq!(refused, Err(PostError::CodedStream));
    let too_long = StreamRequest { length: MESSAGE_BYTES_MAX + 1, ..stream(4) };
    let invalid = PostError::InvalidLength { offset: 0, length: MESSAGE_BYTES_MAX + 1 };
    assert_eq!(end.post_stream(too_long, now), Err(invalid));
    // Ten bytes of a fifth unit.
    let request = StreamRequest { length: 4 * UNIT + 10, ..stream(4) };
    let message = end.post_stream(request, now).unwrap();
    let cases = [
        (0, 0, 0),
        (0, 1, UNIT),
        (0, 1, UNIT - 1),
        (0, 0, UNIT - 1),
        (0, 4 * UNIT, 11),
        (0, 4 * UNIT, 9),
        (0, 5 * UNIT, UNIT),
        (0, u64::MAX - UNIT + 1, UNIT),
        (u64::MAX, 0, UNIT),
    ];
    for (offset, remote_offset, length) in cases {
        let refused =
            end.continue_stream(message, StreamPart { offset, remote_offset, length }, now);
        assert_eq!(refused, Err(PostError::InvalidPart { remote_offset, length }));
    }
    let tail = StreamPart { offset: 0, remote_offset: 3 * UNIT, length: UNIT + 10 };
    assert_eq!(end.continue_stream(message, tail, now), Ok(()));
    end.end_stream(message, now).unwrap();
    let over = Err(PostError::NotInProgress(message));
    assert_eq!(end.continue_stream(message, part(0, 1), now), over);
    assert_eq!(end.end_stream(message, now), over);
    let plain = end.post_send(send(0, 10), now).unwrap();
    for message in [plain, plain + 1] {
        let over = Err(PostError::NotInProgress(message));
        assert_eq!(end.continue_stream(message, part(0, 1), now), over);
        assert_eq!(end.end_stream(message, now), over);
    }
    assert_eq!(end.cancel_send(plain + 1, now), Err(PostError::NotInProgress(plain + 1)));
    assert_eq!(end.complete_receive(0, now), Err(PostError::NotInProgress(0)));
    let request = StreamRequest { reliability: Reliability::Unreliable, ..stream(4) };
    let full = end.post_stream(request, now).unwrap();
    for _ in 0..STREAM_PARTS_MAX {
        assert_eq!(end.continue_stream(full, part(0, 1), now), Ok(()));
    }
    assert_eq!(end.continue_stream(full, part(0, 1), now), Err(PostError::Retry));
}

#[test]
fn an_unreliable_send_is_sent_once_and_its_receive_ends_with_what_came() {
    let mut pair = Pair::established(1);
    pair.ends[1].post_receive(receive(0, 16 * UNIT), pair.now).unwrap();
    pair.ends[0].post_send(unreliable(0, 16 * UNIT), pair.now).unwrap();
    let mut held = Vec::new();
    pair.run_filtered(SECOND, |_, datagram| {
        let is_held = matches!(unit_of(datagram), Some(3 | 4 | 15));
        held.extend(is_held.then(|| datagram.to_vec()));
        !is_held
    });
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)], "all of it has left");
    assert_eq!(statuses(&pair.events[1]), []);
    assert_eq!(held.len(), 3, "nothing is sent again");
    assert_eq!(pair.ends[1].packet_map(0, 1), Some(vec![0b01]));
    let retry = pair.ends[0].post_send(unreliable(0, 1), pair.now);
    assert_eq!(retry, Err(PostError::Retry), "the slot is the peer's until it is done");
    pair.ends[1].complete_receive(0, pair.now).unwrap();
    let again = pair.ends[1].complete_receive(0, pair.now);
    assert_eq!(again, Err(PostError::NotInProgress(0)));
    pair.pump();
    let (user_data, message, length, immediate) = (0, 0, 16 * UNIT, None);
    let status = CompletionStatus::Partial;
    let event = Event::ReceiveCompleted { user_data, message, length, immediate, status };
    assert_eq!(pair.events[1], [event]);
    let statistics = pair.ends[1].statistics();
    assert_eq!((statistics.receives_completed, statistics.failed), (1, 0));
    assert_eq!(statistics.payload_bytes_received, 13 * UNIT);
    let before = pair.memory[1].clone();
    for datagram in held {
        pair.deliver(1, datagram);
    }
    assert_eq!(pair.memory[1], before, "late units change neither memory nor bitmap");
    assert_eq!(pair.ends[1].statistics().late, 3);
    pair.run(SECOND);
    assert_eq!(statuses(&pair.events[0]).len(), 1);
    pair.ends[0].post_send(unreliable(0, 1), pair.now).unwrap();
    pair.ends[1].post_receive(receive(0, 1), pair.now).unwrap();
    pair.run(SECOND);
    assert_eq!(
        statuses(&pair.events[1])[1],
        (1, CompletionStatus::Ok),
        "complete without a request"
    );
}

#[test]
fn an_unreliable_stream_sends_a_part_as_often_as_it_is_named() {
    let mut pair = Pair::established(2);
    pair.ends[1].post_receive(receive(0, 4 * UNIT), pair.now).unwrap();
    let request = StreamRequest { reliability: Reliability::Unreliable, ..stream(4) };
    let message = pair.ends[0].post_stream(request, pair.now).unwrap();
    let mut sent = 0;
    for round in 0..3 {
        pair.ends[0].continue_stream(message, part(1, 1), pair.now).unwrap();
        pair.run_filtered(100 * MILLISECOND, |_, datagram| {
            sent += u32::from(unit_of(datagram).is_some());
            unit_of(datagram).is_none() || round > 0
        });
    }
    assert_eq!(sent, 3);
    assert_eq!(landed(&pair, 4), [false, true, false, false]);
    pair.ends[0].end_stream(message, pair.now).unwrap();
    pair.run(SECOND);
    assert_eq!(statuses(&pair.events[0]), [(message, CompletionStatus::Ok)]);
    assert_eq!(statuses(&pair.events[1]), [(message, CompletionStatus::Partial)]);
    assert_eq!(pair.ends[1].statistics().duplicates, 1);
}

#[test]
fn a_cancelled_send_ends_at_both_ends() {
    for started in [false, true] {
        let mut pair = Pair::established(2);
        pair.ends[1].post_receive(receive(0, 200 * UNIT), pair.now).unwrap();
        pair.run(100 * MILLISECOND);
        let message = pair.ends[0].post_send(send(0, 200 * UNIT), pair.now).unwrap();
        if started {
            pair.run(6 * MILLISECOND);
        }
        pair.ends[0].cancel_send(message, pair.now).unwrap();
        let again = pair.ends[0].cancel_send(message, pair.now);
        assert_eq!(again, Err(PostError::NotInProgress(message)));
        pair.pump();
        assert_eq!(statuses(&pair.events[0]), [(message, CompletionStatus::Cancelled)]);
        let mut lost = 2;
        pair.run_filtered(2 * SECOND, |index, _| {
            // This notice may be lost; it is repeated.
            lost -= i32::from(index == 1 && lost > 0);
            index == 0 || lost == 0
        });
        assert_eq!(statuses(&pair.events[1]), [(message, CompletionStatus::Cancelled)]);
        let units = pair.ends[0].statistics().data_packets_sent;
        assert!(units < 200 && (units > 0) == started, "{units}");
        // The slots are free again.
        for _ in 0..2 {
            pair.ends[1].post_receive(receive(0, UNIT), pair.now).unwrap();
            pair.ends[0].post_send(send(0, UNIT), pair.now).unwrap();
        }
        pair.run(SECOND);
        assert_eq!(statuses(&pair.events[0]).len(), 3);
    }
}

#[test]
fn a_send_cancelled_before_its_credit_ends_the_receive_that_comes() {
    let mut pair = Pair::established(2);
    let message = pair.ends[0].post_send(send(0, UNIT), pair.now).unwrap();
    pair.ends[0].cancel_send(message, pair.now).unwrap();
    pair.run_filtered(SECOND, |index, _| {
        assert_eq!(index, 0, "nothing is sent about a message without a receive");
        true
    });
    pair.ends[1].post_receive(receive(0, UNIT), pair.now).unwrap();
    pair.run(SECOND);
    assert_eq!(statuses(&pair.events[1]), [(message, CompletionStatus::Cancelled)]);
}

#[test]
fn a_receive_that_was_completed_ends_its_send_whether_or_not_it_has_begun() {
    let mut pair = Pair::established(2);
    pair.ends[1].post_receive(receive(0, 200 * UNIT), pair.now).unwrap();
    pair.ends[1].post_receive(receive(0, UNIT), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 200 * UNIT), pair.now).unwrap();
    pair.run(16 * MILLISECOND);
    for message in 0..2 {
        pair.ends[1].complete_receive(message, pair.now).unwrap();
    }
    let before = pair.memory[1].clone();
    pair.run(100 * MILLISECOND);
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Partial)]);
    pair.run(SECOND);
    pair.ends[0].post_send(send(0, UNIT), pair.now).unwrap();
    pair.run(100 * MILLISECOND);
    assert_eq!(statuses(&pair.events[0])[1..], [(1, CompletionStatus::Partial)], "soon, too");
    let partial = [(0, CompletionStatus::Partial), (1, CompletionStatus::Partial)];
    assert_eq!(statuses(&pair.events[1]), partial);
    assert_eq!(pair.memory[1], before);
}

#[test]
fn many_notices_share_packets_and_all_arrive() {
    let slots = 256;
    let mut pair = Pair::established(slots);
    for _ in 0..slots {
        pair.ends[1].post_receive(receive(0, UNIT), pair.now).unwrap();
        let message = pair.ends[0].post_stream(stream(1), pair.now).unwrap();
        pair.ends[0].end_stream(message, pair.now).unwrap();
    }
    let before = pair.ends[0].statistics().control_packets_sent;
    pair.run(100 * MILLISECOND);
    assert_eq!(statuses(&pair.events[1]).len(), usize::from(slots));
    let sent = pair.ends[0].statistics().control_packets_sent - before;
    assert!(sent < 64, "{sent} packets for {slots} notices");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Parts in any order, with overlaps and gaps, over a lossy path.
    #[test]
    fn any_stream_lands_what_was_named_and_nothing_else(
        parts in proptest::collection::vec((0_u64..30, 1_u64..8), 0..12),
        lost in proptest::collection::vec(any::<bool>(), 60),
        ends_early: bool,
    ) {
        let mut pair = Pair::established(2);
        pair.ends[1].post_receive(receive(0, 40 * UNIT), pair.now).unwrap();
        let message = pair.ends[0].post_stream(stream(40), pair.now).unwrap();
        let mut named = vec![false; 40];
        for (unit, count) in parts {
            pair.ends[0].continue_stream(message, part(unit, count), pair.now).unwrap();
            named[unit as usize..(unit + count) as usize].fill(true);
            if !ends_early {
                pair.run(MILLISECOND);
            }
        }
        pair.ends[0].end_stream(message, pair.now).unwrap();
        let mut lost = lost.into_iter();
        pair.run_filtered(20 * SECOND, |_, _| !lost.next().unwrap_or(false));
        prop_assert_eq!(statuses(&pair.events[0]), [(message, CompletionStatus::Ok)]);
        let is_whole = named.iter().all(|unit| *unit);
        let status = if is_whole { CompletionStatus::Ok } else { CompletionStatus::Partial };
        prop_assert_eq!(statuses(&pair.events[1]), [(message, status)]);
        let chunks = named.chunks(2).enumerate().filter(|(_, units)| units == &[true; 2]);
        let chunks: Vec<_> = chunks.map(|(chunk, _)| (0, chunk as u32)).collect();
        pair.memory[1].chunks.sort_unstable();
        prop_assert_eq!(&pair.memory[1].chunks, &chunks);
        prop_assert_eq!(landed(&pair, 40), named);
    }
}
