//! Intake of commands, from the capsule to being handed out: checks, data, fused pairs.

use zerocopy::IntoBytes;

use super::super::command::{
    DATASET_MANAGEMENT, FORCE_UNIT_ACCESS, FUSED, FUSED_FIRST, FUSED_SECOND, SENT_AGAIN,
    SGL_IN_CAPSULE, SubmissionEntry, WRITE, WRITE_IF, WRITE_ZEROES,
};
use super::super::pdu::{CommonHeader, DataHeader, FLAG_LAST, Header, PduError, R2t, kind};
use super::super::status::Status;
use super::super::transmit::Data;
use super::{
    Command, ControllerEvent, ControllerQueue, Operation, Pair, Reason, Sink, Slot, Stage,
    Unverified, blocks_of,
};
use crate::sector::{BLOCK_BYTES, check_conditional, check_written};
use crate::secure_queue::{Direction, SecureQueue};

impl ControllerQueue {
    /// Ends a command that hasn't been handed out: at once if none of its data are in flight,
    /// otherwise when they have arrived. The other command of its pair fails, too.
    pub(super) fn end_early(&mut self, index: u16, status: Status) {
        let Some(slot) = self.slot_mut(index) else { return };
        let partner = slot.partner.take();
        match slot.stage {
            Stage::InCapsule | Stage::Receiving => {
                slot.verdict.get_or_insert(status);
                if self.pair == Pair::First(index) {
                    self.pair = Pair::Failed;
                }
            }
            Stage::Unasked | Stage::Ready | Stage::Executing => {
                if let Some(slot) = self.take(index) {
                    self.transmit.recycle(slot.buffer);
                    self.respond(&slot.entry, slot.number, status);
                    self.ask();
                }
            }
        }
        if let Some(partner) = partner {
            if let Some(other) = self.slot_mut(partner) {
                other.partner = None;
            }
            self.end_early(partner, Status::ABORTED_FAILED_FUSED);
        }
    }

    pub(super) fn receive_header(&mut self, header: Header, data: usize) -> Result<(), PduError> {
        self.sink = Sink::Discard;
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
        if self.secure.is_some() && entry.opcode == DATASET_MANAGEMENT && data > 0 {
            let list = self.transmit.buffer(data);
            self.unverified = Some(Unverified { entry, number, list, received: 0 });
            self.sink = Sink::List;
            return Ok(());
        }
        if !self.verify_command(number, &entry, &[]) {
            return Ok(());
        }
        if let Some(index) = self.admit(entry, number, data)? {
            if data > 0 {
                let buffer = self.transmit.buffer(data);
                self.sink = Sink::Slot(index);
                if let Some(slot) = self.slot_mut(index) {
                    slot.buffer = buffer;
                }
            } else {
                self.proceed(index);
            }
        }
        Ok(())
    }

    fn verify_command(&mut self, number: u64, entry: &SubmissionEntry, list: &[u8]) -> bool {
        let Some(secure) = &self.secure else { return true };
        if secure.verify_command(number, entry, list).is_ok() {
            return true;
        }
        let detail = format!("command {number}, opcode {:#04x}", entry.opcode);
        self.fail(Reason::CommandMac, Some(entry.start_lba.get()), detail);
        false
    }

