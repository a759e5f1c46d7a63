//! The doorbells by which a job's process and a session's thread wake each other
//! (docs/formats/ring-abi.md, "Doorbell").
//!
//! The thread never receives anything from the job. Messages over a Unix socket may carry
//! descriptors, and closing an unwanted one can block the receiver: a TCP socket that lingers
//! (SO_LINGER) blocks for as long as its owner chose. So the job wakes the thread through an
//! eventfd, which carries only a number. The thread watches it but never reads it, as the job could
//! make a read block by clearing O_NONBLOCK. In the other direction there is a socket, whose end on
//! this side was shut down for reading before the job got the other.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socketpair,
};

use crate::calls::{Calls, call};

const QUIET: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

/// The daemon's end.
#[derive(Debug)]
pub struct DaemonBell {
    /// Sends bytes to the job; the job can't send anything to it.
    to_job: OwnedFd,
    /// The job's calls.
    calls: Calls,
}

/// The job's end: two descriptors.
#[derive(Debug)]
pub struct JobBell {
    /// Stream socket: readable when the daemon has rung; ends with the session.
    pub doorbell: OwnedFd,
    /// The eventfd that wakes the daemon.
    pub call: OwnedFd,
}

/// Creates both ends.
pub fn pair() -> io::Result<(DaemonBell, JobBell)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (to_job, doorbell) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    shutdown(&to_job, Shutdown::Read)?;
    let (calls, call) = Calls::create()?;
    Ok((DaemonBell { to_job, calls }, JobBell { doorbell, call }))
}

impl DaemonBell {
    /// Descriptors for a sleeping thread to poll: the job's calls, and the closing of its socket.
    pub fn poll_fds(&self) -> [PollFd<'_>; 2] {
        [
            PollFd::from_borrowed_fd(self.calls.as_fd(), PollFlags::IN),
            // Only for its closing, which is always reported.
            PollFd::from_borrowed_fd(self.to_job.as_fd(), PollFlags::empty()),
        ]
    }

    /// Clears the job's calls, however many there were.
    pub fn take_calls(&self) {
        self.calls.take();
    }

    /// Wakes the job. If the socket is full, wake-ups are pending already.
    pub fn ring(&self) {
        let _ = send(&self.to_job, &[1], QUIET);
    }
}

impl JobBell {
    /// Wakes the daemon.
    pub fn ring(&self) {
        // The counter can't be full, as that would take 2^64 calls. If the daemon is gone, the next
        // `take_rings` notices.
        call(&self.call);
    }

    /// Takes the daemon's bytes without blocking. True if the daemon has closed its end.
    pub fn take_rings(&self) -> bool {
        let mut rings = [0; 256];
        loop {
            match recv(&self.doorbell, &mut rings[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) | Err(Errno::CONNRESET) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{Timespec, poll};

    use super::*;

    /// Whether there are calls, and whether the job's end is closed.
    fn seen(bell: &DaemonBell) -> (bool, bool) {
        let mut fds = bell.poll_fds();
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        let [calls, end] = &fds;
        (!calls.revents().is_empty(), !end.revents().is_empty())
    }

    #[test]
    fn each_end_wakes_the_other() {
        let (daemon, job) = pair().unwrap();
        assert_eq!(seen(&daemon), (false, false));
        job.ring();
        job.ring();
        assert_eq!(seen(&daemon), (true, false));
        daemon.take_calls();
        assert_eq!(seen(&daemon), (false, false), "both calls were cleared");
        job.ring();
        assert_eq!(seen(&daemon), (true, false), "although the counter is never read");
        daemon.ring();
        assert!(!job.take_rings());
        drop(daemon);
        assert!(job.take_rings());
    }

    #[test]
    fn closing_the_jobs_end_is_noticed() {
        let (daemon, job) = pair().unwrap();
        drop(job);
        assert!(seen(&daemon).1);
        daemon.ring();
    }

    #[test]
    fn nothing_can_be_sent_to_the_daemon() {
        let (_daemon, job) = pair().unwrap();
        assert_eq!(send(&job.doorbell, &[1], QUIET), Err(Errno::PIPE));
    }

    #[test]
    fn a_job_that_changes_the_eventfd_does_not_block_the_daemon() {
        let (daemon, job) = pair().unwrap();
        rustix::fs::fcntl_setfl(&job.call, rustix::fs::OFlags::empty()).unwrap();
        job.ring();
        let mut count = [0; 8];
        rustix::io::read(&job.call, &mut count).unwrap();
        // The call is either still reported as an edge or gone with the count; clearing it doesn't
        // block.
        daemon.take_calls();
        assert_eq!(seen(&daemon), (false, false));
    }
}
