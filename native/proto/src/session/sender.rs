//! The sending half: messages waiting for credit, units in flight, time-outs and what they resend.

use std::collections::VecDeque;

use sealane_erasure::Coder;

use crate::link::Nanos;

use super::bitmap::Bitmap;
use super::events::Events;
use super::layout::{Block, Layout, Place};
use super::packet::{Kind, MESSAGE_END};
use super::plan::code_of;
use super::types::{
    CompletionStatus, Event, MESSAGE_BYTES_MAX, Memory, PostError, Reliability, SendRequest,
};

/// Transmissions awaiting their time-out: 3 round trips of 25 ms at 400 Gbit/s in 4 KiB units.
/// When full, nothing new is sent until the oldest is acknowledged or expires.
const TRANSMISSIONS_MAX: usize = 1 << 20;

/// A unit to be sent now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pick {
    /// Its message.
    pub message: u64,
    /// Its coded index.
    pub coded: u32,
    /// Whether it was sent before.
    pub is_retransmission: bool,
    /// Whether this is the first retransmission of an erasure-coded message.
    pub is_fallback: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Waiting to be sent, being sent, or waiting to be acknowledged.
    Active,
    /// Longer than the peer's receive: completed here, the peer is being told.
    Refused,
    /// Completed, and the peer has nothing more to say about it.
    Ended,
}

#[derive(Debug)]
struct Outgoing {
    request: SendRequest,
    layout: Layout,
    /// Blocks whose units go out in turn.
    depth: u8,
    state: State,
    /// Units that were sent, each counted once.
    sent_units: u32,
    /// Set from the first transmission on.
    started: Option<Nanos>,
    acknowledged: Bitmap,
    /// Coded units whose time is up and which were not sent again. Empty without a code.
    abandoned: Bitmap,
    fell_back: bool,
}

#[derive(Debug, Clone, Copy)]
struct Transmission {
    message: u64,
    coded: u32,
    sent_at: Nanos,
}

/// The parity symbols of a block, one behind the other.
#[derive(Debug, Default)]
struct BlockParity {
    /// Message and number of the block; `None` before the first.
    of: Option<(u64, u32)>,
    symbols: Vec<u8>,
}

/// Parity of the blocks that were encoded last: as many as go out in turn.
#[derive(Debug, Default)]
struct ParityCache {
    blocks: Vec<BlockParity>,
    symbols: Vec<u8>,
    coder: Coder,
}

/// All messages that this end sends. Message numbers rise by one per post.
#[derive(Debug)]
pub struct Sender {
    unit_bytes: u16,
    slots: usize,
    /// Number of the first message in `window`.
    base: u64,
    window: VecDeque<Outgoing>,
    /// Lengths of the peer's receives for the messages from `base` on.
    credit: VecDeque<u64>,
    /// First message that may have units never sent.
    sending: u64,
    transmissions: VecDeque<Transmission>,
    parity: ParityCache,
}

impl Sender {
    /// No messages yet.
    #[must_use]
    pub fn new(unit_bytes: u16, slots: u16) -> Self {
        Self {
            unit_bytes,
            slots: usize::from(slots),
            base: 0,
            window: VecDeque::new(),
            credit: VecDeque::new(),
            sending: 0,
            transmissions: VecDeque::new(),
            parity: ParityCache::default(),
        }
    }

    /// Queues a message; returns its number.
    pub fn post(&mut self, request: SendRequest) -> Result<u64, PostError> {
        let SendRequest { offset, length, .. } = request;
        let invalid = PostError::InvalidLength { offset, length };
        if length > MESSAGE_BYTES_MAX || offset.checked_add(length).is_none() {
            return Err(invalid);
        }
        if Layout::new(length, self.unit_bytes, 0, 0).is_none() {
            return Err(invalid);
        }
        let code = code_of(request.reliability, self.unit_bytes);
        let cut = code
            .and_then(|(k, m, depth)| Some((Layout::new(length, self.unit_bytes, k, m)?, depth)));
        let Some((layout, depth)) = cut else {
            let (k, m, depth) = match request.reliability {
                Reliability::ErasureCoded { k, m, depth } => (k, m, depth),
                Reliability::SelectiveRepeat | Reliability::Auto => (0, 0, 0),
            };
            return Err(PostError::InvalidCode { k, m, depth });
        };
        let number = self.next();
        if self.window.len() >= self.slots || number >= MESSAGE_END {
            return Err(PostError::Retry);
        }
        self.window.push_back(Outgoing {
            request,
            layout,
            depth,
            state: State::Active,
            sent_units: 0,
            started: None,
            acknowledged: Bitmap::new(0),
            abandoned: Bitmap::new(0),
            fell_back: false,
        });
        Ok(number)
    }

