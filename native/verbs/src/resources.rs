//! What one queue pair has at libibverbs: device, memory, completion queue, and the pair itself.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int};
use std::io;
use std::mem::zeroed;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use memmap2::{Advice, MmapMut, MmapRaw};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::MTU_BYTES_MIN;
use crate::address::QueuePairAddress;
use crate::bindings::{self as ibv, Verbs};
use crate::devices::{Device, device_of, gid_of};
use crate::library::library;

/// Slots for what is received: 2 MiB at an MTU of 4096 bytes, 0.8 ms at 20 Gbit/s. Peers that write
/// use as many.
pub(crate) const RECEIVE_SLOTS: usize = 512;
/// Slots of packets on their way out.
pub(crate) const SEND_SLOTS: usize = 128;
/// Most completions at a time: one for each slot. A queue that runs over can't be used any more.
const ENTRIES: c_int = 640;
const _: () = assert!(ENTRIES as usize == RECEIVE_SLOTS + SEND_SLOTS);
/// Hops that a packet may take; what Linux and the devices use by default.
const HOP_LIMIT: u8 = 64;

/// Why a queue pair can't be had.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// libibverbs could not be loaded.
    #[error("libibverbs is not there ({0}); Debian's package libibverbs1 installs it")]
    Library(&'static str),
    /// No device has the address.
    #[error("no RDMA device has the address {0} for RoCE v2")]
    Device(IpAddr),
    /// The port is down.
    #[error("port {port} of {name} is not active", name = .0.name, port = .0.port)]
    Inactive(Device),
    /// The MTU is too small for a packet of a session.
    #[error(
        "{name} has an MTU of {mtu} bytes, but {MTU_BYTES_MIN} are needed: give its network \
         interface an MTU of 4200 bytes",
        name = .device.name
    )]
    Mtu {
        /// The device.
        device: Device,
        /// Its active MTU.
        mtu: u16,
    },
    /// A call of libibverbs failed.
    #[error("{call} of {name} failed: {error}", name = .device.name)]
    System {
        /// The device.
        device: Device,
        /// The function.
        call: &'static str,
        /// Its error.
        error: io::Error,
    },
}

/// How peers bring their packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By SEND, into the slot that is next.
    Send,
    /// By WRITE with immediate data, into the slot that they choose (SDR-RDMA, section 3).
    Write,
}

/// A place in a peer's ring.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) offset: u64,
    pub(crate) rkey: u32,
    pub(crate) immediate: u32,
}

/// An object of libibverbs, and the function that destroys it.
struct Owned<T> {
    raw: *mut T,
    destroy: unsafe extern "C" fn(*mut T) -> c_int,
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: the object was made with the function's counterpart and is not used again. An
        // error would mean that something still uses it, which `Resources` rules out by its order.
        let result = unsafe { (self.destroy)(self.raw) };
        debug_assert_eq!(result, 0, "an object of libibverbs is still in use");
    }
}

/// An open device, which all queue pairs of the process share.
struct Context(Owned<ibv::ibv_context>);

// SAFETY: libibverbs may be called from any thread (ibv_* are thread-safe).
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The open devices by name.
static CONTEXTS: Mutex<BTreeMap<String, Weak<Context>>> = Mutex::new(BTreeMap::new());

/// Everything of one queue pair, in the order of destruction.
pub(crate) struct Resources {
    pair: Owned<ibv::ibv_qp>,
    completions: Owned<ibv::ibv_cq>,
    channel: Owned<ibv::ibv_comp_channel>,
    region: Owned<ibv::ibv_mr>,
    /// The receive slots, for peers that write to them.
    ring: Option<Owned<ibv::ibv_mr>>,
    _domain: Owned<ibv::ibv_pd>,
    context: Arc<Context>,
    /// Receive slots, then send slots.
    memory: MmapRaw,
    verbs: &'static Verbs,
    device: Device,
    local: QueuePairAddress,
}

// SAFETY: libibverbs may be called from any thread (ibv_* are thread-safe), and the memory's slots
// are accessed only through `QueuePair`, which has one owner.
unsafe impl Send for Resources {}
// SAFETY: as above.
unsafe impl Sync for Resources {}

