//! The settings of a simulated world, which alone determine a run.

use sealane_proto::link::{LinkConfig, LinkError, Nanos};
use sealane_proto::session::{
    BLOCK_UNITS_MAX, ConfigError, Detection, MESSAGE_BYTES_MAX, PARITY_GAP_MAX, PayloadMode, Plan,
    PlanError, PlanRow, Reliability, Steering, Version,
};

/// Most messages of a run, which bounds the memory for their outcomes.
pub const MESSAGES_MAX: u32 = 1_000_000;
/// Most bytes of each end's memory with real payload.
pub const MEMORY_BYTES_MAX: u64 = 1 << 30;

/// Another path between the ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathLinks {
    /// From the sending to the receiving end.
    pub forward: LinkConfig,
    /// From the receiving to the sending end.
    pub backward: LinkConfig,
    /// An interval in which both directions lose everything: start, end.
    pub blackout: Option<(Nanos, Nanos)>,
}

/// A host that alternately runs and pauses; arrivals and timers wait during a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pauses {
    /// From the start of one pause to the start of the next.
    pub every: Nanos,
    /// How long each is.
    pub length: Nanos,
}

impl Pauses {
    /// When a host processes what is due at an instant; the receiving end's pauses are shifted by
    /// half a period.
    pub(crate) fn awake_at(self, end: usize, at: Nanos) -> Nanos {
        let within = (at + end as u64 * self.every / 2) % self.every;
        at + self.length.saturating_sub(within)
    }
}

/// The settings of a run: one end sends `count` messages to the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scenario {
    /// Determines every random choice.
    pub seed: u64,
    /// Number of messages.
    pub count: u32,
    /// Shortest message, in bytes.
    pub message_bytes_min: u64,
    /// Longest message, in bytes; lengths are uniform between the two.
    pub message_bytes_max: u64,
    /// Most messages that are posted and not completed.
    pub depth: u16,
    /// How their losses are recovered.
    pub reliability: Reliability,
    /// Pause between the data and the parity of a message.
    pub parity_gap: Nanos,
    /// Whether every third message is a stream, sent in parts from its end to its start. Streams
    /// can't use a code and use selective repeat.
    pub streams: bool,
    /// Payload bytes of a unit.
    pub unit_bytes: u16,
    /// Units of a chunk.
    pub chunk_units: u16,
    /// Slots of the session.
    pub slots: u16,
    /// Wire bytes per second that each end may send.
    pub rate_bytes_per_second: u64,
    /// Idle timeout of the session.
    pub idle_timeout: Nanos,
    /// Skew of the path that both ends know, in nanoseconds.
    pub reordering: Nanos,
    /// How the sending end detects losses.
    pub detection: Detection,
    /// Of packets and frames.
    pub version: Version,
    /// How both ends steer what they send, …
    pub steering: Steering,
    /// … or only the sending one, if the receiving one does otherwise.
    pub receiver_steering: Option<Steering>,
    /// Whether packets carry bytes.
    pub payload: PayloadMode,
    /// From the sending to the receiving end. Corruption requires real payload.
    pub forward: LinkConfig,
    /// From the receiving to the sending end.
    pub backward: LinkConfig,
    /// An interval in which both directions lose everything: start, end.
    pub blackout: Option<(Nanos, Nanos)>,
    /// Pauses of both hosts, alike but at different times.
    pub pauses: Option<Pauses>,
    /// Further paths besides the one described by the fields above.
    pub more_paths: Vec<PathLinks>,
    /// Virtual time after which an unfinished run counts as failed.
    pub time_max: Nanos,
}

