//! What a session's worker reports: to the endpoint through `Report`, to the job through its ring
//! and doorbell.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use sealane_proto::link::Nanos;

use super::limits::Limit;
use super::path_report::PathReport;
use super::statistics::{WorkerStatistics, values};
use super::worker::Worker;
use crate::clock::now;
use crate::latency::Latencies;

/// Maximum age of the published statistics.
pub(super) const STATISTICS_NANOS: Nanos = 10_000_000;

/// State of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// The path is being validated, and the keys are being confirmed.
    Establishing,
    /// Messages can be sent.
    Established,
    /// Nothing new is sent; sends in progress continue.
    Draining,
    /// The session is over.
    Closed {
        /// Stable id of the reason.
        reason: String,
    },
}

/// Shared between worker and endpoint: state and statistics, and the endpoint's requests.
#[derive(Debug)]
pub(super) struct Report {
    /// A request to drain …
    pub(super) is_to_drain: AtomicBool,
    /// … and a request to end for this reason.
    pub(super) end: Mutex<Option<String>>,
    pub(super) state: Mutex<State>,
    pub(super) statistics: Mutex<Vec<u64>>,
    /// See [`Figures::message_sizes`].
    pub(super) message_sizes: AtomicU64,
    /// How long its sends took.
    pub(super) sends: Latencies<1>,
    /// The current unit; final once the session is established.
    pub(super) unit_bytes: AtomicU16,
    pub(super) paths: Mutex<Vec<PathReport>>,
    /// Readable after a state change.
    pub(super) changed: OwnedFd,
    pub(super) settled: Condvar,
}

impl Report {
    pub(super) fn set(&self, state: State) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        self.settled.notify_all();
        crate::event::ring(&self.changed);
    }
}

/// The figures of one session as its worker last published them.
#[derive(Debug)]
pub struct Figures(pub(super) Arc<Report>);

impl Figures {
    /// The counters, in the order of `statistics::names`; empty before the start.
    pub fn statistics(&self) -> Vec<u64> {
        self.0.statistics.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lengths of the messages so far for which the plan chose: bit b stands for up to 2^b bytes and
    /// more than half of that.
    pub fn message_sizes(&self) -> u64 {
        self.0.message_sizes.load(Ordering::Relaxed)
    }

    /// The latest report about each path; empty before the start.
    pub fn paths(&self) -> Vec<PathReport> {
        self.0.paths.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Worker {
    /// Publishes the statistics if they are due, and rings the doorbell if there is news for the
    /// job.
    pub(super) fn publish(&mut self) {
        let time = now();
        let is_in_line = self.flow.as_ref().is_some_and(|flow| flow.turn_at().is_some());
        let limit = Limit::of(self.session.limit(), self.memory.ring.is_full(), is_in_line);
        self.limits.enter(limit, time);
        self.progress.must_ring |=
            std::mem::take(&mut self.progress.has_sent) && self.memory.ring.is_send_wanted();
        let is_due = time.saturating_sub(self.progress.published) >= STATISTICS_NANOS;
        self.progress.is_stale = !(is_due || self.progress.must_ring || self.progress.is_over);
        if !self.progress.is_stale {
            self.publish_statistics(time);
        }
        self.progress.must_ring |= self.memory.ring.take_chunk_wake();
        if std::mem::take(&mut self.progress.must_ring)
            && let Some(bell) = &self.bell
        {
            bell.ring();
        }
    }

    pub(super) fn publish_statistics(&mut self, time: Nanos) {
        self.progress.published = time;
        let values = values(&self.session.statistics(), &self.counters());
        self.memory.ring.publish_statistics(&values);
        self.report.message_sizes.store(self.session.message_sizes(), Ordering::Relaxed);
        *self.report.statistics.lock().unwrap_or_else(PoisonError::into_inner) = values;
        let mut paths = self.report.paths.lock().unwrap_or_else(PoisonError::into_inner);
        paths.clear();
        paths.extend(PathReport::of(&self.local_addresses, &self.lanes, &self.session));
    }

    fn counters(&self) -> WorkerStatistics {
        let sent = self.lanes.counters();
        let [
            limited_application_nanos,
            limited_credit_nanos,
            limited_pacing_nanos,
            limited_loss_nanos,
            limited_round_trip_nanos,
            limited_stall_nanos,
            limited_completions_nanos,
            limited_shared_rate_nanos,
            limited_congestion_nanos,
        ] = self.limits.spent();
        WorkerStatistics {
            send_errors: sent.errors,
            send_calls: sent.calls,
            send_drops: sent.dropped,
            receive_calls: self.lanes.receive_calls(),
            receive_drops: self.lanes.receive_drops(),
            limited_application_nanos,
            limited_credit_nanos,
            limited_pacing_nanos,
            limited_loss_nanos,
            limited_round_trip_nanos,
            limited_stall_nanos,
            limited_completions_nanos,
            limited_shared_rate_nanos,
            limited_congestion_nanos,
        }
    }
}
