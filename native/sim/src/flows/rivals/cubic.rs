//! CUBIC (RFC 9438): the window grows with the cube of the time since the last loss.

use sealane_proto::congestion::{Allowance, Controller, Report, Setup};
use sealane_proto::link::{NANOS_PER_SECOND, Nanos};

use super::{allowance, product};

/// C, in packets per second cubed.
pub(super) const SCALE: f64 = 0.4;
/// The window after a loss.
pub(super) const KEPT: f64 = 0.7;
/// First window in packets.
const START_PACKETS: f64 = 10.0;
/// The window may also fill this many products of queue.
const PRODUCTS_MAX: f64 = 2.0;

#[derive(Debug)]
pub(super) struct Cubic {
    setup: Setup,
    /// In packets, as are all windows here.
    pub(super) window: f64,
    /// Doubles below this window.
    doubling_below: f64,
    window_at_loss: f64,
    /// The window of a flow by RFC 5681, below which this one never stays.
    reno: f64,
    /// When the present growth began.
    since: Option<Nanos>,
    lost_at: Option<Nanos>,
}

impl Cubic {
    pub fn new(setup: &Setup) -> Self {
        Self {
            setup: *setup,
            window: START_PACKETS,
            doubling_below: f64::INFINITY,
            window_at_loss: 0.0,
            reno: START_PACKETS,
            since: None,
            lost_at: None,
        }
    }

    fn lost(&mut self, now: Nanos) {
        if self.lost_at.is_some_and(|at| now.saturating_sub(at) <= self.setup.timeout) {
            return;
        }
        self.lost_at = Some(now);
        let is_converging = self.window < self.window_at_loss;
        self.window_at_loss =
            if is_converging { self.window * f64::midpoint(1.0, KEPT) } else { self.window };
        self.window = (self.window * KEPT).max(1.0);
        self.reno = self.window;
        self.doubling_below = self.window;
        self.since = None;
    }

    fn grow(&mut self, packets: f64, now: Nanos) {
        let since = *self.since.get_or_insert(now);
        let seconds = (now - since + self.setup.base_rtt) as f64 / NANOS_PER_SECOND as f64;
        let to_plateau = (self.window_at_loss * (1.0 - KEPT) / SCALE).cbrt();
        let target = SCALE * (seconds - to_plateau).powi(3) + self.window_at_loss;
        let target = target.clamp(self.window, 1.5 * self.window);
        self.window += (target - self.window) / self.window * packets;
        let reno_step = 3.0 * (1.0 - KEPT) / (1.0 + KEPT);
        self.reno += reno_step * packets / self.reno;
        self.window = self.window.max(self.reno);
    }
}

impl Controller for Cubic {
    fn allowance(&self) -> Allowance {
        // Not paced: the window leaves as acknowledgements arrive, up to the line's rate.
        let bytes = self.window * self.setup.domain.packet_bytes as f64;
        let mut allowed = allowance(&self.setup, bytes, 1.0);
        allowed.rate_bytes_per_second = self.setup.domain.line_bytes_per_second;
        allowed
    }

    fn sent(&mut self, _bytes: u64, _now: Nanos) {}

    fn reported(&mut self, report: &Report, now: Nanos) {
        if report.lost_packets > 0 {
            self.lost(now);
        }
        let packet = self.setup.domain.packet_bytes as f64;
        let packets = report.bytes as f64 / packet;
        if self.window < self.doubling_below {
            self.window += packets;
        } else if packets > 0.0 {
            self.grow(packets, now);
        }
        self.window = self.window.min(PRODUCTS_MAX * product(&self.setup) / packet).max(1.0);
    }

    fn timed_out(&mut self, _now: Nanos) {
        self.doubling_below = self.window * KEPT;
        self.window = 1.0;
    }
}
