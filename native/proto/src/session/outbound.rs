//! Outgoing packets: probes, control packets and units.

use crate::aead::TAG_BYTES;
use crate::link::Nanos;

use super::challenges::CHALLENGE_INTERVAL;
use super::config::{Detection, PayloadMode};
use super::control::Halves;
use super::frame::Frame;
use super::packet::Kind;
use super::path::Path;
use super::paths::{PathId, PathSet};
use super::probes::Probe;
use super::requests::Memory;
use super::sender::Pick;
use super::train::Train;
use super::{PROBES_PER_IDLE_TIMEOUT, STALL_TIMEOUTS, Session, State, packet};

/// When the newest packet of a path arrived, unless nothing is to be challenged on it.
fn last_heard(path: &Path) -> Option<Nanos> {
    let is_asking = path.challenges.due().is_some();
    path.newest.filter(|_| path.is_validated() && !is_asking).map(|newest| newest.at)
}

/// Silence, at least, after which an end that has part of a message probes.
const LANDING_SILENCE: Nanos = 1_000_000_000;
/// Other paths that have to be heard of before a path counts as silent without a time-out.
const WITNESSES: usize = 3;
/// How late, at least, a peer that is heard of on other paths may be on one of them: its threads
/// wait for a processor, and gather what they acknowledge.
const LATENESS: Nanos = 2_000_000;

impl Session {
    /// When the peer's silence requires a challenge or a stall that has not happened yet.
    pub(super) fn probe_at(&self) -> Option<Nanos> {
        let is_waiting = self.sender.has_outstanding();
        let mut validated =
            self.paths.iter().map(|(_, path)| path).filter(|path| path.is_validated());
        let is_challenging = validated.all(|path| path.challenges.due().is_some());
        let is_done = is_challenging && (self.is_stalled || !is_waiting);
        if self.state != State::Established || is_done {
            return None;
        }
        let patience = self.config.idle_timeout / PROBES_PER_IDLE_TIMEOUT;
        let stall = self.paths.timeout().saturating_mul(STALL_TIMEOUTS);
        let silence = match is_waiting {
            true => patience.min(stall),
            // The peer may be sending the rest to where this end no longer is.
            false if self.receiver.units_missing() > 0 => patience.min(stall.max(LANDING_SILENCE)),
            false => patience,
        };
        Some(self.absences.extend(self.silent_since, silence))
    }

    pub(super) fn probe(&mut self, now: Nanos) {
        self.probe_quiet_paths(now);
        if self.probe_at().is_none_or(|at| at > now) {
            return;
        }
        for (_, path) in self.paths.iter_mut().filter(|(_, path)| path.is_validated()) {
            path.challenges.start(now);
        }
        if self.sender.has_outstanding() && !self.is_stalled {
            self.is_stalled = true;
            self.stalled_since = now;
            self.paths.congestion_mut().timed_out(now);
            self.adopt_rate(now);
            for index in 0..self.paths.count() {
                self.paths.interrupted(PathId(index));
                self.paths[PathId(index)].narrow.forget();
            }
            self.statistics.stalls += 1;
        }
    }

    /// When a path will not have been heard for so long, although others may, that it is challenged:
    /// that keeps NAT bindings, and shows the peer where this end is now.
    pub(super) fn quiet_at(&self) -> Option<Nanos> {
        let heard_at = self.paths.iter().filter_map(|(_, path)| last_heard(path)).min()?;
        Some(self.absences.extend(heard_at, self.config.idle_timeout / PROBES_PER_IDLE_TIMEOUT))
    }

    fn probe_quiet_paths(&mut self, now: Nanos) {
        while self.quiet_at().is_some_and(|at| at <= now) {
            let heard = |(id, path)| Some((last_heard(path)?, id));
            let Some((_, quiet)) = self.paths.iter().filter_map(heard).min() else { return };
            self.paths[quiet].challenges.start(now);
        }
    }

