//! Operations that the daemon has taken from the ring and not completed yet.
//!
//! There are at most as many as the ring has entries (`ring::DaemonRing::take`). Sends and receives
//! each wait in a queue for a slot of the machine, and commands for a stream in that stream's
//! queue, so that nothing blocks anything else.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use sealane_proto::link::Nanos;
use sealane_proto::session::Reliability;

use super::region::Landing;
use super::ring::{Completion, Opcode, Operation, Status, Submission};

/// All operations between submission and completion, by handle.
#[derive(Debug)]
pub(super) struct Operations {
    open: BTreeMap<u64, Open>,
    sends: VecDeque<u64>,
    receives: VecDeque<u64>,
    /// Waiting parts and ends, by their stream.
    parts: BTreeMap<u64, VecDeque<u64>>,
    /// Where receives land, those of other sessions of the region included.
    landing: Arc<Landing>,
    /// When the messages that have a deadline will be cancelled.
    deadlines: BTreeSet<(Nanos, u64)>,
}

/// One operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Open {
    pub(super) submission: Submission,
    /// Its message number in the session, once it has a slot.
    pub(super) message: Option<u64>,
    /// When it was taken from the ring.
    pub(super) since: Nanos,
    deadline: Option<Nanos>,
    /// Its deadline has passed, and it is cancelled for that reason.
    is_expired: bool,
}

/// One of the two directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Send,
    Receive,
}

impl Operations {
    /// None yet; receives land in the region of this table.
    pub(super) fn new(landing: Arc<Landing>) -> Self {
        Self {
            open: BTreeMap::new(),
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            parts: BTreeMap::new(),
            landing,
            deadlines: BTreeSet::new(),
        }
    }

    /// Reserves the range of a receive, before [`Self::add`]; false if another receive uses a byte
    /// of it. Other operations need none.
    pub(super) fn reserve(&self, submission: &Submission) -> bool {
        !is_receive(submission) || self.landing.reserve(submission.offset, submission.length)
    }

    /// Gives the range of a receive back.
    pub(super) fn release(&self, submission: &Submission) {
        if is_receive(submission) {
            self.landing.release(submission.offset, submission.length);
        }
    }

    /// Adds an operation from the ring, with its range reserved. Messages wait behind others of the
    /// same direction, parts behind those of their stream, if it is open. Returns whether the
    /// operation waits.
    pub(super) fn add(&mut self, handle: u64, submission: Submission, now: Nanos) -> bool {
        let waits = match submission.kind {
            Operation::Send(_) | Operation::Stream(_) => {
                self.sends.push_back(handle);
                true
            }
            Operation::Receive => {
                self.receives.push_back(handle);
                true
            }
            Operation::Continue { stream, .. } | Operation::End { stream } => {
                let is_open = self.get(stream).is_some_and(|open| open.is(Opcode::Stream));
                if is_open {
                    self.parts.entry(stream).or_default().push_back(handle);
                }
                is_open
            }
            Operation::Cancel { .. } | Operation::Complete { .. } | Operation::PacketMap { .. } => {
                false
            }
        };
        let deadline = submission.kind.terms().and_then(|terms| terms.deadline);
        let deadline = deadline.map(|nanos| now.saturating_add(nanos));
        self.deadlines.extend(deadline.map(|at| (at, handle)));
        let open = Open { submission, message: None, since: now, deadline, is_expired: false };
        self.open.insert(handle, open);
        waits
    }

    /// An open operation.
    pub(super) fn get(&self, handle: u64) -> Option<Open> {
        self.open.get(&handle).copied()
    }

    /// The operation that has waited longest for a slot.
    pub(super) fn first(&self, direction: Direction) -> Option<(u64, Submission)> {
        let queue = match direction {
            Direction::Send => &self.sends,
            Direction::Receive => &self.receives,
        };
        let handle = *queue.front()?;
        Some((handle, self.get(handle)?.submission))
    }

    /// Removes that operation from its queue: it has become a message, or never will.
    pub(super) fn left(&mut self, direction: Direction, message: Option<u64>) {
        let handle = match direction {
            Direction::Send => self.sends.pop_front(),
            Direction::Receive => self.receives.pop_front(),
        };
        if let Some(open) = handle.and_then(|handle| self.open.get_mut(&handle)) {
            open.message = message;
        }
    }

    /// Removes an operation from the queue for a slot, wherever it is.
    pub(super) fn withdraw(&mut self, handle: u64) {
        self.sends.retain(|waiting| *waiting != handle);
        self.receives.retain(|waiting| *waiting != handle);
    }

    /// When the next deadline passes.
    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Takes an operation whose deadline has passed.
    pub(super) fn take_expired(&mut self, now: Nanos) -> Option<u64> {
        let (at, handle) = self.deadlines.first().copied().filter(|(at, _)| *at <= now)?;
        self.deadlines.remove(&(at, handle));
        Some(handle)
    }

    /// Sets whether its deadline is the reason why an operation is cancelled.
    pub(super) fn set_expired(&mut self, handle: u64, is_expired: bool) {
        if let Some(open) = self.open.get_mut(&handle) {
            open.is_expired = is_expired;
        }
    }

    /// Streams with waiting parts.
    pub(super) fn streams(&self) -> Vec<u64> {
        self.parts.keys().copied().collect()
    }

    /// The part of a stream that has waited longest.
    pub(super) fn first_part(&self, stream: u64) -> Option<(u64, Submission)> {
        let handle = *self.parts.get(&stream)?.front()?;
        Some((handle, self.get(handle)?.submission))
    }

    /// Removes that part from its queue.
    pub(super) fn part_left(&mut self, stream: u64) {
        if let Some(queue) = self.parts.get_mut(&stream) {
            queue.pop_front();
            if queue.is_empty() {
                self.parts.remove(&stream);
            }
        }
    }

    /// Removes an operation that is in no queue; fills in the completion from its submission.
    pub(super) fn end(&mut self, handle: u64, completion: Completion) -> Option<Completion> {
        let Open { submission, deadline, is_expired, .. } = self.open.remove(&handle)?;
        if let Some(at) = deadline {
            self.deadlines.remove(&(at, handle));
        }
        let status = match completion.status {
            Status::Cancelled if is_expired => Status::Expired,
            status => status,
        };
        let opcode = submission.kind.opcode();
        self.release(&submission);
        Some(Completion { opcode, status, user_data: submission.user_data, handle, ..completion })
    }

    /// Empties all queues, because no more slots will be assigned. Returns the waiting operations.
    pub(super) fn give_up(&mut self) -> Vec<u64> {
        let parts = std::mem::take(&mut self.parts).into_values().flatten();
        self.sends.drain(..).chain(self.receives.drain(..)).chain(parts).collect()
    }
}

impl Drop for Operations {
    fn drop(&mut self) {
        // None is open unless the worker has panicked. The region may have other sessions, which
        // live on.
        for open in self.open.values() {
            self.release(&open.submission);
        }
    }
}

fn is_receive(submission: &Submission) -> bool {
    submission.kind.opcode() == Opcode::Receive
}

impl Open {
    /// Whether it has this opcode.
    pub(super) fn is(&self, opcode: Opcode) -> bool {
        self.submission.kind.opcode() == opcode
    }

    /// Whether it is a send whose completion says that the peer has the message.
    pub(super) fn is_reliable_send(&self) -> bool {
        matches!(self.submission.kind, Operation::Send(terms) if terms.reliability != Reliability::Unreliable)
    }
}
