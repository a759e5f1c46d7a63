//! A namespace: its store, locks, limits, reservations and counters.

use std::fmt::Write as _;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::openings::Openings;
use sealane_proto::link::Nanos;
use sealane_proto::nvme::Reason;
use sealane_proto::sector::{BLOCK_BYTES, check_written, field, metadata, set_unwritten};

use super::changed::Changed;
use super::load::{HostLoad, Load};
use super::mailbox::{Message, Waiter};
use super::order::{Order, Writer};
use super::outcomes::Outcomes;
use super::qos::{Cost, Qos, QosLimits};
use super::range_lock::{Acquired, LockId, Mode, RangeLocks};
use super::reservation::{Group, HostId, Notices, Reservations};
use crate::clock;
use crate::latency::{self, Io, Latencies};
use crate::storage::events::{EventLog, StorageEvent};
use crate::storage::store::{BlockStore, StoreChannel};
use crate::storage::upkeep::Upkeep;

/// Counters of a namespace's commands or blocks that succeeded, unless stated otherwise.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Read and compare commands.
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub flushes: AtomicU64,
    pub deallocations: AtomicU64,
    pub sectors_read: AtomicU64,
    pub sectors_stored: AtomicU64,
    /// Commands for which the store failed.
    pub media_errors: AtomicU64,
    /// Sectors and commands refused by a check.
    pub refusals: AtomicU64,
    pub reservation_conflicts: AtomicU64,
    /// Commands that had to wait for quality of service.
    pub throttled: AtomicU64,
    /// Commands that had to wait for a range.
    pub contended: AtomicU64,
    /// Blocks that a gateway sent again and that were left out, as they had been changed since.
    pub superseded: AtomicU64,
    /// Flushes that a gateway had to wait for because another gateway had changed the same block.
    pub ordering_flushes: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

