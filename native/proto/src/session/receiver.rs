//! The receiving half: posted receives, units landing in them, decoding, and what to acknowledge.

use std::collections::{BTreeMap, VecDeque};

use sealane_erasure::Coder;

use super::bitmap::Bitmap;
use super::events::Events;
use super::layout::{Block, Layout, Place};
use super::packet::MESSAGE_END;
use super::types::{
    CompletionStatus, Event, MESSAGE_BYTES_MAX, Memory, PayloadMode, PostError, ReceiveRequest,
};

/// Bytes of parity that may wait, in private memory, for the rest of their blocks.
/// Parity beyond it is dropped as if lost: 200 ms of (32, 8) parity at 2.5 Gbit/s.
pub const SCRATCH_BYTES_MAX: usize = 16 << 20;

/// An authentic unit, as its header describes it.
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
    /// The word sent along.
    pub immediate: Option<u32>,
}

/// What became of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Accepted.
    Landed,
    /// Accepted, and its message is whole now.
    Completed,
    /// It had landed before.
    Duplicate,
    /// Its block was whole before it came.
    Surplus,
    /// Its message had ended before.
    Late,
    /// No receive is posted for its message.
    Unposted,
    /// It contradicts its message, or itself.
    Malformed,
    /// Its message is longer than the receive; both ends give it up.
    TooLong,
    /// No room for parity.
    ScratchFull,
}

#[derive(Debug)]
enum State {
    Posted,
    Landing(Box<Landing>),
    /// Completed here as too long; the peer has not confirmed yet.
    Refused,
    /// The session ended before the message arrived: never to be acknowledged.
    Aborted,
    Ended,
}

#[derive(Debug)]
struct Incoming {
    request: ReceiveRequest,
    state: State,
}

#[derive(Debug)]
struct Landing {
    layout: Layout,
    immediate: Option<u32>,
    /// By coded index: landed, or not needed any more.
    arrived: Bitmap,
    /// Units that each chunk still waits for.
    chunk_missing: Vec<u16>,
    /// Parity symbols of blocks that are not whole yet.
    parity: BTreeMap<u32, Vec<(u8, Vec<u8>)>>,
}

/// Decodes blocks in private memory.
#[derive(Debug, Default)]
struct Restorer {
    coder: Coder,
    /// The data symbols of one block, padded.
    symbols: Vec<u8>,
}

/// Progress of one message, for the acknowledgement.
#[derive(Debug, Clone, Copy)]
pub enum Progress<'a> {
    /// Some units are in.
    Partial(&'a Bitmap),
    /// The message has ended.
    Ended,
}

/// All messages that this end receives.
#[derive(Debug)]
pub struct Receiver {
    unit_bytes: u16,
    chunk_units: u16,
    slots: usize,
    payload: PayloadMode,
    base: u64,
    window: VecDeque<Incoming>,
    scratch_bytes: usize,
    /// Buffers of dropped parity, for reuse; bounded with the scratch.
    spare: Vec<Vec<u8>>,
    restorer: Restorer,
    decoded_units: u64,
}

impl Receiver {
    /// Nothing posted yet.
    #[must_use]
    pub fn new(unit_bytes: u16, chunk_units: u16, slots: u16, payload: PayloadMode) -> Self {
        Self {
            unit_bytes,
            chunk_units,
            slots: usize::from(slots),
            payload,
            base: 0,
            window: VecDeque::new(),
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

    /// One more than the last message number with a receive.
    #[must_use]
    pub fn posted_end(&self) -> u64 {
        self.base + self.window.len() as u64
    }

    /// All messages below it have ended, and the peer need say nothing more about them.
    #[must_use]
    pub fn completed_end(&self) -> u64 {
        self.base
    }

    /// Data units computed from parity so far.
    #[must_use]
    pub fn decoded_units(&self) -> u64 {
        self.decoded_units
    }

    /// Buffer lengths of the receives from a message number on.
    pub fn lengths_from(&self, number: u64) -> impl Iterator<Item = u64> + '_ {
        let skip = number.saturating_sub(self.base) as usize;
        self.window.iter().skip(skip).map(|incoming| incoming.request.length_max)
    }

    /// What to acknowledge, for messages from `from` on, in rising order.
    pub fn progress(&self, from: u64) -> impl Iterator<Item = (u64, Progress<'_>)> {
        let skip = from.saturating_sub(self.base) as usize;
        let numbered = self.window.iter().enumerate().skip(skip);
        numbered.filter_map(|(index, incoming)| {
            let progress = match &incoming.state {
                State::Landing(landing) => Progress::Partial(&landing.arrived),
                State::Ended => Progress::Ended,
                State::Posted | State::Refused | State::Aborted => return None,
            };
            Some((self.base + index as u64, progress))
        })
    }

    /// Messages that the peer is to be told were refused here.
    pub fn refused(&self) -> impl Iterator<Item = u64> + '_ {
        let numbered = self.window.iter().enumerate();
        let refused = numbered.filter(|(_, incoming)| matches!(incoming.state, State::Refused));
        refused.map(|(index, _)| self.base + index as u64)
    }

