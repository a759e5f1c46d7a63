//! The controller's (target's) side of an I/O queue: takes capsules, hands out commands to execute,
//! sends data and completions. Secure if it has a [`SecureQueue`], otherwise plain.
//!
//! A command is handed out only when all its bytes have arrived and, on a secure queue, its command
//! MAC and every sector MAC are verified. The first wrong MAC ends the queue.

use std::collections::VecDeque;

use zerocopy::IntoBytes;

use super::Reason;
use super::command::{CompletionEntry, SGL_IN_CAPSULE, SubmissionEntry};
use super::controller_check::Rules;
use super::operation::NamespaceFormat;
pub use super::operation::{Command, Operation};
use super::pdu::{
    CapsuleResp, CommonHeader, DataHeader, Digests, FLAG_LAST, FLAG_SUCCESS, PduError, PduLimits,
    kind, termination,
};
use super::reader::{PduReader, Piece, StreamSink};
use super::slots::Slots;
use super::status::Status;
use super::transmit::{Data, TransmitQueue};
use crate::sector::{BLOCK_BYTES, Block};
use crate::secure_queue::{CommandCounter, Direction, Outcome, SecureQueue};

mod intake;

/// Maximum bytes of writes that were requested and aren't completed: enough to keep the wire and
/// the stores busy. More would only take memory.
pub const WRITE_WINDOW: usize = 4 << 20;

/// Limits negotiated for the queue.
#[derive(Debug, Clone, Copy)]
pub struct ControllerLimits {
    /// Entries of the queue; one less may be outstanding.
    pub queue_depth: u16,
    /// Maximum data bytes of one H2CData PDU.
    pub h2c_data_max: usize,
    /// Maximum data bytes of one command capsule.
    pub in_capsule_max: usize,
    /// Maximum bytes of one command.
    pub transfer_max: usize,
    /// Whether a successful read may end without a response capsule (queue flow control is off).
    pub success_flag: bool,
    /// Digests negotiated in ICReq and ICResp.
    pub digests: Digests,
}

/// An event of the queue.
#[derive(Debug, PartialEq, Eq)]
pub enum ControllerEvent {
    /// Execute this and complete it.
    Received(Command),
    /// The queue has ended: send the remaining bytes, then close the connection.
    Failed {
        /// The reason.
        reason: Reason,
        /// LBA of the command at fault, if one is known.
        lba: Option<u64>,
        /// Description.
        detail: String,
    },
}

/// Stage of a command on its way to execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its data are arriving with its capsule.
    InCapsule,
    /// Its data haven't been requested.
    Unasked,
    /// Its data were requested (R2T).
    Receiving,
    /// All its data have arrived; it waits for the other command of its fused pair.
    Ready,
    /// Handed out.
    Executing,
}

#[derive(Debug)]
struct Slot {
    entry: SubmissionEntry,
    number: u64,
    buffer: Vec<u8>,
    received: usize,
    /// Bytes of data expected from the host.
    wanted: usize,
    stage: Stage,
    /// The status with which it ends once its data have arrived, if already determined.
    verdict: Option<Status>,
    /// The other command of a complete fused pair.
    partner: Option<u16>,
}

/// State of a fused pair whose second command hasn't arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pair {
    None,
    /// The first command waits in this slot.
    First(u16),
    /// The first command failed.
    Failed,
}

/// Destination of the data of the current PDU.
#[derive(Debug, Clone, Copy)]
enum Sink {
    /// Dropped: data of a command already answered with an error, or of a termination request.
    Discard,
    Slot(u16),
    /// The range list of a command, which its MAC covers.
    List,
}

/// A command whose MAC can be verified only together with its list.
#[derive(Debug)]
struct Unverified {
    entry: SubmissionEntry,
    number: u64,
    list: Vec<u8>,
    received: usize,
}

/// Maximum errors kept for [`ControllerQueue::next_error`]; beyond it, the oldest are dropped.
pub const ERRORS_MAX: usize = 64;

