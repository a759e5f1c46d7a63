//! The event loop: two ends, two wires, and one clock that jumps to the next event.

use std::collections::BTreeMap;

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::aead::Secret;
use sealane_proto::link::{LinkCounters, Loss, Nanos, PARTS};
use sealane_proto::session::packet::{Header, Kind};
use sealane_proto::session::{
    Arrival as SessionArrival, CloseReason, Departure, Event, IpVersion, Memory, PACKETS_PER_KEY,
    PathAccount, PathId, PostError, ReceiveRequest, Reliability, SendRequest, Session,
    SessionConfig, SessionKeys, SessionStatistics, Source, StreamPart, StreamRequest,
};

use crate::bitmap_only::BitmapOnly;
use crate::check::{CompletionChecker, CreditChecker, Findings, RateChecker, Rule, Violation};
use crate::memory::{Sabotage, WatchedMemory};
use crate::scenario::{Scenario, ScenarioError};
use crate::wire::{Arrival, Wire};

/// Rounds at one instant after which a machine counts as stuck: far more than a burst and its
/// answers.
const ROUNDS_PER_INSTANT_MAX: u32 = 10_000;

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// By message: nanoseconds from its first packet to its last acknowledgement. `None` if it did
    /// not complete.
    pub completion_nanos: Vec<Option<Nanos>>,
    /// Virtual time at the end.
    pub elapsed_nanos: Nanos,
    /// Digest of all events in order: equal for equal scenarios.
    pub trace_hash: u64,
    /// Datagrams sent and received in both directions: the size of the run.
    pub steps: u64,
    /// Counters of the sending end.
    pub sender: SessionStatistics,
    /// Counters of the receiving end.
    pub receiver: SessionStatistics,
    /// Counters of the link from sender to receiver.
    pub forward: LinkCounters,
    /// Counters of the link back.
    pub backward: LinkCounters,
    /// The sending end's statistics of each path.
    pub paths: Vec<PathAccount>,
    /// Units that a receiver with bitmaps only would have counted towards another message …
    pub foreign_units: u64,
    /// … and messages that it would have completed with such units in them.
    pub foreign_messages: u64,
    /// Broken rules; any entry is a bug.
    pub violations: Vec<Violation>,
}

/// Runs a scenario to its end.
pub fn run(scenario: &Scenario) -> Result<Outcome, ScenarioError> {
    scenario.validate()?;
    Ok(alone(World::new(scenario, None)?))
}

fn alone(mut world: World<'_>) -> Outcome {
    drive(std::slice::from_mut(&mut world), |_, _| {});
    world.finish()
}

/// Like [`run`], with a fault between machine and checkers that the checkers must find.
#[cfg(test)]
pub(crate) fn run_sabotaged(
    scenario: &Scenario,
    sabotage: WorldSabotage,
) -> Result<Outcome, ScenarioError> {
    scenario.validate()?;
    Ok(alone(World::new(scenario, Some(sabotage))?))
}

/// Where a test injects its fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "tests make the checkers fail with these"))]
pub(crate) enum WorldSabotage {
    Memory(Sabotage),
    /// The credit checker is not told about receives.
    ForgetCredit,
    /// Every datagram is counted twice against the rate.
    CountTwice,
    /// Completions are reported twice.
    CompleteTwice,
    /// Nothing ever arrives.
    CutWires,
}

/// FNV-1a over words: cheap, and sufficient to distinguish traces.
#[derive(Debug)]
struct Trace(u64);

impl Trace {
    fn add(&mut self, words: &[u64]) {
        for word in words {
            self.0 = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01b3);
            self.0 ^= self.0 >> 32;
        }
    }
}

struct End {
    session: Session,
    memory: WatchedMemory,
    rate: RateChecker,
    completions: CompletionChecker,
    posted: u32,
    in_flight: u16,
    is_closed: bool,
}

/// A session and its paths.
pub(crate) struct World<'a> {
    scenario: &'a Scenario,
    lengths: Vec<u64>,
    now: Nanos,
    /// Rounds so far at this instant.
    rounds: u32,
    /// Number of messages that may be posted: all, unless something else has to happen first.
    released: u32,
    /// The bytes of received messages that were [`Self::release`]d with their bytes.
    arrived: BTreeMap<u64, Vec<u8>>,
    /// Messages were released after the latest instant.
    is_woken: bool,
    /// Sending end, receiving end.
    ends: [End; 2],
    /// Their outgoing wires, by path.
    wires: [Vec<Wire>; 2],
    credit: CreditChecker,
    /// Gets the same packets as the receiving end.
    bitmap_only: BitmapOnly,
    findings: Findings,
    trace: Trace,
    completion_nanos: Vec<Option<Nanos>>,
    steps: u64,
    out: Vec<u8>,
    sabotage: Option<WorldSabotage>,
}

