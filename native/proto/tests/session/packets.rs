//! Packets between two machines: key updates, and echoed ECN marks.

use std::collections::BTreeSet;

use sealane_proto::session::packet::{Header, Kind};
use sealane_proto::session::{
    Arrival, CloseReason, Ecn, Event, PathId, Session, SessionConfig, Source,
};

use crate::pair::{DELAY, MILLISECOND, Pair, config, end_with, receive, send};

fn pair_with(packets_per_key: u64) -> Pair {
    // Slow enough to take many round trips.
    let rate_bytes_per_second = 400_000;
    let changed = |index| SessionConfig {
        packets_per_key,
        rate_bytes_per_second,
        slots: 16,
        ..config(index)
    };
    let end = |index| end_with(index, 0, changed(index));
    Pair::of([end(0), end(1)]).establish()
}

/// Moves 16 messages of 2 KiB from end 0 to end 1, and checks them.
fn transfer(pair: &mut Pair, keeps: impl FnMut(usize, &[u8]) -> bool) {
    for message in 0..16 {
        let request = receive(message * 2048, 2048);
        pair.ends[1].post_receive(request, pair.now).unwrap();
        pair.ends[0].post_send(send(message * 2048, 2048), pair.now).unwrap();
    }
    pair.run_filtered(4000 * MILLISECOND, keeps);
    assert_eq!(pair.memory[1].bytes[..16 * 2048], pair.memory[0].bytes[..16 * 2048]);
    assert_eq!(pair.ends[1].statistics().receives_completed, 16);
}

#[test]
fn keys_roll_over_while_messages_move_and_packets_are_lost() {
    let mut pair = pair_with(8);
    let mut nonces = [BTreeSet::new(), BTreeSet::new()];
    let mut count = 0_u32;
    transfer(&mut pair, |index, datagram| {
        let (header, _) = Header::decode(datagram).unwrap();
        assert!(nonces[index].insert((header.channel, header.packet_number)), "used twice");
        count += 1;
        !count.is_multiple_of(7)
    });
    let [sender, receiver] = pair.ends.each_ref().map(Session::statistics);
    assert!(sender.key_updates_sent >= 8, "{sender:?}");
    assert!(receiver.key_updates_received >= sender.key_updates_sent - 1);
    assert_eq!((receiver.forged, receiver.unknown_epoch), (0, 0));
}

#[test]
fn a_cold_message_takes_the_validation_of_the_path_and_its_own_round_trip() {
    let mut pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index))));
    pair.ends[1].post_receive(receive(0, 2000), 0).unwrap();
    pair.ends[0].post_send(send(0, 1000), 0).unwrap();
    pair.run(4 * DELAY);
    pair.pump();
    let is_completed = |event: &Event| matches!(event, Event::SendCompleted { .. });
    assert!(pair.events[0].iter().any(is_completed), "{:?}", pair.events);
}

#[test]
fn marks_are_counted_and_echoed() {
    let mut pair = pair_with(1 << 20);
    let statistics = pair.ends[0].statistics();
    assert_eq!((statistics.is_ecn_capable, statistics.ce_echoed), (1, 0));
    // Every packet in flight to end 1 meets a queue.
    pair.ends[1].post_receive(receive(0, 4096), pair.now).unwrap();
    pair.run(50 * MILLISECOND);
    pair.ends[0].post_send(send(0, 4096), pair.now).unwrap();
    pair.pump();
    let marked = std::mem::take(&mut pair.under_way[1]);
    let count = marked.len() as u64;
    for mut datagram in marked {
        let met_a_queue = Arrival { path: PathId(0), source: Source::Path, ecn: Ecn::Ce };
        pair.ends[1].receive(&mut datagram, met_a_queue, &mut pair.memory[1], pair.now);
    }
    pair.run(50 * MILLISECOND);
    let [sender, receiver] = pair.ends.each_ref().map(Session::statistics);
    assert!(count > 4);
    assert_eq!((receiver.ce_received, sender.ce_echoed), (count, count));
    assert_eq!(sender.is_ecn_capable, 1);
}

