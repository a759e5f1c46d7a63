//! What may be sent to an address before anything shows that the peer is there (RFC 9000 §8.1).
//!
//! The peer names its addresses at establishment, so an attested peer could name a stranger's. It
//! proves that it receives there by answering a challenge, whose token it can't know otherwise. Until
//! then an address gets three times the bytes that came from it; beyond them a session has a budget
//! of ten packets and one for each path, for the challenges themselves, which grows by a packet a
//! second for each path: enough to find paths that lose much, and no flood for whoever is there.

use crate::link::Nanos;

/// Bytes that may be sent for each byte that came.
const FACTOR: u64 = 3;
/// Packets of the largest size that a session may send beyond that, and one for each path.
const PACKETS: u64 = 10;
/// After this the budget has one more for each path.
const REFILL: Nanos = 1_000_000_000;

/// What one path has exchanged with an address that has not answered.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unproven {
    /// Without what the budget paid: else a peer that is heard after a long outage could not be answered.
    sent_bytes: u64,
    received_bytes: u64,
    is_proven: bool,
}

impl Unproven {
    /// The address has answered a challenge.
    pub fn proven(&mut self) {
        self.is_proven = true;
    }

    /// An authentic packet of this many wire bytes came from the address.
    pub fn received(&mut self, wire_bytes: u64) {
        self.received_bytes += wire_bytes;
    }

    /// Whether so much more is within what came from there.
    fn is_covered(&self, wire_bytes: u64) -> bool {
        self.is_proven || self.sent_bytes + wire_bytes <= FACTOR * self.received_bytes
    }
}

/// What a session may send to all such addresses together. A packet costs the time in which the
/// budget grows by as much.
#[derive(Debug)]
pub struct Budget {
    packet_bytes: u64,
    /// In which it grows by a packet.
    refill: Nanos,
    depth: Nanos,
    /// When all of it will be there again.
    full_at: Nanos,
}

impl Budget {
    /// A whole one. `packet_bytes`: of the largest packet, with all headers.
    #[must_use]
    pub fn new(packet_bytes: usize, paths: u8) -> Self {
        let refill = REFILL / u64::from(paths.max(1));
        let depth = (PACKETS + u64::from(paths)) * refill;
        Self { packet_bytes: packet_bytes as u64, refill, depth, full_at: 0 }
    }

    /// When a packet may leave for the address of a path.
    #[must_use]
    pub fn open_at(&self, path: &Unproven) -> Nanos {
        if path.is_covered(self.packet_bytes) {
            return 0;
        }
        // The largest packet must fit.
        (self.full_at + self.refill).saturating_sub(self.depth)
    }

    /// A packet leaves for it.
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

    /// Sends what the budget allows from `now` on, without letting time pass; how many packets.
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
        assert_eq!(flood(&mut budget, &mut other, start + 3 * REFILL), 0, "one for all paths");
        assert_eq!(
            flood(&mut budget, &mut path, start + 1000 * REFILL),
            14,
            "no more than at first"
        );
    }

    #[test]
    fn three_times_what_came_costs_nothing() {
        let mut budget = Budget::new(PACKET as usize, 1);
        let mut path = Unproven::default();
        path.received(2 * PACKET);
        assert_eq!(flood(&mut budget, &mut path, REFILL), 6 + 11);
        path.received(PACKET);
        assert_eq!(flood(&mut budget, &mut path, REFILL), 3, "whatever the budget has paid");
    }

    #[test]
    fn who_has_answered_is_not_bounded() {
        let mut budget = Budget::new(PACKET as usize, 1);
        let mut path = Unproven::default();
        path.proven();
        assert_eq!(flood(&mut budget, &mut path, 0), 1000);
        assert_eq!(flood(&mut budget, &mut Unproven::default(), 0), 11);
    }
}
