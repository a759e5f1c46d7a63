//! Converts the job's submissions to commands of the machine, and publishes completions.

use std::sync::PoisonError;

use sealane_proto::link::Nanos;
use sealane_proto::session::{PostError, ReceiveRequest, SendRequest, StreamPart, StreamRequest};

use super::operations::Direction;
use super::ring::{
    Completion, Opcode, Operation, PACKET_MAP_BYTES, RingFault, Status, Submission, Terms,
};
use super::worker::Worker;
use crate::clock::now;

/// Most submissions per turn, so that a job that keeps posting does not delay packets.
const SUBMISSIONS_PER_TURN: usize = 64;

impl Worker {
    /// Takes the job's submissions, and executes new and waiting operations as far as possible.
    pub(super) fn submit(&mut self) {
        if let Some(plan) = self.next_plan.lock().unwrap_or_else(PoisonError::into_inner).take() {
            self.session.install_plan(plan);
        }
        match self.take_submissions() {
            Ok(has_more) => self.progress.has_more |= has_more,
            Err(fault) => return self.end_for(fault),
        }
        // What the job submitted after the request is refused, also if it came between two looks.
        self.begin_drain();
        self.post_waiting(Direction::Receive);
        self.post_waiting(Direction::Send);
        for stream in self.progress.operations.streams() {
            self.continue_stream(stream);
        }
    }

    /// Takes the job's submissions; returns whether there may be more.
    fn take_submissions(&mut self) -> Result<bool, RingFault> {
        for _ in 0..SUBMISSIONS_PER_TURN {
            let Some((handle, submission)) = self.memory.ring.take()? else { return Ok(false) };
            if !self.progress.operations.reserve(&submission) {
                self.refuse(handle, &submission, Status::Overlap);
            } else if self.flow.as_mut().is_some_and(|flow| !flow.admit(&submission.kind)) {
                self.progress.operations.release(&submission);
                self.refuse(handle, &submission, Status::Limit);
            } else if !self.progress.operations.add(handle, submission, now()) {
                self.command(handle, &submission);
            }
        }
        Ok(true)
    }

    /// Posts operations that wait for a slot of the machine, in order, as far as it accepts them.
    fn post_waiting(&mut self, direction: Direction) {
        while let Some((handle, submission)) = self.progress.operations.first(direction) {
            let posted = self.post(handle, &submission);
            if posted == Err(PostError::Retry) {
                return;
            }
            self.progress.operations.left(direction, posted.ok());
            if let Err(error) = posted {
                self.finish(handle, refusal(error));
            }
        }
    }

    fn post(&mut self, handle: u64, submission: &Submission) -> Result<u64, PostError> {
        let Submission { offset, length, kind, .. } = *submission;
        let user_data = handle;
        match kind {
            Operation::Send(Terms { reliability, immediate, priority, .. }) => {
                let request =
                    SendRequest { offset, length, reliability, immediate, priority, user_data };
                self.session.post_send(request, now())
            }
            Operation::Stream(Terms { reliability, immediate, priority, .. }) => {
                let request = StreamRequest { length, reliability, immediate, priority, user_data };
                self.session.post_stream(request, now())
            }
            _ => {
                let request = ReceiveRequest { offset, length_max: length, user_data };
                let message = self.session.post_receive(request, now())?;
                let slot = (message % u64::from(self.layout.slots)) as u16;
                let chunks = length.div_ceil(u64::from(self.layout.chunk_bytes));
                self.memory.ring.slot_posted(slot, handle, chunks as u32);
                Ok(message)
            }
        }
    }

    /// Posts the waiting parts of a stream, once it has a slot.
    fn continue_stream(&mut self, stream: u64) {
        while let Some((handle, submission)) = self.progress.operations.first_part(stream) {
            let done = match self.progress.operations.get(stream) {
                // The stream is over: cancelled at either end, or already ended.
                None => Err(PostError::NotInProgress(stream)),
                Some(open) => match open.message {
                    None => return,
                    Some(message) => self.stream_command(message, &submission),
                },
            };
            if done == Err(PostError::Retry) {
                return;
            }
            self.progress.operations.part_left(stream);
            self.finish(handle, done.map_or_else(refusal, |()| Status::Ok));
        }
    }

    fn stream_command(&mut self, message: u64, submission: &Submission) -> Result<(), PostError> {
        let Submission { offset, length, kind, .. } = *submission;
        match kind {
            Operation::Continue { remote_offset, .. } => {
                let part = StreamPart { offset, remote_offset, length };
                self.session.continue_stream(message, part, now())
            }
            _ => self.session.end_stream(message, now()),
        }
    }

