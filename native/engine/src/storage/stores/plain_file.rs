//! Plain 4096-byte blocks in place: block *n* is at byte 4096·*n* of a file or block device.
//! Whether a power cut can tear a block depends on the device.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::super::store::{BlockStore, StoreChannel, StoreCounters, StoreDone, StoreRequest};
use super::fresh::failure::copy_error;
use super::pages::{BlockFile, DeviceFile, IO_PAGES_MAX, PAGE_BYTES, Page};
use super::ring::{Ended, Io, Ring, clear, event, signal};

/// A file of plain blocks.
#[derive(Debug)]
pub struct PlainFileStore {
    device: Arc<DeviceFile>,
    block_count: u64,
    counters: Arc<StoreCounters>,
}

impl PlainFileStore {
    /// Creates a sparse file, which must not exist yet, or opens a block device and keeps its
    /// contents.
    pub fn create(path: &Path, block_count: u64) -> io::Result<Self> {
        let device = Arc::new(DeviceFile::create(path, block_count)?);
        Ok(Self { device, block_count, counters: Arc::default() })
    }

    /// Opens an existing file or device.
    pub fn open(path: &Path, block_count: u64) -> io::Result<Self> {
        let device = Arc::new(DeviceFile::open(path, block_count)?);
        Ok(Self { device, block_count, counters: Arc::default() })
    }
}

impl BlockStore for PlainFileStore {
    fn reserve(&self, blocks: Range<u64>) -> io::Result<()> {
        self.device.reserve(blocks)
    }

    fn block_bytes(&self) -> usize {
        PAGE_BYTES
    }

    fn block_count(&self) -> u64 {
        self.block_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        Ok(Box::new(PlainChannel {
            block_count: self.block_count,
            ring: Ring::new(Arc::clone(&self.device) as Arc<_>, event()?)?,
            counters: Arc::clone(&self.counters),
            operations: HashMap::new(),
            next: 0,
            done: Vec::new(),
        }))
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.counters.by_name()
    }
}

/// An operation in progress.
struct Operation {
    ticket: u64,
    request: StoreRequest,
    pieces: usize,
    result: io::Result<()>,
}

/// One I/O of an operation.
#[derive(Debug)]
struct Piece {
    operation: u64,
    start: usize,
    /// Pages to zero once this piece has completed.
    zeros_left: Range<u64>,
}

impl Piece {
    fn new(operation: u64, start: usize) -> Self {
        Self { operation, start, zeros_left: 0..0 }
    }
}

struct PlainChannel {
    block_count: u64,
    ring: Ring<Piece>,
    counters: Arc<StoreCounters>,
    operations: HashMap<u64, Operation>,
    next: u64,
    done: Vec<StoreDone>,
}

impl PlainChannel {
    fn push_pieces(&mut self, operation: u64, request: &StoreRequest) -> usize {
        match request {
            StoreRequest::Deallocate { blocks: 0, .. } => 0,
            StoreRequest::Flush => {
                self.ring.push(Piece::new(operation, 0), Io::Sync);
                1
            }
            StoreRequest::Deallocate { lba, blocks } => {
                self.ring.push(Piece::new(operation, 0), Io::Punch(*lba, *blocks));
                1
            }
            StoreRequest::Read { lba, buffer } => {
                let starts = (0..buffer.len()).step_by(IO_PAGES_MAX * PAGE_BYTES);
                for start in starts.clone() {
                    let count = IO_PAGES_MAX.min((buffer.len() - start) / PAGE_BYTES);
                    let io = Io::Read(lba + (start / PAGE_BYTES) as u64, self.ring.buffer(count));
                    self.ring.push(Piece::new(operation, start), io);
                }
                starts.count()
            }
            StoreRequest::Write { lba, buffer, durable } => {
                let parts = buffer.chunks(IO_PAGES_MAX * PAGE_BYTES);
                let count = parts.len();
                for (index, part) in parts.enumerate() {
                    let mut pages = self.ring.buffer(part.len() / PAGE_BYTES);
                    pages.as_mut_bytes().copy_from_slice(part);
                    let io = Io::Write(lba + (index * IO_PAGES_MAX) as u64, pages, *durable);
                    self.ring.push(Piece::new(operation, 0), io);
                }
                count
            }
        }
    }

    /// Writes zeros where the device can't punch holes, a few pages at a time. Returns the number
    /// of I/Os it started.
    fn push_zeros(&mut self, operation: u64, pages: Range<u64>) -> usize {
        if pages.is_empty() {
            return 0;
        }
        let next = pages.end.min(pages.start + IO_PAGES_MAX as u64);
        let zeros = vec![Page::ZERO; (next - pages.start) as usize];
        let piece = Piece { operation, start: 0, zeros_left: next..pages.end };
        self.ring.push(piece, Io::Write(pages.start, zeros, false));
        1
    }

