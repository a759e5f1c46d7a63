//! A host's command on its way through, and the parts of it that the target has.

use std::ops::Range;

use sealane_proto::link::Nanos;
use sealane_proto::nvme::controller_queue::Operation;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{BLOCK_BYTES, DATA_BYTES, IV_BYTES};

use super::journal::{Change, Mark};
use super::ranges::BlockRanges;

/// A host's command.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) operation: Operation,
    pub(super) lba: u64,
    pub(super) blocks: u32,
    pub(super) is_forced: bool,
    /// First block that no part has been cut for.
    pub(super) cut: u32,
    /// Whether every part has been cut.
    pub(super) is_cut: bool,
    /// Parts without an end.
    pub(super) parts: u32,
    /// Plaintext of a read, from its first part on.
    pub(super) answer: Vec<u8>,
    pub(super) status: Status,
    /// When it first had to wait for a back end.
    pub(super) held_since: Option<Nanos>,
}

impl Request {
    pub(super) fn new(operation: Operation, lba: u64, blocks: u32, is_forced: bool) -> Self {
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
            held_since: None,
        }
    }
}

/// Whom a part is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// The host's command in this slot.
    Request(u16),
    /// A command that was answered without waiting for this part.
    Nobody,
    /// The journal, which was full.
    Journal,
    /// The journal, which is sent again to this incarnation of the target.
    Replay(u64),
    /// This queue, which asks its target something.
    Outcomes,
}

/// Where a change was sent last. Until it has an answer it may have been made.
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

/// Blocks and room in the journal that are a change's own until it ends.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    pub(super) ranges: BlockRanges,
    pub(super) cost: usize,
}

/// What a part does at the target.
#[derive(Debug)]
pub(super) enum Work {
    /// Reads for the host, or to compare or verify.
    Read,
    /// A write or deallocation: sent again exactly as it is.
    Change { change: Change, is_forced: bool },
    /// Makes durable what was acknowledged before `mark`, which is set before it is first sent.
    Flush { mark: Mark },
    /// Reads for a compare-and-write. `sent`: the new sectors, if an earlier attempt to store them
    /// has an unknown outcome.
    Examine { sent: Option<Change> },
    /// Stores the new sectors of a compare-and-write if those it compared with are still current.
    Swap { current: Vec<[u8; IV_BYTES]>, change: Change, is_forced: bool },
    /// Asks how the changes of a queue ended that is over.
    Outcomes { queue: u64, epoch: u64 },
    /// Asks how far the openings of the target's store have come.
    Openings,
}

/// A part of a command that is one command at the target.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) owner: Owner,
    pub(super) lba: u64,
    /// First block, from the start of the request.
    pub(super) first: u32,
    pub(super) blocks: u32,
    pub(super) work: Work,
    pub(super) claim: Option<Claim>,
    /// Grows with each part: the order in which they are sent again.
    pub(super) order: u64,
    /// Attempts of a compare-and-write that met somebody else's.
    pub(super) attempts: u32,
    /// It was sent before, on an association that was lost.
    pub(super) is_again: bool,
    /// Of a piece of the journal, its place there.
    pub(super) place: u64,
    /// Where it was sent last, if it is a change: its target must be asked before it is sent again.
    pub(super) sent: Option<Sent>,
    /// An earlier attempt may have been made by an incarnation of the target that is over.
    pub(super) is_unknown: bool,
    /// Ranges of a deallocation that were done by earlier attempts.
    pub(super) ranges_done: usize,
    /// Association in which it was sent last.
    pub(super) epoch: u64,
    /// When an answer is overdue.
    pub(super) deadline: Nanos,
}

impl Part {
    /// A part that no host asked for.
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

    /// Bytes that move between gateway and target.
    pub(super) fn back_bytes(&self) -> usize {
        match &self.work {
            Work::Change { change: Change::Deallocate(_), .. } => 0,
            Work::Flush { .. } | Work::Outcomes { .. } | Work::Openings => BLOCK_BYTES,
            _ => self.blocks as usize * BLOCK_BYTES,
        }
    }

    /// Where its plaintext is in the request's.
    pub(super) fn plain_range(&self) -> Range<usize> {
        let start = self.first as usize * DATA_BYTES;
        start..start + self.blocks as usize * DATA_BYTES
    }
}

/// Parts that the target has, by tag.
#[derive(Debug, Default)]
pub(super) struct Parts {
    parts: Vec<Option<Part>>,
    /// Tags that are free.
    free: Vec<u64>,
}

impl Parts {
    /// Gives the part the tag it comes back with.
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

    /// Takes the part out.
    pub(super) fn take(&mut self, tag: u64) -> Option<Part> {
        let part = self.parts.get_mut(tag as usize).and_then(Option::take)?;
        self.free.push(tag);
        Some(part)
    }

    /// Takes all parts out.
    pub(super) fn drain(&mut self) -> Vec<Part> {
        self.free.clear();
        self.parts.drain(..).flatten().collect()
    }

    /// The command in `slot` was answered: its parts are nobody's, whatever comes to the slot next.
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
