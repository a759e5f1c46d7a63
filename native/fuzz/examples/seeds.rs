//! Writes the committed corpora: `cargo run --example seeds` in `native/fuzz`. One small file for
//! each thing a target can do, so that the fuzzer starts beyond every checksum.

use std::path::Path;
use std::{fs, io};

use sealane_engine::session::entry::{Operation, Submission, Terms};
use sealane_engine::storage::stores::fresh::geometry::Geometry;
use sealane_engine::storage::stores::fresh::keys::{Authority, BODY_BYTES, StoreKeys};
use sealane_engine::storage::stores::fresh::log::{LogPage, Record};
use sealane_engine::storage::stores::fresh::placed::Placed;
use sealane_engine::storage::stores::fresh::superblock::Superblock;
use sealane_engine::storage::stores::pages::Page;
use sealane_proto::freshness::leaf::{Ivs, LeafFormat};
use sealane_proto::nvme::command::{CompletionEntry, SubmissionEntry};
use sealane_proto::nvme::pdu::{
    CapsuleCmd, CapsuleResp, CommonHeader, DataHeader, Digests, FLAG_LAST, PduError, R2t, kind,
    termination,
};
use sealane_proto::nvme::transmit::{Data, TransmitQueue};
use sealane_proto::session::frame::{AbortReason, Frame, push_credit_length, push_lost_run};
use sealane_proto::session::packet::{Header, Kind, Version};
use sealane_proto::session::{LossCounts, PathCounts, PathId, Reliability};
use sealane_proto::wire::IntoBytes;

/// Opcodes by their index in the controller target's table.
const CONTROLLER_COMMANDS: u8 = 12;
/// Number of commands of the host target.
const HOST_COMMANDS: u8 = 8;

