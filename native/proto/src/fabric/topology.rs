//! Hosts, switches and the cables between them, with the shortest paths.

use std::collections::VecDeque;

use crate::link::{LinkConfig, Nanos};

/// A host or a switch. Hosts come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u16);

impl NodeId {
    fn index(self) -> usize {
        self.0.into()
    }
}

/// One direction of a cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u32);

impl PortId {
    /// Its index among the ports.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a port leads, and how.
#[derive(Debug, Clone, Copy)]
pub struct PortSetup {
    /// The node at which packets leave …
    pub from: NodeId,
    /// … and the one at which they arrive.
    pub to: NodeId,
    /// Its wire and buffer.
    pub link: LinkConfig,
}

/// A network: nodes, ports, and for each pair of a node and a host the ports on shortest paths.
#[derive(Debug)]
pub struct Topology {
    hosts: u16,
    ports: Vec<PortSetup>,
    /// For each node and host, start and number of its ports in `choices`.
    routes: Vec<(u32, u32)>,
    choices: Vec<PortId>,
}

impl Topology {
    /// A network of this many hosts, followed by switches, connected by these ports.
    ///
    /// # Panics
    /// If a port names a node that does not exist.
    #[must_use]
    pub fn new(hosts: u16, switches: u16, ports: Vec<PortSetup>) -> Self {
        let nodes = usize::from(hosts) + usize::from(switches);
        let mut arriving = vec![Vec::new(); nodes];
        let mut leaving = vec![Vec::new(); nodes];
        for (index, port) in (0..).map(PortId).zip(&ports) {
            arriving[port.to.index()].push(port.from);
            leaving[port.from.index()].push(index);
        }
        let mut routes = vec![(0, 0); nodes * usize::from(hosts)];
        let mut choices = Vec::new();
        for host in 0..hosts {
            let distances = distances(NodeId(host), &arriving);
            for node in 0..nodes {
                let start = choices.len() as u32;
                let shorter = leaving[node].iter().filter(|port| {
                    let next = ports[port.index()].to.index();
                    distances[next].saturating_add(1) == distances[node]
                });
                choices.extend(shorter.copied());
                routes[node * usize::from(hosts) + usize::from(host)] =
                    (start, choices.len() as u32 - start);
            }
        }
        Self { hosts, ports, routes, choices }
    }

    /// Number of hosts.
    #[must_use]
    pub fn hosts(&self) -> u16 {
        self.hosts
    }

    /// All ports, in the order of their ids.
    #[must_use]
    pub fn ports(&self) -> &[PortSetup] {
        &self.ports
    }

    /// The ports of a node on shortest paths to a host.
    #[must_use]
    pub fn choices(&self, node: NodeId, host: NodeId) -> &[PortId] {
        let (start, count) = self.routes[node.index() * usize::from(self.hosts) + host.index()];
        &self.choices[start as usize..(start + count) as usize]
    }
}

/// Hops from each node to a host; `u32::MAX` if there is no way. Hosts don't forward.
fn distances(host: NodeId, arriving: &[Vec<NodeId>]) -> Vec<u32> {
    let mut distances = vec![u32::MAX; arriving.len()];
    distances[host.index()] = 0;
    let mut reached = VecDeque::from([host]);
    while let Some(node) = reached.pop_front() {
        for from in &arriving[node.index()] {
            if distances[from.index()] == u32::MAX {
                distances[from.index()] = distances[node.index()] + 1;
                reached.push_back(*from);
            }
        }
    }
    distances
}

/// Two data centres of 128 hosts: each a fat tree of three tiers (8 pods with 4 leaf and 4
/// aggregation switches, 16 core switches) below one border switch, with parallel links between the
/// two border switches. The topology of Uno's evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sites {
    /// A cable within a data centre.
    pub near: LinkConfig,
    /// A cable from a host to its leaf switch.
    pub host: LinkConfig,
    /// A cable between a core switch and the border switch.
    pub border: LinkConfig,
    /// A link between the data centres …
    pub wan: LinkConfig,
    /// … and how many there are.
    pub wan_links: u16,
}

