//! Posting of sends: whole messages, and the parts of streams.

use crate::link::Nanos;

use super::super::layout::Layout;
use super::super::order::Order;
use super::super::outgoing::{Body, Outgoing, State};
use super::super::packet::MESSAGE_END;
use super::super::plan::code_of;
use super::super::requests::{
    MESSAGE_BYTES_MAX, PRIORITIES, PostError, Reliability, SendRequest, StreamPart, StreamRequest,
};
use super::super::stream::Stream;
use super::Sender;

impl Sender {
    /// Queues a message, whose parity leaves `parity_gap` after its data; returns its number.
    pub fn post(&mut self, request: SendRequest, parity_gap: Nanos) -> Result<u64, PostError> {
        let SendRequest { offset, length, reliability, immediate, priority, user_data } = request;
        let invalid = PostError::InvalidLength { offset, length };
        if length > MESSAGE_BYTES_MAX || offset.checked_add(length).is_none() {
            return Err(invalid);
        }
        if Layout::new(length, self.unit_bytes, 0, 0).is_none() {
            return Err(invalid);
        }
        let code = code_of(reliability);
        let cut = code
            .and_then(|(k, m, depth)| Some((Layout::new(length, self.unit_bytes, k, m)?, depth)));
        let Some((layout, depth)) = cut else {
            let Reliability::ErasureCoded { k, m, depth } = reliability else {
                return Err(PostError::InvalidCode { k: 0, m: 0, depth: 0 });
            };
            return Err(PostError::InvalidCode { k, m, depth });
        };
        let body = Body::Whole { offset, order: Order::new(&layout, depth) };
        let is_reliable = reliability != Reliability::Unreliable;
        let body = (layout, body);
        let mut message = Outgoing::new(body, (is_reliable, priority), (immediate, user_data));
        message.parity_gap = parity_gap;
        self.push(message)
    }

    /// Queues a stream; returns its number.
    pub fn post_stream(&mut self, request: StreamRequest) -> Result<u64, PostError> {
        let StreamRequest { length, reliability, immediate, priority, user_data } = request;
        let layout = Layout::new(length, self.unit_bytes, 0, 0);
        let layout = layout.ok_or(PostError::InvalidLength { offset: 0, length })?;
        if matches!(reliability, Reliability::ErasureCoded { .. }) {
            return Err(PostError::CodedStream);
        }
        let body = Body::Stream(Stream::new(self.unit_bytes));
        let is_reliable = reliability != Reliability::Unreliable;
        let body = (layout, body);
        self.push(Outgoing::new(body, (is_reliable, priority), (immediate, user_data)))
    }

    /// Announces units of a stream.
    pub fn continue_stream(&mut self, number: u64, part: StreamPart) -> Result<(), PostError> {
        let StreamPart { offset, remote_offset, length } = part;
        let unit_bytes = u64::from(self.unit_bytes);
        let message = self.open_stream(number)?;
        let range = message.layout.length();
        let end = remote_offset.checked_add(length).filter(|end| *end <= range);
        let is_whole = |end: u64| end.is_multiple_of(unit_bytes) || end == range;
        let is_valid = length > 0
            && remote_offset.is_multiple_of(unit_bytes)
            && end.is_some_and(is_whole)
            && offset.checked_add(length).is_some();
        if !is_valid {
            return Err(PostError::InvalidPart { remote_offset, length });
        }
        // Within the range, units are counted in 32 bits.
        let unit = (remote_offset / unit_bytes) as u32;
        let count = length.div_ceil(unit_bytes) as u32;
        let repeats = !message.is_reliable;
        let Body::Stream(stream) = &mut message.body else {
            return Err(PostError::NotInProgress(number));
        };
        if !stream.add((unit, count), offset, repeats) {
            return Err(PostError::Retry);
        }
        let is_ready = stream.next().is_some();
        let rank = message.rank(number);
        if is_ready && number < self.admitted_end {
            self.ready.insert(rank);
        }
        Ok(())
    }

    fn push(&mut self, message: Outgoing) -> Result<u64, PostError> {
        if message.priority >= PRIORITIES {
            return Err(PostError::InvalidPriority(message.priority));
        }
        if self.window.len() >= self.slots || self.window.end() >= MESSAGE_END {
            return Err(PostError::Retry);
        }
        Ok(self.window.push(message))
    }

    pub(super) fn open_stream(&mut self, number: u64) -> Result<&mut Outgoing, PostError> {
        let message = self.window.get_mut(number).filter(|message| {
            message.state == State::Active && message.stream().is_some_and(|s| !s.is_ended())
        });
        message.ok_or(PostError::NotInProgress(number))
    }
}
