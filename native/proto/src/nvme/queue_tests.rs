//! The state machines of both sides against each other, with an adversary between them.

use std::sync::Arc;

use proptest::prelude::*;

use super::super::controller_queue::{
    Command, ControllerEvent, ControllerLimits, ControllerQueue, Operation,
};
use super::super::operation::{Access, CommandSet, NamespaceFormat};
use super::*;
use crate::aead::Secret;
use crate::freshness::milestone::Milestone;
use crate::freshness::openings::{OPENINGS_BYTES, Openings};
use crate::nvme::command::{READ, WRITE};
use crate::nvme::pdu::COMMON_BYTES;
use crate::sector::{
    BLOCK_BYTES, CounterRange, DATA_BYTES, SealKey, VolumeIdentity, is_unwritten, set_unwritten,
};
use crate::secure_queue::QueueContext;

pub(super) const BLOCKS: u64 = 64;

pub(super) fn secure(queue_id: u16) -> SecureQueue {
    let context = QueueContext {
        volume_id: [1; 16],
        host_nqn: "nqn.2026-11.dev.sealane:host".into(),
        queue_id,
        association_epoch: 1,
        incarnation: 1,
    };
    SecureQueue::new(&Secret::take(&mut [8; 32]), &context)
}

/// Feeds bytes as a connection does: into their place if there is one, otherwise in portions.
pub(super) fn feed(queue: &mut impl StreamSink, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let place = queue.place();
        let (placed, rest) = bytes.split_at(place.len().min(bytes.len()));
        place[..placed.len()].copy_from_slice(placed);
        queue.placed(placed.len());
        let (portion, rest) = rest.split_at(rest.len().min(1000));
        queue.receive(portion);
        bytes = rest;
    }
}

/// Namespace 1 with every command.
pub(super) fn everything(block_bytes: usize) -> Vec<NamespaceFormat> {
    let commands = [
        CommandSet::COMPARE,
        CommandSet::WRITE_ZEROES,
        CommandSet::DEALLOCATE,
        CommandSet::VERIFY,
        CommandSet::FUSED,
        CommandSet::RESERVATIONS,
        CommandSet::WRITE_IF,
    ];
    let commands = commands.into_iter().fold(CommandSet::NONE, CommandSet::with);
    vec![NamespaceFormat {
        nsid: 1,
        block_bytes,
        block_count: BLOCKS,
        commands,
        access: Access::Full,
    }]
}

/// Host, controller and stored blocks; bytes move only on request of the test.
pub(super) struct World {
    pub(super) host: HostQueue,
    pub(super) controller: ControllerQueue,
    store: Vec<Option<Vec<u8>>>,
    /// Mark of the next change.
    mark: u64,
    block_bytes: usize,
    done: Vec<HostEvent>,
    ended: Vec<ControllerEvent>,
}

impl World {
    pub(super) fn new(queue_id: Option<u16>, success_flag: bool) -> Self {
        Self::with_digests(queue_id, success_flag, Digests::default())
    }

