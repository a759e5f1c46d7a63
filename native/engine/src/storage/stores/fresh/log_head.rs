//! Where the log stands. Pages are given their places under a lock that nobody holds across I/O, and
//! written side by side afterwards: by the store's thread and by queues that announce writes in place.

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

/// Where the log stands, and what of it is flushed. Taken after [`Writer`] and before the map's state.
#[derive(Debug)]
pub(super) struct LogHead {
    pub epoch: u64,
    pub key: PageKey,
    /// First page that the last checkpoint goes on from, and the tag of the one before.
    pub start: (u64, Tag),
    /// First page that the oldest checkpoint goes on from which may still be wanted.
    pub kept: u64,
    /// The next page's number, and the tag of the one before.
    pub next: u64,
    pub tag: Tag,
    /// Pages before this one are flushed; and the tag of the last of them.
    pub flushed: (u64, Tag),
}

/// Pages that have their places, and are over when they and all before them are durable.
#[derive(Debug)]
pub(super) struct Run {
    /// Among those afloat.
    number: u64,
    first: u64,
    pub pages: Vec<Page>,
}

impl<F: Layout> Map<F> {
    pub(super) fn log(&self) -> MutexGuard<'_, LogHead> {
        self.log_head.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the log has room for so many pages, and one more: changes may come while this looks.
    pub(super) fn has_log_room(&self, log: &LogHead, pages: u64) -> bool {
        log.next - log.kept + pages < self.log_usable()
    }

    /// Gives the records the next pages. [`Map::end_run`] must follow, whatever happens.
    pub(super) fn begin_run(&self, log: &mut LogHead, records: &[Record<F::Entry>]) -> Run {
        let first = log.next;
        let pages = self.next_pages(log, records);
        Run { number: self.afloat.begin(None), first, pages }
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

    /// The pages of a run are durable, or `written` says why not. Waits until all before them are, and
    /// tells whose announcements are over thereby. An error fails the store.
    pub(super) fn end_run(&self, run: &Run, written: io::Result<()>) -> io::Result<()> {
        let written = self.guard(written);
        self.afloat.wait_for(run.number);
        let result = written.as_ref().copied().map_err(copy_error);
        for (mailbox, name, result) in self.afloat.end(run.number, result) {
            mailbox.put(name, result);
        }
        written?;
        self.state().check()
    }

    /// Writes pages to the log of a store that nobody uses, which a sync must follow.
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

    /// The next pages of the log, which have these records.
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

    /// For who asks without waiting for the log.
    pub(super) fn note_log_used(&self, log: &LogHead) {
        self.counters.log_used.store(log.next - log.kept, Ordering::Relaxed);
    }

    /// The log once no page of it is on its way to the device; none is added while it is held. Who has
    /// the writer has no page on its way.
    pub(super) fn quiet_log(&self, _writer: &Writer<F::Entry>) -> MutexGuard<'_, LogHead> {
        let log = self.log();
        self.afloat.wait_for_none();
        log
    }
}
