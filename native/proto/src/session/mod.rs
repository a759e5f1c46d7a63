//! The session machine (`docs/understand/sessions.md`): sealed messages over datagrams, with
//! selective repeat or erasure coding.
//!
//! It has three kinds of input: the user (`post_*`, `close`), the network (`receive`) and a timer
//! (`handle_timeout`). After each of them the caller pulls its outputs until they are empty:
//! `next_transmit`, then `next_timeout`, then `next_event`. Wire format and rules:
//! `docs/formats/session-wire.md`. A controller of [`crate::congestion`] decides how much may be in
//! flight; [`subflows`] which path a unit takes.

mod absences;
mod bitmap;
mod breaker;
mod bursts;
mod cadence;
mod candidate;
mod challenges;
mod config;
mod congestion;
mod control;
mod datagram;
mod drain;
mod ecn;
mod epochs;
mod events;
mod evidence;
mod flight;
pub mod frame;
mod gaps;
mod inbound;
mod landing;
mod layout;
mod lull;
mod marking;
mod moderation;
mod narrow;
mod opening;
mod order;
mod outbound;
mod outgoing;
mod pacing;
pub mod packet;
mod parity;
mod path;
mod paths;
mod plan;
mod posting;
mod probes;
mod protection;
mod receiver;
pub mod replay;
mod requests;
mod rtt;
mod sender;
mod statistics;
mod stream;
mod subflows;
mod train;
mod units;
mod unproven;
mod usage;

#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::link::Nanos;

use absences::Absences;
use control::Control;
use events::Events;
use path::Pace;
use paths::Paths;
use protection::{Protection, Refusal};
use receiver::Receiver;
use sender::Sender;
use units::UnitSearch;

pub use config::{
    ConfigError, Detection, IpVersion, PayloadMode, SLOTS_MAX, SessionConfig, SessionKeys,
    UNIT_BYTES_MAX, UNIT_BYTES_MIN,
};
pub use congestion::{Marks, Steering};
pub use datagram::{Arrival, Departure, Follow, Source};
pub use ecn::{Ecn, PathCounts};
pub use epochs::{FORGERIES_PER_KEY_MAX, PACKETS_PER_KEY, PACKETS_PER_KEY_MAX};
pub use events::{CloseReason, CompletionStatus, Event};
pub use gaps::LossCounts;
pub use opening::{Arrivals, Opener, Received};
pub use pacing::BURST_PACKETS;
pub use packet::Version;
pub use path::{PathAccount, PathState};
pub use paths::{PATHS_MAX, PathId, PathSet};
pub use plan::{PARITY_GAP_MAX, PLAN_ROWS_MAX, Plan, PlanError, PlanRow};
pub use receiver::SCRATCH_BYTES_MAX;
pub use requests::{
    BLOCK_UNITS_MAX, MESSAGE_BYTES_MAX, Memory, PRIORITIES, PostError, ReceiveRequest, Reliability,
    SendRequest, StreamPart, StreamRequest,
};
pub use statistics::{SendLimit, SessionStatistics};
pub use stream::STREAM_PARTS_MAX;
pub use train::Train;
pub use units::{UNIT_CANDIDATES_MAX, Units};

/// Silence of the peer, in time-outs, after which units are held back and only probes are sent. A
/// single lost unit causes at most two time-outs of silence; more means that the path is down.
pub const STALL_TIMEOUTS: u64 = gaps::OUTAGE_TIMEOUTS;
/// Probes per idle timeout that a session without traffic sends to its peer.
const PROBES_PER_IDLE_TIMEOUT: u64 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No path is validated yet: at most ten units leave.
    Connecting,
    /// Units may flow.
    Established,
    /// Only CLOSE is sent.
    Closing,
    /// Nothing more is sent.
    Closed,
}

fn check(config: &SessionConfig) {
    if let Err(error) = config.validate() {
        panic!("{error}");
    }
}

