//! Threads of a session beside its worker (the paper's DPA workers): each seals, sends, receives
//! and opens for some of the paths. Everything else, such as the bitmap of what has landed, is the
//! worker's.
//!
//! A worker without them does all of it itself, which costs a small message no change of threads
//! and a large one half of its rate (docs/decisions/0088-path-threads.md).

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use quinn_udp::RecvMeta;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use sealane_proto::session::{Arrivals, Opener, Train};

use super::outbound::{Batch, SendCounters};
use crate::event;
use crate::udp::{RECEIVE_BATCH, RECEIVE_BUFFER_BYTES, Udp};

/// Most batches of a path that wait to be sent: enough to seal one while another is written.
const QUEUED_MAX: usize = 4;
/// Most received lists of a thread that wait for the worker: 2 MiB. What arrives beyond them stays
/// in the sockets' buffers.
const LISTS_MAX: usize = 32;
/// Receive calls on a path before another path's turn.
const RECEIVES_PER_TURN: usize = 4;

/// Reasons to wake a sleeping thread.
const WORK: u8 = 1;
/// As [`WORK`], for the worker: there is room for a batch.
const ROOM: u8 = 2;

/// Wakes a thread that sleeps in `poll`.
#[derive(Debug)]
struct Wake {
    event: OwnedFd,
    /// For which reasons the thread is to be woken; none while it is awake.
    reasons: AtomicU8,
}

impl Wake {
    fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, reasons: AtomicU8::new(0) })
    }

    /// Announces that the thread will sleep. It must then look for work once more: whoever adds
    /// work after that look wakes it.
    fn fall_asleep(&self, reasons: u8) {
        self.reasons.store(reasons, Ordering::SeqCst);
    }

    /// The thread is awake; `is_rung`: the event was readable.
    fn woke_up(&self, is_rung: bool) {
        self.reasons.store(0, Ordering::SeqCst);
        if is_rung {
            event::clear(&self.event);
        }
    }

    fn wake(&self, reason: u8) {
        let wants = self.reasons.load(Ordering::SeqCst) & reason != 0;
        if wants && self.reasons.swap(0, Ordering::SeqCst) != 0 {
            event::ring(&self.event);
        }
    }
}

/// One path's socket, as seen by the worker.
#[derive(Debug)]
pub(super) struct Port {
    thread: Arc<Shared>,
    state: Arc<PortState>,
    /// Index among the thread's ports.
    index: usize,
}

#[derive(Debug, Default)]
struct PortState {
    /// Most datagrams of a batch; falls to 1 if the network device can't cut batches.
    segments_max: AtomicUsize,
    /// The peer's address: packets from others are left to the worker, which limits what forged
    /// ones cost.
    peer: Mutex<Option<SocketAddr>>,
    /// Batches that wait to be sent.
    queued: AtomicUsize,
    sent: Mutex<SendCounters>,
    receive_calls: AtomicU64,
    receive_drops: AtomicU64,
}

impl PortState {
    fn has_room(&self) -> bool {
        self.queued.load(Ordering::SeqCst) < QUEUED_MAX
    }
}

impl Port {
    /// Most datagrams of a batch.
    pub(super) fn segments_max(&self) -> usize {
        self.state.segments_max.load(Ordering::Relaxed)
    }

    /// Takes a batch to send, and leaves an empty one; false if too many are waiting.
    pub(super) fn send(&self, to: SocketAddr, train: &mut Train, batch: Batch) -> bool {
        if !self.state.has_room() {
            return false;
        }
        let spare = lock(&self.thread.spare_trains).pop().unwrap_or_else(Train::deferred);
        let train = std::mem::replace(train, spare);
        self.state.queued.fetch_add(1, Ordering::SeqCst);
        lock(&self.thread.orders).push_back(Order { port: self.index, to, train, batch });
        self.thread.wake.wake(WORK);
        true
    }

    /// Results of sending so far.
    pub(super) fn counters(&self) -> SendCounters {
        *lock(&self.state.sent)
    }

    /// Counts a batch that is given up.
    pub(super) fn lost(&self, batch: Batch) {
        lock(&self.state.sent).count(false, batch.segments as u64);
    }

    /// Number of receive calls that returned data.
    pub(super) fn receive_calls(&self) -> u64 {
        self.state.receive_calls.load(Ordering::Relaxed)
    }

    /// Datagrams that the kernel had dropped at the last receive call because the socket's buffer
    /// was full.
    pub(super) fn receive_drops(&self) -> u64 {
        self.state.receive_drops.load(Ordering::Relaxed)
    }

