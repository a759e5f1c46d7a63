//! The receiving half: posted receives, landing units, decoding, and what to acknowledge.

use std::collections::{BTreeSet, VecDeque};

use super::bitmap::Bitmap;
use super::config::PayloadMode;
use super::events::Events;
use super::events::{CompletionStatus, Event};
use super::frame::{AbortReason, Frame};
use super::landing::{Description, Landing, Restorer};
use super::layout::{Block, Layout, Place};
use super::packet::MESSAGE_END;
use super::requests::{MESSAGE_BYTES_MAX, Memory, PostError, ReceiveRequest};

/// Bytes of parity kept in private memory until the rest of its block arrives. Parity beyond this
/// is dropped as if lost; it is 200 ms of (32, 8) parity at 2.5 Gbit/s.
pub const SCRATCH_BYTES_MAX: usize = 16 << 20;

/// An authentic unit, as described by its header.
#[derive(Debug, Clone, Copy)]
pub struct Unit {
    /// Message number.
    pub message: u64,
    /// Coded index.
    pub coded: u32,
    /// Message length in bytes.
    pub length: u64,
    /// Data units of a block.
    pub k: u8,
    /// Parity units of a block.
    pub m: u8,
    /// Whether its message is a stream.
    pub is_stream: bool,
    /// The immediate.
    pub immediate: Option<u32>,
}

/// The end of a stream, sent once its sender has announced all units.
#[derive(Debug, Clone, Copy)]
pub struct StreamEnd {
    /// Message number.
    pub message: u64,
    /// Announced units, each counted once.
    pub units: u32,
    /// The stream's range in bytes.
    pub length: u64,
    /// The immediate.
    pub immediate: Option<u32>,
}

/// Result of processing a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Accepted.
    Landed,
    /// Accepted, and its message is now complete.
    Completed,
    /// It had already landed.
    Duplicate,
    /// Its block was already complete.
    Surplus,
    /// Its message had already ended.
    Late,
    /// No receive is posted for its message.
    Unposted,
    /// It contradicts its message, or itself.
    Malformed,
    /// Its message is longer than the receive; both ends abort it.
    TooLong,
    /// No room for more parity.
    ScratchFull,
}

#[derive(Debug)]
enum State {
    Posted,
    Landing(Box<Landing>),
    /// Completed: aborted here, and the peer has not confirmed it yet.
    GivenUp(AbortReason),
    /// The session ended before the message arrived; never acknowledged.
    Aborted,
    Ended,
}

#[derive(Debug)]
struct Incoming {
    request: ReceiveRequest,
    state: State,
}

/// Progress of one message, as acknowledged.
#[derive(Debug, Clone, Copy)]
pub enum Progress<'a> {
    /// Some units have arrived.
    Partial(&'a Bitmap),
    /// The message has ended.
    Ended,
}

/// All messages received by this end.
#[derive(Debug)]
pub struct Receiver {
    unit_bytes: u16,
    chunk_units: u16,
    slots: usize,
    payload: PayloadMode,
    base: u64,
    window: VecDeque<Incoming>,
    /// The message of the unit that landed last.
    current: u64,
    /// Messages aborted here, until the peer knows.
    notices: BTreeSet<u64>,
    notices_made: u64,
    scratch_bytes: usize,
    /// Buffers of dropped parity for reuse; bounded together with the scratch.
    spare: Vec<Vec<u8>>,
    restorer: Restorer,
    decoded_units: u64,
}

impl Receiver {
    /// Creates a receiver without receives.
    #[must_use]
    pub fn new(unit_bytes: u16, chunk_units: u16, slots: u16, payload: PayloadMode) -> Self {
        Self {
            unit_bytes,
            chunk_units,
            slots: usize::from(slots),
            payload,
            base: 0,
            window: VecDeque::new(),
            current: 0,
            notices: BTreeSet::new(),
            notices_made: 0,
            scratch_bytes: 0,
            spare: Vec::new(),
            restorer: Restorer::default(),
            decoded_units: 0,
        }
    }

    /// Posts a buffer; returns the number of the message that will land in it.
    pub fn post(&mut self, request: ReceiveRequest) -> Result<u64, PostError> {
        let ReceiveRequest { offset, length_max: length, .. } = request;
        if length > MESSAGE_BYTES_MAX || offset.checked_add(length).is_none() {
            return Err(PostError::InvalidLength { offset, length });
        }
        if self.window.len() >= self.slots || self.posted_end() >= MESSAGE_END {
            return Err(PostError::Retry);
        }
        self.window.push_back(Incoming { request, state: State::Posted });
        Ok(self.posted_end() - 1)
    }

    /// End of the message numbers with a receive.
    #[must_use]
    pub fn posted_end(&self) -> u64 {
        self.base + self.window.len() as u64
    }

