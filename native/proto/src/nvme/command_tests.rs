//! Every command of the set from a host to a controller: those handed out, those refused, and the
//! protection by digests.

use proptest::prelude::*;

use super::super::command::{
    COMPARE, DATASET_MANAGEMENT, FLUSH, FLUSH_MILESTONE, FUSED_FIRST, FUSED_SECOND, READ,
    RESERVATION_ACQUIRE, RESERVATION_REGISTER, RESERVATION_RELEASE, RESERVATION_REPORT, VERIFY,
    WRITE, WRITE_IF, WRITE_ZEROES,
};
use super::super::operation::{
    Access, AcquireAction, Command, LbaRange, Operation, Persistence, RegisterAction,
    ReservationType,
};
use super::tests::{BLOCKS, World, everything, feed, sealed, secure};
use super::*;
use crate::nvme::controller_queue::ControllerEvent;
use crate::sector::{BLOCK_BYTES, DATA_BYTES, field, metadata, set_expected_iv, take_expected_iv};

/// Passes bytes on until all submitted commands are handed out; returns them.
fn handed_out(world: &mut World) -> Vec<Command> {
    let mut commands = Vec::new();
    loop {
        let bytes = world.host.transmit().take();
        feed(&mut world.controller, &bytes);
        while let Some(event) = world.controller.next_event() {
            match event {
                ControllerEvent::Received(command) => commands.push(command),
                failed @ ControllerEvent::Failed { .. } => panic!("{failed:?}"),
            }
        }
        let bytes = world.controller.transmit().take();
        feed(&mut world.host, &bytes);
        if world.host.transmit().pending_bytes() == 0 {
            return commands;
        }
    }
}

fn ended(world: &mut World) -> Vec<(u64, Status)> {
    let bytes = world.controller.transmit().take();
    feed(&mut world.host, &bytes);
    let mut all = Vec::new();
    while let Some(event) = world.host.next_event() {
        match event {
            HostEvent::Completed { tag, status, .. } => all.push((tag, status)),
            failed @ HostEvent::Failed { .. } => panic!("{failed:?}"),
        }
    }
    all
}

/// A host that sends arbitrary capsules and reads the statuses of the answers by command id.
struct Raw {
    world: World,
}

impl Raw {
    fn plain() -> Self {
        let mut world = World::new(None, false);
        world.controller.set_namespaces(everything(DATA_BYTES));
        Self { world }
    }

    fn send(&mut self, entry: SubmissionEntry, data: &[u8]) {
        let common = CommonHeader::new(
            kind::CAPSULE_CMD,
            0,
            data.len(),
            self.world.controller.limits.digests,
        );
        let mut out = TransmitQueue::default();
        let body = if data.is_empty() { Data::None } else { Data::Copied(data) };
        out.put_pdu(CapsuleCmd { common, entry }.as_bytes(), body);
        let bytes = out.take();
        feed(&mut self.world.controller, &bytes);
    }

    fn operations(&mut self) -> Vec<Operation> {
        let mut all = Vec::new();
        while let Some(event) = self.world.controller.next_event() {
            match event {
                ControllerEvent::Received(command) => all.push(command.operation),
                failed @ ControllerEvent::Failed { .. } => panic!("{failed:?}"),
            }
        }
        all
    }

    fn statuses(&mut self) -> Vec<(u16, Status)> {
        let bytes = self.world.controller.transmit().take();
        let completions = bytes.as_chunks::<24>().0.iter();
        completions
            .filter(|pdu| pdu[0] == kind::CAPSULE_RESP)
            .map(|pdu| {
                let cid = u16::from_le_bytes([pdu[20], pdu[21]]);
                (cid, Status::from_field(u16::from_le_bytes([pdu[22], pdu[23]])))
            })
            .collect()
    }

    /// The status of one command that must be refused.
    fn refused(entry: SubmissionEntry, data: &[u8]) -> Status {
        let mut raw = Self::plain();
        raw.send(entry, data);
        assert_eq!(raw.operations(), []);
        match raw.statuses()[..] {
            [(_, status)] => status,
            ref other => panic!("{other:?}"),
        }
    }
}

fn entry(opcode: u8, cid: u16, cdw10_11: u64, cdw12: u32, data: usize) -> SubmissionEntry {
    let kind = if data > 0 { SGL_IN_CAPSULE } else { SGL_TRANSPORT };
    SubmissionEntry {
        opcode,
        flags: FLAGS_SGL,
        cid: cid.into(),
        nsid: 1.into(),
        sgl: Sgl { length: (data as u32).into(), kind, ..Sgl::default() },
        start_lba: cdw10_11.into(),
        cdw12: cdw12.into(),
        ..SubmissionEntry::default()
    }
}

fn block(byte: u8) -> Vec<u8> {
    vec![byte; DATA_BYTES]
}

