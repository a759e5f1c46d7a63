//! ECN marking of the packets that leave on a path: only while the peer's counts account for what
//! was sent (RFC 9000 §13.4), and, if congestion control relies on marks, while it reports the
//! *canaries*: packets that leave as if a queue had marked them.
//!
//! Plausible counts prove that the path carries ECN-capable packets. They don't prove that marks
//! arrive: a network or a peer that turns every CE into ECT(0) has plausible counts, too. The peer
//! can't know which packets are canaries.

use rand_core::Rng;

use super::ecn::{Ecn, PathCounts};
use crate::link::{NANOS_PER_SECOND, Nanos};

/// If this many marked packets are unanswered …
const TESTING_PACKETS: u64 = 6;
/// … for this long, the path may drop marked packets. Several leave within a round trip.
const TESTING_TIME: Nanos = 3 * NANOS_PER_SECOND / 2;
/// Packets of a trial: canaries and, in between, ECT(0).
const TRIAL_PACKETS: usize = 6;
/// They leave at random, each in its own interval of this many packets.
const TRIAL_SPACING: u64 = 16;
/// Canaries of a trial.
const CANARIES: u64 = TRIAL_PACKETS as u64 / 2;
/// A trial is judged once the peer has reported this many packets after its last one.
const TRIAL_PATIENCE: u64 = 64;
/// Packets from one trial to the next, on average.
const TRIAL_EVERY: u64 = 4096;
/// The first trial comes within this many packets.
const FIRST_TRIAL_WITHIN: u64 = 32;
/// How long packets leave unmarked before the path is tried again.
const RETRY_AFTER: Nanos = 30 * NANOS_PER_SECOND;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Marked packets were sent, with no report about them yet.
    Testing,
    /// The peer's counts account for the marks.
    Capable,
    /// They do not, or no marked packet arrives, or no canary; since when.
    Failed(Nanos),
}

/// A few packets whose marks have to be reported.
#[derive(Debug, Clone, Copy)]
struct Trial {
    /// Their numbers, ascending; canaries are the ones with an odd index.
    packets: [u64; TRIAL_PACKETS],
    /// The peer's counts before it knew any of them.
    before: PathCounts,
    /// Losses on the path when it began.
    lost_before: u64,
    /// CE counts that were taken for its canaries.
    own: u64,
}

/// When canaries leave.
#[derive(Debug, Clone, Copy)]
enum Canaries {
    /// Never: nothing relies on marks.
    Off,
    /// The next trial begins with a packet to be drawn within this many.
    Within(u64),
    /// It begins with this packet.
    From(u64),
}

/// Decides which mark packets leave with, based on the peer's counts.
#[derive(Debug)]
pub struct Marking {
    state: State,
    canaries: Canaries,
    trial: Option<Trial>,
    /// The last trial was inconclusive: its canaries may have been lost.
    is_repeated: bool,
    /// The mark of the packet sent last.
    codepoint: Ecn,
    /// When the first packet left.
    first_sent: Option<Nanos>,
    /// Packets sent …
    sent: u64,
    /// … with a mark.
    marked: u64,
    /// Most packets that may have arrived unmarked, all sent before the path was tried again.
    unmarked_max: u64,
    /// The peer's newest counts.
    peer: PathCounts,
    /// Canaries among them.
    own_ce: u64,
    /// How often the marks were found not to be accounted for.
    failures: u64,
}

impl Marking {
    /// Before any packet; the first packets test the path. `has_canaries`: something relies on the
    /// marks.
    #[must_use]
    pub fn new(has_canaries: bool) -> Self {
        let within = Canaries::Within(FIRST_TRIAL_WITHIN);
        Self {
            state: State::Testing,
            canaries: if has_canaries { within } else { Canaries::Off },
            trial: None,
            is_repeated: false,
            codepoint: Ecn::Ect0,
            first_sent: None,
            sent: 0,
            marked: 0,
            unmarked_max: 0,
            peer: PathCounts::default(),
            own_ce: 0,
            failures: 0,
        }
    }

    /// The mark of the packet sent last.
    #[must_use]
    pub fn codepoint(&self) -> Ecn {
        self.codepoint
    }

    /// Whether packets leave marked and nothing speaks against the peer's counts of CE.
    #[must_use]
    pub fn is_trusted(&self) -> bool {
        !matches!(self.state, State::Failed(_))
    }

