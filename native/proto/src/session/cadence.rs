//! How often an end acknowledges what arrives. The sender asks, since its congestion controller
//! needs the reports; the receiver bounds what it agrees to (`docs/formats/session-wire.md`,
//! ACK_CADENCE).

use crate::link::Nanos;

use super::congestion::Steering;
use super::frame::Frame;
use super::packet::Version;

/// Shortest delay of an acknowledgement unless the sender asks for a shorter one: the time of a
/// batch of packets.
pub const ACK_DELAY_MIN: Nanos = 100_000;
/// A congestion controller needs at least this many of them in a round trip of the data centre.
const ACKS_PER_NEAR_RTT: u64 = 4;

/// The shortest delays of acknowledgements, of this end's and of the peer's.
///
/// Requests and answers are written into packets that leave anyway, and cause none.
#[derive(Debug)]
pub struct Cadence {
    /// The shortest delay that this end agrees to.
    bound: Nanos,
    /// What this end asks for, if it asks.
    wanted: Option<Nanos>,
    is_answered: bool,
    /// The peer has asked since the last answer.
    owes_answer: bool,
    own: Nanos,
    peers: Nanos,
}

/// The delay that a controller needs where the data centre has this round trip.
fn needed(near_rtt: Option<Nanos>) -> Nanos {
    near_rtt.map_or(ACK_DELAY_MIN, |near| (near / ACKS_PER_NEAR_RTT).clamp(1, ACK_DELAY_MIN))
}

impl Cadence {
    /// Creates the state before any packet. In version 5 nobody asks: each end takes its own network
    /// for the peer's.
    #[must_use]
    pub fn new(version: Version, steering: &Steering) -> Self {
        let near_rtt = steering.congestion.map(|(_, domain)| domain.near_rtt);
        let needed_here = needed(near_rtt);
        let asks = version >= Version::V6;
        let delay = if asks { ACK_DELAY_MIN } else { needed_here };
        Self {
            bound: needed(near_rtt.or(steering.near_rtt)),
            wanted: (asks && needed_here < ACK_DELAY_MIN).then_some(needed_here),
            is_answered: false,
            owes_answer: false,
            own: delay,
            peers: delay,
        }
    }

    /// Shortest delay of this end's acknowledgements.
    #[must_use]
    pub fn own(&self) -> Nanos {
        self.own
    }

    /// Shortest delay of the peer's acknowledgements.
    #[must_use]
    pub fn peers(&self) -> Nanos {
        self.peers
    }

    /// Processes a request of the peer. Whatever it asks for, acknowledgements leave no sooner after
    /// each other than this end agrees to, and no later than for a peer that doesn't ask.
    pub fn asked(&mut self, delay: Nanos) {
        self.own = delay.clamp(self.bound, ACK_DELAY_MIN);
        self.owes_answer = true;
    }

    /// Processes the peer's answer: what leaves during this delay comes to the window, so it counts
    /// as no longer than that of a peer that was not asked.
    pub fn answered(&mut self, delay: Nanos) {
        if let Some(wanted) = self.wanted {
            self.peers = delay.clamp(wanted, ACK_DELAY_MIN);
            self.is_answered = true;
        }
    }

