//! One front-end queue and the back end it has at the moment: a machine without I/O of its own.
//!
//! Plaintext comes in at the front, is copied once and sealed; sealed changes are kept until they
//! are acknowledged, so that a lost association can be followed by the identical bytes. What a
//! finished part does is in [`super::opening`].

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use sealane_proto::link::Nanos;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::controller_queue::{
    Command, ControllerEvent, ControllerLimits, ControllerQueue, Operation,
};
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::SubmitError;
use sealane_proto::nvme::operation::{LbaRange, NamespaceFormat};
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{BLOCK_BYTES, CounterRange, DATA_BYTES, set_expected_iv};

use super::back::Back;
use super::journal::Change;
use super::link::{Begin, Link, Phase};
use super::ranges::ChangingRanges;
use super::request::{Claim, Owner, Part, Parts, Request, Work};
use super::{QueueName, Shared, add};

/// Bytes that may be on their way to or from the target, and that may wait for the host before its
/// commands wait too. Enough to keep both wires busy, and little enough to stay in the caches.
pub(super) const WINDOW: usize = 512 * 1024;

/// The journal on its way to a target that restarted.
#[derive(Debug, Default)]
struct Replay {
    /// Position of the next entry.
    next: u64,
    /// Blocks of the entries that are on their way: overlapping ones go one by one, in order.
    changing: ChangingRanges,
    is_waiting: bool,
}

