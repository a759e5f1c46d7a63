//! Challenges: test whether a path answers, and whether it carries full-size packets (RFC 8899).
//!
//! Until a path is validated, and again when full-size packets seem to vanish, challenges are sent
//! in rounds: padded to the session's largest datagram (to that of each candidate unit during the
//! search for the unit), followed by a small one. Answers are padded like the challenge. An answer
//! to a padded challenge shows that the path is usable. Answers to small ones alone mean that it is
//! too narrow. Before the round-trip time is known, rounds start close together and double their
//! distance (decision 79).

use std::collections::VecDeque;

use crate::link::Nanos;

use super::units::Units;

/// Shortest interval of probes, and a guess of the round-trip time where there is no sample.
pub const CHALLENGE_INTERVAL: Nanos = 100_000_000;
/// Shortest interval of rounds: longer than a short loss burst. Before the round-trip time is known,
/// it doubles from this …
const ROUND_INTERVAL_MIN: Nanos = 20_000_000;
/// … up to this.
const ROUND_INTERVAL_MAX: Nanos = 320_000_000;
/// Most unanswered challenges kept.
const OUTSTANDING_MAX: usize = 32;
/// Pairs of which only the small one was answered before the path counts as too narrow, since
/// either may be lost. A path with 30 % loss produces this many once in 1e5; it produces five once
/// in 1500.
const SMALL_ANSWERS_MAX: u32 = 8;

#[derive(Debug, Clone, Copy)]
struct Challenge {
    token: u64,
    sent_at: Nanos,
    /// The unit to whose packets it was padded; `None`: a small one.
    unit_bytes: Option<u16>,
}

/// A search in rounds of sizes: each unit, largest first, then a small one.
#[derive(Debug, Clone, Copy)]
struct Search {
    units: Units,
    next: usize,
    /// Whether a padded challenge was answered.
    has_carried: bool,
    small_answers: u32,
    /// Complete rounds that were sent before the round-trip time was known.
    rounds: u32,
}

impl Search {
    fn new(units: Units) -> Self {
        Self { units, next: 0, has_carried: false, small_answers: 0, rounds: 0 }
    }

    /// The pause after a round while the round-trip time is unknown.
    fn next_pause(&mut self) -> Nanos {
        let pause = ROUND_INTERVAL_MIN.saturating_mul(1 << self.rounds.min(16));
        self.rounds += 1;
        pause.min(ROUND_INTERVAL_MAX)
    }
}

/// The meaning of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The path answers, with this round-trip time.
    Alive(Nanos),
    /// The path answers, and packets of this unit pass in both directions.
    Carried {
        /// In bytes.
        unit_bytes: u16,
        /// The round-trip time.
        rtt: Nanos,
    },
    /// So far the path answers only small packets.
    Small,
    /// The path answers small packets but none of the padded ones sent just before them.
    TooNarrow,
}

/// One end's challenges on a path.
#[derive(Debug, Default)]
pub struct Challenges {
    /// Unanswered ones, oldest first.
    outstanding: VecDeque<Challenge>,
    due: Option<Nanos>,
    search: Option<Search>,
}

impl Challenges {
    /// When the next one is due.
    #[must_use]
    pub fn due(&self) -> Option<Nanos> {
        self.due
    }

    /// Starts to send small ones, unless some are being sent.
    pub fn start(&mut self, now: Nanos) {
        self.due.get_or_insert(now);
    }

    /// Sends the next one now.
    pub fn hurry(&mut self, now: Nanos) {
        self.due = Some(now);
    }

    /// When the challenge with this token left.
    #[must_use]
    pub fn sent_at(&self, token: u64) -> Option<Nanos> {
        self.outstanding.iter().find(|sent| sent.token == token).map(|sent| sent.sent_at)
    }

    /// Starts to test for these units on a path about which nothing is known: earlier challenges
    /// went another way.
    pub fn search(&mut self, units: Units, now: Nanos) {
        *self = Self { due: Some(now), search: Some(Search::new(units)), ..Self::default() };
    }

    /// Tests only for these units from now on, if a search is running.
    pub fn narrow(&mut self, units: Units) {
        if let Some(search) = &mut self.search {
            *search = Search { rounds: search.rounds, ..Search::new(units) };
        }
    }

