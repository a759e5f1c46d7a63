//! What channels of sealed stores have in common: changes that wait for room, and ends to tell.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::super::store::{StoreCounters, StoreDone, StoreRequest};
use super::fresh::failure::copy_error;
use super::fresh::journal::{Mailbox, Requests};
use super::ring::{hush, tell};

/// Name under which a channel asks for room.
pub(super) const ROOM: u64 = u64::MAX;

/// Ends of operations that `poll` has not told yet.
pub(super) struct Ends {
    event: Arc<OwnedFd>,
    done: Vec<StoreDone>,
    /// The event is readable because of them.
    is_told: bool,
    /// `poll` is under way, and takes what ends meanwhile.
    is_polled: bool,
}

impl Ends {
    /// None yet; `event` becomes readable with the first.
    pub fn new(event: Arc<OwnedFd>) -> Self {
        Self { event, done: Vec::new(), is_told: false, is_polled: false }
    }

    /// A `poll` has begun.
    pub fn begin_poll(&mut self) {
        self.is_polled = true;
        if std::mem::take(&mut self.is_told) {
            hush(&self.event);
        }
    }

    /// The `poll` is over: hands over what has ended.
    pub fn end_poll(&mut self, done: &mut Vec<StoreDone>) {
        self.is_polled = false;
        done.append(&mut self.done);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.done.len()
    }

    /// Counts how an operation ended, and keeps that to be told.
    pub fn tell(
        &mut self,
        counters: &StoreCounters,
        ticket: u64,
        request: StoreRequest,
        result: io::Result<()>,
    ) {
        counters.ended(&request, &result);
        if !self.is_told && !self.is_polled {
            self.is_told = true;
            tell(&self.event);
        }
        self.done.push(StoreDone { ticket, result, buffer: request.into_buffer() });
    }
}

/// Writes and deallocations of one channel for which there is no room yet; in order.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    changes: VecDeque<(u64, StoreRequest)>,
    is_room_wanted: bool,
}

impl Waiting {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether changes wait, and for nothing that was asked for.
    pub fn is_stuck(&self) -> bool {
        !self.changes.is_empty() && !self.is_room_wanted
    }
}

/// A channel whose changes may have to wait for room.
pub(super) trait ChangeChannel {
    /// Its changes that wait.
    fn waiting(&mut self) -> &mut Waiting;
    /// Where it asks for room, and where the answer goes.
    fn room(&self) -> (&Requests, &Arc<Mailbox>);
    /// Tries a change. Gives it back if room must be made first.
    fn try_change(&mut self, ticket: u64, request: StoreRequest) -> Option<StoreRequest>;
    /// Tells how an operation ended.
    fn tell(&mut self, ticket: u64, request: StoreRequest, result: io::Result<()>);
    /// Whether operations of its own are on their way that give room back when they end.
    fn gives_room_back(&self) -> bool {
        false
    }

    /// What came of a change that needs no I/O: gives it back if room must be made first (false), else
    /// tells its end.
    fn tried(
        &mut self,
        ticket: u64,
        request: StoreRequest,
        changed: io::Result<bool>,
    ) -> Option<StoreRequest> {
        match changed {
            Ok(false) => return Some(request),
            Ok(true) => self.tell(ticket, request, Ok(())),
            Err(error) => self.tell(ticket, request, Err(error)),
        }
        None
    }

    /// Starts a change, or has it wait behind those that do.
    fn change(&mut self, ticket: u64, request: StoreRequest) {
        if self.waiting().len() > 0 {
            self.waiting().changes.push_back((ticket, request));
        } else if let Some(request) = self.try_change(ticket, request) {
            self.waiting().changes.push_back((ticket, request));
            self.want_room();
        }
    }

    /// Starts those that wait, as far as there is room.
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

    /// Asks for room, once.
    fn want_room(&mut self) {
        if !std::mem::replace(&mut self.waiting().is_room_wanted, true) {
            let (requests, mailbox) = self.room();
            requests.room(mailbox, ROOM);
        }
    }

    /// Room was made, or can't be.
    fn room_came(&mut self, result: &io::Result<()>) {
        self.waiting().is_room_wanted = false;
        match result {
            Ok(()) => self.retry_waiting(),
            Err(error) => {
                for (ticket, request) in std::mem::take(&mut self.waiting().changes) {
                    self.tell(ticket, request, Err(copy_error(error)));
                }
            }
        }
    }
}
