//! What the user of a session asks for, and the memory that it is done in.

/// Bytes of a message, most (64 GiB): bounds the bitmaps (6 MiB each at 1408-byte units).
pub const MESSAGE_BYTES_MAX: u64 = 1 << 36;
/// Data and parity units of a block together, most: a block's bits then span five words at most.
pub const BLOCK_UNITS_MAX: u16 = 255;

/// How a message survives loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reliability {
    /// What is not acknowledged in time is sent again.
    SelectiveRepeat,
    /// Every `k` units travel with `m` parity units; any `k` of them are enough.
    /// What they cannot mend is sent again.
    ErasureCoded {
        /// Data units of a block, at least 1.
        k: u8,
        /// Parity units of a block, at least 1.
        m: u8,
        /// Blocks whose units go out in turn, at least 1.
        depth: u8,
    },
    /// As the session's plan has it for the message's length ([`super::Session::install_plan`]);
    /// for a stream selective repeat.
    Auto,
    /// Every unit is sent once. The send completes when all have left; what is lost the receiver
    /// sees in the chunks that do not land, and completes the receive itself.
    Unreliable,
}

/// A message to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendRequest {
    /// Where its bytes start in [`Memory`]. They must not change until the send completes.
    pub offset: u64,
    /// Its length in bytes; 0 is a message too.
    pub length: u64,
    /// How it survives loss.
    pub reliability: Reliability,
    /// A word delivered with the completion of the receive.
    pub immediate: Option<u32>,
    /// Returned with the completion.
    pub user_data: u64,
}

/// A message whose units are named as it goes ([`super::Session::continue_stream`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamRequest {
    /// Bytes of the peer's buffer, from its start, in which its units may lie.
    pub length: u64,
    /// How its units survive loss. There is no code for streams.
    pub reliability: Reliability,
    /// A word delivered with the completion of the receive.
    pub immediate: Option<u32>,
    /// Returned with the completion.
    pub user_data: u64,
}

/// Whole units of a stream that lie one behind the other at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamPart {
    /// Where its bytes start in [`Memory`]. They must not change until the send completes.
    pub offset: u64,
    /// Where they go in the peer's buffer: a multiple of the unit.
    pub remote_offset: u64,
    /// Bytes, at least 1: a multiple of the unit, or up to the end of the stream's range.
    pub length: u64,
}

/// A buffer for the next message from the peer: the i-th send lands in the i-th receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// Where the buffer starts in [`Memory`].
    pub offset: u64,
    /// Its length in bytes. A longer message aborts at both ends.
    pub length_max: u64,
    /// Returned with the completion.
    pub user_data: u64,
}

/// Why a request was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// All slots are in use: post again after a completion.
    #[error("all slots are in use; post again after a completion")]
    Retry,
    /// Longer than [`MESSAGE_BYTES_MAX`], or the range overflows.
    #[error("{length} bytes at offset {offset} are no valid message ({MESSAGE_BYTES_MAX} at most)")]
    InvalidLength {
        /// Offset asked for.
        offset: u64,
        /// Length asked for.
        length: u64,
    },
    /// The code has no data or no parity units, or too many.
    #[error(
        "({k}, {m}), {depth} blocks in turn, is no valid code: all at least 1, {BLOCK_UNITS_MAX} \
         units a block at most"
    )]
    InvalidCode {
        /// Data units asked for.
        k: u8,
        /// Parity units asked for.
        m: u8,
        /// Blocks in turn asked for.
        depth: u8,
    },
    /// Streams have no code: what would be in a block is not known.
    #[error("a stream cannot be erasure coded")]
    CodedStream,
    /// A part of a stream that is not made of whole units within the stream's range.
    #[error(
        "{length} bytes at {remote_offset} are no part of the stream: whole units within its range \
         are needed"
    )]
    InvalidPart {
        /// Place in the peer's buffer asked for.
        remote_offset: u64,
        /// Bytes asked for.
        length: u64,
    },
    /// No such message is in progress, or it is no stream that is still open.
    #[error("message {0} is not in progress, or is no open stream")]
    NotInProgress(u64),
    /// The session's unit is still being looked for.
    #[error("the session has no unit yet: post once it is established")]
    Undecided,
    /// The session drains: nothing new is sent.
    #[error("the session drains and sends nothing new")]
    Draining,
    /// The session is over.
    #[error("the session is closed")]
    Closed,
}

/// The memory that messages are sent from and land in. Offsets lie within posted requests only.
///
/// Nothing is written to it but authentic payload, at most once per byte and message.
pub trait Memory {
    /// Copies `into.len()` bytes out, from `offset` on.
    fn read(&self, offset: u64, into: &mut [u8]);
    /// Appends a copy of `length` bytes, from `offset` on.
    fn append(&self, offset: u64, length: usize, out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + length, 0);
        self.read(offset, &mut out[start..]);
    }
    /// Copies `from` in, at `offset`.
    fn write(&mut self, offset: u64, from: &[u8]);
    /// All bytes of this chunk are in memory. Called once per chunk, after the last write into it.
    fn chunk_landed(&mut self, slot: u16, chunk: u32);
    /// A new message of `chunk_count` chunks begins to land in this slot (message number modulo
    /// slots): what an earlier message published there is void. Called once per message, before
    /// its first write. Whoever publishes chunks to a reader clears them at `post_receive` too.
    fn chunks_cleared(&mut self, slot: u16, chunk_count: u32);
}
