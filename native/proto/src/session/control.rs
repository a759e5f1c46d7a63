//! Control packets: when one is due and what it contains.
//!
//! Frames are repeated until the peer's frames show that they arrived, so nothing ever waits
//! without a timer.

use std::ops::Range;

use crate::link::Nanos;

use super::cadence::{ACK_DELAY_MIN, Cadence};
use super::congestion::Steering;
use super::drain::Drain;
use super::frame::{
    CLOSE_BYTES, CREDIT_HEADER_BYTES, CREDIT_LENGTH_BYTES, DRAINING_BYTES, ENDED, Frame,
    LOSS_COUNTS_BYTES, LOSSES_HEADER_BYTES, LOST_RUN_BYTES, PATH_BYTES, PATH_COUNTS_BYTES,
    PING_BYTES, SLICE_HEADER_BYTES, STREAM_END_BYTES_MAX, push_credit_length, push_lost_run,
};
use super::gaps::LossCounts;
use super::packet::{self, Version};
use super::path::{Newest, Path};
use super::paths::{PathId, Paths};
use super::probes::Probe;
use super::receiver::{Progress, Receiver};
use super::rtt::RoundTrip;
use super::sender::Sender;
use super::units::UnitSearch;

/// An acknowledgement waits at most this fraction of a round trip for more to acknowledge …
const ACK_DELAY_SHARE: u64 = 16;
/// … from the shortest delay ([`Cadence`]) to a fraction of the shortest time-out.
const ACK_DELAY_MAX: Nanos = 25_000_000;
/// Unsolicited repetitions of the acknowledgement of an ended message.
const ACK_REPEATS: u8 = 2;
/// Shortest pause before such a repetition: on a short path the next message's acknowledgement
/// mostly replaces it.
const ACK_REPEAT_MIN: Nanos = 1_000_000;
/// Longest interval between repetitions of an unconfirmed CREDIT, ABORT or STREAM_END.
const REPEAT_INTERVAL_MAX: Nanos = 1_000_000_000;
/// Number of times that CLOSE is sent.
const CLOSE_REPEATS: u8 = 3;
/// Shortest interval between them.
const CLOSE_INTERVAL_MIN: Nanos = 10_000_000;

/// A repeated frame: when it is due next, and how often it was sent without an answer.
#[derive(Debug, Default)]
pub struct Repeat {
    due: Option<Nanos>,
    backoff: u32,
}

impl Repeat {
    /// When it is due next.
    #[must_use]
    pub fn due(&self) -> Option<Nanos> {
        self.due
    }

    /// Makes it due now, as if it had never been sent.
    pub fn now(&mut self, now: Nanos) {
        *self = Self { due: Some(now), backoff: 0 };
    }

    /// Stops the repetition.
    pub fn stop(&mut self) {
        *self = Self::default();
    }

    /// Records that it was sent; it is due again after a growing interval.
    pub fn again(&mut self, timeout: Nanos, now: Nanos) {
        let pause = timeout.saturating_mul(1 << self.backoff.min(10)).min(REPEAT_INTERVAL_MAX);
        self.due = Some(now.saturating_add(pause));
        self.backoff += 1;
    }
}

/// How long acknowledgements wait on a path with this average round trip.
#[must_use]
pub fn ack_delay(srtt: Option<Nanos>, least: Nanos) -> Nanos {
    srtt.map_or(ACK_DELAY_MIN, |srtt| (srtt / ACK_DELAY_SHARE).clamp(least, ACK_DELAY_MAX))
}

/// How long the next repetition of the acknowledgement of an ended message waits: first a quarter of
/// a round trip, then a whole one, to get past a short loss burst.
fn ack_repeat_pause(repeats_left: u8, srtt: Nanos) -> Nanos {
    let pause = if repeats_left == ACK_REPEATS { srtt / 4 } else { srtt };
    pause.max(ACK_REPEAT_MIN)
}

/// State of the control packets of one end.
#[derive(Debug)]
pub struct Control {
    cadence: Cadence,
    ack_due: Option<Nanos>,
    /// When the last acknowledgement was written.
    acknowledged_at: Option<Nanos>,
    ack_repeats: u8,
    /// A SLICE round in progress: the next message and unit to report.
    round: Option<(u64, u32)>,
    credit: Repeat,
    /// The peer knows all credit below this message number.
    credit_confirmed_end: u64,
    notices: Repeat,
    notices_made: u64,
    /// Notices that earlier packets of the current round contained.
    notices_written: usize,
    lost_runs: Vec<(u64, u32)>,
    drain: Drain,
    close: Option<(u8, Repeat)>,
    closes_left: u8,
    scratch: Vec<u8>,
}

