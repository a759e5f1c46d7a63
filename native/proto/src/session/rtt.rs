//! Round-trip estimate: send times, the peer's reports about them, and the resulting time-out.

use std::collections::VecDeque;

use crate::link::Nanos;

/// The α of RTO = srtt · (1 + α): the share of a round trip that queuing on the path may add.
const RTO_ALPHA: u64 = 2;
/// Shortest time-out: schedulers of a busy host stall a thread for a few milliseconds.
const RTO_MIN: Nanos = 5_000_000;
/// Time-out before the first sample.
const RTO_INITIAL: Nanos = 300_000_000;
/// Send times are kept at this fraction of a round trip, so a sample is off by at most 0.4 %.
const MARKS_PER_RTT: u64 = 256;
/// Most send times kept: four round trips.
const MARKS_MAX: usize = 1024;
/// The least round trip of late is that of the present and the last interval of this length.
const LEAST_INTERVAL: Nanos = 5_000_000_000;

/// A sent packet.
#[derive(Debug, Clone, Copy)]
struct Mark {
    number: u64,
    sent_at: Nanos,
    /// Total wire bytes sent up to the end of this packet.
    bytes: u64,
}

/// Estimates of one path.
#[derive(Debug, Default)]
pub struct RoundTrip {
    /// Some of the sent packets, ascending by number, time and bytes.
    marks: VecDeque<Mark>,
    /// Bytes sent up to the newest of them that the peer has reported.
    reported_bytes: u64,
    smoothed: Option<Nanos>,
    least: Least<LEAST_INTERVAL>,
}

/// A sent packet that the peer has reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Echo {
    /// When it was sent.
    pub sent_at: Nanos,
    /// Its round trip, if the report measures it.
    pub rtt: Option<Nanos>,
}

/// The least sample of the present and the last interval of this length.
#[derive(Debug, Default)]
pub struct Least<const INTERVAL: Nanos> {
    since: Nanos,
    present: Option<Nanos>,
    last: Option<Nanos>,
}

impl<const INTERVAL: Nanos> Least<INTERVAL> {
    /// Adds a sample.
    pub fn sample(&mut self, rtt: Nanos, now: Nanos) {
        if now.saturating_sub(self.since) >= INTERVAL {
            (self.since, self.last) = (now, self.present.take());
        }
        self.present = Some(self.present.map_or(rtt, |present| present.min(rtt)));
    }

    /// The least one; `None` before the first.
    #[must_use]
    pub fn get(&self) -> Option<Nanos> {
        self.present.into_iter().chain(self.last).min()
    }
}

impl RoundTrip {
    /// Records a sent packet: its number, and the total bytes sent up to its end.
    pub fn packet_sent(&mut self, (number, bytes): (u64, u64), now: Nanos) {
        let gap = self.smoothed.map_or(0, |srtt| srtt / MARKS_PER_RTT);
        if self.marks.back().is_none_or(|last| now.saturating_sub(last.sent_at) >= gap) {
            if self.marks.len() == MARKS_MAX {
                self.marks.pop_front();
            }
            self.marks.push_back(Mark { number, sent_at: now, bytes });
        }
    }

    /// Processes the peer's report of the newest packet it has. Each mark is used once. `delay`:
    /// how long the peer has had it; `None` if the report can't be measured because the delay is
    /// unknown or the report took another path than the packet. Returns the newest recorded packet
    /// among those reported for the first time.
    pub fn echo_received(&mut self, number: u64, delay: Option<Nanos>, now: Nanos) -> Option<Echo> {
        let mut newest = None;
        while self.marks.front().is_some_and(|mark| mark.number <= number) {
            newest = self.marks.pop_front();
        }
        let mark: Mark = newest?;
        self.reported_bytes = mark.bytes;
        let rtt = delay.map(|delay| now.saturating_sub(mark.sent_at).saturating_sub(delay).max(1));
        if let Some(rtt) = rtt {
            self.sample(rtt, now);
        }
        Some(Echo { sent_at: mark.sent_at, rtt })
    }

