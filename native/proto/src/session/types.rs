//! What passes through the doors of the session machine: configuration, requests, events, counters.

use crate::aead::Secret;
use crate::counters;
use crate::link::Nanos;

use super::ecn::Ecn;
use super::epochs::PACKETS_PER_KEY_MAX;
use super::packet;
use super::paths::{PATHS_MAX, PathId};

/// Bytes of a payload unit, fewest and most. The most leaves room for all headers in one datagram.
pub const UNIT_BYTES_MIN: u16 = 256;
/// See [`UNIT_BYTES_MIN`].
pub const UNIT_BYTES_MAX: u16 = 65_000;
/// Messages in flight each way, most: a slot costs memory at both ends, and its credit wire bytes.
pub const SLOTS_MAX: u16 = 1024;
/// Bytes of a message, most (64 GiB): bounds the bitmaps (6 MiB each at 1408-byte units).
pub const MESSAGE_BYTES_MAX: u64 = 1 << 36;
/// Data and parity units of a block together, most: a block's bits then span five words at most.
pub const BLOCK_UNITS_MAX: u16 = 255;

/// Whether packets carry bytes or only say how many they would carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadMode {
    /// Sealed payload: the only mode that may ever meet a network.
    Real,
    /// No payload and no AEAD; lengths, timers and decisions are those of [`PayloadMode::Real`].
    /// For the simulator only.
    LengthsOnly,
}

/// How a sending end finds out what was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Detection {
    /// By the peer's reports of packets that did not arrive: one round trip after they were sent.
    /// The time-out is left for reports that are lost themselves.
    #[default]
    Reports,
    /// By the time-out alone: the paper's selective repeat with RTO, for comparisons.
    Timeout,
}

/// Which IP carries the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IpVersion {
    /// Version 4.
    #[default]
    V4,
    /// Version 6.
    V6,
}

impl IpVersion {
    /// Bytes of the IP and UDP headers of a packet, without options.
    #[must_use]
    pub fn header_bytes(self) -> usize {
        match self {
            Self::V4 => 20 + 8,
            Self::V6 => 40 + 8,
        }
    }
}

/// Fixed for the life of a session, and equal at both ends but for the connection ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionConfig {
    /// Connection id in the packets that this end receives.
    pub connection_id_local: u64,
    /// Connection id in the packets that this end sends.
    pub connection_id_peer: u64,
    /// Payload bytes of a full unit.
    pub unit_bytes: u16,
    /// What carries the packets, which is counted with them.
    pub ip: IpVersion,
    /// Paths between the ends: from 1 to [`PATHS_MAX`].
    pub paths: u8,
    /// Units of a chunk, the grain in which a landing message is published. At least 1.
    pub chunk_units: u16,
    /// Messages in flight each way. A power of two.
    pub slots: u16,
    /// Bytes on the wire per second that this end may send, IP and UDP headers included.
    pub rate_bytes_per_second: u64,
    /// Silence of the peer after which the session is given up, in nanoseconds.
    pub idle_timeout: Nanos,
    /// What arrives this many nanoseconds later than what was sent after it is not lost: the skew of
    /// the path, if it is known. What the path does is learnt on top.
    pub reordering: Nanos,
    /// How this end finds out which of its units were lost.
    pub detection: Detection,
    /// Packets after which this end takes a new key for what it sends: up to
    /// [`PACKETS_PER_KEY_MAX`], [`super::PACKETS_PER_KEY`] unless for a test.
    pub packets_per_key: u64,
    /// Whether packets carry bytes.
    pub payload: PayloadMode,
}

/// Where a datagram came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The address that this end sends to on the path that the datagram names.
    Path,
    /// Another one, which this end would follow if the datagram is authentic: see
    /// [`super::Session::receive`].
    Elsewhere,
    /// Another one.
    Foreign,
}

/// How a datagram is to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departure {
    /// By which path.
    pub path: PathId,
    /// The ECN field of its IP header.
    pub ecn: Ecn,
}

/// What the socket says of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The path whose address of this end it came to.
    pub path: PathId,
    /// Where it came from.
    pub source: Source,
    /// The ECN field of its IP header.
    pub ecn: Ecn,
}

/// A value of [`SessionConfig`] is out of range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The unit is too small or too large.
    #[error("unit_bytes is {0}: from {UNIT_BYTES_MIN} to {UNIT_BYTES_MAX} is needed")]
    UnitBytes(u16),
    /// A chunk has no units.
    #[error("chunk_units is 0: at least 1 is needed")]
    ChunkUnits,
    /// The number of slots is no power of two, or too large.
    #[error("slots is {0}: a power of two up to {SLOTS_MAX} is needed")]
    Slots(u16),
    /// There is no path, or there are too many.
    #[error("paths is {0}: from 1 to {PATHS_MAX} is needed")]
    Paths(u8),
    /// Nothing could ever be sent.
    #[error("rate_bytes_per_second is 0")]
    Rate,
    /// The session would end at once.
    #[error("idle_timeout is 0")]
    IdleTimeout,
    /// A key could protect nothing, or more than it may.
    #[error("packets_per_key is {0}: from 1 to {PACKETS_PER_KEY_MAX} is needed")]
    PacketsPerKey(u64),
}

