//! The peer's packets that have not arrived: gaps in their numbers, from the time they are noticed
//! until they are filled, or counted as losses and reported (docs/understand/sessions.md,
//! "Recovery").
//!
//! Time decides, as in RFC 8985 (RACK): a packet is lost once a packet sent later has been here for
//! the *reordering window*. The window starts small and grows with every packet that arrives after
//! it was counted as lost.

use std::collections::VecDeque;

use crate::link::Nanos;

/// Most open gaps, remembered lost runs and waiting reports. Beyond this the oldest is settled or
/// forgotten at once, so a peer's packet numbers use bounded memory.
const GAPS_MAX: usize = 1024;
/// The window starts at this fraction of a round trip, which covers neighbouring queues of a host.
const WINDOW_SHARE: u64 = 64;
/// The window is never shorter than a batch of packets.
const WINDOW_MIN: Nanos = 100_000;
/// The window before a round-trip time is known.
const WINDOW_INITIAL: Nanos = 1_000_000;
/// Lost runs without a late arrival after which the window returns to its initial size (RFC 8985
/// §7.4: 16).
const CALM_RUNS: u32 = 16;
/// How often a loss is reported, each time in a different acknowledgement round.
const REPORTS: u8 = 4;
/// Fewest packets of a run that counts as an outage if it spans a silence of [`OUTAGE_TIMEOUTS`].
const OUTAGE_PACKETS: u64 = 32;
/// See [`OUTAGE_PACKETS`]; equal to the time after which a sender holds back its units.
pub const OUTAGE_TIMEOUTS: u64 = 4;

/// Drops of the host explain losses that are noticed up to this long after them: longer than it
/// takes to read what was in the buffer.
const HOST_DROPS_LIFE: Nanos = 250_000_000;
/// Most packets of one drop: Linux counts a list of datagrams (UDP_GRO) as one.
const LIST_PACKETS_MAX: u64 = 64;

/// Packets lost on the way to one end, since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LossCounts {
    /// Packets counted as lost on the path, without outages.
    pub lost: u64,
    /// Runs of such packets with consecutive numbers.
    pub runs: u64,
    /// Packets of those that arrived later after all.
    pub found: u64,
    /// Units that arrived after they had already landed.
    pub duplicates: u64,
    /// Packets that got here and were dropped by this host, as a buffer was full. Not in `lost`.
    pub dropped: u64,
}

impl LossCounts {
    /// Merges other counts. Packets may be reordered but counts only grow, so the larger ones are
    /// newer.
    pub fn merge(&mut self, counts: Self) {
        self.lost = self.lost.max(counts.lost);
        self.runs = self.runs.max(counts.runs);
        self.found = self.found.max(counts.found);
        self.duplicates = self.duplicates.max(counts.duplicates);
        self.dropped = self.dropped.max(counts.dropped);
    }
}

impl std::iter::Sum for LossCounts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |sum, one| Self {
            lost: sum.lost.saturating_add(one.lost),
            runs: sum.runs.saturating_add(one.runs),
            found: sum.found.saturating_add(one.found),
            duplicates: sum.duplicates.saturating_add(one.duplicates),
            dropped: sum.dropped.saturating_add(one.dropped),
        })
    }
}

/// Times that decide how long a gap may stay open.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Smoothed round-trip time, if known.
    pub srtt: Option<Nanos>,
    /// Retransmission time-out.
    pub timeout: Nanos,
}

/// Packet numbers `start..end`, none of which has arrived.
#[derive(Debug, Clone, Copy)]
struct Gap {
    start: u64,
    end: u64,
    /// When the first packet after the gap arrived.
    seen_at: Nanos,
    /// How long nothing had arrived by then.
    silence: Nanos,
}

/// A run that has to be reported `times` more times.
#[derive(Debug, Clone, Copy)]
struct Report {
    start: u64,
    length: u32,
    times: u8,
}