/// How the front end ended: reason id, empty if orderly, and words.
pub(super) type Ended = (&'static str, String);

/// What became of an attempt to submit.
enum Submitted {
    /// The target has it, or it was answered.
    Done,
    /// It can't go now; it is first again next time.
    Later,
}

pub(super) struct GatewayQueue {
    pub(super) shared: Arc<Shared>,
    pub(super) name: QueueName,
    pub(super) front: ControllerQueue,
    pub(super) is_front_gone: bool,
    /// The last one takes commands; those before it are being drained.
    pub(super) backs: Vec<Back>,
    pub(super) requests: Vec<Option<Request>>,
    /// Commands of which parts are still to be cut, in the order of their arrival.
    waiting: VecDeque<u16>,
    /// Parts to be submitted again, in the order in which they were first.
    pub(super) again: Vec<Part>,
    /// Parts that the target has.
    pub(super) parts: Parts,
    /// Bytes of the parts that the target has.
    pub(super) in_flight: usize,
    counters: Option<CounterRange>,
    orders: u64,
    /// Not later than the first deadline of the parts that the target has.
    first_deadline: Nanos,
    /// Since when there has been no back end to work with.
    held_since: Option<Nanos>,
    replay: Option<Replay>,
}

impl GatewayQueue {
    pub(super) fn new(
        shared: Arc<Shared>,
        name: QueueName,
        limits: ControllerLimits,
        namespace: NamespaceFormat,
    ) -> Self {
        Self {
            shared,
            name,
            requests: (0..limits.queue_depth).map(|_| None).collect(),
            front: ControllerQueue::new(limits, vec![namespace], None),
            is_front_gone: false,
            backs: Vec::new(),
            waiting: VecDeque::new(),
            again: Vec::new(),
            parts: Parts::default(),
            in_flight: 0,
            counters: None,
            orders: 0,
            first_deadline: Nanos::MAX,
            held_since: None,
            replay: None,
        }
    }

    // Inputs.

    /// Takes a back end that control opened. One of an association that is over is dropped.
    pub(super) fn add_back(&mut self, back: Back, now: Nanos) {
        if !self.shared.link(|link| link.is_live(back.epoch)) {
            return;
        }
        if self.backs.last().is_some_and(|old| old.epoch != back.epoch) {
            self.drop_backs(now);
        }
        if !self.backs.is_empty() {
            add(&self.shared.counters.rekeys, 1);
        }
        // The one before it may hold answers that nobody took yet: only who takes them closes it.
        self.backs.push(back);
    }

    /// A back-end queue failed: its association is over.
    pub(super) fn lose_back(&mut self, reason: Reason, lba: Option<u64>, detail: &str, now: Nanos) {
        let Some(epoch) = self.backs.last().map(|back| back.epoch) else { return };
        if self.shared.link(|link| link.is_live(epoch)) && reason != Reason::QueueClosed {
            self.refused(reason, lba, detail.to_owned());
        }
        self.shared.lose(self.name, epoch, reason.id(), detail);
        self.drop_backs(now);
    }

    /// Deadlines: of commands at the target, and of commands without one.
    pub(super) fn handle_timeout(&mut self, now: Nanos) {
        self.follow_link(now);
        if now >= self.first_deadline {
            let first = self.parts.iter().map(|part| part.deadline).min();
            self.first_deadline = first.unwrap_or(Nanos::MAX);
            if now >= self.first_deadline {
                let late = self.parts.iter().filter(|part| part.deadline <= now).count();
                add(&self.shared.counters.commands_timed_out, late as u64);
                let epoch = self.backs.last().map_or(0, |back| back.epoch);
                let detail = format!("{late} commands have no answer in time");
                self.shared.lose(self.name, epoch, "command.timeout", &detail);
                self.drop_backs(now);
            }
        }
        self.give_up_held(now);
    }

    /// When [`Self::handle_timeout`] must be called next, if nothing else happens.
    pub(super) fn next_timeout(&self) -> Option<Nanos> {
        let held = self.held_since.map(|since| since.saturating_add(self.hold()));
        let held = held.filter(|_| self.requests.iter().any(Option::is_some));
        let first = Some(self.first_deadline).filter(|_| !self.parts.is_empty());
        held.into_iter().chain(first).min()
    }

    /// Takes what the front end received; says why it ended, if it did.
    pub(super) fn take_front_events(&mut self) -> Option<Ended> {
        while let Some(event) = self.front.next_event() {
            match event {
                ControllerEvent::Received(command) => self.accept(command),
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

    /// The host is gone: nothing that the target doesn't have yet is sent any more.
    pub(super) fn abandon(&mut self) {
        self.is_front_gone = true;
        self.waiting.clear();
        self.requests.iter_mut().for_each(|request| *request = None);
        for part in std::mem::take(&mut self.again) {
            self.forget(&part);
        }
        if self.replay.take().is_some() {
            let name = self.name;
            self.shared.link(|link| link.abandon_replay(name));
        }
    }

    /// Submits what may be submitted now.
    pub(super) fn submit(&mut self, now: Nanos) {
        let phase = self.follow_link(now);
        if self.backs.is_empty() || self.is_front_gone {
            return;
        }
        if phase == Phase::Replaying {
            self.submit_replay(now);
        }
        if matches!(phase, Phase::Resending | Phase::Ready) {
            self.submit_again(phase, now);
        }
        if phase == Phase::Ready && self.again.is_empty() {
            self.submit_waiting(now);
        }
        self.ask_for_keys();
    }

    /// Leaves a back end whose association is over, and knows since when there has been none.
    fn follow_link(&mut self, now: Nanos) -> Phase {
        let (phase, epoch) = self.shared.link(|link| (link.phase(), link.epoch()));
        if self
            .backs
            .last()
            .is_some_and(|back| back.epoch != epoch || matches!(phase, Phase::Lost | Phase::Failed))
        {
            self.drop_backs(now);
        }
        match phase {
            Phase::Failed => self.fail_all(),
            Phase::Ready if !self.backs.is_empty() => self.held_since = None,
            _ => self.hold_from(now),
        }
        phase
    }

    // Commands of the host.

    fn accept(&mut self, command: Command) {
        let Command { slot, operation, lba, blocks, is_forced, .. } = command;
        let counters = &self.shared.counters;
        match &operation {
            Operation::Read => add(&counters.reads, 1),
            Operation::Write(_) => add(&counters.writes, 1),
            Operation::Flush => add(&counters.flushes, 1),
            Operation::WriteZeroes { .. } | Operation::Deallocate(_) => {
                add(&counters.deallocations, 1);
            }
            Operation::Compare(_) | Operation::CompareAndWrite { .. } => add(&counters.compares, 1),
            Operation::Verify => add(&counters.verifies, 1),
            Operation::WriteIf(_)
            | Operation::ReservationRegister { .. }
            | Operation::ReservationAcquire { .. }
            | Operation::ReservationRelease { .. }
            | Operation::ReservationReport { .. } => {
                // The front end's namespace doesn't offer them.
                self.front.complete(slot, Status::INVALID_OPCODE.final_(), Vec::new());
                return;
            }
        }
        if let Operation::Deallocate(ranges) = &operation
            && ranges.iter().all(|range| range.blocks == 0)
        {
            self.front.complete(slot, Status::SUCCESS, Vec::new());
            return;
        }
        let mut request = Request::new(operation, lba, blocks, is_forced);
        request.held_since = self.held_since;
        if let Some(place) = self.requests.get_mut(usize::from(slot)) {
            *place = Some(request);
            self.waiting.push_back(slot);
        }
    }

    fn submit_waiting(&mut self, now: Nanos) {
        while let Some(slot) = self.waiting.front().copied() {
            if !self.has_room() {
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

    /// The next part of a command, if there is one left.
    fn cut(&mut self, slot: u16) -> Option<Part> {
        let blocks_max = self.backs.last()?.blocks_max;
        let request = self.requests.get_mut(usize::from(slot)).and_then(Option::as_mut)?;
        if request.is_cut {
            return None;
        }
        let moves_blocks = matches!(
            request.operation,
            Operation::Read | Operation::Write(_) | Operation::Compare(_) | Operation::Verify
        );
        let first = request.cut;
        let blocks =
            if moves_blocks { (request.blocks - first).min(blocks_max) } else { request.blocks };
        let work = match &request.operation {
            Operation::Flush => Work::Flush { mark: self.shared.link(|link| link.journal.mark()) },
            Operation::CompareAndWrite { .. } => Work::Examine { sent: None },
            // Changes are made when their blocks are claimed.
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
            deadline: Nanos::MAX,
        })
    }

    /// Claims what a new part needs, seals it if it is a write, and submits it.
    fn begin(&mut self, mut part: Part, now: Nanos) -> Submitted {
        let Owner::Request(slot) = part.owner else { return Submitted::Later };
        let Some(request) = self.requests.get(usize::from(slot)).and_then(Option::as_ref) else {
            return Submitted::Done;
        };
        let is_forced = request.is_forced;
        if let Some(ranges) = changed_ranges(&request.operation, &part) {
            let cost = match &request.operation {
                Operation::WriteZeroes { .. } | Operation::Deallocate(_) => {
                    Change::Deallocate(Arc::clone(&ranges)).cost()
                }
                _ => Change::write_cost(part.blocks as usize * BLOCK_BYTES),
            };
            match self.shared.link(|link| link.begin(&ranges, cost)) {
                Begin::Begun => part.claim = Some(Claim { ranges, cost }),
                Begin::Wait => return Submitted::Later,
                Begin::FlushFirst => {
                    self.flush_journal(now);
                    return Submitted::Later;
                }
            }
        }
        self.advance(slot, part.blocks);
        match self.prepare(&mut part, slot, is_forced) {
            Ok(()) => self.send(part, now),
            Err(status) => {
                self.give_up(&part);
                self.part_done(&part, status);
            }
        }
        Submitted::Done
    }

    /// Notes that a part of the command in `slot` was cut.
    fn advance(&mut self, slot: u16, blocks: u32) {
        if let Some(request) = self.requests.get_mut(usize::from(slot)).and_then(Option::as_mut) {
            request.cut += blocks;
            request.parts += 1;
            request.is_cut = request.cut >= request.blocks;
        }
    }

    /// Makes the change of a part whose blocks are claimed; other parts change nothing yet.
    fn prepare(&mut self, part: &mut Part, slot: u16, is_forced: bool) -> Result<(), Status> {
        let place = self.requests.get_mut(usize::from(slot));
        let Some(request) = place.and_then(Option::take) else { return Ok(()) };
        let change = match (&request.operation, &part.claim) {
            (Operation::Write(plain), _) => {
                let plain = plain.get(part.plain_range()).unwrap_or_default();
                self.seal(part.lba, plain).map(Some)
            }
            (Operation::WriteZeroes { .. } | Operation::Deallocate(_), Some(claim)) => {
                Ok(Some(Change::Deallocate(Arc::clone(&claim.ranges))))
            }
            _ => Ok(None),
        };
        if let Some(place) = self.requests.get_mut(usize::from(slot)) {
            *place = Some(request);
        }
        if let Some(change) = change? {
            part.work = Work::Change { change, is_forced };
        }
        Ok(())
    }

    /// Copies the plaintext into private memory and seals it there, each sector with a new IV.
    pub(super) fn seal(&mut self, lba: u64, plain: &[u8]) -> Result<Change, Status> {
        let shared = Arc::clone(&self.shared);
        let sectors = plain.as_chunks::<DATA_BYTES>().0;
        let mut sealed = shared.link(|link| link.journal.buffer(sectors.len() * BLOCK_BYTES));
        let blocks = sealed.as_chunks_mut::<BLOCK_BYTES>().0;
        for ((lba, sector), block) in (lba..).zip(sectors).zip(blocks) {
            // Counted one by one: when the lease ends within a part, what it burned stays burned.
            let Ok(iv) = shared.take_iv(&mut self.counters) else {
                self.refused(Reason::LeaseExhausted, Some(lba), "no counters are leased".into());
                return Err(Status::from(Reason::LeaseExhausted));
            };
            block[..DATA_BYTES].copy_from_slice(sector);
            shared.key.seal(iv, lba, block);
            add(&shared.counters.sectors_sealed, 1);
            if let Some(ledger) = &shared.ledger
                && let Err(error) = ledger.note(shared.key.epoch(), lba, sector, block)
            {
                self.refused(Reason::StoreFailed, Some(lba), format!("nonce ledger: {error}"));
                return Err(Status::INTERNAL_ERROR);
            }
        }
        Ok(Change::Write { lba, blocks: Arc::new(sealed) })
    }

    // Submission.

    fn has_room(&mut self) -> bool {
        let commands_max = self.shared.settings.commands_per_key_max;
        let can_submit = self.backs.last().is_some_and(|back| back.can_submit(commands_max));
        can_submit && self.in_flight < WINDOW && self.front.transmit().pending_bytes() < WINDOW
    }

    fn submit_again(&mut self, phase: Phase, now: Nanos) {
        // A part with blocks of its own is a change that began: all of those must end first.
        let may = |part: &Part| phase == Phase::Ready || part.claim.is_some();
        while self.has_room()
            && let Some(index) = self.again.iter().position(may)
        {
            let part = self.again.remove(index);
            add(&self.shared.counters.commands_resent, u64::from(part.is_again));
            self.send(part, now);
        }
    }

    /// Gives a part to the target. There must be room for it.
    pub(super) fn send(&mut self, mut part: Part, now: Nanos) {
        if part.order == 0 {
            self.orders += 1;
            part.order = self.orders;
        }
        if let Work::Flush { mark } = &mut part.work {
            *mark = self.shared.link(|link| link.journal.mark());
        }
        let Some(back) = self.backs.last_mut() else {
            self.again.push(part);
            return;
        };
        let command = command_of(&part, back);
        part.deadline = now.saturating_add(nanos(self.shared.settings.command_timeout));
        self.first_deadline = self.first_deadline.min(part.deadline);
        let bytes = part.back_bytes();
        let tag = self.parts.insert(part);
        match back.submit(tag, command) {
            Ok(()) => self.in_flight += bytes,
            Err(error) => {
                let Some(part) = self.parts.take(tag) else { return };
                if error == SubmitError::Length {
                    self.give_up(&part);
                    self.part_done(&part, Status::INTERNAL_ERROR.final_());
                } else {
                    self.again.push(part);
                }
            }
        }
    }

    fn internal(owner: Owner, work: Work) -> Part {
        Part {
            owner,
            lba: 0,
            first: 0,
            blocks: 0,
            work,
            claim: None,
            order: 0,
            attempts: 0,
            is_again: false,
            deadline: Nanos::MAX,
        }
    }

    /// Flushes because the journal is full.
    fn flush_journal(&mut self, now: Nanos) {
        add(&self.shared.counters.journal_flushes, 1);
        let mark = self.shared.link(|link| link.journal.mark());
        let part = Self::internal(Owner::Journal, Work::Flush { mark });
        self.send(part, now);
    }

    /// Sends the journal to a target that restarted, if it is this queue's turn to.
    fn submit_replay(&mut self, now: Nanos) {
        let name = self.name;
        if self.replay.is_none() && self.shared.link(|link| link.claim_replay(name)) {
            self.replay = Some(Replay::default());
        }
        while self.has_room()
            && let Some(replay) = &mut self.replay
        {
            let next = replay.next;
            let entry = self.shared.link(|link| {
                link.journal.since(next).map(|(position, change)| (position, change.clone()))
            });
            let Some((position, change)) = entry else { break };
            let ranges = change.ranges();
            if !replay.changing.claim(&ranges, 0) {
                replay.is_waiting = true;
                return;
            }
            replay.next = position + 1;
            let mut part =
                Self::internal(Owner::Replay(position), Work::Change { change, is_forced: false });
            part.blocks = match &part.work {
                Work::Change { change: Change::Write { lba, blocks }, .. } => {
                    part.lba = *lba;
                    (blocks.len() / BLOCK_BYTES) as u32
                }
                _ => 0,
            };
            add(&self.shared.counters.changes_replayed, 1);
            self.send(part, now);
        }
        self.finish_replay();
    }

    /// An entry of the journal is acknowledged again.
    pub(super) fn replayed(&mut self, change: &Change) {
        if let Some(replay) = &mut self.replay {
            replay.changing.release(&change.ranges());
            replay.is_waiting = false;
        }
        self.finish_replay();
    }

    fn finish_replay(&mut self) {
        let Some(replay) = &self.replay else { return };
        let (next, name) = (replay.next, self.name);
        let on_its_way = self.parts.iter().any(|part| matches!(part.owner, Owner::Replay(_)));
        if !on_its_way && self.shared.link(|link| link.journal.since(next).is_none()) {
            self.replay = None;
            self.shared.link(|link| link.replayed(name));
        }
    }

    fn ask_for_keys(&mut self) {
        let commands_max = self.shared.settings.commands_per_key_max;
        if let Some(back) = self.backs.last_mut()
            && back.take_rekey_due(commands_max)
        {
            self.shared.event(self.name, "rekey_due", "", String::new());
        }
    }

    /// Closes the connections of replaced queues that have nothing left to answer.
    pub(super) fn close_drained(&mut self) {
        let Some(current) = self.backs.len().checked_sub(1) else { return };
        let mut index = 0;
        let before = self.backs.len();
        self.backs.retain(|back| {
            let keeps = index == current || back.queue.outstanding() > 0;
            index += 1;
            keeps
        });
        if self.backs.len() < before && self.backs.len() == 1 {
            self.shared.event(self.name, "queue_rekeyed", "", String::new());
        }
    }

    // Loss.

    /// Leaves the back end. What the target had is kept to be sent again; the host waits.
    pub(super) fn drop_backs(&mut self, now: Nanos) {
        self.backs.clear();
        self.in_flight = 0;
        self.first_deadline = Nanos::MAX;
        self.replay = None;
        self.hold_from(now);
        for mut part in self.parts.drain() {
            part.is_again = true;
            if matches!(part.owner, Owner::Replay(_)) {
                continue;
            }
            if self.is_front_gone {
                self.forget(&part);
            } else {
                self.again.push(part);
            }
        }
        self.again.sort_by_key(|part| part.order);
    }

    fn hold_from(&mut self, now: Nanos) {
        if self.held_since.is_none() {
            self.held_since = Some(now);
        }
        let since = self.held_since;
        for request in self.requests.iter_mut().flatten() {
            request.held_since = request.held_since.or(since);
        }
    }

    fn hold(&self) -> Nanos {
        nanos(self.shared.settings.hold)
    }

    /// Ends commands that have waited for a back end for too long.
    fn give_up_held(&mut self, now: Nanos) {
        let Some(since) = self.held_since else { return };
        let hold = self.hold();
        let is_over = |since: Nanos| now >= since.saturating_add(hold);
        if !is_over(since)
            && !self.requests.iter().flatten().any(|r| r.held_since.is_some_and(is_over))
        {
            return;
        }
        for slot in 0..self.requests.len() as u16 {
            let request = self.requests.get(usize::from(slot)).and_then(Option::as_ref);
            if request.is_some_and(|request| request.held_since.is_some_and(is_over)) {
                add(&self.shared.counters.commands_given_up, 1);
                self.end_request(slot, Status::INTERNAL_PATH_ERROR);
            }
        }
    }

    fn fail_all(&mut self) {
        for slot in 0..self.requests.len() as u16 {
            self.end_request(slot, Status::INTERNAL_ERROR.final_());
        }
        for part in std::mem::take(&mut self.again) {
            self.forget(&part);
        }
    }

    /// Answers the command that is first in the queue with an error.
    pub(super) fn end_first_waiting(&mut self, status: Status) {
        if let Some(slot) = self.waiting.front().copied() {
            self.end_request(slot, status);
        }
    }

    /// Answers a command whose parts the target doesn't have (any more).
    fn end_request(&mut self, slot: u16, status: Status) {
        let ended = |part: &Part| part.owner == Owner::Request(slot);
        let (mine, others) = std::mem::take(&mut self.again).into_iter().partition(ended);
        self.again = others;
        let mine: Vec<Part> = mine;
        for part in mine {
            self.forget(&part);
        }
        self.parts.disown(slot);
        self.waiting.retain(|waiting| *waiting != slot);
        if self.requests.get_mut(usize::from(slot)).and_then(Option::take).is_some() {
            self.front.complete(slot, status, Vec::new());
        }
    }

    /// Lets go of a part that is never sent (again).
    fn forget(&mut self, part: &Part) {
        self.give_up(part);
        if part.owner == Owner::Journal {
            self.shared.link(Link::flush_ended);
        }
    }

    /// Gives back a part's blocks and its room in the journal.
    pub(super) fn give_up(&mut self, part: &Part) {
        if let Some(claim) = &part.claim {
            self.shared.link(|link| link.give_up(&claim.ranges, claim.cost));
        }
    }

    pub(super) fn refused(&self, reason: Reason, lba: Option<u64>, detail: String) {
        add(&self.shared.counters.refusals, 1);
        self.shared.event_at(self.name, "refused", reason.id(), lba, detail);
    }
}

impl Drop for GatewayQueue {
    fn drop(&mut self) {
        // Changes that are on their way have no known end: only a fence makes sure they have one.
        let epoch = self.backs.last().map(|back| back.epoch);
        if let Some(epoch) = epoch
            && !self.parts.is_empty()
        {
            self.shared.lose(self.name, epoch, "queue.abandoned", "commands were on their way");
        }
        self.abandon();
        self.drop_backs(0);
        // Counters that were never taken still belong to this gateway.
        self.shared.leased().extend(self.counters.take());
    }
}

/// A duration in the clock's unit.
fn nanos(duration: std::time::Duration) -> Nanos {
    Nanos::try_from(duration.as_nanos()).unwrap_or(Nanos::MAX)
}

/// The blocks that a part changes, if it changes any.
fn changed_ranges(operation: &Operation, part: &Part) -> Option<Arc<[Range<u64>]>> {
    let own = part.lba..part.lba + u64::from(part.blocks);
    let ranges: Arc<[Range<u64>]> = match operation {
        Operation::Write(_) | Operation::WriteZeroes { .. } | Operation::CompareAndWrite { .. } => {
            Arc::new([own])
        }
        Operation::Deallocate(ranges) => ranges
            .iter()
            .filter(|range| range.blocks > 0)
            .map(|range| range.lba..range.lba + u64::from(range.blocks))
            .collect(),
        _ => return None,
    };
    Some(ranges).filter(|ranges| !ranges.is_empty())
}

/// The part as a command of the target, with a copy of what it sends.
fn command_of(part: &Part, back: &mut Back) -> HostCommand {
    let copy = |back: &mut Back, blocks: &[u8]| {
        let mut data = back.queue.buffer(blocks.len());
        data.copy_from_slice(blocks);
        data
    };
    match &part.work {
        Work::Read | Work::Examine { .. } => {
            HostCommand::Read { lba: part.lba, blocks: part.blocks }
        }
        Work::Flush { .. } => HostCommand::Flush,
        Work::Change { change: Change::Write { lba, blocks }, is_forced } => {
            HostCommand::Write { lba: *lba, data: copy(back, blocks), is_forced: *is_forced }
        }
        Work::Swap { current, change: Change::Write { lba, blocks }, is_forced } => {
            let mut data = copy(back, blocks);
            for (block, iv) in data.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().zip(current) {
                set_expected_iv(block, iv);
            }
            HostCommand::WriteIf { lba: *lba, data, is_forced: *is_forced }
        }
        Work::Change { change: Change::Deallocate(ranges), .. }
        | Work::Swap { change: Change::Deallocate(ranges), .. } => HostCommand::Deallocate(
            ranges
                .iter()
                .map(|range| LbaRange {
                    lba: range.start,
                    blocks: (range.end - range.start) as u32,
                })
                .collect(),
        ),
    }
}
