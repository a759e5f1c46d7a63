//! The opening and mark of a change, and how far the openings of a store had come. With them, a
//! gateway that sends changes again after a restart leaves out those that the store contains or has
//! something newer of (`docs/understand/crash-consistency.md` §4).

use super::milestone::{MILESTONE_BYTES, Milestone};

/// Number of openings in an answer: the current one and earlier ones.
const OPENINGS: usize = 16;
/// Bytes of an answer.
pub const OPENINGS_BYTES: usize = OPENINGS * MILESTONE_BYTES;

/// The opening and mark at which a change was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// Nonce of the opening that made it.
    pub opening: [u8; 16],
    /// Nonce of the previous opening, if there was one.
    pub before: Option<[u8; 16]>,
    /// Number of the log page before which the log contains the change.
    pub mark: u64,
}

/// Whether an opening contains a change that an earlier one made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It contains the change or something newer for the same blocks.
    Contained,
    /// It contains neither the change nor anything newer for the same blocks.
    Missing,
    /// Undecidable, as other gateways have changed something since.
    Unknown,
}

/// An opening of a store, and how far each earlier one had come when the next one began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Openings {
    /// The opening itself; its log page is the current mark.
    pub now: Milestone,
    /// Earlier openings that wrote to the log, latest first, at most 15.
    pub earlier: Vec<Milestone>,
}

impl Openings {
    /// Encodes them: one milestone after the other, then zeros.
    #[must_use]
    pub fn encode(&self) -> [u8; OPENINGS_BYTES] {
        let mut bytes = [0; OPENINGS_BYTES];
        let places = bytes.as_chunks_mut::<MILESTONE_BYTES>().0;
        let all = std::iter::once(&self.now).chain(&self.earlier);
        places.iter_mut().zip(all).for_each(|(place, milestone)| *place = milestone.encode());
        bytes
    }

    /// Decodes them from the beginning of these bytes; None if the store keeps no freshness.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (places, _) = bytes.get(..OPENINGS_BYTES)?.as_chunks::<MILESTONE_BYTES>();
        let mut all = places.iter().map_while(Milestone::decode);
        Some(Self { now: all.next()?, earlier: all.collect() })
    }

    /// This opening with the mark of a change.
    #[must_use]
    pub fn made(&self, mark: u64) -> Made {
        let before = self.earlier.first().map(|before| before.opening);
        Made { opening: self.now.opening, before, mark }
    }

    /// Whether this opening contains a change. `was_absent` says that its gateway has changed
    /// nothing in any later opening, so that everything these wrote to the log is from other
    /// gateways.
    #[must_use]
    pub fn judge(&self, made: &Made, was_absent: bool) -> Verdict {
        if made.opening == self.now.opening {
            return Verdict::Contained;
        }
        let place = |nonce| self.earlier.iter().position(|earlier| earlier.opening == nonce);
        let since = if let Some(own) = place(made.opening) {
            if self.earlier[own].log_flushed >= made.mark {
                return Verdict::Contained;
            }
            own
        } else if let Some(before) = made.before.and_then(place) {
            // An opening that wrote nothing to the log isn't in the list: the change is lost.
            before
        } else {
            return Verdict::Unknown;
        };
        if since > 0 && was_absent { Verdict::Unknown } else { Verdict::Missing }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milestone(opening: u8, log_flushed: u64) -> Milestone {
        Milestone { opening: [opening; 16], checkpoint: 1, log_flushed }
    }

    /// Opening 9, after openings 5 and 3, which had come to pages 20 and 10.
    fn openings() -> Openings {
        Openings { now: milestone(9, 21), earlier: vec![milestone(5, 20), milestone(3, 10)] }
    }

    fn made(opening: u8, before: Option<u8>, mark: u64) -> Made {
        Made { opening: [opening; 16], before: before.map(|before| [before; 16]), mark }
    }

    #[test]
    fn openings_are_decoded_from_their_bytes() {
        let mut openings = openings();
        for count in [0, 2, 15] {
            openings.earlier.resize(count, milestone(7, 8));
            assert_eq!(Openings::decode(&openings.encode()), Some(openings.clone()));
        }
        assert_eq!(Openings::decode(&[0; OPENINGS_BYTES]), None);
        assert_eq!(Openings::decode(&openings.encode()[1..]), None);
    }

    #[test]
    fn a_change_is_contained_if_its_opening_had_come_as_far_as_its_mark() {
        let openings = openings();
        for was_absent in [false, true] {
            let judge = |made| openings.judge(&made, was_absent);
            assert_eq!(judge(made(5, Some(3), 20)), Verdict::Contained);
            assert_eq!(judge(made(5, Some(3), 21)), Verdict::Missing);
            assert_eq!(judge(made(3, None, 10)), Verdict::Contained);
            assert_eq!(
                judge(made(9, Some(5), 99)),
                Verdict::Contained,
                "the same opening has lost nothing"
            );
        }
        assert_eq!(openings.made(30), made(9, Some(5), 30));
    }

    #[test]
    fn the_order_is_unknown_to_a_gateway_that_was_absent_while_others_changed_something() {
        let openings = openings();
        assert_eq!(openings.judge(&made(3, None, 11), true), Verdict::Unknown);
        assert_eq!(openings.judge(&made(3, None, 11), false), Verdict::Missing);
    }

    #[test]
    fn an_opening_that_wrote_nothing_is_identified_by_the_previous_one() {
        let openings = openings();
        assert_eq!(openings.judge(&made(6, Some(5), 21), true), Verdict::Missing);
        assert_eq!(openings.judge(&made(4, Some(3), 11), true), Verdict::Unknown);
        assert_eq!(openings.judge(&made(2, Some(1), 5), false), Verdict::Unknown, "too long ago");
        assert_eq!(openings.judge(&made(2, None, 5), false), Verdict::Unknown);
    }
}