    /// How often the marks were found not to be accounted for.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures
    }

    /// The peer's counts, with canaries as ECT(0), since no queue marked them.
    #[must_use]
    pub fn peer(&self) -> PathCounts {
        let PathCounts { ect0, ce, .. } = self.peer;
        PathCounts { ect0: ect0 + self.own_ce, ce: ce - self.own_ce, ..self.peer }
    }

    /// Decides the mark of the packet with this number, which leaves now. `is_validated`: the path
    /// has answered. `lost`: see [`Self::counts_received`].
    pub fn packet_sent(
        &mut self,
        number: u64,
        (is_validated, lost): (bool, u64),
        random: &mut impl Rng,
        now: Nanos,
    ) {
        match self.state {
            State::Testing if !is_validated && self.is_unanswered(now) => self.fail(now),
            State::Capable => self.schedule(number, lost, random),
            State::Failed(since)
                if self.trial.is_none() && now.saturating_sub(since) >= RETRY_AFTER =>
            {
                self.begin(number, lost, random);
            }
            _ => {}
        }
        let is_trusted = self.is_trusted();
        let usual = if is_trusted { Ecn::Ect0 } else { Ecn::NotEct };
        self.codepoint = match self.trial.and_then(|trial| trial.mark(number)) {
            Some(Ecn::Ect0) if is_trusted => usual,
            Some(mark) => mark,
            None => usual,
        };
        self.first_sent.get_or_insert(now);
        self.sent += 1;
        self.marked += u64::from(self.codepoint != Ecn::NotEct);
    }

    fn is_unanswered(&self, now: Nanos) -> bool {
        let is_old = self.first_sent.is_some_and(|at| now.saturating_sub(at) >= TESTING_TIME);
        is_old && self.marked >= TESTING_PACKETS
    }

    /// Begins the next trial of canaries in its turn.
    fn schedule(&mut self, number: u64, lost: u64, random: &mut impl Rng) {
        if self.trial.is_some() {
            return;
        }
        match self.canaries {
            Canaries::Off => {}
            Canaries::Within(packets) => {
                self.canaries = Canaries::From(number + random.next_u64() % packets);
            }
            Canaries::From(first) if number < first => {}
            Canaries::From(_) => self.begin(number, lost, random),
        }
    }

    fn begin(&mut self, number: u64, lost: u64, random: &mut impl Rng) {
        let mut start = number;
        let packets = [(); TRIAL_PACKETS].map(|()| {
            let packet = start + random.next_u64() % TRIAL_SPACING;
            start += TRIAL_SPACING;
            packet
        });
        let before = self.peer;
        self.trial = Some(Trial { packets, before, lost_before: lost, own: 0 });
    }

    fn fail(&mut self, now: Nanos) {
        self.state = State::Failed(now);
        self.trial = None;
        self.failures += 1;
        self.canaries.next_within(2 * TRIAL_EVERY);
    }

    /// Processes the peer's counts. Older counts than the known ones are ignored, as frames may be
    /// reordered. `reported`: packets sent up to the newest that the peer has; `lost`: those of them
    /// that it has counted as lost so far.
    pub fn counts_received(
        &mut self,
        counts: PathCounts,
        (reported, lost): (u64, u64),
        now: Nanos,
    ) {
        let known = self.peer;
        if counts.received <= known.received {
            return;
        }
        self.peer = counts;
        if self.is_trusted() {
            let is_sound = counts.ect1 == known.ect1
                && counts.ect0 >= known.ect0
                && counts.ce >= known.ce
                && counts.marked() <= self.marked
                && counts.received - counts.marked() <= self.unmarked_max;
            if is_sound {
                self.state = State::Capable;
            } else {
                self.fail(now);
            }
        }
        self.own_ce = self.own_ce.min(counts.ce);
        let Some(trial) = &mut self.trial else { return };
        if reported <= trial.packets[0] {
            trial.before = counts;
            return;
        }
        let more =
            counts.ce.saturating_sub(known.ce).min(trial.canaries_before(reported) - trial.own);
        trial.own += more;
        self.own_ce += more;
        if reported > trial.packets[TRIAL_PACKETS - 1] + TRIAL_PATIENCE {
            let trial = *trial;
            self.judge(trial, (reported, lost), now);
        }
    }

    fn judge(&mut self, trial: Trial, (reported, lost): (u64, u64), now: Nanos) {
        self.trial = None;
        let has_canaries = trial.own > 0;
        let is_marked = has_canaries && self.peer.ect0 > trial.before.ect0;
        let is_lossy = lost.saturating_sub(trial.lost_before) >= CANARIES;
        let is_repeated = std::mem::take(&mut self.is_repeated);
        match self.state {
            State::Failed(_) if is_marked => {
                // What has not arrived yet may have left unmarked.
                let arrived = self.peer.received - self.peer.marked();
                self.unmarked_max = arrived + self.sent.saturating_sub(self.peer.received);
                self.state = State::Capable;
                self.canaries.next_within(2 * TRIAL_EVERY);
            }
            State::Failed(_) => self.state = State::Failed(now),
            _ if has_canaries => self.canaries.next_within(2 * TRIAL_EVERY),
            _ if is_lossy && !is_repeated => {
                self.is_repeated = true;
                self.canaries = Canaries::From(reported);
            }
            _ => self.fail(now),
        }
    }
}