impl SessionConfig {
    /// Checks every range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if !(UNIT_BYTES_MIN..=UNIT_BYTES_MAX).contains(&self.unit_bytes) {
            return Err(ConfigError::UnitBytes(self.unit_bytes));
        }
        if !(1..=PATHS_MAX).contains(&self.paths) {
            return Err(ConfigError::Paths(self.paths));
        }
        if self.chunk_units == 0 {
            return Err(ConfigError::ChunkUnits);
        }
        if !self.slots.is_power_of_two() || self.slots > SLOTS_MAX {
            return Err(ConfigError::Slots(self.slots));
        }
        if self.rate_bytes_per_second == 0 {
            return Err(ConfigError::Rate);
        }
        if self.idle_timeout == 0 {
            return Err(ConfigError::IdleTimeout);
        }
        if !(1..=PACKETS_PER_KEY_MAX).contains(&self.packets_per_key) {
            return Err(ConfigError::PacketsPerKey(self.packets_per_key));
        }
        Ok(())
    }

    /// Bytes of the largest datagram of this session, UDP and IP headers not included.
    #[must_use]
    pub fn datagram_bytes_max(&self) -> usize {
        packet::DATA_OVERHEAD_BYTES_MAX + usize::from(self.unit_bytes)
    }

    /// Bytes of the largest packet, UDP and IP headers included.
    #[must_use]
    pub fn packet_bytes_max(&self) -> usize {
        self.datagram_bytes_max() + self.ip.header_bytes()
    }
}

/// The secrets of both directions, for key epoch 0. The peer has them the other way round.
#[derive(Debug, Clone)]
pub struct SessionKeys {
    /// Protects what this end sends.
    pub send: Secret,
    /// Protects what this end receives.
    pub receive: Secret,
}

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

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionStatus {
    /// All of the message is in the peer's (send) or in this end's (receive) buffer.
    Ok,
    /// The session ended before the peer confirmed: the message may or may not have arrived.
    OutcomeUnknown,
    /// The session ended, and the message did not arrive.
    Aborted,
    /// The message is longer than the receive posted for it. Nothing of it counts.
    TooLong,
    /// The sender gave the message up. At the sender: it may have arrived all the same.
    Cancelled,
    /// The receiver wanted no more of the message: the chunks that landed are right, the rest of
    /// the buffer is as it was.
    Partial,
}

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// Someone asked for it.
    Requested,
    /// The peer was silent for the idle timeout.
    IdleTimeout,
    /// A key has protected as many packets as it may, and the peer has not confirmed it.
    PacketLimit,
    /// More packets failed authentication than a key tolerates.
    ForgeryLimit,
    /// The peer is no longer trusted.
    Revoked,
    /// The path loses too much at the least rate that the circuit breaker leaves.
    PathOverloaded,
    /// The path carries small packets and not those of full size.
    PathMtu,
    /// One end drained, and all that was under way has ended, or had no more time.
    Draining,
    /// A code that this version does not know.
    Other(u8),
}

impl CloseReason {
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Requested => 0,
            Self::IdleTimeout => 1,
            Self::PacketLimit => 2,
            Self::ForgeryLimit => 3,
            Self::Revoked => 4,
            Self::PathOverloaded => 5,
            Self::PathMtu => 6,
            Self::Draining => 7,
            Self::Other(code) => code,
        }
    }

    pub(super) fn from_code(code: u8) -> Self {
        match code {
            0 => Self::Requested,
            1 => Self::IdleTimeout,
            2 => Self::PacketLimit,
            3 => Self::ForgeryLimit,
            4 => Self::Revoked,
            5 => Self::PathOverloaded,
            6 => Self::PathMtu,
            7 => Self::Draining,
            other => Self::Other(other),
        }
    }
}

/// What happened, for the user of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The peer holds the keys and the path carries full-size packets both ways.
    Established {
        /// First measured round trip.
        rtt: Nanos,
    },
    /// A send ended. Exactly one for each accepted [`SendRequest`].
    SendCompleted {
        /// From the request.
        user_data: u64,
        /// Its message number.
        message: u64,
        /// How it ended.
        status: CompletionStatus,
        /// When its first packet was sent (when it ended, if none was).
        started: Nanos,
        /// When it ended: the arrival of the last acknowledgement.
        completed: Nanos,
    },
    /// A receive ended. Exactly one for each accepted [`ReceiveRequest`].
    ReceiveCompleted {
        /// From the request.
        user_data: u64,
        /// Its message number.
        message: u64,
        /// Bytes of the message, of a stream its range; 0 unless the status is `Ok`, or `Partial`
        /// and some of it has arrived.
        length: u64,
        /// The word sent along.
        immediate: Option<u32>,
        /// How it ended.
        status: CompletionStatus,
    },
    /// Nothing new is sent any more, at either end: one of them drains.
    Draining,
    /// The session is over; all requests have completed. The last event.
    Closed {
        /// Why.
        reason: CloseReason,
        /// Whether the peer closed it.
        by_peer: bool,
    },
}

