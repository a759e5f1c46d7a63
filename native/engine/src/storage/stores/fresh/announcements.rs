//! Announcements of writes in place that a queue's thread writes to the log by itself, so that a
//! write waits for one operation of the device and for no other thread (decision 16).
//!
//! Their pages are part of the one chain, so a write may be made only when its page and all pages
//! before it are durable: after a crash the log ends at the first page that is missing. The pages of a
//! flush are of that chain too: what is announced while one is under way is over when the flush's
//! pages are durable, and doesn't wait for its anchor.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::super::pages::Page;
use super::failure::copy_error;
use super::journal::Mailbox;
use super::log::records_per_page;
use super::map::{Layout, Map};

/// Most pages of one announcement: no more than any store takes in one write.
const PAGES_MAX: usize = 32;

/// An announcement that is over: whom to tell, under which name, and how it ended.
pub type Told = (Arc<Mailbox>, u64, io::Result<()>);

/// Pages to be written durably, side by side.
#[derive(Debug)]
pub struct Announcement {
    /// What [`Map::end_announcement`] wants to hear.
    pub number: u64,
    /// First page's place.
    pub place: u64,
    /// The pages.
    pub pages: Vec<Page>,
    /// Whether table or log are so full that a merge is due.
    pub is_merge_due: bool,
}

/// What becomes of writes that want to be announced.
#[derive(Debug)]
pub enum Begun {
    /// They are announced when these pages are durable, and those before them.
    Afloat(Announcement),
    /// The log has them already, durably.
    Nothing,
    /// The log has them on pages that are on their way: told as any other announcement.
    Waiting,
    /// Somebody else has the log, or room must be made in it: the store's thread has to be asked.
    Busy,
}

/// Pages on their way.
#[derive(Debug)]
struct Entry {
    number: u64,
    /// Whom to tell that they are over, under which name; None: who wrote them waits for it.
    mailbox: Option<(Arc<Mailbox>, u64)>,
    /// How their own write ended.
    ended: Option<io::Result<()>>,
}

#[derive(Debug, Default)]
struct Inner {
    /// In the order of their pages.
    entries: VecDeque<Entry>,
    next: u64,
    /// Why a page is missing, if one is: none behind it counts.
    failure: Option<io::Error>,
    /// Who waits for some to be over.
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

/// Pages of the log on their way to the device.
#[derive(Default)]
pub(super) struct Afloat {
    inner: Mutex<Inner>,
    /// The first ones are over.
    over: Condvar,
    /// Where one thread plays all others: has them go on, since whoever waits here waits for them.
    #[cfg(test)]
    others: Mutex<Option<Others>>,
}

/// What the other threads do while one waits for their pages.
#[cfg(test)]
pub(super) type Others = Box<dyn FnMut() + Send>;

impl std::fmt::Debug for Afloat {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Afloat").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl Afloat {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds pages behind all others; their number. `mailbox`: whom to tell, under which name.
    pub fn begin(&self, mailbox: Option<(&Arc<Mailbox>, u64)>) -> u64 {
        self.lock().push(mailbox, None)
    }

    /// Has somebody told when all that is on its way now is over. False: nothing is.
    fn join(&self, mailbox: &Arc<Mailbox>, name: u64) -> bool {
        let mut inner = self.lock();
        let is_any = !inner.entries.is_empty();
        if is_any {
            inner.push(Some((mailbox, name)), Some(Ok(())));
        }
        is_any
    }

    /// Some have ended by themselves: whom to tell that theirs are over thereby.
    pub fn end(&self, number: u64, result: io::Result<()>) -> Vec<Told> {
        let mut inner = self.lock();
        if let Some(entry) = inner.entries.iter_mut().find(|entry| entry.number == number) {
            entry.ended = Some(result);
        }
        let mut told = Vec::new();
        let before = inner.entries.len();
        while let Some(first) = inner.entries.front_mut()
            && let Some(ended) = first.ended.take()
        {
            if let Err(error) = ended {
                inner.failure.get_or_insert(error);
            }
            let result = inner.failure.as_ref().map_or(Ok(()), |error| Err(copy_error(error)));
            let first = inner.entries.pop_front().and_then(|first| first.mailbox);
            told.extend(first.map(|(mailbox, name)| (mailbox, name, result)));
        }
        if inner.waiters > 0 && inner.entries.len() < before {
            self.over.notify_all();
        }
        told
    }

    /// Waits until all pages before these are over.
    pub fn wait_for(&self, number: u64) {
        self.wait_while(|entries| entries.front().is_some_and(|first| first.number < number));
    }

    /// Waits until there are none. Whoever could add some must be kept from it.
    pub fn wait_for_none(&self) {
        self.wait_while(|entries| !entries.is_empty());
    }

    /// Has others go on whenever somebody waits for pages of theirs.
    #[cfg(test)]
    pub fn set_others(&self, others: Option<Others>) {
        *self.others.lock().unwrap_or_else(PoisonError::into_inner) = others;
    }

