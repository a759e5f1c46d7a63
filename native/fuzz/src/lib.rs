//! The fuzz targets, as functions of their input bytes. Each one decodes its input into steps, so
//! that the fuzzer gets past checksums and MACs, and asserts what must hold regardless of the peer.

mod card;
mod controller;
mod gcm;
mod host;
#[path = "../../proto/tests/session/hostile.rs"]
mod hostile;
mod recovery;
mod script;
mod store;

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

pub use card::card_ring;
pub use gcm::gcm;
pub use recovery::{store_recovery, store_recovery_in_place};
pub use store::store_page;

use script::Script;
use sealane_engine::session::completion::Completion;
use sealane_engine::session::entry::Submission;
use sealane_engine::session::layout::{Layout, SUBMISSION_PRODUCER};
use sealane_engine::session::ring::DaemonRing;
use sealane_engine::shared_memory::{PeerAccess, SharedMemory};
use sealane_proto::aead::Secret;
use sealane_proto::nvme::controller_queue::blocks_of;
use sealane_proto::nvme::operation::{Access, CommandSet, NamespaceFormat};
use sealane_proto::nvme::pdu::{Digests, PduLimits};
use sealane_proto::nvme::reader::{PduReader, Piece, StreamSink};
use sealane_proto::sector::{
    BLOCK_BYTES, CounterRange, DATA_BYTES, SealKey, VolumeIdentity, check_conditional,
    check_written, field, take_expected_iv,
};
use sealane_proto::secure_queue::{QueueContext, SecureQueue};
use sealane_proto::session::frame::Frames;
use sealane_proto::session::packet::Header as PacketHeader;
use sealane_proto::session::{PATHS_MAX, Version};

/// Number of blocks of the namespace.
pub const BLOCKS: u64 = 64;

/// A controller's plain queue with a host that may send anything.
pub fn controller_queue(data: &[u8]) {
    controller::run(data, false);
}

/// A controller's secure queue with a man in the middle who has the key or changes a bit.
pub fn controller_queue_secure(data: &[u8]) {
    controller::run(data, true);
}

/// A host's plain queue with a controller that may send anything.
pub fn host_queue(data: &[u8]) {
    host::run(data, false);
}

/// A host's secure queue with a man in the middle who has the key or changes a bit.
pub fn host_queue_secure(data: &[u8]) {
    host::run(data, true);
}

/// The reader gives the same pieces regardless of how the stream is split, and never more data than
/// allowed.
pub fn pdu_reader(data: &[u8]) {
    let mut script = Script::new(data);
    let digests = Digests::from_field(script.byte());
    let step = usize::from(script.byte()) + 1;
    let limits = PduLimits { capsule_data_max: 64, data_max: 256, digests };
    let bytes = script.rest();
    let whole = pieces(limits, bytes, bytes.len().max(1));
    assert_eq!(whole, pieces(limits, bytes, step));
}

fn pieces(limits: PduLimits, bytes: &[u8], step: usize) -> (String, Vec<u8>) {
    let mut reader = PduReader::new(limits);
    let (mut found, mut data) = (String::new(), Vec::new());
    for mut input in bytes.chunks(step) {
        loop {
            match reader.next(&mut input) {
                Ok(None) => break,
                Ok(Some(Piece::Header(header, bytes))) => {
                    assert!(bytes <= limits.data_max);
                    write!(found, "{header:?} {bytes};").expect("a string grows");
                }
                Ok(Some(Piece::Data(part))) => data.extend_from_slice(part),
                Ok(Some(Piece::End(is_intact))) => {
                    write!(found, "{is_intact};").expect("a string grows");
                }
                Err(error) => {
                    write!(found, "{error}").expect("a string grows");
                    assert!(reader.header().len() <= 128);
                    return (found, data);
                }
            }
        }
    }
    (found, data)
}

/// A sealed sector opens if and only if nothing was changed, and both checks of its form agree.
pub fn sector_open(data: &[u8]) {
    let mut script = Script::new(data);
    let lba = script.word();
    let identity = VolumeIdentity { volume_id: [1; 16], generation: 1 };
    let key = SealKey::new(&Secret::take(&mut [3; 32]), identity, 1);
    let mut range = CounterRange::new(1, 1, 1, 1 << 20).expect("a valid range");
    let mut block = [0; BLOCK_BYTES];
    key.seal(range.take().expect("counters are left"), lba, &[0; DATA_BYTES], &mut block);
    let sealed = block;
    while !script.is_empty() {
        let at = usize::from(script.half()) % BLOCK_BYTES;
        // The metadata has most of the interesting bytes.
        let at = if script.byte() & 1 == 0 { at } else { DATA_BYTES + at % 64 };
        block[at] = script.byte();
    }
    let is_same = block == sealed;
    let mut plain = [1; DATA_BYTES];
    let opened = key.open(lba, &block, &mut plain);
    assert_eq!(opened.is_ok(), is_same);
    assert_eq!(plain, [0; DATA_BYTES], "what was sealed, or wiped");
    if check_written(&block).is_ok() {
        assert!(check_conditional(&block).is_ok());
    } else if check_conditional(&block).is_ok() {
        take_expected_iv(&mut block);
        assert!(check_written(&block).is_ok());
    }
}

