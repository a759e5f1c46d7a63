//! The two queues between a job and its session, both ends.
//!
//! Indexes run freely and wrap at 2^64 (never, in practice); an entry's place is its index modulo
//! the number of entries. The daemon keeps its own indexes in private memory and only publishes
//! them. It copies each submission once, then looks at the copy alone.
//!
//! A completion always has a place: a submission is taken only while operations in flight plus
//! completions that the job has not consumed are fewer than the entries. So a job that stops
//! reading completions stops its own submissions, and with them the credit its peer gets.

use std::sync::atomic::Ordering;

use sealane_proto::session::{BLOCK_UNITS_MAX, MESSAGE_BYTES_MAX};

use super::layout::{
    COMPLETION_CONSUMER, COMPLETION_ENTRIES, COMPLETION_PRODUCER, ENTRY_BYTES, Layout, STATE,
    STATISTICS, STATISTICS_COUNT, SUBMISSION_CONSUMER, SUBMISSION_ENTRIES, SUBMISSION_PRODUCER,
};
use super::region::SharedMemory;

const OPCODE_SEND: u8 = 1;
const OPCODE_RECEIVE: u8 = 2;
const FLAG_IMMEDIATE: u8 = 1;
const RESERVED_START: usize = 32;

/// Longest message.
pub const LENGTH_MAX: u64 = MESSAGE_BYTES_MAX;

/// What a job did wrong; its session ends for it, and no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// An index moved back, or further than the ring is long.
    #[error("ring.index.jump")]
    IndexJump,
    /// No such operation.
    #[error("ring.entry.opcode")]
    Opcode,
    /// A flag that this version does not know, or that the operation does not take.
    #[error("ring.entry.flags")]
    Flags,
    /// The bytes named are not all inside the region.
    #[error("ring.entry.range")]
    Range,
    /// More bytes than a message can have.
    #[error("ring.entry.length")]
    Length,
    /// Only one of k and m is zero, both are too large together, or a receive names a code.
    #[error("ring.entry.reliability")]
    Reliability,
    /// A reserved byte is not zero.
    #[error("ring.entry.reserved")]
    Reserved,
}

impl RingFault {
    /// Stable id for logs, statistics and the close reason.
    pub fn reason(self) -> String {
        self.to_string()
    }
}

/// One validated submission: a private copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submission {
    /// Send or receive.
    pub kind: Operation,
    /// First byte in the region.
    pub offset: u64,
    /// Bytes to send, or room to receive.
    pub length: u64,
    /// Returned in the completion.
    pub user_data: u64,
}

/// What a submission asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Send a message; `k` = `m` = 0 is selective repeat, else an erasure code.
    Send {
        /// Data units of a block.
        k: u8,
        /// Parity units of a block.
        m: u8,
        /// 32 bits that travel with the message.
        immediate: Option<u32>,
    },
    /// Receive the next message.
    Receive,
}

impl Submission {
    /// Writes the entry as it lies in the ring.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        match self.kind {
            Operation::Send { k, m, immediate } => {
                entry[0] = OPCODE_SEND;
                entry[1] = if immediate.is_some() { FLAG_IMMEDIATE } else { 0 };
                entry[2] = k;
                entry[3] = m;
                entry[4..8].copy_from_slice(&immediate.unwrap_or(0).to_le_bytes());
            }
            Operation::Receive => entry[0] = OPCODE_RECEIVE,
        }
        entry[8..16].copy_from_slice(&self.offset.to_le_bytes());
        entry[16..24].copy_from_slice(&self.length.to_le_bytes());
        entry[24..32].copy_from_slice(&self.user_data.to_le_bytes());
        entry
    }

    /// Validates a private copy of an entry against a region of `region_bytes`.
    pub fn parse(entry: &[u8; ENTRY_BYTES], region_bytes: u64) -> Result<Self, RingFault> {
        let [opcode, flags, k, m, ..] = *entry;
        let immediate = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        let (offset, length) = (word(entry, 8), word(entry, 16));
        let kind = match opcode {
            OPCODE_SEND => {
                if flags & !FLAG_IMMEDIATE != 0 || (flags == 0 && immediate != 0) {
                    return Err(RingFault::Flags);
                }
                if (k == 0) != (m == 0) || u16::from(k) + u16::from(m) > BLOCK_UNITS_MAX {
                    return Err(RingFault::Reliability);
                }
                Operation::Send { k, m, immediate: (flags != 0).then_some(immediate) }
            }
            OPCODE_RECEIVE => {
                if flags != 0 || immediate != 0 {
                    return Err(RingFault::Flags);
                }
                if k != 0 || m != 0 {
                    return Err(RingFault::Reliability);
                }
                Operation::Receive
            }
            _ => return Err(RingFault::Opcode),
        };
        if length > LENGTH_MAX {
            return Err(RingFault::Length);
        }
        if offset.checked_add(length).is_none_or(|end| end > region_bytes) {
            return Err(RingFault::Range);
        }
        if entry[RESERVED_START..].iter().any(|byte| *byte != 0) {
            return Err(RingFault::Reserved);
        }
        Ok(Self { kind, offset, length, user_data: word(entry, 24) })
    }
}

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Everything was delivered and acknowledged.
    Ok,
    /// The session ended before the answer came.
    OutcomeUnknown,
    /// The peer or the session gave the message up.
    Aborted,
    /// The message was longer than the receive that it met.
    TooLong,
    /// The session could not take the operation.
    Refused,
}

