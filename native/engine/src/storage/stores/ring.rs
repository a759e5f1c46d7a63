//! Operations on a file or drive through io_uring: submitted in batches; completions signal an
//! event descriptor.
//!
//! The kernel uses an operation's buffers until its completion is reaped. Until then the ring owns
//! them, and it isn't dropped before all completions are reaped.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

use super::pages::{IO_PAGES_MAX, PAGE_BYTES, Page};

/// Most operations that the kernel has at a time; further ones wait in the ring's backlog.
const RING_ENTRIES: u32 = 128;
/// Most buffers kept for later operations.
const POOL_BUFFERS: usize = 64;

/// An operation that a ring can execute.
///
/// # Safety
/// The entry may refer only to memory that the job owns on the heap: the kernel uses it until the
/// completion, while the job itself may be moved.
pub unsafe trait Job {
    /// Type of the submission entries.
    type Submission: squeue::EntryMarker;
    /// Type of the completion entries.
    type Completion: cqueue::EntryMarker + Into<cqueue::Entry>;

    /// The submission entry of this job on a file.
    fn entry(&mut self, fd: types::Fd, user_data: u64) -> Self::Submission;
    /// The result of the operation, given the result field of its completion entry.
    fn outcome(&self, result: i32) -> io::Result<()>;
}

/// One operation on a file.
#[derive(Debug)]
pub enum Io {
    /// Fills the pages from a page number on.
    Read(u64, Vec<Page>),
    /// Writes the pages from a page number on; durably if the flag is set.
    Write(u64, Vec<Page>, bool),
    /// Makes completed writes durable.
    Sync,
    /// Makes pages read as zeros: the first page's number, and how many.
    Punch(u64, u64),
}

/// A completed operation.
#[derive(Debug)]
pub struct Ended<T, J = Io> {
    /// The caller's tag.
    pub tag: T,
    /// The operation, with its buffer.
    pub io: J,
    /// Its result. A short read or write is an error.
    pub result: io::Result<()>,
}

/// A ring of operations on one file, for one thread.
pub struct Ring<T, J: Job = Io> {
    kernel: IoUring<J::Submission, J::Completion>,
    file: Arc<dyn AsFd + Send + Sync>,
    event: Arc<OwnedFd>,
    flying: Vec<Option<(T, J)>>,
    vacant: Vec<usize>,
    backlog: VecDeque<(T, J)>,
    pool: Vec<Vec<Page>>,
}

