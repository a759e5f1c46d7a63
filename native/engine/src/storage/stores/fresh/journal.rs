//! Makes a store's changes durable and merges them, on a thread while there is something to do.
//! Channels ask it for flushes and for room, and one flush answers all requests from before it
//! began. Merges run in steps between flushes.
//!
//! The threads are those of [`THREADS`]. A store waits there for its device, its anchor and its
//! queues, never for another store's journal.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::super::ring::{clear, signal};
use super::failure::copy_error;
use super::map::{Layout, Map};
use crate::storage::threads::Threads;

/// How long a journal keeps its thread after its last request, so that a busy one never changes it.
const LINGER: Duration = Duration::from_millis(50);

/// The threads of all journals.
static THREADS: Threads = Threads::new("store-journal");

/// Where a channel finds the answers to its requests.
#[derive(Debug)]
pub struct Mailbox {
    mail: Mutex<Mail>,
    event: Arc<OwnedFd>,
}

#[derive(Debug, Default)]
struct Mail {
    ends: Vec<(u64, io::Result<()>)>,
    /// Whether the event was signalled for them.
    is_signalled: bool,
}

impl Mailbox {
    /// An empty mailbox, which signals `event` when it is no longer empty.
    #[must_use]
    pub fn new(event: Arc<OwnedFd>) -> Self {
        Self { mail: Mutex::default(), event }
    }

    fn lock(&self) -> MutexGuard<'_, Mail> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all answers.
    pub fn take(&self) -> Vec<(u64, io::Result<()>)> {
        let mut mail = self.lock();
        if std::mem::take(&mut mail.is_signalled) {
            clear(&self.event);
        }
        std::mem::take(&mut mail.ends)
    }

    /// Adds an answer.
    pub fn put(&self, operation: u64, result: io::Result<()>) {
        let mut mail = self.lock();
        mail.ends.push((operation, result));
        // Whoever is signalled for the first answer takes all.
        if !std::mem::replace(&mut mail.is_signalled, true) {
            signal(&self.event);
        }
    }
}

#[derive(Debug, Default)]
struct Wanted {
    /// At most one for every operation in flight on a channel.
    flushes: Vec<(Arc<Mailbox>, u64)>,
    /// At most one for every operation in flight on a channel.
    announcements: Vec<(Arc<Mailbox>, u64)>,
    /// At most one for every channel.
    rooms: Vec<(Arc<Mailbox>, u64)>,
    is_background: bool,
    is_merge_due: bool,
    is_over: bool,
}

impl Wanted {
    fn is_nothing(&self) -> bool {
        let asked = [&self.flushes, &self.announcements, &self.rooms];
        let flags = [self.is_background, self.is_merge_due, self.is_over];
        asked.iter().all(|asked| asked.is_empty()) && !flags.contains(&true)
    }
}

/// What a journal does; the store's map.
trait Work: Send + Sync {
    /// Answers requests, and does a step of a merge if there is one to do.
    fn answer(&self, wanted: Wanted);
    /// Whether there is another step to do.
    fn is_merging(&self) -> bool;
    /// Makes everything durable, at the end.
    fn finish(&self);
}

/// Where the work is, which exactly one thread does at a time.
enum Place {
    /// Nobody does it: there is nothing to do.
    Resting(Arc<dyn Work>),
    /// A thread of [`THREADS`] does it, or will.
    Threads,
    /// It has ended.
    Ended,
}

/// Requests to a journal.
pub struct Requests {
    threads: &'static Threads,
    wanted: Mutex<(Wanted, Place)>,
    changed: Condvar,
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Requests").finish_non_exhaustive()
    }
}

impl Requests {
    fn lock(&self) -> MutexGuard<'_, (Wanted, Place)> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests a flush. The answer goes to the mailbox under the operation's id.
    pub fn flush(self: &Arc<Self>, mailbox: &Arc<Mailbox>, operation: u64) {
        self.ask(mailbox, operation, |wanted| &mut wanted.flushes);
    }

    /// Requests an announcement of all waiting writes in place, answered likewise.
    pub fn announce(self: &Arc<Self>, mailbox: &Arc<Mailbox>, operation: u64) {
        self.ask(mailbox, operation, |wanted| &mut wanted.announcements);
    }