/// One end of a session.
#[derive(Debug)]
pub struct Session {
    config: SessionConfig,
    state: State,
    protection: Protection,
    sender: Sender,
    plan: Plan,
    message_sizes: u64,
    receiver: Receiver,
    control: Control,
    paths: Paths,
    units: UnitSearch,
    /// Units in flight of late, if there is a congestion controller.
    usage: usage::Usage,
    /// Paces all outgoing packets, across paths.
    pacer: pacing::Pacer,
    /// The path of the last datagram written, and whether it goes to the path's candidate.
    departed: (PathId, bool),
    /// Paths that may have a candidate: all that have, and some that had.
    considering: PathSet,
    /// Paths that have moved to their candidates since the caller last asked.
    moved: PathSet,
    /// When the peer was last heard from.
    last_received: Nanos,
    /// Start of the peer's silence: `last_received`, or the first unit sent after a pause.
    silent_since: Nanos,
    /// Times when this end was not driven, which don't count as silence of the peer.
    absences: Absences,
    /// Whether packets that are received now may have waited unread.
    is_reading_late: bool,
    is_stalled: bool,
    /// Units wait until the caller allows them.
    is_held: bool,
    stalled_since: Nanos,
    /// Source of the datagram being received.
    source: Source,
    /// Datagrams from other addresses that failed authentication.
    forged_elsewhere: candidate::Forgeries,
    events: Events,
    sends_posted: u64,
    path_mtu_bytes: u64,
    statistics: SessionStatistics,
}

impl Session {
    /// Creates a session that starts to validate its paths at `now` and then uses them in turn.
    ///
    /// # Panics
    /// If [`SessionConfig::validate`] refuses the configuration.
    #[must_use]
    pub fn new(config: SessionConfig, steering: Steering, keys: &SessionKeys, now: Nanos) -> Self {
        let units = UnitSearch::new(Units::fixed(config.unit_bytes), false);
        Self::build(config, steering, units, keys, now)
    }

    /// Like [`Self::new`], but the session finds its unit: the largest of `units` whose packets
    /// pass in both directions, as determined by the end that `decides`. Nothing can be posted
    /// before the session is established; from then on [`Self::config`] has the unit, regardless of
    /// its earlier value.
    ///
    /// # Panics
    /// If [`SessionConfig::validate`] refuses the configuration with any of the units.
    #[must_use]
    pub fn searching(
        config: SessionConfig,
        steering: Steering,
        (units, decides): (Units, bool),
        keys: &SessionKeys,
        now: Nanos,
    ) -> Self {
        // Packets other than probes must pass whichever unit is chosen.
        let mut least = config;
        for unit_bytes in units.iter() {
            least.unit_bytes = unit_bytes;
            check(&least);
        }
        Self::build(least, steering, UnitSearch::new(units, decides), keys, now)
    }

    fn build(
        config: SessionConfig,
        steering: Steering,
        units: UnitSearch,
        keys: &SessionKeys,
        now: Nanos,
    ) -> Self {
        check(&config);
        let SessionConfig { unit_bytes, chunk_units, slots, payload, .. } = config;
        Self {
            config,
            state: State::Connecting,
            protection: Protection::new(&config, keys),
            sender: Sender::new(unit_bytes, slots, config.paths),
            plan: Plan::default(),
            message_sizes: 0,
            receiver: Receiver::new(unit_bytes, chunk_units, slots, payload),
            control: Control::new(config.version, &steering),
            paths: Paths::new(&config, units.units(), steering, keys.token_seed, now),
            units,
            usage: usage::Usage::default(),
            pacer: Pace::of(&config).pacer(now),
            departed: (PathId(0), false),
            considering: PathSet::default(),
            moved: PathSet::default(),
            last_received: now,
            silent_since: now,
            absences: Absences::default(),
            is_reading_late: false,
            is_stalled: false,
            is_held: false,
            stalled_since: now,
            source: Source::Path,
            forged_elsewhere: candidate::Forgeries::default(),
            events: Events::default(),
            sends_posted: 0,
            path_mtu_bytes: 0,
            statistics: SessionStatistics::default(),
        }
    }

    // Commands.

