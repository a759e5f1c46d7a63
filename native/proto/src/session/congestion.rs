//! The seam of congestion control: how fast each path may be sent on (UnoCC). Until that is
//! there: the session's rate, and a circuit breaker for each path.

use std::fmt::Debug;

use crate::link::Nanos;

use super::breaker::{self, Breaker};
use super::path::PathAccount;
use super::paths::PathId;

/// What may leave on a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Wire bytes a second. The session's rate bounds all paths together, whatever these are.
    pub rate_bytes_per_second: u64,
    /// Wire bytes that may be under way when a unit leaves.
    pub window_bytes: u64,
}

/// What comes of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Unchanged,
    /// Allowances are others now, of this path or any.
    Changed,
    /// The path can't carry the session at all.
    Hopeless,
}

/// Decides how fast each path may be sent on. Sans-IO as the machine is: what it is told comes with
/// the time.
pub trait Congestion: Debug + Send {
    /// What may leave on a path. Asked for after [`Verdict::Changed`].
    fn allowance(&self, path: PathId) -> Allowance;

    /// A packet leaves on a path.
    fn sent(&mut self, _path: PathId, _wire_bytes: u64, _now: Nanos) {}

    /// The peer has reported about a path.
    fn reported(&mut self, path: PathId, account: &PathAccount, now: Nanos) -> Verdict;

    /// The path went silent: what was lost says that it was gone, not that it was full.
    fn interrupted(&mut self, path: PathId);

    /// Times that a rate was cut because the path could not carry it.
    fn trips(&self) -> u64;
}

/// The session's rate on every path, less what a circuit breaker takes off.
#[derive(Debug)]
pub struct MandatoryRate {
    breakers: Vec<Breaker>,
}

impl MandatoryRate {
    /// For so many paths, each of which may be given the whole rate.
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
