//! The host's (initiator's) side of an I/O queue: takes commands and reports their ends. Secure if
//! it has a [`SecureQueue`], otherwise plain.
//!
//! On a secure queue a completion is accepted only with its MAC, and data only with the MACs for
//! the command that requested them. The first wrong MAC ends the queue.

use std::collections::VecDeque;
use std::ops::Range;

use zerocopy::IntoBytes;

use super::Reason;
use super::command::{
    CompletionEntry, FLAGS_SGL, OPENINGS, RANGE_BYTES, SGL_IN_CAPSULE, SGL_TRANSPORT, Sgl,
    SubmissionEntry, Transfer,
};
use super::controller_queue::{blocks_of, outcome_of};
use super::host_command::{Entry, HostCommand, Payload};
use super::pdu::{
    CapsuleCmd, CommonHeader, DataHeader, Digests, FLAG_LAST, FLAG_SUCCESS, Header, PduError,
    PduLimits, R2t, kind, termination,
};
use super::reader::{PduReader, Piece, StreamSink};
use super::slots::Slots;
use super::status::Status;
use super::transmit::{Data, SharedBytes, TransmitQueue};
use crate::freshness::openings::Openings;
use crate::sector::{BLOCK_BYTES, DATA_BYTES, METADATA_BYTES};
use crate::secure_queue::{CommandCounter, Direction, SecureQueue};

/// Minimum bytes that a controller may request at once, unless fewer are left: the least maximum of
/// one H2CData PDU (MAXH2CDATA) that NVMe/TCP allows. Each request is answered with headers and
/// digests, so requests of a byte each would multiply the bytes that wait to be sent.
const REQUEST_BYTES_MIN: usize = 4096;

/// Limits negotiated for the queue.
#[derive(Debug, Clone, Copy)]
pub struct HostLimits {
    /// Entries of the queue; one less may be outstanding.
    pub queue_depth: u16,
    /// Maximum data bytes of one H2CData PDU, from ICResp.
    pub h2c_data_max: usize,
    /// Maximum bytes of one command.
    pub transfer_max: usize,
    /// Maximum bytes of in-capsule data.
    pub in_capsule_max: usize,
    /// Bytes of a block on the wire: 4096, or 4160 on a secure queue.
    pub block_bytes: usize,
    /// The namespace's id.
    pub nsid: u32,
    /// Digests negotiated in ICReq and ICResp.
    pub digests: Digests,
}

/// A command can't be submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The maximum number of commands is outstanding.
    #[error("the queue is full")]
    Full,
    /// Not a whole number of blocks, or none, or more than one command may move; or an empty or too
    /// long list of ranges.
    #[error("a command moves 1 block up to the transfer limit, or 1 to 256 ranges")]
    Length,
    /// The queue has ended.
    #[error("the queue is closed")]
    Closed,
}

/// An event of the queue.
#[derive(Debug, PartialEq, Eq)]
pub enum HostEvent {
    /// A command ended.
    Completed {
        /// The tag given on submission.
        tag: u64,
        /// How it ended.
        status: Status,
        /// The mark of a successful change, if the store keeps marks; otherwise 0.
        mark: u64,
        /// The blocks of a successful read or other command that returns blocks; otherwise the
        /// command's buffer, for reuse, or nothing if it has none left, as with kept sectors.
        data: Vec<u8>,
    },
    /// The queue has ended: the outcome of every outstanding command is unknown.
    Failed {
        /// The reason.
        reason: Reason,
        /// LBA of the command at fault, if one is known.
        lba: Option<u64>,
        /// Description.
        detail: String,
    },
}

#[derive(Debug)]
struct Slot {
    entry: SubmissionEntry,
    number: u64,
    tag: u64,
    buffer: Vec<u8>,
    /// Data that somebody else keeps, until they are requested.
    kept: Option<Stamped>,
    /// Bytes of data moved by R2T or C2HData.
    moved: usize,
    /// Where its last bytes end in the transmit queue.
    last: u64,
    /// Whether a data digest didn't match.
    is_damaged: bool,
    fused: Option<Fused>,
}

/// Sectors that somebody else keeps, with the metadata that is sent instead of theirs: it has the
/// sector MACs.
#[derive(Debug)]
struct Stamped {
    sectors: SharedBytes,
    metadata: SharedBytes,
}

