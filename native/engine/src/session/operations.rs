//! Operations that the daemon has taken from the ring and not completed yet.
//!
//! At most as many as the ring has entries (`ring::DaemonRing::take`). Sends and receives wait for a
//! slot of the machine in a queue each, and what follows a stream in a queue of that stream, so that
//! nothing stands in another's way.

use std::collections::{BTreeMap, VecDeque};

use super::ring::{Completion, Opcode, Operation, Submission};

/// Everything between a submission and its completion, by handle.
#[derive(Debug, Default)]
pub(super) struct Operations {
    open: BTreeMap<u64, Open>,
    sends: VecDeque<u64>,
    receives: VecDeque<u64>,
    /// Parts and ends that wait, by the stream that they are of.
    parts: BTreeMap<u64, VecDeque<u64>>,
    /// Where the region's receives lie: the end of each by its beginning. None has length 0, no two
    /// overlap.
    landing: BTreeMap<u64, u64>,
}

/// One of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Open {
    pub(super) submission: Submission,
    /// Its number in the session, once it has a slot.
    pub(super) message: Option<u64>,
}

/// One of the two directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Send,
    Receive,
}

impl Operations {
    /// Whether this is a receive into bytes that another one has. What would land there would be a
    /// mixture of two messages, and each would tell its job that it is whole.
    pub(super) fn overlaps(&self, submission: &Submission) -> bool {
        let Submission { offset, length, kind: Operation::Receive, .. } = *submission else {
            return false;
        };
        let before_end = self.landing.range(..offset + length).next_back();
        length > 0 && before_end.is_some_and(|(_, end)| *end > offset)
    }

    /// Adds what was taken from the ring. Messages wait behind the others of their direction, parts
    /// behind those of their stream, if that is open. True for what waits.
    pub(super) fn add(&mut self, handle: u64, submission: Submission) -> bool {
        let waits = match submission.kind {
            Operation::Send { .. } | Operation::Stream { .. } => {
                self.sends.push_back(handle);
                true
            }
            Operation::Receive => {
                self.receives.push_back(handle);
                if submission.length > 0 {
                    let Submission { offset, length, .. } = submission;
                    self.landing.insert(offset, offset + length);
                }
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
        self.open.insert(handle, Open { submission, message: None });
        waits
    }

    /// An open operation.
    pub(super) fn get(&self, handle: u64) -> Option<Open> {
        self.open.get(&handle).copied()
    }

    /// The operation that waits longest for a slot.
    pub(super) fn first(&self, direction: Direction) -> Option<(u64, Submission)> {
        let queue = match direction {
            Direction::Send => &self.sends,
            Direction::Receive => &self.receives,
        };
        let handle = *queue.front()?;
        Some((handle, self.get(handle)?.submission))
    }

    /// That one waits no more: it has become a message, or will not.
    pub(super) fn left(&mut self, direction: Direction, message: Option<u64>) {
        let handle = match direction {
            Direction::Send => self.sends.pop_front(),
            Direction::Receive => self.receives.pop_front(),
        };
        if let Some(open) = handle.and_then(|handle| self.open.get_mut(&handle)) {
            open.message = message;
        }
    }

    /// Takes an operation out of the queue for a slot, wherever it stands there.
    pub(super) fn withdraw(&mut self, handle: u64) {
        self.sends.retain(|waiting| *waiting != handle);
        self.receives.retain(|waiting| *waiting != handle);
    }

    /// Streams with parts that wait.
    pub(super) fn streams(&self) -> Vec<u64> {
        self.parts.keys().copied().collect()
    }

    /// The part of a stream that waits longest.
    pub(super) fn first_part(&self, stream: u64) -> Option<(u64, Submission)> {
        let handle = *self.parts.get(&stream)?.front()?;
        Some((handle, self.get(handle)?.submission))
    }

    /// That one waits no more.
    pub(super) fn part_left(&mut self, stream: u64) {
        if let Some(queue) = self.parts.get_mut(&stream) {
            queue.pop_front();
            if queue.is_empty() {
                self.parts.remove(&stream);
            }
        }
    }

    /// Ends an operation that waits nowhere; `completion` gets what the submission knows.
    pub(super) fn end(&mut self, handle: u64, completion: Completion) -> Option<Completion> {
        let Open { submission, .. } = self.open.remove(&handle)?;
        let opcode = submission.kind.opcode();
        if opcode == Opcode::Receive && submission.length > 0 {
            self.landing.remove(&submission.offset);
        }
        Some(Completion { opcode, user_data: submission.user_data, handle, ..completion })
    }

    /// Empties all queues: no slot will come any more. Returns what waited.
    pub(super) fn give_up(&mut self) -> Vec<u64> {
        let parts = std::mem::take(&mut self.parts).into_values().flatten();
        self.sends.drain(..).chain(self.receives.drain(..)).chain(parts).collect()
    }
}

impl Open {
    /// Whether it is one of those.
    pub(super) fn is(&self, opcode: Opcode) -> bool {
        self.submission.kind.opcode() == opcode
    }
}