    /// Whether another batch would be taken.
    pub(super) fn has_room(&self) -> bool {
        self.state.has_room()
    }

    /// Sets the peer's address.
    pub(super) fn set_peer(&self, peer: SocketAddr) {
        *lock(&self.state.peer) = Some(peer);
    }
}

/// A batch to send.
#[derive(Debug)]
struct Order {
    port: usize,
    to: SocketAddr,
    train: Train,
    batch: Batch,
}

/// Datagrams that arrived together on a path.
#[derive(Debug)]
pub(super) struct Arrived {
    /// Index of the path.
    pub(super) path: usize,
    pub(super) meta: RecvMeta,
    pub(super) arrivals: Arrivals,
    /// Index of the thread, to which the buffer returns.
    thread: usize,
}

/// Shared by the worker and one thread.
#[derive(Debug)]
struct Shared {
    orders: Mutex<VecDeque<Order>>,
    spare_trains: Mutex<Vec<Train>>,
    arrived: Mutex<VecDeque<Arrived>>,
    spare_buffers: Mutex<Vec<Vec<u8>>>,
    opener: Mutex<Arc<Opener>>,
    is_over: AtomicBool,
    /// Whether the thread has ended.
    has_ended: AtomicBool,
    wake: Wake,
    worker: Arc<Wake>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All threads of a session. Dropping it sends what is queued, as far as the kernel takes it at
/// once, and waits until the threads have ended.
#[derive(Debug)]
pub(super) struct PathThreads {
    threads: Vec<(Arc<Shared>, JoinHandle<()>)>,
    worker: Arc<Wake>,
    /// The thread from which the last list was taken.
    read: usize,
    opener_version: u64,
}

impl PathThreads {
    /// Starts `count` threads, each for every `count`-th path; returns the paths' ports in order.
    pub(super) fn start(
        sockets: Vec<Udp>,
        count: usize,
        (opener, opener_version): (Opener, u64),
    ) -> io::Result<(Self, Vec<Port>)> {
        let worker = Arc::new(Wake::new()?);
        let opener = Arc::new(opener);
        let count = count.clamp(1, sockets.len().max(1));
        let shared = (0..count).map(|_| {
            Ok(Arc::new(Shared {
                orders: Mutex::default(),
                spare_trains: Mutex::default(),
                arrived: Mutex::default(),
                spare_buffers: Mutex::new((0..LISTS_MAX).map(|_| Vec::new()).collect()),
                opener: Mutex::new(Arc::clone(&opener)),
                is_over: AtomicBool::new(false),
                has_ended: AtomicBool::new(false),
                wake: Wake::new()?,
                worker: Arc::clone(&worker),
            }))
        });
        let shared: Vec<_> = shared.collect::<io::Result<_>>()?;
        let mut served: Vec<Vec<Served>> = (0..count).map(|_| Vec::new()).collect();
        let mut ports = Vec::with_capacity(sockets.len());
        for (path, udp) in sockets.into_iter().enumerate() {
            let (thread, index) = (path % count, path / count);
            let state = Arc::<PortState>::default();
            state.segments_max.store(udp.segments_max(), Ordering::Relaxed);
            ports.push(Port {
                thread: Arc::clone(&shared[thread]),
                state: Arc::clone(&state),
                index,
            });
            let waiting = VecDeque::new();
            served[thread].push(Served {
                path,
                udp,
                state,
                waiting,
                is_blocked: false,
                is_readable: true,
            });
        }
        let mut this = Self { threads: Vec::with_capacity(count), worker, read: 0, opener_version };
        for (index, (shared, ports)) in shared.into_iter().zip(served).enumerate() {
            let thread = PathThread { shared: Arc::clone(&shared), index, ports, first: 0 };
            let builder = std::thread::Builder::new().name(format!("sealane-paths-{index}"));
            this.threads.push((shared, builder.spawn(move || thread.run())?));
        }
        Ok((this, ports))
    }

    /// Takes the next received list, from the threads in turn.
    pub(super) fn next_arrived(&mut self) -> Option<Arrived> {
        let count = self.threads.len();
        let mut behind = (1..=count).map(|step| (self.read + step) % count);
        let found = behind
            .find_map(|thread| Some((thread, lock(&self.threads[thread].0.arrived).pop_front()?)));
        let (thread, arrived) = found?;
        self.read = thread;
        Some(arrived)
    }

