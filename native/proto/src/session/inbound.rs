//! Processing of authentic packets.

use crate::aead::TAG_BYTES;
use crate::link::Nanos;

use super::challenges::Answer;
use super::config::{Detection, SessionConfig};
use super::congestion::Verdict;
use super::datagram::{Arrival, Follow, Source};
use super::ecn::PathCounts;
use super::events::{CloseReason, Event};
use super::frame::{Frame, Frames};
use super::pacing::BURST_PACKETS;
use super::packet::{Header, Kind};
use super::path::Pace;
use super::paths::PathId;
use super::receiver::{Outcome, Receiver, StreamEnd, Unit};
use super::requests::Memory;
use super::rtt::Echo;
use super::sender::Sender;
use super::unproven::Unproven;
use super::{Session, State, frame, layout, packet};

/// A window leaves in at least this many bursts …
const BURSTS_PER_WINDOW: u64 = 8;
/// … of at least this many packets, or each would cost a wake-up.
const BURST_PACKETS_MIN: u64 = 2;

impl Session {
    pub(super) fn authentic(
        &mut self,
        header: &Header,
        plaintext: &[u8],
        arrival: Arrival,
        memory: &mut impl Memory,
        now: Nanos,
    ) -> Follow {
        let Some((path, is_to_candidate)) = self.paths.with_channel(header.channel) else {
            return Follow::Nowhere;
        };
        self.last_received = now;
        self.silent_since = now;
        if std::mem::take(&mut self.is_stalled) {
            self.statistics.stalled_nanos += now.saturating_sub(self.stalled_since);
            // Losses during the silence say nothing about packet sizes.
            self.paths.iter_mut().for_each(|(_, path)| path.narrow.forget());
        }
        self.statistics.packets_received += 1;
        self.paths.heard(path);
        let heard = &mut self.paths[path];
        self.source = match arrival.source {
            // The caller still remembers a candidate that was refused.
            Source::Candidate if heard.candidate().is_none() => Source::Elsewhere,
            Source::Unnamed => Source::Path,
            source => source,
        };
        if is_to_candidate {
            // Its number, and the way it took, say nothing about the path.
            if header.kind == Kind::Control {
                self.packet_received(path, header, plaintext, memory, now);
            } else {
                self.statistics.malformed += 1;
            }
            return Follow::Nowhere;
        }
        heard.is_as_stated |= arrival.source == Source::Path;
        heard.mark_received(self.source, arrival.ecn);
        let is_newest = heard.packet_received(header.packet_number, self.is_reading_late, now);
        let follow = match self.source {
            Source::Elsewhere if heard.is_challenged() => {
                heard.unproven = Unproven::default();
                Follow::Path
            }
            Source::Elsewhere if is_newest && heard.consider(self.units.units(), now) => {
                self.considering = self.considering.with(path);
                Follow::Candidate
            }
            Source::Path if is_newest => {
                heard.heard_here(now);
                Follow::Nowhere
            }
            _ => Follow::Nowhere,
        };
        let bytes = plaintext.len() as u64;
        match heard.candidate_mut() {
            Some(candidate) if follow == Follow::Candidate || self.source == Source::Candidate => {
                candidate.unproven.received(bytes);
            }
            _ if arrival.source == Source::Unnamed => {}
            _ if self.source == Source::Path || follow == Follow::Path => {
                heard.unproven.received(bytes);
            }
            _ => {}
        }
        self.packet_received(path, header, plaintext, memory, now);
        if follow == Follow::Path {
            self.paths.end_early();
            self.paths[path].search(self.units.units(), now);
        }
        follow
    }

    fn packet_received(
        &mut self,
        path: PathId,
        header: &Header,
        plaintext: &[u8],
        memory: &mut impl Memory,
        now: Nanos,
    ) {
        let payload_bytes = match header.kind {
            Kind::Control => {
                self.control_received(path, plaintext, memory, now);
                plaintext.len() + packet::HEADER_BYTES
            }
            Kind::Unit { message, unit, length, k, m, is_stream, immediate } => {
                let unit = Unit { message, coded: unit, length, k, m, is_stream, immediate };
                self.unit_received(path, unit, plaintext, memory, now)
            }
        };
        let wire_bytes = payload_bytes + TAG_BYTES + self.config.ip.header_bytes();
        self.statistics.wire_bytes_received += wire_bytes as u64;
    }

