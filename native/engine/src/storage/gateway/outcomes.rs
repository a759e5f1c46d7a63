//! Asks the target, after it has fenced a lost association, for the outcomes of that association's
//! changes. A change that was made must not be made again, because another gateway may have changed
//! the blocks in between (`docs/formats/secure-queue.md` §3).
//!
//! Only the incarnation that a change was sent to knows its outcome. For other incarnations,
//! changes are sent again, from the journal or as parts.

use sealane_proto::link::Nanos;
use sealane_proto::nvme::outcomes::{Ended, decode};
use sealane_proto::nvme::status::Status;

use super::front::Front;
use super::journal::Change;
use super::queue::GatewayQueue;
use super::request::{Owner, Part, Sent, Work};

/// Outcome of a change that was sent.
pub(super) enum Fate {
    /// Its queue ended before the change began: it will never be made.
    Unmade,
    /// The target has been asked.
    Asked,
    /// It was made, or it failed, or some of its ranges are done.
    Ended(Ended),
    /// The target no longer knows.
    Forgotten,
}

/// A queue that has ended, and the target's answer about its changes.
#[derive(Debug)]
pub(super) struct Answer {
    queue: u64,
    says: Says,
}

#[derive(Debug)]
enum Says {
    /// Asked, but not answered yet.
    Nothing,
    Changes(Vec<Ended>),
    /// The target doesn't know them (any more).
    Forgotten,
}

impl<F: Front> GatewayQueue<F> {
    /// Outcome of a change that was sent to this incarnation of the target; asks for it if
    /// necessary.
    pub(super) fn fate(&mut self, sent: Sent, now: Nanos) -> Fate {
        if let Some(answer) = self.answers.iter().find(|answer| answer.queue == sent.queue) {
            return match &answer.says {
                Says::Nothing => Fate::Asked,
                Says::Forgotten => Fate::Forgotten,
                Says::Changes(changes) => {
                    let ended = changes.iter().find(|ended| ended.number == sent.number);
                    ended.map_or(Fate::Unmade, |ended| Fate::Ended(*ended))
                }
            };
        }
        if self.has_room() {
            self.answers.push(Answer { queue: sent.queue, says: Says::Nothing });
            let work = Work::Outcomes { queue: sent.queue, epoch: sent.epoch };
            self.send(Part::internal(Owner::Outcomes, work), now);
        }
        Fate::Asked
    }

    /// Records the target's answer about the changes of a queue.
    pub(super) fn take_outcomes(&mut self, queue: u64, status: Status, data: &[u8]) {
        let outcomes = if status.is_success() { decode(data) } else { None };
        if let Some(answer) = self.answers.iter_mut().find(|answer| answer.queue == queue) {
            answer.says = outcomes.map_or(Says::Forgotten, Says::Changes);
        }
    }

    /// Forgets unanswered questions, so that they are asked again.
    pub(super) fn forget_questions(&mut self) {
        self.answers.retain(|answer| !matches!(answer.says, Says::Nothing));
    }

    /// Settles the changes that were in flight when their association was lost: those that were
    /// made are acknowledged, the others may be sent again.
    pub(super) fn settle_unknown(&mut self, now: Nanos) {
        if self.again.iter().all(|part| part.sent.is_none()) {
            return;
        }
        let Some((incarnation, epoch)) =
            self.backs.last().map(|back| (back.incarnation, back.epoch))
        else {
            return;
        };
        for mut part in std::mem::take(&mut self.again) {
            let Some(sent) = part.sent else {
                self.again.push(part);
                continue;
            };
            if sent.incarnation != incarnation {
                // Whether it was made, and whether it was lost since, is unknown.
                part.is_unknown = true;
                part.sent = None;
                part.ranges_done = 0;
                self.again.push(part);
                continue;
            }
            match self.fate(sent, now) {
                Fate::Asked => self.again.push(part),
                Fate::Unmade => {
                    part.sent = None;
                    self.again.push(part);
                }
                Fate::Ended(ended) if ended.status.code() == Status::ABORTED.code() => {
                    part.sent = None;
                    part.ranges_done += usize::from(ended.ranges);
                    self.again.push(part);
                }
                Fate::Ended(ended) => {
                    part.epoch = epoch;
                    self.ended_before(part, ended, now);
                }
                Fate::Forgotten => {
                    self.give_up(&part);
                    self.part_done(&part, Status::INTERNAL_PATH_ERROR.final_());
                }
            }
        }
        if self.again.is_empty() && self.replay.is_none() {
            self.answers.retain(|answer| matches!(answer.says, Says::Nothing));
        }
    }

    /// Ends a part whose answer was lost, with the outcome that the target reports.
    fn ended_before(&mut self, mut part: Part, ended: Ended, now: Nanos) {
        let Ended { status, mark, .. } = ended;
        let made = self.backs.last().and_then(|back| back.made(mark));
        match std::mem::replace(&mut part.work, Work::Read) {
            Work::Change { change, is_forced } => {
                self.change_ended(part, change, is_forced, status, made);
            }
            Work::Swap { change, .. } => self.swap_ended(part, change, status, made, now),
            work => self.again.push(Part { work, sent: None, ..part }),
        }
    }
}

/// Whether the work changes sectors, so that doing it twice does harm.
pub(super) fn is_change(work: &Work) -> bool {
    matches!(work, Work::Change { .. } | Work::Swap { .. })
}

/// The remaining ranges of a deallocation of which the first `done` are done.
pub(super) fn ranges_left(change: &Change, done: usize) -> &[std::ops::Range<u64>] {
    match change {
        Change::Deallocate(ranges) => ranges.get(done..).unwrap_or_default(),
        Change::Write { .. } => &[],
    }
}