    /// Appends the request until it is answered, and one answer for all requests since the last.
    pub fn write(&mut self, out: &mut Vec<u8>) {
        let encoded = |delay: Nanos| u32::try_from(delay).unwrap_or(u32::MAX);
        if let Some(wanted) = self.wanted.filter(|_| !self.is_answered) {
            let delay_nanos = encoded(wanted);
            Frame::AckCadence { is_answer: false, delay_nanos }.encode(out);
        }
        if std::mem::take(&mut self.owes_answer) {
            let delay_nanos = encoded(self.own);
            Frame::AckCadence { is_answer: true, delay_nanos }.encode(out);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::congestion::{Algorithm, Domain, Rules};

    use super::super::frame::Frames;
    use super::*;

    fn uno(near_rtt: Nanos) -> Steering {
        let domain = Domain {
            line_bytes_per_second: 12_500_000_000,
            near_rtt,
            far_rtt: 10_000_000,
            packet_bytes: 0,
        };
        let congestion = Some((Algorithm::Uno(Rules::DEFAULT), domain));
        Steering { congestion, ..Steering::default() }
    }

    fn written(cadence: &mut Cadence) -> Vec<(bool, u32)> {
        let mut out = Vec::new();
        cadence.write(&mut out);
        let read = |frame| match frame {
            Frame::AckCadence { is_answer, delay_nanos } => (is_answer, delay_nanos),
            other => panic!("{other:?}"),
        };
        Frames::new(&out, Version::V6, 1).flatten().map(read).collect()
    }

    #[test]
    fn a_controller_asks_for_a_quarter_of_its_near_round_trip_until_it_is_answered() {
        let mut sender = Cadence::new(Version::V6, &uno(14_000));
        let mut receiver = Cadence::new(Version::V6, &uno(14_000));
        assert_eq!((receiver.own(), sender.peers()), (ACK_DELAY_MIN, ACK_DELAY_MIN));
        for _ in 0..2 {
            assert_eq!(written(&mut sender), [(false, 3500)]);
        }
        receiver.asked(3500);
        assert_eq!(receiver.own(), 3500);
        assert_eq!(written(&mut receiver), [(false, 3500), (true, 3500)]);
        assert_eq!(written(&mut receiver), [(false, 3500)], "one answer for all requests since");
        sender.answered(3500);
        assert_eq!((sender.peers(), written(&mut sender)), (3500, vec![]));
    }

    #[test]
    fn who_needs_no_more_than_usual_does_not_ask() {
        for steering in [Steering::default(), uno(400_000), uno(1_000_000)] {
            let mut cadence = Cadence::new(Version::V6, &steering);
            assert_eq!(written(&mut cadence), []);
            cadence.answered(1);
            assert_eq!(cadence.peers(), ACK_DELAY_MIN, "an answer to nothing");
        }
    }

    #[test]
    fn a_receiver_without_a_controller_agrees_to_what_its_network_allows() {
        let known = Steering { near_rtt: Some(40_000), ..Steering::default() };
        for (steering, agreed) in [(known, 10_000), (Steering::default(), ACK_DELAY_MIN)] {
            let mut receiver = Cadence::new(Version::V6, &steering);
            receiver.asked(3500);
            assert_eq!(
                (receiver.own(), written(&mut receiver)),
                (agreed, vec![(true, agreed as u32)])
            );
        }
    }

    #[test]
    fn in_version_5_nobody_asks_and_both_go_by_their_own_network() {
        let mut cadence = Cadence::new(Version::V5, &uno(14_000));
        assert_eq!((cadence.own(), cadence.peers(), written(&mut cadence)), (3500, 3500, vec![]));
        let known = Steering { near_rtt: Some(40_000), ..Steering::default() };
        assert_eq!(Cadence::new(Version::V5, &known).own(), ACK_DELAY_MIN);
    }

    proptest! {
        #[test]
        fn whatever_a_peer_says_both_delays_stay_within_their_bounds(
            near in 1_000_u64..1_000_000, said: Vec<(bool, u32)>,
        ) {
            let mut cadence = Cadence::new(Version::V6, &uno(near));
            let range = (near / 4).min(ACK_DELAY_MIN)..=ACK_DELAY_MIN;
            for (is_answer, delay) in said {
                if is_answer {
                    cadence.answered(delay.into());
                } else {
                    cadence.asked(delay.into());
                }
                prop_assert!(range.contains(&cadence.own()), "{}", cadence.own());
                prop_assert!(range.contains(&cadence.peers()), "{}", cadence.peers());
                prop_assert!(written(&mut cadence).len() <= 2);
            }
        }
    }
}