    /// Checks an authentic command and gives it a slot; `None` if it was answered.
    fn admit(
        &mut self,
        entry: SubmissionEntry,
        number: u64,
        data: usize,
    ) -> Result<Option<u16>, PduError> {
        self.head = (self.head + 1) % self.limits.queue_depth.max(2);
        let role = entry.flags & FUSED;
        let pair = self.pair;
        if let Pair::First(first) = pair
            && role != FUSED_SECOND
        {
            self.end_early(first, Status::ABORTED_MISSING_FUSED.final_());
        }
        self.pair = Pair::None;
        let wanted = match self.check(&entry, data, pair) {
            Ok(wanted) => wanted,
            Err(status) => {
                self.respond(&entry, number, status);
                match (role, pair) {
                    (FUSED_FIRST, _) => self.pair = Pair::Failed,
                    (FUSED_SECOND, Pair::First(first)) => {
                        self.end_early(first, Status::ABORTED_FAILED_FUSED);
                    }
                    _ => {}
                }
                return Ok(None);
            }
        };
        let slot = Slot {
            entry,
            number,
            buffer: Vec::new(),
            received: 0,
            wanted,
            stage: if data > 0 { Stage::InCapsule } else { Stage::Unasked },
            verdict: None,
            partner: match (role, pair) {
                (FUSED_SECOND, Pair::First(first)) => Some(first),
                _ => None,
            },
        };
        let (cid, first) = (entry.cid.get(), slot.partner);
        let index = self.slots.insert(slot);
        let index = index.ok_or(PduError::sequence("more commands than the queue holds"))?;
        if let Some(place) = self.cids.get_mut(usize::from(index)) {
            *place = Some(cid);
        }
        if role == FUSED_FIRST {
            self.pair = Pair::First(index);
        }
        if let Some(first) = first.and_then(|first| self.slot_mut(first)) {
            first.partner = Some(index);
        }
        Ok(Some(index))
    }

    fn check(&self, entry: &SubmissionEntry, data: usize, pair: Pair) -> Result<usize, Status> {
        if self.cids.contains(&Some(entry.cid.get())) {
            return Err(Status::COMMAND_ID_CONFLICT.final_());
        }
        if entry.flags & FUSED == FUSED_SECOND && pair == Pair::Failed {
            return Err(Status::ABORTED_FAILED_FUSED);
        }
        let wanted = self.rules().check(entry, data)?;
        if entry.flags & FUSED == FUSED_SECOND {
            let Pair::First(first) = pair else {
                return Err(Status::ABORTED_MISSING_FUSED.final_());
            };
            let first = self.slots.get(first);
            let same = |first: &Slot| {
                first.entry.nsid == entry.nsid
                    && first.entry.start_lba == entry.start_lba
                    && first.entry.block_count() == entry.block_count()
            };
            if !first.is_some_and(same) {
                return Err(Status::INVALID_FIELD.final_());
            }
        }
        Ok(wanted)
    }

    /// Moves a command with a complete capsule to its next stage.
    fn proceed(&mut self, index: u16) {
        let Some(slot) = self.slot_mut(index) else { return };
        let partner = slot.partner;
        if slot.wanted == 0 {
            self.finish(index);
            return;
        }
        if self.pair == Pair::First(index) {
            return; // requested with the second's data, so none are in flight if it never arrives
        }
        let waits = |slot: Option<&mut Slot>| slot.is_some_and(|slot| slot.stage == Stage::Unasked);
        for index in partner.into_iter().chain([index]) {
            if waits(self.slot_mut(index)) && !self.unasked.contains(&index) {
                self.unasked.push_back(index);
            }
        }
        self.ask();
    }

    /// Requests the data of waiting commands, in order, as far as the window allows.
    pub(super) fn ask(&mut self) {
        while let Some(&index) = self.unasked.front() {
            let (window, window_used) = (self.window, self.window_used);
            let Some(slot) = self.slot_mut(index) else {
                self.unasked.pop_front();
                continue;
            };
            let (bytes, cid) = (slot.wanted, slot.entry.cid);
            if window_used > 0 && window_used + bytes > window {
                return;
            }
            self.unasked.pop_front();
            self.window_used += bytes;
            let buffer = self.transmit.buffer(bytes);
            if let Some(slot) = self.slot_mut(index) {
                slot.buffer = buffer;
                slot.stage = Stage::Receiving;
            }
            let request = R2t {
                common: CommonHeader::new(kind::R2T, 0, 0, self.limits.digests),
                cid,
                tag: index.into(),
                offset: 0.into(),
                length: (bytes as u32).into(),
                reserved: [0; 4],
            };
            self.transmit.put_pdu(request.as_bytes(), Data::None);
        }
    }

