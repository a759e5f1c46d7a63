//! Limits what may be sent to an address before the peer has proven that it receives there (RFC
//! 9000 §8.1).
//!
//! The peer states its addresses at establishment, so even an attested peer could state a third
//! party's. It proves that it receives at an address by answering a challenge, whose token it can't
//! know otherwise. Until then, at most three times the bytes received from an address are sent to
//! it. Beyond that, a session has a budget of ten packets plus one for each path, for the
//! challenges themselves. The budget grows by one packet a second for each path: enough to find
//! paths with heavy loss, but no flood for a third party. Apart from that, a session may send ten
//! units, the first of its messages, before any path is validated; none once a path has followed the
//! peer to an address that it did not state.

use crate::link::Nanos;

/// Bytes that may be sent for each byte received.
const FACTOR: u64 = 3;
/// Packets of maximum size that a session may send beyond that, in addition to one for each path.
const PACKETS: u64 = 10;
/// Units that a session may send before a path is validated, in all.
const UNITS: u8 = 10;
/// Time in which the budget grows by one packet for each path.
const REFILL: Nanos = 1_000_000_000;

/// Bytes exchanged on one path with an address that may not be proven yet.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unproven {
    /// Excluding bytes charged to the budget: otherwise, a peer that is heard again after a long
    /// outage couldn't be answered.
    sent_bytes: u64,
    received_bytes: u64,
    is_proven: bool,
}

impl Unproven {
    /// Records that the address has answered a challenge.
    pub fn proven(&mut self) {
        self.is_proven = true;
    }

    /// Records an authentic packet of this many wire bytes from the address.
    pub fn received(&mut self, wire_bytes: u64) {
        self.received_bytes += wire_bytes;
    }

    /// Whether this many more bytes may be sent without the budget.
    fn is_covered(&self, wire_bytes: u64) -> bool {
        self.is_proven || self.sent_bytes + wire_bytes <= FACTOR * self.received_bytes
    }
}

/// What a session may send to all unproven addresses together. A packet costs the time in which the
/// budget grows by its size.
#[derive(Debug)]
pub struct Budget {
    packet_bytes: u64,
    /// Time in which it grows by one packet.
    refill: Nanos,
    depth: Nanos,
    /// When the budget will be full again.
    full_at: Nanos,
    units_left: u8,
}

impl Budget {
    /// Creates a full budget. `packet_bytes` is the size of the largest packet with all headers.
    #[must_use]
    pub fn new(packet_bytes: usize, paths: u8) -> Self {
        let refill = REFILL / u64::from(paths.max(1));
        let depth = (PACKETS + u64::from(paths)) * refill;
        Self { packet_bytes: packet_bytes as u64, refill, depth, full_at: 0, units_left: UNITS }
    }

    /// When a packet may next be sent to the address of a path.
    #[must_use]
    pub fn open_at(&self, path: &Unproven) -> Nanos {
        if path.is_covered(self.packet_bytes) {
            return 0;
        }
        // The largest packet must fit.
        (self.full_at + self.refill).saturating_sub(self.depth)
    }

    /// Units that may still be sent on paths that are not validated.
    #[must_use]
    pub fn units_left(&self) -> u8 {
        self.units_left
    }

    /// Ends that: the address may be anyone's.
    pub fn bar_units(&mut self) {
        self.units_left = 0;
    }

    /// Counts a unit sent on a path that is not validated.
    pub fn unit_sent(&mut self) {
        self.units_left = self.units_left.saturating_sub(1);
    }

    /// Charges a control packet sent to the address of a path.
    pub fn sent(&mut self, path: &mut Unproven, wire_bytes: u64, now: Nanos) {
        if path.is_covered(wire_bytes) {
            path.sent_bytes += wire_bytes;
        } else {
            let cost = self.refill.saturating_mul(wire_bytes) / self.packet_bytes;
            self.full_at = self.full_at.max(now).saturating_add(cost);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: u64 = 1500;

    /// Sends as many packets as the budget allows at `now`; returns their number.
    fn flood(budget: &mut Budget, path: &mut Unproven, now: Nanos) -> u64 {
        let mut packets = 0;
        while packets < 1000 && budget.open_at(path) <= now {
            budget.sent(path, PACKET, now);
            packets += 1;
        }
        packets
    }

    #[test]
    fn an_address_that_never_answers_gets_a_budget_and_then_a_packet_a_second_for_each_path() {
        let mut budget = Budget::new(PACKET as usize, 4);
        let mut path = Unproven::default();
        let start = 100 * REFILL;
        assert_eq!(flood(&mut budget, &mut path, start), 14);
        assert_eq!(budget.open_at(&path), start + REFILL / 4);
        assert_eq!(flood(&mut budget, &mut path, start + 3 * REFILL), 3 * 4);
        let mut other = Unproven::default();
        assert_eq!(
            flood(&mut budget, &mut other, start + 3 * REFILL),
            0,
            "all paths share one budget"
        );
        assert_eq!(
            flood(&mut budget, &mut path, start + 1000 * REFILL),
            14,
            "no more than at the beginning"
        );
    }

    #[test]
    fn three_times_the_received_bytes_are_not_charged() {
        let mut budget = Budget::new(PACKET as usize, 1);
        let mut path = Unproven::default();
        path.received(2 * PACKET);
        assert_eq!(flood(&mut budget, &mut path, REFILL), 6 + 11);
        path.received(PACKET);
        assert_eq!(
            flood(&mut budget, &mut path, REFILL),
            3,
            "regardless of the bytes charged to the budget"
        );
    }

    #[test]
    fn a_proven_address_is_not_limited() {
        let mut budget = Budget::new(PACKET as usize, 1);
        let mut path = Unproven::default();
        path.proven();
        assert_eq!(flood(&mut budget, &mut path, 0), 1000);
        assert_eq!(flood(&mut budget, &mut Unproven::default(), 0), 11);
    }
}
