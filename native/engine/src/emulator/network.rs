//! What an emulator's packets pass: two switches, one for each side, with parallel paths between
//! them, and, if the hosts have access links, a cable from each host to the switch of its side.

use hdrhistogram::Histogram;
use sealane_proto::fabric::{Class, Fabric, NodeId, Packet, PortId, PortSetup, Topology};
use sealane_proto::link::{LinkConfig, LinkCounters, Nanos};

use super::{BATCH, EmulatorConfig, Spell};

/// Largest lateness recorded: a minute.
const SLIP_NANOS_MAX: Nanos = 60_000_000_000;
/// The switches, where packets enter and leave if there are no access links.
const SWITCHES: usize = 2;

/// Results of one direction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirectionReport {
    /// Counters of each path's link.
    pub paths: Vec<LinkCounters>,
    /// Packets sent on, including copies.
    pub sent_packets: u64,
    /// Packets that the kernel did not accept.
    pub unsent_packets: u64,
    /// Lateness of sent packets, which is this machine's error in the delay: (nanoseconds to within
    /// a hundredth, number of packets).
    pub slips: Vec<(Nanos, u64)>,
}

/// One direction of a host's access link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AccessReport {
    /// Its counters.
    pub link: LinkCounters,
    /// Bytes in its buffer now.
    pub queued_bytes: u64,
}

/// A packet at the end of its way.
#[derive(Debug)]
pub(super) struct Arrived<P> {
    pub packet: P,
    /// When it is due.
    pub at: Nanos,
    pub is_marked: bool,
    /// Chance that decides which bit is flipped, if one is.
    pub corruption: Option<u64>,
}

/// Where a packet enters and leaves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    /// Side at which it enters.
    pub side: usize,
    /// Index of the host that sends it, and of the one that gets it; only with access links.
    pub hosts: (usize, usize),
}

#[derive(Debug, Clone)]
struct Traveller<P> {
    side: usize,
    /// Index of the host that sent it.
    from: usize,
    packet: P,
}

struct Tally {
    sent_packets: u64,
    unsent_packets: u64,
    slips: Histogram<u64>,
}

pub(super) struct Network<P> {
    fabric: Fabric<Traveller<P>>,
    /// Paths of each direction; their ports come first, those forward before those back.
    paths: usize,
    /// Number of hosts with access links. The ports of each, to and from its switch, follow.
    hosts: usize,
    tallies: [Tally; SWITCHES],
    /// Bytes that arrived at each host, by the host that sent them; empty without access links.
    arrived_bytes: Vec<Vec<u64>>,
}

impl<P: Clone> Network<P> {
    /// `sides`: the side of each host, for access links.
    pub fn new(config: &EmulatorConfig, sides: &[usize]) -> Self {
        let hosts = if config.access.is_some() { sides.len() } else { 0 };
        // Without access links the switches themselves are where packets go.
        let switch = |side: usize| NodeId((hosts + side) as u16);
        let cable = |from, to, link: &LinkConfig| PortSetup { from, to, link: *link };
        let forward = config.forward.iter().map(|link| cable(switch(0), switch(1), link));
        let backward = config.backward.iter().map(|link| cable(switch(1), switch(0), link));
        let mut ports: Vec<PortSetup> = forward.chain(backward).collect();
        if let Some(link) = &config.access {
            for (host, side) in sides.iter().enumerate() {
                let host = NodeId(host as u16);
                let switch = switch(*side);
                ports.extend([cable(host, switch, link), cable(switch, host, link)]);
            }
        }
        let (ends, inner) = if hosts > 0 { (hosts, SWITCHES) } else { (SWITCHES, 0) };
        let topology = Topology::new(ends as u16, inner as u16, ports);
        let tally = || Tally {
            sent_packets: 0,
            unsent_packets: 0,
            slips: Histogram::new_with_max(SLIP_NANOS_MAX, 2).expect("the constants are valid"),
        };
        let fabric = Fabric::new(topology, config.seed);
        Self {
            fabric,
            paths: config.forward.len(),
            hosts,
            tallies: [tally(), tally()],
            arrived_bytes: vec![vec![0; hosts]; hosts],
        }
    }

    /// Whether packets between hosts of one side pass it.
    pub fn has_access_links(&self) -> bool {
        self.hosts > 0
    }

