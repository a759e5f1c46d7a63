//! One back-end queue: its connection, its state machine and the use of its keys.

use sealane_proto::freshness::openings::{Made, Openings};
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::{HostQueue, SubmitError};
use sealane_proto::sector::BLOCK_BYTES;

use super::super::connection::Connection;

/// A secure queue to the target.
#[derive(Debug)]
pub(super) struct Back {
    pub(super) connection: Connection,
    pub(super) queue: HostQueue,
    /// Association epoch of its keys.
    pub(super) epoch: u64,
    /// Incarnation of the target that they are bound to.
    pub(super) incarnation: u64,
    /// Maximum blocks of one command.
    pub(super) blocks_max: u32,
    /// Whether the target has answered which openings its store had, and how far they had come.
    pub(super) has_openings_answer: bool,
    /// Its answer; None if the store keeps no marks.
    pub(super) openings: Option<Openings>,
    /// Whether a change was sent on it.
    pub(super) has_sent: bool,
    /// Commands submitted under its keys.
    commands: u64,
    is_rekey_asked: bool,
}

impl Back {
    pub(super) fn new(
        connection: Connection,
        queue: HostQueue,
        (epoch, incarnation): (u64, u64),
        transfer_max: usize,
    ) -> Self {
        let blocks_max = (transfer_max / BLOCK_BYTES).max(1) as u32;
        Self {
            connection,
            queue,
            epoch,
            incarnation,
            blocks_max,
            has_openings_answer: false,
            openings: None,
            has_sent: false,
            commands: 0,
            is_rekey_asked: false,
        }
    }

    /// The opening and mark of a change with this mark; None if the target's store keeps no marks.
    pub(super) fn made(&self, mark: u64) -> Option<Made> {
        self.openings.as_ref().map(|openings| openings.made(mark))
    }

    /// Whether one more command may be submitted under its keys.
    pub(super) fn can_submit(&self, commands_max: u64) -> bool {
        self.commands < commands_max && self.queue.can_submit()
    }

    /// Submits a command.
    pub(super) fn submit(&mut self, tag: u64, command: HostCommand) -> Result<(), SubmitError> {
        self.queue.submit(tag, command).map_err(|(error, _)| error)?;
        self.commands += 1;
        Ok(())
    }

    /// Whether its keys must be replaced soon; true only once.
    pub(super) fn take_rekey_due(&mut self, commands_max: u64) -> bool {
        let is_due = !self.is_rekey_asked && self.commands >= commands_max - commands_max / 8;
        self.is_rekey_asked |= is_due;
        is_due
    }
}
