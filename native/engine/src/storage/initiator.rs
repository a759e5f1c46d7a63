//! Host side of a plain I/O queue: moves whole buffers with many commands in flight.
//!
//! It runs on the caller's thread, one transfer at a time; progress can be read from any other.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::{HostEvent, HostLimits, HostQueue};
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
    /// Nothing was heard for too long.
    #[error("no answer for {0:?}")]
    TimedOut(Duration),
    /// The buffer isn't a whole number of blocks.
    #[error("a transfer moves whole blocks of {0} bytes")]
    Misaligned(usize),
}

enum Transfer<'a> {
    Write(&'a [u8]),
    Read(&'a mut [u8]),
    Flush,
}

#[derive(Debug)]
struct Inner {
    connection: Connection,
    queue: HostQueue,
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
    /// of `io_bytes`; `timeout` is how long nothing may be heard.
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
                is_ended: false,
            }),
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            progress: 0.into(),
            io_bytes: io_bytes.max(block_bytes),
            block_bytes,
            timeout,
        })
    }

    /// Writes the buffer at `lba`.
    pub fn write(&self, lba: u64, data: &[u8]) -> Result<(), TransferError> {
        self.run(lba, Transfer::Write(data))
    }

    /// Fills the buffer from `lba`.
    pub fn read(&self, lba: u64, into: &mut [u8]) -> Result<(), TransferError> {
        self.run(lba, Transfer::Read(into))
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
        let length = match &transfer {
            Transfer::Write(data) => data.len(),
            Transfer::Read(into) => into.len(),
            Transfer::Flush => self.block_bytes,
        };
        if !length.is_multiple_of(self.block_bytes) {
            return Err(TransferError::Misaligned(self.block_bytes));
        }
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.is_ended {
            return Err(closed("the queue was closed".into()));
        }
        let outcome = self.pump(&mut inner, lba, length, &mut transfer);
        if !matches!(outcome, Ok(()) | Err(TransferError::Status { .. })) {
            inner.is_ended = true;
        }
        outcome
    }

    fn pump(
        &self,
        inner: &mut Inner,
        lba: u64,
        length: usize,
        transfer: &mut Transfer<'_>,
    ) -> Result<(), TransferError> {
        let in_flight_max = (IN_FLIGHT_BYTES / self.io_bytes).max(1);
        let mut submitted = 0;
        let mut failed = None;
        loop {
            while submitted < length
                && failed.is_none()
                && inner.queue.can_submit()
                && inner.queue.outstanding() < in_flight_max
            {
                submitted += self.submit(inner, lba, submitted, length, transfer)?;
            }
            if inner.queue.outstanding() == 0 {
                return failed.map_or(Ok(()), Err);
            }
            inner.connection.send(inner.queue.transmit()).map_err(|Gone(detail)| closed(detail))?;
            let interest = Connection::interest(true, inner.queue.transmit().pending_bytes());
            let descriptors =
                [(inner.connection.as_fd(), interest), (self.stop.as_fd(), PollFlags::IN)];
            let [ready, stopped] =
                wait(descriptors, Some(self.timeout)).map_err(|error| closed(error.to_string()))?;
            if !stopped.is_empty() {
                return Err(closed("the queue was closed".into()));
            }
            if ready.is_empty() {
                return Err(TransferError::TimedOut(self.timeout));
            }
            if ready != PollFlags::OUT {
                let received = inner.connection.receive(&mut inner.queue);
                received.map_err(|Gone(detail)| closed(detail))?;
            }
            while let Some(event) = inner.queue.next_event() {
                match event {
                    HostEvent::Completed { tag, status, data } => {
                        let ended = self.ended(lba, tag as usize, status, &data, transfer);
                        inner.queue.recycle(data);
                        failed = failed.or(ended.err());
                    }
                    HostEvent::Failed { reason, detail, .. } => {
                        return Err(TransferError::Ended { reason, detail });
                    }
                }
            }
        }
    }

    fn submit(
        &self,
        inner: &mut Inner,
        lba: u64,
        offset: usize,
        length: usize,
        transfer: &Transfer<'_>,
    ) -> Result<usize, TransferError> {
        let bytes = self.io_bytes.min(length - offset);
        let lba = lba + (offset / self.block_bytes) as u64;
        let tag = offset as u64;
        let command = match transfer {
            Transfer::Read(_) => {
                HostCommand::Read { lba, blocks: (bytes / self.block_bytes) as u32 }
            }
            Transfer::Flush => HostCommand::Flush,
            Transfer::Write(data) => {
                let mut buffer = inner.queue.buffer(bytes);
                buffer.copy_from_slice(data.get(offset..offset + bytes).unwrap_or_default());
                HostCommand::Write { lba, data: buffer, is_forced: false }
            }
        };
        let submitted = inner.queue.submit(tag, command);
        submitted.map(|()| bytes).map_err(|(error, _)| closed(error.to_string()))
    }

    fn ended(
        &self,
        lba: u64,
        offset: usize,
        status: Status,
        data: &[u8],
        transfer: &mut Transfer<'_>,
    ) -> Result<(), TransferError> {
        if !status.is_success() {
            let lba = lba + (offset / self.block_bytes) as u64;
            return Err(TransferError::Status { status, lba });
        }
        let moved = match transfer {
            Transfer::Read(into) => {
                if let Some(place) = into.get_mut(offset..offset + data.len()) {
                    place.copy_from_slice(data);
                }
                data.len()
            }
            Transfer::Write(all) => self.io_bytes.min(all.len() - offset),
            Transfer::Flush => 0,
        };
        self.progress.fetch_add(moved as u64, Ordering::Relaxed);
        Ok(())
    }
}

pub(super) fn closed(detail: String) -> TransferError {
    TransferError::Ended { reason: Reason::QueueClosed, detail }
}