fn main() -> io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let put = |target: &str, name: String, bytes: &[u8]| {
        let folder = root.join(target);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join(name), bytes)
    };
    for digests in 0..4 {
        put(
            "pdu_reader",
            format!("stream-{digests}"),
            &[&[digests, 9], &stream(digests)[..]].concat(),
        )?;
        for target in ["controller_queue", "controller_queue_secure"] {
            for command in 0..CONTROLLER_COMMANDS {
                for shape in [0, 4] {
                    let name = format!("command-{command}-{shape}-{digests}");
                    put(target, name, &controller_script(digests, command, shape))?;
                }
            }
            put(target, format!("fused-{digests}"), &fused_script(digests))?;
        }
        for target in ["host_queue", "host_queue_secure"] {
            for command in 0..HOST_COMMANDS {
                put(
                    target,
                    format!("command-{command}-{digests}"),
                    &host_script(digests, command),
                )?;
            }
        }
    }
    for (length, aad_bytes) in [(0, 0), (16, 39), (513, 64), (1408, 39), (4096, 33)] {
        put("gcm", format!("{length}-{aad_bytes}"), &gcm_script(length, aad_bytes))?;
    }
    for (name, changes) in [("same", &[][..]), ("mac", &[28, 0, 1, 7]), ("tag", &[0, 0, 1, 7])] {
        put("sector_open", name.into(), &[&[5, 0, 0, 0, 0, 0, 0, 0], changes].concat())?;
    }
    session_packets(&put)?;
    let unit = |index| [4, 1, 0, index, 0, 0, 0, 0, 0, 0, 0, 0];
    let landed = [&[9][..], &unit(0), &unit(1), &unit(1)].concat();
    put("session_peer", "landed".into(), &landed)?;
    for frame in 0..15 {
        let sent =
            [&[8, 0, 5, 2, 2, 0, 0, 2, 4, 4, 4][..], &[2, frame, 0, 0, 2, 1, 1, 1, 1]].concat();
        put("session_peer", format!("frame-{frame}"), &sent)?;
    }
    let elsewhere = [&[9, 12, 1][..], &unit(0), &[12, 0], &unit(1)].concat();
    put("session_peer", "two-paths".into(), &elsewhere)?;
    // Writes a submission entry word by word, advances the producer, takes the entry and completes
    // it.
    for opcode in 1..=8_u64 {
        let write =
            |place: u16, word: u64| [&[0][..], &place.to_le_bytes(), &word.to_le_bytes()].concat();
        let steps = [write(16, opcode), write(21, 0), vec![1, 2, 3, 1, 0], vec![0; 12], vec![2]];
        put("job_ring", format!("opcode-{opcode}"), &steps.concat())?;
    }
    // Two jobs, which end in the other order; then one that ends twice, one that never was, and more
    // than there are.
    let pair = [0, 7, 0, 8, 4, 2, 1, 1, 2, 0, 1, 7];
    put("card_ring", "other-order".into(), &pair)?;
    let ended = 16_u64.to_le_bytes(); // the third job, in the slot of the first
    let twice = [&pair[..], &[0, 9, 2, 0, 1, 7, 2, 1], &ended, &[1, 7]].concat();
    put("card_ring", "twice".into(), &twice)?;
    let never = [&[0, 7, 2, 1][..], &9_u64.to_le_bytes(), &[1, 7]].concat();
    put("card_ring", "never-was".into(), &never)?;
    let overrun = [&[0, 7, 1, 0, 0][..], &(1_u64 << 40).to_le_bytes(), &[5, 7]].concat();
    put("card_ring", "overrun".into(), &overrun)?;
    let written = [&[0, 7, 3, 64, 0, 4][..], &[1, 2, 3, 4], &[2, 0, 0, 6, 7]].concat();
    put("card_ring", "slot-written".into(), &written)?;
    for kind in operations() {
        let has_length = kind.has_range() || matches!(kind, Operation::Stream(_));
        let length = if has_length { 64 } else { 0 };
        let entry = Submission { kind, offset: 0, length, user_data: 7 }.encode();
        let bytes = [&(1_u64 << 20).to_le_bytes()[..], &entry].concat();
        put("ring_entry", kind.opcode().name().into(), &bytes)?;
    }
    store_pages(&put)?;
    let written = [12, 3, 0, 1, 0, 0, 0, 0x7b, 9, 2, 0, 4, 20, 1, 0, 11, 5];
    put("store_recovery", "whole".into(), &written)?;
    for (name, change) in [
        ("checkpoint", [1, 9, 24, 0, 255, 255]),
        ("log", [3, 9, 32, 0, 255, 255]),
        ("table", [7, 9, 40, 0, 255, 255]),
        ("swapped", [7, 2, 8, 0, 0, 0]),
    ] {
        put("store_recovery", name.into(), &[&written[..], &change].concat())?;
        put("store_recovery_in_place", name.into(), &[&written[..], &change].concat())?;
    }
    put("store_recovery_in_place", "whole".into(), &written)?;
    let block = [201, 48, 16, 16, 7, 7, 7, 7];
    put("store_recovery_in_place", "metadata".into(), &[&written[..], &block].concat())?;
    Ok(())
}

