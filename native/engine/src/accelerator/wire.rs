//! What the daemon and an emulated card say to each other (docs/formats/card.md): messages over a
//! Unix socket of type SEQPACKET, and rings in memory that the daemon creates.
//!
//! All numbers are little-endian. Requests and answers alternate on a connection; the first request
//! is [`Operation::Hello`]. Keys and queues belong to the connection and end with it, because it is
//! on this connection that the card shows what it is. A queue also has a socket of its own, on which
//! each message, one byte, says that there are new submissions; it ends with that socket.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use sealane_proto::sector::{BLOCK_BYTES, DATA_BYTES};

/// Version of this protocol.
pub const VERSION: u32 = 1;
/// Largest message: evidence with its certificates.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Descriptors that come with a queue: arena, submissions, completions, an eventfd by which the card
/// tells of completions, and its end of the queue's socket, on which it can't send.
pub const QUEUE_DESCRIPTORS: usize = 5;

/// Bytes before the data of a slot; additional data ends where the data begins.
pub const HEADROOM_BYTES: usize = 64;
/// A slot of the arena: headroom, data, and behind it the tag and room.
pub const SLOT_BYTES: usize = HEADROOM_BYTES + BLOCK_BYTES;
/// Offset of the first entry of a ring. Before it, at 0, is the number of entries ever written.
pub const ENTRIES_OFFSET: usize = 64;

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// Version (4) → [`Welcome`].
    Hello = 1,
    /// Nonce (32) → evidence.
    Evidence = 2,
    /// Key (32) → slot (2).
    Load = 3,
    /// Slot (2) → nothing.
    Unload = 4,
    /// Depth (2), with the descriptors → nothing.
    Open = 5,
}

impl Operation {
    /// The operation of a number.
    #[must_use]
    pub fn of(number: u32) -> Option<Self> {
        [Self::Hello, Self::Evidence, Self::Load, Self::Unload, Self::Open]
            .into_iter()
            .find(|operation| *operation as u32 == number)
    }
}

/// How a request ended; the first four bytes of each answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Answer {
    /// What was asked for follows.
    Done = 0,
    /// No slot or queue is left.
    Full = 1,
    /// The request isn't understood or not allowed.
    Refused = 2,
}

/// The card's answer to a hello.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Welcome {
    /// [`VERSION`].
    pub version: U32,
    /// Jobs that a queue may hold.
    pub depth: U16,
    /// Keys that the card can hold.
    pub key_slots: U16,
    /// Most bytes of additional data.
    pub aad_bytes_max: U16,
    /// 1 if the bus is protected.
    pub has_protected_bus: U16,
    /// Name of the kind, filled with zeros.
    pub profile: [u8; 20],
}

/// A job, as the daemon writes it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Submission {
    /// Name of the job.
    pub cookie: U64,
    /// Slot of the arena.
    pub slot: U32,
    /// Place of the key.
    pub key: U16,
    /// Bytes of additional data.
    pub aad_bytes: U16,
    /// The nonce.
    pub nonce: [u8; 12],
    /// Zero.
    pub reserved: [u8; 4],
}

/// The end of a job, as the card writes it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Completion {
    /// Name of the job.
    pub cookie: U64,
    /// 1 if it is sealed, 0 if not.
    pub is_sealed: U64,
}

const _: () = assert!(size_of::<Submission>() == 32 && size_of::<Completion>() == 16);

/// Bytes of the ring of a queue of this depth. A ring has an entry for each job in flight.
#[must_use]
pub fn ring_bytes(depth: u16, entry_bytes: usize) -> usize {
    ENTRIES_OFFSET + usize::from(depth) * entry_bytes
}

/// Offset of an entry, by its number since the queue was opened.
#[must_use]
pub fn entry_offset(number: u64, depth: u16, entry_bytes: usize) -> u64 {
    (ENTRIES_OFFSET + (number % u64::from(depth)) as usize * entry_bytes) as u64
}

/// Bytes of the arena of a queue of this depth.
#[must_use]
pub fn arena_bytes(depth: u16) -> usize {
    usize::from(depth) * SLOT_BYTES
}

/// Offset of a slot's data.
#[must_use]
pub fn data_offset(slot: u16) -> u64 {
    (usize::from(slot) * SLOT_BYTES + HEADROOM_BYTES) as u64
}

/// Offset of a slot's tag.
#[must_use]
pub fn tag_offset(slot: u16) -> u64 {
    data_offset(slot) + DATA_BYTES as u64
}