/// A command that was answered with an error, for the error log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandError {
    /// Command id.
    pub cid: u16,
    /// Status of the answer.
    pub status: Status,
    /// First LBA, or command dwords 10 and 11 of a command without.
    pub lba: u64,
    /// Namespace id, as the host gave it.
    pub nsid: u32,
}

/// The controller's side of one I/O queue.
#[derive(Debug)]
pub struct ControllerQueue {
    pub(super) limits: ControllerLimits,
    namespaces: Vec<NamespaceFormat>,
    secure: Option<SecureQueue>,
    counter: CommandCounter,
    reader: PduReader,
    slots: Slots<Slot>,
    /// Command ids of the slots in one compact list, as every new id is compared with all of them.
    cids: Vec<Option<u16>>,
    /// Commands whose data haven't been requested.
    unasked: VecDeque<u16>,
    /// Maximum of `window_used`: [`WRITE_WINDOW`].
    pub(super) window: usize,
    window_used: usize,
    pair: Pair,
    sink: Sink,
    unverified: Option<Unverified>,
    head: u16,
    transmit: TransmitQueue,
    events: VecDeque<ControllerEvent>,
    errors: VecDeque<CommandError>,
    is_failed: bool,
}

impl ControllerQueue {
    /// Creates a queue whose Connect command has been answered; the next bytes are the first I/O
    /// command.
    #[must_use]
    pub fn new(
        limits: ControllerLimits,
        namespaces: Vec<NamespaceFormat>,
        secure: Option<SecureQueue>,
    ) -> Self {
        let outstanding = limits.queue_depth.max(2) - 1;
        Self {
            limits,
            namespaces,
            secure,
            counter: CommandCounter::default(),
            reader: PduReader::new(PduLimits {
                capsule_data_max: limits.in_capsule_max,
                data_max: limits.h2c_data_max,
                digests: limits.digests,
            }),
            slots: Slots::new(outstanding),
            cids: vec![None; usize::from(outstanding)],
            unasked: VecDeque::new(),
            window: WRITE_WINDOW,
            window_used: 0,
            pair: Pair::None,
            sink: Sink::Discard,
            unverified: None,
            head: 0,
            transmit: TransmitQueue::default(),
            events: VecDeque::new(),
            errors: VecDeque::new(),
            is_failed: false,
        }
    }

    // Commands.

    /// Changes the namespaces of a running queue. Commands that wait for their data are checked
    /// against the new ones; those already handed out aren't affected.
    pub fn set_namespaces(&mut self, namespaces: Vec<NamespaceFormat>) {
        self.namespaces = namespaces;
    }

    /// Ends a command with `status`; `buffer` may be one that is no longer needed, for reuse. Both
    /// entries of a fused pair are answered: the one at fault with `status`, the other with Command
    /// Aborted due to Failed Fused Command.
    pub fn complete(&mut self, slot: u16, status: Status, buffer: Vec<u8>) {
        self.complete_change(slot, status, 0, buffer);
    }

    /// As [`Self::complete`]; on a secure queue the completion of a successful change has this
    /// mark.
    pub fn complete_change(&mut self, slot: u16, status: Status, mark: u64, buffer: Vec<u8>) {
        self.transmit.recycle(buffer);
        let Some(done) = self.take_executing(slot) else { return };
        let Some(second) = done.partner.and_then(|partner| self.take(partner)) else {
            self.respond_marked(&done.entry, done.number, status, mark);
            self.ask();
            return;
        };
        let (first_status, second_status) = if status.is_success() {
            (status, status)
        } else if is_of_compare(status) {
            (status, Status::ABORTED_FAILED_FUSED)
        } else {
            (Status::ABORTED_FAILED_FUSED, status)
        };
        self.respond_marked(&done.entry, done.number, first_status, mark);
        self.respond_marked(&second.entry, second.number, second_status, mark);
        self.ask();
    }

