//! Handles the target's answers to parts: opens read sectors, compares them, acknowledges changes.

use std::sync::Arc;

use sealane_proto::digest::are_equal;
use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::openings::{Made, Openings};
use sealane_proto::link::Nanos;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::controller_queue::Operation;
use sealane_proto::nvme::host_queue::HostEvent;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{BLOCK_BYTES, Block, DATA_BYTES, IV_BYTES, block_iv, is_unwritten};

use super::front::Front;
use super::journal::Change;
use super::queue::GatewayQueue;
use super::request::{Owner, Part, Request, Work};
use super::{Shared, add};
use crate::clock;

/// Maximum retries of one compare-and-write, each caused by another gateway's write.
const SWAPS_MAX: u32 = 16;

impl<F: Front> GatewayQueue<F> {
    /// Takes the target's answers from all back-end queues.
    pub(super) fn take_back_events(&mut self, now: Nanos) {
        let mut index = 0;
        while let Some(back) = self.backs.get_mut(index) {
            match back.queue.next_event() {
                None => index += 1,
                Some(HostEvent::Completed { tag, status, mark, data }) => {
                    let made = back.made(mark);
                    if let Some(part) = self.parts.take(tag) {
                        self.in_flight -= part.back_bytes();
                        if matches!(part.work, Work::Openings) {
                            self.opened(index, status, &data);
                        } else {
                            self.finish(part, status, made, &data, now);
                        }
                    }
                    if let Some(back) = self.backs.get_mut(index) {
                        back.queue.recycle(data);
                    }
                }
                Some(HostEvent::Failed { reason, lba, detail }) => {
                    if reason == Reason::PduMalformed {
                        // Tell the target what was wrong if the socket accepts it; nothing waits
                        // for that.
                        let _ = back.connection.send(back.queue.transmit());
                    }
                    self.lose_back(reason, lba, &detail, now);
                }
            }
        }
        self.close_drained();
    }

    /// Records the target's answer about the openings of its store.
    fn opened(&mut self, index: usize, status: Status, data: &[u8]) {
        let Some(back) = self.backs.get_mut(index) else { return };
        let openings = if status.is_success() { Openings::decode(data) } else { None };
        if let Some(openings) = &openings {
            self.shared.link(|link| link.opened(back.incarnation, openings));
        }
        (back.has_openings_answer, back.openings) = (true, openings);
    }

    fn finish(
        &mut self,
        mut part: Part,
        status: Status,
        made: Option<Made>,
        data: &[u8],
        now: Nanos,
    ) {
        let work = std::mem::replace(&mut part.work, Work::Read);
        match work {
            Work::Read => {
                let status = if status.is_success() {
                    self.open(&part, data)
                } else {
                    self.back_status(&part, status)
                };
                self.part_done(&part, status);
            }
            Work::Change { change, is_forced } => {
                self.change_ended(part, change, is_forced, status, made);
            }
            Work::Flush { mark } => {
                let status = if status.is_success() {
                    let told = data.first_chunk().and_then(Milestone::decode);
                    if !self.shared.link(|link| link.flushed(part.epoch, mark, told)) {
                        // The incarnation now connected may lack what this one flushed.
                        return self.repeat(part, work);
                    }
                    status
                } else {
                    self.back_status(&part, status)
                };
                self.flush_ended(&part, status);
            }
            Work::Examine { sent } => {
                let status = if status.is_success() {
                    self.examined(part, sent, data, now)
                } else {
                    Some((part, status))
                };
                if let Some((part, status)) = status {
                    self.swap_failed(&part, status);
                }
            }
            Work::Swap { change, .. } => self.swap_ended(part, change, status, made, now),
            Work::Outcomes { queue, .. } => self.take_outcomes(queue, status, data),
            Work::Openings => {}
        }
    }

    pub(super) fn change_ended(
        &mut self,
        part: Part,
        change: Change,
        is_forced: bool,
        status: Status,
        made: Option<Made>,
    ) {
        if let Owner::Replay(incarnation) = part.owner {
            self.replayed(incarnation, (part.place, part.lba), status, made);
            return;
        }
        if status.is_success() {
            self.acknowledge(part, change, made, |change| Work::Change { change, is_forced });
        } else {
            let status = self.back_status(&part, status);
            self.give_up(&part);
            self.part_done(&part, status);
        }
    }

    /// The target answered that a part's change was made: acknowledges it, or, if the association
    /// of the answer is over, sends it again as `work`.
    fn acknowledge(
        &mut self,
        part: Part,
        change: Change,
        made: Option<Made>,
        work: impl FnOnce(Change) -> Work,
    ) {
        if let Some(claim) = &part.claim
            && let Err(change) =
                self.shared.link(|link| link.acknowledge(part.epoch, &claim.ranges, change, made))
        {
            return self.repeat(part, work(change));
        }
        self.part_done(&part, Status::SUCCESS);
    }