/// The packet numbers of one channel as they arrive.
#[derive(Debug, Default)]
pub struct Gaps {
    /// Smallest window, as configured.
    window_floor: Nanos,
    /// Window derived from packets that arrived too late.
    window_learnt: Nanos,
    calm_runs: u32,
    /// One more than the newest number, and its arrival time. `None` before the first.
    newest: Option<(u64, Nanos)>,
    /// Open gaps, ascending by number and time.
    open: VecDeque<Gap>,
    /// Recently lost gaps, ascending by number.
    lost: VecDeque<Gap>,
    unreported: VecDeque<Report>,
    reported: VecDeque<Report>,
    counts: LossCounts,
    /// Drops of this host since the start …
    host_drops: u64,
    /// … those of them that explain no missing packet so far …
    drops_left: u64,
    /// … and when the newest was noticed.
    dropped_at: Nanos,
}

impl Gaps {
    /// Creates the state before any packet. `window_floor`: a packet that arrives up to this much
    /// later than one sent after it isn't lost.
    #[must_use]
    pub fn new(window_floor: Nanos) -> Self {
        Self { window_floor, ..Self::default() }
    }

    /// Records the first arrival of an authentic packet.
    pub fn packet_received(&mut self, number: u64, timing: Timing, now: Nanos) {
        match self.newest {
            Some((next, _)) if number < next => return self.filled(number, timing, now),
            Some((next, at)) if number > next => {
                let silence = now.saturating_sub(at);
                self.open.push_back(Gap { start: next, end: number, seen_at: now, silence });
                if self.open.len() > GAPS_MAX {
                    self.settle_oldest(timing, now);
                }
            }
            _ => {}
        }
        self.newest = Some((number + 1, now));
    }

    /// When the oldest gap counts as lost if it is not filled before.
    #[must_use]
    pub fn next_at(&self, timing: Timing) -> Option<Nanos> {
        self.open.front().map(|gap| gap.seen_at.saturating_add(self.window(timing)))
    }

    /// Counts gaps that have been open for the window as lost; returns whether there were any.
    pub fn settle(&mut self, timing: Timing, now: Nanos) -> bool {
        let window = self.window(timing);
        let mut is_any = false;
        while self.open.front().is_some_and(|gap| gap.seen_at.saturating_add(window) <= now) {
            self.settle_oldest(timing, now);
            is_any = true;
        }
        is_any
    }

    /// Whether packets are missing that don't count as lost yet.
    #[must_use]
    pub fn is_any_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Records how often this host has dropped something since the start. Each drop explains a list
    /// of packets that are missing now, or are noticed soon: they were lost here, not on the path.
    pub fn host_dropped(&mut self, total: u64, now: Nanos) {
        if let Some(more) = total.checked_sub(self.host_drops).filter(|more| *more > 0) {
            self.drops_left = self.drops_left_at(now).saturating_add(more);
            self.host_drops = total;
            self.dropped_at = now;
        }
    }

    fn drops_left_at(&self, now: Nanos) -> u64 {
        let is_recent = now.saturating_sub(self.dropped_at) <= HOST_DROPS_LIFE;
        if is_recent { self.drops_left } else { 0 }
    }

    /// Records a unit that had already landed.
    pub fn duplicate(&mut self) {
        self.counts.duplicates += 1;
    }

    /// Losses since the start.
    #[must_use]
    pub fn counts(&self) -> LossCounts {
        self.counts
    }

    /// Whether there is a loss that was never reported.
    #[must_use]
    pub fn is_unreported(&self) -> bool {
        !self.unreported.is_empty()
    }

    /// Whether there is a loss to report again.
    #[must_use]
    pub fn is_repeating(&self) -> bool {
        !self.reported.is_empty()
    }