impl Control {
    /// Creates the state before any packet.
    #[must_use]
    pub fn new(version: Version, steering: &Steering) -> Self {
        Self {
            cadence: Cadence::new(version, steering),
            ack_due: None,
            acknowledged_at: None,
            ack_repeats: 0,
            round: None,
            credit: Repeat::default(),
            credit_confirmed_end: 0,
            notices: Repeat::default(),
            notices_made: 0,
            notices_written: 0,
            lost_runs: Vec::new(),
            drain: Drain::default(),
            close: None,
            closes_left: 0,
            scratch: Vec::new(),
        }
    }

    /// How often both ends acknowledge.
    #[must_use]
    pub fn cadence(&self) -> &Cadence {
        &self.cadence
    }

    /// See [`Self::cadence`].
    pub fn cadence_mut(&mut self) -> &mut Cadence {
        &mut self.cadence
    }

    /// Schedules an acknowledgement that may wait: a delay after the last one. After a longer pause
    /// it leaves with the batch that asked for it, and costs no wake-up of its own.
    pub fn acknowledge_later(&mut self, rtt: &RoundTrip, now: Nanos) {
        let delay = ack_delay(rtt.smoothed(), self.cadence.own());
        let due = self.acknowledged_at.map_or(now, |at| at.saturating_add(delay).max(now));
        self.ack_due = Some(self.ack_due.map_or(due, |earlier| earlier.min(due)));
    }

    /// Schedules an immediate acknowledgement.
    pub fn acknowledge_now(&mut self, now: Nanos) {
        self.ack_due = Some(now);
    }

    /// Acknowledges the end of a message immediately, and repeats it.
    pub fn message_ended(&mut self, now: Nanos) {
        self.acknowledge_now(now);
        self.ack_repeats = ACK_REPEATS;
    }

    /// Records that a receive was posted.
    pub fn credit_changed(&mut self, now: Nanos) {
        self.credit.now(now);
    }

    /// Records that the peer knows all credit below `end`.
    pub fn credit_confirmed(&mut self, end: u64, posted_end: u64, now: Nanos) {
        let end = end.min(posted_end);
        if end > self.credit_confirmed_end {
            self.credit_confirmed_end = end;
            if end == posted_end {
                self.credit.stop();
            } else {
                self.credit.now(now);
            }
        }
    }

    /// Updates the number of notices ever made, and whether any are pending.
    pub fn notices_changed(&mut self, made: u64, is_any: bool, now: Nanos) {
        if !is_any {
            self.notices.stop();
            self.notices_written = 0;
        } else if made > self.notices_made {
            self.notices.now(now);
            self.notices_written = 0;
        }
        self.notices_made = made;
    }

    /// Resends the notices, because the peer does not seem to know one: with the next
    /// acknowledgement, or at once if none is due.
    pub fn notices_missed(&mut self, now: Nanos) {
        if let Some(due) = self.notices.due {
            self.notices.due = Some(due.min(self.ack_due.unwrap_or(now)));
        }
    }

    /// The state of this end's drain.
    #[must_use]
    pub fn drain(&self) -> &Drain {
        &self.drain
    }

    /// See [`Self::drain`].
    pub fn drain_mut(&mut self) -> &mut Drain {
        &mut self.drain
    }

    /// Starts to close: from now on only CLOSE is sent.
    pub fn close(&mut self, code: u8, completed_end: u64, now: Nanos) {
        let mut repeat = Repeat::default();
        repeat.now(now);
        self.close = Some((code, repeat));
        self.closes_left = CLOSE_REPEATS;
        self.round = Some((completed_end, 0));
    }

