//! The circuit breaker of a session (RFC 8084): until there is congestion control, it prevents a
//! rate that the path can't carry from starving other traffic.
//!
//! It judges by the peer's counts. Loss above a bound in two consecutive intervals cuts the rate to
//! half of what arrived. Clean intervals raise it again, for the first minute to at most three
//! quarters of what arrived, so that others keep a share. Loss that persists at the lowest rate
//! ends the session.
//!
//! What the peer's host drops says nothing about the path: the rate is cut to a little less than
//! what the peer took, at once, and rises again with clean intervals, up to the maximum. After such
//! a cut a host drops little, so a second interval above the bound is never its doing. That is why
//! only the peer's word for the drops is enough: they are losses like all others where the path is
//! judged, and a claim can only make the session slower.

use crate::link::{NANOS_PER_SECOND, Nanos};

use super::congestion::Marks;

/// An interval lasts this many round trips …
const INTERVAL_ROUND_TRIPS: u64 = 10;
/// … and at least this long …
const INTERVAL_MIN: Nanos = NANOS_PER_SECOND;
/// … and covers at least this many packets, so that it isn't decided by chance.
const INTERVAL_PACKETS_MIN: u64 = 256;
/// Losing one packet in this many is too much on any path …
const LOSS_BOUND: u64 = 4;
/// … and one in this many if there is a queue, shown by CE marks or a round trip half as long
/// again.
const LOSS_BOUND_QUEUED: u64 = 20;
/// The peer's host dropping one packet in this many is too much.
const DROPS_BOUND: u64 = 20;
/// A single bad interval may be due to an outage.
const INTERVALS_TO_TRIP: u32 = 2;
/// Clean intervals raise the rate by this fraction of the maximum …
const RAISE_PARTS: u64 = 32;
/// … and up to the maximum once the last trip is this long ago.
const CEILING_NANOS: Nanos = 60 * NANOS_PER_SECOND;
/// The lowest rate is this fraction of the maximum …
const FLOOR_PARTS: u64 = 64;
/// … and loss above the bound for this long at the lowest rate means that the path can't carry the
/// session at all.
const FLOOR_NANOS: Nanos = 30 * NANOS_PER_SECOND;

/// A path's counters at one time, all since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Packets sent, up to the newest that the peer has …
    pub sent: u64,
    /// … and how many of them arrived …
    pub received: u64,
    /// … marked CE.
    pub ce: u64,
    /// Packets that the peer's host dropped.
    pub dropped: u64,
    /// Wire bytes sent.
    pub wire_bytes: u64,
    /// Smoothed round-trip time.
    pub srtt: Nanos,
}

/// What the caller must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Unchanged,
    /// Send at this rate from now on, in wire bytes per second.
    Rate(u64),
    /// End the session.
    Fatal,
}

/// Judges the rate of one path.
#[derive(Debug)]
pub struct Breaker {
    marks: Marks,
    rate_max: u64,
    rate: u64,
    /// Highest rate to which clean intervals raise it.
    ceiling: u64,
    tripped_at: Nanos,
    trips: u64,
    /// Consecutive intervals above the bound.
    bad: u32,
    /// Since when loss has been above the bound at the lowest rate.
    floor_since: Option<Nanos>,
    /// Start of the interval; `None`: the next report starts it.
    start: Option<(Nanos, Report)>,
    srtt_least: Nanos,
}

impl Breaker {
    /// Starts at the maximum rate that the operator allows.
    #[must_use]
    pub fn new(rate_max: u64, marks: Marks) -> Self {
        Self {
            marks,
            rate_max,
            rate: rate_max,
            ceiling: rate_max,
            tripped_at: 0,
            trips: 0,
            bad: 0,
            floor_since: None,
            start: None,
            srtt_least: Nanos::MAX,
        }
    }

