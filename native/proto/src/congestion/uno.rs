//! UnoCC: one loop for flows within a data centre and between data centres (Uno,
//! arXiv:2510.15802, and its released code).
//!
//! The window grows by a fixed share of the bandwidth-delay product per round trip. It shrinks with
//! the marked share of the bytes, once per *epoch*, which lasts as long for far flows as for near
//! ones; gains are such that equal marks give equal rates whatever the round trip. *Quick Adapt*
//! handles what marks are too slow for: if a round trip brings less than half of the window, the
//! window becomes what was brought.

use super::quick_adapt::QuickAdapt;
use super::window::Window;
use super::{Allowance, Controller, Domain, Report, Setup};
use crate::link::{NANOS_PER_SECOND, Nanos};

/// Additive increase in bandwidth-delay products per round trip.
const INCREASE: f64 = 0.001;
/// Weight of the newest epoch in the average marked share.
const GAIN: f64 = 0.65;
/// Above this marked share a falling share does not mean that the queue drains.
const DRAINING_MAX: f64 = 0.9;
/// Factor of the decrease while only the phantom queue is congested …
const PHANTOM_ONLY: f64 = 0.35;
/// … which a round trip of at most this many base round trips shows.
const QUEUE_FREE: f64 = 1.055;
/// Share of the arrived bytes that becomes the window after a collapse.
const ADAPT_KEEPS: f64 = 0.96;
/// Marks then leave this share of it while there is no real queue: the phantom queue is still full
/// of what was refused. All flows together have what the link carries, less what they keep back for
/// it to drain …
const ADAPTED_SHARE: f64 = 0.75;
/// … until the marked share falls below this, …
const ADAPTED_MARKED: f64 = 0.5;
/// … or for so many far round trips.
const ADAPTED_ROUND_TRIPS: Nanos = 8;
/// Doubling ends with losses if more than one packet in this many was lost …
const DOUBLING_LOSS_BOUND: u64 = 8;
/// … and at least this many: on a lossy path some are lost without congestion.
const DOUBLING_LOSSES_MIN: u64 = 4;
/// A loss within this many round trips after the first mark is due to the last doubling …
const DOUBLING_UNDONE: Nanos = 2;
/// … and leaves this much of the window. Half of it would be exact for one flow alone; of several,
/// those that lose nothing then take the rest.
const DOUBLING_KEEPS: f64 = 0.75;
/// Increase, as a share of the bytes that arrived, once a far round trip has passed without a mark.
/// With more than this, several far flows fill the buffer before the first mark is reported.
const FAST_INCREASE: f64 = 1.0 / 64.0;
/// It grows with each far round trip without a mark, from the fifth on …
const FAST_STEPS_FROM: Nanos = 4;
/// … up to this many times.
const FAST_STEPS_MAX: Nanos = 8;
/// Round trips of it that the next mark undoes: a mark is reported one round trip late, and made
/// another one after the link was full.
const FAST_INCREASE_UNDONE: i32 = 2;

/// A flow that begins again as a new one has found no queue longer than this part of a near round
/// trip.
const RESTART_QUEUE_PART: Nanos = 4;

/// Shortest pause after which the window is smaller than before.
const PAUSE_MIN: Nanos = NANOS_PER_SECOND;

/// Which rules hold, each of which can be left out for comparison.
#[expect(clippy::struct_excessive_bools, reason = "each is a rule of its own, and one ablation")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// A falling marked share means that the phantom queue drains: increase instead of decreasing.
    pub gradient: bool,
    /// Decrease less while only the phantom queue is congested.
    pub discount: bool,
    /// Quick Adapt.
    pub quick_adapt: bool,
    /// Epochs of far flows last as long as those of near ones, instead of their own round trip.
    pub equal_epochs: bool,
    /// The threshold of the decrease is the same for near and far flows.
    pub shared_threshold: bool,
    /// Start small and double until the first mark or loss, instead of with a whole
    /// bandwidth-delay product.
    pub small_start: bool,
    /// Increase faster after a far round trip without marks.
    pub fast_increase: bool,
    /// Neither increase nor adapt while something other than the window limits the flow, count
    /// all epochs that a report spans, keep most of what Quick Adapt has left, and cut the window on
    /// silence and after long pauses.
    pub guarded: bool,
    /// After everything sent has been acknowledged and nothing waited, begin with no less than the
    /// small start, unless the last report showed a queue.
    pub restart: bool,
}

