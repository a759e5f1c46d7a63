//! Pages of 4096 bytes on a store of 4160-byte blocks: the data part of each block. For callers
//! that may block.

use std::io;
use std::ops::Range;
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::Duration;

use rustix::event::PollFlags;
use sealane_proto::sector::{BLOCK_BYTES, DATA_BYTES, METADATA_BYTES};

use super::super::connection::wait;
use super::super::store::{BlockStore, StoreChannel, StoreRequest};
use super::pages::{BlockFile, Page, runs};
use crate::clock;

/// Most blocks of one operation: no store's commands are smaller.
const MOVE_BLOCKS: usize = 32;
/// Most operations in parallel.
const DEPTH: usize = 64;

/// Executes one operation on an idle channel, and returns its buffer.
pub fn execute(channel: &mut dyn StoreChannel, request: StoreRequest) -> io::Result<Vec<u8>> {
    channel.submit(0, request);
    let mut done = Vec::new();
    loop {
        channel.poll(&mut done);
        if let Some(done) = done.pop() {
            return done.result.map(|()| done.buffer);
        }
        wait_for_end(channel)?;
    }
}

/// Executes operations in parallel on an idle channel; each has the index of its first page. Passes
/// that and the buffer to `ended`.
fn execute_all(
    channel: &mut dyn StoreChannel,
    moves: &mut dyn Iterator<Item = (usize, StoreRequest)>,
    mut ended: impl FnMut(usize, &[u8]),
) -> io::Result<()> {
    let mut done = Vec::new();
    let mut result = Ok(());
    let mut is_over = false;
    loop {
        while !is_over && channel.in_flight() < DEPTH {
            match moves.next() {
                Some((first, request)) => channel.submit(first as u64, request),
                None => is_over = true,
            }
        }
        channel.poll(&mut done);
        for done in done.drain(..) {
            match done.result {
                Ok(()) => ended(done.ticket as usize, &done.buffer),
                Err(error) => result = Err(error),
            }
        }
        if channel.in_flight() == DEPTH || (channel.in_flight() > 0 && is_over) {
            wait_for_end(channel)?;
        } else if is_over {
            return result;
        }
    }
}

/// Splits places into runs of neighbours, each small enough for one operation, with the index of
/// its first place.
fn parts(places: &[u64]) -> impl Iterator<Item = (usize, &[u64])> {
    let mut next = 0;
    runs(places).flat_map(|run| run.chunks(MOVE_BLOCKS)).map(move |run| {
        let first = next;
        next += run.len();
        (first, run)
    })
}

/// A write of pages as blocks with zero metadata.
pub(super) fn write_of(lba: u64, pages: &[Page], durable: bool) -> StoreRequest {
    let mut buffer = vec![0; pages.len() * BLOCK_BYTES];
    for (page, block) in pages.iter().zip(buffer.chunks_exact_mut(BLOCK_BYTES)) {
        block[..DATA_BYTES].copy_from_slice(&page.0);
    }
    StoreRequest::Write { lba, buffer, durable }
}

/// Waits until `poll` would return a completion.
pub fn wait_for_end(channel: &dyn StoreChannel) -> io::Result<()> {
    let due = channel.due();
    let left = due.map(|due| Duration::from_nanos(due.saturating_sub(clock::now())));
    match channel.as_fd() {
        Some(fd) => wait([(fd, PollFlags::IN)], left).map(drop),
        None => wait([], left).map(drop),
    }
}

/// Pages on a raw store, through one channel.
pub struct RawPages {
    store: RwLock<Box<dyn BlockStore>>,
    /// `None` if the store was extended and no channel could be opened afterwards.
    channel: Mutex<Option<Box<dyn StoreChannel>>>,
}

impl std::fmt::Debug for RawPages {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RawPages").field("store", &self.store).finish_non_exhaustive()
    }
}

