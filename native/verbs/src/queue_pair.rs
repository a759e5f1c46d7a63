//! A queue pair that is connected, used and made again by one thread.

use std::io;
use std::mem::zeroed;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};

use crate::address::QueuePairAddress;
use crate::bindings as ibv;
use crate::resources::{Mode, Place, RECEIVE_SLOTS, Resources, SEND_SLOTS, Unavailable};

/// Most datagrams of one call of [`QueuePair::send`].
pub const SEGMENTS_MAX: usize = SEND_SLOTS / 2;
/// Completions taken in one call.
const COMPLETIONS: usize = 32;
/// Every so many sends one reports that it and all before it are complete.
const SENDS_PER_SIGNAL: u64 = 32;
/// Pause after the second failure in a row, until the pair is connected again; it doubles with each
/// further one. The first is mended at once.
const RETRY: Duration = Duration::from_secs(1);
/// Most doublings.
const RETRY_DOUBLINGS: u32 = 5;
/// A connection that lasted this long was none of a row of failures.
const LASTING: Duration = Duration::from_secs(1);
/// Time in which sends complete, unless the device has stopped: pauses of a lossless network are a
/// thousand times shorter.
const STUCK: Duration = Duration::from_millis(200);

/// Set in the identifiers of sends.
const SEND: u64 = 1 << 63;

/// Result of [`QueuePair::receive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Received {
    /// Datagrams handed over.
    pub datagrams: usize,
    /// Bytes of them.
    pub bytes: usize,
    /// Nothing more had arrived.
    pub is_all: bool,
}

/// How far the pair is.
#[derive(Debug)]
enum Connection {
    /// No peer is known yet.
    Unknown,
    /// To be connected at this time.
    Down { at: Instant },
    /// Another thread connects it, and then sets the result.
    Connecting(Arc<OnceLock<io::Result<()>>>),
    /// It sends and receives.
    Up { since: Instant },
}

/// An unreliable connected queue pair with slots of its own.
pub struct QueuePair {
    resources: Arc<Resources>,
    peer: Option<QueuePairAddress>,
    connection: Connection,
    /// Readable once the connecting thread has ended.
    connected: Arc<OwnedFd>,
    /// Failures in a row.
    row: u32,
    /// Number of times that it was connected; part of identifiers, so that completions from before
    /// are known.
    generation: u32,
    /// Sends of this generation, and how many of them are complete.
    sent: u64,
    completed: u64,
    /// When sends began to wait for room.
    blocked_at: Option<Instant>,
    /// Completions that were taken and not looked at yet.
    taken: [ibv::ibv_wc; COMPLETIONS],
    taken_count: usize,
    /// Copy of a packet, which only this process can change: it is opened there.
    snapshot: Vec<u8>,
    failures: u64,
    calls: u64,
}

impl QueuePair {
    /// Makes a queue pair at the device that has this address. It receives nothing before
    /// [`Self::set_peer`].
    pub fn new(ip: IpAddr, mode: Mode) -> Result<Self, Unavailable> {
        let mut psn = [0; 4];
        // Not a secret: packets carry it in the clear. It only keeps late packets of another pair
        // with this number from being expected.
        let drawn = rustix::rand::getrandom(&mut psn[..], rustix::rand::GetRandomFlags::empty());
        let psn = u32::from_ne_bytes(psn) >> 8;
        let resources = Resources::new(ip, mode, drawn.map_or(0, |_| psn))?;
        let connected = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let connected = connected.map_err(|error| resources.error("eventfd", error.into()))?;
        Ok(Self {
            resources: Arc::new(resources),
            peer: None,
            connection: Connection::Unknown,
            connected: Arc::new(connected),
            row: 0,
            generation: 0,
            sent: 0,
            completed: 0,
            blocked_at: None,
            // SAFETY: zeros are valid: numbers.
            taken: unsafe { zeroed() },
            taken_count: 0,
            snapshot: Vec::new(),
            failures: 0,
            calls: 0,
        })
    }

    /// Its address, for the peer.
    #[must_use]
    pub fn local(&self) -> QueuePairAddress {
        *self.resources.local()
    }

    /// Bytes of memory that are pinned for it.
    #[must_use]
    pub fn pinned_bytes(&self) -> usize {
        self.resources.pinned_bytes()
    }

