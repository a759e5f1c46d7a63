//! Acceptance tests of the reference (docs/understand/sessions.md, "Acceptance tests") that need a
//! test-controlled network: it decides which packet of a message is lost, repeated, delayed or
//! rerouted.

use proptest::prelude::*;
use sealane_proto::session::{
    Arrival, CompletionStatus, Event, Memory, PATHS_MAX, PathId, Reliability, SLOTS_MAX,
    SendRequest, Session, SessionConfig, UNIT_BYTES_MAX,
};

use crate::pair::{
    DELAY, MILLISECOND, ON_PATH, Pair, UNIT, config, end_with, path_of, receive, send,
};
use crate::{statuses, unit_of};

const SECOND: u64 = 1000 * MILLISECOND;

/// An established pair whose chunks have this many units.
fn chunked(chunk_units: u16, slots: u16) -> Pair {
    with_paths(1, chunk_units, slots)
}

fn with_paths(paths: u8, chunk_units: u16, slots: u16) -> Pair {
    let of = |i| end_with(i, 0, SessionConfig { paths, chunk_units, slots, ..config(i) });
    let mut pair = Pair::of([0, 1].map(of));
    pair.run(100 * MILLISECOND);
    pair.events.iter_mut().for_each(Vec::clear);
    pair
}

fn with(reliability: Reliability, units: u64) -> SendRequest {
    SendRequest { reliability, immediate: Some(0xbeef), ..send(0, units * UNIT) }
}

/// Sends `units` units once, and loses those for which `loses` is true.
fn send_once(pair: &mut Pair, units: u64, loses: impl Fn(u32) -> bool) {
    pair.ends[1].post_receive(receive(0, units * UNIT), pair.now).unwrap();
    pair.ends[0].post_send(with(Reliability::Unreliable, units), pair.now).unwrap();
    pair.run_filtered(SECOND, |_, datagram| !unit_of(datagram).is_some_and(&loses));
}

fn chunks(pair: &Pair) -> Vec<u32> {
    let mut chunks: Vec<u32> = pair.memory[1].chunks.iter().map(|(_, chunk)| *chunk).collect();
    chunks.sort_unstable();
    chunks
}

/// Test 2.
#[test]
fn a_packet_lost_at_any_place_leaves_exactly_its_chunk_missing() {
    for lost in 0..12 {
        let mut pair = chunked(4, 1);
        send_once(&mut pair, 12, |unit| unit == lost);
        let expected: Vec<u32> = (0..3).filter(|chunk| *chunk != lost / 4).collect();
        assert_eq!(chunks(&pair), expected, "unit {lost}");
        let map = pair.ends[1].packet_map(0, lost / 4).unwrap();
        assert_eq!(map, [0b1111 & !(1 << (lost % 4))]);
    }
}

/// Test 3.
#[test]
fn seven_packets_of_a_chunk_are_one_missing_chunk_and_the_map_names_them() {
    let lost = [16, 17, 20, 23, 24, 30, 31];
    let mut pair = chunked(16, 1);
    send_once(&mut pair, 48, |unit| lost.contains(&unit));
    assert_eq!(chunks(&pair), [0, 2]);
    let map = pair.ends[1].packet_map(0, 1).unwrap();
    let is_in = |unit: u32| map[(unit - 16) as usize / 8] >> (unit % 8) & 1 == 1;
    assert!((16..32).all(|unit| is_in(unit) != lost.contains(&unit)), "{map:?}");
}

/// Test 9: every packet carries the whole immediate, so a single surviving packet suffices.
#[test]
fn the_immediate_is_known_from_any_one_packet_and_from_none_without() {
    for survivor in 0..3 {
        let mut pair = chunked(4, 1);
        send_once(&mut pair, 3, |unit| unit != survivor);
        assert_eq!(pair.ends[1].immediate(0), Some(0xbeef));
    }
    let mut pair = chunked(4, 1);
    send_once(&mut pair, 3, |_| true);
    assert_eq!(pair.ends[1].immediate(0), None);
    // A parity unit is equivalent.
    let coded = Reliability::ErasureCoded { k: 4, m: 2, depth: 1 };
    pair = chunked(4, 1);
    pair.ends[1].post_receive(receive(0, 4 * UNIT), pair.now).unwrap();
    pair.ends[0].post_send(with(coded, 4), pair.now).unwrap();
    pair.run_filtered(5 * DELAY, |_, datagram| unit_of(datagram).is_none_or(|unit| unit == 5));
    assert_eq!(statuses(&pair.events[1]), []);
    assert_eq!(pair.ends[1].immediate(0), Some(0xbeef));
}

