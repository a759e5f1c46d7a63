//! Pages on a plain namespace of somebody else's target, over one NVMe/TCP I/O queue.
//!
//! A thread of its own moves the bytes; channels and the journal give it operations from any other.
//! Once the connection is gone, or a command has no answer in time, every operation ends with
//! `NotConnected`: what the target has of those on their way is unknown, and only a new device, on
//! a new association, can find out.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::{HostEvent, HostLimits, HostQueue};
use sealane_proto::nvme::status::Status;
use zerocopy::IntoBytes;

use super::super::connection::{Connection, Gone, wait};
use super::device::{Device, IoQueue, Piece};
use super::pages::{BlockFile, PAGE_BYTES, Page};
use super::ring::{Ended, IO_PAGES_MAX, Io, event, hush, tell};

/// Most bytes in flight: more would only wait in socket buffers.
const IN_FLIGHT_BYTES: usize = 1024 * 1024;
/// Buffers that a queue keeps for the next operations.
const POOL_BUFFERS: usize = 64;

/// What to do with an operation that has ended.
type Reply = Box<dyn FnOnce(Io, io::Result<()>) + Send>;

#[derive(Default)]
struct Inbox {
    /// Bounded by what the channels have in flight.
    jobs: Vec<(Io, Reply)>,
    is_closing: bool,
    /// Why nothing is taken any more.
    ended: Option<String>,
}

struct Shared {
    inbox: Mutex<Inbox>,
    event: Arc<OwnedFd>,
}

fn not_connected(detail: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, detail)
}

impl Shared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give(&self, io: Io, reply: Reply) {
        let ended = {
            let mut inbox = self.inbox();
            if let Some(detail) = &inbox.ended {
                detail.clone()
            } else {
                inbox.jobs.push((io, reply));
                tell(&self.event);
                return;
            }
        };
        reply(io, Err(not_connected(&ended)));
    }
}

/// The namespace as a device.
pub struct RemoteDevice {
    shared: Arc<Shared>,
    page_count: u64,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for RemoteDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let page_count = self.page_count;
        formatter
            .debug_struct("RemoteDevice")
            .field("page_count", &page_count)
            .finish_non_exhaustive()
    }
}

impl RemoteDevice {
    /// Takes a connected socket whose Connect command succeeded, for a namespace of `block_count`
    /// blocks. `timeout` is how long one command may take.
    pub fn start(
        fd: OwnedFd,
        limits: HostLimits,
        block_count: u64,
        timeout: Duration,
    ) -> io::Result<Self> {
        let block_bytes = limits.block_bytes;
        if !block_bytes.is_power_of_two() || !(512..=PAGE_BYTES).contains(&block_bytes) {
            let detail =
                format!("blocks of {block_bytes} bytes; allowed: 512 to 4096, powers of 2");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
        if limits.transfer_max < PAGE_BYTES {
            let detail = format!("{} bytes per command; allowed: 4096 and up", limits.transfer_max);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
        let blocks_per_page = (PAGE_BYTES / block_bytes) as u64;
        let shared = Arc::new(Shared { inbox: Mutex::default(), event: event()? });
        let mover = Mover {
            shared: Arc::clone(&shared),
            connection: Connection::new(fd),
            queue: HostQueue::new(limits, None),
            blocks_per_page,
            step: (limits.transfer_max / PAGE_BYTES).min(IO_PAGES_MAX),
            timeout,
            jobs: HashMap::new(),
            backlog: VecDeque::new(),
            commands: HashMap::new(),
            next: 0,
            in_flight: 0,
        };
        let thread = std::thread::Builder::new().name("store-remote".into());
        let thread = Some(thread.spawn(move || mover.run())?);
        Ok(Self { shared, page_count: block_count / blocks_per_page, thread })
    }

    fn execute(&self, io: Io) -> io::Result<Io> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let reply = move |io, result: io::Result<()>| {
            // Whoever asked waits below.
            let _ = sender.send(result.map(|()| io));
        };
        self.shared.give(io, Box::new(reply));
        receiver.recv().map_err(|_| not_connected("the device's thread ended"))?
    }
}

impl Drop for RemoteDevice {
    fn drop(&mut self) {
        self.shared.inbox().is_closing = true;
        tell(&self.shared.event);
        if let Some(thread) = self.thread.take() {
            // It panics only by a defect, and that was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl BlockFile for RemoteDevice {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        for (page, pages) in (page..).step_by(IO_PAGES_MAX).zip(pages.chunks_mut(IO_PAGES_MAX)) {
            let Io::Read(_, found) = self.execute(Io::Read(page, pages.to_vec()))? else {
                return Err(io::Error::other("a read came back as something else"));
            };
            pages.copy_from_slice(&found);
        }
        Ok(())
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        for (page, pages) in (page..).step_by(IO_PAGES_MAX).zip(pages.chunks(IO_PAGES_MAX)) {
            self.execute(Io::Write(page, pages.to_vec(), false))?;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.execute(Io::Sync).map(drop)
    }
}

impl Device for RemoteDevice {
    fn page_count(&self) -> u64 {
        self.page_count
    }

