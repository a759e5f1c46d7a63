//! Turns a host's command into parts at the target: cuts, claims, seals and sends them.

use std::sync::Arc;

use sealane_proto::link::Nanos;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::controller_queue::Operation;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::SubmitError;
use sealane_proto::nvme::operation::LbaRange;
use sealane_proto::nvme::status::Status;
use sealane_proto::nvme::transmit::SharedBytes;
use sealane_proto::sector::{BLOCK_BYTES, Block, DATA_BYTES, Exhausted, Iv, set_expected_iv};

use super::acceleration::{Acceleration, Submitted as Given};
use super::back::Back;
use super::front::Front;
use super::journal::Change;
use super::link::{Begin, Phase};
use super::loss::nanos;
use super::outcomes::{is_change, ranges_left};
use super::queue::{GatewayQueue, HOST_WINDOW, TARGET_WINDOW};
use super::ranges::BlockRanges;
use super::request::{Claim, Owner, Part, Sent, Work};
use super::{QueueName, Shared, add};

/// Result of an attempt to submit a part.
enum Submitted {
    /// It was sent to the target, or the command was completed.
    Done,
    /// It can't be sent now; it is the first to be tried next time.
    Later,
}

/// A change whose blocks are claimed.
enum Prepared {
    Ready(Change),
    /// Private memory for the sealed sectors, and those that a device is sealing.
    AtDevice(Vec<u8>, Given),
}

impl<F: Front> GatewayQueue<F> {
    pub(super) fn submit_waiting(&mut self, now: Nanos) {
        while let Some(slot) = self.waiting.front().copied() {
            let waiting = self.acceleration.as_ref().map_or(0, Acceleration::waiting_bytes);
            if !self.has_room() || self.in_flight + waiting >= TARGET_WINDOW {
                return;
            }
            let Some(part) = self.cut(slot) else {
                self.waiting.pop_front();
                continue;
            };
            match self.begin(part, now) {
                Submitted::Done => {}
                Submitted::Later => return,
            }
        }
    }

    /// The next part of a command, if any is left.
    fn cut(&mut self, slot: u16) -> Option<Part> {
        let blocks_max = self.backs.last()?.blocks_max;
        let request = self.requests.get_mut(usize::from(slot)).and_then(Option::as_mut)?;
        if request.is_cut {
            return None;
        }
        let moves_blocks = match request.operation {
            Operation::Read | Operation::Write(_) | Operation::Compare(_) | Operation::Verify => {
                true
            }
            Operation::WriteZeroes { .. } => self.shared.is_fully_sealed,
            _ => false,
        };
        let first = request.cut;
        let blocks =
            if moves_blocks { (request.blocks - first).min(blocks_max) } else { request.blocks };
        let work = match &request.operation {
            Operation::Flush => flush_work(&self.shared),
            Operation::CompareAndWrite { .. } => Work::Examine { sent: None },
            // A change is prepared when its blocks have been claimed.
            _ => Work::Read,
        };
        Some(Part {
            owner: Owner::Request(slot),
            lba: request.lba + u64::from(first),
            first,
            blocks,
            work,
            claim: None,
            order: 0,
            attempts: 0,
            is_again: false,
            place: 0,
            sent: None,
            is_unknown: false,
            ranges_done: 0,
            epoch: 0,
            deadline: Nanos::MAX,
        })
    }

