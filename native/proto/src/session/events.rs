//! What happened, for the user of a session; counted as it is told.

use std::collections::VecDeque;

use crate::link::Nanos;

use super::statistics::SessionStatistics;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionStatus {
    /// All of the message is in the peer's (send) or in this end's (receive) buffer.
    Ok,
    /// The session ended before the peer confirmed: the message may or may not have arrived.
    OutcomeUnknown,
    /// The session ended, and the message did not arrive.
    Aborted,
    /// The message is longer than the receive posted for it. Nothing of it counts.
    TooLong,
    /// The sender gave the message up. At the sender: it may have arrived all the same.
    Cancelled,
    /// The receiver wanted no more of the message: the chunks that landed are right, the rest of
    /// the buffer is as it was.
    Partial,
}

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// Someone asked for it.
    Requested,
    /// The peer was silent for the idle timeout.
    IdleTimeout,
    /// A key has protected as many packets as it may, and the peer has not confirmed it.
    PacketLimit,
    /// More packets failed authentication than a key tolerates.
    ForgeryLimit,
    /// The peer is no longer trusted.
    Revoked,
    /// The path loses too much at the least rate that the circuit breaker leaves.
    PathOverloaded,
    /// The path carries small packets and not those of full size.
    PathMtu,
    /// One end drained, and all that was under way has ended, or had no more time.
    Draining,
    /// This end may not act any more: whoever attests it refused it.
    Barred,
    /// A code that this version does not know.
    Other(u8),
}

impl CloseReason {
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Requested => 0,
            Self::IdleTimeout => 1,
            Self::PacketLimit => 2,
            Self::ForgeryLimit => 3,
            Self::Revoked => 4,
            Self::PathOverloaded => 5,
            Self::PathMtu => 6,
            Self::Draining => 7,
            Self::Barred => 8,
            Self::Other(code) => code,
        }
    }

    pub(super) fn from_code(code: u8) -> Self {
        match code {
            0 => Self::Requested,
            1 => Self::IdleTimeout,
            2 => Self::PacketLimit,
            3 => Self::ForgeryLimit,
            4 => Self::Revoked,
            5 => Self::PathOverloaded,
            6 => Self::PathMtu,
            7 => Self::Draining,
            8 => Self::Barred,
            other => Self::Other(other),
        }
    }
}

/// What happened, for the user of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The peer holds the keys and the path carries full-size packets both ways.
    Established {
        /// First measured round trip.
        rtt: Nanos,
    },
    /// A send ended. Exactly one for each accepted [`super::SendRequest`].
    SendCompleted {
        /// From the request.
        user_data: u64,
        /// Its message number.
        message: u64,
        /// How it ended.
        status: CompletionStatus,
        /// When its first packet was sent (when it ended, if none was).
        started: Nanos,
        /// When it ended: the arrival of the last acknowledgement.
        completed: Nanos,
    },
    /// A receive ended. Exactly one for each accepted [`super::ReceiveRequest`].
    ReceiveCompleted {
        /// From the request.
        user_data: u64,
        /// Its message number.
        message: u64,
        /// Bytes of the message, of a stream its range; 0 unless the status is `Ok`, or `Partial`
        /// and some of it has arrived.
        length: u64,
        /// The word sent along.
        immediate: Option<u32>,
        /// How it ended.
        status: CompletionStatus,
    },
    /// Nothing new is sent any more, at either end: one of them drains.
    Draining,
    /// The session is over; all requests have completed. The last event.
    Closed {
        /// Why.
        reason: CloseReason,
        /// Whether the peer closed it; of a drain, whether the peer asked for it first.
        by_peer: bool,
    },
}

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
