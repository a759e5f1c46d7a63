//! Source of a gateway queue's commands and destination of their completions: a host's NVMe/TCP
//! queue, or this process itself.

use std::collections::VecDeque;

use sealane_proto::nvme::controller_queue::{Command, ControllerEvent, ControllerQueue};
use sealane_proto::nvme::status::Status;

/// The front end of a queue.
pub(super) trait Front {
    /// The next event: a command to execute, or the end of the front end.
    fn next_event(&mut self) -> Option<ControllerEvent>;
    /// Ends a command with `status`; `buffer` may be one that is no longer needed, for reuse.
    fn complete(&mut self, slot: u16, status: Status, buffer: Vec<u8>);
    /// Ends a read with its blocks.
    fn complete_read(&mut self, slot: u16, data: Vec<u8>);
    /// A buffer for a read, reused if there is one.
    fn buffer(&mut self, bytes: usize) -> Vec<u8>;
    /// Bytes that the host hasn't received yet.
    fn pending_bytes(&mut self) -> usize;
}

impl Front for ControllerQueue {
    fn next_event(&mut self) -> Option<ControllerEvent> {
        self.next_event()
    }

    fn complete(&mut self, slot: u16, status: Status, buffer: Vec<u8>) {
        self.complete(slot, status, buffer);
    }

    fn complete_read(&mut self, slot: u16, data: Vec<u8>) {
        self.complete_read(slot, data);
    }

    fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        self.buffer(bytes)
    }

    fn pending_bytes(&mut self) -> usize {
        self.transmit().pending_bytes()
    }
}

/// Commands of this process; at most as many outstanding as the queue has slots.
#[derive(Debug, Default)]
pub(super) struct LocalFront {
    commands: VecDeque<Command>,
    /// Slot and status of each command that ended.
    ends: VecDeque<(u16, Status)>,
    spare: Vec<Vec<u8>>,
}

impl LocalFront {
    /// Submits a command.
    pub(super) fn submit(&mut self, command: Command) {
        self.commands.push_back(command);
    }

    /// Whether [`Self::next_end`] would return a command.
    pub(super) fn has_end(&self) -> bool {
        !self.ends.is_empty()
    }

    /// The next command that ended.
    pub(super) fn next_end(&mut self) -> Option<(u16, Status)> {
        self.ends.pop_front()
    }
}

impl Front for LocalFront {
    fn next_event(&mut self) -> Option<ControllerEvent> {
        self.commands.pop_front().map(ControllerEvent::Received)
    }

    fn complete(&mut self, slot: u16, status: Status, buffer: Vec<u8>) {
        self.spare.push(buffer);
        self.ends.push_back((slot, status));
    }

    fn complete_read(&mut self, slot: u16, data: Vec<u8>) {
        self.complete(slot, Status::SUCCESS, data);
    }

    fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.resize(bytes, 0);
        buffer
    }

    fn pending_bytes(&mut self) -> usize {
        0
    }
}
