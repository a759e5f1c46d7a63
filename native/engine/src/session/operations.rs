//! Operations that the daemon has taken from the ring and not completed yet.
//!
//! At most as many as the ring has entries (`ring::DaemonRing::take`). Sends and receives wait for a
//! slot of the machine in a queue each, so that neither direction stands in the other's way.

use std::collections::{BTreeMap, VecDeque};

use super::ring::{Completion, Operation, Status, Submission};

/// Everything between a submission and its completion, by handle.
#[derive(Debug, Default)]
pub(super) struct Operations {
    open: BTreeMap<u64, Submission>,
    sends: VecDeque<u64>,
    receives: VecDeque<u64>,
}

/// One of the two directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Send,
    Receive,
}

impl Operations {
    /// Adds what was taken from the ring; it waits behind the others of its direction.
    pub(super) fn add(&mut self, handle: u64, submission: Submission) {
        match submission.kind {
            Operation::Send { .. } => self.sends.push_back(handle),
            Operation::Receive => self.receives.push_back(handle),
        }
        self.open.insert(handle, submission);
    }

    /// The operation that waits longest for a slot.
    pub(super) fn first(&self, direction: Direction) -> Option<(u64, Submission)> {
        let handle = self.queue(direction).front()?;
        Some((*handle, *self.open.get(handle)?))
    }

    /// That one has its slot.
    pub(super) fn posted(&mut self, direction: Direction) {
        match direction {
            Direction::Send => self.sends.pop_front(),
            Direction::Receive => self.receives.pop_front(),
        };
    }

    /// Ends an operation that has left its queue; `completion` gets what the submission knows.
    pub(super) fn end(&mut self, handle: u64, completion: Completion) -> Option<Completion> {
        let submission = self.open.remove(&handle)?;
        Some(Completion { user_data: submission.user_data, handle, ..completion })
    }

    /// Bytes of an open operation.
    pub(super) fn length(&self, handle: u64) -> u64 {
        self.open.get(&handle).map_or(0, |submission| submission.length)
    }

    /// Ends everything that waits: no slot will come any more.
    pub(super) fn give_up(&mut self) -> Vec<Completion> {
        let waiting: Vec<u64> = self.sends.drain(..).chain(self.receives.drain(..)).collect();
        let mut aborted = |handle: &u64| {
            let is_send = matches!(self.open.get(handle)?.kind, Operation::Send { .. });
            let status = Status::Aborted;
            self.end(*handle, Completion { is_send, status, ..Completion::default() })
        };
        waiting.iter().filter_map(&mut aborted).collect()
    }

    fn queue(&self, direction: Direction) -> &VecDeque<u64> {
        match direction {
            Direction::Send => &self.sends,
            Direction::Receive => &self.receives,
        }
    }
}
