//! Every kind of malformed PDU, from either side, causes one termination request that names the
//! fault and one event; nothing is accepted afterwards.

use zerocopy::FromBytes;

use super::super::command::WRITE;
use super::tests::{World, feed};
use super::*;
use crate::nvme::controller_queue::ControllerEvent;
use crate::sector::DATA_BYTES;

const NONE: Digests = Digests { header: false, data: false };

fn pdu(kind_of: u8, flags: u8, header: &[u8], data: usize) -> Vec<u8> {
    let common = CommonHeader::new(kind_of, flags, data, NONE);
    [common.as_bytes(), header, &vec![0; data]].concat()
}

fn data_pdu(kind_of: u8, flags: u8, cid: u16, tag: u16, offset: u32, data: usize) -> Vec<u8> {
    let header = [
        &cid.to_le_bytes()[..],
        &tag.to_le_bytes(),
        &offset.to_le_bytes(),
        &(data as u32).to_le_bytes(),
        &[0; 4],
    ];
    pdu(kind_of, flags, &header.concat(), data)
}

fn changed(mut bytes: Vec<u8>, offset: usize, value: u8) -> Vec<u8> {
    bytes[offset] = value;
    bytes
}

fn capsule(data: usize) -> Vec<u8> {
    let kind_of_pointer = if data > 0 { SGL_IN_CAPSULE } else { SGL_TRANSPORT };
    let entry = SubmissionEntry {
        opcode: WRITE,
        flags: FLAGS_SGL,
        cid: 5.into(),
        nsid: 1.into(),
        sgl: Sgl { length: (DATA_BYTES as u32).into(), kind: kind_of_pointer, ..Sgl::default() },
        ..SubmissionEntry::default()
    };
    pdu(kind::CAPSULE_CMD, 0, entry.as_bytes(), data)
}

/// Fatal error status and information of the termination request in `bytes`.
fn fault(bytes: &[u8], kind_of: u8, offending: &[u8]) -> (u16, u32) {
    let common = CommonHeader::read_from_bytes(&bytes[..8]).unwrap();
    assert_eq!((common.kind, common.pdu_bytes.get() as usize), (kind_of, bytes.len()));
    let quoted = &bytes[24..];
    assert!(quoted.len() >= 8 && offending.starts_with(quoted), "must quote the header at fault");
    let code = u16::from_le_bytes([bytes[8], bytes[9]]);
    (code, u32::from_le_bytes([bytes[10], bytes[11], bytes[12], bytes[13]]))
}

const BLOCK: usize = DATA_BYTES;
const LAST: u8 = FLAG_LAST;