    /// Takes up to `room` runs (first number, length) to report: new ones, and earlier ones if
    /// `repeats`.
    pub fn take_reports(&mut self, room: usize, repeats: bool, runs: &mut Vec<(u64, u32)>) {
        let mut left = if repeats { self.reported.len() } else { 0 };
        while runs.len() < room {
            let report = match self.unreported.pop_front() {
                Some(report) => report,
                None if left == 0 => return,
                None => {
                    left -= 1;
                    let Some(report) = self.reported.pop_front() else { return };
                    report
                }
            };
            runs.push((report.start, report.length));
            if report.times > 1 && self.reported.len() < GAPS_MAX {
                self.reported.push_back(Report { times: report.times - 1, ..report });
            }
        }
    }

    /// How long a gap may stay open.
    fn window(&self, timing: Timing) -> Nanos {
        let start = timing.srtt.map_or(WINDOW_INITIAL, |srtt| srtt / WINDOW_SHARE);
        let most = timing.srtt.unwrap_or(timing.timeout).max(self.window_floor);
        start.max(WINDOW_MIN).max(self.window_floor).max(self.window_learnt.min(most))
    }

    fn settle_oldest(&mut self, timing: Timing, now: Nanos) {
        let Some(gap) = self.open.pop_front() else { return };
        let length = gap.end - gap.start;
        // An outage loses everything, so it says nothing about the path's usual loss.
        let is_outage = length >= OUTAGE_PACKETS
            && gap.silence > timing.timeout.saturating_mul(OUTAGE_TIMEOUTS);
        if !is_outage {
            let left = self.drops_left_at(now);
            let dropped = length.min(left.saturating_mul(LIST_PACKETS_MAX));
            self.drops_left = left - dropped.div_ceil(LIST_PACKETS_MAX);
            self.counts.dropped += dropped;
            self.counts.lost += length - dropped;
            self.counts.runs += u64::from(length > dropped);
        }
        self.calm_runs += 1;
        if self.calm_runs >= CALM_RUNS {
            self.window_learnt = 0;
        }
        push_bounded(&mut self.lost, gap);
        let mut start = gap.start;
        while start < gap.end && self.unreported.len() < GAPS_MAX {
            let length = u32::try_from(gap.end - start).unwrap_or(u32::MAX);
            self.unreported.push_back(Report { start, length, times: REPORTS });
            start += u64::from(length);
        }
    }

    /// Records a packet that fills a gap.
    fn filled(&mut self, number: u64, timing: Timing, now: Nanos) {
        if take(&mut self.open, number).is_some() {
            return;
        }
        if let Some(gap) = take(&mut self.lost, number) {
            self.counts.found += 1;
            self.calm_runs = 0;
            // The window that would have sufficed, plus a quarter.
            let delay = now.saturating_sub(gap.seen_at);
            let most = timing.srtt.unwrap_or(timing.timeout);
            self.window_learnt = self.window_learnt.max(delay + delay / 4).min(most);
        }
    }
}

fn push_bounded(gaps: &mut VecDeque<Gap>, gap: Gap) {
    if gaps.len() == GAPS_MAX {
        gaps.pop_front();
    }
    gaps.push_back(gap);
}