    /// A buffer for a read, reused if there is one.
    #[must_use]
    pub fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        self.transmit.buffer(bytes)
    }

    /// Ends a read with its blocks. On a secure queue they are sealed sectors or marked as
    /// unwritten, and this sets their sector MACs.
    pub fn complete_read(&mut self, slot: u16, mut data: Vec<u8>) {
        let Some(done) = self.take_executing(slot) else { return };
        if let Some(secure) = &self.secure {
            let lba = done.entry.start_lba.get();
            for (index, block) in blocks_of(&mut data).enumerate() {
                let lba = lba + index as u64;
                secure.stamp_sector(Direction::Read, done.number, index as u32, lba, block);
            }
        }
        self.send_data(&done, data);
    }

    /// Ends a command with data for the host that aren't blocks, truncated or padded with zeros to
    /// the requested length.
    pub fn complete_data(&mut self, slot: u16, mut data: Vec<u8>) {
        let Some(done) = self.take_executing(slot) else { return };
        data.resize(done.entry.sgl.length.get() as usize, 0);
        self.send_data(&done, data);
    }

    /// Aborts a command that hasn't been handed out; returns whether there was one. It is answered
    /// with Command Abort Requested, at once or when its data in flight have arrived.
    pub fn abort(&mut self, cid: u16) -> bool {
        let waits = |slot: &Slot| slot.entry.cid.get() == cid && slot.stage != Stage::Executing;
        let Some(index) = self.slots.find(waits) else { return false };
        self.end_early(index, Status::ABORTED);
        true
    }

    // Outputs.

    /// Bytes to send.
    pub fn transmit(&mut self) -> &mut TransmitQueue {
        &mut self.transmit
    }

    /// The next event.
    pub fn next_event(&mut self) -> Option<ControllerEvent> {
        self.events.pop_front()
    }

    /// The next command that was answered with an error.
    pub fn next_error(&mut self) -> Option<CommandError> {
        self.errors.pop_front()
    }

    // Questions.

    /// Whether [`Self::next_event`] would return an event.
    #[must_use]
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// Number of events that [`Self::next_event`] has yet to return, in the order of their arrival.
    #[must_use]
    pub fn event_count(&self) -> usize {
        self.events.len()
    }

    /// Number of commands that are partly received or being executed.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.slots.count()
    }

    /// Whether the queue has ended.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        self.is_failed
    }

    fn rules(&self) -> Rules<'_> {
        Rules {
            namespaces: &self.namespaces,
            transfer_max: self.limits.transfer_max,
            is_secure: self.secure.is_some(),
        }
    }

    fn slot_mut(&mut self, index: u16) -> Option<&mut Slot> {
        self.slots.get_mut(index)
    }

    /// Frees a slot.
    fn take(&mut self, index: u16) -> Option<Slot> {
        let slot = self.slots.take(index)?;
        if let Some(cid) = self.cids.get_mut(usize::from(index)) {
            *cid = None;
        }
        let was_asked = slot.wanted > 0
            && slot.entry.sgl.kind != SGL_IN_CAPSULE
            && slot.stage != Stage::Unasked;
        if was_asked {
            self.window_used = self.window_used.saturating_sub(slot.wanted);
        }
        if slot.stage == Stage::Unasked {
            self.unasked.retain(|waiting| *waiting != index);
        }
        if self.pair == Pair::First(index) {
            self.pair = Pair::Failed;
        }
        Some(slot)
    }

    fn take_executing(&mut self, index: u16) -> Option<Slot> {
        let slot = self.slots.get(index);
        slot.filter(|slot| slot.stage == Stage::Executing)?;
        self.take(index)
    }

    fn send_data(&mut self, done: &Slot, data: Vec<u8>) {
        let finished = self.secure.is_none() && self.limits.success_flag;
        let flags = FLAG_LAST | if finished { FLAG_SUCCESS } else { 0 };
        let header = DataHeader {
            common: CommonHeader::new(kind::C2H_DATA, flags, data.len(), self.limits.digests),
            cid: done.entry.cid,
            tag: 0.into(),
            offset: 0.into(),
            length: (data.len() as u32).into(),
            reserved: [0; 4],
        };
        self.transmit.put_pdu(header.as_bytes(), Data::Owned(data));
        if !finished {
            self.respond(&done.entry, done.number, Status::SUCCESS);
        }
    }

    fn respond(&mut self, entry: &SubmissionEntry, number: u64, status: Status) {
        self.respond_marked(entry, number, status, 0);
    }

    fn respond_marked(&mut self, entry: &SubmissionEntry, number: u64, status: Status, mark: u64) {
        if !status.is_success() {
            if self.errors.len() == ERRORS_MAX {
                self.errors.pop_front();
            }
            let (cid, lba, nsid) = (entry.cid.get(), entry.start_lba.get(), entry.nsid.get());
            self.errors.push_back(CommandError { cid, status, lba, nsid });
        }
        let mut completion = CompletionEntry {
            sq_head: self.head.into(),
            cid: entry.cid,
            status: status.field().into(),
            ..CompletionEntry::default()
        };
        if let Some(secure) = &self.secure {
            let outcome = outcome_of(entry, status, mark);
            completion.result = secure.completion_mac(number, &outcome);
            completion.sq_head = (outcome.mark as u16).into();
            completion.sq_id = ((outcome.mark >> 16) as u16).into();
        }
        let common = CommonHeader::new(kind::CAPSULE_RESP, 0, 0, self.limits.digests);
        let response = CapsuleResp { common, entry: completion };
        self.transmit.put_pdu(response.as_bytes(), Data::None);
    }

    fn fail_pdu(&mut self, error: PduError) {
        self.transmit.put(&termination(false, error, self.reader.header()));
        self.fail(Reason::PduMalformed, None, error.to_string());
    }

    fn fail(&mut self, reason: Reason, lba: Option<u64>, detail: String) {
        self.is_failed = true;
        self.events.push_back(ControllerEvent::Failed { reason, lba, detail });
    }
}