    /// The least sample of the last five to ten seconds; `None` before the first one.
    #[must_use]
    pub fn least(&self) -> Option<Nanos> {
        self.least.get()
    }

    /// Bytes sent up to the newest recorded packet that the peer has reported.
    #[must_use]
    pub fn reported_bytes(&self) -> u64 {
        self.reported_bytes
    }

    /// Adds a sample to the average (weight 1/8, as in RFC 6298).
    pub fn sample(&mut self, rtt: Nanos, now: Nanos) {
        let rtt = rtt.max(1);
        self.least.sample(rtt, now);
        self.smoothed = Some(self.smoothed.map_or(rtt, |srtt| srtt - srtt / 8 + rtt / 8));
    }

    /// The average; `None` before the first sample.
    #[must_use]
    pub fn smoothed(&self) -> Option<Nanos> {
        self.smoothed
    }

    /// How long an answer that returns on the same path may take.
    #[must_use]
    pub fn timeout(&self) -> Nanos {
        timeout_of(self.smoothed)
    }
}

/// How long an answer may take on a path with this average.
#[must_use]
pub fn timeout_of(srtt: Option<Nanos>) -> Nanos {
    srtt.map_or(RTO_INITIAL, |srtt| (srtt * (1 + RTO_ALPHA)).max(RTO_MIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_exact_when_the_newest_packet_was_marked() {
        let mut rtt = RoundTrip::default();
        rtt.packet_sent((0, 100), 1_000);
        rtt.packet_sent((1, 150), 2_000);
        let echo = rtt.echo_received(1, Some(500), 25_002_500);
        assert_eq!(echo, Some(Echo { sent_at: 2_000, rtt: Some(25_000_000) }));
        assert_eq!(rtt.smoothed(), Some(25_000_000));
        assert_eq!((rtt.timeout(), rtt.reported_bytes()), (75_000_000, 150));
        assert_eq!(rtt.echo_received(1, Some(500), 90_000_000), None);
        assert_eq!(rtt.smoothed(), Some(25_000_000), "a mark counts once");
    }

    #[test]
    fn a_report_without_a_delay_measures_nothing() {
        let mut rtt = RoundTrip::default();
        rtt.packet_sent((0, 100), 1_000);
        rtt.echo_received(0, None, 9_000);
        assert_eq!((rtt.smoothed(), rtt.reported_bytes()), (None, 100));
    }

    #[test]
    fn marks_are_bounded_and_the_error_is_small() {
        let mut rtt = RoundTrip::default();
        rtt.sample(25_000_000, 0);
        for number in 0..1_000_000 {
            rtt.packet_sent((number, number), number * 100);
        }
        assert!(rtt.marks.len() <= MARKS_MAX);
        rtt.echo_received(999_999, Some(0), 999_999 * 100 + 25_000_000);
        let srtt = rtt.smoothed().unwrap();
        assert!((25_000_000..=25_000_000 + 25_000_000 / 256).contains(&srtt), "{srtt}");
    }

    #[test]
    fn the_least_sample_is_forgotten_after_ten_seconds() {
        let mut rtt = RoundTrip::default();
        let second = 1_000_000_000;
        for (at, sample, least) in [
            (1, 30_000_000, 30_000_000),
            (2, 25_000_000, 25_000_000),
            (7, 40_000_000, 25_000_000),
            (11, 50_000_000, 25_000_000),
            (12, 50_000_000, 40_000_000),
            (17, 50_000_000, 50_000_000),
        ] {
            let now = at * second;
            rtt.packet_sent((at, at * 100), now - sample);
            rtt.echo_received(at, Some(0), now);
            assert_eq!(rtt.least(), Some(least), "after {at} s");
        }
    }

    #[test]
    fn the_time_out_has_a_floor() {
        let mut rtt = RoundTrip::default();
        assert_eq!(rtt.timeout(), RTO_INITIAL);
        rtt.sample(10_000, 0);
        assert_eq!(rtt.timeout(), RTO_MIN);
    }
}
