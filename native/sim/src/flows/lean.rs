//! Lean flows in the network of a cell.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rand_chacha::ChaCha8Rng;
use rand_core::SeedableRng;
use sealane_proto::congestion::{Setup, Start};
use sealane_proto::fabric::{Class, Fabric, NodeId, Packet};
use sealane_proto::link::{LinkConfig, NANOS_PER_SECOND, Nanos};

use super::balance::Paths;
use super::flow::{Flow, News, Times};
use super::landing::{Arrived, Landing};
use super::run::{World, run};
use super::{
    Cell, CellError, CellOutcome, Chain, FlowOutcome, FlowSetup, HEADER_BYTES, PAYLOAD_BYTES,
};

const DATA_BYTES: u32 = PAYLOAD_BYTES + HEADER_BYTES;

/// What hosts exchange.
#[derive(Debug, Clone, Copy)]
enum Body {
    Data {
        number: u32,
        sent_at: Nanos,
        subflow: u8,
        wait: Nanos,
    },
    Ack {
        number: u32,
        sent_at: Nanos,
        subflow: u8,
        is_marked: bool,
        news: News,
    },
    /// The receiver asks for a block.
    Missing {
        block: u32,
    },
}

/// What has arrived of a flow.
#[derive(Debug)]
enum Received {
    Plain(Arrived),
    Coded(Landing),
}

struct LeanFlows {
    fabric: Fabric<Body>,
    flows: Vec<Flow>,
    received: Vec<Received>,
    /// When to wake which flow.
    wakes: BinaryHeap<Reverse<(Nanos, u32)>>,
    /// When to look at which block of which flow.
    blocks: BinaryHeap<Reverse<(Nanos, u32, u32)>>,
    /// Packets of a chunk of each flow that depends on another one.
    chunk_packets: Vec<Option<u32>>,
    /// Flows that follow each flow.
    followers: Vec<Vec<u32>>,
    /// When each chunk of each flow had arrived.
    chunks: Vec<Vec<Nanos>>,
    random: ChaCha8Rng,
    unfinished: usize,
    arrivals: u64,
}

/// Runs a cell to its end.
///
/// # Errors
/// If the cell is not valid.
pub fn run_cell(cell: &Cell) -> Result<CellOutcome, CellError> {
    cell.validate()?;
    Ok(run(cell, &mut LeanFlows::new(cell)))
}

fn drain(link: &LinkConfig) -> Nanos {
    let nanos = u128::from(link.buffer_bytes) * 8 * u128::from(NANOS_PER_SECOND)
        / u128::from(link.rate_bits_per_second.max(1));
    nanos as Nanos
}

impl LeanFlows {
    fn new(cell: &Cell) -> Self {
        let Cell { sites, .. } = cell;
        let domain = cell.domain(PAYLOAD_BYTES.into());
        let mut random = ChaCha8Rng::seed_from_u64(cell.seed);
        let mut build = |setup: &FlowSetup| {
            let is_far = setup.is_far();
            let far_drain = if is_far { 3 * drain(&sites.wan) } else { 0 };
            let times = Times {
                base_rtt: cell.round_trip(is_far),
                drain: 5 * drain(&sites.near) + far_drain,
            };
            let start = Setup {
                domain,
                rate_bytes_per_second: domain.line_bytes_per_second,
                base_rtt: times.base_rtt,
                timeout: times.base_rtt + times.drain,
                start: Start::Unknown,
            };
            let controller = cell.congestion.start(&start, is_far, setup.start);
            let paths = Paths::new(cell.balance, times.base_rtt, &mut random);
            Flow::new(*setup, times, cell.code.filter(|_| is_far), controller, paths)
        };
        let mut flows: Vec<Flow> = cell.flows.iter().map(&mut build).collect();
        let mut wakes = BinaryHeap::with_capacity(flows.len());
        let packets_of = |chain: Chain| (chain.chunk_bytes / u64::from(PAYLOAD_BYTES)) as u32;
        let chunk_packets: Vec<Option<u32>> =
            cell.chains.iter().map(|chain| chain.map(packets_of)).collect();
        for (flow, packets) in flows.iter_mut().zip(&chunk_packets) {
            flow.release(packets.unwrap_or(u32::MAX));
        }
        for (index, flow) in (0..).zip(&mut flows) {
            flow.wake_at = flow.setup.start;
            wakes.push(Reverse((flow.wake_at, index)));
        }
        let received = |flow: &Flow| match flow.code {
            Some(code) => Received::Coded(Landing::new(flow.blocks(), code.data)),
            None => Received::Plain(Arrived::new(flow.packets())),
        };
        let received = flows.iter().map(received).collect();
        Self {
            fabric: cell.fabric(),
            received,
            wakes,
            blocks: BinaryHeap::new(),
            chunk_packets,
            followers: cell.followers(),
            chunks: vec![Vec::new(); flows.len()],
            random,
            unfinished: flows.len(),
            arrivals: 0,
            flows,
        }
    }

    fn arrived(&mut self, packet: &Packet<Body>, now: Nanos) {
        let flow = packet.flow as u32;
        match packet.body {
            Body::Data { number, sent_at, subflow, wait } => {
                let news = self.landed(flow, number, wait, now);
                let is_marked = packet.is_marked;
                let body = Body::Ack { number, sent_at, subflow, is_marked, news };
                self.send_control(flow, body, packet.entropy, now);
            }
            Body::Ack { number, sent_at, subflow, is_marked, news } => {
                let sender = &mut self.flows[flow as usize];
                if sender.is_finished() {
                    return;
                }
                let packet = (number, sent_at, subflow);
                sender.acked(packet, (is_marked, news), &mut self.random, now);
                if sender.is_finished() {
                    self.unfinished -= 1;
                }
                self.drive(flow, now);
            }
            Body::Missing { block } => {
                let sender = &mut self.flows[flow as usize];
                if !sender.is_finished() {
                    sender.asked(block, &mut self.random, now);
                    self.drive(flow, now);
                }
            }
        }
    }