/// Runs worlds side by side on one clock. Messages that `between` releases after an instant belong
/// to that instant. Ends when no events are left, or when one of the worlds is stuck.
pub(crate) fn drive(worlds: &mut [World<'_>], mut between: impl FnMut(&mut [World<'_>], Nanos)) {
    for world in &mut *worlds {
        world.start();
    }
    let mut nexts: Vec<Option<Nanos>> = worlds.iter().map(World::next_at).collect();
    while let Some(now) = nexts.iter().flatten().min().copied() {
        for (world, next) in worlds.iter_mut().zip(&mut nexts) {
            if next.is_some_and(|at| at <= now) {
                if !world.advance(now) {
                    return;
                }
                *next = world.next_at();
            }
        }
        between(worlds, now);
        for (world, next) in worlds.iter_mut().zip(&mut nexts) {
            if std::mem::take(&mut world.is_woken) {
                *next = world.next_at();
            }
        }
    }
}

impl<'a> World<'a> {
    /// Creates a world whose message lengths are drawn from the scenario's range.
    pub fn new(
        scenario: &'a Scenario,
        sabotage: Option<WorldSabotage>,
    ) -> Result<Self, ScenarioError> {
        let mut seeds = ChaCha8Rng::seed_from_u64(scenario.seed);
        let span = scenario.message_bytes_max - scenario.message_bytes_min + 1;
        let draw = |random: u64| ((u128::from(random) * u128::from(span)) >> 64) as u64;
        let lengths: Vec<u64> = (0..scenario.count)
            .map(|_| scenario.message_bytes_min + draw(seeds.next_u64()))
            .collect();
        let mut forward = scenario.forward;
        if sabotage == Some(WorldSabotage::CutWires) {
            forward.loss = Loss::Independent(PARTS);
        }
        let mut wires = [
            vec![Wire::new(forward, scenario.blackout, seeds.next_u64())],
            vec![Wire::new(scenario.backward, scenario.blackout, seeds.next_u64())],
        ];
        for path in &scenario.more_paths {
            wires[0].push(Wire::new(path.forward, path.blackout, seeds.next_u64()));
            wires[1].push(Wire::new(path.backward, path.blackout, seeds.next_u64()));
        }
        let mut ends = [End::new(scenario, 0, "sends")?, End::new(scenario, 1, "receives")?];
        if let Some(WorldSabotage::Memory(fault)) = sabotage {
            ends[1].memory.sabotage = Some(fault);
        }
        Ok(Self {
            scenario,
            lengths,
            now: 0,
            rounds: 0,
            released: scenario.count,
            arrived: BTreeMap::new(),
            is_woken: false,
            ends,
            wires,
            credit: CreditChecker::default(),
            bitmap_only: BitmapOnly::new(scenario),
            findings: Findings::default(),
            trace: Trace(0xcbf2_9ce4_8422_2325),
            completion_nanos: vec![None; scenario.count as usize],
            steps: 0,
            out: Vec::new(),
            sabotage,
        })
    }

    /// Holds back all messages until they are released; sets their lengths.
    pub fn hold(&mut self, lengths: Vec<u64>) {
        self.lengths = lengths;
        self.released = 0;
    }

    /// Releases the next message, with these bytes if payload is real.
    pub fn release(&mut self, bytes: Option<Vec<u8>>, now: Nanos) {
        let message = u64::from(self.released);
        if let Some(bytes) = bytes {
            for end in &mut self.ends {
                end.memory.contents.insert(message, bytes.clone());
            }
        }
        self.released += 1;
        self.now = self.now.max(now);
        self.findings.now = self.now;
        self.post();
        self.pump(0);
        self.is_woken = true;
    }

    /// Whether a message could leave at once: keys and path are confirmed and receives are posted.
    pub fn is_ready(&self) -> bool {
        let session = &self.ends[0].session;
        session.is_established() && session.credit_end() > 0
    }