#[test]
fn every_command_arrives_as_it_was_submitted() {
    let ranges = vec![LbaRange { lba: 3, blocks: 4 }, LbaRange { lba: 60, blocks: 4 }];
    let cases: Vec<(HostCommand, u64, u32, bool, Operation)> = vec![
        (HostCommand::Read { lba: 7, blocks: 2 }, 7, 2, false, Operation::Read),
        (
            HostCommand::Write { lba: 1, data: block(5), is_forced: true },
            1,
            1,
            true,
            Operation::Write(block(5)),
        ),
        (HostCommand::Flush, 0, 0, false, Operation::Flush),
        (
            HostCommand::WriteZeroes { lba: 0, blocks: 64, deallocate: true },
            0,
            64,
            false,
            Operation::WriteZeroes { deallocate: true },
        ),
        (HostCommand::Deallocate(ranges.clone()), 0, 0, false, Operation::Deallocate(ranges)),
        (
            HostCommand::Compare { lba: 9, data: block(6).repeat(5) },
            9,
            5,
            false,
            Operation::Compare(block(6).repeat(5)),
        ),
        (HostCommand::Verify { lba: 2, blocks: 62 }, 2, 62, false, Operation::Verify),
        (
            HostCommand::CompareAndWrite { lba: 8, expected: block(1), data: block(2) },
            8,
            1,
            false,
            Operation::CompareAndWrite { expected: block(1), data: block(2) },
        ),
    ];
    for digests in [Digests::default(), Digests { header: true, data: true }] {
        let mut world = World::with_digests(None, false, digests);
        world.controller.set_namespaces(everything(DATA_BYTES));
        for (command, lba, blocks, is_forced, operation) in &cases {
            world.host.submit(1, command.clone()).unwrap();
            let mut commands = handed_out(&mut world);
            let received = commands.pop().unwrap();
            assert!(commands.is_empty());
            assert_eq!(
                (received.nsid, received.lba, received.blocks, received.is_forced),
                (1, *lba, *blocks, *is_forced)
            );
            assert_eq!(received.operation, *operation);
            if received.operation == Operation::Read {
                let data = vec![3; *blocks as usize * DATA_BYTES];
                world.controller.complete_read(received.slot, data);
            } else {
                world.controller.complete(received.slot, Status::SUCCESS, Vec::new());
            }
            assert_eq!(ended(&mut world), [(1, Status::SUCCESS)]);
            assert_eq!((world.host.outstanding(), world.controller.outstanding()), (0, 0));
        }
    }
}

#[test]
fn a_fused_pair_ends_once_with_the_status_of_the_command_at_fault() {
    let statuses = [
        Status::SUCCESS,
        Status::COMPARE_FAILURE.final_(),
        Status::WRITE_FAULT,
        Status::UNRECOVERED_READ,
    ];
    for in_capsule_max in [0, 8192] {
        for status in statuses {
            let mut world = World::new(None, false);
            world.controller.set_namespaces(everything(DATA_BYTES));
            world.host.limits.in_capsule_max = in_capsule_max;
            let pair = HostCommand::CompareAndWrite { lba: 8, expected: block(1), data: block(2) };
            world.host.submit(4, pair).unwrap();
            assert_eq!(world.host.outstanding(), 2);
            let commands = handed_out(&mut world);
            let [Command { slot, lba: 8, blocks: 1, .. }] = commands[..] else {
                panic!("{commands:?}")
            };
            world.controller.complete(slot, status, Vec::new());
            assert_eq!(ended(&mut world), [(4, status)], "{status}");
            assert_eq!((world.host.outstanding(), world.controller.outstanding()), (0, 0));
        }
    }
}

