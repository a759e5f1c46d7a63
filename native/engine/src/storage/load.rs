//! A closed-loop load generator: keeps a fixed number of commands outstanding and records each
//! one's latency. On plain I/O queues it measures any NVMe/TCP controller from the host's side; a
//! gateway runs it on a queue of its own ([`super::gateway::GatewayVolume::run_load`]).

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::event::PollFlags;
use rustix::time::{ClockId, clock_gettime};
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::{HostEvent, HostLimits, HostQueue};

use super::connection::{Connection, Gone, wait};
use super::initiator::{TransferError, closed};

/// Maximum latency recorded; longer ones are counted as this.
const LATENCY_MAX: Duration = Duration::from_secs(60);
/// Significant digits of recorded latencies.
const LATENCY_DIGITS: u8 = 3;
/// Number of different buffers among which writes choose their data.
const PATTERN_BUFFERS: usize = 8;

/// The load to run on a namespace.
#[derive(Debug, Clone)]
pub struct LoadPlan {
    /// Whether to write; otherwise read.
    pub is_write: bool,
    /// Whether addresses are random; otherwise ascending.
    pub is_random: bool,
    /// Blocks per command.
    pub io_blocks: u32,
    /// Commands outstanding per queue.
    pub depth: usize,
    /// Blocks of the namespace to access; divided among the queues.
    pub span: Range<u64>,
    /// How long commands are submitted; those outstanding at the end are counted, too.
    pub duration: Duration,
    /// Maximum time without any answer.
    pub timeout: Duration,
    /// Seed of addresses and data.
    pub seed: u64,
    /// Whether all that was written is read back afterwards, and compared. Then each write has bytes
    /// of its own, and no two commands in flight have a block in common. Only of writes, and not on
    /// a gateway's own queue, which keeps no data of reads: [`TransferError::Unverifiable`].
    pub is_verified: bool,
}

/// The measurements.
#[derive(Debug)]
pub struct LoadResult {
    /// Number of completed commands.
    pub commands: u64,
    /// Bytes they moved.
    pub bytes: u64,
    /// From the submission of the first command to the end of the last.
    pub elapsed: Duration,
    /// Processor time of the load's own threads.
    pub cpu: Duration,
    /// Latencies in nanoseconds.
    pub latency: Histogram<u64>,
    /// Places that were read back and hold what was written there last.
    pub verified: u64,
}

/// The queue that a load runs on.
pub(super) trait Port {
    /// Submits a read or write; [`Port::next_end`] returns `tag` when it ends.
    fn submit(&mut self, tag: u64, command: HostCommand) -> Result<(), TransferError>;
    /// A buffer for a write, reused if there is one.
    fn buffer(&mut self, bytes: usize) -> Vec<u8>;
    /// Sends submitted commands and waits for an answer, for a limited time.
    fn exchange(&mut self) -> Result<(), TransferError>;
    /// The tag of the next command that ended, and its buffer, or the error that ends the load.
    fn next_end(&mut self) -> Result<Option<(u64, Vec<u8>)>, TransferError>;
    /// Takes back a buffer of [`Port::next_end`].
    fn recycle(&mut self, buffer: Vec<u8>);
    /// Number of commands that haven't ended.
    fn outstanding(&self) -> usize;
}

/// An I/O queue of a controller.
struct QueuePort {
    queue: HostQueue,
    connection: Connection,
    timeout: Duration,
}

/// Runs the load on all queues concurrently, one thread each, for the plan's duration.
pub fn run_load(
    queues: Vec<(OwnedFd, HostLimits)>,
    plan: &LoadPlan,
) -> Result<LoadResult, TransferError> {
    let start = Barrier::new(queues.len());
    let share = (plan.span.end - plan.span.start) / queues.len().max(1) as u64;
    let parts: Vec<Result<LoadResult, TransferError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(queues)
            .map(|(index, (fd, limits))| {
                let first = plan.span.start + index * share;
                let (queue, connection) = (HostQueue::new(limits, None), Connection::new(fd));
                let port = QueuePort { queue, connection, timeout: plan.timeout };
                let span = first..first + share;
                let mut load = Load::new(port, limits.block_bytes, plan, span, index);
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    let result = load.run()?;
                    Ok(LoadResult { verified: load.verify()?, ..result })
                })
            })
            .collect();
        let lost = || Err(closed("a load thread panicked".into()));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| lost())).collect()
    });
    let mut total = LoadResult {
        commands: 0,
        bytes: 0,
        elapsed: Duration::ZERO,
        cpu: Duration::ZERO,
        latency: new_histogram()?,
        verified: 0,
    };
    for part in parts {
        let part = part?;
        total.commands += part.commands;
        total.bytes += part.bytes;
        total.elapsed = total.elapsed.max(part.elapsed);
        total.cpu += part.cpu;
        total.verified += part.verified;
        total.latency.add(&part.latency).map_err(|error| closed(error.to_string()))?;
    }
    Ok(total)
}

