//! An emulated drive: blocks in memory, whose operations complete no sooner than the given drive
//! would complete them. For benchmarks; its contents are lost with the process.
//!
//! It costs no more than a drive's driver: it uses no descriptor, timer or system call of its own.
//! The queue's thread learns when the next completion is due, and then takes all completions that
//! are due, as from a drive that coalesces its interrupts.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use sealane_proto::link::Nanos;

use super::super::store::{BlockStore, StoreChannel, StoreDone, StoreRequest};
use super::memory::{MemoryChannel, MemoryStore};
use crate::clock;

/// The performance of one direction of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Most bytes per second.
    pub bytes_per_second: u64,
    /// Most operations per second.
    pub operations_per_second: u64,
    /// Least duration of an operation, in nanoseconds.
    pub latency_ns: u64,
}

/// The performance of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Its name.
    pub name: &'static str,
    /// Performance of reads.
    pub read: Rate,
    /// Performance of writes, flushes and deallocations.
    pub write: Rate,
}

/// The known drives. `sn655`: a WD SN655 3.84 TB as measured in the Hazel paper's evaluation.
/// `evo870`: a Samsung 870 EVO 1 TB according to its data sheet; slow enough that two cores keep up
/// with it.
pub const PROFILES: [Profile; 2] = [
    Profile {
        name: "sn655",
        read: Rate {
            bytes_per_second: 6_800_000_000,
            operations_per_second: 1_200_000,
            latency_ns: 25_000,
        },
        write: Rate {
            bytes_per_second: 2_700_000_000,
            operations_per_second: 650_000,
            latency_ns: 15_000,
        },
    },
    Profile {
        name: "evo870",
        read: Rate {
            bytes_per_second: 560_000_000,
            operations_per_second: 98_000,
            latency_ns: 77_000,
        },
        write: Rate {
            bytes_per_second: 530_000_000,
            operations_per_second: 88_000,
            latency_ns: 28_000,
        },
    },
];

impl Profile {
    /// Parses a drive: a name, or `READ:WRITE`, each of which is the three figures of a [`Rate`],
    /// separated by commas.
    pub fn parse(drive: &str) -> io::Result<Self> {
        let named = PROFILES.into_iter().find(|profile| profile.name == drive);
        named.or_else(|| Self::of_figures(drive)).ok_or_else(|| {
            let names = PROFILES.map(|profile| profile.name).join(", ");
            let detail = format!(
                "no drive {drive:?}: known are {names}, or bytes per second, operations per \
                 second and nanoseconds of reads and of writes, as in \"560000000,98000,77000:\
                 530000000,88000,28000\""
            );
            io::Error::new(io::ErrorKind::InvalidInput, detail)
        })
    }

    fn of_figures(drive: &str) -> Option<Self> {
        let rate = |text: &str| {
            let mut figures = text.split(',').map(|figure| figure.parse::<u64>().ok());
            let mut next = || figures.next().flatten();
            let (bytes_per_second, operations_per_second) = (next()?, next()?);
            let rate = Rate { bytes_per_second, operations_per_second, latency_ns: next()? };
            let is_sound = bytes_per_second > 0 && operations_per_second > 0;
            (is_sound && figures.next().is_none()).then_some(rate)
        };
        let (read, write) = drive.split_once(':')?;
        Some(Self { name: "figures", read: rate(read)?, write: rate(write)? })
    }
}

/// Computes when operations of one direction complete. They run one after the other, each for as
/// long as the rate's bytes and operations per second require, and each takes at least the latency.
#[derive(Debug)]
struct Pace {
    rate: Rate,
    free_ns: u64,
}

impl Pace {
    /// When an operation of `bytes` that starts at `now_ns` completes; never before one that
    /// started earlier.
    fn due(&mut self, now_ns: u64, bytes: usize) -> u64 {
        let per_operation = 1_000_000_000 / self.rate.operations_per_second;
        let per_bytes =
            u128::from(bytes as u64) * 1_000_000_000 / u128::from(self.rate.bytes_per_second);
        self.free_ns = self.free_ns.max(now_ns) + per_operation.max(per_bytes as u64);
        self.free_ns.max(now_ns + self.rate.latency_ns)
    }
}

#[derive(Debug)]
struct Drive {
    read: Pace,
    write: Pace,
}

/// An emulated drive.
#[derive(Debug)]
pub struct EmulatedStore {
    memory: MemoryStore,
    drive: Arc<Mutex<Drive>>,
}

impl EmulatedStore {
    /// An empty drive with 4160-byte blocks if sealed, otherwise with 4096-byte blocks.
    #[must_use]
    pub fn new(block_count: u64, is_sealed: bool, profile: &Profile) -> Self {
        let pace = |rate| Pace { rate, free_ns: 0 };
        let drive = Drive { read: pace(profile.read), write: pace(profile.write) };
        Self {
            memory: MemoryStore::new(block_count, is_sealed),
            drive: Arc::new(Mutex::new(drive)),
        }
    }
}

impl BlockStore for EmulatedStore {
    fn block_bytes(&self) -> usize {
        self.memory.block_bytes()
    }

    fn block_count(&self) -> u64 {
        self.memory.block_count()
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        Ok(Box::new(EmulatedChannel {
            memory: self.memory.channel(),
            drive: Arc::clone(&self.drive),
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            ended: Vec::new(),
            last_ended: 0,
        }))
    }

    fn extend(&mut self, block_count: u64) -> io::Result<()> {
        self.memory.extend(block_count)
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.memory.statistics()
    }
}

