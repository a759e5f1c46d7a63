//! The synchronous sector stores behind the interface of block stores.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sealane_proto::sector::{BLOCK_BYTES, METADATA_BYTES};

use crate::storage::store::{
    BlockStore, SectorStore, StoreChannel, StoreCounters, StoreDone, StoreRequest,
};

/// A sector store; every operation ends inside `submit`.
#[derive(Debug, Clone)]
pub struct Adapted {
    store: Arc<dyn SectorStore>,
    counters: Arc<StoreCounters>,
    block_count: u64,
}

impl Adapted {
    /// Wraps an empty store of `block_count` sectors.
    pub fn new(store: Box<dyn SectorStore>, block_count: u64) -> Self {
        Self { store: store.into(), counters: Arc::default(), block_count }
    }

    fn execute(&self, request: &mut StoreRequest) -> io::Result<()> {
        request.check(BLOCK_BYTES, self.block_count)?;
        match request {
            StoreRequest::Read { lba, buffer } => {
                self.store.read(*lba, buffer)?;
                self.counters.read(buffer.len());
            }
            StoreRequest::Write { lba, buffer, durable } => {
                self.store.write(*lba, buffer)?;
                if *durable {
                    self.store.flush()?;
                }
                self.counters.written(buffer.len());
            }
            StoreRequest::Flush => {
                self.store.flush()?;
                self.counters.flushed();
            }
            StoreRequest::Deallocate { lba, blocks } => {
                let end = *lba + *blocks;
                (*lba..end).try_for_each(|lba| self.store.write(lba, &[0; BLOCK_BYTES]))?;
                self.counters.deallocated();
            }
        }
        Ok(())
    }
}

impl BlockStore for Adapted {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn block_count(&self) -> u64 {
        self.block_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        Ok(Box::new(Channel { store: self.clone(), done: Vec::new() }))
    }

    fn scan(&self, visit: &mut dyn FnMut(u64, &[u8; METADATA_BYTES])) -> io::Result<()> {
        let mut block = [0; BLOCK_BYTES];
        for lba in 0..self.block_count {
            self.store.read(lba, &mut block)?;
            if let Some(metadata) = block.last_chunk()
                && *metadata != [0; METADATA_BYTES]
            {
                visit(lba, metadata);
            }
        }
        Ok(())
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.counters.by_name()
    }
}

struct Channel {
    store: Adapted,
    done: Vec<StoreDone>,
}

impl StoreChannel for Channel {
    fn submit(&mut self, ticket: u64, mut request: StoreRequest) {
        let result = self.store.execute(&mut request);
        self.done.push(StoreDone { ticket, result, buffer: request.into_buffer() });
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        done.append(&mut self.done);
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