    /// Whether the last CLOSE has been sent.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.close.is_some() && self.closes_left == 0
    }

    /// When the next control packet is due on any path.
    #[must_use]
    pub fn next_at(&self, is_established: bool, now: Nanos) -> Option<Nanos> {
        if let Some((_, repeat)) = &self.close {
            return repeat.due.filter(|_| self.closes_left > 0);
        }
        let at_once = self.round.is_some().then_some(now);
        let draining = self.drain.due().filter(|_| is_established);
        let dues = [at_once, self.ack_due, self.credit.due, self.notices.due, draining];
        dues.into_iter().flatten().min()
    }

    /// Appends the frames of a packet on `path`, up to `room` bytes, and updates all timers.
    pub fn write(
        &mut self,
        out: &mut Vec<u8>,
        room: usize,
        halves: &mut Halves<'_>,
        (paths, path): (&mut Paths, PathId),
        now: Nanos,
    ) {
        let (start, end) = (out.len(), out.len() + room);
        let is_new_round = self.start_round(halves, now);
        let completed_end = halves.receiver.completed_end();
        let credit_end = halves.sender.credit_end();
        Frame::Ack { completed_end, credit_end }.encode(out);
        let answered_bytes = write_responses(out, &mut paths[path]);
        if let Some(unit_bytes) = halves.units.take_notice(halves.timeout, now) {
            Frame::Unit { unit_bytes }.encode(out);
        }
        if self.close.is_none() {
            self.cadence.write(out);
        }
        if paths[path].probe.take().is_some_and(|probe| probe != Probe::Quiet) {
            Frame::Ping.encode(out);
        }
        let is_acknowledgement = self.round.is_some();
        for reported in paths.in_turn() {
            let Some(Newest { number: newest, at, is_late }) = paths[reported].newest else {
                continue;
            };
            if !is_acknowledgement && paths[reported].counted == Some(newest) {
                continue;
            }
            if out.len() + PATH_COUNTS_BYTES > start + room / 2 {
                break;
            }
            let age = (!is_late).then(|| now.saturating_sub(at));
            let age_nanos = age.and_then(|age| u32::try_from(age).ok()).unwrap_or(u32::MAX);
            let counts = paths[reported].arrived;
            Frame::PathCounts { path: reported, newest, age_nanos, counts }.encode(out);
            paths[reported].counted = Some(newest);
        }
        let reserved = PATH_BYTES + CLOSE_BYTES + PING_BYTES + DRAINING_BYTES;
        if self.close.is_none() {
            self.write_losses(out, end - reserved, paths, is_new_round);
            self.write_notices(out, end - reserved, halves, now);
            if halves.is_established {
                self.drain.write(out, halves.timeout, now);
            }
            self.write_credit(out, end - reserved, halves, now);
        }
        self.write_slices(out, end - reserved, halves.receiver);
        let is_asking = paths[path].challenges.due().is_some_and(|due| due <= now);
        if let Some(bytes) = answered_bytes {
            // The answer may be larger than what the path carries, so no challenge is sent with it.
            out.resize(out.len().max(start + bytes), 0);
        } else if is_asking && self.close.is_none() {
            let token = paths.new_token();
            Frame::PathChallenge { token }.encode(out);
            paths[path].asked(now);
            let Path { challenges, rtt, .. } = &mut paths[path];
            let timeout = rtt.smoothed().map(|_| rtt.timeout());
            if let Some(unit_bytes) = challenges.sent(token, timeout, now) {
                out.resize(out.len().max(start + packet::control_bytes_max(unit_bytes)), 0);
            }
        }
        if let Some((code, repeat)) = &mut self.close {
            Frame::Close { code: *code }.encode(out);
            repeat.due = Some(now.saturating_add(halves.srtt.max(CLOSE_INTERVAL_MIN)));
            self.closes_left = self.closes_left.saturating_sub(1);
        }
    }

    /// Starts a round of acknowledgements if one is due; returns whether this packet starts one.
    fn start_round(&mut self, halves: &Halves<'_>, now: Nanos) -> bool {
        if self.round.is_none() && self.ack_due.is_some_and(|due| due <= now) {
            self.round = Some((halves.receiver.completed_end(), 0));
            self.ack_due = None;
            self.acknowledged_at = Some(now);
            if self.ack_repeats > 0 {
                let pause = ack_repeat_pause(self.ack_repeats, halves.srtt);
                self.ack_repeats -= 1;
                self.ack_due = Some(now.saturating_add(pause));
            }
            return true;
        }
        false
    }

    /// Writes losses: new ones in any packet, previously reported ones once per round.
    fn write_losses(
        &mut self,
        out: &mut Vec<u8>,
        end: usize,
        paths: &mut Paths,
        is_new_round: bool,
    ) {
        for path in paths.in_turn() {
            let gaps = &mut paths[path].gaps;
            let counts = gaps.counts();
            if !(is_new_round || gaps.is_unreported()) {
                continue;
            }
            if out.len() + LOSS_COUNTS_BYTES + LOSSES_HEADER_BYTES > end {
                return;
            }
            if counts != LossCounts::default() {
                Frame::LossCounts { path, counts }.encode(out);
            }
            let room = (end - out.len() - LOSSES_HEADER_BYTES) / LOST_RUN_BYTES;
            self.lost_runs.clear();
            gaps.take_reports(room, is_new_round, &mut self.lost_runs);
            if self.lost_runs.is_empty() {
                continue;
            }
            self.lost_runs.sort_unstable();
            self.scratch.clear();
            for run in &self.lost_runs {
                push_lost_run(&mut self.scratch, *run);
            }
            Frame::Losses { path, runs: &self.scratch }.encode(out);
        }
    }

    /// Writes as many notices as fit; the next packet continues from there.
    fn write_notices(&mut self, out: &mut Vec<u8>, end: usize, halves: &Halves<'_>, now: Nanos) {
        if self.notices.due.is_none_or(|due| due > now) {
            return;
        }
        let notices = halves.sender.notices().chain(halves.receiver.notices());
        for frame in notices.skip(self.notices_written) {
            if out.len() + STREAM_END_BYTES_MAX > end {
                return;
            }
            frame.encode(out);
            self.notices_written += 1;
        }
        self.notices_written = 0;
        self.notices.again(halves.timeout, now);
    }

    fn write_credit(&mut self, out: &mut Vec<u8>, end: usize, halves: &Halves<'_>, now: Nanos) {
        let room = end.saturating_sub(out.len() + CREDIT_HEADER_BYTES);
        let count = room / CREDIT_LENGTH_BYTES;
        if self.credit.due.is_none() || count == 0 {
            return;
        }
        let start = self.credit_confirmed_end.max(halves.receiver.completed_end());
        self.scratch.clear();
        for length in halves.receiver.lengths_from(start).take(count) {
            push_credit_length(&mut self.scratch, length);
        }
        if self.scratch.is_empty() {
            self.credit.stop();
            return;
        }
        Frame::Credit { start, lengths: &self.scratch }.encode(out);
        self.credit.again(halves.timeout, now);
    }

    /// Writes as much of the round as fits; the next packet continues from there.
    fn write_slices(&mut self, out: &mut Vec<u8>, end: usize, receiver: &Receiver) {
        let Some((from, from_unit)) = self.round.take() else { return };
        for (message, progress) in receiver.progress(from) {
            let bitmap = match progress {
                Progress::Partial(bitmap) => bitmap,
                Progress::Ended => {
                    if out.len() + SLICE_HEADER_BYTES > end {
                        self.round = Some((message, 0));
                        return;
                    }
                    Frame::Slice { message, cumulative: ENDED, start: 0, bitmap: &[] }.encode(out);
                    continue;
                }
            };
            let cumulative = bitmap.first_clear();
            let mut at = cumulative & !7;
            if message == from {
                at = at.max(from_unit);
            }
            let mut is_told = false;
            loop {
                let piece = bitmap.piece(at);
                if piece.is_none() && is_told {
                    break;
                }
                // Without any unit behind the cumulative ones there is that to say.
                let Range { start, end: set_end } = piece.unwrap_or(at..at);
                let wanted = (set_end - start).div_ceil(8) as usize;
                let room = end.saturating_sub(out.len() + SLICE_HEADER_BYTES);
                if room < wanted.clamp(1, 8) {
                    self.round = Some((message, start));
                    return;
                }
                let count = wanted.min(room).min(usize::from(u16::MAX));
                self.scratch.clear();
                bitmap.extract(start, count, &mut self.scratch);
                Frame::Slice { message, cumulative, start, bitmap: &self.scratch }.encode(out);
                is_told = true;
                at = start + count as u32 * 8;
            }
        }
    }
}