    /// Requests room for further changes, answered likewise.
    pub fn room(self: &Arc<Self>, mailbox: &Arc<Mailbox>, operation: u64) {
        self.ask(mailbox, operation, |wanted| &mut wanted.rooms);
    }

    fn ask(
        self: &Arc<Self>,
        mailbox: &Arc<Mailbox>,
        operation: u64,
        queue: impl FnOnce(&mut Wanted) -> &mut Vec<(Arc<Mailbox>, u64)>,
    ) {
        if !self.want(|wanted| queue(wanted).push((Arc::clone(mailbox), operation))) {
            mailbox.put(operation, Err(closed()));
        }
    }

    /// Requests that waiting changes are written to the log, without an answer.
    pub fn write_back(self: &Arc<Self>) {
        self.want(|wanted| wanted.is_background = true);
    }

    /// Requests a check whether a merge is due, without an answer.
    pub fn merge(self: &Arc<Self>) {
        self.want(|wanted| wanted.is_merge_due = true);
    }

    /// Adds a request, and has a thread do the work if none does; false if the journal has ended.
    fn want(self: &Arc<Self>, add: impl FnOnce(&mut Wanted)) -> bool {
        let mut state = self.lock();
        let (wanted, place) = &mut *state;
        if wanted.is_over {
            return false;
        }
        add(wanted);
        match std::mem::replace(place, Place::Threads) {
            Place::Resting(work) => {
                drop(state);
                Turn { requests: Arc::clone(self), work: Some(work) }.pass_on();
            }
            Place::Threads => self.changed.notify_one(),
            Place::Ended => *place = Place::Ended,
        }
        true
    }

    /// Takes all requests. Waits for one for so long, unless the work `is_merging`; `None` if there
    /// was none, or if the journal ends.
    fn next(&self, is_merging: bool, linger: Duration) -> Option<Wanted> {
        let state = self.lock();
        let is_idle = |state: &mut (Wanted, Place)| !is_merging && state.0.is_nothing();
        let waited = self.changed.wait_timeout_while(state, linger, is_idle);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.0.is_over || is_idle(&mut state) {
            return None;
        }
        Some(std::mem::take(&mut state.0))
    }
}

fn closed() -> io::Error {
    io::Error::other("the store is closed")
}

/// The right to do a journal's work.
struct Turn {
    requests: Arc<Requests>,
    /// Present until it is handed over or back.
    work: Option<Arc<dyn Work>>,
}

impl Turn {
    /// Has a thread do the work.
    fn pass_on(self) {
        self.requests.threads.run(move || self.serve());
    }

    /// Works until there has been nothing to do for a while, or the journal ends.
    fn serve(self) {
        let threads = self.requests.threads;
        while let Some(work) = &self.work {
            // A journal without a request must not keep others waiting.
            let linger = if threads.is_scarce() { Duration::ZERO } else { LINGER };
            let Some(wanted) = self.requests.next(work.is_merging(), linger) else { break };
            work.answer(wanted);
            if threads.is_short() {
                return self.pass_on();
            }
        }
        self.give_back();
    }

    /// Lets the work rest, unless there is more to do meanwhile.
    fn give_back(mut self) {
        let requests = Arc::clone(&self.requests);
        let mut state = requests.lock();
        if !state.0.is_nothing() && !state.0.is_over {
            drop(state);
            return self.pass_on();
        }
        if let Some(work) = self.work.take() {
            state.1 = Place::Resting(work);
        }
        requests.changed.notify_all();
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.work.take().is_none() {
            return;
        }
        // A panic, which is a defect: nothing can be made durable any more.
        let mut state = self.requests.lock();
        state.1 = Place::Ended;
        let is_over = true;
        let wanted = std::mem::replace(&mut state.0, Wanted { is_over, ..Wanted::default() });
        drop(state);
        self.requests.changed.notify_all();
        for asked in [wanted.announcements, wanted.flushes, wanted.rooms] {
            answer(asked, &Err(closed()));
        }
    }
}

