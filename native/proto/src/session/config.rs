//! The fixed configuration of a session, and its keys.

use crate::aead::Secret;
use crate::link::Nanos;

use super::epochs::PACKETS_PER_KEY_MAX;
use super::packet::{self, Version};
use super::paths::PATHS_MAX;

/// Fewest payload bytes of a unit.
pub const UNIT_BYTES_MIN: u16 = 256;
/// Most payload bytes of a unit, which leaves room for all headers in one datagram.
pub const UNIT_BYTES_MAX: u16 = 65_000;
/// Most messages in flight in each direction. A slot costs memory at both ends, and its credit wire
/// bytes.
pub const SLOTS_MAX: u16 = 1024;

/// Whether packets carry bytes or only state their length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadMode {
    /// Sealed payload: the only mode allowed on a real network.
    Real,
    /// No payload and no AEAD; lengths, timers and decisions are as in [`PayloadMode::Real`]. For
    /// the simulator only.
    LengthsOnly,
}

/// How a sender detects losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Detection {
    /// From the peer's reports of missing packets, one round trip after they were sent. The
    /// time-out remains as a fallback for lost reports.
    #[default]
    Reports,
    /// From the time-out alone: the paper's selective repeat with RTO, for comparisons.
    Timeout,
}

/// IP version of the packets.
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

/// Fixed for the life of a session, and equal at both ends except for the connection ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionConfig {
    /// Of packets and frames, as agreed on in establishment.
    pub version: Version,
    /// Connection id in the packets that this end receives.
    pub connection_id_local: u64,
    /// Connection id in the packets that this end sends.
    pub connection_id_peer: u64,
    /// Payload bytes of a full unit.
    pub unit_bytes: u16,
    /// IP version, whose headers count as part of each packet.
    pub ip: IpVersion,
    /// Number of paths between the ends, from 1 to [`PATHS_MAX`].
    pub paths: u8,
    /// Units of a chunk, the granularity at which landed data is published. At least 1.
    pub chunk_units: u16,
    /// Messages in flight in each direction. A power of two.
    pub slots: u16,
    /// Rate at which this end may send, in bytes per second including IP and UDP headers.
    pub rate_bytes_per_second: u64,
    /// Silence of the peer after which the session ends, in nanoseconds.
    pub idle_timeout: Nanos,
    /// Known skew of the path in nanoseconds: a packet that arrives up to this much later than one
    /// that was sent after it isn't taken for lost. Measured reordering is added to it.
    pub reordering: Nanos,
    /// How this end detects the loss of its units.
    pub detection: Detection,
    /// Packets after which this end replaces its sending key: up to [`PACKETS_PER_KEY_MAX`], and
    /// [`super::PACKETS_PER_KEY`] except in tests.
    pub packets_per_key: u64,
    /// Whether packets carry bytes.
    pub payload: PayloadMode,
}

/// A value of [`SessionConfig`] is out of range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The unit is too small or too large.
    #[error("unit_bytes is {0}; allowed: {UNIT_BYTES_MIN} to {UNIT_BYTES_MAX}")]
    UnitBytes(u16),
    /// A chunk has no units.
    #[error("chunk_units is 0; it must be at least 1")]
    ChunkUnits,
    /// The number of slots is not a power of two, or too large.
    #[error("slots is {0}; allowed: a power of two up to {SLOTS_MAX}")]
    Slots(u16),
    /// There is no path, or there are too many.
    #[error("paths is {0}; allowed: 1 to {PATHS_MAX}")]
    Paths(u8),
    /// Nothing could be sent.
    #[error("rate_bytes_per_second is 0")]
    Rate,
    /// The session would end at once.
    #[error("idle_timeout is 0")]
    IdleTimeout,
    /// The packet limit of a key is zero or above the maximum.
    #[error("packets_per_key is {0}; allowed: 1 to {PACKETS_PER_KEY_MAX}")]
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

    /// Bytes of the session's largest datagram, without UDP and IP headers.
    #[must_use]
    pub fn datagram_bytes_max(&self) -> usize {
        packet::DATA_OVERHEAD_BYTES_MAX + usize::from(self.unit_bytes)
    }

    /// Bytes of the session's largest packet, with UDP and IP headers.
    #[must_use]
    pub fn packet_bytes_max(&self) -> usize {
        self.datagram_bytes_max() + self.ip.header_bytes()
    }
}

/// Delay behind newer packets, in addition to the configured skew, up to which a packet can still be
/// told from a replayed one: the difference between two routes through a network.
const REPLAY_SKEW: Nanos = 40_000_000;

impl SessionConfig {
    /// Width that a path's replay window needs: the packets that the peer, which has the same rate,
    /// can send while one packet is delayed by that much.
    #[must_use]
    pub fn replay_packets(&self) -> u64 {
        let late = u128::from(self.reordering.saturating_add(REPLAY_SKEW));
        let bytes = u128::from(self.rate_bytes_per_second) * late / 1_000_000_000;
        u64::try_from(bytes / u128::from(self.unit_bytes)).unwrap_or(u64::MAX)
    }
}

/// The secrets of one end: those of both directions for key epoch 0, which the peer has swapped, and
/// one of its own.
#[derive(Clone)]
pub struct SessionKeys {
    /// Protects what this end sends.
    pub send: Secret,
    /// Protects what this end receives.
    pub receive: Secret,
    /// Random seed for the tokens of challenges. The peer does not know it.
    pub token_seed: [u8; 32],
}

impl std::fmt::Debug for SessionKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionKeys").finish_non_exhaustive()
    }
}
