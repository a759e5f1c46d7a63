//! An I/O queue as the controller (target) sees it: capsules in, commands out to be executed,
//! data and completions back. Plain, or secure when it holds a [`SecureQueue`].
//!
//! Nothing is handed out for execution before all of its bytes are here and, on a secure queue,
//! its command MAC and every sector MAC are verified. The first bad MAC ends the queue.

use std::collections::VecDeque;

use zerocopy::IntoBytes;

use super::Reason;
use super::command::{
    CompletionEntry, FLAGS_SGL, FLUSH, FORCE_UNIT_ACCESS, PROTECTION_INFORMATION, READ,
    SGL_IN_CAPSULE, SGL_TRANSPORT, SubmissionEntry, WRITE,
};
use super::operation::{Access, NamespaceFormat};
pub use super::operation::{Command, Operation};
use super::pdu::{
    CapsuleResp, CommonHeader, DataHeader, Digests, FLAG_LAST, FLAG_SUCCESS, Header, PduError, R2t,
    kind, termination,
};
use super::reader::{PduReader, Piece, StreamSink};
use super::status::Status;
use super::transmit::TransmitQueue;
use crate::sector::{BLOCK_BYTES, Block, check_written};
use crate::secure_queue::{CommandCounter, Direction, Outcome, SecureQueue};

/// Bytes of writes whose data may be asked for at once. More than keeps the wire busy would only
/// fall out of the processor's caches between one copy and the next, and hold memory.
pub const WRITE_WINDOW: usize = 512 * 1024;

/// Broadcast namespace id, allowed in a flush.
const ALL_NAMESPACES: u32 = u32::MAX;

/// What was negotiated for the queue.
#[derive(Debug, Clone, Copy)]
pub struct ControllerLimits {
    /// Entries of the queue; one less may be outstanding.
    pub queue_depth: u16,
    /// Most data bytes of one H2CData PDU.
    pub h2c_data_max: usize,
    /// Most data bytes of one command capsule.
    pub in_capsule_max: usize,
    /// Most bytes of one command.
    pub transfer_max: usize,
    /// Whether a successful read may end without a response capsule (queue flow control is off).
    pub success_flag: bool,
    /// Digests negotiated in ICReq and ICResp.
    pub digests: Digests,
}

/// What happened.
#[derive(Debug, PartialEq, Eq)]
pub enum ControllerEvent {
    /// Execute this and complete it.
    Received(Command),
    /// The queue is over: send what is left to transmit, then close the connection.
    Failed {
        /// Why.
        reason: Reason,
        /// LBA of the command at fault, if one is known.
        lba: Option<u64>,
        /// In words.
        detail: String,
    },
}

#[derive(Debug)]
struct Slot {
    entry: SubmissionEntry,
    number: u64,
    buffer: Vec<u8>,
    received: usize,
    /// Receiving by R2T; a data PDU for any other slot is a fault.
    receiving: bool,
}

#[derive(Debug, Clone, Copy)]
enum Sink {
    /// Data of a command that is already answered with an error.
    Discard,
    Slot(u16),
}

/// The controller's side of one I/O queue.
#[derive(Debug)]
pub struct ControllerQueue {
    pub(super) limits: ControllerLimits,
    namespaces: Vec<NamespaceFormat>,
    secure: Option<SecureQueue>,
    counter: CommandCounter,
    reader: PduReader,
    slots: Vec<Option<Slot>>,
    /// Writes whose data isn't asked for yet.
    unasked: VecDeque<u16>,
    /// Bytes of the writes whose data was asked for and that aren't completed.
    window_used: usize,
    sink: Sink,
    head: u16,
    transmit: TransmitQueue,
    events: VecDeque<ControllerEvent>,
    is_failed: bool,
}