impl Canaries {
    /// Schedules the next trial, if there are any.
    fn next_within(&mut self, packets: u64) {
        if !matches!(self, Self::Off) {
            *self = Self::Within(packets);
        }
    }
}

impl Trial {
    fn mark(&self, number: u64) -> Option<Ecn> {
        let index = self.packets.iter().position(|packet| *packet == number)?;
        Some(if index % 2 == 1 { Ecn::Ce } else { Ecn::Ect0 })
    }

    /// Canaries among the packets up to the newest that the peer has.
    fn canaries_before(&self, reported: u64) -> u64 {
        let canaries = self.packets.iter().skip(1).step_by(2);
        canaries.filter(|packet| **packet < reported).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_core::SeedableRng;

    use super::*;

    const VALIDATED: (bool, u64) = (true, 0);

    fn counts(received: u64, ect0: u64, ect1: u64, ce: u64) -> PathCounts {
        PathCounts { received, ect0, ect1, ce }
    }

    fn random() -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(1)
    }

    /// What becomes of a packet on its way and in the peer's counts: how it arrives, if it does.
    type Way = fn(u64, Ecn) -> Option<Ecn>;

    const SOUND: Way = |_, mark| Some(mark);
    const BLEACHED: Way = |_, mark| Some(if mark == Ecn::Ce { Ecn::Ect0 } else { mark });
    const ERASED: Way = |_, _| Some(Ecn::NotEct);

    /// One end's marking with a peer that reports each packet at once.
    struct Tried {
        marking: Marking,
        random: ChaCha8Rng,
        number: u64,
        lost: u64,
        arrived: PathCounts,
        sent: Vec<Ecn>,
    }

    impl Tried {
        fn new(has_canaries: bool) -> Self {
            Self {
                marking: Marking::new(has_canaries),
                random: random(),
                number: 0,
                lost: 0,
                arrived: PathCounts::default(),
                sent: Vec::new(),
            }
        }

        fn packets(&mut self, count: u64, way: Way, now: Nanos) {
            for _ in 0..count {
                let path = (true, self.lost);
                self.marking.packet_sent(self.number, path, &mut self.random, now);
                self.sent.push(self.marking.codepoint());
                match way(self.number, self.marking.codepoint()) {
                    Some(mark) => self.arrived.add(mark),
                    None => self.lost += 1,
                }
                self.number += 1;
                self.marking.counts_received(self.arrived, (self.number, self.lost), now);
            }
        }

        fn canaries(&self) -> usize {
            self.sent.iter().filter(|mark| **mark == Ecn::Ce).count()
        }
    }

    fn tested(sent: u64, answers: &[PathCounts]) -> (bool, Ecn) {
        let mut marking = Marking::new(false);
        (0..sent).for_each(|number| marking.packet_sent(number, VALIDATED, &mut random(), 0));
        for answer in answers {
            marking.counts_received(*answer, (answer.received, 0), 0);
        }
        marking.packet_sent(sent, VALIDATED, &mut random(), 0);
        (marking.is_trusted(), marking.codepoint())
    }

    #[test]
    fn marks_that_are_accounted_for_go_on() {
        let good = [counts(4, 4, 0, 0), counts(9, 6, 0, 3)];
        assert_eq!(tested(9, &good), (true, Ecn::Ect0));
        // An older frame that was overtaken by a newer one is ignored.
        assert_eq!(tested(9, &[good[1], good[0]]), (true, Ecn::Ect0));
    }

    #[test]
    fn counts_that_make_no_sense_end_the_marking() {
        for (what, bad) in [
            ("erased", counts(5, 3, 0, 1)),
            ("turned into ECT(1)", counts(5, 3, 1, 1)),
            ("more than sent", counts(10, 9, 0, 1)),
            ("fewer CE than before", counts(6, 6, 0, 0)),
            ("fewer ECT(0) than before", counts(6, 2, 0, 4)),
        ] {
            let first = counts(4, 3, 0, 1);
            assert_eq!(tested(9, &[first, bad]), (false, Ecn::NotEct), "{what}");
        }
    }

