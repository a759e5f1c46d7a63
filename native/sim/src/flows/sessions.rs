//! The product's session machines in the network of a cell: one session for each flow.
//!
//! Payload is left out; lengths, timers and decisions are the product's. Entropies are the ports of
//! the sessions' paths.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use sealane_proto::aead::Secret;
use sealane_proto::fabric::{Class, Fabric, NodeId, Packet};
use sealane_proto::link::Nanos;
use sealane_proto::session::{
    Arrival, CompletionStatus, Departure, Detection, Ecn, Event, IpVersion, Marks, Memory,
    PACKETS_PER_KEY, PathId, PayloadMode, ReceiveRequest, Reliability, SendRequest, Session,
    SessionConfig, SessionKeys, SessionStatistics, Source, Steering, Version,
};

use super::run::{World, run};
use super::{Cell, CellError, CellOutcome, Congestion, FlowOutcome, FlowSetup, PAYLOAD_BYTES};

/// Bytes of the messages into which a flow is cut, and how many of them are posted at once.
const MESSAGE_BYTES: u64 = 1 << 24;
const MESSAGES_POSTED: u64 = 8;
/// Slots of a session.
const SLOTS: u16 = 16;
/// Silence after which a session ends.
const IDLE: Nanos = 60_000_000_000;
/// Packets up to this size leave a port first, as acknowledgements do in the lean model.
const CONTROL_BYTES_MAX: u32 = 600;

/// Settings of the sessions of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionsSetup {
    /// Paths of each session.
    pub paths: u8,
    /// What marks mean.
    pub marks: Marks,
    /// Whether ports send short packets first.
    pub control_first: bool,
    /// Code of the messages of flows between data centres; k, m.
    pub code: Option<(u8, u8)>,
    /// What becomes of the marks of the first flow, or of all flows, and from when on.
    pub tampering: Option<(Tampering, Victims, Nanos)>,
}

/// What a network, or a peer that lies, does to marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tampering {
    /// Every CE becomes ECT(0).
    Bleaches,
    /// Everything is marked CE.
    MarksAll,
}

/// Whose packets are tampered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victims {
    /// Those of the first flow.
    First,
    /// Those of all.
    All,
}

impl SessionsSetup {
    /// How a packet to a receiving end arrives.
    fn arrives(&self, flow: usize, ecn: Ecn, now: Nanos) -> Ecn {
        let Some((tampering, victims, from)) = self.tampering else { return ecn };
        let is_hit = now >= from && (flow == 0 || victims == Victims::All);
        match (tampering, ecn) {
            (Tampering::Bleaches, Ecn::Ce) if is_hit => Ecn::Ect0,
            (Tampering::MarksAll, _) if is_hit => Ecn::Ce,
            _ => ecn,
        }
    }
}

/// Memory of which nothing is read or written.
#[derive(Debug)]
struct NoMemory;

impl Memory for NoMemory {
    fn read(&self, _offset: u64, _into: &mut [u8]) {}

    fn write(&mut self, _offset: u64, _from: &[u8]) {}

    fn chunk_landed(&mut self, _slot: u16, _chunk: u32) {}

    fn chunks_cleared(&mut self, _slot: u16, _chunk_count: u32) {}
}

/// A datagram in the network.
#[derive(Debug, Clone)]
pub(super) struct Datagram {
    /// 0: to the receiver of the flow; 1: to its sender.
    direction: usize,
    path: PathId,
    ecn: Ecn,
    bytes: Vec<u8>,
}

/// A session with both ends.
struct Pair {
    setup: FlowSetup,
    /// Sender, receiver.
    ends: [Session; 2],
    reliability: Reliability,
    /// Posted so far.
    receives: u64,
    sends: u64,
    completed: u64,
    /// Bytes of the messages into which the flow is cut.
    message_bytes: u64,
    /// Messages that may be sent: all, unless something has to arrive before the others.
    released: u64,
    /// When each message, and all before it, had arrived …
    arrived: Vec<Nanos>,
    /// … and those that are there before one in front of them.
    arrived_early: BTreeSet<u64>,
    lost: bool,
    outcome: FlowOutcome,
    wake_at: [Nanos; 2],
}

impl Pair {
    fn messages(&self) -> u64 {
        self.setup.bytes.div_ceil(self.message_bytes)
    }

    /// Posts what may be posted.
    fn post(&mut self, now: Nanos) {
        let messages = self.messages();
        let end = messages.min(self.completed + MESSAGES_POSTED);
        let [sender, receiver] = &mut self.ends;
        while receiver.is_established() && self.receives < end {
            let (offset, length) = message_of(&self.setup, self.message_bytes, self.receives);
            let receive = ReceiveRequest { offset, length_max: length, user_data: 0 };
            if receiver.post_receive(receive, now).is_err() {
                break;
            }
            self.receives += 1;
        }
        while sender.is_established()
            && now >= self.setup.start
            && self.sends < end.min(self.released)
        {
            let (offset, length) = message_of(&self.setup, self.message_bytes, self.sends);
            let reliability = self.reliability;
            let send = SendRequest {
                offset,
                length,
                reliability,
                immediate: None,
                priority: 0,
                user_data: 0,
            };
            if sender.post_send(send, now).is_err() {
                break;
            }
            self.sends += 1;
        }
    }

