//! State of the back end that all queues of a volume share: the live association, changes that the
//! target may have lost, blocks being changed. A state machine without I/O.
//!
//! ```text
//!          connect, same incarnation (or nothing to send again)
//!   Lost ───────────────────────────────────────────────────────────► Ready
//!    ▲  └─ connect, new incarnation ─► Replaying ─► Resending ──────────┘│
//!    └────────────────────────────── lose ──────────────────────────────┘
//!   any ── fail ─► Failed
//! ```
//!
//! Replaying: one queue sends the journal and flushes it; nothing else is sent. Resending: changes
//! that were in flight when the target was lost are sent again; a read may have seen them, so reads
//! wait.

use std::ops::Range;

use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::openings::{Made, Openings, Verdict};
use sealane_proto::nvme::status::Status;

use super::QueueName;
use super::journal::{Change, Journal, Mark, Piece};
use super::journal_pool::JournalPool;
use super::ranges::ChangingRanges;

/// Determines which commands may be submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// None: there is no back end.
    Lost,
    /// Only entries of the journal, by the queue that claimed them.
    Replaying,
    /// Only changes that were sent before.
    Resending,
    /// Everything.
    Ready,
    /// None, for good: acknowledged changes may be lost.
    Failed,
}

/// Answer to a request to begin a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begin {
    /// Its blocks and its room in the journal are claimed.
    Begun,
    /// The same, and the caller should flush before changes have to wait for room.
    BegunAndFlush,
    /// An overlapping change or a flush must end first; then every queue is woken.
    Wait,
    /// The journal is full: the caller must flush and then try again.
    FlushFirst,
    /// The journal is full, and the flush that was to make room failed with this status.
    Refused(Status),
}

/// The association epoch isn't newer, or its target is another than that of the same epoch, or the
/// target didn't confirm the newest milestone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the association is over: open a newer one")]
pub struct StaleAssociation;

/// The target behind an association.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Incarnation {
    /// Changes with each start of its process.
    pub number: u64,
    /// The milestone that it was asked for and confirmed.
    pub confirmed: Option<Milestone>,
    /// Its store's milestone; None if it reports none.
    pub milestone: Option<Milestone>,
}

/// State of a volume's back end.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // independent facts; `phase` combines them
pub(super) struct Link {
    epoch: u64,
    incarnation: Option<u64>,
    /// The newest milestone reported by the target: a later incarnation must have it.
    milestone: Option<Milestone>,
    is_lost: bool,
    is_failed: bool,
    must_replay: bool,
    must_resend: bool,
    /// Queue that sends the journal.
    replayer: Option<QueueName>,
    /// Pieces of the journal still to be sent to this incarnation.
    pieces: Vec<Piece>,
    /// Number of pieces that queues are sending.
    pieces_out: usize,
    /// Whether the pieces were compared with the openings of this incarnation's store.
    is_judged: bool,
    /// This incarnation's opening of its store, once known.
    opening: Option<[u8; 16]>,
    /// Whether changes were sent to this incarnation.
    has_sent: bool,
    /// The opening of the latest earlier incarnation to which changes were sent.
    sent_in: Option<[u8; 16]>,
    pub(super) journal: Journal,
    changing: ChangingRanges,
    is_flushing: bool,
    /// Whether a change waits for room that the current or the next flush makes.
    is_room_wanted: bool,
    /// Status of a failed flush that a change waited for; reported to the next change without room.
    refusal: Option<Status>,
    is_awaited: bool,
    /// Whether other queues must be woken.
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

    /// Records that a queue of association `epoch` is connected to this incarnation of the target.
    /// Refuses an incarnation that didn't confirm the newest milestone: a flush of the previous one
    /// may have been answered meanwhile, and this one may lack what it made durable.
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

    /// Ends association `epoch`. True for the first caller only.
    pub(super) fn lose(&mut self, epoch: u64) -> bool {
        let is_first = epoch == self.epoch && !self.is_lost && !self.is_failed;
        if is_first {
            self.is_lost = true;
            self.replayer = None;
            self.wakes = true;
        }
        is_first
    }

    /// Ends the volume for good. True for the first caller only.
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

    /// The newest association epoch, live or not.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The connected incarnation, if everything acknowledged so far is durable: then it is the only
    /// one that can lose changes acknowledged from now on. None otherwise, or if no target is
    /// connected.
    pub(super) fn settled_incarnation(&self) -> Option<u64> {
        let is_settled = self.phase() == Phase::Ready && self.journal.is_empty();
        self.incarnation.filter(|_| is_settled)
    }

    /// Whether a back-end queue of this epoch may still be used.
    pub(super) fn is_live(&self, epoch: u64) -> bool {
        epoch == self.epoch && !self.is_lost && !self.is_failed
    }

