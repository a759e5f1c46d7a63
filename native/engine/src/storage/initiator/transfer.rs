//! Transfers that a caller starts on a host's I/O queue, and how they are split into commands.

use std::time::Duration;

use sealane_proto::nvme::Reason;
use sealane_proto::nvme::host_command::{BLOCKS_MAX, HostCommand};
use sealane_proto::nvme::operation::LbaRange;
use sealane_proto::nvme::status::Status;

/// Memory of a caller. The queue accesses it from its own thread until the transfer has ended.
pub trait TransferBuffer: std::fmt::Debug + Send {
    /// Length in bytes.
    fn bytes(&self) -> usize;
    /// Fills `into` with the bytes from `offset` on.
    fn copy_to(&self, offset: usize, into: &mut [u8]);
    /// Copies `data` to `offset`.
    fn copy_from(&mut self, offset: usize, data: &[u8]);
}

/// An operation on blocks, split into as many commands as necessary.
#[derive(Debug)]
pub enum Transfer {
    /// Fill the buffer.
    Read(Box<dyn TransferBuffer>),
    /// Write the buffer, durably if `is_forced`.
    Write {
        /// Whole blocks.
        data: Box<dyn TransferBuffer>,
        /// Whether it must be durable before it completes.
        is_forced: bool,
    },
    /// Compare the stored blocks with the buffer.
    Compare(Box<dyn TransferBuffer>),
    /// Make blocks read as zeros.
    WriteZeroes {
        /// Number of blocks.
        blocks: u64,
        /// Whether they may be deallocated.
        deallocate: bool,
    },
    /// Verify stored blocks without transferring them.
    Verify {
        /// Number of blocks.
        blocks: u64,
    },
    /// Make completed writes durable; one command.
    Flush,
    /// Deallocate up to 256 ranges; one command.
    Deallocate(Vec<LbaRange>),
    /// Write `data` if the stored blocks equal `expected`; one (fused) command.
    CompareAndWrite {
        /// The blocks that must be stored now.
        expected: Vec<u8>,
        /// The blocks to store then.
        data: Vec<u8>,
    },
}

/// A transfer didn't succeed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TransferError {
    /// The controller answered with an error.
    #[error("{status} at LBA {lba}")]
    Status {
        /// The status in its answer.
        status: Status,
        /// First LBA of the command.
        lba: u64,
    },
    /// The queue ended; commands in flight have an unknown outcome.
    #[error("queue ended: {detail} [{}]", reason.id())]
    Ended {
        /// The reason.
        reason: Reason,
        /// Description.
        detail: String,
    },
    /// A command wasn't answered in time: its outcome is unknown, and the queue ends.
    #[error("no answer for {0:?}")]
    TimedOut(Duration),
    /// The caller cancelled it; commands that were in flight may have been executed.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// A read returned other bytes than were written.
    #[error("the data at LBA {lba} are not what was written there last")]
    Differs {
        /// First LBA of the command.
        lba: u64,
    },
    /// A load that is to be verified can't be.
    #[error(
        "only a load of writes on more places than its depth, on queues of its own, is verified"
    )]
    Unverifiable,
    /// The queue has reached its limit of transfers.
    #[error("{0} transfers are waiting for this queue already")]
    Busy(usize),
    /// No command can have this length.
    #[error("compare-and-write needs equal buffers of whole blocks, deallocate 1 to 256 ranges")]
    Length,
    /// The buffer isn't a whole number of blocks.
    #[error("a transfer moves whole blocks of {0} bytes")]
    Misaligned(usize),
}

/// Number of blocks of a transfer, and of each of its commands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    pub(super) blocks: u64,
    pub(super) step: u64,
}

impl Transfer {
    /// How the transfer is split if one command moves at most `io_bytes`.
    pub(super) fn extent(
        &self,
        io_bytes: usize,
        block_bytes: usize,
    ) -> Result<Extent, TransferError> {
        let bytes = match self {
            Self::Read(buffer) | Self::Compare(buffer) | Self::Write { data: buffer, .. } => {
                buffer.bytes()
            }
            Self::WriteZeroes { blocks, .. } | Self::Verify { blocks } => {
                return Ok(Extent { blocks: *blocks, step: BLOCKS_MAX.into() });
            }
            Self::Flush | Self::Deallocate(_) | Self::CompareAndWrite { .. } => {
                return Ok(Extent { blocks: 1, step: 1 });
            }
        };
        if !bytes.is_multiple_of(block_bytes) {
            return Err(TransferError::Misaligned(block_bytes));
        }
        let step = (io_bytes / block_bytes) as u64;
        Ok(Extent { blocks: (bytes / block_bytes) as u64, step })
    }

    /// Bytes that a command for `blocks` moves.
    pub(super) fn moved(&self, blocks: u64, block_bytes: usize) -> usize {
        match self {
            Self::Read(_) | Self::Write { .. } | Self::Compare(_) => blocks as usize * block_bytes,
            Self::CompareAndWrite { data, .. } => data.len(),
            Self::WriteZeroes { .. } | Self::Verify { .. } | Self::Flush | Self::Deallocate(_) => 0,
        }
    }

    /// The command for `blocks` at `first` of a transfer that begins at `lba`. `buffer` supplies
    /// memory for its data.
    pub(super) fn command(
        &self,
        lba: u64,
        first: u64,
        blocks: u64,
        block_bytes: usize,
        buffer: impl FnOnce(usize) -> Vec<u8>,
    ) -> HostCommand {
        let lba = lba.saturating_add(first);
        let count = blocks as u32;
        let part = |all: &dyn TransferBuffer| {
            let mut data = buffer(blocks as usize * block_bytes);
            all.copy_to(first as usize * block_bytes, &mut data);
            data
        };
        match self {
            Self::Read(_) => HostCommand::Read { lba, blocks: count },
            Self::Write { data, is_forced } => {
                HostCommand::Write { lba, data: part(&**data), is_forced: *is_forced }
            }
            Self::Compare(data) => HostCommand::Compare { lba, data: part(&**data) },
            Self::WriteZeroes { deallocate, .. } => {
                HostCommand::WriteZeroes { lba, blocks: count, deallocate: *deallocate }
            }
            Self::Verify { .. } => HostCommand::Verify { lba, blocks: count },
            Self::Flush => HostCommand::Flush,
            Self::Deallocate(ranges) => HostCommand::Deallocate(ranges.clone()),
            Self::CompareAndWrite { expected, data } => {
                HostCommand::CompareAndWrite { lba, expected: expected.clone(), data: data.clone() }
            }
        }
    }
}
