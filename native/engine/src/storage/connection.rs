//! One non-blocking stream socket and its receive buffer.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, recvmsg,
    sendmsg, shutdown,
};
use sealane_proto::nvme::reader::StreamSink;
use sealane_proto::nvme::transmit::TransmitQueue;

/// Receive buffer for headers and small commands, enough for a deep queue. Long data are received
/// directly into their place.
const RECEIVE_BYTES: usize = 128 * 1024;
/// Part of the receive buffer used while the stream carries long data: room for the next headers,
/// but for little of the next data, which would have to be copied to their place.
const BEHIND_BYTES: usize = 8 * 1024;
/// Data of at least this length are long. Shorter data are received together with the bytes behind
/// them, as the saved calls outweigh the copies.
const LONG_BYTES: usize = 16 * 1024;
/// Maximum number of slices in one send. A write of 128 KiB in sealed sectors has 65.
const GATHER: usize = 256;
/// Time limit for sending the last bytes of a queue that ends and for the peer's closing.
const SHUTDOWN_TIME: Duration = Duration::from_millis(500);

/// The peer closed the connection, or the socket failed.
#[derive(Debug)]
pub struct Gone(pub String);

/// A connected stream socket on which sends and receives never block.
#[derive(Debug)]
pub struct Connection {
    fd: OwnedFd,
    buffer: Vec<u8>,
    /// Whether the data last waited for were long.
    is_long: bool,
}

