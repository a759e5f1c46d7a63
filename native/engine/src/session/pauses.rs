//! Sleep times of a paced session's worker: a wake-up costs as much as 40 packets, so several
//! packets become due during a pause and leave in one call.

use sealane_proto::link::{NANOS_PER_SECOND, Nanos};
use sealane_proto::session::{BURST_PACKETS, SendLimit, Session};

use super::share::Flow;

/// A paced sender wakes up for this many packets at once, half of the machine's burst; the other
/// half compensates for late timers …
const PACKETS_PER_PAUSE: u64 = BURST_PACKETS / 2;
/// … for no more than this many bytes, …
const BYTES_PER_PAUSE_MAX: u64 = 288_000;
/// … and after at most this time, as in Linux's TCP pacing (`sk_pacing_shift`), except amid a long
/// message ([`Session::lull`]) …
const UNITS_NANOS_MAX: Nanos = 1_000_000;
/// … and control frames wait at most this long.
const CONTROL_NANOS_MAX: Nanos = 250_000;

/// One pause in so many is not spent deaf, so that round trips are measured.
const PAUSES_PER_SAMPLE: u8 = 8;

/// With a congestion controller a round trip has at least this many pauses.
const PAUSES_PER_ROUND_TRIP: u64 = 64;

/// The shortest sleep times, and the wake-up time of waiting units.
#[derive(Debug)]
pub(super) struct Pauses {
    /// For units held back by the rate.
    units: Nanos,
    /// For everything else.
    control: Nanos,
    /// Units wait until this time, even if some could leave earlier.
    units_at: Nanos,
    /// Deaf pauses since the last other one.
    deaf: u8,
}

impl Pauses {
    pub(super) fn new(session: &Session) -> Self {
        let config = session.config();
        let bytes = PACKETS_PER_PAUSE * config.datagram_bytes_max() as u64;
        let bytes = bytes.min(BYTES_PER_PAUSE_MAX);
        let nanos = bytes.saturating_mul(NANOS_PER_SECOND) / config.rate_bytes_per_second.max(1);
        // A congestion controller of a near session judges what happens within its round trip; one
        // of a far session is content with a fraction of its own.
        let epoch = session.steering().congestion.map_or(Nanos::MAX, |(_, domain)| {
            (domain.near_rtt / 2).max(session.statistics().srtt_nanos / PAUSES_PER_ROUND_TRIP)
        });
        let nanos = nanos.min(epoch);
        let (units, control) = (nanos.min(UNITS_NANOS_MAX), nanos.min(CONTROL_NANOS_MAX));
        Self { units, control, units_at: 0, deaf: 0 }
    }

    /// When to wake up unless something arrives; `None`: only then. `is_blocked`: the kernel accepts
    /// no packets, and wakes the thread when it does.
    pub(super) fn until(
        &mut self,
        session: &mut Session,
        flow: Option<&Flow>,
        is_blocked: bool,
        now: Nanos,
    ) -> Option<Nanos> {
        let turn_at = flow.and_then(Flow::turn_at);
        let due = session.next_timeout().into_iter().chain(turn_at).min();
        if session.is_urgent() && !is_blocked {
            self.units_at = 0;
            due
        } else if is_paced(session, flow) {
            self.paced_wake_at(due, without_units(session), session.lull(now), now)
        } else {
            self.units_at = 0;
            due.map(|at| self.after_control(at, now))
        }
    }

    /// The wake-up time while the rate holds units back. `due`: the first due time; `others`: the
    /// first one of anything but units; `lull`: how long the pause may be amid a long message.
    fn paced_wake_at(
        &mut self,
        due: Option<Nanos>,
        others: Option<Nanos>,
        lull: Nanos,
        now: Nanos,
    ) -> Option<Nanos> {
        let mut pause_ends = now.saturating_add(self.units.max(lull));
        if now < self.units_at {
            // An interruption does not restart the pause.
            pause_ends = pause_ends.min(self.units_at);
        }
        self.units_at = due?.max(pause_ends);
        let others = others.map(|at| self.after_control(at, now));
        others.into_iter().chain([self.units_at]).min()
    }

    /// Whether to sleep through what arrives during the pause that [`Self::until`] has begun.
    pub(super) fn is_deaf(&mut self, session: &Session, now: Nanos) -> bool {
        let pause = self.units_at.saturating_sub(now);
        if pause == 0 || !session.may_read_late(pause) {
            return false;
        }
        self.deaf = (self.deaf + 1) % PAUSES_PER_SAMPLE;
        self.deaf > 0
    }