/// A packet header that decodes encodes to the same bytes; iterating over frames ends.
pub fn session_packet(data: &[u8]) {
    if let Ok((header, length)) = PacketHeader::decode(data) {
        let mut encoded = Vec::new();
        header.encode(&mut encoded);
        assert_eq!(encoded, data[..length]);
    }
    let frames = Frames::new(data, Version::V6, PATHS_MAX);
    let is_valid = frames.validate().is_ok();
    let mut count = 0;
    for frame in frames {
        count += 1;
        let Ok(frame) = frame else {
            assert!(!is_valid);
            return;
        };
        let mut encoded = Vec::new();
        frame.encode(&mut encoded);
        let again = Frames::new(&encoded, Version::V6, PATHS_MAX).next();
        assert_eq!(again, Some(Ok(frame)));
    }
    assert!(is_valid && count <= data.len());
}

/// A fabric's session with a peer that has the keys and sends anything.
pub fn session_peer(data: &[u8]) {
    hostile::run(data);
}

/// Regardless of what a job writes into its rings, the daemon's end takes valid submissions or
/// reports a fault, and can complete every submission taken.
pub fn job_ring(data: &[u8]) {
    const REGION_BYTES: u64 = 1 << 16;
    let layout = Layout { entries: 8, region_bytes: REGION_BYTES, slots: 4, chunk_bytes: 4096 };
    let memory = |name, bytes, access| SharedMemory::create(name, bytes, access).expect("memory");
    let submission = memory("fuzz", layout.submission_bytes(), PeerAccess::Writes);
    let completion = memory("fuzz", layout.completion_bytes(), PeerAccess::Reads);
    let file = submission.file().try_clone_to_owned().expect("a descriptor");
    let job = SharedMemory::attach(file, PeerAccess::Writes).expect("the job's mapping");
    let mut ring = DaemonRing::new(layout, submission, completion);
    let mut script = Script::new(data);
    let mut taken = Vec::new();
    while !script.is_empty() {
        match script.byte() % 4 {
            0 => {
                let words = layout.submission_bytes() as u64 / 8;
                let offset = u64::from(script.half()) % words * 8;
                job.word(offset).store(script.word(), Ordering::Release);
            }
            1 => {
                let next = job.word(SUBMISSION_PRODUCER).load(Ordering::Acquire).wrapping_add(1);
                job.word(SUBMISSION_PRODUCER).store(next, Ordering::Release);
            }
            2 => match ring.take() {
                Ok(Some((handle, submission))) => {
                    assert!(lies_inside(&submission, REGION_BYTES));
                    assert!(taken.last().is_none_or(|last| *last < handle));
                    taken.push(handle);
                    assert!(taken.len() <= layout.entries as usize);
                }
                Ok(None) => {}
                Err(fault) => {
                    assert!(fault.reason().starts_with("ring."));
                    return;
                }
            },
            _ => {
                ring.slot_posted(script.half() % 4, script.word() >> 1, u32::from(script.half()));
                ring.chunk_landed(script.half(), u32::from(script.half()));
                if let Some(handle) = taken.pop() {
                    ring.complete(&Completion { handle, ..Completion::default() });
                }
            }
        }
    }
}

fn lies_inside(submission: &Submission, region_bytes: u64) -> bool {
    let bytes = if submission.kind.has_range() { submission.length } else { 0 };
    submission.offset.checked_add(bytes).is_some_and(|end| end <= region_bytes)
}

/// A ring entry that parses refers to bytes inside the region, and parses again after encoding.
pub fn ring_entry(data: &[u8]) {
    let mut script = Script::new(data);
    let region_bytes = script.word();
    let Some(entry) = script.rest().first_chunk() else { return };
    if let Ok(submission) = Submission::parse(entry, region_bytes) {
        assert!(lies_inside(&submission, region_bytes));
        assert_eq!(Submission::parse(&submission.encode(), region_bytes), Ok(submission));
    }
    if let Some(completion) = Completion::parse(entry) {
        assert_eq!(Completion::parse(&completion.encode()), Some(completion));
    }
}

fn secure() -> SecureQueue {
    let context = QueueContext {
        volume_id: [1; 16],
        host_nqn: "nqn.2026-11.dev.sealane:host".into(),
        queue_id: 1,
        association_epoch: 1,
        incarnation: 1,
    };
    SecureQueue::new(&Secret::take(&mut [8; 32]), &context)
}

fn block_bytes(is_secure: bool) -> usize {
    if is_secure { BLOCK_BYTES } else { DATA_BYTES }
}

fn namespaces(is_secure: bool, access: Access) -> Vec<NamespaceFormat> {
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
    let block_bytes = block_bytes(is_secure);
    vec![NamespaceFormat { nsid: 1, block_bytes, block_count: BLOCKS, commands, access }]
}

/// Sectors with the form of written ones; they are never opened.
fn sectors(data: &mut [u8]) {
    for block in blocks_of(data) {
        block.fill(0);
        block[DATA_BYTES + field::IV.0] = 1;
        block[DATA_BYTES + field::VERSION.0] = 1;
    }
}

/// Feeds bytes like a connection: directly to their place if there is one, otherwise in portions.
fn feed(queue: &mut impl StreamSink, mut bytes: &[u8], step: usize) {
    while !bytes.is_empty() {
        let place = queue.place();
        let (placed, rest) = bytes.split_at(place.len().min(bytes.len()));
        place[..placed.len()].copy_from_slice(placed);
        queue.placed(placed.len());
        let (portion, rest) = rest.split_at(rest.len().min(step.max(1)));
        queue.receive(portion);
        bytes = rest;
    }
}
