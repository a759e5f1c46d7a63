//! What all queues of a volume share about the back end: which association is alive, what the
//! target may have forgotten, which blocks are being changed. One state machine, no I/O.
//!
//! ```text
//!          connect, same incarnation (or nothing to send again)
//!   Lost ───────────────────────────────────────────────────────────► Ready
//!    ▲  └─ connect, new incarnation ─► Replaying ─► Resending ──────────┘│
//!    └────────────────────────────── lose ──────────────────────────────┘
//!   any ── fail ─► Failed
//! ```
//!
//! Replaying: one queue sends the journal and flushes it, nothing else moves. Resending: changes that were on
//! their way when the target went are sent again; a read may have seen them, so reads wait.

use std::ops::Range;

use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::openings::{Made, Openings, Verdict};
use sealane_proto::nvme::status::Status;

use super::QueueName;
use super::journal::{Change, Journal, Mark, Piece};
use super::journal_pool::JournalPool;
use super::ranges::ChangingRanges;

/// What may be submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// No back end: wait for one.
    Lost,
    /// Only entries of the journal, by the queue that claimed them.
    Replaying,
    /// Only changes that were sent before.
    Resending,
    /// Everything.
    Ready,
    /// Nothing, ever: what was acknowledged may be gone.
    Failed,
}

/// Answer to a change that wants to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begin {
    /// Its blocks and its room in the journal are its own.
    Begun,
    /// The same; and the asker should flush, before changes have to wait for it.
    BegunAndFlush,
    /// An overlapping change or a flush must end first; every queue is woken then.
    Wait,
    /// The journal is full: the asker must flush, and then ask again.
    FlushFirst,
    /// The journal is full, and the flush that was to make room failed like this.
    Refused(Status),
}

/// The association epoch is not newer, its target is another one than its epoch's, or was asked for
/// an older milestone than the newest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the association is over: open a newer one")]
pub struct StaleAssociation;

/// The target behind an association.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Incarnation {
    /// Changes with each start of its process.
    pub number: u64,
    /// The milestone that it was asked for, and said it has.
    pub confirmed: Option<Milestone>,
    /// How far its store has come; None: it doesn't say.
    pub milestone: Option<Milestone>,
}

/// State of a volume's back end.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // independent facts; `phase` says which one counts
pub(super) struct Link {
    epoch: u64,
    incarnation: Option<u64>,
    /// How far the target's store had come when it last said so: what a later one must have.
    milestone: Option<Milestone>,
    is_lost: bool,
    is_failed: bool,
    must_replay: bool,
    must_resend: bool,
    /// Queue that sends the journal.
    replayer: Option<QueueName>,
    /// What of the journal this incarnation is still to be sent.
    pieces: Vec<Piece>,
    /// Pieces that queues have.
    pieces_out: usize,
    /// What this incarnation has of the journal was looked at.
    is_judged: bool,
    /// The opening that this incarnation has of its store, once it has said so.
    opening: Option<[u8; 16]>,
    /// This incarnation was sent changes.
    has_sent: bool,
    /// The opening of an earlier one, the last that was sent changes.
    sent_in: Option<[u8; 16]>,
    pub(super) journal: Journal,
    changing: ChangingRanges,
    is_flushing: bool,
    /// A change waits for the flush that is under way, or for the next.
    is_room_wanted: bool,
    /// How the flush failed that a change waited for: told to the next one without room.
    refusal: Option<Status>,
    is_awaited: bool,
    /// Something changed that other queues wait for.
    wakes: bool,
}

impl Link {
    pub(super) fn new(journal_bytes_max: usize, pool: JournalPool) -> Self {
        Self {
            epoch: 0,
            incarnation: None,
            milestone: None,
            is_lost: true,
            is_failed: false,
            must_replay: false,
            must_resend: false,
            replayer: None,
            pieces: Vec::new(),
            pieces_out: 0,
            is_judged: false,
            opening: None,
            has_sent: false,
            sent_in: None,
            journal: Journal::new(journal_bytes_max, pool),
            changing: ChangingRanges::default(),
            is_flushing: false,
            is_room_wanted: false,
            refusal: None,
            is_awaited: false,
            wakes: false,
        }
    }