/// A store's journal. When this is dropped, it ends after handling all requests.
#[derive(Debug)]
pub struct Journal {
    requests: Arc<Requests>,
}

impl Journal {
    /// Creates it, without anything to do. Fails if it can't have a thread.
    pub fn start<F: Layout>(map: Arc<Map<F>>) -> io::Result<Self> {
        Self::on(&THREADS, map)
    }

    fn on(threads: &'static Threads, work: Arc<dyn Work>) -> io::Result<Self> {
        threads.prepare()?;
        let wanted = Mutex::new((Wanted::default(), Place::Resting(work)));
        let changed = Condvar::new();
        Ok(Self { requests: Arc::new(Requests { threads, wanted, changed }) })
    }

    /// Where to put requests.
    #[must_use]
    pub fn requests(&self) -> &Arc<Requests> {
        &self.requests
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let mut state = self.requests.lock();
        state.0.is_over = true;
        self.requests.changed.notify_all();
        let is_away = |state: &mut (Wanted, Place)| matches!(state.1, Place::Threads);
        let waited = self.requests.changed.wait_while(state, is_away);
        state = waited.unwrap_or_else(PoisonError::into_inner);
        let place = std::mem::replace(&mut state.1, Place::Ended);
        let is_over = true;
        let wanted = std::mem::replace(&mut state.0, Wanted { is_over, ..Wanted::default() });
        drop(state);
        if let Place::Resting(work) = place {
            work.answer(wanted);
            work.finish();
        }
    }
}

impl<F: Layout> Work for Map<F> {
    fn answer(&self, wanted: Wanted) {
        if !wanted.announcements.is_empty() {
            answer(wanted.announcements, &self.announce());
        }
        if !wanted.flushes.is_empty() {
            answer(wanted.flushes, &self.flush());
        } else if wanted.is_background {
            // The next write or flush reports a failure.
            let _ = self.write_back();
        }
        if !wanted.rooms.is_empty() {
            answer(wanted.rooms, &self.make_room());
        }
        if wanted.is_over {
            return;
        }
        // The next write or flush reports a failure: the map refuses both from then on. If the
        // anchor doesn't answer, the next flush or merge tries again.
        if Map::is_merging(self) {
            let _ = self.merge_step();
        } else if self.is_merge_due() {
            let _ = self.begin_merge();
        }
    }

    fn is_merging(&self) -> bool {
        Map::is_merging(self)
    }

    fn finish(&self) {
        // Changes that can't be made durable here were never acknowledged as durable.
        let _ = Map::finish(self);
    }
}

fn answer(asked: Vec<(Arc<Mailbox>, u64)>, result: &io::Result<()>) {
    for (mailbox, operation) in asked {
        mailbox.put(operation, result.as_ref().copied().map_err(copy_error));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::super::ring::event;
    use super::*;

    /// Work that is done at once.
    struct Brief;

    impl Work for Brief {
        fn answer(&self, wanted: Wanted) {
            answer(wanted.flushes, &Ok(()));
        }

        fn is_merging(&self) -> bool {
            false
        }

        fn finish(&self) {}
    }

    fn flush_all(journals: &[Journal], mailbox: &Arc<Mailbox>) {
        for journal in journals {
            journal.requests().flush(mailbox, 0);
        }
        let mut missing = journals.len();
        while missing > 0 {
            missing -= mailbox.take().len();
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    #[test]
    fn without_another_thread_no_journal_keeps_one_while_it_is_idle() {
        let threads = Box::leak(Box::new(Threads::limited("test", 1)));
        let mailbox = Arc::new(Mailbox::new(event().unwrap()));
        let journals: Vec<_> =
            (0..8).map(|_| Journal::on(threads, Arc::new(Brief)).unwrap()).collect();
        let begun = Instant::now();
        // In turn, then all at once.
        for _ in 0..5 {
            for journal in journals.chunks(1) {
                flush_all(journal, &mailbox);
            }
        }
        for _ in 0..5 {
            flush_all(&journals, &mailbox);
        }
        // The first one lingers, as no thread was refused before.
        assert!(begun.elapsed() < 10 * LINGER, "{:?}", begun.elapsed());
    }
}