impl Rules {
    /// The released code's rules, and nothing else.
    pub const RELEASED: Self = Self {
        gradient: true,
        discount: true,
        quick_adapt: true,
        equal_epochs: true,
        shared_threshold: true,
        small_start: false,
        fast_increase: false,
        guarded: false,
        restart: false,
    };
    /// Sealane's rules.
    pub const DEFAULT: Self = Self {
        small_start: true,
        fast_increase: true,
        guarded: true,
        restart: true,
        ..Self::RELEASED
    };
    /// Sealane's rules where switches mark by their real queues: a marked share that falls then
    /// says nothing about the queue, and every mark means a queue.
    pub const REAL_QUEUES: Self = Self { gradient: false, discount: false, ..Self::DEFAULT };

    /// Leaves out the rule with the name of a field; `None` if there is none.
    #[must_use]
    pub fn without(self, rule: &str) -> Option<Self> {
        let mut rules = self;
        *match rule {
            "gradient" => &mut rules.gradient,
            "discount" => &mut rules.discount,
            "quick_adapt" => &mut rules.quick_adapt,
            "equal_epochs" => &mut rules.equal_epochs,
            "shared_threshold" => &mut rules.shared_threshold,
            "small_start" => &mut rules.small_start,
            "fast_increase" => &mut rules.fast_increase,
            "guarded" => &mut rules.guarded,
            "restart" => &mut rules.restart,
            _ => return None,
        } = false;
        Some(rules)
    }
}

/// Marks are counted per epoch, an interval of *sending* times.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Epochs {
    /// Not counted until this many more bytes are sent.
    Off(f64),
    /// Counted: the epoch ends with the first packet sent at or after `end`.
    On { end: Nanos, bytes: u64, marked_bytes: u64 },
}

impl Epochs {
    fn from(end: Nanos) -> Self {
        Self::On { end, bytes: 0, marked_bytes: 0 }
    }
}

/// The window of one flow.
#[derive(Debug)]
pub struct Uno {
    domain: Domain,
    rules: Rules,
    window: Window,
    /// Average marked share, and its value an epoch earlier.
    marked: f64,
    marked_before: f64,
    epochs: Epochs,
    quick_adapt: QuickAdapt,
    /// Until then, marks without a real queue leave this window.
    adapted: (Nanos, f64),
    /// Below this window it doubles each round trip.
    doubling_below: f64,
    window_at_start: f64,
    /// Packets lost, and bytes that arrived, since doubling began.
    doubling_lost: u64,
    doubling_bytes: u64,
    /// Losses reported with packets sent before this time are those of a silence.
    losses_from: Nanos,
    /// Until then, a loss undoes the last doubling.
    undo_until: Nanos,
    /// At the last report losses showed that a buffer has overflowed.
    finds_queue: bool,
    /// When the last mark was reported …
    last_mark: Nanos,
    /// … and the last packet sent.
    last_sent: Nanos,
    /// The last report showed neither a queue nor units that wait for the window.
    is_at_rest: bool,
}

impl Uno {
    /// Creates a flow that has sent nothing.
    #[must_use]
    pub fn new(setup: &Setup, rules: Rules, now: Nanos) -> Self {
        let (window, doubling_below) = Window::first(setup, rules.small_start);
        Self {
            domain: setup.domain,
            rules,
            marked: 0.0,
            marked_before: 0.0,
            epochs: Epochs::Off(window.bytes()),
            quick_adapt: QuickAdapt::new(rules.guarded, now),
            adapted: (0, 0.0),
            doubling_below,
            window_at_start: window.bytes(),
            doubling_lost: 0,
            doubling_bytes: 0,
            losses_from: 0,
            undo_until: 0,
            finds_queue: false,
            last_mark: now,
            last_sent: now,
            is_at_rest: false,
            window,
        }
    }

    fn increase(&mut self, bytes: u64) {
        let step = INCREASE * self.window.product() * bytes as f64 / self.window.bytes();
        self.window.set(self.window.bytes() + step);
    }

    /// Share by which an epoch in which all bytes were marked reduces the window.
    fn decrease_max(&self) -> f64 {
        let window = &self.window;
        let is_shared = self.rules.shared_threshold;
        window.decrease_max(if is_shared { window.near_product() } else { window.product() })
    }

