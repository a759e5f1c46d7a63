//! Announcements of writes in place that a queue's thread writes to the log by itself, so that a
//! write waits for a single device operation and for no other thread (decision 16).
//!
//! Their pages are part of the log's chain, so a write may be made only after its page and all
//! pages before it are durable: after a crash, the log ends at the first missing page. The pages of
//! a flush are part of that chain, too: an announcement during a flush completes once the flush's
//! pages are durable, and doesn't wait for its anchor.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::super::pages::Page;
use super::failure::copy_error;
use super::journal::Mailbox;
use super::log::records_per_page;
use super::map::{Layout, Map};

/// Most pages of one announcement: every store accepts this many in one write.
const PAGES_MAX: usize = 32;

/// A completed announcement: the mailbox and id for the answer, and the result.
pub type Completion = (Arc<Mailbox>, u64, io::Result<()>);

/// Consecutive pages to write durably in one operation.
#[derive(Debug)]
pub struct Announcement {
    /// Number to pass to [`Map::end_announcement`].
    pub number: u64,
    /// Place of the first page.
    pub place: u64,
    /// The pages.
    pub pages: Vec<Page>,
    /// Whether the table or the log is so full that a merge is due.
    pub is_merge_due: bool,
}

/// How the announcement of some writes has begun.
#[derive(Debug)]
pub enum Begun {
    /// They are announced once these pages and all pages before them are durable.
    InFlight(Announcement),
    /// The log already has them, durably.
    Nothing,
    /// The log has them on pages in flight; completion is reported as for any other announcement.
    Waiting,
    /// The log is in use, or has no room: the store's thread must be asked.
    Busy,
}

/// Consecutive pages in flight.
#[derive(Debug)]
struct Entry {
    number: u64,
    /// Mailbox and id for the answer; `None` if their writer waits by itself.
    mailbox: Option<(Arc<Mailbox>, u64)>,
    /// Result of their own write, once it has ended.
    ended: Option<io::Result<()>>,
}

#[derive(Debug, Default)]
struct Inner {
    /// In the order of their pages.
    entries: VecDeque<Entry>,
    next: u64,
    /// Set if a page is missing, with the reason: no later page counts.
    failure: Option<io::Error>,
    /// Number of threads that wait for entries to complete.
    waiters: usize,
}

impl Inner {
    fn push(
        &mut self,
        mailbox: Option<(&Arc<Mailbox>, u64)>,
        ended: Option<io::Result<()>>,
    ) -> u64 {
        self.next += 1;
        let (number, mailbox) = (self.next, mailbox.map(|(to, name)| (Arc::clone(to), name)));
        self.entries.push_back(Entry { number, mailbox, ended });
        number
    }
}

/// Pages of the log in flight to the device.
#[derive(Default)]
pub(super) struct InFlight {
    inner: Mutex<Inner>,
    /// Notified when the first entries have completed.
    over: Condvar,
    /// In tests with a single thread: runs the other threads' work, since a waiting thread would
    /// wait for it forever.
    #[cfg(test)]
    others: Mutex<Option<Others>>,
}

/// Runs the work of other threads while one waits for their pages.
#[cfg(test)]
pub(super) type Others = Box<dyn FnMut() + Send>;

impl std::fmt::Debug for InFlight {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("InFlight").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl InFlight {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds pages behind all others and returns their number. `mailbox`: where to report
    /// completion, and under which id.
    pub fn begin(&self, mailbox: Option<(&Arc<Mailbox>, u64)>) -> u64 {
        self.lock().push(mailbox, None)
    }

    /// Notifies `mailbox` once all pages now in flight have completed. Returns false if there are
    /// none.
    fn join(&self, mailbox: &Arc<Mailbox>, name: u64) -> bool {
        let mut inner = self.lock();
        let is_any = !inner.entries.is_empty();
        if is_any {
            inner.push(Some((mailbox, name)), Some(Ok(())));
        }
        is_any
    }

