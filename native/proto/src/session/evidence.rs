//! What says something about a path's own loss: packets and losses while the path has no queue.
//!
//! A buffer that is full drops packets, too. Parity against these would only be more to drop, so
//! they are for rate control alone. A path's time is cut into rounds of a round trip. In a round
//! there was a queue
//! * if in a quarter of it no packet's round trip was near the least of the last minutes, or none was
//!   measured: the level counts, so a queue that stands for long is still one, and jitter is none;
//! * if packets were marked CE, where marks come from real queues;
//! * or if the congestion controller found one.
//!
//! A loss may be reported a round before or after the queue that caused it, so the rounds beside one
//! with a queue say nothing either.

use crate::link::Nanos;

use super::path::PathAccount;
use super::rtt::Least;

/// A part of a round is judged by at least so many packets: of so many, jitter leaves one short …
const PART_SAMPLES: u32 = 8;
/// … and lasts for a round trip by this at least, so that a queue that comes and goes is seen.
const PART_SHARE: Nanos = 4;
/// After so many round trips a round is judged by what was measured: reports may be rare.
const ROUND_MAX: Nanos = 64;
/// A packet has waited in a queue if its round trip is longer than the least by one part in this
/// many …
const QUEUE_PARTS: Nanos = 20;
/// … and by this: shorter delays come from the hosts.
const QUEUE_MIN: Nanos = 500_000;
/// The least round trip is that of the present and the last interval of this length: after that, a
/// longer one is the path's own.
const LEAST_INTERVAL: Nanos = 150_000_000_000;

/// Packets of this end, and those of them that were lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Losses {
    /// Packets that arrived or were lost.
    pub packets: u64,
    /// Packets that were lost, without those that arrived late.
    pub lost: u64,
    /// Runs of consecutive lost packets.
    pub runs: u64,
    /// Runs whose length in time is known …
    pub timed_runs: u64,
    /// … and the sum of these lengths.
    pub timed_nanos: Nanos,
}

impl Losses {
    /// What was added since `older`. A peer that claims more than was sent only counts what was
    /// sent.
    fn since(self, older: Self) -> Self {
        let packets = self.packets.saturating_sub(older.packets);
        let lost = self.lost.saturating_sub(older.lost).min(packets);
        Self {
            packets,
            lost,
            runs: self.runs.saturating_sub(older.runs).min(lost),
            timed_runs: self.timed_runs - older.timed_runs,
            timed_nanos: self.timed_nanos - older.timed_nanos,
        }
    }

    /// Merges other counts, which only grow: the larger ones are newer.
    fn merge(&mut self, other: Self) {
        self.packets = self.packets.max(other.packets);
        self.lost = self.lost.max(other.lost);
        self.runs = self.runs.max(other.runs);
        self.timed_runs = self.timed_runs.max(other.timed_runs);
        self.timed_nanos = self.timed_nanos.max(other.timed_nanos);
    }
}

impl std::ops::AddAssign for Losses {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.lost += other.lost;
        self.runs += other.runs;
        self.timed_runs += other.timed_runs;
        self.timed_nanos += other.timed_nanos;
    }
}

impl std::iter::Sum for Losses {
    fn sum<I: Iterator<Item = Self>>(losses: I) -> Self {
        losses.fold(Self::default(), |mut sum, one| {
            sum += one;
            sum
        })
    }
}

/// What a report says about queues on the path.
#[derive(Debug, Clone, Copy, Default)]
pub struct Signs {
    /// Round trip of the newest packet, if the report measures it.
    pub rtt: Option<Nanos>,
    /// Packets that a real queue has marked, since the start.
    pub marked: u64,
    /// The congestion controller finds a queue.
    pub is_found: bool,
}

/// The evidence of one path.
#[derive(Debug, Default)]
pub struct Evidence {
    least: Least<LEAST_INTERVAL>,
    /// The most that the peer has reported.
    known: Losses,
    marked: u64,
    /// When the round began …
    began: Nanos,
    /// … what was known then, …
    known_before: Losses,
    /// … and whether something has shown a queue.
    is_queued: bool,
    /// When the part of it began, how many packets it has measured, and the shortest round trip.
    part_began: Nanos,
    samples: u32,
    shortest: Nanos,
    /// The round before, unless there was a queue in it or before it.
    waiting: Option<Losses>,
    was_queued: bool,
    /// Rounds without a queue.
    clear: Losses,
}

impl Evidence {
    /// Packets and losses not attributable to queues. Excludes the last few round trips.
    #[must_use]
    pub fn clear(&self) -> Losses {
        self.clear
    }