    /// Returns the buffer of a list.
    pub(super) fn return_buffer(&self, arrived: Arrived) {
        let (shared, _) = &self.threads[arrived.thread];
        let mut spare = lock(&shared.spare_buffers);
        spare.push(arrived.arrivals.into_buffer());
        let is_awaited = spare.len() == RECEIVE_BATCH;
        drop(spare);
        if is_awaited {
            shared.wake.wake(WORK);
        }
    }

    /// Whether a list waits to be taken.
    pub(super) fn has_arrived(&self) -> bool {
        self.threads.iter().any(|(shared, _)| !lock(&shared.arrived).is_empty())
    }

    /// Whether a thread has ended although it should not.
    pub(super) fn has_failed(&self) -> bool {
        self.threads.iter().any(|(shared, _)| shared.has_ended.load(Ordering::SeqCst))
    }

    /// Gives the threads the keys of this version, unless they have them.
    pub(super) fn update(&mut self, version: u64, opener: impl FnOnce() -> Opener) {
        if self.opener_version != version {
            self.opener_version = version;
            let opener = Arc::new(opener());
            for (shared, _) in &self.threads {
                *lock(&shared.opener) = Arc::clone(&opener);
            }
        }
    }

    /// Announces that the worker will sleep until its event is readable: because of a list if it
    /// `wants_lists`, or of room for a batch if it `wants_room`. It must look for both once more.
    pub(super) fn fall_asleep(&self, wants_lists: bool, wants_room: bool) {
        let reasons = [(wants_lists, WORK), (wants_room, ROOM)];
        let reasons = reasons.iter().filter(|(wants, _)| *wants).map(|(_, reason)| reason);
        self.worker.fall_asleep(reasons.sum());
    }

    /// The worker is awake; `is_rung`: the event was readable.
    pub(super) fn woke_up(&self, is_rung: bool) {
        self.worker.woke_up(is_rung);
    }

    /// Readable when a thread has something for the sleeping worker: a list, or room for a batch.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.worker.event.as_fd()
    }
}

impl Drop for PathThreads {
    fn drop(&mut self) {
        for (shared, _) in &self.threads {
            shared.is_over.store(true, Ordering::SeqCst);
            shared.wake.wake(WORK);
        }
        for (_, handle) in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = handle.join();
        }
    }
}

/// A path of a thread.
struct Served {
    path: usize,
    udp: Udp,
    state: Arc<PortState>,
    /// Batches that the thread has taken over.
    waiting: VecDeque<Order>,
    /// Whether the kernel did not accept the first of them.
    is_blocked: bool,
    is_readable: bool,
}

impl Served {
    /// Seals the first batch that waits and sends it.
    fn send(&mut self, shared: &Shared) {
        let Some(Order { to, train, batch, .. }) = self.waiting.front_mut() else { return };
        train.seal();
        let mut results = SendCounters::default();
        self.is_blocked = !batch.send(&self.udp, (*to, train), &mut results);
        if self.is_blocked {
            return;
        }
        let PortState { segments_max, sent, queued, .. } = &*self.state;
        let mut sent = lock(sent);
        *sent = [*sent, results].into_iter().sum();
        drop(sent);
        segments_max.store(self.udp.segments_max(), Ordering::Relaxed);
        if let Some(Order { mut train, .. }) = self.waiting.pop_front() {
            train.clear();
            lock(&shared.spare_trains).push(train);
        }
        if queued.fetch_sub(1, Ordering::SeqCst) - 1 <= QUEUED_MAX / 2 {
            shared.worker.wake(ROOM);
        }
    }

    /// Whether a batch waits that the kernel may accept.
    fn can_send(&self) -> bool {
        !self.waiting.is_empty() && !self.is_blocked
    }

    /// Receives and opens what has arrived, as far as the worker has returned buffers.
    fn receive(&mut self, shared: &Shared, thread: usize) {
        for _ in 0..RECEIVES_PER_TURN {
            if !self.is_readable {
                return;
            }
            let Some(mut buffers) = take_buffers(shared) else { return };
            let filled = self.udp.fill(&mut buffers);
            // An error is a late ICMP error about an earlier packet, which is lost.
            self.is_readable =
                filled.as_ref().is_ok_and(|lists| *lists == RECEIVE_BATCH) || filled.is_err();
            let lists = filled.unwrap_or(0);
            let metas = *self.udp.received();
            self.state.receive_drops.store(self.udp.drops(), Ordering::Relaxed);
            self.state.receive_calls.store(self.udp.calls(), Ordering::Relaxed);
            let opener = Arc::clone(&lock(&shared.opener));
            let peer = *lock(&self.state.peer);
            let mut unused = Vec::new();
            for (index, (buffer, meta)) in buffers.into_iter().zip(metas).enumerate() {
                if index >= lists {
                    unused.push(buffer);
                    continue;
                }
                let opener = Some(&*opener).filter(|_| Some(meta.addr) == peer);
                let arrivals = Arrivals::new(buffer, (meta.len, meta.stride), opener);
                let arrived = Arrived { path: self.path, meta, arrivals, thread };
                lock(&shared.arrived).push_back(arrived);
            }
            lock(&shared.spare_buffers).append(&mut unused);
            if lists > 0 {
                shared.worker.wake(WORK);
            }
        }
    }
}

