//! Quick Adapt: finds the collapse of a path by what a round trip brings.

use super::Report;
use super::window::{Window, whole};
use crate::link::Nanos;

/// Length of a period in base round trips.
const PERIOD: f64 = 1.05;
/// A path has collapsed if so many periods bring too little on average: a host that runs late brings
/// nothing for one, and the rest in the next.
const PERIODS: u64 = 2;
/// Less than this share of the window is too little.
const BELOW: f64 = 0.5;

/// Compares what arrives in each period with the window, and, if it is *guarded*, with what was sent
/// before: to a flow that sent nothing, because after a cut more was in flight than its window, nothing
/// comes back. Of the periods that brought too little the most that one sent counts, as a flow whose
/// path has collapsed soon sends no more than what arrives.
#[derive(Debug)]
pub(super) struct QuickAdapt {
    is_guarded: bool,
    phase: Phase,
    /// Bytes that arrived in the present period, and in those before it that brought too little.
    arrived: u64,
    /// The most that the period before one of these sent.
    sent_before: u64,
    /// Number of these periods.
    periods: u64,
    /// Bytes sent since the present period began, or since the restart.
    sent: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The first period begins with the report of a packet sent at or after this time.
    From(Nanos),
    /// The present period ends then.
    Until(Nanos),
}

impl QuickAdapt {
    pub fn new(is_guarded: bool, now: Nanos) -> Self {
        let phase = Phase::From(now);
        Self { is_guarded, phase, arrived: 0, sent_before: 0, periods: 0, sent: 0 }
    }

    /// Begins a first period with what is sent from now on.
    pub fn restart(&mut self, now: Nanos) {
        (self.phase, self.sent) = (Phase::From(now), 0);
    }

    pub fn sent(&mut self, bytes: u64) {
        self.sent = self.sent.saturating_add(bytes);
    }

    /// Takes the bytes that arrived in the present period, and in those before it that brought too
    /// little: all that is known of a path that has gone silent.
    pub fn take_arrived(&mut self) -> u64 {
        std::mem::take(&mut self.arrived)
    }

    /// Counts a report. If the path has collapsed, returns the bytes that a period brought.
    pub fn reported(&mut self, report: &Report, window: &Window, now: Nanos) -> Option<u64> {
        match self.phase {
            Phase::From(start) if report.sent_at < start => return None,
            Phase::From(_) => self.first_period(),
            Phase::Until(end) => {
                self.arrived += report.bytes;
                if now < end {
                    return None;
                }
                let mean = self.arrived / self.periods;
                let sent = self.sent_before as f64;
                let expected =
                    if self.is_guarded { window.bytes().min(sent) } else { window.bytes() };
                if mean as f64 >= BELOW * expected {
                    self.first_period();
                } else if self.periods >= if self.is_guarded { PERIODS } else { 1 } {
                    self.arrived = 0;
                    return Some(mean);
                } else {
                    self.next_period();
                }
            }
        }
        let length = whole(PERIOD * window.base_rtt() as f64);
        self.phase = Phase::Until(now.saturating_add(length));
        None
    }

    fn first_period(&mut self) {
        (self.arrived, self.sent_before, self.periods) = (0, 0, 0);
        self.next_period();
    }

    fn next_period(&mut self) {
        self.periods += 1;
        self.sent_before = self.sent_before.max(std::mem::take(&mut self.sent));
    }
}