impl Resources {
    /// Opens the device that has an address, and makes a queue pair there.
    pub(crate) fn new(ip: IpAddr, mode: Mode, first_psn: u32) -> Result<Self, Unavailable> {
        let verbs = library().map_err(Unavailable::Library)?;
        let device = device_of(ip).ok_or(Unavailable::Device(ip))?;
        let made = Maker { verbs, device: &device };
        let (context, mtu_bytes) = made.context()?;
        let slot_bytes = usize::from(mtu_bytes);
        let memory = MmapMut::map_anon((RECEIVE_SLOTS + SEND_SLOTS) * slot_bytes)
            .map(MmapRaw::from)
            .and_then(|map| map.advise(Advice::DontFork).map(|()| map))
            .map_err(|error| made.error("mmap", error))?;
        // SAFETY: the context is alive; a null result is refused.
        let domain = unsafe { (verbs.ibv_alloc_pd)(context.0.raw) };
        let domain = made.owned("ibv_alloc_pd", domain, verbs.ibv_dealloc_pd)?;
        let access = ibv::IBV_ACCESS_LOCAL_WRITE.cast_signed();
        // SAFETY: the domain is alive; the region has exactly the length of the mapping, which outlives
        // it.
        let region = unsafe {
            (verbs.ibv_reg_mr)(domain.raw, memory.as_mut_ptr().cast(), memory.len(), access)
        };
        let region = made.owned("ibv_reg_mr", region, verbs.ibv_dereg_mr)?;
        let ring = match mode {
            Mode::Send => None,
            Mode::Write => {
                let access = access | ibv::IBV_ACCESS_REMOTE_WRITE.cast_signed();
                let length = RECEIVE_SLOTS * slot_bytes;
                // SAFETY: as above. Peers address it from 0, so that they don't learn where it is.
                let ring = unsafe {
                    let at = memory.as_mut_ptr().cast();
                    (verbs.ibv_reg_mr_iova)(domain.raw, at, length, 0, access)
                };
                Some(made.owned("ibv_reg_mr_iova", ring, verbs.ibv_dereg_mr)?)
            }
        };
        // SAFETY: the context is alive.
        let channel = unsafe { (verbs.ibv_create_comp_channel)(context.0.raw) };
        let channel =
            made.owned("ibv_create_comp_channel", channel, verbs.ibv_destroy_comp_channel)?;
        // SAFETY: context and channel are alive.
        let completions =
            unsafe { (verbs.ibv_create_cq)(context.0.raw, ENTRIES, null_mut(), channel.raw, 0) };
        let completions = made.owned("ibv_create_cq", completions, verbs.ibv_destroy_cq)?;
        // SAFETY: zeros are valid: numbers and null pointers.
        let mut wanted: ibv::ibv_qp_init_attr = unsafe { zeroed() };
        wanted.send_cq = completions.raw;
        wanted.recv_cq = completions.raw;
        wanted.qp_type = ibv::IBV_QPT_UC;
        wanted.cap.max_send_wr = SEND_SLOTS as u32;
        wanted.cap.max_recv_wr = RECEIVE_SLOTS as u32;
        wanted.cap.max_send_sge = 1;
        wanted.cap.max_recv_sge = 1;
        // SAFETY: the domain and the queues are alive; the request is read and written in the call.
        let pair = unsafe { (verbs.ibv_create_qp)(domain.raw, &raw mut wanted) };
        let pair = made.owned("ibv_create_qp", pair, verbs.ibv_destroy_qp)?;
        // SAFETY: the pair is alive, and its number does not change.
        let number = unsafe { (*pair.raw).qp_num };
        // SAFETY: the region is alive, and its key does not change.
        let rkey = ring.as_ref().map(|ring| unsafe { (*ring.raw).rkey });
        let local = QueuePairAddress { ip, number, first_psn, mtu_bytes, rkey };
        let made = Self {
            pair,
            completions,
            channel,
            region,
            ring,
            _domain: domain,
            context,
            memory,
            verbs,
            device,
            local,
        };
        let flags = fcntl_getfl(made.event()).map(|flags| flags | OFlags::NONBLOCK);
        flags
            .and_then(|flags| fcntl_setfl(made.event(), flags))
            .map_err(|error| made.error("fcntl", error.into()))?;
        Ok(made)
    }

    pub(crate) fn local(&self) -> &QueuePairAddress {
        &self.local
    }

    /// Bytes that are pinned for it.
    pub(crate) fn pinned_bytes(&self) -> usize {
        self.memory.len()
    }