impl Status {
    const ALL: [Self; 5] =
        [Self::Ok, Self::OutcomeUnknown, Self::Aborted, Self::TooLong, Self::Refused];

    /// Name as the job's language shows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::Aborted => "aborted",
            Self::TooLong => "too_long",
            Self::Refused => "refused",
        }
    }

    fn code(self) -> u8 {
        self as u8
    }
}

/// One finished operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// True for a send, false for a receive.
    pub is_send: bool,
    /// How it ended.
    pub status: Status,
    /// The number that the submission carried.
    pub user_data: u64,
    /// Message number in the session.
    pub message: u64,
    /// Bytes of the message.
    pub length: u64,
    /// The sender's immediate, at the receiver.
    pub immediate: Option<u32>,
    /// Sends: nanoseconds from the first transmission to the acknowledgement of the last byte.
    pub duration_nanos: u64,
}

impl Completion {
    /// Writes the entry as it lies in the ring.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        entry[0] = if self.is_send { OPCODE_SEND } else { OPCODE_RECEIVE };
        entry[1] = if self.immediate.is_some() { FLAG_IMMEDIATE } else { 0 };
        entry[2] = self.status.code();
        entry[4..8].copy_from_slice(&self.immediate.unwrap_or(0).to_le_bytes());
        for (at, value) in
            [(8, self.message), (16, self.length), (24, self.user_data), (32, self.duration_nanos)]
        {
            entry[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        entry
    }

    /// Reads an entry on the job's side. `None` if this version never writes such a one.
    pub fn parse(entry: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let immediate = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        Some(Self {
            is_send: match entry[0] {
                OPCODE_SEND => true,
                OPCODE_RECEIVE => false,
                _ => return None,
            },
            status: *Status::ALL.get(usize::from(entry[2]))?,
            immediate: (entry[1] & FLAG_IMMEDIATE != 0).then_some(immediate),
            message: word(entry, 8),
            length: word(entry, 16),
            user_data: word(entry, 24),
            duration_nanos: word(entry, 32),
        })
    }
}

fn word(entry: &[u8; ENTRY_BYTES], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&entry[at..at + 8]);
    u64::from_le_bytes(bytes)
}

/// The daemon's end of both queues.
#[derive(Debug)]
pub struct DaemonRing {
    layout: Layout,
    submission: SharedMemory,
    completion: SharedMemory,
    submissions_taken: u64,
    completions_written: u64,
    completions_consumed: u64,
    in_flight: u64,
}

impl DaemonRing {
    /// Takes over new memories of this layout.
    pub fn new(layout: Layout, submission: SharedMemory, completion: SharedMemory) -> Self {
        layout.describe(&completion);
        Self {
            layout,
            submission,
            completion,
            submissions_taken: 0,
            completions_written: 0,
            completions_consumed: 0,
            in_flight: 0,
        }
    }

