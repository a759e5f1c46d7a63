//! The session machine through its public interface: two ends, and a network that the test
//! controls.

mod acceptance;
mod commands;
mod drain;
mod early;
mod evidence;
mod gap;
mod hostile;
mod migration;
mod packets;
mod pair;
mod paths;
mod priority;
mod property;
mod seeds;
mod units;

use pair::{
    DELAY, ELSEWHERE, MILLISECOND, ON_PATH, Pair, UNIT, config, end, end_with, receive, send,
};
use proptest::prelude::*;
use sealane_proto::session::packet::{Header, Kind};
use sealane_proto::session::{
    Arrival, CloseReason, CompletionStatus, Detection, Event, Follow, MESSAGE_BYTES_MAX, PathId,
    Plan, PlanRow, PostError, Reliability, SendRequest, SessionConfig, SessionStatistics, Source,
};

fn is_unit(datagram: &[u8]) -> bool {
    matches!(Header::decode(datagram), Ok((Header { kind: Kind::Unit { .. }, .. }, _)))
}

fn unit_of(datagram: &[u8]) -> Option<u32> {
    match Header::decode(datagram) {
        Ok((Header { kind: Kind::Unit { unit, .. }, .. }, _)) => Some(unit),
        _ => None,
    }
}

fn statuses(events: &[Event]) -> Vec<(u64, CompletionStatus)> {
    let status = |event: &Event| match *event {
        Event::SendCompleted { message, status, .. }
        | Event::ReceiveCompleted { message, status, .. } => Some((message, status)),
        Event::Established { .. } | Event::Draining | Event::Closed { .. } => None,
    };
    events.iter().filter_map(status).collect()
}

#[test]
fn every_length_arrives_with_its_immediate_and_its_chunks() {
    let mut pair = Pair::established(16);
    let lengths = [0, 1, UNIT - 1, UNIT, UNIT + 1, 2 * UNIT, 2 * UNIT + 1, 5 * UNIT];
    for (index, length) in lengths.into_iter().enumerate() {
        let offset = index as u64 * 4096;
        pair.ends[1].post_receive(receive(offset, 4096), pair.now).unwrap();
        let immediate = (index % 2 == 0).then_some(index as u32);
        let request = SendRequest { immediate, ..send(offset, length) };
        pair.ends[0].post_send(request, pair.now).unwrap();
    }
    pair.run(1000 * MILLISECOND);
    for (index, length) in lengths.into_iter().enumerate() {
        let offset = index * 4096;
        let message = index as u64;
        let event = Event::ReceiveCompleted {
            user_data: offset as u64,
            message,
            length,
            immediate: (index % 2 == 0).then_some(index as u32),
            status: CompletionStatus::Ok,
        };
        assert!(pair.events[1].contains(&event), "{event:?} not in {:?}", pair.events[1]);
        let end = offset + length as usize;
        assert_eq!(pair.memory[1].bytes[offset..end], pair.memory[0].bytes[offset..end]);
        assert!(pair.memory[1].bytes[end..offset + 4096].iter().all(|byte| *byte == 0xa5));
        let chunk_count = length.div_ceil(UNIT).max(1).div_ceil(2);
        let landed = pair.memory[1].chunks.iter().filter(|(slot, _)| *slot == message as u16);
        assert_eq!(landed.count() as u64, chunk_count);
    }
    assert_eq!(statuses(&pair.events[0]).len(), lengths.len());
    assert_eq!(pair.ends[0].statistics().retransmitted_packets, 0);
}

#[test]
fn nothing_is_sent_without_credit() {
    let mut pair = Pair::established(4);
    pair.ends[0].post_send(send(0, 1000), pair.now).unwrap();
    pair.run_filtered(1000 * MILLISECOND, |_, datagram| {
        assert!(!is_unit(datagram));
        true
    });
    pair.ends[1].post_receive(receive(0, 1000), pair.now).unwrap();
    let mut lost = 3;
    pair.run_filtered(2000 * MILLISECOND, |index, _| {
        // The first credits are lost and have to be repeated.
        lost -= i32::from(index == 0 && lost > 0);
        index == 1 || lost == 0
    });
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)]);
}

