//! What limits a session's sending, as time spent in each state: the seconds of a session's life add
//! up to its age. (As `tcpi_busy_time` and its like in Linux's TCP_INFO, but all states are told.)

use sealane_proto::link::Nanos;
use sealane_proto::session::SendLimit;

/// States, in the order of the statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limit {
    /// The job has posted nothing.
    Application,
    /// The peer has posted no receive for the next message.
    Credit,
    /// The rate in force.
    Pacing,
    /// Lost packets are sent again or waited for.
    Loss,
    /// All is sent; the acknowledgement is on its way.
    RoundTrip,
    /// The peer is silent.
    Stall,
    /// The job does not read completions, so nothing more is taken from it.
    Completions,
    /// The rate that all sessions share: others have their turn.
    SharedRate,
}

/// Number of states.
pub(super) const LIMITS: usize = 8;

/// Time in each state, up to the last look.
#[derive(Debug)]
pub(super) struct Limits {
    spent: [Nanos; LIMITS],
    state: Limit,
    since: Nanos,
}

impl Limits {
    pub(super) fn new(now: Nanos) -> Self {
        Self { spent: [0; LIMITS], state: Limit::Application, since: now }
    }

    /// From now on it is `state`; until now it was the one before.
    pub(super) fn enter(&mut self, state: Limit, now: Nanos) {
        self.spent[self.state as usize] += now.saturating_sub(self.since);
        self.state = state;
        self.since = now;
    }

    pub(super) fn spent(&self) -> [Nanos; LIMITS] {
        self.spent
    }
}

impl Limit {
    /// What holds the sender up, if the ring's completion queue is full or not, and units that are
    /// due wait for the session's turn or not.
    pub(super) fn of(sender: SendLimit, is_queue_full: bool, is_in_line: bool) -> Self {
        match sender {
            SendLimit::Pacing | SendLimit::Loss if is_in_line => Self::SharedRate,
            SendLimit::Idle if is_queue_full => Self::Completions,
            SendLimit::Idle => Self::Application,
            SendLimit::Credit => Self::Credit,
            SendLimit::Pacing => Self::Pacing,
            SendLimit::Loss => Self::Loss,
            SendLimit::Flight => Self::RoundTrip,
            SendLimit::Stalled => Self::Stall,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_add_up_to_the_age() {
        let mut limits = Limits::new(100);
        for (state, at) in [
            (Limit::Pacing, 110),
            (Limit::Pacing, 115),
            (Limit::Loss, 140),
            (Limit::Completions, 141),
            (Limit::Application, 171),
            (Limit::Credit, 172),
        ] {
            limits.enter(state, at);
        }
        assert_eq!(limits.spent(), [11, 0, 30, 1, 0, 0, 30, 0]);
        assert_eq!(limits.spent().iter().sum::<u64>(), 72);
    }

    #[test]
    fn full_queue_is_the_limit_only_where_nothing_else_is() {
        assert_eq!(Limit::of(SendLimit::Idle, true, false), Limit::Completions);
        assert_eq!(Limit::of(SendLimit::Idle, false, false), Limit::Application);
        assert_eq!(Limit::of(SendLimit::Pacing, true, false), Limit::Pacing);
    }

    #[test]
    fn waiting_for_a_turn_is_the_limit_where_units_are_due() {
        assert_eq!(Limit::of(SendLimit::Pacing, true, true), Limit::SharedRate);
        assert_eq!(Limit::of(SendLimit::Loss, false, true), Limit::SharedRate);
        assert_eq!(Limit::of(SendLimit::Flight, false, true), Limit::RoundTrip);
    }
}
