//! What the journal sends on its own behalf: itself, to a target that restarted, and the flush that
//! makes room in it.

use sealane_proto::link::Nanos;
use sealane_proto::sector::BLOCK_BYTES;

use super::add;
use super::front::Front;
use super::journal::Change;
use super::queue::GatewayQueue;
use super::ranges::ChangingRanges;
use super::request::{Owner, Part, Work};
use super::submission::flush_work;

/// The journal on its way to a target that restarted.
#[derive(Debug, Default)]
pub(super) struct Replay {
    /// Position of the next entry.
    next: u64,
    /// Blocks of the entries that are on their way: overlapping ones go one by one, in order.
    changing: ChangingRanges,
    is_waiting: bool,
}

impl<F: Front> GatewayQueue<F> {
    /// Flushes because the journal is full.
    pub(super) fn flush_journal(&mut self, now: Nanos) {
        add(&self.shared.counters.journal_flushes, 1);
        let part = Part::internal(Owner::Journal, flush_work(&self.shared));
        self.send(part, now);
    }

    /// Sends the journal to a target that restarted, if it is this queue's turn to.
    pub(super) fn submit_replay(&mut self, now: Nanos) {
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
                Part::internal(Owner::Replay(position), Work::Change { change, is_forced: false });
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
}
