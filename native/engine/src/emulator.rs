//! A long-haul link on one machine: relays UDP between two loopback ports, each way through its
//! own `Link` (rate, delay, buffer, loss), on its own thread.
//!
//! It handles *wire* packets: what arrives as one segmentation-offload list is taken apart first,
//! so that every packet is delayed and lost on its own. The client's side is learned from its
//! first packet; everything it sends goes on to `forward_to`, and back.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use sealane_proto::link::{Fate, Link, LinkConfig, LinkCounters, Nanos};

use crate::clock::{now, sharpen_timers, timespec};
use crate::udp::{HEADER_BYTES, Udp};

/// Packets on their way in one direction; beyond it they overflow. 2^18 packets of 1500 bytes are
/// 25 ms at 125 Gbit/s, more than this relay can carry.
const IN_TRANSIT_MAX: usize = 1 << 18;

/// What one direction has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DirectionCounters {
    /// What the link decided.
    pub link: LinkCounters,
    /// Packets sent on.
    pub sent_packets: u64,
    /// Packets that the kernel would not take, or that had nowhere to go.
    pub unsent_packets: u64,
    /// Longest that a packet left after its time: the error this machine adds to the delay.
    pub slip_max_nanos: Nanos,
}

/// Both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EmulatorCounters {
    /// From the client to `forward_to`.
    pub forward: DirectionCounters,
    /// Back to the client.
    pub backward: DirectionCounters,
}