/// One namespace of a target.
#[derive(Debug)]
pub struct Namespace {
    store: RwLock<Option<Box<dyn BlockStore>>>,
    layout: &'static str,
    pub(super) block_bytes: usize,
    block_count: AtomicU64,
    pub(super) is_sealed: bool,
    /// Whether the store keeps marks; without them, changes need not be ordered for restarts.
    has_marks: bool,
    /// Whether the store knows which sectors are unwritten, and reads current sectors only.
    pub(super) is_fresh: bool,
    locks: Mutex<RangeLocks<Waiter>>,
    qos: Mutex<Qos<Waiter>>,
    is_limited: AtomicBool,
    reservations: Mutex<Reservations>,
    is_reserved: AtomicBool,
    pub(super) counters: Counters,
    pub(super) latencies: Latencies<3>,
    load: Mutex<Load>,
    changed: Mutex<Changed>,
    order: Mutex<Order>,
    outcomes: Mutex<Outcomes>,
    events: Arc<EventLog>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder of one of these locks can panic in the middle of a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Namespace {
    /// Creates a namespace on a store. It is sealed if the store's blocks have metadata; then the
    /// store must be one that reads current sectors only.
    pub fn new(store: Box<dyn BlockStore>) -> io::Result<Self> {
        let is_sealed = store.block_bytes() == BLOCK_BYTES;
        Self::assemble(store, is_sealed, true)
    }

    /// Creates a namespace without freshness: it accepts any well-formed sector of its store, even
    /// an old one; an unwritten sector is an error.
    pub fn without_freshness(store: Box<dyn BlockStore>) -> io::Result<Self> {
        let is_sealed = store.block_bytes() == BLOCK_BYTES;
        Self::assemble(store, is_sealed, false)
    }

    /// Creates a namespace for any host. If its blocks have metadata, these belong to the host.
    pub fn plain(store: Box<dyn BlockStore>) -> io::Result<Self> {
        Self::assemble(store, false, true)
    }

    fn assemble(store: Box<dyn BlockStore>, is_sealed: bool, is_fresh: bool) -> io::Result<Self> {
        let (block_bytes, block_count) = (store.block_bytes(), store.block_count());
        let events = Arc::new(EventLog::new()?);
        store.tell_events(&events);
        Ok(Self {
            layout: store.layout(),
            has_marks: store.openings().is_some(),
            store: RwLock::new(Some(store)),
            block_bytes,
            block_count: block_count.into(),
            is_sealed,
            is_fresh,
            locks: Mutex::default(),
            qos: Mutex::default(),
            is_limited: AtomicBool::new(false),
            reservations: Mutex::default(),
            is_reserved: AtomicBool::new(false),
            counters: Counters::default(),
            latencies: Latencies::new(&latency::TARGET),
            load: Mutex::default(),
            changed: Mutex::default(),
            order: Mutex::default(),
            outcomes: Mutex::default(),
            events,
        })
    }

    // Commands.

    /// Changes the limits, also for waiting commands.
    pub fn set_limits(&self, limits: QosLimits) {
        let mut released = Vec::new();
        {
            let mut qos = lock(&self.qos);
            qos.set_limits(limits);
            qos.dispatch(clock::now(), &mut released);
            self.is_limited.store(qos.is_active(), Ordering::Relaxed);
        }
        post_released(released);
    }

    /// Makes everything written so far durable.
    pub fn sync(&self) -> io::Result<()> {
        use crate::storage::connection::wait;
        use crate::storage::store::StoreRequest;
        use rustix::event::PollFlags;
        use std::time::Duration;

        let mut channel = self.open()?;
        channel.submit(0, StoreRequest::Flush);
        let mut done = Vec::new();
        loop {
            channel.poll(&mut done);
            if let Some(done) = done.pop() {
                return done.result;
            }
            if let Some(fd) = channel.as_fd() {
                wait([(fd, PollFlags::IN)], None)?;
            } else if let Some(due) = channel.due() {
                let left = due.saturating_sub(clock::now());
                wait([], Some(Duration::from_nanos(left)))?;
            }
        }
    }

    /// Offers only the first blocks of a store, whose growth hasn't been announced.
    pub fn offer(&self, block_count: u64) {
        self.block_count.fetch_min(block_count, Ordering::Relaxed);
    }

    /// Extends the namespace to `block_count` blocks, for queues that start afterwards.
    /// `ResourceBusy` while a queue or a background job is running, `InvalidInput` for fewer blocks
    /// than before; see [`BlockStore::extend`].
    pub fn extend(&self, block_count: u64) -> io::Result<()> {
        if block_count < self.block_count() {
            let detail = format!("a namespace of {} blocks never shrinks", self.block_count());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
        let mut store = self.store.write().unwrap_or_else(PoisonError::into_inner);
        match &mut *store {
            Some(store) => store.extend(block_count)?,
            None => return Err(io::Error::other("the namespace is closed")),
        }
        self.block_count.store(block_count, Ordering::Relaxed);
        Ok(())
    }

    /// Closes the store as soon as the last queue that uses it has ended.
    pub fn close(&self) {
        *self.store.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    // Questions.

    /// Whether its blocks are sealed sectors, which are served to secure queues only.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.is_sealed
    }

    /// Name of the block layout of a store that keeps freshness; empty if it keeps none.
    #[must_use]
    pub fn layout(&self) -> &'static str {
        self.layout
    }

    /// Bytes of a block: 4096, or 4160 if sealed.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Number of blocks.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.block_count.load(Ordering::Relaxed)
    }

    /// The milestone of its store; None if the store keeps no freshness or is closed.
    #[must_use]
    pub fn milestone(&self) -> Option<Milestone> {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        store.as_ref().and_then(|store| store.milestone())
    }

    /// Whether its store contains everything that was flushed at this milestone; false if it is
    /// closed.
    #[must_use]
    pub fn contains(&self, told: &Milestone) -> bool {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        store.as_ref().is_some_and(|store| store.contains(told))
    }

    /// The mark of a completed change whose blocks are still locked; 0 if the store keeps none.
    pub(super) fn mark(&self) -> u64 {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        store.as_ref().map_or(0, |store| store.mark())
    }

    /// The openings of its store and how far they had come; None if the store keeps no freshness or
    /// is closed.
    pub(super) fn openings(&self) -> Option<Openings> {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        store.as_ref().and_then(|store| store.openings())
    }

    /// The events, with a descriptor that signals them.
    pub fn events(&self) -> &EventLog {
        &self.events
    }

    /// Reads the reservations.
    pub fn with_reservations<T>(&self, look: impl FnOnce(&Reservations) -> T) -> T {
        look(&lock(&self.reservations))
    }