    fn ended(&mut self, ended: Ended<Piece>) {
        let Ended { tag: Piece { operation: id, start, zeros_left }, io, mut result } = ended;
        let mut pieces = 0;
        if result.is_ok() {
            pieces = self.push_zeros(id, zeros_left);
        }
        if let Io::Punch(page, count) = io
            && let Err(error) = &result
            && error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error())
        {
            pieces = self.push_zeros(id, page..page + count);
            result = Ok(());
        }
        let Some(operation) = self.operations.get_mut(&id) else { return };
        operation.pieces = operation.pieces + pieces - 1;
        if let Err(error) = result {
            operation.result = Err(error);
        }
        if operation.result.is_ok()
            && let Io::Read(_, pages) = &io
            && let StoreRequest::Read { buffer, .. } = &mut operation.request
        {
            let bytes = pages.as_bytes();
            buffer[start..start + bytes.len()].copy_from_slice(bytes);
        }
        if operation.pieces == 0
            && let Some(operation) = self.operations.remove(&id)
        {
            self.end(operation);
        }
        if let Io::Read(_, pages) | Io::Write(_, pages, _) = io {
            self.ring.keep(pages);
        }
    }

    fn end(&mut self, operation: Operation) {
        let Operation { ticket, request, result, .. } = operation;
        self.counters.ended(&request, &result);
        if self.done.is_empty() {
            signal(self.ring.event());
        }
        self.done.push(StoreDone { ticket, result, buffer: request.into_buffer() });
    }
}

impl StoreChannel for PlainChannel {
    fn submit(&mut self, ticket: u64, request: StoreRequest) {
        let result = request.check(PAGE_BYTES, self.block_count);
        let id = self.next;
        self.next += 1;
        let pieces = if result.is_ok() { self.push_pieces(id, &request) } else { 0 };
        let operation = Operation { ticket, request, pieces, result };
        if pieces == 0 {
            self.end(operation);
        } else {
            self.operations.insert(id, operation);
        }
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        clear(self.ring.event());
        let mut ended = Vec::new();
        let turned = self.ring.turn(&mut ended);
        for ended in ended {
            self.ended(ended);
        }
        if let Err(error) = turned {
            for (_, mut operation) in std::mem::take(&mut self.operations) {
                operation.result = Err(copy_error(&error));
                self.end(operation);
            }
        }
        done.append(&mut self.done);
    }

    fn in_flight(&self) -> usize {
        self.operations.len() + self.done.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.event().as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::super::scratch::Scratch;
    use super::*;

    #[test]
    fn behaves_as_a_store() {
        let scratch = Scratch::new();
        conformance::check(&PlainFileStore::create(&scratch.file(), 1000).expect("store"));
    }

    #[test]
    fn keeps_blocks_from_one_opening_to_the_next() {
        let scratch = Scratch::new();
        let store = PlainFileStore::create(&scratch.file(), 1000).expect("store");
        let mut channel = store.open().expect("channel");
        let buffer = conformance::blocks(PAGE_BYTES, 300, 600, 1);
        let write = StoreRequest::Write { lba: 300, buffer, durable: false };
        conformance::execute(&mut *channel, write).expect("write");
        drop((channel, store));
        let store = PlainFileStore::open(&scratch.file(), 1000).expect("store");
        let mut channel = store.open().expect("channel");
        let found = conformance::read(&mut *channel, PAGE_BYTES, 299, 602);
        assert_eq!(
            found[PAGE_BYTES..601 * PAGE_BYTES],
            conformance::blocks(PAGE_BYTES, 300, 600, 1)
        );
        assert_eq!(found[..PAGE_BYTES], [0; PAGE_BYTES]);
    }

    #[test]
    fn refuses_files_that_exist_or_are_too_small() {
        let scratch = Scratch::new();
        PlainFileStore::create(&scratch.file(), 10).expect("store");
        let error = PlainFileStore::create(&scratch.file(), 10).expect_err("the file exists");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        let error = PlainFileStore::open(&scratch.file(), 11).expect_err("it is too small");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_channel_dropped_with_operations_in_flight_waits_for_them() {
        let scratch = Scratch::new();
        let store = PlainFileStore::create(&scratch.file(), 1000).expect("store");
        let mut channel = store.open().expect("channel");
        for lba in 0..300 {
            let buffer = conformance::block(PAGE_BYTES, lba, 1);
            channel.submit(lba, StoreRequest::Write { lba, buffer, durable: false });
        }
        channel.poll(&mut Vec::new());
        drop(channel);
        let mut channel = store.open().expect("channel");
        let found = conformance::read(&mut *channel, PAGE_BYTES, 0, 1);
        assert_eq!(found, conformance::block(PAGE_BYTES, 0, 1));
    }
}
