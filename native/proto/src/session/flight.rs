//! Units under way: when each left, and which of them are to be sent again.

use std::collections::VecDeque;

use crate::link::Nanos;

/// Transmissions remembered: 3 round trips of 25 ms at 400 Gbit/s in 4 KiB units.
/// When full, nothing new is sent until the oldest is acknowledged or lost.
const TRANSMISSIONS_MAX: usize = 1 << 20;

/// A unit that left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmission {
    /// In which packet.
    pub packet: u64,
    /// Its message.
    pub message: u64,
    /// Its coded index.
    pub coded: u32,
    /// When.
    pub sent_at: Nanos,
}

/// All transmissions of which nobody knows yet what became of them, in the order of their packets.
#[derive(Debug, Default)]
pub struct Flight {
    transmissions: VecDeque<Transmission>,
}

impl Flight {
    /// Nothing more may be sent but what was sent before.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.transmissions.len() >= TRANSMISSIONS_MAX
    }

    /// Whether nothing is under way.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.transmissions.is_empty()
    }

    /// A unit has left.
    pub fn sent(&mut self, transmission: Transmission) {
        self.transmissions.push_back(transmission);
    }

    /// Forgets the oldest as long as they are not outstanding.
    pub fn prune(&mut self, is_outstanding: impl Fn(&Transmission) -> bool) {
        while self.transmissions.front().is_some_and(|oldest| !is_outstanding(oldest)) {
            self.transmissions.pop_front();
        }
    }

    /// When the oldest is given up.
    #[must_use]
    pub fn next_at(&self, timeout: Nanos) -> Option<Nanos> {
        self.transmissions.front().map(|oldest| oldest.sent_at.saturating_add(timeout))
    }

    /// Takes the oldest outstanding transmission whose time is up.
    pub fn take_expired(
        &mut self,
        now: Nanos,
        timeout: Nanos,
        is_outstanding: impl Fn(&Transmission) -> bool,
    ) -> Option<Transmission> {
        self.prune(is_outstanding);
        if self.next_at(timeout)? > now {
            return None;
        }
        self.transmissions.pop_front()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.transmissions.clear();
    }
}
