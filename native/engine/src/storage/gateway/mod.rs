//! A volume at the gateway: key, leased counters, journal, running queues.
//!
//! A front-end queue runs even without a back end. The control plane opens back-end queues and
//! hands them over ([`GatewayVolume::replace_back`]). The engine requests them by events:
//! `association_lost` (open a newer association for every queue) and `rekey_due` (open a queue with
//! fresh keys in the current association).

mod acceleration;
mod back;
mod front;
mod journal;
mod journal_pool;
mod ledger;
mod link;
mod load;
mod loss;
mod opening;
mod outcomes;
mod queue;
mod ranges;
mod replay;
mod request;
mod submission;
mod worker;

#[cfg(test)]
mod acceleration_tests;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::rand::GetRandomFlags;
use sealane_proto::aead::Secret;
use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::key_ring::{BadEpoch, KeyRing};
use sealane_proto::link::Nanos;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::controller_queue::{ControllerLimits, ControllerQueue};
use sealane_proto::nvme::host_queue::{HostLimits, HostQueue};
use sealane_proto::nvme::operation::{Access, CommandSet, NamespaceFormat};
use sealane_proto::sector::{COUNTERS_PER_SECTOR, CounterRange, DATA_BYTES, Exhausted, Iv};
use sealane_proto::secure_queue::SecureQueue;

use super::connection::Connection;
use super::events::{EventLog, StorageEvent};
use super::queues::Queues;
use crate::accelerator::{Device, KeySlot};
use crate::clock;
use crate::latency::{self, Io, Latencies};
use acceleration::{Acceleration, AtDevice, Switch};
use back::Back;
pub use journal_pool::JournalPool;
use ledger::Ledger;
use link::Link;
pub use link::{Incarnation, StaleAssociation};
use queue::GatewayQueue;

/// Counters that a queue thread takes from the lease at a time: enough for 4096 sectors, 16 MiB of
/// writes. This keeps lock contention low, and few counters are lost if the process dies.
const COUNTERS_PER_SPLIT: u64 = 1 << 20;

/// Commands of a plain front end in addition to read, write and flush. Deallocate is added where
/// sectors may be unwritten.
const FRONT_COMMANDS: CommandSet = CommandSet::COMPARE
    .with(CommandSet::WRITE_ZEROES)
    .with(CommandSet::VERIFY)
    .with(CommandSet::FUSED);

/// Properties of a volume from its descriptor.
#[derive(Debug, Clone, Copy)]
pub struct VolumeFormat {
    /// Number of sectors.
    pub block_count: u64,
    /// Whether every sector was sealed before the first attach: then an unwritten sector is an
    /// error, and Write Zeroes seals zeros.
    pub is_fully_sealed: bool,
    /// Whether hosts may only read it: another tenant's volume, shared for reading.
    pub is_read_only: bool,
}

/// A volume's settings, chosen by the operator.
#[derive(Debug, Clone, Copy)]
pub struct GatewaySettings {
    /// Time limit for one command at the target; then the association is given up.
    pub command_timeout: Duration,
    /// Time limit for which commands wait for a lost back end; then they end with a path error.
    pub hold: Duration,
    /// Maximum bytes of acknowledged, unflushed changes kept to be sent again.
    pub journal_bytes_max: usize,
    /// Maximum commands under one set of keys; a queue with new keys is requested before they are
    /// used up.
    pub commands_per_key_max: u64,
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    deallocations: AtomicU64,
    compares: AtomicU64,
    verifies: AtomicU64,
    sectors_sealed: AtomicU64,
    sectors_opened: AtomicU64,
    sectors_unwritten: AtomicU64,
    refusals: AtomicU64,
    leased: AtomicU64,
    associations_lost: AtomicU64,
    commands_resent: AtomicU64,
    commands_timed_out: AtomicU64,
    commands_given_up: AtomicU64,
    changes_replayed: AtomicU64,
    journal_flushes: AtomicU64,
    rekeys: AtomicU64,
    sectors_accelerated: AtomicU64,
    sectors_inline: AtomicU64,
    accelerator_jobs: AtomicU64,
    accelerator_nanos: AtomicU64,
    accelerator_refusals: AtomicU64,
    accelerators_lost: AtomicU64,
}

fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

/// Wakes a queue thread when the link has changed, and passes it back ends.
#[derive(Debug)]
struct Mailbox {
    wake: OwnedFd,
    /// When anything was last received from the host.
    heard: AtomicU64,
    /// Commands of the host that have no answer yet.
    unanswered: AtomicUsize,
    backs: Mutex<Vec<Back>>,
    /// The newest change of the accelerator, if the queue hasn't taken it.
    acceleration: Mutex<Option<Switch>>,
    /// Whether the newest change was to an accelerator that is to get jobs.
    has_acceleration: AtomicBool,
}

impl Mailbox {
    fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            wake,
            heard: clock::now().into(),
            unanswered: 0.into(),
            backs: Mutex::default(),
            acceleration: Mutex::default(),
            has_acceleration: false.into(),
        })
    }

    /// Records that something was received from the host.
    fn hear(&self) {
        self.heard.store(clock::now(), Ordering::Relaxed);
    }

    fn wake(&self) {
        // Fails only if the counter is full; then the thread is already signalled.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn post(&self, back: Back) {
        self.backs.lock().unwrap_or_else(PoisonError::into_inner).push(back);
        self.wake();
    }

    /// Changes what the queue does with an accelerator.
    fn post_acceleration(&self, switch: Switch) {
        self.has_acceleration.store(matches!(switch, Switch::To(_)), Ordering::Relaxed);
        *self.acceleration.lock().unwrap_or_else(PoisonError::into_inner) = Some(switch);
        self.wake();
    }

    fn take_acceleration(&self) -> Option<Switch> {
        self.acceleration.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Lets the accelerator get no more jobs; returns whether the queue knows that.
    fn rest(&self) -> bool {
        if self.has_acceleration.load(Ordering::Relaxed) {
            self.post_acceleration(Switch::Rest);
        }
        self.acceleration.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Takes the posted back ends and clears the descriptor.
    fn take(&self) -> Vec<Back> {
        let mut count = [0; 8];
        // Fails only if nothing was signalled.
        let _ = rustix::io::read(&self.wake, &mut count);
        std::mem::take(&mut *self.backs.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Name of a front-end queue of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueueName {
    /// Tag of the front-end association, for events and for stopping its queues.
    pub association: u64,
    /// Queue id.
    pub queue_id: u16,
}

#[derive(Debug)]
struct Shared {
    keys: KeyRing,
    is_fully_sealed: bool,
    settings: GatewaySettings,
    leased: Mutex<Vec<CounterRange>>,
    ledger: Option<Ledger>,
    link: Mutex<Link>,
    mailboxes: Mutex<HashMap<QueueName, Arc<Mailbox>>>,
    counters: Counters,
    latencies: Latencies<3>,
    events: EventLog,
    accelerator: Mutex<Option<Accelerator>>,
}

/// How long a device keeps a key that is no longer the newest. By then every job with it has ended:
/// each has a deadline that is far shorter.
const KEPT: Duration = Duration::from_secs(1);

/// The device that seals for a volume.
#[derive(Debug)]
struct Accelerator {
    device: Arc<dyn Device>,
    at_device: Arc<AtDevice>,
    /// When the newest key was loaded.
    loaded: Instant,
}

impl Accelerator {
    fn new(device: Arc<dyn Device>) -> Self {
        let at_device = Arc::new(AtDevice::new(Arc::clone(device.record())));
        Self { device, at_device, loaded: Instant::now() }
    }

    fn is(&self, device: &Arc<dyn Device>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.device), Arc::as_ptr(device))
    }

    /// Loads a key, in place of older ones if there is no other place.
    fn load(&self, secret: &Secret) -> io::Result<KeySlot> {
        match self.device.load(secret) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                let older = self.at_device.take(|_| true);
                if older.is_empty() {
                    return Err(error);
                }
                for slot in older {
                    self.device.unload(slot)?;
                }
                self.device.load(secret)
            }
            loaded => loaded,
        }
    }

    /// Gives the device the newest key, in place of older ones, and each thread without one a queue
    /// of the device.
    fn supply(&mut self, shared: &Shared) -> io::Result<()> {
        let (epoch, secret) = shared.keys.newest_secret();
        if self.at_device.get(epoch).is_none() {
            match self.load(secret) {
                Ok(slot) => self.at_device.insert(epoch, slot),
                // Other volumes have its places; the processor seals for this one.
                Err(error) if error.kind() == io::ErrorKind::StorageFull => return Ok(()),
                Err(error) => return Err(error),
            }
            self.loaded = Instant::now();
        } else if self.loaded.elapsed() >= KEPT {
            for slot in self.at_device.take(|old| old != epoch) {
                self.device.unload(slot)?;
            }
        }
        // The threads need the list of mailboxes, and a device may take its time.
        let mailboxes: Vec<Arc<Mailbox>> = shared.mailboxes().values().cloned().collect();
        for mailbox in mailboxes {
            if !mailbox.has_acceleration.load(Ordering::Relaxed) {
                let mut seed = [0; 32];
                rustix::rand::getrandom(&mut seed[..], GetRandomFlags::empty())?;
                let queue = match self.device.queue() {
                    Ok(queue) => queue,
                    // It has as many as it can; the processor seals for this thread.
                    Err(error) if error.kind() == io::ErrorKind::StorageFull => break,
                    Err(error) => return Err(error),
                };
                let at_device = Arc::clone(&self.at_device);
                let acceleration = Acceleration::new(queue, at_device, seed);
                mailbox.post_acceleration(Switch::To(Box::new(acceleration)));
            }
        }
        Ok(())
    }

    fn unload(self) {
        for slot in self.at_device.take(|_| true) {
            // It loses the key with its connection, which ends when it is given up.
            if let Err(error) = self.device.unload(slot)
                && self.device.record().loss().is_none()
            {
                self.device.record().lose(&format!("it did not forget a key: {error}"));
            }
        }
    }
}