#[test]
fn a_fused_command_without_its_other_half_is_aborted() {
    let first =
        SubmissionEntry { flags: FLAGS_SGL | FUSED_FIRST, ..entry(COMPARE, 1, 8, 0, DATA_BYTES) };
    let second =
        SubmissionEntry { flags: FLAGS_SGL | FUSED_SECOND, ..entry(WRITE, 2, 8, 0, DATA_BYTES) };
    let (failed, missing) = (Status::ABORTED_FAILED_FUSED, Status::ABORTED_MISSING_FUSED.final_());
    let run = |entries: &[SubmissionEntry]| {
        let mut raw = Raw::plain();
        for entry in entries {
            let data = if entry.sgl.kind == SGL_IN_CAPSULE { block(0) } else { Vec::new() };
            raw.send(*entry, &data);
        }
        let handed = raw.operations().len();
        (handed, raw.statuses())
    };
    let by_request = |entry: SubmissionEntry| SubmissionEntry {
        sgl: Sgl { kind: SGL_TRANSPORT, ..entry.sgl },
        ..entry
    };
    assert_eq!(run(&[first, second]), (1, vec![]));
    assert_eq!(run(&[second]), (0, vec![(2, missing)]));
    assert_eq!(
        run(&[first, entry(READ, 3, 0, 0, 0)]).1,
        [(1, missing), (3, Status::SGL_LENGTH_INVALID.final_())]
    );
    assert_eq!(run(&[by_request(first), entry(FLUSH, 3, 0, 0, 0)]), (1, vec![(1, missing)]));
    assert_eq!(run(&[first, first]).1, [(1, missing)]);
    let elsewhere = SubmissionEntry { start_lba: 9.into(), ..second };
    let invalid = Status::INVALID_FIELD.final_();
    assert_eq!(run(&[first, elsewhere]), (0, vec![(2, invalid), (1, failed)]));
    assert_eq!(run(&[by_request(first), elsewhere]), (0, vec![(2, invalid), (1, failed)]));
    let beyond = SubmissionEntry { start_lba: 64.into(), ..first };
    assert_eq!(
        run(&[beyond, second]),
        (0, vec![(1, Status::LBA_OUT_OF_RANGE.final_()), (2, failed)])
    );
    let same_id = SubmissionEntry { cid: 1.into(), ..second };
    let conflict = Status::COMMAND_ID_CONFLICT.final_();
    assert_eq!(run(&[first, same_id]), (0, vec![(1, conflict), (1, failed)]));
    for (opcode, flags) in
        [(WRITE, FUSED_FIRST), (COMPARE, FUSED_SECOND), (COMPARE, 3), (READ, FUSED_FIRST)]
    {
        let odd =
            SubmissionEntry { flags: FLAGS_SGL | flags, ..entry(opcode, 1, 8, 0, DATA_BYTES) };
        assert_eq!(run(&[odd]), (0, vec![(1, invalid)]));
    }
    let two = SubmissionEntry { cdw12: 1.into(), ..first };
    assert_eq!(run(&[two]).1, [(1, Status::ATOMIC_WRITE_UNIT_EXCEEDED.final_())]);
}

#[test]
fn bad_fields_of_every_command_get_their_own_status() {
    let pi = 1 << 26;
    let dsm = |ranges: u64, bytes| entry(DATASET_MANAGEMENT, 1, (ranges - 1) | 1 << 34, 0, bytes);
    let wide = |entry: SubmissionEntry, address: u64| SubmissionEntry {
        sgl: Sgl { address: address.into(), ..entry.sgl },
        ..entry
    };
    let kind =
        |entry: SubmissionEntry, kind| SubmissionEntry { sgl: Sgl { kind, ..entry.sgl }, ..entry };
    let cases = [
        (entry(0x04, 1, 0, 0, 0), 0, Status::INVALID_OPCODE),
        (entry(0x81, 1, 0, 0, DATA_BYTES), DATA_BYTES, Status::INVALID_OPCODE),
        (entry(FLUSH, 1, 0, 0, 0), 8, Status::SGL_LENGTH_INVALID),
        (
            SubmissionEntry { nsid: 0.into(), ..entry(FLUSH, 1, 0, 0, 0) },
            0,
            Status::INVALID_NAMESPACE,
        ),
        (
            SubmissionEntry { nsid: u32::MAX.into(), ..entry(VERIFY, 1, 0, 0, 0) },
            0,
            Status::INVALID_NAMESPACE,
        ),
        (entry(WRITE_ZEROES, 1, 1, 63, 0), 0, Status::LBA_OUT_OF_RANGE),
        (entry(WRITE_ZEROES, 1, 0, pi, 0), 0, Status::INVALID_FIELD),
        (entry(WRITE_ZEROES, 1, 0, 1 << 20, 0), 0, Status::INVALID_FIELD),
        (entry(VERIFY, 1, u64::MAX, 0, 0), 0, Status::LBA_OUT_OF_RANGE),
        (entry(VERIFY, 1, 0, pi, 0), 0, Status::INVALID_FIELD),
        (SubmissionEntry { flags: 0x80, ..entry(VERIFY, 1, 0, 0, 0) }, 0, Status::INVALID_FIELD),
        (entry(VERIFY, 1, 0, 0, 0), 4, Status::SGL_LENGTH_INVALID),
        (entry(COMPARE, 1, 64, 0, DATA_BYTES), DATA_BYTES, Status::LBA_OUT_OF_RANGE),
        (entry(COMPARE, 1, 0, 8, 9 * DATA_BYTES), 0, Status::INVALID_FIELD),
        (entry(COMPARE, 1, 0, 1, DATA_BYTES), DATA_BYTES, Status::SGL_LENGTH_INVALID),
        (entry(COMPARE, 1, 0, 0, DATA_BYTES), DATA_BYTES - 1, Status::SGL_LENGTH_INVALID),
        (entry(WRITE, 1, 0, 2 << 20, DATA_BYTES), DATA_BYTES, Status::INVALID_FIELD),
        (wide(entry(WRITE, 1, 0, 0, DATA_BYTES), 1), DATA_BYTES, Status::SGL_OFFSET_INVALID),
        (wide(kind(entry(WRITE, 1, 0, 0, DATA_BYTES), SGL_TRANSPORT), 1), 0, Status::INVALID_FIELD),
        (
            kind(entry(WRITE, 1, 0, 0, DATA_BYTES), SGL_TRANSPORT),
            DATA_BYTES,
            Status::SGL_LENGTH_INVALID,
        ),
        (kind(entry(READ, 1, 0, 0, DATA_BYTES), SGL_IN_CAPSULE), 0, Status::SGL_TYPE_INVALID),
        (kind(entry(WRITE, 1, 0, 0, DATA_BYTES), 0x40), 0, Status::SGL_TYPE_INVALID),
        (dsm(2, 16), 16, Status::SGL_LENGTH_INVALID),
        (kind(dsm(1, 4097), SGL_TRANSPORT), 0, Status::SGL_LENGTH_INVALID),
        (entry(RESERVATION_REGISTER, 1, 0, 0, 8), 8, Status::SGL_LENGTH_INVALID),
        (entry(RESERVATION_REGISTER, 1, 3, 0, 16), 16, Status::INVALID_FIELD),
        (entry(RESERVATION_REGISTER, 1, 1 << 30, 0, 16), 16, Status::INVALID_FIELD),
        (entry(RESERVATION_ACQUIRE, 1, 0, 0, 16), 16, Status::INVALID_FIELD),
        (entry(RESERVATION_ACQUIRE, 1, 0x703, 0, 16), 16, Status::INVALID_FIELD),
        (entry(RESERVATION_ACQUIRE, 1, 0x108, 0, 16), 16, Status::INVALID_FIELD),
        (entry(RESERVATION_RELEASE, 1, 0x700, 0, 8), 8, Status::INVALID_FIELD),
        (entry(RESERVATION_RELEASE, 1, 0x109, 0, 8), 8, Status::INVALID_FIELD),
        (entry(RESERVATION_RELEASE, 1, 0x101, 0, 16), 16, Status::SGL_LENGTH_INVALID),
        (entry(RESERVATION_REPORT, 1, 0x2_0000, 0, 0), 0, Status::INVALID_FIELD),
        (entry(RESERVATION_REPORT, 1, 1, 0, 0), 0, Status::SGL_LENGTH_INVALID),
    ];
    for (index, (entry, carried, status)) in cases.into_iter().enumerate() {
        let got = Raw::refused(entry, &vec![0; carried]);
        assert_eq!(got, status.final_(), "case {index}: {got}");
    }
}

