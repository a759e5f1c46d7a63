//! An in-memory device of sealed blocks that counts operations. It keeps the store's own pages, but only
//! the metadata of other blocks, so that working sets can be larger than memory.

use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use sealane_engine::storage::store::{
    BLOCK_BYTES, BlockStore, METADATA_BYTES, StoreChannel, StoreDone, StoreRequest,
};
use sealane_engine::storage::stores::in_place_store::raw_blocks;
use sealane_proto::sector::DATA_BYTES;

#[derive(Debug)]
struct Shared {
    block_count: u64,
    /// Blocks below this one belong to the store itself.
    own: u64,
    /// Whether the metadata of blocks is kept.
    keeps: bool,
    pages: Mutex<HashMap<u64, Vec<u8>>>,
    metadata: Mutex<HashMap<u64, [u8; METADATA_BYTES]>>,
    read: AtomicU64,
    written: AtomicU64,
}

/// The counting device.
#[derive(Debug, Clone)]
pub struct Device(Arc<Shared>);

impl Device {
    /// Returns a device for a store in place of `sectors` sectors. Anything not kept reads as zeros.
    pub fn new(sectors: u64, keeps: bool) -> Self {
        let block_count = raw_blocks(sectors);
        Self(Arc::new(Shared {
            block_count,
            own: block_count - sectors,
            keeps,
            pages: Mutex::default(),
            metadata: Mutex::default(),
            read: 0.into(),
            written: 0.into(),
        }))
    }

    /// Returns the numbers of blocks read and written so far.
    pub fn counts(&self) -> [u64; 2] {
        [&self.0.read, &self.0.written].map(|count| count.load(Ordering::Relaxed))
    }
}

impl Shared {
    fn read(&self, lba: u64, block: &mut [u8]) {
        block.fill(0);
        if lba >= self.own {
            if let Some(kept) = self.metadata.lock().expect("metadata").get(&lba) {
                block[DATA_BYTES..].copy_from_slice(kept);
            }
        } else if let Some(kept) = self.pages.lock().expect("pages").get(&lba) {
            block[..DATA_BYTES].copy_from_slice(kept);
        }
    }

    fn write(&self, lba: u64, block: &[u8]) {
        if lba < self.own {
            self.pages.lock().expect("pages").insert(lba, block[..DATA_BYTES].to_vec());
        } else if self.keeps {
            let kept = block.last_chunk().expect("a block is longer than its metadata");
            self.metadata.lock().expect("metadata").insert(lba, *kept);
        }
    }
}

struct Channel(Arc<Shared>, Vec<StoreDone>);

impl BlockStore for Device {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn block_count(&self) -> u64 {
        self.0.block_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        Ok(Box::new(Channel(Arc::clone(&self.0), Vec::new())))
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

impl StoreChannel for Channel {
    fn submit(&mut self, ticket: u64, mut request: StoreRequest) {
        let Self(shared, done) = self;
        match &mut request {
            StoreRequest::Read { lba, buffer } => {
                let blocks = buffer.chunks_exact_mut(BLOCK_BYTES);
                shared.read.fetch_add(blocks.len() as u64, Ordering::Relaxed);
                (*lba..).zip(blocks).for_each(|(lba, block)| shared.read(lba, block));
            }
            StoreRequest::Write { lba, buffer, .. } => {
                let blocks = buffer.chunks_exact(BLOCK_BYTES);
                shared.written.fetch_add(blocks.len() as u64, Ordering::Relaxed);
                (*lba..).zip(blocks).for_each(|(lba, block)| shared.write(lba, block));
            }
            StoreRequest::Flush | StoreRequest::Deallocate { .. } => {}
        }
        let buffer = request.into_buffer();
        done.push(StoreDone { ticket, result: Ok(()), buffer });
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        done.append(&mut self.1);
    }

    fn in_flight(&self) -> usize {
        self.1.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