fn new_histogram() -> Result<Histogram<u64>, TransferError> {
    Histogram::new_with_max(LATENCY_MAX.as_nanos() as u64, LATENCY_DIGITS)
        .map_err(|error| closed(error.to_string()))
}

/// The next number of SplitMix64; addresses and data must be spread evenly, not secret.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Fills a buffer with the bytes of a write of its own.
fn fill(seed: u64, lba: u64, number: u64, data: &mut [u8]) {
    let mut state = seed;
    for part in [lba, number] {
        state = draw(&mut state) ^ part;
    }
    for word in data.chunks_mut(8) {
        word.copy_from_slice(&draw(&mut state).to_le_bytes()[..word.len()]);
    }
}

fn thread_cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// One queue's share of the load.
pub(super) struct Load<'a, P> {
    port: P,
    plan: &'a LoadPlan,
    span: Range<u64>,
    io_bytes: usize,
    /// Submission time of each outstanding command, by tag.
    submitted: Vec<Instant>,
    /// First block of each outstanding command, by tag.
    places: Vec<u64>,
    /// These blocks, if the load is verified.
    busy: HashSet<u64>,
    /// Number of the last write of each place, if the load is verified.
    written: BTreeMap<u64, u64>,
    writes: u64,
    /// Free tags.
    free: Vec<u64>,
    next_lba: u64,
    seed: u64,
    random: u64,
    pattern: Vec<u8>,
}

impl<'a, P: Port> Load<'a, P> {
    pub(super) fn new(
        port: P,
        block_bytes: usize,
        plan: &'a LoadPlan,
        span: Range<u64>,
        index: u64,
    ) -> Self {
        let io_bytes = plan.io_blocks as usize * block_bytes;
        let mut load = Self {
            port,
            plan,
            next_lba: span.start,
            span,
            io_bytes,
            submitted: vec![Instant::now(); plan.depth],
            places: vec![0; plan.depth],
            busy: HashSet::new(),
            written: BTreeMap::new(),
            writes: 0,
            free: (0..plan.depth as u64).collect(),
            seed: plan.seed.wrapping_add(index),
            random: plan.seed.wrapping_add(index),
            pattern: Vec::new(),
        };
        if plan.is_write {
            // Random, so that no store or link can compress it.
            load.pattern = (0..io_bytes * PATTERN_BUFFERS / 8)
                .flat_map(|_| draw(&mut load.random).to_le_bytes())
                .collect();
        }
        load
    }

    pub(super) fn run(&mut self) -> Result<LoadResult, TransferError> {
        let can_verify = self.plan.is_write && self.place_count() > self.plan.depth as u64;
        if self.plan.is_verified && !can_verify {
            return Err(TransferError::Unverifiable);
        }
        let (started, cpu_before) = (Instant::now(), thread_cpu());
        let mut commands = 0;
        let mut latency = new_histogram()?;
        loop {
            let is_over = started.elapsed() >= self.plan.duration;
            while !is_over && let Some(tag) = self.free.pop() {
                self.submit(tag)?;
            }
            if self.port.outstanding() == 0 {
                let elapsed = started.elapsed();
                let cpu = thread_cpu().saturating_sub(cpu_before);
                let bytes = commands * self.io_bytes as u64;
                return Ok(LoadResult { commands, bytes, elapsed, cpu, latency, verified: 0 });
            }
            self.port.exchange()?;
            let now = Instant::now();
            while let Some((tag, buffer)) = self.port.next_end()? {
                commands += 1;
                let since = self.submitted.get(tag as usize).copied().unwrap_or(now);
                latency.saturating_record((now - since).as_nanos() as u64);
                self.port.recycle(buffer);
                self.busy.remove(&self.places[tag as usize]);
                self.free.push(tag);
            }
        }
    }

