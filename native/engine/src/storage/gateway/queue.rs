//! One front-end queue with its current back end: a state machine without I/O of its own.
//!
//! Plaintext from the front end is copied once and sealed. Sealed changes are kept until they are
//! acknowledged, so that the identical bytes can be sent again after an association is lost.
//! [`super::submission`] sends parts, [`super::opening`] handles their answers, and [`super::loss`]
//! and [`super::replay`] deal with a lost back end.

use std::collections::VecDeque;
use std::sync::Arc;

use sealane_proto::link::Nanos;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::controller_queue::{Command, ControllerEvent, Operation};
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::CounterRange;

use super::acceleration::Acceleration;
use super::back::Back;
use super::front::Front;
use super::link::Phase;
use super::outcomes::Answer;
use super::replay::Replay;
use super::request::{Owner, Part, Parts, Request, Work};
use super::{QueueName, Shared, add};

/// Maximum bytes in flight to the target. It covers the latency of stores that announce writes
/// before making them, and of networks with a round trip of a millisecond.
pub(super) const TARGET_WINDOW: usize = 4 << 20;
/// Maximum bytes pending for the host; beyond it, its commands wait. Enough to keep the wire busy,
/// and small enough to stay in the caches.
pub(super) const HOST_WINDOW: usize = 512 * 1024;

/// End of the front end: reason id (empty if orderly) and description.
pub(super) type Ended = (&'static str, String);

pub(super) struct GatewayQueue<F: Front> {
    pub(super) shared: Arc<Shared>,
    pub(super) name: QueueName,
    pub(super) front: F,
    pub(super) is_front_gone: bool,
    /// The last one is in use; those before it are being drained.
    pub(super) backs: Vec<Back>,
    pub(super) requests: Vec<Option<Request>>,
    /// Commands of which parts remain to be cut, in order of arrival.
    pub(super) waiting: VecDeque<u16>,
    /// Parts to be submitted again, in the order of their first submission.
    pub(super) again: Vec<Part>,
    /// Parts in flight to the target.
    pub(super) parts: Parts,
    /// Bytes of the parts in flight.
    pub(super) in_flight: usize,
    pub(super) counters: Option<CounterRange>,
    /// The accelerator in use, and the parts that wait for it.
    pub(super) acceleration: Option<Acceleration>,
    pub(super) orders: u64,
    /// A time not later than the first deadline of the parts in flight.
    pub(super) first_deadline: Nanos,
    /// Time since which there has been no usable back end.
    pub(super) held_since: Option<Nanos>,
    pub(super) replay: Option<Replay>,
    /// The target's answers about queues that have ended.
    pub(super) answers: Vec<Answer>,
}

impl<F: Front> GatewayQueue<F> {
    pub(super) fn new(shared: Arc<Shared>, name: QueueName, front: F, queue_depth: u16) -> Self {
        Self {
            shared,
            name,
            requests: (0..queue_depth).map(|_| None).collect(),
            front,
            is_front_gone: false,
            backs: Vec::new(),
            waiting: VecDeque::new(),
            again: Vec::new(),
            parts: Parts::default(),
            in_flight: 0,
            counters: None,
            acceleration: None,
            orders: 0,
            first_deadline: Nanos::MAX,
            held_since: None,
            replay: None,
            answers: Vec::new(),
        }
    }

    // Inputs.

    /// Adds a back end opened by the control plane; drops it if its association is over.
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
        // The previous back end may hold answers that haven't been processed: it is closed only
        // after that.
        self.backs.push(back);
        // Its first command, so that the answer arrives before any change is acknowledged.
        self.send(Part::internal(Owner::Outcomes, Work::Openings), now);
    }

    /// Checks the deadlines of commands at the target and of commands held without one.
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

    /// When [`Self::handle_timeout`] must next be called if nothing else happens.
    pub(super) fn next_timeout(&self) -> Option<Nanos> {
        let held = self.held_since.map(|since| since.saturating_add(self.hold()));
        let held = held.filter(|_| self.requests.iter().any(Option::is_some));
        let first = Some(self.first_deadline).filter(|_| !self.parts.is_empty());
        let device = self.acceleration.as_ref().and_then(Acceleration::deadline);
        held.into_iter().chain(first).chain(device).min()
    }

    /// Processes the front end's events; returns why it ended, if it did.
    pub(super) fn take_front_events(&mut self, now: Nanos) -> Option<Ended> {
        while let Some(event) = self.front.next_event() {
            match event {
                ControllerEvent::Received(command) => self.accept(command, now),
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

    /// The host is gone: drops everything that hasn't been sent to the target.
    pub(super) fn abandon(&mut self) {
        self.is_front_gone = true;
        self.waiting.clear();
        self.requests.iter_mut().for_each(|request| *request = None);
        let mut unsent = std::mem::take(&mut self.again);
        unsent.extend(self.acceleration.iter_mut().flat_map(|own| own.drop_parts(|_| true)));
        for part in unsent {
            self.forget(&part);
        }
        if self.replay.take().is_some() {
            let name = self.name;
            self.shared.link(|link| link.abandon_replay(name));
        }
    }

    /// Submits everything that may be submitted now.
    pub(super) fn submit(&mut self, now: Nanos) {
        self.take_sealed(now);
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
        if let Some(acceleration) = &mut self.acceleration {
            acceleration.ring();
        }
    }

    /// Drops back ends whose association is over, and records since when there has been none.
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

    fn accept(&mut self, command: Command, now: Nanos) {
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
            | Operation::FlushMilestone
            | Operation::Outcomes { .. }
            | Operation::Openings
            | Operation::ReservationRegister { .. }
            | Operation::ReservationAcquire { .. }
            | Operation::ReservationRelease { .. }
            | Operation::ReservationReport { .. } => {
                // The front end's namespace doesn't support them.
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
        let mut request = Request::new(operation, lba, blocks, is_forced, now);
        request.held_since = self.held_since;
        if let Some(place) = self.requests.get_mut(usize::from(slot)) {
            *place = Some(request);
            self.waiting.push_back(slot);
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

    /// Closes the connections of replaced back-end queues without outstanding commands.
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

    pub(super) fn refused(&self, reason: Reason, lba: Option<u64>, detail: String) {
        self.shared.refused(self.name, reason, lba, detail);
    }
}

impl<F: Front> Drop for GatewayQueue<F> {
    fn drop(&mut self) {
        // The outcome of changes in flight is unknown: only a fence makes sure that they have
        // ended.
        let epoch = self.backs.last().map(|back| back.epoch);
        if let Some(epoch) = epoch
            && self.parts.iter().any(|part| !matches!(part.work, Work::Openings))
        {
            self.shared.lose(self.name, epoch, "queue.abandoned", "commands were on their way");
        }
        self.abandon();
        self.drop_backs(0);
        // Counters that were never used still belong to this gateway.
        self.shared.leased().extend(self.counters.take());
    }
}
