//! Gemini (Zeng et al., "Congestion Control for Cross-Datacenter Networks", ICNP 2019), as in Uno's
//! released code: marks slow a flow down within a data centre, delay between data centres, each
//! once per round trip.

use super::window::Window;
use super::{Allowance, Controller, Report, Setup};
use crate::link::Nanos;

/// Weight of the newest round trip in the average marked share.
const GAIN: f64 = 0.5;
/// Additive increase per round trip in bandwidth-delay products of the longest round trip: the same
/// bytes for all flows.
const INCREASE: f64 = 2.4e-4;

/// What differs between the original, Uno's comparison and a path without marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GeminiRules {
    /// Reduction by delay, in per mille of the window.
    pub decrease_per_mille: u16,
    /// Queueing delay above which it reduces the window.
    pub delay_threshold: Nanos,
    /// Start with a small window and double it until the first sign of congestion.
    pub small_start: bool,
    /// Halve the window on loss, instead of starting over.
    pub halves_on_loss: bool,
    /// There are no marks: delay slows down near flows, too, beyond a fifth of their round trip.
    pub is_unmarked: bool,
}

impl GeminiRules {
    /// The parameters of Uno's comparison with one bottleneck: a delay of 0.1 ms.
    pub const RELEASED: Self = Self {
        decrease_per_mille: 100,
        delay_threshold: 100_000,
        small_start: false,
        halves_on_loss: false,
        is_unmarked: false,
    };
    /// Those of its comparison with realistic traffic, and of the original.
    pub const RELEASED_5MS: Self = Self { delay_threshold: 5_000_000, ..Self::RELEASED };
    /// These with the start of our UnoCC.
    pub const SMALL_START: Self = Self { small_start: true, ..Self::RELEASED_5MS };
    /// What sessions use: a loss does not start them over.
    pub const DEFAULT: Self = Self {
        decrease_per_mille: 200,
        delay_threshold: 1_000_000,
        small_start: true,
        halves_on_loss: true,
        is_unmarked: false,
    };
    /// A path that erases marks: only delay and loss are known.
    pub const NO_MARKS: Self = Self { is_unmarked: true, ..Self::DEFAULT };
}

/// The window of one flow.
#[derive(Debug)]
pub struct Gemini {
    setup: Setup,
    rules: GeminiRules,
    window: Window,
    /// Below this window it doubles each round trip.
    doubling_below: f64,
    marked: f64,
    /// Bytes of the first window still to be sent; nothing is judged before.
    unsent: f64,
    /// When the round trip being observed began …
    round_start: Nanos,
    /// … what has arrived in it …
    bytes: u64,
    /// … of which marked, …
    marked_bytes: u64,
    /// … and its least sample.
    rtt_least: Nanos,
    decreased_at: Nanos,
    /// When a loss last had its effect.
    lost_at: Option<Nanos>,
    /// In the last whole round trip the delay showed a queue: even the least sample was long.
    finds_queue: bool,
}

impl Gemini {
    /// Creates a flow that has sent nothing.
    #[must_use]
    pub fn new(setup: &Setup, rules: GeminiRules) -> Self {
        let (window, doubling_below) = Window::first(setup, rules.small_start);
        Self {
            setup: *setup,
            rules,
            doubling_below,
            marked: 0.0,
            unsent: window.bytes(),
            round_start: 0,
            bytes: 0,
            marked_bytes: 0,
            rtt_least: Nanos::MAX,
            decreased_at: 0,
            lost_at: None,
            finds_queue: false,
            window,
        }
    }

    /// Bytes on the longest path of the network.
    fn far_product(&self) -> f64 {
        let domain = &self.setup.domain;
        self.window.near_product() * domain.far_rtt as f64 / domain.near_rtt.max(1) as f64
    }