impl Shared {
    fn accelerator(&self) -> MutexGuard<'_, Option<Accelerator>> {
        self.accelerator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn jobs_at_device(&self) -> usize {
        self.accelerator().as_ref().map_or(0, |accelerator| accelerator.at_device.jobs())
    }

    fn refused(&self, name: QueueName, reason: Reason, lba: Option<u64>, detail: String) {
        add(&self.counters.refusals, 1);
        self.event_at(name, "refused", reason.id(), lba, detail);
    }

    fn leased(&self) -> MutexGuard<'_, Vec<CounterRange>> {
        self.leased.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mailboxes(&self) -> MutexGuard<'_, HashMap<QueueName, Arc<Mailbox>>> {
        self.mailboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads or changes the link's state, and wakes every queue if necessary.
    fn link<R>(&self, change: impl FnOnce(&mut Link) -> R) -> R {
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut link);
        let wakes = link.take_wakes();
        drop(link);
        if wakes {
            for mailbox in self.mailboxes().values() {
                mailbox.wake();
            }
        }
        result
    }

    fn split(&self) -> Option<CounterRange> {
        let mut leased = self.leased();
        while let Some(range) = leased.last_mut() {
            if let Some(part) = range.split(COUNTERS_PER_SPLIT) {
                return Some(part);
            }
            leased.pop();
        }
        None
    }

    fn take_iv(&self, local: &mut Option<CounterRange>) -> Result<Iv, Exhausted> {
        if let Some(range) = local
            && let Ok(iv) = range.take()
        {
            return Ok(iv);
        }
        *local = self.split();
        local.as_mut().ok_or(Exhausted)?.take()
    }

    fn event(&self, name: QueueName, kind: &'static str, reason: &'static str, detail: String) {
        self.event_at(name, kind, reason, None, detail);
    }

    fn event_at(
        &self,
        name: QueueName,
        kind: &'static str,
        reason: &'static str,
        lba: Option<u64>,
        detail: String,
    ) {
        let QueueName { association, queue_id } = name;
        self.events.push(StorageEvent { kind, reason, lba, association, queue_id, detail });
    }

    /// Ends the association, unless it has already ended.
    fn lose(&self, name: QueueName, epoch: u64, reason: &'static str, detail: &str) {
        if self.link(|link| link.lose(epoch)) {
            add(&self.counters.associations_lost, 1);
            self.event(name, "association_lost", reason, detail.to_owned());
        }
    }

    /// Ends the volume: no answer from now on could be trusted.
    fn fail(&self, name: QueueName, reason: &'static str, detail: String) {
        if self.link(Link::fail) {
            self.event(name, "volume_failed", reason, detail);
        }
    }
}

