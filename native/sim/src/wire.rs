//! One direction of a path in virtual time: the link with its datagrams, and the detection of
//! copies.

use std::collections::BTreeSet;

use sealane_proto::link::{Link, LinkConfig, LinkCounters, Nanos};
use sealane_proto::session::Ecn;

/// A datagram that has arrived.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// Number of the packet on this wire; copies share it.
    pub packet: u64,
    pub is_corrupted: bool,
    /// An intact copy of it has arrived before.
    pub is_copy: bool,
    pub ecn: Ecn,
    pub datagram: Vec<u8>,
}

pub(crate) struct Wire {
    link: Link<(Vec<u8>, Ecn)>,
    /// Duplicated packets of which one copy has arrived intact.
    arrived_once: BTreeSet<u64>,
    spare: Vec<Vec<u8>>,
}

impl Wire {
    pub fn new(config: LinkConfig, blackout: Option<(Nanos, Nanos)>, seed: u64) -> Self {
        let mut link = Link::new(config, seed);
        link.set_outages(blackout.as_slice());
        Self { link, arrived_once: BTreeSet::new(), spare: Vec::new() }
    }

    /// Puts a datagram on the wire. `wire_bytes` may exceed its length (lengths-only mode).
    pub fn offer(&mut self, datagram: &[u8], ecn: Ecn, wire_bytes: u32, now: Nanos) {
        let mut packet = self.spare.pop().unwrap_or_default();
        packet.clear();
        packet.extend_from_slice(datagram);
        self.link.offer((packet, ecn), wire_bytes, ecn != Ecn::NotEct, now);
    }

    /// When the next datagram arrives.
    pub fn next_at(&self) -> Option<Nanos> {
        self.link.next_at()
    }

    /// Takes the next datagram that has arrived, if any.
    pub fn arrive(&mut self, now: Nanos) -> Option<Arrival> {
        let delivery = self.link.take(now)?;
        let (mut datagram, sent) = delivery.packet;
        let ecn = if delivery.is_marked { Ecn::Ce } else { sent };
        let is_corrupted = delivery.corruption.is_some();
        if let Some(chance) = delivery.corruption {
            let bit = ((u128::from(chance) * (datagram.len() as u128 * 8)) >> 64) as usize;
            datagram[bit / 8] ^= 1 << (bit % 8);
        }
        let is_copy =
            delivery.is_duplicated && !is_corrupted && !self.arrived_once.insert(delivery.number);
        Some(Arrival { packet: delivery.number, is_corrupted, is_copy, ecn, datagram })
    }

    /// Returns a buffer for reuse.
    pub fn recycle(&mut self, datagram: Vec<u8>) {
        self.spare.push(datagram);
    }

    pub fn counters(&self) -> LinkCounters {
        self.link.counters()
    }
}