#[test]
fn a_message_longer_than_its_receive_ends_at_both_ends_and_stops_nothing_else() {
    let mut pair = Pair::established(4);
    for (index, length_max) in [1000, 999, 1000].into_iter().enumerate() {
        pair.ends[1].post_receive(receive(index as u64 * 4096, length_max), pair.now).unwrap();
        pair.ends[0].post_send(send(index as u64 * 4096, 1000), pair.now).unwrap();
    }
    let before = pair.memory[1].bytes[4096..8192].to_vec();
    pair.run_filtered(1000 * MILLISECOND, |_, datagram| {
        let header = Header::decode(datagram).map(|(header, _)| header.kind);
        assert!(!matches!(header, Ok(Kind::Unit { message: 1, .. })), "credit says no");
        true
    });
    let too_long = (1, CompletionStatus::TooLong);
    for events in &pair.events {
        let mut found = statuses(events);
        found.sort_by_key(|(message, _)| *message);
        assert_eq!(found, [(0, CompletionStatus::Ok), too_long, (2, CompletionStatus::Ok)]);
    }
    assert_eq!(pair.memory[1].bytes[4096..8192], before);
    // The slots are free again at both ends.
    for _ in 0..4 {
        pair.ends[1].post_receive(receive(0, 10), pair.now).unwrap();
        pair.ends[0].post_send(send(0, 10), pair.now).unwrap();
    }
}

#[test]
fn a_receiver_refuses_what_a_sender_should_not_have_sent() {
    let mut pair = Pair::established(4);
    pair.ends[1].post_receive(receive(0, 1000), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 1000), pair.now).unwrap();
    pair.run_filtered(20 * MILLISECOND, |_, datagram| !is_unit(datagram));
    // The receiving end is replaced by one with the same keys and a smaller buffer.
    pair.ends[1] = end(1, 4, pair.now);
    pair.ends[1].post_receive(receive(0, 999), pair.now).unwrap();
    let before = pair.memory[1].clone();
    pair.run(2000 * MILLISECOND);
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::TooLong)]);
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::TooLong)]);
    assert_eq!(pair.memory[1], before);
}

#[test]
fn a_packet_held_back_until_its_slot_has_a_new_buffer_changes_nothing() {
    let mut pair = Pair::established(1);
    pair.ends[1].post_receive(receive(0, 1000), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 1000), pair.now).unwrap();
    let mut held = None;
    pair.run_filtered(1000 * MILLISECOND, |_, datagram| {
        let is_first = held.is_none() && unit_of(datagram) == Some(2);
        if is_first {
            held = Some(datagram.to_vec());
        }
        !is_first
    });
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Ok)]);
    pair.ends[1].post_receive(receive(0, 1000), pair.now).unwrap();
    pair.memory[1].bytes.fill(0xa5);
    let before = pair.memory[1].clone();
    let late = pair.ends[1].statistics().late;
    pair.deliver(1, held.expect("a unit was held back"));
    assert_eq!(pair.memory[1], before);
    assert_eq!(pair.ends[1].statistics().late, late + 1);
}

#[test]
fn forged_and_replayed_datagrams_change_nothing_and_spoil_nothing() {
    let mut pair = Pair::established(1);
    pair.ends[1].post_receive(receive(0, 1000), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 1000), pair.now).unwrap();
    let mut originals = Vec::new();
    pair.run_filtered(20 * MILLISECOND, |_, datagram| {
        originals.extend(is_unit(datagram).then(|| datagram.to_vec()));
        !is_unit(datagram)
    });
    assert_eq!(originals.len(), 4);
    let before = pair.memory[1].clone();
    for original in &originals {
        for at in 0..original.len() {
            let mut forged = original.clone();
            forged[at] ^= 0x10;
            pair.deliver(1, forged);
        }
    }
    assert_eq!(pair.memory[1], before);
    let statistics = pair.ends[1].statistics();
    assert!(statistics.forged > 0 && statistics.malformed > 0 && statistics.units_received == 0);
    for original in &originals {
        pair.deliver(1, original.clone());
    }
    pair.pump();
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Ok)]);
    let landed = pair.memory[1].clone();
    let replayed = pair.ends[1].statistics().replayed;
    for original in &originals {
        pair.deliver(1, original.clone());
    }
    assert_eq!(pair.memory[1], landed);
    assert_eq!(pair.ends[1].statistics().replayed, replayed + 4);
}

