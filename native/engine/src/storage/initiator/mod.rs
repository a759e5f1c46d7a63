//! Host side of a plain I/O queue: concurrent transfers from any thread.
//!
//! The thread that starts a transfer submits and sends as many of its commands as the queue
//! accepts. The queue's own thread receives answers, completes transfers and submits the remaining
//! commands. The caller collects completed transfers when the descriptor of
//! [`HostVolumeQueue::as_fd`] is readable: no call waits for the peer, and there are no callbacks.

mod transfer;

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::host_queue::{HostEvent, HostLimits, HostQueue, SubmitError};
use sealane_proto::nvme::status::Status;

use self::transfer::Extent;
pub use self::transfer::{Transfer, TransferBuffer, TransferError};
use super::connection::{Connection, Gone, wait};

/// Maximum bytes in flight: more would only wait in socket buffers and drop out of the caches.
const IN_FLIGHT_BYTES: usize = 512 * 1024;
/// Maximum transfers of one queue that have not ended or whose end hasn't been taken.
pub const TRANSFERS_MAX: usize = 1024;

/// The end of a transfer, with its buffers.
#[derive(Debug)]
pub struct Done {
    /// The ticket returned by `start`.
    pub ticket: u64,
    /// How it ended.
    pub outcome: Result<(), TransferError>,
    /// The transfer itself, which owns its buffers.
    pub transfer: Transfer,
}

/// A transfer that hasn't ended.
#[derive(Debug)]
struct Active {
    lba: u64,
    extent: Extent,
    transfer: Transfer,
    /// Blocks whose commands have been submitted.
    submitted: u64,
    /// Commands in flight.
    commands: usize,
    /// Why no more commands are submitted; reported once those in flight have ended.
    failed: Option<TransferError>,
}

impl Active {
    fn has_more(&self) -> bool {
        self.failed.is_none() && self.submitted < self.extent.blocks
    }
}

/// A command in flight.
#[derive(Debug, Clone, Copy)]
struct InFlight {
    tag: u64,
    ticket: u64,
    /// First block, relative to the start of the transfer.
    first: u64,
    bytes: usize,
    deadline: Instant,
}

#[derive(Debug)]
struct Inner {
    connection: Connection,
    queue: HostQueue,
    block_bytes: usize,
    io_bytes: usize,
    timeout: Duration,
    transfers: HashMap<u64, Active>,
    /// Tickets of transfers with commands to submit; served round-robin.
    waiting: VecDeque<u64>,
    /// Commands in flight, oldest first.
    in_flight: VecDeque<InFlight>,
    in_flight_bytes: usize,
    next_ticket: u64,
    next_tag: u64,
    done: Vec<Done>,
    progress: u64,
    ended: Option<TransferError>,
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    /// Wakes the queue's thread.
    wake: OwnedFd,
    /// Readable while there are completed transfers to take.
    ready: OwnedFd,
}

/// A plain I/O queue of a host.
#[derive(Debug)]
pub struct HostVolumeQueue {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The process in which the thread runs: a forked child has a copy of this memory, but not the
    /// thread.
    process: u32,
}