    fn queue(self: Arc<Self>, event: Arc<OwnedFd>) -> io::Result<Box<dyn IoQueue>> {
        let outbox = Arc::new(Outbox { ended: Mutex::default(), event });
        let (flying, pool) = (0, Vec::new());
        Ok(Box::new(RemoteQueue { device: self, outbox, flying, pool }))
    }
}

/// Where a channel finds the ends of its operations.
struct Outbox {
    ended: Mutex<Vec<Ended<Piece>>>,
    event: Arc<OwnedFd>,
}

struct RemoteQueue {
    device: Arc<RemoteDevice>,
    outbox: Arc<Outbox>,
    flying: usize,
    pool: Vec<Vec<Page>>,
}

impl IoQueue for RemoteQueue {
    fn push(&mut self, piece: Piece, io: Io) {
        self.flying += 1;
        let outbox = Arc::clone(&self.outbox);
        let reply = move |io, result| {
            let mut ended = outbox.ended.lock().unwrap_or_else(PoisonError::into_inner);
            ended.push(Ended { tag: piece, io, result });
            tell(&outbox.event);
        };
        self.device.shared.give(io, Box::new(reply));
    }

    fn turn(&mut self, ended: &mut Vec<Ended<Piece>>) -> io::Result<()> {
        let mut found = self.outbox.ended.lock().unwrap_or_else(PoisonError::into_inner);
        self.flying -= found.len();
        ended.append(&mut found);
        Ok(())
    }

    fn drain(&mut self) -> bool {
        let mut ended = Vec::new();
        loop {
            hush(&self.outbox.event);
            if self.turn(&mut ended).is_err() {
                return false;
            }
            if self.flying == 0 {
                return true;
            }
            if wait([(self.outbox.event.as_fd(), PollFlags::IN)], None).is_err() {
                return false;
            }
        }
    }

    fn buffer(&mut self, count: usize) -> Vec<Page> {
        let mut pages = self.pool.pop().unwrap_or_default();
        pages.resize(count, Page::ZERO);
        pages
    }

    fn keep(&mut self, pages: Vec<Page>) {
        if self.pool.len() < POOL_BUFFERS && pages.capacity() <= IO_PAGES_MAX {
            self.pool.push(pages);
        }
    }
}

/// An operation and how far it is.
struct Job {
    io: Io,
    reply: Reply,
    /// Pages of which the commands are submitted; all of them once one has failed.
    submitted: usize,
    outstanding: usize,
    result: io::Result<()>,
}

impl Job {
    fn pages(&self) -> usize {
        match &self.io {
            Io::Read(_, pages) | Io::Write(_, pages, _) => pages.len(),
            Io::Sync | Io::Punch(..) => 1,
        }
    }
}

/// A command that has no answer yet.
struct InFlight {
    job: u64,
    first: usize,
    bytes: usize,
    deadline: Instant,
}

/// The thread's state.
struct Mover {
    shared: Arc<Shared>,
    connection: Connection,
    queue: HostQueue,
    blocks_per_page: u64,
    /// Pages of the longest command.
    step: usize,
    timeout: Duration,
    jobs: HashMap<u64, Job>,
    /// Jobs of which commands are still to be submitted, oldest first.
    backlog: VecDeque<u64>,
    commands: HashMap<u64, InFlight>,
    /// Number of the next job or command.
    next: u64,
    in_flight: usize,
}

impl Mover {
    fn run(mut self) {
        let detail = match self.serve() {
            Ok(()) => "the device is closed".to_owned(),
            Err(Gone(detail)) => detail,
        };
        let waiting = {
            let mut inbox = self.shared.inbox();
            inbox.ended = Some(detail.clone());
            std::mem::take(&mut inbox.jobs)
        };
        let known = self.jobs.into_values().map(|job| (job.io, job.reply));
        for (io, reply) in known.chain(waiting) {
            reply(io, Err(not_connected(&detail)));
        }
    }

    /// Works until the device is dropped; then what it was given ends first.
    fn serve(&mut self) -> Result<(), Gone> {
        loop {
            hush(&self.shared.event);
            if self.take_jobs() && self.jobs.is_empty() {
                return Ok(());
            }
            self.submit();
            self.connection.send(self.queue.transmit())?;
            let [ready] = self.wait()?;
            if ready.intersects(!PollFlags::OUT) {
                self.connection.receive(&mut self.queue)?;
            }
            self.take_events()?;
            let now = Instant::now();
            if self.commands.values().any(|command| command.deadline <= now) {
                return Err(Gone(format!("no answer for {:?}", self.timeout)));
            }
        }
    }

    /// Waits for the connection, for operations, or for the first deadline.
    fn wait(&mut self) -> Result<[PollFlags; 1], Gone> {
        let interest = Connection::interest(true, self.queue.transmit().pending_bytes());
        let descriptors =
            [(self.connection.as_fd(), interest), (self.shared.event.as_fd(), PollFlags::IN)];
        let first = self.commands.values().map(|command| command.deadline).min();
        let left = first.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let [ready, _] = wait(descriptors, left).map_err(|error| Gone(error.to_string()))?;
        Ok([ready])
    }

