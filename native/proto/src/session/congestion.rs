//! What limits sending besides the session's rate: a circuit breaker for each path, and one
//! congestion controller for all of them, if the session has one.

use crate::congestion::{Algorithm, Allowance, Controller, Domain, Report, Setup, Start, create};
use crate::link::{NANOS_PER_SECOND, Nanos};

use super::breaker::{self, Breaker};
use super::config::SessionConfig;
use super::path::PathAccount;
use super::paths::PathId;
use super::rtt::Echo;

/// Share of the line, as its divisor, that a session may use at most if its marks don't arrive
/// although phantom queues mark. Flows that slow down before there is a queue lose against a flow
/// that slows down because of one, whatever its rules.
const UNMARKED_SHARE: u64 = 8;

/// What a mark on a packet means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Marks {
    /// A switch has a queue, so a loss near a mark is due to congestion.
    #[default]
    Queues,
    /// The rate is close to that of the link. There need not be a queue, so marks say nothing about
    /// the cause of a loss.
    PhantomQueues,
}

/// How an end steers what it sends. The ends of a session need not agree on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Steering {
    /// The congestion controller and the network that it runs in; `None`: the session's rate alone.
    pub congestion: Option<(Algorithm, Domain)>,
    /// Round trip within the data centre, for an end without a controller: bounds how often the
    /// peer may ask it to acknowledge.
    pub near_rtt: Option<Nanos>,
    /// What marks mean on the session's paths.
    pub marks: Marks,
    /// What is known about the controller's first window.
    pub start: Start,
}

/// Result of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Unchanged,
    /// The rate of this or any other path has changed.
    Changed,
    /// The path can't carry the session at all.
    Hopeless,
}

/// What has been reported about a path and passed on to the controller.
#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    packets: u64,
    bytes: u64,
    received: u64,
    ce: u64,
    lost: u64,
}

/// The controller with what it needs from the paths.
#[derive(Debug)]
struct Steered {
    controller: Box<dyn Controller>,
    /// What was chosen …
    algorithm: Algorithm,
    setup: Setup,
    /// … and whether a controller that needs no marks stands in for it, since they don't arrive.
    is_fallen_back: bool,
    /// By path.
    counted: Vec<Counted>,
    /// The last sample, for reports that came on another path and so measure nothing.
    rtt: Nanos,
}

/// Limits what leaves.
#[derive(Debug)]
pub struct Congestion {
    breakers: Vec<Breaker>,
    steering: Steering,
    /// From establishment on.
    steered: Option<Steered>,
}

impl Congestion {
    /// Creates the limits of a session: each path may use the whole rate.
    #[must_use]
    pub fn new(config: &SessionConfig, steering: Steering) -> Self {
        let breaker = || Breaker::new(config.rate_bytes_per_second, steering.marks);
        let breakers = (0..config.paths).map(|_| breaker()).collect();
        Self { breakers, steering, steered: None }
    }

    /// How this end steers what it sends.
    #[must_use]
    pub fn steering(&self) -> &Steering {
        &self.steering
    }

    /// Starts the controller with the round trip found in establishment.
    pub fn established(&mut self, config: &SessionConfig, rtt: Nanos, timeout: Nanos, now: Nanos) {
        let Some((algorithm, domain)) = self.steering.congestion else { return };
        let packet_bytes = config.packet_bytes_max() as u64;
        let setup = Setup {
            domain: Domain { packet_bytes, ..domain },
            rate_bytes_per_second: config.rate_bytes_per_second,
            base_rtt: rtt,
            timeout,
            start: self.steering.start,
        };
        self.steered = Some(Steered {
            controller: create(algorithm, &setup, now),
            algorithm,
            setup,
            is_fallen_back: false,
            counted: vec![Counted::default(); self.breakers.len()],
            rtt,
        });
    }

    /// Wire bytes per second that a path may carry. The session's rate limits all paths together,
    /// regardless of this.
    #[must_use]
    pub fn rate_of(&self, path: PathId) -> u64 {
        self.breakers[path.index()].rate()
    }