/// Pages as written by stores, one of each kind.
fn store_pages(put: &impl Fn(&str, String, &[u8]) -> io::Result<()>) -> io::Result<()> {
    let keys = StoreKeys::new(&[1; 16], &[7; 32], &Authority::Device);
    let geometry = Geometry::placed(1000, Placed::ENTRIES_PER_LEAF);
    let superblock = Superblock { uuid: [1; 16], seed: [7; 32], geometry };
    // Epoch, number and key are those that the target parses with.
    fn log<F: LeafFormat>(keys: &StoreKeys, entry: F::Entry) -> Page {
        let entry = Record::written(5, entry);
        let records = vec![entry, Record::Void { lba: 7, blocks: 9 }];
        let (flushed, sequence, previous) = (1, 8, [4; 16]);
        let page = LogPage { epoch: 1, number: 2, flushed, sequence, previous, records };
        page.encode::<F>(&keys.log(1, &[3; 16])).0
    }
    let placed = Placed::decode(&[1; 54]);
    let mut leaves = [Page::ZERO; 2];
    Placed::set(&mut leaves[0].0, 3, Some(&placed));
    Ivs::set(&mut leaves[1].0, 3, Some(&[1; 12]));
    let magic = |magic: &[u8; 8]| {
        let mut page = Page::ZERO;
        page.0[..8].copy_from_slice(magic);
        page
    };
    let pages = [
        superblock.encode(&keys),
        magic(b"SEALCHKP"),
        log::<Placed>(&keys, placed),
        log::<Ivs>(&keys, [1; 12]),
        magic(b"SEALNODE"),
        leaves[0],
        leaves[1],
        Page([7; 4096]),
    ];
    for (kind, page) in (0..).zip(pages) {
        let end = page.0.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        // The target computes the tags again.
        let end = if end > BODY_BYTES && kind < 5 {
            page.0[..BODY_BYTES].iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1)
        } else {
            end
        };
        put("store_page", format!("page-{kind}"), &[&[kind], &page.0[..end]].concat())?;
    }
    Ok(())
}

/// A header of each kind, and each frame.
fn session_packets(put: &impl Fn(&str, String, &[u8]) -> io::Result<()>) -> io::Result<()> {
    let unit = |is_stream, immediate| {
        let (k, m) = if is_stream { (0, 0) } else { (4, 2) };
        Kind::Unit { message: 3, unit: 1, length: 5000, k, m, is_stream, immediate }
    };
    for (name, kind) in [
        ("control", Kind::Control),
        ("unit", unit(false, None)),
        ("immediate", unit(false, Some(7))),
        ("stream", unit(true, None)),
    ] {
        let (version, connection_id) = (Version::V6, 1);
        let header =
            Header { version, connection_id, epoch: 1, channel: 0, packet_number: 9, kind };
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        put("session_packet", name.into(), &bytes)?;
    }
    let (mut lengths, mut runs) = (Vec::new(), Vec::new());
    [5000, 1 << 39].into_iter().for_each(|length| push_credit_length(&mut lengths, length));
    [(3, 2), (9, 1)].into_iter().for_each(|run| push_lost_run(&mut runs, run));
    let (path, message, reason) = (PathId(1), 3, AbortReason::Cancelled);
    let losses = LossCounts { lost: 4, runs: 2, found: 1, duplicates: 1, dropped: 3 };
    let counts = PathCounts { received: 9, ect0: 8, ect1: 0, ce: 1 };
    for (name, frame) in [
        ("ack", Frame::Ack { completed_end: 3, credit_end: 5 }),
        ("slice", Frame::Slice { message, cumulative: 1, start: 8, bitmap: &[0x5a, 1] }),
        ("credit", Frame::Credit { start: 3, lengths: &lengths }),
        ("abort-send", Frame::AbortSend { message, reason }),
        ("abort-receive", Frame::AbortReceive { message, reason: AbortReason::Completed }),
        ("stream-end", Frame::StreamEnd { message, units: 4, length: 5000, immediate: Some(7) }),
        ("ping", Frame::Ping),
        ("losses", Frame::Losses { path, runs: &runs }),
        ("loss-counts", Frame::LossCounts { path, counts: losses }),
        ("path-challenge", Frame::PathChallenge { token: 7 }),
        ("path-response", Frame::PathResponse { token: 7 }),
        ("path-counts", Frame::PathCounts { path, newest: 9, age_nanos: 5, counts }),
        ("unit-bytes", Frame::Unit { unit_bytes: 1408 }),
        ("ack-cadence", Frame::AckCadence { is_answer: false, delay_nanos: 3500 }),
        ("draining", Frame::Draining { is_done: true }),
        ("close", Frame::Close { code: 1 }),
    ] {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        put("session_packet", format!("frame-{name}"), &bytes)?;
    }
    Ok(())
}