/// A memory that checks that a chunk's bytes are there when it is published.
struct Eager<'a> {
    inner: &'a mut crate::pair::Bytes,
    expected: &'a [u8],
    chunk_bytes: usize,
}

impl Memory for Eager<'_> {
    fn read(&self, offset: u64, into: &mut [u8]) {
        self.inner.read(offset, into);
    }

    fn write(&mut self, offset: u64, from: &[u8]) {
        self.inner.write(offset, from);
    }

    fn chunk_landed(&mut self, slot: u16, chunk: u32) {
        let start = chunk as usize * self.chunk_bytes;
        let range = start..(start + self.chunk_bytes).min(self.expected.len());
        assert_eq!(self.inner.bytes[range.clone()], self.expected[range]);
        self.inner.chunk_landed(slot, chunk);
    }

    fn chunks_cleared(&mut self, slot: u16, chunk_count: u32) {
        self.inner.chunks_cleared(slot, chunk_count);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Tests 4 and 5: packets in any order, across paths and chunks, each five times on its own
    /// path and five times at the address of the next path.
    #[test]
    fn any_order_and_any_copies_land_each_chunk_once_and_never_early(
        order in Just((0_usize..20).flat_map(|i| [i; 5]).collect::<Vec<_>>()).prop_shuffle(),
        coded: bool,
        paths in 1_u8..4,
    ) {
        let reliability =
            if coded { Reliability::ErasureCoded { k: 4, m: 1, depth: 2 } } else { Reliability::SelectiveRepeat };
        let mut pair = with_paths(paths, 4, 1);
        pair.ends[1].post_receive(receive(0, 16 * UNIT), pair.now).unwrap();
        pair.run(2 * DELAY);
        pair.ends[0].post_send(with(reliability, 16), pair.now).unwrap();
        for _ in 0..20 {
            pair.now += MILLISECOND / 20;
            pair.pump();
        }
        let mut packets = std::mem::take(&mut pair.under_way[1]);
        packets.retain(|packet| unit_of(packet).is_some());
        let expected = pair.memory[0].bytes[..16 * UNIT as usize].to_vec();
        let Pair { ends: [_, right], memory, now, .. } = &mut pair;
        let mut eager = Eager { inner: &mut memory[1], expected: &expected, chunk_bytes: 4 * UNIT as usize };
        for packet in order.into_iter().filter_map(|index| packets.get(index)) {
            let path = path_of(packet);
            for path in [PathId((path.0 + 1) % paths), path] {
                right.receive(&mut packet.clone(), Arrival { path, ..ON_PATH }, &mut eager, *now);
            }
        }
        let count = packets.len() as u64;
        prop_assert_eq!(count, if coded { 20 } else { 16 });
        let used = (0..paths).filter(|path| packets.iter().any(|packet| path_of(packet).0 == *path));
        prop_assert_eq!(used.count(), usize::from(paths));
        let statistics = right.statistics();
        let misdirected = if paths > 1 { 5 * count } else { 0 };
        prop_assert_eq!(statistics.misdirected, misdirected);
        prop_assert_eq!(statistics.replayed, if paths > 1 { 4 } else { 9 } * count);
        prop_assert_eq!(statistics.units_received, if coded { count - 4 } else { count });
        prop_assert_eq!(chunks(&pair), [0, 1, 2, 3]);
        prop_assert_eq!(&pair.memory[1].bytes[..expected.len()], &expected[..]);
    }
}

/// Test 13, with every number of wraps from 1 to 100: no number of wraps makes a late packet match
/// a slot again, because its message number is compared in full.
#[test]
fn a_packet_late_by_any_number_of_wraps_changes_nothing() {
    let mut pair = chunked(1, 2);
    let mut held = Vec::new();
    for message in 0..200_u64 {
        pair.memory[0].bytes[..16].fill(message as u8);
        pair.ends[1].post_receive(receive(message % 2 * UNIT, UNIT), pair.now).unwrap();
        pair.ends[0].post_send(SendRequest { immediate: None, ..send(0, 16) }, pair.now).unwrap();
        let mut is_first = true;
        pair.run_filtered(100 * MILLISECOND, |_, datagram| {
            let holds = is_first && unit_of(datagram).is_some();
            if holds {
                held.push(datagram.to_vec());
                is_first = false;
            }
            !holds
        });
    }
    assert_eq!(held.len(), 200);
    // A new buffer in each slot.
    for slot in 0..2 {
        pair.ends[1].post_receive(receive(slot * UNIT, UNIT), pair.now).unwrap();
    }
    pair.memory[1].bytes.fill(0xa5);
    let before = pair.memory[1].clone();
    for packet in held {
        pair.deliver(1, packet);
    }
    assert_eq!(pair.memory[1], before);
    assert_eq!(pair.ends[1].statistics().late, 200);
    // And both buffers hold exactly their own messages.
    for slot in 0..2 {
        pair.ends[0].post_send(send(slot * UNIT, UNIT), pair.now).unwrap();
    }
    pair.run(100 * MILLISECOND);
    let end = 2 * UNIT as usize;
    assert_eq!(pair.memory[1].bytes[..end], pair.memory[0].bytes[..end]);
    assert_eq!(statuses(&pair.events[1])[200..], [200, 201].map(|i| (i, CompletionStatus::Ok)));
}

