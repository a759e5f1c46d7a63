//! The thread that joins one plain front-end queue to one secure back-end queue: seals what goes
//! down, opens what comes up.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::event::PollFlags;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::controller_queue::{Command, ControllerEvent, ControllerQueue, Operation};
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::{HostEvent, HostQueue};
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{BLOCK_BYTES, CounterRange, DATA_BYTES, Exhausted, Iv, is_unwritten};

use super::connection::{Connection, Gone, wait};
use super::events::StorageEvent;
use super::gateway::{QueuePair, Shared, add};

/// Bytes that may be on their way to or from the target, and that may wait for the host before its
/// commands wait too. Enough to keep both wires busy, and little enough to stay in the caches.
const WINDOW: usize = 512 * 1024;

/// A host's command on its way through.
struct Request {
    operation: Operation,
    lba: u64,
    blocks: u32,
    is_forced: bool,
    /// Plaintext of a read, from its first part on.
    answer: Vec<u8>,
    parts_left: usize,
    status: Status,
}

/// A part of a request that fits one back-end command.
#[derive(Clone, Copy)]
struct Part {
    slot: u16,
    /// First block, from the start of the request.
    first: u32,
    blocks: u32,
}

impl Part {
    fn tag(self) -> u64 {
        u64::from(self.slot) << 48 | u64::from(self.first) << 24 | u64::from(self.blocks)
    }

    fn from_tag(tag: u64) -> Self {
        let mask = (1 << 24) - 1;
        Self {
            slot: (tag >> 48) as u16,
            first: (tag >> 24 & mask) as u32,
            blocks: (tag & mask) as u32,
        }
    }

    fn back_bytes(self) -> usize {
        self.blocks as usize * BLOCK_BYTES
    }

