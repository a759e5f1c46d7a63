//! Parallel hashing: divides a batch among threads that share nothing.

use std::num::NonZero;
use std::sync::OnceLock;
use std::thread::{available_parallelism, scope};

const HASHERS_MAX: usize = 16;
/// Least pages per thread: hashing them takes several times as long as starting a thread (30 µs).
const PAGES_PER_HASHER: usize = 256;

/// Number of threads to use for this many pages on this machine.
#[must_use]
pub fn hashers(pages: usize) -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    let processors = PROCESSORS.get_or_init(|| available_parallelism().map_or(1, NonZero::get));
    (pages / PAGES_PER_HASHER).clamp(1, HASHERS_MAX.min(*processors))
}

/// Does the work on each part, each on its own thread, the first on the caller's. Returns when all
/// are done.
pub fn side_by_side<T: Send>(parts: &mut [T], work: impl Fn(&mut T) + Sync) {
    let Some((mine, others)) = parts.split_first_mut() else { return };
    scope(|scope| {
        let work = &work;
        for other in others {
            scope.spawn(move || work(other));
        }
        work(mine);
    });
}

/// Does the work on each item, divided among `hashers` threads.
pub fn each<T: Send>(hashers: usize, items: &mut [T], work: impl Fn(&mut T) + Sync) {
    let share = items.len().div_ceil(hashers).max(1);
    let mut parts: Vec<_> = items.chunks_mut(share).collect();
    side_by_side(&mut parts, |part| part.iter_mut().for_each(&work));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_worked_on_once_with_any_number_of_threads() {
        for hashers in 1..=HASHERS_MAX {
            let mut items: Vec<u64> = (0..37).collect();
            each(hashers, &mut items, |item| *item += 100);
            assert_eq!(items, (100..137).collect::<Vec<_>>());
            each(hashers, &mut Vec::<u64>::new(), |_| unreachable!("no items"));
        }
    }

    #[test]
    fn small_batches_get_one_hasher_and_none_gets_more_than_there_are() {
        assert_eq!([0, 1, 256, 511].map(hashers), [1; 4]);
        assert!((1..=HASHERS_MAX).contains(&hashers(usize::MAX)));
    }
}