    /// What all paths together may carry, if there is a controller.
    #[must_use]
    pub fn allowance(&self) -> Option<Allowance> {
        self.steered.as_ref().map(|steered| steered.controller.allowance())
    }

    /// Units that may be in flight, at least one; `None`: any number. To the window comes what
    /// leaves while an acknowledgement waits at the peer for `ack_delay`.
    #[must_use]
    pub fn units_in_flight_max(&self, ack_delay: Nanos) -> Option<u64> {
        let steered = self.steered.as_ref()?;
        let Allowance { window_bytes, rate_bytes_per_second } = steered.controller.allowance();
        let late = u128::from(rate_bytes_per_second) * u128::from(ack_delay);
        let late = (late / u128::from(NANOS_PER_SECOND)) as u64;
        Some((window_bytes.saturating_add(late) / steered.setup.domain.packet_bytes).max(1))
    }

    /// Whether a controller that needs no marks stands in for the chosen one.
    #[must_use]
    pub fn is_fallen_back(&self) -> bool {
        self.steered.as_ref().is_some_and(|steered| steered.is_fallen_back)
    }

    /// Chooses the controller by whether marks arrive. `rtt_least`: of the slowest path.
    pub fn rely_on_marks(&mut self, do_arrive: bool, rtt_least: Nanos, now: Nanos) {
        if let Some(steered) = &mut self.steered {
            steered.rely_on_marks(do_arrive, self.steering.marks, rtt_least, now);
        }
    }

    /// Packets of a path that a real queue has marked, since the start.
    #[must_use]
    pub fn queue_marks(&self, account: &PathAccount) -> u64 {
        if self.steering.marks == Marks::Queues { account.received.ce } else { 0 }
    }

    /// Whether the controller, if there is one, finds a queue.
    #[must_use]
    pub fn finds_queue(&self) -> bool {
        self.steered.as_ref().is_some_and(|steered| steered.controller.finds_queue())
    }

    /// Records that a unit is to leave after all before it have been acknowledged.
    pub fn resumed(&mut self) {
        if let Some(steered) = &mut self.steered {
            steered.controller.resumed();
        }
    }

    /// Records that a packet leaves.
    pub fn sent(&mut self, wire_bytes: u64, now: Nanos) {
        if let Some(steered) = &mut self.steered {
            steered.controller.sent(wire_bytes, now);
        }
    }

    /// Processes the peer's report about a path. `echo`: its newest packet; `rtt_least`: the least
    /// round trip of late, of the path and of the slowest path; `is_limited`: only these limits
    /// hold units back.
    pub fn reported(
        &mut self,
        path: PathId,
        account: &PathAccount,
        (echo, rtt_least): (Option<Echo>, (Nanos, Nanos)),
        is_limited: bool,
        now: Nanos,
    ) -> Verdict {
        let index = path.index();
        let is_cut = self.breakers[index].is_cut();
        if let (Some(steered), Some(echo)) = (&mut self.steered, echo) {
            let (own, slowest) = rtt_least;
            if let Some(rtt) = echo.rtt {
                // As if this path were as long as the slowest one.
                steered.rtt = rtt.saturating_sub(own).saturating_add(slowest);
            }
            let counted = &mut steered.counted[index];
            let report = counted.news(account);
            let report = Report {
                sent_at: echo.sent_at,
                rtt: steered.rtt,
                rtt_least: slowest,
                is_limited: is_limited && !is_cut,
                ..report
            };
            steered.controller.reported(&report, now);
        }
        let report = breaker::Report {
            sent: account.packets_reported,
            received: account.received.received,
            ce: account.received.ce,
            dropped: account.dropped_packets,
            wire_bytes: account.wire_bytes_sent,
            srtt: account.srtt,
        };
        match self.breakers[index].report(report, now) {
            breaker::Verdict::Unchanged => Verdict::Unchanged,
            breaker::Verdict::Rate(_) => Verdict::Changed,
            breaker::Verdict::Fatal => Verdict::Hopeless,
        }
    }