    /// Length of an epoch: the part of a near round trip that this flow's is longer by.
    fn epoch_length(&self, rtt: Nanos) -> Nanos {
        let (near, base_rtt) = (self.domain.near_rtt, self.window.base_rtt());
        if !self.rules.equal_epochs || base_rtt <= near {
            return rtt.max(1);
        }
        let length = u128::from(rtt) * u128::from(near) / u128::from(base_rtt);
        (length as Nanos).max(1)
    }

    fn is_doubling(&self) -> bool {
        self.window.bytes() < self.doubling_below
    }

    /// Whether so much was lost while doubling that a buffer has overflowed.
    fn has_overflowed(&self) -> bool {
        let arrived = self.doubling_bytes / self.domain.packet_bytes.max(1);
        let bound = (arrived / DOUBLING_LOSS_BOUND).max(DOUBLING_LOSSES_MIN);
        self.doubling_lost >= bound
    }

    /// Whether no mark has been reported for a far round trip, so that the window grows faster.
    fn is_unmarked(&self, now: Nanos) -> bool {
        let interval = self.domain.far_rtt.max(self.window.base_rtt());
        let is_long = now.saturating_sub(self.last_mark) >= interval;
        self.rules.fast_increase && !self.is_doubling() && is_long
    }

    /// How many times [`FAST_INCREASE`] the window grows by.
    fn fast_steps(&self, now: Nanos) -> u32 {
        let interval = self.domain.far_rtt.max(self.window.base_rtt());
        let passed = now.saturating_sub(self.last_mark) / interval;
        passed.saturating_sub(FAST_STEPS_FROM).clamp(1, FAST_STEPS_MAX) as u32
    }

    /// The window after a collapse, of which so many bytes arrived.
    fn adapt(&mut self, arrived: u64, now: Nanos) {
        self.window.set((ADAPT_KEEPS * arrived as f64).min(self.window.bytes()));
        self.epochs = Epochs::Off(self.window.bytes());
        self.quick_adapt.restart(now);
        if self.rules.guarded {
            let until = now.saturating_add(ADAPTED_ROUND_TRIPS * self.domain.far_rtt);
            self.adapted = (until, ADAPTED_SHARE * self.window.bytes());
        }
    }

    /// The part of [`Controller::reported`] that marks decide.
    fn end_epochs(&mut self, report: &Report, now: Nanos) {
        let base_rtt = self.window.base_rtt();
        let rtt = if report.rtt > 0 { report.rtt } else { base_rtt };
        let length = self.epoch_length(rtt);
        let Epochs::On { end, bytes, marked_bytes } = &mut self.epochs else { return };
        if report.sent_at < *end || *bytes == 0 {
            return;
        }
        let (acked, share) = (*bytes, *marked_bytes as f64 / *bytes as f64);
        // A report may span several epochs. Each has its effect, or sparse reports would make far
        // flows yield less than near ones.
        let passed = if self.rules.guarded { 1 + (report.sent_at - *end) / length } else { 1 };
        *end = end.saturating_add(passed.saturating_mul(length));
        (*bytes, *marked_bytes) = (0, 0);
        let passed = passed.min(1 << 16) as i32;
        self.marked = share + (1.0 - GAIN).powi(passed) * (self.marked - share);
        if self.marked < self.marked_before.min(ADAPTED_MARKED) {
            self.adapted = (0, 0.0);
        }
        if share > 0.0 {
            let is_draining = self.marked_before > 0.0
                && self.marked <= DRAINING_MAX
                && self.marked < self.marked_before;
            if self.rules.gradient && is_draining {
                self.increase(acked);
            } else {
                let is_queue_free = rtt as f64 <= QUEUE_FREE * base_rtt as f64;
                let factor = if self.rules.discount && is_queue_free { PHANTOM_ONLY } else { 1.0 };
                let kept = (1.0 - self.marked * factor * self.decrease_max()).max(0.0);
                let window = self.window.bytes();
                let (until, least) = self.adapted;
                let least = if now < until && is_queue_free { least.min(window) } else { 0.0 };
                self.window.set((window * kept.powi(passed)).max(least));
            }
        }
        self.marked_before = self.marked;
    }
}

impl Controller for Uno {
    fn allowance(&self) -> Allowance {
        self.window.allowance(1.0)
    }