    /// Connects it, in the background, to a peer.
    ///
    /// # Panics
    ///
    /// While it is being connected to another one.
    pub fn set_peer(&mut self, peer: QueuePairAddress) {
        let is_idle = !matches!(self.connection, Connection::Connecting(_));
        assert!(is_idle, "it is being connected to another peer");
        self.peer = Some(peer);
        self.connection = Connection::Down { at: Instant::now() };
        self.tend();
    }

    /// How often it failed: by an error that the device reported, or at connecting.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures
    }

    /// Number of receive calls that returned data.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Whether it is connected. Goes on connecting it if it is not.
    pub fn tend(&mut self) -> bool {
        match &self.connection {
            Connection::Up { .. } => return true,
            Connection::Connecting(attempt) => match attempt.get() {
                Some(Ok(())) => self.connection = Connection::Up { since: Instant::now() },
                Some(Err(_)) => self.failed(),
                // The thread is gone without a result.
                None if Arc::strong_count(attempt) == 1 && attempt.get().is_none() => self.failed(),
                None => {}
            },
            Connection::Down { at } if *at <= Instant::now() => self.start_connecting(),
            Connection::Down { .. } | Connection::Unknown => {}
        }
        self.is_up()
    }

    /// Whether it is connected, as far as [`Self::tend`] has seen.
    #[must_use]
    pub fn is_up(&self) -> bool {
        matches!(self.connection, Connection::Up { .. })
    }

    fn start_connecting(&mut self) {
        let Some(peer) = self.peer else { return };
        self.generation = self.generation.wrapping_add(1) & (u32::MAX >> 1);
        (self.sent, self.completed, self.blocked_at) = (0, 0, None);
        self.taken_count = 0;
        let resources = Arc::clone(&self.resources);
        let connected = Arc::clone(&self.connected);
        let generation = self.generation;
        let attempt = Arc::new(OnceLock::new());
        let result = Arc::clone(&attempt);
        let connect = move || {
            let slots = (0..RECEIVE_SLOTS).map(|slot| (id_of(generation, slot), slot));
            let tried = resources.connect(&peer, || resources.post_receives(slots));
            // Nobody else sets it. A full counter is readable, too.
            let _ = result.set(tried);
            let _ = write(connected.as_fd(), &1_u64.to_ne_bytes());
        };
        // The look-up of the peer's link-layer address may take a second, in which the session's
        // other paths go on.
        match Builder::new().name("sealane-verbs".into()).spawn(connect) {
            Ok(_) => self.connection = Connection::Connecting(attempt),
            Err(_) => self.failed(),
        }
    }

    /// Takes it down until it is connected again.
    fn failed(&mut self) {
        let now = Instant::now();
        if let Connection::Up { since } = self.connection
            && now.duration_since(since) >= LASTING
        {
            self.row = 0;
        }
        let pause = match self.row {
            0 => Duration::ZERO,
            row => RETRY * (1 << (row - 1).min(RETRY_DOUBLINGS)),
        };
        self.row = self.row.saturating_add(1);
        self.failures += 1;
        self.taken_count = 0;
        self.connection = Connection::Down { at: now + pause };
    }

    /// Passes on what has arrived, at most some datagrams at a time. The bytes are whatever the
    /// network had.
    pub fn receive(&mut self, mut each: impl FnMut(&mut [u8])) -> Received {
        if !self.tend() {
            return Received { is_all: true, ..Received::default() };
        }
        self.take();
        let count = std::mem::take(&mut self.taken_count);
        let mut received = Received { is_all: count < COMPLETIONS, ..Received::default() };
        let mut has_failed = false;
        let mut free = Vec::with_capacity(count);
        for index in 0..count {
            let completion = self.taken[index];
            let Some(slot) = self.slot_of(completion.wr_id) else { continue };
            has_failed |= completion.status != ibv::IBV_WC_SUCCESS;
            if has_failed {
                continue;
            }
            if completion.wr_id & SEND != 0 {
                self.completed += SENDS_PER_SIGNAL;
                self.blocked_at = None;
                continue;
            }
            free.push((completion.wr_id, slot));
            let Some((place, length)) = place_of(&self.local(), &completion, slot) else {
                continue;
            };
            self.snapshot.resize(length, 0);
            // SAFETY: the length is within the slot. The device, and in mode `write` anybody, may
            // write to it meanwhile: the copy is then a mixture, which does not open.
            unsafe { self.snapshot.as_mut_ptr().copy_from(self.resources.slot(place), length) };
            each(&mut self.snapshot);
            received.datagrams += 1;
            received.bytes += length;
        }
        self.calls += u64::from(received.datagrams > 0);
        if has_failed || self.resources.post_receives(free.into_iter()).is_err() {
            self.failed();
            received.is_all = true;
        }
        received
    }

    /// Takes completions, unless some have been taken that were not looked at.
    fn take(&mut self) {
        if self.taken_count == 0 {
            match self.resources.poll(&mut self.taken) {
                Ok(count) => self.taken_count = count,
                Err(_) => self.failed(),
            }
        }
    }

    /// The slot of a completion; none if it is of an earlier connection.
    fn slot_of(&self, id: u64) -> Option<usize> {
        let generation = ((id & !SEND) >> 32) as u32;
        let slot = (id as u32) as usize;
        let slots = if id & SEND == 0 { RECEIVE_SLOTS } else { SEND_SLOTS };
        (generation == self.generation && slot < slots).then_some(slot)
    }

    /// Sends datagrams of `segment_bytes` each (the last may be shorter). Returns false if there is
    /// no room at present; an error if it is not connected, or a datagram is larger than the
    /// peer takes.
    pub fn send(&mut self, contents: &[u8], segment_bytes: usize) -> io::Result<bool> {
        if !self.tend() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let Some(peer) = self.peer else { return Err(io::ErrorKind::NotConnected.into()) };
        let most = peer.mtu_bytes.min(self.local().mtu_bytes);
        if segment_bytes == 0 || segment_bytes > usize::from(most) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let segments = contents.chunks(segment_bytes);
        if self.sent - self.completed + segments.len() as u64 > SEND_SLOTS as u64 {
            if self.blocked_at.get_or_insert_with(Instant::now).elapsed() < STUCK {
                return Ok(false);
            }
            self.failed();
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (generation, resources) = (self.generation, Arc::clone(&self.resources));
        let sends = segments.map(|segment| {
            let slot = (self.sent % SEND_SLOTS as u64) as usize;
            let place = RECEIVE_SLOTS + slot;
            // SAFETY: the slot's last send is complete, so that the device no longer reads it; a
            // segment is no longer than a slot.
            unsafe { resources.slot(place).copy_from(segment.as_ptr(), segment.len()) };
            let remote = peer.rkey.map(|rkey| {
                let slot = (self.sent % RECEIVE_SLOTS as u64) as u32;
                let offset = u64::from(slot) * u64::from(peer.mtu_bytes);
                Place { offset, rkey, immediate: immediate_of(generation, slot) }
            });
            self.sent += 1;
            let signals = self.sent.is_multiple_of(SENDS_PER_SIGNAL);
            (SEND | id_of(generation, slot), place, segment.len(), signals, remote)
        });
        let posted = resources.post_sends(sends);
        posted.inspect_err(|_| self.failed()).map(|()| true)
    }

    /// Time until it needs attention although nothing arrives, if it does.
    #[must_use]
    pub fn due_in(&self) -> Option<Duration> {
        let at = match self.connection {
            Connection::Down { at } => Some(at),
            Connection::Up { .. } => self.blocked_at.map(|at| at + STUCK),
            Connection::Unknown | Connection::Connecting(_) => None,
        };
        at.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Readable when it is connected, or, after [`Self::fall_asleep`], when something has arrived or
    /// there is room again.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        if self.is_up() { self.resources.event() } else { (*self.connected).as_fd() }
    }

    /// Goes on connecting it. If `wants` anything of a connection, makes [`Self::event`] report the
    /// next completion; false if there is one already.
    pub fn fall_asleep(&mut self, wants: bool) -> bool {
        if !self.tend() || !wants {
            return true;
        }
        if self.resources.arm().is_err() {
            self.failed();
            return false;
        }
        self.take();
        self.taken_count == 0
    }

    /// Takes the event that has woken the thread; `is_error` if the descriptor reports that its
    /// device is gone.
    pub fn woken(&mut self, is_error: bool) {
        // An empty counter is none to clear.
        let _ = read(self.connected.as_fd(), &mut [0; 8]);
        self.resources.clear_events();
        if is_error && self.is_up() {
            self.failed();
        }
    }

    /// Puts it into the error state, as a device does: for tests.
    #[doc(hidden)]
    pub fn fail(&self) -> io::Result<()> {
        self.resources.fail()
    }
}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = formatter.debug_struct("QueuePair");
        shown.field("local", &self.local()).field("peer", &self.peer);
        shown.field("connection", &self.connection).finish_non_exhaustive()
    }
}