    fn receive_data_header(&mut self, header: &DataHeader) -> Result<(), PduError> {
        let index = header.tag.get();
        let slot = self.slots.get(index);
        let slot = slot.filter(|slot| slot.stage == Stage::Receiving);
        let slot = slot.ok_or(PduError::field(10, "transfer tag without requested data"))?;
        if slot.entry.cid != header.cid {
            return Err(PduError::field(8, "command id that doesn't match the transfer tag"));
        }
        let length = header.length.get() as usize;
        let offset = header.offset.get() as usize;
        if offset.checked_add(length).is_none_or(|end| end > slot.wanted) {
            return Err(PduError::range("data outside the requested range"));
        }
        if offset != slot.received {
            return Err(PduError::sequence("data out of order"));
        }
        let ends = offset + length == slot.wanted;
        if ends != (header.common.flags & FLAG_LAST != 0) {
            return Err(PduError::field(1, "last-PDU flag in the wrong place"));
        }
        self.sink = Sink::Slot(index);
        Ok(())
    }

    pub(super) fn receive_data(&mut self, data: &[u8]) {
        let (buffer, received) = match self.sink {
            Sink::Discard => return,
            Sink::Slot(index) => match self.slot_mut(index) {
                Some(slot) => (&mut slot.buffer, &mut slot.received),
                None => return,
            },
            Sink::List => match &mut self.unverified {
                Some(unverified) => (&mut unverified.list, &mut unverified.received),
                None => return,
            },
        };
        if let Some(place) = buffer.get_mut(*received..*received + data.len()) {
            place.copy_from_slice(data);
            *received += data.len();
        }
    }

    /// The data of a PDU are complete.
    pub(super) fn end_data(&mut self, is_intact: bool) -> Result<(), PduError> {
        match std::mem::replace(&mut self.sink, Sink::Discard) {
            Sink::Discard => {}
            Sink::Slot(index) => {
                let Some(slot) = self.slot_mut(index) else { return Ok(()) };
                let is_complete = slot.received == slot.wanted;
                if !is_intact {
                    self.end_early(index, Status::TRANSIENT_TRANSPORT_ERROR);
                }
                if is_complete {
                    self.finish(index);
                }
            }
            Sink::List => {
                let Some(Unverified { entry, number, list, .. }) = self.unverified.take() else {
                    return Ok(());
                };
                if !self.verify_command(number, &entry, &list) {
                    return Ok(());
                }
                let Some(index) = self.admit(entry, number, list.len())? else { return Ok(()) };
                if !is_intact {
                    self.end_early(index, Status::TRANSIENT_TRANSPORT_ERROR);
                }
                if let Some(slot) = self.slot_mut(index) {
                    slot.received = list.len();
                    slot.buffer = list;
                }
                self.finish(index);
            }
        }
        Ok(())
    }

    /// All bytes of a command have arrived: verifies them and hands out the command or its pair.
    fn finish(&mut self, index: u16) {
        let Some(slot) = self.slot_mut(index) else { return };
        if let Some(status) = slot.verdict {
            self.end_unexecuted(index, status);
            return;
        }
        if let Err(status) = self.check_data(index) {
            self.end_unexecuted(index, status);
            return;
        }
        if self.is_failed {
            return;
        }
        let Some(slot) = self.slot_mut(index) else { return };
        slot.stage = Stage::Ready;
        if slot.entry.flags & FUSED == 0 {
            self.hand_out(index);
            return;
        }
        let Some(partner) = slot.partner else { return };
        let is_ready = |slot: &mut Slot| slot.stage == Stage::Ready;
        if self.slot_mut(partner).is_some_and(is_ready) {
            self.hand_out_pair(index, partner);
        }
    }

    fn end_unexecuted(&mut self, index: u16, status: Status) {
        if let Some(slot) = self.slot_mut(index) {
            slot.stage = Stage::Ready;
        }
        self.end_early(index, status);
    }