#[test]
fn a_controller_names_every_fault_of_a_host() {
    let h2c =
        |flags, cid, tag, offset, data| data_pdu(kind::H2C_DATA, flags, cid, tag, offset, data);
    let good = || h2c(0, 0, 0, 0, BLOCK);
    let cases: Vec<(&str, Vec<u8>, (u16, u32))> = vec![
        ("unknown type", changed(capsule(0), 0, 8), (1, 0)),
        ("connection request", pdu(kind::IC_REQ, 0, &[0; 120], 0), (2, 0)),
        ("response capsule", pdu(kind::CAPSULE_RESP, 0, &[0; 16], 0), (2, 0)),
        ("controller's data", data_pdu(kind::C2H_DATA, LAST, 0, 0, 0, 8), (2, 0)),
        ("request for data", pdu(kind::R2T, 0, &[0; 16], 0), (2, 0)),
        ("controller's termination", pdu(kind::C2H_TERM, 0, &[0; 16], 0), (2, 0)),
        ("reserved flag", changed(capsule(0), 1, 0x80), (1, 1)),
        ("header digest", changed(capsule(0), 1, 1), (1, 1)),
        ("data digest", changed(capsule(BLOCK), 1, 2), (1, 1)),
        ("last flag of a capsule", changed(capsule(0), 1, LAST), (1, 1)),
        ("success flag of a host", changed(good(), 1, 8), (1, 1)),
        ("header length", changed(capsule(0), 2, 71), (1, 2)),
        ("data offset", changed(capsule(BLOCK), 3, 76), (1, 3)),
        ("data offset of no data", changed(capsule(0), 3, 4), (1, 3)),
        ("PDU shorter than its header", changed(capsule(0), 4, 71), (1, 4)),
        ("termination too long", pdu(kind::H2C_TERM, 0, &[0; 16], 129), (1, 4)),
        ("too much in a capsule", capsule(8193), (5, 0)),
        ("too much in one PDU", h2c(0, 0, 0, 0, 3 * BLOCK + 1), (5, 0)),
        ("contradictory length", changed(good(), 16, 1), (1, 16)),
        ("no data", h2c(0, 0, 0, 0, 0), (1, 16)),
        ("unknown transfer tag", h2c(0, 0, 1, 0, BLOCK), (1, 10)),
        ("transfer tag beyond the table", h2c(0, 0, u16::MAX, 0, BLOCK), (1, 10)),
        ("another command", h2c(0, 1, 0, 0, BLOCK), (1, 8)),
        ("beyond the end", h2c(0, 0, 0, 4 * BLOCK as u32, BLOCK), (4, 0)),
        ("offset that overflows", h2c(0, 0, 0, u32::MAX, BLOCK), (4, 0)),
        ("out of order", h2c(0, 0, 0, BLOCK as u32, BLOCK), (2, 0)),
        ("last flag too early", h2c(LAST, 0, 0, 0, BLOCK), (1, 1)),
    ];
    for (name, bytes, expected) in cases {
        let mut world = World::new(None, false);
        let data = vec![1; 4 * BLOCK];
        world.host.submit(1, HostCommand::Write { lba: 0, data, is_forced: false }).unwrap();
        let command = world.host.transmit().take();
        feed(&mut world.controller, &command);
        let _request = world.controller.transmit().take();
        feed(&mut world.controller, &bytes);
        let answer = world.controller.transmit().take();
        assert_eq!(fault(&answer, kind::C2H_TERM, &bytes), expected, "{name}");
        let event = world.controller.next_event();
        let is_fault =
            matches!(event, Some(ControllerEvent::Failed { reason: Reason::PduMalformed, .. }));
        assert!(is_fault, "{name}: {event:?}");
        // Nothing is accepted or answered any more.
        assert!(world.controller.place().is_empty() && world.controller.is_failed());
        feed(&mut world.controller, &capsule(BLOCK));
        assert_eq!(world.controller.next_event(), None, "{name}");
        assert_eq!(world.controller.transmit().pending_bytes(), 0, "{name}");
    }
}

#[test]
fn the_last_flag_must_end_the_transfer() {
    let mut world = World::new(None, false);
    let data = vec![1; 4 * BLOCK];
    world.host.submit(1, HostCommand::Write { lba: 0, data, is_forced: false }).unwrap();
    let command = world.host.transmit().take();
    feed(&mut world.controller, &command);
    feed(&mut world.controller, &data_pdu(kind::H2C_DATA, 0, 0, 0, 0, 3 * BLOCK));
    let _request = world.controller.transmit().take();
    let bytes = data_pdu(kind::H2C_DATA, 0, 0, 0, 3 * BLOCK as u32, BLOCK);
    feed(&mut world.controller, &bytes);
    let answer = world.controller.transmit().take();
    assert_eq!(fault(&answer, kind::C2H_TERM, &bytes), (1, 1));
}