    /// Credit arrived: receives of these lengths are posted from message `start` on.
    pub fn credit_received(&mut self, start: u64, lengths: impl Iterator<Item = u64>) {
        let known = self.credit_end();
        if start > known {
            return;
        }
        let fresh = lengths.skip((known - start) as usize);
        let room = self.slots.saturating_sub(self.credit.len());
        self.credit.extend(fresh.take(room));
    }

    /// All messages below this number have a receive posted, as far as is known here.
    #[must_use]
    pub fn credit_end(&self) -> u64 {
        self.base + self.credit.len() as u64
    }

    /// The peer says: all messages below `end` have ended there.
    pub fn completed_end_received(&mut self, end: u64, now: Nanos, events: &mut Events) {
        for number in self.base..end.min(self.next()) {
            self.ended_at_peer(number, now, events);
        }
        self.retire();
    }

    /// The peer says what it has of one message.
    pub fn slice_received(
        &mut self,
        number: u64,
        (cumulative, start, bitmap): (u32, u32, &[u8]),
        now: Nanos,
        events: &mut Events,
    ) {
        let Some(message) = self.get_mut(number) else { return };
        if message.started.is_none() && message.state == State::Active {
            return;
        }
        if cumulative >= message.layout.coded_units() {
            self.ended_at_peer(number, now, events);
            self.retire();
        } else if message.state == State::Active {
            message.acknowledged.set_below(cumulative);
            message.acknowledged.merge(start, bitmap);
        }
    }

    /// The peer refuses a message. It is to be told that this end knows.
    pub fn abort_received(&mut self, number: u64, now: Nanos, events: &mut Events) {
        self.refuse(number, now, events);
    }

    /// Skips what needs no sending, and refuses messages that are longer than their receive.
    /// To be called after every input that could change what is next.
    pub fn advance(&mut self, now: Nanos, events: &mut Events) {
        self.sending = self.sending.max(self.base);
        while self.sending < self.next().min(self.credit_end()) {
            let index = (self.sending - self.base) as usize;
            let message = &self.window[index];
            let is_sent = message.sent_units == message.layout.coded_units();
            if message.state == State::Active && message.layout.length() > self.credit[index] {
                self.refuse(self.sending, now, events);
            } else if message.state == State::Active && !is_sent {
                return;
            }
            self.sending += 1;
        }
    }

