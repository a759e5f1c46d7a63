//! The thread that writes the log and the checkpoints of a sealed file store: channels ask it for
//! a flush, and one flush answers all who asked before it began.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::ring::{copy_error, tell};
use super::sealed_map::SealedMap;

/// Where a channel finds the ends of the flushes that it asked for.
#[derive(Debug)]
pub struct Mailbox {
    ends: Mutex<Vec<(u64, io::Result<()>)>>,
    event: Arc<OwnedFd>,
}

impl Mailbox {
    /// An empty one; `event` is made readable with every end.
    #[must_use]
    pub fn new(event: Arc<OwnedFd>) -> Self {
        Self { ends: Mutex::default(), event }
    }

    /// Takes the ends so far.
    pub fn take(&self) -> Vec<(u64, io::Result<()>)> {
        std::mem::take(&mut *self.ends.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn put(&self, operation: u64, result: io::Result<()>) {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).push((operation, result));
        tell(&self.event);
    }
}

#[derive(Debug, Default)]
struct Wanted {
    /// At most one for every operation in flight on a channel.
    flushes: Vec<(Arc<Mailbox>, u64)>,
    is_background: bool,
    is_over: bool,
}

/// What is asked of the thread.
#[derive(Debug, Default)]
pub struct Requests {
    wanted: Mutex<Wanted>,
    changed: Condvar,
}

impl Requests {
    fn lock(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for a flush; its end goes to the mailbox under the operation's name.
    pub fn flush(&self, mailbox: &Arc<Mailbox>, operation: u64) {
        let mut wanted = self.lock();
        if wanted.is_over {
            drop(wanted);
            mailbox.put(operation, Err(io::Error::other("the store is closed")));
            return;
        }
        wanted.flushes.push((Arc::clone(mailbox), operation));
        self.changed.notify_one();
    }

    /// Asks for a flush that nobody waits for.
    pub fn flush_in_background(&self) {
        self.lock().is_background = true;
        self.changed.notify_one();
    }

    fn next(&self) -> Wanted {
        let mut wanted = self.lock();
        while wanted.flushes.is_empty() && !wanted.is_background && !wanted.is_over {
            wanted = self.changed.wait(wanted).unwrap_or_else(PoisonError::into_inner);
        }
        let is_over = wanted.is_over;
        std::mem::replace(&mut *wanted, Wanted { is_over, ..Wanted::default() })
    }
}

/// The running thread; it ends when this is dropped, after what it was asked for.
#[derive(Debug)]
pub struct Journal {
    requests: Arc<Requests>,
    thread: Option<JoinHandle<()>>,
}

impl Journal {
    /// Starts the thread.
    pub fn start(map: Arc<SealedMap>) -> io::Result<Self> {
        let requests = Arc::new(Requests::default());
        let for_thread = Arc::clone(&requests);
        let run = move || run(&map, &for_thread);
        let thread = std::thread::Builder::new().name("store-journal".into()).spawn(run)?;
        Ok(Self { requests, thread: Some(thread) })
    }

    /// Where to ask.
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
            // It panics only by a defect, and that was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn run(map: &SealedMap, requests: &Requests) {
    loop {
        let wanted = requests.next();
        let result = map.flush();
        for (mailbox, operation) in &wanted.flushes {
            mailbox.put(*operation, result.as_ref().copied().map_err(copy_error));
        }
        // A failure is told to whoever writes or flushes next: the map refuses both from now on.
        if result.is_ok() && map.is_checkpoint_due() {
            let _ = map.checkpoint();
        }
        if wanted.is_over {
            return;
        }
    }
}
