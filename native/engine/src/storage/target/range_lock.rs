//! Range locks of one namespace.
//!
//! Overlapping ranges are granted strictly first come, first served: a request waits for every
//! earlier one that it conflicts with, granted or waiting. So no request starves, and as a holder
//! never requests a second range, there are no deadlocks. No call blocks: a request that must wait
//! is granted later, by a release.

use std::ops::Range;

/// Handle of a request.
pub type LockId = usize;

/// Kind of lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Shared with other readers.
    Shared,
    /// Exclusive.
    Exclusive,
}

/// Answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acquired {
    /// The range is held.
    Granted(LockId),
    /// A later release will return the waiter.
    Waiting(LockId),
}

#[derive(Debug)]
struct Request<W> {
    blocks: Range<u64>,
    mode: Mode,
    /// Order of arrival.
    number: u64,
    /// The waiter; `None` once the range is held.
    waiter: Option<W>,
}

impl<W> Request<W> {
    fn conflicts(&self, blocks: &Range<u64>, mode: Mode) -> bool {
        (self.mode == Mode::Exclusive || mode == Mode::Exclusive)
            && self.blocks.start < blocks.end
            && blocks.start < self.blocks.end
    }
}

/// The ranges held and waited for. Their number is bounded by the commands that may be outstanding.
#[derive(Debug)]
pub struct RangeLocks<W> {
    requests: Vec<Option<Request<W>>>,
    free: Vec<LockId>,
    next_number: u64,
    waiting: usize,
}

impl<W> Default for RangeLocks<W> {
    fn default() -> Self {
        Self { requests: Vec::new(), free: Vec::new(), next_number: 0, waiting: 0 }
    }
}

impl<W> RangeLocks<W> {
    /// Requests a range; `waiter` is kept until the range is held.
    pub fn acquire(&mut self, blocks: Range<u64>, mode: Mode, waiter: W) -> Acquired {
        let must_wait =
            self.requests.iter().flatten().any(|earlier| earlier.conflicts(&blocks, mode));
        let number = self.next_number;
        self.next_number += 1;
        let waiter = must_wait.then_some(waiter);
        let request = Some(Request { blocks, mode, number, waiter });
        let id = if let Some(id) = self.free.pop() {
            if let Some(place) = self.requests.get_mut(id) {
                *place = request;
            }
            id
        } else {
            self.requests.push(request);
            self.requests.len() - 1
        };
        if must_wait {
            self.waiting += 1;
            Acquired::Waiting(id)
        } else {
            Acquired::Granted(id)
        }
    }

    /// Releases a range, or withdraws a request. Adds the waiters that hold their range from now on
    /// to `granted`, with their handles, in order of their requests.
    pub fn release(&mut self, id: LockId, granted: &mut Vec<(LockId, W)>) {
        let Some(gone) = self.requests.get_mut(id).and_then(Option::take) else { return };
        self.free.push(id);
        if gone.waiter.is_some() {
            self.waiting -= 1;
        }
        if self.waiting == 0 {
            return;
        }
        let mut candidates: Vec<(u64, LockId)> = self
            .requests
            .iter()
            .enumerate()
            .filter_map(|(id, request)| Some((id, request.as_ref()?)))
            .filter(|(_, request)| request.waiter.is_some() && request.number > gone.number)
            .filter(|(_, request)| gone.conflicts(&request.blocks, request.mode))
            .map(|(id, request)| (request.number, id))
            .collect();
        candidates.sort_unstable();
        for (number, id) in candidates {
            if self.is_first(number, id)
                && let Some(Some(request)) = self.requests.get_mut(id)
                && let Some(waiter) = request.waiter.take()
            {
                self.waiting -= 1;
                granted.push((id, waiter));
            }
        }
    }

    /// Whether no earlier request conflicts with this one.
    fn is_first(&self, number: u64, id: LockId) -> bool {
        let Some(Some(request)) = self.requests.get(id) else { return false };
        let mut earlier = self.requests.iter().flatten().filter(|earlier| earlier.number < number);
        !earlier.any(|earlier| earlier.conflicts(&request.blocks, request.mode))
    }

