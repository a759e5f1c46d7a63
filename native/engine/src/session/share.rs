//! Shared by the sessions of a fabric: the operator's rate, and each job's limits.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use sealane_proto::link::Nanos;
use sealane_proto::session::Session;
use sealane_proto::share::{Answer, FlowId, JobId, JobUse, SharedRate, UserId};

use super::ring::Operation;
use crate::clock::now;
use crate::event;

/// The rate that all sessions of a fabric share.
#[derive(Debug)]
pub struct SharedLine(Mutex<Line>);

#[derive(Debug)]
struct Line {
    rate: SharedRate,
    wakes: BTreeMap<FlowId, Arc<OwnedFd>>,
}

/// Limits of one user over all its jobs, or of one job over all its sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareLimits {
    /// Wire bytes per second.
    pub rate_bytes_per_second: u64,
    /// Receives in progress.
    pub receives: u64,
    /// Sends and streams in progress.
    pub sends: u64,
}

/// A user's account at a fabric: the total use of its jobs.
#[derive(Debug)]
pub struct UserAccount {
    line: Arc<SharedLine>,
    id: UserId,
    operations: Operations,
}

/// A job's account at a fabric: the total use of its sessions.
#[derive(Debug)]
pub struct JobAccount {
    user: Arc<UserAccount>,
    id: JobId,
    operations: Operations,
    refused: AtomicU64,
}

/// Operations in progress, and how many there may be.
#[derive(Debug)]
struct Operations {
    limits: ShareLimits,
    receives: AtomicU64,
    sends: AtomicU64,
}

impl Operations {
    fn new(limits: ShareLimits) -> Self {
        Self { limits, receives: AtomicU64::new(0), sends: AtomicU64::new(0) }
    }

    fn count(&self, kind: &Operation) -> Option<(&AtomicU64, u64)> {
        match kind {
            Operation::Receive => Some((&self.receives, self.limits.receives)),
            Operation::Send(_) | Operation::Stream(_) => Some((&self.sends, self.limits.sends)),
            _ => None,
        }
    }

