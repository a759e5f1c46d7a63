//! What is known of a background job.

use std::fmt;

use sealane_proto::link::Nanos;

use crate::storage::upkeep::{Finding, Report};

/// Findings that are kept of a job, and told as events; the others are counted.
pub const FINDINGS_MAX: usize = 64;

/// What a job does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobKind {
    /// Reads every written sector and every leaf page and checks them.
    Scrub,
    /// Gives sectors fast-path MACs anew.
    Refresh,
}

impl JobKind {
    /// Its name.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Scrub => "scrub",
            Self::Refresh => "refresh",
        }
    }
}

impl fmt::Display for JobKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.id())
    }
}

/// What a job is up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobState {
    /// It goes on, perhaps waiting for hosts or its rate.
    Running,
    /// It waits to be resumed.
    Paused,
    /// It came to the end.
    Finished,
    /// It was told to end.
    Cancelled,
    /// The volume was closed before its end.
    Interrupted,
    /// The device is gone.
    Failed,
}

impl JobState {
    /// Its name.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Finished => "finished",
            Self::Cancelled => "cancelled",
            Self::Interrupted => "interrupted",
            Self::Failed => "failed",
        }
    }

    /// Whether it will do nothing more.
    #[must_use]
    pub fn is_over(self) -> bool {
        !matches!(self, Self::Running | Self::Paused)
    }
}

/// How far a job is. Counts are those since it was started.
#[derive(Debug, Clone)]
pub struct JobStatus {
    /// What it does.
    pub kind: JobKind,
    /// What it is up to.
    pub state: JobState,
    /// Why it failed.
    pub detail: String,
    /// First block not looked at; the volume's size at the end.
    pub position: u64,
    /// Blocks of the volume.
    pub total: u64,
    /// Written blocks that were looked at.
    pub checked: u64,
    /// Blocks that can't be told of: their leaf page is wrong.
    pub unchecked: u64,
    /// Blocks that have a current fast-path MAC now.
    pub refreshed: u64,
    /// What is wrong, all in all.
    pub found: u64,
    /// Of that, written again as it has to be.
    pub repaired: u64,
    /// The first of it.
    pub findings: Vec<Finding>,
    /// Bytes read and written.
    pub bytes: u64,
    /// Bytes per second at most; 0: no limit.
    pub bytes_per_second: u64,
    /// Time that it was not paused, nanoseconds.
    pub active: Nanos,
    /// Times that it held back because commands of hosts took long.
    pub yields: u64,
}

impl JobStatus {
    /// Adds what was done with one piece; returns those findings that are to be told.
    pub(super) fn add(&mut self, report: Report) -> &[Finding] {
        self.checked += report.checked;
        self.unchecked += report.unchecked;
        self.refreshed += report.refreshed;
        self.bytes += report.bytes;
        self.found += report.findings.len() as u64;
        let known = self.findings.len();
        let room = FINDINGS_MAX - known;
        self.findings.extend(report.findings.into_iter().take(room));
        &self.findings[known..]
    }
}
