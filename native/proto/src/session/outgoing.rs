//! An outgoing message, and the window of all outgoing messages.

use std::cmp::Reverse;
use std::collections::VecDeque;

use crate::link::Nanos;

use super::bitmap::Bitmap;
use super::events::Events;
use super::events::{CompletionStatus, Event};
use super::flight::Transmission;
use super::frame::AbortReason;
use super::layout::{Block, Layout};
use super::order::Order;
use super::stream::Stream;

/// Place of a message among those that wait: by priority, then by number.
pub type Rank = (Reverse<u8>, u64);

/// State of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Waiting to be sent, being sent, or waiting to be acknowledged.
    Active,
    /// Completed: all of it was sent, and nothing is sent again.
    Injected,
    /// Completed: aborted by one end; the peer has not confirmed yet.
    GivenUp(AbortReason),
    /// Completed, and the peer will send nothing more about it.
    Ended,
}

/// Source of a message's units.
#[derive(Debug)]
pub enum Body {
    /// All from one memory range, in order.
    Whole {
        /// Offset of its first byte in memory.
        offset: u64,
        /// Progress of its first transmission.
        order: Order,
    },
    /// Part by part.
    Stream(Stream),
}

/// An outgoing message.
#[derive(Debug)]
pub struct Outgoing {
    /// Its division into units.
    pub layout: Layout,
    /// The source of its units.
    pub body: Body,
    /// Whether lost units are sent again.
    pub is_reliable: bool,
    /// The immediate.
    pub immediate: Option<u32>,
    /// See [`super::requests::PRIORITIES`].
    pub priority: u8,
    user_data: u64,
    /// Pause between its data and its parity …
    pub parity_gap: Nanos,
    /// … and its end, while it lasts.
    pub parity_at: Option<Nanos>,
    /// Its state.
    pub state: State,
    /// Time of the first transmission; for a stream, of the permission to send it.
    pub started: Option<Nanos>,
    /// By coded index: the peer has the unit or does not need it.
    pub acknowledged: Bitmap,
    /// Coded units that were lost and not sent again. Empty without a code.
    abandoned: Bitmap,
    fell_back: bool,
}

impl Outgoing {
    /// Creates a message of which nothing has been sent.
    #[must_use]
    pub fn new(
        (layout, body): (Layout, Body),
        (is_reliable, priority): (bool, u8),
        (immediate, user_data): (Option<u32>, u64),
    ) -> Self {
        Self {
            layout,
            body,
            is_reliable,
            immediate,
            priority,
            user_data,
            parity_gap: 0,
            parity_at: None,
            state: State::Active,
            started: None,
            acknowledged: Bitmap::new(0),
            abandoned: Bitmap::new(0),
            fell_back: false,
        }
    }

    /// The stream, if it is one.
    #[must_use]
    pub fn stream(&self) -> Option<&Stream> {
        match &self.body {
            Body::Stream(stream) => Some(stream),
            Body::Whole { .. } => None,
        }
    }

    /// Its place among the messages whose units may leave: the first goes first.
    #[must_use]
    pub fn rank(&self, number: u64) -> Rank {
        (Reverse(self.priority), number)
    }

    /// Coded index of the next unit that was never sent.
    #[must_use]
    pub fn next_new(&self) -> Option<u32> {
        match &self.body {
            Body::Whole { order, .. } => order.next(&self.layout),
            Body::Stream(stream) => stream.next().map(|(unit, _)| unit),
        }
    }

    /// Units left until it may be complete; 0 for a stream, whose end is not known.
    #[must_use]
    pub fn remaining(&self) -> u32 {
        match &self.body {
            Body::Whole { order, .. } => order.remaining(&self.layout),
            Body::Stream(_) => 0,
        }
    }

    /// Whether every unit, including future ones of a stream, has been sent.
    #[must_use]
    pub fn is_sent(&self) -> bool {
        self.next_new().is_none() && self.stream().is_none_or(Stream::is_ended)
    }

    /// Records the first transmission, or the permission to send a stream.
    pub fn start(&mut self, now: Nanos) {
        if self.started.is_none() {
            self.started = Some(now);
            let units = self.layout.coded_units();
            self.acknowledged = Bitmap::new(if self.is_reliable { units } else { 0 });
            self.abandoned = Bitmap::new(if self.layout.is_coded() { units } else { 0 });
        }
    }

