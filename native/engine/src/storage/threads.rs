//! Threads for work that comes and goes. A thread without work waits for some for a while and then
//! ends, so idle volumes own none.
//!
//! Work that waits for a thread never waits for other work: there is a thread for each piece, unless
//! the system refuses one. Then work queues, and runs in the order in which it came: at least one
//! thread remains, and long work is asked to make room ([`Threads::is_short`]). Work must therefore
//! not wait for other work of the same `Threads`.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::sharpen_timers;

/// How long a thread waits for work before it ends.
const IDLE: Duration = Duration::from_secs(1);

type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    waiting: VecDeque<Work>,
    /// Number of threads, and of those that wait for work.
    threads: usize,
    idle: usize,
}

/// Threads of one kind.
pub struct Threads {
    name: &'static str,
    limit: usize,
    state: Mutex<State>,
    changed: Condvar,
    is_short: AtomicBool,
    /// Whether the system refused the last thread that it was asked for.
    was_refused: AtomicBool,
}

impl Threads {
    /// No threads yet; they will have this name.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self::limited(name, usize::MAX)
    }

    /// As [`Threads::new`], as if the system allowed so many threads.
    pub(crate) const fn limited(name: &'static str, limit: usize) -> Self {
        Self {
            name,
            limit,
            state: Mutex::new(State { waiting: VecDeque::new(), threads: 0, idle: 0 }),
            changed: Condvar::new(),
            is_short: AtomicBool::new(false),
            was_refused: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that there is a thread: from then on [`Threads::run`] runs all work.
    pub fn prepare(&'static self) -> io::Result<()> {
        let mut state = self.lock();
        if state.threads == 0 { self.start(&mut state) } else { Ok(()) }
    }

    /// Runs work on a thread, and never blocks for long. Requires [`Threads::prepare`].
    pub fn run(&'static self, work: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        state.waiting.push_back(Box::new(work));
        // A thread that was woken for earlier work still counts as idle until it takes that.
        if state.waiting.len() <= state.idle {
            self.changed.notify_one();
        } else if self.start(&mut state).is_err() {
            self.is_short.store(true, Ordering::Relaxed);
        }
    }

    /// Whether work waits because the system refused a thread: then work that has more to do should
    /// come again by [`Threads::run`] and end.
    pub fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
    }

    /// Whether work waits, or would wait, for a thread: then work that has nothing to do should end,
    /// instead of waiting on its thread for more.
    pub fn is_scarce(&self) -> bool {
        self.is_short() || self.was_refused.load(Ordering::Relaxed)
    }

    /// The lock is held, so that the last thread doesn't end meanwhile.
    fn start(&'static self, state: &mut State) -> io::Result<()> {
        let started = if state.threads < self.limit {
            std::thread::Builder::new().name(self.name.into()).spawn(|| self.work())
        } else {
            Err(io::ErrorKind::QuotaExceeded.into())
        };
        self.was_refused.store(started.is_err(), Ordering::Relaxed);
        started?;
        state.threads += 1;
        Ok(())
    }

    fn work(&self) {
        sharpen_timers();
        while let Some(work) = self.next() {
            // A panic is a defect, and was reported when it happened. Other work goes on.
            let _ = catch_unwind(AssertUnwindSafe(work));
        }
    }

    /// Waits for work; `None` if the thread must end.
    fn next(&self) -> Option<Work> {
        let mut state = self.lock();
        let mut has_waited = false;
        loop {
            if let Some(work) = state.waiting.pop_front() {
                if state.waiting.is_empty() {
                    self.is_short.store(false, Ordering::Relaxed);
                }
                return Some(work);
            }
            if has_waited && state.threads > 1 {
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            state = if state.threads == 1 {
                self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                let waited = self.changed.wait_timeout(state, IDLE);
                let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                has_waited = timeout.timed_out();
                state
            };
            state.idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::Instant;

    use super::*;

    fn leaked(limit: usize) -> &'static Threads {
        let threads = Box::leak(Box::new(Threads::limited("test", limit)));
        threads.prepare().unwrap();
        threads
    }

    #[test]
    fn work_that_waits_has_a_thread_each_and_idle_threads_end_except_one() {
        let threads = leaked(usize::MAX);
        let (done, ended) = channel();
        let releases: Vec<_> = (0..20)
            .map(|_| {
                let (release, released) = channel::<()>();
                let done = done.clone();
                threads.run(move || {
                    released.recv().unwrap();
                    done.send(()).unwrap();
                });
                release
            })
            .collect();
        // The last comes first: none waits for another one's thread.
        for release in releases.iter().rev() {
            release.send(()).unwrap();
            ended.recv_timeout(Duration::from_secs(10)).unwrap();
        }
        let begun = Instant::now();
        while threads.lock().threads > 1 {
            assert!(begun.elapsed() < 10 * IDLE, "{} threads", threads.lock().threads);
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(IDLE * 3 / 2);
        assert_eq!(threads.lock().threads, 1);
    }

    #[test]
    fn without_another_thread_work_runs_in_turn() {
        /// Work without an end.
        fn repeat(threads: &'static Threads, done: Sender<bool>) {
            while done.send(false).is_ok() {
                if threads.is_short() {
                    return threads.run(move || repeat(threads, done));
                }
            }
        }
        let threads = leaked(1);
        let (done, ends) = channel();
        let other = done.clone();
        threads.run(move || repeat(threads, done));
        assert!(!ends.recv().unwrap());
        threads.run(move || other.send(true).unwrap());
        let begun = Instant::now();
        while !ends.recv().unwrap() {
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "work without an end has starved it"
            );
        }
    }

    #[test]
    fn a_panic_ends_its_work_only() {
        let threads = leaked(1);
        threads.run(|| panic!("on purpose"));
        let (done, ended) = channel();
        threads.run(move || done.send(()).unwrap());
        ended.recv_timeout(Duration::from_secs(10)).unwrap();
    }
}
