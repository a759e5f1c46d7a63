//! Datagrams on their way to the kernel: consecutive ones of equal size leave in one call.

use std::io;
use std::net::SocketAddr;

use quinn_udp::EcnCodepoint;
use sealane_proto::session::Ecn;

use crate::udp::Udp;

/// Most bytes of one send call: what an IPv4 packet of 65,535 bytes holds besides its headers, the
/// kernel's limit for a segmentation list. A call costs as much as sealing 25 packets.
const BATCH_BYTES_MAX: usize = 65_507;

/// Results of sending.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SendCounters {
    /// Calls accepted by the kernel.
    pub(super) calls: u64,
    /// Calls refused by the kernel.
    pub(super) errors: u64,
    /// Datagrams of the refused calls, which are lost for the session machine.
    pub(super) dropped: u64,
}

impl SendCounters {
    /// Counts a call with this many datagrams.
    fn count(&mut self, is_accepted: bool, datagrams: u64) {
        self.calls += u64::from(is_accepted);
        self.errors += u64::from(!is_accepted);
        self.dropped += if is_accepted { 0 } else { datagrams };
    }
}

impl std::iter::Sum for SendCounters {
    fn sum<I: Iterator<Item = Self>>(counters: I) -> Self {
        counters.fold(Self::default(), |sum, each| Self {
            calls: sum.calls + each.calls,
            errors: sum.errors + each.errors,
            dropped: sum.dropped + each.dropped,
        })
    }
}

/// A batch being gathered: datagrams of one size, of which only the last may be shorter.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    bytes: Vec<u8>,
    segment_bytes: usize,
    segments: usize,
    ecn: Ecn,
    is_closed: bool,
    is_blocked: bool,
    /// A datagram that did not fit the batch while the kernel did not accept it.
    held: Vec<u8>,
    held_ecn: Ecn,
    counters: SendCounters,
}

impl Outbound {
    /// Whether the kernel's buffer was full at the last attempt.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Results so far.
    pub(super) fn counters(&self) -> SendCounters {
        self.counters
    }

    /// The batch, to which a datagram may be appended; [`Self::add`] then adds it.
    pub(super) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Adds the datagram that was appended to the batch at `start`. First sends the batch if the
    /// datagram cannot join it. Must not be called while blocked.
    pub(super) fn add(&mut self, udp: &Udp, to: SocketAddr, start: usize, ecn: Ecn) {
        let length = self.bytes.len() - start;
        let joins = !self.is_closed
            && ecn == self.ecn
            && length <= self.segment_bytes
            && self.segments < udp.segments_max()
            && self.bytes.len() <= BATCH_BYTES_MAX;
        if self.segments > 0 && !joins {
            self.held.extend_from_slice(&self.bytes[start..]);
            self.held_ecn = ecn;
            self.bytes.truncate(start);
            self.flush(udp, to);
        } else {
            self.take(length, ecn);
        }
    }

    /// Sends the batch. If the kernel's buffer is full, keeps it and becomes blocked.
    pub(super) fn flush(&mut self, udp: &Udp, to: SocketAddr) {
        if self.segments == 0 {
            return;
        }
        let sent = udp.send(to, &self.bytes, self.segment_bytes, codepoint(self.ecn));
        self.is_blocked = matches!(&sent, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        if self.is_blocked {
            return;
        }
        self.counters.count(sent.is_ok(), self.segments as u64);
        self.bytes.clear();
        self.segments = 0;
        if !self.held.is_empty() {
            std::mem::swap(&mut self.bytes, &mut self.held);
            self.take(self.bytes.len(), self.held_ecn);
        }
    }

    /// Sends one datagram at once, to another address than the batch. If the kernel's buffer is
    /// full, it is lost.
    pub(super) fn send_apart(&mut self, udp: &Udp, to: SocketAddr, datagram: &[u8], ecn: Ecn) {
        let sent = udp.send(to, datagram, datagram.len(), codepoint(ecn));
        self.counters.count(sent.is_ok(), 1);
    }

    /// Adds the datagram at the end of the buffer to the batch.
    fn take(&mut self, length: usize, ecn: Ecn) {
        if self.segments == 0 {
            self.segment_bytes = length;
            self.ecn = ecn;
        }
        self.is_closed = length < self.segment_bytes;
        self.segments += 1;
    }
}

fn codepoint(ecn: Ecn) -> Option<EcnCodepoint> {
    match ecn {
        Ecn::NotEct => None,
        Ecn::Ect1 => Some(EcnCodepoint::Ect1),
        Ecn::Ect0 => Some(EcnCodepoint::Ect0),
        Ecn::Ce => Some(EcnCodepoint::Ce),
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use super::*;

    fn push(outbound: &mut Outbound, udp: &Udp, to: SocketAddr, datagram: &[u8], ecn: Ecn) {
        let start = outbound.buffer().len();
        outbound.buffer().extend_from_slice(datagram);
        outbound.add(udp, to, start, ecn);
    }

    #[test]
    fn datagrams_keep_their_boundaries_and_order_in_any_mixture() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let to = receiver.local_addr().unwrap();
        let udp = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut outbound = Outbound::default();
        let lengths = [100, 100, 40, 100, 1400, 1400, 1400, 7, 7, 8, 1, 1200];
        for (index, length) in lengths.iter().enumerate() {
            push(&mut outbound, &udp, to, &vec![index as u8; *length], Ecn::Ect0);
        }
        outbound.flush(&udp, to);
        assert_eq!(outbound.counters(), SendCounters { calls: 6, errors: 0, dropped: 0 });
        let mut bytes = [0; 2000];
        for (index, length) in lengths.iter().enumerate() {
            let received = receiver.recv(&mut bytes).unwrap();
            assert_eq!(received, *length);
            assert!(bytes[..received].iter().all(|byte| *byte == index as u8));
        }
    }

    #[test]
    fn a_batch_takes_as_many_datagrams_as_the_kernel_does() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = receiver.local_addr().unwrap();
        let udp = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        for (bytes, full) in [(1472, 44), (8972, 7)] {
            let mut outbound = Outbound::default();
            for _ in 0..=full {
                push(&mut outbound, &udp, to, &vec![7; bytes], Ecn::Ect0);
            }
            assert_eq!(outbound.counters(), SendCounters { calls: 1, errors: 0, dropped: 0 });
            assert_eq!(outbound.segments, 1, "{full} of {bytes} bytes left in one call");
        }
    }

    #[test]
    fn what_the_kernel_refuses_is_counted_and_does_not_hold_up_the_rest() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let to = receiver.local_addr().unwrap();
        let udp = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut outbound = Outbound::default();
        // No one can listen on port 0.
        let nowhere = SocketAddr::new(to.ip(), 0);
        for byte in 0..3 {
            push(&mut outbound, &udp, nowhere, &[byte; 100], Ecn::NotEct);
        }
        outbound.flush(&udp, nowhere);
        assert_eq!(outbound.counters(), SendCounters { calls: 0, errors: 1, dropped: 3 });
        push(&mut outbound, &udp, to, &[7; 100], Ecn::NotEct);
        outbound.flush(&udp, to);
        let mut bytes = [0; 200];
        assert_eq!(receiver.recv(&mut bytes).unwrap(), 100);
        assert_eq!(bytes[..100], [7; 100]);
    }
}