    /// Takes the next submission, if there is one and its completion will have a place.
    ///
    /// The operation counts as in flight from now until `complete`.
    pub fn take(&mut self) -> Result<Option<Submission>, RingFault> {
        let entries = u64::from(self.layout.entries);
        let produced = self.submission.word(SUBMISSION_PRODUCER).load(Ordering::Acquire);
        match produced.checked_sub(self.submissions_taken) {
            None => return Err(RingFault::IndexJump),
            Some(0) => return Ok(None),
            Some(waiting) if waiting > entries => return Err(RingFault::IndexJump),
            Some(_) => {}
        }
        if self.in_flight + self.unconsumed()? >= entries {
            return Ok(None);
        }
        let mut entry = [0; ENTRY_BYTES];
        let place = (self.submissions_taken & (entries - 1)) * ENTRY_BYTES as u64;
        self.submission.copy_out(SUBMISSION_ENTRIES + place, &mut entry);
        self.submissions_taken += 1;
        self.completion.word(SUBMISSION_CONSUMER).store(self.submissions_taken, Ordering::Release);
        let submission = Submission::parse(&entry, self.layout.region_bytes)?;
        self.in_flight += 1;
        Ok(Some(submission))
    }

    /// Publishes the end of an operation that was taken.
    ///
    /// # Panics
    /// Without an operation in flight: the session would have invented a completion.
    pub fn complete(&mut self, completion: &Completion) {
        assert!(self.in_flight > 0, "every completion belongs to a submission");
        let entries = u64::from(self.layout.entries);
        let place = (self.completions_written & (entries - 1)) * ENTRY_BYTES as u64;
        self.completion.copy_in(COMPLETION_ENTRIES + place, &completion.encode());
        self.in_flight -= 1;
        self.completions_written += 1;
        self.completion
            .word(COMPLETION_PRODUCER)
            .store(self.completions_written, Ordering::Release);
    }

    /// Publishes the state of the session (`layout::STATE_*`).
    pub fn publish_state(&self, state: u64) {
        self.completion.word(STATE).store(state, Ordering::Release);
    }

    /// Publishes the statistics, in their documented order.
    pub fn publish_statistics(&self, values: &[u64]) {
        for (index, value) in values.iter().take(STATISTICS_COUNT).enumerate() {
            self.completion.word(STATISTICS + 8 * index as u64).store(*value, Ordering::Relaxed);
        }
    }

    /// Publishes that a chunk of the message in `slot` has landed, after its bytes.
    pub fn chunk_landed(&self, slot: u16, chunk: u32) {
        if let Some(offset) = self.bitmap_offset(slot, chunk) {
            self.completion.byte(offset).store(1, Ordering::Release);
        }
    }

    /// Clears the first `chunk_count` bitmap bytes of a slot.
    pub fn chunks_cleared(&self, slot: u16, chunk_count: u32) {
        for chunk in 0..chunk_count {
            if let Some(offset) = self.bitmap_offset(slot, chunk) {
                self.completion.byte(offset).store(0, Ordering::Release);
            }
        }
    }

    fn bitmap_offset(&self, slot: u16, chunk: u32) -> Option<u64> {
        let per_slot = self.layout.chunks_per_slot();
        (slot < self.layout.slots && u64::from(chunk) < per_slot)
            .then(|| self.layout.bitmap() + u64::from(slot) * per_slot + u64::from(chunk))
    }

    /// Completions that the job has not consumed. Its index is a claim: it may only move
    /// forward, and not past what was written.
    fn unconsumed(&mut self) -> Result<u64, RingFault> {
        let consumed = self.submission.word(COMPLETION_CONSUMER).load(Ordering::Acquire);
        if consumed < self.completions_consumed || consumed > self.completions_written {
            return Err(RingFault::IndexJump);
        }
        self.completions_consumed = consumed;
        Ok(self.completions_written - consumed)
    }
}

/// The job's end of both queues. The daemon is trusted; its own index is still checked, so that a
/// version mistake is an error and not a wild read.
#[derive(Debug)]
pub struct JobRing {
    layout: Layout,
    submission: SharedMemory,
    completion: SharedMemory,
    submissions_posted: u64,
    completions_taken: u64,
}