    /// Records that [`Self::next_new`] has been sent at `now`. The pause before parity begins after
    /// the last data.
    pub fn advance(&mut self, now: Nanos) {
        match &mut self.body {
            Body::Whole { order, .. } => {
                order.advance();
                if self.parity_gap > 0 && order.is_data_sent(&self.layout) {
                    self.parity_at = Some(now.saturating_add(self.parity_gap));
                }
            }
            Body::Stream(stream) => stream.advance(),
        }
    }

    /// Skips parity that the peer no longer needs.
    pub fn skip(&mut self) {
        if let Body::Whole { order, .. } = &mut self.body {
            order.skip(&self.layout, &self.acknowledged);
        }
    }

    /// Reports the end to the user and frees the message's memory.
    pub fn complete(
        &mut self,
        number: u64,
        status: CompletionStatus,
        now: Nanos,
        events: &mut Events,
    ) {
        let (user_data, started) = (self.user_data, self.started.unwrap_or(now));
        let length = self.stream().map_or(self.layout.length(), |stream| {
            self.layout.length().min(u64::from(stream.announced_units()) * self.layout.unit_bytes())
        });
        let event =
            Event::SendCompleted { user_data, message: number, status, started, completed: now };
        events.push(event, length);
        // The bitmaps may be large, and the slot may have to wait for older messages.
        self.acknowledged = Bitmap::new(0);
        self.abandoned = Bitmap::new(0);
    }

    /// Decides whether to resend a unit after one of its transmissions was lost. With a code it is
    /// resent only if what has arrived and may still arrive of its block does not suffice; parity
    /// that has not left is kept for losses not known yet.
    pub fn must_resend(&mut self, coded: u32) -> bool {
        let Some((block, parity_passed)) = self.parity_passed(coded) else { return true };
        self.abandoned.set(coded);
        let Block { coded_start, coded_end, .. } = block;
        let lost = self.abandoned.count_without(&self.acknowledged, coded_start, coded_end);
        if lost <= parity_passed {
            return false;
        }
        self.abandoned.clear(coded);
        true
    }

    /// Whether this is the first time that the message resends a unit of a block whose parity is
    /// used up.
    pub fn falls_back(&mut self, coded: u32) -> bool {
        let m = u32::from(self.layout.m());
        self.parity_passed(coded).is_some_and(|(_, passed)| passed == m)
            && !std::mem::replace(&mut self.fell_back, true)
    }

    /// The block of a unit, and how many of its parity units have left or were not needed; `None`
    /// without a code.
    fn parity_passed(&self, coded: u32) -> Option<(Block, u32)> {
        let order = match &self.body {
            Body::Whole { order, .. } if self.layout.is_coded() => order,
            _ => return None,
        };
        let block = self.layout.block_of(coded);
        let number = block.data_start / u32::from(self.layout.k());
        Some((block, order.parity_passed(&self.layout, number)))
    }
}

/// The messages that have not ended, by number.
#[derive(Debug, Default)]
pub struct Window {
    /// Number of the first message.
    base: u64,
    messages: VecDeque<Outgoing>,
}

impl Window {
    /// Number of the first message.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// End of the message numbers.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.base + self.messages.len() as u64
    }

    /// Number of messages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Adds a message; returns its number.
    pub fn push(&mut self, message: Outgoing) -> u64 {
        self.messages.push_back(message);
        self.end() - 1
    }

    /// A message by number.
    #[must_use]
    pub fn get(&self, number: u64) -> Option<&Outgoing> {
        let index = number.checked_sub(self.base)?;
        self.messages.get(usize::try_from(index).ok()?)
    }

    /// A message by number, mutable.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut Outgoing> {
        let index = number.checked_sub(self.base)?;
        self.messages.get_mut(usize::try_from(index).ok()?)
    }

    /// Whether a transmission's unit is still needed.
    #[must_use]
    pub fn is_outstanding(&self, transmission: &Transmission) -> bool {
        self.get(transmission.message).is_some_and(|message| {
            message.state == State::Active && !message.acknowledged.get(transmission.coded)
        })
    }

    /// Drops the first message if it has ended.
    pub fn pop_ended(&mut self) -> bool {
        let is_ended = self.messages.front().is_some_and(|first| first.state == State::Ended);
        if is_ended {
            self.messages.pop_front();
            self.base += 1;
        }
        is_ended
    }
}
