//! A controller: the I/O queues of one host's association, and the namespaces they serve.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use sealane_proto::link::Nanos;
use sealane_proto::nvme::controller_queue::{CommandError, ControllerLimits, ControllerQueue};
use sealane_proto::secure_queue::SecureQueue;

use super::assigned::{AnaState, Assigned};
use super::mailbox::{Mailbox, Message};
use super::namespace::Namespace;
use super::outcomes::QueueName;
use super::reservation::HostId;
use super::worker::Worker;
use crate::clock;
use crate::permit::Permit;
use crate::storage::connection::Connection;
use crate::storage::events::EventLog;
use crate::storage::queues::Queues;

/// Time limit for a queue's thread to answer whether it aborted a command.
const ABORT_WAIT: Duration = Duration::from_secs(1);

/// Maximum entries of the error log, reported by Identify Controller (ELPE).
pub const ERROR_LOG_MAX: usize = 64;

/// An entry of the error log (NVMe Base 2.0 §5.16.1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorEntry {
    /// Number of errors so far, including this one.
    pub count: u64,
    /// Queue id of the command.
    pub queue_id: u16,
    /// The command and its error.
    pub error: CommandError,
}

/// Next queue number; numbers are unique in the process.
static NEXT_QUEUE: AtomicU64 = AtomicU64::new(1);

/// State shared by a controller and its queues.
#[derive(Debug)]
pub(super) struct Shared {
    pub association: u64,
    pub host_id: HostId,
    /// The host may act while this permit holds; `None`: no permit limits it.
    pub permit: Option<Arc<Permit>>,
    pub events: EventLog,
    pub refusals: AtomicU64,
    /// When a byte was last received on any queue.
    received: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    namespaces: Vec<Assigned>,
    error_count: u64,
    /// Newest last.
    errors: VecDeque<ErrorEntry>,
    is_read_only: bool,
    mailboxes: Vec<(u16, Weak<Mailbox>)>,
}

impl Shared {
    /// Adds an error to the log.
    pub fn note_error(&self, queue_id: u16, error: CommandError) {
        let mut state = self.lock();
        state.error_count += 1;
        if state.errors.len() == ERROR_LOG_MAX {
            state.errors.pop_front();
        }
        let count = state.error_count;
        state.errors.push_back(ErrorEntry { count, queue_id, error });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that bytes were received.
    pub fn touch(&self) {
        self.received.store(clock::now(), Ordering::Relaxed);
    }
}

/// The I/O side of one controller.
#[derive(Debug)]
pub struct Controller {
    // First, so that the queues are stopped before their shared state is dropped.
    queues: Queues,
    shared: Arc<Shared>,
}

impl Controller {
    /// Creates a controller without queues and namespaces.
    pub fn new(association: u64, host_id: HostId) -> io::Result<Self> {
        Self::permitted(association, host_id, None)
    }

    /// As [`Controller::new`], for a host that may act while `permit` holds: queues end with it.
    pub fn permitted(
        association: u64,
        host_id: HostId,
        permit: Option<Arc<Permit>>,
    ) -> io::Result<Self> {
        let shared = Shared {
            association,
            host_id,
            permit,
            events: EventLog::new()?,
            refusals: AtomicU64::new(0),
            received: AtomicU64::new(clock::now()),
            state: Mutex::default(),
        };
        Ok(Self { queues: Queues::default(), shared: Arc::new(shared) })
    }

    /// Makes it a controller for a host that may not change anything: changes fail with Namespace
    /// is Write Protected.
    #[must_use]
    pub fn read_only(self) -> Self {
        self.shared.lock().is_read_only = true;
        self
    }

    // Commands.

