//! What all worlds of a cell have in common: the network, and the loop that runs them.

use std::collections::BTreeMap;

use sealane_proto::congestion::Domain;
use sealane_proto::fabric::{Fabric, NodeId, PortId, Sites, Topology};
use sealane_proto::link::Nanos;

use super::{
    Cell, CellOutcome, Change, Effect, FlowOutcome, FlowSetup, HEADER_BYTES, PAYLOAD_BYTES, Place,
    Sample,
};

/// Senders and receivers in a network.
pub(super) trait World {
    /// What hosts exchange.
    type Body: Clone;

    fn fabric(&self) -> &Fabric<Self::Body>;

    /// Whether all flows have ended.
    fn is_over(&self) -> bool;

    /// Time of the next thing to happen.
    fn next_at(&self) -> Option<Nanos>;

    /// Processes everything that is due at an instant.
    fn step(&mut self, now: Nanos);

    /// Bytes of each flow that have been acknowledged so far.
    fn acked_bytes(&self) -> Vec<u64>;

    fn outcomes(&self) -> Vec<FlowOutcome>;

    /// Packets that have arrived at a host.
    fn arrivals(&self) -> u64;

    /// When each chunk had arrived, by flow.
    fn chunks(&self) -> Vec<Vec<Nanos>>;
}

/// Runs a world until all flows have ended, or until the cell's time is up.
pub(super) fn run(cell: &Cell, world: &mut impl World) -> CellOutcome {
    let port = Sites::port_to(world.fabric().topology(), NodeId(cell.sample_host));
    let mut samples = Vec::new();
    let mut sample_at = if cell.sample_every > 0 { cell.sample_every } else { Nanos::MAX };
    while !world.is_over() {
        let Some(now) = world.next_at().filter(|at| *at <= cell.time_max) else { break };
        while sample_at <= now {
            samples.push(Sample {
                at: sample_at,
                acked_bytes: world.acked_bytes(),
                sent_packets: world.outcomes().iter().map(|flow| flow.sent_packets).collect(),
                queued_bytes: port.map_or(0, |port| world.fabric().queued_bytes(port, sample_at)),
            });
            sample_at += cell.sample_every;
        }
        world.step(now);
    }
    let fabric = world.fabric();
    let ports = (0..fabric.topology().ports().len() as u32).map(PortId);
    let counters = || ports.clone().map(|port| fabric.counters(port));
    CellOutcome {
        overflowed_packets: counters().map(|counters| counters.overflowed_packets).sum(),
        down_packets: counters().map(|counters| counters.down_packets).sum(),
        chunks: world.chunks(),
        flows: world.outcomes(),
        samples,
        arrivals: world.arrivals(),
    }
}

impl FlowSetup {
    /// Whether it is between the data centres.
    pub(super) fn is_far(&self) -> bool {
        self.from / Sites::HOSTS != self.to / Sites::HOSTS
    }
}

impl Cell {
    /// Round trip of a full packet and its acknowledgement on idle links.
    #[must_use]
    pub fn round_trip(&self, is_far: bool) -> Nanos {
        self.sites.one_way(PAYLOAD_BYTES + HEADER_BYTES, is_far)
            + self.sites.one_way(HEADER_BYTES, is_far)
    }

    /// What all its flows share.
    pub(super) fn domain(&self, packet_bytes: u64) -> Domain {
        Domain {
            line_bytes_per_second: self.sites.host.rate_bits_per_second / 8,
            near_rtt: self.round_trip(false),
            far_rtt: self.round_trip(true),
            packet_bytes,
        }
    }

    /// Its network, idle, with what is to happen to it.
    pub(super) fn fabric<T: Clone>(&self) -> Fabric<T> {
        let mut fabric = Fabric::new(self.sites.build(), self.seed);
        let mut by_port: BTreeMap<u32, Vec<&Change>> = BTreeMap::new();
        for change in &self.changes {
            by_port.entry(self.port(fabric.topology(), change.place).0).or_default().push(change);
        }
        for (port, changes) in by_port {
            Self::arrange(&mut fabric, PortId(port), &changes);
        }
        fabric
    }

    /// The port of a place that exists.
    fn port(&self, topology: &Topology, place: Place) -> PortId {
        let links = usize::from(self.sites.wan_links);
        match place {
            Place::ToHost(host) => Sites::port_to(topology, NodeId(host)).unwrap_or(PortId(0)),
            Place::Wan { from_site, link } => {
                let sites = 2 - usize::from(from_site);
                PortId((topology.ports().len() - sites * links) as u32 + u32::from(link))
            }
        }
    }

    fn arrange<T: Clone>(fabric: &mut Fabric<T>, port: PortId, changes: &[&Change]) {
        let usual = fabric.topology().ports()[port.index()].link.rate_bits_per_second;
        let (mut outages, mut narrows, mut detours, mut rates) = (vec![], vec![], vec![], vec![]);
        for Change { effect, start, end, .. } in changes.iter().copied().copied() {
            match effect {
                Effect::Down => outages.push((start, end)),
                Effect::Narrow(bytes) => narrows.push((start, end, bytes)),
                Effect::Longer(nanos) => detours.push((start, end, nanos)),
                Effect::Rate(rate) => rates.extend([(start, rate), (end, usual)]),
            }
        }
        fabric.set_outages(port, &outages);
        fabric.set_narrows(port, &narrows);
        fabric.set_detours(port, &detours);
        fabric.set_rates(port, &rates);
    }
}