#[test]
fn a_coded_message_completes_early_and_what_comes_later_changes_nothing() {
    let mut pair = Pair::established(2);
    let reliability = Reliability::ErasureCoded { k: 4, m: 2, depth: 1 };
    pair.ends[1].post_receive(receive(0, 4096), pair.now).unwrap();
    let length = 7 * UNIT + 10;
    pair.ends[0].post_send(SendRequest { reliability, ..send(0, length) }, pair.now).unwrap();
    let mut held = Vec::new();
    pair.run_filtered(500 * MILLISECOND, |_, datagram| {
        // Two data units of each block are lost, also of the short one; parity restores them.
        let is_held = matches!(unit_of(datagram), Some(0 | 2 | 8 | 9));
        if is_held {
            held.push(datagram.to_vec());
        }
        !is_held
    });
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)]);
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Ok)]);
    assert_eq!(pair.ends[1].statistics().decoded_units, 4);
    assert_eq!(pair.ends[0].statistics().retransmitted_packets, 0);
    let end = length as usize;
    assert_eq!(pair.memory[1].bytes[..end], pair.memory[0].bytes[..end]);
    let before = pair.memory[1].clone();
    for datagram in held {
        pair.deliver(1, datagram);
    }
    assert_eq!(pair.memory[1], before);
    assert_eq!(pair.ends[1].statistics().late, 4);
}

#[test]
fn an_undecodable_block_gets_only_what_it_lacks() {
    let mut pair = Pair::established(2);
    let reliability = Reliability::ErasureCoded { k: 4, m: 2, depth: 1 };
    pair.ends[1].post_receive(receive(0, 4096), pair.now).unwrap();
    pair.ends[0].post_send(SendRequest { reliability, ..send(0, 8 * UNIT) }, pair.now).unwrap();
    let mut lost = 0;
    pair.run_filtered(500 * MILLISECOND, |_, datagram| {
        // Three losses in the first block are one more than its parity can restore.
        let is_lost = lost < 3 && matches!(unit_of(datagram), Some(0..3));
        lost += u32::from(is_lost);
        !is_lost
    });
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Ok)]);
    assert_eq!(pair.ends[0].statistics().retransmitted_packets, 1);
    assert_eq!(pair.ends[0].statistics().fallbacks, 1);
    assert_eq!(pair.memory[1].bytes[..2048], pair.memory[0].bytes[..2048]);
}

/// Sends 32 units as blocks of (4, 2), two blocks per round trip; returns their coded indices in
/// the order in which they left. `is_lost` decides losses by coded index and position.
fn leave_in_order(is_lost: impl Fn(u32, usize) -> bool) -> Vec<u32> {
    let rate_bytes_per_second = 70_000;
    let slow = |index| end_with(index, 0, SessionConfig { rate_bytes_per_second, ..config(index) });
    let mut pair = Pair::of([slow(0), slow(1)]).establish();
    let reliability = Reliability::ErasureCoded { k: 4, m: 2, depth: 1 };
    pair.ends[1].post_receive(receive(0, 32 * UNIT), pair.now).unwrap();
    pair.run(100 * MILLISECOND);
    pair.ends[0].post_send(SendRequest { reliability, ..send(0, 32 * UNIT) }, pair.now).unwrap();
    let mut left = Vec::new();
    pair.run_filtered(1000 * MILLISECOND, |_, datagram| {
        let unit = unit_of(datagram);
        left.extend(unit);
        unit.is_none_or(|unit| !is_lost(unit, left.len()))
    });
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Ok)]);
    left
}