impl ControllerQueue {
    /// A queue whose Connect command is answered; the next bytes are the first I/O command.
    #[must_use]
    pub fn new(
        limits: ControllerLimits,
        namespaces: Vec<NamespaceFormat>,
        secure: Option<SecureQueue>,
    ) -> Self {
        let outstanding = usize::from(limits.queue_depth.max(2)) - 1;
        Self {
            limits,
            namespaces,
            secure,
            counter: CommandCounter::default(),
            reader: PduReader::new(limits.h2c_data_max.max(limits.in_capsule_max)),
            slots: (0..outstanding).map(|_| None).collect(),
            unasked: VecDeque::new(),
            window_used: 0,
            sink: Sink::Discard,
            head: 0,
            transmit: TransmitQueue::default(),
            events: VecDeque::new(),
            is_failed: false,
        }
    }

    // Commands.

    /// Changes the namespaces while the queue runs. Commands that wait for their data are checked
    /// against the new ones; those handed out already are the caller's.
    pub fn set_namespaces(&mut self, namespaces: Vec<NamespaceFormat>) {
        self.namespaces = namespaces;
    }

    /// Ends a command with `status`; a buffer that isn't needed any more may be handed back.
    pub fn complete(&mut self, slot: u16, status: Status, buffer: Vec<u8>) {
        self.transmit.recycle(buffer);
        let Some(done) = self.slots.get_mut(usize::from(slot)).and_then(Option::take) else {
            return;
        };
        self.respond(&done.entry, done.number, status);
        if done.entry.opcode == WRITE && done.entry.sgl.kind == SGL_TRANSPORT {
            let bytes = done.entry.sgl.length.get() as usize;
            self.window_used = self.window_used.saturating_sub(bytes);
            self.ask();
        }
    }

