//! The thread that makes a store's changes durable and merges them. Channels ask it for flushes and
//! for room, and one flush answers all requests from before it began. Merges run in steps between
//! flushes.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::super::ring::{clear, signal};
use super::failure::copy_error;
use super::map::{Layout, Map};
use crate::clock::sharpen_timers;

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

/// Requests to the thread.
#[derive(Debug, Default)]
pub struct Requests {
    wanted: Mutex<Wanted>,
    changed: Condvar,
}

impl Requests {
    fn lock(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests a flush. The answer goes to the mailbox under the operation's id.
    pub fn flush(&self, mailbox: &Arc<Mailbox>, operation: u64) {
        self.ask(mailbox, operation, |wanted| &mut wanted.flushes);
    }

    /// Requests an announcement of all waiting writes in place, answered likewise.
    pub fn announce(&self, mailbox: &Arc<Mailbox>, operation: u64) {
        self.ask(mailbox, operation, |wanted| &mut wanted.announcements);
    }

    /// Requests room for further changes, answered likewise.
    pub fn room(&self, mailbox: &Arc<Mailbox>, operation: u64) {
        self.ask(mailbox, operation, |wanted| &mut wanted.rooms);
    }

    fn ask(
        &self,
        mailbox: &Arc<Mailbox>,
        operation: u64,
        queue: impl FnOnce(&mut Wanted) -> &mut Vec<(Arc<Mailbox>, u64)>,
    ) {
        let mut wanted = self.lock();
        if wanted.is_over {
            drop(wanted);
            mailbox.put(operation, Err(io::Error::other("the store is closed")));
            return;
        }
        queue(&mut wanted).push((Arc::clone(mailbox), operation));
        self.changed.notify_one();
    }

    /// Requests that waiting changes are written to the log, without an answer.
    pub fn write_back(&self) {
        self.lock().is_background = true;
        self.changed.notify_one();
    }

    /// Requests a check whether a merge is due, without an answer.
    pub fn merge(&self) {
        self.lock().is_merge_due = true;
        self.changed.notify_one();
    }

    /// Takes all requests. If `is_idle`, waits until there is one.
    fn next(&self, is_idle: bool) -> Wanted {
        let mut wanted = self.lock();
        while is_idle && wanted.is_nothing() {
            wanted = self.changed.wait(wanted).unwrap_or_else(PoisonError::into_inner);
        }
        let is_over = wanted.is_over;
        std::mem::replace(&mut *wanted, Wanted { is_over, ..Wanted::default() })
    }
}

/// The running thread. When this is dropped, it ends after handling all requests.
#[derive(Debug)]
pub struct Journal {
    requests: Arc<Requests>,
    thread: Option<JoinHandle<()>>,
}

impl Journal {
    /// Starts the thread.
    pub fn start<F: Layout>(map: Arc<Map<F>>) -> io::Result<Self> {
        let requests = Arc::new(Requests::default());
        let for_thread = Arc::clone(&requests);
        let run = move || run(&map, &for_thread);
        let thread = std::thread::Builder::new().name("store-journal".into()).spawn(run)?;
        Ok(Self { requests, thread: Some(thread) })
    }

    /// Where to put requests.
    #[must_use]
    pub fn requests(&self) -> &Arc<Requests> {
        &self.requests
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.requests.lock().is_over = true;
        self.requests.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic would be a defect, and was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn run<F: Layout>(map: &Map<F>, requests: &Requests) {
    sharpen_timers();
    loop {
        let wanted = requests.next(!map.is_merging());
        if !wanted.announcements.is_empty() {
            answer(wanted.announcements, &map.announce());
        }
        if !wanted.flushes.is_empty() {
            answer(wanted.flushes, &map.flush());
        } else if wanted.is_background {
            // The next write or flush reports a failure.
            let _ = map.write_back();
        }
        if !wanted.rooms.is_empty() {
            answer(wanted.rooms, &map.make_room());
        }
        if wanted.is_over {
            // Changes that can't be made durable here were never acknowledged as durable.
            let _ = map.finish();
            return;
        }
        // The next write or flush reports a failure: the map refuses both from then on. If the
        // anchor doesn't answer, the next flush or merge tries again.
        if map.is_merging() {
            let _ = map.merge_step();
        } else if map.is_merge_due() {
            let _ = map.begin_merge();
        }
    }
}

fn answer(asked: Vec<(Arc<Mailbox>, u64)>, result: &io::Result<()>) {
    for (mailbox, operation) in asked {
        mailbox.put(operation, result.as_ref().copied().map_err(copy_error));
    }
}