impl Connection {
    /// Uses a connected socket.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, buffer: vec![0; RECEIVE_BYTES], is_long: false }
    }

    /// Receives available bytes into `queue`, at most one buffer beyond the data it waits for.
    pub fn receive(&mut self, queue: &mut impl StreamSink) -> Result<(), Gone> {
        let place = queue.place();
        let offered = place.len();
        if offered > 0 {
            self.is_long = offered >= LONG_BYTES;
        }
        let behind = &mut self.buffer[..if self.is_long { BEHIND_BYTES } else { RECEIVE_BYTES }];
        let received = if offered == 0 {
            recv(&self.fd, behind, RecvFlags::DONTWAIT).map(|(bytes, _)| bytes)
        } else {
            let mut slices = [IoSliceMut::new(place), IoSliceMut::new(behind)];
            let mut control = RecvAncillaryBuffer::default();
            recvmsg(&self.fd, &mut slices, &mut control, RecvFlags::DONTWAIT).map(|got| got.bytes)
        };
        match received {
            Ok(0) => Err(Gone("the peer closed the connection".into())),
            Ok(bytes) => {
                let placed = bytes.min(offered);
                queue.placed(placed);
                queue.receive(self.buffer.get(..bytes - placed).unwrap_or_default());
                Ok(())
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Gone(format!("receive failed: {error}"))),
        }
    }

    /// Sends as much as the socket accepts.
    pub fn send(&self, queue: &mut TransmitQueue) -> Result<(), Gone> {
        while queue.pending_bytes() > 0 {
            let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(GATHER);
            queue.slices(&mut slices, GATHER);
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = sendmsg(&self.fd, &slices, &mut SendAncillaryBuffer::default(), flags);
            match sent {
                Ok(bytes) => queue.advance(bytes),
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Gone(format!("send failed: {error}"))),
            }
        }
        Ok(())
    }

    /// Sends the remaining bytes of a queue that ends, closes this direction, and reads and drops
    /// what the peer sends until it closes too; all within `SHUTDOWN_TIME`. Closing at once would
    /// reset the connection as soon as the peer sends: it would lose the last bytes sent to it, and
    /// a Linux host, which re-sends a command at once on the reset connection, would use up the
    /// command's retries before it begins to reconnect, and report an I/O error.
    pub fn shut_down(&mut self, queue: &mut TransmitQueue) {
        let deadline = Instant::now() + SHUTDOWN_TIME;
        while queue.pending_bytes() > 0 {
            if self.send(queue).is_err() || !self.is_ready(PollFlags::OUT, deadline) {
                return;
            }
        }
        if shutdown(&self.fd, Shutdown::Write).is_err() {
            return;
        }
        while Instant::now() < deadline && self.is_ready(PollFlags::IN, deadline) {
            match recv(&self.fd, &mut self.buffer[..], RecvFlags::DONTWAIT) {
                Ok((bytes, _)) if bytes > 0 => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                _ => return,
            }
        }
    }

    fn is_ready(&self, interest: PollFlags, deadline: Instant) -> bool {
        let mut fds = [PollFd::new(&self.fd, interest)];
        let left = deadline.saturating_duration_since(Instant::now());
        // An interruption ends the wait early; the peer may then miss the last bytes.
        poll(&mut fds, Timespec::try_from(left).ok().as_ref()).is_ok_and(|ready| ready > 0)
    }

    /// The events to poll for: input if `wants_input`, output if bytes are pending.
    #[must_use]
    pub fn interest(wants_input: bool, pending: usize) -> PollFlags {
        let input = if wants_input { PollFlags::IN } else { PollFlags::empty() };
        if pending > 0 { input | PollFlags::OUT } else { input }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Waits until one of the descriptors is ready; returns each one's ready events.
pub fn wait<const N: usize>(
    descriptors: [(BorrowedFd<'_>, PollFlags); N],
    timeout: Option<Duration>,
) -> io::Result<[PollFlags; N]> {
    let mut fds = descriptors.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags));
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    loop {
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => return Ok(fds.map(|fd| fd.revents())),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    /// Expects the data of `place`, then headers.
    #[derive(Default)]
    struct Sink {
        place: Vec<u8>,
        placed: usize,
        received: usize,
    }

    impl StreamSink for Sink {
        fn place(&mut self) -> &mut [u8] {
            &mut self.place[self.placed..]
        }

        fn placed(&mut self, bytes: usize) {
            self.placed += bytes;
        }

        fn receive(&mut self, input: &[u8]) {
            self.received += input.len();
        }
    }

    /// The bytes that two receives pass on when plenty have arrived: one behind a place of `waited`
    /// bytes, and one after it without a place.
    fn behind(waited: usize) -> [usize; 2] {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let sent = far.write(&vec![7; 100_000]).unwrap();
        assert!(sent > LONG_BYTES + 3 * BEHIND_BYTES, "{sent}");
        let mut connection = Connection::new(near.into());
        let mut sink = Sink { place: vec![0; waited], ..Sink::default() };
        connection.receive(&mut sink).unwrap();
        assert_eq!((sink.placed, sink.place), (waited, vec![7; waited]));
        let first = sink.received;
        sink.place = Vec::new();
        sink.placed = 0;
        connection.receive(&mut sink).unwrap();
        [first, sink.received - first]
    }

    #[test]
    fn short_commands_are_taken_by_the_buffer_and_long_data_by_their_place() {
        let [first, _] = behind(100);
        assert!(first > 2 * BEHIND_BYTES, "{first} bytes behind a short place");
        assert_eq!(behind(LONG_BYTES), [BEHIND_BYTES; 2]);
    }

    #[test]
    fn a_connection_that_ends_is_not_reset_under_a_peer_that_still_sends() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut connection = Connection::new(listener.accept().unwrap().0.into());
        // What the peer sent before the end is not read either.
        far.write_all(&[7; 4096]).unwrap();
        let ends = thread::spawn(move || connection.shut_down(&mut TransmitQueue::default()));
        assert_eq!(far.read(&mut [0; 1]).unwrap(), 0, "the peer must see an orderly end");
        for _ in 0..20 {
            far.write_all(&[7; 4096]).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!ends.is_finished(), "the connection was closed under its peer");
        drop(far);
        let begun = Instant::now();
        ends.join().unwrap();
        assert!(begun.elapsed() < SHUTDOWN_TIME / 2, "closed {:?} after its peer", begun.elapsed());
    }
}
