//! The sending half: messages that wait for credit, units in flight, and the choice of the next
//! unit.

mod posting;
mod waiting;

use std::cmp::Reverse;
use std::collections::{BTreeSet, VecDeque};

use crate::link::Nanos;

use super::events::CompletionStatus;
use super::events::Events;
use super::flight::{Flight, Transmission};
use super::frame::{AbortReason, ENDED, Frame};
use super::layout::Place;
use super::outgoing::{Body, Outgoing, Rank, State, Window};
use super::packet::Kind;
use super::parity::ParityCache;
use super::paths::PathId;
use super::requests::{Memory, PostError};
use super::stream::Stream;

/// Most units of a message whose first unit may cost a wake-up of its own.
const URGENT_UNITS_MAX: u32 = 32;

/// A unit to send now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pick {
    /// Its message.
    pub message: u64,
    /// Its coded index.
    pub coded: u32,
    /// Whether it was sent before and lost.
    pub is_retransmission: bool,
    /// Whether this is the first retransmission of an erasure-coded message.
    pub is_fallback: bool,
}

/// All messages sent by this end. Message numbers increase by one per post.
#[derive(Debug)]
pub struct Sender {
    unit_bytes: u16,
    slots: usize,
    window: Window,
    /// Lengths of the peer's receives, starting with the message at the window's base.
    credit: VecDeque<u64>,
    /// First message that has no credit yet.
    admitted_end: u64,
    /// Messages below `admitted_end` that have units never sent.
    ready: BTreeSet<Rank>,
    /// Those of them that pause before their parity, by its end.
    waiting: BTreeSet<(Nanos, Rank)>,
    /// Messages below `admitted_end` with a notice to send to the peer, until they have ended
    /// there.
    notices: BTreeSet<u64>,
    notices_made: u64,
    flight: Flight,
    parity: ParityCache,
}

impl Sender {
    /// Creates a sender without messages.
    #[must_use]
    pub fn new(unit_bytes: u16, slots: u16, paths: u8) -> Self {
        Self {
            unit_bytes,
            slots: usize::from(slots),
            window: Window::default(),
            credit: VecDeque::new(),
            admitted_end: 0,
            ready: BTreeSet::new(),
            waiting: BTreeSet::new(),
            notices: BTreeSet::new(),
            notices_made: 0,
            flight: Flight::new(paths),
            parity: ParityCache::default(),
        }
    }

    // Commands.

    /// Ends a stream: no more parts will follow.
    pub fn end_stream(
        &mut self,
        number: u64,
        now: Nanos,
        events: &mut Events,
    ) -> Result<(), PostError> {
        if let Body::Stream(stream) = &mut self.open_stream(number)?.body {
            stream.end();
        }
        if number < self.admitted_end {
            self.notify(number);
            self.finish_injected(number, now, events);
        }
        Ok(())
    }

    /// Cancels a message and notifies the peer.
    pub fn cancel(
        &mut self,
        number: u64,
        now: Nanos,
        events: &mut Events,
    ) -> Result<(), PostError> {
        let message = self.window.get(number).filter(|message| message.state == State::Active);
        message.ok_or(PostError::NotInProgress(number))?;
        self.give_up(number, AbortReason::Cancelled, now, events);
        Ok(())
    }

    /// Ends all messages because the session ends.
    pub fn close(&mut self, now: Nanos, events: &mut Events) {
        for number in self.window.base()..self.window.end() {
            let Some(message) = self.window.get_mut(number) else { continue };
            let status = match message.started {
                Some(_) => CompletionStatus::OutcomeUnknown,
                None => CompletionStatus::Aborted,
            };
            if message.state == State::Active {
                message.complete(number, status, now, events);
            }
            message.state = State::Ended;
        }
        self.retire();
        self.ready.clear();
        self.waiting.clear();
        self.flight.clear();
    }

    // Input from the peer.