    #[test]
    fn a_path_that_answers_nothing_marked_is_tried_without_marks() {
        let mut marking = Marking::new(true);
        let mut mark = |number, now| {
            marking.packet_sent(number, (false, 0), &mut random(), now);
            marking.codepoint()
        };
        // A long path is slow to answer: many packets leave before.
        assert!((0..100).all(|number| mark(number, number) == Ecn::Ect0));
        assert_eq!(mark(100, TESTING_TIME), Ecn::NotEct);
        let mut few = Marking::new(true);
        for number in 0..TESTING_PACKETS {
            few.packet_sent(number, (false, 0), &mut random(), number * TESTING_TIME);
            assert_eq!(few.codepoint(), Ecn::Ect0);
        }
        marking.counts_received(counts(2, 0, 0, 0), (2, 0), 0);
        assert_eq!((marking.is_trusted(), marking.peer().received), (false, 2));
    }

    #[test]
    fn canaries_are_reported_as_no_marks_of_queues() {
        let mut tried = Tried::new(true);
        tried.packets(40 * TRIAL_EVERY, SOUND, 0);
        assert!(tried.marking.is_trusted());
        assert_eq!((tried.marking.peer().ce, tried.marking.peer().ect0), (0, tried.number));
        let trials = tried.canaries() as u64 / CANARIES;
        assert!((25..60).contains(&trials), "{trials}");
        let mut without = Tried::new(false);
        without.packets(40 * TRIAL_EVERY, SOUND, 0);
        assert_eq!(without.canaries(), 0);
    }

    #[test]
    fn marks_of_queues_count_besides_canaries() {
        let mut tried = Tried::new(true);
        tried.packets(
            100_000,
            |number, mark| Some(if number % 10 == 0 { Ecn::Ce } else { mark }),
            0,
        );
        let marked = 10_000;
        let found = tried.marking.peer().ce;
        // A canary that a queue would have marked, too, is subtracted.
        assert!(found <= marked && found + 40 > marked, "{found}");
    }

    #[test]
    fn a_path_that_turns_ce_into_ect0_is_found_in_the_first_trial() {
        let mut tried = Tried::new(true);
        tried.packets(256, BLEACHED, 0);
        assert!(!tried.marking.is_trusted());
        let mut late = Tried::new(true);
        late.packets(10_000, SOUND, 0);
        late.packets(2 * TRIAL_EVERY + 256, BLEACHED, 0);
        assert!(!late.marking.is_trusted());
        // Without canaries nobody notices.
        let mut without = Tried::new(false);
        without.packets(100_000, BLEACHED, 0);
        assert!(without.marking.is_trusted());
    }

    #[test]
    fn lost_canaries_are_tried_again_once() {
        let mut tried = Tried::new(true);
        // A burst takes the first trial.
        tried.packets(150, |number, mark| (!(5..140).contains(&number)).then_some(mark), 0);
        assert!(tried.marking.is_trusted());
        tried.packets(400, SOUND, 0);
        assert!(tried.marking.is_trusted());
        assert_eq!(tried.canaries() as u64, 2 * CANARIES);
        let mut never = Tried::new(true);
        never.packets(600, |_, mark| (mark != Ecn::Ce).then_some(mark), 0);
        assert!(!never.marking.is_trusted(), "a path that drops CE");
    }

    #[test]
    fn a_path_that_failed_is_tried_again_and_with_few_packets() {
        for has_canaries in [false, true] {
            let mut tried = Tried::new(has_canaries);
            tried.packets(1000, ERASED, 0);
            assert_eq!((tried.marking.is_trusted(), tried.marking.failures()), (false, 1));
            let before = tried.sent.len();
            tried.packets(1000, ERASED, RETRY_AFTER);
            let marked = tried.sent[before..].iter().filter(|mark| **mark != Ecn::NotEct).count();
            assert_eq!((marked, tried.marking.is_trusted()), (TRIAL_PACKETS, false));
            tried.packets(1000, SOUND, 2 * RETRY_AFTER);
            assert!(tried.marking.is_trusted());
            assert_eq!(tried.sent.last(), Some(&Ecn::Ect0));
            // And it is watched as before.
            tried.packets(10, ERASED, 2 * RETRY_AFTER);
            assert_eq!((tried.marking.is_trusted(), tried.marking.failures()), (false, 2));
        }
    }

    #[test]
    fn a_peer_that_counts_backwards_is_not_trusted_and_harms_nothing() {
        let mut tried = Tried::new(true);
        tried.packets(2000, SOUND, 0);
        for ce in [0, u64::MAX / 2, 1] {
            let claimed = counts(tried.number + 1 + ce, 0, 0, ce);
            tried.marking.counts_received(claimed, (tried.number, 0), 0);
            assert!(!tried.marking.is_trusted(), "{ce} {:?}", tried.marking);
            assert!(tried.marking.peer().ce <= u64::MAX / 2);
        }
    }
}
