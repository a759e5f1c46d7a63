//! Messages from other threads to a queue's thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::assigned::Assigned;

/// A message to a queue's thread. At most one of the first two kinds per outstanding command.
#[derive(Debug)]
pub enum Message {
    /// The command in this slot now holds its range.
    Locked(u16),
    /// Quality of service admits the command in this slot.
    Released(u16),
    /// The controller has new namespaces.
    Namespaces(Vec<Assigned>),
    /// Abort the command with this id, and reply whether it was aborted.
    Abort(u16, SyncSender<bool>),
}

/// Messages to one thread, with a descriptor that wakes it.
#[derive(Debug)]
pub struct Mailbox {
    messages: Mutex<Vec<Message>>,
    signal: OwnedFd,
}

impl Mailbox {
    /// Creates an empty mailbox.
    pub fn new() -> io::Result<Self> {
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { messages: Mutex::default(), signal })
    }

    /// Adds a message.
    pub fn post(&self, message: Message) {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.push(message);
        if messages.len() == 1 {
            // Fails only if the counter is full; then the descriptor is readable anyway.
            let _ = rustix::io::write(&self.signal, &1u64.to_ne_bytes());
        }
    }

    /// Takes all messages and clears the descriptor.
    pub fn take(&self) -> Vec<Message> {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        if !messages.is_empty() {
            let mut count = [0; 8];
            // Can't fail: a signal is pending.
            let _ = rustix::io::read(&self.signal, &mut count);
        }
        std::mem::take(&mut *messages)
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }
}

/// A waiting command: the mailbox of its queue's thread and its slot.
#[derive(Debug, Clone)]
pub struct Waiter {
    /// Mailbox of the queue's thread.
    pub mailbox: Arc<Mailbox>,
    /// Slot of the command.
    pub slot: u16,
}