    fn unit_received(
        &mut self,
        path: PathId,
        unit: Unit,
        payload: &[u8],
        memory: &mut impl Memory,
        now: Nanos,
    ) -> usize {
        let outcome = self.receiver.unit_received(unit, payload, memory, &mut self.events);
        let counter = match outcome {
            Outcome::Landed | Outcome::Completed => &mut self.statistics.units_received,
            Outcome::Duplicate => &mut self.statistics.duplicates,
            Outcome::Surplus => &mut self.statistics.surplus,
            Outcome::Late | Outcome::TooLong => &mut self.statistics.late,
            Outcome::Unposted => &mut self.statistics.unposted,
            Outcome::Malformed => &mut self.statistics.malformed,
            Outcome::ScratchFull => &mut self.statistics.scratch_full,
        };
        *counter += 1;
        match outcome {
            Outcome::Completed => self.control.message_ended(now),
            Outcome::TooLong => self.refresh_notices(now),
            Outcome::Late => {
                // An uncoded message has ended with all its units, unless one end aborted it.
                if unit.k == 0 {
                    self.paths[path].gaps.duplicate();
                }
                self.control.acknowledge_later(&self.paths[path].rtt, now);
                self.control.notices_missed(now);
            }
            Outcome::Duplicate => {
                self.paths[path].gaps.duplicate();
                self.control.acknowledge_later(&self.paths[path].rtt, now);
            }
            _ => self.control.acknowledge_later(&self.paths[path].rtt, now),
        }
        let immediate_bytes = unit.immediate.map_or(0, |_| packet::IMMEDIATE_BYTES);
        let layout = layout::Layout::new(unit.length, self.config.unit_bytes, unit.k, unit.m);
        let layout = layout.filter(|layout| unit.coded < layout.coded_units());
        let payload_bytes =
            layout.map_or(payload.len(), |layout| layout.payload_length(unit.coded));
        packet::HEADER_BYTES + packet::DESCRIPTOR_BYTES + immediate_bytes + payload_bytes
    }

    fn control_received(
        &mut self,
        path: PathId,
        plaintext: &[u8],
        memory: &mut impl Memory,
        now: Nanos,
    ) {
        let frames = Frames::new(plaintext, self.config.version, self.paths.count());
        if frames.validate().is_err() {
            self.statistics.malformed += 1;
            return;
        }
        self.sender.begin_reports();
        for frame in frames.flatten() {
            self.frame_received((path, plaintext.len()), frame, memory, now);
            if matches!(self.state, State::Closing | State::Closed) {
                return;
            }
        }
        self.sender.prune();
        self.sender.advance(now, &mut self.events);
        self.refresh_notices(now);
        self.finish_drain(now);
    }