    /// Whether the delay shows a queue. Within a data centre marks do.
    fn is_delayed(&self) -> bool {
        let base_rtt = self.window.base_rtt();
        let is_far = base_rtt > 4 * self.setup.domain.near_rtt;
        let GeminiRules { delay_threshold, is_unmarked, .. } = self.rules;
        let tolerated = delay_threshold.max(if is_unmarked { base_rtt / 5 } else { 0 });
        let is_queued =
            self.rtt_least != Nanos::MAX && self.rtt_least > base_rtt.saturating_add(tolerated);
        is_queued && (is_far || is_unmarked)
    }

    /// Reduces the window, at most once in a round trip.
    fn decrease(&mut self, is_marked: bool, is_delayed: bool, now: Nanos) {
        if now.saturating_sub(self.decreased_at) <= self.window.base_rtt() {
            return;
        }
        let by_marks = self.marked * self.window.decrease_max(self.window.near_product());
        let by_delay = f64::from(self.rules.decrease_per_mille) / 1000.0;
        let by_marks = if is_marked { by_marks } else { 0.0 };
        let by_delay = if is_delayed { by_delay } else { 0.0 };
        self.window.set(self.window.bytes() * (1.0 - by_marks.max(by_delay)));
        (self.decreased_at, self.round_start) = (now, now);
        if self.rules.small_start {
            self.doubling_below = 0.0;
        }
    }

    fn end_round(&mut self, now: Nanos) {
        let share = self.marked_bytes as f64 / self.bytes as f64;
        self.marked += GAIN * (share - self.marked);
        self.finds_queue = self.is_delayed();
        self.start_round(now);
    }

    fn start_round(&mut self, now: Nanos) {
        self.round_start = now;
        (self.bytes, self.marked_bytes, self.rtt_least) = (0, 0, Nanos::MAX);
    }

    fn lost(&mut self, now: Nanos) {
        if self.lost_at.is_some_and(|at| now.saturating_sub(at) <= self.setup.timeout) {
            return;
        }
        self.lost_at = Some(now);
        self.decreased_at = now;
        self.start_round(now);
        if self.rules.halves_on_loss {
            self.doubling_below = 0.0;
            self.window.set(self.window.bytes() / 2.0);
        } else {
            self.doubling_below = self.window.bytes() / 2.0;
            self.window.set(0.0);
        }
    }
}

impl Controller for Gemini {
    fn allowance(&self) -> Allowance {
        self.window.allowance(1.0)
    }

    fn sent(&mut self, bytes: u64, now: Nanos) {
        if self.unsent > 0.0 {
            self.unsent -= bytes as f64;
            if self.unsent <= 0.0 {
                self.decreased_at = now;
                self.start_round(now);
            }
        }
    }

    fn reported(&mut self, report: &Report, now: Nanos) {
        self.window.measured(report.rtt_least);
        if report.lost_packets > 0 {
            self.lost(now);
        }
        if report.bytes == 0 {
            return;
        }
        self.bytes += report.bytes;
        self.marked_bytes += report.marked_bytes;
        if report.rtt > 0 {
            self.rtt_least = self.rtt_least.min(report.rtt);
        }
        if self.unsent <= 0.0 && now.saturating_sub(self.round_start) > self.window.base_rtt() {
            self.end_round(now);
        }
        if self.window.bytes() >= self.doubling_below {
            self.doubling_below = 0.0;
        }
        let is_marked = report.marked_bytes > 0;
        let is_delayed = self.is_delayed();
        if is_marked || is_delayed {
            if self.unsent <= 0.0 {
                self.decrease(is_marked, is_delayed, now);
            }
        } else if self.doubling_below > 0.0 {
            self.window.set(self.window.bytes() + report.bytes as f64);
        } else {
            let step = INCREASE * self.far_product() * report.bytes as f64 / self.window.bytes();
            self.window.set(self.window.bytes() + step);
        }
    }

    fn timed_out(&mut self, now: Nanos) {
        self.lost(now);
    }

    fn finds_queue(&self) -> bool {
        self.finds_queue
    }
}