    /// Claims blocks and room for a new part, seals it if it is a write, and submits it.
    fn begin(&mut self, mut part: Part, now: Nanos) -> Submitted {
        let Owner::Request(slot) = part.owner else { return Submitted::Later };
        let Some(request) = self.requests.get(usize::from(slot)).and_then(Option::as_ref) else {
            return Submitted::Done;
        };
        let is_forced = request.is_forced;
        let mut flushes = false;
        if let Some(ranges) = changed_ranges(&request.operation, &part) {
            let cost = match &request.operation {
                Operation::WriteZeroes { .. } | Operation::Deallocate(_)
                    if !self.shared.is_fully_sealed =>
                {
                    Change::Deallocate(ranges.clone()).cost()
                }
                _ => Change::write_cost(part.blocks as usize * BLOCK_BYTES),
            };
            match self.shared.link(|link| link.begin(&ranges, cost)) {
                begun @ (Begin::Begun | Begin::BegunAndFlush) => {
                    part.claim = Some(Claim { ranges, cost });
                    flushes = begun == Begin::BegunAndFlush;
                }
                Begin::Wait => return Submitted::Later,
                Begin::Refused(status) => {
                    self.end_request(slot, status);
                    return Submitted::Done;
                }
                Begin::FlushFirst => {
                    self.flush_journal(now);
                    return Submitted::Later;
                }
            }
        }
        if flushes {
            self.flush_journal(now);
        }
        self.advance(slot, part.blocks);
        match self.prepare(&mut part, slot, is_forced, now) {
            Ok(None) => self.send(part, now),
            Ok(Some(given)) => self.wait_for_device(part, is_forced, given, now),
            Err(status) => {
                self.give_up(&part);
                self.part_done(&part, status);
            }
        }
        Submitted::Done
    }

    /// Records that a part of the command in `slot` was cut.
    fn advance(&mut self, slot: u16, blocks: u32) {
        if let Some(request) = self.requests.get_mut(usize::from(slot)).and_then(Option::as_mut) {
            request.cut += blocks;
            request.parts += 1;
            request.is_cut = request.cut >= request.blocks;
        }
    }

    /// Prepares the change of a part whose blocks are claimed; does nothing for other parts. Sectors
    /// that were submitted to a device are missing in the change.
    fn prepare(
        &mut self,
        part: &mut Part,
        slot: u16,
        is_forced: bool,
        now: Nanos,
    ) -> Result<Option<(Vec<u8>, Given)>, Status> {
        let place = self.requests.get_mut(usize::from(slot));
        let Some(request) = place.and_then(Option::take) else { return Ok(None) };
        let change = match (&request.operation, &part.claim) {
            (Operation::Write(plain), _) => {
                let plain = plain.get(part.plain_range()).unwrap_or_default();
                self.seal_or_submit(part.lba, plain, Some(now)).map(|(sealed, given)| {
                    Some(if given.is_empty() {
                        Prepared::Ready(Change::Write { lba: part.lba, blocks: Arc::new(sealed) })
                    } else {
                        Prepared::AtDevice(sealed, given)
                    })
                })
            }
            (Operation::WriteZeroes { .. }, _) if self.shared.is_fully_sealed => {
                let zeros = vec![0; part.blocks as usize * DATA_BYTES];
                self.seal(part.lba, &zeros).map(Prepared::Ready).map(Some)
            }
            (Operation::WriteZeroes { .. } | Operation::Deallocate(_), Some(claim)) => {
                Ok(Some(Prepared::Ready(Change::Deallocate(claim.ranges.clone()))))
            }
            _ => Ok(None),
        };
        if let Some(place) = self.requests.get_mut(usize::from(slot)) {
            *place = Some(request);
        }
        match change? {
            Some(Prepared::Ready(change)) => part.work = Work::Change { change, is_forced },
            Some(Prepared::AtDevice(sealed, submitted)) => return Ok(Some((sealed, submitted))),
            None => {}
        }
        Ok(None)
    }

    /// Seals plaintext into private memory, each sector with a new IV.
    pub(super) fn seal(&mut self, lba: u64, plain: &[u8]) -> Result<Change, Status> {
        let (sealed, _) = self.seal_or_submit(lba, plain, None)?;
        Ok(Change::Write { lba, blocks: Arc::new(sealed) })
    }