/// Identifier of a receive; of a send with [`SEND`].
fn id_of(generation: u32, slot: usize) -> u64 {
    u64::from(generation) << 32 | slot as u64
}

/// Slot and length of what has arrived; none if it is nothing that a peer sends. `slot`: the posted one.
/// Immediate data and lengths are anybody's.
fn place_of(
    local: &QueuePairAddress,
    completion: &ibv::ibv_wc,
    slot: usize,
) -> Option<(usize, usize)> {
    let (place, opcode) = if local.rkey.is_some() {
        // SAFETY: immediate data are numbers, whatever the completion.
        let immediate = u32::from_be(unsafe { completion.__bindgen_anon_1.imm_data });
        (slot_of_immediate(immediate), ibv::IBV_WC_RECV_RDMA_WITH_IMM)
    } else {
        (slot, ibv::IBV_WC_RECV)
    };
    let length = completion.byte_len as usize;
    let is_whole = (1..=usize::from(local.mtu_bytes)).contains(&length);
    (completion.opcode == opcode && place < RECEIVE_SLOTS && is_whole).then_some((place, length))
}

/// Immediate data of a packet in a ring, split as in SDR-RDMA (section 3.3): 10 bits of the sender's
/// generation, 18 of the packet's place, 4 for users, which are 0. It is a hint: nothing protects it.
fn immediate_of(generation: u32, slot: u32) -> u32 {
    (generation & 0x3ff) << 22 | slot << 4
}