#[test]
fn commands_outside_the_namespaces_set_are_refused() {
    for (opcode, bytes) in [
        (COMPARE, DATA_BYTES),
        (WRITE_ZEROES, 0),
        (DATASET_MANAGEMENT, 16),
        (VERIFY, 0),
        (RESERVATION_REGISTER, 16),
        (RESERVATION_REPORT, 0),
        (RESERVATION_ACQUIRE, 16),
        (RESERVATION_RELEASE, 8),
    ] {
        let mut raw = Raw { world: World::new(None, false) };
        raw.send(entry(opcode, 1, 0, 0, bytes), &vec![0; bytes]);
        assert_eq!(raw.statuses(), [(1, Status::INVALID_OPCODE.final_())], "{opcode:#x}");
    }
}

#[test]
fn a_plain_queue_refuses_a_write_if_even_if_its_namespace_offers_it() {
    let status = Raw::refused(entry(WRITE_IF, 1, 0, 0, DATA_BYTES), &block(0));
    assert_eq!(status, Status::INVALID_OPCODE.final_());
}

#[test]
fn a_plain_queue_refuses_a_flush_with_milestone() {
    let status = Raw::refused(entry(FLUSH_MILESTONE, 1, 0, 0, DATA_BYTES), &[]);
    assert_eq!(status, Status::INVALID_OPCODE.final_());
}

#[test]
fn a_flush_with_milestone_is_answered_with_an_authentic_block() {
    let asked = || {
        let mut world = World::new(Some(1), false);
        world.host.submit(1, HostCommand::FlushMilestone).unwrap();
        let commands = handed_out(&mut world);
        let [Command { slot, operation: Operation::FlushMilestone, blocks: 0, .. }] = commands[..]
        else {
            panic!("{commands:?}")
        };
        (world, slot)
    };
    let mut block = vec![0; BLOCK_BYTES];
    block[..32].fill(7);
    let (mut world, slot) = asked();
    world.controller.complete_read(slot, block.clone());
    let bytes = world.controller.transmit().take();
    feed(&mut world.host, &bytes);
    let Some(HostEvent::Completed { tag: 1, status: Status::SUCCESS, data, .. }) =
        world.host.next_event()
    else {
        panic!("no answer")
    };
    assert_eq!(data[..DATA_BYTES], block[..DATA_BYTES]);

    let (mut world, slot) = asked();
    world.controller.complete_read(slot, block);
    let mut bytes = world.controller.transmit().take();
    bytes[30] ^= 1;
    feed(&mut world.host, &bytes);
    let event = world.host.next_event();
    assert!(
        matches!(event, Some(HostEvent::Failed { reason: Reason::SectorMac, .. })),
        "{event:?}"
    );

    let (mut world, slot) = asked();
    world.controller.complete(slot, Status::SUCCESS, Vec::new());
    let bytes = world.controller.transmit().take();
    feed(&mut world.host, &bytes);
    let event = world.host.next_event();
    assert!(matches!(event, Some(HostEvent::Failed { reason: Reason::PduMalformed, .. })));
}