    /// As [`Self::seal`], but with a time it gives sectors to the accelerator while that has room;
    /// also returns these, which are missing.
    fn seal_or_submit(
        &mut self,
        lba: u64,
        plain: &[u8],
        now: Option<Nanos>,
    ) -> Result<(Vec<u8>, Given), Status> {
        let shared = Arc::clone(&self.shared);
        let sectors = plain.as_chunks::<DATA_BYTES>().0;
        let mut sealed = shared.link(|link| link.journal.buffer(sectors.len() * BLOCK_BYTES));
        let blocks = sealed.as_chunks_mut::<BLOCK_BYTES>().0;
        let mut submitted = Vec::new();
        for (index, ((lba, sector), block)) in (lba..).zip(sectors).zip(blocks).enumerate() {
            let outcome = self.take_iv(&shared, lba).and_then(|iv| {
                let iv = match &mut self.acceleration {
                    Some(acceleration) if now.is_some() && acceleration.takes_jobs() => {
                        match acceleration.submit(&shared.keys, iv, (lba, sector)) {
                            Ok((cookie, ticket)) => {
                                add(&shared.counters.accelerator_jobs, 1);
                                submitted.push((cookie, index, ticket));
                                return Ok(());
                            }
                            Err(iv) => {
                                add(&shared.counters.sectors_inline, 1);
                                iv
                            }
                        }
                    }
                    _ => iv,
                };
                seal_sector(&shared, iv, lba, sector, block)
            });
            if let Err(status) = outcome {
                if let (Some(acceleration), Some(now)) = (&mut self.acceleration, now) {
                    acceleration.disown(submitted, now);
                }
                return Err(status);
            }
        }
        Ok((sealed, submitted))
    }

    /// The next IV. Each is counted by itself: if the lease is exhausted within a part, the IVs used
    /// so far stay used.
    pub(super) fn take_iv(&mut self, shared: &Shared, lba: u64) -> Result<Iv, Status> {
        shared.take_iv(&mut self.counters).map_err(|Exhausted| {
            self.refused(Reason::LeaseExhausted, Some(lba), "no counters are leased".into());
            Status::from(Reason::LeaseExhausted)
        })
    }

    pub(super) fn has_room(&mut self) -> bool {
        let commands_max = self.shared.settings.commands_per_key_max;
        let can_submit = self.backs.last().is_some_and(|back| back.can_submit(commands_max));
        let waiting = self.acceleration.as_ref().map_or(0, Acceleration::waiting_bytes);
        can_submit
            && self.in_flight + waiting < TARGET_WINDOW
            && self.front.pending_bytes() < HOST_WINDOW
    }

    pub(super) fn submit_again(&mut self, phase: Phase, now: Nanos) {
        self.settle_unknown(now);
        // A part with a claim is a change that has begun: all of these must end before other parts
        // are sent.
        let may =
            |part: &Part| part.sent.is_none() && (phase == Phase::Ready || part.claim.is_some());
        while self.has_room()
            && let Some(index) = self.again.iter().position(may)
        {
            let part = self.again.remove(index);
            add(&self.shared.counters.commands_resent, u64::from(part.is_again));
            self.send(part, now);
        }
    }

    /// Sends a part to the target. There must be room for it.
    pub(super) fn send(&mut self, mut part: Part, now: Nanos) {
        if part.order == 0 {
            self.orders += 1;
            part.order = self.orders;
        }
        let Some(back) = self.backs.last_mut() else {
            self.unsent(part);
            return;
        };
        let command = command_of(&part, back);
        part.epoch = back.epoch;
        // The number that it gets if the queue accepts it.
        let (incarnation, queue, epoch) = (back.incarnation, back.queue.name(), back.epoch);
        let sent = Sent { incarnation, queue, epoch, number: back.queue.last_number() + 1 };
        part.sent = is_change(&part.work).then_some(sent);
        if part.sent.is_some() && !std::mem::replace(&mut back.has_sent, true) {
            self.shared.link(|link| link.sends(incarnation));
        }
        part.deadline = now.saturating_add(nanos(self.shared.settings.command_timeout));
        self.first_deadline = self.first_deadline.min(part.deadline);
        let bytes = part.back_bytes();
        let tag = self.parts.insert(part);
        match back.submit(tag, command) {
            Ok(()) => self.in_flight += bytes,
            Err(error) => {
                let Some(mut part) = self.parts.take(tag) else { return };
                part.sent = None;
                if error == SubmitError::Length {
                    self.give_up(&part);
                    self.part_done(&part, Status::INTERNAL_ERROR.final_());
                } else {
                    self.unsent(part);
                }
            }
        }
    }

    /// Keeps a part that couldn't be sent now.
    fn unsent(&mut self, part: Part) {
        match part.owner {
            Owner::Replay(_) => self.return_replayed(part),
            Owner::Outcomes => self.forget_questions(),
            _ => self.again.push(part),
        }
    }
}