    /// When the oldest unit on a path will have waited for its time-out without any report about
    /// it, if there are other paths. Time during which this end was not driven does not count.
    fn silence_on(&self, path: PathId) -> Option<Nanos> {
        let known = &self.paths[path];
        let (packet, sent_at) = self.sender.oldest_on(path)?;
        // A late unit, while newer packets were reported, is lost; the path itself works.
        let is_unheard = known.packets_reported <= packet && !known.is_silent;
        (is_unheard && self.paths.has_other(path))
            .then(|| self.absences.extend(sent_at, self.silence_of(path, sent_at)))
    }

    /// How long nothing may be heard about a unit of a path: a time-out, or little more than a
    /// round trip if several other paths were heard of since, which shows that the peer itself is
    /// not late.
    fn silence_of(&self, path: PathId, sent_at: Nanos) -> Nanos {
        let timeout = self.paths.timeout_on(path);
        let srtt = self.paths[path].rtt.smoothed().max(self.paths.srtt());
        match srtt {
            Some(srtt) if self.paths.witnesses(path, sent_at) >= WITNESSES => {
                let late = (srtt / 4).max(LATENESS);
                (srtt + late).saturating_add(self.config.reordering).min(timeout)
            }
            _ => timeout,
        }
    }

    /// The earliest of [`Self::silence_on`].
    pub(super) fn silence_at(&self) -> Option<Nanos> {
        (0..self.paths.count()).filter_map(|path| self.silence_on(PathId(path))).min()
    }

    /// Skips paths on which nothing is heard, if there are others: units in flight on them are sent
    /// again, and challenges detect when they are back.
    pub(super) fn watch_paths(&mut self, now: Nanos) {
        for path in (0..self.paths.count()).map(PathId) {
            if self.silence_on(path).is_none_or(|at| at > now) {
                continue;
            }
            self.paths[path].is_silent = true;
            self.paths[path].challenges.start(now);
            self.paths.interrupted(path);
            self.paths.failed(path);
            self.sender.abandon_path(path);
            self.statistics.path_silences += 1;
        }
    }

    /// When it is decided whether a path moves to its candidate.
    pub(super) fn decision_at(&self) -> Option<Nanos> {
        self.considering().filter_map(|path| self.decision_on(&self.paths[path])).min()
    }

    /// The paths that may have a candidate: mostly none, so this must cost nothing.
    fn considering(&self) -> impl Iterator<Item = PathId> + use<> {
        let considering = self.considering;
        let count = if considering.is_empty() { 0 } else { self.paths.count() };
        (0..count).map(PathId).filter(move |path| considering.has(*path))
    }

    fn decision_on(&self, path: &Path) -> Option<Nanos> {
        let (since, wait) = path.candidate()?.decision();
        Some(self.absences.extend(since, wait))
    }

    /// Moves paths whose peers have moved.
    pub(super) fn move_paths(&mut self, now: Nanos) {
        for path in self.considering() {
            let is_due = self.decision_on(&self.paths[path]).is_some_and(|at| at <= now);
            if is_due && self.paths[path].settle_candidate() {
                self.moved = self.moved.with(path);
                self.paths.interrupted(path);
                self.paths[path].evidence.moved(now);
                self.paths.measured();
                self.statistics.path_moves += 1;
            }
            if self.paths[path].candidate().is_none() {
                self.considering = self.considering.without(path);
            }
        }
    }

    /// When a probe is due on a path after its last unit, while units on it are unacknowledged and
    /// nothing else has to or may be sent.
    fn tail_probe_on(&self, path: PathId) -> Option<Nanos> {
        self.sender.oldest_on(path)?;
        let known = &self.paths[path];
        let is_tail = self.is_stalled || !self.has_units();
        Some(known.probes.next_at(known.rtt.smoothed().unwrap_or(CHALLENGE_INTERVAL), is_tail))
    }

    /// Whether there are units to send.
    pub(super) fn has_units(&self) -> bool {
        self.sender.has_new() || self.sender.has_lost()
    }

    /// The earliest of [`Self::tail_probe_on`].
    pub(super) fn tail_probe_at(&self) -> Option<Nanos> {
        let is_quiet = self.is_stalled || !self.has_units() || self.is_window_full();
        let is_waiting =
            self.state == State::Established && self.config.detection == Detection::Reports;
        let paths = (0..self.paths.count()).map(PathId);
        (is_quiet && is_waiting)
            .then(|| paths.filter_map(|path| self.tail_probe_on(path)).min())
            .flatten()
    }