    /// Cancels the messages whose deadlines have passed.
    pub(super) fn expire(&mut self, time: Nanos) {
        while let Some(operation) = self.progress.operations.take_expired(time) {
            self.progress.operations.set_expired(operation, true);
            if self.cancel(operation) != Status::Ok {
                // It has just ended for another reason, which is still to be reported.
                self.progress.operations.set_expired(operation, false);
            }
        }
    }

    /// Executes a command that doesn't wait for anything.
    fn command(&mut self, handle: u64, submission: &Submission) {
        let status = match submission.kind {
            Operation::Cancel { operation } => self.cancel(operation),
            Operation::Complete { receive } => self.complete_receive(receive),
            Operation::PacketMap { receive, chunk } => {
                return self.packet_map(handle, receive, chunk);
            }
            // A part of something that is not an open stream.
            _ => Status::Refused,
        };
        self.finish(handle, status);
    }

    fn cancel(&mut self, operation: u64) -> Status {
        let Some(open) = self.progress.operations.get(operation) else { return Status::Refused };
        match (open.submission.kind.opcode(), open.message) {
            (Opcode::Send | Opcode::Stream | Opcode::Receive, None) => {
                self.progress.operations.withdraw(operation);
                self.finish(operation, Status::Cancelled);
                Status::Ok
            }
            (Opcode::Send | Opcode::Stream, Some(message)) => {
                let cancelled = self.session.cancel_send(message, now());
                cancelled.map_or_else(refusal, |()| Status::Ok)
            }
            _ => Status::Refused,
        }
    }

    fn complete_receive(&mut self, receive: u64) -> Status {
        let open = self.progress.operations.get(receive).filter(|open| open.is(Opcode::Receive));
        match open.map(|open| open.message) {
            None => Status::Refused,
            Some(None) => self.cancel(receive),
            Some(Some(message)) => {
                let completed = self.session.complete_receive(message, now());
                completed.map_or_else(refusal, |()| Status::Ok)
            }
        }
    }

    fn packet_map(&mut self, handle: u64, receive: u64, chunk: u32) {
        let open = self.progress.operations.get(receive).filter(|open| open.is(Opcode::Receive));
        let map = open.and_then(|open| {
            let message = open.message?;
            Some((message, self.session.packet_map(message, chunk)?))
        });
        let mut completion = Completion { status: Status::Refused, ..Completion::default() };
        if let Some((message, map)) = map {
            // A chunk has no more units than this (`Endpoint::new`).
            let length = map.len().min(PACKET_MAP_BYTES);
            completion.packets[..length].copy_from_slice(&map[..length]);
            completion.status = Status::Ok;
            completion.message = message;
            completion.immediate = self.session.immediate(message);
        }
        self.complete(handle, completion);
    }

    fn finish(&mut self, handle: u64, status: Status) {
        self.complete(handle, Completion { status, ..Completion::default() });
    }

    /// Publishes the completion of an operation that is in no queue.
    pub(super) fn complete(&mut self, handle: u64, completion: Completion) {
        if let Some(open) = self.progress.operations.get(handle) {
            if let Some(flow) = &mut self.flow {
                flow.ended(&open.submission.kind);
            }
            if open.is_reliable_send() && completion.status == Status::Ok {
                self.report.sends.note(now().saturating_sub(open.since));
            }
        }
        if let Some(completion) = self.progress.operations.end(handle, completion) {
            self.memory.ring.complete(&completion);
            if completion.opcode == Opcode::Send && completion.status == Status::Ok {
                self.progress.has_sent = true;
            } else {
                self.progress.must_ring = true;
            }
        }
    }

    /// Publishes the completion of an operation that was never started.
    fn refuse(&mut self, handle: u64, submission: &Submission, status: Status) {
        let opcode = submission.kind.opcode();
        let user_data = submission.user_data;
        let completion = Completion { opcode, status, user_data, handle, ..Completion::default() };
        self.memory.ring.complete(&completion);
        self.progress.must_ring = true;
    }

    /// Aborts all waiting operations because the session is over.
    pub(super) fn abort_waiting(&mut self) {
        for handle in self.progress.operations.give_up() {
            self.finish(handle, Status::Aborted);
        }
    }
}

fn refusal(error: PostError) -> Status {
    match error {
        PostError::Closed => Status::Aborted,
        PostError::Draining => Status::Draining,
        _ => Status::Refused,
    }
}
