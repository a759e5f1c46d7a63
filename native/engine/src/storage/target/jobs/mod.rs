//! Background jobs of a namespace: scrub and refresh. Each job has its own thread, with a lower
//! priority than the queues' threads, and takes the range lock for one short piece at a time. A
//! host's command waits for at most one piece of each job (`docs/formats/stores.md` §4).

mod job;
mod pace;
mod status;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::namespace::Namespace;
use job::Job;
pub use status::{JobKind, JobState, JobStatus};

/// Parameters of a job's start.
#[derive(Debug, Clone, Copy, Default)]
pub struct JobStart {
    /// The first block to check, where an earlier process stopped.
    pub position: u64,
    /// Bytes read and written per second; 0: no limit.
    pub bytes_per_second: u64,
    /// Whether it begins paused.
    pub is_paused: bool,
}

/// An order to a running job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Pause after the current piece, keeping the position.
    Pause,
    /// Resume.
    Resume,
    /// End the job.
    Cancel,
    /// Limit its bytes per second; 0: no limit.
    Rate(u64),
}

/// Why a job wasn't started or can't take an order.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// A job of this kind is already running.
    #[error("a {0} of this volume is already running")]
    Running(JobKind),
    /// No job of this kind is running.
    #[error("no {0} of this volume is running")]
    Over(JobKind),
    /// The store doesn't support it.
    #[error("its store has nothing that a {0} could check")]
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

/// The jobs of one namespace, at most one of each kind. They end when this is dropped.
#[derive(Debug)]
pub struct Jobs {
    namespace: Arc<Namespace>,
    jobs: Mutex<[Option<Job>; 2]>,
}

impl Jobs {
    /// Creates an empty set of jobs.
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

    /// Gives an order to a job.
    pub fn order(&self, kind: JobKind, order: Order) -> Result<(), JobError> {
        match &self.jobs()[kind as usize] {
            Some(job) if job.order(order) => Ok(()),
            _ => Err(JobError::Over(kind)),
        }
    }

    /// Status of the last job of each kind, including ended ones.
    #[must_use]
    pub fn list(&self) -> Vec<JobStatus> {
        self.jobs().iter().flatten().map(Job::status).collect()
    }

    /// Ends all jobs at their current positions and waits until none uses the store.
    pub fn end(&self) {
        self.jobs().iter_mut().flatten().for_each(Job::end);
    }
}

#[cfg(test)]
mod tests;
