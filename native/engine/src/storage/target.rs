//! A volume as the target has it, and the thread that serves one of its secure I/O queues.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::PollFlags;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::controller_queue::{
    Command, ControllerEvent, ControllerLimits, ControllerQueue, Operation,
};
use sealane_proto::nvme::operation::NamespaceFormat;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::BLOCK_BYTES;
use sealane_proto::secure_queue::SecureQueue;

use super::connection::{Connection, Gone, wait};
use super::events::{EventLog, StorageEvent};
use super::freshness::{FlatTable, ReadError};
use super::queues::Queues;
use super::store::SectorStore;

/// Bytes that may wait for the host before its commands are neither received nor executed. Enough
/// to keep the wire busy, and little enough to stay in the processor's caches.
const PENDING_MAX: usize = 512 * 1024;

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    sectors_read: AtomicU64,
    sectors_stored: AtomicU64,
    refusals: AtomicU64,
}

fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

/// A volume of sealed sectors: store, freshness table, statistics, events.
#[derive(Debug)]
struct Shared {
    store: Box<dyn SectorStore>,
    table: FlatTable,
    counters: Counters,
    events: EventLog,
}

/// One volume and its running queues.
#[derive(Debug)]
pub struct TargetVolume {
    // First, so that the queues are stopped before what they share goes.
    queues: Queues,
    shared: Arc<Shared>,
}

impl TargetVolume {
    /// A volume of `sector_count` never-written sectors over an empty store.
    pub fn new(sector_count: u64, store: Box<dyn SectorStore>) -> io::Result<Self> {
        let shared = Shared {
            store,
            table: FlatTable::new(sector_count),
            counters: Counters::default(),
            events: EventLog::new()?,
        };
        Ok(Self { queues: Queues::default(), shared: Arc::new(shared) })
    }

    /// Serves an I/O queue on its own thread: `fd` is a connected socket whose Connect command is
    /// answered. There is no way to serve a volume without a secure queue.
    pub fn start_queue(
        &self,
        fd: OwnedFd,
        association: u64,
        queue_id: u16,
        limits: ControllerLimits,
        namespace: NamespaceFormat,
        secure: SecureQueue,
    ) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let name = format!("target-q{queue_id}");
        self.queues.start(name, association, move |stop| {
            let mut worker = Worker {
                shared,
                queue: ControllerQueue::new(limits, vec![namespace], Some(secure)),
                association,
                queue_id,
            };
            worker.event("queue_opened", "", None, String::new());
            let (reason, detail) = worker.run(&mut Connection::new(fd), stop.as_fd());
            worker.event("queue_closed", reason, None, detail);
        })
    }

    /// Stops the queues of one association, or all; returns when nothing is in flight.
    pub fn close_queues(&self, association: Option<u64>) {
        self.queues.stop(association);
    }

    /// Events so far and the descriptor that tells of them.
    pub fn events(&self) -> &EventLog {
        &self.shared.events
    }

    /// Counters by name.
    pub fn statistics(&self) -> Vec<(&'static str, u64)> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        vec![
            ("reads", read(&counters.reads)),
            ("writes", read(&counters.writes)),
            ("flushes", read(&counters.flushes)),
            ("sectors_read", read(&counters.sectors_read)),
            ("sectors_stored", read(&counters.sectors_stored)),
            ("sectors_written", self.shared.table.written()),
            ("refusals", read(&counters.refusals)),
            ("queues_running", self.queues.running() as u64),
            ("events_dropped", self.shared.events.dropped()),
        ]
    }
}

struct Worker {
    shared: Arc<Shared>,
    queue: ControllerQueue,
    association: u64,
    queue_id: u16,
}