    /// Records the result of a write of pages. Returns the announcements that are thereby complete.
    pub fn end(&self, number: u64, result: io::Result<()>) -> Vec<Completion> {
        let mut inner = self.lock();
        if let Some(entry) = inner.entries.iter_mut().find(|entry| entry.number == number) {
            entry.ended = Some(result);
        }
        let mut completed = Vec::new();
        let before = inner.entries.len();
        while let Some(first) = inner.entries.front_mut()
            && let Some(ended) = first.ended.take()
        {
            if let Err(error) = ended {
                inner.failure.get_or_insert(error);
            }
            let result = inner.failure.as_ref().map_or(Ok(()), |error| Err(copy_error(error)));
            let first = inner.entries.pop_front().and_then(|first| first.mailbox);
            completed.extend(first.map(|(mailbox, name)| (mailbox, name, result)));
        }
        if inner.waiters > 0 && inner.entries.len() < before {
            self.over.notify_all();
        }
        completed
    }

    /// Waits until all pages before these have completed.
    pub fn wait_for(&self, number: u64) {
        self.wait_while(|entries| entries.front().is_some_and(|first| first.number < number));
    }

    /// Waits until no pages are in flight. The caller must prevent others from adding pages.
    pub fn wait_for_none(&self) {
        self.wait_while(|entries| !entries.is_empty());
    }

    /// Sets what runs whenever somebody waits for other threads' pages.
    #[cfg(test)]
    pub fn set_others(&self, others: Option<Others>) {
        *self.others.lock().unwrap_or_else(PoisonError::into_inner) = others;
    }

    /// Runs the other threads' work, if a single thread does it all.
    ///
    /// # Panics
    /// If the pages are still in flight afterwards: this thread would wait for itself.
    #[cfg(test)]
    fn let_others(&self, is_early: impl Fn(&VecDeque<Entry>) -> bool) {
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(go_on) = &mut *others else { return };
        if is_early(&self.lock().entries) {
            go_on();
            let entries = &self.lock().entries;
            assert!(!is_early(entries), "waits for log pages that nobody writes: {entries:?}");
        }
    }

    fn wait_while(&self, is_early: impl Fn(&VecDeque<Entry>) -> bool) {
        #[cfg(test)]
        self.let_others(&is_early);
        let mut inner = self.lock();
        inner.waiters += 1;
        while is_early(&inner.entries) {
            inner = self.over.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner.waiters -= 1;
    }
}

impl<F: Layout> Map<F> {
    /// Prepares pages that announce the writes with these first blocks, for a queue to write
    /// durably by itself. [`Map::end_announcement`] completes the announcement and reports it to
    /// `mailbox` under `name`. Never blocks.
    pub fn begin_announcement(
        &self,
        writes: &[u64],
        mailbox: &Arc<Mailbox>,
        name: u64,
    ) -> io::Result<Begun> {
        let Ok(mut log) = self.log_head.try_lock() else { return Ok(Begun::Busy) };
        let mut state = self.state();
        state.check()?;
        let per_page = records_per_page::<F>();
        let records = state.waiting.len() + state.intents.unlogged_blocks(writes);
        let pages = records.div_ceil(per_page);
        let place = self.geometry.log(log.next);
        let is_one_run = self.geometry.log(log.next + pages as u64) == place + pages as u64;
        if pages > PAGES_MAX || !is_one_run || !self.has_log_room(&log, pages as u64) {
            return Ok(Begun::Busy);
        }
        // Blocks deallocated before a write was announced come before it in the log.
        let mut records = std::mem::take(&mut state.waiting);
        state.intents.announce(writes, &mut records);
        if records.is_empty() {
            // A flush that is still running may have logged them.
            let is_on_its_way = self.log_in_flight.join(mailbox, name);
            return Ok(if is_on_its_way { Begun::Waiting } else { Begun::Nothing });
        }
        state.take_pages(log.next, [records.len()], per_page);
        let is_merge_due = self.wants_merge(&log, &state);
        drop(state);
        let pages = self.next_pages(&mut log, &records);
        let number = self.log_in_flight.begin(Some((mailbox, name)));
        Ok(Begun::InFlight(Announcement { number, place, pages, is_merge_due }))
    }