    /// Holds units back or releases them, for a rate that several sessions share. Control packets
    /// are still sent, so that nothing appears lost or late because of it.
    pub fn hold_units(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// Starts to drain both ends: new sends are refused; sends in progress, including open streams,
    /// continue. When all sends of both ends have ended, the session closes as
    /// [`CloseReason::Draining`]. The caller limits how long that may take.
    pub fn drain(&mut self, now: Nanos) {
        self.begin_drain(false, now);
    }

    fn begin_drain(&mut self, is_asked: bool, now: Nanos) {
        if self.check_open().is_ok() && self.control.drain_mut().begin(is_asked, now) {
            self.events.push(Event::Draining, 0);
        }
        self.finish_drain(now);
    }

    /// Ends the session: completes all requests and notifies the peer (without waiting for it).
    pub fn close(&mut self, reason: CloseReason, now: Nanos) {
        if matches!(self.state, State::Connecting | State::Established) {
            let completed_end = self.receiver.completed_end();
            self.end(reason, false, now);
            self.state = State::Closing;
            self.control.close(reason.code(), completed_end, now);
        }
    }

    // Inputs.

    /// Processes a datagram from the network; returns what the caller does with its source, or
    /// `None` if it was not authentic. Faults are only counted.
    ///
    /// While the path is not validated, an authentic datagram from another address makes the caller
    /// send to that address from now on, and answers to earlier challenges no longer validate the
    /// path. A validated path first considers the address (`docs/formats/session-wire.md`,
    /// "Migration"); [`Self::take_moved`] reports that it moves.
    pub fn receive(
        &mut self,
        datagram: &mut [u8],
        arrival: Arrival,
        memory: &mut impl Memory,
        now: Nanos,
    ) -> Option<Follow> {
        self.receive_packet(Received::sealed(datagram), arrival, memory, now)
    }

    /// As [`Self::receive`], for a datagram that an [`Opener`] may have opened.
    pub fn receive_packet(
        &mut self,
        datagram: Received<'_>,
        arrival: Arrival,
        memory: &mut impl Memory,
        now: Nanos,
    ) -> Option<Follow> {
        if matches!(self.state, State::Closing | State::Closed) {
            return None;
        }
        let path =
            packet::channel_of(datagram.bytes).and_then(|channel| self.paths.with_channel(channel));
        if path.is_some_and(|(path, _)| path != arrival.path) {
            self.statistics.misdirected += 1;
            return None;
        }
        let is_foreign = match arrival.source {
            Source::Path | Source::Unnamed | Source::Candidate => false,
            Source::Elsewhere => path.is_some_and(|(path, _)| {
                self.paths[path].is_abandoned() || self.forged_elsewhere.is_full(now)
            }),
            Source::Foreign => true,
        };
        let refusal = match self.protection.open(datagram, is_foreign, now) {
            Ok((header, plaintext)) => {
                return Some(self.authentic(&header, plaintext, arrival, memory, now));
            }
            Err(refusal) => refusal,
        };
        let counter = match refusal {
            Refusal::Malformed => &mut self.statistics.malformed,
            Refusal::Misdirected => &mut self.statistics.misdirected,
            Refusal::Foreign => &mut self.statistics.foreign_packets,
            Refusal::UnknownEpoch => &mut self.statistics.unknown_epoch,
            Refusal::Replayed => &mut self.statistics.replayed,
            Refusal::Forged => {
                if arrival.source == Source::Elsewhere {
                    self.forged_elsewhere.note(now);
                }
                &mut self.statistics.forged
            }
        };
        *counter += 1;
        if self.protection.is_receive_exhausted() {
            self.close(CloseReason::ForgeryLimit, now);
        }
        None
    }

    /// Whether a path has been validated: it then may move to other addresses.
    #[must_use]
    pub fn is_validated(&self, path: PathId) -> bool {
        self.paths[path].is_validated()
    }

    /// The paths that have moved to their candidates since the last call. Call it after
    /// [`Self::handle_timeout`], before anything is sent.
    pub fn take_moved(&mut self) -> PathSet {
        std::mem::take(&mut self.moved)
    }

    /// Reports that this end was not driven during a period that has just ended, so that it doesn't
    /// count as silence of a path. Call it before [`Self::handle_timeout`].
    pub fn was_away(&mut self, away: Range<Nanos>) {
        self.absences.note(away.start, away.end);
    }

    /// Whether packets of a path are missing that don't count as lost yet.
    #[must_use]
    pub fn misses_packets(&self, path: PathId) -> bool {
        self.paths[path].gaps.is_any_open()
    }

    /// Reports how many datagrams of a path this host has dropped since the start because a buffer
    /// was full. Call it before the time passes to packets that are missing for that reason
    /// ([`Self::handle_timeout`]), so that they don't count as losses of the path.
    pub fn host_dropped(&mut self, path: PathId, total: u64, now: Nanos) {
        self.paths[path].gaps.host_dropped(total, now);
    }

    /// Processes the passage of time. Call it at [`Self::next_timeout`]; harmless at any other
    /// time.
    pub fn handle_timeout(&mut self, now: Nanos) {
        match self.state {
            State::Closed => {}
            State::Closing => {
                if self.control.is_closed() {
                    self.state = State::Closed;
                }
            }
            State::Connecting | State::Established => {
                if now >= self.last_received.saturating_add(self.config.idle_timeout) {
                    self.close(CloseReason::IdleTimeout, now);
                    return;
                }
                self.protection.retire(now);
                self.sender.prune();
                for (_, path) in self.paths.iter_mut() {
                    let timing = path.timing();
                    if path.gaps.settle(timing, now) {
                        self.control.acknowledge_now(now);
                    }
                }
                self.move_paths(now);
                self.watch_paths(now);
                self.probe(now);
                self.probe_tail(now);
                self.finish_drain(now);
            }
        }
    }

    // Outputs.

    /// Appends one whole datagram to `out`; false if nothing may be sent now. [`Self::departure`]
    /// says how to send it.
    pub fn next_transmit(&mut self, memory: &impl Memory, now: Nanos, out: &mut Vec<u8>) -> bool {
        let mut train = Train::continuing(std::mem::take(out));
        let is_written = self.next_packet(memory, now, &mut train);
        *out = train.into_bytes();
        is_written
    }

    /// As [`Self::next_transmit`], for a packet that may be sealed later.
    pub fn next_packet(&mut self, memory: &impl Memory, now: Nanos, out: &mut Train) -> bool {
        if self.state == State::Closed || self.pacer.next_at() > now {
            return false;
        }
        if self.state != State::Closing && self.protection.is_send_exhausted() {
            self.close(CloseReason::PacketLimit, now);
        }
        if let Some((_, path)) = self.control_due(now).filter(|(due, _)| *due <= now) {
            return self.transmit_control(path, now, out);
        }
        if let Some((_, path)) = self.candidate_due().filter(|(due, _)| *due <= now) {
            return self.transmit_to_candidate(path, now, out);
        }
        if self.transmit_carried(memory, now, out) {
            return true;
        }
        if self.is_held || !self.may_send_units() || self.is_window_full() {
            return false;
        }
        let open = self.paths.open(now);
        let is_sent = !open.is_empty() && self.transmit_unit(open, memory, now, out);
        if is_sent && self.window_units().is_some() {
            let rtt = self.paths.srtt().unwrap_or(0);
            self.usage.note(self.units_in_flight(), rtt, now);
        }
        is_sent
    }

    /// The keys that may open the peer's packets now, for another thread; outdated once
    /// [`Self::opener_version`] has changed.
    #[must_use]
    pub fn opener(&self) -> Opener {
        self.protection.opener()
    }

    /// Changes of [`Self::opener`] so far.
    #[must_use]
    pub fn opener_version(&self) -> u64 {
        self.protection.opener_version()
    }

    /// How to send the datagram that was appended last.
    #[must_use]
    pub fn departure(&self) -> Departure {
        let (path, is_to_candidate) = self.departed;
        // Nobody counts the marks of packets to candidates.
        let ecn = if is_to_candidate { Ecn::NotEct } else { self.paths[path].marking.codepoint() };
        Departure { path, is_to_candidate, ecn }
    }

    /// When to call [`Self::handle_timeout`] and [`Self::next_transmit`] next. May be in the past
    /// if there is something to send.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Nanos> {
        if self.state == State::Closed {
            return None;
        }
        let paced = |at: Nanos| at.max(self.pacer.next_at());
        let is_carrying = self.paths.iter().any(|(_, path)| path.is_carrying);
        let carried = is_carrying.then_some(0);
        let control = self.control_due(0).into_iter().map(|(at, _)| at);
        let candidate = self.candidate_due().map(|(at, _)| at);
        let control = control.chain(candidate).chain(carried).min();
        let control = control.map(paced);
        if self.state == State::Closing {
            return control.or(Some(0));
        }
        let idle = Some(self.last_received.saturating_add(self.config.idle_timeout));
        let unit = self.unit_at().filter(|_| !self.is_held);
        let gap = self.paths.iter().filter_map(|(_, path)| path.gaps.next_at(path.timing())).min();
        let silences = [self.probe_at(), self.tail_probe_at(), self.silence_at(), self.quiet_at()];
        let dues = [control, idle, unit, gap, self.decision_at()].into_iter().chain(silences);
        dues.flatten().min()
    }

