//! Challenges: whether a path answers, and whether it carries packets of full size (RFC 8899).
//!
//! Until a path is validated, and again when full-size packets seem to vanish, challenges leave in rounds:
//! padded to the session's largest datagram (to that of each unit, while its unit is being looked for),
//! and small behind them. Answers are padded as what they answer. One to a padded challenge says that
//! the path will do. Small answers alone say that it is too narrow.

use std::collections::VecDeque;

use crate::link::Nanos;

use super::units::Units;

/// Interval of challenges until one is answered, and the least interval of probes.
pub const CHALLENGE_INTERVAL: Nanos = 100_000_000;
/// Least interval of rounds while one of their smaller sizes is answered: past a short burst of loss.
const ROUND_INTERVAL_MIN: Nanos = 20_000_000;
/// Challenges that may be answered.
const OUTSTANDING_MAX: usize = 32;
/// Pairs of which the small one alone was answered, before that means anything: either may be lost.
/// A path that loses 30 % of what it can carry makes as many one time in 1e5; five, one in 1500.
const SMALL_ANSWERS_MAX: u32 = 8;

#[derive(Debug, Clone, Copy)]
struct Challenge {
    token: u64,
    sent_at: Nanos,
    /// The unit for whose packets it was padded; `None`: a small one.
    unit_bytes: Option<u16>,
}

/// A challenge is answered in rounds of sizes: each unit's, the largest first, and a small one.
#[derive(Debug, Clone, Copy)]
struct Search {
    units: Units,
    next: usize,
    /// A padded one was answered.
    has_carried: bool,
    small_answers: u32,
}

/// What an answer shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The path answers; the round trip.
    Alive(Nanos),
    /// The path answers, and packets of this unit pass both ways.
    Carried {
        /// In bytes.
        unit_bytes: u16,
        /// The round trip.
        rtt: Nanos,
    },
    /// The path answers small packets only, so far.
    Small,
    /// The path answers small packets, and none of the padded ones that left right before them.
    TooNarrow,
}

/// Challenges of one end.
#[derive(Debug, Default)]
pub struct Challenges {
    /// The oldest first.
    outstanding: VecDeque<Challenge>,
    due: Option<Nanos>,
    search: Option<Search>,
}

impl Challenges {
    /// When the next is to be sent.
    #[must_use]
    pub fn due(&self) -> Option<Nanos> {
        self.due
    }

    /// Begins to send small ones, unless some are being sent.
    pub fn start(&mut self, now: Nanos) {
        self.due.get_or_insert(now);
    }

    /// Begins to ask for these units, of a path of which nothing is known: what was sent so far went
    /// another way.
    pub fn search(&mut self, units: Units, now: Nanos) {
        let search = Search { units, next: 0, has_carried: false, small_answers: 0 };
        *self = Self { due: Some(now), search: Some(search), ..Self::default() };
    }

    /// Asks for fewer units from now on, if it asks at all.
    pub fn narrow(&mut self, units: Units) {
        if let Some(search) = &mut self.search {
            let has_carried = false;
            *search = Search { units, next: 0, has_carried, small_answers: 0 };
        }
    }

    /// What was asked for is known.
    pub fn stop(&mut self) {
        *self = Self::default();
    }

    /// Whether units are being asked for.
    #[must_use]
    pub fn is_searching(&self) -> bool {
        self.search.is_some()
    }

    /// One leaves with this token; the unit for whose packets it is to be padded, if it is.
    pub fn sent(&mut self, token: u64, timeout: Nanos, now: Nanos) -> Option<u16> {
        self.due = Some(now.saturating_add(timeout.max(CHALLENGE_INTERVAL)));
        let mut unit_bytes = None;
        if let Some(search) = &mut self.search {
            unit_bytes = search.units.get(search.next);
            search.next = if unit_bytes.is_some() { search.next + 1 } else { 0 };
            if unit_bytes.is_some() {
                self.due = Some(now);
            }
        }
        if self.outstanding.len() == OUTSTANDING_MAX {
            self.outstanding.pop_front();
        }
        self.outstanding.push_back(Challenge { token, sent_at: now, unit_bytes });
        unit_bytes
    }

    /// An answer arrived; `None` if it is none to a challenge of this end.
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
                // The larger ones were lost, or will not pass: another round shows it.
                let soon = now.saturating_add(rtt.max(ROUND_INTERVAL_MIN));
                self.due = self.due.map(|due| due.min(soon));
            }
            return Some(Answer::Carried { unit_bytes, rtt });
        }
        // Of rounds that were lost as a whole, in an outage, nothing is known.
        search.small_answers += u32::from(!search.has_carried);
        let is_too_narrow = search.small_answers >= SMALL_ANSWERS_MAX;
        Some(if is_too_narrow { Answer::TooNarrow } else { Answer::Small })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Nanos = 30_000_000;

    const UNIT: u16 = 1408;

    fn searching(units: &[u16]) -> Challenges {
        let mut challenges = Challenges::default();
        challenges.search(Units::falling(units).unwrap(), 0);
        challenges
    }

    /// Sends what is due, from one due time to the next; (token, unit it is padded for) of each.
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
        // Many pairs are lost, and when the path is back, a padded one by chance.
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
