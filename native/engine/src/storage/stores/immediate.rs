//! Shared by stores whose operations complete inside `submit`.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::super::store::{StoreChannel, StoreCounters, StoreDone, StoreRequest};

/// A store that executes operations immediately, on the submitting thread.
pub(super) trait Immediate: Send + Sync {
    /// Executes the operation; a read fills its buffer.
    fn execute(&self, request: &mut StoreRequest) -> io::Result<()>;
    /// The store's counters.
    fn counters(&self) -> &StoreCounters;
}

/// A channel of an [`Immediate`] store.
#[derive(Debug)]
pub(super) struct ImmediateChannel<S> {
    store: Arc<S>,
    done: Vec<StoreDone>,
}

impl<S> ImmediateChannel<S> {
    pub(super) fn new(store: &Arc<S>) -> Self {
        Self { store: Arc::clone(store), done: Vec::new() }
    }
}

impl<S: Immediate> StoreChannel for ImmediateChannel<S> {
    fn submit(&mut self, ticket: u64, mut request: StoreRequest) {
        let result = self.store.execute(&mut request);
        if result.is_err() {
            self.store.counters().failed();
        }
        self.done.push(StoreDone { ticket, result, buffer: request.into_buffer() });
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        done.append(&mut self.done);
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