    /// Reads every place that was written, and returns how many there are;
    /// [`TransferError::Differs`] if one doesn't hold what was written last.
    fn verify(&mut self) -> Result<u64, TransferError> {
        let (mut expected, mut verified) = (vec![0; self.io_bytes], 0);
        let mut left: Vec<u64> = self.written.keys().copied().collect();
        loop {
            while let Some(&lba) = left.last()
                && let Some(tag) = self.free.pop()
            {
                left.pop();
                self.places[tag as usize] = lba;
                self.port.submit(tag, HostCommand::Read { lba, blocks: self.plan.io_blocks })?;
            }
            if self.port.outstanding() == 0 {
                return Ok(verified);
            }
            self.port.exchange()?;
            while let Some((tag, buffer)) = self.port.next_end()? {
                let lba = self.places[tag as usize];
                fill(self.seed, lba, self.written[&lba], &mut expected);
                if buffer != expected {
                    return Err(TransferError::Differs { lba });
                }
                verified += 1;
                self.port.recycle(buffer);
                self.free.push(tag);
            }
        }
    }

    fn place_count(&self) -> u64 {
        ((self.span.end - self.span.start) / u64::from(self.plan.io_blocks)).max(1)
    }

    fn next_place(&mut self) -> u64 {
        let blocks = u64::from(self.plan.io_blocks);
        if self.plan.is_random {
            return self.span.start + draw(&mut self.random) % self.place_count() * blocks;
        }
        let lba = self.next_lba;
        let next = lba + blocks;
        self.next_lba = if next + blocks > self.span.end { self.span.start } else { next };
        lba
    }

    fn submit(&mut self, tag: u64) -> Result<(), TransferError> {
        let mut lba = self.next_place();
        while self.plan.is_verified && !self.busy.insert(lba) {
            lba = self.next_place();
        }
        self.places[tag as usize] = lba;
        let command = if self.plan.is_write {
            let mut data = self.port.buffer(self.io_bytes);
            if self.plan.is_verified {
                self.writes += 1;
                self.written.insert(lba, self.writes);
                fill(self.seed, lba, self.writes, &mut data);
            } else {
                let from = lba as usize % PATTERN_BUFFERS * self.io_bytes;
                data.copy_from_slice(&self.pattern[from..from + self.io_bytes]);
            }
            HostCommand::Write { lba, data, is_forced: false }
        } else {
            HostCommand::Read { lba, blocks: self.plan.io_blocks }
        };
        if let Some(place) = self.submitted.get_mut(tag as usize) {
            *place = Instant::now();
        }
        self.port.submit(tag, command)
    }
}

impl Port for QueuePort {
    fn submit(&mut self, tag: u64, command: HostCommand) -> Result<(), TransferError> {
        self.queue.submit(tag, command).map_err(|(error, _)| closed(error.to_string()))
    }

    fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        self.queue.buffer(bytes)
    }

    fn exchange(&mut self) -> Result<(), TransferError> {
        let gone = |Gone(detail)| closed(detail);
        self.connection.send(self.queue.transmit()).map_err(gone)?;
        let interest = Connection::interest(true, self.queue.transmit().pending_bytes());
        let [ready] = wait([(self.connection.as_fd(), interest)], Some(self.timeout))
            .map_err(|error| closed(error.to_string()))?;
        if ready.is_empty() {
            return Err(TransferError::TimedOut(self.timeout));
        }
        if ready != PollFlags::OUT {
            self.connection.receive(&mut self.queue).map_err(gone)?;
        }
        Ok(())
    }

    fn next_end(&mut self) -> Result<Option<(u64, Vec<u8>)>, TransferError> {
        match self.queue.next_event() {
            None => Ok(None),
            Some(HostEvent::Completed { tag, status, data, .. }) => {
                if status.is_success() {
                    Ok(Some((tag, data)))
                } else {
                    Err(TransferError::Status { status, lba: 0 })
                }
            }
            Some(HostEvent::Failed { reason, detail, .. }) => {
                Err(TransferError::Ended { reason, detail })
            }
        }
    }

    fn recycle(&mut self, buffer: Vec<u8>) {
        self.queue.recycle(buffer);
    }

    fn outstanding(&self) -> usize {
        self.queue.outstanding()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};

    use super::*;

    const BYTES: usize = 512;

    /// A namespace in memory that ends commands in order, four at a time.
    #[derive(Default)]
    struct Disk {
        blocks: HashMap<u64, Vec<u8>>,
        pending: VecDeque<(u64, HostCommand)>,
        ended: VecDeque<(u64, Vec<u8>)>,
        writes: u64,
        /// Number of the write that it acknowledges and forgets.
        forgets: Option<u64>,
        /// Whether two commands in flight had a block in common.
        has_overlap: bool,
    }

    impl Port for Disk {
        fn submit(&mut self, tag: u64, command: HostCommand) -> Result<(), TransferError> {
            let lba_of = |command: &HostCommand| match command {
                HostCommand::Read { lba, .. } | HostCommand::Write { lba, .. } => *lba,
                _ => panic!("{command:?}"),
            };
            let lba = lba_of(&command);
            self.has_overlap |= self.pending.iter().any(|(_, other)| lba_of(other) == lba);
            self.pending.push_back((tag, command));
            Ok(())
        }

        fn buffer(&mut self, bytes: usize) -> Vec<u8> {
            vec![0; bytes]
        }

        fn exchange(&mut self) -> Result<(), TransferError> {
            for (tag, command) in self.pending.drain(..self.pending.len().min(4)) {
                let data = match command {
                    HostCommand::Write { lba, data, .. } => {
                        self.writes += 1;
                        if self.forgets != Some(self.writes) {
                            self.blocks.insert(lba, data);
                        }
                        Vec::new()
                    }
                    HostCommand::Read { lba, .. } => self.blocks[&lba].clone(),
                    _ => panic!("{command:?}"),
                };
                self.ended.push_back((tag, data));
            }
            Ok(())
        }

        fn next_end(&mut self) -> Result<Option<(u64, Vec<u8>)>, TransferError> {
            Ok(self.ended.pop_front())
        }

        fn recycle(&mut self, _: Vec<u8>) {}

        fn outstanding(&self) -> usize {
            self.pending.len() + self.ended.len()
        }
    }

    fn plan(is_random: bool) -> LoadPlan {
        LoadPlan {
            is_write: true,
            is_random,
            io_blocks: 1,
            depth: 8,
            span: 0..32,
            duration: Duration::ZERO,
            timeout: Duration::from_secs(1),
            seed: 3,
            is_verified: true,
        }
    }

    /// Runs so many times `depth` commands, whatever the clock says; returns how many ended.
    fn run_rounds(load: &mut Load<'_, Disk>, rounds: usize) -> u64 {
        let mut commands = 0;
        for _ in 0..rounds {
            while let Some(tag) = load.free.pop() {
                load.submit(tag).unwrap();
            }
            commands += load.run().unwrap().commands;
        }
        commands
    }

    #[test]
    fn a_verified_load_finds_the_last_write_of_each_place() {
        for is_random in [false, true] {
            let plan = plan(is_random);
            let mut load = Load::new(Disk::default(), BYTES, &plan, plan.span.clone(), 0);
            assert_eq!(run_rounds(&mut load, 64), 64 * 8);
            assert_eq!(load.verify().unwrap(), 32);
            assert!(!load.port.has_overlap);
            let contents: HashSet<_> = load.port.blocks.values().collect();
            assert_eq!(contents.len(), 32, "each write has bytes of its own");
        }
    }

    #[test]
    fn a_verified_load_notices_a_write_that_was_lost_and_one_that_went_elsewhere() {
        let plan = plan(false);
        let mut load = Load::new(Disk::default(), BYTES, &plan, plan.span.clone(), 0);
        run_rounds(&mut load, 64);
        let last = load.port.writes;
        let lba = (last - 1) % 32;
        let other = load.port.blocks[&((lba + 1) % 32)].clone();
        load.port.blocks.insert(lba, other);
        let failed = load.verify();
        assert!(matches!(failed, Err(TransferError::Differs { lba: found }) if found == lba));

        let disk = Disk { forgets: Some(20), ..Disk::default() };
        let mut load = Load::new(disk, BYTES, &plan, plan.span.clone(), 0);
        for lba in plan.span.clone() {
            load.port.blocks.insert(lba, vec![0; BYTES]);
        }
        // Each place is written once, so the lost write isn't overwritten.
        assert_eq!(run_rounds(&mut load, 4), 32);
        assert!(matches!(load.verify(), Err(TransferError::Differs { lba: 19 })));
    }

    #[test]
    fn a_verified_load_writes_on_more_places_than_commands_in_flight() {
        let crowded = LoadPlan { depth: 32, ..plan(true) };
        let reading = LoadPlan { is_write: false, ..plan(true) };
        for plan in [crowded, reading] {
            let mut load = Load::new(Disk::default(), BYTES, &plan, plan.span.clone(), 0);
            assert!(matches!(load.run(), Err(TransferError::Unverifiable)));
        }
    }
}
