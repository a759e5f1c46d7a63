//! The memory of a queue.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use sealane_engine::accelerator::wire::{
    Completion, SLOT_BYTES, Submission, arena_bytes, entry_offset, ring_bytes,
};
use sealane_engine::calls::call;
use sealane_engine::shared_memory::{PeerAccess, SharedMemory};
use zerocopy::{FromBytes, IntoBytes};

/// Arena, submissions, completions, and the eventfd that tells of completions.
#[derive(Debug)]
pub struct Rings {
    /// Where the jobs' data are.
    pub arena: SharedMemory,
    depth: u16,
    submissions: SharedMemory,
    completions: SharedMemory,
    bell: OwnedFd,
    taken: u64,
    completed: u64,
    published: u64,
    is_broken: bool,
}

impl Rings {
    /// Maps the memory of a new queue; `None` if the daemon's descriptors are not what they should
    /// be.
    pub fn open(depth: u16, descriptors: [OwnedFd; 4]) -> Option<Self> {
        let [arena, submissions, completions, bell] = descriptors;
        let arena = SharedMemory::attach(arena, PeerAccess::Writes).ok()?;
        let submissions = SharedMemory::attach(submissions, PeerAccess::Reads).ok()?;
        let completions = SharedMemory::attach(completions, PeerAccess::Writes).ok()?;
        // A full counter must not hold up the other daemons. One that clears this again can do it:
        // gateways that don't trust each other need cards of their own.
        rustix::io::ioctl_fionbio(&bell, true).ok()?;
        let fits = depth > 0
            && arena.len() >= arena_bytes(depth)
            && submissions.len() >= ring_bytes(depth, size_of::<Submission>())
            && completions.len() >= ring_bytes(depth, size_of::<Completion>());
        fits.then_some(Self {
            arena,
            depth,
            submissions,
            completions,
            bell,
            taken: 0,
            completed: 0,
            published: 0,
            is_broken: false,
        })
    }

    /// The next job that the daemon has submitted. A queue whose daemon says that it submitted more
    /// than there is room for has none from then on.
    pub fn take(&mut self) -> Option<Submission> {
        let written = self.submissions.word(0).load(Ordering::Acquire);
        self.is_broken |= written.wrapping_sub(self.taken) > self.depth.into();
        if self.is_broken || written == self.taken {
            return None;
        }
        let mut bytes = [0; size_of::<Submission>()];
        self.submissions.copy_out(entry_offset(self.taken, self.depth, bytes.len()), &mut bytes);
        self.taken += 1;
        Submission::read_from_bytes(&bytes).ok()
    }

    /// The slot of a job, if it is in the arena.
    pub fn slot(&self, job: &Submission) -> Option<u16> {
        let slot = u16::try_from(job.slot.get()).ok()?;
        ((usize::from(slot) + 1) * SLOT_BYTES <= self.arena.len()).then_some(slot)
    }

    /// Writes that a job has ended. [`Self::publish`] tells the daemon.
    pub fn complete(&mut self, cookie: u64, is_sealed: bool) {
        let entry = Completion { cookie: cookie.into(), is_sealed: u64::from(is_sealed).into() };
        let offset = entry_offset(self.completed, self.depth, size_of::<Completion>());
        self.completions.copy_in(offset, entry.as_bytes());
        self.completed += 1;
    }

    /// Announces completions that are none.
    pub fn overrun(&mut self) {
        self.completed += 1 << 40;
    }

    /// Writes to all of the memory that the card may write to.
    pub fn scribble(&self) {
        for memory in [&self.arena, &self.completions] {
            memory.copy_in(0, &vec![0xee; memory.len()]);
        }
    }

    /// Tells the daemon what has ended since the last call.
    pub fn publish(&mut self) {
        if self.completed > self.published {
            self.published = self.completed;
            self.completions.word(0).store(self.completed, Ordering::Release);
            call(&self.bell);
        }
    }
}