    /// The peer gave a message up, or knows that this end did.
    pub fn abort_received(&mut self, number: u64, events: &mut Events) {
        if self.refuse(number, events)
            && let Some(incoming) = self.get_mut(number)
        {
            incoming.state = State::Ended;
            self.retire();
        }
    }

    /// Lands an authentic unit. `payload` is private memory.
    pub fn unit_received(
        &mut self,
        unit: Unit,
        payload: &[u8],
        memory: &mut impl Memory,
        events: &mut Events,
    ) -> Outcome {
        let number = unit.message;
        if number < self.base {
            return Outcome::Late;
        }
        if number >= self.posted_end() {
            return Outcome::Unposted;
        }
        let Some(layout) = Layout::new(unit.length, self.unit_bytes, unit.k, unit.m) else {
            return Outcome::Malformed;
        };
        let is_sound = unit.coded < layout.coded_units()
            && (self.payload == PayloadMode::LengthsOnly
                || payload.len() == layout.payload_length(unit.coded));
        if !is_sound {
            return Outcome::Malformed;
        }
        let (slots, chunk_units) = (self.slots as u64, self.chunk_units);
        let Some(incoming) = self.get_mut(number) else { return Outcome::Unposted };
        let request = incoming.request;
        match &mut incoming.state {
            State::Ended | State::Refused | State::Aborted => return Outcome::Late,
            State::Posted if unit.length > request.length_max => {
                self.refuse(number, events);
                return Outcome::TooLong;
            }
            State::Posted => {
                let landing = Landing::new(layout, unit.immediate, chunk_units);
                let chunk_count = landing.chunk_missing.len() as u32;
                incoming.state = State::Landing(Box::new(landing));
                memory.chunks_cleared((number % slots) as u16, chunk_count);
            }
            State::Landing(landing)
                if landing.layout != layout || landing.immediate != unit.immediate =>
            {
                return Outcome::Malformed;
            }
            State::Landing(_) => {}
        }
        self.land(number, unit.coded, payload, memory, events)
    }

    /// Ends all receives, because the session does.
    pub fn close(&mut self, events: &mut Events) {
        for (index, incoming) in self.window.iter_mut().enumerate() {
            if matches!(incoming.state, State::Posted | State::Landing(_)) {
                let message = self.base + index as u64;
                incoming.complete(message, CompletionStatus::Aborted, events);
                incoming.state = State::Aborted;
            }
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
        let layout = landing.layout;
        if landing.arrived.get(coded) {
            return if layout.is_coded() { Outcome::Surplus } else { Outcome::Duplicate };
        }
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
            self.mend(index as usize, layout.block_of(coded), slot, memory);
        }
        self.finish(index as usize, events)
    }

