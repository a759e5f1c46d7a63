//! A host's queue with a controller that may do anything.

use std::collections::{HashMap, HashSet};

use sealane_proto::nvme::command::{CompletionEntry, READ, SubmissionEntry};
use sealane_proto::nvme::controller_queue::blocks_of;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::{HostEvent, HostLimits, HostQueue};
use sealane_proto::nvme::operation::LbaRange;
use sealane_proto::nvme::pdu::{
    CapsuleResp, CommonHeader, DataHeader, Digests, FLAG_LAST, FLAG_SUCCESS, Header, PduLimits,
    R2t, kind,
};
use sealane_proto::nvme::reader::{PduReader, Piece};
use sealane_proto::nvme::status::Status;
use sealane_proto::nvme::transmit::{Data, TransmitQueue};
use sealane_proto::secure_queue::{CommandCounter, Direction, Outcome, SecureQueue};
use sealane_proto::wire::IntoBytes;

use crate::script::Script;
use crate::{block_bytes, feed, sectors, secure};

const DEPTH: u16 = 8;
const TRANSFER_BLOCKS: u32 = 4;

struct Run {
    queue: HostQueue,
    key: Option<SecureQueue>,
    counter: CommandCounter,
    digests: Digests,
    step: usize,
    /// Capsules sent by the host.
    capsules: PduReader,
    entries: HashMap<u16, (u64, SubmissionEntry)>,
    next_tag: u64,
    outstanding: HashSet<u64>,
    is_failed: bool,
}

pub fn run(data: &[u8], is_secure: bool) {
    let mut script = Script::new(data);
    let digests = Digests::from_field(script.byte());
    let block_bytes = block_bytes(is_secure);
    let limits = HostLimits {
        queue_depth: DEPTH,
        h2c_data_max: 3 * block_bytes,
        transfer_max: TRANSFER_BLOCKS as usize * block_bytes,
        in_capsule_max: 2 * block_bytes,
        block_bytes,
        nsid: 1,
        digests,
    };
    let data_max = limits.transfer_max;
    let mut run = Run {
        queue: HostQueue::new(limits, is_secure.then(secure)),
        key: is_secure.then(secure),
        counter: CommandCounter::default(),
        digests,
        step: usize::from(script.byte()) * 16 + 1,
        capsules: PduReader::new(PduLimits { capsule_data_max: data_max, data_max, digests }),
        entries: HashMap::new(),
        next_tag: 0,
        outstanding: HashSet::new(),
        is_failed: false,
    };
    while !script.is_empty() && !run.is_failed {
        run.turn(&mut script, block_bytes);
        run.look();
    }
}

impl Run {
    fn turn(&mut self, script: &mut Script<'_>, block_bytes: usize) {
        match script.byte() % 8 {
            0 => {
                let count = usize::from(script.byte());
                feed(&mut self.queue, script.take(count), self.step);
            }
            1 | 2 => self.submit(script, block_bytes),
            3 => self.request(script),
            4 | 5 => self.data(script),
            _ => self.respond(script),
        }
    }

    fn submit(&mut self, script: &mut Script<'_>, block_bytes: usize) {
        let (choice, lba) = (script.byte(), u64::from(script.byte()));
        let blocks = u32::from(choice >> 4) % (TRANSFER_BLOCKS + 2);
        let is_forced = choice & 8 != 0;
        let mut data = vec![0; blocks as usize * block_bytes];
        sectors(&mut data);
        let command = match choice % 8 {
            0 => HostCommand::Read { lba, blocks },
            1 if lba & 0x80 != 0 => HostCommand::WriteKept { lba, sectors: data.into(), is_forced },
            1 => HostCommand::Write { lba, data, is_forced },
            2 => HostCommand::Flush,
            3 => HostCommand::WriteZeroes { lba, blocks, deallocate: is_forced },
            4 => HostCommand::Deallocate(vec![LbaRange { lba, blocks }; blocks as usize]),
            5 => HostCommand::Compare { lba, data },
            6 => HostCommand::CompareAndWrite { lba, expected: data.clone(), data },
            _ if self.key.is_some() => HostCommand::WriteIf { lba, data, is_forced },
            _ => HostCommand::Verify { lba, blocks },
        };
        if self.queue.submit(self.next_tag, command).is_ok() {
            self.outstanding.insert(self.next_tag);
            self.next_tag += 1;
        }
    }

    fn send(&mut self, header: &[u8], data: Data<'_>) {
        let mut out = TransmitQueue::default();
        out.put_pdu(header, data);
        let bytes = out.take();
        feed(&mut self.queue, &bytes, self.step);
    }

    fn cid(script: &mut Script<'_>) -> u16 {
        u16::from(script.byte()) % DEPTH
    }

    fn total(&self, cid: u16) -> usize {
        self.entries.get(&cid).map_or(0, |(_, entry)| entry.sgl.length.get() as usize)
    }