    pub(super) fn probe_tail(&mut self, now: Nanos) {
        if self.tail_probe_at().is_none_or(|at| at > now) {
            return;
        }
        for path in (0..self.paths.count()).map(PathId) {
            if self.tail_probe_on(path).is_some_and(|at| at <= now) {
                // If units can take another path, they do so once this one has gone silent.
                let has_other = self.paths.has_other(path);
                let known = &mut self.paths[path];
                let srtt = known.rtt.smoothed().unwrap_or(CHALLENGE_INTERVAL);
                let probe = known.probes.sent(srtt, now);
                known.probe = Some(probe);
                known.is_carrying = probe == Probe::Carrying && !has_other;
                self.statistics.probes_sent += 1;
            }
        }
    }

    /// When a control packet is due, and the path that it must take, if any.
    pub(super) fn control_due(&self, now: Nanos) -> Option<(Nanos, Option<PathId>)> {
        let anywhere = self.control.next_at(self.state == State::Established, now);
        if self.state == State::Closing {
            return anywhere.map(|at| (at, None));
        }
        let bound = self.paths.iter().filter_map(|(id, path)| {
            path.control_due(now).map(|at| (at.max(self.paths.control_open_at(id)), Some(id)))
        });
        let anywhere = anywhere.into_iter().chain(self.units.due());
        let anywhere = anywhere.map(|at| at.max(self.paths.any_open_at()));
        bound.chain(anywhere.map(|at| (at, None))).min_by_key(|(at, _)| *at)
    }

    pub(super) fn transmit_control(
        &mut self,
        path: Option<PathId>,
        now: Nanos,
        out: &mut Train,
    ) -> bool {
        let start = out.len();
        let is_unheard = now.saturating_sub(self.last_received) > self.paths.timeout();
        let is_closing = self.state == State::Closing;
        let path = path.unwrap_or_else(|| self.paths.for_control(is_unheard || is_closing));
        let mut halves = Halves {
            units: &mut self.units,
            sender: &self.sender,
            receiver: &self.receiver,
            is_established: self.state == State::Established,
            srtt: self.paths.srtt().unwrap_or(CHALLENGE_INTERVAL),
            timeout: self.paths.timeout(),
        };
        let Some(packet) = self.protection.begin(path, Kind::Control, out) else { return false };
        let room = self.config.datagram_bytes_max() - packet::HEADER_BYTES - TAG_BYTES;
        self.control.write(out.buffer(), room, &mut halves, (&mut self.paths, path), now);
        if self.paths.iter().any(|(_, path)| path.gaps.is_unreported()) {
            self.control.acknowledge_now(now);
        } else if self.paths.iter().any(|(_, path)| path.gaps.is_repeating()) {
            self.control.acknowledge_later(&self.paths[path].rtt, now);
        }
        let wire_bytes = out.len() - start + TAG_BYTES + self.config.ip.header_bytes();
        self.protection.finish(packet, out);
        self.statistics.control_packets_sent += 1;
        self.paths[path].narrow.sent(false, now);
        self.account((path, false), wire_bytes, now);
        true
    }

    /// When the next challenge to a candidate may leave, and of which path.
    pub(super) fn candidate_due(&self) -> Option<(Nanos, PathId)> {
        if self.state != State::Established {
            return None;
        }
        let due = |path| Some((self.paths.candidate_due(path)?, path));
        self.considering().filter_map(due).min()
    }

    /// Writes a challenge to the candidate of a path.
    pub(super) fn transmit_to_candidate(
        &mut self,
        path: PathId,
        now: Nanos,
        out: &mut Train,
    ) -> bool {
        let start = out.len();
        let token = self.paths.new_token();
        let Some(candidate) = self.paths[path].candidate_mut() else { return false };
        let unit_bytes = candidate.sent(token, now);
        let Some(packet) = self.protection.begin_to_candidate(path, out) else { return false };
        let payload_start = out.len();
        Frame::PathChallenge { token }.encode(out.buffer());
        if let Some(unit_bytes) = unit_bytes {
            out.buffer().resize(payload_start + packet::control_bytes_max(unit_bytes), 0);
        }
        let wire_bytes = out.len() - start + TAG_BYTES + self.config.ip.header_bytes();
        self.protection.finish(packet, out);
        self.statistics.control_packets_sent += 1;
        self.account_all((path, true), wire_bytes as u64, now);
        self.paths.sent_to_candidate(path, wire_bytes as u64, now);
        true
    }

