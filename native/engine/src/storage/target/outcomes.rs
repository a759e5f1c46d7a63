//! Outcomes of the changes of secure queues that have ended, for gateways that didn't receive them.
//!
//! A gateway whose association was lost doesn't know which of its changes were made. Making one
//! twice would undo another gateway's changes in between, so it asks the target first, after the
//! queue is fenced (`docs/formats/secure-queue.md` §3). Outcomes are kept in memory, as the target
//! can answer only for its current incarnation.
//!
//! A gateway reuses a command id only after it has the completion of the previous command. So for
//! each command id only the outcome of the last change can be unknown to it.

use std::collections::{BTreeMap, VecDeque};

use sealane_proto::nvme::outcomes::Ended;

/// Maximum queues kept for each gateway, the newest ones: enough for 16 queues lost 16 times before
/// a question arrives.
pub(super) const QUEUES_MAX: usize = 256;
/// Maximum gateways; as many as a volume may have.
pub(super) const GATEWAYS_MAX: usize = 128;

/// The changes of one queue, by command id.
#[derive(Debug, Default)]
pub(super) struct Changes(Vec<Option<Ended>>);

impl Changes {
    /// Records the outcome of a change; its gateway knows that of the previous one with the same
    /// command id.
    pub(super) fn note(&mut self, cid: u16, ended: Ended) {
        let index = usize::from(cid);
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        if let Some(place) = self.0.get_mut(index) {
            *place = Some(ended);
        }
    }

    fn into_list(self) -> Box<[Ended]> {
        self.0.into_iter().flatten().collect()
    }
}

/// A secure queue, as identified by its gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueName {
    pub(super) name: u64,
    /// Association epoch of its gateway.
    pub(super) epoch: u64,
}

#[derive(Debug)]
struct Queue {
    name: QueueName,
    /// None while its thread is running, as changes may still be in progress.
    changes: Option<Box<[Ended]>>,
}

/// The queues of all gateways of a namespace.
#[derive(Debug, Default)]
pub(super) struct Outcomes {
    gateways: BTreeMap<String, Gateway>,
    begun: u64,
}

#[derive(Debug)]
struct Gateway {
    queues: VecDeque<Queue>,
    /// Every queue of this epoch and newer ones that ever began is known.
    known_since: u64,
    /// Sequence number of its last queue, counted over all gateways.
    last_begun: u64,
}

impl Outcomes {
    /// Registers a queue of `gateway` that begins to take commands.
    pub(super) fn begin(&mut self, gateway: &str, name: QueueName) {
        self.begun += 1;
        if !self.gateways.contains_key(gateway)
            && self.gateways.len() >= GATEWAYS_MAX
            && let Some(oldest) = self.oldest()
        {
            self.gateways.remove(&oldest);
        }
        let new = || Gateway { queues: VecDeque::new(), known_since: name.epoch, last_begun: 0 };
        let known = self.gateways.entry(gateway.to_owned()).or_insert_with(new);
        known.last_begun = self.begun;
        known.queues.retain(|queue| queue.name != name);
        if known.queues.len() == QUEUES_MAX
            && let Some(forgotten) = known.queues.pop_front()
        {
            known.known_since = known.known_since.max(forgotten.name.epoch.saturating_add(1));
        }
        known.queues.push_back(Queue { name, changes: None });
    }

    /// Records the outcomes of a queue that has ended and has nothing left in flight at a store.
    pub(super) fn end(&mut self, gateway: &str, name: QueueName, changes: Changes) {
        let known = self.gateways.get_mut(gateway);
        let queue =
            known.and_then(|known| known.queues.iter_mut().find(|queue| queue.name == name));
        if let Some(queue) = queue {
            queue.changes = Some(changes.into_list());
        }
    }

    /// Outcomes of the changes of a queue of `gateway`; None if they aren't known (any more), or it
    /// hasn't ended. A fenced queue that never began has changed nothing.
    pub(super) fn of(&self, gateway: &str, name: QueueName) -> Option<&[Ended]> {
        let known = self.gateways.get(gateway)?;
        match known.queues.iter().find(|queue| queue.name == name) {
            Some(queue) => queue.changes.as_deref(),
            None => (name.epoch >= known.known_since).then_some(&[]),
        }
    }

    fn oldest(&self) -> Option<String> {
        let oldest = self.gateways.iter().min_by_key(|(_, known)| known.last_begun);
        oldest.map(|(gateway, _)| gateway.clone())
    }
}

#[cfg(test)]
mod tests {
    use sealane_proto::nvme::status::Status;

    use super::*;

    fn ended(number: u64) -> Ended {
        Ended { number, status: Status::SUCCESS, ranges: 0, mark: 0 }
    }

    /// Queue `number`, in an association of its own.
    fn queue(number: u64) -> QueueName {
        QueueName { name: number << 32, epoch: number }
    }

    fn over(outcomes: &mut Outcomes, gateway: &str, number: u64) {
        outcomes.begin(gateway, queue(number));
        let mut changes = Changes::default();
        changes.note(3, ended(number));
        outcomes.end(gateway, queue(number), changes);
    }

    #[test]
    fn the_outcome_of_the_last_change_of_each_command_id_is_kept() {
        let mut outcomes = Outcomes::default();
        outcomes.begin("g", queue(7));
        assert_eq!(outcomes.of("g", queue(7)), None, "not ended");
        let mut changes = Changes::default();
        for (cid, number) in [(5, 1), (0, 2), (5, 9)] {
            changes.note(cid, ended(number));
        }
        outcomes.end("g", queue(7), changes);
        assert_eq!(outcomes.of("g", queue(7)), Some(&[ended(2), ended(9)][..]));
        assert_eq!(outcomes.of("h", queue(7)), None, "another gateway");
    }

    #[test]
    fn a_queue_that_changed_nothing_or_never_began_is_known_and_an_older_one_is_not() {
        let mut outcomes = Outcomes::default();
        outcomes.begin("g", queue(5));
        outcomes.end("g", queue(5), Changes::default());
        assert_eq!(outcomes.of("g", queue(5)), Some(&[][..]));
        assert_eq!(outcomes.of("g", queue(6)), Some(&[][..]));
        assert_eq!(outcomes.of("g", queue(4)), None);
    }

    #[test]
    fn queues_and_gateways_are_bounded_and_the_oldest_are_dropped() {
        let mut outcomes = Outcomes::default();
        for number in 1..=QUEUES_MAX as u64 + 1 {
            over(&mut outcomes, "g", number);
        }
        assert_eq!(outcomes.of("g", queue(1)), None);
        assert_eq!(outcomes.of("g", queue(2)), Some(&[ended(2)][..]));
        for number in 0..GATEWAYS_MAX as u64 - 1 {
            over(&mut outcomes, &format!("h{number}"), 1);
        }
        over(&mut outcomes, "g", 999);
        over(&mut outcomes, "one more", 1);
        assert_eq!(outcomes.of("g", queue(3)), Some(&[ended(3)][..]), "the second most recent");
        assert_eq!(outcomes.of("h0", queue(1)), None);
        over(&mut outcomes, "h0", 2);
        assert_eq!(outcomes.of("h0", queue(1)), None, "forgotten for good");
    }
}
