//! One message on its way out, and the window of all of them.

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

/// Where a message stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Waiting to be sent, being sent, or waiting to be acknowledged.
    Active,
    /// Completed: all of it has left, and nothing of it is sent again.
    Injected,
    /// Completed: given up by one end; the peer has not said yet that it knows.
    GivenUp(AbortReason),
    /// Completed, and the peer has nothing more to say about it.
    Ended,
}

/// Where the units of a message come from.
#[derive(Debug)]
pub enum Body {
    /// All of them from one place, in order.
    Whole {
        /// Where its bytes start in memory.
        offset: u64,
        /// How far its first transmission has come.
        order: Order,
    },
    /// Part by part.
    Stream(Stream),
}

/// One message on its way out.
#[derive(Debug)]
pub struct Outgoing {
    /// How it is cut.
    pub layout: Layout,
    /// Where its units come from.
    pub body: Body,
    /// Whether what is lost is sent again.
    pub is_reliable: bool,
    /// The word sent along.
    pub immediate: Option<u32>,
    user_data: u64,
    /// Where it stands.
    pub state: State,
    /// Set from the first transmission on; of a stream, from when it may be sent.
    pub started: Option<Nanos>,
    /// By coded index: the peer has it, or does not need it.
    pub acknowledged: Bitmap,
    /// Coded units that were lost and not sent again. Empty without a code.
    abandoned: Bitmap,
    fell_back: bool,
}

impl Outgoing {
    /// A message of which nothing has been sent.
    #[must_use]
    pub fn new(
        (layout, body): (Layout, Body),
        is_reliable: bool,
        (immediate, user_data): (Option<u32>, u64),
    ) -> Self {
        Self {
            layout,
            body,
            is_reliable,
            immediate,
            user_data,
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

    /// The unit to be sent next of those that were not sent yet, by its coded index.
    #[must_use]
    pub fn next_new(&self) -> Option<u32> {
        match &self.body {
            Body::Whole { order, .. } => order.next(&self.layout),
            Body::Stream(stream) => stream.next().map(|(unit, _)| unit),
        }
    }

    /// Whether every unit that there will be has been sent.
    #[must_use]
    pub fn is_sent(&self) -> bool {
        self.next_new().is_none() && self.stream().is_none_or(Stream::is_ended)
    }

    /// The first transmission, or permission to send a stream.
    pub fn start(&mut self, now: Nanos) {
        if self.started.is_none() {
            self.started = Some(now);
            let units = self.layout.coded_units();
            self.acknowledged = Bitmap::new(if self.is_reliable { units } else { 0 });
            self.abandoned = Bitmap::new(if self.layout.is_coded() { units } else { 0 });
        }
    }

    /// [`Self::next_new`] has been sent.
    pub fn advance(&mut self) {
        match &mut self.body {
            Body::Whole { order, .. } => order.advance(),
            Body::Stream(stream) => stream.advance(),
        }
    }

    /// Passes over parity that the peer no longer needs.
    pub fn skip(&mut self) {
        if let Body::Whole { order, .. } = &mut self.body {
            order.skip(&self.layout, &self.acknowledged);
        }
    }

    /// Reports the end to the user, and frees what it took.
    pub fn complete(
        &mut self,
        number: u64,
        status: CompletionStatus,
        now: Nanos,
        events: &mut Events,
    ) {
        let (user_data, started) = (self.user_data, self.started.unwrap_or(now));
        let length = self.stream().map_or(self.layout.length(), |stream| {
            self.layout.length().min(u64::from(stream.named_units()) * self.layout.unit_bytes())
        });
        let event =
            Event::SendCompleted { user_data, message: number, status, started, completed: now };
        events.push(event, length);
        // The bitmaps may be large, and slots wait for older messages.
        self.acknowledged = Bitmap::new(0);
        self.abandoned = Bitmap::new(0);
    }

    /// A transmission of this unit was lost. With a code it is sent again only if what has arrived
    /// and what may still arrive of its block is not enough: parity that has not left is for what
    /// nobody knows of yet.
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

    /// Whether this is the first time that a block falls back to repeating, its parity being used
    /// up; asked when a unit of it is repeated.
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
    /// Number of the first.
    base: u64,
    messages: VecDeque<Outgoing>,
}

impl Window {
    /// Number of the first message.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// One more than the number of the last.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.base + self.messages.len() as u64
    }

    /// Messages in it.
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

    /// The same, to be changed.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut Outgoing> {
        let index = number.checked_sub(self.base)?;
        self.messages.get_mut(usize::try_from(index).ok()?)
    }

    /// Whether the unit of a transmission is still needed.
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