impl Worker {
    /// Runs until the peer goes, the queue fails or `stop` is readable. Returns why it ended.
    fn run(&mut self, connection: &mut Connection, stop: BorrowedFd<'_>) -> (&'static str, String) {
        loop {
            let pending = self.queue.transmit().pending_bytes();
            let interest = Connection::interest(pending < PENDING_MAX, pending);
            let ready = wait([(connection.as_fd(), interest), (stop, PollFlags::IN)], None);
            match ready {
                Ok([_, stopped]) if !stopped.is_empty() => return ("", "stopped".into()),
                Ok([ready, _]) if ready != PollFlags::OUT => {
                    if let Err(Gone(detail)) = connection.receive(&mut self.queue) {
                        return ("", detail);
                    }
                }
                Ok(_) => {}
                Err(error) => return ("", error.to_string()),
            }
            // Until nothing is left to execute, or the host must take some bytes first.
            loop {
                if let Some(ended) = self.execute_some() {
                    connection.farewell(self.queue.transmit());
                    return ended;
                }
                if let Err(Gone(detail)) = connection.send(self.queue.transmit()) {
                    return ("", detail);
                }
                if !self.queue.has_event() || !self.may_execute() {
                    break;
                }
            }
        }
    }

    fn may_execute(&mut self) -> bool {
        self.queue.transmit().pending_bytes() < PENDING_MAX
    }

    fn execute_some(&mut self) -> Option<(&'static str, String)> {
        while self.may_execute()
            && let Some(event) = self.queue.next_event()
        {
            match event {
                ControllerEvent::Received(command) => self.execute(command),
                ControllerEvent::Failed { reason: Reason::QueueClosed, detail, .. } => {
                    return Some(("", detail));
                }
                ControllerEvent::Failed { reason, lba, detail } => {
                    self.refused(reason, lba, detail.clone());
                    return Some((reason.id(), detail));
                }
            }
        }
        None
    }

    fn execute(&mut self, command: Command) {
        let Command { slot, operation, lba, blocks, is_forced, .. } = command;
        let shared = Arc::clone(&self.shared);
        let counters = &shared.counters;
        match operation {
            Operation::Flush => {
                add(&counters.flushes, 1);
                let status = match shared.store.flush() {
                    Ok(()) => Status::SUCCESS,
                    Err(error) => self.store_failed(Status::WRITE_FAULT, None, &error),
                };
                self.queue.complete(slot, status, Vec::new());
            }
            Operation::Write(data) => {
                add(&counters.writes, 1);
                let durable = || if is_forced { shared.store.flush() } else { Ok(()) };
                let stored = shared.table.write(&*shared.store, lba, &data);
                let status = match stored.and_then(|()| durable()) {
                    Ok(()) => {
                        add(&counters.sectors_stored, u64::from(blocks));
                        Status::SUCCESS
                    }
                    Err(error) => self.store_failed(Status::WRITE_FAULT, Some(lba), &error),
                };
                self.queue.complete(slot, status, data);
            }
            Operation::Read => {
                add(&counters.reads, 1);
                let mut data = self.queue.buffer(blocks as usize * BLOCK_BYTES);
                match shared.table.read(&*shared.store, lba, &mut data) {
                    Ok(()) => {
                        add(&counters.sectors_read, u64::from(blocks));
                        self.queue.complete_read(slot, data);
                    }
                    Err(ReadError::Refused { reason, lba }) => {
                        self.refused(reason, Some(lba), "stored sector".into());
                        self.queue.complete(slot, Status::from(reason), data);
                    }
                    Err(ReadError::Store(error)) => {
                        let status = Status::UNRECOVERED_READ;
                        let status = self.store_failed(status, Some(lba), &error);
                        self.queue.complete(slot, status, data);
                    }
                }
            }
            // The namespace doesn't offer any other command.
            _ => self.queue.complete(slot, Status::INVALID_OPCODE.final_(), Vec::new()),
        }
    }

    fn store_failed(&self, status: Status, lba: Option<u64>, error: &io::Error) -> Status {
        self.refused(Reason::StoreFailed, lba, error.to_string());
        status
    }

    fn refused(&self, reason: Reason, lba: Option<u64>, detail: String) {
        add(&self.shared.counters.refusals, 1);
        self.event("refused", reason.id(), lba, detail);
    }

    fn event(&self, kind: &'static str, reason: &'static str, lba: Option<u64>, detail: String) {
        let (association, queue_id) = (self.association, self.queue_id);
        self.shared.events.push(StorageEvent { kind, reason, lba, association, queue_id, detail });
    }
}
