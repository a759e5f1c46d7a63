//! A store that provokes races: operations are executed by `poll`, block by block and in random
//! order among all in flight. A test can also suspend it or make it fail.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use rustix::event::{EventfdFlags, eventfd};
use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::openings::Openings;
use sealane_proto::sector::{BLOCK_BYTES, DATA_BYTES};

use crate::permit::Permit;
use crate::storage::store::{BlockStore, StoreChannel, StoreDone, StoreRequest};
use crate::storage::stores::fresh::failure::Refusal;

#[derive(Debug)]
struct Inner {
    block_bytes: usize,
    blocks: Mutex<Vec<Vec<u8>>>,
    is_held: AtomicBool,
    fails: AtomicBool,
    fails_flushes: AtomicBool,
    stale: AtomicU64,
    flushes: AtomicU64,
    submitted: AtomicU64,
    /// Bytes of the largest read so far.
    largest_read: AtomicU64,
    channels: AtomicU64,
    ending: Mutex<Option<Arc<Permit>>>,
    seed: u64,
}

/// Handle on a store that outlives its namespaces.
#[derive(Debug, Clone)]
pub struct ShuffledStore(Arc<Inner>);

impl ShuffledStore {
    pub fn new(block_count: usize, is_sealed: bool, seed: u64) -> Self {
        let block_bytes = if is_sealed { BLOCK_BYTES } else { DATA_BYTES };
        Self(Arc::new(Inner {
            block_bytes,
            blocks: Mutex::new(vec![vec![0; block_bytes]; block_count]),
            is_held: false.into(),
            fails: false.into(),
            fails_flushes: false.into(),
            stale: u64::MAX.into(),
            flushes: 0.into(),
            submitted: 0.into(),
            largest_read: 0.into(),
            channels: 0.into(),
            ending: Mutex::default(),
            seed,
        }))
    }

    /// While held, no operation makes progress.
    pub fn hold(&self, is_held: bool) {
        self.0.is_held.store(is_held, Ordering::SeqCst);
    }

    pub fn fail(&self, fails: bool) {
        self.0.fails.store(fails, Ordering::SeqCst);
    }

    pub fn fail_flushes(&self, fails: bool) {
        self.0.fails_flushes.store(fails, Ordering::SeqCst);
    }

    /// From now on, operations that begin with this block fail, as it is stale.
    pub fn roll_back(&self, lba: u64) {
        self.0.stale.store(lba, Ordering::SeqCst);
    }

    /// Revokes the permit when the next operation completes.
    pub fn end_when_done(&self, permit: &Arc<Permit>) {
        *self.0.ending.lock().unwrap() = Some(Arc::clone(permit));
    }

    pub fn flushes(&self) -> u64 {
        self.0.flushes.load(Ordering::SeqCst)
    }

    /// Operations submitted so far.
    pub fn submitted(&self) -> u64 {
        self.0.submitted.load(Ordering::SeqCst)
    }

    /// Bytes of the largest read so far.
    pub fn largest_read(&self) -> u64 {
        self.0.largest_read.load(Ordering::SeqCst)
    }

    pub fn block(&self, lba: usize) -> Vec<u8> {
        self.0.blocks.lock().unwrap()[lba].clone()
    }

    pub fn put(&self, lba: usize, block: Vec<u8>) {
        self.0.blocks.lock().unwrap()[lba] = block;
    }
}

impl BlockStore for ShuffledStore {
    fn block_bytes(&self) -> usize {
        self.0.block_bytes
    }

    fn block_count(&self) -> u64 {
        self.0.blocks.lock().unwrap().len() as u64
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        let number = self.0.channels.fetch_add(1, Ordering::SeqCst);
        // Always readable, so that a waiting thread polls repeatedly.
        let signal = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let random = ChaCha8Rng::seed_from_u64(self.0.seed + number);
        Ok(Box::new(Channel { store: self.0.clone(), running: Vec::new(), random, signal }))
    }

    fn openings(&self) -> Option<Openings> {
        let now = Milestone { opening: [1; 16], checkpoint: 1, log_flushed: 1 };
        Some(Openings { now, earlier: Vec::new() })
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        vec![("device_flushes", self.flushes())]
    }
}

struct Running {
    ticket: u64,
    request: StoreRequest,
    blocks_done: usize,
}

struct Channel {
    store: Arc<Inner>,
    running: Vec<Running>,
    random: ChaCha8Rng,
    signal: OwnedFd,
}

impl Channel {
    /// Executes one block of an operation; returns whether it was the last.
    fn step(&mut self, index: usize) -> bool {
        let bytes = self.store.block_bytes;
        let mut blocks = self.store.blocks.lock().unwrap();
        let Running { request, blocks_done, .. } = &mut self.running[index];
        let at = *blocks_done * bytes;
        *blocks_done += 1;
        match request {
            StoreRequest::Read { lba, buffer } => {
                let block = &blocks[*lba as usize + *blocks_done - 1];
                buffer[at..at + bytes].copy_from_slice(block);
                at + bytes == buffer.len()
            }
            StoreRequest::Write { lba, buffer, .. } => {
                let block = &mut blocks[*lba as usize + *blocks_done - 1];
                block.copy_from_slice(&buffer[at..at + bytes]);
                at + bytes == buffer.len()
            }
            StoreRequest::Deallocate { lba, blocks: count } => {
                let range = *lba as usize..(*lba + *count) as usize;
                blocks[range].iter_mut().for_each(|block| block.fill(0));
                true
            }
            StoreRequest::Flush => {
                self.store.flushes.fetch_add(1, Ordering::SeqCst);
                true
            }
        }
    }
}

impl StoreChannel for Channel {
    fn submit(&mut self, ticket: u64, request: StoreRequest) {
        self.store.submitted.fetch_add(1, Ordering::SeqCst);
        if let StoreRequest::Read { buffer, .. } = &request {
            self.store.largest_read.fetch_max(buffer.len() as u64, Ordering::SeqCst);
        }
        self.running.push(Running { ticket, request, blocks_done: 0 });
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        if self.running.is_empty() || self.store.is_held.load(Ordering::SeqCst) {
            return;
        }
        let index = self.random.next_u64() as usize % self.running.len();
        let is_flush = matches!(self.running[index].request, StoreRequest::Flush);
        let fails = self.store.fails.load(Ordering::SeqCst)
            || is_flush && self.store.fails_flushes.load(Ordering::SeqCst);
        if fails || self.step(index) {
            let Running { ticket, request, .. } = self.running.swap_remove(index);
            let stale = self.store.stale.load(Ordering::SeqCst);
            let result = match &request {
                _ if fails => Err(io::Error::other("broken")),
                StoreRequest::Read { lba, .. } | StoreRequest::Write { lba, .. }
                    if *lba == stale =>
                {
                    Err(Refusal::Stale(stale).into())
                }
                _ => Ok(()),
            };
            if let Some(permit) = self.store.ending.lock().unwrap().take() {
                permit.take_back("node.revoked");
            }
            done.push(StoreDone { ticket, result, buffer: request.into_buffer() });
        }
    }

    fn in_flight(&self) -> usize {
        self.running.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.signal.as_fd())
    }
}
