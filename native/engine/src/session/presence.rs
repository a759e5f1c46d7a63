//! Tracks whether a session's thread is running: it checks the clock where a turn may take long,
//! and knows when it meant to wake up. On a loaded host there are gaps.

use std::ops::Range;

use sealane_proto::link::Nanos;

/// Longest time between checks that is normal, even with full lists of datagrams; after a longer
/// one the thread was not running.
const AWAY_NANOS: Nanos = 2_000_000;

/// When the thread was last known to be running.
#[derive(Debug, Default)]
pub struct Presence(Nanos);

impl Presence {
    /// Starts with the thread running now.
    #[must_use]
    pub fn new(now: Nanos) -> Self {
        Self(now)
    }

    /// Records that the thread is running now; returns the period since the last check if it was
    /// absent.
    pub fn look(&mut self, now: Nanos) -> Option<Range<Nanos>> {
        let since = std::mem::replace(&mut self.0, now);
        (now.saturating_sub(since) > AWAY_NANOS).then_some(since..now)
    }

    /// Records a sleep until now. The thread was not expected back before `due`.
    pub fn slept(&mut self, due: Option<Nanos>, now: Nanos) {
        self.0 = due.unwrap_or(now).min(now).max(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Nanos = 1_000_000_000;

    #[test]
    fn a_long_turn_and_a_late_awakening_are_absences() {
        let mut presence = Presence::new(START);
        assert_eq!(presence.look(START + AWAY_NANOS), None);
        let looked = START + AWAY_NANOS;
        assert_eq!(presence.look(looked + AWAY_NANOS + 1), Some(looked..looked + AWAY_NANOS + 1));
        let slept = looked + AWAY_NANOS + 1;
        let due = slept + 50_000_000;
        presence.slept(Some(due), due + 30_000_000);
        assert_eq!(presence.look(due + 30_000_100), Some(due..due + 30_000_100));
    }

    #[test]
    fn a_sleep_until_something_arrives_or_is_due_is_none() {
        let mut presence = Presence::new(START);
        presence.slept(None, START + 60_000_000_000);
        assert_eq!(presence.look(START + 60_000_000_100), None);
        let slept = START + 60_000_000_100;
        presence.slept(Some(slept + 1_000_000), slept + 500_000);
        assert_eq!(presence.look(slept + 600_000), None);
        presence.slept(Some(slept + 700_000), slept + 700_000);
        assert_eq!(presence.look(slept + 800_000), None);
    }
}