    /// Processes credit: receives of these lengths are posted from message `start` on.
    pub fn credit_received(&mut self, start: u64, lengths: impl Iterator<Item = u64>) {
        let known = self.credit_end();
        if start > known {
            return;
        }
        let fresh = lengths.skip((known - start) as usize);
        let room = self.slots.saturating_sub(self.credit.len());
        self.credit.extend(fresh.take(room));
    }

    /// Processes that all messages below `end` have ended at the peer.
    pub fn completed_end_received(&mut self, end: u64, now: Nanos, events: &mut Events) {
        for number in self.window.base()..end.min(self.window.end()) {
            self.ended_at_peer(number, now, events);
        }
        self.retire();
    }

    /// Processes the units of one message that the peer has.
    pub fn slice_received(
        &mut self,
        number: u64,
        (cumulative, start, bitmap): (u32, u32, &[u8]),
        now: Nanos,
        events: &mut Events,
    ) {
        if cumulative == ENDED {
            self.ended_at_peer(number, now, events);
            return self.retire();
        }
        let Some(message) = self.window.get_mut(number) else { return };
        if message.started.is_some() && message.state == State::Active {
            message.acknowledged.set_below(cumulative);
            message.acknowledged.merge(start, bitmap);
        }
    }

    /// Starts to process the loss reports of one packet from the peer.
    pub fn begin_reports(&mut self) {
        self.flight.begin_reports();
    }

    /// Processes the peer's report of lost packets on a path: runs of packet numbers, ascending.
    pub fn losses_received(&mut self, path: PathId, runs: impl Iterator<Item = (u64, u64)>) {
        for (start, end) in runs {
            self.flight.report(path, start, end);
        }
    }

    /// Treats everything in flight on a path as lost.
    pub fn abandon_path(&mut self, path: PathId) {
        self.flight.abandon(path);
    }

    /// Processes the peer's abort of a message; the peer gets a confirmation.
    pub fn abort_received(
        &mut self,
        number: u64,
        reason: AbortReason,
        now: Nanos,
        events: &mut Events,
    ) {
        self.give_up(number, reason, now, events);
    }

    /// Admits messages that have credit, aborts those that are longer than their receive, and skips
    /// units that need no sending. Call it after every input that could change the next unit.
    pub fn advance(&mut self, now: Nanos, events: &mut Events) {
        self.admitted_end = self.admitted_end.max(self.window.base());
        while self.admitted_end < self.window.end().min(self.credit_end()) {
            let number = self.admitted_end;
            let length_max = self.credit[(number - self.window.base()) as usize];
            let Some(message) = self.window.get_mut(number) else { return };
            self.admitted_end += 1;
            if message.state == State::Active && message.layout.length() > length_max {
                self.give_up(number, AbortReason::TooLong, now, events);
            } else {
                self.admitted(number, now, events);
            }
        }
        self.skip(now, events);
    }

    /// Skips parity that the peer no longer needs, until the first message that is ready has a
    /// unit to send.
    fn skip(&mut self, now: Nanos, events: &mut Events) {
        while let Some(first) = self.ready.first().copied() {
            let (_, number) = first;
            if let Some(message) = self.window.get_mut(number) {
                message.skip();
                if message.next_new().is_some() {
                    return;
                }
            }
            self.ready.remove(&first);
            self.finish_injected(number, now, events);
        }
    }

    // Choice of the next unit.

    /// Drops transmissions that no longer matter.
    pub fn prune(&mut self) {
        let Self { flight, window, .. } = self;
        flight.prune(|transmission| window.is_outstanding(transmission));
    }

    /// When something may be sent; not after `now` if there is something new.
    #[must_use]
    pub fn next_at(
        &self,
        now: Nanos,
        patience: impl Fn(PathId, u64) -> Option<Nanos>,
    ) -> Option<Nanos> {
        if self.has_new() || self.flight.has_lost() {
            return Some(now);
        }
        let expiry = self.flight.next(patience).map(|(at, _)| at);
        expiry.into_iter().chain(self.parity_at()).min()
    }