/// Why a scenario cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScenarioError {
    /// The session rejects its configuration.
    #[error(transparent)]
    Session(#[from] ConfigError),
    /// No messages, or too many.
    #[error("count is {0}; allowed: 1 to {MESSAGES_MAX}")]
    Count(u32),
    /// Nothing may be posted.
    #[error("depth is {0}; allowed: 1 to the number of slots")]
    Depth(u16),
    /// The range of lengths is empty or too long.
    #[error("message_bytes from {0} to {1}; allowed: an ascending range up to {MESSAGE_BYTES_MAX}")]
    MessageBytes(u64, u64),
    /// The messages of all slots do not fit into memory.
    #[error("slots × message_bytes_max is {0}; at most {MEMORY_BYTES_MAX} with real payload")]
    Memory(u64),
    /// The code has no data or no parity units, or too many.
    #[error(
        "{0:?} is not a valid scheme: each number must be at least 1, and a block has at most {BLOCK_UNITS_MAX} units"
    )]
    Reliability(Reliability),
    /// The pause before parity is too long.
    #[error("the pause before parity is {0} ns; at most {PARITY_GAP_MAX}")]
    Gap(Nanos),
    /// The configuration of a link is not valid.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// Without tags, corrupted packets cannot be detected.
    #[error("corruption needs real payload")]
    Corruption,
}

impl Scenario {
    /// A small world with real payload over a clean path: 200 Mbit/s, 25 ms round-trip time.
    #[must_use]
    pub fn small(seed: u64) -> Self {
        let path = LinkConfig::clean(200_000_000, 12_500_000, 1 << 20);
        Self {
            seed,
            count: 8,
            message_bytes_min: 0,
            message_bytes_max: 40_000,
            depth: 4,
            reliability: Reliability::SelectiveRepeat,
            parity_gap: 0,
            streams: false,
            unit_bytes: 1408,
            chunk_units: 4,
            slots: 8,
            rate_bytes_per_second: 25_000_000,
            idle_timeout: 60_000_000_000,
            reordering: 0,
            detection: Detection::Reports,
            version: Version::V6,
            steering: Steering::default(),
            receiver_steering: None,
            payload: PayloadMode::Real,
            forward: path,
            backward: path,
            blackout: None,
            pauses: None,
            more_paths: Vec::new(),
            time_max: 600_000_000_000,
        }
    }

    /// Lengths only, at 400 Gbit/s with 4 KiB units and 25 ms round-trip time: the paper's figures.
    #[must_use]
    pub fn fast(seed: u64) -> Self {
        let small = Self::small(seed);
        let path = LinkConfig {
            rate_bits_per_second: 400_000_000_000,
            buffer_bytes: 16 << 20,
            ..small.forward
        };
        Self {
            unit_bytes: 4096,
            chunk_units: 16,
            depth: 1,
            slots: 2,
            rate_bytes_per_second: 50_000_000_000,
            payload: PayloadMode::LengthsOnly,
            forward: path,
            backward: path,
            ..small
        }
    }

    /// The plan of the sending end: this scheme for messages of any length.
    pub(crate) fn plan(&self) -> Result<Plan, ScenarioError> {
        let Self { reliability, parity_gap, .. } = *self;
        let row = PlanRow { length_max: self.message_bytes_max, reliability, parity_gap };
        Plan::new(&[row], self.unit_bytes).map_err(|error| match error {
            PlanError::Gap(_) => ScenarioError::Gap(parity_gap),
            _ => ScenarioError::Reliability(reliability),
        })
    }

    pub(crate) fn validate(&self) -> Result<(), ScenarioError> {
        if self.count == 0 || self.count > MESSAGES_MAX {
            return Err(ScenarioError::Count(self.count));
        }
        if self.depth == 0 || self.depth > self.slots {
            return Err(ScenarioError::Depth(self.depth));
        }
        let (min, max) = (self.message_bytes_min, self.message_bytes_max);
        if min > max || max > MESSAGE_BYTES_MAX {
            return Err(ScenarioError::MessageBytes(min, max));
        }
        let memory = max * u64::from(self.slots);
        if self.payload == PayloadMode::Real && memory > MEMORY_BYTES_MAX {
            return Err(ScenarioError::Memory(memory));
        }
        self.plan()?;
        let others = self.more_paths.iter().flat_map(|path| [&path.forward, &path.backward]);
        for path in [&self.forward, &self.backward].into_iter().chain(others) {
            path.validate()?;
            if path.corrupt_parts_per_billion > 0 && self.payload == PayloadMode::LengthsOnly {
                return Err(ScenarioError::Corruption);
            }
        }
        Ok(())
    }
}