    // The association.

    /// A queue of association `epoch` with this incarnation of the target is connected. One that
    /// wasn't asked for the newest milestone is refused: an answer of the one before it may have
    /// come meanwhile, and this one may lack what that flushed.
    pub(super) fn connect(
        &mut self,
        epoch: u64,
        incarnation: &Incarnation,
    ) -> Result<(), StaleAssociation> {
        let Incarnation { number: incarnation, confirmed, milestone } = *incarnation;
        let is_same = self.incarnation == Some(incarnation);
        if epoch == self.epoch && is_same && !self.is_lost {
            return Ok(());
        }
        if epoch <= self.epoch || self.is_failed || !is_same && confirmed != self.milestone {
            return Err(StaleAssociation);
        }
        self.epoch = epoch;
        self.is_lost = false;
        self.replayer = None;
        if self.incarnation.is_some_and(|known| known != incarnation) {
            self.must_replay = true;
            self.must_resend = true;
            self.pieces = self.journal.pieces();
            self.pieces_out = 0;
            self.is_judged = false;
            if std::mem::take(&mut self.has_sent) {
                self.sent_in = self.opening;
            }
            self.opening = None;
        }
        if !is_same {
            self.milestone = milestone;
        }
        self.incarnation = Some(incarnation);
        self.settle();
        self.wakes = true;
        Ok(())
    }

    /// The association `epoch` is over. True for who says it first.
    pub(super) fn lose(&mut self, epoch: u64) -> bool {
        let is_first = epoch == self.epoch && !self.is_lost && !self.is_failed;
        if is_first {
            self.is_lost = true;
            self.replayer = None;
            self.wakes = true;
        }
        is_first
    }

    /// The volume can't go on. True for who says it first.
    pub(super) fn fail(&mut self) -> bool {
        let is_first = !self.is_failed;
        self.is_failed = true;
        self.wakes = true;
        is_first
    }

    pub(super) fn phase(&self) -> Phase {
        match self {
            Self { is_failed: true, .. } => Phase::Failed,
            Self { is_lost: true, .. } => Phase::Lost,
            Self { must_replay: true, .. } => Phase::Replaying,
            Self { must_resend: true, .. } => Phase::Resending,
            _ => Phase::Ready,
        }
    }

    /// The newest association epoch, alive or not.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The incarnation that alone can lose what is acknowledged from now on: nothing acknowledged
    /// before is unflushed. None: something is, or no target is connected.
    pub(super) fn settled_incarnation(&self) -> Option<u64> {
        let is_settled = self.phase() == Phase::Ready && self.journal.is_empty();
        self.incarnation.filter(|_| is_settled)
    }

    /// Whether a back-end queue of this epoch may still be used.
    pub(super) fn is_live(&self, epoch: u64) -> bool {
        epoch == self.epoch && !self.is_lost && !self.is_failed
    }

    // Sending again.

    /// Makes `queue` the one that sends the journal, if one is needed and there is none.
    pub(super) fn claim_replay(&mut self, queue: QueueName) -> bool {
        let is_free = self.phase() == Phase::Replaying && self.replayer.is_none();
        if is_free {
            self.replayer = Some(queue);
        }
        is_free
    }

    /// The queue ends before it has sent everything: another one starts again.
    pub(super) fn abandon_replay(&mut self, queue: QueueName) {
        if self.replayer == Some(queue) {
            self.replayer = None;
            self.wakes = true;
        }
    }

    /// The target said which opening it has of its store.
    pub(super) fn opened(&mut self, incarnation: u64, openings: &Openings) {
        if self.incarnation == Some(incarnation) {
            self.opening = Some(openings.now.opening);
        }
    }

    /// A change is sent.
    pub(super) fn sends(&mut self, incarnation: u64) {
        self.has_sent |= self.incarnation == Some(incarnation);
    }

