//! What limits a session's sending, as the time spent in each state; the times add up to the
//! session's age. (Like `tcpi_busy_time` and similar fields in Linux's TCP_INFO, but with every
//! state reported.)

use sealane_proto::link::Nanos;
use sealane_proto::session::SendLimit;

/// States, in the order of the statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limit {
    /// The job has posted nothing.
    Application,
    /// The peer has posted no receive for the next message.
    Credit,
    /// The current rate.
    Pacing,
    /// Lost packets are being sent again or waited for.
    Loss,
    /// Everything is sent and awaits its acknowledgement.
    RoundTrip,
    /// The peer is silent.
    Stall,
    /// The job does not read completions, so no more submissions are accepted.
    Completions,
    /// The rate shared by all sessions: other sessions have their turn.
    SharedRate,
    /// The congestion controller.
    Congestion,
}

/// Number of states.
pub(super) const LIMITS: usize = 9;

/// Time spent in each state, up to the last update.
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

    /// Switches to `state` and accounts the time since the last call to the previous state.
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
    /// The limit, given what holds the sender up, whether the ring's completion queue is full, and
    /// whether due units wait for the session's turn.
    pub(super) fn of(sender: SendLimit, is_queue_full: bool, is_in_line: bool) -> Self {
        match sender {
            SendLimit::Pacing | SendLimit::Congestion | SendLimit::Loss if is_in_line => {
                Self::SharedRate
            }
            SendLimit::Idle if is_queue_full => Self::Completions,
            SendLimit::Idle => Self::Application,
            SendLimit::Credit => Self::Credit,
            SendLimit::Pacing => Self::Pacing,
            SendLimit::Congestion => Self::Congestion,
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
        assert_eq!(limits.spent(), [11, 0, 30, 1, 0, 0, 30, 0, 0]);
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