/// Removes a number from its gap, which shrinks or splits in two.
fn take(gaps: &mut VecDeque<Gap>, number: u64) -> Option<Gap> {
    let index = gaps.partition_point(|gap| gap.end <= number);
    let gap = *gaps.get(index).filter(|gap| gap.start <= number)?;
    let before = (gap.start < number).then_some(Gap { end: number, ..gap });
    let after = (number + 1 < gap.end).then_some(Gap { start: number + 1, ..gap });
    match (before, after) {
        (None, None) => drop(gaps.remove(index)),
        (Some(one), None) | (None, Some(one)) => gaps[index] = one,
        (Some(before), Some(after)) => {
            gaps[index] = before;
            gaps.insert(index + 1, after);
            if gaps.len() > GAPS_MAX {
                gaps.pop_front();
            }
        }
    }
    Some(gap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const MILLISECOND: Nanos = 1_000_000;
    const TIMING: Timing = Timing { srtt: Some(25 * MILLISECOND), timeout: 75 * MILLISECOND };
    const WINDOW: Nanos = 25 * MILLISECOND / WINDOW_SHARE;

    fn counts(gaps: &Gaps) -> (u64, u64, u64) {
        let LossCounts { lost, runs, found, .. } = gaps.counts();
        (lost, runs, found)
    }

    fn reports(gaps: &mut Gaps, repeats: bool) -> Vec<(u64, u32)> {
        let mut runs = Vec::new();
        gaps.take_reports(100, repeats, &mut runs);
        runs
    }

    #[test]
    fn what_the_host_dropped_is_no_loss_of_the_path() {
        let mut gaps = Gaps::new(0);
        let all = |gaps: &Gaps| (gaps.counts().lost, gaps.counts().runs, gaps.counts().dropped);
        for number in [0, 11, 80, 83] {
            gaps.packet_received(number, TIMING, 0);
        }
        assert!(gaps.is_any_open());
        gaps.host_dropped(2, 0);
        gaps.host_dropped(2, 0);
        assert!(gaps.settle(TIMING, WINDOW));
        // A list of ten, and one of the next 68; four of those and two more were lost.
        assert_eq!(all(&gaps), (6, 2, 74));
        let sent_again = [(1, 10), (12, 68), (81, 2)];
        assert_eq!(reports(&mut gaps, false), sent_again);
        gaps.host_dropped(3, WINDOW);
        let late = WINDOW + HOST_DROPS_LIFE;
        gaps.packet_received(85, TIMING, late);
        gaps.settle(TIMING, late + WINDOW);
        assert_eq!(all(&gaps), (7, 3, 74), "an old drop was of something else");
        gaps.host_dropped(1, late);
        assert_eq!(gaps.drops_left_at(late), 0, "the count only grows");
    }

    #[test]
    fn a_gap_is_lost_after_the_window_and_not_before() {
        let mut gaps = Gaps::new(0);
        for number in [7, 8, 10, 14] {
            gaps.packet_received(number, TIMING, 0);
        }
        assert_eq!(gaps.next_at(TIMING), Some(WINDOW));
        assert!(!gaps.settle(TIMING, WINDOW - 1));
        assert!(gaps.settle(TIMING, WINDOW));
        assert_eq!(counts(&gaps), (4, 2, 0), "what came before the first packet does not count");
        assert_eq!(reports(&mut gaps, false), [(9, 1), (11, 3)]);
        assert_eq!(gaps.next_at(TIMING), None);
    }

    #[test]
    fn what_comes_within_the_window_is_not_lost() {
        let mut gaps = Gaps::new(3 * MILLISECOND);
        for number in [0, 5, 3, 1, 2] {
            gaps.packet_received(number, TIMING, 0);
        }
        gaps.packet_received(4, TIMING, 3 * MILLISECOND - 1);
        assert!(!gaps.settle(TIMING, 1_000 * MILLISECOND));
        assert_eq!(counts(&gaps), (0, 0, 0));
    }

    #[test]
    fn what_comes_too_late_widens_the_window_until_losses_are_real_again() {
        let mut gaps = Gaps::new(0);
        gaps.packet_received(0, TIMING, 0);
        gaps.packet_received(2, TIMING, 0);
        gaps.settle(TIMING, WINDOW);
        gaps.packet_received(1, TIMING, 4 * MILLISECOND);
        assert_eq!(counts(&gaps), (1, 1, 1));
        gaps.packet_received(4, TIMING, 10 * MILLISECOND);
        assert_eq!(gaps.next_at(TIMING), Some(15 * MILLISECOND));
        // Never longer than a round trip.
        gaps.settle(TIMING, 15 * MILLISECOND);
        gaps.packet_received(3, TIMING, 500 * MILLISECOND);
        gaps.packet_received(6, TIMING, 500 * MILLISECOND);
        assert_eq!(gaps.next_at(TIMING), Some(525 * MILLISECOND));
        for run in 0..u64::from(CALM_RUNS) {
            assert_eq!(gaps.window(TIMING), 25 * MILLISECOND, "run {run}");
            gaps.packet_received(8 + 2 * run, TIMING, 600 * MILLISECOND);
            gaps.settle_oldest(TIMING, 0);
        }
        assert_eq!(gaps.window(TIMING), WINDOW);
    }

    #[test]
    fn a_loss_is_reported_again_in_later_rounds_only() {
        let mut gaps = Gaps::new(0);
        gaps.packet_received(0, TIMING, 0);
        gaps.packet_received(2, TIMING, 0);
        gaps.settle(TIMING, WINDOW);
        assert_eq!(reports(&mut gaps, true), [(1, 1)]);
        assert_eq!(reports(&mut gaps, false), []);
        for _ in 1..REPORTS {
            assert!(gaps.is_repeating());
            assert_eq!(reports(&mut gaps, true), [(1, 1)]);
        }
        assert!(!gaps.is_repeating());
    }

    #[test]
    fn an_outage_is_reported_but_is_no_measure_of_the_path() {
        let mut gaps = Gaps::new(0);
        gaps.packet_received(0, TIMING, 0);
        gaps.packet_received(100, TIMING, 1_000 * MILLISECOND);
        gaps.settle(TIMING, 2_000 * MILLISECOND);
        assert_eq!(counts(&gaps), (0, 0, 0));
        assert_eq!(reports(&mut gaps, false), [(1, 99)]);
        // The same number lost without a silence is a burst.
        gaps.packet_received(200, TIMING, 1_001 * MILLISECOND);
        gaps.settle(TIMING, 2_000 * MILLISECOND);
        assert_eq!(counts(&gaps), (99, 1, 0));
    }

    #[test]
    fn memory_is_bounded_whatever_the_numbers_are() {
        let mut gaps = Gaps::new(0);
        gaps.packet_received(0, TIMING, 0);
        for number in 1..10_000 {
            gaps.packet_received(number * 3, TIMING, number);
        }
        gaps.packet_received(1 << 60, TIMING, 10_000);
        assert_eq!(gaps.open.len(), GAPS_MAX);
        gaps.settle(TIMING, u64::MAX);
        assert_eq!(counts(&gaps).1, 10_000);
        assert!(gaps.lost.len() <= GAPS_MAX && gaps.unreported.len() <= GAPS_MAX);
        let last = gaps.lost.back().copied().expect("a run");
        for number in (last.start..last.start + 10_000).step_by(2) {
            gaps.packet_received(number + 1, TIMING, 0);
        }
        assert!(gaps.lost.len() <= GAPS_MAX);
    }

    proptest! {
        /// Compared with a set of numbers: everything neither arrived nor lost is open, and every
        /// loss is real.
        #[test]
        fn agrees_with_a_set_of_numbers(
            steps in proptest::collection::vec((0_u64..60, 0_u64..400_000), 1..120),
        ) {
            let mut gaps = Gaps::new(0);
            let mut here = BTreeSet::new();
            let (mut now, mut lost) = (0, BTreeSet::new());
            let mut found = 0;
            for (number, pause) in steps {
                now += pause;
                gaps.settle(TIMING, now);
                for (start, length) in reports(&mut gaps, false) {
                    for number in start..start + u64::from(length) {
                        prop_assert!(!here.contains(&number) && lost.insert(number));
                    }
                }
                if here.insert(number) {
                    found += u64::from(lost.contains(&number));
                    gaps.packet_received(number, TIMING, now);
                }
            }
            let LossCounts { lost: counted, found: counted_found, .. } = gaps.counts();
            prop_assert_eq!(counted as usize, lost.len());
            prop_assert_eq!(counted_found, found);
            let open: u64 = gaps.open.iter().map(|gap| gap.end - gap.start).sum();
            let range = here.iter().next_back().unwrap() + 1;
            prop_assert!(open + lost.len() as u64 <= range);
        }
    }
}
