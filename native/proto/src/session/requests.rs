//! Requests of a session's user, and the memory that they refer to.

/// Most bytes of a message (64 GiB), which bounds the bitmaps (6 MiB each with 1408-byte units).
pub const MESSAGE_BYTES_MAX: u64 = 1 << 36;
/// Most data and parity units of a block together, so that its bits span at most five words.
pub const BLOCK_UNITS_MAX: u16 = 255;

/// Number of priorities. A message's units leave before those of all messages of lower priority
/// that wait; within a priority, messages leave by number. 0 is the lowest.
pub const PRIORITIES: u8 = 8;

/// How losses of a message are recovered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reliability {
    /// Units that are not acknowledged in time are sent again.
    SelectiveRepeat,
    /// Every `k` units are sent with `m` parity units, and any `k` of them suffice. Further losses
    /// are sent again.
    ErasureCoded {
        /// Data units of a block, at least 1.
        k: u8,
        /// Parity units of a block, at least 1.
        m: u8,
        /// Number of interleaved blocks, at least 1.
        depth: u8,
    },
    /// The scheme of the session's plan for the message's length
    /// ([`super::Session::install_plan`]); selective repeat for a stream.
    Auto,
    /// Every unit is sent once, and the send completes when all have left. The receiver recognises
    /// losses by the chunks that do not land, and completes the receive itself.
    Unreliable,
}

/// A message to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendRequest {
    /// Offset of its bytes in [`Memory`]. They must not change until the send completes.
    pub offset: u64,
    /// Its length in bytes; 0 is allowed.
    pub length: u64,
    /// How its losses are recovered.
    pub reliability: Reliability,
    /// A word delivered with the completion of the receive.
    pub immediate: Option<u32>,
    /// Below [`PRIORITIES`].
    pub priority: u8,
    /// Returned with the completion.
    pub user_data: u64,
}

/// A message whose units are announced as it goes ([`super::Session::continue_stream`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamRequest {
    /// Length of the range, at the start of the peer's buffer, in which its units may lie.
    pub length: u64,
    /// How its losses are recovered. Streams cannot use an erasure code.
    pub reliability: Reliability,
    /// A word delivered with the completion of the receive.
    pub immediate: Option<u32>,
    /// Below [`PRIORITIES`].
    pub priority: u8,
    /// Returned with the completion.
    pub user_data: u64,
}

/// Whole units of a stream that are contiguous at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamPart {
    /// Offset of its bytes in [`Memory`]. They must not change until the send completes.
    pub offset: u64,
    /// Offset in the peer's buffer, a multiple of the unit.
    pub remote_offset: u64,
    /// Length in bytes, at least 1: a multiple of the unit, or up to the end of the stream's range.
    pub length: u64,
}

/// A buffer for the peer's next message: the i-th send lands in the i-th receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// Offset of the buffer in [`Memory`].
    pub offset: u64,
    /// Its length in bytes. A longer message is aborted at both ends.
    pub length_max: u64,
    /// Returned with the completion.
    pub user_data: u64,
}

/// Why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// All slots are in use; post again after a completion.
    #[error("all slots are in use; post again after a completion")]
    Retry,
    /// The message is longer than [`MESSAGE_BYTES_MAX`], or its range overflows.
    #[error(
        "{length} bytes at offset {offset} are not a valid message (at most {MESSAGE_BYTES_MAX} bytes)"
    )]
    InvalidLength {
        /// Requested offset.
        offset: u64,
        /// Requested length.
        length: u64,
    },
    /// The code has no data or no parity units, or too many.
    #[error(
        "({k}, {m}) with {depth} blocks interleaved is not a valid code: each must be at least 1, \
         and a block has at most {BLOCK_UNITS_MAX} units"
    )]
    InvalidCode {
        /// Requested data units.
        k: u8,
        /// Requested parity units.
        m: u8,
        /// Requested number of interleaved blocks.
        depth: u8,
    },
    /// The priority is not below [`PRIORITIES`].
    #[error("priority {0} is not below {PRIORITIES}")]
    InvalidPriority(u8),
    /// A stream can't have a code, because the contents of its blocks are not known in advance.
    #[error("a stream cannot be erasure coded")]
    CodedStream,
    /// The part does not consist of whole units within the stream's range.
    #[error(
        "{length} bytes at {remote_offset} are not a valid part of the stream: a part consists of \
         whole units within its range"
    )]
    InvalidPart {
        /// Requested place in the peer's buffer.
        remote_offset: u64,
        /// Requested length.
        length: u64,
    },
    /// No such message is in progress, or it is not an open stream.
    #[error("message {0} is not in progress, or is not an open stream")]
    NotInProgress(u64),
    /// The session's unit is not decided yet.
    #[error("the session has no unit yet; post once it is established")]
    Undecided,
    /// The session drains: nothing new is sent.
    #[error("the session drains and sends nothing new")]
    Draining,
    /// The session is over.
    #[error("the session is closed")]
    Closed,
}

/// The memory that messages are sent from and land in. Offsets are always within posted requests.
///
/// Only authentic payload is written to it, each byte at most once per message.
pub trait Memory {
    /// Copies `into.len()` bytes out, starting at `offset`.
    fn read(&self, offset: u64, into: &mut [u8]);
    /// Appends a copy of `length` bytes, starting at `offset`.
    fn append(&self, offset: u64, length: usize, out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + length, 0);
        self.read(offset, &mut out[start..]);
    }
    /// Copies `from` in, at `offset`.
    fn write(&mut self, offset: u64, from: &[u8]);
    /// Reports that all bytes of this chunk are in memory. Called once per chunk, after the last
    /// write to it.
    fn chunk_landed(&mut self, slot: u16, chunk: u32);
    /// Reports that a new message of `chunk_count` chunks starts to land in this slot (message
    /// number modulo slots), which voids the chunks published there before. Called once per
    /// message, before its first write. An implementation that publishes chunks to a reader also
    /// clears them at `post_receive`.
    fn chunks_cleared(&mut self, slot: u16, chunk_count: u32);
}
