//! What the channels of sealed stores share: changes that wait for room, and completions that wait
//! for `poll`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::super::store::{StoreCounters, StoreDone, StoreRequest};
use super::fresh::failure::copy_error;
use super::fresh::journal::{Mailbox, Requests};
use super::ring::{clear, signal};

/// Id of a channel's request for room.
pub(super) const ROOM: u64 = u64::MAX;

/// Completions that `poll` has not returned yet.
pub(super) struct Ends {
    event: Arc<OwnedFd>,
    done: Vec<StoreDone>,
    /// Whether the event was signalled for them.
    is_signalled: bool,
    /// Whether `poll` is running: it also returns whatever completes meanwhile.
    is_polled: bool,
}

impl Ends {
    /// No completions yet; the first one signals `event`.
    pub fn new(event: Arc<OwnedFd>) -> Self {
        Self { event, done: Vec::new(), is_signalled: false, is_polled: false }
    }

    /// Begins a `poll`.
    pub fn begin_poll(&mut self) {
        self.is_polled = true;
        if std::mem::take(&mut self.is_signalled) {
            clear(&self.event);
        }
    }

    /// Ends the `poll`: moves the completions to `done`.
    pub fn end_poll(&mut self, done: &mut Vec<StoreDone>) {
        self.is_polled = false;
        done.append(&mut self.done);
    }

    /// Number of completions.
    pub fn len(&self) -> usize {
        self.done.len()
    }

    /// Counts a completed operation and keeps its completion for `poll`.
    pub fn push(
        &mut self,
        counters: &StoreCounters,
        ticket: u64,
        request: StoreRequest,
        result: io::Result<()>,
    ) {
        counters.ended(&request, &result);
        if !self.is_signalled && !self.is_polled {
            self.is_signalled = true;
            signal(&self.event);
        }
        self.done.push(StoreDone { ticket, result, buffer: request.into_buffer() });
    }
}

/// Writes and deallocations of one channel for which there is no room yet, in order.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    changes: VecDeque<(u64, StoreRequest)>,
    is_room_wanted: bool,
}

impl Waiting {
    /// Number of waiting changes.
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether changes wait although no room was requested for them.
    pub fn is_stuck(&self) -> bool {
        !self.changes.is_empty() && !self.is_room_wanted
    }
}

/// A channel whose changes may have to wait for room.
pub(super) trait ChangeChannel {
    /// The channel's waiting changes.
    fn waiting(&mut self) -> &mut Waiting;
    /// Where to request room, and the mailbox for the answer.
    fn room(&self) -> (&Arc<Requests>, &Arc<Mailbox>);
    /// Tries to start a change. Returns it if room must be made first.
    fn try_change(&mut self, ticket: u64, request: StoreRequest) -> Option<StoreRequest>;
    /// Reports a completed operation.
    fn complete(&mut self, ticket: u64, request: StoreRequest, result: io::Result<()>);
    /// Whether operations of this channel are in flight that free room when they complete.
    fn gives_room_back(&self) -> bool {
        false
    }

    /// Handles the result of a change that needs no I/O: `Ok(false)` returns the change, because
    /// room must be made first; any other result completes it.
    fn tried(
        &mut self,
        ticket: u64,
        request: StoreRequest,
        changed: io::Result<bool>,
    ) -> Option<StoreRequest> {
        match changed {
            Ok(false) => return Some(request),
            Ok(true) => self.complete(ticket, request, Ok(())),
            Err(error) => self.complete(ticket, request, Err(error)),
        }
        None
    }

    /// Starts a change, or queues it behind changes that already wait.
    fn change(&mut self, ticket: u64, request: StoreRequest) {
        if self.waiting().len() > 0 {
            self.waiting().changes.push_back((ticket, request));
        } else if let Some(request) = self.try_change(ticket, request) {
            self.waiting().changes.push_back((ticket, request));
            self.want_room();
        }
    }

    /// Starts waiting changes as long as there is room.
    fn retry_waiting(&mut self) {
        while let Some((ticket, request)) = self.waiting().changes.pop_front() {
            if let Some(request) = self.try_change(ticket, request) {
                self.waiting().changes.push_front((ticket, request));
                if !self.gives_room_back() {
                    self.want_room();
                }
                return;
            }
        }
    }

    /// Requests room, unless a request is already pending.
    fn want_room(&mut self) {
        if !std::mem::replace(&mut self.waiting().is_room_wanted, true) {
            let (requests, mailbox) = self.room();
            requests.room(mailbox, ROOM);
        }
    }

    /// Handles the answer to a request for room.
    fn room_came(&mut self, result: &io::Result<()>) {
        self.waiting().is_room_wanted = false;
        match result {
            Ok(()) => self.retry_waiting(),
            Err(error) => {
                for (ticket, request) in std::mem::take(&mut self.waiting().changes) {
                    self.complete(ticket, request, Err(copy_error(error)));
                }
            }
        }
    }
}
