//! Background jobs of a namespace: scrub and refresh. Each has a thread of its own, below the
//! queues' priority, and takes the range lock for one short piece at a time: a host's command waits
//! for one piece of each job at most, and for none of the next (`docs/formats/stores.md` §4).

mod job;
mod pace;
mod status;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::namespace::Namespace;
use job::Job;
pub use status::{JobKind, JobState, JobStatus};

/// How a job begins.
#[derive(Debug, Clone, Copy, Default)]
pub struct JobStart {
    /// The first block to look at: where an earlier process got to.
    pub position: u64,
    /// Bytes read and written per second; 0: no limit.
    pub bytes_per_second: u64,
    /// Waits to be resumed.
    pub is_paused: bool,
}

/// What a job is told while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Stop after the piece it is at, and keep the place.
    Pause,
    /// Go on.
    Resume,
    /// End.
    Cancel,
    /// Move at most so many bytes per second; 0: no limit.
    Rate(u64),
}

/// Why a job wasn't started, or isn't told anything.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// One of each kind runs at a time.
    #[error("a {0} of this volume is under way")]
    Running(JobKind),
    /// None is under way.
    #[error("no {0} of this volume is under way")]
    Over(JobKind),
    /// The store can't.
    #[error("its store keeps nothing that a {0} could look at")]
    Unsupported(JobKind),
    /// The store couldn't be opened for it.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl JobError {
    /// Its stable reason id.
    #[must_use]
    pub fn id(&self) -> &'static str {
        match self {
            Self::Running(_) => "volume.job.running",
            Self::Over(_) => "volume.job.over",
            Self::Unsupported(_) => "volume.job.unsupported",
            Self::Io(_) => "store.failed",
        }
    }
}

/// The jobs of one namespace, one of each kind. They end when this is dropped.
#[derive(Debug)]
pub struct Jobs {
    namespace: Arc<Namespace>,
    jobs: Mutex<[Option<Job>; 2]>,
}

impl Jobs {
    /// None yet.
    #[must_use]
    pub fn new(namespace: Arc<Namespace>) -> Self {
        Self { namespace, jobs: Mutex::default() }
    }

    fn jobs(&self) -> MutexGuard<'_, [Option<Job>; 2]> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a job.
    pub fn start(&self, kind: JobKind, start: JobStart) -> Result<(), JobError> {
        let mut jobs = self.jobs();
        let place = &mut jobs[kind as usize];
        if place.as_ref().is_some_and(|job| !job.status().state.is_over()) {
            return Err(JobError::Running(kind));
        }
        let upkeep = self.namespace.upkeep()?.ok_or(JobError::Unsupported(kind))?;
        if kind == JobKind::Refresh && !upkeep.has_fast_path() {
            return Err(JobError::Unsupported(kind));
        }
        *place = Some(Job::start(kind, Arc::clone(&self.namespace), upkeep, start)?);
        Ok(())
    }

    /// Tells a job something.
    pub fn order(&self, kind: JobKind, order: Order) -> Result<(), JobError> {
        match &self.jobs()[kind as usize] {
            Some(job) if job.order(order) => Ok(()),
            _ => Err(JobError::Over(kind)),
        }
    }

    /// How far the jobs are that were started, those that are over among them.
    #[must_use]
    pub fn list(&self) -> Vec<JobStatus> {
        self.jobs().iter().flatten().map(Job::status).collect()
    }

    /// Ends all jobs where they are and waits until none of them uses the store.
    pub fn end(&self) {
        self.jobs().iter_mut().flatten().for_each(Job::end);
    }
}

#[cfg(test)]
mod tests;
