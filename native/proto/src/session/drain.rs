//! The orderly end of a session: nothing new is sent, everything in progress ends, then both ends
//! close.
//!
//! An end sends DRAINING frames, each with whether all its sends have ended. An end that receives
//! one drains, too. The end that knows that both are done closes; by then every outcome is known.

use crate::link::Nanos;

use super::control::Repeat;
use super::frame::Frame;

/// One end's state of draining.
#[derive(Debug, Default)]
pub struct Drain {
    /// Whether the peer asked for it; `None` before it starts.
    is_asked: Option<bool>,
    /// Whether all its sends have ended.
    is_done: bool,
    /// Whether all sends of the peer have ended.
    is_peer_done: bool,
    /// When to send the frame.
    notice: Repeat,
}

impl Drain {
    /// Whether the session drains.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.is_asked.is_some()
    }

    /// Whether the peer asked first; `None` if there is no drain.
    #[must_use]
    pub fn is_asked(&self) -> Option<bool> {
        self.is_asked
    }

    /// Starts to drain, at the peer's request if `is_asked`; returns whether it had not started
    /// before.
    pub fn begin(&mut self, is_asked: bool, now: Nanos) -> bool {
        let begins = self.is_asked.is_none();
        if begins {
            self.is_asked = Some(is_asked);
            self.notice.now(now);
        }
        begins
    }

    /// Processes the peer's frame.
    pub fn peer_reported(&mut self, is_done: bool) {
        self.is_peer_done |= is_done;
    }

    /// Updates whether sends are in progress here; returns whether none are at either end, so the
    /// drain is complete.
    pub fn update(&mut self, has_sends: bool, now: Nanos) -> bool {
        if self.is_draining() && !has_sends && !self.is_done {
            self.is_done = true;
            self.notice.now(now);
        }
        self.is_done && self.is_peer_done
    }

    /// When a control packet has to carry the frame.
    #[must_use]
    pub fn due(&self) -> Option<Nanos> {
        self.notice.due()
    }

    /// Appends the frame if it is due. It is repeated after a time-out until the session closes.
    pub fn write(&mut self, out: &mut Vec<u8>, timeout: Nanos, now: Nanos) {
        if self.notice.due().is_some_and(|due| due <= now) {
            Frame::Draining { is_done: self.is_done }.encode(out);
            self.notice.again(timeout, now);
        }
    }
}
