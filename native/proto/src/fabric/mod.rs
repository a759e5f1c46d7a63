//! A packet network in which many flows meet: hosts and switches whose ports are [`Link`]s.
//!
//! Sans-IO: packets are offered at a host and taken at another one, each with its time. A switch
//! forwards on a shortest path; among equal ones it chooses by a hash of the packet's flow and
//! entropy, as equal-cost multipath does. Control packets leave a port before data packets and take
//! their time on the wire from them.

mod topology;

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::link::{Link, LinkConfig, LinkCounters, Nanos};

pub use topology::{NodeId, PortId, PortSetup, Sites, Topology};

/// Buffer of a port for control packets, which are short and few.
const CONTROL_BUFFER_BYTES: u64 = 1 << 24;

/// Which packets leave a port first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Acknowledgements and the like: they leave first, are not marked, and don't count in phantom
    /// queues.
    Control,
    /// All others.
    Data,
}

/// A packet with what switches look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet<T> {
    /// The host to which it goes.
    pub to: NodeId,
    /// Identifies the flow …
    pub flow: u64,
    /// … and the path among several equal ones.
    pub entropy: u32,
    /// Its class.
    pub class: Class,
    /// Its length, including all headers.
    pub wire_bytes: u32,
    /// Whether switches may mark it instead of dropping it.
    pub is_ecn_capable: bool,
    /// Whether a switch has marked it.
    pub is_marked: bool,
    /// Chance that decides which of its bits is flipped, if a port has corrupted it.
    pub corruption: Option<u64>,
    /// What the hosts exchange.
    pub body: T,
}

/// One direction of a cable, with a queue for each class.
#[derive(Debug)]
struct Port<T> {
    to: NodeId,
    data: Link<Packet<T>>,
    control: Link<Packet<T>>,
}

/// A network in operation.
#[derive(Debug)]
pub struct Fabric<T> {
    topology: Topology,
    ports: Vec<Port<T>>,
    /// Earliest delivery of a port's queues: time, then twice the port's index, plus one for
    /// control.
    dues: BinaryHeap<Reverse<(Nanos, u32)>>,
    /// The entry of each queue in `dues` that counts; others are out of date.
    due_at: Vec<Nanos>,
    seed: u64,
}

impl<T: Clone> Fabric<T> {
    /// Creates an idle network. The seed decides hashes, marks and losses.
    #[must_use]
    pub fn new(topology: Topology, seed: u64) -> Self {
        let ports: Vec<Port<T>> = (0..)
            .zip(topology.ports())
            .map(|(index, port)| {
                let control = LinkConfig::clean(
                    port.link.rate_bits_per_second,
                    port.link.delay_nanos,
                    CONTROL_BUFFER_BYTES,
                );
                let control = LinkConfig { loss: port.link.loss, ..control };
                let seed = mix(seed ^ mix(index));
                Port {
                    to: port.to,
                    data: Link::new(port.link, seed),
                    control: Link::new(control, mix(seed)),
                }
            })
            .collect();
        let due_at = vec![Nanos::MAX; 2 * ports.len()];
        Self { topology, ports, dues: BinaryHeap::new(), due_at, seed }
    }

    /// The network's hosts, switches and cables.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Sends a packet from a host. Returns whether its first port took it.
    pub fn offer(&mut self, from: NodeId, packet: Packet<T>, now: Nanos) -> bool {
        self.forward(from, packet, now)
    }

    /// Time of the next thing to happen, after which [`Self::take`] may have a packet.
    #[must_use]
    pub fn next_at(&self) -> Option<Nanos> {
        self.dues.peek().map(|Reverse((at, _))| *at)
    }

