//! What comes of an authentic packet.

use crate::aead::TAG_BYTES;
use crate::link::Nanos;

use super::breaker::{Report, Verdict};
use super::challenges::Answer;
use super::ecn::PathCounts;
use super::frame::{Frame, Frames, NO_PACKET};
use super::packet::{Header, IP_UDP_BYTES, Kind};
use super::receiver::{Outcome, StreamEnd, Unit};
use super::types::{Arrival, CloseReason, Detection, Event, Memory, Source};
use super::{Session, State, frame, layout, packet};

impl Session {
    pub(super) fn authentic(
        &mut self,
        header: &Header,
        plaintext: &[u8],
        arrival: Arrival,
        memory: &mut impl Memory,
        now: Nanos,
    ) {
        self.last_received = now;
        self.silent_since = now;
        if std::mem::take(&mut self.is_stalled) {
            self.statistics.stalled_nanos += now.saturating_sub(self.stalled_since);
        }
        self.statistics.packets_received += 1;
        self.counts.add(arrival.ecn);
        self.control.packet_received(header.packet_number, now);
        self.gaps.packet_received(header.packet_number, self.timing(), now);
        self.is_elsewhere = arrival.source == Source::Elsewhere;
        self.packet_received(header, plaintext, memory, now);
        if self.is_elsewhere {
            self.control.challenges_mut().search(now);
        }
    }

    fn packet_received(
        &mut self,
        header: &Header,
        plaintext: &[u8],
        memory: &mut impl Memory,
        now: Nanos,
    ) {
        let payload_bytes = match header.kind {
            Kind::Control => {
                self.control_received(plaintext, memory, now);
                plaintext.len() + packet::HEADER_BYTES
            }
            Kind::Unit { message, unit, length, k, m, is_stream, immediate } => {
                let unit = Unit { message, coded: unit, length, k, m, is_stream, immediate };
                self.unit_received(unit, plaintext, memory, now)
            }
        };
        self.statistics.wire_bytes_received += (payload_bytes + TAG_BYTES + IP_UDP_BYTES) as u64;
    }

    fn unit_received(
        &mut self,
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
                // An uncoded message has ended with all of its units, unless one end gave it up.
                if unit.k == 0 {
                    self.gaps.duplicate();
                }
                self.control.acknowledge_later(&self.rtt, now);
                self.control.notices_missed(now);
            }
            Outcome::Duplicate => {
                self.gaps.duplicate();
                self.control.acknowledge_later(&self.rtt, now);
            }
            _ => self.control.acknowledge_later(&self.rtt, now),
        }
        let immediate_bytes = unit.immediate.map_or(0, |_| packet::IMMEDIATE_BYTES);
        let layout = layout::Layout::new(unit.length, self.config.unit_bytes, unit.k, unit.m);
        let layout = layout.filter(|layout| unit.coded < layout.coded_units());
        let payload_bytes =
            layout.map_or(payload.len(), |layout| layout.payload_length(unit.coded));
        packet::HEADER_BYTES + packet::DESCRIPTOR_BYTES + immediate_bytes + payload_bytes
    }

    fn control_received(&mut self, plaintext: &[u8], memory: &mut impl Memory, now: Nanos) {
        let frames = Frames::new(plaintext);
        if frames.validate().is_err() {
            self.statistics.malformed += 1;
            return;
        }
        for frame in frames.flatten() {
            self.frame_received(frame, memory, now);
            if matches!(self.state, State::Closing | State::Closed) {
                return;
            }
        }
        self.sender.prune();
        self.sender.advance(now, &mut self.events);
        self.refresh_notices(now);
        self.finish_drain(now);
    }

    fn frame_received(&mut self, frame: Frame<'_>, memory: &mut impl Memory, now: Nanos) {
        match frame {
            Frame::Ack { completed_end, credit_end, packet_number, delay_nanos } => {
                if packet_number != NO_PACKET {
                    self.protection.acknowledged(packet_number);
                    let end = packet_number.saturating_add(1);
                    let end = end.min(self.protection.next_packet_number());
                    self.reported_end = self.reported_end.max(end);
                    self.rtt.echo_received(packet_number, delay_nanos.into(), now);
                }
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
            Frame::Losses { runs } => {
                if self.config.detection == Detection::Reports {
                    self.sender.losses_received(frame::lost_runs(runs));
                }
            }
            Frame::LossCounts { counts } => self.peer_losses.merge(counts),
            Frame::PathChallenge { token } => {
                self.control.challenge_received(token);
                self.control.acknowledge_now(now);
            }
            Frame::PathCounts { counts } => self.counts_received(counts, now),
            Frame::PathResponse { .. } if self.is_elsewhere => {}
            Frame::PathResponse { token } => self.response_received(token, now),
            Frame::Draining { is_done } => {
                self.control.drain_mut().peer_said(is_done);
                self.drain(now);
            }
            Frame::Close { code } => {
                self.end(CloseReason::from_code(code), true, now);
                self.state = State::Closed;
            }
        }
    }

    fn counts_received(&mut self, counts: PathCounts, now: Nanos) {
        self.marking.counts_received(counts);
        self.narrow.received(counts.received);
        if self.narrow.is_suspected(self.rtt.timeout(), now)
            && !self.is_stalled
            && !self.control.challenges().is_searching()
        {
            self.control.challenges_mut().search(now);
        }
        let report = Report {
            sent: self.reported_end,
            received: counts.received,
            ce: counts.ce,
            wire_bytes: self.statistics.wire_bytes_sent,
            srtt: self.rtt.smoothed().unwrap_or(0),
        };
        match self.breaker.report(report, now) {
            Verdict::Unchanged => {}
            Verdict::Rate(rate) => self.pacer.set_rate(rate, now),
            Verdict::Fatal => self.close(CloseReason::PathOverloaded, now),
        }
    }

    fn response_received(&mut self, token: u64, now: Nanos) {
        match self.control.challenges_mut().answered(token, now) {
            None | Some(Answer::Small) => {}
            Some(Answer::TooNarrow) => self.close(CloseReason::PathMtu, now),
            Some(Answer::Validated(rtt)) => {
                self.narrow.forget();
                if self.state == State::Connecting {
                    let packet_bytes = self.config.datagram_bytes_max() + IP_UDP_BYTES;
                    self.path_mtu_bytes = packet_bytes as u64;
                    self.rtt.sample(rtt);
                    self.state = State::Established;
                    self.events.push(Event::Established { rtt }, 0);
                }
            }
        }
    }
}
