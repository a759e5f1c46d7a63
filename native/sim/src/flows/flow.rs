//! The sending end of a flow.

use std::collections::VecDeque;

use rand_chacha::ChaCha8Rng;
use sealane_proto::congestion::{Controller, Report};
use sealane_proto::link::Nanos;

use super::balance::Paths;
use super::{Code, FlowOutcome, FlowSetup, HEADER_BYTES, PAYLOAD_BYTES};

/// Window that a packet occupies.
const WINDOW_BYTES: u64 = PAYLOAD_BYTES as u64;
/// Silence, in time-outs, after which a flow has lost contact.
const SILENT_TIMEOUTS: u64 = 2;
/// The pace follows the window at this fraction of a round trip.
const PACE_SHARE: u64 = 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    New,
    InFlight,
    Lost,
    Done,
}

#[derive(Debug, Clone, Copy)]
struct Packet {
    sent_at: Nanos,
    state: State,
}

/// A packet to send.
#[derive(Debug, Clone, Copy)]
pub(super) struct Departure {
    pub number: u32,
    pub subflow: u8,
    pub entropy: u32,
    /// How long the receiver waits for the rest of its block.
    pub wait: Nanos,
}

/// What an acknowledgement says besides the packet that it acknowledges.
#[derive(Debug, Clone, Copy)]
pub(super) enum News {
    /// All packets below this one have arrived.
    AllBelow(u32),
    /// Whether the packet's block is complete.
    Block { is_complete: bool },
}

/// Times of a flow's class.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// Round trip on idle links.
    pub base_rtt: Nanos,
    /// What full buffers on its path add to it.
    pub drain: Nanos,
}

#[derive(Debug)]
pub(super) struct Flow {
    pub setup: FlowSetup,
    pub times: Times,
    pub code: Option<Code>,
    pub outcome: FlowOutcome,
    pub acked_packets: u64,
    controller: Box<dyn Controller>,
    paths: Paths,
    packets: Vec<Packet>,
    /// Blocks known to be complete.
    complete: Vec<bool>,
    /// Packets or blocks not known to have arrived.
    missing: u32,
    /// All packets below this one are known to have arrived.
    known_end: u32,
    next_new: u32,
    /// Packets that may leave: all, unless something has to arrive before the others.
    released: u32,
    lost: VecDeque<u32>,
    in_flight: u64,
    /// Time-outs of packets in flight, and of others that are not any more.
    timeouts: VecDeque<(Nanos, u32)>,
    next_send: Nanos,
    pace_gap: Nanos,
    paced_at: Nanos,
    heard_at: Nanos,
    /// When the world wakes this flow.
    pub wake_at: Nanos,
}

impl Flow {
    pub fn new(
        setup: FlowSetup,
        times: Times,
        code: Option<Code>,
        controller: Box<dyn Controller>,
        paths: Paths,
    ) -> Self {
        let data = setup.bytes.div_ceil(PAYLOAD_BYTES.into()) as u32;
        let (packets, blocks) = match code {
            None => (data, 0),
            // As in the released code: the last block is padded to a whole one.
            Some(Code { data: k, parity: m }) => {
                let blocks = data.div_ceil(k.into());
                (blocks * u32::from(k + m), blocks)
            }
        };
        Self {
            setup,
            times,
            code,
            outcome: FlowOutcome::default(),
            acked_packets: 0,
            controller,
            paths,
            packets: vec![Packet { sent_at: 0, state: State::New }; packets as usize],
            complete: vec![false; blocks as usize],
            missing: if code.is_some() { blocks } else { packets },
            known_end: 0,
            next_new: 0,
            released: packets,
            lost: VecDeque::new(),
            in_flight: 0,
            timeouts: VecDeque::new(),
            next_send: setup.start,
            pace_gap: 0,
            paced_at: 0,
            heard_at: setup.start,
            wake_at: Nanos::MAX,
        }
    }

    pub fn is_finished(&self) -> bool {
        self.missing == 0
    }

    pub fn packets(&self) -> u32 {
        self.packets.len() as u32
    }

    pub fn blocks(&self) -> u32 {
        self.complete.len() as u32
    }

    /// Block of a packet and its place there.
    pub fn place(&self, number: u32) -> Option<(u32, u32)> {
        let code = self.code?;
        let size = code.packets();
        Some((number / size, number % size))
    }

    fn timeout(&self) -> Nanos {
        self.times.base_rtt + self.times.drain
    }

    fn is_block_complete(&self, number: u32) -> bool {
        self.place(number).is_some_and(|(block, _)| self.complete[block as usize])
    }

    /// Lets the first packets leave, and no others for now.
    pub fn release(&mut self, packets: u32) {
        self.released = packets.min(self.packets());
    }

    fn has_more(&self) -> bool {
        self.next_new < self.released || !self.lost.is_empty()
    }

