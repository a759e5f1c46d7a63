//! Reads, writes and syncs of a file through io_uring: submitted in batches, ended through an
//! event descriptor.
//!
//! The kernel works on the buffers until an operation's completion is reaped; until then the ring
//! owns them, and it isn't dropped before all have come.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

use super::pages::{DeviceFile, PAGE_BYTES, Page};

/// Operations that the kernel is given at a time; more wait their turn here.
const RING_ENTRIES: u32 = 128;
/// Buffers kept for the next operations.
const POOL_BUFFERS: usize = 64;
/// Pages of the largest buffer kept, and of the largest read or write: 1 MiB.
pub const IO_PAGES_MAX: usize = 256;

/// One operation on a file.
#[derive(Debug)]
pub enum Io {
    /// Fills the pages from a page number on.
    Read(u64, Vec<Page>),
    /// Writes the pages from a page number on; durably or not.
    Write(u64, Vec<Page>, bool),
    /// Makes completed writes durable.
    Sync,
    /// Makes so many pages read as zeros.
    Punch(u64, u64),
}

/// An operation that has ended.
#[derive(Debug)]
pub struct Ended<T> {
    /// What the caller gave along.
    pub tag: T,
    /// The operation, with its buffer.
    pub io: Io,
    /// How it ended. A read or write that ended short is an error.
    pub result: io::Result<()>,
}

/// A ring of operations on one file, of one thread.
#[derive(Debug)]
pub struct Ring<T> {
    kernel: Uring,
    file: Arc<DeviceFile>,
    event: Arc<OwnedFd>,
    flying: Vec<Option<(T, Io)>>,
    vacant: Vec<usize>,
    backlog: VecDeque<(T, Io)>,
    pool: Vec<Vec<Page>>,
}

/// The kernel's side of a ring.
struct Uring(IoUring);

impl std::fmt::Debug for Uring {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Uring")
    }
}

/// A descriptor that becomes readable when told.
pub fn event() -> io::Result<Arc<OwnedFd>> {
    Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

/// Makes the descriptor readable.
pub fn tell(event: &OwnedFd) {
    // It fails only when the counter is full, and then the descriptor is readable already.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Makes the descriptor unreadable until told again.
pub fn hush(event: &OwnedFd) {
    // It fails only when the descriptor isn't readable.
    let _ = rustix::io::read(event, &mut [0; 8]);
}

/// The same error once more, for everybody who waits for what failed.
#[must_use]
pub fn copy_error(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), error.to_string())
}

/// Opens an io_uring, or says what it takes.
pub fn open(entries: u32) -> io::Result<IoUring> {
    IoUring::new(entries).map_err(|error| {
        let detail = "io_uring is not available (kernel.io_uring_disabled, seccomp or ulimit -l)";
        io::Error::new(error.kind(), format!("{detail}: {error}"))
    })
}

impl<T> Ring<T> {
    /// A ring for a file. The event descriptor becomes readable with every completion.
    pub fn new(file: Arc<DeviceFile>, event: Arc<OwnedFd>) -> io::Result<Self> {
        let ring = open(RING_ENTRIES)?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        let flying = (0..RING_ENTRIES).map(|_| None).collect();
        let vacant = (0..RING_ENTRIES as usize).collect();
        let (backlog, pool) = (VecDeque::new(), Vec::new());
        Ok(Self { kernel: Uring(ring), file, event, flying, vacant, backlog, pool })
    }

    /// The event descriptor.
    #[must_use]
    pub fn event(&self) -> &OwnedFd {
        &self.event
    }

    /// A buffer of `count` pages of any contents.
    #[must_use]
    pub fn buffer(&mut self, count: usize) -> Vec<Page> {
        let mut pages = self.pool.pop().unwrap_or_default();
        pages.resize(count, Page::ZERO);
        pages
    }

    /// Gives a buffer back for later operations.
    pub fn keep(&mut self, pages: Vec<Page>) {
        if self.pool.len() < POOL_BUFFERS && pages.capacity() <= IO_PAGES_MAX {
            self.pool.push(pages);
        }
    }

