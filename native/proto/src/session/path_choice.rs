//! The interface for load balancing: chooses the path of each unit (UnoLB).

use std::fmt::Debug;

use crate::link::Nanos;

use super::path::PathAccount;
use super::paths::{PATHS_MAX, PathId, PathSet};

/// Chooses the path of each unit. Sans-IO like the session machine: all inputs come with their
/// time.
///
/// The caller enforces the invariants regardless of the choice: units leave only on validated
/// paths, within the session's rate and each path's allowance, and a unit lost on one path may be
/// resent on any.
pub trait PathChoice: Debug + Send {
    /// Returns the path of the next unit, one of `open`, which is not empty. Called once for each
    /// unit that leaves. Any other result counts as the first of `open`.
    fn choose(&mut self, open: PathSet, now: Nanos) -> PathId;

    /// Reports what the peer has counted on a path.
    fn reported(&mut self, _path: PathId, _account: &PathAccount, _now: Nanos) {}

    /// Reports that a time-out passed without a report about units on this path.
    fn interrupted(&mut self, _path: PathId, _now: Nanos) {}
}

/// Uses the open paths in turn.
#[derive(Debug)]
pub struct RoundRobin {
    last: PathId,
}

impl Default for RoundRobin {
    /// Starts with the first path.
    fn default() -> Self {
        Self { last: PathId(PATHS_MAX - 1) }
    }
}

impl PathChoice for RoundRobin {
    fn choose(&mut self, open: PathSet, _now: Nanos) -> PathId {
        self.last = open.next_after(self.last).unwrap_or(self.last);
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_open_path_has_its_turn() {
        let open = [0, 2, 3].map(PathId).into_iter().fold(PathSet::default(), PathSet::with);
        let mut choice = RoundRobin::default();
        let chosen: Vec<u8> = (0..7).map(|_| choice.choose(open, 0).0).collect();
        assert_eq!(chosen, [0, 2, 3, 0, 2, 3, 0]);
    }
}