    /// Readable once something has completed after [`Self::arm`].
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's descriptor stays open as long as the channel, which `self` owns.
        unsafe { BorrowedFd::borrow_raw((*self.channel.raw).fd) }
    }

    /// Takes the events that have come.
    pub(crate) fn clear_events(&self) {
        let (mut queue, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel and its only completion queue are alive; the descriptor does not
        // block. Each event is acknowledged, so that the queue can be destroyed.
        unsafe {
            while (self.verbs.ibv_get_cq_event)(self.channel.raw, &raw mut queue, &raw mut context)
                == 0
            {
                (self.verbs.ibv_ack_cq_events)(queue, 1);
            }
        }
    }

    /// Asks for an event at the next completion.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // SAFETY: the completion queue is alive.
        of_result(unsafe {
            let notify =
                (*self.context.0.raw).ops.req_notify_cq.ok_or(io::ErrorKind::Unsupported)?;
            notify(self.completions.raw, 0)
        })
    }

    /// Takes completions; returns how many, at most as many as fit.
    pub(crate) fn poll(&self, into: &mut [ibv::ibv_wc]) -> io::Result<usize> {
        // SAFETY: the completion queue is alive, and at most `into.len()` entries are written.
        let found = unsafe {
            let poll = (*self.context.0.raw).ops.poll_cq.ok_or(io::ErrorKind::Unsupported)?;
            let most = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
            poll(self.completions.raw, most, into.as_mut_ptr())
        };
        usize::try_from(found).map_err(|_| io::ErrorKind::Other.into())
    }

    /// The first byte of a slot; receive slots come first.
    pub(crate) fn slot(&self, index: usize) -> *mut u8 {
        assert!(index < RECEIVE_SLOTS + SEND_SLOTS, "there is no such slot");
        self.memory.as_mut_ptr().wrapping_add(index * usize::from(self.local.mtu_bytes))
    }

    fn piece(&self, index: usize, length: usize) -> ibv::ibv_sge {
        // SAFETY: the region is alive, and its key does not change.
        let lkey = unsafe { (*self.region.raw).lkey };
        ibv::ibv_sge { addr: self.slot(index) as u64, length: length as u32, lkey }
    }

    /// Lets the device receive: into these slots, or, for peers that write, as many messages.
    pub(crate) fn post_receives(&self, ids: impl Iterator<Item = (u64, usize)>) -> io::Result<()> {
        let (ids, mut pieces): (Vec<_>, Vec<_>) = ids
            .map(|(id, index)| (id, self.piece(index, usize::from(self.local.mtu_bytes))))
            .unzip();
        let mut requests: Vec<_> = ids
            .iter()
            .zip(&mut pieces)
            .map(|(id, piece)| ibv::ibv_recv_wr {
                wr_id: *id,
                next: null_mut(),
                sg_list: piece,
                num_sge: c_int::from(self.ring.is_none()),
            })
            .collect();
        let first = chain(&mut requests, |request| &mut request.next);
        if first.is_null() {
            return Ok(());
        }
        let mut bad = null_mut();
        // SAFETY: the pair is alive; the list and its pieces live until the call returns, and each
        // piece is a slot of the registered memory.
        let result = unsafe {
            let post = (*self.context.0.raw).ops.post_recv.ok_or(io::ErrorKind::Unsupported)?;
            post(self.pair.raw, first, &raw mut bad)
        };
        of_result(result)
    }

    /// Sends what these slots hold: (identifier, slot, length, whether to report completion), to a
    /// place in the peer's ring if it has one.
    pub(crate) fn post_sends(
        &self,
        sends: impl Iterator<Item = (u64, usize, usize, bool, Option<Place>)>,
    ) -> io::Result<()> {
        let (heads, mut pieces): (Vec<_>, Vec<_>) = sends
            .map(|(id, index, length, signals, place)| {
                ((id, signals, place), self.piece(index, length))
            })
            .unzip();
        let mut requests: Vec<_> = heads
            .iter()
            .zip(&mut pieces)
            .map(|((id, signals, place), piece)| {
                // SAFETY: zeros are valid: numbers and null pointers.
                let mut request: ibv::ibv_send_wr = unsafe { zeroed() };
                request.wr_id = *id;
                request.sg_list = piece;
                request.num_sge = 1;
                request.opcode = ibv::IBV_WR_SEND;
                if let Some(place) = place {
                    request.opcode = ibv::IBV_WR_RDMA_WRITE_WITH_IMM;
                    request.wr.rdma.remote_addr = place.offset;
                    request.wr.rdma.rkey = place.rkey;
                    request.__bindgen_anon_1.imm_data = place.immediate.to_be();
                }
                request.send_flags = if *signals { ibv::IBV_SEND_SIGNALED } else { 0 };
                request
            })
            .collect();
        let first = chain(&mut requests, |request| &mut request.next);
        if first.is_null() {
            return Ok(());
        }
        let mut bad = null_mut();
        // SAFETY: as in `post_receives`.
        let result = unsafe {
            let post = (*self.context.0.raw).ops.post_send.ok_or(io::ErrorKind::Unsupported)?;
            post(self.pair.raw, first, &raw mut bad)
        };
        of_result(result)
    }

    /// Brings the pair from any state to one in which it sends to and receives from `peer`; blocks
    /// while the peer's link-layer address is looked up. `fill` posts the receives.
    pub(crate) fn connect(
        &self,
        peer: &QueuePairAddress,
        fill: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        // Its place in the table changes when the address is removed and added again.
        let found = device_of(self.local.ip).filter(|found| found.name == self.device.name);
        let device = found.ok_or(io::ErrorKind::AddrNotAvailable)?;
        // SAFETY: zeros are valid: numbers.
        let mut wanted: ibv::ibv_qp_attr = unsafe { zeroed() };
        wanted.qp_state = ibv::IBV_QPS_RESET;
        self.modify(&mut wanted, ibv::IBV_QP_STATE)?;
        wanted.qp_state = ibv::IBV_QPS_INIT;
        wanted.port_num = device.port;
        // Nothing is reached from the network but by posted receives, and the ring if there is one.
        let is_written = self.ring.is_some();
        wanted.qp_access_flags = if is_written { ibv::IBV_ACCESS_REMOTE_WRITE } else { 0 };
        let mask = ibv::IBV_QP_STATE | ibv::IBV_QP_PKEY_INDEX | ibv::IBV_QP_PORT;
        self.modify(&mut wanted, mask | ibv::IBV_QP_ACCESS_FLAGS)?;
        // What earlier connections have left, which a reset leaves in the queue: beside it there might
        // be no room for all that is to come. Nobody else takes completions now.
        // SAFETY: zeros are valid: numbers.
        let mut left: [ibv::ibv_wc; 32] = unsafe { zeroed() };
        while self.poll(&mut left)? > 0 {}
        fill()?;
        wanted.qp_state = ibv::IBV_QPS_RTR;
        wanted.path_mtu = mtu_code(self.local.mtu_bytes.min(peer.mtu_bytes));
        wanted.dest_qp_num = peer.number;
        wanted.rq_psn = peer.first_psn;
        wanted.ah_attr.is_global = 1;
        wanted.ah_attr.port_num = device.port;
        wanted.ah_attr.grh.dgid = ibv::ibv_gid { raw: gid_of(peer.ip).octets() };
        wanted.ah_attr.grh.sgid_index = device.gid_index;
        wanted.ah_attr.grh.hop_limit = HOP_LIMIT;
        let mask = ibv::IBV_QP_STATE | ibv::IBV_QP_AV | ibv::IBV_QP_PATH_MTU;
        self.modify(&mut wanted, mask | ibv::IBV_QP_DEST_QPN | ibv::IBV_QP_RQ_PSN)?;
        wanted.qp_state = ibv::IBV_QPS_RTS;
        wanted.sq_psn = self.local.first_psn;
        self.modify(&mut wanted, ibv::IBV_QP_STATE | ibv::IBV_QP_SQ_PSN)
    }

    /// Puts the pair into the error state, as a device does that has met an error.
    pub(crate) fn fail(&self) -> io::Result<()> {
        // SAFETY: zeros are valid: numbers.
        let mut wanted: ibv::ibv_qp_attr = unsafe { zeroed() };
        wanted.qp_state = ibv::IBV_QPS_ERR;
        self.modify(&mut wanted, ibv::IBV_QP_STATE)
    }

    fn modify(&self, wanted: &mut ibv::ibv_qp_attr, mask: u32) -> io::Result<()> {
        // SAFETY: the pair is alive; the attributes are read until the call returns.
        of_result(unsafe { (self.verbs.ibv_modify_qp)(self.pair.raw, wanted, mask.cast_signed()) })
    }

    pub(crate) fn error(&self, call: &'static str, error: io::Error) -> Unavailable {
        Maker { verbs: self.verbs, device: &self.device }.error(call, error)
    }
}

