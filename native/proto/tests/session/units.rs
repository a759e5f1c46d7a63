//! Search for the unit: of several sizes, the largest that passes in both directions.

use sealane_proto::aead::Secret;
use sealane_proto::session::packet::Header;
use sealane_proto::session::{
    CloseReason, Event, PostError, Session, SessionKeys, Steering, Units,
};

use crate::pair::{DELAY, MILLISECOND, Pair, config, receive, send};
use crate::statuses;

const UNITS: [u16; 3] = [8896, 1408, 1152];
/// Bytes of a datagram besides its unit.
const OVERHEAD: usize = 59;

fn end(index: u64, units: &[u16]) -> Session {
    let secret = |direction: u64| Secret::take(&mut [direction as u8 + 1; 32]);
    let keys = SessionKeys {
        send: secret(index),
        receive: secret(1 - index),
        token_seed: [index as u8; 32],
    };
    let units = Units::descending(units).unwrap();
    Session::searching(config(index), Steering::default(), (units, index == 0), &keys, 0)
}

/// Lets time pass while datagrams longer than `most[to]` vanish on their way to that end.
fn run(pair: &mut Pair, milliseconds: u64, most: [usize; 2]) {
    pair.run_filtered(milliseconds * MILLISECOND, |to, datagram| datagram.len() <= most[to]);
}

fn units(pair: &Pair) -> [Option<u16>; 2] {
    [0, 1].map(|index| {
        let end = &pair.ends[index];
        end.is_established().then(|| end.config().unit_bytes)
    })
}

fn carries(pair: &mut Pair) {
    pair.ends[1].post_receive(receive(0, 30_000), pair.now).unwrap();
    pair.ends[0].post_send(send(0, 30_000), pair.now).unwrap();
    run(pair, 300, [usize::MAX; 2]);
    assert_eq!(statuses(&pair.events[0]).len(), 1);
    assert_eq!(pair.memory[0].bytes[..30_000], pair.memory[1].bytes[..30_000]);
}

#[test]
fn a_path_that_carries_the_largest_is_ready_as_soon_as_with_one_size() {
    let mut pair = Pair::of([0, 1].map(|index| end(index, &UNITS)));
    run(&mut pair, 20, [usize::MAX; 2]);
    assert_eq!(units(&pair), [Some(8896); 2]);
    carries(&mut pair);
}

#[test]
fn the_largest_that_passes_both_ways_is_found_in_three_rounds() {
    for most in [[1408 + OVERHEAD, 9000], [9000, 1408 + OVERHEAD], [1408 + OVERHEAD; 2]] {
        let mut pair = Pair::of([0, 1].map(|index| end(index, &UNITS)));
        run(&mut pair, 150, most);
        assert_eq!(units(&pair), [Some(1408); 2], "{most:?}");
        carries(&mut pair);
    }
}

#[test]
fn a_unit_that_is_no_candidate_is_malformed() {
    let mut pair = Pair::of([end(0, &[8896, 4032]), end(1, &[8896, 1408])]);
    run(&mut pair, 150, [4032 + OVERHEAD; 2]);
    assert_eq!(units(&pair), [Some(4032), None]);
    assert!(pair.ends[1].statistics().malformed > 0);
}

#[test]
fn nothing_is_posted_before_the_unit_is_known() {
    let mut session = end(0, &UNITS);
    assert!(!session.has_unit());
    assert_eq!(session.post_send(send(0, 10), 0), Err(PostError::Undecided));
    assert_eq!(session.post_receive(receive(0, 10), 0), Err(PostError::Undecided));
    assert!(end(0, &UNITS[..1]).has_unit());
}

#[test]
fn only_probes_are_larger_than_the_least_unit_before_one_is_known() {
    let mut pair = Pair::of([0, 1].map(|index| end(index, &UNITS)));
    pair.pump();
    let lengths: Vec<usize> = pair.under_way[1].iter().map(Vec::len).collect();
    assert_eq!(lengths[..3], UNITS.map(|unit| usize::from(unit) + OVERHEAD));
    assert!(lengths[3] < 200, "{lengths:?}");
}

#[test]
fn an_answer_is_as_large_as_what_it_answers_and_alone_in_its_packet() {
    let mut pair = Pair::of([0, 1].map(|index| end(index, &UNITS)));
    pair.pump();
    pair.now += DELAY;
    pair.under_way[0].clear();
    for datagram in std::mem::take(&mut pair.under_way[1]) {
        pair.deliver(1, datagram);
    }
    pair.pump();
    let lengths: Vec<usize> = pair.under_way[0].iter().map(Vec::len).collect();
    assert_eq!(lengths[..3], UNITS.map(|unit| usize::from(unit) + OVERHEAD), "{lengths:?}");
    assert!(pair.under_way[0].iter().all(|datagram| Header::decode(datagram).is_ok()));
}

#[test]
fn a_path_too_narrow_for_all_closes_the_session_with_that_reason() {
    let mut pair = Pair::of([0, 1].map(|index| end(index, &UNITS)));
    run(&mut pair, 2_000, [1000; 2]);
    let reason = CloseReason::PathMtu;
    assert!(pair.events.concat().contains(&Event::Closed { reason, by_peer: false }));
}