#[test]
fn data_that_were_not_requested_yet_end_the_queue() {
    // Data of the first command of a pair are requested together with the second's.
    let mut raw = Raw::plain();
    let first = entry(COMPARE, 1, 8, 0, DATA_BYTES);
    let sgl = Sgl { kind: SGL_TRANSPORT, ..first.sgl };
    raw.send(SubmissionEntry { flags: FLAGS_SGL | FUSED_FIRST, sgl, ..first }, &[]);
    let header = DataHeader {
        common: CommonHeader::new(kind::H2C_DATA, FLAG_LAST, DATA_BYTES, Digests::default()),
        cid: 1.into(),
        tag: 0.into(),
        offset: 0.into(),
        length: (DATA_BYTES as u32).into(),
        reserved: [0; 4],
    };
    feed(&mut raw.world.controller, header.as_bytes());
    let event = raw.world.controller.next_event();
    assert!(
        matches!(event, Some(ControllerEvent::Failed { reason: Reason::PduMalformed, .. })),
        "{event:?}"
    );
}

#[test]
fn range_lists_are_checked_and_may_be_in_a_longer_buffer() {
    let list = |ranges: &[(u64, u32)], bytes: usize| {
        let mut list: Vec<u8> = ranges
            .iter()
            .flat_map(|(lba, blocks)| {
                [&[7; 4][..], &blocks.to_le_bytes(), &lba.to_le_bytes()].concat()
            })
            .collect();
        list.resize(bytes, 0xff);
        list
    };
    let send = |attribute: u64, count: u64, data: &[u8]| {
        let mut raw = Raw::plain();
        raw.send(entry(DATASET_MANAGEMENT, 1, (count - 1) | attribute, 0, data.len()), data);
        (raw.operations(), raw.statuses())
    };
    let deallocate = 1 << 34;
    let expected = vec![LbaRange { lba: 0, blocks: 64 }, LbaRange { lba: 64, blocks: 0 }];
    let whole = list(&[(0, 64), (64, 0)], 4096);
    assert_eq!(send(deallocate, 2, &whole), (vec![Operation::Deallocate(expected)], vec![]));
    assert_eq!(send(0, 2, &whole), (vec![], vec![(1, Status::SUCCESS)]));
    for bad in [(1, 64), (65, 0), (u64::MAX, 1)] {
        let refused = (vec![], vec![(1, Status::LBA_OUT_OF_RANGE.final_())]);
        assert_eq!(send(deallocate, 2, &list(&[(0, 1), bad], 32)), refused);
    }
}

#[test]
fn reservation_commands_are_decoded_and_reports_have_the_requested_length() {
    let keys = [1u64.to_le_bytes(), 0xdead_beef_u64.to_le_bytes()].concat();
    let mut raw = Raw::plain();
    raw.send(entry(RESERVATION_REGISTER, 1, 2 | 8 | 3 << 30, 0, 16), &keys);
    raw.send(entry(RESERVATION_ACQUIRE, 2, 2 | 6 << 8, 0, 16), &keys);
    raw.send(entry(RESERVATION_RELEASE, 3, 5 << 8, 0, 8), &keys[8..]);
    raw.send(entry(RESERVATION_RELEASE, 4, 1, 0, 8), &keys[..8]);
    let report = SubmissionEntry {
        sgl: Sgl { length: 64.into(), kind: SGL_TRANSPORT, ..Sgl::default() },
        ..entry(RESERVATION_REPORT, 5, 15 | 1 << 32, 0, 0)
    };
    raw.send(report, &[]);
    let current_key = 1;
    let expected = [
        Operation::ReservationRegister {
            action: RegisterAction::Replace,
            ignore_existing_key: true,
            persistence: Persistence::Set,
            current_key,
            new_key: 0xdead_beef,
        },
        Operation::ReservationAcquire {
            action: AcquireAction::PreemptAndAbort,
            kind: ReservationType::ExclusiveAccessAllRegistrants,
            current_key,
            preempt_key: 0xdead_beef,
        },
        Operation::ReservationRelease {
            kind: Some(ReservationType::WriteExclusiveAllRegistrants),
            current_key: 0xdead_beef,
        },
        Operation::ReservationRelease { kind: None, current_key },
        Operation::ReservationReport { extended: true, bytes: 64 },
    ];
    assert_eq!(raw.operations(), expected);
    raw.world.controller.complete_data(4, vec![9; 24]);
    let bytes = raw.world.controller.transmit().take();
    assert_eq!(bytes[24..88], [vec![9; 24], vec![0; 40]].concat());
}