#[test]
fn a_host_names_every_fault_of_a_controller() {
    // Command 0 reads 2 blocks, command 1 writes 4 on request, command 2 wrote 1 in its capsule.
    let c2h = |flags, cid, offset, data| data_pdu(kind::C2H_DATA, flags, cid, 0, offset, data);
    let r2t = |cid, offset, length: usize| {
        let with_length = data_pdu(kind::H2C_DATA, 0, cid, 9, offset, length);
        pdu(kind::R2T, 0, &with_length[8..24], 0)
    };
    let response =
        |cid: u8| pdu(kind::CAPSULE_RESP, 0, &[&[0; 12][..], &[cid, 0, 0, 0]].concat(), 0);
    let cases: Vec<(&str, Vec<u8>, (u16, u32))> = vec![
        ("unknown type", changed(response(0), 0, 10), (1, 0)),
        ("connection response", pdu(kind::IC_RESP, 0, &[0; 120], 0), (2, 0)),
        ("command capsule", capsule(0), (2, 0)),
        ("host's data", data_pdu(kind::H2C_DATA, 0, 0, 0, 0, 8), (2, 0)),
        ("host's termination", pdu(kind::H2C_TERM, 0, &[0; 16], 0), (2, 0)),
        ("header digest", changed(response(0), 1, 1), (1, 1)),
        ("data in a response", changed(response(0), 4, 25), (1, 4)),
        ("response without a command", response(6), (1, 20)),
        ("data without a command", c2h(LAST, 6, 0, BLOCK), (1, 8)),
        ("data for a write", c2h(LAST, 1, 0, BLOCK), (1, 8)),
        ("data beyond the end", c2h(LAST, 0, 0, 2 * BLOCK + 1), (4, 0)),
        ("data out of order", c2h(LAST, 0, BLOCK as u32, BLOCK), (2, 0)),
        ("more than any command", c2h(LAST, 0, 0, 8 * BLOCK + 1), (5, 0)),
        ("success before the end", c2h(LAST | FLAG_SUCCESS, 0, 0, BLOCK), (1, 1)),
        ("success without last", c2h(FLAG_SUCCESS, 0, 0, 2 * BLOCK), (1, 1)),
        ("request without a command", r2t(6, 0, BLOCK), (1, 8)),
        ("request for data of a read", r2t(0, 0, BLOCK), (1, 8)),
        ("request for data already sent", r2t(2, 0, BLOCK), (1, 8)),
        ("request beyond the end", r2t(1, 0, 4 * BLOCK + 1), (4, 0)),
        ("request for no bytes", r2t(1, 0, 0), (4, 0)),
        ("request out of order", r2t(1, BLOCK as u32, BLOCK), (4, 0)),
        ("request for a few bytes", r2t(1, 0, BLOCK - 1), (1, 16)),
    ];
    for (name, bytes, expected) in cases {
        let mut world = World::new(None, true);
        let write = |blocks: usize| HostCommand::Write {
            lba: 0,
            data: vec![1; blocks * BLOCK],
            is_forced: false,
        };
        world.host.submit(1, HostCommand::Read { lba: 0, blocks: 2 }).unwrap();
        world.host.submit(2, write(4)).unwrap();
        world.host.submit(3, write(1)).unwrap();
        let _sent = world.host.transmit().take();
        feed(&mut world.host, &bytes);
        let answer = world.host.transmit().take();
        assert_eq!(fault(&answer, kind::H2C_TERM, &bytes), expected, "{name}");
        let event = world.host.next_event();
        let is_fault =
            matches!(event, Some(HostEvent::Failed { reason: Reason::PduMalformed, .. }));
        assert!(is_fault, "{name}: {event:?}");
        assert!(world.host.place().is_empty() && !world.host.can_submit());
        assert_eq!(world.host.submit(4, HostCommand::Flush).unwrap_err().0, SubmitError::Closed);
    }
}

