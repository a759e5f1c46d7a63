//! A controller's queue with a host that may do anything.

use std::collections::HashMap;

use sealane_proto::nvme::command::{
    COMPARE, DATASET_MANAGEMENT, FLAGS_SGL, FLUSH, READ, RESERVATION_ACQUIRE, RESERVATION_REGISTER,
    RESERVATION_RELEASE, RESERVATION_REPORT, SGL_IN_CAPSULE, SGL_TRANSPORT, Sgl, SubmissionEntry,
    VERIFY, WRITE, WRITE_IF, WRITE_ZEROES,
};
use sealane_proto::nvme::controller_queue::{
    Command, ControllerEvent, ControllerLimits, ControllerQueue, Operation, blocks_of,
};
use sealane_proto::nvme::operation::Access;
use sealane_proto::nvme::pdu::{
    CapsuleCmd, CommonHeader, DataHeader, Digests, FLAG_LAST, Header, PduLimits, kind,
};
use sealane_proto::nvme::reader::{PduReader, Piece};
use sealane_proto::nvme::status::Status;
use sealane_proto::nvme::transmit::{Data, TransmitQueue};
use sealane_proto::secure_queue::{CommandCounter, Direction, SecureQueue};
use sealane_proto::wire::IntoBytes;

use crate::script::Script;
use crate::{BLOCKS, block_bytes, feed, namespaces, sectors, secure};

const OPCODES: [u8; 12] = [
    FLUSH,
    WRITE,
    READ,
    COMPARE,
    WRITE_ZEROES,
    DATASET_MANAGEMENT,
    VERIFY,
    RESERVATION_REGISTER,
    RESERVATION_REPORT,
    RESERVATION_ACQUIRE,
    RESERVATION_RELEASE,
    WRITE_IF,
];
const DEPTH: u16 = 8;
const IN_CAPSULE_MAX: usize = 8400;
const H2C_DATA_MAX: usize = 8320;

/// Data requested by the controller and not sent yet.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    cid: u16,
    tag: u16,
    sent: usize,
    total: usize,
}

struct Run {
    queue: ControllerQueue,
    key: Option<SecureQueue>,
    counter: CommandCounter,
    digests: Digests,
    step: usize,
    /// Responses of the controller.
    answers: PduReader,
    wanted: Vec<Wanted>,
    entries: HashMap<u16, (u64, SubmissionEntry)>,
    handed_out: Vec<Command>,
    received: usize,
    sent_commands: usize,
    responses: usize,
    /// Raw bytes were fed in, so the number of outstanding commands is unknown.
    is_raw: bool,
}

pub fn run(data: &[u8], is_secure: bool) {
    let mut script = Script::new(data);
    let digests = Digests::from_field(script.byte());
    let limits = ControllerLimits {
        queue_depth: DEPTH,
        h2c_data_max: H2C_DATA_MAX,
        in_capsule_max: IN_CAPSULE_MAX,
        transfer_max: 16 * block_bytes(is_secure),
        success_flag: false,
        digests,
    };
    let answer_limits = PduLimits { capsule_data_max: 0, data_max: 1 << 20, digests };
    let namespaces = namespaces(is_secure, Access::Full);
    let mut run = Run {
        queue: ControllerQueue::new(limits, namespaces, is_secure.then(secure)),
        key: is_secure.then(secure),
        counter: CommandCounter::default(),
        digests,
        step: usize::from(script.byte()) * 16 + 1,
        answers: PduReader::new(answer_limits),
        wanted: Vec::new(),
        entries: HashMap::new(),
        handed_out: Vec::new(),
        received: 0,
        sent_commands: 0,
        responses: 0,
        is_raw: false,
    };
    while !script.is_empty() && !run.queue.is_failed() {
        run.turn(&mut script);
        run.look();
    }
}

impl Run {
    fn turn(&mut self, script: &mut Script<'_>) {
        match script.byte() % 10 {
            0 => {
                self.is_raw = true;
                let count = usize::from(script.byte());
                feed(&mut self.queue, script.take(count), self.step);
            }
            1..=3 => self.command(script),
            4 | 5 => self.data(script),
            6 | 7 => self.complete(script),
            8 => {
                self.queue.abort(u16::from(script.byte()) % DEPTH);
            }
            _ => {
                let access = match script.byte() % 3 {
                    0 => Access::Full,
                    1 => Access::ReadOnly,
                    _ => Access::Refused(Status::ANA_INACCESSIBLE),
                };
                self.queue.set_namespaces(namespaces(self.key.is_some(), access));
            }
        }
    }