    /// Ends all messages, because the session does.
    pub fn close(&mut self, now: Nanos, events: &mut Events) {
        for number in self.base..self.next() {
            let Some(message) = self.get_mut(number) else { continue };
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
        self.transmissions.clear();
    }

    /// Drops transmissions that need no time-out any more.
    pub fn prune(&mut self) {
        while let Some(head) = self.transmissions.front() {
            if self.is_outstanding(head) {
                return;
            }
            self.transmissions.pop_front();
        }
    }

    /// When something may be sent: `now` at the latest if there is something new.
    #[must_use]
    pub fn next_at(&self, now: Nanos, timeout: Nanos) -> Option<Nanos> {
        if self.has_new() {
            return Some(now);
        }
        self.transmissions.front().map(|head| head.sent_at.saturating_add(timeout))
    }

    /// Whether units were sent that are not acknowledged.
    #[must_use]
    pub fn has_outstanding(&self) -> bool {
        !self.transmissions.is_empty()
    }

    /// Chooses the unit to send now: what has expired first, then what is new.
    pub fn pick(&mut self, now: Nanos, timeout: Nanos) -> Option<Pick> {
        while let Some(head) = self.transmissions.front().copied() {
            let is_outstanding = self.is_outstanding(&head);
            if is_outstanding && head.sent_at.saturating_add(timeout) > now {
                break;
            }
            self.transmissions.pop_front();
            if !is_outstanding {
                continue;
            }
            if let Some(message) = self.get_mut(head.message)
                && message.must_resend(head.coded)
            {
                let is_fallback = message.layout.is_coded() && !message.fell_back;
                message.fell_back = true;
                let Transmission { message, coded, .. } = head;
                return Some(Pick { message, coded, is_retransmission: true, is_fallback });
            }
        }
        if !self.has_new() {
            return None;
        }
        let message = self.get_mut(self.sending)?;
        let coded = message.layout.interleaved(message.sent_units, message.depth);
        let message = self.sending;
        Some(Pick { message, coded, is_retransmission: false, is_fallback: false })
    }

    /// What the header of a picked unit says, and whether the unit is parity.
    #[must_use]
    pub fn describe(&self, pick: Pick) -> Option<(Kind, bool, usize)> {
        let message = self.window.get((pick.message - self.base) as usize)?;
        let layout = &message.layout;
        let kind = Kind::Unit {
            message: pick.message,
            unit: pick.coded,
            length: layout.length(),
            k: layout.k(),
            m: layout.m(),
            immediate: message.request.immediate,
        };
        let is_parity = matches!(layout.place(pick.coded), Place::Parity { .. });
        Some((kind, is_parity, layout.payload_length(pick.coded)))
    }

    /// Appends the payload of a picked unit.
    pub fn write_payload(&mut self, pick: Pick, memory: &impl Memory, out: &mut Vec<u8>) {
        let Some(message) = self.window.get((pick.message - self.base) as usize) else { return };
        let (layout, offset) = (&message.layout, message.request.offset);
        match layout.place(pick.coded) {
            Place::Data(unit) => {
                let start = out.len();
                out.resize(start + layout.unit_length(unit), 0);
                memory.read(offset + layout.unit_offset(unit), &mut out[start..]);
            }
            Place::Parity { block: number, index } => {
                let block = layout.block(number);
                let place = (pick.message, number, message.depth);
                let parity = self.parity.of(place, layout, &block, (offset, memory));
                let start = usize::from(index) * block.symbol_bytes;
                out.extend_from_slice(&parity[start..start + block.symbol_bytes]);
            }
        }
    }

    /// A picked unit has left.
    pub fn sent(&mut self, pick: Pick, now: Nanos, events: &mut Events) {
        let Pick { message: number, coded, .. } = pick;
        self.transmissions.push_back(Transmission { message: number, coded, sent_at: now });
        if pick.is_retransmission {
            return;
        }
        let Some(message) = self.get_mut(number) else { return };
        if message.started.is_none() {
            let units = message.layout.coded_units();
            message.started = Some(now);
            message.acknowledged = Bitmap::new(units);
            message.abandoned = Bitmap::new(if message.layout.is_coded() { units } else { 0 });
        }
        message.sent_units += 1;
        if message.sent_units == message.layout.coded_units() {
            self.advance(now, events);
        }
    }

    /// Messages that the peer is to be told were given up here.
    pub fn refused(&self) -> impl Iterator<Item = u64> + '_ {
        let refused = self.window.iter().enumerate();
        let refused = refused.filter(|(_, message)| message.state == State::Refused);
        refused.map(|(index, _)| self.base + index as u64)
    }

    fn next(&self) -> u64 {
        self.base + self.window.len() as u64
    }

    /// Whether there is a unit that was never sent and may be sent.
    #[must_use]
    pub fn has_new(&self) -> bool {
        self.sending < self.next().min(self.credit_end())
            && self.transmissions.len() < TRANSMISSIONS_MAX
    }

    fn get_mut(&mut self, number: u64) -> Option<&mut Outgoing> {
        let index = number.checked_sub(self.base)?;
        self.window.get_mut(usize::try_from(index).ok()?)
    }

