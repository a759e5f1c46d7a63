//! The end of the log. Pages get their places under a lock that is never held across I/O. They are
//! then written concurrently, by the store's thread and by queues that announce writes in place.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use super::super::pages::Page;
use super::commit::Writer;
use super::counters::count;
use super::failure::copy_error;
use super::keys::{PageKey, Tag};
use super::log::{LogPage, Record, records_per_page};
use super::map::{Layout, Map};

/// The end of the log, and how far it is flushed. Locked after [`Writer`] and before the map's
/// state.
#[derive(Debug)]
pub(super) struct LogHead {
    pub epoch: u64,
    pub key: PageKey,
    /// First log page of the last checkpoint, and the tag of the page before it.
    pub start: (u64, Tag),
    /// First log page of the oldest checkpoint that may still be needed.
    pub kept: u64,
    /// Number of the next page, and the tag of the page before it.
    pub next: u64,
    pub tag: Tag,
    /// Pages before this one are flushed; and the tag of the last of those.
    pub flushed: (u64, Tag),
}

/// Pages with places in the log. They complete once they and all pages before them are durable.
#[derive(Debug)]
pub(super) struct Run {
    /// Number among the pages in flight.
    number: u64,
    first: u64,
    pub pages: Vec<Page>,
}

impl<F: Layout> Map<F> {
    pub(super) fn log(&self) -> MutexGuard<'_, LogHead> {
        self.log_head.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the log has room for `pages` more and one in reserve: changes may be added after
    /// this check.
    pub(super) fn has_log_room(&self, log: &LogHead, pages: u64) -> bool {
        log.next - log.kept + pages < self.log_usable()
    }

    /// Assigns the next pages to the records. [`Map::end_run`] must follow in any case.
    pub(super) fn begin_run(&self, log: &mut LogHead, records: &[Record<F::Entry>]) -> Run {
        let first = log.next;
        let pages = self.next_pages(log, records);
        Run { number: self.log_in_flight.begin(None), first, pages }
    }

    /// Writes the pages of a run.
    pub(super) fn write_run(
        &self,
        run: &Run,
        write: impl Fn(u64, &[Page]) -> io::Result<()>,
    ) -> io::Result<()> {
        let to_wrap = (self.geometry.log_pages - run.first % self.geometry.log_pages) as usize;
        let (pages, wrapped) = run.pages.split_at(to_wrap.min(run.pages.len()));
        if !pages.is_empty() {
            write(self.geometry.log(run.first), pages)?;
        }
        if wrapped.is_empty() { Ok(()) } else { write(self.geometry.log(0), wrapped) }
    }

    /// Records that the pages of a run are durable, or the error in `written`. Waits until all
    /// pages before them are durable, and reports announcements that are thereby complete. An error
    /// fails the store.
    pub(super) fn end_run(&self, run: &Run, written: io::Result<()>) -> io::Result<()> {
        let written = self.guard(written);
        self.log_in_flight.wait_for(run.number);
        let result = written.as_ref().copied().map_err(copy_error);
        for (mailbox, name, result) in self.log_in_flight.end(run.number, result) {
            mailbox.put(name, result);
        }
        written?;
        self.state().check()
    }

    /// Appends pages to the log of a store that isn't in use yet. A sync must follow.
    pub(super) fn append(&self, records: &[Record<F::Entry>]) -> io::Result<()> {
        let run = {
            let mut log = self.log();
            let run = self.begin_run(&mut log, records);
            self.state().log_taken = log.next;
            run
        };
        let written = self.write_run(&run, |place, pages| self.file.write(place, pages));
        self.end_run(&run, written)
    }

    /// Encodes the next pages of the log, with these records.
    pub(super) fn next_pages(&self, log: &mut LogHead, records: &[Record<F::Entry>]) -> Vec<Page> {
        let sequence = self.sequence.load(Ordering::Relaxed);
        let next = |records: &[Record<F::Entry>]| {
            let page = LogPage {
                epoch: log.epoch,
                number: log.next,
                flushed: log.flushed.0,
                sequence,
                previous: log.tag,
                records: records.to_vec(),
            };
            let (page, tag) = page.encode::<F>(&log.key);
            log.tag = tag;
            log.next += 1;
            page
        };
        let pages: Vec<Page> = records.chunks(records_per_page::<F>()).map(next).collect();
        count(&self.counters.log_pages, pages.len() as u64);
        self.note_log_used(log);
        pages
    }

    /// Updates the counter for readers that don't lock the log.
    pub(super) fn note_log_used(&self, log: &LogHead) {
        self.counters.log_used.store(log.next - log.kept, Ordering::Relaxed);
    }

    /// Locks the log once no page of it is in flight. None is added while the lock is held. The
    /// holder of the writer has no pages in flight.
    pub(super) fn quiet_log(&self, _writer: &Writer<F::Entry>) -> MutexGuard<'_, LogHead> {
        let log = self.log();
        self.log_in_flight.wait_for_none();
        log
    }
}
