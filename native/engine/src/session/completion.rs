//! Entries of the completion queue: encoding, and decoding on the job's side
//! (docs/formats/ring-abi.md).

use super::entry::{FLAG_IMMEDIATE, Opcode, word};
use super::layout::ENTRY_BYTES;

/// Bytes of a packet map, which bounds the units of a chunk.
pub const PACKET_MAP_BYTES: usize = 16;

/// The outcome of an operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Status {
    /// Everything was delivered and acknowledged.
    #[default]
    Ok,
    /// The session ended before the answer arrived.
    OutcomeUnknown,
    /// The peer or the session aborted the message.
    Aborted,
    /// The message was longer than its receive.
    TooLong,
    /// The session could not accept the operation.
    Refused,
    /// The sender cancelled the message.
    Cancelled,
    /// The receiver wanted no more of the message than had landed.
    Partial,
    /// The job has reached its limit of operations of this kind in progress.
    Limit,
    /// This or the peer's fabric is stopping: nothing new is sent.
    Draining,
    /// Another receive in progress in this session uses some of the same bytes.
    Overlap,
    /// It had not ended by its deadline, and was cancelled.
    Expired,
}

impl Status {
    const ALL: [Self; 11] = [
        Self::Ok,
        Self::OutcomeUnknown,
        Self::Aborted,
        Self::TooLong,
        Self::Refused,
        Self::Cancelled,
        Self::Partial,
        Self::Limit,
        Self::Draining,
        Self::Overlap,
        Self::Expired,
    ];

    /// Name in the job's API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::Aborted => "aborted",
            Self::TooLong => "too_long",
            Self::Refused => "refused",
            Self::Cancelled => "cancelled",
            Self::Partial => "partial",
            Self::Limit => "limit",
            Self::Draining => "draining",
            Self::Overlap => "overlap",
            Self::Expired => "expired",
        }
    }

    fn code(self) -> u8 {
        self as u8
    }
}

/// One completed operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Completion {
    /// The submission's operation.
    pub opcode: Opcode,
    /// How it ended.
    pub status: Status,
    /// The submission's user data.
    pub user_data: u64,
    /// Index of the submission, which identifies the operation.
    pub handle: u64,
    /// Message number in the session.
    pub message: u64,
    /// Bytes of the message.
    pub length: u64,
    /// The sender's immediate, at the receiver.
    pub immediate: Option<u32>,
    /// Sends: nanoseconds from the first transmission to the acknowledgement of the last byte.
    pub duration_nanos: u64,
    /// Packet maps: bit i of byte j is set if unit 8j + i of the chunk has landed.
    pub packets: [u8; PACKET_MAP_BYTES],
}

impl Completion {
    /// Encodes the entry as stored in the ring.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        entry[0] = self.opcode as u8;
        entry[1] = if self.immediate.is_some() { FLAG_IMMEDIATE } else { 0 };
        entry[2] = self.status.code();
        entry[4..8].copy_from_slice(&self.immediate.unwrap_or(0).to_le_bytes());
        for (at, value) in [
            (8, self.message),
            (16, self.length),
            (24, self.user_data),
            (32, self.duration_nanos),
            (40, self.handle),
        ] {
            entry[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        entry[48..].copy_from_slice(&self.packets);
        entry
    }

    /// Decodes an entry on the job's side. `None` if this version never writes such an entry.
    pub fn parse(entry: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let immediate = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        Some(Self {
            opcode: Opcode::parse(entry[0])?,
            status: *Status::ALL.get(usize::from(entry[2]))?,
            immediate: (entry[1] & FLAG_IMMEDIATE != 0).then_some(immediate),
            message: word(entry, 8),
            length: word(entry, 16),
            user_data: word(entry, 24),
            duration_nanos: word(entry, 32),
            handle: word(entry, 40),
            packets: *entry[48..].first_chunk()?,
        })
    }
}