    /// Sets when paths are down or longer in both directions, in absolute times.
    pub fn set_schedule(&mut self, schedule: &[Spell]) {
        for path in 0..self.paths {
            let of_path = || schedule.iter().filter(move |spell| spell.path == path);
            let outages: Vec<_> = of_path()
                .filter(|spell| spell.more_nanos.is_none())
                .map(|spell| (spell.start_nanos, spell.end_nanos))
                .collect();
            let detours: Vec<_> = of_path()
                .filter_map(|spell| Some((spell.start_nanos, spell.end_nanos, spell.more_nanos?)))
                .collect();
            for port in [path, self.paths + path].map(|port| PortId(port as u32)) {
                self.fabric.set_outages(port, &outages);
                self.fabric.set_detours(port, &detours);
            }
        }
    }

    /// Offers a packet. `flow_hash` chooses one of the paths.
    pub fn offer(
        &mut self,
        packet: P,
        route: Route,
        flow_hash: u64,
        (wire_bytes, is_ecn_capable): (u32, bool),
        now: Nanos,
    ) {
        let Route { side, hosts: (from, to) } = route;
        let (from, to) = if self.has_access_links() { (from, to) } else { (side, 1 - side) };
        let packet = Packet {
            to: NodeId(to as u16),
            flow: flow_hash,
            entropy: 0,
            class: Class::Data,
            wire_bytes,
            is_ecn_capable,
            is_marked: false,
            corruption: None,
            body: Traveller { side, from, packet },
        };
        // The first port counts what it refuses.
        let _ = self.fabric.offer(NodeId(from as u16), packet, now);
    }

    /// Takes packets that are due, by the side at which they entered, together no more than came in
    /// at a time.
    pub fn take_due(&mut self, now: Nanos, batches: &mut [Vec<Arrived<P>>; SWITCHES]) {
        for _ in 0..BATCH {
            let Some((at, packet)) = self.fabric.take(now) else { return };
            let Packet { to, wire_bytes, is_marked, corruption, body, .. } = packet;
            let Traveller { side, from, packet } = body;
            let at_host = self.arrived_bytes.get_mut(usize::from(to.0));
            if let Some(bytes) = at_host.and_then(|senders| senders.get_mut(from)) {
                *bytes += u64::from(wire_bytes);
            }
            batches[side].push(Arrived { packet, at, is_marked, corruption });
        }
    }

    /// Counts packets that were sent.
    pub fn sent(&mut self, side: usize, scheduled: &[Nanos], unsent: u64, now: Nanos) {
        let tally = &mut self.tallies[side];
        tally.sent_packets += scheduled.len() as u64 - unsent;
        tally.unsent_packets += unsent;
        for at in scheduled {
            tally.slips.saturating_record(now.saturating_sub(*at));
        }
    }

    pub fn next_at(&self) -> Option<Nanos> {
        self.fabric.next_at()
    }

    fn counters(&self, port: usize) -> LinkCounters {
        self.fabric.counters(PortId(port as u32))
    }

    pub fn direction(&self, side: usize) -> DirectionReport {
        let Tally { sent_packets, unsent_packets, slips } = &self.tallies[side];
        let first = side * self.paths;
        let slips = slips.iter_recorded();
        DirectionReport {
            paths: (first..first + self.paths).map(|port| self.counters(port)).collect(),
            sent_packets: *sent_packets,
            unsent_packets: *unsent_packets,
            slips: slips.map(|step| (step.value_iterated_to(), step.count_at_value())).collect(),
        }
    }

    /// Bytes that arrived at each host, by the host that sent them; empty without access links.
    pub fn arrived_bytes(&self) -> Vec<Vec<u64>> {
        self.arrived_bytes.clone()
    }

    /// The access link of each host, to its switch and from there.
    pub fn access(&self, now: Nanos) -> Vec<[AccessReport; 2]> {
        let report = |port: usize| AccessReport {
            link: self.counters(port),
            queued_bytes: self.fabric.queued_bytes(PortId(port as u32), now),
        };
        let first = SWITCHES * self.paths;
        (0..self.hosts).map(|host| [0, 1].map(|down| report(first + 2 * host + down))).collect()
    }
}
