//! Candidates: other addresses at which the peer of a validated path may now be, because a NAT was
//! rebound or a host changed its address (RFC 9000 §9).
//!
//! Anyone who sees a packet can send a copy from an address of their own, ahead of the original. So
//! a path follows only a peer that has proven both: that full-size packets reach it at the new
//! address, and that they no longer do at the present one. Until then units take the present one.

use crate::link::Nanos;

use super::challenges::{Answer, Challenges};
use super::units::Units;
use super::unproven::Unproven;

/// A candidate has this many time-outs to answer …
const LIFE_TIMEOUTS: u64 = 10;
/// … and at least this long. As long, a path considers no candidate after one that was refused.
const LIFE_MIN: Nanos = 1_000_000_000;

/// An address that a path's peer may have moved to.
#[derive(Debug)]
pub struct Candidate {
    /// Challenges sent to it.
    pub challenges: Challenges,
    /// Bytes exchanged with it.
    pub unproven: Unproven,
    /// When the first packet came from it, and how long the present address may take to answer.
    since: Nanos,
    patience: Nanos,
    has_carried: bool,
}

impl Candidate {
    /// Starts to challenge an address. `patience`: the path's time-out.
    #[must_use]
    pub fn new(units: Units, patience: Nanos, now: Nanos) -> Self {
        let mut challenges = Challenges::default();
        challenges.search(units, now);
        let unproven = Unproven::default();
        Self { challenges, unproven, since: now, patience, has_carried: false }
    }

    /// Processes an answer that came from this address; returns whether it answers a challenge
    /// sent there.
    pub fn answered(&mut self, token: u64, now: Nanos) -> bool {
        let Some(answer) = self.challenges.answered(token, now) else { return false };
        self.unproven.proven();
        match answer {
            Answer::Small | Answer::Alive(_) => {}
            Answer::Carried { .. } => {
                self.has_carried = true;
                self.challenges.stop();
            }
            // The path can't move to where the session's units don't pass.
            Answer::TooNarrow => self.challenges.stop(),
        }
        true
    }

    /// When the path moves to this address, or refuses it.
    #[must_use]
    pub fn decided_at(&self) -> Nanos {
        let wait = if self.has_carried { self.patience } else { self.life() };
        self.since.saturating_add(wait)
    }

    /// Whether full-size packets reach the peer there.
    #[must_use]
    pub fn has_carried(&self) -> bool {
        self.has_carried
    }

    /// How long it may take to answer.
    #[must_use]
    pub fn life(&self) -> Nanos {
        self.patience.saturating_mul(LIFE_TIMEOUTS).max(LIFE_MIN)
    }
}
