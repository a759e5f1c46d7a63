//! The job's side of a session: its rings, its region and the doorbell. Runs in the job's process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::bitmap::ChunkBitmap;
use super::doorbell::JobBell;
use super::layout::{Layout, STATE_CLOSED, VERSION};
use super::ring::{Completion, JobRing, PostRefused, Submission};
use crate::shared_memory::{PeerAccess, SharedMemory};

/// The job's handle on a session.
#[derive(Debug)]
pub struct Job {
    ring: JobRing,
    region: Arc<SharedMemory>,
    bell: JobBell,
}

impl Job {
    /// Attaches to the descriptors from the daemon.
    ///
    /// `shared`: this process's mapping of a region that the session shares with another one.
    ///
    /// Fails with `Unsupported` if they are of another version of the ring ABI, with `InvalidInput`
    /// if they are of another region.
    pub fn attach(
        region: OwnedFd,
        submission: OwnedFd,
        completion: OwnedFd,
        bell: JobBell,
        shared: Option<Arc<SharedMemory>>,
    ) -> io::Result<Self> {
        let region = match shared {
            Some(shared) if shared.is_of(&region)? => shared,
            Some(_) => return Err(invalid("the session has another region")),
            None => Arc::new(SharedMemory::attach(region, PeerAccess::Writes)?),
        };
        let submission = SharedMemory::attach(submission, PeerAccess::Writes)?;
        let completion = SharedMemory::attach(completion, PeerAccess::Reads)?;
        let ring = JobRing::new(submission, completion)
            .filter(|ring| ring.layout().region_bytes == region.len() as u64)
            .ok_or_else(|| {
                let detail = format!("the fabric's rings don't have version {VERSION} of the ABI");
                io::Error::new(io::ErrorKind::Unsupported, detail)
            })?;
        Ok(Self { ring, region, bell })
    }

    /// The sizes that the daemon chose.
    pub fn layout(&self) -> Layout {
        self.ring.layout()
    }

    /// The region, for reading and writing.
    pub fn region(&self) -> &Arc<SharedMemory> {
        &self.region
    }

    /// Readable when there are completions, or when the daemon has ended the session.
    pub fn doorbell(&self) -> BorrowedFd<'_> {
        self.bell.doorbell.as_fd()
    }

    /// State of the session (`layout::STATE_*`).
    pub fn state(&self) -> u64 {
        self.ring.state()
    }

    /// Why the session ended, as in [`JobRing::close_reason`].
    pub fn close_reason(&self) -> String {
        self.ring.close_reason()
    }

    /// The statistics, in the order of `statistics::names`.
    pub fn statistics(&self) -> Vec<u64> {
        self.ring.statistics()
    }

    /// The bitmap of a receive, as in [`JobRing::bitmap`].
    pub fn bitmap(&self, handle: u64, chunk_count: usize) -> Option<ChunkBitmap> {
        self.ring.bitmap(handle, chunk_count)
    }

    /// Enables or disables the doorbell for landed chunks.
    pub fn wake_for_chunks(&self, wanted: bool) {
        self.ring.wake_for_chunks(wanted);
    }

    /// Disables or enables the doorbell for successful sends.
    pub fn quiet_sends(&self, are_quiet: bool) {
        self.ring.quiet_sends(are_quiet);
    }

    /// Posts one operation, wakes the daemon, and returns the operation's handle.
    pub fn post(&mut self, submission: &Submission) -> Result<u64, PostRefused> {
        let handle = self.ring.post(submission)?;
        self.bell.ring();
        Ok(handle)
    }

    /// Whether the fabric has ended the session, or is gone: it no longer uses the region for it.
    pub fn has_ended(&self) -> bool {
        self.ring.state() == STATE_CLOSED || self.bell.take_rings()
    }

    /// Hangs up, so that the fabric ends the session. Returns the rings: their state says when it
    /// has, and until then it may read and write the region for this session.
    pub fn into_ring(self) -> JobRing {
        self.ring
    }

    /// Takes up to `limit` completions without blocking, and clears the doorbell.
    ///
    /// Fails with `BrokenPipe` when the daemon has ended the session and no completion is left.
    pub fn completions(&mut self, limit: usize) -> io::Result<Vec<Completion>> {
        let is_gone = self.bell.take_rings();
        let may_be_full = self.ring.may_be_full();
        let completions = self
            .ring
            .completions(limit)
            .ok_or_else(|| invalid("the completion queue is inconsistent"))?;
        if completions.is_empty() {
            if is_gone {
                return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the session has ended"));
            }
        } else if may_be_full {
            self.bell.ring();
        }
        Ok(completions)
    }
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}