    fn plain_range(self) -> std::ops::Range<usize> {
        let start = self.first as usize * DATA_BYTES;
        start..start + self.blocks as usize * DATA_BYTES
    }
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    front: ControllerQueue,
    back: HostQueue,
    back_blocks: u32,
    requests: Vec<Option<Request>>,
    waiting: VecDeque<Part>,
    /// Bytes of the parts that the target has.
    in_flight: usize,
    counters: Option<CounterRange>,
    association: u64,
    queue_id: u16,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, pair: QueuePair) -> Self {
        let back_blocks = (pair.back.transfer_max / BLOCK_BYTES).max(1) as u32;
        Self {
            shared,
            requests: (0..pair.front.queue_depth).map(|_| None).collect(),
            front: ControllerQueue::new(pair.front, vec![pair.namespace], None),
            back: HostQueue::new(pair.back, Some(pair.secure)),
            back_blocks,
            waiting: VecDeque::new(),
            in_flight: 0,
            counters: None,
            association: pair.association,
            queue_id: pair.queue_id,
        }
    }

    pub(super) fn run(
        &mut self,
        front: &mut Connection,
        back: &mut Connection,
        stop: BorrowedFd<'_>,
    ) -> (&'static str, String) {
        loop {
            let pending = self.front.transmit().pending_bytes();
            let front_interest = Connection::interest(pending < WINDOW, pending);
            let back_interest = Connection::interest(true, self.back.transmit().pending_bytes());
            let ready = wait(
                [
                    (front.as_fd(), front_interest),
                    (back.as_fd(), back_interest),
                    (stop, PollFlags::IN),
                ],
                None,
            );
            let [front_ready, back_ready, stopped] = match ready {
                Ok(ready) => ready,
                Err(error) => return ("", error.to_string()),
            };
            if !stopped.is_empty() {
                return ("", "stopped".into());
            }
            if front_ready.intersects(!PollFlags::OUT)
                && let Err(Gone(detail)) = front.receive(&mut self.front)
            {
                return ("", detail);
            }
            let mut lost = None;
            if back_ready.intersects(!PollFlags::OUT)
                && let Err(Gone(detail)) = back.receive(&mut self.back)
            {
                lost = Some((Reason::QueueClosed, None, detail));
            }
            if let Some(ended) = self.front_events() {
                front.farewell(self.front.transmit());
                return ended;
            }
            lost = self.back_events().or(lost);
            if lost.is_none() {
                // The host first: what it takes makes room for what is submitted.
                if let Err(Gone(detail)) = front.send(self.front.transmit()) {
                    return ("", detail);
                }
                self.submit_waiting();
                if let Err(Gone(detail)) = back.send(self.back.transmit()) {
                    lost = Some((Reason::QueueClosed, None, detail));
                }
            }
            if let Some((reason, lba, detail)) = lost {
                self.back_lost(reason, lba, &detail);
                // The target hears what it did wrong, the host what became of its commands.
                back.farewell(self.back.transmit());
                front.farewell(self.front.transmit());
                return (reason.id(), detail);
            }
        }
    }

    /// Takes the host's commands; returns why the front-end queue ended, if it did.
    fn front_events(&mut self) -> Option<(&'static str, String)> {
        while let Some(event) = self.front.next_event() {
            match event {
                ControllerEvent::Received(command) => self.begin(command),
                ControllerEvent::Failed { reason, lba, detail } => {
                    if reason == Reason::QueueClosed {
                        return Some(("", detail));
                    }
                    self.refused(reason, lba, detail.clone());
                    return Some((reason.id(), detail));
                }
            }
        }
        None
    }

    fn begin(&mut self, command: Command) {
        let Command { slot, operation, lba, blocks, is_forced, .. } = command;
        let counters = &self.shared.counters;
        match operation {
            Operation::Read => add(&counters.reads, 1),
            Operation::Write(_) => add(&counters.writes, 1),
            Operation::Flush => add(&counters.flushes, 1),
            _ => {}
        }
        let mut parts_left = 0;
        let mut first = 0;
        while first < blocks || parts_left == 0 {
            let part_blocks = (blocks - first).min(self.back_blocks);
            self.waiting.push_back(Part { slot, first, blocks: part_blocks });
            first += part_blocks;
            parts_left += 1;
        }
        if let Some(place) = self.requests.get_mut(usize::from(slot)) {
            *place = Some(Request {
                operation,
                lba,
                blocks,
                is_forced,
                answer: Vec::new(),
                parts_left,
                status: Status::SUCCESS,
            });
        }
    }

    fn submit_waiting(&mut self) {
        while self.back.can_submit() && self.front.transmit().pending_bytes() < WINDOW {
            let Some(part) = self.waiting.front().copied() else { return };
            if self.in_flight > 0 && self.in_flight + part.back_bytes() > WINDOW {
                return;
            }
            self.waiting.pop_front();
            match self.submit(part) {
                Ok(()) => self.in_flight += part.back_bytes(),
                Err(status) => self.part_done(part, status),
            }
        }
    }

    fn submit(&mut self, part: Part) -> Result<(), Status> {
        let request = self.requests.get_mut(usize::from(part.slot)).and_then(Option::take);
        let Some(request) = request else { return Err(Status::INTERNAL_ERROR) };
        let lba = request.lba + u64::from(part.first);
        let command = match &request.operation {
            Operation::Read => Ok(HostCommand::Read { lba, blocks: part.blocks }),
            Operation::Flush => Ok(HostCommand::Flush),
            Operation::Write(plain) => {
                let plain = plain.get(part.plain_range()).unwrap_or_default();
                let is_forced = request.is_forced;
                self.seal(lba, plain).map(|data| HostCommand::Write { lba, data, is_forced })
            }
            // The front end's namespace doesn't offer any other command.
            _ => Err(Status::INVALID_OPCODE.final_()),
        };
        let submitted = command.and_then(|command| {
            self.back.submit(part.tag(), command).map_err(|_| Status::INTERNAL_ERROR)
        });
        if let Some(place) = self.requests.get_mut(usize::from(part.slot)) {
            *place = Some(request);
        }
        submitted
    }

    /// Copies the plaintext into private memory and seals it there, each sector with a new IV.
    fn seal(&mut self, lba: u64, plain: &[u8]) -> Result<Vec<u8>, Status> {
        let sectors = plain.as_chunks::<DATA_BYTES>().0;
        let mut sealed = self.back.buffer(sectors.len() * BLOCK_BYTES);
        let blocks = sealed.as_chunks_mut::<BLOCK_BYTES>().0;
        for ((lba, sector), block) in (lba..).zip(sectors).zip(blocks) {
            // Counted one by one: when the lease ends within a part, what it burned stays burned.
            let Ok(iv) = take_iv(&mut self.counters, &self.shared) else {
                self.refused(Reason::LeaseExhausted, Some(lba), "no counters are leased".into());
                self.back.recycle(sealed);
                return Err(Status::from(Reason::LeaseExhausted));
            };
            block[..DATA_BYTES].copy_from_slice(sector);
            self.shared.key.seal(iv, lba, block);
            add(&self.shared.counters.sectors_sealed, 1);
        }
        Ok(sealed)
    }

    /// Takes the target's answers; returns why the back-end queue failed, if it did.
    fn back_events(&mut self) -> Option<(Reason, Option<u64>, String)> {
        while let Some(event) = self.back.next_event() {
            match event {
                HostEvent::Completed { tag, status, data } => {
                    let part = Part::from_tag(tag);
                    self.in_flight -= part.back_bytes();
                    let status = if status.is_success() {
                        self.open(part, &data)
                    } else {
                        self.back_status(part, status)
                    };
                    self.back.recycle(data);
                    self.part_done(part, status);
                }
                HostEvent::Failed { reason, lba, detail } => return Some((reason, lba, detail)),
            }
        }
        None
    }

    fn back_status(&self, part: Part, status: Status) -> Status {
        let request = self.requests.get(usize::from(part.slot)).and_then(Option::as_ref);
        let lba = request.map(|request| request.lba + u64::from(part.first));
        let reason = match Status::from_field(status.code() << 1) {
            Status::REFERENCE_TAG_CHECK => Reason::SectorStale,
            Status::APPLICATION_TAG_CHECK => Reason::SectorFormat,
            Status::UNRECOVERED_READ | Status::WRITE_FAULT => Reason::StoreFailed,
            _ => Reason::BackEndStatus,
        };
        self.refused(reason, lba, format!("target answered {status}"));
        status
    }

    /// Opens the sectors of a finished read into the request's buffer.
    fn open(&mut self, part: Part, data: &[u8]) -> Status {
        let shared = Arc::clone(&self.shared);
        let request = self.requests.get_mut(usize::from(part.slot)).and_then(Option::as_mut);
        let Some(Request { operation: Operation::Read, lba, blocks, answer, .. }) = request else {
            return Status::SUCCESS;
        };
        if answer.is_empty() {
            *answer = self.front.buffer(*blocks as usize * DATA_BYTES);
        }
        let lba = *lba + u64::from(part.first);
        let plain = answer.get_mut(part.plain_range()).unwrap_or_default();
        let sectors = plain.as_chunks_mut::<DATA_BYTES>().0;
        let (mut opened, mut unwritten) = (0, 0);
        let mut refused = None;
        for ((lba, block), sector) in (lba..).zip(data.as_chunks::<BLOCK_BYTES>().0).zip(sectors) {
            if is_unwritten(block) {
                sector.fill(0);
                unwritten += 1;
            } else if let Err(reason) = shared.key.open(lba, block, sector) {
                refused = Some((reason, lba));
                break;
            } else {
                opened += 1;
            }
        }
        add(&shared.counters.sectors_opened, opened);
        add(&shared.counters.sectors_unwritten, unwritten);
        match refused {
            None => Status::SUCCESS,
            Some((reason, lba)) => {
                self.refused(reason, Some(lba), "sector read back".into());
                Status::from(reason)
            }
        }
    }

    fn part_done(&mut self, part: Part, status: Status) {
        let Some(place) = self.requests.get_mut(usize::from(part.slot)) else { return };
        let Some(mut request) = place.take() else { return };
        request.parts_left -= 1;
        if request.status.is_success() {
            request.status = status;
        }
        if request.parts_left > 0 {
            *place = Some(request);
            return;
        }
        match request.operation {
            Operation::Read if request.status.is_success() => {
                self.front.complete_read(part.slot, request.answer);
            }
            Operation::Read => self.front.complete(part.slot, request.status, request.answer),
            Operation::Write(buffer) => self.front.complete(part.slot, request.status, buffer),
            _ => self.front.complete(part.slot, request.status, Vec::new()),
        }
    }

    /// Answers every command whose outcome is now unknown with an error.
    fn back_lost(&mut self, reason: Reason, lba: Option<u64>, detail: &str) {
        self.refused(reason, lba, detail.to_owned());
        self.waiting.clear();
        let status = Status::from(reason);
        for (slot, place) in self.requests.iter_mut().enumerate() {
            if place.take().is_some() {
                self.front.complete(slot as u16, status, Vec::new());
            }
        }
    }

    fn refused(&self, reason: Reason, lba: Option<u64>, detail: String) {
        add(&self.shared.counters.refusals, 1);
        self.event("refused", reason.id(), lba, detail);
    }

    pub(super) fn event(
        &self,
        kind: &'static str,
        reason: &'static str,
        lba: Option<u64>,
        detail: String,
    ) {
        let (association, queue_id) = (self.association, self.queue_id);
        self.shared.events.push(StorageEvent { kind, reason, lba, association, queue_id, detail });
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Counters that were never taken still belong to this gateway.
        self.shared.leased().extend(self.counters.take());
    }
}

fn take_iv(local: &mut Option<CounterRange>, shared: &Shared) -> Result<Iv, Exhausted> {
    if let Some(range) = local
        && let Ok(iv) = range.take()
    {
        return Ok(iv);
    }
    *local = shared.split();
    local.as_mut().ok_or(Exhausted)?.take()
}
