//! Blocks in memory, for tests and benchmarks. Lost with the process; a flush does nothing.
//!
//! Sealed blocks are fresh without a tree: they lie in the target's own memory, which is where
//! other stores keep the root of their tree.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use sealane_proto::sector::{Block, field, metadata};

use super::super::store::{
    BLOCK_BYTES, BlockStore, DATA_BYTES, StoreChannel, StoreCounters, StoreRequest,
};
use super::fresh_store::in_use;
use super::immediate::{Immediate, ImmediateChannel};

/// Blocks per region. A region is allocated by its first write and freed when a single operation
/// deallocates all of it. Locks are per region, so that a block changes as a whole.
const REGION_BLOCKS: u64 = 256;

#[derive(Debug)]
pub(super) struct Shared {
    block_bytes: usize,
    block_count: u64,
    regions: Vec<RwLock<Vec<u8>>>,
    /// Number of sealed blocks that are written.
    written: AtomicU64,
    counters: StoreCounters,
}

/// A channel of a memory store.
pub(super) type MemoryChannel = ImmediateChannel<Shared>;

/// A store in memory, allocated by region.
#[derive(Debug)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

impl MemoryStore {
    /// An empty store with 4160-byte blocks if sealed, otherwise with 4096-byte blocks.
    #[must_use]
    pub fn new(block_count: u64, is_sealed: bool) -> Self {
        let block_bytes = if is_sealed { BLOCK_BYTES } else { DATA_BYTES };
        let regions = (0..block_count.div_ceil(REGION_BLOCKS)).map(|_| RwLock::default());
        let shared = Shared {
            block_bytes,
            block_count,
            regions: regions.collect(),
            written: 0.into(),
            counters: StoreCounters::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Opens a channel of the concrete type.
    #[must_use]
    pub(super) fn channel(&self) -> MemoryChannel {
        ImmediateChannel::new(&self.shared)
    }
}

impl BlockStore for MemoryStore {
    fn block_bytes(&self) -> usize {
        self.shared.block_bytes
    }

    fn block_count(&self) -> u64 {
        self.shared.block_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        Ok(Box::new(self.channel()))
    }

    fn extend(&mut self, block_count: u64) -> io::Result<()> {
        let shared = Arc::get_mut(&mut self.shared).ok_or_else(in_use)?;
        shared.block_count = shared.block_count.max(block_count);
        let regions = shared.block_count.div_ceil(REGION_BLOCKS) as usize;
        shared.regions.resize_with(regions, RwLock::default);
        Ok(())
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        let mut named = self.shared.counters.by_name();
        if self.shared.block_bytes == BLOCK_BYTES {
            named.push(("sectors_written", self.shared.written.load(Ordering::Relaxed)));
        }
        named
    }
}

/// A byte range in one region.
struct Part<'a> {
    region: &'a RwLock<Vec<u8>>,
    start: usize,
    end: usize,
}

impl Shared {
    fn region_bytes(&self) -> usize {
        REGION_BLOCKS as usize * self.block_bytes
    }

    /// Changes stored blocks, and updates the count of written ones.
    fn replace(&self, stored: &mut [u8], change: impl FnOnce(&mut [u8])) {
        if self.block_bytes != BLOCK_BYTES {
            return change(stored);
        }
        let is_written = |block: &&Block| metadata(block, field::VERSION) != [0];
        let written = |blocks: &[u8]| blocks.as_chunks().0.iter().filter(is_written).count() as u64;
        let before = written(stored);
        change(stored);
        let after = written(stored);
        self.written.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
    }

    /// The parts of regions that a range covers, in order. The range must be inside the store.
    fn parts(&self, mut lba: u64, blocks: u64) -> impl Iterator<Item = Part<'_>> {
        let end = lba + blocks;
        std::iter::from_fn(move || {
            if lba == end {
                return None;
            }
            let index = lba / REGION_BLOCKS;
            let stop = end.min((index + 1) * REGION_BLOCKS);
            let offset = |lba: u64| (lba - index * REGION_BLOCKS) as usize * self.block_bytes;
            let (start, end) = (offset(lba), offset(stop));
            lba = stop;
            self.regions.get(index as usize).map(|region| Part { region, start, end })
        })
    }

    fn read(&self, lba: u64, mut buffer: &mut [u8]) {
        for part in self.parts(lba, (buffer.len() / self.block_bytes) as u64) {
            let (piece, rest) = buffer.split_at_mut(part.end - part.start);
            let region = part.region.read().unwrap_or_else(PoisonError::into_inner);
            match region.get(part.start..part.end) {
                Some(stored) => piece.copy_from_slice(stored),
                None => piece.fill(0),
            }
            buffer = rest;
        }
    }

    fn write(&self, lba: u64, mut buffer: &[u8]) {
        for part in self.parts(lba, (buffer.len() / self.block_bytes) as u64) {
            let (piece, rest) = buffer.split_at(part.end - part.start);
            let mut region = part.region.write().unwrap_or_else(PoisonError::into_inner);
            if region.is_empty() {
                region.resize(self.region_bytes(), 0);
            }
            if let Some(stored) = region.get_mut(part.start..part.end) {
                self.replace(stored, |stored| stored.copy_from_slice(piece));
            }
            buffer = rest;
        }
    }

    fn deallocate(&self, lba: u64, blocks: u64) {
        for part in self.parts(lba, blocks) {
            let mut region = part.region.write().unwrap_or_else(PoisonError::into_inner);
            if let Some(stored) = region.get_mut(part.start..part.end) {
                self.replace(stored, |stored| stored.fill(0));
            }
            if part.end - part.start == self.region_bytes() {
                *region = Vec::new();
            }
        }
    }
}

impl Immediate for Shared {
    fn execute(&self, request: &mut StoreRequest) -> io::Result<()> {
        request.check(self.block_bytes, self.block_count)?;
        match request {
            StoreRequest::Read { lba, buffer } => {
                self.read(*lba, buffer);
                self.counters.read(buffer.len());
            }
            StoreRequest::Write { lba, buffer, .. } => {
                self.write(*lba, buffer);
                self.counters.written(buffer.len());
            }
            StoreRequest::Flush => self.counters.flushed(),
            StoreRequest::Deallocate { lba, blocks } => {
                self.deallocate(*lba, *blocks);
                self.counters.deallocated();
            }
        }
        Ok(())
    }

    fn counters(&self) -> &StoreCounters {
        &self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::*;

    fn allocated(store: &MemoryStore) -> usize {
        let regions = store.shared.regions.iter();
        regions.filter(|region| !region.read().expect("region").is_empty()).count()
    }

    #[test]
    fn behaves_as_a_store() {
        conformance::check(&MemoryStore::new(1000, true));
        conformance::check(&MemoryStore::new(1000, false));
    }

    #[test]
    fn deallocating_a_whole_region_frees_it() {
        let store = MemoryStore::new(1000, true);
        let mut channel = store.channel();
        let write = |lba| StoreRequest::Write { lba, buffer: vec![1; BLOCK_BYTES], durable: false };
        channel.submit(1, write(3));
        channel.submit(2, write(256));
        assert_eq!(allocated(&store), 2);
        channel.submit(3, StoreRequest::Deallocate { lba: 0, blocks: 255 });
        assert_eq!(allocated(&store), 2);
        channel.submit(4, StoreRequest::Deallocate { lba: 0, blocks: 256 });
        assert_eq!(allocated(&store), 1);
    }
}