    /// Leaves out of the journal's way what the target's store contains, or has something newer of.
    /// An error, and the first block: others may have something newer in the store, and nobody can tell.
    pub(super) fn judge(
        &mut self,
        incarnation: u64,
        openings: Option<&Openings>,
    ) -> Result<(), u64> {
        if self.incarnation != Some(incarnation) || std::mem::replace(&mut self.is_judged, true) {
            return Ok(());
        }
        let Some(openings) = openings else { return Ok(()) };
        let sent_in = self.sent_in;
        let judge = |made: Made| openings.judge(&made, sent_in == Some(made.opening));
        let verdict = |piece: &Piece| piece.made.map_or(Verdict::Missing, judge);
        let unknown = self.pieces.iter().find(|piece| verdict(piece) == Verdict::Unknown);
        if let Some(unknown) = unknown {
            let ranges = unknown.change.ranges();
            let first = ranges.first().map_or(0, |range| range.start);
            return Err(first.max(unknown.lba));
        }
        self.pieces.retain(|piece| verdict(piece) == Verdict::Missing);
        Ok(())
    }

    /// A piece of the journal that this incarnation of the target is still to be sent.
    pub(super) fn next_piece(&mut self, incarnation: u64) -> Option<Piece> {
        let piece = self.pieces.pop().filter(|_| self.incarnation == Some(incarnation))?;
        self.pieces_out += 1;
        Some(piece)
    }

    /// A piece is back: it wasn't sent, or has no answer. One for another incarnation is that one's.
    pub(super) fn return_piece(&mut self, incarnation: u64, piece: Piece, wakes: bool) {
        if self.incarnation == Some(incarnation) {
            self.pieces_out -= 1;
            self.pieces.push(piece);
            self.wakes |= wakes;
        }
    }

    /// A piece is acknowledged: it was made again then.
    pub(super) fn piece_done(&mut self, incarnation: u64, place: u64, made: Option<Made>) {
        if self.incarnation == Some(incarnation) {
            self.journal.made_again(place, made);
            self.pieces_out -= 1;
            self.wakes |= self.pieces_out == 0 && self.pieces.is_empty();
        }
    }

    /// Whether this incarnation has acknowledged all of the journal.
    pub(super) fn is_sent_again(&self, incarnation: u64) -> bool {
        self.incarnation == Some(incarnation) && self.pieces.is_empty() && self.pieces_out == 0
    }

    /// All of the journal is acknowledged by the new incarnation, and flushed.
    pub(super) fn replayed(&mut self, queue: QueueName) {
        if self.replayer == Some(queue) {
            self.replayer = None;
            self.must_replay = false;
            self.settle();
            self.wakes = true;
        }
    }

    // Changes and flushes.

    /// A change that was never sent wants to be.
    pub(super) fn begin(&mut self, ranges: &[Range<u64>], cost: usize) -> Begin {
        if !self.changing.claim(ranges, self.epoch) {
            self.is_awaited = true;
            return Begin::Wait;
        }
        if self.journal.reserve(cost) {
            self.refusal = None;
            if self.is_flushing || !self.journal.is_half_full() {
                return Begin::Begun;
            }
            self.is_flushing = true;
            return Begin::BegunAndFlush;
        }
        self.changing.release(ranges);
        if let Some(status) = self.refusal.take() {
            return Begin::Refused(status);
        }
        self.is_room_wanted = true;
        self.is_awaited = true;
        // With nothing to flush, changes on their way have all the room: their ends are waited for.
        if self.is_flushing || self.journal.is_empty() {
            return Begin::Wait;
        }
        self.is_flushing = true;
        Begin::FlushFirst
    }

    /// The change is acknowledged, in association `epoch`; `made` says when it was made. It is given back if there is a newer one:
    /// its target may be another incarnation, which lacks the change and was sent the journal without.
    pub(super) fn acknowledge(
        &mut self,
        epoch: u64,
        ranges: &[Range<u64>],
        change: Change,
        made: Option<Made>,
    ) -> Result<(), Change> {
        if epoch != self.epoch {
            return Err(change);
        }
        self.journal.push(change, made);
        self.end(ranges);
        Ok(())
    }

