//! A host's command in progress, and its parts at the target.

use std::ops::Range;

use sealane_proto::link::Nanos;
use sealane_proto::nvme::controller_queue::Operation;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{BLOCK_BYTES, DATA_BYTES, IV_BYTES};

use super::journal::{Change, Mark};
use super::ranges::BlockRanges;
use crate::latency::Io;

/// A host's command.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) operation: Operation,
    pub(super) lba: u64,
    pub(super) blocks: u32,
    pub(super) is_forced: bool,
    /// First block for which no part has been cut.
    pub(super) cut: u32,
    /// Whether every part has been cut.
    pub(super) is_cut: bool,
    /// Number of parts that haven't ended.
    pub(super) parts: u32,
    /// Plaintext of a read; empty until its first part ends.
    pub(super) answer: Vec<u8>,
    pub(super) status: Status,
    /// When it was accepted.
    pub(super) since: Nanos,
    /// When it first had to wait for a back end.
    pub(super) held_since: Option<Nanos>,
}

impl Request {
    pub(super) fn new(
        operation: Operation,
        lba: u64,
        blocks: u32,
        is_forced: bool,
        since: Nanos,
    ) -> Self {
        Self {
            operation,
            lba,
            blocks,
            is_forced,
            cut: 0,
            is_cut: false,
            parts: 0,
            answer: Vec::new(),
            status: Status::SUCCESS,
            since,
            held_since: None,
        }
    }

    /// The measured operation that it is, if it is one.
    pub(super) fn io(&self) -> Option<Io> {
        match self.operation {
            Operation::Read => Some(Io::Read),
            Operation::Write(_) | Operation::CompareAndWrite { .. } => Some(Io::Write),
            Operation::Flush => Some(Io::Flush),
            _ => None,
        }
    }
}

/// The originator of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// The host's command in this slot.
    Request(u16),
    /// None: the command was completed without waiting for this part.
    Nobody,
    /// The journal, to make room.
    Journal,
    /// The journal, replayed to this incarnation of the target.
    Replay(u64),
    /// This queue, for its own questions to the target.
    Outcomes,
}

/// Where a change was last sent. Until it is answered, it may or may not have been made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sent {
    /// The target's incarnation.
    pub(super) incarnation: u64,
    /// The queue's name.
    pub(super) queue: u64,
    /// Its association epoch.
    pub(super) epoch: u64,
    /// The command's number on that queue.
    pub(super) number: u64,
}

/// Blocks and room in the journal that a change has claimed until it ends.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    pub(super) ranges: BlockRanges,
    pub(super) cost: usize,
}

/// The work of a part at the target.
#[derive(Debug)]
pub(super) enum Work {
    /// Reads for the host, or to compare or verify.
    Read,
    /// A write or deallocation; if it is sent again, then unchanged.
    Change { change: Change, is_forced: bool },
    /// Makes durable everything acknowledged before `mark`, which is taken before the flush is
    /// first sent.
    Flush { mark: Mark },
    /// Reads for a compare-and-write. `sent` has the new sectors if the outcome of an earlier
    /// attempt to store them is unknown.
    Examine { sent: Option<Change> },
    /// Stores the new sectors of a compare-and-write if the compared ones are still current.
    Swap { current: Vec<[u8; IV_BYTES]>, change: Change, is_forced: bool },
    /// Asks for the outcomes of the changes of a queue that has ended.
    Outcomes { queue: u64, epoch: u64 },
    /// Asks for the openings of the target's store and how far they had come.
    Openings,
}

/// A part of a command: one command at the target.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) owner: Owner,
    pub(super) lba: u64,
    /// First block, relative to the start of the request.
    pub(super) first: u32,
    pub(super) blocks: u32,
    pub(super) work: Work,
    pub(super) claim: Option<Claim>,
    /// Increases with each part; parts are sent again in this order.
    pub(super) order: u64,
    /// Attempts of a compare-and-write that failed because of another gateway's write.
    pub(super) attempts: u32,
    /// Whether it was sent before, on an association that was lost.
    pub(super) is_again: bool,
    /// Position in the journal, if it is a piece of the journal.
    pub(super) place: u64,
    /// Where it was last sent, if it is a change: that target must be asked before it is sent
    /// again.
    pub(super) sent: Option<Sent>,
    /// Whether an earlier incarnation of the target may have executed an earlier attempt.
    pub(super) is_unknown: bool,
    /// Number of ranges of a deallocation done by earlier attempts.
    pub(super) ranges_done: usize,
    /// Association epoch in which it was last sent.
    pub(super) epoch: u64,
    /// When its answer is overdue.
    pub(super) deadline: Nanos,
}

impl Part {
    /// Creates a part without a host's command.
    pub(super) fn internal(owner: Owner, work: Work) -> Self {
        Self {
            owner,
            lba: 0,
            first: 0,
            blocks: 0,
            work,
            claim: None,
            order: 0,
            attempts: 0,
            is_again: false,
            place: 0,
            sent: None,
            is_unknown: false,
            ranges_done: 0,
            epoch: 0,
            deadline: Nanos::MAX,
        }
    }

    /// Bytes transferred between gateway and target.
    pub(super) fn back_bytes(&self) -> usize {
        match &self.work {
            Work::Change { change: Change::Deallocate(_), .. } => 0,
            Work::Flush { .. } | Work::Outcomes { .. } | Work::Openings => BLOCK_BYTES,
            _ => self.blocks as usize * BLOCK_BYTES,
        }
    }

    /// Position of its plaintext in the request's.
    pub(super) fn plain_range(&self) -> Range<usize> {
        let start = self.first as usize * DATA_BYTES;
        start..start + self.blocks as usize * DATA_BYTES
    }
}

/// Parts in flight to the target, by tag.
#[derive(Debug, Default)]
pub(super) struct Parts {
    parts: Vec<Option<Part>>,
    /// Free tags.
    free: Vec<u64>,
}

impl Parts {
    /// Adds a part; returns its tag.
    pub(super) fn insert(&mut self, part: Part) -> u64 {
        if let Some(tag) = self.free.pop()
            && let Some(place) = self.parts.get_mut(tag as usize)
        {
            *place = Some(part);
            return tag;
        }
        self.parts.push(Some(part));
        self.parts.len() as u64 - 1
    }

    /// Removes and returns a part.
    pub(super) fn take(&mut self, tag: u64) -> Option<Part> {
        let part = self.parts.get_mut(tag as usize).and_then(Option::take)?;
        self.free.push(tag);
        Some(part)
    }

    /// Removes and returns all parts.
    pub(super) fn drain(&mut self) -> Vec<Part> {
        self.free.clear();
        self.parts.drain(..).flatten().collect()
    }

    /// The command in `slot` was completed: detaches its parts, so that they aren't attributed to
    /// the slot's next command.
    pub(super) fn disown(&mut self, slot: u16) {
        for part in self.parts.iter_mut().flatten() {
            if part.owner == Owner::Request(slot) {
                part.owner = Owner::Nobody;
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().flatten()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.parts.len()
    }
}