/// A submission that was not put on the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PostRefused {
    /// The queue is full: consume completions and try again.
    #[error("the submission queue is full")]
    Retry,
    /// The daemon would end the session for it.
    #[error("{0}")]
    Invalid(RingFault),
}

impl JobRing {
    /// Attaches to memories that the daemon made. `None` if they are not of this version.
    pub fn new(submission: SharedMemory, completion: SharedMemory) -> Option<Self> {
        let layout = Layout::read(&completion)?;
        (submission.len() == layout.submission_bytes()).then_some(Self {
            layout,
            submission,
            completion,
            submissions_posted: 0,
            completions_taken: 0,
        })
    }

    /// The sizes that the daemon chose.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Puts a submission on the ring; the caller rings the doorbell.
    pub fn post(&mut self, submission: &Submission) -> Result<(), PostRefused> {
        let entry = submission.encode();
        Submission::parse(&entry, self.layout.region_bytes).map_err(PostRefused::Invalid)?;
        let entries = u64::from(self.layout.entries);
        let taken = self.completion.word(SUBMISSION_CONSUMER).load(Ordering::Acquire);
        if self.submissions_posted.saturating_sub(taken) >= entries {
            return Err(PostRefused::Retry);
        }
        let place = (self.submissions_posted & (entries - 1)) * ENTRY_BYTES as u64;
        self.submission.copy_in(SUBMISSION_ENTRIES + place, &entry);
        self.submissions_posted += 1;
        self.submission.word(SUBMISSION_PRODUCER).store(self.submissions_posted, Ordering::Release);
        Ok(())
    }

    /// Takes up to `limit` completions, oldest first. `None` if the ring makes no sense.
    pub fn completions(&mut self, limit: usize) -> Option<Vec<Completion>> {
        let entries = u64::from(self.layout.entries);
        let written = self.completion.word(COMPLETION_PRODUCER).load(Ordering::Acquire);
        let waiting = written.checked_sub(self.completions_taken)?;
        if waiting > entries {
            return None;
        }
        let count = waiting.min(limit as u64);
        let mut completions = Vec::with_capacity(count as usize);
        for index in self.completions_taken..self.completions_taken + count {
            let mut entry = [0; ENTRY_BYTES];
            let place = (index & (entries - 1)) * ENTRY_BYTES as u64;
            self.completion.copy_out(COMPLETION_ENTRIES + place, &mut entry);
            completions.push(Completion::parse(&entry)?);
        }
        self.completions_taken += count;
        self.submission.word(COMPLETION_CONSUMER).store(self.completions_taken, Ordering::Release);
        Some(completions)
    }

    /// State of the session (`layout::STATE_*`).
    pub fn state(&self) -> u64 {
        self.completion.word(STATE).load(Ordering::Acquire)
    }

    /// The statistics, in their documented order. Advisory: each is read on its own.
    pub fn statistics(&self) -> Vec<u64> {
        (0..STATISTICS_COUNT as u64)
            .map(|index| self.completion.word(STATISTICS + 8 * index).load(Ordering::Relaxed))
            .collect()
    }