#[test]
fn access_is_checked_when_a_command_arrives_and_when_its_data_are_complete() {
    let with = |access| {
        let mut namespaces = everything(DATA_BYTES);
        namespaces[0].access = access;
        namespaces
    };
    let write = entry(WRITE, 1, 0, 0, DATA_BYTES);
    let protected = Status::NAMESPACE_WRITE_PROTECTED.final_();
    let mut raw = Raw::plain();
    raw.world.controller.set_namespaces(with(Access::ReadOnly));
    raw.send(write, &block(1));
    raw.send(entry(WRITE_ZEROES, 2, 0, 0, 0), &[]);
    raw.send(entry(DATASET_MANAGEMENT, 3, 0, 0, 16), &[0; 16]);
    raw.send(entry(VERIFY, 4, 0, 0, 0), &[]);
    assert_eq!(raw.statuses(), [(1, protected), (2, protected), (3, protected)]);
    assert_eq!(raw.operations(), [Operation::Verify]);
    raw.world.controller.set_namespaces(with(Access::Refused(Status::ANA_INACCESSIBLE)));
    raw.send(entry(FLUSH, 5, 0, 0, 0), &[]);
    assert_eq!(raw.statuses(), [(5, Status::ANA_INACCESSIBLE)]);

    let mut world = World::new(None, false);
    world
        .host
        .submit(1, HostCommand::Write { lba: 0, data: block(1).repeat(4), is_forced: false })
        .unwrap();
    let bytes = world.host.transmit().take();
    feed(&mut world.controller, &bytes);
    let bytes = world.controller.transmit().take();
    feed(&mut world.host, &bytes);
    world.controller.set_namespaces(with(Access::ReadOnly));
    let bytes = world.host.transmit().take();
    feed(&mut world.controller, &bytes);
    assert_eq!(world.controller.next_event(), None);
    assert_eq!(ended(&mut world), [(1, protected)]);
}

#[test]
fn commands_that_are_not_handed_out_can_be_aborted() {
    let mut world = World::new(None, false);
    world.controller.set_namespaces(everything(DATA_BYTES));
    world.host.limits.transfer_max = BLOCKS as usize * DATA_BYTES;
    world.controller.limits.transfer_max = BLOCKS as usize * DATA_BYTES;
    world.controller.window = 2 * BLOCKS as usize * DATA_BYTES;
    let all =
        HostCommand::Write { lba: 0, data: block(1).repeat(BLOCKS as usize), is_forced: false };
    for tag in 0..3 {
        world.host.submit(tag, all.clone()).unwrap();
    }
    world.host.submit(3, HostCommand::Read { lba: 0, blocks: 1 }).unwrap();
    let bytes = world.host.transmit().take();
    feed(&mut world.controller, &bytes);
    assert!(world.controller.abort(2), "its data aren't requested");
    assert!(world.controller.abort(1), "its data are in flight");
    assert!(!world.controller.abort(3), "it is handed out");
    assert!(!world.controller.abort(9), "there is no such command");
    assert_eq!(ended(&mut world), [(2, Status::ABORTED)]);
    let commands = handed_out(&mut world);
    let slots: Vec<u16> = commands.iter().map(|command| command.slot).collect();
    assert_eq!(slots, [3, 0]);
    let mut all = Vec::new();
    while let Some(event) = world.host.next_event() {
        all.push(event);
    }
    assert!(
        matches!(all[..], [HostEvent::Completed { tag: 1, status: Status::ABORTED, .. }]),
        "{all:?}"
    );

    let first =
        SubmissionEntry { flags: FLAGS_SGL | FUSED_FIRST, ..entry(COMPARE, 1, 8, 0, DATA_BYTES) };
    let second =
        SubmissionEntry { flags: FLAGS_SGL | FUSED_SECOND, ..entry(WRITE, 2, 8, 0, DATA_BYTES) };
    let mut raw = Raw::plain();
    raw.send(first, &block(1));
    assert!(raw.world.controller.abort(1));
    raw.send(second, &block(1));
    assert_eq!(raw.statuses(), [(1, Status::ABORTED), (2, Status::ABORTED_FAILED_FUSED)]);
    assert_eq!(raw.operations(), []);
}