    /// Counts an operation; false if the limit is reached.
    fn admit(&self, kind: &Operation) -> bool {
        let Some((count, most)) = self.count(kind) else { return true };
        let more = |now: u64| (now < most).then_some(now + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn ended(&self, kind: &Operation) {
        if let Some((count, _)) = self.count(kind) {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn ended_all(&self, [receives, sends]: [u64; 2]) {
        self.receives.fetch_sub(receives, Ordering::Relaxed);
        self.sends.fetch_sub(sends, Ordering::Relaxed);
    }
}

/// A job's current and past use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccountUse {
    /// Its use of the line.
    pub line: JobUse,
    /// Receives in progress.
    pub receives: u64,
    /// Sends and streams in progress.
    pub sends: u64,
    /// Operations refused because the limit was reached.
    pub refused: u64,
}

impl SharedLine {
    /// Creates a line with this many wire bytes per second.
    pub fn new(rate_bytes_per_second: u64) -> Arc<Self> {
        let rate = SharedRate::new(rate_bytes_per_second);
        Arc::new(Self(Mutex::new(Line { rate, wakes: BTreeMap::new() })))
    }

    /// Adds a user. It is removed with its last job and the caller's handle.
    pub fn add_user(self: &Arc<Self>, limits: ShareLimits) -> Arc<UserAccount> {
        let id = self.lock().rate.add_user(limits.rate_bytes_per_second);
        Arc::new(UserAccount { line: Arc::clone(self), id, operations: Operations::new(limits) })
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    /// Wakes the workers of the flows that got a grant.
    fn wake_granted(&mut self) {
        while let Some(flow) = self.rate.next_granted() {
            if let Some(wake) = self.wakes.get(&flow) {
                event::ring(wake);
            }
        }
    }
}

impl UserAccount {
    /// Adds a job. It is removed with its last session and the caller's handle.
    pub fn add_job(self: &Arc<Self>, limits: ShareLimits) -> Arc<JobAccount> {
        let id = self.line.lock().rate.add_job(self.id, limits.rate_bytes_per_second);
        Arc::new(JobAccount {
            user: Arc::clone(self),
            id,
            operations: Operations::new(limits),
            refused: AtomicU64::new(0),
        })
    }
}

impl Drop for UserAccount {
    fn drop(&mut self) {
        self.line.lock().rate.remove_user(self.id);
    }
}

impl JobAccount {
    /// The job's use.
    pub fn usage(&self) -> AccountUse {
        AccountUse {
            line: self.line().lock().rate.job_use(self.id),
            receives: self.operations.receives.load(Ordering::Relaxed),
            sends: self.operations.sends.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }

    fn line(&self) -> &SharedLine {
        &self.user.line
    }
}

impl Drop for JobAccount {
    fn drop(&mut self) {
        self.line().lock().rate.remove_job(self.id);
    }
}

/// One session's part of its job's account. Its worker owns it; dropping it returns everything.
#[derive(Debug)]
pub(super) struct Flow {
    account: Arc<JobAccount>,
    id: FlowId,
    wake: Arc<OwnedFd>,
    /// Granted but not yet used.
    allowance: u64,
    /// Sent but not yet reported to the line.
    unreported: u64,
    /// When to ask again, while it waits for its turn.
    turn_at: Option<Nanos>,
    /// Operations in progress: receives, sends.
    open: [u64; 2],
}

impl Flow {
    pub(super) fn new(account: Arc<JobAccount>) -> std::io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut line = account.line().lock();
        let id = line.rate.add_flow(account.id);
        line.wakes.insert(id, Arc::clone(&wake));
        drop(line);
        Ok(Self { account, id, wake, allowance: 0, unreported: 0, turn_at: None, open: [0; 2] })
    }

    /// Whether the grant is used up, so that units must be held back.
    pub(super) fn is_spent(&self) -> bool {
        self.allowance == 0
    }

    /// Records that this many bytes have left, granted or not.
    pub(super) fn spend(&mut self, wire_bytes: u64) {
        self.allowance = self.allowance.saturating_sub(wire_bytes);
        self.unreported += wire_bytes;
    }

    /// Asks for a grant for units that are due; returns whether there is one. Otherwise the session
    /// waits.
    pub(super) fn ask(&mut self, time: Nanos) -> bool {
        let mut line = self.account.line().lock();
        let answer = line.rate.ask(self.id, std::mem::take(&mut self.unreported), time);
        line.wake_granted();
        drop(line);
        self.turn_at = match answer {
            Answer::Granted(allowance) => {
                self.allowance = allowance;
                None
            }
            Answer::Wait(at) => Some(at),
        };
        self.turn_at.is_none()
    }

    /// Ends a turn of the worker: if the session doesn't wait for the line, its units are no longer
    /// held back.
    ///
    /// A unit that has become due since the worker looked at it has not asked: if it stayed held
    /// back, nothing would wake the worker for it.
    pub(super) fn end_turn(&mut self, session: &mut Session, time: Nanos) {
        if self.turn_at.is_none() || !session.has_held_units(time) {
            self.rest(time);
            session.hold_units(false);
        }
    }

    /// Returns the rest of the grant, because there is nothing to send or it can't leave.
    fn rest(&mut self, time: Nanos) {
        if self.allowance == 0 && self.unreported == 0 && self.turn_at.is_none() {
            return;
        }
        self.allowance = 0;
        self.turn_at = None;
        let mut line = self.account.line().lock();
        line.rate.rest(self.id, std::mem::take(&mut self.unreported), time);
        line.wake_granted();
    }

    /// When to ask again, if the session waits for its turn.
    pub(super) fn turn_at(&self) -> Option<Nanos> {
        self.turn_at
    }

    /// Readable when the session's turn comes before that time.
    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Clears the wake-up.
    pub(super) fn woken(&self) {
        event::clear(&self.wake);
    }

    /// Counts a posted operation; false if the job or its user has reached its limit for this kind.
    pub(super) fn admit(&mut self, kind: &Operation) -> bool {
        let Some(open) = self.open_of(kind) else { return true };
        let (job, user) = (&self.account.operations, &self.account.user.operations);
        if !job.admit(kind) {
            self.account.refused.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        if !user.admit(kind) {
            job.ended(kind);
            self.account.refused.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        self.open[open] += 1;
        true
    }

    /// Records the end of an admitted operation.
    pub(super) fn ended(&mut self, kind: &Operation) {
        if let Some(open) = self.open_of(kind) {
            self.account.operations.ended(kind);
            self.account.user.operations.ended(kind);
            self.open[open] -= 1;
        }
    }

    /// Where an operation is counted, if it is.
    fn open_of(&self, kind: &Operation) -> Option<usize> {
        self.account.operations.count(kind)?;
        Some(usize::from(*kind != Operation::Receive))
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.account.operations.ended_all(self.open);
        self.account.user.operations.ended_all(self.open);
        let mut line = self.account.line().lock();
        line.wakes.remove(&self.id);
        line.rate.remove_flow(self.id, self.unreported, now());
        line.wake_granted();
    }
}

#[cfg(test)]
mod tests {
    use sealane_proto::session::Reliability;

    use super::super::ring::Terms;
    use super::*;
    use crate::session::full_socket_tests::sending;

    const RATE: u64 = 125_000_000;
    const LIMITS: ShareLimits = ShareLimits { rate_bytes_per_second: RATE, receives: 2, sends: 1 };

    #[test]
    fn a_unit_that_becomes_due_at_the_end_of_a_turn_wakes_the_worker() {
        let ([mut sender, _], due) = sending();
        let line = SharedLine::new(RATE);
        let mut flow = Flow::new(line.add_user(LIMITS).add_job(LIMITS)).unwrap();
        sender.session.hold_units(flow.is_spent());
        assert!(!sender.session.has_held_units(due - 1), "not due yet, so it doesn't ask");
        flow.end_turn(&mut sender.session, due);
        assert!(sender.session.next_timeout().is_some_and(|at| at <= due));
    }

    #[test]
    fn units_of_a_session_that_waits_for_its_turn_stay_held_back() {
        let ([mut sender, _], due) = sending();
        let line = SharedLine::new(RATE);
        let job = line.add_user(LIMITS).add_job(LIMITS);
        let [mut first, mut second] = [0, 1].map(|_| Flow::new(Arc::clone(&job)).unwrap());
        while first.ask(due) {
            first.spend(first.allowance);
        }
        sender.session.hold_units(second.is_spent());
        assert!(!second.ask(due));
        second.end_turn(&mut sender.session, due);
        assert!(second.turn_at().is_some());
        assert!(sender.session.next_timeout().is_none_or(|at| at > due));
    }

    fn is_woken(flow: &Flow) -> bool {
        rustix::io::read(&flow.wake, &mut [0; 8]).is_ok()
    }

    #[test]
    fn who_waits_is_woken_by_who_gives_back() {
        let line = SharedLine::new(RATE);
        let job = line.add_user(LIMITS).add_job(LIMITS);
        let [mut first, mut second] = [0, 1].map(|_| Flow::new(Arc::clone(&job)).unwrap());
        let time = 1_000_000_000;
        while first.ask(time) {
            first.spend(first.allowance);
        }
        assert!(first.is_spent() && first.turn_at().is_some_and(|at| at > time));
        assert!(!second.ask(time));
        // A quantum's time later it is the turn of the second flow, which has had nothing; it uses
        // nothing of its grant.
        let later = first.turn_at().unwrap();
        assert!(!first.ask(later));
        assert!(is_woken(&second) && second.ask(later));
        assert!(!is_woken(&first));
        second.rest(later);
        assert!(is_woken(&first) && first.ask(later));
        assert_eq!(job.usage().line.waits, 2);
        assert!(job.usage().line.waited_nanos > 0);
    }

    #[test]
    fn a_job_has_no_more_operations_under_way_than_it_may() {
        let line = SharedLine::new(RATE);
        let job = line.add_user(LIMITS).add_job(LIMITS);
        let [mut first, mut second] = [0, 1].map(|_| Flow::new(Arc::clone(&job)).unwrap());
        let send = Operation::Send(Terms::new(Reliability::SelectiveRepeat));
        assert!(first.admit(&Operation::Receive) && second.admit(&Operation::Receive));
        assert!(!first.admit(&Operation::Receive));
        assert!(first.admit(&send) && !second.admit(&send));
        assert!(second.admit(&Operation::Cancel { operation: 0 }));
        second.ended(&Operation::Cancel { operation: 0 });
        second.ended(&Operation::Receive);
        assert!(first.admit(&Operation::Receive));
        let usage = job.usage();
        assert_eq!((usage.receives, usage.sends, usage.refused), (2, 1, 2));
        drop(first);
        assert_eq!((job.usage().receives, job.usage().sends), (0, 0));
    }

    #[test]
    fn a_user_has_no_more_operations_under_way_than_it_may_however_many_jobs_it_is() {
        let line = SharedLine::new(RATE);
        let user = line.add_user(LIMITS);
        let jobs = [0, 1].map(|_| user.add_job(LIMITS));
        let [mut first, mut second] = [0, 1].map(|at: usize| Flow::new(jobs[at].clone()).unwrap());
        assert!(first.admit(&Operation::Receive) && second.admit(&Operation::Receive));
        assert!(!second.admit(&Operation::Receive));
        let usage = jobs[1].usage();
        assert_eq!((usage.receives, usage.refused), (1, 1));
        let mut other = Flow::new(line.add_user(LIMITS).add_job(LIMITS)).unwrap();
        assert!(other.admit(&Operation::Receive), "another user's are not touched");
        first.ended(&Operation::Receive);
        assert!(second.admit(&Operation::Receive));
        drop(second);
        assert!(first.admit(&Operation::Receive) && first.admit(&Operation::Receive));
    }
}
