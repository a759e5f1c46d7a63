//! One path: a pair of addresses with its own packet numbers, and everything known about it.
//!
//! Each path numbers its packets separately, so that a late packet on one says nothing about
//! another: loss, round-trip time, marks and packet size are determined for each path.

use std::collections::VecDeque;

use rand_core::Rng;

use crate::link::Nanos;

use super::bursts::Bursts;
use super::candidate::Candidate;
use super::challenges::Challenges;
use super::config::SessionConfig;
use super::datagram::Source;
use super::ecn::{Ecn, PathCounts};
use super::evidence::Evidence;
use super::gaps::{Gaps, LossCounts, Timing};
use super::marking::Marking;
use super::narrow::Narrow;
use super::pacing::Pacer;
use super::probes::{Probe, Probes};
use super::rtt::RoundTrip;
use super::units::Units;
use super::unproven::Unproven;

/// Most answers to the peer's challenges that may wait.
const RESPONSES_MAX: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing is known about it yet.
    Challenged,
    /// It has carried a full-size packet to the peer, whose answer came back on it.
    Validated,
    /// It is too narrow or too congested, and is no longer used.
    Abandoned,
}

/// State of a path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PathState {
    /// Nothing is known about it yet: it is being challenged.
    #[default]
    Challenged,
    /// It carries units.
    Validated,
    /// It was validated but is skipped because nothing has been heard on it; challenges continue.
    Silent,
    /// It is too narrow or too congested, and is no longer used.
    Abandoned,
}

/// Statistics of one path since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathAccount {
    /// Its state.
    pub state: PathState,
    /// Packets sent.
    pub packets_sent: u64,
    /// Wire bytes of these packets.
    pub wire_bytes_sent: u64,
    /// Packets up to the newest that the peer has: arrived, lost or late.
    pub packets_reported: u64,
    /// Packets that arrived, by mark, according to the peer.
    pub received: PathCounts,
    /// Packets that the peer counts as lost on the path and that have not arrived since.
    pub lost_packets: u64,
    /// Runs of consecutive lost packets.
    pub lost_runs: u64,
    /// Runs of lost packets whose length in time is known …
    pub timed_runs: u64,
    /// … and the sum of these lengths.
    pub timed_runs_nanos: Nanos,
    /// Packets that the peer's host dropped, according to the peer.
    pub dropped_packets: u64,
    /// Wire bytes sent after the newest packet that the peer has reported; may be too high by 0.4 %
    /// of a round trip's bytes.
    pub in_flight_bytes: u64,
    /// Smoothed round-trip time in nanoseconds; 0 before the first sample.
    pub srtt: Nanos,
    /// Packets received from the peer on this path, by mark.
    pub arrived: PathCounts,
}

/// Limits for all paths of a session together.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Wire bytes per second.
    pub rate_bytes_per_second: u64,
    /// Wire bytes of the largest packet.
    pub packet_bytes_max: u64,
}

impl Pace {
    /// The limits of a session.
    #[must_use]
    pub fn of(config: &SessionConfig) -> Self {
        let rate_bytes_per_second = config.rate_bytes_per_second;
        Self { rate_bytes_per_second, packet_bytes_max: config.packet_bytes_max() as u64 }
    }

    /// A pacer with a full bucket.
    #[must_use]
    pub fn pacer(self, now: Nanos) -> Pacer {
        Pacer::new(self.rate_bytes_per_second, self.packet_bytes_max, now)
    }
}

/// The newest packet received on a path.
#[derive(Debug, Clone, Copy)]
pub struct Newest {
    /// Its number.
    pub number: u64,
    /// When it was read …
    pub at: Nanos,
    /// … for which it may have waited.
    pub is_late: bool,
}

/// One path of one end.
#[derive(Debug)]
pub struct Path {
    state: State,
    /// Units on it have waited for a time-out without any report about it, and other paths are
    /// usable.
    pub is_silent: bool,
    /// Round trip and time-out.
    pub rtt: RoundTrip,
    /// Challenges that ask the peer whether the path carries packets …
    pub challenges: Challenges,
    /// … and waiting answers to its challenges: (token, plaintext bytes of the challenge packet).
    pub responses: VecDeque<(u64, usize)>,
    /// A probe has to leave …
    pub probe: Option<Probe>,
    /// … followed by the oldest unit, even if it is in flight.
    pub is_carrying: bool,
    /// Schedule of the probes.
    pub probes: Probes,
    /// Largest unit whose packets have passed in both directions; 0 before any has.
    pub carried_unit_bytes: u16,
    /// The packet with the largest number received.
    pub newest: Option<Newest>,
    /// The one up to which the peer was told of arrivals: only acknowledgements tell of them again.
    pub counted: Option<u64>,
    /// The peer's packets that did not arrive …
    pub gaps: Gaps,
    /// … and those that did.
    pub arrived: PathCounts,
    /// The mark with which the peer's packets leave, as far as known.
    usual_mark: Ecn,
    /// ECN marking of outgoing packets.
    pub marking: Marking,
    /// Detection that it has become too narrow.
    pub narrow: Narrow,
    /// This end's packets that did not arrive, according to the peer.
    pub peer_losses: LossCounts,
    /// Losses not attributable to queues.
    pub evidence: Evidence,
    /// How long runs of them lasted.
    pub bursts: Bursts,
    /// Packets sent up to the newest that the peer has.
    pub packets_reported: u64,
    /// When the newest packet that the peer has reported was sent.
    pub reported_sent_at: Nanos,
    /// Whether a packet has come on it from the address that the peer stated.
    pub is_as_stated: bool,
    /// What was exchanged with its address until that has answered.
    pub unproven: Unproven,
    /// Where the peer may have moved to …
    candidate: Option<Candidate>,
    /// … and until when no other address is considered.
    settled_until: Nanos,
    packets_sent: u64,
    wire_bytes_sent: u64,
    /// Set if the path's rate is below the session's.
    pacer: Option<Pacer>,
}

