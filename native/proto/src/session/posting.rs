//! The user's commands about messages: sends, streams, receives, and giving them up.

use crate::link::Nanos;

use super::plan::Plan;
use super::requests::{
    PostError, ReceiveRequest, Reliability, SendRequest, StreamPart, StreamRequest,
};
use super::{Session, State};

impl Session {
    /// Queues a message; returns its number, which counts all sends of this end from 0.
    pub fn post_send(&mut self, request: SendRequest, now: Nanos) -> Result<u64, PostError> {
        self.check_sending()?;
        let mut request = request;
        if request.reliability == Reliability::Auto {
            request.reliability = self.plan.choose(request.length);
        }
        if !self.sender.has_new() {
            self.pacer.restart(now);
        }
        let number = self.sender.post(request)?;
        self.sends_posted += 1;
        self.sender.advance(now, &mut self.events);
        self.refresh_notices(now);
        Ok(number)
    }

    /// Queues a stream: a message whose units [`Self::continue_stream`] names. Returns its number,
    /// which counts as that of any send.
    pub fn post_stream(&mut self, request: StreamRequest, now: Nanos) -> Result<u64, PostError> {
        self.check_sending()?;
        let number = self.sender.post_stream(request)?;
        self.sends_posted += 1;
        self.sender.advance(now, &mut self.events);
        self.refresh_notices(now);
        Ok(number)
    }

    /// Names units of a stream: in any order, with gaps, and again. What is reliable is sent once
    /// and repeated only if lost, from the memory that was named first; what is unreliable is sent
    /// as often as it is named.
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

    /// Says that no more of a stream will come. A reliable stream completes at both ends when all
    /// that was named has arrived, an unreliable one here when all has left.
    pub fn end_stream(&mut self, message: u64, now: Nanos) -> Result<(), PostError> {
        self.check_open()?;
        self.sender.end_stream(message, now, &mut self.events)?;
        self.refresh_notices(now);
        Ok(())
    }

    /// Gives a send up: it completes as `Cancelled` at once, and so does its receive unless all of
    /// it has arrived before that is known there.
    pub fn cancel_send(&mut self, message: u64, now: Nanos) -> Result<(), PostError> {
        self.check_open()?;
        self.sender.cancel(message, now, &mut self.events)?;
        self.sender.advance(now, &mut self.events);
        self.refresh_notices(now);
        Ok(())
    }

    /// Ends a receive with the chunks that have landed, as `Partial`: from here on nothing of the
    /// message changes memory or bitmap. Its send ends as `Partial`, too, unless it has completed.
    pub fn complete_receive(&mut self, message: u64, now: Nanos) -> Result<(), PostError> {
        self.check_open()?;
        self.receiver.complete(message, &mut self.events)?;
        self.refresh_notices(now);
        Ok(())
    }

    /// Puts a plan in force for the sends to come that leave the scheme open.
    pub fn install_plan(&mut self, plan: Plan) {
        self.plan = plan;
    }

    /// Posts a buffer; returns the number of the message that will land in it, which counts all
    /// receives of this end from 0. Its slot is that number modulo `slots`.
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

    /// Refuses before the unit is known, and once the session ends.
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
