//! Operations on a third party's namespace over one NVMe/TCP I/O queue.
//!
//! A thread of the link's own moves the bytes; any other thread may submit operations. Once the
//! connection is lost, or a command is not answered in time, every operation ends with
//! `NotConnected`. Whether the target has executed those in flight is unknown; only a new link, on
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

use super::super::connection::{Connection, Gone, wait};
use super::ring::{clear, event, signal};

/// Most bytes in flight: more would only fill socket buffers.
const IN_FLIGHT_BYTES: usize = 1024 * 1024;

/// An operation on the namespace, split into commands by units of a fixed size.
pub trait Transfer: Send + 'static {
    /// Bytes of a unit.
    const UNIT_BYTES: usize;
    /// Number of units; 1 for operations that transfer none.
    fn units(&self) -> usize;
    /// The command for some of the units; `None` if the operation is not supported.
    fn command(&self, first: usize, units: usize, queue: &mut HostQueue) -> Option<HostCommand>;
    /// Whether the target's answer contains data.
    fn is_read(&self) -> bool;
    /// Buffer for that data, of all units.
    fn place(&mut self) -> &mut [u8];
}

/// Called when an operation has ended.
pub type Reply<T> = Box<dyn FnOnce(T, io::Result<()>) + Send>;

struct Inbox<T> {
    /// Bounded by the operations that channels have in flight.
    jobs: Vec<(T, Reply<T>)>,
    is_closing: bool,
    /// Set when the link has ended: why operations are refused.
    ended: Option<String>,
}

struct Shared<T> {
    inbox: Mutex<Inbox<T>>,
    event: Arc<OwnedFd>,
}

/// The error of operations on a link that has ended.
fn not_connected(detail: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, detail)
}

impl<T> Shared<T> {
    fn inbox(&self) -> MutexGuard<'_, Inbox<T>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give(&self, io: T, reply: Reply<T>) {
        let ended = {
            let mut inbox = self.inbox();
            if let Some(detail) = &inbox.ended {
                detail.clone()
            } else {
                inbox.jobs.push((io, reply));
                signal(&self.event);
                return;
            }
        };
        reply(io, Err(not_connected(&ended)));
    }
}

/// A link to a namespace, for operations of one type.
pub struct Link<T: Transfer> {
    shared: Arc<Shared<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Transfer> Link<T> {
    /// Starts a link on a connected socket whose Connect command succeeded. A command may take
    /// `timeout` and have at most `units_max` units. `InvalidInput` if the target's commands can't
    /// carry one unit.
    pub fn start(
        fd: OwnedFd,
        limits: HostLimits,
        units_max: usize,
        timeout: Duration,
    ) -> io::Result<Self> {
        if limits.transfer_max < T::UNIT_BYTES {
            let (found, least) = (limits.transfer_max, T::UNIT_BYTES);
            let detail = format!("{found} bytes per command; allowed: {least} and up");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
        let inbox = Inbox { jobs: Vec::new(), is_closing: false, ended: None };
        let shared = Arc::new(Shared { inbox: Mutex::new(inbox), event: event()? });
        let mover = Mover {
            shared: Arc::clone(&shared),
            connection: Connection::new(fd),
            queue: HostQueue::new(limits, None),
            step: (limits.transfer_max / T::UNIT_BYTES).min(units_max),
            timeout,
            jobs: HashMap::new(),
            backlog: VecDeque::new(),
            commands: HashMap::new(),
            next: 0,
            in_flight: 0,
        };
        let thread = std::thread::Builder::new().name("store-remote".into());
        let thread = Some(thread.spawn(move || mover.run())?);
        Ok(Self { shared, thread })
    }

    /// Starts an operation. `reply` is called when it has ended, on the link's thread or
    /// immediately.
    pub fn give(&self, io: T, reply: Reply<T>) {
        self.shared.give(io, reply);
    }

    /// Executes an operation and waits for its end.
    pub fn execute(&self, io: T) -> io::Result<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let reply = move |io, result: io::Result<()>| {
            // The receiver waits below.
            let _ = sender.send(result.map(|()| io));
        };
        self.give(io, Box::new(reply));
        receiver.recv().map_err(|_| not_connected("the link's thread ended"))?
    }
}

impl<T: Transfer> Drop for Link<T> {
    fn drop(&mut self) {
        self.shared.inbox().is_closing = true;
        signal(&self.shared.event);
        if let Some(thread) = self.thread.take() {
            // A panic would be a defect, and was reported when it happened.
            let _ = thread.join();
        }
    }
}

/// An operation in progress.
struct Job<T> {
    io: T,
    reply: Reply<T>,
    /// Units whose commands are submitted; all of them once one has failed.
    submitted: usize,
    outstanding: usize,
    result: io::Result<()>,
}

/// A command that has not been answered.
struct InFlight {
    job: u64,
    first: usize,
    bytes: usize,
    deadline: Instant,
}

/// The thread's state.
struct Mover<T> {
    shared: Arc<Shared<T>>,
    connection: Connection,
    queue: HostQueue,
    /// Most units of a command.
    step: usize,
    timeout: Duration,
    jobs: HashMap<u64, Job<T>>,
    /// Jobs with commands still to submit, oldest first.
    backlog: VecDeque<u64>,
    commands: HashMap<u64, InFlight>,
    /// Number of the next job or command.
    next: u64,
    in_flight: usize,
}

impl<T: Transfer> Mover<T> {
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