    /// If k units of the block are in, computes the missing data units and closes the block.
    fn mend(&mut self, index: usize, block: Block, slot: u16, memory: &mut impl Memory) {
        let Some(incoming) = self.window.get_mut(index) else { return };
        let offset = incoming.request.offset;
        let State::Landing(landing) = &mut incoming.state else { return };
        if landing.arrived.count(block.coded_start, block.coded_end) < block.data_count {
            return;
        }
        let layout = landing.layout;
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

    /// Completes the receive if its message is whole.
    fn finish(&mut self, index: usize, events: &mut Events) -> Outcome {
        let message = self.base + index as u64;
        let Some(incoming) = self.window.get_mut(index) else { return Outcome::Unposted };
        let State::Landing(landing) = &incoming.state else { return Outcome::Late };
        if !landing.arrived.is_full() {
            return Outcome::Landed;
        }
        incoming.complete(message, CompletionStatus::Ok, events);
        incoming.state = State::Ended;
        self.retire();
        Outcome::Completed
    }

    /// Completes a receive as too long; whether its number is in the window.
    fn refuse(&mut self, number: u64, events: &mut Events) -> bool {
        let Some(incoming) = self.get_mut(number) else { return false };
        if matches!(incoming.state, State::Posted | State::Landing(_)) {
            incoming.complete(number, CompletionStatus::TooLong, events);
            let old = std::mem::replace(&mut incoming.state, State::Refused);
            if let State::Landing(landing) = old {
                let buffers = landing.parity.into_values().flatten();
                self.scratch_bytes -= buffers.map(|(_, buffer)| buffer.len()).sum::<usize>();
            }
        }
        true
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

impl Restorer {
    /// Computes the missing data units of a block, which has enough parity, and writes them to their
    /// place in the message that starts at the offset.
    fn restore<M: Memory>(
        &mut self,
        layout: &Layout,
        block: &Block,
        missing: &[u32],
        parity: &[(u8, Vec<u8>)],
        (offset, memory): (u64, &mut M),
    ) {
        self.symbols.clear();
        self.symbols.resize(block.data_count as usize * block.symbol_bytes, 0);
        let mut present = Vec::with_capacity(block.data_count as usize);
        let mut restored = Vec::with_capacity(missing.len());
        for (i, symbol) in self.symbols.chunks_exact_mut(block.symbol_bytes).enumerate() {
            if missing.contains(&(i as u32)) {
                restored.push((i, symbol));
                continue;
            }
            let unit = block.data_start + i as u32;
            let length = layout.unit_length(unit);
            memory.read(offset + layout.unit_offset(unit), &mut symbol[..length]);
            present.push((i, &*symbol));
        }
        let parity = parity.iter().map(|(i, symbol)| (usize::from(*i), &symbol[..]));
        let parity: Vec<(usize, &[u8])> = parity.collect();
        let decoded = self.coder.decode(&present, &parity, &mut restored);
        debug_assert_eq!(decoded, Ok(()), "k symbols of a layout's shape decode");
        for (i, symbol) in restored {
            let unit = block.data_start + i as u32;
            let length = layout.unit_length(unit);
            memory.write(offset + layout.unit_offset(unit), &symbol[..length]);
        }
    }
}

impl Incoming {
    fn complete(&self, message: u64, status: CompletionStatus, events: &mut Events) {
        let (length, immediate) = match (&self.state, status) {
            (State::Landing(landing), CompletionStatus::Ok) => {
                (landing.layout.length(), landing.immediate)
            }
            _ => (0, None),
        };
        let user_data = self.request.user_data;
        let event = Event::ReceiveCompleted { user_data, message, length, immediate, status };
        events.push(event, length);
    }
}

impl Landing {
    fn new(layout: Layout, immediate: Option<u32>, chunk_units: u16) -> Self {
        let units = layout.data_units();
        let grain = u32::from(chunk_units);
        let size = |chunk: u32| grain.min(units - chunk * grain) as u16;
        Self {
            layout,
            immediate,
            arrived: Bitmap::new(layout.coded_units()),
            chunk_missing: (0..units.div_ceil(grain)).map(size).collect(),
            parity: BTreeMap::new(),
        }
    }

    /// A data unit is in memory; the last one of a chunk publishes the chunk.
    fn unit_landed(&mut self, unit: u32, chunk_units: u16, slot: u16, memory: &mut impl Memory) {
        let chunk = unit / u32::from(chunk_units);
        if let Some(missing) = self.chunk_missing.get_mut(chunk as usize) {
            *missing -= 1;
            if *missing == 0 {
                memory.chunk_landed(slot, chunk);
            }
        }
    }
}
