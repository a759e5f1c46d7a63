//! Events for the user of a session, counted as they are reported.

use std::collections::VecDeque;

use crate::link::Nanos;

use super::statistics::SessionStatistics;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionStatus {
    /// All of the message is in the peer's (send) or in this end's (receive) buffer. At the sender
    /// of a stream: all parts that it announced are there.
    Ok,
    /// The session ended before the peer confirmed; the message may or may not have arrived.
    OutcomeUnknown,
    /// The session ended, and the message did not arrive.
    Aborted,
    /// The message is longer than the receive posted for it, so none of it counts.
    TooLong,
    /// The sender cancelled the message. At the sender: it may have arrived nevertheless.
    Cancelled,
    /// The receiver wanted no more of the message, or (receive) it was a stream that ended with
    /// gaps. The units that landed are valid; the rest of the buffer is unchanged.
    Partial,
}

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// The user requested it.
    Requested,
    /// The peer was silent for the idle timeout.
    IdleTimeout,
    /// A key has protected the maximum number of packets, and the peer has not confirmed it.
    PacketLimit,
    /// More packets failed authentication than a key tolerates.
    ForgeryLimit,
    /// The peer is no longer trusted.
    Revoked,
    /// The path loses too much even at the lowest rate of the circuit breaker.
    PathOverloaded,
    /// The path carries small packets but not full-size ones.
    PathMtu,
    /// One end drained, and everything in progress has ended or ran out of time.
    Draining,
    /// This end may no longer act: its own attestation was refused.
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

/// An event for the user of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The peer holds the keys and the path carries full-size packets both ways.
    Established {
        /// First measured round trip.
        rtt: Nanos,
    },
    /// A send ended. Exactly one for each accepted [`super::SendRequest`].
    SendCompleted {
        /// As given in the request.
        user_data: u64,
        /// Its message number.
        message: u64,
        /// How it ended.
        status: CompletionStatus,
        /// When its first packet was sent, or when it ended if none was.
        started: Nanos,
        /// When it ended: the arrival of the last acknowledgement.
        completed: Nanos,
    },
    /// A receive ended. Exactly one for each accepted [`super::ReceiveRequest`].
    ReceiveCompleted {
        /// As given in the request.
        user_data: u64,
        /// Its message number.
        message: u64,
        /// Bytes of the message, or the range of a stream; 0 unless the status is `Ok`, or
        /// `Partial` with some of it arrived.
        length: u64,
        /// The immediate.
        immediate: Option<u32>,
        /// How it ended.
        status: CompletionStatus,
    },
    /// One of the ends drains: neither sends anything new.
    Draining,
    /// The session is over and all requests have completed. The last event.
    Closed {
        /// Why.
        reason: CloseReason,
        /// Whether the peer closed it or, for a drain, asked for it first.
        by_peer: bool,
    },
}

/// Events, oldest first: at most one per accepted request, and three for the session itself.
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
    /// Adds an event; for a completion, `length` is the message's.
    pub fn push(&mut self, event: Event, length: u64) {
        self.sends_ended += u64::from(matches!(event, Event::SendCompleted { .. }));
        match event {
            Event::SendCompleted { status: CompletionStatus::Ok, .. } => {
                self.sends_completed += 1;
                self.payload_bytes_sent += length;
            }
            Event::ReceiveCompleted {
                status: CompletionStatus::Ok | CompletionStatus::Partial,
                ..
            } => {
                self.receives_completed += 1;
                self.payload_bytes_received += length;
            }
            Event::SendCompleted { .. } | Event::ReceiveCompleted { .. } => self.failed += 1,
            Event::Established { .. } | Event::Draining | Event::Closed { .. } => {}
        }
        self.queue.push_back(event);
    }

    /// Number of sends that have ended, successfully or not.
    #[must_use]
    pub fn sends_ended(&self) -> u64 {
        self.sends_ended
    }

    /// Takes the oldest.
    pub fn pop(&mut self) -> Option<Event> {
        self.queue.pop_front()
    }

    /// Writes the counters that are derived from events.
    pub fn count_into(&self, statistics: &mut SessionStatistics) {
        statistics.sends_completed = self.sends_completed;
        statistics.receives_completed = self.receives_completed;
        statistics.failed = self.failed;
        statistics.payload_bytes_sent = self.payload_bytes_sent;
        statistics.payload_bytes_received = self.payload_bytes_received;
    }
}
