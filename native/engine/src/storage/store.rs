//! The interface of block stores to the queue threads of a target.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::openings::Openings;
use sealane_proto::link::Nanos;
pub use sealane_proto::sector::{BLOCK_BYTES, DATA_BYTES, METADATA_BYTES};

use super::events::EventLog;
use super::upkeep::Upkeep;

/// Storage of a namespace's blocks. Every queue thread opens its own channel.
///
/// A sealed store (4160-byte blocks) changes the data and metadata of a block atomically, even at a
/// power cut. A flush makes durable every write, on any channel, that had completed before the
/// flush was submitted; a durable write is durable when it completes. The caller must order
/// operations on the same block. Blocks never written, or deallocated, read as zeros.
///
/// The store knows which version of a sealed block is current: a read returns that version or an
/// error. Only stores of volumes of mode `off` return whatever their device has.
pub trait BlockStore: Debug + Send + Sync {
    /// Bytes of a block: 4096 (plain), or 4160 (sealed: data, then 64 bytes of metadata).
    fn block_bytes(&self) -> usize;
    /// Number of blocks.
    fn block_count(&self) -> u64;
    /// Opens a channel to submit operations on.
    fn open(&self) -> io::Result<Box<dyn StoreChannel>>;
    /// Name of the block layout of a store that keeps freshness; empty if it keeps none.
    fn layout(&self) -> &'static str {
        ""
    }
    /// Makes the store report faults to `events` that it finds in the background.
    fn tell_events(&self, _events: &Arc<EventLog>) {}
    /// The milestone of a store that keeps freshness; if read when a flush has completed, it covers
    /// that flush. None if the store keeps no freshness.
    fn milestone(&self) -> Option<Milestone> {
        None
    }
    /// Whether the store, as it was opened, contains everything that was flushed at this milestone.
    fn contains(&self, _told: &Milestone) -> bool {
        false
    }
    /// The mark of a change that has completed and whose blocks aren't being changed now: a
    /// position behind everything that the change wrote to the log. [`BlockStore::openings`]
    /// compares with it later. 0 if the store keeps no marks.
    fn mark(&self) -> u64 {
        0
    }
    /// This opening, and how far earlier ones had come, in marks: a change with a mark up to that
    /// is contained in the store. A change whose mark was known when a flush began is always
    /// contained once that flush has succeeded. None if the store keeps no freshness and so no
    /// marks.
    fn openings(&self) -> Option<Openings> {
        None
    }
    /// Checks and refreshes the store's contents for one background job. None if the store has
    /// nothing to check.
    fn upkeep(&self) -> io::Result<Option<Box<dyn Upkeep>>> {
        Ok(None)
    }
    /// Reserves space on the device for these blocks, so that writing them can't fail for lack of
    /// it; `StorageFull` if there isn't enough. Does nothing if every block has its space already,
    /// or if the device can't reserve any.
    fn reserve(&self, _blocks: Range<u64>) -> io::Result<()> {
        Ok(())
    }
    /// Extends the store to at least `block_count` blocks; new blocks are unwritten. After a power
    /// cut it has either its old or its new size. If the store is large enough already, makes sure
    /// that its size is durable. `ResourceBusy` while a channel or an upkeep is open,
    /// `InvalidInput` for an impossible size, `StorageFull` if its device has no space,
    /// `Unsupported` if this kind of store can't grow.
    fn extend(&mut self, block_count: u64) -> io::Result<()> {
        let detail = format!("a store of this kind doesn't grow to {block_count} blocks");
        Err(io::Error::new(io::ErrorKind::Unsupported, detail))
    }
    /// Counters by name, including those of [`StoreCounters`].
    fn statistics(&self) -> Vec<(&'static str, u64)>;
}

/// A queue thread's access to a store.
pub trait StoreChannel: Send {
    /// Starts an operation, which may complete at once. `poll` reports its end, including failures
    /// and requests out of range.
    fn submit(&mut self, ticket: u64, request: StoreRequest);
    /// Passes submitted operations to the device and moves completed ones into `done`, in order of
    /// completion. Never blocks. Call it once after a batch of submissions.
    fn poll(&mut self, done: &mut Vec<StoreDone>);
    /// Number of submitted operations whose end `poll` has not reported yet.
    fn in_flight(&self) -> usize;
    /// Readable when `poll` has something to report; None if `due` gives that time, or if every
    /// operation completes within `submit`.
    fn as_fd(&self) -> Option<BorrowedFd<'_>>;
    /// When the next operation completes, on the engine's clock, if that is known and `as_fd`
    /// doesn't signal it.
    fn due(&self) -> Option<Nanos> {
        None
    }
}

/// One operation on a store. Buffers consist of whole blocks and are returned when the operation
/// ends.
#[derive(Debug)]
pub enum StoreRequest {
    /// Fills `buffer` with blocks from `lba`.
    Read {
        /// First block.
        lba: u64,
        /// Receives the blocks; its length determines how many.
        buffer: Vec<u8>,
    },
    /// Writes the blocks in `buffer`.
    Write {
        /// First block.
        lba: u64,
        /// The blocks.
        buffer: Vec<u8>,
        /// Whether it must be durable when it completes.
        durable: bool,
    },
    /// Makes all completed writes and deallocations durable.
    Flush,
    /// Makes blocks read as zeros; atomic for each block.
    Deallocate {
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u64,
    },
}

