//! Announcements of writes in place that a queue's thread writes to the log by itself, so that a
//! write waits for one operation of the device and for no other thread (decision 16).
//!
//! Their pages are part of the one chain, so a write may be made only when its page and all pages
//! before it are durable: after a crash the log ends at the first page that is missing. Whoever else
//! writes to the log waits until none is afloat.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::super::pages::Page;
use super::commit::Writer;
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
    /// The log has them already.
    Nothing,
    /// The store's thread has the log, or must make room in it: it has to be asked.
    Busy,
}

/// One announcement on its way.
#[derive(Debug)]
struct Entry {
    number: u64,
    mailbox: Arc<Mailbox>,
    name: u64,
    /// How its own write ended.
    ended: Option<io::Result<()>>,
}

#[derive(Debug, Default)]
struct Inner {
    /// In the order of their pages.
    entries: VecDeque<Entry>,
    next: u64,
    /// Why a page is missing, if one is: none behind it counts.
    failure: Option<io::Error>,
}

/// Announcements on their way.
#[derive(Debug, Default)]
pub(super) struct Afloat {
    inner: Mutex<Inner>,
    none: Condvar,
}

impl Afloat {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds one behind all others; its number.
    fn begin(&self, mailbox: &Arc<Mailbox>, name: u64) -> u64 {
        let mut inner = self.lock();
        inner.next += 1;
        let number = inner.next;
        inner.entries.push_back(Entry { number, mailbox: Arc::clone(mailbox), name, ended: None });
        number
    }

    /// One has ended by itself: those that are over thereby.
    fn end(&self, number: u64, result: io::Result<()>) -> Vec<Told> {
        let mut inner = self.lock();
        if let Some(entry) = inner.entries.iter_mut().find(|entry| entry.number == number) {
            entry.ended = Some(result);
        }
        let mut told = Vec::new();
        while let Some(first) = inner.entries.front_mut()
            && let Some(ended) = first.ended.take()
        {
            if let Err(error) = ended {
                inner.failure.get_or_insert(error);
            }
            let result = inner.failure.as_ref().map_or(Ok(()), |error| Err(copy_error(error)));
            let first = inner.entries.pop_front();
            told.extend(first.map(|first| (first.mailbox, first.name, result)));
        }
        if inner.entries.is_empty() {
            self.none.notify_all();
        }
        told
    }

    /// Waits until there is none. Whoever could add one must be kept from it.
    fn wait_for_none(&self) {
        let mut inner = self.lock();
        while !inner.entries.is_empty() {
            inner = self.none.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<F: Layout> Map<F> {
    /// The log and what else the store's thread has, once no announcement is afloat: its own pages
    /// must not be durable before those.
    pub(super) fn writing(&self) -> MutexGuard<'_, Writer<F::Entry>> {
        let writer = self.writer();
        self.afloat.wait_for_none();
        writer
    }

    /// Pages that announce the writes of which these are the first blocks, for a queue to write them
    /// durably by itself. [`Map::end_announcement`] says when they are announced: to `mailbox` under
    /// `name`. Never blocks.
    pub fn begin_announcement(
        &self,
        writes: &[u64],
        mailbox: &Arc<Mailbox>,
        name: u64,
    ) -> io::Result<Begun> {
        let Ok(mut writer) = self.writer.try_lock() else { return Ok(Begun::Busy) };
        let mut state = self.state();
        state.check()?;
        let per_page = records_per_page::<F>();
        let records = state.waiting.len() + state.intents.unlogged_blocks(writes);
        let pages = records.div_ceil(per_page);
        let place = self.geometry.log(writer.log_next);
        let is_one_run = self.geometry.log(writer.log_next + pages as u64) == place + pages as u64;
        if pages > PAGES_MAX || !is_one_run || !self.has_log_room(&writer, pages as u64) {
            return Ok(Begun::Busy);
        }
        // What became unwritten before a write was announced comes before it in the log.
        let mut records = std::mem::take(&mut state.waiting);
        state.intents.announce(writes, &mut records);
        drop(state);
        if records.is_empty() {
            return Ok(Begun::Nothing);
        }
        let pages = self.next_pages(&mut writer, &records);
        let number = self.afloat.begin(mailbox, name);
        let is_merge_due = writer.merge.is_none() && self.wants_merge(&writer, &self.state());
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
        let numbers: Vec<u64> = (10..13).map(|name| afloat.begin(&mailbox, name)).collect();
        assert_eq!(told(afloat.end(numbers[2], Ok(()))), []);
        assert_eq!(told(afloat.end(numbers[0], Ok(()))), [(10, true)]);
        assert_eq!(told(afloat.end(numbers[1], Ok(()))), [(11, true), (12, true)]);
    }

    #[test]
    fn a_page_that_is_missing_fails_all_behind_it_whenever_they_end() {
        let (afloat, mailbox) = (Afloat::default(), mailbox());
        let numbers: Vec<u64> = (10..14).map(|name| afloat.begin(&mailbox, name)).collect();
        assert_eq!(told(afloat.end(numbers[0], Ok(()))), [(10, true)]);
        assert_eq!(told(afloat.end(numbers[2], Ok(()))), []);
        let failed = afloat.end(numbers[1], Err(io::Error::other("no power")));
        assert_eq!(told(failed), [(11, false), (12, false)]);
        assert_eq!(told(afloat.end(numbers[3], Ok(()))), [(13, false)]);
    }

    #[test]
    fn who_writes_to_the_log_waits_until_none_is_afloat() {
        let (afloat, mailbox) = (Afloat::default(), mailbox());
        let number = afloat.begin(&mailbox, 1);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| afloat.wait_for_none());
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!waiting.is_finished());
            afloat.end(number, Ok(()));
        });
        afloat.wait_for_none();
    }
}