    /// Reports to the session, once a pause is over, whether what it receives next may have waited
    /// unread. `has_left_some`: it may be the rest of what the last turn took.
    pub(super) fn woken(session: &mut Session, is_deaf: bool, has_left_some: bool) {
        if !has_left_some {
            session.reads_late(is_deaf);
        }
    }

    fn after_control(&self, at: Nanos, now: Nanos) -> Nanos {
        at.max(now.saturating_add(self.control))
    }

    /// Whether the pause was interrupted and nothing needs to be done: the units keep waiting, so
    /// that they leave together.
    pub(super) fn is_early(&self, session: &mut Session, flow: Option<&Flow>, now: Nanos) -> bool {
        now < self.units_at
            && !session.is_urgent()
            && is_paced(session, flow)
            && without_units(session).is_none_or(|at| at > now)
    }
}

/// Whether only the session's own rate or window holds units back. (A session waiting for its turn on a
/// shared line is notified of it, and lost units are resent without delay.)
fn is_paced(session: &Session, flow: Option<&Flow>) -> bool {
    let is_paced = matches!(session.limit(), SendLimit::Pacing | SendLimit::Congestion);
    is_paced && flow.and_then(Flow::turn_at).is_none()
}

/// When something other than a unit is due.
fn without_units(session: &mut Session) -> Option<Nanos> {
    session.hold_units(true);
    let at = session.next_timeout();
    session.hold_units(false);
    at
}

#[cfg(test)]
mod tests {
    use sealane_proto::session::{Plan, PlanRow, ReceiveRequest, Reliability, SendRequest};

    use super::*;
    use crate::session::full_socket_tests::{End, MESSAGE_BYTES, ends, exchange, post, sending};

    const MILLISECOND: Nanos = 1_000_000;
    const MICROSECOND: Nanos = 1000;

    fn pauses(units: Nanos) -> Pauses {
        Pauses { units, control: units.min(CONTROL_NANOS_MAX), units_at: 0, deaf: 0 }
    }

    #[test]
    fn units_wait_until_several_leave_together_and_control_frames_do_not_wait_for_them() {
        let mut slow = pauses(1000 * MICROSECOND);
        let now = 7_000_000;
        let units = now + 120 * MICROSECOND;
        assert_eq!(slow.paced_wake_at(Some(units), None, 0, now), Some(now + 1000 * MICROSECOND));
        assert_eq!(slow.units_at, now + 1000 * MICROSECOND);
        // Something else is due: it waits no longer than before, and the units still wait.
        let soon = Some(now + 40 * MICROSECOND);
        assert_eq!(slow.paced_wake_at(soon, soon, 0, now), Some(now + 250 * MICROSECOND));
        assert_eq!(slow.units_at, now + 1000 * MICROSECOND);
        // Nor does their wait restart because something was received meanwhile.
        let heard = now + 400 * MICROSECOND;
        assert_eq!(slow.paced_wake_at(Some(units), None, 0, heard), Some(now + 1000 * MICROSECOND));
        let sent = now + 1000 * MICROSECOND;
        assert_eq!(slow.paced_wake_at(Some(units), None, 0, sent), Some(sent + 1000 * MICROSECOND));
        // Nor because of something that was due late, before they existed.
        assert_eq!(slow.paced_wake_at(Some(sent * 9), None, 0, sent), Some(sent * 9));
        assert_eq!(slow.paced_wake_at(Some(units), None, 0, sent), Some(sent + 1000 * MICROSECOND));
        slow.units_at = 0;
        let later = Some(now + 600 * MICROSECOND);
        assert_eq!(slow.paced_wake_at(Some(units), later, 0, now), later);
        let long_after = now + 5000 * MICROSECOND;
        assert_eq!(slow.paced_wake_at(Some(long_after), None, 0, now), Some(long_after));
    }

    #[test]
    fn amid_a_long_message_units_wait_longer_and_only_until_it_is_replaced() {
        let mut slow = pauses(1000 * MICROSECOND);
        let (now, lull) = (7_000_000, 5 * MILLISECOND);
        let units = Some(now + 120 * MICROSECOND);
        assert_eq!(slow.paced_wake_at(units, None, lull, now), Some(now + lull));
        let sooner = Some(now + 1000 * MICROSECOND + 1);
        assert_eq!(slow.paced_wake_at(units, None, 0, now + 1), sooner, "another goes first");
    }

    /// A message that leaves before those without a priority.
    fn urgent(length: u64) -> SendRequest {
        let reliability = Reliability::SelectiveRepeat;
        SendRequest { offset: 0, length, reliability, immediate: None, priority: 1, user_data: 1 }
    }

