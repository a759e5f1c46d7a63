//! How the changes of secure queues ended that are over, for gateways that never heard of it.
//!
//! A gateway whose association was lost doesn't know which of its changes were made. To make one
//! twice would undo what another gateway did to its blocks in between, so it asks the fenced queue's
//! target first (`docs/secure-queue.md` §3). Kept in memory: with the target's incarnation ends what
//! this can answer for.
//!
//! A gateway uses a command id again only when it has the completion of the command before. So of
//! each command id only the last change can be one that it doesn't know the end of.

use std::collections::{BTreeMap, VecDeque};

use sealane_proto::nvme::outcomes::Ended;

/// Most queues of a gateway that are kept, the newest; 16 queues that are lost 16 times before a
/// question comes through.
pub(super) const QUEUES_MAX: usize = 256;
/// Most gateways; as many as a volume has.
pub(super) const GATEWAYS_MAX: usize = 128;

/// The changes of one queue, by command id.
#[derive(Debug, Default)]
pub(super) struct Changes(Vec<Option<Ended>>);

impl Changes {
    /// Notes how a change ended; the one before of the same command id is known to its gateway.
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

#[derive(Debug)]
struct Queue {
    name: u64,
    /// None while its thread runs: then its changes may have no end yet.
    changes: Option<Box<[Ended]>>,
}

/// The queues of all gateways of a namespace.
#[derive(Debug, Default)]
pub(super) struct Outcomes {
    gateways: BTreeMap<String, Gateway>,
    begun: u64,
}

#[derive(Debug, Default)]
struct Gateway {
    queues: VecDeque<Queue>,
    /// Grows with each queue of any gateway.
    last_begun: u64,
}

impl Outcomes {
    /// A queue of `gateway` begins to take commands.
    pub(super) fn begin(&mut self, gateway: &str, name: u64) {
        self.begun += 1;
        if !self.gateways.contains_key(gateway)
            && self.gateways.len() >= GATEWAYS_MAX
            && let Some(oldest) = self.oldest()
        {
            self.gateways.remove(&oldest);
        }
        let known = self.gateways.entry(gateway.to_owned()).or_default();
        known.last_begun = self.begun;
        known.queues.retain(|queue| queue.name != name);
        if known.queues.len() == QUEUES_MAX {
            known.queues.pop_front();
        }
        known.queues.push_back(Queue { name, changes: None });
    }

    /// The queue is over, and nothing of it is at a store any more.
    pub(super) fn end(&mut self, gateway: &str, name: u64, changes: Changes) {
        let known = self.gateways.get_mut(gateway);
        let queue =
            known.and_then(|known| known.queues.iter_mut().find(|queue| queue.name == name));
        if let Some(queue) = queue {
            queue.changes = Some(changes.into_list());
        }
    }

    /// How the changes of a queue of `gateway` ended; None: it isn't known (any more), or not over.
    pub(super) fn of(&self, gateway: &str, name: u64) -> Option<&[Ended]> {
        let known = self.gateways.get(gateway)?;
        known.queues.iter().find(|queue| queue.name == name)?.changes.as_deref()
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
        Ended { number, status: Status::SUCCESS, ranges: 0 }
    }

    fn over(outcomes: &mut Outcomes, gateway: &str, name: u64) {
        outcomes.begin(gateway, name);
        let mut changes = Changes::default();
        changes.note(3, ended(name));
        outcomes.end(gateway, name, changes);
    }

    #[test]
    fn of_each_command_id_the_last_change_is_told() {
        let mut outcomes = Outcomes::default();
        outcomes.begin("g", 7);
        assert_eq!(outcomes.of("g", 7), None, "not over");
        let mut changes = Changes::default();
        for (cid, number) in [(5, 1), (0, 2), (5, 9)] {
            changes.note(cid, ended(number));
        }
        outcomes.end("g", 7, changes);
        assert_eq!(outcomes.of("g", 7), Some(&[ended(2), ended(9)][..]));
        assert_eq!(outcomes.of("h", 7), None, "another gateway's");
    }

    #[test]
    fn a_queue_that_changed_nothing_is_known_and_one_that_is_forgotten_is_not() {
        let mut outcomes = Outcomes::default();
        outcomes.begin("g", 1);
        outcomes.end("g", 1, Changes::default());
        assert_eq!(outcomes.of("g", 1), Some(&[][..]));
        assert_eq!(outcomes.of("g", 2), None);
    }

    #[test]
    fn queues_and_gateways_are_bounded_and_the_oldest_go() {
        let mut outcomes = Outcomes::default();
        for name in 1..=QUEUES_MAX as u64 + 1 {
            over(&mut outcomes, "g", name);
        }
        assert_eq!(outcomes.of("g", 1), None);
        assert!(outcomes.of("g", 2).is_some());
        for number in 0..GATEWAYS_MAX as u64 - 1 {
            over(&mut outcomes, &format!("h{number}"), 1);
        }
        assert!(outcomes.of("g", 2).is_some());
        over(&mut outcomes, "g", 999);
        over(&mut outcomes, "one more", 1);
        assert!(outcomes.of("g", 2).is_some(), "it was there last but one");
        assert_eq!(outcomes.of("h0", 1), None);
    }
}
