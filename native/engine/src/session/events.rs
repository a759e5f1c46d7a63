//! Converts events of the session machine to completions and states.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use sealane_proto::session::{CloseReason, CompletionStatus, Event};

use crate::clock::now;

use super::endings::{REASON_RESOURCES, reason_of};
use super::endpoint::{EndpointError, Memories};
use super::layout::STATE_ESTABLISHED;
use super::pauses::Pauses;
use super::report::State;
use super::ring::{Completion, Status};
use super::worker::Worker;

impl Worker {
    /// Processes all pending events of the machine.
    pub(super) fn drain_events(&mut self) {
        while let Some(event) = self.session.next_event() {
            match event {
                Event::Established { .. } => {
                    if self.adopt_unit().is_err() {
                        self.end(REASON_RESOURCES.into(), CloseReason::Requested);
                        continue;
                    }
                    // Whoever learns of it finds the round trip that was measured.
                    self.publish_statistics(now());
                    self.memory.ring.publish_state(STATE_ESTABLISHED);
                    self.report.set(State::Established);
                }
                Event::SendCompleted { user_data, message, status, started, completed } => {
                    let completion = Completion {
                        status: status_of(status),
                        message,
                        length: self.length_of(user_data),
                        duration_nanos: completed.saturating_sub(started),
                        ..Completion::default()
                    };
                    self.complete(user_data, completion);
                }
                Event::ReceiveCompleted { user_data, message, length, immediate, status } => {
                    let status = status_of(status);
                    let completion =
                        Completion { status, message, length, immediate, ..Completion::default() };
                    self.complete(user_data, completion);
                }
                Event::Draining => self.report.set(State::Draining),
                Event::Closed { reason, by_peer } => self.over(reason, by_peer),
            }
        }
    }

    /// Creates the memories again if the unit differs from the one they were created for. Fails if
    /// the job has those already.
    fn adopt_unit(&mut self) -> Result<(), EndpointError> {
        let unit_bytes = self.session.config().unit_bytes;
        if unit_bytes != self.shape.unit_bytes {
            let mut for_job = self.job.lock().unwrap_or_else(PoisonError::into_inner);
            if for_job.is_none() {
                return Err(EndpointError::OtherMemories);
            }
            self.shape.unit_bytes = unit_bytes;
            let Memories { layout, memory, bell, job } =
                Memories::new(&self.shape, self.memory.region.clone())?;
            self.layout = layout;
            self.memory = memory;
            self.bell = Some(bell);
            *for_job = Some(job);
        }
        self.pauses = Pauses::new(&self.session);
        self.report.unit_bytes.store(unit_bytes, Ordering::Release);
        Ok(())
    }

    fn length_of(&self, handle: u64) -> u64 {
        self.progress.operations.get(handle).map_or(0, |open| open.submission.length)
    }

    fn over(&mut self, reason: CloseReason, by_peer: bool) {
        self.abort_waiting();
        let reason = self.progress.reason.take().unwrap_or_else(|| reason_of(reason, by_peer));
        self.progress.is_over = true;
        self.publish();
        // The state must be published first: if the doorbell closes without it, the job takes the
        // fabric for dead.
        self.memory.ring.publish_closed(&reason);
        self.bell = None;
        self.report.set(State::Closed { reason });
    }
}

fn status_of(status: CompletionStatus) -> Status {
    match status {
        CompletionStatus::Ok => Status::Ok,
        CompletionStatus::OutcomeUnknown => Status::OutcomeUnknown,
        CompletionStatus::Aborted => Status::Aborted,
        CompletionStatus::TooLong => Status::TooLong,
        CompletionStatus::Cancelled => Status::Cancelled,
        CompletionStatus::Partial => Status::Partial,
    }
}