/// One attached volume, its key, its counters and its running queues.
#[derive(Debug)]
pub struct GatewayVolume {
    // First, so that the queues are stopped before their shared state is dropped.
    queues: Queues,
    shared: Arc<Shared>,
    namespace: NamespaceFormat,
}

/// A back-end queue whose Connect command is answered.
#[derive(Debug)]
pub struct BackQueue {
    /// Limits negotiated with the target.
    pub limits: HostLimits,
    /// Keys of this queue; never used for another one.
    pub secure: SecureQueue,
    /// Association epoch that the keys are bound to.
    pub epoch: u64,
    /// Incarnation of the target that they are bound to.
    pub incarnation: Incarnation,
}

/// A back-end queue can't be used.
#[derive(Debug, thiserror::Error)]
pub enum BackError {
    /// Its association is over.
    #[error(transparent)]
    Stale(#[from] StaleAssociation),
    /// Its front-end queue is closed.
    #[error("the front-end queue is closed")]
    Closed,
}

impl GatewayVolume {
    /// Creates a volume without counters: it reads, but refuses to write until a lease is added.
    /// `ledger` is a file in which every seal is recorded, for tests.
    pub fn new(
        keys: KeyRing,
        format: VolumeFormat,
        settings: GatewaySettings,
        ledger: Option<&Path>,
    ) -> io::Result<Self> {
        Self::sharing(&JournalPool::default(), keys, format, settings, ledger)
    }

    /// As [`GatewayVolume::new`], with a journal that shares `pool` with other volumes.
    pub fn sharing(
        pool: &JournalPool,
        keys: KeyRing,
        format: VolumeFormat,
        settings: GatewaySettings,
        ledger: Option<&Path>,
    ) -> io::Result<Self> {
        let VolumeFormat { block_count, is_fully_sealed, is_read_only } = format;
        let shared = Shared {
            keys,
            is_fully_sealed,
            settings,
            leased: Mutex::default(),
            ledger: ledger.map(Ledger::open).transpose()?,
            link: Mutex::new(Link::new(settings.journal_bytes_max, pool.clone())),
            mailboxes: Mutex::default(),
            counters: Counters::default(),
            latencies: Latencies::new(&latency::GATEWAY),
            events: EventLog::new()?,
            accelerator: Mutex::default(),
        };
        let commands = if is_fully_sealed {
            FRONT_COMMANDS
        } else {
            FRONT_COMMANDS.with(CommandSet::DEALLOCATE)
        };
        let namespace = NamespaceFormat {
            nsid: 1,
            block_bytes: DATA_BYTES,
            block_count,
            commands,
            access: if is_read_only { Access::ReadOnly } else { Access::Full },
        };
        Ok(Self { queues: Queues::default(), shared: Arc::new(shared), namespace })
    }

    /// Adds the key of another epoch; if it is the newest, sectors are sealed with it from now on.
    pub fn add_key(&self, epoch: u32, secret: &Secret) -> Result<(), BadEpoch> {
        self.shared.keys.add(epoch, secret)
    }

    /// Lets a device seal for this volume, or none, from now on. It gets the newest key, and a queue
    /// for each front-end queue; call again after a new key or a new front-end queue, which the
    /// processor seals for until then. After an error the volume uses none. Blocks for up to a second
    /// a key and queue.
    pub fn accelerate(&self, device: Option<Arc<dyn Device>>) -> io::Result<()> {
        let mut own = self.shared.accelerator();
        let is_same = match (&*own, &device) {
            (Some(known), Some(device)) => known.is(device),
            (None, None) => true,
            _ => false,
        };
        if !is_same {
            self.end_acceleration(&mut own);
            *own = device.map(Accelerator::new);
        }
        let Some(accelerator) = &mut *own else { return Ok(()) };
        let outcome = accelerator.supply(&self.shared);
        if outcome.is_err() {
            self.end_acceleration(&mut own);
        }
        outcome
    }

