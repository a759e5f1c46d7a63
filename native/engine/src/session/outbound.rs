//! Datagrams on their way to the kernel: consecutive ones of equal size leave in one call.

use std::io;
use std::net::SocketAddr;

use quinn_udp::EcnCodepoint;
use sealane_proto::session::{Ecn, Train};

use super::link::Link;
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
    pub(super) fn count(&mut self, is_accepted: bool, datagrams: u64) {
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

/// Shape of a batch: datagrams of one size, of which only the last may be shorter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) segments: usize,
    pub(super) segment_bytes: usize,
    ecn: Ecn,
}

impl Batch {
    pub(super) fn of_one(length: usize, ecn: Ecn) -> Self {
        Self { segments: 1, segment_bytes: length, ecn }
    }

    /// Sends it; false if the kernel does not accept it at present.
    pub(super) fn send(
        self,
        udp: &Udp,
        (to, train): (SocketAddr, &Train),
        counters: &mut SendCounters,
    ) -> bool {
        let sent = udp.send(to, train.sealed(), self.segment_bytes, self.codepoint());
        if matches!(&sent, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
            return false;
        }
        counters.count(sent.is_ok(), self.segments as u64);
        true
    }

    /// The ECN field, as the socket takes it.
    fn codepoint(self) -> Option<EcnCodepoint> {
        match self.ecn {
            Ecn::NotEct => None,
            Ecn::Ect1 => Some(EcnCodepoint::Ect1),
            Ecn::Ect0 => Some(EcnCodepoint::Ect0),
            Ecn::Ce => Some(EcnCodepoint::Ce),
        }
    }
}

/// A batch being gathered.
#[derive(Debug)]
pub(super) struct Outbound {
    train: Train,
    batch: Batch,
    is_closed: bool,
    is_blocked: bool,
    /// A datagram that did not fit the batch while the kernel did not accept it.
    held: Train,
    held_ecn: Ecn,
}

impl Outbound {
    /// Creates an empty batch for a link.
    pub(super) fn new(link: &Link) -> Self {
        Self {
            train: link.new_train(),
            batch: Batch::default(),
            is_closed: false,
            is_blocked: false,
            held: link.new_train(),
            held_ecn: Ecn::default(),
        }
    }

    /// Whether the kernel's buffer was full at the last attempt.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// The batch, to which a datagram may be appended; [`Self::add`] then adds it.
    pub(super) fn train(&mut self) -> &mut Train {
        &mut self.train
    }

    /// Adds the datagram that was appended to the batch at `start`. First sends the batch if the
    /// datagram cannot join it. Must not be called while blocked.
    pub(super) fn add(&mut self, link: &mut Link, to: SocketAddr, start: usize, ecn: Ecn) {
        let length = self.train.len() - start;
        let joins = !self.is_closed
            && ecn == self.batch.ecn
            && length <= self.batch.segment_bytes
            && self.batch.segments < link.segments_max()
            && self.train.len() <= BATCH_BYTES_MAX;
        if self.batch.segments > 0 && !joins {
            self.train.move_to(start, &mut self.held);
            self.held_ecn = ecn;
            self.flush(link, to);
        } else {
            self.take(length, ecn);
        }
    }

    /// Sends the batch. If the link accepts no more at present, keeps it and becomes blocked.
    pub(super) fn flush(&mut self, link: &mut Link, to: SocketAddr) {
        if self.batch.segments == 0 {
            return;
        }
        self.is_blocked = !link.send(to, &mut self.train, self.batch);
        if self.is_blocked {
            return;
        }
        self.train.clear();
        self.batch.segments = 0;
        if !self.held.is_empty() {
            std::mem::swap(&mut self.train, &mut self.held);
            self.take(self.train.len(), self.held_ecn);
        }
    }

    /// Sends the datagram that was appended to the batch at `start` at once, to another address. If
    /// the link accepts no more at present, it is lost.
    pub(super) fn send_apart(&mut self, link: &mut Link, to: SocketAddr, start: usize, ecn: Ecn) {
        let mut apart = link.new_train();
        self.train.move_to(start, &mut apart);
        let batch = Batch::of_one(apart.len(), ecn);
        if !link.send(to, &mut apart, batch) {
            link.lost(batch);
        }
    }

    /// Adds the datagram at the end of the buffer to the batch.
    fn take(&mut self, length: usize, ecn: Ecn) {
        if self.batch.segments == 0 {
            self.batch = Batch { segments: 0, segment_bytes: length, ecn };
        }
        self.is_closed = length < self.batch.segment_bytes;
        self.batch.segments += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use super::*;

    fn loopback() -> Link {
        Link::own(Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap())
    }

    fn push(outbound: &mut Outbound, link: &mut Link, to: SocketAddr, datagram: &[u8], ecn: Ecn) {
        let start = outbound.train().len();
        outbound.train().append(datagram);
        outbound.add(link, to, start, ecn);
    }

    #[test]
    fn datagrams_keep_their_boundaries_and_order_in_any_mixture() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let to = receiver.local_addr().unwrap();
        let mut link = loopback();
        let mut outbound = Outbound::new(&link);
        let lengths = [100, 100, 40, 100, 1400, 1400, 1400, 7, 7, 8, 1, 1200];
        for (index, length) in lengths.iter().enumerate() {
            push(&mut outbound, &mut link, to, &vec![index as u8; *length], Ecn::Ect0);
        }
        outbound.flush(&mut link, to);
        assert_eq!(link.counters(), SendCounters { calls: 6, errors: 0, dropped: 0 });
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
        for (bytes, full) in [(1472, 44), (8972, 7)] {
            let mut link = loopback();
            let mut outbound = Outbound::new(&link);
            for _ in 0..=full {
                push(&mut outbound, &mut link, to, &vec![7; bytes], Ecn::Ect0);
            }
            assert_eq!(link.counters(), SendCounters { calls: 1, errors: 0, dropped: 0 });
            assert_eq!(outbound.batch.segments, 1, "{full} of {bytes} bytes left in one call");
        }
    }

    #[test]
    fn what_the_kernel_refuses_is_counted_and_does_not_hold_up_the_rest() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let to = receiver.local_addr().unwrap();
        let mut link = loopback();
        let mut outbound = Outbound::new(&link);
        // No one can listen on port 0.
        let nowhere = SocketAddr::new(to.ip(), 0);
        for byte in 0..3 {
            push(&mut outbound, &mut link, nowhere, &[byte; 100], Ecn::NotEct);
        }
        outbound.flush(&mut link, nowhere);
        assert_eq!(link.counters(), SendCounters { calls: 0, errors: 1, dropped: 3 });
        push(&mut outbound, &mut link, to, &[7; 100], Ecn::NotEct);
        outbound.flush(&mut link, to);
        let mut bytes = [0; 200];
        assert_eq!(receiver.recv(&mut bytes).unwrap(), 100);
        assert_eq!(bytes[..100], [7; 100]);
    }
}