    /// Works until the link is dropped, and then until the operations it was given have ended.
    fn serve(&mut self) -> Result<(), Gone> {
        loop {
            clear(&self.shared.event);
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

    /// Waits for data, for new operations, or for the first deadline.
    fn wait(&mut self) -> Result<[PollFlags; 1], Gone> {
        let interest = Connection::interest(true, self.queue.transmit().pending_bytes());
        let descriptors =
            [(self.connection.as_fd(), interest), (self.shared.event.as_fd(), PollFlags::IN)];
        let first = self.commands.values().map(|command| command.deadline).min();
        let left = first.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let [ready, _] = wait(descriptors, left).map_err(|error| Gone(error.to_string()))?;
        Ok([ready])
    }

    /// Takes new operations from the inbox. Returns whether the link is being closed.
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
            let units = self.step.min(job.io.units() - first);
            let command = job.io.command(first, units, &mut self.queue);
            self.next += 1;
            let submitted = match command {
                Some(command) => {
                    self.queue.submit(self.next, command).map_err(|(error, _)| error.to_string())
                }
                None => Err("a third party's namespace does not support this operation".to_owned()),
            };
            match submitted {
                Ok(()) => {
                    let deadline = Instant::now() + self.timeout;
                    let bytes = units * T::UNIT_BYTES;
                    self.commands.insert(self.next, InFlight { job: id, first, bytes, deadline });
                    self.in_flight += bytes;
                    job.submitted += units;
                    job.outstanding += 1;
                }
                Err(detail) => {
                    job.submitted = job.io.units();
                    job.result = Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
                }
            }
            if job.submitted == job.io.units() {
                self.backlog.pop_front();
            }
            self.finish(id);
        }
    }

    fn take_events(&mut self) -> Result<(), Gone> {
        while let Some(event) = self.queue.next_event() {
            match event {
                HostEvent::Completed { tag, status, data, .. } => {
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
        if job.io.is_read() {
            let place = job.io.place().get_mut(command.first * T::UNIT_BYTES..);
            match place.and_then(|place| place.get_mut(..command.bytes)) {
                Some(place) if data.len() == command.bytes => place.copy_from_slice(data),
                _ => {
                    let detail = format!("{} bytes of {} answered", data.len(), command.bytes);
                    job.result = Err(io::Error::new(io::ErrorKind::InvalidData, detail));
                }
            }
        }
    }

    /// Replies to a job once nothing of it is left to do.
    fn finish(&mut self, id: u64) {
        let is_over = |job: &Job<T>| job.submitted == job.io.units() && job.outstanding == 0;
        if self.jobs.get(&id).is_some_and(is_over)
            && let Some(job) = self.jobs.remove(&id)
        {
            (job.reply)(job.io, job.result);
        }
    }
}

/// Whether a status concerns the path or the end of the controller rather than the blocks.
fn is_of_connection(status: Status) -> bool {
    const PATH_RELATED: u16 = 3;
    const ABORTED_SQ_DELETION: u16 = 0x008;
    let code = status.code();
    code >> 8 == PATH_RELATED || [Status::ABORTED.code(), ABORTED_SQ_DELETION].contains(&code)
}