fn with_digests() -> World {
    let mut world = World::with_digests(None, false, Digests { header: true, data: true });
    world.controller.set_namespaces(everything(DATA_BYTES));
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_flipped_bit_gets_past_the_digests(
        bit in any::<proptest::sample::Index>(), blocks in 1usize..4, answer: bool,
    ) {
        let mut world = with_digests();
        let stored = vec![7; blocks * DATA_BYTES];
        let damage = |bytes: &mut Vec<u8>| {
            let bit = bit.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
        };
        if answer {
            world.host.submit(1, HostCommand::Read { lba: 0, blocks: blocks as u32 }).unwrap();
            let slot = handed_out(&mut world)[0].slot;
            world.controller.complete_read(slot, stored);
            let mut bytes = world.controller.transmit().take();
            damage(&mut bytes);
            feed(&mut world.host, &bytes);
            while let Some(event) = world.host.next_event() {
                match event {
                    HostEvent::Completed { status, .. } => {
                        prop_assert_eq!(status, Status::TRANSIENT_TRANSPORT_ERROR);
                    }
                    HostEvent::Failed { reason, .. } => {
                        prop_assert_eq!(reason, Reason::PduMalformed);
                    }
                }
            }
        } else {
            world.host.submit(1, HostCommand::Write { lba: 0, data: stored, is_forced: false }).unwrap();
            let mut bytes = world.host.transmit().take();
            damage(&mut bytes);
            feed(&mut world.controller, &bytes);
            while let Some(event) = world.controller.next_event() {
                let is_fault = matches!(
                    event,
                    ControllerEvent::Failed { reason: Reason::PduMalformed, .. }
                );
                prop_assert!(is_fault);
            }
        }
    }
}

#[test]
fn damaged_data_fail_only_their_command_and_a_damaged_header_the_connection() {
    for blocks in [1, 4] {
        let mut world = with_digests();
        let data = block(5).repeat(blocks);
        world.host.submit(1, HostCommand::Write { lba: 0, data, is_forced: false }).unwrap();
        let mut bytes = world.host.transmit().take();
        if blocks > 1 {
            feed(&mut world.controller, &bytes);
            let request = world.controller.transmit().take();
            feed(&mut world.host, &request);
            bytes = world.host.transmit().take();
        }
        bytes[100] ^= 1; // in the first of several PDUs; the others are still received
        feed(&mut world.controller, &bytes);
        assert_eq!(world.controller.next_event(), None);
        assert_eq!(ended(&mut world), [(1, Status::TRANSIENT_TRANSPORT_ERROR)]);
        world.host.submit(2, HostCommand::Flush).unwrap();
        assert_eq!(handed_out(&mut world).len(), 1);
    }
    let mut world = World::with_digests(Some(1), false, Digests { header: true, data: true });
    world.controller.set_namespaces(everything(BLOCK_BYTES));
    let ranges = vec![LbaRange { lba: 3, blocks: 4 }];
    world.host.submit(1, HostCommand::Deallocate(ranges)).unwrap();
    let mut bytes = world.host.transmit().take();
    *bytes.last_mut().unwrap() ^= 1; // the digest of a list with a correct MAC
    feed(&mut world.controller, &bytes);
    assert_eq!(world.controller.next_event(), None);
    assert_eq!(ended(&mut world), [(1, Status::TRANSIENT_TRANSPORT_ERROR)]);
    let mut world = with_digests();
    world.host.submit(1, HostCommand::Flush).unwrap();
    let mut bytes = world.host.transmit().take();
    bytes[72] ^= 1;
    feed(&mut world.controller, &bytes);
    let answer = world.controller.transmit().take();
    assert_eq!((answer[0], answer[8]), (kind::C2H_TERM, 3));
    assert_eq!(answer[10..14], bytes[72..76], "the digest received");
    assert_eq!(answer[24..], bytes[..72], "the header at fault");
}