    /// Whether the receiving end has received a message completely.
    pub fn has_received(&self, message: u64) -> bool {
        self.ends[1].completions.is_completed(message)
    }

    /// Whether the sending end knows that this message and all before it were received.
    pub fn has_sent_all(&self, last: u64) -> bool {
        let is_sent = |message| self.ends[0].completions.is_completed(message);
        self.ends[0].in_flight == 0 && is_sent(last)
    }

    /// Takes the bytes of a received message, if payload is real.
    pub fn take_arrived(&mut self, message: u64) -> Option<Vec<u8>> {
        self.arrived.remove(&message)
    }

    fn start(&mut self) {
        self.post();
        self.pump(0);
        self.pump(1);
    }

    /// Processes everything due at an instant; false if that does not end.
    fn advance(&mut self, now: Nanos) -> bool {
        self.rounds = if now > self.now { 0 } else { self.rounds + 1 };
        self.now = now.max(self.now);
        self.findings.now = self.now;
        if self.rounds > ROUNDS_PER_INSTANT_MAX {
            self.findings.add(Rule::Finished, || "no progress: stuck at one instant".into());
            return false;
        }
        if self.now > self.scenario.time_max {
            self.findings.add(Rule::Finished, || "out of virtual time".into());
            return false;
        }
        for end in 0..2 {
            if self.awake_at(end, self.now) > self.now {
                continue;
            }
            let is_timeout = self.ends[end].session.next_timeout().is_some_and(|at| at <= self.now);
            if self.deliver(end) | is_timeout {
                self.pump(end);
            }
        }
        let is_done = self.ends.iter().all(|end| end.completions.is_done());
        if is_done && !self.ends[0].is_closed {
            self.ends[0].session.close(CloseReason::Requested, self.now);
            self.pump(0);
        }
        true
    }

    /// Checks the final state and returns the result.
    pub fn finish(mut self) -> Outcome {
        for end in &mut self.ends {
            end.completions.finish(&mut self.findings);
            self.findings.violations.append(&mut end.memory.findings.violations);
        }
        let [sender, receiver] = &self.ends;
        let paths = sender.session.path_accounts().collect();
        let (sender, receiver) = (sender.session.statistics(), receiver.session.statistics());
        self.trace.add(&[self.now, sender.wire_bytes_sent, receiver.wire_bytes_sent]);
        Outcome {
            completion_nanos: self.completion_nanos,
            elapsed_nanos: self.now,
            trace_hash: self.trace.0,
            steps: self.steps,
            sender,
            receiver,
            forward: self.wires[0][0].counters(),
            backward: self.wires[1][0].counters(),
            paths,
            foreign_units: self.bitmap_only.foreign_units,
            foreign_messages: self.bitmap_only.foreign_messages,
            violations: self.findings.violations,
        }
    }

    fn next_at(&self) -> Option<Nanos> {
        let next_of = |(index, end): (usize, &End)| {
            let arrivals = self.wires[1 - index].iter().filter_map(Wire::next_at);
            let at = arrivals.chain(end.session.next_timeout()).min()?;
            Some(self.awake_at(index, at))
        };
        self.ends.iter().enumerate().filter_map(next_of).min()
    }

    /// When an end processes what is due at an instant.
    fn awake_at(&self, end: usize, at: Nanos) -> Nanos {
        // Also if that is in the past: what had to wait is due now.
        let at = at.max(self.now);
        self.scenario.pauses.map_or(at, |pauses| pauses.awake_at(end, at))
    }

    /// Delivers everything that has arrived at an end; returns whether there was anything.
    fn deliver(&mut self, end: usize) -> bool {
        (0..self.wires[1 - end].len())
            .fold(false, |is_any, path| self.deliver_on(path, end) | is_any)
    }

