//! What leaves: probes, control packets, units.

use crate::aead::TAG_BYTES;
use crate::link::Nanos;

use super::challenges::CHALLENGE_INTERVAL;
use super::control::Halves;
use super::gaps::Timing;
use super::packet::{DATA_OVERHEAD_BYTES_MAX, IP_UDP_BYTES, Kind};
use super::types::{Detection, Memory, PayloadMode};
use super::{PROBES_PER_IDLE_TIMEOUT, STALL_TIMEOUTS, Session, State, packet};

impl Session {
    /// When silence of the peer calls for a challenge or a stall, if it has not yet.
    pub(super) fn probe_at(&self) -> Option<Nanos> {
        let is_waiting = self.sender.has_outstanding();
        let is_challenging = self.control.challenges().due().is_some();
        let is_done = is_challenging && (self.is_stalled || !is_waiting);
        if self.state != State::Established || is_done {
            return None;
        }
        let patience = self.config.idle_timeout / PROBES_PER_IDLE_TIMEOUT;
        let silence = if is_waiting {
            patience.min(self.rtt.timeout().saturating_mul(STALL_TIMEOUTS))
        } else {
            patience
        };
        Some(self.silent_since.saturating_add(silence))
    }

    pub(super) fn probe(&mut self, now: Nanos) {
        if self.probe_at().is_none_or(|at| at > now) {
            return;
        }
        self.control.challenges_mut().start(now);
        if self.sender.has_outstanding() && !self.is_stalled {
            self.is_stalled = true;
            self.stalled_since = now;
            self.breaker.interrupt();
            self.narrow.forget();
            self.statistics.stalls += 1;
        }
    }

    pub(super) fn timing(&self) -> Timing {
        Timing { srtt: self.rtt.smoothed(), timeout: self.rtt.timeout() }
    }

    /// When a probe is due behind the last unit, while units are unacknowledged and nothing else is
    /// to be sent, or may be.
    pub(super) fn tail_probe_at(&self) -> Option<Nanos> {
        let is_quiet = self.is_stalled || !(self.sender.has_new() || self.sender.has_lost());
        let is_waiting = self.state == State::Established
            && self.config.detection == Detection::Reports
            && self.sender.has_outstanding();
        (is_quiet && is_waiting)
            .then(|| self.probes.next_at(self.rtt.smoothed().unwrap_or(CHALLENGE_INTERVAL)))
    }

    pub(super) fn probe_tail(&mut self, now: Nanos) {
        if self.tail_probe_at().is_some_and(|at| at <= now) {
            let is_answered = self.probes.sent(now);
            self.control.probe(is_answered);
            self.statistics.probes_sent += 1;
        }
    }

    pub(super) fn transmit_control(&mut self, now: Nanos, out: &mut Vec<u8>) -> bool {
        let start = out.len();
        let halves = Halves {
            sender: &self.sender,
            receiver: &self.receiver,
            packet_number: self.protection.next_packet_number(),
            is_established: self.state == State::Established,
            counts: self.counts,
            srtt: self.rtt.smoothed().unwrap_or(CHALLENGE_INTERVAL),
            timeout: self.rtt.timeout(),
        };
        let Some(packet) = self.protection.begin(Kind::Control, out) else { return false };
        let room = usize::from(self.config.unit_bytes) + DATA_OVERHEAD_BYTES_MAX
            - packet::HEADER_BYTES
            - TAG_BYTES;
        self.control.write(out, room, &halves, &mut self.gaps, now);
        if self.gaps.is_unreported() {
            self.control.acknowledge_now(now);
        } else if self.gaps.is_repeating() {
            self.control.acknowledge_later(&self.rtt, now);
        }
        let wire_bytes = out.len() - start + TAG_BYTES + IP_UDP_BYTES;
        self.protection.finish(packet, out);
        self.statistics.control_packets_sent += 1;
        self.narrow.sent(false, now);
        self.account(wire_bytes, now);
        true
    }

    pub(super) fn transmit_unit(
        &mut self,
        memory: &impl Memory,
        now: Nanos,
        out: &mut Vec<u8>,
    ) -> bool {
        let Some(pick) = self.sender.pick(now, self.rtt.timeout()) else { return false };
        let Some((kind, is_parity, payload_bytes)) = self.sender.describe(pick) else {
            return false;
        };
        let start = out.len();
        let Some(packet) = self.protection.begin(kind, out) else { return false };
        let wire_bytes = out.len() - start + payload_bytes + TAG_BYTES + IP_UDP_BYTES;
        if self.config.payload == PayloadMode::Real {
            self.sender.write_payload(pick, memory, out);
        }
        self.protection.finish(packet, out);
        if !self.sender.has_outstanding() && !pick.is_retransmission {
            self.silent_since = now;
        }
        let number = self.protection.next_packet_number() - 1;
        self.sender.sent(pick, number, now, &mut self.events);
        self.probes.restart(now);
        self.narrow.sent(payload_bytes == usize::from(self.config.unit_bytes), now);
        self.statistics.data_packets_sent += u64::from(!is_parity);
        self.statistics.parity_packets_sent += u64::from(is_parity);
        self.statistics.retransmitted_packets += u64::from(pick.is_retransmission);
        self.statistics.fallbacks += u64::from(pick.is_fallback);
        self.account(wire_bytes, now);
        true
    }

    fn account(&mut self, wire_bytes: usize, now: Nanos) {
        self.marking.packet_sent(self.state != State::Connecting);
        self.statistics.packets_sent += 1;
        self.statistics.wire_bytes_sent += wire_bytes as u64;
        self.pacer.sent(wire_bytes as u64, now);
        self.rtt.packet_sent(self.protection.next_packet_number() - 1, now);
    }
}