impl StreamSink for ControllerQueue {
    fn place(&mut self) -> &mut [u8] {
        let left = self.reader.data_left();
        if self.is_failed {
            return &mut [];
        }
        let Sink::Slot(index) = self.sink else { return &mut [] };
        let place = self.slot_mut(index).and_then(|slot| {
            slot.buffer.get_mut(slot.received..slot.received.saturating_add(left))
        });
        place.unwrap_or_default()
    }

    fn placed(&mut self, bytes: usize) {
        let Sink::Slot(index) = self.sink else { return };
        let slot = self.slots.get_mut(index);
        if bytes > 0
            && let Some(slot) = slot
            && let Some(data) = slot.buffer.get(slot.received..slot.received + bytes)
        {
            self.reader.skip(data);
            slot.received += bytes;
            // This may complete the data.
            self.receive(&[]);
        }
    }

    fn receive(&mut self, mut input: &[u8]) {
        while !self.is_failed {
            let outcome = match self.reader.next(&mut input) {
                Ok(None) => return,
                Ok(Some(Piece::Header(header, data))) => self.receive_header(header, data),
                Ok(Some(Piece::Data(data))) => {
                    self.receive_data(data);
                    Ok(())
                }
                Ok(Some(Piece::End(is_intact))) => self.end_data(is_intact),
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                self.fail_pdu(error);
            }
        }
    }
}

/// Whether the status of a fused pair belongs to its Compare.
fn is_of_compare(status: Status) -> bool {
    [
        Status::COMPARE_FAILURE,
        Status::UNRECOVERED_READ,
        Status::GUARD_CHECK,
        Status::APPLICATION_TAG_CHECK,
        Status::REFERENCE_TAG_CHECK,
    ]
    .iter()
    .any(|of_compare| of_compare.code() == status.code())
}

/// The authenticated contents of the completion of `entry` with `status`, computed by both sides.
/// Only the completion of a successful change has a mark.
pub(super) fn outcome_of(entry: &SubmissionEntry, status: Status, mark: u64) -> Outcome {
    Outcome {
        opcode: entry.opcode,
        flags: entry.flags,
        start_lba: entry.start_lba.get(),
        block_count: if entry.has_block_range() && status.is_success() {
            entry.block_count()
        } else {
            0
        },
        status,
        mark: if entry.changes_blocks() && status.is_success() { mark } else { 0 },
    }
}

/// The blocks of a buffer of whole 4160-byte blocks.
pub fn blocks_of(buffer: &mut [u8]) -> impl Iterator<Item = &mut Block> {
    buffer.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut()
}
