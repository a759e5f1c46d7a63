//! Pauses between the data and the parity of messages, so that one burst of losses does not hit both
//! (docs/decisions/0101-bursts-in-time.md). Other messages are sent meanwhile.

use crate::link::Nanos;

use super::super::outgoing::State;
use super::Sender;

impl Sender {
    /// When the parity of a pausing message may leave.
    #[must_use]
    pub fn parity_at(&self) -> Option<Nanos> {
        self.waiting.first().filter(|_| !self.flight.is_full()).map(|(at, _)| *at)
    }

    /// Lets a message pause whose data has left, if its plan says so.
    pub(super) fn begin_pause(&mut self, number: u64) {
        let Some(message) = self.window.get(number) else { return };
        if let Some(at) = message.parity_at {
            let rank = message.rank(number);
            self.ready.remove(&rank);
            self.waiting.insert((at, rank));
        }
    }

    /// Makes messages ready whose pause is over, unless the peer needs none of their parity.
    pub(super) fn end_pauses(&mut self, now: Nanos) {
        while let Some((_, rank)) = self.waiting.first().copied().filter(|(at, _)| *at <= now) {
            self.waiting.pop_first();
            let Some(message) = self.window.get_mut(rank.1) else { continue };
            message.parity_at = None;
            message.skip();
            if message.state == State::Active && message.next_new().is_some() {
                self.ready.insert(rank);
            }
        }
    }

    /// Records that no unit of a message will leave any more.
    pub(super) fn unready(&mut self, number: u64) {
        let Some(message) = self.window.get_mut(number) else { return };
        let rank = message.rank(number);
        if let Some(at) = message.parity_at.take() {
            self.waiting.remove(&(at, rank));
        }
        self.ready.remove(&rank);
    }
}