impl Stamped {
    /// The parts in which they are sent, without copying them.
    fn parts(&self) -> Vec<SharedBytes> {
        let count = self.metadata.bytes().len() / METADATA_BYTES;
        let mut parts = Vec::with_capacity(2 * count);
        for index in 0..count {
            let (data, metadata) = (index * BLOCK_BYTES, index * METADATA_BYTES);
            parts.push(self.sectors.part(data..data + DATA_BYTES));
            parts.push(self.metadata.part(metadata..metadata + METADATA_BYTES));
        }
        parts
    }
}

/// Makes the metadata with which sectors that somebody else keeps are sent by command `number`.
fn stamp(
    secure: &SecureQueue,
    (number, lba): (u64, u64),
    sectors: &[u8],
    all_metadata: &mut Vec<u8>,
) {
    let sectors = sectors.as_chunks::<BLOCK_BYTES>().0;
    all_metadata.resize(sectors.len() * METADATA_BYTES, 0);
    let places = all_metadata.as_chunks_mut::<METADATA_BYTES>().0;
    for ((index, sector), place) in (0..).zip(sectors).zip(places) {
        let Some((data, metadata)) = sector.split_first_chunk::<DATA_BYTES>() else { continue };
        place.copy_from_slice(metadata);
        let lba = lba + u64::from(index);
        secure.stamp_metadata(Direction::Write, number, index, lba, (data, place));
    }
}

/// The data of the sectors, each followed by its stamped metadata.
fn stamped<'a>(sectors: &'a [u8], metadata: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + Clone {
    let (sectors, metadata) =
        (sectors.as_chunks::<BLOCK_BYTES>().0, metadata.chunks(METADATA_BYTES));
    let parts =
        |(sector, metadata): (&'a [u8; BLOCK_BYTES], &'a [u8])| [&sector[..DATA_BYTES], metadata];
    sectors.iter().zip(metadata).flat_map(parts)
}

/// The parts of `range` of bytes that lie in several parts.
fn within<'a>(
    parts: impl Iterator<Item = &'a [u8]> + Clone,
    range: Range<usize>,
) -> impl Iterator<Item = &'a [u8]> + Clone {
    let places = parts.scan(0, |end, part: &[u8]| {
        let start = *end;
        *end += part.len();
        Some((start, part))
    });
    places.filter_map(move |(start, part)| {
        let from = range.start.saturating_sub(start).min(part.len());
        let to = range.end.saturating_sub(start).min(part.len());
        part.get(from..to).filter(|part| !part.is_empty())
    })
}

/// The other command of a fused pair; the pair ends when both have ended.
#[derive(Debug, Clone, Copy)]
struct Fused {
    partner: u16,
    /// Status and mark of the other command, once it has ended.
    ended: Option<(Status, u64)>,
}

/// The host's side of one I/O queue.
#[derive(Debug)]
pub struct HostQueue {
    limits: HostLimits,
    secure: Option<SecureQueue>,
    counter: CommandCounter,
    reader: PduReader,
    /// Outstanding commands by command id.
    slots: Slots<Slot>,
    /// Command id of the read to which the current data PDU belongs, and the PDU's flags.
    sink: Option<(u16, u8)>,
    transmit: TransmitQueue,
    /// Memory for the metadata of sectors that somebody else keeps.
    metadata: Vec<u8>,
    events: VecDeque<HostEvent>,
    /// The highest mark received: later ones differ from it by less than 2³¹.
    mark: u64,
    is_failed: bool,
}

impl HostQueue {
    /// Creates a queue whose Connect command succeeded.
    #[must_use]
    pub fn new(limits: HostLimits, secure: Option<SecureQueue>) -> Self {
        Self {
            limits,
            secure,
            counter: CommandCounter::default(),
            reader: PduReader::new(PduLimits {
                capsule_data_max: 0,
                data_max: limits.transfer_max,
                digests: limits.digests,
            }),
            slots: Slots::new(limits.queue_depth.max(2) - 1),
            sink: None,
            transmit: TransmitQueue::default(),
            metadata: Vec::new(),
            events: VecDeque::new(),
            mark: 0,
            is_failed: false,
        }
    }

    // Commands.