    fn sent(&mut self, bytes: u64, now: Nanos) {
        self.quick_adapt.sent(bytes);
        let paused = now.saturating_sub(self.last_sent);
        let is_resumed = paused > self.window.base_rtt();
        self.last_sent = now;
        if self.rules.guarded && paused >= PAUSE_MIN {
            self.doubling_below = self.doubling_below.max(self.window.bytes());
            self.window.age(paused);
            (self.doubling_lost, self.doubling_bytes) = (0, 0);
        }
        if self.rules.guarded && is_resumed && matches!(self.epochs, Epochs::On { .. }) {
            // No epoch passed in a pause.
            self.epochs = Epochs::from(now);
        }
        if let Epochs::Off(left) = &mut self.epochs {
            *left -= bytes as f64;
            if *left <= 0.0 {
                self.epochs = Epochs::from(now);
            }
        }
    }

    fn resumed(&mut self) {
        if self.rules.restart && self.is_at_rest {
            self.window.restart();
        }
    }

    fn reported(&mut self, report: &Report, now: Nanos) {
        self.window.measured(report.rtt_least);
        if let Epochs::On { bytes, marked_bytes, .. } = &mut self.epochs {
            *bytes += report.bytes;
            *marked_bytes += report.marked_bytes;
        }
        if report.marked_bytes > 0 {
            if self.is_unmarked(now) {
                // Reports are a round trip old: undo what the window has grown by since.
                let steps = f64::from(self.fast_steps(now));
                let grown = (1.0 + steps * FAST_INCREASE).powi(FAST_INCREASE_UNDONE);
                self.window.set(self.window.bytes() / grown);
            }
            self.last_mark = now;
        }
        if self.losses_from == Nanos::MAX && report.bytes > 0 {
            // The first report after a silence, and those that are on their way, name what was lost
            // in it.
            self.losses_from = now;
        }
        if report.bytes == 0 || report.sent_at >= self.losses_from {
            self.doubling_lost = self.doubling_lost.saturating_add(report.lost_packets);
        }
        self.doubling_bytes = self.doubling_bytes.saturating_add(report.bytes);
        self.finds_queue = self.is_doubling() && self.has_overflowed();
        if !self.is_doubling() {
            if self.doubling_below > 0.0 {
                // It has got there, and is not to double again.
                self.doubling_below = 0.0;
                self.quick_adapt.restart(now);
            }
        } else if report.marked_bytes > 0 || self.has_overflowed() {
            self.doubling_below = 0.0;
            self.quick_adapt.restart(now);
            let overshot = self.window.bytes() / 2.0;
            if overshot >= self.window_at_start {
                self.undo_until = now.saturating_add(DOUBLING_UNDONE * self.window.base_rtt());
            }
        }
        if report.lost_packets > 0 && now < self.undo_until {
            // The last doubling was too much: a buffer has overflowed.
            self.undo_until = 0;
            self.finds_queue = true;
            self.window.set(self.window.bytes() * DOUBLING_KEEPS);
        }
        if report.bytes == 0 {
            return;
        }
        let queue = report.rtt.saturating_sub(self.window.base_rtt());
        self.is_at_rest = !report.is_limited && queue <= self.domain.near_rtt / RESTART_QUEUE_PART;
        let may_grow = report.is_limited || !self.rules.guarded;
        if self.rules.quick_adapt && !self.is_doubling() && may_grow {
            if let Some(arrived) = self.quick_adapt.reported(report, &self.window, now) {
                self.adapt(arrived, now);
            }
        } else if !may_grow {
            // Less arrives because less was sent: the period says nothing.
            self.quick_adapt.restart(now);
        }
        let unmarked = report.bytes.saturating_sub(report.marked_bytes);
        if may_grow {
            if self.is_doubling() {
                self.window.set(self.window.bytes() + unmarked as f64);
            } else if self.is_unmarked(now) {
                let steps = f64::from(self.fast_steps(now));
                self.window.set(self.window.bytes() + steps * FAST_INCREASE * unmarked as f64);
            } else if unmarked > 0 {
                self.increase(unmarked);
            }
        }
        self.end_epochs(report, now);
    }

    fn timed_out(&mut self, now: Nanos) {
        if self.rules.guarded {
            // Back to half of it soon, unless marks or losses say otherwise.
            self.doubling_below = (self.window.bytes() / 2.0).max(self.doubling_below);
            (self.doubling_lost, self.doubling_bytes) = (0, 0);
            self.losses_from = Nanos::MAX;
            let arrived = self.quick_adapt.take_arrived();
            self.adapt(arrived, now);
        }
    }

    fn finds_queue(&self) -> bool {
        self.finds_queue
    }
}
