//! The interface for congestion control: how fast each path may send (UnoCC). Until that exists,
//! the session's rate with a circuit breaker for each path.

use std::fmt::Debug;

use crate::link::Nanos;

use super::breaker::{self, Breaker};
use super::path::PathAccount;
use super::paths::PathId;

/// How much may be sent on a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Wire bytes per second. The session's rate limits all paths together, regardless of this.
    pub rate_bytes_per_second: u64,
    /// Most wire bytes in flight when a unit leaves.
    pub window_bytes: u64,
}

/// Result of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Unchanged,
    /// The allowance of this or any other path has changed.
    Changed,
    /// The path can't carry the session at all.
    Hopeless,
}

/// Decides how fast each path may send. Sans-IO like the session machine: all inputs come with
/// their time.
pub trait Congestion: Debug + Send {
    /// The allowance of a path. Queried after [`Verdict::Changed`].
    fn allowance(&self, path: PathId) -> Allowance;

    /// Records that a packet leaves on a path.
    fn sent(&mut self, _path: PathId, _wire_bytes: u64, _now: Nanos) {}

    /// Processes the peer's report about a path.
    fn reported(&mut self, path: PathId, account: &PathAccount, now: Nanos) -> Verdict;

    /// Records that the path went silent: its losses mean that it was down, not congested.
    fn interrupted(&mut self, path: PathId);

    /// How often a rate was cut because the path could not carry it.
    fn trips(&self) -> u64;
}

/// The session's rate on every path, unless a circuit breaker has reduced it.
#[derive(Debug)]
pub struct MandatoryRate {
    breakers: Vec<Breaker>,
}

impl MandatoryRate {
    /// Creates the control of this many paths, each of which may use the whole rate.
    #[must_use]
    pub fn new(rate_bytes_per_second: u64, paths: u8) -> Self {
        Self { breakers: (0..paths).map(|_| Breaker::new(rate_bytes_per_second)).collect() }
    }
}

impl Congestion for MandatoryRate {
    fn allowance(&self, path: PathId) -> Allowance {
        let rate_bytes_per_second = self.breakers[path.index()].rate();
        Allowance { rate_bytes_per_second, window_bytes: u64::MAX }
    }

    fn reported(&mut self, path: PathId, account: &PathAccount, now: Nanos) -> Verdict {
        let report = breaker::Report {
            sent: account.packets_reported,
            received: account.received.received,
            ce: account.received.ce,
            dropped: account.dropped_packets,
            wire_bytes: account.wire_bytes_sent,
            srtt: account.srtt,
        };
        match self.breakers[path.index()].report(report, now) {
            breaker::Verdict::Unchanged => Verdict::Unchanged,
            breaker::Verdict::Rate(_) => Verdict::Changed,
            breaker::Verdict::Fatal => Verdict::Hopeless,
        }
    }

    fn interrupted(&mut self, path: PathId) {
        self.breakers[path.index()].interrupt();
    }

    fn trips(&self) -> u64 {
        self.breakers.iter().map(Breaker::trips).sum()
    }
}