/// One of each operation.
fn operations() -> [Operation; 8] {
    let reliability = Reliability::ErasureCoded { k: 4, m: 2, depth: 2 };
    [
        Operation::Send(Terms {
            immediate: Some(7),
            priority: 3,
            deadline: Some(9),
            ..Terms::new(reliability)
        }),
        Operation::Receive,
        Operation::Stream(Terms::new(Reliability::Unreliable)),
        Operation::Continue { stream: 3, remote_offset: 4096 },
        Operation::End { stream: 3 },
        Operation::Cancel { operation: 3 },
        Operation::Complete { receive: 3 },
        Operation::PacketMap { receive: 3, chunk: 2 },
    ]
}

/// A command with two blocks on request or one in the capsule, the requested data, and the
/// completion.
fn controller_script(digests: u8, command: u8, shape: u8) -> Vec<u8> {
    let blocks = if shape & 4 == 0 { 3 } else { 0 };
    let mut script = vec![digests, 255, 1, command, shape, 1, 2, blocks];
    for _ in 0..4 {
        script.extend([4, 0, 255]);
    }
    script.extend([6, 0, 9]);
    script
}

fn fused_script(digests: u8) -> Vec<u8> {
    vec![digests, 255, 1, 3, 5, 1, 2, 0, 1, 1, 6, 2, 2, 0, 6, 0]
}

fn host_script(digests: u8, command: u8) -> Vec<u8> {
    let submit = [1, 0x10 | command, 3];
    let request = [3, 0, 0, 9, 0];
    let data = [4, 0, 1];
    let respond = [6, 0, 0, 6, 1, 0];
    [&[digests, 255][..], &submit, &request, &data, &respond].concat()
}

/// A key, a nonce, and unaligned data and additional data of these lengths.
fn gcm_script(length: usize, aad_bytes: u16) -> Vec<u8> {
    let mut script = vec![7; 32 + 12];
    script.extend_from_slice(&aad_bytes.to_le_bytes());
    script.extend_from_slice(&[5, 77, 1]);
    script.extend((0..usize::from(aad_bytes) + length).map(|index| (index * 7) as u8));
    script
}

/// One PDU of each kind.
fn stream(digests: u8) -> Vec<u8> {
    let digests = Digests::from_field(digests);
    let data = DataHeader {
        common: CommonHeader::new(kind::H2C_DATA, FLAG_LAST, 20, digests),
        cid: 1.into(),
        tag: 2.into(),
        offset: 0.into(),
        length: 20.into(),
        reserved: [0; 4],
    };
    let answer =
        DataHeader { common: CommonHeader::new(kind::C2H_DATA, FLAG_LAST, 20, digests), ..data };
    let request = R2t {
        common: CommonHeader::new(kind::R2T, 0, 0, digests),
        cid: 1.into(),
        tag: 2.into(),
        offset: 0.into(),
        length: 20.into(),
        reserved: [0; 4],
    };
    let common = CommonHeader::new(kind::CAPSULE_CMD, 0, 20, digests);
    let command = CapsuleCmd { common, entry: SubmissionEntry::default() };
    let common = CommonHeader::new(kind::CAPSULE_RESP, 0, 0, digests);
    let response = CapsuleResp { common, entry: CompletionEntry::default() };
    let mut out = TransmitQueue::default();
    out.put_pdu(command.as_bytes(), Data::Copied(&[1; 20]));
    out.put_pdu(request.as_bytes(), Data::None);
    out.put_pdu(data.as_bytes(), Data::Copied(&[2; 20]));
    out.put_pdu(answer.as_bytes(), Data::Copied(&[3; 20]));
    out.put_pdu(response.as_bytes(), Data::None);
    out.put(&termination(true, PduError::field(2, "header length"), command.as_bytes()));
    out.take()
}
