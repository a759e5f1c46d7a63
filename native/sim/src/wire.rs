//! One direction of the path in virtual time: the link, the faults behind it, and what is under way.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::link::{Fate, LOSS_PARTS, Link, LinkCounters, Nanos};

use crate::scenario::Path;

/// A datagram that will arrive. The order is that of arrival, then of sending.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Arrival {
    pub at: Nanos,
    sequence: u64,
    /// Number of the packet on this wire; copies share it.
    pub packet: u64,
    pub is_corrupted: bool,
    pub datagram: Vec<u8>,
}

pub(crate) struct Wire {
    path: Path,
    link: Link,
    faults: ChaCha8Rng,
    blackout: Option<(Nanos, Nanos)>,
    sequence: u64,
    packets: u64,
    in_order: VecDeque<Arrival>,
    displaced: BinaryHeap<Reverse<Arrival>>,
    /// Packets with a copy, of which one has arrived.
    arrived_once: BTreeSet<u64>,
    copied: BTreeSet<u64>,
    spare: Vec<Vec<u8>>,
}

impl Wire {
    pub fn new(path: Path, blackout: Option<(Nanos, Nanos)>, seed: u64) -> Self {
        let mut seeds = ChaCha8Rng::seed_from_u64(seed);
        Self {
            path,
            link: Link::new(path.link(seeds.next_u64())),
            faults: ChaCha8Rng::seed_from_u64(seeds.next_u64()),
            blackout,
            sequence: 0,
            packets: 0,
            in_order: VecDeque::new(),
            displaced: BinaryHeap::new(),
            arrived_once: BTreeSet::new(),
            copied: BTreeSet::new(),
            spare: Vec::new(),
        }
    }

    /// Puts a datagram on the wire. `wire_bytes` may exceed its length (lengths-only mode).
    pub fn offer(&mut self, datagram: &[u8], wire_bytes: u32, now: Nanos) {
        if let Some((start, end)) = self.blackout {
            let is_dark = (start..end).contains(&now);
            self.link.set_loss(if is_dark { LOSS_PARTS } else { self.path.loss_parts_per_billion });
        }
        let Fate::Delivered { at } = self.link.offer(wire_bytes, now) else { return };
        let packet = self.packets;
        self.packets += 1;
        let is_corrupted = self.happens(self.path.corrupt_parts_per_billion);
        let delay = if self.happens(self.path.reorder_parts_per_billion) {
            self.below(self.path.reorder_nanos_max + 1)
        } else {
            0
        };
        if self.happens(self.path.duplicate_parts_per_billion) {
            let later = self.below(self.path.reorder_nanos_max.max(self.path.delay_nanos) + 1);
            self.copied.insert(packet);
            self.put(datagram, packet, at + later, false);
        }
        self.put(datagram, packet, at + delay, is_corrupted);
    }

    /// When the next datagram arrives.
    pub fn next_at(&self) -> Option<Nanos> {
        let displaced = self.displaced.peek().map(|Reverse(arrival)| arrival.at);
        self.in_order.front().map(|arrival| arrival.at).into_iter().chain(displaced).min()
    }

    /// Takes the next datagram if it has arrived; with it, whether a copy came before.
    pub fn arrive(&mut self, now: Nanos) -> Option<(Arrival, bool)> {
        if self.next_at().is_none_or(|at| at > now) {
            return None;
        }
        let first = self.in_order.front().map(|arrival| (arrival.at, arrival.sequence));
        let second = self.displaced.peek().map(|Reverse(arrival)| (arrival.at, arrival.sequence));
        let is_displaced = second.is_some_and(|second| first.is_none_or(|first| second < first));
        let arrival = if is_displaced {
            self.displaced.pop().map(|Reverse(arrival)| arrival)
        } else {
            self.in_order.pop_front()
        }?;
        let is_copied = !self.copied.is_empty() && self.copied.contains(&arrival.packet);
        let is_copy =
            is_copied && !arrival.is_corrupted && !self.arrived_once.insert(arrival.packet);
        Some((arrival, is_copy))
    }

    /// Takes a buffer back.
    pub fn recycle(&mut self, datagram: Vec<u8>) {
        self.spare.push(datagram);
    }

    pub fn counters(&self) -> LinkCounters {
        self.link.counters()
    }

    fn put(&mut self, datagram: &[u8], packet: u64, at: Nanos, is_corrupted: bool) {
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.clear();
        copy.extend_from_slice(datagram);
        if is_corrupted {
            let bit = self.below(copy.len() as u64 * 8);
            copy[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
        let sequence = self.sequence;
        self.sequence += 1;
        let arrival = Arrival { at, sequence, packet, is_corrupted, datagram: copy };
        if self.in_order.back().is_none_or(|last| last.at <= at) {
            self.in_order.push_back(arrival);
        } else {
            self.displaced.push(Reverse(arrival));
        }
    }

    fn happens(&mut self, parts_per_billion: u32) -> bool {
        parts_per_billion > 0 && self.below(LOSS_PARTS.into()) < parts_per_billion.into()
    }

    fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.faults.next_u64()) * u128::from(end)) >> 64) as u64
    }
}
