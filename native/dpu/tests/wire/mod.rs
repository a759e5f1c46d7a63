//! A store that notes and opens every sector that arrives at it.

use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use sealane_engine::storage::store::{BlockStore, StoreChannel, StoreDone, StoreRequest};
use sealane_engine::storage::stores::memory::MemoryStore;
use sealane_proto::link::Nanos;
use sealane_proto::sector::{
    BLOCK_BYTES, Block, DATA_BYTES, IV_BYTES, SealKey, block_iv, sector_key_epoch,
};

/// The load's writes choose their data by the address, modulo this.
const PATTERNS: usize = 8;

/// What has arrived, and what was wrong with it.
#[derive(Debug)]
pub struct Arrived {
    key: SealKey,
    noted: Mutex<Noted>,
}

#[derive(Debug, Default)]
pub struct Noted {
    /// Sectors so far.
    pub sectors: u64,
    /// LBA by key epoch and IV.
    pub ivs: HashMap<(u32, [u8; IV_BYTES]), u64>,
    /// Plaintext by pattern, of this load.
    expected: [Option<Box<[u8; DATA_BYTES]>>; PATTERNS],
    pub wrong: Vec<String>,
}

impl Arrived {
    pub fn new(key: SealKey) -> Arc<Self> {
        Arc::new(Self { key, noted: Mutex::default() })
    }

    /// Begins a load with other data.
    pub fn begin(&self) {
        self.noted.lock().unwrap().expected = Default::default();
    }

    /// Looks at what has arrived.
    pub fn look<T>(&self, look: impl FnOnce(&Noted) -> T) -> T {
        look(&self.noted.lock().unwrap())
    }

    /// Notes a sector that arrived to be stored.
    pub fn note(&self, lba: u64, block: &Block) {
        let mut plain = Box::new([0; DATA_BYTES]);
        let opened = self.key.open(lba, block, &mut plain);
        let mut noted = self.noted.lock().unwrap();
        noted.sectors += 1;
        let (epoch, iv) = (sector_key_epoch(block), block_iv(block));
        if let Some(earlier) = noted.ivs.insert((epoch, iv), lba) {
            noted.wrong.push(format!("IV {iv:?} seals sectors {earlier} and {lba}"));
        }
        if let Err(reason) = opened {
            noted.wrong.push(format!("sector {lba} doesn't open: {}", reason.id()));
            return;
        }
        let pattern = lba as usize % PATTERNS;
        let is_other = plain != *noted.expected[pattern].get_or_insert_with(|| plain.clone());
        if is_other {
            noted.wrong.push(format!("sector {lba} has other bytes than were written"));
        }
    }
}

/// A store in memory, and what has arrived at it.
#[derive(Debug)]
pub struct Wire {
    store: MemoryStore,
    arrived: Arc<Arrived>,
}

impl Wire {
    pub fn new(sectors: u64, arrived: &Arc<Arrived>) -> Self {
        Self { store: MemoryStore::new(sectors, true), arrived: Arc::clone(arrived) }
    }
}

impl BlockStore for Wire {
    fn block_bytes(&self) -> usize {
        self.store.block_bytes()
    }

    fn block_count(&self) -> u64 {
        self.store.block_count()
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        Ok(Box::new(Channel { channel: self.store.open()?, arrived: Arc::clone(&self.arrived) }))
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.store.statistics()
    }
}

struct Channel {
    channel: Box<dyn StoreChannel>,
    arrived: Arc<Arrived>,
}

impl StoreChannel for Channel {
    fn submit(&mut self, ticket: u64, request: StoreRequest) {
        if let StoreRequest::Write { lba, buffer, .. } = &request {
            for (lba, block) in (*lba..).zip(buffer.as_chunks::<BLOCK_BYTES>().0) {
                self.arrived.note(lba, block);
            }
        }
        self.channel.submit(ticket, request);
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        self.channel.poll(done);
    }

    fn in_flight(&self) -> usize {
        self.channel.in_flight()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_fd()
    }

    fn due(&self) -> Option<Nanos> {
        self.channel.due()
    }
}