    /// Moves packets until one arrives at its host, if one does by `now`.
    pub fn take(&mut self, now: Nanos) -> Option<(Nanos, Packet<T>)> {
        while let Some(Reverse((at, queue))) =
            self.dues.peek().copied().filter(|due| due.0.0 <= now)
        {
            self.dues.pop();
            if self.due_at[queue as usize] != at {
                continue;
            }
            self.due_at[queue as usize] = Nanos::MAX;
            let port = &mut self.ports[queue as usize / 2];
            let (to, is_control) = (port.to, queue % 2 == 1);
            let link = if is_control { &mut port.control } else { &mut port.data };
            let delivery = link.take(at);
            let next = link.next_at();
            self.schedule(queue, next);
            let Some(delivery) = delivery else { continue };
            let mut packet = delivery.packet;
            packet.is_marked |= delivery.is_marked;
            packet.corruption = packet.corruption.or(delivery.corruption);
            if packet.to == to {
                return Some((delivery.at, packet));
            }
            self.forward(to, packet, delivery.at);
        }
        None
    }

    /// What a port has done to its data packets.
    #[must_use]
    pub fn counters(&self, port: PortId) -> LinkCounters {
        self.ports[port.index()].data.counters()
    }

    /// Data bytes that wait at a port.
    #[must_use]
    pub fn queued_bytes(&self, port: PortId, now: Nanos) -> u64 {
        self.ports[port.index()].data.queued_bytes(now)
    }

    /// Sets the start and end of each outage of a port, in both classes.
    pub fn set_outages(&mut self, port: PortId, outages: &[(Nanos, Nanos)]) {
        let port = &mut self.ports[port.index()];
        port.data.set_outages(outages);
        port.control.set_outages(outages);
    }

    /// Sets start and end of each detour of a port, in both classes, and how much longer it is.
    pub fn set_detours(&mut self, port: PortId, detours: &[(Nanos, Nanos, Nanos)]) {
        let port = &mut self.ports[port.index()];
        port.data.set_detours(detours);
        port.control.set_detours(detours);
    }

    /// Sets start and end of each time in which a port carries only packets up to some length.
    pub fn set_narrows(&mut self, port: PortId, narrows: &[(Nanos, Nanos, u32)]) {
        let port = &mut self.ports[port.index()];
        port.data.set_narrows(narrows);
        port.control.set_narrows(narrows);
    }

    /// Sets the rates in bits per second that a port has from these times on.
    pub fn set_rates(&mut self, id: PortId, rates: &[(Nanos, u64)]) {
        let port = &mut self.ports[id.index()];
        port.data.set_rates(rates);
        port.control.set_rates(rates);
        let nexts = [port.data.next_at(), port.control.next_at()];
        self.schedule(2 * id.0, nexts[0]);
        self.schedule(2 * id.0 + 1, nexts[1]);
    }

    fn forward(&mut self, node: NodeId, packet: Packet<T>, now: Nanos) -> bool {
        let choices = self.topology.choices(node, packet.to);
        let choice = match choices {
            [] => return false,
            [only] => *only,
            many => {
                let hash = mix(self.seed
                    ^ mix(packet.flow ^ mix(u64::from(packet.entropy) << 16 | node.0 as u64)));
                many[((u128::from(hash) * many.len() as u128) >> 64) as usize]
            }
        };
        let port = &mut self.ports[choice.index()];
        let Packet { wire_bytes: bytes, class, is_ecn_capable, .. } = packet;
        let fate = match class {
            Class::Data => port.data.offer(packet, bytes, is_ecn_capable, now),
            Class::Control => {
                port.data.occupy(bytes, now);
                port.control.offer(packet, bytes, false, now)
            }
        };
        let is_control = class == Class::Control;
        let link = if is_control { &port.control } else { &port.data };
        let next = link.next_at();
        self.schedule(choice.0 * 2 + u32::from(is_control), next);
        fate == crate::link::Fate::Accepted
    }

    fn schedule(&mut self, queue: u32, at: Option<Nanos>) {
        let Some(at) = at else { return };
        if at < self.due_at[queue as usize] {
            self.due_at[queue as usize] = at;
            self.dues.push(Reverse((at, queue)));
        }
    }
}

/// A bijection that spreads its input over all bits (the finalizer of SplitMix64).
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}
