//! Search for a session's unit: padded challenges of several sizes probe the paths at once (RFC
//! 8899), and the largest size that is answered becomes the unit (`docs/formats/session-wire.md`,
//! "Path MTU").

use crate::link::Nanos;

use super::control::Repeat;

/// Most units that a search may try, which bounds the cost of a round of challenges.
pub const UNIT_CANDIDATES_MAX: usize = 4;
/// Answers of one size after which the search stops waiting for a larger one. A challenge or its
/// answer may be lost; at 1 % packet loss this happens three times in a row once in 1e5.
const ANSWERS: u32 = 3;

/// Candidate units, descending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Units {
    /// In bytes; unused entries at the end are 0.
    sizes: [u16; UNIT_CANDIDATES_MAX],
}

impl Units {
    /// A single fixed unit.
    #[must_use]
    pub fn fixed(unit_bytes: u16) -> Self {
        let mut sizes = [0; UNIT_CANDIDATES_MAX];
        sizes[0] = unit_bytes;
        Self { sizes }
    }

    /// Candidates in descending order; `None` if they are not descending, or none or too many.
    #[must_use]
    pub fn descending(units: &[u16]) -> Option<Self> {
        let mut sizes = [0; UNIT_CANDIDATES_MAX];
        sizes.get_mut(..units.len())?.copy_from_slice(units);
        let is_descending = units.windows(2).all(|pair| pair[0] > pair[1]);
        (is_descending && units.last().is_some_and(|least| *least > 0)).then_some(Self { sizes })
    }

    /// Iterates over the units, largest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = u16> {
        self.sizes.into_iter().filter(|unit_bytes| *unit_bytes > 0)
    }

    /// Number of units.
    #[must_use]
    pub fn count(&self) -> usize {
        self.iter().count()
    }

    /// The unit at an index.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<u16> {
        self.iter().nth(index)
    }
}

/// The state of one end's search for the unit.
#[derive(Debug)]
pub struct UnitSearch {
    units: Units,
    /// This end decides; it announces the unit to the other one.
    decides: bool,
    is_decided: bool,
    answers: [u32; UNIT_CANDIDATES_MAX],
    /// UNIT has to be sent: by the deciding end until it is confirmed, by the other one when it
    /// receives it.
    notice: Repeat,
}

impl UnitSearch {
    /// Creates a search; with a single candidate it is already decided.
    #[must_use]
    pub fn new(units: Units, decides: bool) -> Self {
        Self {
            units,
            decides,
            is_decided: units.count() == 1,
            answers: [0; UNIT_CANDIDATES_MAX],
            notice: Repeat::default(),
        }
    }

    /// The remaining candidates.
    #[must_use]
    pub fn units(&self) -> Units {
        self.units
    }

    /// Whether the unit is decided.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        self.is_decided
    }

    /// Whether this unit is a candidate.
    #[must_use]
    pub fn has(&self, unit_bytes: u16) -> bool {
        self.units.iter().any(|candidate| candidate == unit_bytes)
    }

    /// Records that a path has carried packets of this unit in both directions. Returns the unit to
    /// use, if this end decides and the answers suffice.
    #[must_use]
    pub fn carried(&mut self, unit_bytes: u16) -> Option<u16> {
        let index = self.units.iter().position(|candidate| candidate == unit_bytes)?;
        if !self.decides || self.is_decided {
            return None;
        }
        self.answers[index] += 1;
        let largest = self.answers.iter().position(|count| *count > 0)?;
        let is_enough = largest == 0 || self.answers[index] >= ANSWERS;
        self.units.get(largest).filter(|_| is_enough)
    }

    /// Sets the unit and announces it to the peer.
    pub fn decided(&mut self, unit_bytes: u16, now: Nanos) {
        self.units = Units::fixed(unit_bytes);
        self.is_decided = true;
        self.notice.now(now);
    }

    /// Records that the peer has sent the unit, which is already known here. For the deciding end
    /// that is the confirmation; the other end confirms it.
    pub fn announced(&mut self, now: Nanos) {
        if self.decides {
            self.notice.stop();
        } else {
            self.notice.now(now);
        }
    }

    /// When UNIT has to be sent.
    #[must_use]
    pub fn due(&self) -> Option<Nanos> {
        self.notice.due()
    }

    /// The unit to send now, if it is due.
    pub fn take_notice(&mut self, timeout: Nanos, now: Nanos) -> Option<u16> {
        self.notice.due().filter(|due| *due <= now)?;
        if self.decides {
            self.notice.again(timeout, now);
        } else {
            self.notice.stop();
        }
        self.units.get(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNITS: [u16; 3] = [8896, 1408, 1152];

    fn search() -> UnitSearch {
        UnitSearch::new(Units::descending(&UNITS).unwrap(), true)
    }

    #[test]
    fn candidates_fall_and_are_few() {
        assert_eq!(Units::descending(&UNITS).unwrap().iter().collect::<Vec<_>>(), UNITS);
        for bad in [&[][..], &[1408, 1408], &[1152, 1408], &[1408, 0], &[5, 4, 3, 2, 1]] {
            assert_eq!(Units::descending(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_largest_decides_at_once_and_a_smaller_one_after_three_answers() {
        assert_eq!(search().carried(8896), Some(8896));
        let mut search = search();
        assert_eq!([1408, 1152, 1152].map(|unit| search.carried(unit)), [None; 3]);
        assert_eq!(search.carried(1152), Some(1408), "the largest that ever came back");
        assert_eq!(search.carried(9000), None);
        search.decided(1408, 5);
        assert_eq!(search.carried(1408), None, "once");
    }

    #[test]
    fn the_unit_is_said_until_it_is_confirmed_and_confirmed_once_each_time() {
        let mut decider = search();
        assert_eq!(decider.due(), None);
        decider.decided(1408, 5);
        assert_eq!(decider.take_notice(30, 5), Some(1408));
        assert_eq!(decider.take_notice(30, 34), None);
        assert_eq!(decider.take_notice(30, 35), Some(1408));
        decider.announced(40);
        assert_eq!(decider.due(), None);
        let mut other = UnitSearch::new(Units::descending(&UNITS).unwrap(), false);
        assert_eq!(other.carried(8896), None, "it does not decide");
        other.decided(1408, 5);
        assert_eq!(other.take_notice(30, 5), Some(1408));
        assert_eq!(other.due(), None);
        other.announced(50);
        assert_eq!(other.take_notice(30, 50), Some(1408));
    }
}
