//! UDP between two loopback ports. Every client has its own way back, so a session with several
//! subflows (UDP source ports) crosses the link as several flows.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use quinn_udp::EcnCodepoint;
use sealane_proto::ip::flow_hash;

use super::network::{Arrived, Network, Route};
use super::{EmulatorConfig, Medium, MediumReport};
use crate::clock::now;
use crate::udp::{HEADER_BYTES, Udp};

/// Most clients of a relay. Packets of further clients count as foreign.
pub const FLOWS_MAX: usize = 64;
/// Protocol number of UDP (RFC 768).
const UDP: u8 = 17;

struct Flow {
    client: SocketAddr,
    /// The socket that communicates with `forward_to` on behalf of this client.
    far: Udp,
}

#[derive(Debug, Clone)]
pub(super) struct Datagram {
    flow: usize,
    payload: Vec<u8>,
    ecn: Option<EcnCodepoint>,
}

pub(super) struct Relay {
    near: Udp,
    forward_to: SocketAddr,
    flows: Vec<Flow>,
    by_client: HashMap<SocketAddr, usize>,
    salt: u64,
    strips_ce: [bool; 2],
    foreign_packets: u64,
}

impl Relay {
    pub fn bind(forward_to: SocketAddr, config: &EmulatorConfig) -> io::Result<Self> {
        let near = Udp::bind(LOOPBACK)?;
        let (flows, by_client) = (Vec::new(), HashMap::new());
        let EmulatorConfig { seed: salt, strips_ce, .. } = *config;
        Ok(Self { near, forward_to, flows, by_client, salt, strips_ce, foreign_packets: 0 })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.near.local_address()
    }
}

const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Returns the flow of a client; a new client gets a new socket.
fn flow_of(
    client: SocketAddr,
    flows: &mut Vec<Flow>,
    by_client: &mut HashMap<SocketAddr, usize>,
) -> Option<usize> {
    if let Some(flow) = by_client.get(&client) {
        return Some(*flow);
    }
    if flows.len() == FLOWS_MAX {
        return None;
    }
    // Without a socket there is no way back, so the client's packets count as foreign.
    let far = Udp::bind(LOOPBACK).ok()?;
    flows.push(Flow { client, far });
    by_client.insert(client, flows.len() - 1);
    Some(flows.len() - 1)
}

fn hash_between(from: SocketAddr, to: SocketAddr, salt: u64) -> u64 {
    flow_hash((from.ip(), to.ip()), Some((from.port(), to.port())), UDP, salt)
}

impl Medium for Relay {
    type Packet = Datagram;

    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.near.as_fd()).chain(self.flows.iter().map(|flow| flow.far.as_fd()))
    }

    fn sides(&self) -> Vec<usize> {
        Vec::new()
    }

    fn receive(&mut self, network: &mut Network<Datagram>) {
        let Self { near, forward_to, flows, by_client, salt, foreign_packets, .. } = self;
        let route = |side| Route { side, hosts: (0, 0) };
        let time = now();
        let wire_bytes = |payload: &[u8]| payload.len() as u32 + HEADER_BYTES;
        // A receive error is an ICMP error about an earlier packet, which was counted when it was
        // sent.
        let _ = near.receive(|payload, meta| {
            let Some(flow) = flow_of(meta.addr, flows, by_client) else {
                *foreign_packets += 1;
                return;
            };
            let hash = hash_between(meta.addr, *forward_to, *salt);
            let packet = Datagram { flow, payload: payload.to_vec(), ecn: meta.ecn };
            let wire = (wire_bytes(payload), meta.ecn.is_some());
            network.offer(packet, route(0), hash, wire, time);
        });
        for (flow, Flow { client, far }) in flows.iter_mut().enumerate() {
            let _ = far.receive(|payload, meta| {
                if meta.addr != *forward_to {
                    *foreign_packets += 1;
                    return;
                }
                let hash = hash_between(meta.addr, *client, *salt);
                let packet = Datagram { flow, payload: payload.to_vec(), ecn: meta.ecn };
                let wire = (wire_bytes(payload), meta.ecn.is_some());
                network.offer(packet, route(1), hash, wire, time);
            });
        }
    }

    fn send(&mut self, side: usize, batch: &mut Vec<Arrived<Datagram>>) -> u64 {
        let mut unsent = 0;
        for Arrived { packet, is_marked, corruption, .. } in batch.drain(..) {
            let Datagram { flow, mut payload, ecn } = packet;
            if let Some(chance) = corruption.filter(|_| !payload.is_empty()) {
                let bit = ((u128::from(chance) * (payload.len() as u128 * 8)) >> 64) as usize;
                payload[bit / 8] ^= 1 << (bit % 8);
            }
            let Flow { client, far } = &self.flows[flow];
            let (through, to) =
                if side == 0 { (far, self.forward_to) } else { (&self.near, *client) };
            let ecn = if is_marked { Some(EcnCodepoint::Ce) } else { ecn };
            let is_erased = self.strips_ce[side] && ecn == Some(EcnCodepoint::Ce);
            let ecn = if is_erased { Some(EcnCodepoint::Ect0) } else { ecn };
            unsent += u64::from(through.send(to, &payload, payload.len().max(1), ecn).is_err());
        }
        unsent
    }

    fn report(&mut self) -> MediumReport {
        MediumReport { foreign_packets: self.foreign_packets, ..MediumReport::default() }
    }
}
