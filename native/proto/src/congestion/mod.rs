//! Congestion controllers: how fast a flow, or a session with all its paths, may send.
//!
//! A controller is sans-IO like the session machine: it hears what was sent and what the peer has
//! reported, each with its time, and answers with a window and a rate. The same controllers steer
//! sessions and the flows of the simulator.
//!
//! A new controller is a module, a row of [`ALGORITHMS`] and an arm of [`create`].

mod dctcp;
mod gemini;
mod quick_adapt;
#[cfg(test)]
mod tests;
mod uno;
mod window;

use std::fmt::Debug;

use crate::link::Nanos;

pub use dctcp::Dctcp;
pub use gemini::{Gemini, GeminiRules};
pub use uno::{Rules, Uno};
pub use window::whole;

/// What all flows of a network share. Gains and thresholds are derived from it, so it must be equal
/// for all flows that are to get equal shares, regardless of the rate that each may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Domain {
    /// Rate of the hosts' links in bytes per second.
    pub line_bytes_per_second: u64,
    /// Round trip within a data centre, without queues …
    pub near_rtt: Nanos,
    /// … and the longest between data centres.
    pub far_rtt: Nanos,
    /// Bytes of the largest packet, in the unit in which windows count.
    pub packet_bytes: u64,
}

/// One flow of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// The network.
    pub domain: Domain,
    /// The flow's own limit in bytes per second.
    pub rate_bytes_per_second: u64,
    /// Its round trip without queues, until reports say better.
    pub base_rtt: Nanos,
    /// How long a packet may stay unacknowledged.
    pub timeout: Nanos,
    /// What its window starts with.
    pub start: Start,
}

/// What is known about the first window of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// Nothing.
    #[default]
    Unknown,
    /// A window that suited the path some time ago.
    Remembered {
        /// Its bytes.
        window_bytes: u64,
        /// How long ago that was.
        age: Nanos,
    },
    /// The window of another controller, which this one takes over.
    Exactly(u64),
}

/// What the peer has reported since the last report, over all paths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes that arrived, with and without a mark …
    pub bytes: u64,
    /// … and those of them that were marked CE.
    pub marked_bytes: u64,
    /// Packets found to be lost.
    pub lost_packets: u64,
    /// When the newest of the reported packets was sent.
    pub sent_at: Nanos,
    /// Round trip of that packet; 0 if this report has no sample.
    pub rtt: Nanos,
    /// Least round trip of late, the path's own without queues; 0 before the first sample.
    pub rtt_least: Nanos,
    /// Only the window kept the sender from sending more: neither a lack of data, nor the peer's
    /// credit, nor another limit of rate.
    pub is_limited: bool,
}

/// What a flow may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Bytes in flight.
    pub window_bytes: u64,
    /// Bytes per second, between which packets are spread.
    pub rate_bytes_per_second: u64,
}

impl Allowance {
    /// A window with a rate in bytes per second, both not negative; the rate is 1 to `rate_max`.
    #[must_use]
    pub fn new(window_bytes: f64, rate: f64, rate_max: u64) -> Self {
        let rate_bytes_per_second = whole(rate).clamp(1, rate_max);
        Self { window_bytes: whole(window_bytes), rate_bytes_per_second }
    }
}

/// Decides how fast one flow may send.
pub trait Controller: Debug + Send {
    /// The present allowance. It changes only by the calls below.
    fn allowance(&self) -> Allowance;

    /// Records that bytes leave, including those of repeated packets.
    fn sent(&mut self, bytes: u64, now: Nanos);

    /// Records that something is to leave after all before it has been acknowledged.
    fn resumed(&mut self) {}

    /// Processes a report of the peer.
    fn reported(&mut self, report: &Report, now: Nanos);

    /// Processes that nothing was reported for a time-out although packets are in flight, or, where
    /// losses are known only by a time-out, that packets of one timed out.
    fn timed_out(&mut self, now: Nanos);

    /// Whether the last report or round trip showed it a queue: packets wait for longer than it tolerates, or a
    /// buffer has overflowed. Marks are no such sign, since they may come from phantom queues; a
    /// controller that goes by marks alone finds none.
    fn finds_queue(&self) -> bool {
        false
    }
}

/// A controller with its rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// UnoCC.
    Uno(Rules),
    /// Gemini.
    Gemini(GeminiRules),
    /// DCTCP (RFC 8257).
    Dctcp,
}

/// All controllers by name. The "released" ones follow Uno's released code and its settings.
pub const ALGORITHMS: [(&str, Algorithm); 9] = [
    ("uno", Algorithm::Uno(Rules::DEFAULT)),
    ("uno-queue", Algorithm::Uno(Rules::REAL_QUEUES)),
    ("uno-released", Algorithm::Uno(Rules::RELEASED)),
    ("gemini", Algorithm::Gemini(GeminiRules::DEFAULT)),
    ("gemini-released", Algorithm::Gemini(GeminiRules::RELEASED)),
    ("gemini-released-5ms", Algorithm::Gemini(GeminiRules::RELEASED_5MS)),
    ("gemini-small-start", Algorithm::Gemini(GeminiRules::SMALL_START)),
    ("delay", Algorithm::Gemini(GeminiRules::NO_MARKS)),
    ("dctcp", Algorithm::Dctcp),
];

impl Algorithm {
    /// What sessions fall back to where marks don't arrive: a controller by delay and loss.
    pub const UNMARKED: Self = Self::Gemini(GeminiRules::NO_MARKS);

    /// Whether it relies on marks.
    #[must_use]
    pub fn uses_marks(self) -> bool {
        !matches!(self, Self::Gemini(GeminiRules { is_unmarked: true, .. }))
    }

    /// The controller with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        ALGORITHMS.iter().find(|(known, _)| *known == name).map(|(_, algorithm)| *algorithm)
    }
}

/// Creates the controller of a flow.
#[must_use]
pub fn create(algorithm: Algorithm, setup: &Setup, now: Nanos) -> Box<dyn Controller> {
    match algorithm {
        Algorithm::Uno(rules) => Box::new(Uno::new(setup, rules, now)),
        Algorithm::Gemini(rules) => Box::new(Gemini::new(setup, rules)),
        Algorithm::Dctcp => Box::new(Dctcp::new(setup)),
    }
}