    /// Records the result of writing an announcement's pages. Returns the announcements that are
    /// thereby complete. An error fails the store: the contents of its log are unknown.
    pub fn end_announcement(&self, number: u64, result: io::Result<()>) -> Vec<Completion> {
        let result = self.guard(result);
        self.log_in_flight.end(number, result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::ring::event;
    use super::*;

    fn mailbox() -> Arc<Mailbox> {
        Arc::new(Mailbox::new(event().expect("event")))
    }

    /// Ids of completed announcements, and whether they succeeded.
    fn outcomes(completed: Vec<Completion>) -> Vec<(u64, bool)> {
        completed.into_iter().map(|(_, name, result)| (name, result.is_ok())).collect()
    }

    #[test]
    fn an_announcement_completes_once_all_pages_before_it_are_durable() {
        let (in_flight, mailbox) = (InFlight::default(), mailbox());
        let numbers: Vec<u64> =
            (10..13).map(|name| in_flight.begin(Some((&mailbox, name)))).collect();
        assert_eq!(outcomes(in_flight.end(numbers[2], Ok(()))), []);
        assert_eq!(outcomes(in_flight.end(numbers[0], Ok(()))), [(10, true)]);
        assert_eq!(outcomes(in_flight.end(numbers[1], Ok(()))), [(11, true), (12, true)]);
    }

    #[test]
    fn a_missing_page_fails_all_pages_behind_it() {
        let (in_flight, mailbox) = (InFlight::default(), mailbox());
        let numbers: Vec<u64> =
            (10..14).map(|name| in_flight.begin(Some((&mailbox, name)))).collect();
        assert_eq!(outcomes(in_flight.end(numbers[0], Ok(()))), [(10, true)]);
        assert_eq!(outcomes(in_flight.end(numbers[2], Ok(()))), []);
        let failed = in_flight.end(numbers[1], Err(io::Error::other("no power")));
        assert_eq!(outcomes(failed), [(11, false), (12, false)]);
        assert_eq!(outcomes(in_flight.end(numbers[3], Ok(()))), [(13, false)]);
    }

    #[test]
    fn a_joined_announcement_completes_with_the_last_pages_in_flight() {
        let (in_flight, mailbox) = (InFlight::default(), mailbox());
        assert!(!in_flight.join(&mailbox, 10), "nothing is in flight");
        let numbers = [in_flight.begin(None), in_flight.begin(Some((&mailbox, 11)))];
        assert!(in_flight.join(&mailbox, 12));
        assert_eq!(outcomes(in_flight.end(numbers[1], Ok(()))), []);
        assert_eq!(outcomes(in_flight.end(numbers[0], Ok(()))), [(11, true), (12, true)]);
    }

    #[test]
    #[should_panic(expected = "waits for log pages that nobody writes")]
    fn a_single_thread_does_not_wait_for_itself() {
        let (in_flight, mailbox) = (InFlight::default(), mailbox());
        in_flight.begin(Some((&mailbox, 1)));
        in_flight.set_others(Some(Box::new(|| ())));
        in_flight.wait_for_none();
    }

    #[test]
    fn a_wait_for_pages_ends_once_all_before_them_have_completed() {
        let (in_flight, mailbox) = (InFlight::default(), mailbox());
        let first = in_flight.begin(Some((&mailbox, 1)));
        let own = in_flight.begin(None);
        let behind = in_flight.begin(Some((&mailbox, 2)));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| in_flight.wait_for(own));
            let all = scope.spawn(|| in_flight.wait_for_none());
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!waiting.is_finished());
            in_flight.end(first, Ok(()));
            waiting.join().expect("waited");
            assert!(!all.is_finished(), "another one is in flight");
            assert_eq!(outcomes(in_flight.end(own, Ok(()))), []);
            assert_eq!(outcomes(in_flight.end(behind, Ok(()))), [(2, true)]);
        });
    }
}
