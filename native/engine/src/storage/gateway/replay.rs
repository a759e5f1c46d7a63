//! Commands that the journal itself causes: replaying it to a target that restarted, the flush that
//! ends this replay, and the flush that makes room in a full journal.

use sealane_proto::freshness::openings::Made;
use sealane_proto::link::Nanos;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::status::Status;

use super::add;
use super::front::Front;
use super::journal::Piece;
use super::outcomes::Fate;
use super::queue::GatewayQueue;
use super::request::{Owner, Part, Work};
use super::submission::flush_work;

/// State of a replay of the journal to a target that restarted.
#[derive(Debug, Default)]
pub(super) struct Replay {
    /// Whether all pieces are acknowledged and the flush that makes them durable was sent.
    is_flushing: bool,
}

impl<F: Front> GatewayQueue<F> {
    /// Flushes to make room in the journal.
    pub(super) fn flush_journal(&mut self, now: Nanos) {
        add(&self.shared.counters.journal_flushes, 1);
        let part = Part::internal(Owner::Journal, flush_work(&self.shared));
        self.send(part, now);
    }

    /// Sends the journal to a target that restarted, if no other queue does. The pieces don't
    /// overlap, so their order doesn't matter.
    pub(super) fn submit_replay(&mut self, now: Nanos) {
        let name = self.name;
        if self.replay.is_none() && self.shared.link(|link| link.claim_replay(name)) {
            self.replay = Some(Replay::default());
        }
        let Some(back) = self.backs.last() else { return };
        let incarnation = back.incarnation;
        // Wait until it is known what the target's store contains.
        if self.replay.is_none() || !back.has_openings_answer {
            return;
        }
        let judged = self.shared.link(|link| link.judge(incarnation, back.openings.as_ref()));
        if let Err(lba) = judged {
            let detail = format!(
                "the journal, block {lba}: other gateways have changed the volume since the target \
                 was last reached, and which version is newer can't be decided"
            );
            self.shared.fail(self.name, "journal.refused", detail);
            return;
        }
        while self.replay.is_some()
            && self.has_room()
            && let Some(piece) = self.shared.link(|link| link.next_piece(incarnation))
        {
            if !self.send_piece(piece, incarnation, now) {
                return;
            }
        }
        self.finish_replay(incarnation, now);
    }

    /// Sends a piece of the journal, unless an earlier attempt succeeded. False if that isn't known
    /// yet.
    fn send_piece(&mut self, mut piece: Piece, incarnation: u64, now: Nanos) -> bool {
        if let Some(sent) = piece.sent {
            match self.fate(sent, now) {
                Fate::Unmade => {}
                Fate::Asked => {
                    self.shared.link(|link| link.return_piece(incarnation, piece, false));
                    return false;
                }
                Fate::Ended(ended) if ended.status.code() == Status::ABORTED.code() => {
                    piece.ranges_done += usize::from(ended.ranges);
                }
                Fate::Ended(ended) => {
                    let made = self.backs.last().and_then(|back| back.made(ended.mark));
                    let place = (piece.place, piece.lba);
                    self.replayed(incarnation, place, ended.status, made);
                    return true;
                }
                Fate::Forgotten => {
                    let detail = "the target doesn't know what it has of the journal".to_owned();
                    self.shared.fail(self.name, "journal.refused", detail);
                    return false;
                }
            }
        }
        let Piece { place, change, lba, blocks, ranges_done, .. } = piece;
        let work = Work::Change { change, is_forced: false };
        let owner = Owner::Replay(incarnation);
        add(&self.shared.counters.changes_replayed, 1);
        self.send(Part { lba, blocks, place, ranges_done, ..Part::internal(owner, work) }, now);
        true
    }

    /// A piece of the journal was answered, or its outcome became known.
    pub(super) fn replayed(
        &mut self,
        incarnation: u64,
        (place, lba): (u64, u64),
        status: Status,
        made: Option<Made>,
    ) {
        if status.is_success() {
            self.shared.link(|link| link.piece_done(incarnation, place, made));
        } else {
            let detail = format!("the journal, block {lba}: target answered {status}");
            self.shared.fail(self.name, "journal.refused", detail);
        }
    }

    /// Returns a piece that has no answer or couldn't be sent to the pieces still to be sent.
    pub(super) fn return_replayed(&mut self, part: Part) {
        let Owner::Replay(incarnation) = part.owner else { return };
        let Part { place, lba, blocks, sent, ranges_done, work, .. } = part;
        if let Work::Change { change, .. } = work {
            let made = None;
            let piece = Piece { place, made, change, lba, blocks, sent, ranges_done };
            self.shared.link(|link| link.return_piece(incarnation, piece, true));
        }
    }

    /// Flushes the replayed changes before anything else is sent, so that writes acknowledged as
    /// durable are durable again.
    fn finish_replay(&mut self, incarnation: u64, now: Nanos) {
        let Some(replay) = &mut self.replay else { return };
        if !replay.is_flushing && self.shared.link(|link| link.is_sent_again(incarnation)) {
            replay.is_flushing = true;
            let part = Part::internal(Owner::Replay(incarnation), flush_work(&self.shared));
            self.send(part, now);
        }
    }

    /// The flush that ends the replay has ended.
    pub(super) fn replay_flushed(&mut self, status: Status) {
        let name = self.name;
        if self.replay.take().is_none() {
            return;
        }
        if status.is_success() {
            self.shared.link(|link| link.replayed(name));
        } else if let Some(epoch) = self.backs.last().map(|back| back.epoch) {
            // The next association tries again, after a pause.
            let detail = "the journal was replayed but couldn't be flushed";
            self.shared.lose(name, epoch, Reason::BackEndStatus.id(), detail);
        }
    }
}