#[test]
fn parity_leaves_behind_all_data_and_only_for_blocks_that_may_lack_something() {
    let is_parity = |unit: &u32| unit % 6 >= 4;
    let left = leave_in_order(|_, _| false);
    let data: Vec<u32> = (0..48).filter(|unit| !is_parity(unit)).collect();
    assert_eq!(left[..32], data);
    assert!(left.len() > 32 && left[32..].iter().all(is_parity), "{left:?}");
    let first = left[32] / 6;
    assert!(first > 2, "what had arrived by then got parity: {left:?}");
    assert_eq!(
        left[32..],
        (first..8).map(|block| block * 6 + 4).collect::<Vec<_>>()[..left.len() - 32]
    );
}

#[test]
fn what_is_known_to_be_lost_before_the_parity_is_repeated_at_once() {
    let left = leave_in_order(|unit, place| unit == 1 && place < 5);
    let again = left.iter().rposition(|unit| *unit == 1).unwrap();
    assert!((3..20).contains(&again), "{left:?}");
}

/// Sends 16 units as blocks of (4, 2) and loses the second to the ninth packet.
fn lose_eight_in_a_row(depth: u8) -> Pair {
    let mut pair = Pair::established(2);
    let reliability = Reliability::ErasureCoded { k: 4, m: 2, depth };
    pair.ends[1].post_receive(receive(0, 16 * UNIT), pair.now).unwrap();
    pair.ends[0].post_send(SendRequest { reliability, ..send(0, 16 * UNIT) }, pair.now).unwrap();
    let mut sent = 0;
    pair.run_filtered(500 * MILLISECOND, |_, datagram| {
        sent += u32::from(unit_of(datagram).is_some());
        !matches!(sent, 2..=9)
    });
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Ok)]);
    let end = 16 * UNIT as usize;
    assert_eq!(pair.memory[1].bytes[..end], pair.memory[0].bytes[..end]);
    pair
}

#[test]
fn interleaved_blocks_share_a_burst_of_losses() {
    assert_eq!(lose_eight_in_a_row(4).ends[0].statistics().retransmitted_packets, 0);
    assert_ne!(lose_eight_in_a_row(1).ends[0].statistics().retransmitted_packets, 0);
}

#[test]
fn the_lengths_that_follow_the_plan_are_known() {
    let mut pair = Pair::new(4);
    let mut sizes = |reliability, length| {
        let request = SendRequest { reliability, ..send(0, length) };
        pair.ends[0].post_send(request, 0).unwrap();
        pair.ends[0].message_sizes()
    };
    assert_eq!(sizes(Reliability::SelectiveRepeat, 4096), 0);
    assert_eq!(sizes(Reliability::Auto, 0), 1);
    assert_eq!(sizes(Reliability::Auto, 4096), 1 | 1 << 12);
    assert_eq!(sizes(Reliability::Auto, 4097), 1 | 1 << 12 | 1 << 13);
}

#[test]
fn a_plan_decides_for_sends_that_leave_the_scheme_open() {
    let mut pair = Pair::established(8);
    let coded = Reliability::ErasureCoded { k: 4, m: 1, depth: 2 };
    let mut parity_of = |length: u64| {
        let before = pair.ends[0].statistics().parity_packets_sent;
        pair.ends[1].post_receive(receive(0, length), pair.now).unwrap();
        let request = SendRequest { reliability: Reliability::Auto, ..send(0, length) };
        pair.ends[0].post_send(request, pair.now).unwrap();
        pair.run(100 * MILLISECOND);
        let sent = pair.ends[0].statistics().parity_packets_sent - before;
        let rows = [(4 * UNIT, Reliability::SelectiveRepeat), (8 * UNIT, coded)];
        let rows = rows.map(|(length_max, reliability)| PlanRow {
            length_max,
            reliability,
            parity_gap: 0,
        });
        pair.ends[0].install_plan(Plan::new(&rows, UNIT as u16).unwrap());
        sent
    };
    assert_eq!(parity_of(8 * UNIT), 0, "without a plan nothing is coded");
    assert_eq!(parity_of(4 * UNIT), 0);
    assert_eq!(parity_of(4 * UNIT + 1), 2);
    assert_eq!(parity_of(13 * UNIT), 4);
}