    fn deliver_on(&mut self, path: usize, end: usize) -> bool {
        let mut is_any = false;
        while let Some(mut arrival) = self.wires[1 - end][path].arrive(self.now) {
            let End { session, memory, completions, .. } = &mut self.ends[end];
            is_any = true;
            self.steps += 1;
            memory.findings.now = self.now;
            let is_late = match Header::decode(&arrival.datagram) {
                Ok((Header { kind: Kind::Unit { message, unit, .. }, .. }, _)) => {
                    if end == 1 && !arrival.is_corrupted {
                        self.bitmap_only.arrived(message, unit);
                    }
                    completions.is_completed(message)
                }
                _ => false,
            };
            let must_not_change = arrival.is_corrupted || arrival.is_copy || is_late;
            let changes = memory.changes;
            self.trace.add(&[self.now, end as u64, arrival.packet, must_not_change.into()]);
            let on = PathId(path as u8);
            let from = SessionArrival { path: on, source: Source::Path, ecn: arrival.ecn };
            // As in a worker whose sessions share a rate: most reports find their units held.
            session.hold_units(true);
            session.receive(&mut arrival.datagram, from, memory, self.now);
            session.hold_units(false);
            if must_not_change && memory.sabotage == Some(Sabotage::WriteOnRefused) {
                memory.write(0, &[0]);
            }
            if must_not_change && memory.changes != changes {
                self.findings.add(Rule::MemoryUnchanged, || {
                    let Arrival { is_corrupted, is_copy, .. } = arrival;
                    format!("changed by a datagram with corrupted: {is_corrupted}, copy: {is_copy}, late: {is_late}")
                });
            }
            self.wires[1 - end][path].recycle(arrival.datagram);
            self.handle_events(end);
        }
        is_any
    }

    /// Lets an end send all it may, and processes its events.
    fn pump(&mut self, end: usize) {
        self.ends[end].session.handle_timeout(self.now);
        self.handle_events(end);
        self.transmit(end);
        self.handle_events(end);
    }

    fn transmit(&mut self, end: usize) {
        let End { session, memory, rate, .. } = &mut self.ends[end];
        loop {
            self.out.clear();
            let before = session.wire_bytes_sent();
            if !session.next_transmit(memory, self.now, &mut self.out) {
                return;
            }
            self.steps += 1;
            let wire_bytes = session.wire_bytes_sent() - before;
            rate.sent(wire_bytes, &mut self.findings);
            if self.sabotage == Some(WorldSabotage::CountTwice) {
                rate.sent(wire_bytes, &mut self.findings);
            }
            if end == 0 {
                self.credit.sent(&self.out, &mut self.findings);
            }
            let is_short =
                (wire_bytes as usize) < self.out.len() + session.config().ip.header_bytes();
            debug_assert!(!is_short, "statistics count fewer bytes than were sent");
            self.trace.add(&[self.now, 2 + end as u64, wire_bytes]);
            let Departure { path, ecn, .. } = session.departure();
            self.wires[end][path.index()].offer(&self.out, ecn, wire_bytes as u32, self.now);
        }
    }

    fn handle_events(&mut self, end: usize) {
        while let Some(event) = self.ends[end].session.next_event() {
            self.handle_event(end, event);
        }
        self.post();
    }

    fn handle_event(&mut self, end: usize, event: Event) {
        let copies = if self.sabotage == Some(WorldSabotage::CompleteTwice) { 2 } else { 1 };
        let this = &mut self.ends[end];
        match event {
            Event::Established { rtt } => self.trace.add(&[self.now, 4 + end as u64, rtt]),
            Event::SendCompleted { message, status, started, completed, .. } => {
                this.in_flight -= 1;
                for _ in 0..copies {
                    this.completions.completed(message, status, &mut self.findings);
                }
                if let Some(slot) = self.completion_nanos.get_mut(message as usize) {
                    *slot = Some(completed - started);
                }
                self.trace.add(&[self.now, 6 + end as u64, message, started]);
            }
            Event::ReceiveCompleted { message, length, immediate, status, .. } => {
                this.in_flight -= 1;
                this.completions.completed(message, status, &mut self.findings);
                this.memory.findings.now = self.now;
                let bytes = this.memory.verify(message, length);
                self.arrived.extend(bytes.map(|bytes| (message, bytes)));
                if immediate != immediate_of(message) {
                    let detail = || format!("message {message}: immediate {immediate:?}");
                    self.findings.add(Rule::PayloadEqual, detail);
                }
                self.trace.add(&[self.now, 8 + end as u64, message, length]);
            }
            Event::Draining => {}
            Event::Closed { .. } => {
                this.is_closed = true;
                self.trace.add(&[self.now, 10 + end as u64]);
            }
        }
    }