    /// Counters by name, including the store's.
    pub fn statistics(&self) -> Vec<(&'static str, u64)> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        let busy = lock(&self.load).busy();
        let mut named: Vec<(&'static str, u64)> = [
            ("host_reads", read(&counters.reads)),
            ("host_writes", read(&counters.writes)),
            ("flushes", read(&counters.flushes)),
            ("host_read_nanos", self.latencies.nanos(Io::Read)),
            ("host_write_nanos", self.latencies.nanos(Io::Write)),
            ("flush_nanos", self.latencies.nanos(Io::Flush)),
            ("deallocations", read(&counters.deallocations)),
            ("sectors_read", read(&counters.sectors_read)),
            ("sectors_stored", read(&counters.sectors_stored)),
            ("busy_ms", busy / 1_000_000),
            ("media_errors", read(&counters.media_errors)),
            ("refusals", read(&counters.refusals)),
            ("reservation_conflicts", read(&counters.reservation_conflicts)),
            ("throttled", read(&counters.throttled)),
            ("contended", read(&counters.contended)),
            ("superseded", read(&counters.superseded)),
            ("ordering_flushes", read(&counters.ordering_flushes)),
            ("events_dropped", self.events.dropped()),
        ]
        .into();
        // Omit the counters of a store that is being extended: its anchor may be waiting for the
        // caller.
        if let Ok(store) = self.store.try_read()
            && let Some(store) = &*store
        {
            named.extend(store.statistics());
        }
        named
    }

    // For the queues' threads.

    /// Checks sectors read from the store; an error gives the first that can't be served.
    pub(super) fn check(&self, lba: u64, blocks: &mut [u8]) -> Result<(), (Reason, u64)> {
        if !self.is_sealed() {
            return Ok(());
        }
        let mut sectors = (lba..).zip(blocks.as_chunks_mut::<BLOCK_BYTES>().0);
        sectors.try_for_each(|(lba, sector)| {
            // A store that keeps freshness returns zeros for an unwritten sector.
            if self.is_fresh && metadata(sector, field::VERSION) == [0] {
                set_unwritten(sector);
                return Ok(());
            }
            check_written(sector).map_err(|reason| (reason, lba))
        })
    }