    /// A data packet has arrived. Returns what the sender learns from it.
    fn landed(&mut self, flow: u32, number: u32, wait: Nanos, now: Nanos) -> News {
        match &mut self.received[flow as usize] {
            Received::Plain(arrived) => {
                let end = arrived.packet(number);
                self.chunks_landed(flow, end, now);
                News::AllBelow(end)
            }
            Received::Coded(landing) => {
                let place = self.flows[flow as usize].place(number).unwrap_or_default();
                let (is_complete, look_at) = landing.packet(place, wait, now);
                if let Some(at) = look_at {
                    self.blocks.push(Reverse((at, flow, place.0)));
                }
                News::Block { is_complete }
            }
        }
    }

    /// All packets of a flow below this one have arrived: what waits for its chunks may leave.
    fn chunks_landed(&mut self, flow: u32, end: u32, now: Nanos) {
        let index = flow as usize;
        let Some(size) = self.chunk_packets.get(index).copied().flatten() else { return };
        let all = self.flows[index].packets();
        let before = self.chunks[index].len();
        while self.chunks[index].len() < all.div_ceil(size) as usize
            && end >= (size * (self.chunks[index].len() as u32 + 1)).min(all)
        {
            self.chunks[index].push(now);
        }
        let landed = self.chunks[index].len();
        if landed == before {
            return;
        }
        for follower in self.followers[index].clone() {
            self.flows[follower as usize].release(size * (landed as u32 + 1));
            self.drive(follower, now);
        }
    }

    /// Sends a control packet of the receiver on a path that it draws.
    fn answer(&mut self, flow: u32, body: Body, now: Nanos) {
        self.send_control(flow, body, now as u32, now);
    }

    fn send_control(&mut self, flow: u32, body: Body, entropy: u32, now: Nanos) {
        let FlowSetup { from, to, .. } = self.flows[flow as usize].setup;
        let packet = Packet {
            to: NodeId(from),
            flow: flow.into(),
            entropy,
            class: Class::Control,
            wire_bytes: HEADER_BYTES,
            is_ecn_capable: false,
            is_marked: false,
            corruption: None,
            body,
        };
        self.fabric.offer(NodeId(to), packet, now);
    }

    /// Sends what a flow may send, and arranges its next wake.
    fn drive(&mut self, flow: u32, now: Nanos) {
        let sender = &mut self.flows[flow as usize];
        while let Some(departure) = sender.send(&mut self.random, now) {
            let packet = Packet {
                to: NodeId(sender.setup.to),
                flow: flow.into(),
                entropy: departure.entropy,
                class: Class::Data,
                wire_bytes: DATA_BYTES,
                is_ecn_capable: true,
                is_marked: false,
                corruption: None,
                body: Body::Data {
                    number: departure.number,
                    sent_at: now,
                    subflow: departure.subflow,
                    wait: departure.wait,
                },
            };
            self.fabric.offer(NodeId(sender.setup.from), packet, now);
        }
        let Some(at) = sender.next_at() else { return };
        let at = at.max(now + 1);
        if at < sender.wake_at {
            sender.wake_at = at;
            self.wakes.push(Reverse((at, flow)));
        }
    }
}

impl World for LeanFlows {
    type Body = Body;

    fn fabric(&self) -> &Fabric<Body> {
        &self.fabric
    }

    fn is_over(&self) -> bool {
        self.unfinished == 0
    }

    fn next_at(&self) -> Option<Nanos> {
        let wake = self.wakes.peek().map(|Reverse((at, _))| *at);
        let block = self.blocks.peek().map(|Reverse((at, ..))| *at);
        [self.fabric.next_at(), wake, block].into_iter().flatten().min()
    }

    fn step(&mut self, now: Nanos) {
        while let Some((at, packet)) = self.fabric.take(now) {
            self.arrivals += 1;
            self.arrived(&packet, at);
        }
        while let Some(Reverse((at, flow, block))) =
            self.blocks.peek().copied().filter(|Reverse((at, ..))| *at <= now)
        {
            self.blocks.pop();
            if let Received::Coded(landing) = &mut self.received[flow as usize]
                && landing.is_due(block, at)
            {
                self.answer(flow, Body::Missing { block }, now);
            }
        }
        while let Some(Reverse((at, flow))) =
            self.wakes.peek().copied().filter(|Reverse((at, _))| *at <= now)
        {
            self.wakes.pop();
            if self.flows[flow as usize].wake_at == at {
                self.flows[flow as usize].wake_at = Nanos::MAX;
                self.flows[flow as usize].handle_timeout(&mut self.random, now);
                self.drive(flow, now);
            }
        }
    }

    fn acked_bytes(&self) -> Vec<u64> {
        self.flows.iter().map(|flow| flow.acked_packets * u64::from(PAYLOAD_BYTES)).collect()
    }

    fn outcomes(&self) -> Vec<FlowOutcome> {
        self.flows.iter().map(|flow| flow.outcome).collect()
    }

    fn arrivals(&self) -> u64 {
        self.arrivals
    }

    fn chunks(&self) -> Vec<Vec<Nanos>> {
        self.chunks.clone()
    }
}
