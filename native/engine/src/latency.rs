//! How long operations take: histograms of volumes, sessions and accelerators, added up by role for
//! metrics.
//!
//! Recording is two additions to atomics of the volume, session or accelerator's queue itself. Those of one that has
//! ended are kept, so that a role's histograms never decrease.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sealane_proto::link::Nanos;

/// log2 of the smallest bound, in microseconds.
const FIRST: u32 = 4;
/// Number of bounds: from 16 µs to 16.8 s, each twice the one before.
const BOUNDS: usize = 21;
const NANOS_PER_MICRO: Nanos = 1000;

/// Upper bounds of the buckets, each inclusive; one more bucket is behind the last.
pub fn bounds() -> [Nanos; BOUNDS] {
    std::array::from_fn(|index| (1 << (FIRST + index as u32)) * NANOS_PER_MICRO)
}

/// Durations of one kind of operation.
#[derive(Debug, Default)]
struct Histogram {
    buckets: [AtomicU64; BOUNDS + 1],
    nanos: AtomicU64,
}

impl Histogram {
    fn note(&self, duration: Nanos) {
        let micros = duration.div_ceil(NANOS_PER_MICRO).max(1);
        // The logarithm of the next power of two.
        let log2 = u64::BITS - (micros - 1).leading_zeros();
        let index = (log2.saturating_sub(FIRST) as usize).min(BOUNDS);
        self.buckets[index].fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(duration, Ordering::Relaxed);
    }

    fn nanos(&self) -> Nanos {
        self.nanos.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum()
    }
}

/// The sum of some histograms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sum {
    /// Operations in each bucket of [`bounds`] alone, and behind the last.
    pub buckets: [u64; BOUNDS + 1],
    /// Their durations together.
    pub nanos: Nanos,
}

impl Sum {
    const ZERO: Self = Self { buckets: [0; BOUNDS + 1], nanos: 0 };

    fn add(&mut self, histogram: &Histogram) {
        for (sum, bucket) in self.buckets.iter_mut().zip(&histogram.buckets) {
            *sum += bucket.load(Ordering::Relaxed);
        }
        self.nanos += histogram.nanos();
    }
}

/// Operations of hosts that are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Io {
    /// A read.
    Read,
    /// A write, also a conditional one.
    Write,
    /// A flush.
    Flush,
}

impl Io {
    /// All, in the order of their histograms.
    pub const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Flush];

    /// Value of the label in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
        }
    }
}

/// The histograms of everything in this process that has one role, living or ended.
#[derive(Debug)]
pub struct Role<const N: usize> {
    state: Mutex<State<N>>,
}

#[derive(Debug)]
struct State<const N: usize> {
    living: Vec<Arc<[Histogram; N]>>,
    ended: [Sum; N],
}

/// Volumes at a gateway: from a host's command to its answer.
pub static GATEWAY: Role<3> = Role::new();
/// Namespaces at a target, and at a gateway those on third parties: from a command to its answer.
pub static TARGET: Role<3> = Role::new();
/// Sends of sessions: from the job's submission to its completion.
pub static SENDS: Role<1> = Role::new();
/// Jobs of the gateway's accelerator: from submission to the end, whatever the result.
pub static JOBS: Role<1> = Role::new();

impl<const N: usize> Role<N> {
    const fn new() -> Self {
        let state = State { living: Vec::new(), ended: [Sum::ZERO; N] };
        Self { state: Mutex::new(state) }
    }

    /// The sums over all that ever were.
    pub fn sums(&self) -> [Sum; N] {
        let state = self.state();
        let mut sums = state.ended;
        for each in &state.living {
            add(&mut sums, each);
        }
        sums
    }

    fn state(&self) -> MutexGuard<'_, State<N>> {
        // No holder can panic in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn add<const N: usize>(sums: &mut [Sum; N], histograms: &[Histogram; N]) {
    for (sum, histogram) in sums.iter_mut().zip(histograms) {
        sum.add(histogram);
    }
}