/// Seals a sector from the host's command into its place in private memory.
pub(super) fn seal_sector(
    shared: &Shared,
    iv: Iv,
    lba: u64,
    plain: &[u8; DATA_BYTES],
    block: &mut Block,
) -> Result<(), Status> {
    let epoch = shared.keys.seal(iv, lba, plain, block);
    note_seal(shared, (epoch, lba), plain, block)
}

/// Counts a sealed sector, and records it if a test looks for IVs used twice.
pub(super) fn note_seal(
    shared: &Shared,
    (epoch, lba): (u32, u64),
    plain: &[u8; DATA_BYTES],
    block: &Block,
) -> Result<(), Status> {
    add(&shared.counters.sectors_sealed, 1);
    let Some(ledger) = &shared.ledger else { return Ok(()) };
    ledger.note(epoch, lba, plain, block).map_err(|error| {
        let name = QueueName { association: 0, queue_id: 0 };
        shared.refused(name, Reason::StoreFailed, Some(lba), format!("nonce ledger: {error}"));
        Status::INTERNAL_ERROR
    })
}

/// A flush of everything acknowledged so far; it covers no more than that if it is sent again.
pub(super) fn flush_work(shared: &Shared) -> Work {
    Work::Flush { mark: shared.link(|link| link.journal.mark()) }
}

/// The blocks that a part changes, if any.
fn changed_ranges(operation: &Operation, part: &Part) -> Option<BlockRanges> {
    let ranges = match operation {
        Operation::Write(_) | Operation::WriteZeroes { .. } | Operation::CompareAndWrite { .. } => {
            BlockRanges::one(part.lba, u64::from(part.blocks))
        }
        Operation::Deallocate(ranges) => BlockRanges::Many(
            ranges
                .iter()
                .filter(|range| range.blocks > 0)
                .map(|range| range.lba..range.lba + u64::from(range.blocks))
                .collect(),
        ),
        _ => return None,
    };
    Some(ranges).filter(|ranges| !ranges.is_empty())
}

/// The part as a command for the target. It shares the sealed sectors with the part, except those
/// that are sent with an expected IV, which are copied.
fn command_of(part: &Part, back: &mut Back) -> HostCommand {
    match &part.work {
        Work::Read | Work::Examine { .. } => {
            HostCommand::Read { lba: part.lba, blocks: part.blocks }
        }
        Work::Flush { .. } => HostCommand::FlushMilestone,
        Work::Openings => HostCommand::Openings,
        Work::Outcomes { queue, epoch } => HostCommand::Outcomes { queue: *queue, epoch: *epoch },
        Work::Change { change: Change::Write { lba, blocks }, is_forced } => {
            // If it is sent again, only the blocks that newer changes haven't replaced.
            let start = (part.lba - lba) as usize * BLOCK_BYTES;
            let range = start..start + part.blocks as usize * BLOCK_BYTES;
            let (lba, sectors) = (part.lba, SharedBytes::new(Arc::clone(blocks), range));
            match part.owner {
                Owner::Replay(_) => HostCommand::WriteAgain { lba, sectors },
                _ => HostCommand::WriteKept { lba, sectors, is_forced: *is_forced },
            }
        }
        Work::Swap { current, change: Change::Write { lba, blocks }, is_forced } => {
            let mut data = back.queue.buffer(blocks.len());
            data.copy_from_slice(blocks);
            for (block, iv) in data.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().zip(current) {
                set_expected_iv(block, iv);
            }
            HostCommand::WriteIf { lba: *lba, data, is_forced: *is_forced }
        }
        Work::Change { change: change @ Change::Deallocate(_), .. }
        | Work::Swap { change: change @ Change::Deallocate(_), .. } => {
            let ranges = ranges_left(change, part.ranges_done).iter().map(|range| LbaRange {
                lba: range.start,
                blocks: (range.end - range.start) as u32,
            });
            match part.owner {
                Owner::Replay(_) => HostCommand::DeallocateAgain(ranges.collect()),
                _ => HostCommand::Deallocate(ranges.collect()),
            }
        }
    }
}