    pub(super) fn transmit_unit(
        &mut self,
        open: PathSet,
        memory: &impl Memory,
        now: Nanos,
        out: &mut Train,
    ) -> bool {
        let paths = &self.paths;
        let patience = |path, packet| paths.patience(path, packet, self.config.detection);
        let was_idle = self.sender.is_idle();
        let Some(pick) = self.sender.pick(now, patience) else {
            return false;
        };
        if was_idle && !self.sender.is_idle() {
            // A message's pause before its parity is over.
            self.pacer.restart(now);
        }
        let Some(path) = self.paths.choose(open) else { return false };
        let is_sent = self.write_unit(pick, path, memory, now, out);
        if is_sent {
            self.paths[path].probes.restart(now);
        }
        is_sent
    }

    /// Sends the unit that follows a probe, regardless of a stall or the path's allowance. The
    /// probes continue after it.
    pub(super) fn transmit_carried(
        &mut self,
        memory: &impl Memory,
        now: Nanos,
        out: &mut Train,
    ) -> bool {
        let mut paths = (0..self.paths.count()).map(PathId);
        let Some(path) = paths.find(|path| self.paths[*path].is_carrying) else { return false };
        self.paths[path].is_carrying = false;
        let Some(pick) = self.sender.pick_oldest(path) else { return false };
        self.write_unit(pick, path, memory, now, out)
    }

    fn write_unit(
        &mut self,
        pick: Pick,
        path: PathId,
        memory: &impl Memory,
        now: Nanos,
        out: &mut Train,
    ) -> bool {
        let Some((kind, is_parity, payload_bytes)) = self.sender.describe(pick) else {
            return false;
        };
        let start = out.len();
        let Some(packet) = self.protection.begin(path, kind, out) else { return false };
        let header_bytes = out.len() - start;
        let wire_bytes = header_bytes + payload_bytes + TAG_BYTES + self.config.ip.header_bytes();
        if self.config.payload == PayloadMode::Real {
            self.sender.write_payload(pick, memory, out.buffer());
        }
        self.protection.finish(packet, out);
        if !self.sender.has_outstanding() && !pick.is_retransmission {
            self.silent_since = now;
            self.paths.congestion_mut().resumed();
        }
        let number = self.protection.next_packet_number(path) - 1;
        self.sender.sent(pick, (path, number), now, &mut self.events);
        self.paths[path].narrow.sent(payload_bytes == usize::from(self.config.unit_bytes), now);
        self.statistics.data_packets_sent += u64::from(!is_parity);
        self.statistics.parity_packets_sent += u64::from(is_parity);
        self.statistics.retransmitted_packets += u64::from(pick.is_retransmission);
        self.statistics.fallbacks += u64::from(pick.is_fallback);
        self.account((path, true), wire_bytes, now);
        true
    }

    /// Accounts for a packet written for a path; `is_unit`: that it is no control packet.
    fn account(&mut self, (path, is_unit): (PathId, bool), wire_bytes: usize, now: Nanos) {
        let wire_bytes = wire_bytes as u64;
        self.account_all((path, false), wire_bytes, now);
        let number = self.protection.next_packet_number(path) - 1;
        self.paths.sent(path, (number, is_unit), wire_bytes, now);
    }

    /// Accounts for a packet, whether it goes to its path's address or to the candidate.
    fn account_all(&mut self, to: (PathId, bool), wire_bytes: u64, now: Nanos) {
        self.departed = to;
        self.statistics.packets_sent += 1;
        self.statistics.wire_bytes_sent += wire_bytes;
        self.pacer.sent(wire_bytes, now);
    }
}