    /// Lets the device get no more jobs, and returns how many it still has. A queue that doesn't know
    /// yet counts as one more. To be called until it returns 0; [`Self::accelerate`] with another
    /// device, or none, ends the rest.
    pub fn rest_accelerator(&self) -> usize {
        let unaware = self.shared.mailboxes().values().filter(|mailbox| !mailbox.rest()).count();
        unaware + self.shared.jobs_at_device()
    }

    fn end_acceleration(&self, own: &mut Option<Accelerator>) {
        for mailbox in self.shared.mailboxes().values() {
            mailbox.post_acceleration(Switch::Off);
        }
        if let Some(accelerator) = own.take() {
            accelerator.unload();
        }
    }

    /// Adds leased counters.
    pub fn add_counters(&self, range: CounterRange) {
        add(&self.shared.counters.leased, range.remaining());
        self.shared.leased().insert(0, range);
    }

    /// Replaces the counters that no queue has taken, and returns them so that they can be given
    /// back. The new ranges are used from the last one on.
    pub fn replace_counters(&self, ranges: Vec<CounterRange>) -> Vec<CounterRange> {
        add(&self.shared.counters.leased, ranges.iter().map(CounterRange::remaining).sum());
        std::mem::replace(&mut *self.shared.leased(), ranges)
    }

    /// Number of leased counters that no queue has taken yet.
    pub fn counters_remaining(&self) -> u64 {
        self.shared.leased().iter().map(CounterRange::remaining).sum()
    }

    /// Serves a front-end queue, whose Connect command has been answered, on its own thread. Its
    /// commands are held until it gets a back end.
    pub fn start_queue(
        &self,
        fd: OwnedFd,
        name: QueueName,
        limits: ControllerLimits,
    ) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let mailbox = Arc::new(Mailbox::new()?);
        self.shared.mailboxes().insert(name, Arc::clone(&mailbox));
        let namespace = self.namespace;
        let started = self.queues.start(
            format!("gateway-q{}", name.queue_id),
            name.association,
            move |stop| {
                shared.event(name, "queue_opened", "", String::new());
                let front = ControllerQueue::new(limits, vec![namespace], None);
                let depth = limits.queue_depth;
                let queue = GatewayQueue::new(Arc::clone(&shared), name, front, depth);
                let (reason, detail) = worker::run(queue, Connection::new(fd), &mailbox, &stop);
                let mut mailboxes = shared.mailboxes();
                // The control plane may have started a queue of the same name meanwhile.
                if mailboxes.get(&name).is_some_and(|known| Arc::ptr_eq(known, &mailbox)) {
                    mailboxes.remove(&name);
                }
                drop(mailboxes);
                shared.event(name, "queue_closed", reason, detail);
            },
        );
        if started.is_err() {
            self.shared.mailboxes().remove(&name);
        }
        started
    }

    /// Gives a front-end queue its back end. In the same association the old back end is drained
    /// while the new one is used; the first queue of a newer association begins it for the whole
    /// volume.
    pub fn replace_back(
        &self,
        name: QueueName,
        fd: OwnedFd,
        back: BackQueue,
    ) -> Result<(), BackError> {
        let mailbox = self.shared.mailboxes().get(&name).cloned().ok_or(BackError::Closed)?;
        let BackQueue { limits, secure, epoch, incarnation } = back;
        self.shared.link(|link| link.connect(epoch, &incarnation))?;
        let queue = HostQueue::new(limits, Some(secure));
        let bound_to = (epoch, incarnation.number);
        mailbox.post(Back::new(Connection::new(fd), queue, bound_to, limits.transfer_max));
        Ok(())
    }

    /// The milestone that the next incarnation of the target must have; None if no flush is known.
    pub fn milestone(&self) -> Option<Milestone> {
        self.shared.link(|link| link.milestone())
    }

    /// The incarnation of the target that has durably stored everything acknowledged so far, if
    /// any.
    pub fn settled_incarnation(&self) -> Option<u64> {
        self.shared.link(|link| link.settled_incarnation())
    }

