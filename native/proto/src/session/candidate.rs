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
/// … and at least this long. As long, a path considers no candidate after the present address has
/// answered.
const LIFE_MIN: Nanos = 1_000_000_000;
/// Datagrams from other addresses that may fail authentication at once …
const FORGERIES: u64 = 64;
/// … and the time after which another one may. A key's 2^36 forgeries then last two years.
const FORGERY_NANOS: Nanos = 1_000_000;

/// An address that a path's peer may have moved to.
#[derive(Debug)]
pub struct Candidate {
    challenges: Challenges,
    /// Bytes exchanged with it.
    pub unproven: Unproven,
    /// When the first packet came from it …
    since: Nanos,
    /// … and when a challenge left for the present address after that.
    asked_at: Option<Nanos>,
    /// How long that may take to answer: the path's time-out.
    patience: Nanos,
    has_answered: bool,
    has_carried: bool,
}

impl Candidate {
    /// Starts to challenge an address. `patience`: the path's time-out.
    #[must_use]
    pub fn new(units: Units, patience: Nanos, now: Nanos) -> Self {
        let mut challenges = Challenges::default();
        challenges.search(units, now);
        Self {
            challenges,
            unproven: Unproven::default(),
            since: now,
            asked_at: None,
            patience,
            has_answered: false,
            has_carried: false,
        }
    }

    /// When the next challenge to it is due: none before the present address is asked.
    #[must_use]
    pub fn due(&self) -> Option<Nanos> {
        self.asked_at.and(self.challenges.due())
    }

    /// Records a challenge sent to it; returns the unit to pad it for, if any.
    pub fn sent(&mut self, token: u64, now: Nanos) -> Option<u16> {
        self.challenges.sent(token, Some(self.patience), now)
    }

    /// Records that a challenge leaves for the present address.
    pub fn asked(&mut self, now: Nanos) {
        self.asked_at.get_or_insert(now);
    }

    /// Whether a challenge for the present address, sent at this time, is one of those that this
    /// candidate caused.
    #[must_use]
    pub fn was_asked_by(&self, sent_at: Nanos) -> bool {
        self.asked_at.is_some_and(|asked| sent_at >= asked)
    }

    /// Processes an answer that came from this address; returns whether it answers a challenge
    /// sent there.
    pub fn answered(&mut self, token: u64, now: Nanos) -> bool {
        let Some(answer) = self.challenges.answered(token, now) else { return false };
        self.has_answered = true;
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

    /// From when on, and how long, to wait before the path moves to this address or drops it.
    #[must_use]
    pub fn decision(&self) -> (Nanos, Nanos) {
        match self.asked_at.filter(|_| self.has_carried) {
            Some(asked_at) => (asked_at, self.patience),
            None => (self.since, self.life()),
        }
    }

    /// Whether full-size packets reach the peer there.
    #[must_use]
    pub fn has_carried(&self) -> bool {
        self.has_carried
    }

    /// Whether another address may take its place: it has had time to answer and has not.
    #[must_use]
    pub fn is_replaceable(&self, now: Nanos) -> bool {
        !self.has_answered && now >= self.since.saturating_add(self.patience)
    }

    /// How long the present address may take to answer.
    #[must_use]
    pub fn patience(&self) -> Nanos {
        self.patience
    }

    /// How long it may take to answer.
    #[must_use]
    pub fn life(&self) -> Nanos {
        self.patience.saturating_mul(LIFE_TIMEOUTS).max(LIFE_MIN)
    }
}

/// Bounds the datagrams from other addresses that fail authentication: whoever knows a connection
/// id can send them from anywhere, and each costs an AEAD operation and one of a key's forgeries.
#[derive(Debug, Default)]
pub struct Forgeries {
    /// When all of them may fail again.
    free_at: Nanos,
}

impl Forgeries {
    /// Records one.
    pub fn note(&mut self, now: Nanos) {
        self.free_at = self.free_at.max(now).saturating_add(FORGERY_NANOS);
    }

    /// Whether nothing more is opened from other addresses at present.
    #[must_use]
    pub fn is_full(&self, now: Nanos) -> bool {
        self.free_at > now.saturating_add((FORGERIES - 1) * FORGERY_NANOS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Nanos = 30_000_000;

    #[test]
    fn a_candidate_is_challenged_and_followed_after_the_present_address_was_asked() {
        let mut candidate = Candidate::new(Units::fixed(1408), PATIENCE, 1000);
        assert_eq!(candidate.due(), None);
        assert!(!candidate.was_asked_by(2000), "nothing has left yet");
        candidate.asked(5000);
        candidate.asked(9000);
        assert_eq!(candidate.due(), Some(1000));
        assert!(!candidate.was_asked_by(4999), "that was answered before the peer moved");
        assert!(candidate.was_asked_by(5000));
        assert_eq!(candidate.decision(), (1000, LIFE_MIN));
        assert_eq!(candidate.sent(7, 6000), Some(1408));
        assert!(!candidate.answered(8, 7000) && candidate.answered(7, 7000));
        assert_eq!(candidate.decision(), (5000, PATIENCE));
        assert_eq!(candidate.due(), None, "it is known");
    }

    #[test]
    fn a_candidate_may_be_replaced_once_it_has_had_time_to_answer() {
        let mut candidate = Candidate::new(Units::fixed(1408), PATIENCE, 1000);
        candidate.asked(1000);
        assert!(!candidate.is_replaceable(1000 + PATIENCE - 1));
        assert!(candidate.is_replaceable(1000 + PATIENCE));
        candidate.sent(7, 1000);
        candidate.sent(8, 1000);
        assert!(candidate.answered(8, 2000));
        assert!(!candidate.is_replaceable(1000 + PATIENCE), "the small one was answered");
    }
}
