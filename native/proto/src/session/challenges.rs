//! Challenges: whether a path answers, and whether it carries packets of full size (RFC 8899).
//!
//! Until a path is validated, and again when full-size packets seem to vanish, each challenge leaves
//! twice: padded to the session's largest datagram, and small behind it. An answer to a padded one says
//! that the path will do. Small answers alone say that it is too narrow.

use std::collections::VecDeque;

use crate::link::Nanos;

/// Interval of challenges until one is answered, and the least interval of probes.
pub const CHALLENGE_INTERVAL: Nanos = 100_000_000;
/// Challenges that may be answered.
const OUTSTANDING_MAX: usize = 16;
/// Pairs of which the small one alone was answered, before that means anything: either may be lost.
/// A path that loses 30 % of what it can carry makes as many one time in 1e5; five, one in 1500.
const SMALL_ANSWERS_MAX: u32 = 8;

#[derive(Debug, Clone, Copy)]
struct Challenge {
    token: u64,
    sent_at: Nanos,
    is_full: bool,
}

/// A challenge is answered in pairs of sizes.
#[derive(Debug, Clone, Copy, Default)]
struct Search {
    is_small_next: bool,
    small_answers: u32,
}

/// What an answer shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The path answers, at the size that was asked about; the round trip.
    Validated(Nanos),
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

    /// Begins to ask for the full size, of a path of which nothing is known: what was sent so far went
    /// another way.
    pub fn search(&mut self, now: Nanos) {
        *self = Self { due: Some(now), search: Some(Search::default()), ..Self::default() };
    }

    /// Whether full size is being asked for.
    #[must_use]
    pub fn is_searching(&self) -> bool {
        self.search.is_some()
    }

    /// One leaves with this token; whether it is to be padded.
    pub fn sent(&mut self, token: u64, timeout: Nanos, now: Nanos) -> bool {
        let again = now.saturating_add(timeout.max(CHALLENGE_INTERVAL));
        let mut is_full = false;
        self.due = Some(again);
        if let Some(search) = &mut self.search {
            is_full = !search.is_small_next;
            search.is_small_next = is_full;
            if is_full {
                self.due = Some(now);
            }
        }
        if self.outstanding.len() == OUTSTANDING_MAX {
            self.outstanding.pop_front();
        }
        self.outstanding.push_back(Challenge { token, sent_at: now, is_full });
        is_full
    }

    /// An answer arrived; `None` if it is none to a challenge of this end.
    pub fn answered(&mut self, token: u64, now: Nanos) -> Option<Answer> {
        let index = self.outstanding.iter().position(|sent| sent.token == token)?;
        let found = self.outstanding[index];
        let Some(search) = self.search.as_mut().filter(|_| !found.is_full) else {
            *self = Self::default();
            return Some(Answer::Validated(now.saturating_sub(found.sent_at)));
        };
        // Of pairs that were lost as a whole, in an outage, nothing is known.
        search.small_answers += 1;
        let is_too_narrow = search.small_answers >= SMALL_ANSWERS_MAX;
        self.outstanding.remove(index);
        Some(if is_too_narrow { Answer::TooNarrow } else { Answer::Small })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Nanos = 30_000_000;

    /// Sends what is due, from one due time to the next; (token, is padded) of each.
    fn send(challenges: &mut Challenges, count: u64) -> Vec<(u64, bool)> {
        (0..count)
            .map(|token| {
                let due = challenges.due().unwrap();
                (token, challenges.sent(token, TIMEOUT, due))
            })
            .collect()
    }

    #[test]
    fn a_search_sends_both_sizes_back_to_back_and_then_pauses() {
        let mut challenges = Challenges::default();
        challenges.search(0);
        let sizes: Vec<_> = send(&mut challenges, 4).iter().map(|(_, is_full)| *is_full).collect();
        assert_eq!(sizes, [true, false, true, false]);
        assert_eq!(challenges.due(), Some(2 * CHALLENGE_INTERVAL));
    }

    #[test]
    fn an_answer_to_a_padded_one_validates_and_ends_the_search() {
        let mut challenges = Challenges::default();
        challenges.search(0);
        let sent = send(&mut challenges, 2);
        assert_eq!(challenges.answered(999, 5), None);
        assert_eq!(challenges.answered(sent[1].0, 5), Some(Answer::Small));
        assert_eq!(challenges.answered(sent[1].0, 5), None, "once");
        assert!(challenges.is_searching());
        assert_eq!(challenges.answered(sent[0].0, 7), Some(Answer::Validated(7)));
        assert_eq!((challenges.is_searching(), challenges.due()), (false, None));
    }

    #[test]
    fn small_answers_alone_mean_a_narrow_path_after_enough_tries() {
        let mut challenges = Challenges::default();
        challenges.search(0);
        let sent = send(&mut challenges, 2 * u64::from(SMALL_ANSWERS_MAX));
        let small: Vec<_> = sent.iter().filter(|(_, is_full)| !is_full).collect();
        let last = small.len() - 1;
        for (token, _) in &small[..last] {
            assert_eq!(challenges.answered(*token, 5), Some(Answer::Small));
        }
        assert_eq!(challenges.answered(small[last].0, 5), Some(Answer::TooNarrow));
    }

    #[test]
    fn an_outage_says_nothing_of_the_size() {
        let mut challenges = Challenges::default();
        challenges.search(0);
        // Many pairs are lost, and when the path is back, a padded one by chance.
        let sent = send(&mut challenges, 40);
        let (small, full) = (sent[37].0, sent[38].0);
        assert_eq!(challenges.answered(small, 5), Some(Answer::Small));
        assert!(matches!(challenges.answered(full, u64::MAX), Some(Answer::Validated(_))));
    }

    #[test]
    fn probes_are_small_and_any_answer_ends_them() {
        let mut challenges = Challenges::default();
        challenges.start(3);
        challenges.start(9);
        assert_eq!(challenges.due(), Some(3));
        let sent = send(&mut challenges, 20);
        assert!(sent.iter().all(|(_, is_full)| !is_full));
        assert_eq!(challenges.outstanding.len(), OUTSTANDING_MAX);
        assert_eq!(challenges.answered(sent[0].0, 5), None, "long ago");
        assert!(matches!(challenges.answered(sent[19].0, u64::MAX), Some(Answer::Validated(_))));
        assert_eq!(challenges.due(), None);
    }
}