    /// Sends a command that is valid unless the script says otherwise.
    fn command(&mut self, script: &mut Script<'_>) {
        let choice = script.byte();
        let opcode = OPCODES.get(usize::from(choice)).copied().unwrap_or(choice);
        let shape = script.byte();
        let cid = u16::from(script.byte()) % (DEPTH + 2);
        let (lba, blocks) = (u64::from(script.byte()), u32::from(script.byte() % 18));
        let odd = shape & 0x80 != 0;
        let cdw10_11 = match opcode {
            DATASET_MANAGEMENT => (lba % 4) | (1 << 34),
            RESERVATION_REGISTER..=RESERVATION_RELEASE => lba | u64::from(blocks) << 8,
            _ => lba,
        };
        let length = match opcode {
            FLUSH | WRITE_ZEROES | VERIFY => 0,
            DATASET_MANAGEMENT => (lba as usize % 4 + 1) * 16,
            RESERVATION_REGISTER | RESERVATION_ACQUIRE => 16,
            RESERVATION_RELEASE => 8,
            RESERVATION_REPORT => (lba as usize | (blocks as usize) << 8) * 4 + 4,
            _ => (blocks as usize + 1) * block_bytes(self.key.is_some()),
        };
        let length = if odd { length ^ usize::from(script.half()) } else { length };
        let in_capsule = opcode & 3 == 1 && length <= IN_CAPSULE_MAX && shape & 4 != 0;
        let mut entry = SubmissionEntry {
            opcode,
            flags: FLAGS_SGL | shape & 3,
            cid: cid.into(),
            nsid: if odd { u32::from(script.byte()) } else { 1 }.into(),
            sgl: Sgl {
                length: (length as u32).into(),
                kind: if in_capsule { SGL_IN_CAPSULE } else { SGL_TRANSPORT },
                ..Sgl::default()
            },
            start_lba: cdw10_11.into(),
            cdw12: (blocks | u32::from(shape & 0x38) << 27).into(),
            ..SubmissionEntry::default()
        };
        let mut data = if in_capsule { vec![0; length] } else { Vec::new() };
        let number = self.counter.take();
        if opcode == DATASET_MANAGEMENT {
            let list = script.take(data.len());
            data[..list.len()].copy_from_slice(list);
        } else if let Some(key) = &self.key {
            sectors(&mut data);
            stamp(key, number, 0, lba, &mut data);
        }
        if let Some(key) = &self.key {
            key.seal_command(number, &mut entry, &data);
        }
        let common = CommonHeader::new(kind::CAPSULE_CMD, 0, data.len(), self.digests);
        let mut out = TransmitQueue::default();
        let body = if data.is_empty() { Data::None } else { Data::Copied(&data) };
        out.put_pdu(CapsuleCmd { common, entry }.as_bytes(), body);
        let mut bytes = out.take();
        let is_changed = self.key.is_some() && shape & 0x40 != 0;
        if is_changed {
            let bit = usize::from(script.half()) % ((bytes.len() - 8) * 8);
            bytes[8 + bit / 8] ^= 1 << (bit % 8);
        }
        self.sent_commands += 1;
        self.entries.insert(cid, (number, entry));
        let before = self.received;
        feed(&mut self.queue, &bytes, self.step);
        self.look();
        assert!(!is_changed || self.received == before, "a changed command was handed out");
    }

    /// Sends data for one of the requests, or what the script says instead.
    fn data(&mut self, script: &mut Script<'_>) {
        let choice = script.byte();
        let Some(index) = usize::from(choice & 7).checked_rem(self.wanted.len()) else { return };
        let wanted = self.wanted[index];
        let left = wanted.total - wanted.sent;
        let length = left.min(H2C_DATA_MAX).min(usize::from(script.byte()) * 64 + 64);
        let is_last = length == left;
        let odd = choice & 0x80 != 0;
        let offset = if odd { u32::from(script.half()) } else { wanted.sent as u32 };
        let flags = if is_last != (choice & 0x40 != 0) { FLAG_LAST } else { 0 };
        let header = DataHeader {
            common: CommonHeader::new(kind::H2C_DATA, flags, length, self.digests),
            cid: wanted.cid.into(),
            tag: wanted.tag.into(),
            offset: offset.into(),
            length: (length as u32).into(),
            reserved: [0; 4],
        };
        let mut whole = vec![0; wanted.total];
        if let (Some(key), Some((number, entry))) = (&self.key, self.entries.get(&wanted.cid)) {
            sectors(&mut whole);
            stamp(key, *number, 0, entry.start_lba.get(), &mut whole);
        }
        let part = whole.get(wanted.sent..wanted.sent + length).unwrap_or_default();
        let mut out = TransmitQueue::default();
        out.put_pdu(header.as_bytes(), Data::Copied(part));
        if is_last {
            self.wanted.swap_remove(index);
        } else {
            self.wanted[index].sent += length;
        }
        let bytes = out.take();
        feed(&mut self.queue, &bytes, self.step);
    }