    /// The oldest unacknowledged unit on a path: its packet and send time.
    #[must_use]
    pub fn oldest_on(&self, path: PathId) -> Option<(u64, Nanos)> {
        self.flight.oldest(path)
    }

    /// Number of units sent on a path in this packet and later ones, and not acknowledged.
    #[must_use]
    pub fn sent_since(&self, path: PathId, packet: u64) -> u64 {
        self.flight.sent_since(path, packet)
    }

    /// Whether sent units are unacknowledged.
    #[must_use]
    pub fn has_outstanding(&self) -> bool {
        !self.flight.is_empty()
    }

    /// Whether units were lost and have to be sent again if they are still needed.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        self.flight.has_lost()
    }

    /// Whether units were lost and have not arrived since.
    #[must_use]
    pub fn is_recovering(&self) -> bool {
        self.flight.is_recovering()
    }

    /// Whether messages wait only for the peer's credit.
    #[must_use]
    pub fn is_without_credit(&self) -> bool {
        self.admitted_end < self.window.end()
    }

    /// Transmissions lost according to reports, and according to time-outs.
    #[must_use]
    pub fn losses(&self) -> (u64, u64) {
        self.flight.counts()
    }

    /// Whether a unit that was never sent may be sent.
    #[must_use]
    pub fn has_new(&self) -> bool {
        !self.ready.is_empty() && !self.flight.is_full()
    }

    /// Whether no message has a unit to send that was never sent.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ready.is_empty()
    }

    /// The priority of the new unit that would leave first.
    #[must_use]
    pub fn new_priority(&self) -> Option<u8> {
        self.ready.first().filter(|_| self.has_new()).map(|(Reverse(priority), _)| *priority)
    }

    /// Whether the unit that would leave first should not wait until others can leave with it: it
    /// belongs to a short message of a priority above 0.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        let first = self.ready.first().filter(|_| self.new_priority() > Some(0));
        first.and_then(|(_, number)| self.window.get(*number)).is_some_and(|message| {
            message.stream().is_none() && message.layout.coded_units() <= URGENT_UNITS_MAX
        })
    }

    /// Whether the message that would leave first has begun, or is no stream and has no more than so
    /// many units; true if there is none.
    #[must_use]
    pub fn ends_within(&self, units: u32) -> bool {
        let first = self.ready.first().and_then(|(_, number)| self.window.get(*number));
        first.is_none_or(|message| {
            let is_short = message.stream().is_none() && message.layout.coded_units() <= units;
            is_short || message.started.is_some()
        })
    }

    /// How many units the message that would leave first lacks until it may be complete.
    #[must_use]
    pub fn units_to_go(&self) -> u32 {
        let first = self.ready.first().and_then(|(_, number)| self.window.get(*number));
        first.map_or(0, Outgoing::remaining)
    }

    /// Whether another message than the one that would leave first has begun and not ended; true if
    /// there is none that would leave.
    #[must_use]
    pub fn awaits_another(&self) -> bool {
        let Some((_, first)) = self.ready.first() else { return true };
        (self.window.base()..self.admitted_end).filter(|number| number != first).any(|number| {
            let message = self.window.get(number);
            message.is_some_and(|other| other.started.is_some() && other.state != State::Ended)
        })
    }

    /// Chooses the unit to send now: by priority, then lost units before new ones, then by message
    /// number.
    pub fn pick(
        &mut self,
        now: Nanos,
        patience: impl Fn(PathId, u64) -> Option<Nanos>,
    ) -> Option<Pick> {
        self.end_pauses(now);
        while !self.is_new_first(now, &patience) {
            let Self { flight, window, .. } = self;
            let lost = flight.take_lost().or_else(|| {
                let is_outstanding =
                    |transmission: &Transmission| window.is_outstanding(transmission);
                flight.take_expired(now, &patience, is_outstanding)
            });
            let Some(lost) = lost else { break };
            let Transmission { message: number, coded, .. } = lost;
            // A report may be older than a later acknowledgement.
            if window.is_outstanding(&lost)
                && let Some(message) = window.get_mut(number)
                && message.must_resend(coded)
            {
                let is_fallback = message.falls_back(coded);
                return Some(Pick { message: number, coded, is_retransmission: true, is_fallback });
            }
        }
        self.pick_new()
    }

    /// Whether a new unit has a higher priority than all that are known to be lost.
    fn is_new_first(
        &mut self,
        now: Nanos,
        patience: impl Fn(PathId, u64) -> Option<Nanos>,
    ) -> bool {
        let Some(priority) = self.new_priority().filter(|priority| *priority > 0) else {
            return false;
        };
        self.prune();
        let lost = self.flight.lost_priority().max(self.flight.expired_priority(now, patience));
        lost.is_none_or(|lost| priority > lost)
    }

    fn pick_new(&self) -> Option<Pick> {
        let (_, message) = self.ready.first().copied().filter(|_| self.has_new())?;
        let coded = self.window.get(message)?.next_new()?;
        Some(Pick { message, coded, is_retransmission: false, is_fallback: false })
    }

    /// Chooses the oldest unacknowledged unit on a path, even if it is in flight.
    pub fn pick_oldest(&mut self, path: PathId) -> Option<Pick> {
        let Self { flight, window, .. } = self;
        let oldest = flight.take_oldest(path, |transmission| window.is_outstanding(transmission));
        let Transmission { message, coded, .. } = oldest?;
        Some(Pick { message, coded, is_retransmission: true, is_fallback: false })
    }

    /// The header fields of a picked unit, whether it is parity, and its payload length.
    #[must_use]
    pub fn describe(&self, pick: Pick) -> Option<(Kind, bool, usize)> {
        let message = self.window.get(pick.message)?;
        let layout = &message.layout;
        let kind = Kind::Unit {
            message: pick.message,
            unit: pick.coded,
            length: layout.length(),
            k: layout.k(),
            m: layout.m(),
            is_stream: message.stream().is_some(),
            immediate: message.immediate,
        };
        let is_parity = matches!(layout.place(pick.coded), Place::Parity { .. });
        Some((kind, is_parity, layout.payload_length(pick.coded)))
    }

    /// Appends the payload of a picked unit.
    pub fn write_payload(&mut self, pick: Pick, memory: &impl Memory, out: &mut Vec<u8>) {
        let Some(message) = self.window.get(pick.message) else { return };
        let layout = &message.layout;
        let (source, breadth) = match &message.body {
            Body::Whole { offset, order } => (*offset, order.breadth()),
            Body::Stream(stream) => {
                let next = stream.next().filter(|_| !pick.is_retransmission);
                let source = next.map(|(_, source)| source).or_else(|| stream.source(pick.coded));
                let Some(source) = source else { return };
                return memory.append(source, layout.unit_length(pick.coded), out);
            }
        };
        match layout.place(pick.coded) {
            Place::Data(unit) => {
                let length = layout.unit_length(unit);
                memory.append(source + layout.unit_offset(unit), length, out);
            }
            Place::Parity { block: number, index } => {
                let block = layout.block(number);
                let place = (pick.message, number, breadth);
                let parity = self.parity.of(place, layout, &block, (source, memory));
                let start = usize::from(index) * block.symbol_bytes;
                out.extend_from_slice(&parity[start..start + block.symbol_bytes]);
            }
        }
    }

    /// Records that a picked unit has left in this packet of a path.
    pub fn sent(
        &mut self,
        pick: Pick,
        (path, packet): (PathId, u64),
        now: Nanos,
        events: &mut Events,
    ) {
        let Pick { message: number, coded, .. } = pick;
        let Some(message) = self.window.get_mut(number) else { return };
        if message.is_reliable {
            let priority = message.priority;
            let transmission =
                Transmission { path, priority, packet, message: number, coded, sent_at: now };
            self.flight.sent(transmission, pick.is_retransmission);
        }
        if pick.is_retransmission {
            return;
        }
        message.start(now);
        message.advance(now);
        self.begin_pause(number);
        self.skip(now, events);
    }

    // Notices.

    /// The notices to repeat to the peer until their messages have ended there.
    pub fn notices(&self) -> impl Iterator<Item = Frame<'static>> + '_ {
        self.notices.iter().filter_map(|number| {
            let message = self.window.get(*number)?;
            match message.state {
                State::GivenUp(reason) => Some(Frame::AbortSend { message: *number, reason }),
                _ => message.stream().map(|stream| Frame::StreamEnd {
                    message: *number,
                    units: stream.announced_units(),
                    length: message.layout.length(),
                    immediate: message.immediate,
                }),
            }
        })
    }

    /// The number of notices ever made, and whether any are pending.
    #[must_use]
    pub fn notice_state(&self) -> (u64, bool) {
        (self.notices_made, !self.notices.is_empty())
    }

    /// End of the message numbers that are known to have a receive posted.
    #[must_use]
    pub fn credit_end(&self) -> u64 {
        self.window.base() + self.credit.len() as u64
    }

    // Helpers.

    /// Does what was deferred until a message has credit.
    fn admitted(&mut self, number: u64, now: Nanos, events: &mut Events) {
        let Some(message) = self.window.get_mut(number) else { return };
        let is_active = message.state == State::Active;
        let is_given_up = matches!(message.state, State::GivenUp(_));
        if is_active && message.stream().is_some() {
            message.start(now);
        }
        let is_ended = is_active && message.stream().is_some_and(Stream::is_ended);
        let is_ready = is_active && message.next_new().is_some();
        let rank = message.rank(number);
        if is_given_up || is_ended {
            self.notify(number);
        }
        if is_ready {
            self.ready.insert(rank);
        }
        if is_ended {
            self.finish_injected(number, now, events);
        }
    }

    /// Completes an unreliable message once all of it has left.
    fn finish_injected(&mut self, number: u64, now: Nanos, events: &mut Events) {
        let Some(message) = self.window.get_mut(number) else { return };
        if message.state == State::Active && !message.is_reliable && message.is_sent() {
            message.complete(number, CompletionStatus::Ok, now, events);
            message.state = State::Injected;
        }
    }

    fn ended_at_peer(&mut self, number: u64, now: Nanos, events: &mut Events) {
        let Some(message) = self.window.get_mut(number) else { return };
        // The peer cannot have ended a message that was never sent, nor a stream without its end.
        let is_possible =
            message.started.is_some() && message.stream().is_none_or(Stream::is_ended);
        match message.state {
            State::Active if !is_possible => return,
            State::Active => message.complete(number, CompletionStatus::Ok, now, events),
            State::Injected | State::GivenUp(_) => {}
            State::Ended => return,
        }
        message.state = State::Ended;
        self.notices.remove(&number);
        self.unready(number);
    }

    fn give_up(&mut self, number: u64, reason: AbortReason, now: Nanos, events: &mut Events) {
        let Some(message) = self.window.get_mut(number) else { return };
        let status = match reason {
            AbortReason::TooLong => CompletionStatus::TooLong,
            AbortReason::Cancelled => CompletionStatus::Cancelled,
            AbortReason::Completed => CompletionStatus::Partial,
        };
        match message.state {
            State::Active => message.complete(number, status, now, events),
            State::Injected => {}
            State::GivenUp(_) | State::Ended => return,
        }
        message.state = State::GivenUp(reason);
        self.unready(number);
        if number < self.admitted_end {
            self.notify(number);
        }
    }

    fn notify(&mut self, number: u64) {
        self.notices.insert(number);
        self.notices_made += 1;
    }

    fn retire(&mut self) {
        while self.window.pop_ended() {
            self.credit.pop_front();
        }
        self.admitted_end = self.admitted_end.max(self.window.base());
    }
}
