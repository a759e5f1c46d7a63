//! Explicit congestion notification of a path (RFC 3168, RFC 9000 §13.4): the receiver counts
//! arriving marks, the counts return to the sender, and the sender marks packets only while the
//! counts are plausible.

use super::packet::Malformed;

/// Challenges sent marked; if none of them is answered, the path may drop marked packets.
const TESTING_PACKETS: u64 = 6;

/// The ECN field of an IP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ecn {
    /// Not ECN-capable.
    #[default]
    NotEct,
    /// ECN-capable; never sent here.
    Ect1,
    /// ECN-capable.
    Ect0,
    /// Congestion experienced.
    Ce,
}

impl Ecn {
    /// Decodes the low two bits of the traffic class.
    #[must_use]
    pub fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            1 => Self::Ect1,
            2 => Self::Ect0,
            3 => Self::Ce,
            _ => Self::NotEct,
        }
    }
}

/// Authentic packets that arrived on a path since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathCounts {
    /// All of them.
    pub received: u64,
    /// With ECT(0).
    pub ect0: u64,
    /// With ECT(1).
    pub ect1: u64,
    /// With CE.
    pub ce: u64,
}

impl PathCounts {
    /// Counts a packet.
    pub fn add(&mut self, ecn: Ecn) {
        self.received += 1;
        match ecn {
            Ecn::NotEct => {}
            Ecn::Ect1 => self.ect1 += 1,
            Ecn::Ect0 => self.ect0 += 1,
            Ecn::Ce => self.ce += 1,
        }
    }

    /// Rejects impossible counts.
    pub(super) fn checked(self) -> Result<Self, Malformed> {
        if self.ect0 + self.ect1 + self.ce > self.received { Err(Malformed) } else { Ok(self) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Marked packets were sent, with no report about them yet.
    Testing,
    /// The peer's counts account for the marks.
    Capable,
    /// They do not, or no marked packet arrives.
    Failed,
}

/// Decides whether packets sent on a path are marked ECT(0), based on the peer's counts.
#[derive(Debug)]
pub struct Marking {
    state: State,
    /// Packets sent with ECT(0).
    marked: u64,
    /// The peer's newest counts.
    peer: PathCounts,
}

impl Default for Marking {
    /// Before any packet; the first packets test the path.
    fn default() -> Self {
        Self { state: State::Testing, marked: 0, peer: PathCounts::default() }
    }
}

impl Marking {
    /// The mark for the next packet.
    #[must_use]
    pub fn codepoint(&self) -> Ecn {
        if self.state == State::Failed { Ecn::NotEct } else { Ecn::Ect0 }
    }

    /// The peer's counts.
    #[must_use]
    pub fn peer(&self) -> PathCounts {
        self.peer
    }

    /// Records that a packet leaves with the mark of [`Self::codepoint`]. `is_validated`: the path
    /// has answered.
    pub fn packet_sent(&mut self, is_validated: bool) {
        if self.state == State::Testing && !is_validated && self.marked >= TESTING_PACKETS {
            self.state = State::Failed;
        }
        self.marked += u64::from(self.state != State::Failed);
    }

    /// Processes the peer's counts. Older counts than the known ones are ignored, as frames may be
    /// reordered.
    pub fn counts_received(&mut self, counts: PathCounts) {
        let known = self.peer;
        if counts.received <= known.received {
            return;
        }
        self.peer = counts;
        if self.state == State::Failed {
            return;
        }
        // While this end marks, it marks every packet, so each arrives as ECT(0) or CE.
        let is_sound = counts.ect1 == 0
            && counts.ect0 >= known.ect0
            && counts.ce >= known.ce
            && counts.ect0 + counts.ce == counts.received
            && counts.received <= self.marked;
        self.state = if is_sound { State::Capable } else { State::Failed };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(received: u64, ect0: u64, ect1: u64, ce: u64) -> PathCounts {
        PathCounts { received, ect0, ect1, ce }
    }

    fn tested(sent: u64, answers: &[PathCounts]) -> (State, Ecn) {
        let mut marking = Marking::default();
        (0..sent).for_each(|_| marking.packet_sent(true));
        for answer in answers {
            marking.counts_received(*answer);
        }
        (marking.state, marking.codepoint())
    }

    #[test]
    fn packets_are_counted_by_mark() {
        let mut found = PathCounts::default();
        for bits in [0, 1, 2, 2, 3, 0xff] {
            found.add(Ecn::from_bits(bits));
        }
        assert_eq!(found, counts(6, 2, 1, 2));
        assert_eq!(found.checked(), Ok(found));
        assert_eq!(counts(6, 3, 2, 2).checked(), Err(Malformed));
    }

    #[test]
    fn marks_that_are_accounted_for_go_on() {
        let good = [counts(4, 4, 0, 0), counts(9, 6, 0, 3)];
        assert_eq!(tested(9, &good), (State::Capable, Ecn::Ect0));
        // An older frame that was overtaken by a newer one is ignored.
        assert_eq!(tested(9, &[good[1], good[0]]), (State::Capable, Ecn::Ect0));
    }

    #[test]
    fn counts_that_make_no_sense_end_the_marking() {
        for (what, bad) in [
            ("erased", counts(5, 4, 0, 0)),
            ("turned into ECT(1)", counts(5, 4, 1, 0)),
            ("more than sent", counts(10, 10, 0, 0)),
            ("fewer CE than before", counts(6, 6, 0, 0)),
            ("fewer ECT(0) than before", counts(6, 2, 0, 4)),
        ] {
            let first = counts(4, 3, 0, 1);
            assert_eq!(tested(9, &[first, bad]), (State::Failed, Ecn::NotEct), "{what}");
        }
    }

    #[test]
    fn a_path_that_answers_nothing_marked_is_tried_without_marks() {
        let mut marking = Marking::default();
        let sent: Vec<Ecn> = (0..TESTING_PACKETS + 3)
            .map(|_| {
                marking.packet_sent(false);
                marking.codepoint()
            })
            .collect();
        assert_eq!(sent.iter().filter(|mark| **mark == Ecn::Ect0).count() as u64, TESTING_PACKETS);
        assert_eq!(sent.last(), Some(&Ecn::NotEct));
        marking.counts_received(counts(2, 0, 0, 0));
        assert_eq!((marking.codepoint(), marking.peer().received), (Ecn::NotEct, 2));
    }
}