    /// Sends a part again whose answer belongs to an association that is over.
    fn repeat(&mut self, part: Part, work: Work) {
        if matches!(part.owner, Owner::Replay(_)) {
            // The queue that sends the journal now also flushes it.
            return;
        }
        self.again.push(Part { work, is_again: true, ..part });
    }

    fn flush_ended(&mut self, part: &Part, status: Status) {
        if matches!(part.owner, Owner::Replay(_)) {
            return self.replay_flushed(status);
        }
        if part.owner != Owner::Journal {
            self.part_done(part, status);
            return;
        }
        self.shared.link(|link| link.flush_ended(status));
    }

    /// Continues a compare-and-write whose current sectors were read; returns the part and its
    /// status if it has failed.
    fn examined(
        &mut self,
        mut part: Part,
        sent: Option<Change>,
        data: &[u8],
        now: Nanos,
    ) -> Option<(Part, Status)> {
        let current: Vec<[u8; IV_BYTES]> =
            data.as_chunks::<BLOCK_BYTES>().0.iter().map(current_iv).collect();
        if let Some(change) = sent {
            // The outcome of an earlier attempt was lost: if it was executed, the sectors are those
            // it wrote.
            if is_of(&change, &current) {
                // The change was in the store when this opening began.
                let made = self.backs.last().and_then(|back| back.made(0));
                let again = |change| Work::Examine { sent: Some(change) };
                self.acknowledge(part, change, made, again);
                return None;
            }
            // Not executed, or overwritten since. As this can't be decided, neither success nor a
            // failed comparison may be reported.
            return Some((part, Status::INTERNAL_PATH_ERROR.final_()));
        }
        let status = self.open(&part, data);
        if !status.is_success() {
            return Some((part, status));
        }
        let Owner::Request(slot) = part.owner else { return Some((part, Status::ABORTED)) };
        let place = self.requests.get_mut(usize::from(slot));
        let Some(request) = place.and_then(Option::take) else {
            return Some((part, Status::ABORTED));
        };
        let change = match &request.operation {
            Operation::CompareAndWrite { data, .. } => self.seal(part.lba, data),
            _ => Err(Status::INTERNAL_ERROR),
        };
        let is_forced = request.is_forced;
        if let Some(place) = self.requests.get_mut(usize::from(slot)) {
            *place = Some(request);
        }
        match change {
            Ok(change) => {
                part.work = Work::Swap { current, change, is_forced };
                self.send(part, now);
                None
            }
            Err(status) => Some((part, status)),
        }
    }

    pub(super) fn swap_ended(
        &mut self,
        mut part: Part,
        change: Change,
        status: Status,
        made: Option<Made>,
        now: Nanos,
    ) {
        if status.is_success() {
            self.acknowledge(part, change, made, |change| Work::Examine { sent: Some(change) });
        } else if status.code() != Status::COMPARE_FAILURE.code() {
            self.swap_failed(&part, status);
        } else if part.is_unknown {
            part.is_unknown = false;
            part.work = Work::Examine { sent: Some(change) };
            self.send(part, now);
        } else if part.attempts < SWAPS_MAX {
            // Another gateway wrote first: compare with its sectors. The IVs of this attempt are
            // used up.
            part.attempts += 1;
            part.work = Work::Examine { sent: None };
            self.send(part, now);
        } else {
            self.give_up(&part);
            self.part_done(&part, Status::COMMAND_INTERRUPTED);
        }
    }

    fn swap_failed(&mut self, part: &Part, status: Status) {
        let is_own = matches!(
            Status::from_field(status.code() << 1),
            Status::COMPARE_FAILURE
                | Status::INTERNAL_PATH_ERROR
                | Status::ABORTED
                | Status::NAMESPACE_NOT_READY
        );
        let status = if is_own { status } else { self.back_status(part, status) };
        self.give_up(part);
        self.part_done(part, status);
    }

    fn back_status(&mut self, part: &Part, status: Status) -> Status {
        let reason = match Status::from_field(status.code() << 1) {
            Status::REFERENCE_TAG_CHECK => Reason::SectorStale,
            Status::APPLICATION_TAG_CHECK => Reason::SectorFormat,
            Status::UNRECOVERED_READ | Status::WRITE_FAULT => Reason::StoreFailed,
            _ => Reason::BackEndStatus,
        };
        self.refused(reason, Some(part.lba), format!("target answered {status}"));
        status
    }