    /// The current rate in wire bytes per second.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// Whether the rate is below the maximum.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.rate < self.rate_max
    }

    /// How often the rate was cut.
    #[must_use]
    pub fn trips(&self) -> u64 {
        self.trips
    }

    /// Records that the peer went silent: its losses mean that the path was down, not congested.
    pub fn interrupt(&mut self) {
        self.start = None;
    }

    /// Processes the peer's counts.
    pub fn report(&mut self, report: Report, now: Nanos) -> Verdict {
        if report.srtt > 0 {
            self.srtt_least = self.srtt_least.min(report.srtt);
        }
        let Some((began, first)) = self.start else {
            self.start = Some((now, report));
            return Verdict::Unchanged;
        };
        let elapsed = now.saturating_sub(began);
        let sent = report.sent.saturating_sub(first.sent);
        let length = INTERVAL_MIN.max(report.srtt.saturating_mul(INTERVAL_ROUND_TRIPS));
        if elapsed < length || sent < INTERVAL_PACKETS_MIN {
            return Verdict::Unchanged;
        }
        self.start = Some((now, report));
        let received = report.received.saturating_sub(first.received).min(sent);
        // A phantom queue marks packets although there is none.
        let is_marked = self.marks == Marks::Queues && report.ce > first.ce;
        let is_queued = is_marked || report.srtt / 3 > self.srtt_least / 2;
        let bound = if is_queued { LOSS_BOUND_QUEUED } else { LOSS_BOUND };
        let lost = sent - received;
        let dropped = report.dropped.saturating_sub(first.dropped).min(lost);
        let is_lossy = lost * bound > sent;
        let is_dropping = dropped * DROPS_BOUND > sent;
        self.bad = if is_lossy { self.bad + 1 } else { 0 };
        if !(is_lossy || is_dropping) {
            self.floor_since = None;
            return self.raise(now);
        }
        let wire_bytes = u128::from(report.wire_bytes.saturating_sub(first.wire_bytes));
        let arrived = wire_bytes * u128::from(received) / u128::from(sent);
        let arrived = arrived * u128::from(NANOS_PER_SECOND) / u128::from(elapsed);
        let arrived = u64::try_from(arrived).unwrap_or(u64::MAX);
        if self.bad >= INTERVALS_TO_TRIP {
            self.bad = 0;
            self.trip(arrived, now)
        } else if is_dropping {
            self.slow(arrived, now)
        } else {
            Verdict::Unchanged
        }
    }

    fn floor(&self) -> u64 {
        (self.rate_max / FLOOR_PARTS).max(1)
    }

    /// The verdict on an interval above a bound at the lowest rate.
    fn at_floor(&mut self, now: Nanos) -> Verdict {
        let since = *self.floor_since.get_or_insert(now);
        let is_over = now.saturating_sub(since) >= FLOOR_NANOS;
        if is_over { Verdict::Fatal } else { Verdict::Unchanged }
    }

    /// Cuts the rate to seven eighths of what the peer took, `arrived` wire bytes per second.
    fn slow(&mut self, arrived: u64, now: Nanos) -> Verdict {
        let floor = self.floor();
        if self.rate == floor {
            return self.at_floor(now);
        }
        self.rate = (arrived / 8 * 7).clamp(floor, self.rate);
        Verdict::Rate(self.rate)
    }

    /// Cuts the rate to half of what arrived, `arrived` wire bytes per second.
    fn trip(&mut self, arrived: u64, now: Nanos) -> Verdict {
        let floor = self.floor();
        if self.rate == floor {
            return self.at_floor(now);
        }
        self.trips += 1;
        self.tripped_at = now;
        self.rate = (arrived / 2).clamp(floor, self.rate);
        self.ceiling = (arrived / 4 * 3).max(self.rate);
        Verdict::Rate(self.rate)
    }

    fn raise(&mut self, now: Nanos) -> Verdict {
        if now.saturating_sub(self.tripped_at) >= CEILING_NANOS {
            self.ceiling = self.rate_max;
        }
        let raised = (self.rate + self.rate_max / RAISE_PARTS + 1).min(self.ceiling);
        if raised <= self.rate {
            return Verdict::Unchanged;
        }
        self.rate = raised;
        Verdict::Rate(raised)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u64 = 25_000_000;
    const PACKET: u64 = 1000;
    const RTT: Nanos = 25_000_000;

    /// A path with a session that always has something to send.
    struct Path {
        breaker: Breaker,
        report: Report,
        now: Nanos,
    }

    impl Path {
        fn new() -> Self {
            let report = Report { srtt: RTT, ..Report::default() };
            let mut breaker = Breaker::new(MOST, Marks::Queues);
            assert_eq!(breaker.report(report, 0), Verdict::Unchanged);
            Self { breaker, report, now: 0 }
        }

        /// One interval in which `dropped` per mille of the packets don't arrive because the peer's
        /// host drops them.
        fn dropping(&mut self, dropped: u64) -> Verdict {
            self.report.dropped += self.breaker.rate() / PACKET * dropped / 1000;
            self.interval(dropped, RTT, 0)
        }

        /// One interval in which the peer's host takes no more than `most` bytes a second.
        fn taking(&mut self, most: u64) -> Verdict {
            let rate = self.breaker.rate();
            self.dropping(rate.saturating_sub(most) * 1000 / rate)
        }

        /// One interval in which `lost` per mille of the packets are lost.
        fn interval(&mut self, lost: u64, srtt: Nanos, ce: u64) -> Verdict {
            self.now += INTERVAL_MIN;
            let sent = self.breaker.rate() / PACKET;
            self.report.sent += sent;
            self.report.received += sent - sent * lost / 1000;
            self.report.wire_bytes += sent * PACKET;
            self.report.ce += ce;
            self.report.srtt = srtt;
            self.breaker.report(self.report, self.now)
        }
    }

    impl Path {
        fn clean(&mut self, intervals: u32) {
            for _ in 0..intervals {
                let verdict = self.interval(0, RTT, 0);
                assert_ne!(verdict, Verdict::Fatal);
            }
        }
    }

    #[test]
    fn random_loss_below_the_bound_changes_nothing() {
        let mut path = Path::new();
        (0..100).for_each(|_| assert_eq!(path.interval(240, RTT, 0), Verdict::Unchanged));
        assert_eq!((path.breaker.rate(), path.breaker.trips()), (MOST, 0));
    }

    #[test]
    fn one_bad_interval_is_an_outage_and_two_are_a_full_path() {
        let mut path = Path::new();
        assert_eq!(path.interval(500, RTT, 0), Verdict::Unchanged);
        assert_eq!(path.interval(0, RTT, 0), Verdict::Unchanged);
        assert_eq!(path.interval(500, RTT, 0), Verdict::Unchanged);
        // Half of 25 MB/s arrives; half of that is the new rate.
        assert_eq!(path.interval(500, RTT, 0), Verdict::Rate(MOST / 4));
        assert_eq!(path.breaker.trips(), 1);
    }

    #[test]
    fn little_loss_is_too_much_where_there_is_a_queue() {
        for (srtt, ce) in [(RTT * 8 / 5, 0), (RTT, 1)] {
            let mut path = Path::new();
            assert_eq!(path.interval(60, srtt, ce), Verdict::Unchanged);
            assert!(matches!(path.interval(60, srtt, ce), Verdict::Rate(_)), "{srtt} {ce}");
        }
    }

    #[test]
    fn the_rate_recovers_to_three_quarters_and_after_a_minute_to_the_most() {
        let mut path = Path::new();
        let _ = (path.interval(500, RTT, 0), path.interval(500, RTT, 0));
        let arrived = MOST / 2;
        path.clean(55);
        assert_eq!(path.breaker.rate(), arrived / 4 * 3);
        path.clean(60);
        assert_eq!(path.breaker.rate(), MOST);
    }

    #[test]
    fn an_outage_is_not_judged() {
        let mut path = Path::new();
        let _ = path.interval(500, RTT, 0);
        path.breaker.interrupt();
        assert_eq!(path.interval(1000, RTT, 0), Verdict::Unchanged);
        assert_eq!(path.breaker.rate(), MOST);
    }

    #[test]
    fn few_packets_are_not_judged() {
        let mut path = Path::new();
        path.report.sent += INTERVAL_PACKETS_MIN - 1;
        for second in 1..10 {
            let now = second * INTERVAL_MIN;
            assert_eq!(path.breaker.report(path.report, now), Verdict::Unchanged);
        }
    }

    #[test]
    fn loss_that_stays_at_the_least_rate_is_fatal() {
        let mut path = Path::new();
        let verdicts: Vec<_> = (0..200).map(|_| path.interval(900, RTT, 0)).collect();
        let fatal = verdicts.iter().position(|verdict| *verdict == Verdict::Fatal).unwrap();
        assert!((30..60).contains(&fatal), "{fatal}");
        assert_eq!(path.breaker.rate(), MOST / FLOOR_PARTS);
    }

    #[test]
    fn the_rate_follows_what_the_peers_host_takes() {
        let mut path = Path::new();
        let takes = MOST / 5;
        assert!(matches!(path.taking(takes), Verdict::Rate(_)), "at once");
        let mut sent = 0;
        let mut arrived = 0;
        for _ in 0..300 {
            sent += path.breaker.rate();
            arrived += path.breaker.rate().min(takes);
            let _ = path.taking(takes);
        }
        assert!(arrived * 100 > 85 * 300 * takes, "{arrived} of {}", 300 * takes);
        assert!(arrived * 100 > 90 * sent, "{arrived} of {sent}");
        assert_eq!(path.breaker.trips(), 0);
        path.clean(40);
        assert_eq!(path.breaker.rate(), MOST, "the host is well again");
    }

    #[test]
    fn a_claim_of_drops_hides_no_loss_of_the_path() {
        for (lost, srtt) in [(60, 2 * RTT), (300, RTT), (500, RTT)] {
            let mut honest = Path::new();
            let _ = (honest.interval(lost, srtt, 0), honest.interval(lost, srtt, 0));
            for claimed in [0, lost / 10, 45, 49, 51, lost / 2, lost] {
                let mut path = Path::new();
                for _ in 0..2 {
                    path.report.dropped += path.breaker.rate() / PACKET * claimed / 1000;
                    let _ = path.interval(lost, srtt, 0);
                }
                assert!(path.breaker.rate() <= honest.breaker.rate(), "{lost} {claimed}");
                assert_eq!(path.breaker.trips(), 1, "{lost} {claimed}");
            }
        }
    }

    #[test]
    fn drops_that_stay_at_the_lowest_rate_end_the_session() {
        let mut path = Path::new();
        // Below the bound of loss, above that of drops.
        let fatal = (0..200).position(|_| path.dropping(200) == Verdict::Fatal).unwrap();
        assert!(fatal > 30, "{fatal}");
        assert_eq!((path.breaker.rate(), path.breaker.trips()), (MOST / FLOOR_PARTS, 0));
    }

    #[test]
    fn drops_claimed_beyond_the_losses_count_no_more_than_those() {
        let mut path = Path::new();
        path.report.dropped = u64::MAX / 2;
        assert_eq!(path.interval(0, RTT, 0), Verdict::Unchanged);
        assert_eq!(path.breaker.rate(), MOST);
    }

    #[test]
    fn a_peer_that_counts_more_than_was_sent_gains_nothing() {
        let mut path = Path::new();
        for _ in 0..2 {
            path.report.received = 1 << 48;
            let _ = path.interval(500, RTT, 0);
        }
        assert_eq!((path.breaker.rate(), path.breaker.trips()), (MOST, 0));
    }
}
