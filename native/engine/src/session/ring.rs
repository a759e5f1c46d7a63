//! Both ends of the two queues between a job and its session.
//!
//! Indexes increase freely and wrap at 2^64 (never in practice); an entry's place is its index
//! modulo the number of entries. The daemon keeps its own indexes in private memory and only
//! publishes them. It copies each submission once and then uses only the copy.
//!
//! A completion always has a place: a submission is taken only while the operations in flight plus
//! the completions not consumed by the job are fewer than the entries. So a job that stops reading
//! completions stops its own submissions, and with them the credit that its peer gets. The job
//! reserves the last entries for commands, so that waiting operations can always be cancelled.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::bitmap::ChunkBitmap;
pub use super::completion::{Completion, PACKET_MAP_BYTES, Status};
use super::entry::PRIORITY_AT;
pub use super::entry::{Opcode, Operation, RingFault, Submission, Terms};
use super::layout::{
    CHUNK_WAKE, COMMAND_ENTRIES, COMPLETION_CONSUMER, COMPLETION_ENTRIES, COMPLETION_PRODUCER,
    ENTRY_BYTES, Layout, QUIET_SENDS, REASON, REASON_BYTES, STATE, STATE_CLOSED, STATISTICS,
    STATISTICS_COUNT, SUBMISSION_CONSUMER, SUBMISSION_ENTRIES, SUBMISSION_PRODUCER,
};
use crate::shared_memory::SharedMemory;

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
    /// Chunks have landed since the job was last notified.
    has_landed: bool,
    /// Unread completions leave no room for another message.
    is_full: bool,
}

impl DaemonRing {
    /// Takes over new memories with this layout.
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
            has_landed: false,
            is_full: false,
        }
    }

    /// Takes the next submission, if there is one and its completion will have a place.
    ///
    /// The operation counts as in flight until `complete`. Its handle is the index of the
    /// submission, which is unique within the session.
    pub fn take(&mut self) -> Result<Option<(u64, Submission)>, RingFault> {
        let entries = u64::from(self.layout.entries);
        let produced = self.submission.word(SUBMISSION_PRODUCER).load(Ordering::Acquire);
        if produced.checked_sub(self.submissions_taken).is_none_or(|waiting| waiting > entries) {
            return Err(RingFault::IndexJump);
        }
        let unread = self.unconsumed()?;
        let taken = self.in_flight + unread;
        self.is_full = unread > 0 && taken >= entries - u64::from(COMMAND_ENTRIES);
        if produced == self.submissions_taken || taken >= entries {
            return Ok(None);
        }
        let handle = self.submissions_taken;
        let entry = self.next_entry();
        self.submissions_taken += 1;
        self.completion.word(SUBMISSION_CONSUMER).store(self.submissions_taken, Ordering::Release);
        let submission = Submission::parse(&entry, self.layout.region_bytes)?;
        self.in_flight += 1;
        Ok(Some((handle, submission)))
    }

    /// Whether the submission to be taken next seems to be urgent. Only a hint: the job may still
    /// change it.
    pub fn is_next_urgent(&mut self) -> bool {
        let produced = self.submission.word(SUBMISSION_PRODUCER).load(Ordering::Acquire);
        let has_room = self
            .unconsumed()
            .is_ok_and(|unread| self.in_flight + unread < u64::from(self.layout.entries));
        if produced == self.submissions_taken || !has_room {
            return false;
        }
        self.next_entry()[PRIORITY_AT] > 0
    }

    /// A private copy of the entry to be taken next.
    fn next_entry(&self) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        let index = self.submissions_taken & (u64::from(self.layout.entries) - 1);
        self.submission.copy_out(SUBMISSION_ENTRIES + index * ENTRY_BYTES as u64, &mut entry);
        entry
    }

    /// Whether completions that the job has not read leave no room for another message.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Publishes the completion of an operation that was taken.
    ///
    /// # Panics
    /// Without an operation in flight, because the session would have invented a completion.
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

    /// Publishes that the session is over, with the reason.
    pub fn publish_closed(&self, reason: &str) {
        let mut field = [0; REASON_BYTES];
        let length = reason.len().min(REASON_BYTES);
        field[..length].copy_from_slice(&reason.as_bytes()[..length]);
        self.completion.copy_in(REASON, &field);
        self.publish_state(STATE_CLOSED);
    }

    /// Publishes the statistics, in their documented order.
    pub fn publish_statistics(&self, values: &[u64]) {
        for (index, value) in values.iter().take(STATISTICS_COUNT).enumerate() {
            self.completion.word(STATISTICS + 8 * index as u64).store(*value, Ordering::Relaxed);
        }
    }

    /// Assigns a slot's bitmap to the receive with this handle, with no chunk landed.
    pub fn slot_posted(&self, slot: u16, handle: u64, chunk_count: u32) {
        let owner = self.completion.word(self.layout.slot_table() + 8 * u64::from(slot));
        // A reader must see the owner change before any of the bytes change.
        owner.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        self.chunks_cleared(slot, chunk_count);
        owner.store(handle + 1, Ordering::Release);
    }

    /// Publishes that a chunk of the message in `slot` has landed; call it after writing the
    /// chunk's bytes.
    pub fn chunk_landed(&mut self, slot: u16, chunk: u32) {
        if let Some(offset) = self.bitmap_offset(slot, chunk) {
            self.completion.byte(offset).store(1, Ordering::Release);
            self.has_landed = true;
        }
    }

    /// Whether chunks have landed since the last call and the job wants to be woken for them.
    pub fn take_chunk_wake(&mut self) -> bool {
        if !std::mem::take(&mut self.has_landed) {
            return false;
        }
        // Here and in `wake_for_chunks`: each side writes its own word and then reads the other's.
        // Without both fences each could read the old value: the job would sleep, and nobody would
        // wake it.
        fence(Ordering::SeqCst);
        self.submission.word(CHUNK_WAKE).load(Ordering::Acquire) != 0
    }

    /// Whether the job wants to be woken for a successful send; call it after `complete`.
    pub fn is_send_wanted(&self) -> bool {
        // With the fence in `quiet_sends`, as for chunks: the job sees the completion, or this sees
        // that it waits.
        fence(Ordering::SeqCst);
        self.submission.word(QUIET_SENDS).load(Ordering::Acquire) == 0
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

    /// Number of completions that the job has not consumed. The job's index is untrusted: it may
    /// only move forward, and not past what was written.
    fn unconsumed(&mut self) -> Result<u64, RingFault> {
        let consumed = self.submission.word(COMPLETION_CONSUMER).load(Ordering::Acquire);
        if consumed < self.completions_consumed || consumed > self.completions_written {
            return Err(RingFault::IndexJump);
        }
        self.completions_consumed = consumed;
        Ok(self.completions_written - consumed)
    }
}