    /// A sender in the middle of a message, and a time at which its next unit may not leave yet.
    fn paced() -> ([End; 2], Nanos) {
        let (mut ends, _) = sending();
        exchange(&mut ends, 10..14);
        (ends, 13 * MILLISECOND)
    }

    /// The same, with reports on their way to the sender, which left at 14 ms.
    fn reported() -> [End; 2] {
        let (mut ends, _) = paced();
        ends[1].receive(14 * MILLISECOND);
        ends[1].transmit(14 * MILLISECOND);
        ends
    }

    #[test]
    fn trains_are_longer_amid_a_long_message_and_not_before_a_short_one() {
        let (mut ends, now) = paced();
        let session = &mut ends[0].session;
        assert!(session.lull(now) > 0);
        let receive = ReceiveRequest { offset: 0, length_max: 10, user_data: 1 };
        ends[1].session.post_receive(receive, now + MILLISECOND).unwrap();
        exchange(&mut ends, 14..16);
        let session = &mut ends[0].session;
        assert!(session.lull(15 * MILLISECOND) > 0);
        session.post_send(urgent(10), 15 * MILLISECOND).unwrap();
        assert!(session.lull(15 * MILLISECOND) < MILLISECOND / 20, "one unit is to go");
    }

    #[test]
    fn a_pause_is_deaf_unless_it_is_long_and_something_else_may_come() {
        let (mut ends, now) = paced();
        let session = &mut ends[0].session;
        assert!(session.may_read_late(2 * MILLISECOND), "reports of a long message may wait");
        assert!(session.may_read_late(5 * MILLISECOND) && !session.may_read_late(5_000_001));
        let mut pauses = Pauses::new(session);
        let mut deaf = |session: &Session| {
            pauses.units_at = now + 2 * MILLISECOND;
            (0..PAUSES_PER_SAMPLE).filter(|_| pauses.is_deaf(session, now)).count()
        };
        assert_eq!(deaf(session), usize::from(PAUSES_PER_SAMPLE) - 1, "round trips are measured");
        let receive = ReceiveRequest { offset: 0, length_max: 10, user_data: 1 };
        session.post_receive(receive, now).unwrap();
        assert_eq!(deaf(session), 0, "a message may come");
        assert!(!session.may_read_late(1), "however short the pause is");
    }

    #[test]
    fn a_long_pause_is_not_deaf_when_the_message_ends_soon_after() {
        let (mut ends, _) = paced();
        exchange(&mut ends, 14..26);
        let session = &ends[0].session;
        assert!(session.may_read_late(MILLISECOND) && !session.may_read_late(4 * MILLISECOND));
    }

    /// Posts a message of four units with a priority amid the long one, with a plan, and lets it
    /// leave.
    fn overtaken(ends: &mut [End; 2], plan: PlanRow) {
        ends[0].session.install_plan(Plan::new(&[plan], 1408).unwrap());
        let receive = ReceiveRequest { offset: 0, length_max: 4 * 1408, user_data: 1 };
        ends[1].session.post_receive(receive, 13 * MILLISECOND).unwrap();
        exchange(ends, 14..16);
        let request =
            SendRequest { reliability: Reliability::Auto, priority: 3, ..urgent(4 * 1408) };
        ends[0].session.post_send(request, 16 * MILLISECOND).unwrap();
        ends[0].transmit(16 * MILLISECOND);
        assert_eq!(ends[0].session.limit(), SendLimit::Pacing);
    }

    #[test]
    fn the_end_of_a_later_message_that_went_first_is_not_read_late() {
        let (mut ends, _) = paced();
        let reliability = Reliability::SelectiveRepeat;
        overtaken(&mut ends, PlanRow { length_max: u64::MAX, reliability, parity_gap: 0 });
        assert!(!ends[0].session.may_read_late(501 * MICROSECOND), "it awaits its end");
        exchange(&mut ends, 17..19);
        assert!(ends[0].session.may_read_late(501 * MICROSECOND), "it has ended");
    }

    #[test]
    fn no_pause_is_longer_than_the_one_before_parity() {
        let (mut ends, _) = paced();
        let reliability = Reliability::ErasureCoded { k: 4, m: 1, depth: 1 };
        let parity_gap = 2 * MILLISECOND;
        overtaken(&mut ends, PlanRow { length_max: u64::MAX, reliability, parity_gap });
        let session = &ends[0].session;
        assert!(session.lull(16 * MILLISECOND) > 70);
        assert_eq!(session.lull(18 * MILLISECOND - 70), 70);
    }