    fn request(&mut self, script: &mut Script<'_>) {
        let (cid, choice) = (Self::cid(script), script.byte());
        let total = self.total(cid);
        let (offset, length) = match choice {
            0..128 => (0, total),
            128..192 => (usize::from(script.half()), usize::from(script.half())),
            _ => (total / 2 * usize::from(choice & 1), total / 2),
        };
        let request = R2t {
            common: CommonHeader::new(kind::R2T, 0, 0, self.digests),
            cid: cid.into(),
            tag: script.half().into(),
            offset: (offset as u32).into(),
            length: (length as u32).into(),
            reserved: [0; 4],
        };
        self.send(request.as_bytes(), Data::None);
    }

    fn data(&mut self, script: &mut Script<'_>) {
        let (cid, choice) = (Self::cid(script), script.byte());
        let total = self.total(cid);
        let mut whole = vec![0; total];
        sectors(&mut whole);
        if let (Some(key), Some((number, entry))) = (&self.key, self.entries.get(&cid)) {
            let lba = entry.start_lba.get();
            for (index, block) in (0u32..).zip(blocks_of(&mut whole)) {
                let lba = lba.wrapping_add(u64::from(index));
                key.stamp_sector(Direction::Read, *number, index, lba, block);
            }
            if choice & 0x40 != 0 && !whole.is_empty() {
                let at = usize::from(script.half()) % whole.len();
                whole[at] ^= 1;
            }
        }
        let (offset, length) = if choice & 0x80 != 0 {
            (usize::from(script.half()), usize::from(script.half()))
        } else {
            (0, total)
        };
        let part = whole.get(offset..offset + length).unwrap_or(&whole);
        let flags = ((choice & 1) * FLAG_LAST) | (((choice >> 1) & 1) * FLAG_SUCCESS);
        let header = DataHeader {
            common: CommonHeader::new(kind::C2H_DATA, flags, part.len(), self.digests),
            cid: cid.into(),
            tag: 0.into(),
            offset: (offset as u32).into(),
            length: (part.len() as u32).into(),
            reserved: [0; 4],
        };
        let body = if part.is_empty() { Data::None } else { Data::Copied(part) };
        self.send(header.as_bytes(), body);
    }

    fn respond(&mut self, script: &mut Script<'_>) {
        let (cid, choice) = (Self::cid(script), script.byte());
        let status = match choice % 4 {
            0 | 1 => Status::SUCCESS,
            2 => Status::COMPARE_FAILURE,
            _ => Status::from_field(script.half()),
        };
        let mut entry = CompletionEntry {
            cid: cid.into(),
            status: status.field().into(),
            ..CompletionEntry::default()
        };
        let mut is_forged = false;
        if let (Some(key), Some((number, command))) = (&self.key, self.entries.get(&cid)) {
            let counts = command.has_block_range() && status.is_success();
            let outcome = Outcome {
                opcode: command.opcode,
                flags: command.flags,
                start_lba: command.start_lba.get(),
                block_count: if counts { command.block_count() } else { 0 },
                status,
                mark: 0,
            };
            entry.result = key.completion_mac(*number, &outcome);
            if choice & 0x40 != 0 {
                entry.result[usize::from(choice >> 3 & 7)] ^= 1;
                is_forged = true;
            }
        }
        let common = CommonHeader::new(kind::CAPSULE_RESP, 0, 0, self.digests);
        let before = self.outstanding.len();
        self.send(CapsuleResp { common, entry }.as_bytes(), Data::None);
        self.look();
        assert!(!is_forged || self.outstanding.len() == before, "a forged completion counted");
    }

    /// Checks the output: every command ends at most once, capsules are well formed.
    fn look(&mut self) {
        while let Some(event) = self.queue.next_event() {
            match event {
                HostEvent::Completed { tag, .. } => {
                    assert!(self.outstanding.remove(&tag), "a command ended twice");
                }
                HostEvent::Failed { .. } => {
                    self.is_failed = true;
                    assert!(!self.queue.can_submit());
                }
            }
        }
        assert!(self.queue.outstanding() < usize::from(DEPTH));
        let bytes = self.queue.transmit().take();
        let mut input = &bytes[..];
        while let Some(piece) = self.capsules.next(&mut input).expect("a well-formed PDU") {
            match piece {
                Piece::Header(Header::CapsuleCmd(capsule), _) => {
                    let number = self.counter.take();
                    self.entries.insert(capsule.entry.cid.get(), (number, capsule.entry));
                }
                Piece::End(is_intact) => assert!(is_intact),
                _ => {}
            }
        }
        if self.is_failed {
            return;
        }
        // A read never transfers more than was asked for.
        assert!(self.entries.values().all(|(_, entry)| entry.opcode != READ
            || entry.sgl.length.get() as usize <= TRANSFER_BLOCKS as usize * 4160));
    }
}