/// Time to deliver a message whose second unit is lost once, and the number of repeated
/// transmissions.
fn lose_the_second_unit(detection: Detection) -> (u64, SessionStatistics) {
    let ends = [0, 1].map(|i| end_with(i, 0, SessionConfig { detection, ..config(i) }));
    let mut pair = Pair::of(ends);
    pair.ends[1].post_receive(receive(0, 1000), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 1000), pair.now).unwrap();
    let mut is_lost = false;
    pair.run_filtered(500 * MILLISECOND, |_, datagram| {
        let loses = !is_lost && unit_of(datagram) == Some(1);
        is_lost |= loses;
        !loses
    });
    let times = pair.events[0].iter().find_map(|event| match event {
        Event::SendCompleted { started, completed, .. } => Some(completed - started),
        _ => None,
    });
    (times.expect("it completes"), pair.ends[0].statistics())
}

#[test]
fn a_lost_unit_is_sent_again_after_its_report_or_its_time_out_and_only_it() {
    let (time, statistics) = lose_the_second_unit(Detection::Timeout);
    // Sent, a time-out of three round trips, and one more to arrive and be acknowledged.
    assert!((8 * DELAY..9 * DELAY).contains(&time), "{time}");
    assert_eq!((statistics.retransmitted_packets, statistics.timeouts), (1, 1));
    let (time, statistics) = lose_the_second_unit(Detection::Reports);
    // Sent, reported, sent again, acknowledged; this test's network moves in steps of one delay.
    assert!((4 * DELAY..=5 * DELAY).contains(&time), "{time}");
    assert_eq!((statistics.retransmitted_packets, statistics.timeouts), (1, 0));
    assert_eq!((statistics.lost_packets, statistics.lost_runs), (1, 1));
}

#[test]
fn silence_ends_the_session_with_what_is_known() {
    let mut pair = Pair::established(4);
    pair.ends[1].post_receive(receive(0, 1000), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 1000), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 1000), pair.now).unwrap();
    pair.run_filtered(20_000 * MILLISECOND, |index, datagram| index == 0 && !is_unit(datagram));
    let closed = Event::Closed { reason: CloseReason::IdleTimeout, by_peer: false };
    let unknown = (0, CompletionStatus::OutcomeUnknown);
    assert_eq!(statuses(&pair.events[0]), [unknown, (1, CompletionStatus::Aborted)]);
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Aborted)]);
    assert_eq!(pair.events[1].last(), Some(&closed));
    assert!(pair.ends.iter().all(sealane_proto::session::Session::is_closed));
    assert_eq!(pair.ends[0].post_send(send(0, 1), pair.now), Err(PostError::Closed));
    assert_eq!(pair.ends[0].next_timeout(), None);
}

#[test]
fn units_are_held_back_while_the_peer_is_silent() {
    let mut pair = Pair::established(4);
    pair.ends[1].post_receive(receive(0, 60_000), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 60_000), pair.now).unwrap();
    pair.run(3 * DELAY);
    pair.run_filtered(500 * MILLISECOND, |_, _| false);
    assert_eq!(pair.ends[0].statistics().stalls, 1);
    // Except the oldest one with every fourth probe: four times per round trip, if this test's
    // network did not move in steps of half a round trip.
    let mut units = 0;
    pair.run_filtered(5000 * MILLISECOND, |_, datagram| {
        units += u64::from(is_unit(datagram));
        false
    });
    let round_trips = 5000 * MILLISECOND / (2 * DELAY);
    assert!((round_trips / 4..=4 * round_trips).contains(&units), "{units}");
    pair.run(2000 * MILLISECOND);
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)]);
    assert_eq!(pair.ends[0].statistics().stalls, 1);
}

