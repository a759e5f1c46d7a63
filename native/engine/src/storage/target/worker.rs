//! The thread of one I/O queue: its socket, its channels to the stores, its commands.
//!
//! It sleeps in one `poll` over the socket, its mailbox and the stores with operations in flight.
//! It never holds or waits for a lock during I/O, and never blocks on another thread.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags, poll};
use sealane_proto::link::Nanos;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::controller_queue::{ControllerEvent, ControllerQueue};
use sealane_proto::nvme::transmit::TransmitQueue;

use super::assigned::Assigned;
use super::controller::Shared;
use super::execution::Task;
use super::mailbox::{Mailbox, Message};
use super::namespace::Namespace;
use super::order::Writer;
use super::outcomes::{Changes, QueueName};
use crate::clock;
use crate::storage::connection::{Connection, Gone};
use crate::storage::events::StorageEvent;
use crate::storage::store::{StoreChannel, StoreDone};

/// Maximum bytes pending for the host or being read from a store for it; beyond it, commands aren't
/// executed. Enough to keep the wire busy, and small enough to stay in the processor's caches.
const PENDING_MAX: usize = 512 * 1024;

/// How often a queue that ends polls stores that haven't signalled anything.
const DRAIN_LOOK: Nanos = 100_000_000;

/// Why a queue ended: a stable reason id (empty if there was no fault) and a description.
pub(super) type Ended = (&'static str, String);

/// A namespace and this thread's channel to its store.
pub(super) struct Attachment {
    pub nsid: u32,
    pub namespace: Arc<Namespace>,
    pub channel: Box<dyn StoreChannel>,
    /// Number of this queue's commands that use it.
    pub tasks: usize,
    /// Outcomes of the changes of a secure queue.
    pub changes: Changes,
    /// Number of the gateway of a secure queue.
    pub writer: Writer,
    /// Whether the controller no longer has this namespace; dropped with its last command.
    is_retired: bool,
}

pub(super) struct Worker {
    pub controller: Arc<Shared>,
    pub mailbox: Arc<Mailbox>,
    pub queue: ControllerQueue,
    pub queue_id: u16,
    /// Unique in the process.
    pub number: u64,
    /// NQN of the gateway and name of a secure queue; None for a plain one.
    pub secure_name: Option<(String, QueueName)>,
    pub attachments: Vec<Option<Attachment>>,
    /// By slot of the queue.
    pub tasks: Vec<Option<Task>>,
    /// Bytes being read from stores.
    pub reading: usize,
    /// Number of commands that wait for quality of service.
    pub throttled: usize,
    /// Whether the queue is ending: nothing new is started.
    pub is_ending: bool,
    /// Description of the loss of a store's device: the outcome of commands in flight is unknown.
    pub store_lost: Option<String>,
    done: Vec<StoreDone>,
    /// When each event that is still in the queue arrived.
    arrivals: VecDeque<Nanos>,
    /// When the command arrived that is being begun.
    pub arrived: Nanos,
}

impl Worker {
    pub fn new(
        controller: Arc<Shared>,
        mailbox: Arc<Mailbox>,
        queue: ControllerQueue,
        (queue_id, queue_depth): (u16, u16),
        (number, secure_name): (u64, Option<(String, QueueName)>),
    ) -> Self {
        Self {
            controller,
            mailbox,
            queue,
            queue_id,
            number,
            secure_name,
            attachments: Vec::new(),
            tasks: (0..queue_depth.max(2)).map(|_| None).collect(),
            reading: 0,
            throttled: 0,
            is_ending: false,
            store_lost: None,
            done: Vec::new(),
            arrivals: VecDeque::new(),
            arrived: 0,
        }
    }

    /// Runs until the peer is gone, the queue fails or `stop` is readable, and then until nothing
    /// of the queue is in flight. Returns why it ended.
    pub fn run(&mut self, connection: &mut Connection, stop: BorrowedFd<'_>) -> Ended {
        let ended = self.serve(connection, stop);
        self.drain();
        self.tell_outcomes();
        if self.unpermitted().is_none() {
            // Pending answers are dropped: the permit may end meanwhile, and after a lost store no
            // outcome is known.
            connection.shut_down(&mut TransmitQueue::default());
        }
        ended
    }

    fn serve(&mut self, connection: &mut Connection, stop: BorrowedFd<'_>) -> Ended {
        loop {
            let due = self.dispatch();
            let pending = self.queue.transmit().pending_bytes();
            let interest = Connection::interest(pending < PENDING_MAX, pending);
            match self.wait(connection, interest, stop, due) {
                Ok([_, stopped]) if !stopped.is_empty() => return ("", "stopped".into()),
                Ok([ready, _]) if !(ready - PollFlags::OUT).is_empty() => {
                    self.controller.touch();
                    if let Err(Gone(detail)) = connection.receive(&mut self.queue) {
                        return ("", detail);
                    }
                }
                Ok(_) => {}
                Err(error) => return ("", error.to_string()),
            }
            if let Some(ended) = self.work(connection) {
                return ended;
            }
        }
    }

    /// Works until there is nothing left to do but wait.
    ///
    /// Checks the host's permit before beginning or answering anything. Once the permit has ended,
    /// commands in flight at a store are completed there, but not answered.
    fn work(&mut self, connection: &mut Connection) -> Option<Ended> {
        loop {
            let messages = self.mailbox.take();
            if (self.queue.has_event() || !messages.is_empty())
                && let Some(ended) = self.unpermitted()
            {
                return Some(ended);
            }
            for message in messages {
                self.receive(message);
            }
            if let Some(ended) = self.execute_some() {
                connection.shut_down(self.queue.transmit());
                return Some(ended);
            }
            let progressed = self.collect();
            if let Some(detail) = self.store_lost.take() {
                // Send no answer: a status would report an outcome, which is unknown.
                return Some((Reason::StoreFailed.id(), detail));
            }
            while let Some(error) = self.queue.next_error() {
                self.controller.note_error(self.queue_id, error);
            }
            if self.queue.transmit().pending_bytes() > 0
                && let Some(ended) = self.unpermitted()
            {
                return Some(ended);
            }
            if let Err(Gone(detail)) = connection.send(self.queue.transmit()) {
                return Some(("", detail));
            }
            let may_go_on = self.queue.has_event() && self.may_execute();
            if !progressed && !may_go_on {
                return None;
            }
        }
    }

    /// Why the queue ends, if its host may no longer act.
    fn unpermitted(&self) -> Option<Ended> {
        let permit = self.controller.permit.as_ref().filter(|permit| !permit.holds())?;
        Some((permit.reason(), "the host may not act any more".into()))
    }

    fn may_execute(&mut self) -> bool {
        self.queue.transmit().pending_bytes() + self.reading < PENDING_MAX
    }

    fn execute_some(&mut self) -> Option<Ended> {
        if self.queue.event_count() > self.arrivals.len() {
            // Once for all that came together: reading the clock costs more than the rest of a
            // measurement. Events that wait for room keep their times.
            self.arrivals.resize(self.queue.event_count(), clock::now());
        }
        while self.may_execute()
            && let Some(event) = self.queue.next_event()
        {
            self.arrived = self.arrivals.pop_front().unwrap_or(self.arrived);
            match event {
                ControllerEvent::Received(command) => self.execute(command),
                ControllerEvent::Failed { reason: Reason::QueueClosed, detail, .. } => {
                    return Some(("", detail));
                }
                ControllerEvent::Failed { reason, lba, detail } => {
                    self.event("refused", reason.id(), lba, detail.clone());
                    return Some((reason.id(), detail));
                }
            }
        }
        None
    }

    /// Processes completed store operations; returns whether there were any.
    fn collect(&mut self) -> bool {
        let mut progressed = false;
        for index in 0..self.attachments.len() {
            let mut done = std::mem::take(&mut self.done);
            if let Some(Some(attachment)) = self.attachments.get_mut(index)
                && attachment.channel.in_flight() > 0
            {
                attachment.channel.poll(&mut done);
            }
            progressed |= !done.is_empty();
            for done in done.drain(..) {
                self.finished(index, done);
            }
            self.done = done;
        }
        progressed
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Locked(slot) => self.start(slot),
            Message::Released(slot) => {
                self.throttled = self.throttled.saturating_sub(1);
                self.take_lock(slot);
            }
            Message::Namespaces(assigned) => self.assign(&assigned),
            Message::Abort(cid, reply) => {
                // The caller may no longer be waiting for the reply.
                let _ = reply.try_send(self.queue.abort(cid));
            }
        }
    }

    /// Sets the queue's namespaces to those that a queue of its kind may serve.
    pub fn assign(&mut self, assigned: &[Assigned]) {
        let fits = |entry: &&Assigned| entry.namespace.is_sealed() == self.secure_name.is_some();
        let assigned: Vec<&Assigned> = assigned.iter().filter(fits).collect();
        self.queue.set_namespaces(assigned.iter().map(|entry| entry.format()).collect());
        let is_same = |attachment: &Attachment, entry: &Assigned| {
            attachment.nsid == entry.nsid && Arc::ptr_eq(&attachment.namespace, &entry.namespace)
        };
        for place in &mut self.attachments {
            if let Some(attachment) = place {
                attachment.is_retired = !assigned.iter().any(|entry| is_same(attachment, entry));
                if attachment.is_retired && attachment.tasks == 0 {
                    *place = None;
                }
            }
        }
        for entry in assigned {
            if self.attachments.iter().flatten().any(|attachment| is_same(attachment, entry)) {
                continue;
            }
            match entry.namespace.open() {
                Ok(channel) => self.attach(entry, channel),
                Err(error) => {
                    let detail = format!("namespace {}: {error}", entry.nsid);
                    self.event("refused", Reason::StoreFailed.id(), None, detail);
                }
            }
        }
    }

    fn attach(&mut self, entry: &Assigned, channel: Box<dyn StoreChannel>) {
        let (nsid, namespace) = (entry.nsid, Arc::clone(&entry.namespace));
        let mut writer = 0;
        if let Some((gateway, name)) = &self.secure_name {
            namespace.outcomes().begin(gateway, *name);
            writer = namespace.join(gateway);
        }
        let (tasks, changes, is_retired) = (0, Changes::default(), false);
        let attachment =
            Some(Attachment { nsid, namespace, channel, tasks, changes, writer, is_retired });
        match self.attachments.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = attachment,
            None => self.attachments.push(attachment),
        }
    }

    /// Index of the attachment for commands to this namespace.
    pub fn attached(&self, nsid: u32) -> Option<usize> {
        self.attachments.iter().position(|place| {
            place.as_ref().is_some_and(|known| known.nsid == nsid && !known.is_retired)
        })
    }

    /// Counts a command that no longer uses an attachment.
    pub fn detach(&mut self, index: usize) {
        if let Some(place) = self.attachments.get_mut(index)
            && let Some(attachment) = place
        {
            attachment.tasks -= 1;
            attachment.namespace.end();
            if attachment.is_retired && attachment.tasks == 0 {
                *place = None;
            }
        }
    }

    /// Releases commands that quality of service held; returns when to call again.
    fn dispatch(&mut self) -> Option<Nanos> {
        if self.throttled == 0 {
            return None;
        }
        let now = clock::now();
        let namespaces = self.attachments.iter().flatten();
        namespaces.filter_map(|attachment| attachment.namespace.dispatch(now)).min()
    }

    /// Waits for the socket, `stop`, messages, stores or `due`; returns the events of the first
    /// two.
    fn wait(
        &self,
        connection: &Connection,
        interest: PollFlags,
        stop: BorrowedFd<'_>,
        due: Option<Nanos>,
    ) -> io::Result<[PollFlags; 2]> {
        let mut fds = Vec::with_capacity(3 + self.attachments.len());
        fds.push(PollFd::from_borrowed_fd(connection.as_fd(), interest));
        fds.push(PollFd::from_borrowed_fd(stop, PollFlags::IN));
        fds.push(PollFd::from_borrowed_fd(self.mailbox.as_fd(), PollFlags::IN));
        let due = [due, self.add_stores(&mut fds)].into_iter().flatten().min();
        let timeout = due.map(|due| clock::timespec(due.saturating_sub(clock::now())));
        loop {
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) => {
                    let ready =
                        |index: usize| fds.get(index).map_or(PollFlags::empty(), PollFd::revents);
                    return Ok([ready(0), ready(1)]);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Adds the descriptors of stores with operations in flight; returns when the first one without
    /// a descriptor is due.
    fn add_stores<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) -> Option<Nanos> {
        let mut due = None;
        for attachment in self.attachments.iter().flatten() {
            if attachment.channel.in_flight() > 0 {
                let fd = attachment.channel.as_fd();
                fds.extend(fd.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
                due = [due, attachment.channel.due()].into_iter().flatten().min();
            }
        }
        due
    }

    /// Drops commands that aren't in flight at a store and waits for those that are. When this
    /// returns, the queue has no store operation in flight and holds no range.
    fn drain(&mut self) {
        self.is_ending = true;
        for attachment in self.attachments.iter().flatten() {
            attachment.namespace.cancel(self.number);
        }
        self.give_up_waiting();
        loop {
            self.collect();
            let in_flight = |attachment: &Attachment| attachment.channel.in_flight() > 0;
            if !self.attachments.iter().flatten().any(in_flight) {
                return;
            }
            let mut fds = Vec::new();
            let due = self.add_stores(&mut fds);
            let left = due.map_or(DRAIN_LOOK, |due| due.saturating_sub(clock::now()));
            // The result of `poll` doesn't matter, as `collect` checks all stores.
            let _ = poll(&mut fds, Some(&clock::timespec(left.min(DRAIN_LOOK))));
        }
    }

    /// Records the outcomes of the queue's changes, once nothing is in flight.
    fn tell_outcomes(&mut self) {
        let Some((gateway, name)) = &self.secure_name else { return };
        for attachment in self.attachments.iter_mut().flatten() {
            let changes = std::mem::take(&mut attachment.changes);
            attachment.namespace.outcomes().end(gateway, *name, changes);
        }
    }

    pub fn event(
        &self,
        kind: &'static str,
        reason: &'static str,
        lba: Option<u64>,
        detail: String,
    ) {
        if kind == "refused" {
            self.controller.refusals.fetch_add(1, Ordering::Relaxed);
        }
        self.controller.events.push(StorageEvent {
            kind,
            reason,
            lba,
            association: self.controller.association,
            queue_id: self.queue_id,
            detail,
        });
    }
}