impl Path {
    /// Creates a path about which nothing is known. `reordering`: the skew that both ends know;
    /// `units`: the units to try on it; `has_canaries`: whether congestion control relies on marks.
    #[must_use]
    pub fn new(reordering: Nanos, units: Units, has_canaries: bool, now: Nanos) -> Self {
        let mut challenges = Challenges::default();
        challenges.search(units, now);
        Self {
            state: State::Challenged,
            is_silent: false,
            rtt: RoundTrip::default(),
            challenges,
            responses: VecDeque::new(),
            probe: None,
            is_carrying: false,
            probes: Probes::default(),
            carried_unit_bytes: 0,
            newest: None,
            counted: None,
            gaps: Gaps::new(reordering),
            arrived: PathCounts::default(),
            usual_mark: Ecn::NotEct,
            marking: Marking::new(has_canaries),
            narrow: Narrow::default(),
            peer_losses: LossCounts::default(),
            evidence: Evidence::default(),
            bursts: Bursts::default(),
            packets_reported: 0,
            reported_sent_at: 0,
            is_as_stated: false,
            unproven: Unproven::default(),
            candidate: None,
            settled_until: 0,
            packets_sent: 0,
            wire_bytes_sent: 0,
            pacer: None,
        }
    }

    /// Whether it carries units.
    #[must_use]
    pub fn is_validated(&self) -> bool {
        self.state == State::Validated
    }

    /// Whether nothing is known about it yet.
    #[must_use]
    pub fn is_challenged(&self) -> bool {
        self.state == State::Challenged
    }

    /// Marks it as validated: it carries units from now on.
    pub fn validated(&mut self) {
        self.is_silent = false;
        if self.state == State::Challenged {
            self.state = State::Validated;
        }
    }

    /// Stops using it.
    pub fn abandon(&mut self) {
        self.state = State::Abandoned;
        self.candidate = None;
        self.challenges = Challenges::default();
        self.responses.clear();
        self.probe = None;
        self.is_carrying = false;
    }

