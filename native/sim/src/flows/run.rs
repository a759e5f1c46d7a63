//! What all worlds of a cell have in common: the network, and the loop that runs them.

use sealane_proto::congestion::Domain;
use sealane_proto::fabric::{Fabric, NodeId, PortId, Sites};
use sealane_proto::link::Nanos;

use super::{Cell, CellOutcome, FlowOutcome, FlowSetup, HEADER_BYTES, PAYLOAD_BYTES, Sample};

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
                queued_bytes: port.map_or(0, |port| world.fabric().queued_bytes(port, sample_at)),
            });
            sample_at += cell.sample_every;
        }
        world.step(now);
    }
    let fabric = world.fabric();
    let ports = (0..fabric.topology().ports().len() as u32).map(PortId);
    CellOutcome {
        overflowed_packets: ports.map(|port| fabric.counters(port).overflowed_packets).sum(),
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

    /// Its network, idle, with the outages of the links between the data centres.
    pub(super) fn fabric<T: Clone>(&self) -> Fabric<T> {
        let mut fabric = Fabric::new(self.sites.build(), self.seed);
        let links = self.sites.wan_links;
        let first = fabric.topology().ports().len() - 2 * usize::from(links);
        for link in 0..links {
            let of_link = self.outages.iter().filter(|(index, ..)| *index == link);
            let outages: Vec<_> = of_link.map(|(_, start, end)| (*start, *end)).collect();
            fabric.set_outages(PortId(first as u32 + u32::from(link)), &outages);
        }
        fabric
    }
}