    /// All messages below this number have ended, and the peer will send nothing more about them.
    #[must_use]
    pub fn completed_end(&self) -> u64 {
        self.base
    }

    /// How many more units must arrive at least before the message of the unit that landed last is
    /// complete; 0 for streams, which can end at any unit.
    #[must_use]
    pub fn units_missing(&self) -> u64 {
        let index = self.current.checked_sub(self.base).map(|index| index as usize);
        match index.and_then(|index| self.window.get(index)).map(|incoming| &incoming.state) {
            Some(State::Landing(landing)) if !landing.description.is_stream => {
                let layout = &landing.description.layout;
                let missing = layout.coded_units() - landing.arrived.set_count();
                if !layout.is_coded() {
                    return u64::from(missing);
                }
                // An incomplete block lacks m units more than it needs, and one at the least.
                let (k, m) = (u32::from(layout.k()), u32::from(layout.m()));
                let incomplete = layout.data_units().div_ceil(k).min(missing.div_ceil(m + 1));
                u64::from(missing.saturating_sub(m * incomplete))
            }
            _ => 0,
        }
    }

    /// Data units computed from parity so far.
    #[must_use]
    pub fn decoded_units(&self) -> u64 {
        self.decoded_units
    }

    /// Buffer lengths of the receives, starting with this message number.
    pub fn lengths_from(&self, number: u64) -> impl Iterator<Item = u64> + '_ {
        let skip = number.saturating_sub(self.base) as usize;
        self.window.iter().skip(skip).map(|incoming| incoming.request.length_max)
    }

    /// The progress to acknowledge for messages from `from` on, ascending.
    pub fn progress(&self, from: u64) -> impl Iterator<Item = (u64, Progress<'_>)> {
        let skip = from.saturating_sub(self.base) as usize;
        let numbered = self.window.iter().enumerate().skip(skip);
        numbered.filter_map(|(index, incoming)| {
            let progress = match &incoming.state {
                State::Landing(landing) => Progress::Partial(&landing.arrived),
                State::Ended => Progress::Ended,
                State::Posted | State::GivenUp(_) | State::Aborted => return None,
            };
            Some((self.base + index as u64, progress))
        })
    }

    /// The notices to repeat to the peer until it confirms them.
    pub fn notices(&self) -> impl Iterator<Item = Frame<'static>> + '_ {
        self.notices.iter().filter_map(|number| match self.get(*number)?.state {
            State::GivenUp(reason) => Some(Frame::AbortReceive { message: *number, reason }),
            _ => None,
        })
    }

    /// The number of notices ever made, and whether any are pending.
    #[must_use]
    pub fn notice_state(&self) -> (u64, bool) {
        (self.notices_made, !self.notices.is_empty())
    }

    /// Completes a receive with what has arrived.
    pub fn complete(&mut self, number: u64, events: &mut Events) -> Result<(), PostError> {
        let is_open =
            |incoming: &Incoming| matches!(incoming.state, State::Posted | State::Landing(_));
        if !self.get(number).is_some_and(is_open) {
            return Err(PostError::NotInProgress(number));
        }
        self.give_up(number, AbortReason::Completed, events);
        Ok(())
    }

    /// Processes the peer's abort of a message, or its confirmation of this end's abort.
    pub fn abort_received(&mut self, number: u64, reason: AbortReason, events: &mut Events) {
        self.give_up(number, reason, events);
        if let Some(incoming) = self.get_mut(number)
            && matches!(incoming.state, State::GivenUp(_))
        {
            incoming.state = State::Ended;
            self.notices.remove(&number);
            self.retire();
        }
    }

    /// The units of a chunk that are in memory: bit i (least significant first) of byte j is unit
    /// 8j + i of the chunk. `None` if this message is not landing or has no such chunk.
    #[must_use]
    pub fn packet_map(&self, number: u64, chunk: u32) -> Option<Vec<u8>> {
        let State::Landing(landing) = &self.get(number)?.state else { return None };
        let grain = u32::from(self.chunk_units);
        let start = chunk.checked_mul(grain)?;
        let end = landing.description.layout.data_units().min(start.saturating_add(grain));
        let count = end.checked_sub(start).filter(|count| *count > 0)?;
        let mut map = vec![0; count.div_ceil(8) as usize];
        for (i, unit) in (start..end).enumerate() {
            map[i / 8] |= u8::from(landing.has_unit(unit)) << (i % 8);
        }
        Some(map)
    }

    /// The immediate of a message that is landing.
    #[must_use]
    pub fn immediate(&self, number: u64) -> Option<u32> {
        match &self.get(number)?.state {
            State::Landing(landing) => landing.description.immediate,
            _ => None,
        }
    }

    /// Processes an authentic unit. `payload` is private memory.
    pub fn unit_received(
        &mut self,
        unit: Unit,
        payload: &[u8],
        memory: &mut impl Memory,
        events: &mut Events,
    ) -> Outcome {
        let Some(layout) = Layout::new(unit.length, self.unit_bytes, unit.k, unit.m) else {
            return self.outcome_without(unit.message, Outcome::Malformed);
        };
        let is_sound = unit.coded < layout.coded_units()
            && !(unit.is_stream && layout.is_coded())
            && (self.payload == PayloadMode::LengthsOnly
                || payload.len() == layout.payload_length(unit.coded));
        if !is_sound {
            return self.outcome_without(unit.message, Outcome::Malformed);
        }
        let Unit { is_stream, immediate, .. } = unit;
        let description = Description { layout, is_stream, immediate };
        match self.begin(unit.message, description, memory, events) {
            Ok(()) => self.land(unit.message, unit.coded, payload, memory, events),
            Err(outcome) => outcome,
        }
    }

    /// Processes the end of a stream.
    pub fn stream_end_received(
        &mut self,
        end: StreamEnd,
        memory: &mut impl Memory,
        events: &mut Events,
    ) -> Outcome {
        let StreamEnd { message: number, units, length, immediate } = end;
        let layout = Layout::new(length, self.unit_bytes, 0, 0);
        let Some(layout) = layout.filter(|layout| units <= layout.data_units()) else {
            return self.outcome_without(number, Outcome::Malformed);
        };
        let description = Description { layout, is_stream: true, immediate };
        if let Err(outcome) = self.begin(number, description, memory, events) {
            return outcome;
        }
        let Some(index) = number.checked_sub(self.base) else { return Outcome::Late };
        if let Some(Incoming { state: State::Landing(landing), .. }) =
            self.window.get_mut(index as usize)
        {
            landing.stream_ended(units);
        }
        self.finish(index as usize, events)
    }

    /// Ends all receives because the session ends.
    pub fn close(&mut self, events: &mut Events) {
        for (index, incoming) in self.window.iter_mut().enumerate() {
            if matches!(incoming.state, State::Posted | State::Landing(_)) {
                let message = self.base + index as u64;
                incoming.complete(message, CompletionStatus::Aborted, events);
                incoming.state = State::Aborted;
            }
        }
    }

    /// The outcome of a unit that is malformed; that its message is over takes precedence.
    fn outcome_without(&self, number: u64, outcome: Outcome) -> Outcome {
        match number {
            number if number < self.base => Outcome::Late,
            number if number >= self.posted_end() => Outcome::Unposted,
            _ => outcome,
        }
    }

    /// Makes sure that a message is landing and matches the description.
    fn begin(
        &mut self,
        number: u64,
        description: Description,
        memory: &mut impl Memory,
        events: &mut Events,
    ) -> Result<(), Outcome> {
        if number < self.base {
            return Err(Outcome::Late);
        }
        let (slots, chunk_units) = (self.slots as u64, self.chunk_units);
        let Some(incoming) = self.get_mut(number) else { return Err(Outcome::Unposted) };
        match &incoming.state {
            State::Ended | State::GivenUp(_) | State::Aborted => Err(Outcome::Late),
            State::Posted if description.layout.length() > incoming.request.length_max => {
                self.give_up(number, AbortReason::TooLong, events);
                Err(Outcome::TooLong)
            }
            State::Posted => {
                let landing = Landing::new(description, chunk_units);
                let chunk_count = landing.chunk_count();
                incoming.state = State::Landing(Box::new(landing));
                memory.chunks_cleared((number % slots) as u16, chunk_count);
                Ok(())
            }
            State::Landing(landing) if landing.description != description => {
                Err(Outcome::Malformed)
            }
            State::Landing(_) => Ok(()),
        }
    }

    fn land(
        &mut self,
        number: u64,
        coded: u32,
        payload: &[u8],
        memory: &mut impl Memory,
        events: &mut Events,
    ) -> Outcome {
        let Some(index) = number.checked_sub(self.base) else { return Outcome::Late };
        let slot = (number % self.slots as u64) as u16;
        let Some(incoming) = self.window.get_mut(index as usize) else { return Outcome::Unposted };
        let offset = incoming.request.offset;
        let State::Landing(landing) = &mut incoming.state else { return Outcome::Late };
        let layout = landing.description.layout;
        if landing.arrived.get(coded) {
            return if layout.is_coded() { Outcome::Surplus } else { Outcome::Duplicate };
        }
        self.current = number;
        match layout.place(coded) {
            Place::Data(unit) => {
                landing.arrived.set(coded);
                if self.payload == PayloadMode::Real {
                    memory.write(offset + layout.unit_offset(unit), payload);
                }
                landing.unit_landed(unit, self.chunk_units, slot, memory);
            }
            Place::Parity { block, index } => {
                if self.payload == PayloadMode::Real {
                    if self.scratch_bytes + payload.len() > SCRATCH_BYTES_MAX {
                        return Outcome::ScratchFull;
                    }
                    self.scratch_bytes += payload.len();
                    let mut buffer = self.spare.pop().unwrap_or_default();
                    buffer.clear();
                    buffer.extend_from_slice(payload);
                    landing.parity.entry(block).or_default().push((index, buffer));
                }
                landing.arrived.set(coded);
            }
        }
        if layout.is_coded() {
            self.decode(index as usize, layout.block_of(coded), slot, memory);
        }
        self.finish(index as usize, events)
    }

    /// Once k units of the block have arrived, computes the missing data units and marks the block
    /// complete.
    fn decode(&mut self, index: usize, block: Block, slot: u16, memory: &mut impl Memory) {
        let Some(incoming) = self.window.get_mut(index) else { return };
        let offset = incoming.request.offset;
        let State::Landing(landing) = &mut incoming.state else { return };
        if landing.arrived.count(block.coded_start, block.coded_end) < block.data_count {
            return;
        }
        let layout = landing.description.layout;
        let number = block.data_start / u32::from(layout.k());
        let parity = landing.parity.remove(&number).unwrap_or_default();
        let is_missing = |i: u32| !landing.arrived.get(block.coded_start + i);
        let missing: Vec<u32> = (0..block.data_count).filter(|i| is_missing(*i)).collect();
        if !missing.is_empty() && self.payload == PayloadMode::Real {
            self.restorer.restore(&layout, &block, &missing, &parity, (offset, memory));
        }
        for (_, buffer) in parity {
            self.scratch_bytes -= buffer.len();
            self.spare.push(buffer);
        }
        self.decoded_units += missing.len() as u64;
        for i in missing {
            landing.unit_landed(block.data_start + i, self.chunk_units, slot, memory);
        }
        for coded in block.coded_start..block.coded_end {
            landing.arrived.set(coded);
        }
    }

    /// Completes the receive if its message is complete.
    fn finish(&mut self, index: usize, events: &mut Events) -> Outcome {
        let message = self.base + index as u64;
        let Some(incoming) = self.window.get_mut(index) else { return Outcome::Unposted };
        let State::Landing(landing) = &incoming.state else { return Outcome::Late };
        if !landing.is_complete() {
            return Outcome::Landed;
        }
        let has_gaps = landing.has_gaps();
        let status = if has_gaps { CompletionStatus::Partial } else { CompletionStatus::Ok };
        incoming.complete(message, status, events);
        incoming.state = State::Ended;
        self.retire();
        Outcome::Completed
    }

    /// Completes a receive that has not ended, with an abort; its memory does not change any more.
    fn give_up(&mut self, number: u64, reason: AbortReason, events: &mut Events) {
        let status = match reason {
            AbortReason::TooLong => CompletionStatus::TooLong,
            AbortReason::Cancelled => CompletionStatus::Cancelled,
            AbortReason::Completed => CompletionStatus::Partial,
        };
        let Some(incoming) = self.get_mut(number) else { return };
        if !matches!(incoming.state, State::Posted | State::Landing(_)) {
            return;
        }
        incoming.complete(number, status, events);
        let old = std::mem::replace(&mut incoming.state, State::GivenUp(reason));
        if let State::Landing(landing) = old {
            let buffers = landing.parity.into_values().flatten();
            self.scratch_bytes -= buffers.map(|(_, buffer)| buffer.len()).sum::<usize>();
        }
        self.notices.insert(number);
        self.notices_made += 1;
    }

    fn get(&self, number: u64) -> Option<&Incoming> {
        let index = number.checked_sub(self.base)?;
        self.window.get(usize::try_from(index).ok()?)
    }

    fn get_mut(&mut self, number: u64) -> Option<&mut Incoming> {
        let index = number.checked_sub(self.base)?;
        self.window.get_mut(usize::try_from(index).ok()?)
    }

    fn retire(&mut self) {
        while self.window.front().is_some_and(|first| matches!(first.state, State::Ended)) {
            self.window.pop_front();
            self.base += 1;
        }
    }
}

impl Incoming {
    fn complete(&self, message: u64, status: CompletionStatus, events: &mut Events) {
        let landing = match (&self.state, status) {
            (State::Landing(landing), CompletionStatus::Ok | CompletionStatus::Partial) => {
                Some(landing)
            }
            _ => None,
        };
        let length = landing.map_or(0, |landing| landing.description.layout.length());
        let immediate = landing.and_then(|landing| landing.description.immediate);
        let user_data = self.request.user_data;
        let event = Event::ReceiveCompleted { user_data, message, length, immediate, status };
        events.push(event, landing.map_or(0, |landing| landing.landed_bytes()));
    }
}