impl HostVolumeQueue {
    /// Uses a connected socket whose Connect command succeeded. Transfers are split into commands
    /// of at most `io_bytes`; `timeout` limits the time of one command.
    pub fn new(
        fd: OwnedFd,
        limits: HostLimits,
        io_bytes: usize,
        timeout: Duration,
    ) -> std::io::Result<Self> {
        let block_bytes = limits.block_bytes;
        let io_bytes = io_bytes.min(limits.transfer_max) / block_bytes * block_bytes;
        let socket = fd.try_clone()?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let shared = Arc::new(Shared {
            inner: Mutex::new(Inner {
                connection: Connection::new(fd),
                queue: HostQueue::new(limits, None),
                block_bytes,
                io_bytes: io_bytes.max(block_bytes),
                timeout,
                transfers: HashMap::new(),
                waiting: VecDeque::new(),
                in_flight: VecDeque::new(),
                in_flight_bytes: 0,
                next_ticket: 0,
                next_tag: 0,
                done: Vec::new(),
                progress: 0,
                ended: None,
            }),
            wake: eventfd(0, flags)?,
            ready: eventfd(0, flags)?,
        });
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("nvme-host-queue".into())
            .spawn(move || for_thread.serve(&socket))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), process: std::process::id() })
    }

    /// Starts a transfer at `lba`; its end is reported with the returned ticket. On an error
    /// nothing was started.
    pub fn start(&self, lba: u64, transfer: Transfer) -> Result<u64, TransferError> {
        let mut inner = self.shared.lock();
        if let Some(ended) = &inner.ended {
            return Err(ended.clone());
        }
        if inner.transfers.len() + inner.done.len() >= TRANSFERS_MAX {
            return Err(TransferError::Busy(TRANSFERS_MAX));
        }
        let extent = transfer.extent(inner.io_bytes, inner.block_bytes)?;
        let was_idle = inner.in_flight.is_empty();
        let ticket = inner.next_ticket;
        inner.next_ticket += 1;
        let active = Active { lba, extent, transfer, submitted: 0, commands: 0, failed: None };
        inner.transfers.insert(ticket, active);
        inner.waiting.push_back(ticket);
        self.shared.advance(&mut inner);
        // The thread must learn of the first deadline, and of bytes that the socket didn't take.
        if was_idle || inner.queue.transmit().pending_bytes() > 0 {
            signal(&self.shared.wake);
        }
        Ok(ticket)
    }

    /// Cancels a transfer: no more of it is submitted, and nothing more is copied into its buffer.
    /// It ends when its commands in flight have ended.
    pub fn cancel(&self, ticket: u64) {
        let mut inner = self.shared.lock();
        if let Some(active) = inner.transfers.get_mut(&ticket) {
            active.failed.get_or_insert(TransferError::Cancelled);
            inner.settle(ticket);
            self.shared.advance(&mut inner);
        }
    }

    /// Takes the completed transfers.
    pub fn take_done(&self) -> Vec<Done> {
        let mut inner = self.shared.lock();
        drain(&self.shared.ready);
        std::mem::take(&mut inner.done)
    }

    /// Bytes transferred since the queue was created.
    pub fn progress(&self) -> u64 {
        self.shared.lock().progress
    }

    /// Whether this process is a forked child of the one that created the queue. The queue doesn't
    /// work here: its locks may be held for ever, and its thread can't be joined.
    pub fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Closes the queue; every transfer ends with an error. Does nothing in a forked child.
    pub fn close(&self) {
        if self.is_forked() {
            return;
        }
        self.shared.end(&mut self.shared.lock(), &closed("the queue was closed".into()));
        signal(&self.shared.wake);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A thread that panicked has stopped, too.
            let _ = thread.join();
        }
    }
}

impl AsFd for HostVolumeQueue {
    /// Readable while there are completed transfers to take.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.ready.as_fd()
    }
}

