//! What is fixed for the life of a session, and its keys.

use crate::aead::Secret;
use crate::link::Nanos;

use super::epochs::PACKETS_PER_KEY_MAX;
use super::packet;
use super::paths::PATHS_MAX;

/// Bytes of a payload unit, fewest and most. The most leaves room for all headers in one datagram.
pub const UNIT_BYTES_MIN: u16 = 256;
/// See [`UNIT_BYTES_MIN`].
pub const UNIT_BYTES_MAX: u16 = 65_000;
/// Messages in flight each way, most: a slot costs memory at both ends, and its credit wire bytes.
pub const SLOTS_MAX: u16 = 1024;

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

/// How much later than a newer packet one may arrive on a path and still be told from a repeated one,
/// besides the configured skew: two ways through a network that differ by this much.
const REPLAY_SKEW: Nanos = 40_000_000;

impl SessionConfig {
    /// Packet numbers behind the newest that a replay window has to tell apart: what the peer, which
    /// has the same rate, can send while one is that late.
    #[must_use]
    pub fn replay_packets(&self) -> u64 {
        let late = u128::from(self.reordering.saturating_add(REPLAY_SKEW));
        let bytes = u128::from(self.rate_bytes_per_second) * late / 1_000_000_000;
        u64::try_from(bytes / u128::from(self.unit_bytes)).unwrap_or(u64::MAX)
    }
}

/// The secrets of a session's end: those of both directions, for key epoch 0, which the peer has the
/// other way round, and one of its own.
#[derive(Clone)]
pub struct SessionKeys {
    /// Protects what this end sends.
    pub send: Secret,
    /// Protects what this end receives.
    pub receive: Secret,
    /// Random, known to this end alone: tokens of challenges are drawn from it.
    pub token_seed: [u8; 32],
}

impl std::fmt::Debug for SessionKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionKeys").finish_non_exhaustive()
    }
}