/// Links work requests to a list; returns the first, null if there is none.
fn chain<T>(requests: &mut [T], next_of: impl Fn(&mut T) -> &mut *mut T) -> *mut T {
    let mut next = null_mut();
    for request in requests.iter_mut().rev() {
        *next_of(request) = next;
        next = request;
    }
    next
}

/// Most calls of libibverbs return an errno.
fn of_result(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result.abs())) }
}

/// An MTU of 256 to 4096 bytes as InfiniBand numbers it: 1 to 5.
fn mtu_code(bytes: u16) -> ibv::ibv_mtu {
    (bytes / 256).ilog2() + ibv::IBV_MTU_256
}

/// Makes objects of one device.
struct Maker<'a> {
    verbs: &'static Verbs,
    device: &'a Device,
}

impl Maker<'_> {
    fn error(&self, call: &'static str, error: io::Error) -> Unavailable {
        Unavailable::System { device: self.device.clone(), call, error }
    }

    fn owned<T>(
        &self,
        call: &'static str,
        raw: *mut T,
        destroy: unsafe extern "C" fn(*mut T) -> c_int,
    ) -> Result<Owned<T>, Unavailable> {
        if raw.is_null() {
            return Err(self.error(call, io::Error::last_os_error()));
        }
        Ok(Owned { raw, destroy })
    }

    /// The device, opened unless it is, and its MTU. One that was removed and came back, while queue
    /// pairs still have it open, is opened again.
    fn context(&self) -> Result<(Arc<Context>, u16), Unavailable> {
        let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        let open = contexts.get(&self.device.name).and_then(Weak::upgrade);
        if let Some(open) = open
            && let Ok(mtu) = self.mtu_bytes(&open)
        {
            return Ok((open, mtu));
        }
        let opened = Arc::new(Context(self.open()?));
        let mtu = self.mtu_bytes(&opened)?;
        contexts.retain(|_, context| context.strong_count() > 0);
        contexts.insert(self.device.name.clone(), Arc::downgrade(&opened));
        Ok((opened, mtu))
    }

    fn open(&self) -> Result<Owned<ibv::ibv_context>, Unavailable> {
        let Self { verbs, device } = self;
        let mut count = 0;
        // SAFETY: the list has `count` devices and lives until it is freed; names are C strings
        // that live as long as their device. An opened device outlives the list.
        let raw = unsafe {
            let list = (verbs.ibv_get_device_list)(&raw mut count);
            if list.is_null() {
                return Err(self.error("ibv_get_device_list", io::Error::last_os_error()));
            }
            let devices = (0..usize::try_from(count).unwrap_or(0)).map(|index| *list.add(index));
            let is_it = |each: &*mut ibv::ibv_device| {
                CStr::from_ptr((verbs.ibv_get_device_name)(*each)).to_bytes()
                    == device.name.as_bytes()
            };
            let found = devices.into_iter().find(is_it);
            let opened = found.map(|found| (verbs.ibv_open_device)(found));
            (verbs.ibv_free_device_list)(list);
            opened
        };
        let Some(raw) = raw else {
            // The kernel has it, but libibverbs has no driver for it.
            return Err(self.error("ibv_get_device_list", io::ErrorKind::NotFound.into()));
        };
        self.owned("ibv_open_device", raw, verbs.ibv_close_device)
    }

    fn mtu_bytes(&self, context: &Context) -> Result<u16, Unavailable> {
        // SAFETY: zeros are valid: numbers. The context is alive, and the call fills this struct.
        let (result, port) = unsafe {
            let mut port: ibv::ibv_port_attr = zeroed();
            (
                (self.verbs.ibv_query_port)(
                    context.0.raw,
                    self.device.port,
                    (&raw mut port).cast(),
                ),
                port,
            )
        };
        of_result(result).map_err(|error| self.error("ibv_query_port", error))?;
        if port.state != ibv::IBV_PORT_ACTIVE {
            return Err(Unavailable::Inactive(self.device.clone()));
        }
        match 128_u16.checked_shl(port.active_mtu).unwrap_or(0) {
            mtu @ MTU_BYTES_MIN..=4096 => Ok(mtu),
            mtu => Err(Unavailable::Mtu { device: self.device.clone(), mtu }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtus_are_numbered_as_infiniband_does() {
        let codes = [256, 512, 1024, 2048, 4096].map(mtu_code);
        assert_eq!(codes, [1, 2, 3, 4, 5]);
    }

    #[test]
    fn an_address_without_a_device_is_refused_by_name() {
        let made = Resources::new("192.0.2.1".parse().unwrap(), Mode::Send, 0);
        let error = made.err().expect("no device has this address");
        assert!(matches!(error, Unavailable::Device(_) | Unavailable::Library(_)), "{error}");
    }
}
