//! Entries of the completion queue: encoding, and reading them on the job's side (docs/formats/ring-abi.md).

use super::entry::{FLAG_IMMEDIATE, Opcode, word};
use super::layout::ENTRY_BYTES;

/// Bytes of a packet map: so many units of a chunk can be told.
pub const PACKET_MAP_BYTES: usize = 16;

/// How an operation ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Status {
    /// Everything was delivered and acknowledged.
    #[default]
    Ok,
    /// The session ended before the answer came.
    OutcomeUnknown,
    /// The peer or the session gave the message up.
    Aborted,
    /// The message was longer than the receive that it met.
    TooLong,
    /// The session could not take the operation.
    Refused,
    /// The sender gave the message up.
    Cancelled,
    /// The receiver wanted no more of the message than had landed.
    Partial,
    /// The job has as many operations of the kind under way as it may.
    Limit,
    /// The fabric stops, or the peer's: nothing new is sent.
    Draining,
    /// Another receive of this session is under way in the same bytes.
    Overlap,
}

impl Status {
    const ALL: [Self; 10] = [
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
    ];

    /// Name as the job's language shows it.
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
        }
    }

    fn code(self) -> u8 {
        self as u8
    }
}

/// One finished operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Completion {
    /// What the submission asked for.
    pub opcode: Opcode,
    /// How it ended.
    pub status: Status,
    /// The number that the submission carried.
    pub user_data: u64,
    /// Index of the submission, which names the operation.
    pub handle: u64,
    /// Message number in the session.
    pub message: u64,
    /// Bytes of the message.
    pub length: u64,
    /// The sender's immediate, at the receiver.
    pub immediate: Option<u32>,
    /// Sends: nanoseconds from the first transmission to the acknowledgement of the last byte.
    pub duration_nanos: u64,
    /// Packet maps: bit i of byte j says that unit 8j + i of the chunk has landed.
    pub packets: [u8; PACKET_MAP_BYTES],
}

impl Completion {
    /// Writes the entry as it lies in the ring.
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

    /// Reads an entry on the job's side. `None` if this version never writes such a one.
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
