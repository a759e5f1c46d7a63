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

impl Calls {
    /// Creates both ends; the second one, an eventfd, is the caller's.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let calls = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let what = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&calls, &call, epoll::EventData::new_u64(0), what)?;
        Ok((Self(calls), call))
    }

    /// Clears the calls, however many there were.
    pub fn take(&self) {
        let mut events = [const { MaybeUninit::uninit() }; 1];
        // After an interruption or failure the call is reported again.
        let _ = epoll::wait(&self.0, &mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
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