    /// The next packet, if one may leave now.
    pub fn send(&mut self, random: &mut ChaCha8Rng, now: Nanos) -> Option<Departure> {
        let allowance = self.controller.allowance();
        if now < self.next_send || self.in_flight + WINDOW_BYTES > allowance.window_bytes {
            return None;
        }
        let number = self.next_number()?;
        if self.pace_gap == 0 || now - self.paced_at >= self.times.base_rtt / PACE_SHARE {
            let bytes = u128::from(PAYLOAD_BYTES + HEADER_BYTES);
            let gap = bytes * 1_000_000_000 / u128::from(allowance.rate_bytes_per_second);
            (self.pace_gap, self.paced_at) = (gap as Nanos, now);
        }
        self.next_send = self.next_send.max(now.saturating_sub(self.pace_gap)) + self.pace_gap;
        let is_repeated = self.packets[number as usize].sent_at > 0;
        self.outcome.sent_packets += 1;
        self.outcome.repeated_packets += u64::from(is_repeated);
        self.packets[number as usize] = Packet { sent_at: now.max(1), state: State::InFlight };
        if self.in_flight == 0 {
            self.heard_at = now;
            self.controller.resumed();
        }
        self.in_flight += WINDOW_BYTES;
        self.timeouts.push_back((now.max(1) + self.timeout(), number));
        self.controller.sent(WINDOW_BYTES, now);
        let (subflow, entropy) = self.paths.choose(random);
        let wait = if is_repeated { self.times.base_rtt / 20 * 21 } else { self.times.drain };
        Some(Departure { number, subflow, entropy, wait })
    }

    fn next_number(&mut self) -> Option<u32> {
        while let Some(number) = self.lost.pop_front() {
            if self.packets[number as usize].state == State::Lost && !self.is_block_complete(number)
            {
                return Some(number);
            }
        }
        while self.next_new < self.released {
            let number = self.next_new;
            self.next_new += 1;
            if !self.is_block_complete(number) {
                return Some(number);
            }
        }
        None
    }

    /// Processes an acknowledgement: the packet, when and on which subflow it was sent, and whether
    /// it was marked and completes its block.
    pub fn acked(
        &mut self,
        (number, sent_at, subflow): (u32, Nanos, u8),
        (is_marked, news): (bool, News),
        random: &mut ChaCha8Rng,
        now: Nanos,
    ) {
        self.heard_at = now;
        if self.packets[number as usize].state != State::Done {
            self.acked_packets += 1;
        }
        self.done(number);
        match news {
            News::AllBelow(end) => {
                while self.known_end < end {
                    self.done(self.known_end);
                    self.known_end += 1;
                }
            }
            News::Block { is_complete: true } => self.block_complete(number),
            News::Block { .. } => {}
        }
        self.paths.acked(subflow, (sent_at, is_marked), random, now);
        let report = Report {
            bytes: WINDOW_BYTES,
            marked_bytes: if is_marked { WINDOW_BYTES } else { 0 },
            lost_packets: 0,
            sent_at,
            rtt: now - sent_at,
            rtt_least: self.times.base_rtt,
            is_limited: self.has_more(),
        };
        self.controller.reported(&report, now);
        if self.is_finished() && self.outcome.finished_at == 0 {
            self.outcome.finished_at = now;
        }
    }

    fn block_complete(&mut self, number: u32) {
        let Some((block, index)) = self.place(number) else { return };
        if std::mem::replace(&mut self.complete[block as usize], true) {
            return;
        }
        self.missing -= 1;
        let first = number - index;
        let size = self.code.map_or(1, Code::packets);
        (first..first + size).for_each(|other| self.done(other));
    }

    fn done(&mut self, number: u32) {
        let is_coded = self.code.is_some();
        let packet = &mut self.packets[number as usize];
        match packet.state {
            State::Done => return,
            State::InFlight => self.in_flight -= WINDOW_BYTES,
            State::New | State::Lost => {}
        }
        packet.state = State::Done;
        if !is_coded {
            self.missing -= 1;
        }
    }

    /// The receiver asks for a block: all of it that is not known to have arrived is sent again.
    pub fn asked(&mut self, block: u32, random: &mut ChaCha8Rng, now: Nanos) {
        self.heard_at = now;
        if self.complete[block as usize] {
            return;
        }
        self.paths.lost(self.timeout(), random, now);
        let size = self.code.map_or(1, Code::packets);
        let first = block * size;
        for number in first..first + size {
            if self.packets[number as usize].state == State::InFlight {
                self.lose(number);
            }
        }
    }

    fn lose(&mut self, number: u32) {
        self.packets[number as usize].state = State::Lost;
        self.in_flight -= WINDOW_BYTES;
        self.lost.push_back(number);
    }

    /// Processes time-outs.
    pub fn handle_timeout(&mut self, random: &mut ChaCha8Rng, now: Nanos) {
        while let Some((at, number)) = self.timeouts.front().copied().filter(|(at, _)| *at <= now) {
            self.timeouts.pop_front();
            let packet = self.packets[number as usize];
            if packet.state != State::InFlight || packet.sent_at + self.timeout() != at {
                continue;
            }
            self.lose(number);
            self.paths.lost(self.timeout(), random, now);
            let report = Report { lost_packets: 1, ..Report::default() };
            self.controller.reported(&report, now);
            if now - self.heard_at >= SILENT_TIMEOUTS * self.timeout() {
                self.heard_at = now;
                self.controller.timed_out(now);
            }
        }
    }

    /// When to wake this flow if nothing arrives.
    pub fn next_at(&mut self) -> Option<Nanos> {
        if self.is_finished() {
            return None;
        }
        while let Some((at, number)) = self.timeouts.front().copied() {
            let packet = self.packets[number as usize];
            if packet.state == State::InFlight && packet.sent_at + self.timeout() == at {
                break;
            }
            self.timeouts.pop_front();
        }
        let may_send = self.has_more()
            && self.in_flight + WINDOW_BYTES <= self.controller.allowance().window_bytes;
        let sends = may_send.then_some(self.next_send);
        self.timeouts.front().map(|(at, _)| *at).into_iter().chain(sends).min()
    }
}