impl Drop for HostVolumeQueue {
    fn drop(&mut self) {
        if self.is_forked() {
            // Neither join nor detach it: the thread belongs to another process.
            let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            std::mem::forget(thread);
        } else {
            self.close();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The queue's thread.
    fn serve(&self, socket: &OwnedFd) {
        loop {
            let (interest, left) = {
                let mut inner = self.lock();
                if inner.ended.is_some() {
                    return;
                }
                let pending = inner.queue.transmit().pending_bytes();
                (Connection::interest(true, pending), inner.time_left())
            };
            // Every change of these two wakes this thread.
            let descriptors = [(socket.as_fd(), interest), (self.wake.as_fd(), PollFlags::IN)];
            let outcome = wait(descriptors, left);
            let mut inner = self.lock();
            let outcome = outcome
                .map_err(|error| closed(error.to_string()))
                .and_then(|[ready, woken]| self.served(&mut inner, ready, woken));
            if let Err(error) = outcome {
                self.end(&mut inner, &error);
            }
        }
    }

    fn served(
        &self,
        inner: &mut Inner,
        ready: PollFlags,
        woken: PollFlags,
    ) -> Result<(), TransferError> {
        if inner.ended.is_some() {
            return Ok(());
        }
        if !woken.is_empty() {
            drain(&self.wake);
        }
        if !ready.is_empty() && ready != PollFlags::OUT {
            let Inner { connection, queue, .. } = inner;
            connection.receive(queue).map_err(|Gone(detail)| closed(detail))?;
            inner.take_events()?;
        }
        if inner.time_left().is_some_and(|left| left.is_zero()) {
            return Err(TransferError::TimedOut(inner.timeout));
        }
        self.advance(inner);
        Ok(())
    }

    /// Submits and sends what is possible now, and reports completed transfers.
    fn advance(&self, inner: &mut Inner) {
        inner.submit();
        let Inner { connection, queue, .. } = &mut *inner;
        if let Err(Gone(detail)) = connection.send(queue.transmit()) {
            self.end(inner, &closed(detail));
        }
        if !inner.done.is_empty() {
            signal(&self.ready);
        }
    }

    /// Ends the queue and every transfer, once.
    fn end(&self, inner: &mut Inner, error: &TransferError) {
        if inner.ended.is_some() {
            return;
        }
        inner.ended = Some(error.clone());
        inner.waiting.clear();
        inner.in_flight.clear();
        for (ticket, active) in std::mem::take(&mut inner.transfers) {
            let outcome = Err(active.failed.unwrap_or_else(|| error.clone()));
            inner.done.push(Done { ticket, outcome, transfer: active.transfer });
        }
        // Let the peer see the end now, not when the last reference is dropped.
        let _ = inner.connection.send(inner.queue.transmit());
        let _ = rustix::net::shutdown(inner.connection.as_fd(), rustix::net::Shutdown::Both);
        if !inner.done.is_empty() {
            signal(&self.ready);
        }
        signal(&self.wake);
    }
}

impl Inner {
    /// Time left until the oldest command times out.
    fn time_left(&self) -> Option<Duration> {
        let oldest = self.in_flight.front().map(|command| command.deadline);
        oldest.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Submits commands of all transfers round-robin, while there is room.
    fn submit(&mut self) {
        while self.queue.can_submit()
            && let Some(ticket) = self.waiting.pop_front()
        {
            let has_more = self.transfers.get(&ticket).is_some_and(Active::has_more);
            if !has_more {
                self.settle(ticket);
            } else if self.submit_one(ticket) {
                self.waiting.push_back(ticket);
            } else {
                self.waiting.push_front(ticket);
                return;
            }
        }
    }

    /// Submits the next command of a transfer; false if there is no room for it now.
    fn submit_one(&mut self, ticket: u64) -> bool {
        let Self { transfers, queue, block_bytes, .. } = self;
        let Some(active) = transfers.get_mut(&ticket) else { return true };
        let first = active.submitted;
        let blocks = active.extent.step.min(active.extent.blocks - first);
        let bytes = active.transfer.moved(blocks, *block_bytes);
        if self.in_flight_bytes > 0 && self.in_flight_bytes + bytes > IN_FLIGHT_BYTES {
            return false;
        }
        let buffer = |bytes| queue.buffer(bytes);
        let command = active.transfer.command(active.lba, first, blocks, *block_bytes, buffer);
        match queue.submit(self.next_tag, command) {
            Ok(()) => {}
            // Retried when other commands have ended; if there are none, it would wait for ever.
            Err((SubmitError::Full, _)) if !self.in_flight.is_empty() => return false,
            Err((SubmitError::Length | SubmitError::Full, _)) => {
                active.failed.get_or_insert(TransferError::Length);
                return true;
            }
            Err((error @ SubmitError::Closed, _)) => {
                active.failed.get_or_insert(closed(error.to_string()));
                return true;
            }
        }
        active.submitted += blocks;
        active.commands += 1;
        self.in_flight_bytes += bytes;
        let deadline = Instant::now() + self.timeout;
        let command = InFlight { tag: self.next_tag, ticket, first, bytes, deadline };
        self.in_flight.push_back(command);
        self.next_tag += 1;
        true
    }

    fn take_events(&mut self) -> Result<(), TransferError> {
        while let Some(event) = self.queue.next_event() {
            match event {
                HostEvent::Completed { tag, status, data, .. } => {
                    self.ended(tag, status, &data);
                    self.queue.recycle(data);
                }
                HostEvent::Failed { reason, detail, .. } => {
                    return Err(TransferError::Ended { reason, detail });
                }
            }
        }
        Ok(())
    }

    fn ended(&mut self, tag: u64, status: Status, data: &[u8]) {
        let Some(index) = self.in_flight.iter().position(|command| command.tag == tag) else {
            return;
        };
        let Some(command) = self.in_flight.remove(index) else { return };
        self.in_flight_bytes -= command.bytes;
        let Some(active) = self.transfers.get_mut(&command.ticket) else { return };
        active.commands -= 1;
        if !status.is_success() {
            let lba = active.lba.saturating_add(command.first);
            active.failed.get_or_insert(TransferError::Status { status, lba });
        } else if active.failed.is_none() {
            self.progress += command.bytes as u64;
            if let Transfer::Read(into) = &mut active.transfer {
                into.copy_from(command.first as usize * self.block_bytes, data);
            }
        }
        self.settle(command.ticket);
    }

    /// Reports a transfer if it has nothing in flight and nothing to submit.
    fn settle(&mut self, ticket: u64) {
        let has_ended = |active: &Active| active.commands == 0 && !active.has_more();
        if !self.transfers.get(&ticket).is_some_and(has_ended) {
            return;
        }
        if let Some(Active { transfer, failed, .. }) = self.transfers.remove(&ticket) {
            self.done.push(Done { ticket, outcome: failed.map_or(Ok(()), Err), transfer });
        }
    }
}

pub(super) fn closed(detail: String) -> TransferError {
    TransferError::Ended { reason: Reason::QueueClosed, detail }
}

fn signal(event: &OwnedFd) {
    // Fails only if the counter is full; then the waiter is already signalled.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

fn drain(event: &OwnedFd) {
    // Fails only if nothing was signalled.
    let _ = rustix::io::read(event, &mut [0; 8]);
}

#[cfg(test)]
mod tests;
