//! Events for operators, in a bounded list that the control plane empties at its own pace.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

/// Maximum number of events kept; beyond it, the oldest are dropped and counted.
pub const EVENTS_MAX: usize = 1024;

/// One event of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StorageEvent {
    /// `refused`, `found`, `repaired`, `reservation`, `queue_opened` or `queue_closed`.
    pub kind: &'static str,
    /// Stable reason id; empty if nothing is wrong.
    pub reason: &'static str,
    /// The sector concerned.
    pub lba: Option<u64>,
    /// The association given when the queue was started.
    pub association: u64,
    /// Queue id.
    pub queue_id: u16,
    /// Description, without secrets.
    pub detail: String,
}

/// Bounded list of events with a file descriptor that is readable while there are any.
#[derive(Debug)]
pub struct EventLog {
    events: Mutex<(VecDeque<StorageEvent>, u64)>,
    signal: OwnedFd,
}

impl EventLog {
    /// Creates an empty list.
    pub fn new() -> io::Result<Self> {
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { events: Mutex::default(), signal })
    }

    /// Adds an event.
    pub fn push(&self, event: StorageEvent) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.0.len() == EVENTS_MAX {
            events.0.pop_front();
            events.1 += 1;
        }
        events.0.push_back(event);
        // Fails only if the counter is full; then the descriptor is readable anyway.
        let _ = rustix::io::write(&self.signal, &1u64.to_ne_bytes());
    }

    /// Takes all events and clears the descriptor.
    pub fn take(&self) -> Vec<StorageEvent> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = [0; 8];
        // Fails only if nothing was signalled.
        let _ = rustix::io::read(&self.signal, &mut count);
        events.0.drain(..).collect()
    }

    /// Number of events dropped because the list was full.
    pub fn dropped(&self) -> u64 {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).1
    }
}

impl AsFd for EventLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_bounded_and_counts_what_it_drops() {
        let log = EventLog::new().unwrap();
        for index in 0..EVENTS_MAX + 3 {
            log.push(StorageEvent {
                kind: "refused",
                reason: "command.mac",
                lba: Some(index as u64),
                association: 1,
                queue_id: 1,
                detail: String::new(),
            });
        }
        let events = log.take();
        assert_eq!((events.len(), log.dropped()), (EVENTS_MAX, 3));
        assert_eq!(events[0].lba, Some(3));
        assert!(log.take().is_empty());
    }
}
