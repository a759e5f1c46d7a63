//! Datagrams on their way to the kernel: equal ones in a row leave in one call.

use std::io;
use std::net::SocketAddr;

use quinn_udp::EcnCodepoint;
use sealane_proto::session::Ecn;

use crate::udp::Udp;

/// Bytes of one send call: the kernel's limit for a segmentation list is 64 KiB with headers.
const BATCH_BYTES_MAX: usize = 62_000;

/// A batch being gathered: datagrams of one size, of which only the last may be shorter.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    bytes: Vec<u8>,
    segment_bytes: usize,
    segments: usize,
    ecn: Ecn,
    is_closed: bool,
    is_blocked: bool,
}

impl Outbound {
    /// True while the kernel's buffer was full at the last attempt.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Appends the datagram that `fill` writes to the end of the buffer, sending first what can't
    /// travel with it. `fill` says how to mark it, `None` if it has none: so does this. `Err` counts
    /// as sent.
    pub(super) fn push(
        &mut self,
        udp: &Udp,
        to: SocketAddr,
        fill: impl FnOnce(&mut Vec<u8>) -> Option<Ecn>,
    ) -> Result<bool, io::Error> {
        let start = self.bytes.len();
        let Some(ecn) = fill(&mut self.bytes) else { return Ok(false) };
        let length = self.bytes.len() - start;
        let joins = self.segments > 0
            && !self.is_closed
            && ecn == self.ecn
            && length <= self.segment_bytes
            && self.segments < udp.segments_max()
            && self.bytes.len() <= BATCH_BYTES_MAX;
        let mut result = Ok(true);
        if start > 0 && !joins {
            let mut next = self.bytes.split_off(start);
            result = self.flush(udp, to).map(|()| true);
            if self.is_blocked {
                // The kernel takes no more: this datagram is dropped here, as a full queue would.
                return Ok(false);
            }
            self.bytes.append(&mut next);
        }
        if self.segments == 0 {
            self.segment_bytes = length;
            self.ecn = ecn;
        }
        self.is_closed = length < self.segment_bytes;
        self.segments += 1;
        result
    }

    /// Sends what was gathered. If the kernel's buffer is full, keeps it and says `is_blocked`.
    pub(super) fn flush(&mut self, udp: &Udp, to: SocketAddr) -> io::Result<()> {
        if self.segments == 0 {
            return Ok(());
        }
        let sent = udp.send(to, &self.bytes, self.segment_bytes, codepoint(self.ecn));
        self.is_blocked = matches!(&sent, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        if self.is_blocked {
            return Ok(());
        }
        self.bytes.clear();
        self.segments = 0;
        self.is_closed = false;
        sent
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

    #[test]
    fn datagrams_keep_their_boundaries_and_order_in_any_mixture() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let to = receiver.local_addr().unwrap();
        let udp = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut outbound = Outbound::default();
        let lengths = [100, 100, 40, 100, 1400, 1400, 1400, 7, 7, 8, 1, 1200];
        for (index, length) in lengths.iter().enumerate() {
            let filled = outbound.push(&udp, to, |bytes| {
                bytes.extend(std::iter::repeat_n(index as u8, *length));
                Some(Ecn::Ect0)
            });
            assert!(filled.unwrap());
        }
        outbound.flush(&udp, to).unwrap();
        assert!(!outbound.push(&udp, to, |_| None).unwrap());
        let mut bytes = [0; 2000];
        for (index, length) in lengths.iter().enumerate() {
            let received = receiver.recv(&mut bytes).unwrap();
            assert_eq!(received, *length);
            assert!(bytes[..received].iter().all(|byte| *byte == index as u8));
        }
    }
}