/// Answers the oldest challenge of a path and those of the same size directly after it. Returns
/// their plaintext size if there are any.
fn write_responses(out: &mut Vec<u8>, path: &mut Path) -> Option<usize> {
    let (_, bytes) = *path.responses.front()?;
    let is_alike = |path: &Path| path.responses.front().is_some_and(|(_, other)| *other == bytes);
    while is_alike(path) {
        if let Some((token, _)) = path.responses.pop_front() {
            Frame::PathResponse { token }.encode(out);
        }
    }
    Some(bytes)
}

/// The inputs for writing a control packet.
#[derive(Debug)]
pub struct Halves<'a> {
    /// State of the session's unit.
    pub units: &'a mut UnitSearch,
    /// Outgoing messages.
    pub sender: &'a Sender,
    /// Incoming messages.
    pub receiver: &'a Receiver,
    /// Whether a path is validated.
    pub is_established: bool,
    /// Smoothed round-trip time, or a guess.
    pub srtt: Nanos,
    /// Retransmission time-out.
    pub timeout: Nanos,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_a_short_path_repetitions_wait_for_the_next_message() {
        let pauses = |srtt| [2, 1].map(|left| ack_repeat_pause(left, srtt));
        assert_eq!(pauses(25_000_000), [6_250_000, 25_000_000]);
        assert_eq!(pauses(2_000_000), [1_000_000, 2_000_000]);
        assert_eq!(pauses(50_000), [1_000_000; 2]);
    }

    #[test]
    fn an_acknowledgement_leaves_with_its_batch_unless_one_has_just_left() {
        let mut rtt = RoundTrip::default();
        rtt.sample(16_000_000, 0);
        let mut control = Control::new(Version::V6, &Steering::default());
        let mut due = |acknowledged_at, now| {
            (control.acknowledged_at, control.ack_due) = (acknowledged_at, None);
            control.acknowledge_later(&rtt, now);
            control.ack_due
        };
        assert_eq!(due(None, 5), Some(5));
        assert_eq!(due(Some(5), 300_000), Some(1_000_005));
        assert_eq!(due(Some(5), 1_000_004), Some(1_000_005));
        assert_eq!(due(Some(5), 30_000_000), Some(30_000_000));
    }
}