    /// Verifies the sectors of a command on a secure queue, and that its namespace still accepts
    /// it.
    fn check_data(&mut self, index: u16) -> Result<(), Status> {
        let slot = self.slots.get_mut(index);
        let Some(slot) = slot.filter(|slot| slot.wanted > 0) else { return Ok(()) };
        let (entry, wanted) = (slot.entry, slot.wanted);
        if let Some(secure) = self.secure.as_ref().filter(|_| entry.has_block_range()) {
            if let Err(block) = verify_sectors(secure, slot) {
                let detail = format!("write, command {}, block {block}", slot.number);
                self.fail(Reason::SectorMac, Some(entry.start_lba.get() + block), detail);
                return Ok(());
            }
            let check = if entry.opcode == WRITE_IF { check_conditional } else { check_written };
            let blocks = slot.buffer.as_chunks::<BLOCK_BYTES>().0;
            if blocks.iter().any(|block| check(block).is_err()) {
                return Err(Status::from(Reason::SectorFormat));
            }
        }
        let carried = if entry.sgl.kind == SGL_IN_CAPSULE { wanted } else { 0 };
        self.rules().check(&entry, carried).map(|_| ())
    }

    fn hand_out(&mut self, index: u16) {
        let Some(slot) = self.slot_mut(index) else { return };
        let entry = slot.entry;
        let data = std::mem::take(&mut slot.buffer);
        match self.rules().operation(&entry, data) {
            Ok(Some(operation)) => self.event(index, &entry, operation),
            Ok(None) => self.end_early(index, Status::SUCCESS),
            Err(status) => self.end_early(index, status),
        }
    }

    fn hand_out_pair(&mut self, one: u16, other: u16) {
        let role =
            |queue: &mut Self, index| queue.slot_mut(index).map(|slot| slot.entry.flags & FUSED);
        let is_first = role(self, one) == Some(FUSED_FIRST);
        let (first, second) = if is_first { (one, other) } else { (other, one) };
        let Some(slot) = self.slot_mut(second) else { return };
        let data = std::mem::take(&mut slot.buffer);
        let control = slot.entry.cdw12;
        slot.stage = Stage::Executing;
        let Some(slot) = self.slot_mut(first) else { return };
        let expected = std::mem::take(&mut slot.buffer);
        // Force unit access is taken from the write.
        let entry = SubmissionEntry { opcode: WRITE, cdw12: control, ..slot.entry };
        self.event(first, &entry, Operation::CompareAndWrite { expected, data });
    }

    fn event(&mut self, slot: u16, entry: &SubmissionEntry, operation: Operation) {
        let mut number = 0;
        if let Some(slot) = self.slot_mut(slot) {
            slot.stage = Stage::Executing;
            number = slot.number;
        }
        let (lba, blocks) = if entry.has_block_range() {
            (entry.start_lba.get(), entry.block_count())
        } else {
            (0, 0)
        };
        let writes = matches!(entry.opcode, WRITE | WRITE_ZEROES | WRITE_IF);
        let is_forced = writes && entry.cdw12.get() & FORCE_UNIT_ACCESS != 0;
        let may_be_sent_again = matches!(entry.opcode, WRITE | DATASET_MANAGEMENT);
        let is_sent_again = may_be_sent_again && entry.cdw13.get() & SENT_AGAIN != 0;
        let (nsid, cid) = (entry.nsid.get(), entry.cid.get());
        let command =
            Command { slot, nsid, operation, lba, blocks, is_forced, is_sent_again, number, cid };
        self.events.push_back(ControllerEvent::Received(command));
    }
}

/// Verifies the sectors of a command; an error gives the index of the first wrong one.
fn verify_sectors(secure: &SecureQueue, slot: &mut Slot) -> Result<(), u64> {
    let start = slot.entry.start_lba.get();
    for (index, block) in blocks_of(&mut slot.buffer).enumerate() {
        let (direction, lba) = (Direction::Write, start + index as u64);
        secure
            .verify_sector(direction, slot.number, index as u32, lba, block)
            .map_err(|_| index as u64)?;
    }
    Ok(())
}
