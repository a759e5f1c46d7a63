//! Calls from another process through an eventfd, which it may misuse.
//!
//! The eventfd is watched but never read: the other process could make a read block by clearing
//! O_NONBLOCK. An epoll instance reports each write once (edge-triggered), and is itself readable
//! until that report is taken.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

/// The called end.
#[derive(Debug)]
pub struct Calls(OwnedFd);

/// What is watched, as epoll names it.
const CALL: u64 = 0;
const END: u64 = 1;

impl Calls {
    /// Creates both ends; the second one, an eventfd, is the caller's.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let calls = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let what = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&calls, &call, epoll::EventData::new_u64(CALL), what)?;
        Ok((Self(calls), call))
    }

    /// Also reports the end of a connection to the caller: its process has ended, or has closed its
    /// socket. Nothing else about the socket is reported, and nothing is read from it.
    pub fn watch_end(&self, socket: impl AsFd) -> io::Result<()> {
        let what = epoll::EventFlags::empty();
        Ok(epoll::add(&self.0, socket, epoll::EventData::new_u64(END), what)?)
    }

    /// Clears the calls, however many there were, and returns whether a watched connection has
    /// ended. That stays so, and its report, too.
    pub fn take(&self) -> bool {
        let mut space = [const { MaybeUninit::uninit() }; 2];
        // After an interruption or failure the call is reported again.
        match epoll::wait(&self.0, &mut space, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok((events, _)) => events.iter().any(|event| event.data.u64() == END),
            Err(_) => false,
        }
    }
}

impl AsFd for Calls {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Calls the other end. Nothing can be done if that fails: the counter is full, so it is called
/// already, or it is gone.
pub fn call(end: &OwnedFd) {
    let _ = rustix::io::write(end, &1u64.to_ne_bytes());
}