    fn frame_received(
        &mut self,
        (path, plaintext_bytes): (PathId, usize),
        frame: Frame<'_>,
        memory: &mut impl Memory,
        now: Nanos,
    ) {
        match frame {
            Frame::Ack { completed_end, credit_end } => {
                let posted_end = self.receiver.posted_end();
                self.control.credit_confirmed(credit_end, posted_end, now);
                self.sender.completed_end_received(completed_end, now, &mut self.events);
            }
            Frame::Slice { message, cumulative, start, bitmap } => {
                let slice = (cumulative, start, bitmap);
                self.sender.slice_received(message, slice, now, &mut self.events);
            }
            Frame::Credit { start, lengths } => {
                self.sender.credit_received(start, frame::credit_lengths(lengths));
                self.control.acknowledge_now(now);
            }
            Frame::AbortSend { message, reason } => {
                self.receiver.abort_received(message, reason, &mut self.events);
                self.control.message_ended(now);
            }
            Frame::AbortReceive { message, reason } => {
                self.sender.abort_received(message, reason, now, &mut self.events);
                self.control.notices_missed(now);
            }
            Frame::StreamEnd { message, units, length, immediate } => {
                let end = StreamEnd { message, units, length, immediate };
                let outcome = self.receiver.stream_end_received(end, memory, &mut self.events);
                self.statistics.malformed += u64::from(outcome == Outcome::Malformed);
                if outcome == Outcome::Completed {
                    self.control.message_ended(now);
                } else {
                    self.control.acknowledge_now(now);
                }
            }
            Frame::Ping => self.control.acknowledge_now(now),
            Frame::Losses { path, runs } => {
                let known = &mut self.paths[path];
                let timeout = known.timing().timeout;
                for (start, end) in frame::lost_runs(runs) {
                    known.bursts.lost(start, end, timeout);
                }
                if self.config.detection == Detection::Reports {
                    self.sender.losses_received(path, frame::lost_runs(runs));
                }
            }
            Frame::LossCounts { path, counts } => self.paths[path].peer_losses.merge(counts),
            Frame::PathChallenge { token } => {
                self.paths[path].challenge_received(token, plaintext_bytes);
                self.control.acknowledge_now(now);
            }
            Frame::PathCounts { path: reported, newest, age_nanos, counts } => {
                let is_measured = age_nanos < u32::MAX && !self.is_reading_late;
                let age = is_measured.then_some(age_nanos.into());
                let echo = self.newest_received((path, reported), newest, age, now);
                self.counts_received(reported, counts, echo, now);
            }
            Frame::PathResponse { token } => self.response_received(path, token, now),
            Frame::Unit { unit_bytes } => self.unit_announced(unit_bytes, now),
            Frame::AckCadence { is_answer: false, delay_nanos } => {
                self.control.cadence_mut().asked(delay_nanos.into());
            }
            Frame::AckCadence { is_answer: true, delay_nanos } => {
                self.control.cadence_mut().answered(delay_nanos.into());
            }
            Frame::Draining { is_done } => {
                self.control.drain_mut().peer_reported(is_done);
                self.begin_drain(true, now);
            }
            Frame::Close { code } => {
                self.end(CloseReason::from_code(code), true, now);
                self.state = State::Closed;
            }
        }
    }

    /// Processes the newest packet of a path that the peer has, reported on the same or another
    /// path, and how long the peer has had it, unless that is too long to encode.
    fn newest_received(
        &mut self,
        (on, path): (PathId, PathId),
        number: u64,
        age: Option<Nanos>,
        now: Nanos,
    ) -> Option<Echo> {
        self.protection.acknowledged(path, number);
        let sent = self.protection.next_packet_number(path);
        let reported = number.saturating_add(1).min(sent);
        let known = &mut self.paths[path];
        if reported > known.packets_reported {
            known.packets_reported = reported;
            known.is_silent = false;
        }
        let echo = known.rtt.echo_received(number, age.filter(|_| on == path), now);
        self.paths.measured();
        echo
    }

    fn counts_received(
        &mut self,
        path: PathId,
        counts: PathCounts,
        echo: Option<Echo>,
        now: Nanos,
    ) {
        let known = &mut self.paths[path];
        let newest = (known.packets_reported, known.peer_losses.lost);
        known.marking.counts_received(counts, newest, now);
        known.narrow.received(counts.received);
        if known.is_validated()
            && known.narrow.is_suspected(known.rtt.timeout(), now)
            && !self.is_stalled
            && !known.challenges.is_searching()
        {
            known.search(self.units.units(), now);
        }
        let window = self.window_units();
        let is_used = window.is_some_and(|window| self.usage.is_filled(window));
        let is_limited = is_used && self.has_units();
        if self.paths.reported(path, echo, is_limited, now) == Verdict::Hopeless {
            self.abandon(path, CloseReason::PathOverloaded, now);
        }
        self.adopt_rate(now);
    }

    /// Adopts the congestion controller's rate.
    pub(super) fn adopt_rate(&mut self, now: Nanos) {
        let Some(allowance) = self.paths.congestion().allowance() else { return };
        let rate = allowance.rate_bytes_per_second.min(self.config.rate_bytes_per_second);
        let window_packets = allowance.window_bytes / self.config.packet_bytes_max() as u64;
        let burst = (window_packets / BURSTS_PER_WINDOW).clamp(BURST_PACKETS_MIN, BURST_PACKETS);
        self.pacer.adjust(rate, burst, now);
    }