/// The place of a packet in the ring.
fn slot_of_immediate(immediate: u32) -> usize {
    (immediate >> 4 & 0x3_ffff) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_point_at_whole_slots_only() {
        let at = |rkey, opcode, immediate: u32, byte_len| {
            let ip = std::net::Ipv4Addr::LOCALHOST.into();
            let local = QueuePairAddress { ip, number: 2, first_psn: 0, mtu_bytes: 2048, rkey };
            // SAFETY: zeros are valid: numbers.
            let mut completion: ibv::ibv_wc = unsafe { zeroed() };
            completion.opcode = opcode;
            completion.byte_len = byte_len;
            completion.__bindgen_anon_1.imm_data = immediate.to_be();
            place_of(&local, &completion, 7)
        };
        let (sent, written) = (ibv::IBV_WC_RECV, ibv::IBV_WC_RECV_RDMA_WITH_IMM);
        assert_eq!(at(None, sent, u32::MAX, 2048), Some((7, 2048)));
        assert_eq!(at(Some(1), written, immediate_of(3, 511), 1), Some((511, 1)));
        for (rkey, opcode, immediate, length) in [
            (None, sent, 0, 0),
            (None, sent, 0, 2049),
            (None, sent, 0, u32::MAX),
            (None, written, 0, 100),
            (Some(1), sent, 0, 100),
            (Some(1), written, 0, 0),
            (Some(1), written, 0, 2049),
            (Some(1), written, 512 << 4, 100),
            (Some(1), written, u32::MAX, 100),
        ] {
            assert_eq!(at(rkey, opcode, immediate, length), None, "{rkey:?} {immediate} {length}");
        }
    }

    #[test]
    fn immediate_data_name_the_slot_whatever_the_generation() {
        for slot in [0, 1, 511, 0x3_ffff] {
            for generation in [0, 1, 0x3ff, 0x7fff_ffff] {
                assert_eq!(slot_of_immediate(immediate_of(generation, slot)), slot as usize);
            }
        }
        assert_eq!(immediate_of(1, 2), (1 << 22) + (2 << 4));
    }
}