/// Whether the worker has returned enough buffers for a receive call.
fn has_buffers(shared: &Shared) -> bool {
    lock(&shared.spare_buffers).len() >= RECEIVE_BATCH
}

/// Takes the buffers of a receive call, if the worker has returned enough.
fn take_buffers(shared: &Shared) -> Option<[Vec<u8>; RECEIVE_BATCH]> {
    let mut spare = lock(&shared.spare_buffers);
    let rest = spare.len().checked_sub(RECEIVE_BATCH)?;
    let mut taken = spare.drain(rest..);
    let buffers = std::array::from_fn(|_| taken.next().unwrap_or_default());
    drop(taken);
    drop(spare);
    Some(buffers.map(|mut buffer| {
        buffer.resize(RECEIVE_BUFFER_BYTES, 0);
        buffer
    }))
}

struct PathThread {
    shared: Arc<Shared>,
    index: usize,
    ports: Vec<Served>,
    /// Index of the port that comes first in this turn.
    first: usize,
}

impl Drop for PathThread {
    /// Also after a panic: the worker must notice.
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        // Whatever it waits for.
        event::ring(&self.shared.worker.event);
    }
}

impl PathThread {
    fn run(mut self) {
        loop {
            // Before the orders: what was ordered before the end still leaves.
            let is_over = self.shared.is_over.load(Ordering::SeqCst);
            for order in std::mem::take(&mut *lock(&self.shared.orders)) {
                self.ports[order.port].waiting.push_back(order);
            }
            // The first port of a turn gets the buffers that are left, and is looked at even while
            // another one always has something: each port in turn.
            if has_buffers(&self.shared) {
                self.first = (self.first + 1) % self.ports.len();
            }
            self.ports[self.first].is_readable = true;
            let (before, from_first) = self.ports.split_at_mut(self.first);
            // One batch a turn, so that no report waits for more than that.
            for port in from_first.iter_mut().chain(before) {
                port.send(&self.shared);
                if !is_over {
                    port.receive(&self.shared, self.index);
                }
            }
            if !is_over {
                self.sleep();
            } else if !self.ports.iter().any(Served::can_send) {
                return;
            }
        }
    }