    fn is_outstanding(&self, transmission: &Transmission) -> bool {
        let index = transmission.message.checked_sub(self.base);
        let message = index.and_then(|index| self.window.get(index as usize));
        message.is_some_and(|message| {
            message.state == State::Active && !message.acknowledged.get(transmission.coded)
        })
    }

    fn ended_at_peer(&mut self, number: u64, now: Nanos, events: &mut Events) {
        let Some(message) = self.get_mut(number) else { return };
        match message.state {
            State::Active if message.started.is_some() => {
                message.complete(number, CompletionStatus::Ok, now, events);
                message.state = State::Ended;
            }
            State::Refused => message.state = State::Ended,
            // The peer cannot have ended what was never sent.
            State::Active | State::Ended => {}
        }
    }

    fn refuse(&mut self, number: u64, now: Nanos, events: &mut Events) {
        let Some(message) = self.get_mut(number) else { return };
        if message.state == State::Active {
            message.complete(number, CompletionStatus::TooLong, now, events);
            message.state = State::Refused;
        }
    }

    fn retire(&mut self) {
        while self.window.front().is_some_and(|message| message.state == State::Ended) {
            self.window.pop_front();
            self.credit.pop_front();
            self.base += 1;
        }
        self.sending = self.sending.max(self.base);
    }
}

impl Outgoing {
    fn complete(&mut self, number: u64, status: CompletionStatus, now: Nanos, events: &mut Events) {
        let user_data = self.request.user_data;
        let started = self.started.unwrap_or(now);
        let event =
            Event::SendCompleted { user_data, message: number, status, started, completed: now };
        events.push(event, self.layout.length());
        // The bitmaps may be large, and slots wait for older messages.
        self.acknowledged = Bitmap::new(0);
        self.abandoned = Bitmap::new(0);
    }

    /// The time of a unit is up. With a code it is sent again only if what has arrived and what may
    /// still arrive of its block is not enough.
    fn must_resend(&mut self, coded: u32) -> bool {
        if !self.layout.is_coded() {
            return true;
        }
        self.abandoned.set(coded);
        let Block { data_count, coded_start, coded_end, .. } = self.layout.block_of(coded);
        let lost = self.abandoned.count_without(&self.acknowledged, coded_start, coded_end);
        if coded_end - coded_start - lost >= data_count {
            return false;
        }
        self.abandoned.clear(coded);
        true
    }
}

impl ParityCache {
    /// The parity symbols of a block, one behind the other; `place` is its message, its number and
    /// how many blocks go out in turn.
    fn of<M: Memory>(
        &mut self,
        (message, number, depth): (u64, u32, u8),
        layout: &Layout,
        block: &Block,
        (offset, memory): (u64, &M),
    ) -> &[u8] {
        // Blocks that go out in turn have neighbouring numbers.
        let depth = usize::from(depth);
        self.blocks.resize_with(depth, Default::default);
        let index = number as usize % depth;
        let Self { blocks, symbols, coder } = self;
        let BlockParity { of, symbols: parity } = &mut blocks[index];
        if *of != Some((message, number)) {
            *of = Some((message, number));
            symbols.clear();
            symbols.resize(block.data_count as usize * block.symbol_bytes, 0);
            for (index, symbol) in symbols.chunks_exact_mut(block.symbol_bytes).enumerate() {
                let unit = block.data_start + index as u32;
                let length = layout.unit_length(unit);
                memory.read(offset + layout.unit_offset(unit), &mut symbol[..length]);
            }
            parity.resize(usize::from(layout.m()) * block.symbol_bytes, 0);
            let data: Vec<&[u8]> = symbols.chunks_exact(block.symbol_bytes).collect();
            let mut outputs: Vec<&mut [u8]> = parity.chunks_exact_mut(block.symbol_bytes).collect();
            let coded = coder.encode(&data, &mut outputs);
            debug_assert_eq!(coded, Ok(()), "a layout is a valid shape");
        }
        parity
    }
}