#[test]
fn a_success_without_all_data_ends_the_queue() {
    for (command, name) in [
        (HostCommand::Read { lba: 0, blocks: 1 }, "read"),
        (HostCommand::Write { lba: 0, data: vec![0; 4 * BLOCK], is_forced: false }, "write"),
    ] {
        let mut world = World::new(None, true);
        world.host.submit(1, command).unwrap();
        let _sent = world.host.transmit().take();
        feed(&mut world.host, &pdu(kind::CAPSULE_RESP, 0, &[0; 16], 0));
        let event = world.host.next_event();
        let is_fault =
            matches!(event, Some(HostEvent::Failed { reason: Reason::PduMalformed, .. }));
        assert!(is_fault, "{name}: {event:?}");
    }
}

/// A controller that answers without reading can't make the host's memory grow.
#[test]
fn an_answer_before_the_last_byte_of_its_command_has_left_ends_the_queue() {
    let request = |blocks: usize| {
        let with_length = data_pdu(kind::H2C_DATA, 0, 0, 9, 0, blocks * BLOCK);
        pdu(kind::R2T, 0, &with_length[8..24], 0)
    };
    let response = |status: Status| {
        let [low, high] = status.field().to_le_bytes();
        pdu(kind::CAPSULE_RESP, 0, &[&[0; 12][..], &[0, 0, low, high]].concat(), 0)
    };
    // In its capsule, requested at once, and requested in portions.
    for (blocks, at_once) in [(1, 0), (3, 3), (4, 4)] {
        for status in [Status::SUCCESS, Status::COMPARE_FAILURE] {
            for left in [0, 1] {
                let mut world = World::new(None, true);
                let data = vec![1; blocks * BLOCK];
                world
                    .host
                    .submit(1, HostCommand::Write { lba: 0, data, is_forced: false })
                    .unwrap();
                if at_once > 0 {
                    let _capsule = world.host.transmit().take();
                    feed(&mut world.host, &request(at_once));
                }
                let bytes = world.host.transmit().pending_bytes();
                assert!(bytes > blocks * BLOCK, "its data wait");
                world.host.transmit().advance(bytes - left);
                feed(&mut world.host, &response(status));
                match world.host.next_event() {
                    Some(HostEvent::Completed { status: ended, .. }) if left == 0 => {
                        assert_eq!(ended, status);
                    }
                    Some(HostEvent::Failed { reason: Reason::PduMalformed, detail, .. })
                        if left == 1 =>
                    {
                        assert_eq!(detail, "answered before it was sent");
                    }
                    event => panic!("{blocks} blocks, {status}, {left} left: {event:?}"),
                }
            }
        }
    }
}

#[test]
fn data_can_be_requested_in_portions_of_4096_bytes() {
    let mut world = World::new(None, true);
    let data = vec![1; 3 * BLOCK];
    world.host.submit(1, HostCommand::Write { lba: 0, data, is_forced: false }).unwrap();
    let _capsule = world.host.transmit().take();
    // The last one is all that is left, less than 4096 bytes.
    for (offset, length) in [(0, BLOCK), (BLOCK, BLOCK + 4), (2 * BLOCK + 4, BLOCK - 4)] {
        let with_length = data_pdu(kind::H2C_DATA, 0, 0, 9, offset as u32, length);
        feed(&mut world.host, &pdu(kind::R2T, 0, &with_length[8..24], 0));
        assert_eq!(world.host.next_event(), None);
        assert_eq!(world.host.transmit().take().len(), 24 + length);
    }
}

#[test]
fn a_termination_request_ends_the_queue_without_an_answer() {
    let mut world = World::new(None, true);
    feed(&mut world.controller, &pdu(kind::H2C_TERM, 0, &[1; 16], 24));
    let event = world.controller.next_event();
    assert!(matches!(event, Some(ControllerEvent::Failed { reason: Reason::QueueClosed, .. })));
    feed(&mut world.host, &pdu(kind::C2H_TERM, 0, &[1; 16], 128));
    let event = world.host.next_event();
    assert!(matches!(event, Some(HostEvent::Failed { reason: Reason::QueueClosed, .. })));
    let pending =
        world.host.transmit().pending_bytes() + world.controller.transmit().pending_bytes();
    assert_eq!(pending, 0);
}
