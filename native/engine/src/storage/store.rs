//! Where a target keeps its blocks: what every store offers to the queue threads.

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

/// Where a namespace keeps its blocks. Every queue thread opens a channel of its own.
///
/// A sealed store (4160-byte blocks) changes data and metadata of a block together or not at all,
/// at any power cut. A completed flush makes every write durable that had completed before it was
/// submitted, on whatever channel; a durable write is durable itself when it ends. Operations in
/// flight together on the same block are the caller's to order. Blocks never written, or
/// deallocated, read as zeros.
///
/// The store itself knows which version of a sealed block is the current one: a read returns that
/// one or an error. Only those that volumes of mode `off` lie on bare return what their device has.
pub trait BlockStore: Debug + Send + Sync {
    /// Bytes of a block: 4096 (plain), or 4160 (sealed: data, then 64 bytes of metadata).
    fn block_bytes(&self) -> usize;
    /// Blocks of the store.
    fn block_count(&self) -> u64;
    /// A channel to submit operations on.
    fn open(&self) -> io::Result<Box<dyn StoreChannel>>;
    /// How a store that keeps freshness lays blocks out, for people; empty: it keeps none.
    fn layout(&self) -> &'static str {
        ""
    }
    /// Has the store tell what it finds wrong unasked, from now on.
    fn tell_events(&self, _events: &Arc<EventLog>) {}
    /// How far a store that keeps freshness has come: what it tells with the end of a flush has all
    /// of that flush. None: it keeps none.
    fn milestone(&self) -> Option<Milestone> {
        None
    }
    /// Whether the store, as it was opened, has everything that was flushed when this was told.
    fn contains(&self, _told: &Milestone) -> bool {
        false
    }
    /// The mark of a change that has ended and whose blocks nobody changes now: behind all that it
    /// wrote to the log. A store keeps it for what [`BlockStore::openings`] tells later. 0: it keeps
    /// none.
    fn mark(&self) -> u64 {
        0
    }
    /// This opening, and how far those before it had come, in marks: what was made with a mark up to
    /// that is contained. What a flush has that began when the mark was known is found always. None:
    /// the store keeps no freshness, so there is nothing that marks could order.
    fn openings(&self) -> Option<Openings> {
        None
    }
    /// Who checks and refreshes what the store holds, for one background job. None: it keeps nothing
    /// that could be checked.
    fn upkeep(&self) -> io::Result<Option<Box<dyn Upkeep>>> {
        Ok(None)
    }
    /// Has the device keep room for these blocks, so that writing them never fails for want of it;
    /// `StorageFull` if it has none. Nothing where each block has its room, or where it can't.
    fn reserve(&self, _blocks: Range<u64>) -> io::Result<()> {
        Ok(())
    }
    /// Gives the store `block_count` blocks at least, those that it gains unwritten; it has its old
    /// size or the new one after a power cut. Of a store that has them, makes sure that it keeps
    /// them. `ResourceBusy` while a channel or an upkeep is open, `InvalidInput` for a size that it
    /// can't take, `StorageFull` if its device has no room, `Unsupported` if it never grows.
    fn extend(&mut self, block_count: u64) -> io::Result<()> {
        let detail = format!("a store of this kind doesn't grow to {block_count} blocks");
        Err(io::Error::new(io::ErrorKind::Unsupported, detail))
    }
    /// Counters by name; those of [`StoreCounters`] at least.
    fn statistics(&self) -> Vec<(&'static str, u64)>;
}

/// Operations of one queue thread on a store.
pub trait StoreChannel: Send {
    /// Starts an operation, which may end at once. Failures, out-of-range ones too, are told by
    /// `poll` like every other end.
    fn submit(&mut self, ticket: u64, request: StoreRequest);
    /// Hands what was submitted to the device and moves finished operations into `done`, in the
    /// order in which they ended. Never blocks. Call it once after a batch of submissions.
    fn poll(&mut self, done: &mut Vec<StoreDone>);
    /// Operations submitted whose end `poll` has not told yet.
    fn in_flight(&self) -> usize;
    /// Readable when `poll` would find something; None if `due` says when it would, or if every
    /// operation ends inside `submit`.
    fn as_fd(&self) -> Option<BorrowedFd<'_>>;
    /// When the next operation ends, on the engine's clock, if that is known and nothing else tells.
    fn due(&self) -> Option<Nanos> {
        None
    }
}

/// One operation on a store. Buffers are whole blocks; they come back with the operation's end.
#[derive(Debug)]
pub enum StoreRequest {
    /// Fills `buffer` with blocks from `lba`.
    Read {
        /// First block.
        lba: u64,
        /// Where the blocks go; its length says how many.
        buffer: Vec<u8>,
    },
    /// Writes the blocks in `buffer`.
    Write {
        /// First block.
        lba: u64,
        /// The blocks.
        buffer: Vec<u8>,
        /// Whether it must be durable when it ends.
        durable: bool,
    },
    /// Makes all writes and deallocations that have ended durable.
    Flush,
    /// Makes blocks read as zeros, each of them at once.
    Deallocate {
        /// First block.
        lba: u64,
        /// How many.
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
                    let detail = format!("{} bytes are no whole blocks", buffer.len());
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

    /// The blocks that it names.
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

    /// The same change of some of its blocks.
    ///
    /// # Panics
    ///
    /// If it isn't a change, or doesn't have all of these blocks.
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

    /// The buffer, to give back.
    #[must_use]
    pub fn into_buffer(self) -> Vec<u8> {
        match self {
            Self::Read { buffer, .. } | Self::Write { buffer, .. } => buffer,
            Self::Flush | Self::Deallocate { .. } => Vec::new(),
        }
    }
}

/// How an operation ended.
#[derive(Debug)]
pub struct StoreDone {
    /// What the operation was submitted with.
    pub ticket: u64,
    /// An error leaves blocks being written old or new, each as a whole in a sealed store.
    pub result: io::Result<()>,
    /// The operation's buffer; empty for those without.
    pub buffer: Vec<u8>,
}

/// Operations that a store has executed, over all channels.
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
    /// Counts the end of a read of so many bytes.
    pub fn read(&self, bytes: usize) {
        add(&self.reads, 1);
        add(&self.bytes_read, bytes as u64);
    }

    /// Counts the end of a write of so many bytes.
    pub fn written(&self, bytes: usize) {
        add(&self.writes, 1);
        add(&self.bytes_written, bytes as u64);
    }

    /// Counts a flush that a host asked for or that durable writes shared.
    pub fn flushed(&self) {
        add(&self.flushes, 1);
    }

    /// Counts a deallocation.
    pub fn deallocated(&self) {
        add(&self.deallocations, 1);
    }

    /// Counts an operation that failed.
    pub fn failed(&self) {
        add(&self.failures, 1);
    }

    /// Counts the end of an operation, its buffer back in the request.
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
