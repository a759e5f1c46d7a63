//! Host side of a plain I/O queue: moves whole buffers with many commands in flight.
//!
//! It runs on the caller's thread, one transfer at a time; progress can be read from any other.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::host_command::{BLOCKS_MAX, HostCommand};
use sealane_proto::nvme::host_queue::{HostEvent, HostLimits, HostQueue, SubmitError};
use sealane_proto::nvme::operation::LbaRange;
use sealane_proto::nvme::status::Status;

use super::connection::{Connection, Gone, wait};

/// Most bytes in flight: more would only wait in socket buffers and fall out of the caches.
const IN_FLIGHT_BYTES: usize = 512 * 1024;

/// A transfer didn't succeed.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The controller answered with an error.
    #[error("{status} at LBA {lba}")]
    Status {
        /// What it answered.
        status: Status,
        /// First LBA of the command.
        lba: u64,
    },
    /// The queue ended; commands in flight have an unknown outcome.
    #[error("queue ended: {detail} [{}]", reason.id())]
    Ended {
        /// Why.
        reason: Reason,
        /// In words.
        detail: String,
    },
    /// A command wasn't answered in time: its outcome is unknown, and the queue ends.
    #[error("no answer for {0:?}")]
    TimedOut(Duration),
    /// No command can be as long as this one would have to be.
    #[error("compare-and-write takes equal buffers of whole blocks; deallocate 1 to 256 ranges")]
    Length,
    /// The buffer isn't a whole number of blocks.
    #[error("a transfer moves whole blocks of {0} bytes")]
    Misaligned(usize),
}

