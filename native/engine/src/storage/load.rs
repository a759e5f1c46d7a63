//! A closed-loop load generator: keeps a fixed number of commands outstanding and records each
//! one's latency. On plain I/O queues it measures any NVMe/TCP controller from the host's side; a
//! gateway runs it on a queue of its own ([`super::gateway::GatewayVolume::run_load`]).

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
}

/// The queue that a load runs on.
pub(super) trait Port {
    /// Submits a read or write; [`Port::next_end`] returns `tag` when it ends.
    fn submit(&mut self, tag: u64, command: HostCommand) -> Result<(), TransferError>;
    /// A buffer for a write, reused if there is one.
    fn buffer(&mut self, bytes: usize) -> Vec<u8>;
    /// Sends submitted commands and waits for an answer, for a limited time.
    fn exchange(&mut self) -> Result<(), TransferError>;
    /// The tag of the next command that ended, or the error that ends the load.
    fn next_end(&mut self) -> Result<Option<u64>, TransferError>;
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
                    load.run()
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
    };
    for part in parts {
        let part = part?;
        total.commands += part.commands;
        total.bytes += part.bytes;
        total.elapsed = total.elapsed.max(part.elapsed);
        total.cpu += part.cpu;
        total.latency.add(&part.latency).map_err(|error| closed(error.to_string()))?;
    }
    Ok(total)
}

fn new_histogram() -> Result<Histogram<u64>, TransferError> {
    Histogram::new_with_max(LATENCY_MAX.as_nanos() as u64, LATENCY_DIGITS)
        .map_err(|error| closed(error.to_string()))
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
    /// Free tags.
    free: Vec<u64>,
    next_lba: u64,
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
            free: (0..plan.depth as u64).collect(),
            random: plan.seed.wrapping_add(index),
            pattern: Vec::new(),
        };
        if plan.is_write {
            // Random, so that no store or link can compress it.
            load.pattern = (0..io_bytes * PATTERN_BUFFERS / 8)
                .flat_map(|_| load.draw().to_le_bytes())
                .collect();
        }
        load
    }

    /// The next number of SplitMix64; addresses and data must be spread evenly, not secret.
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn run(&mut self) -> Result<LoadResult, TransferError> {
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
                return Ok(LoadResult { commands, bytes, elapsed, cpu, latency });
            }
            self.port.exchange()?;
            let now = Instant::now();
            while let Some(tag) = self.port.next_end()? {
                commands += 1;
                let since = self.submitted.get(tag as usize).copied().unwrap_or(now);
                latency.saturating_record((now - since).as_nanos() as u64);
                self.free.push(tag);
            }
        }
    }

    fn submit(&mut self, tag: u64) -> Result<(), TransferError> {
        let blocks = u64::from(self.plan.io_blocks);
        let places = ((self.span.end - self.span.start) / blocks).max(1);
        let lba = if self.plan.is_random {
            self.span.start + self.draw() % places * blocks
        } else {
            let lba = self.next_lba;
            let next = lba + blocks;
            self.next_lba = if next + blocks > self.span.end { self.span.start } else { next };
            lba
        };
        let command = if self.plan.is_write {
            let mut data = self.port.buffer(self.io_bytes);
            let from = lba as usize % PATTERN_BUFFERS * self.io_bytes;
            data.copy_from_slice(self.pattern.get(from..from + self.io_bytes).unwrap_or_default());
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

    fn next_end(&mut self) -> Result<Option<u64>, TransferError> {
        match self.queue.next_event() {
            None => Ok(None),
            Some(HostEvent::Completed { tag, status, data, .. }) => {
                self.queue.recycle(data);
                if status.is_success() {
                    Ok(Some(tag))
                } else {
                    Err(TransferError::Status { status, lba: 0 })
                }
            }
            Some(HostEvent::Failed { reason, detail, .. }) => {
                Err(TransferError::Ended { reason, detail })
            }
        }
    }

    fn outstanding(&self) -> usize {
        self.queue.outstanding()
    }
}