impl StoreRequest {
    /// Refuses ranges beyond the store and buffers that are not whole blocks.
    pub fn check(&self, block_bytes: usize, block_count: u64) -> io::Result<()> {
        let (lba, blocks) = match self {
            Self::Flush => return Ok(()),
            Self::Deallocate { lba, blocks } => (*lba, *blocks),
            Self::Read { lba, buffer } | Self::Write { lba, buffer, .. } => {
                if buffer.is_empty() || !buffer.len().is_multiple_of(block_bytes) {
                    let detail = format!("{} bytes aren't whole blocks", buffer.len());
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
                }
                (*lba, (buffer.len() / block_bytes) as u64)
            }
        };
        match lba.checked_add(blocks) {
            Some(end) if end <= block_count => Ok(()),
            _ => {
                let detail = format!("{blocks} blocks from {lba} in a store of {block_count}");
                Err(io::Error::new(io::ErrorKind::InvalidInput, detail))
            }
        }
    }

    /// The blocks of this operation; none for a flush.
    #[must_use]
    pub fn blocks(&self, block_bytes: usize) -> Range<u64> {
        match self {
            Self::Flush => 0..0,
            Self::Deallocate { lba, blocks } => *lba..lba + blocks,
            Self::Read { lba, buffer } | Self::Write { lba, buffer, .. } => {
                *lba..lba + (buffer.len() / block_bytes) as u64
            }
        }
    }

    /// The same change, restricted to some of its blocks.
    ///
    /// # Panics
    ///
    /// If it isn't a change, or doesn't include all of these blocks.
    #[must_use]
    pub fn part(&self, range: Range<u64>, block_bytes: usize) -> Self {
        let blocks = range.end - range.start;
        match self {
            Self::Deallocate { .. } => Self::Deallocate { lba: range.start, blocks },
            Self::Write { lba, buffer, durable } => {
                let bytes = |block: u64| (block - lba) as usize * block_bytes;
                let buffer = buffer[bytes(range.start)..bytes(range.end)].to_vec();
                Self::Write { lba: range.start, buffer, durable: *durable }
            }
            Self::Read { .. } | Self::Flush => unreachable!("it changes nothing"),
        }
    }

    /// The buffer; empty if there is none.
    #[must_use]
    pub fn into_buffer(self) -> Vec<u8> {
        match self {
            Self::Read { buffer, .. } | Self::Write { buffer, .. } => buffer,
            Self::Flush | Self::Deallocate { .. } => Vec::new(),
        }
    }
}

/// The end of an operation.
#[derive(Debug)]
pub struct StoreDone {
    /// The ticket given to `submit`.
    pub ticket: u64,
    /// The outcome. After a failed write each block is old or new; in a sealed store never a
    /// mixture.
    pub result: io::Result<()>,
    /// The operation's buffer; empty if it has none.
    pub buffer: Vec<u8>,
}

/// Counts the operations of a store, over all channels.
#[derive(Debug, Default)]
pub struct StoreCounters {
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    deallocations: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    failures: AtomicU64,
}

fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

impl StoreCounters {
    /// Counts a completed read of `bytes`.
    pub fn read(&self, bytes: usize) {
        add(&self.reads, 1);
        add(&self.bytes_read, bytes as u64);
    }

    /// Counts a completed write of `bytes`.
    pub fn written(&self, bytes: usize) {
        add(&self.writes, 1);
        add(&self.bytes_written, bytes as u64);
    }

    /// Counts a flush, requested by a host or shared by durable writes.
    pub fn flushed(&self) {
        add(&self.flushes, 1);
    }

    /// Counts a deallocation.
    pub fn deallocated(&self) {
        add(&self.deallocations, 1);
    }

    /// Counts a failed operation.
    pub fn failed(&self) {
        add(&self.failures, 1);
    }

    /// Counts the end of an operation; its buffer must be back in the request.
    pub fn ended(&self, request: &StoreRequest, result: &io::Result<()>) {
        match (request, result) {
            (_, Err(_)) => self.failed(),
            (StoreRequest::Read { buffer, .. }, Ok(())) => self.read(buffer.len()),
            (StoreRequest::Write { buffer, .. }, Ok(())) => self.written(buffer.len()),
            (StoreRequest::Flush, Ok(())) => self.flushed(),
            (StoreRequest::Deallocate { .. }, Ok(())) => self.deallocated(),
        }
    }

    /// Counters by name.
    pub fn by_name(&self) -> Vec<(&'static str, u64)> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        vec![
            ("device_reads", read(&self.reads)),
            ("device_writes", read(&self.writes)),
            ("device_flushes", read(&self.flushes)),
            ("device_deallocations", read(&self.deallocations)),
            ("device_bytes_read", read(&self.bytes_read)),
            ("device_bytes_written", read(&self.bytes_written)),
            ("device_failures", read(&self.failures)),
        ]
    }
}