    /// A buffer for a read, reused if there is one.
    #[must_use]
    pub fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        self.transmit.buffer(bytes)
    }

    /// Ends a read with its blocks. On a secure queue they are sealed sectors or marked
    /// unwritten, and are given their sector MACs here.
    pub fn complete_read(&mut self, slot: u16, mut data: Vec<u8>) {
        let Some(done) = self.slots.get_mut(usize::from(slot)).and_then(Option::take) else {
            return;
        };
        if let Some(secure) = &self.secure {
            let lba = done.entry.start_lba.get();
            for (index, block) in blocks_of(&mut data).enumerate() {
                let lba = lba + index as u64;
                secure.stamp_sector(Direction::Read, done.number, index as u32, lba, block);
            }
        }
        self.send_data(&done, data);
    }

    fn send_data(&mut self, done: &Slot, data: Vec<u8>) {
        let finished = self.secure.is_none() && self.limits.success_flag;
        let flags = FLAG_LAST | if finished { FLAG_SUCCESS } else { 0 };
        let header = DataHeader {
            common: CommonHeader::new(kind::C2H_DATA, flags, data.len()),
            cid: done.entry.cid,
            tag: 0.into(),
            offset: 0.into(),
            length: (data.len() as u32).into(),
            reserved: [0; 4],
        };
        self.transmit.put(header.as_bytes());
        self.transmit.put_buffer(data);
        if !finished {
            self.respond(&done.entry, done.number, Status::SUCCESS);
        }
    }

    /// Ends a command with data for the host that isn't blocks, cut or filled with zeros to the
    /// length it asked for.
    pub fn complete_data(&mut self, slot: u16, mut data: Vec<u8>) {
        let Some(done) = self.slots.get_mut(usize::from(slot)).and_then(Option::take) else {
            return;
        };
        data.resize(done.entry.sgl.length.get() as usize, 0);
        self.send_data(&done, data);
    }

    /// Aborts a command whose data hasn't all arrived; says whether there was one. It is answered
    /// with Command Abort Requested.
    pub fn abort(&mut self, cid: u16) -> bool {
        let waits = |index: &u16| {
            let slot = self.slots.get(usize::from(*index)).and_then(Option::as_ref);
            slot.is_some_and(|slot| slot.entry.cid.get() == cid)
        };
        let Some(index) = self.unasked.iter().copied().find(waits) else { return false };
        self.unasked.retain(|waiting| *waiting != index);
        if let Some(slot) = self.slots.get_mut(usize::from(index)).and_then(Option::take) {
            self.respond(&slot.entry, slot.number, Status::ABORTED);
        }
        true
    }

    // Outputs.

    /// Bytes to send.
    pub fn transmit(&mut self) -> &mut TransmitQueue {
        &mut self.transmit
    }

    /// What happened next.
    pub fn next_event(&mut self) -> Option<ControllerEvent> {
        self.events.pop_front()
    }

    // Questions.

    /// Whether something happened that [`Self::next_event`] hasn't told yet.
    #[must_use]
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// Commands that are received in part or being executed.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Whether the queue is over.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        self.is_failed
    }

    fn receive_header(&mut self, header: Header, data: usize) -> Result<(), PduError> {
        match header {
            Header::CapsuleCmd(capsule) => self.receive_command(capsule.entry, data),
            Header::HostData(header) => self.receive_data_header(&header),
            Header::HostTermination(request) => {
                let detail = format!("host ended the connection, code {}", request.code.get());
                self.fail(Reason::QueueClosed, None, detail);
                Ok(())
            }
            _ => Err(PduError::sequence("a PDU that hosts don't send on a connected I/O queue")),
        }
    }

    fn receive_command(&mut self, entry: SubmissionEntry, data: usize) -> Result<(), PduError> {
        let number = self.counter.take();
        if let Some(secure) = &self.secure
            && secure.verify_command(number, &entry, &[]).is_err()
        {
            let detail = format!("command {number}, opcode {:#04x}", entry.opcode);
            self.fail(Reason::CommandMac, Some(entry.start_lba.get()), detail);
            return Ok(());
        }
        self.head = (self.head + 1) % self.limits.queue_depth.max(2);
        self.sink = Sink::Discard;
        let status = self.check(&entry, data);
        if !status.is_success() {
            self.respond(&entry, number, status);
            return Ok(());
        }
        let free = self.slots.iter().position(Option::is_none);
        let index = free.ok_or(PduError::sequence("more commands than the queue holds"))? as u16;
        let bytes = entry.sgl.length.get() as usize;
        let in_capsule = data > 0;
        let buffer = if in_capsule { self.transmit.buffer(bytes) } else { Vec::new() };
        if let Some(place) = self.slots.get_mut(usize::from(index)) {
            *place = Some(Slot { entry, number, buffer, received: 0, receiving: false });
        }
        match entry.opcode {
            FLUSH => self.hand_out(index, &entry, Operation::Flush),
            READ => self.hand_out(index, &entry, Operation::Read),
            _ if in_capsule => self.sink = Sink::Slot(index),
            _ => {
                self.unasked.push_back(index);
                self.ask();
            }
        }
        Ok(())
    }

    /// Asks for the data of the writes that wait for it, in their order, as the window allows.
    fn ask(&mut self) {
        while let Some(&index) = self.unasked.front() {
            let Some(slot) = self.slots.get_mut(usize::from(index)).and_then(Option::as_mut) else {
                self.unasked.pop_front();
                continue;
            };
            let bytes = slot.entry.sgl.length.get() as usize;
            if self.window_used > 0 && self.window_used + bytes > WRITE_WINDOW {
                return;
            }
            self.unasked.pop_front();
            self.window_used += bytes;
            slot.buffer = self.transmit.buffer(bytes);
            slot.receiving = true;
            let request = R2t {
                common: CommonHeader::new(kind::R2T, 0, 0),
                cid: slot.entry.cid,
                tag: index.into(),
                offset: 0.into(),
                length: (bytes as u32).into(),
                reserved: [0; 4],
            };
            self.transmit.put(request.as_bytes());
        }
    }

    fn hand_out(&mut self, slot: u16, entry: &SubmissionEntry, operation: Operation) {
        let blocks = if entry.opcode == FLUSH { 0 } else { entry.block_count() };
        let lba = if entry.opcode == FLUSH { 0 } else { entry.start_lba.get() };
        let is_forced = entry.opcode == WRITE && entry.cdw12.get() & FORCE_UNIT_ACCESS != 0;
        let command = Command { slot, nsid: entry.nsid.get(), operation, lba, blocks, is_forced };
        self.events.push_back(ControllerEvent::Received(command));
    }

    /// Checks everything about a command that its bytes alone can tell.
    fn check(&self, entry: &SubmissionEntry, data: usize) -> Status {
        if !matches!(entry.opcode, FLUSH | READ | WRITE) {
            return Status::INVALID_OPCODE.final_();
        }
        if self.slots.iter().flatten().any(|slot| slot.entry.cid == entry.cid) {
            return Status::COMMAND_ID_CONFLICT.final_();
        }
        let nsid = entry.nsid.get();
        if entry.opcode == FLUSH && nsid == ALL_NAMESPACES && data == 0 {
            return Status::SUCCESS;
        }
        let Some(namespace) = self.namespaces.iter().find(|known| known.nsid == nsid) else {
            return Status::INVALID_NAMESPACE.final_();
        };
        match namespace.access {
            Access::Refused(status) => return status,
            Access::ReadOnly if entry.opcode == WRITE => {
                return Status::NAMESPACE_WRITE_PROTECTED.final_();
            }
            Access::ReadOnly | Access::Full => {}
        }
        if entry.opcode == FLUSH {
            let carries = if data == 0 { Status::SUCCESS } else { Status::SGL_LENGTH_INVALID };
            return if data == 0 { carries } else { carries.final_() };
        }
        // Protection information doesn't exist on these namespaces.
        if entry.flags != FLAGS_SGL || entry.cdw12.get() & PROTECTION_INFORMATION != 0 {
            return Status::INVALID_FIELD.final_();
        }
        let blocks = u64::from(entry.block_count());
        let bytes = blocks * namespace.block_bytes as u64;
        if bytes > self.limits.transfer_max as u64 {
            return Status::INVALID_FIELD.final_();
        }
        let end = entry.start_lba.get().checked_add(blocks);
        if end.is_none_or(|end| end > namespace.block_count) {
            return Status::LBA_OUT_OF_RANGE.final_();
        }
        if u64::from(entry.sgl.length.get()) != bytes || entry.sgl.address.get() != 0 {
            return Status::SGL_LENGTH_INVALID.final_();
        }
        match (entry.sgl.kind, entry.opcode, data as u64) {
            (SGL_IN_CAPSULE, WRITE, carried) if carried == bytes => Status::SUCCESS,
            (SGL_TRANSPORT, _, 0) => Status::SUCCESS,
            (SGL_IN_CAPSULE | SGL_TRANSPORT, _, _) => Status::SGL_LENGTH_INVALID.final_(),
            _ => Status::SGL_TYPE_INVALID.final_(),
        }
    }

    fn receive_data_header(&mut self, header: &DataHeader) -> Result<(), PduError> {
        let index = header.tag.get();
        let slot = self.slots.get(usize::from(index)).and_then(Option::as_ref);
        let slot = slot.filter(|slot| slot.receiving && slot.entry.cid == header.cid);
        let slot = slot.ok_or(PduError::field(10, "data for no command that waits for it"))?;
        let length = header.length.get() as usize;
        if header.offset.get() as usize != slot.received {
            return Err(PduError::range("data out of order"));
        }
        if length > slot.buffer.len() - slot.received {
            return Err(PduError::range("more data than was asked for"));
        }
        let ends = slot.received + length == slot.buffer.len();
        if ends != (header.common.flags & FLAG_LAST != 0) {
            return Err(PduError::field(1, "last-PDU flag in the wrong place"));
        }
        self.sink = Sink::Slot(index);
        Ok(())
    }

    fn receive_data(&mut self, data: &[u8]) {
        let Sink::Slot(index) = self.sink else { return };
        let Some(slot) = self.slots.get_mut(usize::from(index)).and_then(Option::as_mut) else {
            return;
        };
        let end = slot.received + data.len();
        if let Some(place) = slot.buffer.get_mut(slot.received..end) {
            place.copy_from_slice(data);
        }
        self.received(index, data.len());
    }

    fn received(&mut self, index: u16, bytes: usize) {
        let Some(slot) = self.slots.get_mut(usize::from(index)).and_then(Option::as_mut) else {
            return;
        };
        slot.received += bytes;
        if slot.received == slot.buffer.len() {
            self.sink = Sink::Discard;
            self.finish_write(index);
        }
    }

    fn finish_write(&mut self, index: u16) {
        let Some(slot) = self.slots.get_mut(usize::from(index)).and_then(Option::as_mut) else {
            return;
        };
        slot.receiving = false;
        let mut buffer = std::mem::take(&mut slot.buffer);
        let (entry, number) = (slot.entry, slot.number);
        if let Some(secure) = &self.secure {
            for (block_index, block) in blocks_of(&mut buffer).enumerate() {
                let lba = entry.start_lba.get() + block_index as u64;
                let verified =
                    secure.verify_sector(Direction::Write, number, block_index as u32, lba, block);
                if verified.is_err() {
                    let detail = format!("write, command {number}, block {block_index}");
                    self.fail(Reason::SectorMac, Some(lba), detail);
                    return;
                }
            }
            let blocks = buffer.as_chunks::<BLOCK_BYTES>().0;
            if blocks.iter().any(|block| check_written(block).is_err()) {
                self.complete(index, Status::from(Reason::SectorFormat), buffer);
                return;
            }
        }
        self.hand_out(index, &entry, Operation::Write(buffer));
    }

    fn respond(&mut self, entry: &SubmissionEntry, number: u64, status: Status) {
        let mut completion = CompletionEntry {
            sq_head: self.head.into(),
            cid: entry.cid,
            status: status.field().into(),
            ..CompletionEntry::default()
        };
        if let Some(secure) = &self.secure {
            completion.result = secure.completion_mac(number, &outcome_of(entry, status));
        }
        let response =
            CapsuleResp { common: CommonHeader::new(kind::CAPSULE_RESP, 0, 0), entry: completion };
        self.transmit.put(response.as_bytes());
    }

    fn fail_pdu(&mut self, error: PduError) {
        self.transmit.put(termination(false, error).as_bytes());
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
        let Sink::Slot(index) = self.sink else { return &mut [] };
        let slot = self.slots.get_mut(usize::from(index)).and_then(Option::as_mut);
        let place = slot.and_then(|slot| {
            slot.buffer.get_mut(slot.received..slot.received.saturating_add(left))
        });
        place.filter(|_| !self.is_failed).unwrap_or_default()
    }

    fn placed(&mut self, bytes: usize) {
        if let Sink::Slot(index) = self.sink
            && bytes > 0
        {
            self.reader.skip(bytes);
            self.received(index, bytes);
        }
    }

    fn receive(&mut self, mut input: &[u8]) {
        while !self.is_failed {
            match self.reader.next(&mut input) {
                Ok(None) => return,
                Ok(Some(Piece::Header(header, data))) => {
                    if let Err(error) = self.receive_header(header, data) {
                        self.fail_pdu(error);
                    }
                }
                Ok(Some(Piece::Data(data))) => self.receive_data(data),
                Err(error) => self.fail_pdu(error),
            }
        }
    }
}

/// What a completion of `entry` with `status` says; both sides compute it from what they know.
pub(super) fn outcome_of(entry: &SubmissionEntry, status: Status) -> Outcome {
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
    }
}

/// The blocks of a buffer of whole 4160-byte blocks.
pub fn blocks_of(buffer: &mut [u8]) -> impl Iterator<Item = &mut Block> {
    buffer.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut()
}
