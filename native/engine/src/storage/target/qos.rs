//! Quality of service of one namespace: limits on commands and bytes per second.
//!
//! A limit is a virtual clock that every command advances by its cost; a command may run while the
//! clock is at most [`BURST`] ahead of now. Other commands wait and are released round-robin, one
//! from each queue, so a deep queue can't crowd out a shallow one. Time is a parameter.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use sealane_proto::link::{NANOS_PER_SECOND, Nanos};

/// How far a namespace may run ahead of its rate after a pause.
const BURST: Nanos = NANOS_PER_SECOND / 100;

/// Limits per second; 0 means none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QosLimits {
    /// Commands.
    pub iops: u64,
    /// Bytes read and written.
    pub bytes_per_second: u64,
    /// Reads.
    pub read_iops: u64,
    /// Writes and other commands that change blocks.
    pub write_iops: u64,
    /// Bytes read.
    pub read_bytes_per_second: u64,
    /// Bytes written.
    pub write_bytes_per_second: u64,
}

/// The cost of one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Data bytes.
    pub bytes: u64,
    /// Whether it changes blocks.
    pub is_write: bool,
}

#[derive(Debug, Default)]
struct Bucket {
    per_second: u64,
    /// When all commands released so far would have been done at exactly the rate.
    clock: Nanos,
}

impl Bucket {
    fn due(&self) -> Nanos {
        if self.per_second == 0 { 0 } else { self.clock.saturating_sub(BURST) }
    }

    fn take(&mut self, now: Nanos, amount: u64) {
        if self.per_second > 0 {
            let nanos = u128::from(amount) * u128::from(NANOS_PER_SECOND);
            let nanos = nanos.div_ceil(u128::from(self.per_second));
            let nanos = Nanos::try_from(nanos).unwrap_or(Nanos::MAX);
            self.clock = self.clock.max(now).saturating_add(nanos);
        }
    }
}

/// Commands and bytes of one direction, or of both.
#[derive(Debug, Default)]
struct Buckets {
    commands: Bucket,
    bytes: Bucket,
}

impl Buckets {
    fn due(&self) -> Nanos {
        self.commands.due().max(self.bytes.due())
    }

    fn take(&mut self, now: Nanos, cost: Cost) {
        self.commands.take(now, 1);
        self.bytes.take(now, cost.bytes);
    }

    fn set(&mut self, commands: u64, bytes: u64) {
        // Commands released at the old rate aren't counted: at most one burst.
        self.commands = Bucket { per_second: commands, clock: 0 };
        self.bytes = Bucket { per_second: bytes, clock: 0 };
    }
}

/// A waiting line: queue and direction, so that a read doesn't wait behind a write under a limit
/// that applies to writes only.
type Line = (u64, bool);

/// The limits of one namespace, and its waiting commands.
#[derive(Debug)]
pub struct Qos<W> {
    limits: QosLimits,
    total: Buckets,
    reads: Buckets,
    writes: Buckets,
    waiting: BTreeMap<Line, VecDeque<(Cost, W)>>,
    /// The line served last.
    last: Line,
}

impl<W> Default for Qos<W> {
    fn default() -> Self {
        Self {
            limits: QosLimits::default(),
            total: Buckets::default(),
            reads: Buckets::default(),
            writes: Buckets::default(),
            waiting: BTreeMap::new(),
            last: (0, false),
        }
    }
}

impl<W> Qos<W> {
    /// Changes the limits, also for waiting commands. Call [`Self::dispatch`] afterwards.
    pub fn set_limits(&mut self, limits: QosLimits) {
        self.limits = limits;
        self.total.set(limits.iops, limits.bytes_per_second);
        self.reads.set(limits.read_iops, limits.read_bytes_per_second);
        self.writes.set(limits.write_iops, limits.write_bytes_per_second);
    }