    /// Number of requests that hold a range or wait for one.
    #[cfg(test)]
    fn requests(&self) -> usize {
        self.requests.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn granted(locks: &mut RangeLocks<u32>, id: LockId) -> Vec<u32> {
        let mut granted = Vec::new();
        locks.release(id, &mut granted);
        granted.into_iter().map(|(_, waiter)| waiter).collect()
    }

    fn acquire(locks: &mut RangeLocks<u32>, blocks: Range<u64>, mode: Mode, who: u32) -> LockId {
        match locks.acquire(blocks, mode, who) {
            Acquired::Granted(id) | Acquired::Waiting(id) => id,
        }
    }

    #[test]
    fn readers_share_and_a_writer_waits_for_all_of_them() {
        let mut locks = RangeLocks::default();
        let first = acquire(&mut locks, 0..8, Mode::Shared, 1);
        let second = acquire(&mut locks, 4..12, Mode::Shared, 2);
        assert!(matches!(locks.acquire(7..8, Mode::Exclusive, 3), Acquired::Waiting(_)));
        assert!(matches!(locks.acquire(12..13, Mode::Exclusive, 4), Acquired::Granted(_)));
        assert!(granted(&mut locks, first).is_empty());
        assert_eq!(granted(&mut locks, second), [3]);
    }

    #[test]
    fn a_writer_that_waits_is_not_overtaken_by_later_readers() {
        let mut locks = RangeLocks::default();
        let reader = acquire(&mut locks, 0..8, Mode::Shared, 1);
        let writer = acquire(&mut locks, 0..8, Mode::Exclusive, 2);
        assert!(matches!(locks.acquire(0..4, Mode::Shared, 3), Acquired::Waiting(_)));
        assert!(matches!(locks.acquire(4..8, Mode::Shared, 4), Acquired::Waiting(_)));
        assert_eq!(granted(&mut locks, reader), [2]);
        assert_eq!(granted(&mut locks, writer), [3, 4]);
    }

    #[test]
    fn a_withdrawn_request_makes_way_for_later_ones() {
        let mut locks = RangeLocks::default();
        let reader = acquire(&mut locks, 0..8, Mode::Shared, 1);
        let writer = acquire(&mut locks, 0..8, Mode::Exclusive, 2);
        acquire(&mut locks, 0..8, Mode::Shared, 3);
        assert_eq!(granted(&mut locks, writer), [3]);
        assert_eq!(granted(&mut locks, reader), [0u32; 0]);
        assert_eq!(locks.requests(), 1);
    }

    #[test]
    fn a_release_of_an_unknown_handle_changes_nothing() {
        let mut locks = RangeLocks::default();
        let id = acquire(&mut locks, 0..8, Mode::Exclusive, 1);
        acquire(&mut locks, 0..8, Mode::Exclusive, 2);
        assert!(granted(&mut locks, 77).is_empty());
        assert_eq!(granted(&mut locks, id), [2]);
    }

    proptest! {
        /// Checks against a model: a request waits exactly if an earlier request conflicts with it,
        /// and every request is granted once the earlier ones are released.
        #[test]
        fn order_and_exclusion_hold_and_no_request_starves(
            steps in proptest::collection::vec((0u64..12, 1u64..6, any::<bool>(), 0usize..8), 1..80)
        ) {
            let mut locks = RangeLocks::default();
            // Maps number of arrival to (id, blocks, mode, is granted).
            let mut live: BTreeMap<u32, (LockId, Range<u64>, Mode, bool)> = BTreeMap::new();
            let conflict = |a: &(LockId, Range<u64>, Mode, bool), b: &(LockId, Range<u64>, Mode, bool)| {
                (a.2 == Mode::Exclusive || b.2 == Mode::Exclusive)
                    && a.1.start < b.1.end && b.1.start < a.1.end
            };
            let drain = steps.len();
            let steps = steps.into_iter().map(Some).chain((0..drain).map(|_| None));
            for (who, step) in (0u32..).zip(steps) {
                if let Some((start, blocks, exclusive, _)) = step {
                    let mode = if exclusive { Mode::Exclusive } else { Mode::Shared };
                    let range = start..start + blocks;
                    let (id, runs) = match locks.acquire(range.clone(), mode, who) {
                        Acquired::Granted(id) => (id, true),
                        Acquired::Waiting(id) => (id, false),
                    };
                    live.insert(who, (id, range, mode, runs));
                }
                if step.is_none_or(|(_, _, _, release)| release < 4) {
                    let running = live.iter().find(|(_, request)| request.3).map(|(who, _)| *who);
                    if let Some(gone) = running {
                        let (id, ..) = live.remove(&gone).unwrap();
                        let mut granted = Vec::new();
                        locks.release(id, &mut granted);
                        for (id, who) in granted {
                            let request = live.get_mut(&who).unwrap();
                            prop_assert_eq!((request.0, request.3), (id, false));
                            request.3 = true;
                        }
                    }
                }
                for (number, request) in &live {
                    let behind = live.range(..number).any(|(_, earlier)| conflict(earlier, request));
                    prop_assert_eq!(request.3, !behind);
                }
            }
            prop_assert!(live.is_empty());
            prop_assert_eq!(locks.requests(), 0);
        }
    }
}
