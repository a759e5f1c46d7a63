//! Packets on the wire, ordered by arrival.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};

use super::{Delivery, Nanos};

/// A packet with its position: by arrival, then by sending.
#[derive(Debug)]
struct Placed<T> {
    sequence: u64,
    delivery: Delivery<T>,
}

impl<T> Placed<T> {
    fn place(&self) -> (Nanos, u64) {
        (self.delivery.at, self.sequence)
    }
}

impl<T> PartialEq for Placed<T> {
    fn eq(&self, other: &Self) -> bool {
        self.place() == other.place()
    }
}

impl<T> Eq for Placed<T> {}

impl<T> PartialOrd for Placed<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Placed<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.place().cmp(&other.place())
    }
}

#[derive(Debug)]
pub(super) struct Transit<T> {
    sequence: u64,
    /// Arrival time of the last packet that keeps its turn.
    last_at: Nanos,
    in_order: VecDeque<Placed<T>>,
    late: BinaryHeap<Reverse<Placed<T>>>,
}

impl<T> Default for Transit<T> {
    fn default() -> Self {
        Self { sequence: 0, last_at: 0, in_order: VecDeque::new(), late: BinaryHeap::new() }
    }
}

impl<T> Transit<T> {
    pub fn len(&self) -> usize {
        self.in_order.len() + self.late.len()
    }

    /// Arrival time of a packet that could arrive `at`, but not before the packets ahead of it.
    pub fn turn(&mut self, at: Nanos) -> Nanos {
        self.last_at = self.last_at.max(at);
        self.last_at
    }

    /// Adds a packet that arrives in its turn, at the time that `turn` returned.
    pub fn put(&mut self, delivery: Delivery<T>) {
        let placed = self.placed(delivery);
        self.in_order.push_back(placed);
    }

    /// Adds a packet that others may overtake.
    pub fn put_late(&mut self, delivery: Delivery<T>) {
        let placed = self.placed(delivery);
        self.late.push(Reverse(placed));
    }

    pub fn next_at(&self) -> Option<Nanos> {
        let late = self.late.peek().map(|Reverse(placed)| placed.delivery.at);
        self.in_order.front().map(|placed| placed.delivery.at).into_iter().chain(late).min()
    }

    pub fn take(&mut self, now: Nanos) -> Option<Delivery<T>> {
        let first = self.in_order.front().map(Placed::place);
        let late = self.late.peek().map(|Reverse(placed)| placed.place());
        let (at, _) = first.into_iter().chain(late).min()?;
        if at > now {
            return None;
        }
        let is_late = late.is_some_and(|late| first.is_none_or(|first| late < first));
        let placed = if is_late {
            self.late.pop().map(|Reverse(placed)| placed)
        } else {
            self.in_order.pop_front()
        };
        placed.map(|placed| placed.delivery)
    }

    fn placed(&mut self, delivery: Delivery<T>) -> Placed<T> {
        let sequence = self.sequence;
        self.sequence += 1;
        Placed { sequence, delivery }
    }
}
