//! The openings that led a store to its current state, and how far each had come, so that the store
//! can tell whether it contains an earlier milestone.

use sealane_proto::freshness::milestone::{MILESTONE_BYTES, Milestone};

/// Number of milestones in a checkpoint.
pub const MILESTONES: usize = 16;

/// The openings so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Passage {
    /// Where this opening began.
    start: Option<Milestone>,
    /// How far earlier openings had come when the next one began, latest first. Limited to
    /// [`MILESTONES`] − 1 openings, and without openings that changed nothing.
    earlier: Vec<Milestone>,
}

impl Passage {
    /// Parses the milestones of a checkpoint.
    #[must_use]
    pub fn decode(milestones: &[[u8; MILESTONE_BYTES]; MILESTONES]) -> Self {
        let [start, earlier @ ..] = milestones;
        let earlier = earlier.iter().map_while(Milestone::decode).collect();
        Self { start: Milestone::decode(start), earlier }
    }

    /// Encodes the milestones of a checkpoint; missing ones are zeros.
    #[must_use]
    pub fn encode(&self) -> [[u8; MILESTONE_BYTES]; MILESTONES] {
        let mut milestones = [[0; MILESTONE_BYTES]; MILESTONES];
        let known = [self.start].into_iter().chain(self.earlier.iter().copied().map(Some));
        for (bytes, known) in milestones.iter_mut().zip(known) {
            *bytes = known.map_or([0; MILESTONE_BYTES], |milestone| milestone.encode());
        }
        milestones
    }

    /// Ends the opening. `found` is how far recovery got, and `log_end` the end of its log.
    pub fn end(&mut self, found: Milestone, log_end: u64) {
        // An opening that changed nothing had no milestone of its own, unless it was the first.
        let has_changes = !self.is_start_of(found.opening, log_end);
        if has_changes || self.earlier.is_empty() {
            self.earlier.insert(0, found);
            self.earlier.truncate(MILESTONES - 1);
        }
    }

    /// Begins the next opening.
    pub fn begin(&mut self, start: Milestone) {
        self.start = Some(start);
    }

    /// The milestone to report for an opening: that of the previous one as long as nothing has
    /// changed. Thus openings that change nothing can be left out.
    #[must_use]
    pub fn milestone(&self, reached: Milestone) -> Milestone {
        let is_unchanged = self.is_start_of(reached.opening, reached.log_flushed);
        let before = self.earlier.first().filter(|_| is_unchanged);
        before.copied().unwrap_or(reached)
    }

    /// How far earlier openings had come, latest first, without those that wrote nothing to the
    /// log.
    #[must_use]
    pub fn earlier(&self) -> &[Milestone] {
        &self.earlier
    }

    /// Whether an opening began with its log ending there. Every change makes the log longer; a
    /// checkpoint without changes doesn't.
    fn is_start_of(&self, opening: [u8; 16], log_end: u64) -> bool {
        self.start.is_some_and(|start| start.opening == opening && start.log_flushed == log_end)
    }

    /// Whether an opening that has reached this point contains a milestone.
    #[must_use]
    pub fn contains(&self, reached: Milestone, told: &Milestone) -> bool {
        reached.covers(told) || self.earlier.iter().any(|earlier| earlier.covers(told))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milestone(opening: u8, log_flushed: u64) -> Milestone {
        Milestone { opening: [opening; 16], checkpoint: u64::from(opening), log_flushed }
    }

    /// A passage of openings that each advanced by one page.
    fn after(openings: u8) -> Passage {
        let mut passage = Passage::default();
        for opening in 1..=openings {
            passage.begin(milestone(opening, 10));
            passage.end(milestone(opening, 11), 11);
        }
        passage.begin(milestone(openings + 1, 10));
        passage
    }

    #[test]
    fn it_survives_encoding() {
        for openings in [0, 1, 5, 60] {
            let passage = after(openings);
            assert_eq!(Passage::decode(&passage.encode()), passage);
        }
        let nothing = [[0; MILESTONE_BYTES]; MILESTONES];
        assert_eq!(Passage::decode(&nothing), Passage::default());
    }

    #[test]
    fn it_contains_what_each_opening_had_when_the_next_began_and_no_more() {
        let passage = after(3);
        let reached = milestone(4, 12);
        for opening in 1..=3 {
            assert!(passage.contains(reached, &milestone(opening, 11)));
            assert!(!passage.contains(reached, &milestone(opening, 12)), "undone");
        }
        assert!(passage.contains(reached, &milestone(4, 12)));
        assert!(!passage.contains(reached, &milestone(4, 13)));
        assert!(!passage.contains(reached, &milestone(9, 1)), "another history");
    }

    #[test]
    fn the_oldest_openings_are_forgotten_and_their_milestones_with_them() {
        let passage = after(MILESTONES as u8);
        let reached = milestone(99, 12);
        assert!(!passage.contains(reached, &milestone(1, 11)));
        assert!(passage.contains(reached, &milestone(2, 11)));
    }

    #[test]
    fn openings_that_change_nothing_are_not_recorded() {
        let mut passage = after(1);
        let told = milestone(1, 11);
        for opening in 2..200 {
            let start = milestone(opening, 10);
            passage.begin(start);
            assert_eq!(passage.milestone(start), told);
            passage.end(start, 10);
            assert!(passage.contains(start, &told));
        }
        let merged = Milestone { checkpoint: 500, ..milestone(199, 10) };
        assert_eq!(
            passage.milestone(merged),
            told,
            "a checkpoint of what was found changes nothing"
        );
        let reached = milestone(199, 11);
        assert_eq!(passage.milestone(reached), reached, "after a change");
    }

    #[test]
    fn an_opening_whose_changes_were_all_lost_is_recorded() {
        let mut passage = after(1);
        let start = milestone(2, 10);
        passage.begin(start);
        passage.end(start, 11);
        assert_eq!(passage.earlier(), [start, milestone(1, 11)]);
    }

    #[test]
    fn the_first_opening_is_recorded_even_if_it_changed_nothing() {
        let (first, second) = (milestone(1, 0), milestone(2, 0));
        let mut passage = Passage::default();
        passage.begin(first);
        assert_eq!(passage.milestone(first), first);
        passage.end(first, 0);
        passage.begin(second);
        assert!(passage.contains(second, &first));
    }
}