    /// Opens the sectors of a completed read, into the answer or to compare or verify them.
    fn open(&mut self, part: &Part, data: &[u8]) -> Status {
        let shared = Arc::clone(&self.shared);
        let Owner::Request(slot) = part.owner else { return Status::ABORTED };
        let request = self.requests.get_mut(usize::from(slot)).and_then(Option::as_mut);
        let Some(request) = request else { return Status::ABORTED };
        let blocks = data.as_chunks::<BLOCK_BYTES>().0;
        let outcome = match &request.operation {
            Operation::Read => {
                if request.answer.is_empty() {
                    request.answer = self.front.buffer(request.blocks as usize * DATA_BYTES);
                }
                let plain = request.answer.get_mut(part.plain_range()).unwrap_or_default();
                let sectors = plain.as_chunks_mut::<DATA_BYTES>().0;
                (part.lba..)
                    .zip(blocks)
                    .zip(sectors)
                    .try_for_each(|((lba, block), sector)| open_sector(&shared, lba, block, sector))
            }
            Operation::Compare(expected) | Operation::CompareAndWrite { expected, .. } => {
                let expected = expected.get(part.plain_range()).unwrap_or_default();
                let sectors = expected.as_chunks::<DATA_BYTES>().0;
                let mut scratch = [0; DATA_BYTES];
                let mut is_equal = true;
                let opened =
                    (part.lba..).zip(blocks).zip(sectors).try_for_each(|((lba, block), sector)| {
                        open_sector(&shared, lba, block, &mut scratch)?;
                        is_equal &= are_equal(&scratch, sector);
                        Ok(())
                    });
                if opened.is_ok() && !is_equal {
                    return Status::COMPARE_FAILURE;
                }
                opened
            }
            _ => {
                let mut scratch = [0; DATA_BYTES];
                (part.lba..)
                    .zip(blocks)
                    .try_for_each(|(lba, block)| open_sector(&shared, lba, block, &mut scratch))
            }
        };
        match outcome {
            Ok(()) => Status::SUCCESS,
            Err((reason, lba)) => {
                self.refused(reason, Some(lba), "sector read back".into());
                Status::from(reason)
            }
        }
    }

    /// Counts a part as ended, and completes the host's command if it was the last one.
    pub(super) fn part_done(&mut self, part: &Part, status: Status) {
        let Owner::Request(slot) = part.owner else { return };
        let Some(place) = self.requests.get_mut(usize::from(slot)) else { return };
        let Some(mut request) = place.take() else { return };
        request.parts -= 1;
        if request.status.is_success() {
            request.status = status;
        }
        if !request.status.is_success() {
            // The rest of a failed command need not be sent.
            request.is_cut = true;
        }
        if request.parts > 0 || !request.is_cut {
            *place = Some(request);
            return;
        }
        self.note_answered(&request);
        match request.operation {
            Operation::Read if request.status.is_success() => {
                self.front.complete_read(slot, request.answer);
            }
            Operation::Read => self.front.complete(slot, request.status, request.answer),
            Operation::Write(buffer) | Operation::Compare(buffer) => {
                self.front.complete(slot, request.status, buffer);
            }
            _ => self.front.complete(slot, request.status, Vec::new()),
        }
    }

    /// Records how long an answered command took.
    pub(super) fn note_answered(&self, request: &Request) {
        if let Some(io) = request.io() {
            self.shared.latencies.note(io, clock::now().saturating_sub(request.since));
        }
    }
}

/// Opens one sector; one that was never written, or was deallocated, is zeros. In a fully sealed
/// volume an unwritten sector is an error: otherwise a target could undo writes by reporting one.
fn open_sector(
    shared: &Shared,
    lba: u64,
    block: &Block,
    sector: &mut [u8; DATA_BYTES],
) -> Result<(), (Reason, u64)> {
    if is_unwritten(block) {
        sector.fill(0);
        if shared.is_fully_sealed {
            return Err((Reason::SectorUnwritten, lba));
        }
        add(&shared.counters.sectors_unwritten, 1);
        return Ok(());
    }
    shared.keys.open(lba, block, sector).map_err(|reason| (reason, lba))?;
    add(&shared.counters.sectors_opened, 1);
    Ok(())
}

/// The IV that a write-if must expect to replace this sector; zero if it is unwritten.
fn current_iv(block: &Block) -> [u8; IV_BYTES] {
    if is_unwritten(block) { [0; IV_BYTES] } else { block_iv(block) }
}

/// Whether the current sectors have the IVs of `change`.
fn is_of(change: &Change, current: &[[u8; IV_BYTES]]) -> bool {
    match change {
        Change::Write { blocks, .. } => {
            let own = blocks.as_chunks::<BLOCK_BYTES>().0.iter().map(block_iv);
            own.eq(current.iter().copied())
        }
        Change::Deallocate(_) => false,
    }
}
