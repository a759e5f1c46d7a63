//! Execution of a command between its arrival and its completion.
//!
//! A command is admitted by quality of service, takes the range lock of its blocks and is checked
//! against the reservations. Then its store operations run one after another; finally it is
//! completed and its range released. A command holds one range at a time: see
//! [`super::range_lock`].

use std::io;
use std::ops::Range;

use sealane_proto::freshness::milestone::MILESTONE_BYTES;
use sealane_proto::freshness::openings::OPENINGS_BYTES;
use sealane_proto::link::Nanos;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::operation::{Command, LbaRange, Operation};
use sealane_proto::nvme::outcomes::{self, Ended};
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{BLOCK_BYTES, IV_BYTES, block_iv, take_expected_iv};

use super::mailbox::Waiter;
use super::namespace::{Namespace, add};
use super::order::Token;
use super::outcomes::QueueName;
use super::qos::Cost;
use super::range_lock::{Acquired, LockId, Mode};
use super::reservation::{Acquire, Group, Refusal, Register};
use super::worker::Worker;
use crate::clock;
use crate::latency::Io;
use crate::storage::events::StorageEvent;
use crate::storage::store::{StoreDone, StoreRequest};
use crate::storage::stores::fresh::failure::reason_of;

/// Blocks that a verify reads at a time. Its total isn't limited by the maximum transfer size, as
/// it moves no data to the host.
const VERIFY_BLOCKS: u64 = 32;

/// Namespace id of a flush of all namespaces.
const ALL_NAMESPACES: u32 = u32::MAX;

/// Flush of the store on behalf of a change, if several gateways use the namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Flushing {
    #[default]
    No,
    /// Before the change: another gateway changed its blocks.
    Before,
    /// After the change: its parts were made at different times, which one mark can't express.
    After,
}

/// A command being executed.
#[allow(clippy::struct_excessive_bools)] // independent facts
pub(super) struct Task {
    /// Index of the attachment; `usize::MAX` for a flush of all namespaces.
    attachment: usize,
    operation: Operation,
    blocks: Range<u64>,
    is_forced: bool,
    /// The range lock that it holds or waits for.
    lock: Option<LockId>,
    /// Number of store operations that haven't ended.
    stores: usize,
    /// The first failure.
    status: Status,
    /// Number of ranges of a deallocation that are done.
    ranges_done: usize,
    /// Number of blocks of a verify that are done.
    verified: u64,
    /// Whether a gateway sends it again after a restart: blocks changed since then are left out.
    is_sent_again: bool,
    /// Which flush its current store operation is, if any.
    flushing: Flushing,
    /// Token of the flush in progress.
    token: Option<Token>,
    /// Whether other gateways' changes in its range are flushed, so that it may be changed.
    is_ordered: bool,
    /// Whether some of its blocks were left out.
    has_left_out: bool,
    /// The store's mark of its change.
    mark: u64,
    /// Number and id of the command, by which its gateway can ask for its outcome.
    number: u64,
    cid: u16,
    /// Whether a change was submitted to the store.
    has_changed: bool,
    /// When it arrived.
    since: Nanos,
}

impl Task {
    /// The blocks of its next read from the store.
    fn to_read(&self) -> Range<u64> {
        match self.operation {
            Operation::Verify => {
                let start = self.blocks.start + self.verified;
                start..self.blocks.end.min(start + VERIFY_BLOCKS)
            }
            _ => self.blocks.clone(),
        }
    }

    /// The measured operation that it is, if it is one.
    fn io(&self) -> Option<Io> {
        match self.operation {
            Operation::Read => Some(Io::Read),
            Operation::Write(_) | Operation::WriteIf(_) | Operation::CompareAndWrite { .. } => {
                Some(Io::Write)
            }
            Operation::Flush | Operation::FlushMilestone => Some(Io::Flush),
            _ => None,
        }
    }

    fn mode(&self) -> Mode {
        match self.operation {
            Operation::Read | Operation::Compare(_) | Operation::Verify => Mode::Shared,
            _ => Mode::Exclusive,
        }
    }

