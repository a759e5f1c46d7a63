//! A volume as the gateway has it: key, leased counters, statistics, running queues.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use sealane_proto::nvme::controller_queue::ControllerLimits;
use sealane_proto::nvme::host_queue::HostLimits;
use sealane_proto::nvme::operation::NamespaceFormat;
use sealane_proto::sector::{COUNTERS_PER_SECTOR, CounterRange, SealKey};
use sealane_proto::secure_queue::SecureQueue;

use super::connection::Connection;
use super::events::EventLog;
use super::gateway_worker::Worker;
use super::queues::Queues;

/// Counters a queue thread takes from the lease at once: 4096 sectors, 16 MiB of writes. It keeps
/// the lock out of the way and is little to lose when the process dies.
const COUNTERS_PER_SPLIT: u64 = 1 << 20;
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) reads: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) flushes: AtomicU64,
    pub(super) sectors_sealed: AtomicU64,
    pub(super) sectors_opened: AtomicU64,
    pub(super) sectors_unwritten: AtomicU64,
    pub(super) refusals: AtomicU64,
    pub(super) leased: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) key: SealKey,
    pub(super) leased: Mutex<Vec<CounterRange>>,
    pub(super) counters: Counters,
    pub(super) events: EventLog,
}

impl Shared {
    pub(super) fn leased(&self) -> std::sync::MutexGuard<'_, Vec<CounterRange>> {
        self.leased.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn split(&self) -> Option<CounterRange> {
        let mut leased = self.leased();
        while let Some(range) = leased.last_mut() {
            if let Some(part) = range.split(COUNTERS_PER_SPLIT) {
                return Some(part);
            }
            leased.pop();
        }
        None
    }
}

/// One attached volume, its key, its counters and its running queues.
#[derive(Debug)]
pub struct GatewayVolume {
    // First, so that the queues are stopped before what they share goes.
    queues: Queues,
    shared: Arc<Shared>,
}

/// Both sides of a queue to start.
#[derive(Debug)]
pub struct QueuePair {
    /// Tag of the front-end association, for events and for stopping.
    pub association: u64,
    /// Queue id on both sides.
    pub queue_id: u16,
    /// What was negotiated with the host.
    pub front: ControllerLimits,
    /// The plain namespace the host sees.
    pub namespace: NamespaceFormat,
    /// What was negotiated with the target.
    pub back: HostLimits,
    /// Keys of the back-end queue.
    pub secure: SecureQueue,
}

impl GatewayVolume {
    /// A volume without counters: it reads, and refuses to write until a lease is added.
    pub fn new(key: SealKey) -> io::Result<Self> {
        let shared = Shared {
            key,
            leased: Mutex::default(),
            counters: Counters::default(),
            events: EventLog::new()?,
        };
        Ok(Self { queues: Queues::default(), shared: Arc::new(shared) })
    }

    /// Adds leased counters.
    pub fn add_counters(&self, range: CounterRange) {
        add(&self.shared.counters.leased, range.remaining());
        self.shared.leased().insert(0, range);
    }

    /// Leased counters that no queue has taken yet.
    pub fn counters_remaining(&self) -> u64 {
        self.shared.leased().iter().map(CounterRange::remaining).sum()
    }

    /// Serves the queue pair on its own thread. Both sockets' Connect commands are answered.
    pub fn start_queue(&self, front: OwnedFd, back: OwnedFd, pair: QueuePair) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let association = pair.association;
        self.queues.start(format!("gateway-q{}", pair.queue_id), association, move |stop| {
            let mut worker = Worker::new(shared, pair);
            worker.event("queue_opened", "", None, String::new());
            let mut front = Connection::new(front);
            let mut back = Connection::new(back);
            let (reason, detail) = worker.run(&mut front, &mut back, stop.as_fd());
            worker.event("queue_closed", reason, None, detail);
        })
    }

    /// Stops the queues of one association, or all; returns when they are gone.
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
        let sealed = read(&counters.sectors_sealed);
        vec![
            ("reads", read(&counters.reads)),
            ("writes", read(&counters.writes)),
            ("flushes", read(&counters.flushes)),
            ("sectors_sealed", sealed),
            ("sectors_opened", read(&counters.sectors_opened)),
            ("sectors_unwritten", read(&counters.sectors_unwritten)),
            ("counters_used", sealed * COUNTERS_PER_SECTOR),
            ("counters_leased", read(&counters.leased)),
            ("refusals", read(&counters.refusals)),
            ("queues_running", self.queues.running() as u64),
            ("events_dropped", self.shared.events.dropped()),
        ]
    }
}
