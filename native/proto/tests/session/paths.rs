//! Several paths, one of which goes silent, becomes too narrow, or works in one direction only.

use sealane_proto::link::Nanos;
use sealane_proto::session::{
    CloseReason, CompletionStatus, Event, PATHS_MAX, PathId, PathState, Session, SessionConfig,
};

use crate::pair::{DELAY, MILLISECOND, Pair, UNIT, config, end_with, path_of, receive, send};
use crate::{is_unit, statuses};

const LENGTH: u64 = 50_000;
const OTHER: PathId = PathId(1);

fn two_paths() -> Pair {
    let config = |index| SessionConfig { paths: 2, ..config(index) };
    let mut pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index)))).establish();
    pair.run(20 * MILLISECOND);
    assert_eq!(states(&pair, 0), [PathState::Validated; 2]);
    pair
}

fn states(pair: &Pair, end: usize) -> Vec<PathState> {
    pair.ends[end].path_accounts().map(|account| account.state).collect()
}

/// How long all of 32 paths take to be validated, from `up_at` on and with one of three packets lost.
fn validated_after(up_at: Nanos) -> Nanos {
    let config = |index| SessionConfig { paths: PATHS_MAX, unit_bytes: 1408, ..config(index) };
    let mut pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index))));
    pair.run_filtered(up_at, |_, _| false);
    let mut chance = 88_172_645_463_325_252_u64;
    let is_ready =
        |pair: &Pair, end| states(pair, end).iter().all(|state| *state == PathState::Validated);
    while !(is_ready(&pair, 0) && is_ready(&pair, 1)) {
        assert!(pair.now < up_at + 60_000 * MILLISECOND, "{:?}", states(&pair, 0));
        pair.run_filtered(20 * MILLISECOND, |_, _| {
            chance ^= chance << 13;
            chance ^= chance >> 7;
            chance ^= chance << 17;
            !chance.is_multiple_of(3)
        });
    }
    pair.now - up_at
}

#[test]
fn what_may_be_sent_to_addresses_that_have_not_answered_is_enough_for_many_paths() {
    let took = [0, 9_000].map(|up_at| validated_after(up_at * MILLISECOND) / MILLISECOND);
    assert!(took.iter().all(|took| *took < 3_000), "{took:?} ms");
}

fn post(pair: &mut Pair) {
    pair.ends[1].post_receive(receive(0, LENGTH), pair.now).unwrap();
    pair.ends[0].post_send(send(0, LENGTH), pair.now).unwrap();
}

fn completed(pair: &Pair) -> usize {
    let ended = statuses(&pair.events[0]);
    assert!(ended.iter().all(|(_, status)| *status == CompletionStatus::Ok));
    assert_eq!(pair.memory[0].bytes[..LENGTH as usize], pair.memory[1].bytes[..LENGTH as usize]);
    ended.len()
}

#[test]
fn a_silent_path_is_passed_over_and_used_again_when_it_answers() {
    let mut pair = two_paths();
    post(&mut pair);
    pair.run(2 * DELAY + MILLISECOND);
    pair.run_filtered(200 * MILLISECOND, |_, datagram| path_of(datagram) != OTHER);
    assert_eq!(completed(&pair), 1);
    assert_eq!(states(&pair, 0), [PathState::Validated, PathState::Silent]);
    let statistics = pair.ends[0].statistics();
    assert_eq!((statistics.path_silences, statistics.stalls), (1, 0));
    pair.run(400 * MILLISECOND);
    assert_eq!(states(&pair, 0), [PathState::Validated; 2]);
}

#[test]
fn time_in_which_nobody_drove_an_end_is_no_silence_of_a_path() {
    for tells in [false, true] {
        let mut pair = two_paths();
        post(&mut pair);
        pair.run(DELAY);
        let left = pair.now;
        pair.now += 500 * MILLISECOND;
        if tells {
            pair.ends[0].was_away(left..pair.now);
        }
        // Packets that arrived meanwhile have not been read yet.
        pair.ends[0].handle_timeout(pair.now);
        let silences = u64::from(!tells);
        let statistics = pair.ends[0].statistics();
        assert_eq!((statistics.path_silences, statistics.stalls), (silences, silences));
        pair.run(200 * MILLISECOND);
        assert_eq!(completed(&pair), 1);
        assert_eq!(pair.ends[0].statistics().path_silences, silences);
    }
}

#[test]
fn a_path_that_is_silent_before_and_behind_an_absence_is_passed_over() {
    let mut pair = two_paths();
    post(&mut pair);
    pair.run(DELAY);
    let left = pair.now;
    pair.now += 500 * MILLISECOND;
    pair.ends[0].was_away(left..pair.now);
    pair.run_filtered(50 * MILLISECOND, |_, datagram| path_of(datagram) != OTHER);
    assert_eq!(states(&pair, 0), [PathState::Validated, PathState::Silent]);
}

#[test]
fn a_path_that_becomes_narrow_is_given_up_while_others_are_left() {
    let mut pair = two_paths();
    let mut posted = 0;
    let deadline = pair.now + 20_000 * MILLISECOND;
    while states(&pair, 0)[1] != PathState::Abandoned {
        assert!(pair.now < deadline, "{:?}", states(&pair, 0));
        post(&mut pair);
        posted += 1;
        pair.run_filtered(250 * MILLISECOND, |to, datagram| {
            to == 0 || path_of(datagram) != OTHER || datagram.len() < 256
        });
    }
    assert!(pair.ends[0].is_established());
    let sent = |pair: &Pair| pair.ends[0].path_accounts().nth(1).map(|path| path.packets_sent);
    let before = sent(&pair);
    post(&mut pair);
    pair.run(300 * MILLISECOND);
    assert_eq!(completed(&pair), posted + 1);
    assert_eq!(sent(&pair), before, "nothing more goes there");
    assert!(pair.ends.iter().all(Session::is_established));
}

#[test]
fn paths_that_all_become_narrow_end_the_session_with_that_reason() {
    let mut pair = two_paths();
    post(&mut pair);
    // Small packets pass, so each path answers; it is skipped and used again in turn.
    pair.run_filtered(10_000 * MILLISECOND, |to, datagram| to == 0 || datagram.len() < 256);
    let reason = CloseReason::PathMtu;
    for (end, by_peer) in [(0, false), (1, true)] {
        assert_eq!(pair.events[end].last(), Some(&Event::Closed { reason, by_peer }));
    }
}

#[test]
fn probes_of_a_sender_that_hears_nothing_repeat_no_counts() {
    let config = |index| SessionConfig { paths: 4, slots: 16, ..config(index) };
    let mut pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index))));
    pair.ends[1].post_receive(receive(0, UNIT), 0).unwrap();
    pair.run(100 * MILLISECOND);
    pair.ends[0].post_send(send(0, UNIT), pair.now).unwrap();
    let mut probes = Vec::new();
    pair.run_filtered(100 * MILLISECOND, |to, datagram| {
        if to == 1 && !is_unit(datagram) {
            probes.push(datagram.len());
        }
        to == 1
    });
    // The counts of four paths have 180 bytes.
    assert!(probes.len() > 10 && probes[1..].iter().all(|bytes| *bytes < 100), "{probes:?}");
}