    /// Submits a command; its end is reported with `tag`. An error returns the command.
    pub fn submit(
        &mut self,
        tag: u64,
        command: HostCommand,
    ) -> Result<(), (SubmitError, HostCommand)> {
        if let Err(error) = self.admit(&command) {
            return Err((error, command));
        }
        let (first, second) = command.into_entries(self.limits.block_bytes);
        let cid = self.put(tag, first);
        if let Some(second) = second {
            let other = self.put(tag, second);
            for (cid, partner) in [(cid, other), (other, cid)] {
                if let Ok(slot) = self.slot(cid) {
                    slot.fused = Some(Fused { partner, ended: None });
                }
            }
        }
        Ok(())
    }

    /// A buffer for a write, reused if there is one.
    #[must_use]
    pub fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        self.transmit.buffer(bytes)
    }

    /// Returns a buffer for reuse.
    pub fn recycle(&mut self, buffer: Vec<u8>) {
        self.transmit.recycle(buffer);
    }

    // Outputs.

    /// Bytes to send.
    pub fn transmit(&mut self) -> &mut TransmitQueue {
        &mut self.transmit
    }

    /// The next event.
    pub fn next_event(&mut self) -> Option<HostEvent> {
        self.events.pop_front()
    }

    // Questions.

    /// Number of commands that haven't ended.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.slots.count()
    }

    /// Number of the command submitted last; 0 if there was none.
    #[must_use]
    pub fn last_number(&self) -> u64 {
        self.counter.last()
    }

    /// The queue's name, which identifies it in later questions to its target; 0 for a plain one.
    #[must_use]
    pub fn name(&self) -> u64 {
        self.secure.as_ref().map_or(0, SecureQueue::name)
    }

    /// Whether one more command can be submitted.
    #[must_use]
    pub fn can_submit(&self) -> bool {
        !self.is_failed && self.slots.free() > 0
    }

    fn admit(&self, command: &HostCommand) -> Result<(), SubmitError> {
        if self.is_failed {
            return Err(SubmitError::Closed);
        }
        if !command.has_valid_length(self.limits.block_bytes, self.limits.transfer_max) {
            return Err(SubmitError::Length);
        }
        // A secure queue authenticates the list together with the command, so both must be in one
        // capsule.
        if let HostCommand::Deallocate(ranges) | HostCommand::DeallocateAgain(ranges) = command
            && self.secure.is_some()
            && ranges.len() * RANGE_BYTES > self.limits.in_capsule_max
        {
            return Err(SubmitError::Length);
        }
        if self.slots.free() < command.entries() { Err(SubmitError::Full) } else { Ok(()) }
    }

    /// Puts an entry into a free slot and its capsule into the transmit queue; returns the command
    /// id.
    fn put(&mut self, tag: u64, request: Entry) -> u16 {
        let cid = self.slots.next_free().unwrap_or_default();
        let number = self.counter.take();
        let Entry { opcode, fused, cdw10_11, cdw12, cdw13, bytes, data } = request;
        let (mut buffer, kept) = match data {
            Payload::Own(buffer) => (buffer, None),
            // A plain queue has no MACs to put in.
            Payload::Kept(sectors) if self.secure.is_none() => (sectors.bytes().to_vec(), None),
            Payload::Kept(sectors) => (Vec::new(), Some(sectors)),
        };
        let has_data = kept.is_some() || !buffer.is_empty();
        let in_capsule = has_data && bytes <= self.limits.in_capsule_max;
        let mut entry = SubmissionEntry {
            opcode,
            flags: FLAGS_SGL | fused,
            cid: cid.into(),
            nsid: self.limits.nsid.into(),
            sgl: Sgl {
                length: (bytes as u32).into(),
                kind: if in_capsule { SGL_IN_CAPSULE } else { SGL_TRANSPORT },
                ..Sgl::default()
            },
            start_lba: cdw10_11.into(),
            cdw12: cdw12.into(),
            cdw13: cdw13.into(),
            ..SubmissionEntry::default()
        };
        if let Some(secure) = &self.secure {
            secure.seal_command(number, &mut entry, &buffer);
            if entry.has_block_range() {
                for (index, block) in blocks_of(&mut buffer).enumerate() {
                    let lba = cdw10_11 + index as u64;
                    secure.stamp_sector(Direction::Write, number, index as u32, lba, block);
                }
            }
        }
        if let (Some(sectors), Some(secure)) = (&kept, &self.secure) {
            stamp(secure, (number, cdw10_11), sectors.bytes(), &mut self.metadata);
        }
        let data = if in_capsule { bytes } else { 0 };
        let common = CommonHeader::new(kind::CAPSULE_CMD, 0, data, self.limits.digests);
        let capsule = CapsuleCmd { common, entry };
        let kept = match kept {
            Some(sectors) if in_capsule => {
                let parts = stamped(sectors.bytes(), &self.metadata);
                self.transmit.put_pdu_of(capsule.as_bytes(), parts);
                None
            }
            _ if in_capsule => {
                self.transmit.put_pdu(capsule.as_bytes(), Data::Copied(&buffer));
                self.transmit.recycle(std::mem::take(&mut buffer));
                None
            }
            kept => {
                self.transmit.put_pdu(capsule.as_bytes(), Data::None);
                kept.map(|sectors| {
                    let metadata = std::mem::take(&mut self.metadata).into();
                    Stamped { sectors, metadata }
                })
            }
        };
        let (moved, is_damaged, fused) = (0, false, None);
        let last = self.transmit.end();
        self.slots.insert(Slot {
            entry,
            number,
            tag,
            buffer,
            kept,
            moved,
            last,
            is_damaged,
            fused,
        });
        cid
    }

    fn slot(&mut self, cid: u16) -> Result<&mut Slot, PduError> {
        let slot = self.slots.get_mut(cid);
        slot.ok_or(PduError::field(8, "no such command is outstanding"))
    }

    fn receive_header(&mut self, header: Header) -> Result<(), PduError> {
        match header {
            Header::CapsuleResp(response) => self.receive_completion(&response.entry),
            Header::ControllerData(header) => self.receive_data_header(&header),
            Header::R2t(request) => self.receive_request(&request),
            Header::ControllerTermination(request) => {
                let detail =
                    format!("controller ended the connection, code {}", request.code.get());
                self.fail(Reason::QueueClosed, None, detail);
                Ok(())
            }
            _ => Err(PduError::sequence("a PDU that controllers don't send on an I/O queue")),
        }
    }

    fn receive_request(&mut self, request: &R2t) -> Result<(), PduError> {
        self.put_requested(request)?;
        let last = self.transmit.end();
        self.slot(request.cid.get())?.last = last;
        Ok(())
    }

    /// Puts the data that the controller requests into the transmit queue.
    fn put_requested(&mut self, request: &R2t) -> Result<(), PduError> {
        let limit = self.limits.h2c_data_max;
        let cid = request.cid.get();
        let slot = self.slot(cid)?;
        let (start, length) = (request.offset.get() as usize, request.length.get() as usize);
        if slot.entry.transfer_direction() != Transfer::HostToController
            || slot.entry.sgl.kind != SGL_TRANSPORT
        {
            return Err(PduError::field(8, "request for data of a command that has none to send"));
        }
        let total = slot.entry.sgl.length.get() as usize;
        if start != slot.moved || length == 0 || length > total - slot.moved {
            return Err(PduError::range("request outside the command's data"));
        }
        if length < REQUEST_BYTES_MIN && length != total - slot.moved {
            return Err(PduError::field(16, "request for a small part of the data"));
        }
        slot.moved += length;
        let whole = length == total && length <= limit;
        let (buffer, kept) = (std::mem::take(&mut slot.buffer), slot.kept.take());
        let (cid, tag, digests) = (request.cid, request.tag, self.limits.digests);
        let header = |offset: usize, bytes: usize| DataHeader {
            common: CommonHeader::new(
                kind::H2C_DATA,
                if offset + bytes == start + length { FLAG_LAST } else { 0 },
                bytes,
                digests,
            ),
            cid,
            tag,
            offset: (offset as u32).into(),
            length: (bytes as u32).into(),
            reserved: [0; 4],
        };
        if let Some(kept) = kept {
            if whole {
                self.transmit.put_pdu_shared(header(0, length).as_bytes(), kept.parts());
                return Ok(());
            }
            for offset in (start..start + length).step_by(limit.max(1)) {
                let end = (offset + limit.max(1)).min(start + length);
                let all = stamped(kept.sectors.bytes(), kept.metadata.bytes());
                let header = header(offset, end - offset);
                self.transmit.put_pdu_of(header.as_bytes(), within(all, offset..end));
            }
            self.slot(cid.get())?.kept = Some(kept);
            return Ok(());
        }
        if whole {
            self.transmit.put_pdu(header(0, length).as_bytes(), Data::Owned(buffer));
            return Ok(());
        }
        let asked = buffer.get(start..start + length).unwrap_or_default();
        for (index, part) in asked.chunks(limit.max(1)).enumerate() {
            let header = header(start + index * limit, part.len());
            self.transmit.put_pdu(header.as_bytes(), Data::Copied(part));
        }
        self.slot(cid.get())?.buffer = buffer;
        Ok(())
    }

    fn receive_data_header(&mut self, header: &DataHeader) -> Result<(), PduError> {
        let is_secure = self.secure.is_some();
        let slot = self.slot(header.cid.get())?;
        let length = header.length.get() as usize;
        if !slot.entry.reads_blocks() {
            return Err(PduError::field(8, "data for a command that reads none"));
        }
        let total = slot.entry.sgl.length.get() as usize;
        let offset = header.offset.get() as usize;
        if offset.checked_add(length).is_none_or(|end| end > total) {
            return Err(PduError::range("data outside the requested range"));
        }
        if offset != slot.moved {
            return Err(PduError::sequence("data out of order"));
        }
        let is_first = slot.moved == 0;
        let flags = header.common.flags;
        let ends = slot.moved + length == total;
        if flags & FLAG_SUCCESS != 0 && (is_secure || !ends || flags & FLAG_LAST == 0) {
            return Err(PduError::field(1, "success flag where a response capsule must follow"));
        }
        if is_first {
            // Allocated only now: most reads of a deep queue wait, and their buffers would drop out
            // of the caches.
            let buffer = self.transmit.buffer(total);
            self.slot(header.cid.get())?.buffer = buffer;
        }
        self.sink = Some((header.cid.get(), flags));
        Ok(())
    }

    fn receive_data(&mut self, data: &[u8]) {
        let Some((cid, _)) = self.sink else { return };
        let Ok(slot) = self.slot(cid) else { return };
        if let Some(place) = slot.buffer.get_mut(slot.moved..slot.moved + data.len()) {
            place.copy_from_slice(data);
        }
        self.received(data.len());
    }

    fn received(&mut self, bytes: usize) {
        if let Some((cid, _)) = self.sink
            && let Ok(slot) = self.slot(cid)
        {
            slot.moved += bytes;
        }
    }

    /// The data of a PDU are complete; if their digest doesn't match, the command can't succeed.
    fn end_data(&mut self, is_intact: bool) {
        let Some((cid, flags)) = self.sink.take() else { return };
        let Ok(slot) = self.slot(cid) else { return };
        slot.is_damaged |= !is_intact;
        if flags & FLAG_SUCCESS != 0 {
            self.finish(cid, Status::SUCCESS, 0);
        }
    }

    fn receive_completion(&mut self, completion: &CompletionEntry) -> Result<(), PduError> {
        let cid = completion.cid.get();
        let status = Status::from_field(completion.status.get());
        let slot = self.slot(cid).map_err(|error| PduError { offset: 20, ..error })?;
        let (entry, number) = (slot.entry, slot.number);
        let mut mark = 0;
        if let Some(secure) = &self.secure {
            let low = u32::from(completion.sq_id.get()) << 16 | u32::from(completion.sq_head.get());
            let outcome = outcome_of(&entry, status, nearest(self.mark, low));
            mark = outcome.mark;
            if secure.verify_completion(number, &outcome, &completion.result).is_err() {
                let detail = format!("command {number}, {status}");
                self.fail(Reason::CompletionMac, Some(entry.start_lba.get()), detail);
                return Ok(());
            }
        }
        self.mark = self.mark.max(mark);
        self.finish(cid, status, mark);
        Ok(())
    }

    fn finish(&mut self, cid: u16, mut status: Status, mut mark: u64) {
        let Some(mut slot) = self.slots.take(cid) else { return };
        let lba = slot.entry.start_lba.get();
        let number = slot.number;
        // Otherwise a controller that answers without reading could make the transmit queue grow
        // without limit: only outstanding commands may have bytes in it.
        if !self.transmit.has_left(slot.last) {
            let detail = "answered before it was sent".to_owned();
            self.fail(Reason::PduMalformed, Some(lba), detail);
            return;
        }
        if slot.is_damaged && status.is_success() {
            status = Status::TRANSIENT_TRANSPORT_ERROR;
        }
        if slot.entry.reads_blocks() && status.is_success() {
            let missing = slot.entry.sgl.length.get() as usize - slot.moved;
            if missing > 0 {
                let detail = format!("read succeeded with {missing} bytes missing");
                self.fail(Reason::PduMalformed, Some(lba), detail);
                return;
            }
            if let Some(secure) = &self.secure {
                for (index, block) in blocks_of(&mut slot.buffer).enumerate() {
                    let lba = lba + index as u64;
                    let verified =
                        secure.verify_sector(Direction::Read, number, index as u32, lba, block);
                    if verified.is_err() {
                        let detail = format!("read, command {number}, block {index}");
                        self.fail(Reason::SectorMac, Some(lba), detail);
                        return;
                    }
                }
            }
        }
        if slot.entry.transfer_direction() == Transfer::HostToController
            && status.is_success()
            && slot.entry.sgl.kind == SGL_TRANSPORT
            && slot.moved != slot.entry.sgl.length.get() as usize
        {
            let detail = "success before all data were requested".to_owned();
            self.fail(Reason::PduMalformed, Some(lba), detail);
            return;
        }
        if slot.entry.opcode == OPENINGS
            && let Some(openings) = Openings::decode(&slot.buffer)
        {
            self.mark = openings.now.log_flushed;
        }
        if let Some(Fused { partner, ended: other }) = slot.fused {
            let Some((other, other_mark)) = other else {
                if let Ok(Slot { fused: Some(fused), .. }) = self.slot(partner) {
                    fused.ended = Some((status, mark));
                }
                self.transmit.recycle(slot.buffer);
                return;
            };
            status = outcome_of_pair(status, other);
            mark = mark.max(other_mark);
        }
        let data = slot.buffer;
        self.events.push_back(HostEvent::Completed { tag: slot.tag, status, mark, data });
    }

    fn fail(&mut self, reason: Reason, lba: Option<u64>, detail: String) {
        self.is_failed = true;
        self.events.push_back(HostEvent::Failed { reason, lba, detail });
    }
}