impl RawPages {
    /// Opens a channel on `store`.
    pub fn new(store: Box<dyn BlockStore>) -> io::Result<Self> {
        let channel = Mutex::new(Some(store.open()?));
        Ok(Self { store: RwLock::new(store), channel })
    }

    /// Number of blocks of the raw store.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.store.read().unwrap_or_else(PoisonError::into_inner).block_count()
    }

    /// Opens another channel on the store.
    pub fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        self.store.read().unwrap_or_else(PoisonError::into_inner).open()
    }

    /// Extends the store to `block_count` blocks. All channels from [`RawPages::open`] must be
    /// closed.
    pub fn extend(&self, block_count: u64) -> io::Result<()> {
        let mut channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        *channel = None;
        let mut store = self.store.write().unwrap_or_else(PoisonError::into_inner);
        let extended = store.extend(block_count);
        *channel = Some(store.open()?);
        extended
    }

    fn with_channel<T>(
        &self,
        use_it: impl FnOnce(&mut dyn StoreChannel) -> io::Result<T>,
    ) -> io::Result<T> {
        match &mut *self.channel.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(channel) => use_it(&mut **channel),
            None => Err(io::Error::other("the store has no channel")),
        }
    }

    fn write_blocks(&self, page: u64, pages: &[Page], durable: bool) -> io::Result<()> {
        for (lba, part) in (page..).step_by(MOVE_BLOCKS).zip(pages.chunks(MOVE_BLOCKS)) {
            self.with_channel(|channel| execute(channel, write_of(lba, part, durable)))?;
        }
        Ok(())
    }

    fn read_blocks(&self, lba: u64, blocks: usize) -> io::Result<Vec<u8>> {
        let read = StoreRequest::Read { lba, buffer: vec![0; blocks * BLOCK_BYTES] };
        self.with_channel(|channel| execute(channel, read))
    }
}

impl BlockFile for RawPages {
    fn reserve(&self, pages: Range<u64>) -> io::Result<()> {
        self.store.read().unwrap_or_else(PoisonError::into_inner).reserve(pages)
    }

    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        for (first, part) in (page..).step_by(MOVE_BLOCKS).zip(pages.chunks_mut(MOVE_BLOCKS)) {
            let blocks = self.read_blocks(first, part.len())?;
            for (page, block) in part.iter_mut().zip(blocks.chunks_exact(BLOCK_BYTES)) {
                page.0.copy_from_slice(&block[..DATA_BYTES]);
            }
        }
        Ok(())
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.write_blocks(page, pages, false)
    }

    fn write_durably(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.write_blocks(page, pages, true)
    }

    fn read_each(&self, places: &[u64], pages: &mut [Page]) -> io::Result<()> {
        let read = |lba, blocks| StoreRequest::Read { lba, buffer: vec![0; blocks * BLOCK_BYTES] };
        let mut moves = parts(places).map(|(first, run)| (first, read(run[0], run.len())));
        let mut take = |first: usize, buffer: &[u8]| {
            for (page, block) in pages[first..].iter_mut().zip(buffer.chunks_exact(BLOCK_BYTES)) {
                page.0.copy_from_slice(&block[..DATA_BYTES]);
            }
        };
        self.with_channel(|channel| execute_all(channel, &mut moves, &mut take))
    }

    fn write_each(&self, places: &[u64], pages: &[Page]) -> io::Result<()> {
        let mut moves = parts(places)
            .map(|(first, run)| (first, write_of(run[0], &pages[first..first + run.len()], false)));
        self.with_channel(|channel| execute_all(channel, &mut moves, |_, _| {}))
    }

    fn sync(&self) -> io::Result<()> {
        self.with_channel(|channel| execute(channel, StoreRequest::Flush).map(drop))
    }

    fn read_metadata(&self, page: u64) -> io::Result<[u8; METADATA_BYTES]> {
        let block = self.read_blocks(page, 1)?;
        Ok(std::array::from_fn(|index| block[DATA_BYTES + index]))
    }
}