/// The histograms of one volume, session or accelerator's queue.
#[derive(Debug)]
pub struct Latencies<const N: usize> {
    role: &'static Role<N>,
    own: Arc<[Histogram; N]>,
}

impl<const N: usize> Latencies<N> {
    /// Creates empty ones, which count for `role` also after they are dropped.
    pub fn new(role: &'static Role<N>) -> Self {
        let own = Arc::new(std::array::from_fn(|_| Histogram::default()));
        role.state().living.push(own.clone());
        Self { role, own }
    }
}

impl Latencies<3> {
    /// Records an operation that was answered.
    pub fn note(&self, operation: Io, duration: Nanos) {
        self.own[operation as usize].note(duration);
    }

    /// The durations of all operations of a kind together.
    pub fn nanos(&self, operation: Io) -> Nanos {
        self.own[operation as usize].nanos()
    }

    /// Number of operations of a kind.
    #[cfg(test)]
    pub fn count(&self, operation: Io) -> u64 {
        self.own[operation as usize].count()
    }
}

impl Latencies<1> {
    /// Records a send or a job that has ended.
    pub fn note(&self, duration: Nanos) {
        self.own[0].note(duration);
    }

    /// Number and time of those that were recorded.
    #[cfg(test)]
    pub fn recorded(&self) -> (u64, Nanos) {
        (self.own[0].count(), self.own[0].nanos())
    }
}

impl<const N: usize> Drop for Latencies<N> {
    fn drop(&mut self) {
        let mut state = self.role.state();
        state.living.retain(|each| !Arc::ptr_eq(each, &self.own));
        add(&mut state.ended, &self.own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(role: &Role<3>, operation: Io) -> Vec<(usize, u64)> {
        let buckets = role.sums()[operation as usize].buckets;
        buckets.into_iter().enumerate().filter(|(_, count)| *count > 0).collect()
    }

    #[test]
    fn a_duration_is_in_the_first_bucket_whose_bound_it_does_not_exceed() {
        for (index, bound) in bounds().into_iter().enumerate() {
            for (duration, expected) in [(bound, index), (bound + 1, index + 1)] {
                let histogram = Histogram::default();
                histogram.note(duration);
                let found =
                    histogram.buckets.iter().position(|count| count.load(Ordering::Relaxed) == 1);
                assert_eq!(found, Some(expected), "{duration} ns");
            }
        }
        assert_eq!((bounds()[0], bounds()[BOUNDS - 1]), (16_000, 16_777_216_000));
    }

    #[test]
    fn the_shortest_and_the_longest_have_a_bucket() {
        let histogram = Histogram::default();
        histogram.note(0);
        histogram.note(Nanos::MAX);
        let ends = [0, BOUNDS].map(|index| histogram.buckets[index].load(Ordering::Relaxed));
        assert_eq!(ends, [1, 1]);
    }

    #[test]
    fn a_role_keeps_what_its_ended_volumes_recorded() {
        static ROLE: Role<3> = Role::new();
        let (one, other) = (Latencies::new(&ROLE), Latencies::new(&ROLE));
        one.note(Io::Read, 20_000);
        other.note(Io::Read, 20_000);
        other.note(Io::Flush, 1_000_000_000);
        assert_eq!((one.nanos(Io::Read), one.nanos(Io::Flush)), (20_000, 0));
        let before = ROLE.sums();
        assert_eq!(counted(&ROLE, Io::Read), [(1, 2)]);
        assert_eq!(before[Io::Read as usize].nanos, 40_000);
        drop(other);
        assert_eq!(ROLE.sums(), before);
        assert_eq!(ROLE.state().living.len(), 1);
        one.note(Io::Write, 1);
        drop(one);
        assert_eq!(counted(&ROLE, Io::Flush), [(16, 1)]);
        assert_eq!(counted(&ROLE, Io::Write), [(0, 1)]);
        assert!(ROLE.state().living.is_empty());
    }
}