    fn sleep(&mut self) {
        let Self { shared, ports, .. } = self;
        shared.wake.fall_asleep(WORK);
        let has_buffers = has_buffers(shared);
        let has_work = shared.is_over.load(Ordering::SeqCst)
            || !lock(&shared.orders).is_empty()
            || ports.iter().any(Served::can_send)
            || (has_buffers && ports.iter().any(|port| port.is_readable));
        let mut is_rung = false;
        if !has_work {
            let wanted = |port: &Served| {
                let mut wanted = PollFlags::empty();
                wanted.set(PollFlags::IN, has_buffers && !port.is_readable);
                wanted.set(PollFlags::OUT, port.is_blocked);
                wanted
            };
            // Not those of which nothing is wanted: `poll` would report their errors at once,
            // again and again.
            let waits = |port: &Served| !wanted(port).is_empty();
            let mut fds = vec![PollFd::new(&shared.wake.event, PollFlags::IN)];
            let watched = ports.iter().filter(|port| waits(port));
            fds.extend(watched.map(|port| PollFd::new(&port.udp, wanted(port))));
            // EINTR: the loop looks at everything again.
            let _ = poll(&mut fds, None);
            let found: Vec<_> = fds.iter().map(PollFd::revents).collect();
            is_rung = !found[0].is_empty();
            let watched = ports.iter_mut().filter(|port| waits(port));
            for (port, revents) in watched.zip(&found[1..]) {
                port.is_readable |= revents.intersects(PollFlags::IN | PollFlags::ERR);
                port.is_blocked &= !revents.intersects(PollFlags::OUT | PollFlags::ERR);
            }
        }
        shared.wake.woke_up(is_rung);
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::{Duration, Instant};

    use sealane_proto::session::Ecn;

    use super::*;
    use crate::session::full_socket_tests::sending;

    fn loopback() -> Udp {
        Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap()
    }

    fn peer() -> (UdpSocket, SocketAddr) {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let address = socket.local_addr().unwrap();
        (socket, address)
    }

    fn opener() -> (Opener, u64) {
        (Opener::without_keys(), 0)
    }

    fn send(port: &Port, to: SocketAddr, byte: u8) -> bool {
        let mut train = Train::deferred();
        train.append(&[byte; 100]);
        let batch = Batch::of_one(100, Ecn::Ect0);
        port.send(to, &mut train, batch)
    }

    #[test]
    fn what_is_queued_leaves_before_the_threads_end() {
        let sockets = [0, 1, 2].map(|_| loopback()).into();
        let (threads, ports) = PathThreads::start(sockets, 2, opener()).unwrap();
        let (socket, to) = peer();
        for (byte, port) in (0..).zip(ports.iter().cycle().take(9)) {
            assert!(send(port, to, byte), "three batches of a path have room");
        }
        drop(threads);
        let mut bytes = [0; 200];
        let mut seen: Vec<u8> =
            (0..9).map(|_| (socket.recv(&mut bytes).unwrap(), bytes[0]).1).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..9).collect::<Vec<u8>>());
        let calls: u64 = ports.iter().map(|port| port.counters().calls).sum();
        assert_eq!(calls, 9);
    }

    #[test]
    fn no_more_batches_wait_than_may() {
        let (threads, ports) = PathThreads::start(vec![loopback()], 1, opener()).unwrap();
        // It ends, so it takes nothing.
        drop(threads);
        let (_, to) = peer();
        let taken = (0..10).filter(|byte| send(&ports[0], to, *byte)).count();
        assert_eq!(taken, QUEUED_MAX);
        assert!(!ports[0].has_room());
    }

    #[test]
    fn packets_from_others_than_the_peer_are_left_sealed() {
        let ([mut sender, receiver], due) = sending();
        let mut train = Train::default();
        assert!(sender.session.next_packet(&sender.memory, due, &mut train));
        let keys = (receiver.session.opener(), receiver.session.opener_version());
        let udp = loopback();
        let here = udp.local_address().unwrap();
        let (mut threads, ports) = PathThreads::start(vec![udp], 1, keys).unwrap();
        let ((known, address), (stranger, _)) = (peer(), peer());
        ports[0].set_peer(address);
        for (socket, is_tried) in [(stranger, false), (known, true)] {
            socket.send_to(train.sealed(), here).unwrap();
            let until = Instant::now() + Duration::from_secs(5);
            let mut arrived = loop {
                if let Some(arrived) = threads.next_arrived() {
                    break arrived;
                }
                assert!(Instant::now() < until);
            };
            let tried: Vec<_> = arrived.arrivals.datagrams().map(|one| one.is_tried()).collect();
            assert_eq!(tried, [is_tried]);
            threads.return_buffer(arrived);
        }
    }

    #[test]
    fn a_flooded_path_does_not_take_all_buffers_of_its_thread() {
        let sockets = vec![loopback(), loopback()];
        let to: Vec<_> = sockets.iter().map(|udp| udp.local_address().unwrap()).collect();
        let (mut threads, _ports) = PathThreads::start(sockets, 1, opener()).unwrap();
        let (socket, _) = peer();
        for _ in 0..20 * LISTS_MAX {
            socket.send_to(&[0; 10], to[0]).unwrap();
        }
        socket.send_to(&[1; 10], to[1]).unwrap();
        let until = Instant::now() + Duration::from_secs(5);
        let mut taken = 0;
        loop {
            assert!(Instant::now() < until);
            let Some(arrived) = threads.next_arrived() else { continue };
            let is_other = arrived.path == 1;
            threads.return_buffer(arrived);
            if is_other {
                break;
            }
            taken += 1;
        }
        assert!(taken < 4 * LISTS_MAX, "{taken} lists of the other path came first");
    }

    #[test]
    fn a_thread_that_has_ended_is_noticed() {
        let (threads, _) = PathThreads::start(vec![loopback()], 1, opener()).unwrap();
        assert!(!threads.has_failed());
        threads.threads[0].0.is_over.store(true, Ordering::SeqCst);
        threads.threads[0].0.wake.wake(WORK);
        let until = Instant::now() + Duration::from_secs(5);
        while !threads.has_failed() {
            assert!(Instant::now() < until);
        }
    }
}