    /// The bitmap bytes of a slot: 1 where a whole chunk has landed. Advisory.
    pub fn bitmap(&self, slot: u16) -> Vec<u8> {
        let per_slot = self.layout.chunks_per_slot();
        let start = self.layout.bitmap() + u64::from(slot % self.layout.slots) * per_slot;
        (start..start + per_slot)
            .map(|offset| self.completion.byte(offset).load(Ordering::Acquire))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::region::JobAccess;
    use super::*;

    const REGION_BYTES: u64 = 1 << 20;

    /// Both ends, and what a hostile job has: the submission memory, writable.
    fn rings(entries: u32) -> (DaemonRing, JobRing, SharedMemory) {
        let layout = Layout { entries, region_bytes: REGION_BYTES, slots: 4, chunk_bytes: 4096 };
        let submission =
            SharedMemory::create("s", layout.submission_bytes(), JobAccess::Writes).unwrap();
        let completion =
            SharedMemory::create("c", layout.completion_bytes(), JobAccess::Reads).unwrap();
        let attach = |memory: &SharedMemory, access| {
            SharedMemory::attach(memory.file().try_clone_to_owned().unwrap(), access).unwrap()
        };
        let hostile = attach(&submission, JobAccess::Writes);
        let job_submission = attach(&submission, JobAccess::Writes);
        let job_completion = attach(&completion, JobAccess::Reads);
        let daemon = DaemonRing::new(layout, submission, completion);
        (daemon, JobRing::new(job_submission, job_completion).unwrap(), hostile)
    }

    fn send(user_data: u64) -> Submission {
        let kind = Operation::Send { k: 0, m: 0, immediate: None };
        Submission { kind, offset: 0, length: 10, user_data }
    }

    fn done(user_data: u64) -> Completion {
        Completion {
            is_send: true,
            status: Status::Ok,
            user_data,
            message: user_data,
            length: 10,
            immediate: None,
            duration_nanos: 1,
        }
    }

    #[test]
    fn order_is_kept_through_many_wraps() {
        let (mut daemon, mut job, _) = rings(4);
        for number in 0..1000 {
            job.post(&send(number)).unwrap();
            assert_eq!(daemon.take().unwrap(), Some(send(number)));
            assert_eq!(daemon.take().unwrap(), None);
            daemon.complete(&done(number));
            assert_eq!(job.completions(8).unwrap(), vec![done(number)]);
        }
    }

    #[test]
    fn full_submission_queue_asks_for_a_retry() {
        let (mut daemon, mut job, _) = rings(2);
        job.post(&send(0)).unwrap();
        job.post(&send(1)).unwrap();
        assert_eq!(job.post(&send(2)), Err(PostRefused::Retry));
        daemon.take().unwrap();
        job.post(&send(2)).unwrap();
    }

    #[test]
    fn unread_completions_stop_submissions_and_none_is_dropped() {
        let (mut daemon, mut job, _) = rings(4);
        for number in 0..4 {
            job.post(&send(number)).unwrap();
            daemon.take().unwrap().unwrap();
            daemon.complete(&done(number));
        }
        job.post(&send(4)).unwrap();
        assert_eq!(daemon.take().unwrap(), None);
        assert_eq!(job.completions(1).unwrap(), vec![done(0)]);
        assert_eq!(daemon.take().unwrap(), Some(send(4)));
        job.post(&send(5)).unwrap();
        assert_eq!(daemon.take().unwrap(), None);
        daemon.complete(&done(4));
        assert_eq!(job.completions(8).unwrap(), (1..5).map(done).collect::<Vec<_>>());
    }

    #[test]
    fn index_jumps_are_faults() {
        for jump in [5, u64::MAX, 1 << 63] {
            let (mut daemon, _job, hostile) = rings(4);
            hostile.word(SUBMISSION_PRODUCER).store(jump, Ordering::Release);
            assert_eq!(daemon.take(), Err(RingFault::IndexJump));
        }
        let (mut daemon, mut job, hostile) = rings(4);
        job.post(&send(0)).unwrap();
        daemon.take().unwrap();
        hostile.word(SUBMISSION_PRODUCER).store(0, Ordering::Release);
        assert_eq!(daemon.take(), Err(RingFault::IndexJump), "an index that moves back");
    }

    #[test]
    fn consumer_index_can_neither_pass_what_was_written_nor_move_back() {
        let (mut daemon, mut job, hostile) = rings(4);
        job.post(&send(0)).unwrap();
        hostile.word(COMPLETION_CONSUMER).store(1, Ordering::Release);
        assert_eq!(daemon.take(), Err(RingFault::IndexJump));
        hostile.word(COMPLETION_CONSUMER).store(0, Ordering::Release);
        daemon.take().unwrap();
        daemon.complete(&done(0));
        job.completions(1).unwrap();
        job.post(&send(1)).unwrap();
        daemon.take().unwrap();
        hostile.word(COMPLETION_CONSUMER).store(0, Ordering::Release);
        job.post(&send(2)).unwrap();
        assert_eq!(daemon.take(), Err(RingFault::IndexJump));
    }

    #[test]
    fn bad_entries_are_named() {
        let good = send(1).encode();
        let with = |changes: &[(usize, u8)]| {
            let mut entry = good;
            for (at, value) in changes {
                entry[*at] = *value;
            }
            Submission::parse(&entry, REGION_BYTES)
        };
        assert!(with(&[]).is_ok());
        assert_eq!(with(&[(0, 0)]), Err(RingFault::Opcode));
        assert_eq!(with(&[(0, 3)]), Err(RingFault::Opcode));
        assert_eq!(with(&[(1, 2)]), Err(RingFault::Flags));
        assert_eq!(with(&[(4, 1)]), Err(RingFault::Flags), "an immediate without its flag");
        assert_eq!(with(&[(2, 4)]), Err(RingFault::Reliability));
        assert_eq!(with(&[(0, 2), (2, 4), (3, 2)]), Err(RingFault::Reliability));
        assert_eq!(with(&[(0, 2), (1, 1)]), Err(RingFault::Flags));
        assert_eq!(with(&[(2, 200), (3, 56)]), Err(RingFault::Reliability));
        assert_eq!(with(&[(21, 1)]), Err(RingFault::Length));
        assert_eq!(with(&[(10, 0x10)]), Err(RingFault::Range));
        assert_eq!(with(&[(18, 0x10)]), Err(RingFault::Range));
        for at in RESERVED_START..ENTRY_BYTES {
            assert_eq!(with(&[(at, 1)]), Err(RingFault::Reserved));
        }
        let mut overflowing = send(1);
        overflowing.offset = u64::MAX - 4;
        assert_eq!(Submission::parse(&overflowing.encode(), REGION_BYTES), Err(RingFault::Range));
    }

    #[test]
    fn bitmap_and_state_reach_the_job() {
        let (daemon, job, _) = rings(4);
        daemon.chunk_landed(1, 3);
        daemon.chunk_landed(9, 3);
        daemon.chunk_landed(1, u32::MAX);
        daemon.publish_state(2);
        assert_eq!(job.state(), 2);
        let landed: Vec<usize> = (0..256).filter(|chunk| job.bitmap(1)[*chunk] == 1).collect();
        assert_eq!(landed, [3]);
        assert!(job.bitmap(0).iter().chain(&job.bitmap(2)).all(|byte| *byte == 0));
        daemon.chunks_cleared(1, 4);
        assert!(job.bitmap(1).iter().all(|byte| *byte == 0));
    }

    proptest! {
        #[test]
        fn entries_round_trip(
            offset in 0_u64..1000, length in 0_u64..1000, user_data: u64, immediate: Option<u32>,
            code in prop_oneof![Just((0, 0)), (1_u8..200, 1_u8..55)], receive: bool,
        ) {
            let kind = if receive {
                Operation::Receive
            } else {
                Operation::Send { k: code.0, m: code.1, immediate }
            };
            let submission = Submission { kind, offset, length, user_data };
            prop_assert_eq!(Submission::parse(&submission.encode(), 2000), Ok(submission));
        }

        /// Any 64 bytes give a fault or a submission that lies inside the region.
        #[test]
        fn no_entry_reaches_outside(bytes in prop::collection::vec(any::<u8>(), 64), small: bool) {
            let mut entry: [u8; ENTRY_BYTES] = bytes.try_into().unwrap();
            if small {
                entry[10..16].fill(0);
                entry[18..24].fill(0);
                entry[RESERVED_START..].fill(0);
                entry[0] = 1 + (entry[0] & 1);
                entry[1..8].fill(0);
            }
            if let Ok(submission) = Submission::parse(&entry, 5000) {
                prop_assert!(submission.offset + submission.length <= 5000);
            }
        }

        /// A job that scribbles over its whole submission memory never panics the daemon, and
        /// nothing that is taken reaches outside.
        #[test]
        fn scribbled_memory_ends_in_a_fault_or_in_valid_submissions(
            writes in prop::collection::vec((0_u64..384, any::<u64>()), 1..40)
        ) {
            let (mut daemon, _job, hostile) = rings(4);
            for (offset, value) in writes {
                hostile.word(offset / 8 * 8).store(value % 7, Ordering::Release);
                match daemon.take() {
                    Err(_) => break,
                    Ok(Some(taken)) => prop_assert!(taken.offset + taken.length <= REGION_BYTES),
                    Ok(None) => {}
                }
            }
        }
    }
}