    fn handle_events(&mut self, now: Nanos) {
        while let Some(event) = self.ends[0].next_event() {
            match event {
                Event::SendCompleted { status, .. } => {
                    self.completed += 1;
                    self.lost |= status != CompletionStatus::Ok;
                    if self.completed == self.messages() {
                        self.outcome.finished_at = if self.lost { 0 } else { now };
                    }
                }
                Event::Closed { .. } => self.lost = true,
                _ => {}
            }
        }
        while let Some(event) = self.ends[1].next_event() {
            if let Event::ReceiveCompleted { status: CompletionStatus::Ok, message, .. } = event {
                self.arrived_early.insert(message);
            }
        }
        while self.arrived_early.remove(&(self.arrived.len() as u64)) {
            self.arrived.push(now);
        }
        self.post(now);
    }

    fn is_over(&self) -> bool {
        self.completed == self.messages() || self.lost
    }
}

/// Offset and length of a message of a flow that is cut into messages of this many bytes.
fn message_of(setup: &FlowSetup, message_bytes: u64, number: u64) -> (u64, u64) {
    let offset = number * message_bytes;
    (offset, message_bytes.min(setup.bytes - offset))
}

pub(super) struct Sessions {
    setup: SessionsSetup,
    fabric: Fabric<Datagram>,
    pairs: Vec<Pair>,
    /// Pairs that follow each pair.
    followers: Vec<Vec<u32>>,
    /// Time, then twice the pair, plus the end.
    wakes: BinaryHeap<Reverse<(Nanos, u32)>>,
    unfinished: usize,
    arrivals: u64,
    out: Vec<u8>,
}

/// Runs a cell with the product's sessions instead of lean flows. The cell's balance and code are
/// replaced by `setup`.
///
/// # Errors
/// If the cell is not valid.
pub fn run_sessions(cell: &Cell, setup: SessionsSetup) -> Result<CellOutcome, CellError> {
    cell.validate()?;
    let Congestion::Product(algorithm) = cell.congestion else { return Err(CellError::Rival) };
    let domain = cell.domain(0);
    let steering = Steering {
        congestion: Some((algorithm, domain)),
        marks: setup.marks,
        ..Steering::default()
    };
    Ok(run(cell, &mut Sessions::new(cell, setup, steering, domain.line_bytes_per_second)))
}

impl Pair {
    fn outcome(&self) -> FlowOutcome {
        let statistics = self.ends[0].statistics();
        FlowOutcome {
            sent_packets: statistics.data_packets_sent + statistics.parity_packets_sent,
            repeated_packets: statistics.retransmitted_packets,
            ..self.outcome
        }
    }
}

impl Sessions {
    /// A session for each flow, each with this rate in bytes per second.
    pub(super) fn new(cell: &Cell, setup: SessionsSetup, steering: Steering, rate: u64) -> Self {
        let config = SessionConfig {
            version: Version::V6,
            connection_id_local: 1,
            connection_id_peer: 1,
            unit_bytes: PAYLOAD_BYTES as u16,
            ip: IpVersion::V4,
            paths: setup.paths,
            chunk_units: 16,
            slots: SLOTS,
            rate_bytes_per_second: rate,
            idle_timeout: IDLE,
            reordering: 0,
            detection: Detection::Reports,
            packets_per_key: PACKETS_PER_KEY,
            payload: PayloadMode::LengthsOnly,
        };
        let pair = |(index, flow): (usize, &FlowSetup)| {
            let end = |end: u64| {
                let secret =
                    |direction: u64| Secret::extract(&direction.to_be_bytes(), b"simulation");
                let mut token_seed = [end as u8; 32];
                token_seed[..8].copy_from_slice(&(index as u64).to_be_bytes());
                let keys = SessionKeys { send: secret(end), receive: secret(1 - end), token_seed };
                Session::new(config, steering, &keys, 0)
            };
            let code = setup.code.filter(|_| flow.is_far());
            let coded = |(k, m)| Reliability::ErasureCoded { k, m, depth: 1 };
            let chain = cell.chains.get(index).copied().flatten();
            Pair {
                setup: *flow,
                message_bytes: chain.map_or(MESSAGE_BYTES, |chain| chain.chunk_bytes),
                released: if chain.is_some() { 1 } else { u64::MAX },
                arrived: Vec::new(),
                arrived_early: BTreeSet::new(),
                ends: [end(0), end(1)],
                reliability: code.map_or(Reliability::SelectiveRepeat, coded),
                receives: 0,
                sends: 0,
                completed: 0,
                lost: false,
                outcome: FlowOutcome::default(),
                wake_at: [Nanos::MAX; 2],
            }
        };
        let pairs: Vec<Pair> = cell.flows.iter().enumerate().map(pair).collect();
        let mut world = Self {
            setup,
            fabric: cell.fabric(),
            followers: cell.followers(),
            wakes: BinaryHeap::new(),
            unfinished: pairs.len(),
            arrivals: 0,
            out: Vec::new(),
            pairs,
        };
        for index in 0..world.pairs.len() {
            world.drive(index, 0, 0);
            world.drive(index, 1, 0);
        }
        world
    }