/// The job's end of both queues. The daemon is trusted, but its index is checked, so that a version
/// mismatch is an error instead of a wild read.
#[derive(Debug)]
pub struct JobRing {
    layout: Layout,
    submission: SharedMemory,
    completion: Arc<SharedMemory>,
    submissions_posted: u64,
    completions_taken: u64,
}

/// Why a submission was not put on the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PostRefused {
    /// There is no room; consume completions and try again.
    #[error("the ring is full; read completions first")]
    Retry,
    /// The submission would make the daemon end the session.
    #[error("{0}")]
    Invalid(RingFault),
}

impl JobRing {
    /// Attaches to memories created by the daemon. `None` if they are of another version.
    pub fn new(submission: SharedMemory, completion: SharedMemory) -> Option<Self> {
        let layout = Layout::read(&completion)?;
        (submission.len() == layout.submission_bytes()).then_some(Self {
            layout,
            submission,
            completion: Arc::new(completion),
            submissions_posted: 0,
            completions_taken: 0,
        })
    }

    /// The sizes that the daemon chose.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Puts a submission on the ring and returns its handle; the caller rings the doorbell.
    ///
    /// A command can be posted while fewer operations than the ring's entries have an unread
    /// completion, any other operation only while there are [`COMMAND_ENTRIES`] fewer. So a command
    /// always finds room, and the daemon takes it.
    pub fn post(&mut self, submission: &Submission) -> Result<u64, PostRefused> {
        let entry = submission.encode();
        Submission::parse(&entry, self.layout.region_bytes).map_err(PostRefused::Invalid)?;
        let entries = u64::from(self.layout.entries);
        let kept = if submission.kind.is_command() { 0 } else { u64::from(COMMAND_ENTRIES) };
        if self.submissions_posted - self.completions_taken >= entries - kept {
            return Err(PostRefused::Retry);
        }
        let handle = self.submissions_posted;
        let place = (handle & (entries - 1)) * ENTRY_BYTES as u64;
        self.submission.copy_in(SUBMISSION_ENTRIES + place, &entry);
        self.submissions_posted += 1;
        self.submission.word(SUBMISSION_PRODUCER).store(self.submissions_posted, Ordering::Release);
        Ok(handle)
    }

    /// Takes up to `limit` completions, oldest first. `None` if the ring is inconsistent.
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