    // Sending again.

    /// Makes `queue` the one that sends the journal, if the journal must be sent and no other queue
    /// does.
    pub(super) fn claim_replay(&mut self, queue: QueueName) -> bool {
        let is_free = self.phase() == Phase::Replaying && self.replayer.is_none();
        if is_free {
            self.replayer = Some(queue);
        }
        is_free
    }

    /// The queue ends before it has sent everything: another one must claim the replay.
    pub(super) fn abandon_replay(&mut self, queue: QueueName) {
        if self.replayer == Some(queue) {
            self.replayer = None;
            self.wakes = true;
        }
    }

    /// Records the target's current opening of its store.
    pub(super) fn opened(&mut self, incarnation: u64, openings: &Openings) {
        if self.incarnation == Some(incarnation) {
            self.opening = Some(openings.now.opening);
        }
    }

    /// Records that a change is sent.
    pub(super) fn sends(&mut self, incarnation: u64) {
        self.has_sent |= self.incarnation == Some(incarnation);
    }

    /// Removes the pieces that the target's store contains or has newer versions of. Fails with the
    /// first block of a piece for which that can't be decided, as other gateways may have written
    /// something newer.
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

    /// The next piece of the journal to send to this incarnation of the target.
    pub(super) fn next_piece(&mut self, incarnation: u64) -> Option<Piece> {
        let piece = self.pieces.pop().filter(|_| self.incarnation == Some(incarnation))?;
        self.pieces_out += 1;
        Some(piece)
    }

    /// Takes back a piece that wasn't sent or has no answer, unless it was for another incarnation.
    pub(super) fn return_piece(&mut self, incarnation: u64, piece: Piece, wakes: bool) {
        if self.incarnation == Some(incarnation) {
            self.pieces_out -= 1;
            self.pieces.push(piece);
            self.wakes |= wakes;
        }
    }

    /// A piece is acknowledged; `made` is its new opening and mark.
    pub(super) fn piece_done(&mut self, incarnation: u64, place: u64, made: Option<Made>) {
        if self.incarnation == Some(incarnation) {
            self.journal.made_again(place, made);
            self.pieces_out -= 1;
            self.wakes |= self.pieces_out == 0 && self.pieces.is_empty();
        }
    }

    /// Whether this incarnation has acknowledged the whole journal.
    pub(super) fn is_sent_again(&self, incarnation: u64) -> bool {
        self.incarnation == Some(incarnation) && self.pieces.is_empty() && self.pieces_out == 0
    }

    /// The new incarnation has acknowledged and flushed the whole journal.
    pub(super) fn replayed(&mut self, queue: QueueName) {
        if self.replayer == Some(queue) {
            self.replayer = None;
            self.must_replay = false;
            self.settle();
            self.wakes = true;
        }
    }

    // Changes and flushes.