/// A running relay; stops when dropped.
#[derive(Debug)]
pub struct Emulator {
    address: SocketAddr,
    counters: Arc<Mutex<EmulatorCounters>>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Emulator {
    /// Starts relaying between a new loopback port and `forward_to`. Both directions have the
    /// parameters of `config`; the way back draws from the seed after `config.seed`.
    pub fn start(config: LinkConfig, forward_to: SocketAddr) -> io::Result<Self> {
        let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
        let near = Udp::bind(any)?;
        let far = Udp::bind(any)?;
        let address = near.local_address()?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let counters = Arc::new(Mutex::new(EmulatorCounters::default()));
        let backward = LinkConfig { seed: config.seed.wrapping_add(1), ..config };
        let relay = Relay {
            near,
            far,
            forward: Direction::new(config, Some(forward_to)),
            backward: Direction::new(backward, None),
            counters: Arc::clone(&counters),
        };
        let stopped = stop.try_clone()?;
        let thread = std::thread::Builder::new()
            .name("sealane-emulator".into())
            .spawn(move || relay.run(&stopped))?;
        Ok(Self { address, counters, stop, thread: Some(thread) })
    }

    /// Where the client sends to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What happened so far.
    pub fn counters(&self) -> EmulatorCounters {
        *self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops the thread and waits for it; packets in transit are dropped.
    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // An eventfd takes a one unless it was already told 2^64-2 times.
            let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
            let _ = thread.join();
        }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Direction {
    link: Link,
    destination: Option<SocketAddr>,
    in_transit: VecDeque<(Nanos, Vec<u8>)>,
    sent_packets: u64,
    unsent_packets: u64,
    slip_max_nanos: Nanos,
}

impl Direction {
    fn new(config: LinkConfig, destination: Option<SocketAddr>) -> Self {
        Self {
            link: Link::new(config),
            destination,
            in_transit: VecDeque::new(),
            sent_packets: 0,
            unsent_packets: 0,
            slip_max_nanos: 0,
        }
    }

    fn accept(&mut self, packet: &[u8], now: Nanos) {
        let wire_bytes = packet.len() as u32 + HEADER_BYTES;
        if let Fate::Delivered { at } = self.link.offer(wire_bytes, now) {
            if self.in_transit.len() < IN_TRANSIT_MAX {
                self.in_transit.push_back((at, packet.to_vec()));
            } else {
                self.unsent_packets += 1;
            }
        }
    }

    /// Sends what is due. Returns when the next packet is.
    fn release(&mut self, through: &Udp) -> Option<Nanos> {
        loop {
            let (at, _) = self.in_transit.front()?;
            let time = now();
            if *at > time {
                return Some(*at);
            }
            let (at, packet) = self.in_transit.pop_front()?;
            let sent = self
                .destination
                .is_some_and(|to| through.send(to, &packet, packet.len().max(1)).is_ok());
            if sent {
                self.sent_packets += 1;
                self.slip_max_nanos = self.slip_max_nanos.max(time - at);
            } else {
                self.unsent_packets += 1;
            }
        }
    }

    fn counters(&self) -> DirectionCounters {
        DirectionCounters {
            link: self.link.counters(),
            sent_packets: self.sent_packets,
            unsent_packets: self.unsent_packets,
            slip_max_nanos: self.slip_max_nanos,
        }
    }
}

struct Relay {
    near: Udp,
    far: Udp,
    forward: Direction,
    backward: Direction,
    counters: Arc<Mutex<EmulatorCounters>>,
}

impl Relay {
    fn run(mut self, stop: &OwnedFd) {
        sharpen_timers();
        let mut readable = [true, true];
        loop {
            self.receive(readable);
            let due = [self.forward.release(&self.far), self.backward.release(&self.near)];
            *self.counters.lock().unwrap_or_else(PoisonError::into_inner) = EmulatorCounters {
                forward: self.forward.counters(),
                backward: self.backward.counters(),
            };
            let wait = due.into_iter().flatten().min().map(|at| timespec(at.saturating_sub(now())));
            let mut fds = [
                PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.near.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.far.as_fd(), PollFlags::IN),
            ];
            if poll(&mut fds, wait.as_ref()).is_err() {
                continue; // EINTR: look again
            }
            if !fds[0].revents().is_empty() {
                return;
            }
            readable = [!fds[1].revents().is_empty(), !fds[2].revents().is_empty()];
        }
    }

    fn receive(&mut self, [is_near, is_far]: [bool; 2]) {
        let Self { near, far, forward, backward, .. } = self;
        let time = now();
        // A receive error is an ICMP answer to an earlier packet: it was counted when sent.
        if is_near {
            let _ = near.receive(|packet, from| {
                let client = *backward.destination.get_or_insert(from);
                if client == from {
                    forward.accept(packet, time);
                }
            });
        }
        if is_far {
            let _ = far.receive(|packet, from| {
                if forward.destination == Some(from) {
                    backward.accept(packet, time);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use super::*;

    fn config(loss_parts_per_billion: u32) -> LinkConfig {
        LinkConfig {
            rate_bits_per_second: 1_000_000_000,
            delay_nanos: 2_000_000,
            buffer_bytes: 16 << 20,
            loss_parts_per_billion,
            seed: 7,
        }
    }

    fn socket() -> UdpSocket {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket
    }

    #[test]
    fn relays_both_ways_after_the_delay() {
        let (client, server) = (socket(), socket());
        let mut emulator = Emulator::start(config(0), server.local_addr().unwrap()).unwrap();
        let start = now();
        client.send_to(b"ping", emulator.address()).unwrap();
        let mut bytes = [0; 64];
        let (length, from) = server.recv_from(&mut bytes).unwrap();
        assert_eq!(&bytes[..length], b"ping");
        assert!(now() - start >= 2_000_000);
        server.send_to(b"pong", from).unwrap();
        let (length, from) = client.recv_from(&mut bytes).unwrap();
        assert_eq!((&bytes[..length], from), (&b"pong"[..], emulator.address()));
        assert!(now() - start >= 4_000_000);
        emulator.stop();
        let counters = emulator.counters();
        assert_eq!(counters.forward.link.offered_bytes, 4 + u64::from(HEADER_BYTES));
        assert_eq!((counters.forward.sent_packets, counters.backward.sent_packets), (1, 1));
    }

    #[test]
    fn strangers_are_not_relayed() {
        let (client, server, stranger) = (socket(), socket(), socket());
        let emulator = Emulator::start(config(0), server.local_addr().unwrap()).unwrap();
        client.send_to(b"first", emulator.address()).unwrap();
        let mut bytes = [0; 64];
        server.recv_from(&mut bytes).unwrap();
        stranger.send_to(b"strange", emulator.address()).unwrap();
        client.send_to(b"second", emulator.address()).unwrap();
        let (length, _) = server.recv_from(&mut bytes).unwrap();
        assert_eq!(&bytes[..length], b"second");
    }

    /// A list of packets handed to the kernel in one call must be lost packet by packet.
    #[test]
    fn segmentation_lists_are_lost_packet_by_packet() {
        const LISTS: u32 = 40;
        const SEGMENTS: u32 = 40;
        let server = socket();
        let sender = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut emulator =
            Emulator::start(config(100_000_000), server.local_addr().unwrap()).unwrap();
        let mut seen = Vec::new();
        for list in 0..LISTS {
            let contents: Vec<u8> = (0..SEGMENTS)
                .flat_map(|segment| {
                    let mut packet = vec![0; 1000];
                    packet[..4].copy_from_slice(&(list * SEGMENTS + segment).to_le_bytes());
                    packet
                })
                .collect();
            sender.send(emulator.address(), &contents, 1000).unwrap();
            server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            let mut bytes = [0; 2000];
            while let Ok((1000, _)) = server.recv_from(&mut bytes) {
                let number = u32::from_le_bytes(bytes[..4].try_into().unwrap());
                seen.push(number);
                if number % SEGMENTS == SEGMENTS - 1 {
                    break;
                }
            }
        }
        emulator.stop();
        let link = emulator.counters().forward.link;
        assert_eq!(link.offered_packets, u64::from(LISTS * SEGMENTS));
        assert_eq!(link.delivered_packets, seen.len() as u64);
        let missing: Vec<u32> = (0..LISTS * SEGMENTS).filter(|n| !seen.contains(n)).collect();
        // Seeded: 10 % of 1600, within four standard deviations, and never a list at once.
        assert!((112..=208).contains(&missing.len()), "{} lost", missing.len());
        let mut longest = 0;
        let mut run = 0;
        for number in 0..LISTS * SEGMENTS {
            run = if missing.contains(&number) { run + 1 } else { 0 };
            longest = longest.max(run);
        }
        assert!(longest <= 6, "a run of {longest} losses");
    }
}