    pub(super) fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        match &*self.store.read().unwrap_or_else(PoisonError::into_inner) {
            Some(store) => store.open(),
            None => Err(io::Error::other("the namespace is closed")),
        }
    }

    pub(super) fn acquire(&self, blocks: Range<u64>, mode: Mode, waiter: Waiter) -> Acquired {
        let acquired = self.acquire_for_job(blocks, mode, waiter);
        if matches!(acquired, Acquired::Waiting(_)) {
            add(&self.counters.contended, 1);
        }
        acquired
    }

    pub(super) fn release(&self, id: LockId) {
        let mut granted = Vec::new();
        lock(&self.locks).release(id, &mut granted);
        for (_, waiter) in granted {
            waiter.mailbox.post(Message::Locked(waiter.slot));
        }
    }

    /// Whether a command may run now; if not, its thread gets a message when it may.
    pub(super) fn admit(&self, queue: u64, cost: Cost, waiter: &Waiter) -> bool {
        // If the limits change just after this check, the next command notices.
        if !self.is_limited.load(Ordering::Relaxed) {
            return true;
        }
        let admitted = lock(&self.qos).admit(clock::now(), queue, cost, waiter.clone());
        if !admitted {
            add(&self.counters.throttled, 1);
        }
        admitted
    }

    /// Releases commands that may run by now; returns when to call again, if any are left.
    pub(super) fn dispatch(&self, now: Nanos) -> Option<Nanos> {
        let mut released = Vec::new();
        let due = {
            let mut qos = lock(&self.qos);
            qos.dispatch(now, &mut released);
            qos.next_due()
        };
        post_released(released);
        due
    }

    /// Drops the waiting commands of a queue that ends.
    pub(super) fn cancel(&self, queue: u64) {
        lock(&self.qos).cancel(queue);
    }

    /// Whether the reservations permit this. Callers hold a range, so no reservation changes before
    /// the end of the command.
    pub(super) fn allows(&self, host: HostId, group: Group) -> bool {
        let allowed = !self.is_reserved.load(Ordering::Relaxed)
            || lock(&self.reservations).allows(host, group);
        if !allowed {
            add(&self.counters.reservation_conflicts, 1);
        }
        allowed
    }

    /// Changes the reservations and notifies affected hosts. Callers hold the whole namespace.
    pub(super) fn change_reservations<E>(
        &self,
        change: impl FnOnce(&mut Reservations) -> Result<Notices, E>,
    ) -> Result<(), E> {
        let notices = {
            let mut reservations = lock(&self.reservations);
            let notices = change(&mut reservations)?;
            self.is_reserved.store(reservations.is_reserved(), Ordering::Relaxed);
            notices
        };
        for (host, notice) in notices {
            self.events.push(StorageEvent {
                kind: "reservation",
                reason: notice.id(),
                lba: None,
                association: 0,
                queue_id: 0,
                detail: hexadecimal(&host),
            });
        }
        Ok(())
    }

    /// Records that a secure queue, which holds their range, changed these blocks.
    pub(super) fn note_changed(&self, blocks: Range<u64>) {
        lock(&self.changed).note(blocks);
    }

    /// The blocks of a change sent again that may be changed; the others were changed since the
    /// store was opened. Callers hold the range.
    pub(super) fn not_superseded(&self, blocks: Range<u64>) -> Vec<Range<u64>> {
        let count = blocks.end - blocks.start;
        let left = lock(&self.changed).unchanged(blocks);
        let kept: u64 = left.iter().map(|range| range.end - range.start).sum();
        add(&self.counters.superseded, count - kept);
        left
    }

    /// Registers a queue of a gateway; returns the gateway's number.
    pub(super) fn join(&self, gateway: &str) -> Writer {
        if self.has_marks { self.order().join(gateway) } else { 0 }
    }

    /// The changes of each gateway that aren't flushed yet.
    pub(super) fn order(&self) -> MutexGuard<'_, Order> {
        lock(&self.order)
    }

    /// The outcomes of the changes of secure queues.
    pub(super) fn outcomes(&self) -> MutexGuard<'_, Outcomes> {
        lock(&self.outcomes)
    }

    pub(super) fn begin(&self) {
        lock(&self.load).begin();
    }

    pub(super) fn end(&self) {
        lock(&self.load).end();
    }

    // For background jobs.

    /// Checks and refreshes the store's contents; None if the store has nothing to check.
    pub(super) fn upkeep(&self) -> io::Result<Option<Box<dyn Upkeep>>> {
        match &*self.store.read().unwrap_or_else(PoisonError::into_inner) {
            Some(store) => store.upkeep(),
            None => Err(io::Error::other("the namespace is closed")),
        }
    }

    /// As [`Namespace::acquire`], but a wait isn't counted as a command's.
    pub(super) fn acquire_for_job(
        &self,
        blocks: Range<u64>,
        mode: Mode,
        waiter: Waiter,
    ) -> Acquired {
        lock(&self.locks).acquire(blocks, mode, waiter)
    }

    /// Begins or ends watching the load.
    pub(super) fn watch_load(&self, is_watched: bool) {
        lock(&self.load).watch(is_watched);
    }

    /// The load measured while it is watched.
    pub(super) fn load(&self) -> HostLoad {
        lock(&self.load).watched()
    }
}

fn post_released(released: Vec<Waiter>) {
    for waiter in released {
        waiter.mailbox.post(Message::Released(waiter.slot));
    }
}

/// Bytes as hexadecimal digits.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::stores::memory::MemoryStore;
    use sealane_proto::sector::{Block, METADATA_BYTES};

    #[test]
    fn without_freshness_only_sealed_sectors_pass() {
        let store = Box::new(MemoryStore::new(10, true));
        let namespace = Namespace::without_freshness(store).expect("namespace");
        let mut sealed: Block = [7; BLOCK_BYTES];
        sealed[BLOCK_BYTES - METADATA_BYTES..].fill(0);
        sealed[BLOCK_BYTES - METADATA_BYTES + field::IV.0] = 1;
        sealed[BLOCK_BYTES - METADATA_BYTES + field::VERSION.0] = 1;
        let mut unwritten: Block = [0; BLOCK_BYTES];
        set_unwritten(&mut unwritten);
        assert_eq!(namespace.check(3, &mut [sealed, sealed].concat()), Ok(()));
        for erased in [[0; BLOCK_BYTES], unwritten] {
            let refused = namespace.check(3, &mut [sealed, erased].concat());
            assert_eq!(refused, Err((Reason::SectorFormat, 4)));
        }
    }

    #[test]
    fn metadata_of_a_plain_namespace_belong_to_the_host() {
        let namespace = Namespace::plain(Box::new(MemoryStore::new(10, true))).expect("namespace");
        assert!(!namespace.is_sealed());
        assert_eq!(namespace.check(0, &mut [0; BLOCK_BYTES]), Ok(()));
    }
}