    fn complete(&mut self, script: &mut Script<'_>) {
        let choice = script.byte();
        let Some(index) = usize::from(choice & 7).checked_rem(self.handed_out.len()) else {
            return;
        };
        let command = self.handed_out.swap_remove(index);
        match (choice >> 3, command.operation) {
            (
                0..16,
                Operation::Read
                | Operation::FlushMilestone
                | Operation::Outcomes { .. }
                | Operation::Openings,
            ) => {
                // A milestone, or a list, comes in a block of its own.
                let bytes = command.blocks.max(1) as usize * block_bytes(self.key.is_some());
                let data = self.queue.buffer(bytes);
                self.queue.complete_read(command.slot, data);
            }
            (0..16, Operation::ReservationReport { .. }) => {
                self.queue.complete_data(command.slot, vec![1; usize::from(script.byte())]);
            }
            (0..16, _) => self.queue.complete(command.slot, Status::SUCCESS, Vec::new()),
            (16..24, _) => self.queue.complete(command.slot, Status::COMPARE_FAILURE, Vec::new()),
            (_, _) => self.queue.complete(command.slot, Status::WRITE_FAULT, Vec::new()),
        }
    }

    /// Checks the output: commands lie inside their namespace, responses are well formed and
    /// bounded.
    fn look(&mut self) {
        while let Some(event) = self.queue.next_event() {
            match event {
                ControllerEvent::Received(command) => {
                    self.received += 1;
                    check_command(&command, block_bytes(self.key.is_some()));
                    self.handed_out.push(command);
                }
                ControllerEvent::Failed { .. } => assert!(self.queue.is_failed()),
            }
        }
        let outstanding = self.queue.outstanding();
        assert!(outstanding < usize::from(DEPTH) && self.handed_out.len() <= outstanding);
        let bytes = self.queue.transmit().take();
        let mut input = &bytes[..];
        loop {
            match self.answers.next(&mut input).expect("a well-formed answer") {
                None => break,
                Some(Piece::Header(Header::R2t(request), _)) => self.wanted.push(Wanted {
                    cid: request.cid.get(),
                    tag: request.tag.get(),
                    sent: 0,
                    total: request.length.get() as usize,
                }),
                Some(Piece::Header(Header::CapsuleResp(_), _)) => self.responses += 1,
                Some(Piece::End(is_intact)) => assert!(is_intact),
                Some(_) => {}
            }
        }
        if !self.is_raw && !self.queue.is_failed() {
            assert_eq!(self.responses + outstanding, self.sent_commands, "one answer for each");
        }
    }
}

fn check_command(command: &Command, block_bytes: usize) {
    let end = command.lba.checked_add(u64::from(command.blocks));
    assert!(end.is_some_and(|end| end <= BLOCKS));
    let bytes = command.blocks as usize * block_bytes;
    match &command.operation {
        Operation::Write(data) | Operation::Compare(data) | Operation::WriteIf(data) => {
            assert!(data.len() == bytes && bytes > 0);
        }
        Operation::CompareAndWrite { expected, data } => {
            assert!(data.len() == bytes && expected.len() == bytes && command.blocks == 1);
        }
        Operation::Deallocate(ranges) => {
            assert!((1..=256).contains(&ranges.len()));
            let is_inside = |lba: u64, blocks| {
                lba.checked_add(u64::from(blocks)).is_some_and(|end| end <= BLOCKS)
            };
            assert!(ranges.iter().all(|range| is_inside(range.lba, range.blocks)));
        }
        _ => {}
    }
}

fn stamp(key: &SecureQueue, number: u64, first: u32, lba: u64, data: &mut [u8]) {
    for (index, block) in (first..).zip(blocks_of(data)) {
        let lba = lba.wrapping_add(u64::from(index));
        key.stamp_sector(Direction::Write, number, index, lba, block);
    }
}