    /// Claims the blocks and room that a change needs before it is first sent.
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
        // If there is nothing to flush, changes in flight have all the room: wait until they end.
        if self.is_flushing || self.journal.is_empty() {
            return Begin::Wait;
        }
        self.is_flushing = true;
        Begin::FlushFirst
    }

    /// The change is acknowledged in association `epoch`; `made` is its opening and mark. Returns
    /// the change if there is a newer association: its target may be another incarnation, which
    /// lacks the change and was sent the journal without it.
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

    /// The change was refused or abandoned.
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

    /// The milestone that the store of the next target must have.
    pub(super) fn milestone(&self) -> Option<Milestone> {
        self.milestone
    }

    /// A flush submitted at `mark` in association `epoch` succeeded; `told` is the store's
    /// milestone. Returns false, and drops nothing, if there is a newer association.
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

    /// The flush requested by the journal has ended. If it failed while a change waited for room,
    /// the next change without room, on any queue, gets its status: it would only request the same
    /// flush.
    pub(super) fn flush_ended(&mut self, status: Status) {
        self.is_flushing = false;
        self.wakes = true;
        let is_room_wanted = std::mem::take(&mut self.is_room_wanted);
        if is_room_wanted && !status.is_success() {
            self.refusal = Some(status);
        }
    }

    /// The queue that was to flush has ended: another one must flush.
    pub(super) fn flush_lost(&mut self) {
        self.flush_ended(Status::SUCCESS);
    }

    /// Whether queues must be woken; called after every change of state.
    pub(super) fn take_wakes(&mut self) -> bool {
        std::mem::take(&mut self.wakes)
    }

    /// Ends phases that have nothing left to do.
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
#[allow(clippy::single_range_in_vec_init)] // lists of one range are intended
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
            "another target in the same epoch"
        );
        assert!(link.lose(5) && !link.lose(5));
        assert_eq!(link.connect(5, &target(1)), Err(StaleAssociation));
        assert_eq!(link.connect(4, &target(1)), Err(StaleAssociation));
        link.connect(6, &target(1)).unwrap();
        assert!(!link.lose(5), "an old association");
        assert!(link.is_live(6) && !link.is_live(5));
    }

    #[test]
    fn a_new_incarnation_gets_the_journal_before_changes_that_were_in_flight() {
        let mut link = Link::new(0, JournalPool::default());
        link.connect(1, &target(10)).unwrap();
        acknowledged(&mut link, 0..1);
        assert_eq!(link.begin(&[4..5], 10), Begin::Begun);
        link.lose(1);
        link.connect(2, &target(11)).unwrap();
        assert_eq!(link.phase(), Phase::Replaying);
        assert!(link.claim_replay(queue(1)) && !link.claim_replay(queue(2)));
        link.replayed(queue(2));
        assert_eq!(link.phase(), Phase::Replaying, "another queue can't end it");
        link.replayed(queue(1));
        assert_eq!(link.phase(), Phase::Resending);
        link.give_up(&[4..5], 10);
        assert_eq!(link.phase(), Phase::Ready);
        assert!(link.take_wakes());
    }

    #[test]
    fn an_incarnation_is_settled_when_nothing_acknowledged_before_is_unflushed() {
        let mut link = Link::new(0, JournalPool::default());
        assert_eq!(link.settled_incarnation(), None);
        link.connect(1, &target(10)).unwrap();
        assert_eq!(link.settled_incarnation(), Some(10));
        acknowledged(&mut link, 0..1);
        link.lose(1);
        link.connect(2, &target(11)).unwrap();
        assert!(link.claim_replay(queue(1)));
        assert_eq!(link.settled_incarnation(), None, "it lacks the changes being replayed");
        link.replayed(queue(1));
        assert_eq!(link.settled_incarnation(), None, "it may lose them again");
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
    fn the_same_incarnation_has_lost_nothing() {
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
        assert_eq!(link.milestone(), Some(milestone(7)), "an answer that was overtaken is ignored");
        link.lose(1);
        for confirmed in [None, Some(milestone(5))] {
            let asked_for_less = Incarnation { confirmed, ..target(11) };
            assert_eq!(link.connect(2, &asked_for_less), Err(StaleAssociation));
        }
        link.connect(2, &target(10)).unwrap();
        assert_eq!(link.milestone(), Some(milestone(7)), "the same incarnation has lost nothing");
        link.lose(2);
        let next = Milestone { opening: [2; 16], ..milestone(8) };
        let asked =
            Incarnation { number: 11, confirmed: Some(milestone(7)), milestone: Some(next) };
        link.connect(3, &asked).unwrap();
        assert_eq!(link.milestone(), Some(next));
        acknowledged(&mut link, 0..1);
        let mark = link.journal.mark();
        assert!(
            !link.flushed(2, mark, Some(milestone(99))),
            "an answer of the previous association"
        );
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
        assert_eq!(link.begin(&[2..3], 1), Begin::Wait, "nothing to flush: wait until changes end");
    }

    #[test]
    fn a_journal_that_fills_up_is_flushed_before_changes_wait_for_it() {
        let mut link = Link::new(0, JournalPool::default());
        link.connect(1, &target(1)).unwrap();
        let half = Change::Write { lba: 0, blocks: Arc::new(vec![0; JOURNAL_BYTES_MIN / 2]) };
        assert_eq!(link.begin(&[0..1], half.cost()), Begin::Begun);
        assert_eq!(link.begin(&[2..3], 1), Begin::Begun, "a flush would make nothing durable");
        assert!(link.acknowledge(1, &[0..1], half, None).is_ok());
        assert_eq!(link.begin(&[4..5], 1), Begin::BegunAndFlush);
        assert_eq!(link.begin(&[6..7], 1), Begin::Begun, "one flush at a time");
        link.flush_ended(Status::WRITE_FAULT);
        assert_eq!(
            link.begin(&[8..9], JOURNAL_BYTES_MIN),
            Begin::FlushFirst,
            "it failed, but no change waited for it"
        );
        link.flush_ended(Status::WRITE_FAULT);
        assert_eq!(
            link.begin(&[10..11], 1),
            Begin::BegunAndFlush,
            "a change that has room isn't refused"
        );
        link.flush_ended(Status::SUCCESS);
        assert_eq!(link.begin(&[8..9], JOURNAL_BYTES_MIN), Begin::FlushFirst);
        link.flush_ended(Status::WRITE_FAULT);
        let refused = Begin::Refused(Status::WRITE_FAULT);
        assert_eq!(link.begin(&[8..9], JOURNAL_BYTES_MIN), refused);
        assert_eq!(link.begin(&[8..9], JOURNAL_BYTES_MIN), Begin::FlushFirst, "reported once");
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