    /// The next event, oldest first.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop()
    }

    // Queries.

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &SessionConfig {
        &self.config
    }

    /// How this end steers what it sends.
    #[must_use]
    pub fn steering(&self) -> &Steering {
        self.paths.congestion().steering()
    }

    /// Whether units may flow.
    #[must_use]
    pub fn is_established(&self) -> bool {
        self.state == State::Established
    }

    /// Whether the unit, in which all posted messages are counted, is decided.
    #[must_use]
    pub fn has_unit(&self) -> bool {
        self.units.is_decided()
    }

    /// Whether the session is over and sends nothing more; it may be dropped once its events are
    /// pulled.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// The units of a chunk that are in memory while a message lands: bit i (least significant
    /// first) of byte j is unit 8j + i of the chunk. `None` if there is no such message or chunk.
    #[must_use]
    pub fn packet_map(&self, message: u64, chunk: u32) -> Option<Vec<u8>> {
        self.receiver.packet_map(message, chunk)
    }

    /// The immediate of a message that is landing, known from its first packet on.
    #[must_use]
    pub fn immediate(&self, message: u64) -> Option<u32> {
        self.receiver.immediate(message)
    }

    /// Whether a unit is ready to leave but held back ([`Self::hold_units`]).
    #[must_use]
    pub fn has_held_units(&self, now: Nanos) -> bool {
        self.is_held && self.unit_at().is_some_and(|at| at <= now)
    }

    /// Whether a short message of a priority above 0 waits, which should leave as soon as it may.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        self.sender.is_urgent()
    }

    /// End of the message numbers for which the peer is known to have posted a receive.
    #[must_use]
    pub fn credit_end(&self) -> u64 {
        self.sender.credit_end()
    }

    // Helpers.

    /// When the next unit may leave, unless it is held back.
    fn unit_at(&self) -> Option<Nanos> {
        let detection = self.config.detection;
        let patience = |path, packet| self.paths.patience(path, packet, detection);
        let due = self.sender.next_at(0, patience)?;
        let at = due.max(self.paths.open_at()?).max(self.pacer.next_at());
        (self.may_send_units() && !self.is_window_full()).then_some(at)
    }

    /// Whether as many units are in flight as the congestion controller allows: the next one leaves
    /// after a report, which a probe asks for if necessary.
    fn is_window_full(&self) -> bool {
        self.window_units().is_some_and(|most| self.units_in_flight() >= most)
    }

    /// Units that the congestion controller allows in flight, if there is one.
    fn window_units(&self) -> Option<u64> {
        let delay = control::ack_delay(self.paths.srtt(), self.control.cadence().peers());
        self.paths.congestion().units_in_flight_max(delay)
    }

    /// Units sent after the newest packet that the peer has reported on their path.
    fn units_in_flight(&self) -> u64 {
        let paths = self.paths.iter();
        paths.map(|(id, path)| self.sender.sent_since(id, path.packets_reported)).sum()
    }

    /// Before a path is validated, a few units may leave with the challenges, so that a short
    /// message needn't wait for the answer. A longer one would have to, in its middle.
    fn may_send_units(&self) -> bool {
        match self.state {
            State::Established => !self.is_stalled,
            State::Connecting => {
                let units = u32::from(self.paths.early_units());
                self.units.is_decided() && self.sender.ends_within(units)
            }
            State::Closing | State::Closed => false,
        }
    }

    /// Closes the session once nothing is in progress at either end.
    fn finish_drain(&mut self, now: Nanos) {
        let has_sends = self.events.sends_ended() < self.sends_posted;
        if self.check_open().is_ok() && self.control.drain_mut().update(has_sends, now) {
            self.close(CloseReason::Draining, now);
        }
    }

    fn end(&mut self, reason: CloseReason, by_peer: bool, now: Nanos) {
        self.sender.close(now, &mut self.events);
        self.receiver.close(&mut self.events);
        // Which end finishes last, and so closes, is a matter of timing; report the end that asked
        // to drain.
        let is_drained = reason == CloseReason::Draining;
        let asked = self.control.drain().is_asked().filter(|_| is_drained);
        self.events.push(Event::Closed { reason, by_peer: asked.unwrap_or(by_peer) }, 0);
    }
}
