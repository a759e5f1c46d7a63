//! A packet socket on one interface: a receive ring filled by the kernel (packet(7), TPACKET_V2)
//! with a time stamp for each frame, and batched sending.
//!
//! With the kernel's time stamps a packet's delay counts from its *arrival*, even if the emulator
//! reads it late.

use std::ffi::c_int;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};
use sealane_proto::link::{NANOS_PER_SECOND, Nanos};

use super::BATCH;
use crate::clock::{now, wall_clock};

/// Length of an Ethernet header.
pub(super) const ETHERNET_BYTES: usize = 14;

/// Ring size: 16,384 frames of 1500 bytes or 2,048 of 9000, which bounds how late the emulator may
/// read them.
const RING_BYTES: usize = 32 << 20;
/// The ring consists of blocks of whole pages and whole frames.
const BLOCK_BYTES: usize = 1 << 20;
/// Bytes before a frame in its slot: header, address and alignment as laid out by `tpacket_rcv`,
/// rounded up.
const SLOT_HEADER_BYTES: usize = 128;

pub(super) struct PacketSocket {
    socket: OwnedFd,
    ring: MmapRaw,
    slot_bytes: usize,
    next_slot: usize,
}

impl PacketSocket {
    /// Opens an interface of this thread's network namespace. Needs CAP_NET_RAW.
    pub fn open(interface: &str, mtu: u16) -> io::Result<Self> {
        // Without a protocol, nothing is received until the ring exists.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
        let index = netdevice::name_to_index(&socket, interface)?;
        let slot_bytes =
            (usize::from(mtu) + ETHERNET_BYTES + SLOT_HEADER_BYTES).next_power_of_two();
        set_option(&socket, libc::PACKET_VERSION, &(libc::tpacket_versions::TPACKET_V2 as c_int))?;
        set_option(&socket, PACKET_IGNORE_OUTGOING, &1_i32)?;
        set_option(&socket, libc::PACKET_QDISC_BYPASS, &1_i32)?;
        let request = libc::tpacket_req {
            tp_block_size: BLOCK_BYTES as u32,
            tp_block_nr: (RING_BYTES / BLOCK_BYTES) as u32,
            tp_frame_size: slot_bytes as u32,
            tp_frame_nr: (RING_BYTES / slot_bytes) as u32,
        };
        set_option(&socket, libc::PACKET_RX_RING, &request)?;
        let ring = MmapOptions::new().len(RING_BYTES).map_raw(&socket)?;
        bind(&socket, index)?;
        Ok(Self { socket, ring, slot_bytes, next_slot: 0 })
    }

    /// Passes on up to `count_max` frames, each with its length on the wire (larger than the slice
    /// if the frame was truncated) and its arrival time.
    pub fn receive(&mut self, count_max: usize, mut each: impl FnMut(&[u8], usize, Nanos)) {
        let (time, wall) = (now(), wall_clock());
        for _ in 0..count_max {
            let offset = self.next_slot * self.slot_bytes;
            // SAFETY: `next_slot` is below the number of slots, so the slot lies inside the ring,
            // which stays mapped while `self` exists; slots are aligned for their header.
            let slot = unsafe { self.ring.as_mut_ptr().add(offset) };
            // SAFETY: the status is the first field; kernel and user space hand the slot over
            // through it.
            let status = unsafe { AtomicU32::from_ptr(slot.cast()) };
            if status.load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
                return;
            }
            // SAFETY: the slot is ours until we change the status; any bytes are a valid header.
            let header = unsafe { ptr::read_unaligned(slot.cast::<libc::tpacket2_hdr>()) };
            let (start, bytes) = (usize::from(header.tp_mac), header.tp_snaplen as usize);
            if start + bytes <= self.slot_bytes {
                // SAFETY: inside the slot, as just checked, and ours as above.
                let frame = unsafe { std::slice::from_raw_parts(slot.add(start), bytes) };
                let stamp = u64::from(header.tp_sec) * NANOS_PER_SECOND + u64::from(header.tp_nsec);
                let age = wall.saturating_sub(stamp);
                each(frame, header.tp_len as usize, time.saturating_sub(age));
            }
            status.store(libc::TP_STATUS_KERNEL, Ordering::Release);
            self.next_slot = (self.next_slot + 1) % (RING_BYTES / self.slot_bytes);
        }
    }

    /// Sends frames in order. Returns how many the kernel accepted.
    pub fn send(&self, frames: &[&[u8]]) -> usize {
        frames.chunks(BATCH).map(|frames| self.send_batch(frames)).sum()
    }

    fn send_batch(&self, frames: &[&[u8]]) -> usize {
        let mut vectors: Vec<libc::iovec> = frames
            .iter()
            .map(|frame| libc::iovec {
                iov_base: frame.as_ptr().cast_mut().cast(),
                iov_len: frame.len(),
            })
            .collect();
        let mut messages: Vec<libc::mmsghdr> = vectors
            .iter_mut()
            .map(|vector| {
                // SAFETY: all zeros are a valid message without address, data or control.
                let mut message: libc::mmsghdr = unsafe { zeroed() };
                message.msg_hdr.msg_iov = vector;
                message.msg_hdr.msg_iovlen = 1;
                message
            })
            .collect();
        let (mut done, mut sent) = (0, 0);
        while let Some(rest) = messages.get_mut(done..).filter(|rest| !rest.is_empty()) {
            // SAFETY: `rest` and the vectors it points to live until the call returns; the frames
            // are only read.
            let taken = unsafe {
                libc::sendmmsg(self.socket.as_raw_fd(), rest.as_mut_ptr(), rest.len() as u32, 0)
            };
            if let Ok(taken) = usize::try_from(taken) {
                done += taken;
                sent += taken;
            } else if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                // The first of them was refused and counts as unsent; try the others.
                done += 1;
            }
        }
        sent
    }

    /// Frames dropped because the ring was full, since the last call.
    pub fn take_missed(&mut self) -> u64 {
        // SAFETY: all zeros are valid statistics.
        let mut statistics: libc::tpacket_stats = unsafe { zeroed() };
        let mut length = size_of::<libc::tpacket_stats>() as libc::socklen_t;
        // SAFETY: the option is a `tpacket_stats`, and the kernel writes at most `length` bytes.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                ptr::from_mut(&mut statistics).cast(),
                &raw mut length,
            )
        };
        if result == 0 { u64::from(statistics.tp_drops) } else { 0 }
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// From <linux/if_packet.h>: don't receive packets sent by this machine.
const PACKET_IGNORE_OUTGOING: c_int = 23;

fn set_option<T>(socket: &OwnedFd, option: c_int, value: &T) -> io::Result<()> {
    // SAFETY: each option's value has the type that packet(7) gives it; it is only read.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            option,
            ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn bind(socket: &OwnedFd, interface_index: u32) -> io::Result<()> {
    // SAFETY: all zeros are a valid address.
    let mut address: libc::sockaddr_ll = unsafe { zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = interface_index.cast_signed();
    // SAFETY: the address is a `sockaddr_ll` of that length.
    let result = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            ptr::from_ref(&address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