    pub(super) fn with_digests(
        queue_id: Option<u16>,
        success_flag: bool,
        digests: Digests,
    ) -> Self {
        let block_bytes = if queue_id.is_some() { BLOCK_BYTES } else { DATA_BYTES };
        let controller = ControllerLimits {
            queue_depth: 8,
            h2c_data_max: 3 * block_bytes,
            transfer_max: 8 * block_bytes,
            in_capsule_max: 8192,
            success_flag,
            digests,
        };
        let [namespace] = everything(block_bytes)[..] else { unreachable!() };
        let namespace = NamespaceFormat { commands: CommandSet::NONE, ..namespace };
        let host = HostLimits {
            queue_depth: 8,
            h2c_data_max: 3 * block_bytes,
            transfer_max: 8 * block_bytes,
            in_capsule_max: 8192,
            block_bytes,
            nsid: 1,
            digests,
        };
        Self {
            host: HostQueue::new(host, queue_id.map(secure)),
            controller: ControllerQueue::new(controller, vec![namespace], queue_id.map(secure)),
            store: vec![None; BLOCKS as usize],
            mark: 0,
            block_bytes,
            done: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// With a secure controller that requests so many blocks at once, and a host that sends them.
    fn requesting(mut self, blocks: usize) -> Self {
        let h2c_data_max = blocks * BLOCK_BYTES;
        self.host.limits.h2c_data_max = h2c_data_max;
        let limits = ControllerLimits { h2c_data_max, ..self.controller.limits };
        self.controller = ControllerQueue::new(limits, everything(BLOCK_BYTES), Some(secure(1)));
        self
    }

    fn execute(&mut self, command: Command) {
        let start = command.lba as usize;
        match command.operation {
            Operation::Flush => self.controller.complete(command.slot, Status::SUCCESS, Vec::new()),
            Operation::Write(data) => {
                for (index, block) in data.chunks(self.block_bytes).enumerate() {
                    self.store[start + index] = Some(block.to_vec());
                }
                self.controller.complete_change(command.slot, Status::SUCCESS, self.mark, data);
            }
            Operation::Openings => {
                let now = Milestone { opening: [1; 16], checkpoint: 1, log_flushed: self.mark };
                let openings = Openings { now, earlier: Vec::new() };
                let mut data = vec![0; BLOCK_BYTES];
                data[..OPENINGS_BYTES].copy_from_slice(&openings.encode());
                self.controller.complete_read(command.slot, data);
            }
            Operation::Read => {
                let bytes = command.blocks as usize * self.block_bytes;
                let mut data = self.controller.buffer(bytes);
                for (index, block) in data.chunks_mut(self.block_bytes).enumerate() {
                    match &self.store[start + index] {
                        Some(stored) => block.copy_from_slice(stored),
                        None => match <&mut [u8; BLOCK_BYTES]>::try_from(&mut *block) {
                            Ok(sector) => set_unwritten(sector),
                            Err(_) => block.fill(0),
                        },
                    }
                }
                self.controller.complete_read(command.slot, data);
            }
            other => panic!("not in the command set: {other:?}"),
        }
    }

    fn feed_controller(&mut self, bytes: &[u8]) {
        feed(&mut self.controller, bytes);
        while let Some(event) = self.controller.next_event() {
            match event {
                ControllerEvent::Received(command) => self.execute(command),
                failed @ ControllerEvent::Failed { .. } => self.ended.push(failed),
            }
        }
    }

    fn feed_host(&mut self, bytes: &[u8]) {
        feed(&mut self.host, bytes);
        while let Some(event) = self.host.next_event() {
            self.done.push(event);
        }
    }

    fn sent_by_host(&mut self) -> Vec<u8> {
        self.host.transmit().take()
    }

    fn sent_by_controller(&mut self) -> Vec<u8> {
        self.controller.transmit().take()
    }

    fn run(&mut self) {
        while self.host.transmit().pending_bytes() + self.controller.transmit().pending_bytes() > 0
        {
            let bytes = self.sent_by_host();
            self.feed_controller(&bytes);
            let bytes = self.sent_by_controller();
            self.feed_host(&bytes);
        }
    }

    fn refusal(&self) -> Option<Reason> {
        self.ended.iter().find_map(|event| match event {
            ControllerEvent::Failed { reason, .. } => Some(*reason),
            ControllerEvent::Received(_) => None,
        })
    }

    fn host_refusal(&self) -> Option<Reason> {
        self.done.iter().find_map(|event| match event {
            HostEvent::Failed { reason, .. } => Some(*reason),
            HostEvent::Completed { .. } => None,
        })
    }

    fn completed(&self, wanted: u64) -> Option<(Status, &[u8])> {
        self.done.iter().find_map(|event| match event {
            HostEvent::Completed { tag, status, data, .. } if *tag == wanted => {
                Some((*status, &data[..]))
            }
            _ => None,
        })
    }
}

#[test]
fn marks_are_complete_and_authentic_however_large_they_are() {
    let written = |world: &mut World, tag| {
        world.host.submit(tag, write(0, sealed(1, 0))).unwrap();
        world.run();
        world.done.iter().find_map(|event| match event {
            HostEvent::Completed { tag: ended, mark, .. } if *ended == tag => Some(*mark),
            _ => None,
        })
    };
    let mut world = World::new(Some(1), false);
    world.mark = 0x12_ffff_fff0;
    world.host.submit(1, HostCommand::Openings).unwrap();
    world.run();
    assert_eq!(written(&mut world, 2), Some(0x12_ffff_fff0));
    world.mark = 0x13_0000_0010;
    assert_eq!(written(&mut world, 3), Some(0x13_0000_0010));
    world.mark -= 1;
    assert_eq!(written(&mut world, 4), Some(0x13_0000_000f), "an answer that was overtaken");
    // The low and the high half of the transmitted mark.
    for place in [16, 18] {
        let mut world = World::new(Some(1), false);
        world.mark = 7;
        world.host.submit(1, write(0, sealed(1, 0))).unwrap();
        let bytes = world.sent_by_host();
        world.feed_controller(&bytes);
        let mut bytes = world.sent_by_controller();
        bytes[place] ^= 1;
        world.feed_host(&bytes);
        assert_eq!(world.host_refusal(), Some(Reason::CompletionMac));
    }
    // A queue that doesn't know the store's openings can't complete a mark.
    let mut world = World::new(Some(1), false);
    world.mark = 1 << 32;
    assert_eq!(written(&mut world, 1), None);
    assert_eq!(world.host_refusal(), Some(Reason::CompletionMac));
}

fn write(lba: u64, data: Vec<u8>) -> HostCommand {
    HostCommand::Write { lba, data, is_forced: false }
}

fn read(lba: u64, blocks: usize) -> HostCommand {
    HostCommand::Read { lba, blocks: blocks as u32 }
}

fn refused(world: &mut World, command: HostCommand) -> SubmitError {
    world.host.submit(99, command).unwrap_err().0
}

pub(super) fn sealed(blocks: usize, lba: u64) -> Vec<u8> {
    let identity = VolumeIdentity { volume_id: [1; 16], generation: 1 };
    let key = SealKey::new(&Secret::take(&mut [3; 32]), identity, 1);
    let mut range = CounterRange::new(1, 1, 1 + (lba << 20), 1 << 40).unwrap();
    let mut data = vec![0; blocks * BLOCK_BYTES];
    for (index, block) in blocks_of(&mut data).enumerate() {
        key.seal(range.take().unwrap(), lba + index as u64, &[9; DATA_BYTES], block);
    }
    data
}

/// What both sides send until a write ends, and the stored blocks.
fn exchanged(world: &mut World, command: HostCommand) -> (Vec<Vec<u8>>, Vec<Option<Vec<u8>>>) {
    world.host.submit(1, command).unwrap();
    let mut sent = Vec::new();
    while world.completed(1).is_none() {
        let bytes = world.sent_by_host();
        world.feed_controller(&bytes);
        sent.push(bytes);
        let bytes = world.sent_by_controller();
        world.feed_host(&bytes);
        assert!(sent.len() < 10, "{:?}", world.ended);
    }
    assert_eq!(world.completed(1).map(|(status, _)| status), Some(Status::SUCCESS));
    (sent, world.store.clone())
}

/// In the capsule, requested at once, and requested in portions.
#[test]
fn kept_sectors_are_sent_like_a_copy_of_them_and_stay_as_they_are() {
    for (blocks, at_once) in [(1, 3), (3, 3), (8, 3), (4, 8), (8, 8)] {
        for digests in [Digests::default(), Digests { header: true, data: true }] {
            let new = || World::with_digests(Some(1), false, digests).requesting(at_once);
            let kept = Arc::new(sealed(10, 3));
            let range = BLOCK_BYTES..(1 + blocks) * BLOCK_BYTES;
            let data = kept[range.clone()].to_vec();
            let copied = exchanged(&mut new(), write(4, data.clone()));
            let command = HostCommand::WriteKept {
                lba: 4,
                sectors: SharedBytes::new(Arc::clone(&kept), range),
                is_forced: false,
            };
            let sent = exchanged(&mut new(), command);
            assert!(sent == copied, "{blocks} blocks, {at_once} at once");
            assert!(sent.1[4..4 + blocks].iter().flatten().flatten().eq(&data));
            assert!(*kept == sealed(10, 3), "the kept sectors never change");
            assert_eq!(Arc::strong_count(&kept), 1, "nothing holds them after the end");
        }
    }
}

#[test]
fn kept_sectors_are_held_while_they_wait_and_copied_by_a_plain_queue() {
    let kept = Arc::new(sealed(8, 4));
    let command = |bytes| {
        let sectors = SharedBytes::new(Arc::clone(&kept), 0..bytes);
        HostCommand::WriteKept { lba: 4, sectors, is_forced: true }
    };
    let mut world = World::new(Some(1), false).requesting(8);
    assert_eq!(refused(&mut world, command(kept.len() - 1)), SubmitError::Length);
    world.host.submit(1, command(kept.len())).unwrap();
    let bytes = world.sent_by_host();
    world.feed_controller(&bytes);
    assert_eq!(Arc::strong_count(&kept), 2, "until they are requested");
    let request = world.sent_by_controller();
    world.feed_host(&request);
    assert_eq!(Arc::strong_count(&kept), 9, "each sector waits to be sent");
    drop(world);
    assert_eq!(Arc::strong_count(&kept), 1, "a lost queue holds nothing");

    let mut world = World::new(None, false);
    let (_, stored) = exchanged(&mut world, command(2 * DATA_BYTES));
    assert!(stored[4..6].iter().flatten().flatten().eq(&kept[..2 * DATA_BYTES]));
}

#[derive(Debug, Clone)]
enum Step {
    Write(u64, usize, u8),
    Read(u64, usize),
    Flush,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let place = (0u64..56, 1usize..8);
    proptest::collection::vec(
        prop_oneof![
            (place.clone(), any::<u8>()).prop_map(|((lba, n), byte)| Step::Write(lba, n, byte)),
            place.prop_map(|(lba, n)| Step::Read(lba, n)),
            Just(Step::Flush),
        ],
        1..30,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn plain_queue_behaves_like_an_array(
        steps in steps(), cut in 1usize..9000, success_flag: bool, header: bool, data: bool,
    ) {
        let mut world = World::with_digests(None, success_flag, Digests { header, data });
        let mut model = vec![0u8; BLOCKS as usize];
        for (tag, step) in steps.into_iter().enumerate() {
            let tag = tag as u64;
            match step {
                Step::Write(lba, n, byte) => {
                    world.host.submit(tag, write(lba, vec![byte; n * DATA_BYTES])).unwrap();
                    model[lba as usize..lba as usize + n].fill(byte);
                }
                Step::Read(lba, n) => world.host.submit(tag, read(lba, n)).unwrap(),
                Step::Flush => world.host.submit(tag, HostCommand::Flush).unwrap(),
            }
            while world.host.outstanding() > 0 {
                let bytes = world.sent_by_host();
                bytes.chunks(cut).for_each(|part| world.feed_controller(part));
                let bytes = world.sent_by_controller();
                bytes.chunks(cut).for_each(|part| world.feed_host(part));
            }
            let (status, data) = world.completed(tag).unwrap();
            prop_assert!(status.is_success());
            if let Step::Read(lba, n) = step {
                let expected: Vec<u8> = model[lba as usize..lba as usize + n]
                    .iter().flat_map(|byte| [*byte; DATA_BYTES]).collect();
                prop_assert_eq!(data, &expected[..]);
            }
        }
    }

    #[test]
    fn a_flipped_bit_on_a_secure_queue_never_changes_data(
        bit in 0usize..(2 * BLOCK_BYTES + 300) * 8, answer: bool,
    ) {
        let mut world = World::new(Some(1), false);
        let blocks = sealed(1, 5);
        if answer {
            world.store[5] = Some(blocks);
            world.host.submit(1, read(5, 1)).unwrap();
            let bytes = world.sent_by_host();
            world.feed_controller(&bytes);
            let mut bytes = world.sent_by_controller();
            let bit = bit % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            world.feed_host(&bytes);
            // Unused header bytes have no meaning; everything else is checked.
            if let Some((status, data)) = world.completed(1) {
                prop_assert!(status.is_success());
                prop_assert_eq!(data, &sealed(1, 5)[..], "bit {}", bit);
            }
        } else {
            world.host.submit(1, write(5, blocks)).unwrap();
            let mut bytes = world.sent_by_host();
            let bit = bit % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            world.feed_controller(&bytes);
            if let Some(stored) = &world.store[5] {
                prop_assert_eq!(stored, &sealed(1, 5), "bit {}", bit);
            }
            prop_assert!(world.store.iter().enumerate().all(|(lba, s)| lba == 5 || s.is_none()));
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        for queue_id in [None, Some(1)] {
            let mut world = World::new(queue_id, true);
            world.feed_controller(&bytes);
            world.host.submit(1, read(0, 1)).unwrap();
            world.feed_host(&bytes);
        }
    }
}

#[test]
fn secure_queue_moves_sealed_sectors_in_capsule_and_on_request() {
    for blocks in [1, 2, 7] {
        let mut world = World::new(Some(1), true);
        let data = sealed(blocks, 3);
        world.host.submit(1, write(3, data.clone())).unwrap();
        world.run();
        world.host.submit(2, read(3, blocks)).unwrap();
        world.host.submit(3, HostCommand::Flush).unwrap();
        world.run();
        assert!(world.completed(1).unwrap().0.is_success());
        assert_eq!(world.completed(2).unwrap().1, &data[..]);
        assert!(world.completed(3).unwrap().0.is_success());
        assert_eq!((world.refusal(), world.host_refusal()), (None, None));
    }
}

#[test]
fn unwritten_sectors_are_answered_as_such() {
    let mut world = World::new(Some(1), false);
    world.host.submit(1, read(9, 2)).unwrap();
    world.run();
    let (_, data) = world.completed(1).unwrap();
    assert!(data.as_chunks::<BLOCK_BYTES>().0.iter().all(is_unwritten));
}

#[test]
fn replayed_write_is_refused() {
    let mut world = World::new(Some(1), false);
    world.host.submit(1, write(5, sealed(1, 5))).unwrap();
    let recorded = world.sent_by_host();
    world.feed_controller(&recorded);
    assert_eq!(world.refusal(), None);
    world.store[5] = None;
    world.feed_controller(&recorded);
    assert_eq!(world.refusal(), Some(Reason::CommandMac));
    assert_eq!(world.store[5], None);
}

#[test]
fn redirected_write_is_refused() {
    let mut world = World::new(Some(1), false);
    world.host.submit(1, write(5, sealed(1, 5))).unwrap();
    let mut bytes = world.sent_by_host();
    bytes[COMMON_BYTES + 40] = 6;
    world.feed_controller(&bytes);
    assert_eq!(world.refusal(), Some(Reason::CommandMac));
    assert!(world.store.iter().all(Option::is_none));
}

#[test]
fn command_of_another_queue_is_refused() {
    let mut one = World::new(Some(1), false);
    let mut two = World::new(Some(2), false);
    one.host.submit(1, write(5, sealed(1, 5))).unwrap();
    let bytes = one.sent_by_host();
    two.feed_controller(&bytes);
    assert_eq!(two.refusal(), Some(Reason::CommandMac));
}

#[test]
fn swapped_write_data_is_refused_before_anything_is_stored() {
    let mut world = World::new(Some(1), false);
    world.host.submit(1, write(5, sealed(1, 5))).unwrap();
    world.host.submit(2, write(6, sealed(1, 6))).unwrap();
    let mut bytes = world.sent_by_host();
    let each = bytes.len() / 2;
    let data = |index: usize| index * each + 72..(index + 1) * each;
    let first = bytes[data(0)].to_vec();
    let second = bytes[data(1)].to_vec();
    bytes[data(0)].copy_from_slice(&second);
    bytes[data(1)].copy_from_slice(&first);
    world.feed_controller(&bytes);
    assert_eq!(world.refusal(), Some(Reason::SectorMac));
    assert!(world.store.iter().all(Option::is_none));
}

#[test]
fn swapped_read_answers_are_refused() {
    let mut world = World::new(Some(1), false);
    world.store[5] = Some(sealed(1, 5));
    world.store[6] = Some(sealed(1, 6));
    world.host.submit(1, read(5, 1)).unwrap();
    world.host.submit(2, read(6, 1)).unwrap();
    let bytes = world.sent_by_host();
    world.feed_controller(&bytes);
    let mut bytes = world.sent_by_controller();
    let each = bytes.len() / 2;
    // Swap the command ids of the two data headers: each answer now claims the other command.
    bytes[COMMON_BYTES] ^= 1;
    bytes[each + COMMON_BYTES] ^= 1;
    world.feed_host(&bytes);
    assert!(world.host_refusal().is_some());
    assert!(world.done.iter().all(|event| !matches!(event, HostEvent::Completed { .. })));
}

#[test]
fn swapped_read_data_is_refused() {
    let mut world = World::new(Some(1), false);
    world.store[5] = Some(sealed(1, 5));
    world.store[6] = Some(sealed(1, 6));
    world.host.submit(1, read(5, 1)).unwrap();
    world.host.submit(2, read(6, 1)).unwrap();
    let bytes = world.sent_by_host();
    world.feed_controller(&bytes);
    let bytes = world.sent_by_controller();
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let data = 24..24 + BLOCK_BYTES;
    let mut forged = bytes.clone();
    forged[data.clone()].copy_from_slice(&second[data.clone()]);
    forged[first.len() + data.start..first.len() + data.end].copy_from_slice(&first[data]);
    world.feed_host(&forged);
    assert_eq!(world.host_refusal(), Some(Reason::SectorMac));
}

#[test]
fn old_read_answer_is_refused() {
    let mut world = World::new(Some(1), false);
    world.store[5] = Some(sealed(1, 5));
    world.host.submit(1, read(5, 1)).unwrap();
    let bytes = world.sent_by_host();
    world.feed_controller(&bytes);
    let recorded = world.sent_by_controller();
    world.feed_host(&recorded);
    world.host.submit(2, read(5, 1)).unwrap();
    world.feed_host(&recorded);
    assert_eq!(world.host_refusal(), Some(Reason::CompletionMac));
    assert_eq!(world.completed(2), None);
}

#[test]
fn forged_completion_of_a_dropped_write_is_refused() {
    for status in [Status::SUCCESS, Status::WRITE_FAULT] {
        let mut world = World::new(Some(1), false);
        world.host.submit(1, write(5, sealed(1, 5))).unwrap();
        let _dropped = world.sent_by_host();
        let entry = CompletionEntry { status: status.field().into(), ..CompletionEntry::default() };
        let forged = super::super::pdu::CapsuleResp {
            common: CommonHeader::new(kind::CAPSULE_RESP, 0, 0, Digests::default()),
            entry,
        };
        world.feed_host(forged.as_bytes());
        assert_eq!(world.host_refusal(), Some(Reason::CompletionMac));
    }
}

#[test]
fn reflected_bytes_are_refused() {
    let mut world = World::new(Some(1), false);
    world.host.submit(1, write(5, sealed(1, 5))).unwrap();
    let bytes = world.sent_by_host();
    world.feed_host(&bytes);
    assert_eq!(world.host_refusal(), Some(Reason::PduMalformed));
}

fn transfer(opcode: u8, cid: u16, lba: u64, blocks: u32, sgl: Sgl) -> SubmissionEntry {
    SubmissionEntry {
        opcode,
        flags: FLAGS_SGL,
        cid: cid.into(),
        nsid: 1.into(),
        sgl,
        start_lba: lba.into(),
        cdw12: (blocks - 1).into(),
        ..SubmissionEntry::default()
    }
}

type Change = fn(&mut SubmissionEntry);

#[test]
fn bad_commands_get_their_own_status() {
    let send = |change: Change| {
        let mut world = World::new(None, false);
        let sgl = Sgl { length: (DATA_BYTES as u32).into(), kind: SGL_TRANSPORT, ..Sgl::default() };
        let mut entry = transfer(READ, 3, 4, 1, sgl);
        change(&mut entry);
        let capsule = CapsuleCmd {
            common: CommonHeader::new(kind::CAPSULE_CMD, 0, 0, Digests::default()),
            entry,
        };
        world.feed_controller(capsule.as_bytes());
        let bytes = world.sent_by_controller();
        Status::from_field(u16::from_le_bytes(bytes[22..24].try_into().unwrap()))
    };
    let cases: [(Change, Status); 9] = [
        (|entry| entry.opcode = 0x7e, Status::INVALID_OPCODE),
        (|entry| entry.nsid = 2.into(), Status::INVALID_NAMESPACE),
        (|entry| entry.start_lba = 64.into(), Status::LBA_OUT_OF_RANGE),
        (|entry| entry.start_lba = u64::MAX.into(), Status::LBA_OUT_OF_RANGE),
        (|entry| entry.cdw12 = 8.into(), Status::INVALID_FIELD),
        (|entry| entry.cdw12 = (1 << 29).into(), Status::INVALID_FIELD),
        (|entry| entry.flags = 0, Status::INVALID_FIELD),
        (|entry| entry.sgl.length = 4095.into(), Status::SGL_LENGTH_INVALID),
        (|entry| entry.sgl.kind = 0x20, Status::SGL_TYPE_INVALID),
    ];
    for (change, expected) in cases {
        assert_eq!(send(change), expected.final_(), "{expected}");
    }
}

#[test]
fn a_command_id_can_be_outstanding_only_once_and_the_queue_is_bounded() {
    let mut world = World::new(None, false);
    let sgl = Sgl { length: (DATA_BYTES as u32).into(), kind: SGL_TRANSPORT, ..Sgl::default() };
    let capsule = |cid| CapsuleCmd {
        common: CommonHeader::new(kind::CAPSULE_CMD, 0, 0, Digests::default()),
        entry: transfer(WRITE, cid, 4, 1, sgl),
    };
    for cid in 0..7 {
        world.feed_controller(capsule(cid).as_bytes());
    }
    let _requests = world.sent_by_controller();
    world.feed_controller(capsule(3).as_bytes());
    let bytes = world.sent_by_controller();
    let status = Status::from_field(u16::from_le_bytes(bytes[22..24].try_into().unwrap()));
    assert_eq!(status, Status::COMMAND_ID_CONFLICT.final_());
    world.feed_controller(capsule(7).as_bytes());
    assert_eq!(world.refusal(), Some(Reason::PduMalformed));
}

#[test]
fn submission_is_bounded_by_depth_and_length() {
    let mut world = World::new(None, false);
    assert_eq!(refused(&mut world, read(0, 9)), SubmitError::Length);
    assert_eq!(refused(&mut world, read(0, 0)), SubmitError::Length);
    for tag in 0..7 {
        world.host.submit(tag, read(0, 1)).unwrap();
    }
    assert!(!world.host.can_submit());
    assert_eq!(refused(&mut world, read(0, 1)), SubmitError::Full);
}

#[test]
fn data_are_requested_in_order_and_only_as_the_window_allows() {
    let mut world = World::new(None, false);
    let all = BLOCKS as usize * DATA_BYTES;
    world.controller.limits.transfer_max = all;
    world.host.limits.transfer_max = all;
    world.controller.window = 2 * all + 1;
    for tag in 0..5 {
        world.host.submit(tag, write(0, vec![tag as u8; all])).unwrap();
    }
    let bytes = world.sent_by_host();
    world.feed_controller(&bytes);
    let requests = world.sent_by_controller();
    assert_eq!(requests.len() / 24, 2);
    world.feed_host(&requests);
    world.run();
    let done = world.done.iter().map(|event| match event {
        HostEvent::Completed { tag, status, .. } => (*tag, status.is_success()),
        HostEvent::Failed { .. } => (u64::MAX, false),
    });
    assert_eq!(done.collect::<Vec<_>>(), (0..5).map(|tag| (tag, true)).collect::<Vec<_>>());
}
