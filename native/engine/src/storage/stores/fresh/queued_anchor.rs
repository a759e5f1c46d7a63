//! An anchor that another component advances: the record to be anchored waits in a queue of one,
//! and an event descriptor signals it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::super::ring::{clear, event, signal};
use super::anchor::{Anchor, AnchorError, AnchorPolicy, Anchored};

#[derive(Debug, Default)]
struct Queue {
    latest: Option<Anchored>,
    wanted: Option<Anchored>,
    /// The number of an answered record, and the answer.
    answer: Option<(u64, Result<(), AnchorError>)>,
}

/// Both ends of the queue: [`Anchor`] for the store, the rest for the keeper of the anchor.
#[derive(Debug)]
pub struct QueuedAnchor {
    policy: AnchorPolicy,
    timeout: Duration,
    base: u64,
    is_believed: bool,
    event: Arc<OwnedFd>,
    queue: Mutex<Queue>,
    answered: Condvar,
}

impl QueuedAnchor {
    /// A queue to an anchor with the record `latest`; `timeout` bounds the wait for an answer. See
    /// [`Anchor::base`] and [`Anchor::is_believed`].
    pub fn new(
        policy: AnchorPolicy,
        (latest, base): (Option<Anchored>, u64),
        timeout: Duration,
        is_believed: bool,
    ) -> io::Result<Self> {
        let queue = Queue { latest, ..Queue::default() };
        let (queue, answered) = (Mutex::new(queue), Condvar::new());
        Ok(Self { policy, timeout, base, is_believed, event: event()?, queue, answered })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the record to advance the anchor to, if there is one.
    pub fn take(&self) -> Option<Anchored> {
        clear(&self.event);
        self.queue().wanted.take()
    }

    /// Answers a record that was taken. An answer to an earlier number is ignored.
    pub fn answer(&self, number: u64, result: Result<(), AnchorError>) {
        self.queue().answer = Some((number, result));
        self.answered.notify_all();
    }
}

impl AsFd for QueuedAnchor {
    /// Readable when [`QueuedAnchor::take`] would return a record.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Anchor for QueuedAnchor {
    fn latest(&self) -> io::Result<Option<Anchored>> {
        Ok(self.queue().latest)
    }

    fn advance(&self, to: &Anchored) -> Result<(), AnchorError> {
        let mut queue = self.queue();
        queue.wanted = Some(*to);
        queue.answer = None;
        signal(&self.event);
        let is_open = |queue: &mut Queue| {
            queue.answer.as_ref().is_none_or(|(number, _)| *number != to.number)
        };
        let waited = self.answered.wait_timeout_while(queue, self.timeout, is_open);
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match queue.answer.take() {
            Some((number, result)) if number == to.number => {
                if result.is_ok() {
                    queue.latest = Some(*to);
                }
                result
            }
            _ => {
                let seconds = self.timeout.as_secs_f64();
                Err(AnchorError::Unreachable(format!("no answer within {seconds} s")))
            }
        }
    }

    fn base(&self) -> u64 {
        self.base
    }

    fn policy(&self) -> AnchorPolicy {
        self.policy
    }

    fn is_believed(&self) -> bool {
        self.is_believed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(number: u64) -> Anchored {
        let (checkpoint_tag, log_tag) = ([1; 16], [2; 16]);
        let (epoch, checkpoint, log_flushed) = (3, 4, 5);
        Anchored { number, epoch, checkpoint, checkpoint_tag, log_flushed, log_tag }
    }

    fn queued(timeout: Duration) -> QueuedAnchor {
        QueuedAnchor::new(AnchorPolicy::EveryCommit, (None, 0), timeout, false).expect("queue")
    }

    #[test]
    fn a_record_is_passed_on_as_bytes_and_answered() {
        let anchor = Arc::new(queued(Duration::from_secs(20)));
        let keeper = Arc::clone(&anchor);
        let keeping = std::thread::spawn(move || {
            for result in [Err(AnchorError::Lost("another".into())), Ok(())] {
                let taken = loop {
                    if let Some(taken) = keeper.take() {
                        break taken;
                    }
                    std::thread::yield_now();
                };
                assert_eq!(Anchored::decode(&taken.encode()), Some(taken));
                keeper.answer(taken.number, result);
            }
        });
        assert_eq!(anchor.advance(&state(1)), Err(AnchorError::Lost("another".into())));
        assert_eq!(anchor.latest().expect("latest"), None);
        assert_eq!(anchor.advance(&state(1)), Ok(()));
        assert_eq!(anchor.latest().expect("latest"), Some(state(1)));
        keeping.join().expect("keeper");
    }

    #[test]
    fn a_missing_answer_is_an_unknown_outcome_and_a_late_one_changes_nothing() {
        let anchor = queued(Duration::from_millis(1));
        assert!(matches!(anchor.advance(&state(1)), Err(AnchorError::Unreachable(_))));
        anchor.answer(1, Ok(()));
        assert!(matches!(anchor.advance(&state(2)), Err(AnchorError::Unreachable(_))));
        assert_eq!(anchor.take(), Some(state(2)));
    }

    #[test]
    fn malformed_records_are_not_decoded() {
        let bytes = state(7).encode();
        assert_eq!(Anchored::decode_as(7, &bytes), Some(state(7)));
        // A record with another number belongs to another state of the store.
        assert_eq!([6, 8].map(|number| Anchored::decode_as(number, &bytes)), [None; 2]);
        assert_eq!(Anchored::decode(&bytes[1..]), None);
        assert_eq!(Anchored::decode(&[9; super::super::anchor::ANCHORED_BYTES]), None);
    }
}