#[test]
fn an_idle_session_stays() {
    let mut pair = Pair::established(4);
    pair.run(60_000 * MILLISECOND);
    assert!(pair.ends.iter().all(sealane_proto::session::Session::is_established));
    let statistics = pair.ends[0].statistics();
    assert!(statistics.packets_sent < 200, "{}", statistics.packets_sent);
    assert_eq!(statistics.stalls, 0);
    // And the first message after the pause does not have to wait.
    pair.ends[1].post_receive(receive(0, 100), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 100), pair.now).unwrap();
    pair.run(5 * DELAY);
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)]);
}

#[test]
fn closing_tells_the_peer_what_has_arrived_and_what_has_not() {
    let mut pair = Pair::established(4);
    for offset in [0, 4096, 8192] {
        pair.ends[1].post_receive(receive(offset, 1000), pair.now).unwrap();
        pair.ends[0].post_send(send(offset, 1000), pair.now).unwrap();
    }
    // Messages 0 and 2 arrive, 1 only in part; none is acknowledged before the CLOSE.
    let mut units = 0;
    pair.run_filtered(4 * DELAY, |index, datagram| {
        let is_lost = is_unit(datagram) && units == 5;
        units += u32::from(is_unit(datagram));
        !is_lost && (index == 1 || units == 0)
    });
    let ok = |message| (message, CompletionStatus::Ok);
    assert_eq!(statuses(&pair.events[1]), [ok(0), ok(2)]);
    assert_eq!(statuses(&pair.events[0]), []);
    pair.ends[1].close(CloseReason::Revoked, pair.now);
    pair.run(100 * MILLISECOND);
    assert_eq!(statuses(&pair.events[1]), [ok(0), ok(2), (1, CompletionStatus::Aborted)]);
    let unknown = (1, CompletionStatus::OutcomeUnknown);
    assert_eq!(statuses(&pair.events[0]), [ok(0), ok(2), unknown]);
    let closed = |by_peer| Event::Closed { reason: CloseReason::Revoked, by_peer };
    assert_eq!(pair.events[1].last(), Some(&closed(false)));
    assert_eq!(pair.events[0].last(), Some(&closed(true)));
    assert!(pair.ends.iter().all(sealane_proto::session::Session::is_closed));
}

#[test]
fn posts_are_bounded_and_checked() {
    let mut pair = Pair::established(2);
    let [a, b] = &mut pair.ends;
    let too_long = MESSAGE_BYTES_MAX + 1;
    let invalid = |offset, length| Err(PostError::InvalidLength { offset, length });
    assert_eq!(a.post_send(send(0, too_long), 0), invalid(0, too_long));
    assert_eq!(a.post_send(send(u64::MAX, 1), 0), invalid(u64::MAX, 1));
    assert_eq!(b.post_receive(receive(u64::MAX, 1), 0), invalid(u64::MAX, 1));
    for (k, m, depth) in [(0, 1, 1), (1, 0, 1), (200, 56, 1), (4, 2, 0)] {
        let reliability = Reliability::ErasureCoded { k, m, depth };
        let request = SendRequest { reliability, ..send(0, 1) };
        assert_eq!(a.post_send(request, 0), Err(PostError::InvalidCode { k, m, depth }));
    }
    for number in 0..2 {
        assert_eq!(a.post_send(send(0, 1), 0), Ok(number));
        assert_eq!(b.post_receive(receive(0, 1), 0), Ok(number));
    }
    assert_eq!(a.post_send(send(0, 1), 0), Err(PostError::Retry));
    assert_eq!(b.post_receive(receive(0, 1), 0), Err(PostError::Retry));
    pair.run(100 * MILLISECOND);
    assert_eq!(pair.ends[0].post_send(send(0, 1), pair.now), Ok(2));
    assert_eq!(pair.ends[1].post_receive(receive(0, 1), pair.now), Ok(2));
}

