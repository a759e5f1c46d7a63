//! The orderly end of a session: nothing new is sent, what is under way ends, then both ends close.
//!
//! An end says DRAINING in its control packets, and in each whether all of its sends have ended. An
//! end that hears it drains, too. Who knows that both are done closes: nobody's outcome is open then.

use crate::link::Nanos;

use super::control::Repeat;
use super::frame::Frame;

/// Where an end stands.
#[derive(Debug, Default)]
pub struct Drain {
    /// Whether the peer asked for it; none before it begins.
    is_asked: Option<bool>,
    /// Its sends have all ended.
    is_done: bool,
    /// So have those of the peer.
    is_peer_done: bool,
    /// What is due to be said.
    saying: Repeat,
}

impl Drain {
    /// Whether nothing new is sent.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.is_asked.is_some()
    }

    /// Whether it is the peer's: it asked first. None if there is no drain.
    #[must_use]
    pub fn is_asked(&self) -> Option<bool> {
        self.is_asked
    }

    /// Begins, as the peer asks if `is_asked`; true unless it had.
    pub fn begin(&mut self, is_asked: bool, now: Nanos) -> bool {
        let begins = self.is_asked.is_none();
        if begins {
            self.is_asked = Some(is_asked);
            self.saying.now(now);
        }
        begins
    }

    /// The peer has said so.
    pub fn peer_said(&mut self, is_done: bool) {
        self.is_peer_done |= is_done;
    }

    /// Whether sends are under way here; true if nothing is at either end, so that it is over.
    pub fn update(&mut self, has_sends: bool, now: Nanos) -> bool {
        if self.is_draining() && !has_sends && !self.is_done {
            self.is_done = true;
            self.saying.now(now);
        }
        self.is_done && self.is_peer_done
    }

    /// When a control packet is to say it.
    #[must_use]
    pub fn due(&self) -> Option<Nanos> {
        self.saying.due()
    }

    /// Appends the frame if it is due; it is said again after a time-out, until the session closes.
    pub fn write(&mut self, out: &mut Vec<u8>, timeout: Nanos, now: Nanos) {
        if self.saying.due().is_some_and(|due| due <= now) {
            Frame::Draining { is_done: self.is_done }.encode(out);
            self.saying.again(timeout, now);
        }
    }
}
