//! A load on one channel of a store: random blocks, with a fixed number of operations in flight.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use sealane_engine::clock;
use sealane_engine::storage::store::{
    BLOCK_BYTES, BlockStore, StoreChannel, StoreDone, StoreRequest,
};
use sealane_proto::sector::{FORMAT_VERSION, field};

use crate::sample::Random;

/// Parameters of a load.
#[derive(Clone, Copy)]
pub struct Pattern {
    /// Whether it writes instead of reading.
    pub is_write: bool,
    /// Number of blocks, from block 0, that it picks from at random.
    pub span: u64,
    /// Operations in flight.
    pub depth: usize,
    /// Writes between two flushes; 0 for no flushes.
    pub flush_every: u64,
}

/// Length of a load.
#[derive(Clone, Copy)]
pub enum Until {
    /// A time.
    Elapsed(Duration),
    /// A number of operations, plus those then in flight.
    Operations(u64),
}

/// Result of a load.
#[derive(Default)]
pub struct Outcome {
    pub operations: u64,
    pub seconds: f64,
    /// Processor seconds of this thread, and of all other threads of the process.
    pub own: f64,
    pub others: f64,
    /// Latency of each operation in nanoseconds, ascending.
    pub latencies: Vec<u64>,
}

/// A channel and its buffers.
pub struct Load {
    channel: Box<dyn StoreChannel>,
    block_bytes: usize,
    buffers: Vec<Vec<u8>>,
    done: Vec<StoreDone>,
    random: Random,
    number: u64,
}

const FLUSH: u64 = u64::MAX;

impl Load {
    pub fn new(store: &dyn BlockStore, seed: u64) -> Self {
        Self {
            channel: store.open().expect("channel"),
            block_bytes: store.block_bytes(),
            buffers: Vec::new(),
            done: Vec::new(),
            random: Random(seed),
            number: seed << 40,
        }
    }

    fn buffer(&mut self, is_write: bool) -> Vec<u8> {
        let mut buffer = self.buffers.pop().unwrap_or_else(|| vec![0; self.block_bytes]);
        if is_write && self.block_bytes == BLOCK_BYTES {
            self.number += 1;
            let metadata = &mut buffer[BLOCK_BYTES - 64..];
            metadata.fill(0);
            metadata[field::IV.0..field::IV.0 + 8].copy_from_slice(&self.number.to_le_bytes());
            metadata[field::VERSION.0] = FORMAT_VERSION;
        }
        buffer
    }

    /// Writes these distinct blocks, `depth` at a time.
    pub fn write(&mut self, lbas: &[u64], depth: usize) {
        for lbas in lbas.chunks(depth) {
            for lba in lbas {
                let buffer = self.buffer(true);
                self.channel
                    .submit(*lba, StoreRequest::Write { lba: *lba, buffer, durable: false });
            }
            self.wait_for(lbas.len());
            let buffers = self.done.drain(..).map(|done| {
                done.result.expect("write");
                done.buffer
            });
            self.buffers.extend(buffers);
        }
    }

    /// Reads these blocks, one after another.
    pub fn read(&mut self, lbas: impl IntoIterator<Item = u64>) {
        for lba in lbas {
            let buffer = self.buffer(false);
            self.channel.submit(lba, StoreRequest::Read { lba, buffer });
            self.wait_for(1);
            let done = self.done.pop().expect("an end");
            done.result.expect("read");
            self.buffers.push(done.buffer);
        }
    }

    /// Writes each block once, in order, 32 at a time.
    pub fn fill(&mut self, span: u64) {
        for first in (0..span).step_by(32) {
            let count = 32.min(span - first);
            let buffer = (0..count).flat_map(|_| self.buffer(true)).collect();
            self.channel.submit(0, StoreRequest::Write { lba: first, buffer, durable: false });
            self.wait_for(1);
            self.done.drain(..).for_each(|done| done.result.expect("fill"));
        }
        self.channel.submit(0, StoreRequest::Flush);
        self.wait_for(1);
        self.done.clear();
    }

    fn wait_for(&mut self, count: usize) {
        self.channel.poll(&mut self.done);
        while self.done.len() < count {
            let due = self.channel.due();
            let left = due.map(|due| clock::timespec(due.saturating_sub(clock::now())));
            let fd = self.channel.as_fd();
            let mut fds: Vec<_> =
                fd.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
            poll(&mut fds, left.as_ref()).expect("poll");
            drop(fds);
            self.channel.poll(&mut self.done);
        }
    }

    /// Loads the store.
    pub fn run(&mut self, pattern: Pattern, until: Until) -> Outcome {
        self.run_each(pattern, until, &[pattern.is_write])
    }

    /// Loads the store; each slot repeats these operations in order (true: write, false: read).
    pub fn run_each(&mut self, pattern: Pattern, until: Until, turns: &[bool]) -> Outcome {
        let mut outcome = Outcome::default();
        let mut busy: Vec<(u64, Instant)> = vec![(u64::MAX, Instant::now()); pattern.depth];
        let mut idle: Vec<usize> = (0..pattern.depth).collect();
        let mut turn = vec![0; pattern.depth];
        let (mut since_flush, mut is_flushing) = (0, false);
        let (own, all, begun) = (thread_time(), crate::sample::processor_time(), Instant::now());
        loop {
            let is_over = match until {
                Until::Elapsed(duration) => begun.elapsed() >= duration,
                Until::Operations(count) => outcome.operations >= count,
            };
            if is_over && idle.len() == pattern.depth && !is_flushing {
                break;
            }
            while !is_over && let Some(slot) = idle.pop() {
                let lba = loop {
                    let lba = self.random.below(pattern.span);
                    if busy.iter().all(|(other, _)| *other != lba) {
                        break lba;
                    }
                };
                busy[slot] = (lba, Instant::now());
                let is_write = turns[turn[slot] % turns.len()];
                turn[slot] += 1;
                let buffer = self.buffer(is_write);
                self.channel.submit(
                    slot as u64,
                    if is_write {
                        StoreRequest::Write { lba, buffer, durable: false }
                    } else {
                        StoreRequest::Read { lba, buffer }
                    },
                );
                since_flush += 1;
            }
            if pattern.flush_every > 0 && since_flush >= pattern.flush_every && !is_flushing {
                (since_flush, is_flushing) = (0, true);
                self.channel.submit(FLUSH, StoreRequest::Flush);
            }
            self.wait_for(1);
            for done in self.done.drain(..) {
                done.result.expect("operation");
                if done.ticket == FLUSH {
                    is_flushing = false;
                    continue;
                }
                let slot = done.ticket as usize;
                outcome.latencies.push(busy[slot].1.elapsed().as_nanos() as u64);
                busy[slot].0 = u64::MAX;
                idle.push(slot);
                outcome.operations += 1;
                self.buffers.push(done.buffer);
            }
        }
        outcome.seconds = begun.elapsed().as_secs_f64();
        outcome.own = (thread_time() - own).as_secs_f64();
        let all = crate::sample::processor_time() - all;
        outcome.others = all.as_secs_f64() - outcome.own;
        outcome.latencies.sort_unstable();
        outcome
    }
}

fn thread_time() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