#[test]
fn both_ends_may_send() {
    let mut pair = Pair::established(4);
    pair.memory[1].bytes[..5000].fill(0x11);
    for (from, to) in [(0, 1), (1, 0)] {
        pair.ends[to].post_receive(receive(8192, 5000), pair.now).unwrap();
        pair.ends[from].post_send(send(0, 5000), pair.now).unwrap();
    }
    pair.run(200 * MILLISECOND);
    let [first, second] = &pair.memory;
    assert_eq!(second.bytes[8192..8192 + 5000], first.bytes[..5000]);
    assert_eq!(first.bytes[8192..8192 + 5000], second.bytes[..5000]);
    assert_eq!(statuses(&pair.events[0]).len(), 2);
}

#[test]
fn a_path_is_validated_by_an_answer_that_came_back_on_it_and_kept_then() {
    let mut pair = Pair::new(4);
    pair.pump();
    let challenge = pair.under_way[1].remove(0);
    pair.now += DELAY;
    let Pair { now, ends: [left, right], memory, under_way, .. } = &mut pair;
    let mut out = Vec::new();
    // The responder's own challenge went to the announced address …
    left.receive(&mut under_way[0].remove(0), ON_PATH, &mut memory[0], *now);
    assert!(left.next_transmit(&memory[0], *now, &mut out));
    // … and the answer comes from another one: it is authentic, but says nothing about that path.
    let followed = right.receive(&mut out.clone(), ELSEWHERE, &mut memory[1], *now);
    assert_eq!(followed, Some(Follow::Path));
    assert!(!right.is_established());
    let mut forged = challenge.clone();
    *forged.last_mut().unwrap() ^= 1;
    assert!(right.receive(&mut forged, ELSEWHERE, &mut memory[1], *now).is_none());
    // A new challenge is sent there at once, and its answer counts.
    out.clear();
    assert!(right.next_transmit(&memory[1], *now, &mut out));
    left.receive(&mut out, ON_PATH, &mut memory[0], *now);
    out.clear();
    assert!(left.next_transmit(&memory[0], *now, &mut out));
    right.receive(&mut out, ON_PATH, &mut memory[1], *now);
    assert!(right.is_established());
    // Where the caller follows nobody, a packet from elsewhere is not even opened.
    let mut expected = right.statistics();
    let foreign = Arrival { source: Source::Foreign, ..ON_PATH };
    assert!(right.receive(&mut challenge.clone(), foreign, &mut memory[1], *now).is_none());
    expected.foreign_packets += 1;
    assert_eq!(right.statistics(), expected);
}

#[test]
fn a_packet_that_comes_to_the_address_of_another_path_is_not_opened() {
    let [left, right] =
        [0, 1].map(|index| end_with(index, 0, SessionConfig { paths: 2, ..config(index) }));
    let mut pair = Pair::of([left, right]);
    pair.pump();
    let challenge = pair.under_way[1].remove(0);
    let Pair { now, ends: [_, right], memory, .. } = &mut pair;
    let by_the_other = Arrival { path: PathId(1), ..ON_PATH };
    assert!(right.receive(&mut challenge.clone(), by_the_other, &mut memory[1], *now).is_none());
    assert_eq!(right.statistics().misdirected, 1);
    assert!(right.receive(&mut challenge.clone(), ON_PATH, &mut memory[1], *now).is_some());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_peer_that_says_anything_harms_its_own_messages_only(
        script in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        hostile::run(&script);
    }
}

#[test]
fn a_script_of_the_hostile_peer_gets_as_far_as_memory() {
    let post = [9];
    let unit = |index| [4, 1, 0, index, 0, 0, 0, 0, 0, 0, 0, 0];
    let sent = [&post[..], &unit(0), &unit(1), &unit(1)].concat();
    let statistics = hostile::run(&sent);
    assert_eq!((statistics.units_received, statistics.receives_completed), (2, 1));
    assert_eq!(statistics.late, 1);
}