    /// Whether there is any limit or any waiting command.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.limits != QosLimits::default() || !self.waiting.is_empty()
    }

    /// Admits a command of `queue` (true), or keeps it until [`Self::dispatch`] releases it.
    pub fn admit(&mut self, now: Nanos, queue: u64, cost: Cost, waiter: W) -> bool {
        let line = (queue, cost.is_write);
        // A command overtakes neither those in its own line nor one that is already due.
        let overtakes =
            self.waiting.contains_key(&line) || self.next_due().is_some_and(|due| due <= now);
        if !overtakes && self.due(cost) <= now {
            self.take(now, cost);
            return true;
        }
        self.waiting.entry(line).or_default().push_back((cost, waiter));
        false
    }

    /// Releases the commands that may run by now, round-robin.
    pub fn dispatch(&mut self, now: Nanos, released: &mut Vec<W>) {
        while let Some(line) = self.next_line(now) {
            let Some(commands) = self.waiting.get_mut(&line) else { return };
            let Some((cost, waiter)) = commands.pop_front() else { return };
            if commands.is_empty() {
                self.waiting.remove(&line);
            }
            self.take(now, cost);
            self.last = line;
            released.push(waiter);
        }
    }

    /// When [`Self::dispatch`] can next release a command; `None` if none is waiting.
    #[must_use]
    pub fn next_due(&self) -> Option<Nanos> {
        let heads = self.waiting.values().filter_map(VecDeque::front);
        heads.map(|(cost, _)| self.due(*cost)).min()
    }

    /// Drops the waiting commands of a queue that ends.
    pub fn cancel(&mut self, queue: u64) {
        self.waiting.retain(|(waiting, _), _| *waiting != queue);
    }

    /// The next line after the one served last whose first command may run.
    fn next_line(&self, now: Nanos) -> Option<Line> {
        let later = self.waiting.range((Bound::Excluded(self.last), Bound::Unbounded));
        let earlier = self.waiting.range(..=self.last);
        later
            .chain(earlier)
            .find(|(_, commands)| commands.front().is_some_and(|(cost, _)| self.due(*cost) <= now))
            .map(|(line, _)| *line)
    }

    fn due(&self, cost: Cost) -> Nanos {
        let own = if cost.is_write { &self.writes } else { &self.reads };
        self.total.due().max(own.due())
    }

    fn take(&mut self, now: Nanos, cost: Cost) {
        self.total.take(now, cost);
        let own = if cost.is_write { &mut self.writes } else { &mut self.reads };
        own.take(now, cost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Cost = Cost { bytes: 4096, is_write: false };
    const WRITE: Cost = Cost { bytes: 4096, is_write: true };

    fn limited(limits: QosLimits) -> Qos<u32> {
        let mut qos = Qos::default();
        qos.set_limits(limits);
        qos
    }

    /// Keeps `depth` commands of each queue waiting for `seconds`; returns the commands done by
    /// queue.
    fn saturate(qos: &mut Qos<u32>, costs: &[Cost], depth: &[usize], seconds: u64) -> Vec<u64> {
        let (start, mut done) = (5 * NANOS_PER_SECOND, vec![0; costs.len()]);
        let mut now = start;
        for (queue, cost) in costs.iter().enumerate() {
            for _ in 0..depth[queue] {
                while qos.admit(now, queue as u64, *cost, queue as u32) {
                    done[queue] += 1;
                }
            }
        }
        while let Some(due) = qos.next_due()
            && due <= start + seconds * NANOS_PER_SECOND
        {
            now = now.max(due);
            let mut released = Vec::new();
            qos.dispatch(now, &mut released);
            assert!(!released.is_empty(), "due, but nothing was released");
            for queue in released {
                done[queue as usize] += 1;
                let cost = costs[queue as usize];
                while qos.admit(now, u64::from(queue), cost, queue) {
                    done[queue as usize] += 1;
                }
            }
        }
        done
    }

    #[test]
    fn a_rate_is_kept_to_within_the_burst() {
        let mut qos = limited(QosLimits { iops: 1000, ..QosLimits::default() });
        let done = saturate(&mut qos, &[READ], &[32], 10)[0];
        assert!((10_000..=10_000 + 12).contains(&done), "{done}");
        let mut qos = limited(QosLimits { bytes_per_second: 4_096_000, ..QosLimits::default() });
        let done = saturate(&mut qos, &[WRITE], &[32], 10)[0];
        assert!((10_000..=10_000 + 12).contains(&done), "{done}");
    }

    #[test]
    fn a_command_larger_than_the_burst_runs_and_is_counted_in_full() {
        let mut qos = limited(QosLimits { bytes_per_second: 4096, ..QosLimits::default() });
        assert!(qos.admit(NANOS_PER_SECOND, 1, Cost { bytes: 40_960, is_write: true }, 0));
        assert!(!qos.admit(NANOS_PER_SECOND, 1, WRITE, 1));
        assert_eq!(qos.next_due(), Some(11 * NANOS_PER_SECOND - BURST));
    }

    #[test]
    fn a_shallow_queue_gets_as_much_as_a_deep_one() {
        let mut qos = limited(QosLimits { iops: 1000, ..QosLimits::default() });
        let done = saturate(&mut qos, &[READ, READ], &[128, 1], 10);
        assert!(done[0].abs_diff(done[1]) <= 32, "{done:?}");
    }

    #[test]
    fn reads_do_not_wait_for_the_limit_of_writes() {
        let limits = QosLimits { write_iops: 10, read_iops: 1000, ..QosLimits::default() };
        let done = saturate(&mut limited(limits), &[WRITE, READ], &[8, 8], 10);
        assert!((100..=102).contains(&done[0]), "{done:?}");
        assert!((10_000..=10_012).contains(&done[1]), "{done:?}");
    }

    #[test]
    fn a_read_does_not_wait_behind_its_own_queues_writes() {
        let limits = QosLimits { write_iops: 1, read_iops: 1000, ..QosLimits::default() };
        let mut qos = limited(limits);
        assert!(qos.admit(NANOS_PER_SECOND, 1, WRITE, 0));
        assert!(!qos.admit(NANOS_PER_SECOND, 1, WRITE, 1));
        assert!(qos.admit(NANOS_PER_SECOND, 1, READ, 2));
        // A command that is due and only waits for the timer isn't overtaken.
        let later = 2 * NANOS_PER_SECOND;
        assert!(!qos.admit(later, 2, WRITE, 3));
        assert!(!qos.admit(later, 2, READ, 4));
        let mut released = Vec::new();
        qos.dispatch(later, &mut released);
        released.sort_unstable();
        assert_eq!(released, [1, 4]);
    }

    #[test]
    fn limits_change_while_commands_wait() {
        let mut qos = limited(QosLimits { iops: 1, ..QosLimits::default() });
        assert!(qos.admit(NANOS_PER_SECOND, 1, READ, 0));
        assert!(!qos.admit(NANOS_PER_SECOND, 1, READ, 1));
        qos.set_limits(QosLimits::default());
        let mut released = Vec::new();
        qos.dispatch(NANOS_PER_SECOND, &mut released);
        assert_eq!(released, [1]);
        assert!(!qos.is_active());
        assert_eq!(qos.next_due(), None);
    }

    #[test]
    fn commands_of_a_queue_that_ends_are_dropped() {
        let mut qos = limited(QosLimits { iops: 1, ..QosLimits::default() });
        assert!(qos.admit(NANOS_PER_SECOND, 1, READ, 0));
        assert!(!qos.admit(NANOS_PER_SECOND, 1, READ, 1));
        qos.cancel(1);
        assert_eq!(qos.next_due(), None);
    }

    #[test]
    fn no_limit_lets_everything_through() {
        let mut qos = limited(QosLimits::default());
        assert!((0..1000).all(|_| qos.admit(0, 1, READ, 0)));
    }
}