    /// Processes the peer's report.
    pub fn reported(&mut self, account: &PathAccount, signs: Signs, now: Nanos) {
        let reported = Losses {
            packets: account.packets_reported,
            // A peer that claims too much must not hide what comes later.
            lost: account.lost_packets.min(account.packets_reported),
            runs: account.lost_runs.min(account.packets_reported),
            timed_runs: account.timed_runs,
            timed_nanos: account.timed_runs_nanos,
        };
        // A packet that was counted as lost may arrive late: what is known never decreases.
        self.known.merge(reported);
        self.is_queued |= signs.is_found || signs.marked > self.marked;
        self.marked = self.marked.max(signs.marked);
        if let Some(rtt) = signs.rtt {
            self.least.sample(rtt, now);
            self.shortest = if self.samples == 0 { rtt } else { self.shortest.min(rtt) };
            self.samples += 1;
        }
        let length = now.saturating_sub(self.began);
        let is_measured = self.samples >= PART_SAMPLES
            && now.saturating_sub(self.part_began) >= account.srtt / PART_SHARE;
        let is_over = length >= account.srtt.saturating_mul(ROUND_MAX);
        if is_measured || is_over {
            self.is_queued |= self.is_delayed();
            (self.part_began, self.samples) = (now, 0);
            if length >= account.srtt {
                self.end_round(now);
            }
        }
    }

    /// The path leads elsewhere: what was measured before says nothing about it.
    pub fn moved(&mut self, now: Nanos) {
        (self.least, self.waiting) = (Least::default(), None);
        (self.part_began, self.samples) = (now, 0);
        self.is_queued = true;
        self.end_round(now);
    }

    /// Whether none of the part's packets was as fast as the path is without a queue, as far as
    /// known.
    fn is_delayed(&self) -> bool {
        let least = self.least.get().filter(|_| self.samples > 0);
        least.is_none_or(|least| {
            self.shortest > least.saturating_add(QUEUE_MIN.max(least / QUEUE_PARTS))
        })
    }

