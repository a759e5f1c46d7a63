//! A namespace: where its blocks are, who may touch them when, and what was done to them.

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
use crate::storage::events::{EventLog, StorageEvent};
use crate::storage::store::{BlockStore, StoreChannel};
use crate::storage::upkeep::Upkeep;

/// What hosts did to a namespace; all count commands or blocks that succeeded unless said otherwise.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Read and compare commands.
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub flushes: AtomicU64,
    pub deallocations: AtomicU64,
    pub sectors_read: AtomicU64,
    pub sectors_stored: AtomicU64,
    /// Commands that the store failed.
    pub media_errors: AtomicU64,
    /// Sectors and commands refused by a check.
    pub refusals: AtomicU64,
    pub reservation_conflicts: AtomicU64,
    /// Commands that had to wait for quality of service.
    pub throttled: AtomicU64,
    /// Commands that had to wait for a range.
    pub contended: AtomicU64,
    /// Blocks that a gateway sent again and that had been changed since: left as they are.
    pub superseded: AtomicU64,
    /// Flushes that a gateway waited for because another one had changed the same block.
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
    /// Whether the store keeps marks: else nothing orders changes over a restart, and nothing need.
    has_marks: bool,
    /// Whether the store tells what is unwritten and reads current sectors only.
    pub(super) is_fresh: bool,
    locks: Mutex<RangeLocks<Waiter>>,
    qos: Mutex<Qos<Waiter>>,
    is_limited: AtomicBool,
    reservations: Mutex<Reservations>,
    is_reserved: AtomicBool,
    pub(super) counters: Counters,
    load: Mutex<Load>,
    changed: Mutex<Changed>,
    order: Mutex<Order>,
    outcomes: Mutex<Outcomes>,
    events: Arc<EventLog>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one of these locks can panic half-way through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Namespace {
    /// A namespace over a store; sealed if the store's blocks have metadata, and then the store
    /// must be one that reads current sectors only.
    pub fn new(store: Box<dyn BlockStore>) -> io::Result<Self> {
        let is_sealed = store.block_bytes() == BLOCK_BYTES;
        Self::assemble(store, is_sealed, true)
    }

    /// A namespace without freshness: any well-formed sector of its store passes, older ones too,
    /// and an unwritten one is an error.
    pub fn without_freshness(store: Box<dyn BlockStore>) -> io::Result<Self> {
        let is_sealed = store.block_bytes() == BLOCK_BYTES;
        Self::assemble(store, is_sealed, false)
    }

    /// A namespace for any host, also if its blocks have metadata: that is the host's then.
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
            load: Mutex::default(),
            changed: Mutex::default(),
            order: Mutex::default(),
            outcomes: Mutex::default(),
            events,
        })
    }

    // Commands.

    /// Changes the limits, also for commands that wait.
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

    /// Offers the first blocks of a store only that grew without anybody being told.
    pub fn offer(&self, block_count: u64) {
        self.block_count.fetch_min(block_count, Ordering::Relaxed);
    }

    /// Offers `block_count` blocks from now on, to queues that start then. `ResourceBusy` while a
    /// queue or a background job is running, `InvalidInput` for fewer blocks than before; see
    /// [`BlockStore::extend`].
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

    /// Lets the store go, as soon as the last queue that uses it has.
    pub fn close(&self) {
        *self.store.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    // Questions.

    /// Whether its blocks are sealed sectors, served to secure queues only.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.is_sealed
    }

    /// How a store that keeps freshness lays blocks out, for people; empty: it keeps none.
    #[must_use]
    pub fn layout(&self) -> &'static str {
        self.layout
    }

    /// Bytes of a block: 4096, or 4160 if sealed.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Blocks.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.block_count.load(Ordering::Relaxed)
    }

    /// How far its store has come; None: it keeps no freshness, or is closed.
    #[must_use]
    pub fn milestone(&self) -> Option<Milestone> {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        store.as_ref().and_then(|store| store.milestone())
    }

    /// Whether its store has everything that was flushed when this was told. A closed one has not.
    #[must_use]
    pub fn contains(&self, told: &Milestone) -> bool {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        store.as_ref().is_some_and(|store| store.contains(told))
    }

    /// The mark of a change that has ended, while its blocks are locked; 0: its store keeps none.
    pub(super) fn mark(&self) -> u64 {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        store.as_ref().map_or(0, |store| store.mark())
    }

    /// How far the openings of its store have come; None: it keeps no freshness, or is closed.
    pub(super) fn openings(&self) -> Option<Openings> {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        store.as_ref().and_then(|store| store.openings())
    }

    /// Events so far and the descriptor that tells of them.
    pub fn events(&self) -> &EventLog {
        &self.events
    }

    /// Looks at the reservations.
    pub fn with_reservations<T>(&self, look: impl FnOnce(&Reservations) -> T) -> T {
        look(&lock(&self.reservations))
    }

    /// Counters by name, the store's own among them.
    pub fn statistics(&self) -> Vec<(&'static str, u64)> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        let busy = lock(&self.load).busy();
        let mut named: Vec<(&'static str, u64)> = [
            ("host_reads", read(&counters.reads)),
            ("host_writes", read(&counters.writes)),
            ("flushes", read(&counters.flushes)),
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
        // A store that is being extended tells nothing: who asks may be who its anchor waits for.
        if let Ok(store) = self.store.try_read()
            && let Some(store) = &*store
        {
            named.extend(store.statistics());
        }
        named
    }

    // For the queues' threads.

    /// Checks sectors that came from the store: an error tells the first that can't be served.
    pub(super) fn check(&self, lba: u64, blocks: &mut [u8]) -> Result<(), (Reason, u64)> {
        if !self.is_sealed() {
            return Ok(());
        }
        let mut sectors = (lba..).zip(blocks.as_chunks_mut::<BLOCK_BYTES>().0);
        sectors.try_for_each(|(lba, sector)| {
            // Zeros are what a store that keeps freshness says of an unwritten one.
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

    /// Whether a command may go now; if not, its thread is told when it may.
    pub(super) fn admit(&self, queue: u64, cost: Cost, waiter: &Waiter) -> bool {
        // The limits may change right behind this look: then the next command notices.
        if !self.is_limited.load(Ordering::Relaxed) {
            return true;
        }
        let admitted = lock(&self.qos).admit(clock::now(), queue, cost, waiter.clone());
        if !admitted {
            add(&self.counters.throttled, 1);
        }
        admitted
    }

    /// Lets commands through that may go by now; when to call again, if any are left.
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

    /// Forgets the commands of a queue that ends.
    pub(super) fn cancel(&self, queue: u64) {
        lock(&self.qos).cancel(queue);
    }

    /// Whether the reservations let this through. Callers hold a range, so that no reservation
    /// changes between this and the end of the command.
    pub(super) fn allows(&self, host: HostId, group: Group) -> bool {
        let allowed = !self.is_reserved.load(Ordering::Relaxed)
            || lock(&self.reservations).allows(host, group);
        if !allowed {
            add(&self.counters.reservation_conflicts, 1);
        }
        allowed
    }

    /// Changes the reservations and tells those it concerns. Callers hold the whole namespace.
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

    /// Notes that a secure queue changed these blocks, whose range it holds.
    pub(super) fn note_changed(&self, blocks: Range<u64>) {
        lock(&self.changed).note(blocks);
    }

    /// Of blocks that are sent again and whose range is held: those to change. The others were
    /// changed since the store was opened.
    pub(super) fn not_superseded(&self, blocks: Range<u64>) -> Vec<Range<u64>> {
        let count = blocks.end - blocks.start;
        let left = lock(&self.changed).unchanged(blocks);
        let kept: u64 = left.iter().map(|range| range.end - range.start).sum();
        add(&self.counters.superseded, count - kept);
        left
    }

    /// A queue of a gateway begins; whose it is.
    pub(super) fn join(&self, gateway: &str) -> Writer {
        if self.has_marks { self.order().join(gateway) } else { 0 }
    }

    /// Whose changes no flush has yet.
    pub(super) fn order(&self) -> MutexGuard<'_, Order> {
        lock(&self.order)
    }

    /// How the changes of its secure queues ended.
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

    /// Who checks and refreshes what the store holds; None: nobody can.
    pub(super) fn upkeep(&self) -> io::Result<Option<Box<dyn Upkeep>>> {
        match &*self.store.read().unwrap_or_else(PoisonError::into_inner) {
            Some(store) => store.upkeep(),
            None => Err(io::Error::other("the namespace is closed")),
        }
    }

    /// Asks for a range as [`Namespace::acquire`] does; it isn't a command that waits.
    pub(super) fn acquire_for_job(
        &self,
        blocks: Range<u64>,
        mode: Mode,
        waiter: Waiter,
    ) -> Acquired {
        lock(&self.locks).acquire(blocks, mode, waiter)
    }

    /// Begins or ends to watch the load.
    pub(super) fn watch_load(&self, is_watched: bool) {
        lock(&self.load).watch(is_watched);
    }

    /// The load, while it is watched.
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
    fn metadata_of_a_plain_namespace_is_the_hosts() {
        let namespace = Namespace::plain(Box::new(MemoryStore::new(10, true))).expect("namespace");
        assert!(!namespace.is_sealed());
        assert_eq!(namespace.check(0, &mut [0; BLOCK_BYTES]), Ok(()));
    }
}