    fn response_received(&mut self, path: PathId, token: u64, now: Nanos) {
        let known = &mut self.paths[path];
        let candidate = known.candidate_mut().filter(|_| self.source == Source::Candidate);
        if candidate.is_some_and(|candidate| candidate.answered(token, now)) {
            return;
        }
        // An answer from elsewhere shows that the peer receives where the path goes, but not that
        // the path is open in both directions.
        if !(self.source == Source::Path || known.is_validated()) {
            return;
        }
        let sent_at = known.challenges.sent_at(token);
        let answer = known.challenges.answered(token, now);
        if let Some(sent_at) = sent_at {
            known.unproven.proven();
            known.answered_here(sent_at, now);
        }
        match answer {
            None | Some(Answer::Small) => {}
            Some(Answer::TooNarrow) => self.abandon(path, CloseReason::PathMtu, now),
            Some(Answer::Alive(_)) => self.path_answered(path),
            Some(Answer::Carried { unit_bytes, rtt }) => {
                let known = &mut self.paths[path];
                known.carried_unit_bytes = known.carried_unit_bytes.max(unit_bytes);
                if !known.is_validated() {
                    known.rtt.sample(rtt, now);
                }
                if let Some(unit_bytes) = self.units.carried(unit_bytes) {
                    self.decide_unit(unit_bytes, now);
                }
                self.validate_paths(now);
            }
        }
    }

    /// Processes the session's unit as sent by the peer.
    fn unit_announced(&mut self, unit_bytes: u16, now: Nanos) {
        if !self.units.has(unit_bytes) {
            self.statistics.malformed += 1;
            return;
        }
        if !self.units.is_decided() {
            self.decide_unit(unit_bytes, now);
        }
        self.units.announced(now);
        self.validate_paths(now);
    }

    /// Sets the session's unit. Sender and receiver start over with it; they have not been used
    /// yet.
    fn decide_unit(&mut self, unit_bytes: u16, now: Nanos) {
        self.units.decided(unit_bytes, now);
        self.config.unit_bytes = unit_bytes;
        let SessionConfig { chunk_units, slots, paths, payload, .. } = self.config;
        self.sender = Sender::new(unit_bytes, slots, paths);
        self.receiver = Receiver::new(unit_bytes, chunk_units, slots, payload);
        self.pacer = Pace::of(&self.config).pacer(now);
        self.paths.unit_decided(&self.config, now);
    }

    /// Validates the paths that are known to carry the session's unit.
    fn validate_paths(&mut self, now: Nanos) {
        if !self.units.is_decided() {
            return;
        }
        for path in (0..self.paths.count()).map(PathId) {
            let known = &mut self.paths[path];
            let is_enough = known.carried_unit_bytes >= self.config.unit_bytes;
            if !(is_enough && known.challenges.is_searching()) {
                continue;
            }
            known.challenges.stop();
            known.narrow.forget();
            self.path_answered(path);
        }
        let rtt = self.paths.srtt().filter(|_| self.state == State::Connecting);
        if let Some(rtt) = rtt {
            self.path_mtu_bytes = self.config.packet_bytes_max() as u64;
            self.state = State::Established;
            self.paths.end_early();
            // What left early on another path than the validated one is sent again.
            for path in (0..self.paths.count()).map(PathId) {
                if self.paths[path].is_challenged() {
                    self.sender.abandon_path(path);
                }
            }
            let timeout = self.paths.timeout();
            self.paths.congestion_mut().established(&self.config, rtt, timeout, now);
            self.adopt_rate(now);
            self.events.push(Event::Established { rtt }, 0);
        }
    }

    fn path_answered(&mut self, path: PathId) {
        self.paths[path].validated();
        self.paths.measured();
    }

    /// Abandons a path that is unusable; if it was the last one, the session ends.
    fn abandon(&mut self, path: PathId, reason: CloseReason, now: Nanos) {
        let is_last = self.paths.iter().all(|(id, other)| id == path || other.is_abandoned());
        if is_last {
            return self.close(reason, now);
        }
        self.paths[path].abandon();
        self.paths.failed(path);
        self.sender.abandon_path(path);
    }
}