/// An event descriptor: readable after [`signal`], until [`clear`].
pub fn event() -> io::Result<Arc<OwnedFd>> {
    Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

/// Makes the descriptor readable.
pub fn signal(event: &OwnedFd) {
    // This fails only if the counter is full, and then the descriptor is readable already.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Makes the descriptor unreadable until the next [`signal`].
pub fn clear(event: &OwnedFd) {
    // This fails only if the descriptor isn't readable.
    let _ = rustix::io::read(event, &mut [0; 8]);
}

fn open<J: Job>() -> io::Result<IoUring<J::Submission, J::Completion>> {
    IoUring::builder().build(RING_ENTRIES).map_err(|error| {
        let detail = "io_uring is not available (kernel.io_uring_disabled, seccomp or ulimit -l)";
        io::Error::new(error.kind(), format!("{detail}: {error}"))
    })
}

impl<T, J: Job> Ring<T, J> {
    /// A ring for a file. Every completion signals `event`.
    pub fn new(file: Arc<dyn AsFd + Send + Sync>, event: Arc<OwnedFd>) -> io::Result<Self> {
        let kernel = open::<J>()?;
        kernel.submitter().register_eventfd(event.as_raw_fd())?;
        let flying = (0..RING_ENTRIES).map(|_| None).collect();
        let vacant = (0..RING_ENTRIES as usize).collect();
        let (backlog, pool) = (VecDeque::new(), Vec::new());
        Ok(Self { kernel, file, event, flying, vacant, backlog, pool })
    }

    /// The event descriptor.
    #[must_use]
    pub fn event(&self) -> &OwnedFd {
        &self.event
    }

    /// Prepares an operation; [`Ring::turn`] starts it.
    pub fn push(&mut self, tag: T, io: J) {
        self.backlog.push_back((tag, io));
    }

    /// Submits prepared operations as far as there is room, and moves completed ones to `ended`.
    /// After an error, no more operations complete.
    pub fn turn(&mut self, ended: &mut Vec<Ended<T, J>>) -> io::Result<()> {
        self.submit()?;
        self.reap(ended);
        if self.backlog.is_empty() { Ok(()) } else { self.submit() }
    }

    fn submit(&mut self) -> io::Result<()> {
        let mut is_new = false;
        while let Some(index) = self.vacant.pop() {
            let Some(mut job) = self.backlog.pop_front() else {
                self.vacant.push(index);
                break;
            };
            let fd = types::Fd(self.file.as_fd().as_raw_fd());
            let entry = job.1.entry(fd, index as u64);
            // SAFETY: the entry refers to the file, which the ring keeps open, and to memory that
            // the job owns on the heap. That memory is neither moved, touched nor freed until
            // `reap` has seen the completion: `flying` holds it, and `drop` waits for it.
            let pushed = unsafe { self.kernel.submission().push(&entry) };
            if pushed.is_err() {
                self.vacant.push(index);
                self.backlog.push_front(job);
                break;
            }
            self.flying[index] = Some(job);
            is_new = true;
        }
        if is_new || !self.kernel.submission().is_empty() {
            match self.kernel.submit() {
                Ok(_) => {}
                // The entries stay in the queue, so another turn is needed.
                Err(error) if is_transient(&error) => signal(&self.event),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn reap(&mut self, ended: &mut Vec<Ended<T, J>>) {
        for completion in self.kernel.completion() {
            let completion: cqueue::Entry = completion.into();
            let index = completion.user_data() as usize;
            let Some((tag, io)) = self.flying.get_mut(index).and_then(Option::take) else {
                continue;
            };
            self.vacant.push(index);
            let result = io.outcome(completion.result());
            ended.push(Ended { tag, io, result });
        }
    }

    fn is_idle(&self) -> bool {
        self.vacant.len() == self.flying.len()
    }
}

fn is_transient(error: &io::Error) -> bool {
    let transient = [rustix::io::Errno::BUSY, rustix::io::Errno::AGAIN, rustix::io::Errno::INTR];
    transient.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

impl<T> Ring<T, Io> {
    /// A buffer of `count` pages with unspecified contents.
    #[must_use]
    pub fn buffer(&mut self, count: usize) -> Vec<Page> {
        let mut pages = self.pool.pop().unwrap_or_default();
        pages.resize(count, Page::ZERO);
        pages
    }

    /// Returns a buffer for later operations.
    pub fn keep(&mut self, pages: Vec<Page>) {
        if self.pool.len() < POOL_BUFFERS && pages.capacity() <= IO_PAGES_MAX {
            self.pool.push(pages);
        }
    }
}

// SAFETY: entries refer only to the pages of the job's vector.
unsafe impl Job for Io {
    type Submission = squeue::Entry;
    type Completion = cqueue::Entry;

    fn entry(&mut self, fd: types::Fd, user_data: u64) -> squeue::Entry {
        let bytes = |pages: &Vec<Page>| (pages.len() * PAGE_BYTES) as u32;
        let offset = |page: u64| page * PAGE_BYTES as u64;
        let entry = match self {
            Self::Read(page, pages) => {
                let read = opcode::Read::new(fd, pages.as_mut_ptr().cast(), bytes(pages));
                read.offset(offset(*page)).build()
            }
            Self::Write(page, pages, is_durable) => {
                // RWF_DSYNC (pwritev2(2)): the write is durable when it completes.
                let flags = if *is_durable { 0x2 } else { 0 };
                let write = opcode::Write::new(fd, pages.as_ptr().cast(), bytes(pages));
                write.offset(offset(*page)).rw_flags(flags).build()
            }
            Self::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            Self::Punch(page, count) => {
                // FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE (fallocate(2)).
                let punch = opcode::Fallocate::new(fd, offset(*count));
                punch.offset(offset(*page)).mode(0x3).build()
            }
        };
        entry.user_data(user_data)
    }

    fn outcome(&self, result: i32) -> io::Result<()> {
        let expected = match self {
            Self::Read(_, pages) | Self::Write(_, pages, _) => pages.len() * PAGE_BYTES,
            Self::Sync | Self::Punch(..) => 0,
        };
        match usize::try_from(result) {
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
            Ok(done) if done == expected => Ok(()),
            Ok(done) => {
                let detail = format!("{done} bytes of {expected} transferred");
                // A write is short when the device is full.
                let is_write = matches!(self, Self::Write(..));
                let full = io::ErrorKind::StorageFull;
                let kind = if is_write { full } else { io::ErrorKind::UnexpectedEof };
                Err(io::Error::new(kind, detail))
            }
        }
    }
}

impl<T, J: Job> Ring<T, J> {
    /// Drops operations that were not submitted and waits until the others have completed. Returns
    /// false if waiting fails: then the kernel may still use the buffers and the file.
    pub fn drain(&mut self) -> bool {
        self.backlog.clear();
        let mut ended = Vec::new();
        while !self.is_idle() {
            match self.kernel.submit_and_wait(1) {
                Err(error) if !is_transient(&error) => return false,
                _ => self.reap(&mut ended),
            }
        }
        true
    }
}

impl<T, J: Job> Drop for Ring<T, J> {
    fn drop(&mut self) {
        if !self.drain() {
            // Leak the buffers rather than free memory that the kernel may still use.
            std::mem::forget(std::mem::take(&mut self.flying));
        }
    }
}