#[test]
fn a_range_list_on_a_secure_queue_is_authenticated_with_its_command() {
    let submit = || {
        let mut world = World::new(Some(1), false);
        world.controller.set_namespaces(everything(BLOCK_BYTES));
        let ranges = vec![LbaRange { lba: 3, blocks: 4 }, LbaRange { lba: 9, blocks: 1 }];
        world.host.submit(1, HostCommand::Deallocate(ranges.clone())).unwrap();
        (world, ranges)
    };
    let (mut world, ranges) = submit();
    let commands = handed_out(&mut world);
    assert_eq!(commands[0].operation, Operation::Deallocate(ranges));
    world.controller.complete(commands[0].slot, Status::SUCCESS, Vec::new());
    assert_eq!(ended(&mut world), [(1, Status::SUCCESS)]);
    for byte in 8..72 + 32 {
        let (mut world, _) = submit();
        let mut bytes = world.host.transmit().take();
        bytes[byte] ^= 1;
        feed(&mut world.controller, &bytes);
        let event = world.controller.next_event();
        assert!(
            matches!(event, Some(ControllerEvent::Failed { reason: Reason::CommandMac, .. })),
            "byte {byte}: {event:?}"
        );
    }
    let (mut world, _) = submit();
    let mut bytes = world.host.transmit().take();
    bytes.truncate(72);
    bytes[3] = 0;
    bytes[4] = 72; // the list is dropped
    feed(&mut world.controller, &bytes);
    let event = world.controller.next_event();
    assert!(matches!(event, Some(ControllerEvent::Failed { reason: Reason::CommandMac, .. })));
    // Even a holder of the key may not have the list fetched, as its MAC would be verified too
    // late.
    let (mut world, _) = submit();
    let mut entry = entry(DATASET_MANAGEMENT, 1, 1 << 34, 0, 0);
    entry.sgl.length = 16.into();
    secure(1).seal_command(1, &mut entry, &[]);
    let common = CommonHeader::new(kind::CAPSULE_CMD, 0, 0, Digests::default());
    feed(&mut world.controller, CapsuleCmd { common, entry }.as_bytes());
    assert_eq!(world.controller.next_event(), None);
    let response = world.controller.transmit().take();
    let status = u16::from_le_bytes([response[22], response[23]]);
    assert_eq!(Status::from_field(status), Status::SGL_TYPE_INVALID.final_());
    world.host.limits.in_capsule_max = 16;
    let list = HostCommand::Deallocate(vec![LbaRange { lba: 0, blocks: 1 }; 2]);
    assert_eq!(world.host.submit(2, list).unwrap_err().0, SubmitError::Length);
}

#[test]
fn a_write_if_carries_the_iv_it_expects_under_its_sector_mac() {
    let iv = [7; 12];
    let submit = |spoil: fn(&mut crate::sector::Block)| {
        let mut world = World::new(Some(1), false);
        world.controller.set_namespaces(everything(BLOCK_BYTES));
        let mut data = sealed(1, 5);
        let block = blocks_of(&mut data).next().unwrap();
        set_expected_iv(block, &iv);
        spoil(block);
        let command = HostCommand::WriteIf { lba: 5, data, is_forced: true };
        world.host.submit(1, command).unwrap();
        world
    };
    let mut world = submit(|_| ());
    let mut commands = handed_out(&mut world);
    let Command { operation: Operation::WriteIf(data), is_forced: true, lba: 5, blocks: 1, .. } =
        &mut commands[0]
    else {
        panic!("{commands:?}")
    };
    let block = blocks_of(data).next().unwrap();
    assert_eq!(take_expected_iv(block), iv);
    assert_eq!(&block[..], sealed(1, 5));
    world.controller.complete(commands[0].slot, Status::COMPARE_FAILURE.final_(), Vec::new());
    assert_eq!(ended(&mut world), [(1, Status::COMPARE_FAILURE.final_())]);

    let mut world = submit(|_| ());
    let mut bytes = world.host.transmit().take();
    bytes[72 + DATA_BYTES + field::EXPECTED_IV.0] ^= 1;
    feed(&mut world.controller, &bytes);
    let event = world.controller.next_event();
    assert!(matches!(event, Some(ControllerEvent::Failed { reason: Reason::SectorMac, .. })));

    let spoilers: [fn(&mut crate::sector::Block); 4] = [
        |block| block[DATA_BYTES + field::EXPECTED_IV.1] = 1,
        |block| block[DATA_BYTES + field::VERSION.0] = 2,
        |block| block[DATA_BYTES + field::FLAGS.0] = 1,
        |block| block[DATA_BYTES + field::IV.0..DATA_BYTES + field::IV.1].fill(0),
    ];
    for spoil in spoilers {
        let mut world = submit(spoil);
        assert_eq!(handed_out(&mut world), []);
        let event = world.host.next_event();
        let status = Status::from(Reason::SectorFormat);
        assert!(
            matches!(event, Some(HostEvent::Completed { tag: 1, status: got, .. }) if got == status),
            "{event:?}"
        );
    }
    // An ordinary write must not carry an expected IV.
    let mut world = World::new(Some(1), false);
    let mut data = sealed(1, 5);
    let block = blocks_of(&mut data).next().unwrap();
    set_expected_iv(block, &iv);
    assert_eq!(metadata(block, field::EXPECTED_IV), iv);
    world.host.submit(1, HostCommand::Write { lba: 5, data, is_forced: false }).unwrap();
    assert_eq!(handed_out(&mut world), []);
}

#[test]
fn a_secure_queue_refuses_reservation_commands() {
    let mut world = World::new(Some(1), false);
    world.controller.set_namespaces(everything(BLOCK_BYTES));
    world.host.put(1, Entry { opcode: RESERVATION_REPORT, bytes: 4, ..Entry::default() });
    assert_eq!(handed_out(&mut world), []);
    assert!(matches!(
        world.host.next_event(),
        Some(HostEvent::Completed { tag: 1, status, .. }) if status == Status::INVALID_OPCODE.final_()
    ));
}