    fn end_round(&mut self, now: Nanos) {
        let is_queued = self.is_queued;
        let newest = self.known.since(self.known_before);
        let waiting = self.waiting.take();
        if !is_queued && !self.was_queued {
            self.clear += waiting.unwrap_or_default();
            self.waiting = Some(newest);
        }
        self.was_queued = is_queued;
        (self.began, self.known_before) = (now, self.known);
        self.is_queued = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Nanos = 1_000_000;
    const RTT: Nanos = 25 * MILLISECOND;

    /// A path with a report every sixteenth of a round trip.
    #[derive(Default)]
    struct Path {
        evidence: Evidence,
        account: PathAccount,
        marked: u64,
        now: Nanos,
    }

    impl Path {
        /// Rounds with 160 packets, of which so many are lost, each measured by `rtt`.
        fn rounds(&mut self, count: u64, lost: u64, rtt: impl Fn(u64) -> Nanos, is_found: bool) {
            self.account.srtt = RTT;
            for report in 0..count * 16 {
                self.now += RTT / 16;
                self.account.packets_reported += 10;
                if report % 16 == 8 {
                    self.account.lost_packets += lost;
                    self.account.lost_runs += lost.min(1);
                    self.account.timed_runs += lost.min(1);
                    self.account.timed_runs_nanos += lost * MILLISECOND;
                }
                let signs = Signs { rtt: Some(rtt(report)), marked: self.marked, is_found };
                self.evidence.reported(&self.account, signs, self.now);
            }
        }

        fn lost(&self) -> u64 {
            self.evidence.clear().lost
        }
    }

    #[test]
    fn losses_of_a_path_without_a_queue_count_even_with_jitter() {
        let mut path = Path::default();
        let jitter = |report| RTT + (report * 7 % 16) * RTT / 100;
        path.rounds(100, 2, jitter, false);
        let clear = path.evidence.clear();
        // The last rounds may still turn out to be beside one with a queue.
        assert!((14_000..=16_000).contains(&clear.packets), "{clear:?}");
        assert_eq!((clear.lost * 80, clear.runs * 160), (clear.packets, clear.packets));
        assert_eq!((clear.timed_runs, clear.timed_nanos), (clear.runs, clear.lost * MILLISECOND));
    }

    #[test]
    fn losses_beside_a_queue_do_not_count_however_long_it_stands() {
        let mut path = Path::default();
        path.rounds(10, 0, |_| RTT, false);
        path.rounds(1, 5, |_| RTT, false);
        path.rounds(5_000, 5, |_| RTT + 2 * MILLISECOND, false);
        path.rounds(1, 5, |_| RTT, false);
        path.rounds(10, 0, |_| RTT, false);
        assert_eq!(path.lost(), 0);
        let clear = path.evidence.clear();
        assert_eq!((clear.timed_runs, clear.timed_nanos), (0, 0), "no burst of the path");
        let before = clear.packets;
        path.rounds(10, 5, |_| RTT + MILLISECOND, false);
        assert!(path.lost() > 0, "a twentieth of a round trip is no queue");
        assert!(path.evidence.clear().packets > before);
    }

    #[test]
    fn what_hosts_add_to_a_short_round_trip_is_no_queue() {
        let mut path = Path::default();
        path.rounds(10, 0, |_| 50_000, false);
        path.rounds(10, 1, |_| 500_000, false);
        assert!(path.lost() > 5);
    }

    #[test]
    fn a_longer_route_is_no_queue_for_ever() {
        let mut path = Path::default();
        path.rounds(10, 0, |_| RTT, false);
        let rounds = LEAST_INTERVAL / RTT;
        path.rounds(rounds, 1, |_| 2 * RTT, false);
        assert_eq!(path.lost(), 0);
        path.rounds(rounds + 10, 1, |_| 2 * RTT, false);
        assert!(path.lost() > 5);
    }

    #[test]
    fn losses_beside_marks_of_real_queues_do_not_count() {
        let mut path = Path::default();
        path.rounds(10, 0, |_| RTT, false);
        let before = path.evidence.clear().packets;
        for _ in 0..10 {
            path.marked += 1;
            path.rounds(1, 5, |_| RTT, false);
        }
        assert_eq!(path.lost(), 0);
        assert!(path.evidence.clear().packets < before + 3 * 160, "nor do the packets");
    }

    #[test]
    fn losses_while_the_controller_finds_a_queue_do_not_count() {
        let mut path = Path::default();
        path.rounds(10, 5, |_| RTT, true);
        assert_eq!(path.evidence.clear(), Losses::default());
    }

    #[test]
    fn a_queue_that_fills_and_drains_within_a_round_trip_is_one() {
        let mut path = Path::default();
        path.rounds(10, 0, |_| RTT, false);
        let before = path.evidence.clear().packets;
        let on_off = |report| if report % 16 < 8 { RTT } else { 2 * RTT };
        path.rounds(100, 5, on_off, false);
        assert_eq!(path.lost(), 0);
        assert!(path.evidence.clear().packets < before + 3 * 160);
    }

    /// Reports once a round trip, each with ten packets of which one was lost.
    fn rare(rtt: impl Fn(u64) -> Option<Nanos>) -> Losses {
        let mut path = Path::default();
        path.rounds(10, 0, |_| RTT, false);
        for report in 0..400 {
            path.now += RTT;
            path.account.packets_reported += 10;
            path.account.lost_packets += 1;
            let signs = Signs { rtt: rtt(report), ..Signs::default() };
            path.evidence.reported(&path.account, signs, path.now);
        }
        path.evidence.clear()
    }

    #[test]
    fn a_round_with_few_reports_goes_on_until_jitter_is_none() {
        assert!(rare(|report| Some(RTT + report * 3 % 8 * RTT / 20)).lost > 300);
        assert!(rare(|report| (report % 32 == 0).then_some(RTT)).lost > 200, "but not for ever");
    }

    #[test]
    fn where_nothing_is_measured_nothing_is_known() {
        assert_eq!(rare(|_| None).lost, 0);
    }

    #[test]
    fn a_path_that_moves_is_judged_again_and_keeps_what_is_known() {
        let mut path = Path::default();
        path.rounds(10, 5, |_| RTT, false);
        let before = path.evidence.clear();
        assert!(before.lost > 0);
        path.evidence.moved(path.now);
        path.rounds(1, 5, |_| 2 * RTT, false);
        assert_eq!(path.evidence.clear(), before, "nor does what was around the move");
        path.rounds(10, 5, |_| 2 * RTT, false);
        let added = path.evidence.clear().since(before);
        assert!((25..=45).contains(&added.lost), "{added:?}");
        assert!(added.packets <= 9 * 160, "{added:?}");
    }

    #[test]
    fn claims_beyond_what_was_sent_and_absurd_round_trips_are_harmless() {
        let mut path = Path::default();
        path.rounds(10, 0, |_| RTT, false);
        path.account.lost_packets = u64::MAX;
        path.account.lost_runs = u64::MAX;
        path.rounds(10, 0, |_| RTT, false);
        let clear = path.evidence.clear();
        assert!(clear.lost <= clear.packets && clear.runs <= clear.lost, "{clear:?}");
        path.rounds(10, 0, |_| RTT, false);
        let later = path.evidence.clear().since(clear);
        assert_eq!((later.lost, later.packets), (1600, 1600), "a claim is not forgotten");
        // All packets so far, claimed in a round with a few new ones: no round lost more than it had.
        let (before, after) = (
            Losses { packets: 1000, ..Losses::default() },
            Losses { packets: 1010, lost: 1010, runs: 500, ..Losses::default() },
        );
        let round = after.since(before);
        assert_eq!((round.packets, round.lost, round.runs), (10, 10, 10));
        // With these nothing is known, as beside a queue.
        let mut path = Path::default();
        path.rounds(10, 5, |report| if report == 0 { 1 } else { Nanos::MAX - report }, false);
        assert_eq!(path.lost(), 0);
    }
}