    /// Prepares an operation; [`Ring::turn`] starts it.
    pub fn push(&mut self, tag: T, io: Io) {
        self.backlog.push_back((tag, io));
    }

    /// Gives the kernel what was prepared, as far as there is room, and moves what has ended to
    /// `ended`. After an error nothing more will end.
    pub fn turn(&mut self, ended: &mut Vec<Ended<T>>) -> io::Result<()> {
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
            let entry = entry(&self.file, &mut job.1).user_data(index as u64);
            // SAFETY: the entry names the file, which the ring keeps open, and memory of the
            // job's pages, which stays where it is (on the heap) and is neither touched nor freed
            // until `reap` has seen the completion: `flying` holds it, and `drop` waits for it.
            let pushed = unsafe { self.kernel.0.submission().push(&entry) };
            if pushed.is_err() {
                self.vacant.push(index);
                self.backlog.push_front(job);
                break;
            }
            self.flying[index] = Some(job);
            is_new = true;
        }
        if is_new || !self.kernel.0.submission().is_empty() {
            match self.kernel.0.submit() {
                Ok(_) => {}
                // The entries stay in the queue; another turn must come.
                Err(error) if is_transient(&error) => tell(&self.event),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn reap(&mut self, ended: &mut Vec<Ended<T>>) {
        for completion in self.kernel.0.completion() {
            let index = completion.user_data() as usize;
            let Some((tag, io)) = self.flying.get_mut(index).and_then(Option::take) else {
                continue;
            };
            self.vacant.push(index);
            let result = outcome(&io, completion.result());
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

/// The submission entry of an operation.
fn entry(file: &DeviceFile, io: &mut Io) -> squeue::Entry {
    let fd = types::Fd(file.as_fd().as_raw_fd());
    let bytes = |pages: &Vec<Page>| (pages.len() * PAGE_BYTES) as u32;
    let offset = |page: u64| page * PAGE_BYTES as u64;
    match io {
        Io::Read(page, pages) => {
            let length = bytes(pages);
            opcode::Read::new(fd, pages.as_mut_ptr().cast(), length).offset(offset(*page)).build()
        }
        Io::Write(page, pages, is_durable) => {
            // RWF_DSYNC (pwritev2(2)): the write is durable when it ends.
            let flags = if *is_durable { 0x2 } else { 0 };
            let write = opcode::Write::new(fd, pages.as_ptr().cast(), bytes(pages));
            write.offset(offset(*page)).rw_flags(flags).build()
        }
        Io::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        Io::Punch(page, count) => {
            // FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE (fallocate(2)).
            opcode::Fallocate::new(fd, offset(*count)).offset(offset(*page)).mode(0x3).build()
        }
    }
}

fn outcome(io: &Io, result: i32) -> io::Result<()> {
    let expected = match io {
        Io::Read(_, pages) | Io::Write(_, pages, _) => pages.len() * PAGE_BYTES,
        Io::Sync | Io::Punch(..) => 0,
    };
    match usize::try_from(result) {
        Err(_) => Err(io::Error::from_raw_os_error(-result)),
        Ok(done) if done == expected => Ok(()),
        Ok(done) => {
            let detail = format!("{done} bytes of {expected} transferred");
            Err(io::Error::new(io::ErrorKind::UnexpectedEof, detail))
        }
    }
}

impl<T> Ring<T> {
    /// Forgets what the kernel was not given yet and waits until the rest has ended. False: that
    /// can't be waited for, and the kernel may still use buffers and file.
    pub fn drain(&mut self) -> bool {
        self.backlog.clear();
        let mut ended = Vec::new();
        while !self.is_idle() {
            match self.kernel.0.submit_and_wait(1) {
                Err(error) if !is_transient(&error) => return false,
                _ => self.reap(&mut ended),
            }
        }
        true
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        if !self.drain() {
            // Better lost than freed.
            std::mem::forget(std::mem::take(&mut self.flying));
        }
    }
}
