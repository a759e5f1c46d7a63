//! What other threads tell a queue's thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::assigned::Assigned;

/// A message to a queue's thread. At most one of the first two kinds per outstanding command.
#[derive(Debug)]
pub enum Message {
    /// The command in this slot holds its range now.
    Locked(u16),
    /// The command in this slot may go: quality of service lets it.
    Released(u16),
    /// The controller's namespaces are others now.
    Namespaces(Vec<Assigned>),
    /// Abort the command with this id, and say whether it was.
    Abort(u16, SyncSender<bool>),
}

/// Messages to one thread, and the descriptor that wakes it.
#[derive(Debug)]
pub struct Mailbox {
    messages: Mutex<Vec<Message>>,
    signal: OwnedFd,
}

impl Mailbox {
    /// An empty mailbox.
    pub fn new() -> io::Result<Self> {
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { messages: Mutex::default(), signal })
    }

    /// Leaves a message.
    pub fn post(&self, message: Message) {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.push(message);
        if messages.len() == 1 {
            // It fails only when the counter is full, and then the descriptor is readable anyway.
            let _ = rustix::io::write(&self.signal, &1u64.to_ne_bytes());
        }
    }

    /// Takes all messages; the descriptor is no longer readable.
    pub fn take(&self) -> Vec<Message> {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        if !messages.is_empty() {
            let mut count = [0; 8];
            // It can't fail: something was signalled and not taken yet.
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

/// The command that waits: whose thread to tell, and which slot of its queue.
#[derive(Debug, Clone)]
pub struct Waiter {
    /// Mailbox of the queue's thread.
    pub mailbox: Arc<Mailbox>,
    /// Slot of the command.
    pub slot: u16,
}