    /// Whether it is no longer used.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.state == State::Abandoned
    }

    /// Starts to test whether it carries packets of these units.
    pub fn search(&mut self, units: Units, now: Nanos) {
        self.carried_unit_bytes = 0;
        self.challenges.search(units, now);
    }

    /// Where the peer may have moved to.
    #[must_use]
    pub fn candidate(&self) -> Option<&Candidate> {
        self.candidate.as_ref()
    }

    /// See [`Self::candidate`].
    pub fn candidate_mut(&mut self) -> Option<&mut Candidate> {
        self.candidate.as_mut()
    }

    /// Considers another address, from which the path's newest packet came; false if it has a
    /// candidate that may still answer, or has refused one lately. Both addresses are challenged.
    pub fn consider(&mut self, units: Units, now: Nanos) -> bool {
        let is_free = self.candidate.as_ref().is_none_or(|known| known.is_replaceable(now));
        let is_new = self.is_validated() && is_free && now >= self.settled_until;
        if is_new {
            self.candidate = Some(Candidate::new(units, self.rtt.timeout(), now));
            self.challenges.hurry(now);
        }
        is_new
    }

    /// Records that a challenge leaves for the present address.
    pub fn asked(&mut self, now: Nanos) {
        if let Some(candidate) = &mut self.candidate {
            candidate.asked(now);
        }
    }

    /// A packet newer than the candidate's comes from the present address: refuses the candidate,
    /// and considers no other for a short time, so that whoever overtakes or imitates some packets
    /// gets no challenge for each.
    pub fn heard_here(&mut self, now: Nanos) {
        if let Some(refused) = self.candidate.take() {
            self.settled_until = now.saturating_add(refused.patience());
        }
    }

    /// A challenge that left for the present address at `sent_at` was answered: refuses the
    /// candidate if that was later.
    pub fn answered_here(&mut self, sent_at: Nanos, now: Nanos) {
        if let Some(refused) = self.candidate.take_if(|known| known.was_asked_by(sent_at)) {
            self.settled_until = now.saturating_add(refused.life());
        }
    }

    /// Moves to the candidate if full-size packets reach the peer there; otherwise drops it. Returns
    /// whether it moves.
    pub fn settle_candidate(&mut self) -> bool {
        let Some(candidate) = self.candidate.take_if(|known| known.has_carried()) else {
            self.candidate = None;
            return false;
        };
        self.unproven = candidate.unproven;
        self.is_silent = false;
        self.challenges.stop();
        self.narrow.forget();
        true
    }

    /// Queues the answer to a challenge of the peer, which must be as large as the challenge.
    pub fn challenge_received(&mut self, token: u64, plaintext_bytes: usize) {
        if self.is_abandoned() {
            return;
        }
        if self.responses.len() == RESPONSES_MAX {
            self.responses.pop_front();
        }
        self.responses.push_back((token, plaintext_bytes));
    }

    /// When a control packet has to leave on this path in particular.
    #[must_use]
    pub fn control_due(&self, now: Nanos) -> Option<Nanos> {
        let is_at_once = !self.responses.is_empty() || self.probe.is_some();
        let at_once = is_at_once.then_some(now);
        [at_once, self.challenges.due()].into_iter().flatten().min()
    }

    /// Counts the mark of an authentic packet. One that came another way says nothing about the
    /// path's marks.
    pub fn mark_received(&mut self, source: Source, mark: Ecn) {
        if source == Source::Path || self.is_challenged() {
            self.arrived.add(mark);
            self.usual_mark = if mark == Ecn::Ce { self.usual_mark } else { mark };
        } else {
            self.arrived.add(self.usual_mark);
        }
    }

    /// Records the arrival of an authentic packet, which may have waited unread; returns whether it
    /// is the newest.
    pub fn packet_received(&mut self, number: u64, is_late: bool, now: Nanos) -> bool {
        let is_newest = self.newest.is_none_or(|newest| number > newest.number);
        if is_newest {
            self.newest = Some(Newest { number, at: now, is_late });
        }
        self.gaps.packet_received(number, self.timing(), now);
        is_newest
    }

    /// Records that the packet with this number leaves. `random`: where canaries come from.
    pub fn sent(&mut self, number: u64, wire_bytes: u64, random: &mut impl Rng, now: Nanos) {
        let state = (self.state != State::Challenged, self.peer_losses.lost);
        self.marking.packet_sent(number, state, random, now);
        self.packets_sent += 1;
        self.wire_bytes_sent += wire_bytes;
        if let Some(pacer) = &mut self.pacer {
            pacer.sent(wire_bytes, now);
        }
        self.rtt.packet_sent((number, self.wire_bytes_sent), now);
        self.bursts.packet_sent(number, self.rtt.smoothed(), now);
    }

    /// Sets its rate in wire bytes per second.
    pub fn allow(&mut self, rate: u64, pace: Pace, now: Nanos) {
        if rate >= pace.rate_bytes_per_second {
            self.pacer = None;
        } else if let Some(pacer) = &mut self.pacer {
            pacer.set_rate(rate, now);
        } else {
            let mut pacer = Pacer::new(rate, pace.packet_bytes_max, now);
            pacer.restart(now);
            self.pacer = Some(pacer);
        }
    }

    /// When a packet may leave on it.
    #[must_use]
    pub fn paced_at(&self) -> Nanos {
        self.pacer.as_ref().map_or(0, Pacer::next_at)
    }

    /// The times that decide when a late packet counts as lost.
    #[must_use]
    pub fn timing(&self) -> Timing {
        Timing { srtt: self.rtt.smoothed(), timeout: self.rtt.timeout() }
    }

    /// Statistics of its packets.
    #[must_use]
    pub fn account(&self) -> PathAccount {
        PathAccount {
            state: self.public_state(),
            packets_sent: self.packets_sent,
            wire_bytes_sent: self.wire_bytes_sent,
            packets_reported: self.packets_reported,
            received: self.marking.peer(),
            lost_packets: self.peer_losses.lost.saturating_sub(self.peer_losses.found),
            lost_runs: self.peer_losses.runs,
            timed_runs: self.bursts.runs(),
            timed_runs_nanos: self.bursts.nanos(),
            dropped_packets: self.peer_losses.dropped,
            in_flight_bytes: self.in_flight_bytes(),
            srtt: self.rtt.smoothed().unwrap_or(0),
            arrived: self.arrived,
        }
    }

    fn public_state(&self) -> PathState {
        match self.state {
            State::Challenged => PathState::Challenged,
            State::Validated if self.is_silent => PathState::Silent,
            State::Validated => PathState::Validated,
            State::Abandoned => PathState::Abandoned,
        }
    }

    fn in_flight_bytes(&self) -> u64 {
        self.wire_bytes_sent - self.rtt.reported_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_present_address_is_asked_at_once_even_if_a_challenge_left_lately() {
        let units = Units::fixed(1408);
        let mut path = Path::new(0, units, false, 0);
        path.validated();
        path.challenges.stop();
        path.challenges.start(0);
        path.challenges.sent(1, Some(5_000_000), 0);
        assert!(path.challenges.due() > Some(10_000_000));
        assert!(path.consider(units, 10_000_000));
        assert_eq!(path.challenges.due(), Some(10_000_000));
    }
}