    /// Whether the daemon may count its time as one without room ([`DaemonRing::is_full`]), so that it
    /// must be woken once completions have been read. Ask before reading them.
    ///
    /// It never waits for room: what `post` puts on the ring has a place for its completion.
    pub fn may_be_full(&self) -> bool {
        let room = u64::from(self.layout.entries - COMMAND_ENTRIES);
        self.submissions_posted - self.completions_taken >= room
    }

    /// State of the session (`layout::STATE_*`).
    pub fn state(&self) -> u64 {
        self.completion.word(STATE).load(Ordering::Acquire)
    }

    /// Why the session ended; empty if it has not, or if no reason was published.
    pub fn close_reason(&self) -> String {
        let mut field = [0; REASON_BYTES];
        if self.state() == STATE_CLOSED {
            self.completion.copy_out(REASON, &mut field);
        }
        let text = String::from_utf8_lossy(&field);
        text.trim_end_matches('\0').to_owned()
    }

    /// The statistics, in their documented order. Advisory: each value is read separately.
    pub fn statistics(&self) -> Vec<u64> {
        (0..STATISTICS_COUNT as u64)
            .map(|index| self.completion.word(STATISTICS + 8 * index).load(Ordering::Relaxed))
            .collect()
    }

    /// Enables or disables the doorbell for landed chunks. A chunk that a bitmap read after enabling
    /// it does not show will ring it.
    pub fn wake_for_chunks(&self, wanted: bool) {
        self.submission.word(CHUNK_WAKE).store(u64::from(wanted), Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Disables or enables the doorbell for successful sends. One whose completion is not on the ring
    /// after enabling it will ring it.
    pub fn quiet_sends(&self, are_quiet: bool) {
        self.submission.word(QUIET_SENDS).store(u64::from(are_quiet), Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// The live bitmap of a receive of `chunk_count` chunks. `None` while no slot belongs to the
    /// receive: it still waits for one, or its slot has gone to a later receive.
    pub fn bitmap(&self, handle: u64, chunk_count: usize) -> Option<ChunkBitmap> {
        ChunkBitmap::find(&self.completion, &self.layout, handle, chunk_count)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sealane_proto::session::Reliability;

    use super::*;
    use crate::shared_memory::PeerAccess;

    const REGION_BYTES: u64 = 1 << 20;

    /// Both ends, and the writable submission memory of a hostile job.
    fn rings(entries: u32) -> (DaemonRing, JobRing, SharedMemory) {
        let layout = Layout { entries, region_bytes: REGION_BYTES, slots: 4, chunk_bytes: 4096 };
        let submission =
            SharedMemory::create("s", layout.submission_bytes(), PeerAccess::Writes).unwrap();
        let completion =
            SharedMemory::create("c", layout.completion_bytes(), PeerAccess::Reads).unwrap();
        let attach = |memory: &SharedMemory, access| {
            SharedMemory::attach(memory.file().try_clone_to_owned().unwrap(), access).unwrap()
        };
        let hostile = attach(&submission, PeerAccess::Writes);
        let job_submission = attach(&submission, PeerAccess::Writes);
        let job_completion = attach(&completion, PeerAccess::Reads);
        let daemon = DaemonRing::new(layout, submission, completion);
        (daemon, JobRing::new(job_submission, job_completion).unwrap(), hostile)
    }

    fn send(user_data: u64) -> Submission {
        let kind = Operation::Send(Terms::new(Reliability::SelectiveRepeat));
        Submission { kind, offset: 0, length: 10, user_data }
    }

    fn done(user_data: u64) -> Completion {
        Completion {
            opcode: Opcode::Send,
            user_data,
            handle: user_data,
            message: user_data,
            length: 10,
            duration_nanos: 1,
            ..Completion::default()
        }
    }

    #[test]
    fn order_is_kept_through_many_wraps() {
        let (mut daemon, mut job, _) = rings(4);
        for number in 0..1000 {
            assert_eq!(job.post(&send(number)), Ok(number));
            assert_eq!(daemon.take().unwrap(), Some((number, send(number))));
            assert_eq!(daemon.take().unwrap(), None);
            daemon.complete(&done(number));
            assert_eq!(job.completions(8).unwrap(), vec![done(number)]);
        }
    }

    #[test]
    fn the_daemon_is_woken_for_room_only_where_it_may_count_its_time_as_without() {
        let (mut daemon, mut job, _) = rings(4);
        assert!(!job.may_be_full());
        for number in 0..2 {
            job.post(&send(number)).unwrap();
            daemon.take().unwrap().unwrap();
        }
        daemon.complete(&done(0));
        assert!(!job.may_be_full());
        job.post(&send(2)).unwrap();
        daemon.take().unwrap().unwrap();
        assert_eq!(daemon.take().unwrap(), None);
        assert!(daemon.is_full() && job.may_be_full());
        job.completions(1).unwrap();
        assert!(!job.may_be_full());
    }

    fn cancel(operation: u64) -> Submission {
        Submission { kind: Operation::Cancel { operation }, offset: 0, length: 0, user_data: 0 }
    }

    #[test]
    fn a_ring_full_of_what_waits_has_room_for_what_cancels_it() {
        let (mut daemon, mut job, _) = rings(4);
        for number in 0..3 {
            job.post(&send(number)).unwrap();
        }
        assert_eq!(job.post(&send(3)), Err(PostRefused::Retry));
        assert_eq!(job.post(&cancel(0)), Ok(3));
        assert_eq!(job.post(&cancel(1)), Err(PostRefused::Retry));
        let taken: Vec<u64> =
            std::iter::from_fn(|| daemon.take().unwrap()).map(|(handle, _)| handle).collect();
        assert_eq!(taken, [0, 1, 2, 3], "nothing ends, and the cancel is taken");
        assert!(!daemon.is_full(), "no completion is unread");
        daemon.complete(&done(3));
        assert_eq!(job.post(&cancel(1)), Err(PostRefused::Retry), "the completion is unread");
        job.completions(1).unwrap();
        job.post(&cancel(1)).unwrap();
        assert_eq!(daemon.take().unwrap(), Some((4, cancel(1))));
    }

    #[test]
    fn unread_completions_stop_submissions_and_none_is_dropped() {
        let (mut daemon, mut job, hostile) = rings(4);
        for number in 0..3 {
            job.post(&send(number)).unwrap();
            daemon.take().unwrap().unwrap();
            daemon.complete(&done(number));
        }
        assert!(!daemon.is_full(), "it has not been checked yet");
        assert_eq!(daemon.take().unwrap(), None);
        assert!(daemon.is_full());
        assert_eq!(job.post(&send(3)), Err(PostRefused::Retry));
        // A job that reserves no entry gains one message; an additional completion would have no
        // place.
        hostile.word(SUBMISSION_PRODUCER).store(5, Ordering::Release);
        hostile.copy_in(SUBMISSION_ENTRIES + 3 * ENTRY_BYTES as u64, &send(3).encode());
        assert_eq!(daemon.take().unwrap(), Some((3, send(3))));
        assert_eq!(daemon.take().unwrap(), None);
        daemon.complete(&done(3));
        assert_eq!(daemon.take().unwrap(), None);
        assert_eq!(job.completions(8).unwrap(), (0..4).map(done).collect::<Vec<_>>());
        assert_eq!(daemon.take().unwrap(), Some((4, send(0))), "the entry that was there before");
        assert!(!daemon.is_full());
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
    fn state_reaches_the_job() {
        let (daemon, job, _) = rings(4);
        daemon.publish_state(1);
        assert_eq!((job.state(), job.close_reason()), (1, String::new()));
        daemon.publish_closed("session.closed.requested");
        assert_eq!((job.state(), job.close_reason().as_str()), (2, "session.closed.requested"));
        daemon.publish_closed(&"x".repeat(100));
        assert_eq!(job.close_reason(), "x".repeat(REASON_BYTES));
    }

    #[test]
    fn job_is_woken_for_chunks_only_if_it_wants_to() {
        let (mut daemon, job, _) = rings(4);
        daemon.chunk_landed(0, 0);
        assert!(!daemon.take_chunk_wake());
        job.wake_for_chunks(true);
        assert!(!daemon.take_chunk_wake(), "the job was already notified of that");
        daemon.chunk_landed(0, 1);
        assert!(daemon.take_chunk_wake());
        assert!(!daemon.take_chunk_wake());
        job.wake_for_chunks(false);
        daemon.chunk_landed(0, 2);
        assert!(!daemon.take_chunk_wake());
    }

    proptest! {
        /// A job that scribbles over its whole submission memory never makes the daemon panic, and
        /// no submission taken reaches outside the region.
        #[test]
        fn scribbled_memory_ends_in_a_fault_or_in_valid_submissions(
            writes in prop::collection::vec((0_u64..384, any::<u64>()), 1..40)
        ) {
            let (mut daemon, _job, hostile) = rings(4);
            for (offset, value) in writes {
                hostile.word(offset / 8 * 8).store(value % 7, Ordering::Release);
                match daemon.take() {
                    Err(_) => break,
                    Ok(Some((_, taken))) => {
                        let is_stream = taken.kind.opcode() == Opcode::Stream;
                        prop_assert!(is_stream || taken.offset + taken.length <= REGION_BYTES);
                    }
                    Ok(None) => {}
                }
            }
        }
    }
}
