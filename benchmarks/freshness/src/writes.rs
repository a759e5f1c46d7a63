//! Device I/Os that a random write costs, by the size of the working set: the store in place, and the
//! scheme of the paper (arXiv:2510.18756 §4.4), a write-back cache of leaf pages without a table of
//! pending changes, which is here and not in the product.
//!
//! The device counts and keeps the store's own pages; of blocks it keeps nothing, so that working
//! sets may be larger than memory.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, poll};
use sealane_engine::storage::store::{
    BLOCK_BYTES, BlockStore, METADATA_BYTES, StoreChannel, StoreDone, StoreRequest,
};
use sealane_engine::storage::stores::in_place_store::{InPlaceStore, raw_blocks};
use sealane_engine::storage::stores::sealed_file::Trust;
use sealane_proto::sector::{Block, DATA_BYTES, FORMAT_VERSION, field, metadata_mut};

use crate::sample::{Random, print};

/// Sectors of the volume: 1 TiB, so that the table has its largest size, 1 Mi changes.
const SECTORS: u64 = 1 << 28;
const SET_SECTORS: u64 = 340;
/// Commands on their way, and writes between two flushes.
const DEPTH: u64 = 32;
const FLUSH_EVERY: u64 = 1024;
/// Leaf pages in the paper's prototype's cache; and as many as take the memory of our table and
/// cache of leaf pages.
const PAPER_CACHES: [usize; 2] = [5000, 24_000];

#[derive(Debug)]
struct Shared {
    block_count: u64,
    /// Blocks before this one are kept.
    kept: u64,
    blocks: Mutex<HashMap<u64, Vec<u8>>>,
    /// Blocks read, and blocks written.
    read: AtomicU64,
    written: AtomicU64,
}

/// The device.
#[derive(Debug)]
struct Device(Arc<Shared>);

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

    fn scan(&self, _visit: &mut dyn FnMut(u64, &[u8; METADATA_BYTES])) -> io::Result<()> {
        Ok(())
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
                shared
                    .read
                    .fetch_add((buffer.len() / BLOCK_BYTES) as u64, Ordering::Relaxed);
                let blocks = shared.blocks.lock().expect("blocks");
                for (lba, block) in (*lba..).zip(buffer.chunks_exact_mut(BLOCK_BYTES)) {
                    match blocks.get(&lba) {
                        Some(kept) => block[..DATA_BYTES].copy_from_slice(kept),
                        None => block.fill(0),
                    }
                }
            }
            StoreRequest::Write { lba, buffer, .. } => {
                shared
                    .written
                    .fetch_add((buffer.len() / BLOCK_BYTES) as u64, Ordering::Relaxed);
                let mut blocks = shared.blocks.lock().expect("blocks");
                for (lba, block) in (*lba..).zip(buffer.chunks_exact(BLOCK_BYTES)) {
                    if lba < shared.kept {
                        blocks.insert(lba, block[..DATA_BYTES].to_vec());
                    }
                }
            }
            StoreRequest::Flush | StoreRequest::Deallocate { .. } => {}
        }
        done.push(StoreDone {
            ticket,
            result: Ok(()),
            buffer: request.into_buffer(),
        });
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

/// Measures working sets up to `gibibytes_max`, `writes` to each after as many to come to rest.
pub fn run(gibibytes_max: u64, writes: u64) {
    let mut gibibytes = 1;
    while gibibytes <= gibibytes_max {
        let sectors = gibibytes << 18;
        let (reads, written) = in_place(sectors, writes);
        let mut figures = vec![
            ("gibibytes", gibibytes as f64),
            ("ours", (reads + written) as f64 / writes as f64),
            ("ours_read", reads as f64 / writes as f64),
        ];
        let names = ["paper_5000_pages", "paper_same_memory"];
        let paper = PAPER_CACHES.map(|pages| cached(sectors, writes, pages) as f64 / writes as f64);
        figures.extend(names.into_iter().zip(paper));
        print("writes", &figures);
        gibibytes *= 4;
    }
}

/// Blocks read and written for so many writes to the store in place.
fn in_place(sectors: u64, writes: u64) -> (u64, u64) {
    let block_count = raw_blocks(SECTORS);
    let shared = Arc::new(Shared {
        block_count,
        kept: block_count - SECTORS,
        blocks: Mutex::default(),
        read: 0.into(),
        written: 0.into(),
    });
    let device = Box::new(Device(Arc::clone(&shared)));
    let store = InPlaceStore::create(device, SECTORS, &Trust::default()).expect("store");
    let mut channel = store.open().expect("channel");
    let mut random = Random(5);
    let mut number = 1;
    let counts = || [&shared.read, &shared.written].map(|count| count.load(Ordering::Relaxed));
    write(&mut *channel, sectors, writes, &mut random, &mut number);
    let before = counts();
    write(&mut *channel, sectors, writes, &mut random, &mut number);
    let after = counts();
    (after[0] - before[0], after[1] - before[1])
}

fn write(
    channel: &mut dyn StoreChannel,
    sectors: u64,
    writes: u64,
    random: &mut Random,
    number: &mut u64,
) {
    let mut done = Vec::new();
    for turn in 0..writes / DEPTH {
        let mut lbas: Vec<u64> = (0..DEPTH).map(|_| random.below(sectors)).collect();
        lbas.sort_unstable();
        lbas.dedup();
        for lba in &lbas {
            let mut block: Block = [0; BLOCK_BYTES];
            metadata_mut(&mut block, field::IV)[..8].copy_from_slice(&number.to_le_bytes());
            metadata_mut(&mut block, field::VERSION).fill(FORMAT_VERSION);
            *number += 1;
            let write = StoreRequest::Write {
                lba: *lba,
                buffer: block.to_vec(),
                durable: false,
            };
            channel.submit(*lba, write);
        }
        wait(channel, lbas.len(), &mut done);
        if turn * DEPTH % FLUSH_EVERY == 0 {
            channel.submit(0, StoreRequest::Flush);
            wait(channel, 1, &mut done);
        }
    }
}

fn wait(channel: &mut dyn StoreChannel, count: usize, done: &mut Vec<StoreDone>) {
    channel.poll(done);
    while done.len() < count {
        let fd = channel.as_fd().expect("descriptor");
        poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], None).expect("poll");
        channel.poll(done);
    }
    for done in done.drain(..) {
        done.result.expect("end");
    }
}

/// Device I/Os of the paper's scheme: the block, its leaf page if it isn't cached, and the changed
/// one that gives way to it. Its log lies in memory that outlives power, and costs nothing.
fn cached(sectors: u64, writes: u64, pages: usize) -> u64 {
    let mut random = Random(6);
    let mut last_use: HashMap<u64, u64> = HashMap::new();
    let mut by_use: BTreeMap<u64, u64> = BTreeMap::new();
    let mut count = 0;
    for number in 0..2 * writes {
        let set = random.below(sectors) / SET_SECTORS;
        let mut operations = 1;
        match last_use.insert(set, number) {
            Some(before) => drop(by_use.remove(&before)),
            None => {
                operations += 1;
                if last_use.len() > pages
                    && let Some((_, oldest)) = by_use.pop_first()
                {
                    last_use.remove(&oldest);
                    operations += 1;
                }
            }
        }
        by_use.insert(number, set);
        count += if number < writes { 0 } else { operations };
    }
    count
}
