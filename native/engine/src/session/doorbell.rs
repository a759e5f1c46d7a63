//! How a job's process and a session's thread wake each other (docs/formats/ring-abi.md, "Doorbell").
//!
//! The thread never receives anything from the job. What a job sends over a Unix socket may carry
//! descriptors, and closing one that the receiver doesn't want can block it: a TCP socket that
//! lingers (SO_LINGER) does so as long as its owner likes. So the job wakes the thread through an
//! eventfd, which carries a number only, and which the thread watches and never reads: the job could
//! make that block, too, by clearing O_NONBLOCK. The other way is a socket whose end here was shut
//! down for reading before the job got its own.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socketpair,
};

const QUIET: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

/// The daemon's end.
#[derive(Debug)]
pub struct DaemonBell {
    /// Bytes to the job; nothing can be sent to it.
    to_job: OwnedFd,
    /// Watches the job's eventfd, edge-triggered: a write is seen once and nothing has to be read.
    calls: OwnedFd,
}

/// The job's end: the two descriptors that it gets.
#[derive(Debug)]
pub struct JobBell {
    /// Stream socket: readable when the daemon has rung; ends with the session.
    pub doorbell: OwnedFd,
    /// The eventfd that wakes the daemon.
    pub call: OwnedFd,
}

/// Makes both ends.
pub fn pair() -> io::Result<(DaemonBell, JobBell)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (to_job, doorbell) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    shutdown(&to_job, Shutdown::Read)?;
    let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let calls = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let what = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&calls, &call, epoll::EventData::new_u64(0), what)?;
    Ok((DaemonBell { to_job, calls }, JobBell { doorbell, call }))
}

impl DaemonBell {
    /// What a thread that sleeps watches: calls, and the end of the job's socket.
    pub fn poll_fds(&self) -> [PollFd<'_>; 2] {
        [
            PollFd::from_borrowed_fd(self.calls.as_fd(), PollFlags::IN),
            // Only its end, which is reported unasked.
            PollFd::from_borrowed_fd(self.to_job.as_fd(), PollFlags::empty()),
        ]
    }

    /// Takes the job's calls, however many there were.
    pub fn take_calls(&self) {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 1];
        // An interrupted or failed look leaves the call to be seen again.
        let _ = epoll::wait(&self.calls, &mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    }

    /// Wakes the job. A full socket is a wake-up that the job has not looked at.
    pub fn ring(&self) {
        let _ = send(&self.to_job, &[1], QUIET);
    }
}

impl JobBell {
    /// Wakes the daemon.
    pub fn ring(&self) {
        // A full counter can't be: 2^64 calls. A daemon that is gone shows at the next `take_rings`.
        let _ = rustix::io::write(&self.call, &1_u64.to_ne_bytes());
    }

    /// Takes the daemon's bytes without waiting. True if the daemon closed its end.
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
    use rustix::event::poll;

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
        assert_eq!(seen(&daemon), (false, false), "both were taken");
        job.ring();
        assert_eq!(seen(&daemon), (true, false), "though nobody reads the counter");
        daemon.ring();
        assert!(!job.take_rings());
        drop(daemon);
        assert!(job.take_rings());
    }

    #[test]
    fn a_closed_end_of_the_job_is_seen() {
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
    fn a_job_that_changes_the_eventfd_blocks_nobody() {
        let (daemon, job) = pair().unwrap();
        rustix::fs::fcntl_setfl(&job.call, rustix::fs::OFlags::empty()).unwrap();
        job.ring();
        let mut count = [0; 8];
        rustix::io::read(&job.call, &mut count).unwrap();
        // The call was seen as an edge, or is gone with the count; taking it waits for nothing.
        daemon.take_calls();
        assert_eq!(seen(&daemon), (false, false));
    }
}
