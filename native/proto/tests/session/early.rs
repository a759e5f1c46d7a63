//! Units that leave before a path has answered.

use sealane_proto::link::Nanos;
use sealane_proto::session::{
    Arrival, CompletionStatus, Ecn, Event, Follow, PathId, SessionConfig, Source,
};

use crate::pair::{DELAY, MILLISECOND, Pair, UNIT, config, end_with, path_of, receive, send};
use crate::{is_unit, statuses};

/// As many as may leave.
const EARLY_UNITS: u64 = 10;

/// Two ends that have just begun, a message of so many units at the first, its receive at the other.
fn with_message(units: u64, paths: u8) -> Pair {
    let config = |index| SessionConfig { paths, ..config(index) };
    let mut pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index))));
    pair.ends[1].post_receive(receive(0, units * UNIT), 0).unwrap();
    pair.ends[0].post_send(send(0, units * UNIT), 0).unwrap();
    pair
}

/// Runs while the second end's large packets are lost, so that no path of the first is validated;
/// returns how many units and how many other packets have left.
fn sent_to_a_silent_address(pair: &mut Pair, time: Nanos) -> (u64, u64) {
    let (mut units, mut others) = (0, 0);
    pair.run_filtered(time, |index, datagram| {
        if index == 1 {
            let counter = if is_unit(datagram) { &mut units } else { &mut others };
            *counter += 1;
        }
        index == 1 || datagram.len() < 256
    });
    assert!(!pair.ends[0].is_established());
    (units, others)
}

#[test]
fn a_short_message_is_acknowledged_a_round_trip_after_its_credit() {
    let mut pair = with_message(EARLY_UNITS, 1);
    let credit = DELAY;
    pair.run(credit + 2 * DELAY);
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)]);
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Ok)]);
    assert_eq!(pair.ends[0].statistics().retransmitted_packets, 0);
}

#[test]
fn nothing_leaves_before_the_peer_was_heard() {
    let mut pair = with_message(1, 1);
    pair.run_filtered(300 * MILLISECOND, |index, datagram| {
        assert!(!is_unit(datagram));
        index == 1
    });
}

#[test]
fn ten_units_leave_at_most_those_of_whole_messages_and_others_once_the_path_has_answered() {
    for (messages, expected) in [(&[10, 1][..], 10), (&[6, 6], 6), (&[6, 4, 1], 10), (&[11], 0)] {
        for paths in [1, 3] {
            let config = |index| SessionConfig { paths, slots: 4, ..config(index) };
            let mut pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index))));
            for (number, units) in messages.iter().enumerate() {
                let offset = number as u64 * 8192;
                pair.ends[1].post_receive(receive(offset, units * UNIT), 0).unwrap();
                pair.ends[0].post_send(send(offset, units * UNIT), 0).unwrap();
            }
            let (units, _) = sent_to_a_silent_address(&mut pair, 300 * MILLISECOND);
            assert_eq!(units, expected, "{messages:?}, {paths} paths");
            pair.run(1000 * MILLISECOND);
            assert_eq!(statuses(&pair.events[0]).len(), messages.len());
        }
    }
}

#[test]
fn lost_units_are_not_sent_again_beyond_the_ten() {
    let mut pair = with_message(8, 1);
    let mut units = 0;
    pair.run_filtered(2_000 * MILLISECOND, |index, datagram| {
        units += u64::from(is_unit(datagram));
        !is_unit(datagram) && (index == 1 || datagram.len() < 256)
    });
    assert!((8..=EARLY_UNITS).contains(&units), "{units}");
}

#[test]
fn none_goes_to_an_unanswered_path_once_another_has_answered() {
    let config = |index| SessionConfig { paths: 2, slots: 16, ..config(index) };
    let mut pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index))));
    for _ in 0..EARLY_UNITS {
        pair.ends[1].post_receive(receive(0, UNIT), 0).unwrap();
    }
    // The peer is heard on both, but hears nothing on one of them.
    let silent = PathId(1);
    let (mut sent, mut units, mut heard) = (0, 0, PathId(0));
    for _ in 0..1000 {
        pair.run_filtered(10 * MILLISECOND, |index, datagram| {
            if index == 0 {
                heard = path_of(datagram);
            } else if is_unit(datagram) {
                units += 1;
                assert_ne!(path_of(datagram), silent);
            }
            index == 0 || path_of(datagram) != silent
        });
        if pair.ends[0].is_established() && heard == silent && sent < EARLY_UNITS {
            pair.ends[0].post_send(send(0, UNIT), pair.now).unwrap();
            sent += 1;
        }
    }
    assert_eq!((units, sent), (EARLY_UNITS, EARLY_UNITS));
    assert_eq!(statuses(&pair.events[0]).len() as u64, EARLY_UNITS);
}

#[test]
fn they_take_nothing_from_the_challenges() {
    let challenges = |pair: &mut Pair| sent_to_a_silent_address(pair, 5_000 * MILLISECOND);
    let (units, others) = challenges(&mut with_message(10, 1));
    // What came from there allows a packet more or less.
    let without = challenges(&mut Pair::new(4)).1;
    assert!(units == 10 && others.abs_diff(without) <= 1, "{units}, {others} and {without}");
}

/// The first end after it has got the credit for its message in this way.
fn heard_from(arrival: impl Fn(&[u8]) -> Arrival, follows: Follow) -> Pair {
    let mut pair = with_message(1, 1);
    pair.pump();
    for mut datagram in std::mem::take(&mut pair.under_way[0]) {
        let arrival = arrival(&datagram);
        let follow = pair.ends[0].receive(&mut datagram, arrival, &mut pair.memory[0], MILLISECOND);
        assert_eq!(follow, Some(follows));
    }
    assert_eq!(pair.ends[0].credit_end(), 1);
    pair.now = MILLISECOND;
    pair.pump();
    pair
}

#[test]
fn none_goes_to_an_address_that_the_peer_did_not_state() {
    let elsewhere = |datagram: &[u8]| Arrival {
        path: path_of(datagram),
        source: Source::Elsewhere,
        ecn: Ecn::Ect0,
    };
    let mut pair = heard_from(elsewhere, Follow::Path);
    assert!(pair.under_way[1].iter().all(|datagram| !is_unit(datagram)));
    // The peer's answer to the next challenge comes from there, too, and still none leaves.
    pair.run_filtered(300 * MILLISECOND, |index, datagram| {
        assert!(!is_unit(datagram));
        index == 1 || datagram.len() < 256
    });
    pair.run(1000 * MILLISECOND);
    assert!(matches!(pair.events[0][0], Event::Established { .. }));
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)]);
}

#[test]
fn none_goes_where_nothing_shows_that_the_peer_is() {
    let unnamed = |datagram: &[u8]| Arrival {
        path: path_of(datagram),
        source: Source::Unnamed,
        ecn: Ecn::Ect0,
    };
    let pair = heard_from(unnamed, Follow::Nowhere);
    assert!(pair.under_way[1].iter().all(|datagram| !is_unit(datagram)));
}
