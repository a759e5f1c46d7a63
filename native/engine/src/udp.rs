//! A UDP socket with segmentation offload in both directions (UDP_SEGMENT, UDP_GRO) and large
//! buffers.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use quinn_udp::{EcnCodepoint, RecvMeta, Transmit, UdpSockRef, UdpSocketState};

/// Bytes of the IPv4 and UDP headers of each payload.
pub const HEADER_BYTES: u32 = 28;

/// Requested socket buffer size: 4 MiB is 25 ms at 1.3 Gbit/s. The kernel grants no more than
/// `net.core.rmem_max` and `wmem_max`.
pub const SOCKET_BUFFER_BYTES: usize = 4 << 20;
/// The kernel's limit for one GRO list.
pub const RECEIVE_BUFFER_BYTES: usize = 65_536;
/// Buffers of one receive call; each can hold a whole GRO list. Two stay in a core's cache while
/// they are filled, opened and copied; with eight a receiver needs a tenth more time.
pub const RECEIVE_BATCH: usize = 2;

/// Result of a receive call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Datagrams handed over.
    pub datagrams: usize,
    /// Bytes of them.
    pub bytes: usize,
    /// Nothing more had arrived; another call would find nothing.
    pub is_all: bool,
}

/// Most words that SO_MEMINFO returns (SK_MEMINFO_VARS of <linux/sock_diag.h>).
const MEMINFO_WORDS: usize = 9;

/// A bound socket and its receive buffers.
pub struct Udp {
    socket: UdpSocket,
    state: UdpSocketState,
    buffers: [Vec<u8>; RECEIVE_BATCH],
    received: [RecvMeta; RECEIVE_BATCH],
    calls: u64,
}

impl Udp {
    /// Binds to an address; port 0 selects a free port.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind(address)?;
        let reference = socket2::SockRef::from(&socket);
        reference.set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
        reference.set_send_buffer_size(SOCKET_BUFFER_BYTES)?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        refuse_time_stamps(&socket)?;
        Ok(Self {
            socket,
            state,
            buffers: Default::default(),
            received: [RecvMeta::default(); RECEIVE_BATCH],
            calls: 0,
        })
    }

    /// The address it is bound to.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Most datagrams in one send.
    pub fn segments_max(&self) -> usize {
        self.state.max_gso_segments().max(1)
    }

    /// Number of receive calls that returned data.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Datagrams that the kernel dropped so far because this socket's buffer was full.
    pub fn drops(&self) -> u64 {
        let mut found = [0_u32; MEMINFO_WORDS];
        let mut length = size_of_val(&found) as libc::socklen_t;
        // SAFETY: the descriptor is open; the kernel writes at most `length` bytes to the array,
        // which lives on this stack.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MEMINFO,
                found.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        // A kernel without this option (before 4.12) leaves zeros.
        if result == 0 { found[libc::SK_MEMINFO_DROPS as usize].into() } else { 0 }
    }

    /// Receives once, without blocking, and passes each datagram separately with its metadata:
    /// source and ECN field.
    pub fn receive(&mut self, mut each: impl FnMut(&mut [u8], &RecvMeta)) -> io::Result<Received> {
        let mut buffers = std::mem::take(&mut self.buffers);
        for buffer in &mut buffers {
            buffer.resize(RECEIVE_BUFFER_BYTES, 0);
        }
        let lists = self.fill(&mut buffers);
        let (mut datagrams, mut bytes) = (0, 0);
        for (buffer, meta) in
            buffers.iter_mut().zip(&self.received).take(*lists.as_ref().unwrap_or(&0))
        {
            let list = buffer.get_mut(..meta.len).unwrap_or_default();
            bytes += list.len();
            for datagram in list.chunks_mut(meta.stride.max(1)) {
                each(datagram, meta);
                datagrams += 1;
            }
        }
        self.buffers = buffers;
        Ok(Received { datagrams, bytes, is_all: lists? < RECEIVE_BATCH })
    }

    /// Receives lists of datagrams into these buffers of [`RECEIVE_BUFFER_BYTES`], without
    /// blocking; returns how many, described by [`Self::received`]. 0: nothing has arrived.
    pub fn fill(&mut self, buffers: &mut [Vec<u8>; RECEIVE_BATCH]) -> io::Result<usize> {
        let mut slices = buffers.each_mut().map(|buffer| IoSliceMut::new(buffer));
        let reference = UdpSockRef::from(&self.socket);
        match self.state.recv(reference, &mut slices, &mut self.received) {
            Ok(lists) => {
                self.calls += 1;
                Ok(lists)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Metadata of the lists received last.
    pub fn received(&self) -> &[RecvMeta; RECEIVE_BATCH] {
        &self.received
    }

    /// Sends datagrams of `segment_bytes` each (the last may be shorter) without blocking.
    pub fn send(
        &self,
        to: SocketAddr,
        contents: &[u8],
        segment_bytes: usize,
        ecn: Option<EcnCodepoint>,
    ) -> io::Result<()> {
        let transmit = Transmit {
            destination: to,
            ecn,
            contents,
            segment_size: (contents.len() > segment_bytes).then_some(segment_bytes),
            src_ip: None,
        };
        self.state.try_send(UdpSockRef::from(&self.socket), &transmit)
    }
}

impl AsFd for Udp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl std::fmt::Debug for Udp {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Udp").field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// Turns off the time stamps that `quinn-udp` enables: with one for each datagram of a list, its
/// buffer for control messages overflows and the ECN field is lost.
fn refuse_time_stamps(socket: &UdpSocket) -> io::Result<()> {
    let off: libc::c_int = 0;
    // SAFETY: the descriptor is open; the kernel reads an int that lives on this stack.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_TIMESTAMPNS,
            (&raw const off).cast(),
            size_of_val(&off) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_of_a_list_keep_their_mark() {
        let mut to = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let from = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = to.local_address().unwrap();
        from.send(address, &[7; 400], 100, Some(EcnCodepoint::Ect0)).unwrap();
        let mut marks = Vec::new();
        while marks.len() < 4 {
            to.receive(|_, meta| marks.push(meta.ecn)).unwrap();
        }
        assert_eq!(marks, [Some(EcnCodepoint::Ect0); 4]);
    }

    #[test]
    fn what_did_not_fit_the_buffer_is_counted_and_the_rest_is_received() {
        let mut udp = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = udp.local_address().unwrap();
        assert_eq!(udp.drops(), 0);
        let sent = 4 * SOCKET_BUFFER_BYTES / 60_000;
        for _ in 0..sent {
            sender.send_to(&vec![7; 60_000], to).unwrap();
        }
        let mut received = 0;
        loop {
            let found = udp.receive(|datagram, _| assert_eq!(datagram.len(), 60_000)).unwrap();
            received += found.datagrams;
            if found.is_all {
                break;
            }
        }
        assert!(udp.drops() > 0);
        assert_eq!(received as u64 + udp.drops(), sent as u64);
        assert!(udp.calls() >= received.div_ceil(RECEIVE_BATCH) as u64);
    }
}