    /// Lets the others go on, if one thread plays them all.
    ///
    /// # Panics
    /// If the pages are still on their way then: this thread would wait for itself.
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
    /// Pages that announce the writes of which these are the first blocks, for a queue to write them
    /// durably by itself. [`Map::end_announcement`] says when they are announced: to `mailbox` under
    /// `name`. Never blocks.
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
        // What became unwritten before a write was announced comes before it in the log.
        let mut records = std::mem::take(&mut state.waiting);
        state.intents.announce(writes, &mut records);
        if records.is_empty() {
            // A flush may have taken them along that is still under way.
            let is_on_its_way = self.afloat.join(mailbox, name);
            return Ok(if is_on_its_way { Begun::Waiting } else { Begun::Nothing });
        }
        state.take_pages(log.next, [records.len()], per_page);
        let is_merge_due = self.wants_merge(&log, &state);
        drop(state);
        let pages = self.next_pages(&mut log, &records);
        let number = self.afloat.begin(Some((mailbox, name)));
        Ok(Begun::Afloat(Announcement { number, place, pages, is_merge_due }))
    }

    /// The write of an announcement's pages has ended: those that are over thereby. An error fails
    /// the store: nobody knows what its log has.
    pub fn end_announcement(&self, number: u64, result: io::Result<()>) -> Vec<Told> {
        let result = self.guard(result);
        self.afloat.end(number, result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::ring::event;
    use super::*;

    fn mailbox() -> Arc<Mailbox> {
        Arc::new(Mailbox::new(event().expect("event")))
    }

    /// Names that are over, and whether well.
    fn told(told: Vec<Told>) -> Vec<(u64, bool)> {
        told.into_iter().map(|(_, name, result)| (name, result.is_ok())).collect()
    }

    #[test]
    fn an_announcement_is_over_when_all_pages_before_it_are_durable() {
        let (afloat, mailbox) = (Afloat::default(), mailbox());
        let numbers: Vec<u64> = (10..13).map(|name| afloat.begin(Some((&mailbox, name)))).collect();
        assert_eq!(told(afloat.end(numbers[2], Ok(()))), []);
        assert_eq!(told(afloat.end(numbers[0], Ok(()))), [(10, true)]);
        assert_eq!(told(afloat.end(numbers[1], Ok(()))), [(11, true), (12, true)]);
    }

    #[test]
    fn a_page_that_is_missing_fails_all_behind_it_whenever_they_end() {
        let (afloat, mailbox) = (Afloat::default(), mailbox());
        let numbers: Vec<u64> = (10..14).map(|name| afloat.begin(Some((&mailbox, name)))).collect();
        assert_eq!(told(afloat.end(numbers[0], Ok(()))), [(10, true)]);
        assert_eq!(told(afloat.end(numbers[2], Ok(()))), []);
        let failed = afloat.end(numbers[1], Err(io::Error::other("no power")));
        assert_eq!(told(failed), [(11, false), (12, false)]);
        assert_eq!(told(afloat.end(numbers[3], Ok(()))), [(13, false)]);
    }

    #[test]
    fn who_joins_is_told_with_the_last_that_was_there() {
        let (afloat, mailbox) = (Afloat::default(), mailbox());
        assert!(!afloat.join(&mailbox, 10), "nothing is on its way");
        let numbers = [afloat.begin(None), afloat.begin(Some((&mailbox, 11)))];
        assert!(afloat.join(&mailbox, 12));
        assert_eq!(told(afloat.end(numbers[1], Ok(()))), []);
        assert_eq!(told(afloat.end(numbers[0], Ok(()))), [(11, true), (12, true)]);
    }

    #[test]
    #[should_panic(expected = "waits for log pages that nobody writes")]
    fn a_thread_that_plays_all_others_does_not_wait_for_itself() {
        let (afloat, mailbox) = (Afloat::default(), mailbox());
        afloat.begin(Some((&mailbox, 1)));
        afloat.set_others(Some(Box::new(|| ())));
        afloat.wait_for_none();
    }

    #[test]
    fn who_waits_for_pages_is_told_when_those_before_them_are_over() {
        let (afloat, mailbox) = (Afloat::default(), mailbox());
        let first = afloat.begin(Some((&mailbox, 1)));
        let own = afloat.begin(None);
        let behind = afloat.begin(Some((&mailbox, 2)));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| afloat.wait_for(own));
            let all = scope.spawn(|| afloat.wait_for_none());
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!waiting.is_finished());
            afloat.end(first, Ok(()));
            waiting.join().expect("waited");
            assert!(!all.is_finished(), "others are there");
            assert_eq!(told(afloat.end(own, Ok(()))), []);
            assert_eq!(told(afloat.end(behind, Ok(()))), [(2, true)]);
        });
    }
}