    /// Takes over what was given; whether the device is being closed.
    fn take_jobs(&mut self) -> bool {
        let (jobs, is_closing) = {
            let mut inbox = self.shared.inbox();
            (std::mem::take(&mut inbox.jobs), inbox.is_closing)
        };
        for (io, reply) in jobs {
            let job = Job { io, reply, submitted: 0, outstanding: 0, result: Ok(()) };
            self.next += 1;
            self.jobs.insert(self.next, job);
            self.backlog.push_back(self.next);
        }
        is_closing
    }

    fn submit(&mut self) {
        while self.queue.can_submit()
            && self.in_flight < IN_FLIGHT_BYTES
            && let Some(id) = self.backlog.front().copied()
        {
            let Some(job) = self.jobs.get_mut(&id) else {
                self.backlog.pop_front();
                continue;
            };
            let first = job.submitted;
            let pages = self.step.min(job.pages() - first);
            let command = command(&job.io, first, pages, self.blocks_per_page, &mut self.queue);
            self.next += 1;
            let submitted = match command {
                Some(command) => {
                    self.queue.submit(self.next, command).map_err(|(error, _)| error.to_string())
                }
                None => Err("a namespace of somebody else's has no such operation".to_owned()),
            };
            match submitted {
                Ok(()) => {
                    let deadline = Instant::now() + self.timeout;
                    let bytes = pages * PAGE_BYTES;
                    self.commands.insert(self.next, InFlight { job: id, first, bytes, deadline });
                    self.in_flight += bytes;
                    job.submitted += pages;
                    job.outstanding += 1;
                }
                Err(detail) => {
                    job.submitted = job.pages();
                    job.result = Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
                }
            }
            if job.submitted == job.pages() {
                self.backlog.pop_front();
            }
            self.finish(id);
        }
    }

    fn take_events(&mut self) -> Result<(), Gone> {
        while let Some(event) = self.queue.next_event() {
            match event {
                HostEvent::Completed { tag, status, data } => {
                    let Some(command) = self.commands.remove(&tag) else { continue };
                    self.in_flight -= command.bytes;
                    if is_of_connection(status) {
                        return Err(Gone(format!("the third party answers {status}")));
                    }
                    self.completed(&command, status, &data);
                    self.queue.recycle(data);
                    self.finish(command.job);
                }
                HostEvent::Failed { detail, .. } => return Err(Gone(detail)),
            }
        }
        Ok(())
    }

    fn completed(&mut self, command: &InFlight, status: Status, data: &[u8]) {
        let Some(job) = self.jobs.get_mut(&command.job) else { return };
        job.outstanding -= 1;
        if !status.is_success() {
            job.result = Err(io::Error::other(format!("the third party answers {status}")));
            return;
        }
        if let Io::Read(_, pages) = &mut job.io {
            let place = pages.as_mut_bytes().get_mut(command.first * PAGE_BYTES..);
            match place.and_then(|place| place.get_mut(..command.bytes)) {
                Some(place) if data.len() == command.bytes => place.copy_from_slice(data),
                _ => {
                    let detail = format!("{} bytes of {} answered", data.len(), command.bytes);
                    job.result = Err(io::Error::new(io::ErrorKind::InvalidData, detail));
                }
            }
        }
    }

    /// Replies to a job of which nothing is left to do.
    fn finish(&mut self, id: u64) {
        let is_over = |job: &Job| job.submitted == job.pages() && job.outstanding == 0;
        if self.jobs.get(&id).is_some_and(is_over)
            && let Some(job) = self.jobs.remove(&id)
        {
            (job.reply)(job.io, job.result);
        }
    }
}

/// Whether a status is about the path or the controller's end rather than about the blocks.
fn is_of_connection(status: Status) -> bool {
    const PATH_RELATED: u16 = 3;
    const ABORTED_SQ_DELETION: u16 = 0x008;
    let code = status.code();
    code >> 8 == PATH_RELATED || [Status::ABORTED.code(), ABORTED_SQ_DELETION].contains(&code)
}

/// The command for some of an operation's pages; None if there is none for it.
fn command(
    io: &Io,
    first: usize,
    pages: usize,
    blocks_per_page: u64,
    queue: &mut HostQueue,
) -> Option<HostCommand> {
    let lba = |page: u64| (page + first as u64) * blocks_per_page;
    Some(match io {
        Io::Read(page, _) => {
            HostCommand::Read { lba: lba(*page), blocks: (pages as u64 * blocks_per_page) as u32 }
        }
        Io::Write(page, all, is_durable) => {
            let part = all.get(first..first + pages).unwrap_or_default().as_bytes();
            let mut data = queue.buffer(part.len());
            data.copy_from_slice(part);
            HostCommand::Write { lba: lba(*page), data, is_forced: *is_durable }
        }
        Io::Sync => HostCommand::Flush,
        Io::Punch(..) => return None,
    })
}

#[cfg(test)]
#[path = "remote_tests.rs"]
mod tests;