    /// Keeps as much posted at both ends as the scenario allows.
    fn post(&mut self) {
        let Scenario { count, depth, slots, reliability, streams, message_bytes_max, .. } =
            *self.scenario;
        let [sender, receiver] = &mut self.ends;
        while receiver.posted < count && receiver.in_flight < slots && !receiver.is_closed {
            let message = u64::from(receiver.posted);
            let offset = receiver.memory.offset(message);
            let request =
                ReceiveRequest { offset, length_max: message_bytes_max, user_data: message };
            if receiver.session.post_receive(request, self.now) != Ok(message) {
                break;
            }
            receiver.memory.expect(message, self.lengths[message as usize]);
            self.bitmap_only.posted(message, self.lengths[message as usize]);
            if self.sabotage != Some(WorldSabotage::ForgetCredit) {
                self.credit.posted(message_bytes_max);
            }
            receiver.posted += 1;
            receiver.in_flight += 1;
        }
        while sender.posted < self.released && sender.in_flight < depth && !sender.is_closed {
            let message = u64::from(sender.posted);
            let length = self.lengths[message as usize];
            let posted = if streams && message % 3 == 1 && length > 0 {
                sender.post_stream(message, length, self.now)
            } else {
                let request = SendRequest {
                    offset: sender.memory.offset(message),
                    length,
                    reliability: match reliability {
                        Reliability::ErasureCoded { .. } => Reliability::Auto,
                        other => other,
                    },
                    immediate: immediate_of(message),
                    priority: 0,
                    user_data: message,
                };
                sender.session.post_send(request, self.now)
            };
            if posted != Ok(message) {
                break;
            }
            sender.memory.fill(message, length);
            sender.posted += 1;
            sender.in_flight += 1;
        }
    }
}

impl End {
    /// Sends a message as a stream: at most three parts, the last one first, then one part again.
    fn post_stream(&mut self, message: u64, length: u64, now: Nanos) -> Result<u64, PostError> {
        let unit_bytes = u64::from(self.session.config().unit_bytes);
        let request = StreamRequest {
            length,
            reliability: Reliability::SelectiveRepeat,
            immediate: immediate_of(message),
            priority: 0,
            user_data: message,
        };
        let number = self.session.post_stream(request, now)?;
        let base = self.memory.offset(message);
        let grain = length.div_ceil(3).next_multiple_of(unit_bytes);
        let mut parts: Vec<u64> = (0..length).step_by(grain.max(1) as usize).collect();
        parts.reverse();
        parts.extend(parts.first().copied());
        for start in parts {
            let part = StreamPart {
                offset: base + start,
                remote_offset: start,
                length: grain.min(length - start),
            };
            self.session.continue_stream(number, part, now)?;
        }
        self.session.end_stream(number, now)?;
        Ok(number)
    }

    fn new(scenario: &Scenario, end: u64, what: &'static str) -> Result<Self, ScenarioError> {
        let config = SessionConfig {
            version: scenario.version,
            connection_id_local: 0xa000 + end,
            connection_id_peer: 0xa000 + (1 - end),
            unit_bytes: scenario.unit_bytes,
            ip: IpVersion::V4,
            paths: u8::try_from(1 + scenario.more_paths.len()).unwrap_or(u8::MAX),
            chunk_units: scenario.chunk_units,
            slots: scenario.slots,
            rate_bytes_per_second: scenario.rate_bytes_per_second,
            idle_timeout: scenario.idle_timeout,
            reordering: scenario.reordering,
            detection: scenario.detection,
            packets_per_key: PACKETS_PER_KEY,
            payload: scenario.payload,
        };
        config.validate()?;
        // No one attacks this world, so the keys only have to differ.
        let secret = |direction: u64| Secret::extract(&direction.to_be_bytes(), b"simulation");
        let keys = SessionKeys {
            send: secret(end),
            receive: secret(1 - end),
            token_seed: [end as u8; 32],
        };
        let receiver = scenario.receiver_steering.filter(|_| end == 1);
        let steering = receiver.unwrap_or(scenario.steering);
        let mut session = Session::new(config, steering, &keys, 0);
        session.install_plan(scenario.plan()?);
        Ok(Self {
            session,
            memory: WatchedMemory::new(scenario),
            rate: RateChecker::new(
                scenario.rate_bytes_per_second,
                config.packet_bytes_max() as u64,
            ),
            completions: CompletionChecker::new(what, scenario.count),
            posted: 0,
            in_flight: 0,
            is_closed: false,
        })
    }
}

/// Every third message has no immediate.
fn immediate_of(message: u64) -> Option<u32> {
    (!message.is_multiple_of(3)).then_some(message as u32 ^ 0x5ea1_a4e0)
}