    /// Records that a path went silent: its losses mean that it was down, not congested.
    pub fn interrupted(&mut self, path: PathId) {
        self.breakers[path.index()].interrupt();
    }

    /// Records that the peer went silent on all paths.
    pub fn timed_out(&mut self, now: Nanos) {
        if let Some(steered) = &mut self.steered {
            steered.controller.timed_out(now);
        }
    }

    /// How often a rate was cut because the path could not carry it.
    #[must_use]
    pub fn trips(&self) -> u64 {
        self.breakers.iter().map(Breaker::trips).sum()
    }
}

impl Steered {
    fn rely_on_marks(&mut self, do_arrive: bool, marks: Marks, rtt_least: Nanos, now: Nanos) {
        let falls_back = !do_arrive && self.algorithm.uses_marks();
        if falls_back == self.is_fallen_back {
            return;
        }
        self.is_fallen_back = falls_back;
        // There may be a queue that nobody reported.
        let window_bytes = self.controller.allowance().window_bytes / 2;
        let base_rtt = if rtt_least > 0 { rtt_least } else { self.setup.base_rtt };
        let mut setup = Setup { base_rtt, start: Start::Exactly(window_bytes), ..self.setup };
        let mut algorithm = self.algorithm;
        if falls_back {
            algorithm = Algorithm::UNMARKED;
            if marks == Marks::PhantomQueues {
                let rate = setup.domain.line_bytes_per_second / UNMARKED_SHARE;
                setup.rate_bytes_per_second = setup.rate_bytes_per_second.min(rate);
            }
        }
        self.controller = create(algorithm, &setup, now);
    }
}