    /// Ends the search or the probing.
    pub fn stop(&mut self) {
        *self = Self::default();
    }

    /// Whether a search for units is running.
    #[must_use]
    pub fn is_searching(&self) -> bool {
        self.search.is_some()
    }

    /// Records that a challenge with this token leaves; returns the unit to pad it for, if any.
    /// `timeout`: how long an answer may take; `None` before the first sample of a round trip.
    pub fn sent(&mut self, token: u64, timeout: Option<Nanos>, now: Nanos) -> Option<u16> {
        let mut unit_bytes = None;
        let mut pause =
            timeout.map_or(CHALLENGE_INTERVAL, |timeout| timeout.max(CHALLENGE_INTERVAL));
        if let Some(search) = &mut self.search {
            unit_bytes = search.units.get(search.next);
            if unit_bytes.is_some() {
                search.next += 1;
                pause = 0;
            } else {
                search.next = 0;
                if timeout.is_none() {
                    pause = search.next_pause();
                }
            }
        }
        self.due = Some(now.saturating_add(pause));
        if self.outstanding.len() == OUTSTANDING_MAX {
            self.outstanding.pop_front();
        }
        self.outstanding.push_back(Challenge { token, sent_at: now, unit_bytes });
        unit_bytes
    }

    /// Processes an answer; `None` if it answers no challenge of this end.
    pub fn answered(&mut self, token: u64, now: Nanos) -> Option<Answer> {
        let index = self.outstanding.iter().position(|sent| sent.token == token)?;
        let found = self.outstanding[index];
        let rtt = now.saturating_sub(found.sent_at);
        let Some(search) = &mut self.search else {
            self.stop();
            return Some(Answer::Alive(rtt));
        };
        self.outstanding.remove(index);
        if let Some(unit_bytes) = found.unit_bytes {
            search.has_carried = true;
            if search.next == 0 && search.units.get(0) != Some(unit_bytes) {
                // The larger ones were lost or do not pass; another round decides.
                let soon = now.saturating_add(rtt.max(ROUND_INTERVAL_MIN));
                self.due = self.due.map(|due| due.min(soon));
            }
            return Some(Answer::Carried { unit_bytes, rtt });
        }
        // Rounds that were lost completely, in an outage, say nothing about the size.
        search.small_answers += u32::from(!search.has_carried);
        let is_too_narrow = search.small_answers >= SMALL_ANSWERS_MAX;
        Some(if is_too_narrow { Answer::TooNarrow } else { Answer::Small })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Option<Nanos> = Some(30_000_000);

    const UNIT: u16 = 1408;

    fn searching(units: &[u16]) -> Challenges {
        let mut challenges = Challenges::default();
        challenges.search(Units::descending(units).unwrap(), 0);
        challenges
    }

    /// Sends `count` challenges at their due times; returns the token and padded unit of each.
    fn send(challenges: &mut Challenges, count: u64) -> Vec<(u64, Option<u16>)> {
        (0..count)
            .map(|token| {
                let due = challenges.due().unwrap();
                (token, challenges.sent(token, TIMEOUT, due))
            })
            .collect()
    }

    #[test]
    fn a_search_sends_both_sizes_back_to_back_and_then_pauses() {
        let mut challenges = searching(&[UNIT]);
        let sizes: Vec<_> = send(&mut challenges, 4).iter().map(|(_, unit)| *unit).collect();
        assert_eq!(sizes, [Some(UNIT), None, Some(UNIT), None]);
        assert_eq!(challenges.due(), Some(2 * CHALLENGE_INTERVAL));
    }

    #[test]
    fn rounds_come_ever_later_until_a_round_trip_is_known() {
        let mut challenges = searching(&[UNIT]);
        let mut pauses = Vec::new();
        for token in 0..18 {
            let now = challenges.due().unwrap();
            challenges.sent(token, None, now);
            pauses.push((challenges.due().unwrap() - now) / 1_000_000);
        }
        let expected = [20, 40, 80, 160, 320, 320, 320, 320, 320].map(|pause| [0, pause]);
        assert_eq!(pauses, expected.concat());
        challenges.narrow(Units::fixed(UNIT));
        let now = challenges.due().unwrap();
        challenges.sent(18, None, now);
        challenges.sent(19, None, now);
        assert_eq!(challenges.due(), Some(now + ROUND_INTERVAL_MAX), "the search goes on");
        challenges.sent(20, None, now);
        challenges.sent(21, TIMEOUT, now);
        assert_eq!(challenges.due(), Some(now + CHALLENGE_INTERVAL));
    }

    #[test]
    fn a_round_has_every_size_and_the_small_one_last() {
        let mut challenges = searching(&[8896, UNIT]);
        let sizes: Vec<_> = send(&mut challenges, 4).iter().map(|(_, unit)| *unit).collect();
        assert_eq!(sizes, [Some(8896), Some(UNIT), None, Some(8896)]);
        challenges.narrow(Units::fixed(UNIT));
        let sizes: Vec<_> = send(&mut challenges, 3).iter().map(|(_, unit)| *unit).collect();
        assert_eq!(sizes, [Some(UNIT), None, Some(UNIT)]);
    }

    #[test]
    fn a_path_that_carries_a_smaller_unit_is_not_too_narrow() {
        let mut challenges = searching(&[8896, UNIT]);
        for round in 0..2 * u64::from(SMALL_ANSWERS_MAX) {
            let first = 3 * round;
            for token in first..first + 3 {
                challenges.sent(token, TIMEOUT, 0);
            }
            assert!(matches!(challenges.answered(first + 1, 5), Some(Answer::Carried { .. })));
            assert_eq!(challenges.answered(first + 2, 5), Some(Answer::Small));
        }
    }

    #[test]
    fn an_answer_to_a_padded_one_says_which_unit_passes() {
        let mut challenges = searching(&[UNIT]);
        let sent = send(&mut challenges, 2);
        assert_eq!(challenges.answered(999, 5), None);
        assert_eq!(challenges.answered(sent[1].0, 5), Some(Answer::Small));
        assert_eq!(challenges.answered(sent[1].0, 5), None, "once");
        assert!(challenges.is_searching());
        let carried = Answer::Carried { unit_bytes: UNIT, rtt: 7 };
        assert_eq!(challenges.answered(sent[0].0, 7), Some(carried));
        challenges.stop();
        assert_eq!((challenges.is_searching(), challenges.due()), (false, None));
    }

    #[test]
    fn small_answers_alone_mean_a_narrow_path_after_enough_tries() {
        let mut challenges = searching(&[UNIT]);
        let sent = send(&mut challenges, 2 * u64::from(SMALL_ANSWERS_MAX));
        let small: Vec<_> = sent.iter().filter(|(_, unit)| unit.is_none()).collect();
        let last = small.len() - 1;
        for (token, _) in &small[..last] {
            assert_eq!(challenges.answered(*token, 5), Some(Answer::Small));
        }
        assert_eq!(challenges.answered(small[last].0, 5), Some(Answer::TooNarrow));
    }

    #[test]
    fn an_outage_says_nothing_of_the_size() {
        let mut challenges = searching(&[UNIT]);
        // Many pairs are lost; when the path is back, a padded one happens to be lost, too.
        let sent = send(&mut challenges, 40);
        let (small, full) = (sent[37].0, sent[38].0);
        assert_eq!(challenges.answered(small, 5), Some(Answer::Small));
        assert!(matches!(challenges.answered(full, u64::MAX), Some(Answer::Carried { .. })));
    }

    #[test]
    fn probes_are_small_and_any_answer_ends_them() {
        let mut challenges = Challenges::default();
        challenges.start(3);
        challenges.start(9);
        assert_eq!(challenges.due(), Some(3));
        let sent = send(&mut challenges, 40);
        assert!(sent.iter().all(|(_, unit)| unit.is_none()));
        assert_eq!(challenges.outstanding.len(), OUTSTANDING_MAX);
        assert_eq!(challenges.answered(sent[0].0, 5), None, "long ago");
        assert!(matches!(challenges.answered(sent[39].0, u64::MAX), Some(Answer::Alive(_))));
        assert_eq!(challenges.due(), None);
    }
}
