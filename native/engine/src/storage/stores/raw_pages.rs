//! Pages of 4096 bytes on a store of 4160-byte blocks: the data of each, for who may block.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::PollFlags;
use sealane_proto::sector::{BLOCK_BYTES, DATA_BYTES, METADATA_BYTES};

use super::super::connection::wait;
use super::super::store::{BlockStore, StoreChannel, StoreRequest};
use super::pages::{BlockFile, Page};
use crate::clock;

/// Blocks moved at once: no more than any store takes in one operation.
const MOVE_BLOCKS: usize = 32;

/// Executes one operation on a channel that has no other, and returns its buffer.
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

/// Waits until `poll` would find something.
pub fn wait_for_end(channel: &dyn StoreChannel) -> io::Result<()> {
    let due = channel.due();
    let left = due.map(|due| Duration::from_nanos(due.saturating_sub(clock::now())));
    match channel.as_fd() {
        Some(fd) => wait([(fd, PollFlags::IN)], left).map(drop),
        None => wait([], left).map(drop),
    }
}

/// The pages.
pub struct RawPages {
    store: Arc<dyn BlockStore>,
    channel: Mutex<Box<dyn StoreChannel>>,
}

impl std::fmt::Debug for RawPages {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RawPages").field("store", &self.store).finish_non_exhaustive()
    }
}

impl RawPages {
    /// Those of a store.
    pub fn new(store: Arc<dyn BlockStore>) -> io::Result<Self> {
        let channel = Mutex::new(store.open()?);
        Ok(Self { store, channel })
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn BlockStore> {
        &self.store
    }

    fn channel(&self) -> MutexGuard<'_, Box<dyn StoreChannel>> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_blocks(&self, page: u64, pages: &[Page], durable: bool) -> io::Result<()> {
        for (lba, part) in (page..).step_by(MOVE_BLOCKS).zip(pages.chunks(MOVE_BLOCKS)) {
            let mut buffer = vec![0; part.len() * BLOCK_BYTES];
            for (page, block) in part.iter().zip(buffer.chunks_exact_mut(BLOCK_BYTES)) {
                block[..DATA_BYTES].copy_from_slice(&page.0);
            }
            execute(&mut **self.channel(), StoreRequest::Write { lba, buffer, durable })?;
        }
        Ok(())
    }

    fn read_blocks(&self, lba: u64, blocks: usize) -> io::Result<Vec<u8>> {
        let read = StoreRequest::Read { lba, buffer: vec![0; blocks * BLOCK_BYTES] };
        execute(&mut **self.channel(), read)
    }
}

impl BlockFile for RawPages {
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

    fn sync(&self) -> io::Result<()> {
        execute(&mut **self.channel(), StoreRequest::Flush).map(drop)
    }

    fn read_metadata(&self, page: u64) -> io::Result<[u8; METADATA_BYTES]> {
        let block = self.read_blocks(page, 1)?;
        Ok(std::array::from_fn(|index| block[DATA_BYTES + index]))
    }
}