    fn group(&self) -> Option<Group> {
        match self.operation {
            Operation::Read | Operation::Compare(_) | Operation::Verify => Some(Group::Read),
            Operation::ReservationRegister { .. }
            | Operation::ReservationAcquire { .. }
            | Operation::ReservationRelease { .. }
            | Operation::ReservationReport { .. }
            | Operation::Outcomes { .. }
            | Operation::Openings => None,
            _ => Some(Group::Write),
        }
    }

    /// The outcome of the command, if a change was submitted.
    fn ended(&self) -> Option<Ended> {
        let (mut status, mut ranges) = (self.status, 0);
        if let Operation::Deallocate(all) = &self.operation
            && self.ranges_done < all.len()
        {
            ranges = self.ranges_done as u16;
            if status.is_success() {
                // Its queue ended after some of its ranges.
                status = Status::ABORTED;
            }
        }
        let mark = if status.is_success() { self.mark } else { 0 };
        self.has_changed.then_some(Ended { number: self.number, status, ranges, mark })
    }

    /// The blocks that its next store operation changes; None if it changes none.
    fn to_change(&self) -> Option<Range<u64>> {
        match &self.operation {
            Operation::Write(_)
            | Operation::WriteIf(_)
            | Operation::CompareAndWrite { .. }
            | Operation::WriteZeroes { .. } => Some(self.blocks.clone()),
            Operation::Deallocate(ranges) => ranges.get(self.ranges_done).map(range_of),
            _ => None,
        }
    }

    /// Whether its store operation is a read. A write-if that still has its data is reading the
    /// current sectors.
    fn is_reading(&self) -> bool {
        match &self.operation {
            Operation::Read
            | Operation::Compare(_)
            | Operation::Verify
            | Operation::CompareAndWrite { .. } => true,
            Operation::WriteIf(data) => !data.is_empty(),
            _ => false,
        }
    }

    /// Its cost for quality of service; `None` if it isn't subject to it.
    fn cost(&self, block_bytes: usize) -> Option<Cost> {
        let bytes = (self.blocks.end - self.blocks.start) * block_bytes as u64;
        match self.operation {
            Operation::Read | Operation::Compare(_) | Operation::Verify => {
                Some(Cost { bytes, is_write: false })
            }
            Operation::Write(_) | Operation::WriteIf(_) | Operation::CompareAndWrite { .. } => {
                Some(Cost { bytes, is_write: true })
            }
            // They move no data.
            Operation::WriteZeroes { .. } | Operation::Deallocate(_) => {
                Some(Cost { bytes: 0, is_write: true })
            }
            _ => None,
        }
    }
}

impl Worker {
    /// Begins a command received by the queue.
    pub fn execute(&mut self, command: Command) {
        let Command { slot, nsid, operation, lba, blocks, is_forced, is_sent_again, number, cid } =
            command;
        if nsid == ALL_NAMESPACES {
            return self.flush_all(slot);
        }
        let Some(index) = self.attached(nsid) else {
            // The namespace was there when the command was checked.
            return self.queue.complete(slot, Status::INVALID_NAMESPACE.final_(), Vec::new());
        };
        let Some(Some(attachment)) = self.attachments.get_mut(index) else { return };
        if self.secure_name.is_some() && usize::from(cid) >= self.tasks.len() {
            // Outcomes are kept by command id: the limit bounds them by the depth of the queue.
            return self.queue.complete(slot, Status::INVALID_FIELD.final_(), Vec::new());
        }
        let blocks = lba..lba.saturating_add(u64::from(blocks));
        if blocks.end > attachment.namespace.block_count() {
            return self.queue.complete(slot, Status::LBA_OUT_OF_RANGE.final_(), Vec::new());
        }
        attachment.tasks += 1;
        attachment.namespace.begin();
        let task = Task {
            attachment: index,
            operation,
            blocks,
            is_forced,
            lock: None,
            stores: 0,
            status: Status::SUCCESS,
            ranges_done: 0,
            verified: 0,
            is_sent_again,
            flushing: Flushing::No,
            token: None,
            is_ordered: false,
            has_left_out: false,
            mark: 0,
            number,
            cid,
            has_changed: false,
            since: self.arrived,
        };
        let waiter = Waiter { mailbox: self.mailbox.clone(), slot };
        let cost = task.cost(attachment.namespace.block_bytes());
        let admitted =
            cost.is_none_or(|cost| attachment.namespace.admit(self.number, cost, &waiter));
        if let Some(place) = self.tasks.get_mut(usize::from(slot)) {
            *place = Some(task);
        }
        if admitted {
            self.take_lock(slot);
        } else {
            self.throttled += 1;
        }
    }

