//! Load balancing over paths (UnoLB): which path each unit takes.
//!
//! Units take the *active* paths in turn. Paths beyond these are spare: one that goes silent gives
//! its place to the spare that was heard of last, so a path that has failed is not tried again soon.

use crate::link::Nanos;

use super::paths::{PATHS_MAX, PathId, PathSet};

/// Most active paths: one for each packet of a block of Uno's code, (8, 2).
const ACTIVE_MAX: usize = 10;

/// The active paths and the turn.
#[derive(Debug)]
pub struct Subflows {
    active: PathSet,
    last: PathId,
    /// When each path was last heard of.
    heard_at: [Nanos; PATHS_MAX as usize],
}

impl Default for Subflows {
    /// Starts with the first path.
    fn default() -> Self {
        let heard_at = [0; PATHS_MAX as usize];
        Self { active: PathSet::default(), last: PathId(PATHS_MAX - 1), heard_at }
    }
}

impl Subflows {
    /// The path of the next unit, one of `open`; `None` if that is empty.
    pub fn choose(&mut self, open: PathSet) -> Option<PathId> {
        while self.active.count() < ACTIVE_MAX
            && let Some(spare) = self.spare(open)
        {
            self.active = self.active.with(spare);
        }
        let active = open.and(self.active);
        let next = if active.is_empty() { open } else { active }.next_after(self.last)?;
        self.last = next;
        Some(next)
    }

    /// Records that the peer has reported something new about a path.
    pub fn heard(&mut self, path: PathId, now: Nanos) {
        self.heard_at[path.index()] = now;
    }

    /// Records that a path went silent or is no longer used: it gives up its place.
    pub fn failed(&mut self, path: PathId) {
        self.active = self.active.without(path);
    }

    /// The path that was heard of last, of those that are open and not active; of several, the first.
    fn spare(&self, open: PathSet) -> Option<PathId> {
        let spares = open.without_all(self.active);
        if spares.is_empty() {
            return None;
        }
        let spares = (0..PATHS_MAX).rev().map(PathId).filter(|path| spares.has(*path));
        spares.max_by_key(|path| self.heard_at[path.index()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(paths: impl IntoIterator<Item = u8>) -> PathSet {
        paths.into_iter().map(PathId).fold(PathSet::default(), PathSet::with)
    }

    fn chosen(subflows: &mut Subflows, open: PathSet, count: usize) -> Vec<u8> {
        (0..count).map(|_| subflows.choose(open).unwrap().0).collect()
    }

    #[test]
    fn every_open_path_has_its_turn() {
        let mut subflows = Subflows::default();
        assert_eq!(chosen(&mut subflows, set([0, 2, 3]), 7), [0, 2, 3, 0, 2, 3, 0]);
        assert_eq!(subflows.choose(PathSet::default()), None);
    }

    #[test]
    fn ten_of_sixteen_are_active_and_one_that_fails_gives_way_to_the_spare_heard_of_last() {
        let mut subflows = Subflows::default();
        let all = set(0..16);
        assert_eq!(chosen(&mut subflows, all, 10), (0..10).collect::<Vec<_>>());
        subflows.heard(PathId(12), 5);
        subflows.heard(PathId(14), 9);
        subflows.heard(PathId(15), 7);
        subflows.failed(PathId(3));
        let without = set((0..16).filter(|path| *path != 3));
        let next = chosen(&mut subflows, without, 10);
        assert!(next.contains(&14) && !next.contains(&3), "{next:?}");
        // Back again, it is a spare: no place is free.
        subflows.heard(PathId(3), 20);
        assert!(!chosen(&mut subflows, all, 20).contains(&3));
        subflows.failed(PathId(0));
        let without = set(1..16);
        assert!(chosen(&mut subflows, without, 10).contains(&3));
    }

    #[test]
    fn a_spare_is_used_while_no_active_path_is_open() {
        let mut subflows = Subflows::default();
        chosen(&mut subflows, set(0..12), 10);
        assert_eq!(subflows.choose(set([11])), Some(PathId(11)));
        assert!(!chosen(&mut subflows, set(0..12), 10).contains(&11));
    }
}
