//! Permits: the time until which a peer may act, stored where its data is processed.
//!
//! The control plane asks the broker about a peer and extends the time; every thread that works for
//! the peer checks it before each batch of work. If the control plane stops, stalls or freezes, the
//! permit runs out. It uses the clock that continues while the machine is suspended
//! ([`clock::boot_time`]), never wall-clock time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use sealane_proto::link::Nanos;

use crate::clock;

/// The peer's permit expired because it was not extended.
pub const STALE: &str = "authorization.stale";

/// The peer's permit was revoked for a reason not listed below.
pub const LOST: &str = "authorization.lost";

/// Reason ids of refusals that are reported unchanged.
const REASONS: [&str; 9] = [
    "node.revoked",
    "node.superseded",
    "node.expired",
    "node.unknown",
    "attestation.policy.changed",
    "device.fenced",
    "device.owner.refused",
    "device.forgotten",
    "volume.not_found",
];

/// The time until which one peer may act, shared by everything that works for it.
///
/// A new permit has already ended. One thread changes it; any number of threads check it.
#[derive(Debug, Default)]
pub struct Permit {
    /// On the clock of [`clock::boot_time`].
    until: AtomicU64,
    /// Why it was revoked; empty if it was not.
    taken_back: Mutex<&'static str>,
}

impl Permit {
    /// Extends it to this time; a time before the current one changes nothing.
    pub fn extend(&self, until: Nanos) {
        *self.reason_mut() = "";
        self.until.fetch_max(until, Ordering::Release);
    }

    /// Ends it at once, regardless of the time left.
    pub fn take_back(&self, reason: &str) {
        let known = REASONS.into_iter().find(|known| *known == reason);
        *self.reason_mut() = known.unwrap_or(LOST);
        self.until.store(0, Ordering::Release);
    }

    /// Whether the peer may act now.
    #[must_use]
    pub fn holds(&self) -> bool {
        clock::boot_time() < self.until.load(Ordering::Acquire)
    }

    /// Time left unless it is extended; 0 if it has ended.
    #[must_use]
    pub fn left(&self) -> Nanos {
        self.until.load(Ordering::Acquire).saturating_sub(clock::boot_time())
    }

    /// Why it doesn't hold: a stable reason id.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match *self.reason_mut() {
            "" => STALE,
            reason => reason,
        }
    }

    fn reason_mut(&self) -> std::sync::MutexGuard<'_, &'static str> {
        self.taken_back.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Nanos = 60_000_000_000;

    #[test]
    fn begins_ended_and_is_only_ever_extended() {
        let permit = Permit::default();
        assert!(!permit.holds());
        assert_eq!((permit.left(), permit.reason()), (0, STALE));
        let until = clock::boot_time() + MINUTE;
        permit.extend(until);
        permit.extend(until - MINUTE);
        assert!(permit.holds());
        assert!(permit.left() > MINUTE / 2);
    }

    #[test]
    fn ends_by_itself() {
        let permit = Permit::default();
        permit.extend(clock::boot_time());
        assert!(!permit.holds());
        assert_eq!(permit.reason(), STALE);
    }

    #[test]
    fn is_taken_back_at_once_and_says_why() {
        let permit = Permit::default();
        permit.extend(clock::boot_time() + MINUTE);
        permit.take_back("node.revoked");
        assert!(!permit.holds());
        assert_eq!(permit.reason(), "node.revoked");
        permit.take_back("made up");
        assert_eq!(permit.reason(), LOST);
        permit.extend(clock::boot_time() + MINUTE);
        assert!(permit.holds());
    }
}