/// What keeps a session from sending more at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendLimit {
    /// Nothing is posted.
    Idle,
    /// The peer has posted no receive for the next message.
    Credit,
    /// The rate: there are units to send.
    Pacing,
    /// Units were lost and are sent again, or have been and are not acknowledged yet.
    Loss,
    /// All has been sent and waits for its acknowledgement.
    Flight,
    /// The peer is silent, and units are held back; or the path is not validated yet.
    Stalled,
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

counters! {
    /// Counters since the start of the session. Bytes and packets are of UDP datagrams; wire bytes
    /// include IP and UDP headers.
    pub struct SessionStatistics {
        /// Datagrams sent.
        pub packets_sent: u64,
        /// Wire bytes of all of them.
        pub wire_bytes_sent: u64,
        /// Datagrams with a data unit, retransmissions included.
        pub data_packets_sent: u64,
        /// Datagrams with a parity unit, retransmissions included.
        pub parity_packets_sent: u64,
        /// Data or parity units sent again.
        pub retransmitted_packets: u64,
        /// Datagrams with control frames.
        pub control_packets_sent: u64,
        /// Authentic datagrams received.
        pub packets_received: u64,
        /// Wire bytes of those.
        pub wire_bytes_received: u64,
        /// Data and parity units accepted.
        pub units_received: u64,
        /// Units of a selective-repeat message that had landed before.
        pub duplicates: u64,
        /// Units of an erasure-coded block that was whole before they came.
        pub surplus: u64,
        /// Units of a message that had completed before they came.
        pub late: u64,
        /// Datagrams that failed authentication.
        pub forged: u64,
        /// Packet numbers seen before, or older than the replay window.
        pub replayed: u64,
        /// Datagrams with a wrong length, version or content.
        pub malformed: u64,
        /// Units of a message for which no receive was posted.
        pub unposted: u64,
        /// Parity units dropped because the private scratch was full.
        pub scratch_full: u64,
        /// Data units that were computed from parity.
        pub decoded_units: u64,
        /// Erasure-coded messages that needed a retransmission.
        pub fallbacks: u64,
        /// Times that sending paused because the peer had gone silent.
        pub stalls: u64,
        /// Payload bytes of sends that completed `Ok`.
        pub payload_bytes_sent: u64,
        /// Payload bytes of receives that completed `Ok`.
        pub payload_bytes_received: u64,
        /// Sends that completed `Ok`.
        pub sends_completed: u64,
        /// Receives that completed `Ok`.
        pub receives_completed: u64,
        /// Requests that completed otherwise.
        pub failed: u64,
        /// Smoothed round trip, in nanoseconds (0 before the first): of the slowest path in use.
        pub srtt_nanos: u64,
        /// Retransmission time-out in force, in nanoseconds.
        pub rto_nanos: u64,
        /// Datagrams for another connection or channel.
        pub misdirected: u64,
        /// Datagrams from an address that is none of the session's.
        pub foreign_packets: u64,
        /// Datagrams under a key that is gone or can't be in use yet.
        pub unknown_epoch: u64,
        /// Key updates of what this end sends.
        pub key_updates_sent: u64,
        /// Key updates of the peer.
        pub key_updates_received: u64,
        /// Authentic datagrams that arrived marked CE.
        pub ce_received: u64,
        /// Datagrams of this end that arrived marked CE, as the peer has counted.
        pub ce_echoed: u64,
        /// 1 while what this end sends is marked ECN-capable.
        pub is_ecn_capable: u64,
        /// Packets of this end that the peer counted as lost and that have not come since.
        pub lost_packets: u64,
        /// Runs of packets that were lost one after the other, as the peer counted.
        pub lost_runs: u64,
        /// Units of this end that the peer had when they came again.
        pub spurious_retransmissions: u64,
        /// Packets of the peer that were counted as lost here and have not come since.
        pub missing_packets: u64,
        /// Runs of those.
        pub missing_runs: u64,
        /// Packets of the peer that came after they were counted as lost.
        pub reordered_packets: u64,
        /// Transmissions of this end that were lost by the peer's report.
        pub reported_losses: u64,
        /// Transmissions of this end that were lost by their time-out.
        pub timeouts: u64,
        /// Packets sent for nothing but to show the peer what was lost before them.
        pub probes_sent: u64,
        /// Time in which sending paused because the peer was silent, in nanoseconds.
        pub stalled_nanos: u64,
        /// Wire bytes that this end may send a second: the session's, or what its circuit breaker
        /// has left of it.
        pub rate_bytes_per_second: u64,
        /// Times that the circuit breaker cut the rate.
        pub breaker_trips: u64,
        /// Largest IP packet that the path is known to carry (0 before it is validated).
        pub path_mtu_bytes: u64,
        /// Paths that are validated, and not given up.
        pub paths_validated: u64,
        /// Times that a path was passed over because it had gone silent.
        pub path_silences: u64,
    }
}