    /// Takes the range of a command, then starts it.
    pub fn take_lock(&mut self, slot: u16) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get(task.attachment) else { return };
        let blocks = match &task.operation {
            Operation::Flush
            | Operation::FlushMilestone
            | Operation::Outcomes { .. }
            | Operation::Openings
            | Operation::ReservationReport { .. } => None,
            Operation::Deallocate(ranges) => ranges.get(task.ranges_done).map(range_of),
            // Nothing runs while reservations change, so a preempted host has nothing in flight.
            Operation::ReservationRegister { .. }
            | Operation::ReservationAcquire { .. }
            | Operation::ReservationRelease { .. } => Some(0..u64::MAX),
            _ => Some(task.blocks.clone()),
        };
        if let Some(blocks) = blocks {
            let waiter = Waiter { mailbox: self.mailbox.clone(), slot };
            match attachment.namespace.acquire(blocks, task.mode(), waiter) {
                Acquired::Granted(id) => task.lock = Some(id),
                Acquired::Waiting(id) => {
                    task.lock = Some(id);
                    return;
                }
            }
        }
        self.start(slot);
    }

    /// Starts a command that holds its range.
    pub fn start(&mut self, slot: u16) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get_mut(task.attachment) else { return };
        let namespace = &attachment.namespace;
        let host = self.controller.host_id;
        if task.group().is_some_and(|group| !namespace.allows(host, group)) {
            task.status = Status::RESERVATION_CONFLICT.final_();
            return self.finish(slot, Vec::new());
        }
        if self.secure_name.is_some()
            && !task.is_ordered
            && let Some(blocks) = task.to_change()
            && namespace.order().must_flush(attachment.writer, &blocks)
        {
            add(&namespace.counters.ordering_flushes, 1);
            return self.flush_between(slot, Flushing::Before);
        }
        let lba = task.blocks.start;
        let to_read = task.to_read();
        let bytes = (to_read.end - to_read.start) as usize * namespace.block_bytes();
        let request = match &mut task.operation {
            Operation::Read
            | Operation::Compare(_)
            | Operation::Verify
            | Operation::CompareAndWrite { .. }
            | Operation::WriteIf(_) => {
                self.reading += bytes;
                StoreRequest::Read { lba: to_read.start, buffer: self.queue.buffer(bytes) }
            }
            Operation::Write(data) => {
                let buffer = std::mem::take(data);
                StoreRequest::Write { lba, buffer, durable: task.is_forced }
            }
            Operation::WriteZeroes { .. } => {
                StoreRequest::Deallocate { lba, blocks: task.blocks.end - lba }
            }
            Operation::Deallocate(ranges) => {
                let range = ranges.get(task.ranges_done).map(range_of).unwrap_or_default();
                StoreRequest::Deallocate { lba: range.start, blocks: range.end - range.start }
            }
            Operation::Flush | Operation::FlushMilestone => {
                task.token = namespace.order().begin_flush();
                StoreRequest::Flush
            }
            Operation::Openings => return self.tell_openings(slot),
            Operation::Outcomes { queue, epoch } => {
                let name = QueueName { name: *queue, epoch: *epoch };
                return self.tell_outcomes_of(slot, name);
            }
            _ => return self.change_reservations(slot),
        };
        let is_change =
            matches!(request, StoreRequest::Write { .. } | StoreRequest::Deallocate { .. });
        task.has_changed |= is_change;
        if task.is_sent_again && is_change {
            return self.start_again(slot, request);
        }
        task.stores += 1;
        attachment.channel.submit(u64::from(slot), request);
    }

    /// Flushes the store before or after a change; the range stays locked.
    fn flush_between(&mut self, slot: u16, flushing: Flushing) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get_mut(task.attachment) else { return };
        task.flushing = flushing;
        task.token = attachment.namespace.order().begin_flush();
        task.stores += 1;
        attachment.channel.submit(u64::from(slot), StoreRequest::Flush);
    }

    /// Continues a change after the flush before it, or completes it after the flush behind it.
    fn flushed_between(&mut self, slot: u16, flushing: Flushing, buffer: Vec<u8>) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get(task.attachment) else { return };
        if !task.status.is_success() || flushing == Flushing::After {
            return self.finish(slot, buffer);
        }
        if self.is_ending {
            task.status = Status::ABORTED;
            return self.finish(slot, buffer);
        }
        if let Some(blocks) = task.to_change() {
            attachment.namespace.order().flushed(&blocks);
        }
        task.is_ordered = true;
        self.start(slot);
    }

    /// Starts a change that is sent again, without blocks that were changed since.
    fn start_again(&mut self, slot: u16, request: StoreRequest) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get_mut(task.attachment) else { return };
        let block_bytes = attachment.namespace.block_bytes();
        let blocks = request.blocks(block_bytes);
        let left = attachment.namespace.not_superseded(blocks.clone());
        task.has_left_out |= left != std::slice::from_ref(&blocks);
        if left.is_empty() {
            return self.change_done(slot, request.into_buffer());
        }
        if left == [blocks] {
            task.stores += 1;
            return attachment.channel.submit(u64::from(slot), request);
        }
        for range in left {
            task.stores += 1;
            attachment.channel.submit(u64::from(slot), request.part(range, block_bytes));
        }
    }

    fn flush_all(&mut self, slot: u16) {
        let mut task = Task {
            attachment: usize::MAX,
            operation: Operation::Flush,
            blocks: 0..0,
            is_forced: false,
            lock: None,
            stores: 0,
            status: Status::SUCCESS,
            ranges_done: 0,
            verified: 0,
            is_sent_again: false,
            flushing: Flushing::No,
            token: None,
            is_ordered: false,
            has_left_out: false,
            mark: 0,
            number: 0,
            cid: 0,
            has_changed: false,
            since: self.arrived,
        };
        let host = self.controller.host_id;
        for attachment in self.attachments.iter_mut().flatten() {
            if attachment.namespace.allows(host, Group::Write) {
                attachment.channel.submit(u64::from(slot), StoreRequest::Flush);
                attachment.tasks += 1;
                attachment.namespace.begin();
                task.stores += 1;
            } else {
                task.status = Status::RESERVATION_CONFLICT.final_();
            }
        }
        if task.stores == 0 {
            return self.queue.complete(slot, task.status, Vec::new());
        }
        if let Some(place) = self.tasks.get_mut(usize::from(slot)) {
            *place = Some(task);
        }
    }

    /// Continues a command after one of its store operations has ended.
    pub fn finished(&mut self, index: usize, done: StoreDone) {
        let slot = done.ticket as u16;
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get_mut(index) else { return };
        let namespace = &attachment.namespace;
        task.stores -= 1;
        if let Some(token) = task.token.take() {
            namespace.order().end_flush(token, done.result.is_ok());
        }
        if let Err(error) = &done.result {
            let is_read = task.mode() == Mode::Shared;
            let reason = reason_of(error);
            task.status = failure(reason, is_read, error);
            add(&namespace.counters.media_errors, 1);
            let lba = (task.lock.is_some()).then_some(task.blocks.start);
            let detail = error.to_string();
            if error.kind() == io::ErrorKind::NotConnected {
                self.store_lost = Some(detail.clone());
                // Only the gateway's own device fails like this: the gateway makes the change
                // again.
                task.has_changed = false;
            }
            let refusal = (reason, lba, detail);
            report(namespace, self.controller.association, self.queue_id, refusal);
        }
        if task.attachment == usize::MAX {
            if done.result.is_ok() {
                add(&namespace.counters.flushes, 1);
            }
            let (is_last, status) = (task.stores == 0, task.status);
            self.detach(index);
            if is_last && let Some(place) = self.tasks.get_mut(usize::from(slot)) {
                *place = None;
                self.queue.complete(slot, status, done.buffer);
            }
            return;
        }
        let flushing = std::mem::take(&mut task.flushing);
        if flushing != Flushing::No {
            return self.flushed_between(slot, flushing, done.buffer);
        }
        let is_read = task.is_reading();
        if is_read {
            self.reading = self.reading.saturating_sub(done.buffer.len());
        }
        if task.stores > 0 {
            // A change sent again in parts: the command ends with its last part.
        } else if !task.status.is_success() {
            self.finish(slot, done.buffer);
        } else if is_read {
            self.read_done(slot, done.buffer);
        } else {
            self.change_done(slot, done.buffer);
        }
    }

    /// Continues a conditional write whose condition holds; its range stays locked.
    fn write_compared(&mut self, slot: u16, buffer: Vec<u8>) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get_mut(task.attachment) else { return };
        if self.is_ending {
            task.status = Status::ABORTED;
            return self.finish(slot, buffer);
        }
        task.operation = Operation::Write(Vec::new());
        task.has_changed = true;
        task.stores += 1;
        let (lba, durable) = (task.blocks.start, task.is_forced);
        let request = StoreRequest::Write { lba, buffer, durable };
        attachment.channel.submit(u64::from(slot), request);
    }

    /// The store has read blocks.
    fn read_done(&mut self, slot: u16, mut buffer: Vec<u8>) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get(task.attachment) else { return };
        let namespace = &attachment.namespace;
        let read = task.to_read();
        if let Err((reason, lba)) = namespace.check(read.start, &mut buffer) {
            task.status = Status::from(reason);
            let refusal = (reason, Some(lba), "stored sector".to_owned());
            report(namespace, self.controller.association, self.queue_id, refusal);
            return self.finish(slot, buffer);
        }
        let blocks = read.end - read.start;
        match &mut task.operation {
            Operation::Read => {
                add(&namespace.counters.reads, 1);
                add(&namespace.counters.sectors_read, blocks);
                self.queue.complete_read(slot, buffer);
                return self.forget(slot);
            }
            Operation::Compare(expected) => {
                add(&namespace.counters.reads, 1);
                add(&namespace.counters.sectors_read, blocks);
                if *expected != buffer {
                    task.status = Status::COMPARE_FAILURE.final_();
                }
            }
            Operation::CompareAndWrite { .. } | Operation::WriteIf(_) => {
                let (is_equal, data) = compared(&mut task.operation, &buffer);
                if is_equal {
                    return self.write_compared(slot, data);
                }
                task.status = Status::COMPARE_FAILURE.final_();
            }
            Operation::Verify => {
                task.verified += read.end - read.start;
                if !task.to_read().is_empty() && !self.is_ending {
                    return self.verify_more(slot, buffer);
                }
                if !task.to_read().is_empty() {
                    task.status = Status::ABORTED;
                }
            }
            _ => {}
        }
        self.finish(slot, buffer);
    }

    /// Continues a verify; its range stays locked.
    fn verify_more(&mut self, slot: u16, mut buffer: Vec<u8>) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get_mut(task.attachment) else { return };
        let next = task.to_read();
        let bytes = (next.end - next.start) as usize * attachment.namespace.block_bytes();
        buffer.resize(bytes, 0);
        self.reading += bytes;
        task.stores += 1;
        attachment.channel.submit(u64::from(slot), StoreRequest::Read { lba: next.start, buffer });
    }

    /// The store has written or deallocated blocks, or flushed.
    fn change_done(&mut self, slot: u16, buffer: Vec<u8>) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get(task.attachment) else { return };
        let namespace = &attachment.namespace;
        let counters = &namespace.counters;
        let blocks = task.blocks.end - task.blocks.start;
        let mut must_flush = false;
        if self.secure_name.is_some()
            && let Some(changed) = task.to_change()
        {
            let mut order = namespace.order();
            order.note(attachment.writer, changed);
            let is_several =
                matches!(&task.operation, Operation::Deallocate(ranges) if ranges.len() > 1);
            must_flush = order.is_shared() && (is_several || task.has_left_out);
            drop(order);
            task.mark = namespace.mark();
        }
        // A change that is sent again is older than any change since, so it supersedes nothing.
        let is_noted = self.secure_name.is_some() && !task.is_sent_again;
        let note_changed = |blocks| {
            if is_noted {
                namespace.note_changed(blocks);
            }
        };
        match &task.operation {
            Operation::Flush => add(&counters.flushes, 1),
            Operation::FlushMilestone => {
                add(&counters.flushes, 1);
                let block = milestone_block(namespace, self.queue.buffer(BLOCK_BYTES));
                self.queue.complete_read(slot, block);
                return self.forget(slot);
            }
            Operation::WriteZeroes { .. } => {
                add(&counters.deallocations, 1);
                note_changed(task.blocks.clone());
            }
            Operation::Deallocate(ranges) => {
                add(&counters.deallocations, 1);
                note_changed(ranges.get(task.ranges_done).map(range_of).unwrap_or_default());
                task.ranges_done += 1;
                if task.ranges_done < ranges.len() {
                    if self.is_ending {
                        task.status = Status::ABORTED;
                    } else {
                        task.is_ordered = false;
                        if let Some(id) = task.lock.take() {
                            namespace.release(id);
                        }
                        return self.take_lock(slot);
                    }
                }
            }
            _ => {
                add(&counters.writes, 1);
                add(&counters.sectors_stored, blocks);
                note_changed(task.blocks.clone());
            }
        }
        if must_flush && task.status.is_success() {
            return self.flush_between(slot, Flushing::After);
        }
        self.finish(slot, buffer);
    }

    /// Answers with the openings of the store and how far they had come.
    fn tell_openings(&mut self, slot: u16) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get(task.attachment) else { return };
        let mut data = self.queue.buffer(BLOCK_BYTES);
        data.fill(0);
        if let Some(openings) = attachment.namespace.openings() {
            data[..OPENINGS_BYTES].copy_from_slice(&openings.encode());
        }
        self.queue.complete_read(slot, data);
        self.forget(slot);
    }

    /// Answers with the outcomes of the changes of another queue of the same gateway.
    fn tell_outcomes_of(&mut self, slot: u16, name: QueueName) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get(task.attachment) else { return };
        let mut data = self.queue.buffer(BLOCK_BYTES);
        if let Some((gateway, _)) = &self.secure_name
            && let Some(block) = data.first_chunk_mut()
        {
            outcomes::encode(attachment.namespace.outcomes().of(gateway, name), block);
        }
        self.queue.complete_read(slot, data);
        self.forget(slot);
    }

    fn change_reservations(&mut self, slot: u16) {
        let Some(Some(task)) = self.tasks.get_mut(usize::from(slot)) else { return };
        let Some(Some(attachment)) = self.attachments.get(task.attachment) else { return };
        let (namespace, host) = (&attachment.namespace, self.controller.host_id);
        let result = match task.operation {
            Operation::ReservationRegister {
                action,
                ignore_existing_key: ignore_key,
                persistence,
                current_key,
                new_key,
            } => namespace.change_reservations(|reservations| {
                let command = Register { action, ignore_key, persistence, current_key, new_key };
                reservations.register(host, command)
            }),
            Operation::ReservationAcquire { action, kind, current_key, preempt_key } => namespace
                .change_reservations(|reservations| {
                    let command = Acquire { action, kind, current_key, preempt_key };
                    reservations.acquire(host, command)
                }),
            Operation::ReservationRelease { kind, current_key } => namespace
                .change_reservations(|reservations| reservations.release(host, kind, current_key)),
            Operation::ReservationReport { extended, bytes } => {
                match namespace.with_reservations(|known| known.report(extended, bytes)) {
                    Ok(report) => {
                        self.queue.complete_data(slot, report);
                        return self.forget(slot);
                    }
                    Err(refusal) => Err(refusal),
                }
            }
            _ => return,
        };
        task.status = match result {
            Ok(()) => Status::SUCCESS,
            Err(Refusal::Conflict) => Status::RESERVATION_CONFLICT.final_(),
            Err(Refusal::InvalidField) => Status::INVALID_FIELD.final_(),
            Err(Refusal::HostIdFormat) => Status::HOST_IDENTIFIER_INCONSISTENT.final_(),
            Err(Refusal::Full) => Status::INTERNAL_ERROR,
        };
        self.finish(slot, Vec::new());
    }

    /// Completes a command with its status.
    fn finish(&mut self, slot: u16, buffer: Vec<u8>) {
        let Some(Some(task)) = self.tasks.get(usize::from(slot)) else { return };
        self.queue.complete_change(slot, task.status, task.mark, buffer);
        self.forget(slot);
    }

    /// Releases everything that a completed command held.
    fn forget(&mut self, slot: u16) {
        let task = self.tasks.get_mut(usize::from(slot)).and_then(Option::take);
        let Some(task) = task else { return };
        if let Some(Some(attachment)) = self.attachments.get_mut(task.attachment) {
            if self.secure_name.is_some()
                && let Some(ended) = task.ended()
            {
                attachment.changes.note(task.cid, ended);
            }
            if !self.is_ending
                && let Some(io) = task.io()
            {
                let duration = clock::now().saturating_sub(task.since);
                attachment.namespace.latencies.note(io, duration);
            }
            if let Some(id) = task.lock {
                attachment.namespace.release(id);
            }
        }
        self.detach(task.attachment);
    }

    /// Drops the commands that have nothing in flight at a store; their queue is ending.
    pub fn give_up_waiting(&mut self) {
        for slot in 0..self.tasks.len() {
            let waits = self.tasks.get(slot).and_then(Option::as_ref);
            if waits.is_some_and(|task| task.stores == 0) {
                self.forget(slot as u16);
            }
        }
    }
}

