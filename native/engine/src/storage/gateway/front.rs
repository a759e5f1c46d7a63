//! Where a gateway's queue has its commands from, and where their ends go: a host's NVMe/TCP queue,
//! or this process itself.

use std::collections::VecDeque;

use sealane_proto::nvme::controller_queue::{Command, ControllerEvent, ControllerQueue};
use sealane_proto::nvme::status::Status;

/// The front of a queue.
pub(super) trait Front {
    /// What happened next: a command to execute, or the front's end.
    fn next_event(&mut self) -> Option<ControllerEvent>;
    /// Ends a command with `status`; a buffer that isn't needed any more may be handed back.
    fn complete(&mut self, slot: u16, status: Status, buffer: Vec<u8>);
    /// Ends a read with its blocks.
    fn complete_read(&mut self, slot: u16, data: Vec<u8>);
    /// A buffer for a read, reused if there is one.
    fn buffer(&mut self, bytes: usize) -> Vec<u8>;
    /// Bytes that wait for whoever asked for them.
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

/// Commands of this process. It has at most as many outstanding as the queue has slots.
#[derive(Debug, Default)]
pub(super) struct LocalFront {
    commands: VecDeque<Command>,
    /// Slots and statuses of the commands that ended.
    ends: VecDeque<(u16, Status)>,
    spare: Vec<Vec<u8>>,
}

impl LocalFront {
    /// Submits a command.
    pub(super) fn submit(&mut self, command: Command) {
        self.commands.push_back(command);
    }

    /// Whether [`Self::next_end`] has something to tell.
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