impl Counted {
    /// What is new since the last call. The peer counts packets; their bytes are the mean of those
    /// sent in the meantime.
    fn news(&mut self, account: &PathAccount) -> Report {
        let now = Self {
            packets: account.packets_reported,
            bytes: account.wire_bytes_sent.saturating_sub(account.in_flight_bytes),
            received: account.received.received,
            ce: account.received.ce,
            lost: account.lost_packets,
        };
        let since = |now: u64, before: u64| u128::from(now.saturating_sub(before));
        let packets = since(now.packets, self.packets);
        let bytes = since(now.bytes, self.bytes);
        // A peer that claims more than was sent only counts what was sent.
        let received = since(now.received, self.received).min(packets);
        let ce = since(now.ce, self.ce).min(received);
        let lost = since(now.lost, self.lost).min(packets);
        *self = now;
        let share = |count: u128| (bytes * count / packets.max(1)) as u64;
        Report {
            bytes: share(received),
            marked_bytes: share(ce),
            lost_packets: lost as u64,
            ..Report::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::congestion::Rules;

    use super::super::{IpVersion, PACKETS_PER_KEY, PayloadMode, Version, config::Detection};
    use super::*;

    const MILLISECOND: Nanos = 1_000_000;

    fn config() -> SessionConfig {
        SessionConfig {
            version: Version::V6,
            connection_id_local: 1,
            connection_id_peer: 2,
            unit_bytes: 1408,
            ip: IpVersion::V4,
            paths: 2,
            chunk_units: 1,
            slots: 4,
            rate_bytes_per_second: 12_500_000,
            idle_timeout: 1,
            reordering: 0,
            detection: Detection::Reports,
            packets_per_key: PACKETS_PER_KEY,
            payload: PayloadMode::Real,
        }
    }

    fn account(packets: u64, received: u64, ce: u64) -> PathAccount {
        let mut account = PathAccount {
            packets_sent: packets,
            packets_reported: packets,
            wire_bytes_sent: packets * 1000,
            ..PathAccount::default()
        };
        account.received.received = received;
        account.received.ce = ce;
        account
    }

    fn steered() -> Congestion {
        let domain = Domain {
            line_bytes_per_second: 12_500_000,
            near_rtt: MILLISECOND,
            far_rtt: 10 * MILLISECOND,
            packet_bytes: 0,
        };
        let congestion = Some((Algorithm::Uno(Rules::DEFAULT), domain));
        let steering = Steering { congestion, marks: Marks::PhantomQueues, ..Steering::default() };
        let mut found = Congestion::new(&config(), steering);
        assert_eq!(found.units_in_flight_max(0), None, "before establishment");
        found.established(&config(), 10 * MILLISECOND, 30 * MILLISECOND, 0);
        found
    }

    #[test]
    fn news_are_what_was_added_since_the_last_report() {
        let mut counted = Counted::default();
        let first = counted.news(&account(100, 90, 30));
        assert_eq!((first.bytes, first.marked_bytes), (90_000, 30_000));
        let second = counted.news(&account(200, 190, 30));
        assert_eq!((second.bytes, second.marked_bytes), (100_000, 0));
        assert_eq!(counted.news(&account(200, 190, 30)).bytes, 0);
    }

    #[test]
    fn claims_beyond_what_was_sent_count_as_what_was_sent() {
        let mut counted = Counted::default();
        let mut claimed = account(100, u64::MAX, u64::MAX);
        claimed.lost_packets = u64::MAX;
        let report = counted.news(&claimed);
        assert_eq!(
            (report.bytes, report.marked_bytes, report.lost_packets),
            (100_000, 100_000, 100)
        );
        // Counters that go back are no news.
        assert_eq!(counted.news(&account(50, 10, 0)), Report::default());
    }

    #[test]
    fn the_window_is_counted_in_units_and_never_below_one() {
        let mut congestion = steered();
        let window = congestion.allowance().unwrap().window_bytes;
        let packet = config().packet_bytes_max() as u64;
        assert_eq!(congestion.units_in_flight_max(0), Some(window / packet));
        congestion.timed_out(0);
        congestion.timed_out(0);
        assert_eq!(congestion.units_in_flight_max(0), Some(1));
    }

    #[test]
    fn what_leaves_while_an_acknowledgement_waits_comes_to_the_window() {
        let congestion = steered();
        let allowed = congestion.allowance().unwrap();
        let packet = config().packet_bytes_max() as u64;
        let late = allowed.rate_bytes_per_second / 100;
        let expected = (allowed.window_bytes + late) / packet;
        assert_eq!(congestion.units_in_flight_max(10 * MILLISECOND), Some(expected));
    }

    #[test]
    fn a_path_that_is_slower_than_another_is_not_a_queue() {
        let mut congestion = steered();
        let report = |congestion: &mut Congestion, path, packets, rtt: Nanos, least: Nanos| {
            let echo = Echo { sent_at: 0, rtt: Some(rtt) };
            let leasts = (least, 10 * MILLISECOND);
            let known = account(packets, packets, 0);
            congestion.reported(PathId(path), &known, (Some(echo), leasts), true, MILLISECOND);
            congestion.steered.as_ref().unwrap().rtt
        };
        assert_eq!(report(&mut congestion, 0, 1, MILLISECOND, MILLISECOND), 10 * MILLISECOND);
        let queued = report(&mut congestion, 1, 1, 12 * MILLISECOND, 10 * MILLISECOND);
        assert_eq!(queued, 12 * MILLISECOND);
    }

    #[test]
    fn only_marks_of_real_queues_show_one() {
        assert_eq!(steered().queue_marks(&account(10, 10, 3)), 0);
        let congestion = Congestion::new(&config(), Steering::default());
        assert_eq!(congestion.queue_marks(&account(10, 10, 3)), 3);
    }

    #[test]
    fn a_session_without_a_controller_has_no_window() {
        let mut congestion = Congestion::new(&config(), Steering::default());
        congestion.established(&config(), MILLISECOND, MILLISECOND, 0);
        assert_eq!((congestion.allowance(), congestion.units_in_flight_max(0)), (None, None));
    }
}
