//! How long bursts of losses last, measured by the times at which the lost packets left.
//!
//! A burst on a real path lasts for a time, however many packets are sent in it. Its length in packets
//! says little: a sender that has sent its message meets only a part of a burst, and a slower one
//! meets fewer packets of the same burst.

use std::collections::VecDeque;

use crate::link::Nanos;

use super::gaps::OUTAGE_TIMEOUTS;

/// Most marks kept: some sixteen round trips.
const MARKS_MAX: usize = 1024;
/// Marks are this share of a round trip apart; packets between two of them left at an even pace.
const GRAIN_SHARE: u64 = 64;
/// Distance of marks before a round trip is known.
const GRAIN_INITIAL: Nanos = 1_000_000;
/// Packets further apart than this say nothing of a burst: two lost ones in a row may be independent
/// losses, and their distance is the sender's. 1500 bytes take less at 10 Mbit/s.
const SPARSE: Nanos = 1_250_000;

/// A packet number, and when it left.
type Mark = (u64, Nanos);

/// Lengths of the bursts of one path. A peer's reports can't make them longer than the time in which
/// packets were sent: each packet number counts at most once.
#[derive(Debug, Default)]
pub struct Bursts {
    /// Ascending.
    marks: VecDeque<Mark>,
    newest: Option<Mark>,
    /// Runs that begin before this packet have been measured, or come too late.
    measured_end: u64,
    runs: u64,
    nanos: Nanos,
}

impl Bursts {
    /// Runs measured so far.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// Sum of their lengths.
    #[must_use]
    pub fn nanos(&self) -> Nanos {
        self.nanos
    }

    /// Records that a packet leaves; numbers ascend.
    pub fn packet_sent(&mut self, number: u64, srtt: Option<Nanos>, now: Nanos) {
        let grain = srtt.map_or(GRAIN_INITIAL, |srtt| srtt / GRAIN_SHARE);
        let is_after = |(_, at): Mark| now.saturating_sub(at) >= grain;
        if let Some(newest) = self.newest.filter(|newest| is_after(*newest)) {
            // The pause begins after the packet before it.
            self.mark(newest);
        }
        if self.marks.back().is_none_or(|last| is_after(*last)) {
            self.mark((number, now));
        }
        self.newest = Some((number, now));
    }

    /// Processes the peer's report that packets `start..end` are lost. Reports are repeated; a run
    /// counts once. One of several time-outs is an outage, as in [`super::gaps`]. One whose first
    /// packet is [`SPARSE`] before the next one is left out.
    pub fn lost(&mut self, start: u64, end: u64, timeout: Nanos) {
        if start < self.measured_end || start >= end {
            return;
        }
        // The peer noticed the run by a packet after it, so `end` has left if the report is true.
        let times = [start, start + 1, end - 1, end].map(|number| self.left_at(number));
        let [Some(first), Some(second), Some(last), Some(next)] = times else { return };
        self.measured_end = end;
        let span = last.saturating_sub(first);
        let is_sparse = second.saturating_sub(first) > SPARSE;
        if is_sparse || span > timeout.saturating_mul(OUTAGE_TIMEOUTS) {
            return;
        }
        self.runs += 1;
        self.nanos += span + next.saturating_sub(last).min(span) / 2;
    }

    fn mark(&mut self, mark: Mark) {
        if self.marks.back().is_some_and(|last| last.0 >= mark.0) {
            return;
        }
        if self.marks.len() == MARKS_MAX {
            self.marks.pop_front();
        }
        self.marks.push_back(mark);
    }

