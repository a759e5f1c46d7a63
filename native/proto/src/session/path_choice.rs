//! The seam of load balancing: which path each unit takes (UnoLB).

use std::fmt::Debug;

use crate::link::Nanos;

use super::path::PathAccount;
use super::paths::{PATHS_MAX, PathId, PathSet};

/// Chooses the path of each unit. Sans-IO as the machine is: what it is told comes with the time.
///
/// What must hold whatever it chooses is not its affair: units leave on validated paths only, within
/// the session's rate and each path's allowance, and what was lost on one path may go out on any.
pub trait PathChoice: Debug + Send {
    /// The path of the next unit: one of `open`, which is not empty. Called once for each unit that
    /// leaves. Another answer counts as the first of `open`.
    fn choose(&mut self, open: PathSet, now: Nanos) -> PathId;

    /// The peer has reported about a path.
    fn reported(&mut self, _path: PathId, _account: &PathAccount, _now: Nanos) {}

    /// A time-out has passed without a report about units on this path.
    fn interrupted(&mut self, _path: PathId, _now: Nanos) {}
}

/// One after the other.
#[derive(Debug)]
pub struct RoundRobin {
    last: PathId,
}

impl Default for RoundRobin {
    /// The first one is next.
    fn default() -> Self {
        Self { last: PathId(PATHS_MAX - 1) }
    }
}

impl PathChoice for RoundRobin {
    fn choose(&mut self, open: PathSet, _now: Nanos) -> PathId {
        self.last = open.behind(self.last).unwrap_or(self.last);
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
