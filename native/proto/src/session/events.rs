//! Events waiting for the user, counted as they are made.

use std::collections::VecDeque;

use super::types::{CompletionStatus, Event, SessionStatistics};

/// Oldest first. At most one per accepted request, and three for the session itself.
#[derive(Debug, Default)]
pub struct Events {
    queue: VecDeque<Event>,
    sends_completed: u64,
    receives_completed: u64,
    failed: u64,
    sends_ended: u64,
    payload_bytes_sent: u64,
    payload_bytes_received: u64,
}

impl Events {
    /// Adds an event; `length` is the message's, for a completion.
    pub fn push(&mut self, event: Event, length: u64) {
        self.sends_ended += u64::from(matches!(event, Event::SendCompleted { .. }));
        match event {
            Event::SendCompleted { status: CompletionStatus::Ok, .. } => {
                self.sends_completed += 1;
                self.payload_bytes_sent += length;
            }
            Event::ReceiveCompleted { status: CompletionStatus::Ok, .. } => {
                self.receives_completed += 1;
                self.payload_bytes_received += length;
            }
            Event::SendCompleted { .. } | Event::ReceiveCompleted { .. } => self.failed += 1,
            Event::Established { .. } | Event::Draining | Event::Closed { .. } => {}
        }
        self.queue.push_back(event);
    }

    /// Sends that have ended, well or not.
    #[must_use]
    pub fn sends_ended(&self) -> u64 {
        self.sends_ended
    }

    /// Takes the oldest.
    pub fn pop(&mut self) -> Option<Event> {
        self.queue.pop_front()
    }

    /// Writes the counters that follow from events.
    pub fn count_into(&self, statistics: &mut SessionStatistics) {
        statistics.sends_completed = self.sends_completed;
        statistics.receives_completed = self.receives_completed;
        statistics.failed = self.failed;
        statistics.payload_bytes_sent = self.payload_bytes_sent;
        statistics.payload_bytes_received = self.payload_bytes_received;
    }
}