const SITES: u16 = 2;
const PODS: u16 = 8;
const LEAVES: u16 = 4;
const HOSTS_PER_LEAF: u16 = 4;
const AGGREGATIONS: u16 = 4;
const CORES_PER_AGGREGATION: u16 = 4;
const CORES: u16 = AGGREGATIONS * CORES_PER_AGGREGATION;
const LINKS_PER_CORE: u16 = 8;
const HOSTS: u16 = PODS * LEAVES * HOSTS_PER_LEAF;
const SWITCHES: u16 = PODS * (LEAVES + AGGREGATIONS) + CORES + 1;

impl Sites {
    /// Hosts of one data centre: those of the second follow those of the first.
    pub const HOSTS: u16 = HOSTS;

    /// Builds the network. Its last `2 × wan_links` ports are the links between the data centres,
    /// first those that leave the first one.
    #[must_use]
    pub fn build(&self) -> Topology {
        let mut ports = Vec::new();
        let mut connect = |a: NodeId, b: NodeId, up: LinkConfig, down: LinkConfig| {
            ports.push(PortSetup { from: a, to: b, link: up });
            ports.push(PortSetup { from: b, to: a, link: down });
        };
        let border = |site: u16| NodeId(SITES * HOSTS + (site + 1) * SWITCHES - 1);
        for site in 0..SITES {
            let host = |pod: u16, leaf: u16, index: u16| {
                NodeId(site * HOSTS + (pod * LEAVES + leaf) * HOSTS_PER_LEAF + index)
            };
            let switches = SITES * HOSTS + site * SWITCHES;
            let leaf_of = |pod: u16, leaf: u16| NodeId(switches + pod * LEAVES + leaf);
            let aggregations = switches + PODS * LEAVES;
            let aggregation_of =
                |pod: u16, index: u16| NodeId(aggregations + pod * AGGREGATIONS + index);
            let core_of = |index: u16| NodeId(aggregations + PODS * AGGREGATIONS + index);
            for pod in 0..PODS {
                for leaf in 0..LEAVES {
                    for index in 0..HOSTS_PER_LEAF {
                        connect(host(pod, leaf, index), leaf_of(pod, leaf), self.host, self.near);
                    }
                    for aggregation in 0..AGGREGATIONS {
                        let up = aggregation_of(pod, aggregation);
                        connect(leaf_of(pod, leaf), up, self.near, self.near);
                    }
                }
                for aggregation in 0..AGGREGATIONS {
                    for index in 0..CORES_PER_AGGREGATION {
                        let core = core_of(aggregation * CORES_PER_AGGREGATION + index);
                        connect(aggregation_of(pod, aggregation), core, self.near, self.near);
                    }
                }
            }
            for core in 0..CORES {
                for _ in 0..LINKS_PER_CORE {
                    connect(core_of(core), border(site), self.border, self.border);
                }
            }
        }
        for (from, to) in [(0, 1), (1, 0)] {
            let wan = PortSetup { from: border(from), to: border(to), link: self.wan };
            ports.extend((0..self.wan_links).map(|_| wan));
        }
        Topology::new(SITES * HOSTS, SITES * SWITCHES, ports)
    }

    /// A port that leads to a host, for its queue.
    #[must_use]
    pub fn port_to(topology: &Topology, host: NodeId) -> Option<PortId> {
        let found = topology.ports().iter().position(|port| port.to == host)?;
        Some(PortId(found as u32))
    }

    /// One-way time of a packet of this many bytes between hosts of different pods or sites, on
    /// idle links.
    #[must_use]
    pub fn one_way(&self, wire_bytes: u32, is_far: bool) -> Nanos {
        let time = |link: &LinkConfig| {
            let bits = u128::from(wire_bytes) * 8 * 1_000_000_000;
            let rate = u128::from(link.rate_bits_per_second.max(1));
            // Rounded up once per hop.
            (bits.div_ceil(rate)) as Nanos + link.delay_nanos
        };
        let [host, near, border, wan] = [&self.host, &self.near, &self.border, &self.wan].map(time);
        if is_far { host + 5 * near + 2 * border + wan } else { host + 5 * near }
    }
}