    /// When a packet left; `None` if it has not, or too long ago.
    fn left_at(&self, number: u64) -> Option<Nanos> {
        let newest = self.newest.filter(|newest| number <= newest.0)?;
        let index = self.marks.partition_point(|mark| mark.0 <= number);
        let before = self.marks.get(index.checked_sub(1)?)?;
        let after = self.marks.get(index).copied().unwrap_or(newest);
        let (packets, passed) = (u128::from(after.0 - before.0), u128::from(number - before.0));
        let nanos = u128::from(after.1 - before.1) * passed;
        Some(before.1 + nanos.checked_div(packets).unwrap_or(0) as Nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Nanos = 1_000_000;
    const SRTT: Option<Nanos> = Some(64 * MILLISECOND);
    const TIMEOUT: Nanos = 3 * 64 * MILLISECOND;

    /// Ten packets a millisecond, forty of them, a pause of 20 ms, and one more.
    fn sent() -> Bursts {
        let mut bursts = Bursts::default();
        for number in 0..40 {
            bursts.packet_sent(number, SRTT, number * MILLISECOND / 10);
        }
        bursts.packet_sent(40, SRTT, 24 * MILLISECOND);
        bursts
    }

    fn measured(bursts: &Bursts) -> (u64, Nanos) {
        (bursts.runs(), bursts.nanos())
    }

    #[test]
    fn a_run_is_as_long_as_the_time_in_which_its_packets_left() {
        let mut bursts = sent();
        bursts.lost(10, 21, TIMEOUT);
        assert_eq!(measured(&bursts), (1, MILLISECOND + MILLISECOND / 20));
        // Nobody knows when in the pause this one ended: half of its own length is added at most.
        bursts.lost(30, 40, TIMEOUT);
        let more = 900_000 + 450_000;
        assert_eq!(measured(&bursts), (2, MILLISECOND + MILLISECOND / 20 + more));
    }

    #[test]
    fn a_single_loss_has_no_length() {
        let mut bursts = sent();
        bursts.lost(3, 4, TIMEOUT);
        assert_eq!(measured(&bursts), (1, 0));
    }

    #[test]
    fn a_repeated_report_counts_once() {
        let mut bursts = sent();
        for _ in 0..4 {
            bursts.lost(10, 21, TIMEOUT);
        }
        bursts.lost(15, 21, TIMEOUT);
        assert_eq!(bursts.runs(), 1);
    }

    #[test]
    fn a_run_of_what_was_never_sent_is_ignored() {
        let mut bursts = sent();
        for (start, end) in [(10, 41), (41, 50), (u64::MAX - 1, u64::MAX), (9, 9), (9, 3)] {
            bursts.lost(start, end, TIMEOUT);
            assert_eq!(measured(&bursts), (0, 0), "{start}..{end}");
        }
        Bursts::default().lost(0, 1, TIMEOUT);
    }

    #[test]
    fn an_outage_is_no_burst() {
        let mut bursts = sent();
        bursts.packet_sent(41, SRTT, 25 * MILLISECOND);
        bursts.lost(30, 41, 4 * MILLISECOND);
        assert_eq!(measured(&bursts), (0, 0));
    }

    #[test]
    fn independent_losses_at_a_slow_pace_are_no_bursts() {
        let mut bursts = Bursts::default();
        for number in 0..40 {
            bursts.packet_sent(number, SRTT, number * 10 * MILLISECOND);
        }
        for (start, end) in [(3, 4), (10, 12), (20, 23)] {
            bursts.lost(start, end, TIMEOUT);
            assert_eq!(measured(&bursts), (0, 0), "{start}..{end}");
        }
    }

    #[test]
    fn a_burst_that_goes_on_in_the_next_message_counts() {
        let mut bursts = sent();
        bursts.packet_sent(41, SRTT, 25 * MILLISECOND);
        bursts.lost(38, 41, TIMEOUT);
        let span = 20 * MILLISECOND + MILLISECOND / 5;
        assert_eq!(measured(&bursts), (1, span + MILLISECOND / 2));
    }

    #[test]
    fn memory_is_bounded_and_what_is_older_is_not_measured() {
        let mut bursts = Bursts::default();
        for number in 0..10_000 {
            bursts.packet_sent(number, SRTT, number * MILLISECOND);
        }
        assert_eq!(bursts.marks.len(), MARKS_MAX);
        bursts.lost(100, 110, TIMEOUT);
        assert_eq!(bursts.runs(), 0);
        bursts.lost(9_100, 9_111, TIMEOUT);
        assert_eq!(measured(&bursts), (1, 10 * MILLISECOND + MILLISECOND / 2));
    }
}