    /// Statistics of the sending ends.
    pub(super) fn statistics(&self) -> Vec<SessionStatistics> {
        self.pairs.iter().map(|pair| pair.ends[0].statistics()).collect()
    }

    /// Lets time pass for an end, sends what it may send, and arranges its next wake.
    fn drive(&mut self, index: usize, end: usize, now: Nanos) {
        let pair = &mut self.pairs[index];
        let (was_over, had_arrived) = (pair.is_over(), pair.arrived.len());
        pair.ends[end].handle_timeout(now);
        pair.handle_events(now);
        // Posting may give either end something to send.
        for end in [end, 1 - end] {
            self.transmit(index, end, now);
        }
        let pair = &mut self.pairs[index];
        pair.handle_events(now);
        self.unfinished -= usize::from(pair.is_over() && !was_over);
        for end in 0..2 {
            let Some(at) = pair.ends[end].next_timeout() else { continue };
            let starts = if pair.sends == 0 { pair.setup.start.max(1) } else { Nanos::MAX };
            let at = if starts > now { at.min(starts) } else { at };
            let at = at.max(now + 1);
            if at < pair.wake_at[end] {
                pair.wake_at[end] = at;
                self.wakes.push(Reverse((at, (2 * index + end) as u32)));
            }
        }
        let arrived = pair.arrived.len();
        if arrived > had_arrived {
            for follower in self.followers[index].clone() {
                self.pairs[follower as usize].released = arrived as u64 + 1;
                self.drive(follower as usize, 0, now);
            }
        }
    }

    fn transmit(&mut self, index: usize, end: usize, now: Nanos) {
        let pair = &mut self.pairs[index];
        let FlowSetup { from, to, .. } = pair.setup;
        let [own, other] = if end == 0 { [from, to] } else { [to, from] };
        loop {
            self.out.clear();
            let session = &mut pair.ends[end];
            let before = session.wire_bytes_sent();
            if !session.next_transmit(&NoMemory, now, &mut self.out) {
                return;
            }
            let wire_bytes = (session.wire_bytes_sent() - before) as u32;
            let Departure { path, ecn, .. } = session.departure();
            let is_short = wire_bytes <= CONTROL_BYTES_MAX && self.setup.control_first;
            let packet = Packet {
                to: NodeId(other),
                flow: index as u64,
                entropy: path.0.into(),
                class: if is_short { Class::Control } else { Class::Data },
                wire_bytes,
                is_ecn_capable: ecn != Ecn::NotEct,
                is_marked: false,
                corruption: None,
                body: Datagram { direction: end, path, ecn, bytes: self.out.clone() },
            };
            self.fabric.offer(NodeId(own), packet, now);
        }
    }
}

impl World for Sessions {
    type Body = Datagram;

    fn fabric(&self) -> &Fabric<Datagram> {
        &self.fabric
    }

    fn is_over(&self) -> bool {
        self.unfinished == 0
    }

    fn next_at(&self) -> Option<Nanos> {
        let wake = self.wakes.peek().map(|Reverse((at, _))| *at);
        [self.fabric.next_at(), wake].into_iter().flatten().min()
    }

    fn step(&mut self, now: Nanos) {
        while let Some((at, packet)) = self.fabric.take(now) {
            self.arrivals += 1;
            let index = packet.flow as usize;
            let Datagram { direction, path, ecn, mut bytes } = packet.body;
            let end = 1 - direction;
            let ecn = if packet.is_marked { Ecn::Ce } else { ecn };
            let ecn = if end == 1 { self.setup.arrives(index, ecn, at) } else { ecn };
            let arrival = Arrival { path, source: Source::Path, ecn };
            let pair = &mut self.pairs[index];
            pair.ends[end].receive(&mut bytes, arrival, &mut NoMemory, at);
            self.drive(index, end, at);
        }
        while let Some(Reverse((at, who))) =
            self.wakes.peek().copied().filter(|Reverse((at, _))| *at <= now)
        {
            self.wakes.pop();
            let (index, end) = (who as usize / 2, who as usize % 2);
            if self.pairs[index].wake_at[end] == at {
                self.pairs[index].wake_at[end] = Nanos::MAX;
                self.drive(index, end, now);
            }
        }
    }

    fn acked_bytes(&self) -> Vec<u64> {
        let landed = |pair: &Pair| {
            let statistics = pair.ends[1].statistics();
            statistics.units_received * u64::from(PAYLOAD_BYTES)
        };
        self.pairs.iter().map(landed).collect()
    }

    fn outcomes(&self) -> Vec<FlowOutcome> {
        self.pairs.iter().map(Pair::outcome).collect()
    }

    fn arrivals(&self) -> u64 {
        self.arrivals
    }

    fn chunks(&self) -> Vec<Vec<Nanos>> {
        self.pairs.iter().map(|pair| pair.arrived.clone()).collect()
    }
}
