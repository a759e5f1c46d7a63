//! A lost or late back end: keeping commands to be sent again, and ending those held for too long.

use sealane_proto::link::Nanos;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::status::Status;

use super::add;
use super::front::Front;
use super::link::Link;
use super::queue::GatewayQueue;
use super::request::{Owner, Part};

impl<F: Front> GatewayQueue<F> {
    /// A back-end queue failed: its association is over.
    pub(super) fn lose_back(&mut self, reason: Reason, lba: Option<u64>, detail: &str, now: Nanos) {
        let Some(epoch) = self.backs.last().map(|back| back.epoch) else { return };
        if self.shared.link(|link| link.is_live(epoch)) && reason != Reason::QueueClosed {
            self.refused(reason, lba, detail.to_owned());
        }
        self.shared.lose(self.name, epoch, reason.id(), detail);
        self.drop_backs(now);
    }

    /// Drops the back end. Commands that the target had are kept to be sent again; the host waits.
    pub(super) fn drop_backs(&mut self, now: Nanos) {
        self.backs.clear();
        self.in_flight = 0;
        self.first_deadline = Nanos::MAX;
        self.replay = None;
        self.forget_questions();
        self.hold_from(now);
        for mut part in self.parts.drain() {
            part.is_again = true;
            match part.owner {
                Owner::Replay(_) => {
                    self.return_replayed(part);
                    continue;
                }
                Owner::Outcomes => continue,
                _ => {}
            }
            if self.is_front_gone {
                self.forget(&part);
            } else {
                self.again.push(part);
            }
        }
        self.again.sort_by_key(|part| part.order);
    }

    pub(super) fn hold_from(&mut self, now: Nanos) {
        if self.held_since.is_none() {
            self.held_since = Some(now);
        }
        let since = self.held_since;
        for request in self.requests.iter_mut().flatten() {
            request.held_since = request.held_since.or(since);
        }
    }

    pub(super) fn hold(&self) -> Nanos {
        nanos(self.shared.settings.hold)
    }

    /// Ends commands that have waited too long for a back end.
    pub(super) fn give_up_held(&mut self, now: Nanos) {
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

    pub(super) fn fail_all(&mut self) {
        for slot in 0..self.requests.len() as u16 {
            self.end_request(slot, Status::INTERNAL_ERROR.final_());
        }
        for part in std::mem::take(&mut self.again) {
            self.forget(&part);
        }
    }

    /// Ends a command, and drops its parts that the target doesn't have.
    pub(super) fn end_request(&mut self, slot: u16, status: Status) {
        let ended = |part: &Part| part.owner == Owner::Request(slot);
        let (mine, others) = std::mem::take(&mut self.again).into_iter().partition(ended);
        self.again = others;
        let mut mine: Vec<Part> = mine;
        mine.extend(self.acceleration.iter_mut().flat_map(|own| own.drop_parts(ended)));
        for part in mine {
            self.forget(&part);
        }
        self.parts.disown(slot);
        self.waiting.retain(|waiting| *waiting != slot);
        if let Some(request) = self.requests.get_mut(usize::from(slot)).and_then(Option::take) {
            self.note_answered(&request);
            self.front.complete(slot, status, Vec::new());
        }
    }

    /// Drops a part that won't be sent again.
    pub(super) fn forget(&mut self, part: &Part) {
        self.give_up(part);
        if part.owner == Owner::Journal {
            self.shared.link(Link::flush_lost);
        }
    }

    /// Releases a part's blocks and its room in the journal.
    pub(super) fn give_up(&mut self, part: &Part) {
        if let Some(claim) = &part.claim {
            self.shared.link(|link| link.give_up(&claim.ranges, claim.cost));
        }
    }
}

/// A duration in the clock's unit.
pub(super) fn nanos(duration: std::time::Duration) -> Nanos {
    Nanos::try_from(duration.as_nanos()).unwrap_or(Nanos::MAX)
}