/// Least time between two interrupts of a busy drive, in nanoseconds (NVMe feature 08h, interrupt
/// coalescing).
const COALESCED: Nanos = 10_000;
/// A drive with this many operations in flight is busy.
const COALESCED_OPERATIONS: usize = 8;

/// Completions of one direction with their due times, earliest first.
type Ends = VecDeque<(Nanos, StoreDone)>;

struct EmulatedChannel {
    memory: MemoryChannel,
    drive: Arc<Mutex<Drive>>,
    reads: Ends,
    /// Completions of writes, flushes and deallocations.
    writes: Ends,
    /// Empty between calls.
    ended: Vec<StoreDone>,
    /// When `poll` last returned a completion.
    last_ended: Nanos,
}

impl StoreChannel for EmulatedChannel {
    fn submit(&mut self, ticket: u64, request: StoreRequest) {
        let now = clock::now();
        let bytes = match &request {
            StoreRequest::Read { buffer, .. } | StoreRequest::Write { buffer, .. } => buffer.len(),
            StoreRequest::Flush | StoreRequest::Deallocate { .. } => 0,
        };
        let is_read = matches!(request, StoreRequest::Read { .. });
        let due = {
            let mut drive = self.drive.lock().unwrap_or_else(PoisonError::into_inner);
            let pace = if is_read { &mut drive.read } else { &mut drive.write };
            pace.due(now, bytes)
        };
        self.memory.submit(ticket, request);
        self.memory.poll(&mut self.ended);
        let ends = if is_read { &mut self.reads } else { &mut self.writes };
        ends.extend(self.ended.drain(..).map(|end| (due, end)));
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        let now = clock::now();
        // In the order in which they are due, as in every store.
        loop {
            let ends = first(&mut self.reads, &mut self.writes);
            if ends.front().is_none_or(|(due, _)| *due > now) {
                return;
            }
            done.extend(ends.pop_front().map(|(_, end)| end));
            self.last_ended = now;
        }
    }

    fn in_flight(&self) -> usize {
        self.reads.len() + self.writes.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn due(&self) -> Option<Nanos> {
        let due = |ends: &Ends| ends.front().map(|(due, _)| *due);
        let due = [due(&self.reads), due(&self.writes)].into_iter().flatten().min()?;
        let is_busy = self.in_flight() >= COALESCED_OPERATIONS;
        Some(if is_busy { due.max(self.last_ended + COALESCED) } else { due })
    }
}

/// The queue whose next completion is due first.
fn first<'a>(reads: &'a mut Ends, writes: &'a mut Ends) -> &'a mut Ends {
    match (reads.front(), writes.front()) {
        (Some((read, _)), Some((write, _))) if read > write => writes,
        (None, _) => writes,
        _ => reads,
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::*;

    #[test]
    fn behaves_as_a_store() {
        let profile = Profile::parse("sn655").expect("profile");
        conformance::check(&EmulatedStore::new(1000, true, &profile));
        conformance::check(&EmulatedStore::new(1000, false, &profile));
    }

    #[test]
    fn operations_take_their_latency_and_their_turn() {
        let rate = Rate {
            bytes_per_second: 1_000_000_000,
            operations_per_second: 100_000,
            latency_ns: 50_000,
        };
        let mut pace = Pace { rate, free_ns: 0 };
        // A single operation takes its latency.
        assert_eq!(pace.due(0, 4096), 50_000);
        // Concurrent operations end every 10 µs once their turns add up to more than the latency.
        let ends: Vec<_> = (0..8).map(|_| pace.due(100_000, 4096)).collect();
        assert_eq!(ends[..5], [150_000; 5]);
        assert_eq!(ends[5..], [160_000, 170_000, 180_000]);
        // A large operation takes the time that its bytes require.
        assert_eq!(pace.due(1_000_000, 1_000_000), 2_000_000);
        assert_eq!(pace.due(1_000_000, 0), 2_010_000);
    }

    #[test]
    fn unknown_drives_are_refused_by_name() {
        let refused =
            ["floppy", "", "1,1,0", "1,1:1,1,0", "1,1,0:0,1,0", "1,0,0:1,1,0", "1,1,0:1,1,0,0"];
        for drive in refused {
            let error = Profile::parse(drive).expect_err("unknown").to_string();
            assert!(error.contains(drive) && error.contains("sn655"), "{error}");
        }
    }

    #[test]
    fn a_drive_can_be_asked_for_by_its_figures() {
        let profile = Profile::parse("6800,1200,25:2700,650,15").expect("figures");
        let rate = |bytes_per_second, operations_per_second, latency_ns| Rate {
            bytes_per_second,
            operations_per_second,
            latency_ns,
        };
        assert_eq!((profile.read, profile.write), (rate(6800, 1200, 25), rate(2700, 650, 15)));
    }

    #[test]
    fn operations_complete_in_order_and_not_before_they_are_due() {
        let hour = 3_600_000_000_000;
        let drive = format!("1000000000,1000000,{hour}:1000000000,1000000,0");
        let store = EmulatedStore::new(10, false, &Profile::parse(&drive).expect("figures"));
        let mut channel = store.open().expect("channel");
        assert_eq!(channel.due(), None);
        let begun = clock::now();
        channel.submit(1, StoreRequest::Read { lba: 0, buffer: vec![0; 4096] });
        assert!(channel.due().is_some_and(|due| due >= begun + hour));
        channel.submit(2, StoreRequest::Flush);
        channel.submit(3, StoreRequest::Flush);
        let mut done = Vec::new();
        while done.len() < 2 {
            channel.poll(&mut done);
        }
        assert_eq!(done.iter().map(|end| end.ticket).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(channel.in_flight(), 1, "the read takes an hour");
    }
}