/// Loses the first transmissions of the units in `pattern` (bit i: unit i); returns how many were
/// sent again.
fn lose_pattern(reliability: Reliability, units: u64, pattern: u64) -> u64 {
    let mut pair = chunked(4, 1);
    pair.ends[1].post_receive(receive(0, units * UNIT), pair.now).unwrap();
    pair.ends[0].post_send(with(reliability, units), pair.now).unwrap();
    let mut seen = 0_u64;
    pair.run_filtered(SECOND, |_, datagram| {
        let Some(unit) = unit_of(datagram) else { return true };
        let is_first = seen >> unit & 1 == 0;
        seen |= 1 << unit;
        !(is_first && pattern >> unit & 1 == 1)
    });
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Ok)], "{pattern:b}");
    let end = (units * UNIT) as usize;
    assert_eq!(pair.memory[1].bytes[..end], pair.memory[0].bytes[..end]);
    pair.ends[0].statistics().retransmitted_packets
}

/// Test 20.
#[test]
fn every_pattern_of_losses_is_mended_if_and_only_if_parity_suffices() {
    for pattern in 0..64_u64 {
        let lost = u64::from(pattern.count_ones());
        let mds = Reliability::ErasureCoded { k: 4, m: 2, depth: 1 };
        assert_eq!(lose_pattern(mds, 4, pattern), lost.saturating_sub(2), "{pattern:06b}");
        // XOR (4, 2): two groups of two data units and their XOR.
        let xor = Reliability::ErasureCoded { k: 2, m: 1, depth: 2 };
        let groups = [pattern & 7, pattern >> 3].map(|group| u64::from(group.count_ones()));
        let lacking: u64 = groups.iter().map(|lost| lost.saturating_sub(1)).sum();
        assert_eq!(lose_pattern(xor, 4, pattern), lacking, "{pattern:06b}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn any_pattern_of_a_large_block_gets_exactly_what_it_lacks(pattern in 0_u64..1 << 40, thin: u64) {
        let pattern = pattern & if thin % 2 == 0 { thin } else { u64::MAX };
        let reliability = Reliability::ErasureCoded { k: 32, m: 8, depth: 1 };
        let lost = u64::from(pattern.count_ones());
        prop_assert_eq!(lose_pattern(reliability, 32, pattern), lost.saturating_sub(8));
    }
}

/// Test 22: two blocks of four lose more than their parity covers; the first packet and the first
/// reports are lost, too.
#[test]
fn blocks_beyond_their_parity_are_mended_although_reports_are_lost() {
    let mut pair = chunked(4, 1);
    let reliability = Reliability::ErasureCoded { k: 4, m: 2, depth: 1 };
    pair.ends[1].post_receive(receive(0, 16 * UNIT), pair.now).unwrap();
    pair.run(2 * DELAY);
    pair.ends[0].post_send(with(reliability, 16), pair.now).unwrap();
    let mut first = [true; 24];
    let mut repeated = Vec::new();
    let mut reports = 0;
    pair.run_filtered(3 * SECOND, |index, datagram| match unit_of(datagram) {
        Some(unit) => {
            if !std::mem::replace(&mut first[unit as usize], false) {
                repeated.push(unit);
                return true;
            }
            !matches!(unit, 0 | 1 | 2 | 13 | 14 | 16 | 17)
        }
        None if index == 0 => {
            reports += 1;
            reports > 3
        }
        None => true,
    });
    assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Ok)]);
    let blocks: Vec<u32> = repeated.iter().map(|unit| unit / 6).collect();
    assert_eq!(blocks.iter().filter(|block| **block == 0).count(), 1, "{repeated:?}");
    assert_eq!(blocks.iter().filter(|block| **block == 2).count(), 2, "{repeated:?}");
    assert_eq!(blocks.len(), 3, "{repeated:?}");
}

