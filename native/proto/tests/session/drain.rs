//! The orderly end: nothing new is sent, sends in progress end at both ends, then both close.

use sealane_proto::session::{CloseReason, CompletionStatus, Event, PostError, StreamRequest};

use crate::pair::{DELAY, MILLISECOND, Pair, UNIT, receive, send};
use crate::statuses;

const SECOND: u64 = 1000 * MILLISECOND;

fn is_over(pair: &Pair) -> bool {
    let has_closed = |events: &Vec<Event>| {
        matches!(events.last(), Some(Event::Closed { reason: CloseReason::Draining, .. }))
    };
    pair.events.iter().all(has_closed)
}

/// Whether each end regards the drain as requested by its peer.
fn by_peer(pair: &Pair) -> [bool; 2] {
    let by_peer = |events: &Vec<Event>| {
        let Some(Event::Closed { by_peer, .. }) = events.last() else { panic!("{events:?}") };
        *by_peer
    };
    [by_peer(&pair.events[0]), by_peer(&pair.events[1])]
}

#[test]
fn what_is_under_way_arrives_before_both_ends_close() {
    let mut pair = Pair::established(4);
    let length = 40 * UNIT;
    for index in 0..3 {
        pair.ends[1].post_receive(receive(0, length), pair.now).unwrap();
        pair.ends[0].post_receive(receive(length, length), pair.now).unwrap();
        pair.ends[index % 2].post_send(send(0, length), pair.now).unwrap();
    }
    pair.ends[0].drain(pair.now);
    assert_eq!(pair.ends[0].post_send(send(0, 1), pair.now), Err(PostError::Draining));
    pair.run(2 * DELAY);
    let refused = pair.ends[1].post_send(send(0, 1), pair.now);
    assert_eq!(refused, Err(PostError::Draining), "the peer drains, too");
    pair.run(SECOND);
    assert!(is_over(&pair), "{:?}", pair.events);
    let is_sent_ok =
        |event: &&Event| matches!(event, Event::SendCompleted { status: CompletionStatus::Ok, .. });
    let sent = pair.events.iter().flatten().filter(is_sent_ok).count();
    assert_eq!(sent, 3, "every outcome is known");
    assert_eq!(by_peer(&pair), [false, true]);
    assert_eq!(pair.ends[0].statistics().receives_completed, 1);
    assert_eq!(pair.ends[1].statistics().receives_completed, 2);
}

#[test]
fn an_idle_session_is_over_within_two_round_trips() {
    let mut pair = Pair::established(2);
    pair.ends[1].drain(pair.now);
    pair.run(4 * DELAY + MILLISECOND);
    assert!(is_over(&pair), "{:?}", pair.events);
    assert_eq!(by_peer(&pair), [true, false], "end 0 knew first, and closed");
    assert_eq!(pair.events[0].first(), Some(&Event::Draining));
    assert!(statuses(&pair.events[0]).is_empty());
}

#[test]
fn an_open_stream_is_waited_for_and_may_go_on() {
    let mut pair = Pair::established(2);
    pair.ends[1].post_receive(receive(0, 4 * UNIT), pair.now).unwrap();
    let reliability = sealane_proto::session::Reliability::SelectiveRepeat;
    let stream =
        StreamRequest { length: 4 * UNIT, reliability, immediate: None, priority: 0, user_data: 0 };
    let message = pair.ends[0].post_stream(stream, pair.now).unwrap();
    pair.ends[1].drain(pair.now);
    pair.run(SECOND);
    assert!(!is_over(&pair));
    assert_eq!(pair.ends[0].post_stream(stream, pair.now), Err(PostError::Draining));
    pair.ends[0].end_stream(message, pair.now).unwrap();
    pair.run(5 * SECOND);
    assert!(is_over(&pair), "{:?}", pair.events);
    assert_eq!(statuses(&pair.events[0]), [(message, CompletionStatus::Ok)]);
}

#[test]
fn a_drain_survives_the_loss_of_any_early_packet() {
    for lost in 0..12 {
        let mut pair = Pair::established(2);
        pair.ends[1].post_receive(receive(0, UNIT), pair.now).unwrap();
        pair.ends[0].post_send(send(0, UNIT), pair.now).unwrap();
        pair.ends[0].drain(pair.now);
        pair.ends[1].drain(pair.now);
        let mut count = 0;
        pair.run_filtered(10 * SECOND, |_, _| {
            count += 1;
            count - 1 != lost
        });
        assert!(is_over(&pair), "without packet {lost}: {:?}", pair.events);
        assert_eq!(by_peer(&pair), [false, false], "without packet {lost}");
        assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)], "packet {lost}");
    }
}

#[test]
fn who_has_no_more_time_closes_with_the_reason() {
    let mut pair = Pair::established(2);
    pair.ends[0].post_send(send(0, UNIT), pair.now).unwrap();
    pair.ends[0].drain(pair.now);
    pair.run(SECOND);
    assert!(!is_over(&pair), "the peer has posted no receive");
    pair.ends[0].close(CloseReason::Draining, pair.now);
    pair.run(SECOND);
    assert!(is_over(&pair));
    assert_eq!(by_peer(&pair), [false, true]);
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Aborted)]);
}