impl StreamSink for HostQueue {
    fn place(&mut self) -> &mut [u8] {
        let left = self.reader.data_left();
        let Some((cid, _)) = self.sink.filter(|_| !self.is_failed) else { return &mut [] };
        let slot = self.slots.get_mut(cid);
        let place =
            slot.and_then(|slot| slot.buffer.get_mut(slot.moved..slot.moved.saturating_add(left)));
        place.unwrap_or_default()
    }

    fn placed(&mut self, bytes: usize) {
        let Some((cid, _)) = self.sink.filter(|_| bytes > 0) else { return };
        let slot = self.slots.get(cid);
        if let Some(data) = slot.and_then(|slot| slot.buffer.get(slot.moved..slot.moved + bytes)) {
            self.reader.skip(data);
            self.received(bytes);
            // This may complete the data.
            self.receive(&[]);
        }
    }

    fn receive(&mut self, mut input: &[u8]) {
        while !self.is_failed {
            let outcome = match self.reader.next(&mut input) {
                Ok(None) => return,
                Ok(Some(Piece::Header(header, _))) => self.receive_header(header),
                Ok(Some(Piece::Data(data))) => {
                    self.receive_data(data);
                    Ok(())
                }
                Ok(Some(Piece::End(is_intact))) => {
                    self.end_data(is_intact);
                    Ok(())
                }
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                self.transmit.put(&termination(true, error, self.reader.header()));
                self.fail(Reason::PduMalformed, None, error.to_string());
            }
        }
    }
}

/// The number nearest to `known` that has these low bits.
fn nearest(known: u64, low: u32) -> u64 {
    let distance = low.wrapping_sub(known as u32).cast_signed();
    known.wrapping_add_signed(distance.into())
}

/// The status of a fused pair: that of the command which caused the failure.
fn outcome_of_pair(one: Status, other: Status) -> Status {
    let is_consequence = |status: Status| {
        status.is_success() || status.code() == Status::ABORTED_FAILED_FUSED.code()
    };
    if is_consequence(one) && !other.is_success() { other } else { one }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "command_tests.rs"]
mod command_tests;

#[cfg(test)]
#[path = "malformed_tests.rs"]
mod malformed_tests;