    /// The change was refused or is given up.
    pub(super) fn give_up(&mut self, ranges: &[Range<u64>], cost: usize) {
        self.journal.release(cost);
        self.end(ranges);
    }

    fn end(&mut self, ranges: &[Range<u64>]) {
        self.changing.release(ranges);
        self.wakes |= self.is_awaited;
        self.is_awaited = false;
        if self.must_resend {
            self.settle();
        }
    }

    /// What the target's store must have that is connected next.
    pub(super) fn milestone(&self) -> Option<Milestone> {
        self.milestone
    }

    /// A flush that was submitted at `mark` in association `epoch` succeeded, and this is how far the
    /// store had come. False, and nothing is flushed, if there is a newer association.
    pub(super) fn flushed(&mut self, epoch: u64, mark: Mark, told: Option<Milestone>) -> bool {
        if epoch != self.epoch {
            return false;
        }
        self.journal.flushed(mark);
        self.refusal = None;
        // Answers on several queues may overtake each other.
        if let Some(told) = told
            && self.milestone.is_none_or(|newest| told.is_after(&newest))
        {
            self.milestone = Some(told);
        }
        self.wakes |= self.is_awaited;
        self.is_awaited = false;
        true
    }

    /// The flush that the journal asked for has ended. If it failed and a change waits for room, a
    /// change without room hears of it, whatever queue it is on: it would only ask for the same flush.
    pub(super) fn flush_ended(&mut self, status: Status) {
        self.is_flushing = false;
        self.wakes = true;
        let is_room_wanted = std::mem::take(&mut self.is_room_wanted);
        if is_room_wanted && !status.is_success() {
            self.refusal = Some(status);
        }
    }

    /// The queue that was to flush has ended: another one must.
    pub(super) fn flush_lost(&mut self) {
        self.flush_ended(Status::SUCCESS);
    }

    /// Whether queues must be woken; asked after every change of state.
    pub(super) fn take_wakes(&mut self) -> bool {
        std::mem::take(&mut self.wakes)
    }

