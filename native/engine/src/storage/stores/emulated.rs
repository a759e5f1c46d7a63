//! A drive that doesn't exist: blocks in memory, ended no sooner than the named drive would. For
//! benchmarks, and lost with the process.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::super::store::{BlockStore, METADATA_BYTES, StoreChannel, StoreDone, StoreRequest};
use super::memory::{MemoryChannel, MemoryStore};
use super::ring::hush;

/// What one direction of a drive can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Bytes per second, at most.
    pub bytes_per_second: u64,
    /// Operations per second, at most.
    pub operations_per_second: u64,
    /// Nanoseconds that an operation takes, at least.
    pub latency_ns: u64,
}

/// What a drive can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Its name.
    pub name: &'static str,
    /// Reads.
    pub read: Rate,
    /// Writes, flushes and deallocations.
    pub write: Rate,
}

/// The drives known. `sn655`: WD SN655 3.84 TB as the Hazel paper's evaluation saw it. `evo870`: the
/// data sheet's figures of a Samsung 870 EVO 1 TB, slow enough that two cores keep up with it.
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
    /// The drive of that name.
    pub fn named(name: &str) -> io::Result<Self> {
        let found = PROFILES.into_iter().find(|profile| profile.name == name);
        found.ok_or_else(|| {
            let names = PROFILES.map(|profile| profile.name).join(", ");
            let detail = format!("no drive named {name:?}: known are {names}");
            io::Error::new(io::ErrorKind::InvalidInput, detail)
        })
    }
}

/// When operations of one direction end: each takes its turn for as long as bytes and operations
/// per second ask for, and not less than its latency.
#[derive(Debug)]
struct Pace {
    rate: Rate,
    free_ns: u64,
}

impl Pace {
    /// When an operation of so many bytes that starts at `now_ns` ends.
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
    start: Instant,
}

impl EmulatedStore {
    /// An empty drive: 4160-byte blocks if sealed, 4096 if not.
    #[must_use]
    pub fn new(block_count: u64, is_sealed: bool, profile: &Profile) -> Self {
        let pace = |rate| Pace { rate, free_ns: 0 };
        let drive = Drive { read: pace(profile.read), write: pace(profile.write) };
        Self {
            memory: MemoryStore::new(block_count, is_sealed),
            drive: Arc::new(Mutex::new(drive)),
            start: Instant::now(),
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
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Box::new(EmulatedChannel {
            memory: self.memory.channel(),
            drive: Arc::clone(&self.drive),
            start: self.start,
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            armed_ns: u64::MAX,
            due: BTreeMap::new(),
            next: 0,
        }))
    }

    fn scan(&self, visit: &mut dyn FnMut(u64, &[u8; METADATA_BYTES])) -> io::Result<()> {
        self.memory.scan(visit)
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.memory.statistics()
    }
}

struct EmulatedChannel {
    memory: MemoryChannel,
    drive: Arc<Mutex<Drive>>,
    start: Instant,
    timer: OwnedFd,
    armed_ns: u64,
    /// Ends by the time and order in which they are due.
    due: BTreeMap<(u64, u64), StoreDone>,
    next: u64,
}

impl EmulatedChannel {
    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Has the descriptor become readable when the next end is due.
    fn arm(&mut self, now_ns: u64) {
        let due_ns = self.due.first_key_value().map_or(u64::MAX, |((due_ns, _), _)| *due_ns);
        if due_ns == self.armed_ns {
            return;
        }
        self.armed_ns = due_ns;
        // A time-out of zero would disarm the timer.
        let wait = Duration::from_nanos(due_ns.saturating_sub(now_ns).max(1));
        let value = if due_ns == u64::MAX {
            Timespec::default()
        } else {
            Timespec {
                tv_sec: wait.as_secs().cast_signed(),
                tv_nsec: i64::from(wait.subsec_nanos()),
            }
        };
        let timer = Itimerspec { it_interval: Timespec::default(), it_value: value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &timer)
            .expect("a timer takes any normal time");
    }
}

impl StoreChannel for EmulatedChannel {
    fn submit(&mut self, ticket: u64, request: StoreRequest) {
        let now_ns = self.now_ns();
        let due_ns = {
            let mut drive = self.drive.lock().unwrap_or_else(PoisonError::into_inner);
            match &request {
                StoreRequest::Read { buffer, .. } => drive.read.due(now_ns, buffer.len()),
                StoreRequest::Write { buffer, .. } => drive.write.due(now_ns, buffer.len()),
                StoreRequest::Flush | StoreRequest::Deallocate { .. } => drive.write.due(now_ns, 0),
            }
        };
        self.memory.submit(ticket, request);
        let mut done = Vec::new();
        self.memory.poll(&mut done);
        for end in done {
            self.due.insert((due_ns, self.next), end);
            self.next += 1;
        }
        self.arm(now_ns);
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        let now_ns = self.now_ns();
        while let Some(first) = self.due.first_entry()
            && first.key().0 <= now_ns
        {
            done.push(first.remove());
        }
        if self.armed_ns <= now_ns {
            hush(&self.timer);
            self.armed_ns = u64::MAX;
        }
        self.arm(now_ns);
    }

    fn in_flight(&self) -> usize {
        self.due.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::*;

    #[test]
    fn behaves_as_a_store() {
        let profile = Profile::named("sn655").expect("profile");
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
        // One alone takes its latency.
        assert_eq!(pace.due(0, 4096), 50_000);
        // Many at once end every 10 µs once the turns take longer than the latency.
        let ends: Vec<_> = (0..8).map(|_| pace.due(100_000, 4096)).collect();
        assert_eq!(ends[..5], [150_000; 5]);
        assert_eq!(ends[5..], [160_000, 170_000, 180_000]);
        // A large one takes its bytes' time.
        assert_eq!(pace.due(1_000_000, 1_000_000), 2_000_000);
        assert_eq!(pace.due(1_000_000, 0), 2_010_000);
    }

    #[test]
    fn unknown_drives_are_refused_by_name() {
        let error = Profile::named("floppy").expect_err("unknown").to_string();
        assert!(error.contains("floppy") && error.contains("sn655"), "{error}");
    }
}
