//! The user's commands about messages: sends, streams, receives and their cancellation.

use crate::link::Nanos;

use super::plan::Plan;
use super::requests::{
    PostError, ReceiveRequest, Reliability, SendRequest, StreamPart, StreamRequest,
};
use super::{Session, State};

impl Session {
    /// Queues a message and returns its number; sends of this end are numbered from 0.
    pub fn post_send(&mut self, request: SendRequest, now: Nanos) -> Result<u64, PostError> {
        self.check_sending()?;
        let mut request = request;
        let mut parity_gap = 0;
        if request.reliability == Reliability::Auto {
            (request.reliability, parity_gap) = self.plan.choose(request.length);
            let bits = u64::BITS - request.length.saturating_sub(1).leading_zeros();
            self.message_sizes |= 1 << bits.min(u64::BITS - 1);
        }
        if !self.sender.has_new() {
            self.pacer.restart(now);
        }
        let number = self.sender.post(request, parity_gap)?;
        self.sends_posted += 1;
        self.sender.advance(now, &mut self.events);
        self.refresh_notices(now);
        Ok(number)
    }

    /// Queues a stream: a message whose units are announced with [`Self::continue_stream`]. Returns
    /// its number, which counts as one of the sends.
    pub fn post_stream(&mut self, request: StreamRequest, now: Nanos) -> Result<u64, PostError> {
        self.check_sending()?;
        let number = self.sender.post_stream(request)?;
        self.sends_posted += 1;
        self.sender.advance(now, &mut self.events);
        self.refresh_notices(now);
        Ok(number)
    }

    /// Announces units of a stream, in any order, with gaps, possibly repeatedly. With a reliable
    /// stream each unit is sent once, and again only if lost, always from the memory announced
    /// first. With an unreliable stream it is sent each time it is announced.
    pub fn continue_stream(
        &mut self,
        message: u64,
        part: StreamPart,
        now: Nanos,
    ) -> Result<(), PostError> {
        self.check_open()?;
        if !self.sender.has_new() {
            self.pacer.restart(now);
        }
        self.sender.continue_stream(message, part)
    }

    /// Ends a stream. A reliable one completes at both ends when all announced units have arrived,
    /// an unreliable one completes here when all have left.
    pub fn end_stream(&mut self, message: u64, now: Nanos) -> Result<(), PostError> {
        self.check_open()?;
        self.sender.end_stream(message, now, &mut self.events)?;
        self.refresh_notices(now);
        Ok(())
    }

    /// Cancels a send. It completes as `Cancelled` at once, and so does its receive unless all of
    /// the message arrives there first.
    pub fn cancel_send(&mut self, message: u64, now: Nanos) -> Result<(), PostError> {
        self.check_open()?;
        self.sender.cancel(message, now, &mut self.events)?;
        self.sender.advance(now, &mut self.events);
        self.refresh_notices(now);
        Ok(())
    }

    /// Completes a receive as `Partial` with the chunks that have landed. From then on the message
    /// changes neither memory nor bitmap. Its send completes as `Partial`, too, unless it already
    /// has.
    pub fn complete_receive(&mut self, message: u64, now: Nanos) -> Result<(), PostError> {
        self.check_open()?;
        self.receiver.complete(message, &mut self.events)?;
        self.refresh_notices(now);
        Ok(())
    }

    /// Lengths of the messages so far for which the plan chose: bit b stands for up to 2^b bytes and
    /// more than half of that.
    #[must_use]
    pub fn message_sizes(&self) -> u64 {
        self.message_sizes
    }

    /// Sets the plan for later sends that leave the scheme open.
    pub fn install_plan(&mut self, plan: Plan) {
        self.plan = plan;
    }

    /// Posts a buffer and returns the number of the message that will land in it; receives of this
    /// end are numbered from 0. Its slot is that number modulo `slots`.
    pub fn post_receive(&mut self, request: ReceiveRequest, now: Nanos) -> Result<u64, PostError> {
        self.check_open()?;
        let number = self.receiver.post(request)?;
        self.control.credit_changed(now);
        Ok(number)
    }

    fn check_sending(&self) -> Result<(), PostError> {
        self.check_open()?;
        if self.control.drain().is_draining() { Err(PostError::Draining) } else { Ok(()) }
    }

    /// Returns an error before the unit is decided, and once the session ends.
    pub(super) fn check_open(&self) -> Result<(), PostError> {
        if !self.units.is_decided() {
            return Err(PostError::Undecided);
        }
        match self.state {
            State::Connecting | State::Established => Ok(()),
            State::Closing | State::Closed => Err(PostError::Closed),
        }
    }

    pub(super) fn refresh_notices(&mut self, now: Nanos) {
        let (sent, is_any_sent) = self.sender.notice_state();
        let (received, is_any_received) = self.receiver.notice_state();
        self.control.notices_changed(sent + received, is_any_sent || is_any_received, now);
    }
}