    /// Ends the phases that have nothing left to do.
    fn settle(&mut self) {
        if self.must_replay && self.journal.is_empty() {
            self.must_replay = false;
        }
        if self.must_resend && !self.changing.has_older(self.epoch) {
            self.must_resend = false;
            self.wakes = true;
        }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // lists of one range are meant
mod tests {
    use std::sync::Arc;

    use sealane_proto::sector::BLOCK_BYTES;

    use super::super::journal::JOURNAL_BYTES_MIN;
    use super::*;

    fn queue(queue_id: u16) -> QueueName {
        QueueName { association: 1, queue_id }
    }

    fn target(number: u64) -> Incarnation {
        Incarnation { number, confirmed: None, milestone: None }
    }

    fn change(bytes: usize) -> Change {
        Change::Write { lba: 0, blocks: Arc::new(vec![0; bytes]) }
    }

    fn acknowledged(link: &mut Link, range: Range<u64>) {
        let change = change(BLOCK_BYTES);
        assert_eq!(link.begin(std::slice::from_ref(&range), change.cost()), Begin::Begun);
        let epoch = link.epoch();
        assert!(link.acknowledge(epoch, &[range], change, None).is_ok());
    }

    #[test]
    fn an_association_is_lost_once_and_only_a_newer_one_replaces_it() {
        let mut link = Link::new(0, JournalPool::default());
        assert_eq!(link.phase(), Phase::Lost);
        link.connect(5, &target(1)).unwrap();
        assert_eq!(link.phase(), Phase::Ready);
        link.connect(5, &target(1)).unwrap();
        assert_eq!(
            link.connect(5, &target(2)),
            Err(StaleAssociation),
            "another target in one epoch"
        );
        assert!(link.lose(5) && !link.lose(5));
        assert_eq!(link.connect(5, &target(1)), Err(StaleAssociation));
        assert_eq!(link.connect(4, &target(1)), Err(StaleAssociation));
        link.connect(6, &target(1)).unwrap();
        assert!(!link.lose(5), "old news");
        assert!(link.is_live(6) && !link.is_live(5));
    }

    #[test]
    fn a_new_incarnation_gets_the_journal_first_then_what_was_on_its_way() {
        let mut link = Link::new(0, JournalPool::default());
        link.connect(1, &target(10)).unwrap();
        acknowledged(&mut link, 0..1);
        assert_eq!(link.begin(&[4..5], 10), Begin::Begun);
        link.lose(1);
        link.connect(2, &target(11)).unwrap();
        assert_eq!(link.phase(), Phase::Replaying);
        assert!(link.claim_replay(queue(1)) && !link.claim_replay(queue(2)));
        link.replayed(queue(2));
        assert_eq!(link.phase(), Phase::Replaying, "not by another queue's word");
        link.replayed(queue(1));
        assert_eq!(link.phase(), Phase::Resending);
        link.give_up(&[4..5], 10);
        assert_eq!(link.phase(), Phase::Ready);
        assert!(link.take_wakes());
    }

    #[test]
    fn an_incarnation_is_settled_when_nothing_of_the_one_before_is_unflushed() {
        let mut link = Link::new(0, JournalPool::default());
        assert_eq!(link.settled_incarnation(), None);
        link.connect(1, &target(10)).unwrap();
        assert_eq!(link.settled_incarnation(), Some(10));
        acknowledged(&mut link, 0..1);
        link.lose(1);
        link.connect(2, &target(11)).unwrap();
        assert!(link.claim_replay(queue(1)));
        assert_eq!(link.settled_incarnation(), None, "it lacks what is being replayed");
        link.replayed(queue(1));
        assert_eq!(link.settled_incarnation(), None, "it may lose that again");
        let mark = link.journal.mark();
        assert!(link.flushed(2, mark, None));
        assert_eq!(link.settled_incarnation(), Some(11));
        link.lose(2);
        assert_eq!(link.settled_incarnation(), None);
    }

    #[test]
    fn an_interrupted_replay_starts_again_even_at_the_same_incarnation() {
        let mut link = Link::new(0, JournalPool::default());
        link.connect(1, &target(10)).unwrap();
        acknowledged(&mut link, 0..1);
        link.lose(1);
        link.connect(2, &target(11)).unwrap();
        assert!(link.claim_replay(queue(1)));
        link.abandon_replay(queue(1));
        assert!(link.claim_replay(queue(2)));
        link.lose(2);
        link.connect(3, &target(11)).unwrap();
        assert_eq!(link.phase(), Phase::Replaying);
        assert!(link.claim_replay(queue(1)));
    }

    #[test]
    fn the_same_incarnation_has_forgotten_nothing() {
        let mut link = Link::new(0, JournalPool::default());
        link.connect(1, &target(10)).unwrap();
        acknowledged(&mut link, 0..1);
        link.lose(1);
        link.connect(2, &target(10)).unwrap();
        assert_eq!(link.phase(), Phase::Ready);
    }

    fn milestone(log_flushed: u64) -> Milestone {
        Milestone { opening: [1; 16], checkpoint: 1, log_flushed }
    }

    fn flushed(link: &mut Link, log_flushed: u64) {
        let mark = link.journal.mark();
        assert!(link.flushed(1, mark, Some(milestone(log_flushed))));
    }

    #[test]
    fn a_new_incarnation_must_have_been_asked_for_the_newest_milestone() {
        let mut link = Link::new(0, JournalPool::default());
        link.connect(1, &Incarnation { milestone: Some(milestone(3)), ..target(10) }).unwrap();
        flushed(&mut link, 7);
        flushed(&mut link, 5);
        assert_eq!(link.milestone(), Some(milestone(7)), "an answer that was overtaken");
        link.lose(1);
        for confirmed in [None, Some(milestone(5))] {
            let asked_for_less = Incarnation { confirmed, ..target(11) };
            assert_eq!(link.connect(2, &asked_for_less), Err(StaleAssociation));
        }
        link.connect(2, &target(10)).unwrap();
        assert_eq!(link.milestone(), Some(milestone(7)), "the same has lost nothing");
        link.lose(2);
        let next = Milestone { opening: [2; 16], ..milestone(8) };
        let asked =
            Incarnation { number: 11, confirmed: Some(milestone(7)), milestone: Some(next) };
        link.connect(3, &asked).unwrap();
        assert_eq!(link.milestone(), Some(next));
        acknowledged(&mut link, 0..1);
        let mark = link.journal.mark();
        assert!(!link.flushed(2, mark, Some(milestone(99))), "an answer of the one before");
        assert_eq!(link.milestone(), Some(next));
        assert!(!link.journal.is_empty());
    }

    #[test]
    fn overlapping_changes_wait_and_are_woken() {
        let mut link = Link::new(0, JournalPool::default());
        link.connect(1, &target(1)).unwrap();
        link.take_wakes();
        assert_eq!(link.begin(&[0..8], 10), Begin::Begun);
        assert_eq!(link.begin(&[7..9], 10), Begin::Wait);
        assert!(!link.take_wakes());
        link.give_up(&[0..8], 10);
        assert!(link.take_wakes());
        assert_eq!(link.begin(&[7..9], 10), Begin::Begun);
    }

    #[test]
    fn a_full_journal_is_flushed_by_one_queue() {
        let mut link = Link::new(0, JournalPool::default());
        link.connect(1, &target(1)).unwrap();
        acknowledged(&mut link, 0..1);
        let whole = JOURNAL_BYTES_MIN;
        assert_eq!(link.begin(&[1..2], whole), Begin::FlushFirst);
        assert_eq!(link.begin(&[1..2], whole), Begin::Wait);
        let mark = link.journal.mark();
        link.take_wakes();
        assert!(link.flushed(1, mark, None));
        link.flush_ended(Status::SUCCESS);
        assert!(link.take_wakes());
        assert_eq!(link.begin(&[1..2], whole), Begin::Begun);
        assert_eq!(link.begin(&[2..3], 1), Begin::Wait, "nothing to flush: wait for ends");
    }

    #[test]
    fn a_journal_that_fills_up_is_flushed_before_changes_wait_for_it() {
        let mut link = Link::new(0, JournalPool::default());
        link.connect(1, &target(1)).unwrap();
        let half = Change::Write { lba: 0, blocks: Arc::new(vec![0; JOURNAL_BYTES_MIN / 2]) };
        assert_eq!(link.begin(&[0..1], half.cost()), Begin::Begun);
        assert_eq!(link.begin(&[2..3], 1), Begin::Begun, "nothing that a flush would make durable");
        assert!(link.acknowledge(1, &[0..1], half, None).is_ok());
        assert_eq!(link.begin(&[4..5], 1), Begin::BegunAndFlush);
        assert_eq!(link.begin(&[6..7], 1), Begin::Begun, "one flush at a time");
        link.flush_ended(Status::WRITE_FAULT);
        assert_eq!(
            link.begin(&[8..9], JOURNAL_BYTES_MIN),
            Begin::FlushFirst,
            "it failed, and nobody waited for it"
        );
        link.flush_ended(Status::WRITE_FAULT);
        assert_eq!(link.begin(&[10..11], 1), Begin::BegunAndFlush, "one that has room");
        link.flush_ended(Status::SUCCESS);
        assert_eq!(link.begin(&[8..9], JOURNAL_BYTES_MIN), Begin::FlushFirst);
        link.flush_ended(Status::WRITE_FAULT);
        let refused = Begin::Refused(Status::WRITE_FAULT);
        assert_eq!(link.begin(&[8..9], JOURNAL_BYTES_MIN), refused);
        assert_eq!(link.begin(&[8..9], JOURNAL_BYTES_MIN), Begin::FlushFirst, "told once");
    }

    #[test]
    fn a_failed_volume_stays_failed() {
        let mut link = Link::new(0, JournalPool::default());
        link.connect(1, &target(1)).unwrap();
        assert!(link.fail() && !link.fail());
        assert_eq!(link.phase(), Phase::Failed);
        assert_eq!(link.connect(2, &target(1)), Err(StaleAssociation));
        assert!(!link.is_live(1));
    }
}