/// The answer to a flush with milestone: a block that begins with the milestone; the rest is zero.
fn milestone_block(namespace: &Namespace, mut block: Vec<u8>) -> Vec<u8> {
    block.fill(0);
    if let Some(milestone) = namespace.milestone() {
        block[..MILESTONE_BYTES].copy_from_slice(&milestone.encode());
    }
    block
}

/// Takes the expected IVs out of the sectors of a write-if.
fn take_expected(buffer: &mut [u8]) -> Vec<[u8; IV_BYTES]> {
    buffer.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().map(take_expected_iv).collect()
}

/// Whether the stored blocks are those that a conditional write expects, and the data it then
/// writes.
fn compared(operation: &mut Operation, stored: &[u8]) -> (bool, Vec<u8>) {
    match operation {
        Operation::CompareAndWrite { expected, data } => (expected == stored, std::mem::take(data)),
        Operation::WriteIf(data) => {
            let mut data = std::mem::take(data);
            let expected = take_expected(&mut data);
            let current = stored.as_chunks::<BLOCK_BYTES>().0.iter().map(block_iv);
            (current.eq(expected), data)
        }
        _ => (false, Vec::new()),
    }
}

fn range_of(range: &LbaRange) -> Range<u64> {
    range.lba..range.lba.saturating_add(u64::from(range.blocks))
}

/// The status of a command for which the store failed.
fn failure(reason: Reason, is_read: bool, error: &io::Error) -> Status {
    match error.kind() {
        _ if reason != Reason::StoreFailed => Status::from(reason),
        _ if is_read => Status::UNRECOVERED_READ,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Status::CAPACITY_EXCEEDED,
        _ => Status::WRITE_FAULT,
    }
}

fn report(
    namespace: &Namespace,
    association: u64,
    queue_id: u16,
    (reason, lba, detail): (Reason, Option<u64>, String),
) {
    add(&namespace.counters.refusals, 1);
    let reason = reason.id();
    let event = StorageEvent { kind: "refused", reason, lba, association, queue_id, detail };
    namespace.events().push(event);
}
