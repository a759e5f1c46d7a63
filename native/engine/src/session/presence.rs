//! Whether a session's thread runs: it looks at the clock where a turn may take long, and knows when it
//! meant to wake up. On a loaded host it is away in between.

use std::ops::Range;

use sealane_proto::link::Nanos;

/// A turn's parts take less, also with full lists of datagrams: who is not back by then was away.
const AWAY_NANOS: Nanos = 2_000_000;

/// When the thread was last known to run.
#[derive(Debug, Default)]
pub struct Presence(Nanos);

impl Presence {
    /// It runs now.
    #[must_use]
    pub fn new(now: Nanos) -> Self {
        Self(now)
    }

    /// It runs now; returns since when it was away until now, if it was.
    pub fn look(&mut self, now: Nanos) -> Option<Range<Nanos>> {
        let since = std::mem::replace(&mut self.0, now);
        (now.saturating_sub(since) > AWAY_NANOS).then_some(since..now)
    }

    /// It slept, until now at least: nobody missed it before `due`.
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
