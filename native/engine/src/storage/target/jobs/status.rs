//! Status of a background job.

use std::fmt;

use sealane_proto::link::Nanos;

use crate::storage::upkeep::{Finding, Report};

/// Maximum findings of a job that are kept and reported as events; further ones are only counted.
pub const FINDINGS_MAX: usize = 64;

/// Kind of job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobKind {
    /// Reads every written sector and every leaf page and checks them.
    Scrub,
    /// Issues sectors' fast-path MACs again.
    Refresh,
}

impl JobKind {
    /// Its name in the API.
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

/// State of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobState {
    /// It is running, or waiting for hosts or for its rate.
    Running,
    /// It is paused.
    Paused,
    /// It has processed the whole volume.
    Finished,
    /// It was cancelled.
    Cancelled,
    /// The volume was closed before its end.
    Interrupted,
    /// The device failed.
    Failed,
}

impl JobState {
    /// Its name in the API.
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

    /// Whether it has ended.
    #[must_use]
    pub fn is_over(self) -> bool {
        !matches!(self, Self::Running | Self::Paused)
    }
}

/// Status of a job. Counters begin with its start.
#[derive(Debug, Clone)]
pub struct JobStatus {
    /// Kind of job.
    pub kind: JobKind,
    /// State of the job.
    pub state: JobState,
    /// Why it failed.
    pub detail: String,
    /// First block not yet processed; the volume's size at the end.
    pub position: u64,
    /// Number of blocks of the volume.
    pub total: u64,
    /// Number of written blocks checked.
    pub checked: u64,
    /// Number of blocks that may or may not be written, as their leaf page is wrong.
    pub unchecked: u64,
    /// Number of blocks that now have a current fast-path MAC.
    pub refreshed: u64,
    /// Number of findings.
    pub found: u64,
    /// Number of findings repaired.
    pub repaired: u64,
    /// The first findings, at most [`FINDINGS_MAX`].
    pub findings: Vec<Finding>,
    /// Bytes read and written.
    pub bytes: u64,
    /// Maximum bytes per second; 0: no limit.
    pub bytes_per_second: u64,
    /// Time during which it was not paused, in nanoseconds.
    pub active: Nanos,
    /// How often it held back because commands of hosts took long.
    pub yields: u64,
}

impl JobStatus {
    /// Adds the results for one piece; returns the findings to report.
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