/// Test 17: no later packet repeats the contents of the last acknowledgement.
#[test]
fn a_sender_ends_however_often_the_last_acknowledgement_is_lost() {
    for lost in 1..12 {
        let mut pair = chunked(4, 1);
        pair.ends[1].post_receive(receive(0, 3 * UNIT), pair.now).unwrap();
        pair.run(2 * DELAY);
        pair.ends[0].post_send(with(Reliability::SelectiveRepeat, 3), pair.now).unwrap();
        pair.run(DELAY);
        assert_eq!(statuses(&pair.events[1]), [(0, CompletionStatus::Ok)]);
        assert!(!pair.under_way[0].is_empty(), "the acknowledgement is on its way");
        let mut answers = 0;
        pair.run_filtered(5 * SECOND, |index, _| {
            answers += u32::from(index == 0);
            index == 1 || answers > lost
        });
        assert!(answers > lost);
        assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)], "{lost}");
        assert_eq!(statuses(&pair.events[1]).len(), 1, "{lost}");
    }
}

/// Test 21: half of the data is missing, but parity has arrived, and nothing else is waited for.
#[test]
fn what_is_decodable_is_acknowledged_at_once() {
    let mut pair = chunked(4, 1);
    let reliability = Reliability::ErasureCoded { k: 4, m: 2, depth: 1 };
    pair.ends[1].post_receive(receive(0, 4 * UNIT), pair.now).unwrap();
    pair.run(2 * DELAY);
    pair.ends[0].post_send(with(reliability, 4), pair.now).unwrap();
    pair.run_filtered(SECOND, |_, datagram| unit_of(datagram).is_none_or(|unit| unit >= 2));
    let [Event::SendCompleted { started, completed, status, .. }] = pair.events[0][..] else {
        panic!("{:?}", pair.events[0]);
    };
    assert_eq!(status, CompletionStatus::Ok);
    assert_eq!(completed - started, 2 * DELAY, "a way there and one back");
    assert_eq!(pair.ends[1].statistics().decoded_units, 2);
    assert_eq!(pair.ends[0].statistics().retransmitted_packets, 0);
}

/// Test 18: an older acknowledgement does not revoke a newer one.
#[test]
fn old_and_repeated_acknowledgements_change_nothing() {
    let mut pair = chunked(4, 1);
    pair.ends[1].post_receive(receive(0, 60 * UNIT), pair.now).unwrap();
    pair.run(2 * DELAY);
    pair.ends[0].post_send(with(Reliability::SelectiveRepeat, 60), pair.now).unwrap();
    let mut held = Vec::new();
    let mut lost = true;
    pair.run_filtered(30 * MILLISECOND, |index, datagram| {
        if index == 0 {
            held.push(datagram.to_vec());
        }
        // One unit is missing once, so the message is still in progress.
        let is_lost = unit_of(datagram) == Some(30) && std::mem::take(&mut lost);
        !is_lost && (index == 1 || held.len() % 2 == 0)
    });
    for datagram in held.iter().rev().chain(&held) {
        pair.deliver(0, datagram.clone());
    }
    pair.run(SECOND);
    assert_eq!(statuses(&pair.events[0]), [(0, CompletionStatus::Ok)]);
    assert_eq!(pair.ends[0].statistics().retransmitted_packets, 1);
    assert!(pair.ends.iter().all(Session::is_established));
}

/// Test 10: lengths need not be multiples of anything; invalid configurations are refused.
#[test]
fn configurations_out_of_range_are_refused() {
    let good = config(0);
    assert_eq!(good.validate(), Ok(()));
    let bad = [
        SessionConfig { unit_bytes: 255, ..good },
        SessionConfig { unit_bytes: 65_001, ..good },
        SessionConfig { chunk_units: 0, ..good },
        SessionConfig { paths: 0, ..good },
        SessionConfig { paths: 33, ..good },
        SessionConfig { slots: 0, ..good },
        SessionConfig { slots: 3, ..good },
        SessionConfig { slots: 2048, ..good },
        SessionConfig { rate_bytes_per_second: 0, ..good },
        SessionConfig { idle_timeout: 0, ..good },
    ];
    assert!(bad.iter().all(|config| config.validate().is_err()));
    let ends_of_ranges = [
        SessionConfig { unit_bytes: 256, slots: 1, paths: 1, chunk_units: 1, ..good },
        SessionConfig {
            unit_bytes: UNIT_BYTES_MAX,
            slots: SLOTS_MAX,
            paths: PATHS_MAX,
            chunk_units: u16::MAX,
            ..good
        },
    ];
    assert!(ends_of_ranges.iter().all(|config| config.validate() == Ok(())));
}