/// What a call does to blocks, cut into as many commands as it takes.
enum Transfer<'a> {
    Write { data: &'a [u8], is_forced: bool },
    Read(&'a mut [u8]),
    Compare(&'a [u8]),
    WriteZeroes { blocks: u64, deallocate: bool },
    Verify { blocks: u64 },
    // These are one command each.
    Flush,
    Deallocate(&'a [LbaRange]),
    CompareAndWrite { expected: &'a [u8], data: &'a [u8] },
}

/// Blocks of a transfer: all of them, and those of one command.
#[derive(Clone, Copy)]
struct Extent {
    blocks: u64,
    step: u64,
}

#[derive(Debug)]
struct Inner {
    connection: Connection,
    queue: HostQueue,
    /// Tag of each command in flight and when its time is up, oldest first.
    deadlines: Vec<(u64, Instant)>,
    is_ended: bool,
}

/// A plain I/O queue of a host.
#[derive(Debug)]
pub struct HostVolumeQueue {
    inner: Mutex<Inner>,
    stop: OwnedFd,
    progress: AtomicU64,
    io_bytes: usize,
    block_bytes: usize,
    timeout: Duration,
}

impl HostVolumeQueue {
    /// Takes a connected socket whose Connect command succeeded. Transfers are cut into commands
    /// of `io_bytes`; `timeout` is how long one command may take.
    pub fn new(
        fd: OwnedFd,
        limits: HostLimits,
        io_bytes: usize,
        timeout: Duration,
    ) -> std::io::Result<Self> {
        let block_bytes = limits.block_bytes;
        let io_bytes = io_bytes.min(limits.transfer_max) / block_bytes * block_bytes;
        Ok(Self {
            inner: Mutex::new(Inner {
                connection: Connection::new(fd),
                queue: HostQueue::new(limits, None),
                deadlines: Vec::new(),
                is_ended: false,
            }),
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            progress: 0.into(),
            io_bytes: io_bytes.max(block_bytes),
            block_bytes,
            timeout,
        })
    }

    /// Writes the buffer at `lba`; durable before it returns if `is_forced`.
    pub fn write(&self, lba: u64, data: &[u8], is_forced: bool) -> Result<(), TransferError> {
        self.run(lba, Transfer::Write { data, is_forced })
    }

    /// Fills the buffer from `lba`.
    pub fn read(&self, lba: u64, into: &mut [u8]) -> Result<(), TransferError> {
        self.run(lba, Transfer::Read(into))
    }

    /// Compares the stored blocks with the buffer; the status says whether they are equal.
    pub fn compare(&self, lba: u64, data: &[u8]) -> Result<(), TransferError> {
        self.run(lba, Transfer::Compare(data))
    }

    /// Makes blocks read as zeros.
    pub fn write_zeroes(
        &self,
        lba: u64,
        blocks: u64,
        deallocate: bool,
    ) -> Result<(), TransferError> {
        self.run(lba, Transfer::WriteZeroes { blocks, deallocate })
    }

    /// Checks stored blocks where they are.
    pub fn verify(&self, lba: u64, blocks: u64) -> Result<(), TransferError> {
        self.run(lba, Transfer::Verify { blocks })
    }

    /// Deallocates up to 256 ranges with one command.
    pub fn deallocate(&self, ranges: &[LbaRange]) -> Result<(), TransferError> {
        self.run(0, Transfer::Deallocate(ranges))
    }

    /// Writes `data` if the stored blocks equal `expected`, as one (fused) step.
    pub fn compare_and_write(
        &self,
        lba: u64,
        expected: &[u8],
        data: &[u8],
    ) -> Result<(), TransferError> {
        self.run(lba, Transfer::CompareAndWrite { expected, data })
    }

    /// Makes completed writes durable.
    pub fn flush(&self) -> Result<(), TransferError> {
        self.run(0, Transfer::Flush)
    }

    /// Bytes moved since the queue was made.
    pub fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Ends the queue; a transfer that runs on another thread returns with an error.
    pub fn close(&self) {
        // It fails only when the counter is full, and then the queue is told already.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.is_ended = true;
        // The peer sees the end now, not when the last reference goes.
        let _ = rustix::net::shutdown(inner.connection.as_fd(), rustix::net::Shutdown::Both);
    }

    fn run(&self, lba: u64, mut transfer: Transfer<'_>) -> Result<(), TransferError> {
        let extent = self.extent(&transfer)?;
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.is_ended {
            return Err(closed("the queue was closed".into()));
        }
        let outcome = self.pump(&mut inner, lba, extent, &mut transfer);
        // A status ends a command and a refused length sends none; anything else leaves commands
        // in flight behind.
        if !matches!(outcome, Ok(()) | Err(TransferError::Status { .. } | TransferError::Length)) {
            inner.is_ended = true;
        }
        outcome
    }

    fn extent(&self, transfer: &Transfer<'_>) -> Result<Extent, TransferError> {
        let bytes = match transfer {
            Transfer::Write { data, .. } | Transfer::Compare(data) => data.len(),
            Transfer::Read(into) => into.len(),
            Transfer::WriteZeroes { blocks, .. } | Transfer::Verify { blocks } => {
                return Ok(Extent { blocks: *blocks, step: BLOCKS_MAX.into() });
            }
            Transfer::Flush | Transfer::Deallocate(_) | Transfer::CompareAndWrite { .. } => {
                return Ok(Extent { blocks: 1, step: 1 });
            }
        };
        if !bytes.is_multiple_of(self.block_bytes) {
            return Err(TransferError::Misaligned(self.block_bytes));
        }
        let step = (self.io_bytes / self.block_bytes) as u64;
        Ok(Extent { blocks: (bytes / self.block_bytes) as u64, step })
    }

    /// Submits and completes until everything has ended. `lba` is the first of the transfer; a
    /// command's tag is its first block relative to that.
    fn pump(
        &self,
        inner: &mut Inner,
        lba: u64,
        extent: Extent,
        transfer: &mut Transfer<'_>,
    ) -> Result<(), TransferError> {
        let in_flight_max = (IN_FLIGHT_BYTES / self.io_bytes).max(1);
        let mut submitted = 0;
        let mut failed = None;
        loop {
            while submitted < extent.blocks
                && failed.is_none()
                && inner.deadlines.len() < in_flight_max
            {
                let blocks = extent.step.min(extent.blocks - submitted);
                let command = self.command(inner, lba, submitted, blocks, transfer);
                match inner.queue.submit(submitted, command) {
                    Ok(()) => {}
                    // It waits for others to end; alone it would wait for ever.
                    Err((SubmitError::Full, _)) if !inner.deadlines.is_empty() => break,
                    Err((SubmitError::Length, _)) if inner.deadlines.is_empty() => {
                        return Err(TransferError::Length);
                    }
                    Err((error, _)) => return Err(closed(error.to_string())),
                }
                inner.deadlines.push((submitted, Instant::now() + self.timeout));
                submitted += blocks;
            }
            if inner.deadlines.is_empty() {
                return failed.map_or(Ok(()), Err);
            }
            self.exchange(inner)?;
            while let Some(event) = inner.queue.next_event() {
                match event {
                    HostEvent::Completed { tag, status, data } => {
                        inner.deadlines.retain(|(other, _)| *other != tag);
                        let blocks = extent.step.min(extent.blocks - tag);
                        let ended = self.ended(lba, tag, blocks, status, &data, transfer);
                        inner.queue.recycle(data);
                        failed = failed.or(ended.err());
                    }
                    HostEvent::Failed { reason, detail, .. } => {
                        // The controller hears what it did wrong.
                        inner.connection.farewell(inner.queue.transmit());
                        return Err(TransferError::Ended { reason, detail });
                    }
                }
            }
        }
    }

    /// Sends what waits and receives what is there, once; waits for either.
    fn exchange(&self, inner: &mut Inner) -> Result<(), TransferError> {
        inner.connection.send(inner.queue.transmit()).map_err(|Gone(detail)| closed(detail))?;
        let interest = Connection::interest(true, inner.queue.transmit().pending_bytes());
        let descriptors =
            [(inner.connection.as_fd(), interest), (self.stop.as_fd(), PollFlags::IN)];
        let oldest = inner.deadlines.first().map(|(_, deadline)| *deadline);
        let left = oldest.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let [ready, stopped] =
            wait(descriptors, left).map_err(|error| closed(error.to_string()))?;
        if !stopped.is_empty() {
            return Err(closed("the queue was closed".into()));
        }
        if !ready.is_empty() && ready != PollFlags::OUT {
            let received = inner.connection.receive(&mut inner.queue);
            received.map_err(|Gone(detail)| closed(detail))?;
        } else if left.is_some_and(|left| left.is_zero()) {
            return Err(TransferError::TimedOut(self.timeout));
        }
        Ok(())
    }

    fn command(
        &self,
        inner: &mut Inner,
        lba: u64,
        first: u64,
        blocks: u64,
        transfer: &Transfer<'_>,
    ) -> HostCommand {
        let lba = lba.saturating_add(first);
        let count = blocks as u32;
        let mut part = |all: &[u8]| {
            let start = first as usize * self.block_bytes;
            let bytes = blocks as usize * self.block_bytes;
            let mut buffer = inner.queue.buffer(bytes);
            buffer.copy_from_slice(all.get(start..start + bytes).unwrap_or_default());
            buffer
        };
        match transfer {
            Transfer::Read(_) => HostCommand::Read { lba, blocks: count },
            Transfer::Write { data, is_forced } => {
                HostCommand::Write { lba, data: part(data), is_forced: *is_forced }
            }
            Transfer::Compare(data) => HostCommand::Compare { lba, data: part(data) },
            Transfer::WriteZeroes { deallocate, .. } => {
                HostCommand::WriteZeroes { lba, blocks: count, deallocate: *deallocate }
            }
            Transfer::Verify { .. } => HostCommand::Verify { lba, blocks: count },
            Transfer::Flush => HostCommand::Flush,
            Transfer::Deallocate(ranges) => HostCommand::Deallocate(ranges.to_vec()),
            Transfer::CompareAndWrite { expected, data } => HostCommand::CompareAndWrite {
                lba,
                expected: expected.to_vec(),
                data: data.to_vec(),
            },
        }
    }

    fn ended(
        &self,
        lba: u64,
        first: u64,
        blocks: u64,
        status: Status,
        data: &[u8],
        transfer: &mut Transfer<'_>,
    ) -> Result<(), TransferError> {
        if !status.is_success() {
            return Err(TransferError::Status { status, lba: lba.saturating_add(first) });
        }
        let moved = match transfer {
            Transfer::Read(into) => {
                let start = first as usize * self.block_bytes;
                if let Some(place) = into.get_mut(start..start + data.len()) {
                    place.copy_from_slice(data);
                }
                data.len()
            }
            Transfer::Write { .. } | Transfer::Compare(_) => blocks as usize * self.block_bytes,
            Transfer::CompareAndWrite { data, .. } => data.len(),
            Transfer::WriteZeroes { .. }
            | Transfer::Verify { .. }
            | Transfer::Flush
            | Transfer::Deallocate(_) => 0,
        };
        self.progress.fetch_add(moved as u64, Ordering::Relaxed);
        Ok(())
    }
}

pub(super) fn closed(detail: String) -> TransferError {
    TransferError::Ended { reason: Reason::QueueClosed, detail }
}