    #[test]
    fn parity_after_its_pause_leaves_no_faster_than_a_message() {
        let mut ends = ends();
        let reliability = Reliability::ErasureCoded { k: 4, m: 2, depth: 1 };
        let row = PlanRow { length_max: u64::MAX, reliability, parity_gap: 5 * MILLISECOND };
        ends[0].session.install_plan(Plan::new(&[row], 1408).unwrap());
        post(&mut ends, Reliability::Auto, 0);
        exchange(&mut ends, 0..28);
        let units = (MESSAGE_BYTES as u64).div_ceil(1408);
        let mut at = 28;
        while ends[0].session.statistics().data_packets_sent < units {
            ends[0].transmit(at * MILLISECOND);
            at += 1;
        }
        assert_eq!(ends[0].session.statistics().parity_packets_sent, 0);
        ends[0].transmit((at + 4) * MILLISECOND);
        let parity = ends[0].session.statistics().parity_packets_sent;
        assert!((1..=9).contains(&parity), "{parity}");
    }

    #[test]
    fn the_rest_of_what_waited_unread_does_not_measure_the_round_trip_either() {
        let measured = |has_left_some| {
            let [mut sender, _receiver] = reported();
            let before = sender.session.statistics().srtt_nanos;
            Pauses::woken(&mut sender.session, true, false);
            Pauses::woken(&mut sender.session, false, has_left_some);
            sender.receive(18 * MILLISECOND);
            sender.session.statistics().srtt_nanos - before
        };
        assert_eq!(measured(true), 0);
        assert!(measured(false) > 0);
    }

    #[test]
    fn what_waited_unread_does_not_measure_the_peers_round_trip() {
        let measured = |is_late| {
            let [mut sender, mut receiver] = reported();
            let before = receiver.session.statistics().srtt_nanos;
            sender.session.reads_late(is_late);
            sender.receive(18 * MILLISECOND);
            let receive = ReceiveRequest { offset: 0, length_max: 10, user_data: 1 };
            sender.session.post_receive(receive, 18 * MILLISECOND).unwrap();
            sender.transmit(19 * MILLISECOND);
            receiver.receive(19 * MILLISECOND);
            (before, receiver.session.statistics().srtt_nanos)
        };
        let (before, after) = measured(true);
        assert_eq!(before, after);
        let (before, after) = measured(false);
        assert!(before < after, "{before} {after}");
    }

    #[test]
    fn the_end_of_an_earlier_message_is_not_read_late() {
        let (mut ends, _) = paced();
        post(&mut ends, Reliability::SelectiveRepeat, 14 * MILLISECOND);
        let mut at = 14;
        while ends[0].session.statistics().data_packets_sent <= MESSAGE_BYTES as u64 / 1408 + 1 {
            exchange(&mut ends, at..at + 1);
            at += 1;
        }
        let soon = 501 * MICROSECOND;
        let session = &ends[0].session;
        assert_eq!(session.limit(), SendLimit::Pacing);
        assert!(
            session.lull(at * MILLISECOND) > 0 && !session.may_read_late(soon),
            "the first awaits its end"
        );
    }

    #[test]
    fn reports_that_waited_unread_do_not_measure_the_round_trip() {
        let measured = |is_late| {
            let [mut sender, _receiver] = reported();
            let before = sender.session.statistics().srtt_nanos;
            sender.session.reads_late(is_late);
            sender.receive(18 * MILLISECOND);
            (before, sender.session.statistics().srtt_nanos)
        };
        let (before, after) = measured(true);
        assert_eq!(before, after);
        let (before, after) = measured(false);
        assert!(before < after, "{before} {after}");
    }

    #[test]
    fn an_urgent_unit_waits_for_no_others_unless_the_kernel_accepts_none() {
        let (mut ends, _) = sending();
        let receive = ReceiveRequest { offset: 0, length_max: 10, user_data: 1 };
        ends[1].session.post_receive(receive, 10 * MILLISECOND).unwrap();
        exchange(&mut ends, 10..14);
        let (session, now) = (&mut ends[0].session, 13 * MILLISECOND);
        let unit_at = session.next_timeout().unwrap();
        let mut pauses = Pauses::new(session);
        let paused = pauses.until(session, None, false, now).unwrap();
        assert!(unit_at < paused && pauses.is_early(session, None, now + 1));
        session.post_send(urgent(10), now).unwrap();
        assert!(session.is_urgent() && !pauses.is_early(session, None, now + 1));
        assert_eq!(pauses.until(session, None, false, now), Some(unit_at));
        let late = unit_at + 1;
        assert_eq!(pauses.until(session, None, false, late), Some(unit_at));
        assert!(pauses.until(session, None, true, late) > Some(late), "the socket wakes it");
    }
}
