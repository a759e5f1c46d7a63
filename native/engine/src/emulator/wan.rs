//! IP packets between hosts, each of which is behind one interface of a network namespace.
//!
//! The hosts use no neighbour discovery and share one link-layer address, so frames are forwarded
//! unchanged.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use sealane_proto::ip::IpPacket;

use super::network::{Arrived, Network, Route};
use super::packet_socket::{ETHERNET_BYTES, PacketSocket};
use super::{BATCH, EmulatorConfig, Medium, MediumReport};

/// Most frames taken from one interface before due frames are sent.
const RECEIVE_MAX: usize = 4 * BATCH;

/// An interface and the host behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WanPort {
    /// Name of the interface.
    pub interface: String,
    /// Whether the host is on the second side.
    pub is_second_side: bool,
    /// The host's addresses on this link.
    pub addresses: Vec<IpAddr>,
}

struct Port {
    socket: PacketSocket,
    side: usize,
}

#[derive(Debug, Clone)]
pub(super) struct Frame {
    /// Index of the port by which it leaves.
    port: usize,
    header: IpPacket,
    bytes: Vec<u8>,
}

pub(super) struct Wan {
    ports: Vec<Port>,
    routes: HashMap<IpAddr, usize>,
    mtu: u16,
    salt: u64,
    corruption_passes_checksum: bool,
    strips_ce: [bool; 2],
    local: Vec<Frame>,
    report: MediumReport,
}

impl Wan {
    pub fn open(ports: Vec<WanPort>, mtu: u16, config: &EmulatorConfig) -> io::Result<Self> {
        let mut routes = HashMap::new();
        let mut opened = Vec::with_capacity(ports.len());
        for (index, port) in ports.into_iter().enumerate() {
            let socket = PacketSocket::open(&port.interface, mtu)?;
            opened.push(Port { socket, side: usize::from(port.is_second_side) });
            routes.extend(port.addresses.into_iter().map(|address| (address, index)));
        }
        Ok(Self {
            ports: opened,
            routes,
            mtu,
            salt: config.seed,
            corruption_passes_checksum: config.corruption_passes_checksum,
            strips_ce: config.strips_ce,
            local: Vec::new(),
            report: MediumReport::default(),
        })
    }

    /// Sends the packets that do not cross the link.
    fn send_local(&mut self) {
        for Frame { port, bytes, .. } in self.local.drain(..) {
            self.report.local_packets += 1;
            let sent = self.ports[port].socket.send(&[&bytes]);
            self.report.missed_packets += 1 - sent as u64;
        }
    }
}

impl Medium for Wan {
    type Packet = Frame;

    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.ports.iter().map(|port| port.socket.as_fd())
    }

    fn sides(&self) -> Vec<usize> {
        self.ports.iter().map(|port| port.side).collect()
    }

    fn receive(&mut self, network: &mut Network<Frame>) {
        let frame_bytes_max = usize::from(self.mtu) + ETHERNET_BYTES;
        let sides = self.sides();
        for (from, Port { socket, side }) in self.ports.iter_mut().enumerate() {
            socket.receive(RECEIVE_MAX, |bytes, frame_bytes, arrived_at| {
                if frame_bytes > frame_bytes_max {
                    self.report.oversized_packets += 1;
                    return;
                }
                let header = bytes.get(ETHERNET_BYTES..).and_then(IpPacket::parse);
                let routed = header
                    .and_then(|header| Some((header, *self.routes.get(&header.destination)?)));
                let Some((header, port)) = routed else {
                    self.report.foreign_packets += 1;
                    return;
                };
                let frame = Frame { port, header, bytes: bytes.to_vec() };
                if sides[port] == *side && !network.has_access_links() {
                    self.local.push(frame);
                    return;
                }
                let wire_bytes = (frame_bytes - ETHERNET_BYTES) as u32;
                let hash = header.flow_hash(self.salt);
                let route = Route { side: *side, hosts: (from, port) };
                network.offer(frame, route, hash, (wire_bytes, header.is_ecn_capable), arrived_at);
            });
        }
        self.send_local();
    }

    fn send(&mut self, side: usize, batch: &mut Vec<Arrived<Frame>>) -> u64 {
        for Arrived { packet: Frame { header, bytes, port }, is_marked, corruption, .. } in
            &mut *batch
        {
            let packet = &mut bytes[ETHERNET_BYTES..];
            if *is_marked {
                header.mark(packet);
            }
            if self.strips_ce[side] && self.ports[*port].side != side {
                header.erase_mark(packet);
            }
            if let Some(chance) = corruption {
                header.corrupt(packet, *chance, self.corruption_passes_checksum);
            }
        }
        let mut sent = 0;
        for (index, port) in self.ports.iter().enumerate() {
            let leaving = batch.iter().filter(|delivery| delivery.packet.port == index);
            let frames: Vec<&[u8]> = leaving.map(|d| d.packet.bytes.as_slice()).collect();
            sent += port.socket.send(&frames);
        }
        let unsent = batch.len() - sent;
        batch.clear();
        unsent as u64
    }

    fn report(&mut self) -> MediumReport {
        for port in &mut self.ports {
            self.report.missed_packets += port.socket.take_missed();
        }
        self.report
    }
}