    /// Ends the newest association, which the control plane has lost.
    pub fn lose_association(&self, reason: &str) {
        let name = QueueName { association: 0, queue_id: 0 };
        let epoch = self.shared.link(|link| link.epoch());
        self.shared.lose(name, epoch, "queue.closed", reason);
    }

    /// Ends the volume for good: every command ends with an error.
    pub fn fail(&self, reason: &'static str, detail: &str) {
        let name = QueueName { association: 0, queue_id: 0 };
        self.shared.fail(name, reason, detail.to_owned());
    }

    /// Nanoseconds since anything was received on any front-end queue of an association; `None` if
    /// it has none.
    pub fn idle(&self, association: u64) -> Option<Nanos> {
        let mailboxes = self.shared.mailboxes();
        let mine = mailboxes.iter().filter(|(name, _)| name.association == association);
        let heard = mine.map(|(_, mailbox)| mailbox.heard.load(Ordering::Relaxed)).max()?;
        Some(clock::now().saturating_sub(heard))
    }

    /// Number of commands that the host of an association has no answer to yet.
    pub fn unanswered(&self, association: u64) -> usize {
        let mailboxes = self.shared.mailboxes();
        let mine = mailboxes.iter().filter(|(name, _)| name.association == association);
        mine.map(|(_, mailbox)| mailbox.unanswered.load(Ordering::Relaxed)).sum()
    }

    /// Stops the queues of one association, or all. They answer the commands at the target, for a
    /// few seconds, and take no others. Returns when they have ended and none of their
    /// commands is in flight to the target.
    pub fn close_queues(&self, association: Option<u64>) {
        self.queues.stop(association);
    }

    /// The events, with a descriptor that signals them.
    pub fn events(&self) -> &EventLog {
        &self.shared.events
    }

    /// Counters by name.
    pub fn statistics(&self) -> Vec<(&'static str, u64)> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Shared { counters, latencies, .. } = &*self.shared;
        let sealed = read(&counters.sectors_sealed);
        let journal_bytes = self.shared.link(|link| link.journal.bytes() as u64);
        vec![
            ("reads", read(&counters.reads)),
            ("writes", read(&counters.writes)),
            ("flushes", read(&counters.flushes)),
            ("read_nanos", latencies.nanos(Io::Read)),
            ("write_nanos", latencies.nanos(Io::Write)),
            ("flush_nanos", latencies.nanos(Io::Flush)),
            ("deallocations", read(&counters.deallocations)),
            ("compares", read(&counters.compares)),
            ("verifies", read(&counters.verifies)),
            ("sectors_sealed", sealed),
            ("sectors_opened", read(&counters.sectors_opened)),
            ("sectors_unwritten", read(&counters.sectors_unwritten)),
            ("counters_used", sealed * COUNTERS_PER_SECTOR),
            ("counters_leased", read(&counters.leased)),
            ("refusals", read(&counters.refusals)),
            ("associations_lost", read(&counters.associations_lost)),
            ("commands_resent", read(&counters.commands_resent)),
            ("commands_timed_out", read(&counters.commands_timed_out)),
            ("commands_given_up", read(&counters.commands_given_up)),
            ("changes_replayed", read(&counters.changes_replayed)),
            ("journal_flushes", read(&counters.journal_flushes)),
            ("journal_bytes", journal_bytes),
            ("rekeys", read(&counters.rekeys)),
            ("sectors_accelerated", read(&counters.sectors_accelerated)),
            ("sectors_inline", read(&counters.sectors_inline)),
            ("accelerator_jobs", read(&counters.accelerator_jobs)),
            ("accelerator_nanos", read(&counters.accelerator_nanos)),
            ("accelerator_refusals", read(&counters.accelerator_refusals)),
            ("accelerators_lost", read(&counters.accelerators_lost)),
            ("queues_running", self.queues.running() as u64),
            ("events_dropped", self.shared.events.dropped()),
        ]
    }
}

impl Drop for GatewayVolume {
    fn drop(&mut self) {
        // The queues first: their threads must not be the last to hold the device.
        self.queues.stop(None);
        self.end_acceleration(&mut self.shared.accelerator());
    }
}