#[test]
fn a_path_that_erases_marks_is_not_marked_on() {
    let mut pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index))));
    for _ in 0..4 {
        pair.pump();
        for index in 0..2 {
            for mut datagram in std::mem::take(&mut pair.under_way[index]) {
                let erased = Arrival { path: PathId(0), source: Source::Path, ecn: Ecn::NotEct };
                let memory = &mut pair.memory[index];
                assert!(
                    pair.ends[index].receive(&mut datagram, erased, memory, pair.now).is_some()
                );
            }
        }
    }
    assert!(pair.ends.iter().all(Session::is_established));
    assert!(pair.ends.iter().all(|end| end.statistics().is_ecn_capable == 0));
}

#[test]
fn a_path_that_carries_half_is_given_less_and_all_arrives() {
    let mut pair = pair_with(1 << 20);
    let rate_before = pair.ends[0].statistics().rate_bytes_per_second;
    let (mut count, mut posted) = (0_u32, 0);
    for round in 0..30 {
        if pair.ends[1].post_receive(receive(0, 60_000), pair.now).is_ok() {
            pair.ends[0].post_send(send(0, 60_000), pair.now).unwrap();
            posted += 1;
        }
        pair.run_filtered(400 * MILLISECOND, |index, _| {
            count += 1;
            index == 0 || round >= 20 || count.is_multiple_of(2)
        });
    }
    let statistics = pair.ends[0].statistics();
    assert!(statistics.breaker_trips > 0, "{statistics:?}");
    assert!(statistics.rate_bytes_per_second < rate_before * 3 / 4, "{statistics:?}");
    pair.run(60_000 * MILLISECOND);
    assert_eq!(pair.ends[1].statistics().receives_completed, posted);
}

/// Whether a datagram passes a path that is narrower than a unit.
fn is_small(datagram: &[u8]) -> bool {
    datagram.len() < 256
}

fn closed(pair: &Pair, end: usize) -> Option<(CloseReason, bool)> {
    pair.events[end].iter().find_map(|event| match event {
        Event::Closed { reason, by_peer } => Some((*reason, *by_peer)),
        _ => None,
    })
}

#[test]
fn a_path_that_is_too_narrow_ends_the_session_before_it_begins() {
    let mut pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index))));
    pair.run_filtered(3000 * MILLISECOND, |index, datagram| index == 0 || is_small(datagram));
    // An answer is as large as its challenge: either end notices, and tells the other if it is first.
    let [first, second] = [0, 1].map(|end| closed(&pair, end).unwrap());
    assert_eq!([first.0, second.0], [CloseReason::PathMtu; 2]);
    assert!(!(first.1 && second.1), "{first:?} {second:?}");
}

#[test]
fn a_path_that_becomes_too_narrow_ends_the_session_and_says_why() {
    let mut pair = pair_with(1 << 20);
    transfer(&mut pair, |_, _| true);
    let start = pair.now;
    pair.ends[1].post_receive(receive(0, 40_000), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 40_000), pair.now).unwrap();
    pair.run_filtered(100 * MILLISECOND, |_, _| true);
    pair.run_filtered(8000 * MILLISECOND, |index, datagram| index == 0 || is_small(datagram));
    assert_eq!(closed(&pair, 0), Some((CloseReason::PathMtu, false)), "since {start}");
    assert_eq!(closed(&pair, 1), Some((CloseReason::PathMtu, true)));
}

#[test]
fn loss_of_many_units_is_no_narrow_path() {
    let mut pair = pair_with(1 << 20);
    pair.ends[1].post_receive(receive(0, 60_000), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 60_000), pair.now).unwrap();
    // For a second no units arrive, regardless of size, but control packets do.
    let until = pair.now + 1000 * MILLISECOND;
    while pair.now < until {
        pair.run_filtered(10 * MILLISECOND, |index, datagram| {
            let is_unit =
                matches!(Header::decode(datagram), Ok((Header { kind: Kind::Unit { .. }, .. }, _)));
            index == 0 || !is_unit
        });
    }
    pair.run(20_000 * MILLISECOND);
    assert!(pair.ends.iter().all(Session::is_established));
    assert_eq!(pair.ends[1].statistics().receives_completed, 1);
}
