//! A background job: its thread, and its control by others.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::PollFlags;
use sealane_proto::link::Nanos;

use super::pace::{Courtesy, HOLD, Pace};
use super::status::{JobKind, JobState, JobStatus};
use super::{JobStart, Order};
use crate::clock;
use crate::storage::connection::wait;
use crate::storage::events::StorageEvent;
use crate::storage::stores::fresh::failure::reason_of;
use crate::storage::target::mailbox::{Mailbox, Message, Waiter};
use crate::storage::target::namespace::Namespace;
use crate::storage::target::range_lock::{Acquired, LockId, Mode};
use crate::storage::upkeep::{Report, Upkeep};

/// How often a job that waits for a range checks whether it must end.
const LOOK: Duration = Duration::from_millis(50);
/// Its thread's niceness relative to the queues' threads. Not idle priority, as a host may wait for
/// it.
const NICENESS: i32 = 10;

#[derive(Debug)]
struct State {
    status: JobStatus,
    pace: Pace,
    /// The next piece must not begin before this time, because hosts have priority.
    held_until: Nanos,
    /// The state in which it must end, if requested.
    ending: Option<JobState>,
    /// Start of the current period without a pause.
    active_since: Option<Nanos>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Handle on a started job.
#[derive(Debug)]
pub(super) struct Job {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Job {
    pub fn start(
        kind: JobKind,
        namespace: Arc<Namespace>,
        upkeep: Box<dyn Upkeep>,
        start: JobStart,
    ) -> io::Result<Self> {
        let status = JobStatus {
            kind,
            state: if start.is_paused { JobState::Paused } else { JobState::Running },
            detail: String::new(),
            position: start.position.min(namespace.block_count()),
            total: namespace.block_count(),
            checked: 0,
            unchecked: 0,
            refreshed: 0,
            found: 0,
            repaired: 0,
            findings: Vec::new(),
            bytes: 0,
            bytes_per_second: start.bytes_per_second,
            active: 0,
            yields: 0,
        };
        let state = State {
            status,
            pace: Pace::new(start.bytes_per_second),
            held_until: 0,
            ending: None,
            active_since: (!start.is_paused).then(clock::now),
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let run = Run {
            shared: Arc::clone(&shared),
            kind,
            namespace,
            upkeep,
            mailbox: Arc::new(Mailbox::new()?),
            turn: 0,
            has_structure: kind == JobKind::Scrub,
            known: 0,
        };
        let thread = std::thread::Builder::new().name(format!("volume-{kind}"));
        let thread = Some(thread.spawn(move || run.run())?);
        Ok(Self { shared, thread })
    }

    /// Gives it an order; false if it has ended or is ending.
    pub fn order(&self, order: Order) -> bool {
        let mut state = self.shared.state();
        if state.status.state.is_over() || state.ending.is_some() {
            return false;
        }
        match order {
            Order::Pause => state.pause(),
            Order::Resume => state.resume(),
            Order::Cancel => state.ending = Some(JobState::Cancelled),
            Order::Rate(bytes_per_second) => {
                state.status.bytes_per_second = bytes_per_second;
                state.pace.set_rate(bytes_per_second);
            }
        }
        self.shared.changed.notify_one();
        true
    }

    pub fn status(&self) -> JobStatus {
        let state = self.shared.state();
        let running = state.active_since.map_or(0, |since| clock::now().saturating_sub(since));
        let active = state.status.active + running;
        JobStatus { active, ..state.status.clone() }
    }

    /// Ends it at its current position, and waits until it has ended.
    pub fn end(&mut self) {
        self.shared.state().ending.get_or_insert(JobState::Interrupted);
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It panics only by a defect, which was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn pause(&mut self) {
        self.status.state = JobState::Paused;
        if let Some(since) = self.active_since.take() {
            self.status.active += clock::now().saturating_sub(since);
        }
    }

    fn resume(&mut self) {
        self.status.state = JobState::Running;
        self.active_since.get_or_insert_with(clock::now);
    }

    fn end(&mut self, how: JobState, detail: String) {
        self.pause();
        self.status.state = how;
        self.status.detail = detail;
    }
}

/// The job's state in its own thread.
struct Run {
    shared: Arc<Shared>,
    kind: JobKind,
    namespace: Arc<Namespace>,
    upkeep: Box<dyn Upkeep>,
    mailbox: Arc<Mailbox>,
    /// Distinguishes the answers to successive requests for a range.
    turn: u16,
    /// Whether the store's own structures remain to be checked.
    has_structure: bool,
    /// Number of findings whose right contents the store knows and rewrites at the end.
    known: u64,
}

impl Run {
    fn run(mut self) {
        // If the kernel refuses, the job keeps the priority of the queues' threads.
        let _ = rustix::process::setpriority_process(None, NICENESS);
        self.namespace.watch_load(true);
        let ended = self.work();
        self.namespace.watch_load(false);
        // The store is released before the job is reported as ended.
        let Self { shared, upkeep, .. } = self;
        drop(upkeep);
        match ended {
            Ok(how) => shared.state().end(how, String::new()),
            Err(error) => shared.state().end(JobState::Failed, error.to_string()),
        }
    }

    fn work(&mut self) -> io::Result<JobState> {
        let mut courtesy = Courtesy::new(clock::now(), self.namespace.load());
        loop {
            let position = match self.wait_for_turn() {
                Ok(position) => position,
                Err(how) => return Ok(how),
            };
            if let Some(piece) = self.upkeep.next_piece(position) {
                self.process(piece)?;
            } else if self.has_structure {
                let (began, mut report) = (clock::now(), Report::default());
                self.has_structure = self.upkeep.scrub_structure(&mut report)?;
                self.note(position, began, report);
            } else {
                self.repair();
                let mut state = self.shared.state();
                state.status.position = state.status.total;
                return Ok(JobState::Finished);
            }
            let now = clock::now();
            if courtesy.must_hold(now, self.namespace.load()).unwrap_or(false) {
                let mut state = self.shared.state();
                state.held_until = now + HOLD;
                state.status.yields += 1;
            }
        }
    }

    /// Processes one piece, unless the job must end.
    fn process(&mut self, piece: Range<u64>) -> io::Result<()> {
        let Some(lock) = self.lock(piece.clone())? else { return Ok(()) };
        let (began, mut report) = (clock::now(), Report::default());
        let done = match self.kind {
            JobKind::Scrub => self.upkeep.scrub(piece.clone(), &mut report),
            JobKind::Refresh => self.upkeep.refresh(piece.clone(), &mut report),
        };
        self.namespace.release(lock);
        done?;
        self.note(piece.end, began, report);
        Ok(())
    }

    /// Makes the store rewrite the findings whose right contents it knows. If that fails, the
    /// findings remain unrepaired.
    fn repair(&mut self) {
        if self.known == 0 {
            return;
        }
        let event = |kind, reason: &'static str, detail| StorageEvent {
            kind,
            reason,
            lba: None,
            association: 0,
            queue_id: 0,
            detail: format!("{}: {detail}", self.kind),
        };
        let told = match self.upkeep.repair() {
            Ok(()) => {
                self.shared.state().status.repaired = self.known;
                event("repaired", "", format!("{} pages rewritten", self.known))
            }
            Err(error) => event("found", reason_of(&error).id(), format!("repair: {error}")),
        };
        self.namespace.events().push(told);
    }

    /// Waits until the next piece may begin; returns its position, or the state in which the job
    /// must end.
    fn wait_for_turn(&self) -> Result<u64, JobState> {
        let mut state = self.shared.state();
        loop {
            if let Some(how) = state.ending {
                return Err(how);
            }
            let left = if state.status.state == JobState::Paused {
                Duration::MAX
            } else {
                let due = state.pace.due().max(state.held_until);
                Duration::from_nanos(due.saturating_sub(clock::now()))
            };
            if left.is_zero() {
                return Ok(state.status.position);
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes the lock of a piece; None if the job must end.
    fn lock(&mut self, piece: Range<u64>) -> io::Result<Option<LockId>> {
        let mode = match self.kind {
            JobKind::Scrub => Mode::Shared,
            JobKind::Refresh => Mode::Exclusive,
        };
        self.turn = self.turn.wrapping_add(1);
        let waiter = Waiter { mailbox: Arc::clone(&self.mailbox), slot: self.turn };
        let id = match self.namespace.acquire_for_job(piece, mode, waiter) {
            Acquired::Granted(id) => return Ok(Some(id)),
            Acquired::Waiting(id) => id,
        };
        loop {
            let is_mine = |message| matches!(message, Message::Locked(turn) if turn == self.turn);
            if self.mailbox.take().into_iter().any(is_mine) {
                return Ok(Some(id));
            }
            if self.shared.state().ending.is_some() {
                self.namespace.release(id);
                return Ok(None);
            }
            wait([(self.mailbox.as_fd(), PollFlags::IN)], Some(LOOK))?;
        }
    }

    /// Records the results for a piece, and reports its findings as events.
    fn note(&mut self, position: u64, began: Nanos, report: Report) {
        self.known += report.findings.iter().filter(|found| found.is_known).count() as u64;
        let mut state = self.shared.state();
        state.status.position = position;
        state.pace.moved(began, report.bytes);
        for finding in state.status.add(report) {
            self.namespace.events().push(StorageEvent {
                kind: "found",
                reason: finding.reason.id(),
                lba: finding.lba,
                association: 0,
                queue_id: 0,
                detail: format!("{}: {}", self.kind, finding.detail),
            });
        }
    }
}
