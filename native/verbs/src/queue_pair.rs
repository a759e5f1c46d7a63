//! A queue pair that is connected, used and made again by one thread.

use std::io;
use std::mem::zeroed;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::address::QueuePairAddress;
use crate::bindings as ibv;
use crate::resources::{Mode, Place, RECEIVE_SLOTS, Resources, SEND_SLOTS, Unavailable};

/// Most datagrams of one call of [`QueuePair::send`].
pub const SEGMENTS_MAX: usize = SEND_SLOTS / 2;
/// Completions taken in one call.
const COMPLETIONS: usize = 32;
/// Every so many sends one reports that it and all before it are complete.
const SENDS_PER_SIGNAL: u64 = 32;
/// Pause after a failure, until the pair is connected again.
const RETRY: Duration = Duration::from_secs(1);

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
    /// Another thread connects it.
    Connecting(JoinHandle<io::Result<()>>),
    /// It sends and receives.
    Up,
}

/// An unreliable connected queue pair with slots of its own.
pub struct QueuePair {
    resources: Arc<Resources>,
    peer: Option<QueuePairAddress>,
    connection: Connection,
    /// Number of times that it was connected; part of identifiers, so that completions from before
    /// are known.
    generation: u32,
    /// Sends of this generation, and how many of them are complete.
    sent: u64,
    completed: u64,
    /// Completions that were taken and not looked at yet.
    taken: [ibv::ibv_wc; COMPLETIONS],
    taken_count: usize,
    /// Copy of a packet in the ring.
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
        Ok(Self {
            resources: Arc::new(resources),
            peer: None,
            connection: Connection::Unknown,
            generation: 0,
            sent: 0,
            completed: 0,
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
    pub fn set_peer(&mut self, peer: QueuePairAddress) {
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
        match std::mem::replace(&mut self.connection, Connection::Unknown) {
            Connection::Connecting(thread) if thread.is_finished() => match thread.join() {
                Ok(Ok(())) => self.connection = Connection::Up,
                Ok(Err(_)) | Err(_) => self.failed(),
            },
            Connection::Down { at } if at <= Instant::now() => self.start_connecting(),
            unchanged => self.connection = unchanged,
        }
        matches!(self.connection, Connection::Up)
    }

    fn start_connecting(&mut self) {
        let Some(peer) = self.peer else { return };
        self.generation = self.generation.wrapping_add(1) & (u32::MAX >> 1);
        (self.sent, self.completed, self.taken_count) = (0, 0, 0);
        let resources = Arc::clone(&self.resources);
        let generation = self.generation;
        let connect = move || {
            let slots = (0..RECEIVE_SLOTS).map(|slot| (id_of(generation, slot), slot));
            resources.connect(&peer, || resources.post_receives(slots))
        };
        // The look-up of the peer's link-layer address may take a second, in which the session's
        // other paths go on.
        match Builder::new().name("sealane-verbs".into()).spawn(connect) {
            Ok(thread) => self.connection = Connection::Connecting(thread),
            Err(_) => self.failed(),
        }
    }

    /// Takes it down until it is connected again.
    fn failed(&mut self) {
        self.failures += 1;
        self.taken_count = 0;
        self.connection = Connection::Down { at: Instant::now() + RETRY };
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
                continue;
            }
            free.push((completion.wr_id, slot));
            let Some((place, length)) = self.place_of(&completion, slot) else { continue };
            if self.local().rkey.is_some() {
                self.snapshot.resize(length, 0);
                // SAFETY: the length is within the slot. Others may write to it meanwhile: the copy
                // is then a mixture, which does not open.
                unsafe { self.snapshot.as_mut_ptr().copy_from(self.resources.slot(place), length) };
                each(&mut self.snapshot);
            } else {
                // SAFETY: the slot is ours between its completion and its next posting, and nobody
                // may write to it; the length is within it.
                each(unsafe { std::slice::from_raw_parts_mut(self.resources.slot(place), length) });
            }
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

    /// Slot and length of what has arrived; none if it is nothing that a peer sends. Immediate data
    /// and lengths are anybody's.
    fn place_of(&self, completion: &ibv::ibv_wc, slot: usize) -> Option<(usize, usize)> {
        let (place, opcode) = if self.local().rkey.is_some() {
            // SAFETY: immediate data are numbers, whatever the completion.
            let immediate = u32::from_be(unsafe { completion.__bindgen_anon_1.imm_data });
            (slot_of_immediate(immediate), ibv::IBV_WC_RECV_RDMA_WITH_IMM)
        } else {
            (slot, ibv::IBV_WC_RECV)
        };
        let length = completion.byte_len as usize;
        let is_whole = (1..=usize::from(self.local().mtu_bytes)).contains(&length);
        (completion.opcode == opcode && place < RECEIVE_SLOTS && is_whole)
            .then_some((place, length))
    }

    /// Whether a batch of [`SEGMENTS_MAX`] datagrams would be accepted or lost at once.
    pub fn has_room(&mut self) -> bool {
        !self.tend() || (SEND_SLOTS as u64) - (self.sent - self.completed) >= SEGMENTS_MAX as u64
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
            return Ok(false);
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

    /// Readable when something has arrived or there is room again, after [`Self::fall_asleep`].
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.resources.event()
    }

    /// Makes [`Self::event`] report the next completion; false if there is one already.
    pub fn fall_asleep(&mut self) -> bool {
        if !matches!(self.connection, Connection::Up) {
            return true;
        }
        self.resources.arm();
        self.take();
        self.taken_count == 0
    }

    /// Takes the event that has woken the thread.
    pub fn woken(&self) {
        self.resources.clear_events();
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
    fn immediate_data_name_the_slot_whatever_the_generation() {
        for slot in [0, 1, 511, 0x3_ffff] {
            for generation in [0, 1, 0x3ff, 0x7fff_ffff] {
                assert_eq!(slot_of_immediate(immediate_of(generation, slot)), slot as usize);
            }
        }
        assert_eq!(immediate_of(1, 2), 0b01_0000_0000_0000_0000_0010_0000 | 1 << 22);
    }
}