    /// Replaces the controller's namespaces. Running queues adopt them on their own threads;
    /// commands accepted earlier are still executed.
    pub fn set_namespaces(&self, entries: Vec<(u32, Arc<Namespace>, AnaState)>) {
        let mut state = self.shared.lock();
        let is_read_only = state.is_read_only;
        let assign = |(nsid, namespace, state)| Assigned { nsid, namespace, state, is_read_only };
        state.namespaces = entries.into_iter().map(assign).collect();
        let namespaces = state.namespaces.clone();
        state.mailboxes.retain(|(_, mailbox)| {
            let mailbox = mailbox.upgrade();
            if let Some(mailbox) = &mailbox {
                mailbox.post(Message::Namespaces(namespaces.clone()));
            }
            mailbox.is_some()
        });
    }

    /// Serves an I/O queue on its own thread. `fd` is a connected socket whose Connect command has
    /// been answered. A secure queue serves only sealed namespaces, any other queue only plain
    /// ones.
    pub fn start_queue(
        &self,
        fd: OwnedFd,
        queue_id: u16,
        limits: ControllerLimits,
        secure: Option<SecureQueue>,
    ) -> io::Result<()> {
        let mailbox = Arc::new(Mailbox::new()?);
        let mut state = self.shared.lock();
        let namespaces = state.namespaces.clone();
        state.mailboxes.retain(|(_, mailbox)| mailbox.strong_count() > 0);
        state.mailboxes.push((queue_id, Arc::downgrade(&mailbox)));
        let shared = Arc::clone(&self.shared);
        let number = NEXT_QUEUE.fetch_add(1, Ordering::Relaxed);
        let secure_name =
            secure.as_ref().map(|queue| (queue.host_nqn().to_owned(), name_of(queue)));
        shared.touch();
        // The state stays locked, so that the namespaces can't change meanwhile.
        self.queues.start(format!("target-q{queue_id}"), self.shared.association, move |stop| {
            let queue = ControllerQueue::new(limits, Vec::new(), secure);
            let ids = (queue_id, limits.queue_depth);
            let mut worker = Worker::new(shared, mailbox, queue, ids, (number, secure_name));
            worker.assign(&namespaces);
            worker.event("queue_opened", "", None, String::new());
            let (reason, detail) = worker.run(&mut Connection::new(fd), stop.as_fd());
            worker.event("queue_closed", reason, None, detail);
        })
    }

    /// Aborts a command whose data haven't all arrived; returns whether there was one.
    pub fn abort(&self, queue_id: u16, cid: u16) -> bool {
        let mailbox = {
            let state = self.shared.lock();
            let mut known = state.mailboxes.iter().filter(|(known, _)| *known == queue_id);
            known.find_map(|(_, mailbox)| mailbox.upgrade())
        };
        let Some(mailbox) = mailbox else { return false };
        let (reply, replies) = sync_channel(1);
        mailbox.post(Message::Abort(cid, reply));
        drop(mailbox);
        // A thread that has ended doesn't answer: nothing was aborted.
        replies.recv_timeout(ABORT_WAIT).unwrap_or(false)
    }

    /// Stops every queue; returns when none has anything in flight.
    pub fn close(&self) {
        self.queues.stop(None);
    }

    // Questions.

    /// Time since the last byte was received on any of its queues.
    pub fn idle(&self) -> Nanos {
        clock::now().saturating_sub(self.shared.received.load(Ordering::Relaxed))
    }

    /// Number of queues whose thread is running.
    pub fn queues_running(&self) -> usize {
        self.queues.running()
    }

    /// Number of queues and commands refused by a check, except checks of stored sectors.
    pub fn refusals(&self) -> u64 {
        self.shared.refusals.load(Ordering::Relaxed)
    }

    /// Events of the queues, with a descriptor that signals them.
    pub fn events(&self) -> &EventLog {
        &self.shared.events
    }

    /// The error log, newest entry first.
    pub fn errors(&self) -> Vec<ErrorEntry> {
        self.shared.lock().errors.iter().rev().copied().collect()
    }
}

fn name_of(queue: &SecureQueue) -> QueueName {
    QueueName { name: queue.name(), epoch: queue.association_epoch() }
}
