//! The window of one flow, within its bounds.

use super::{Allowance, Setup, Start};
use crate::link::{NANOS_PER_SECOND, Nanos};

/// First window in bandwidth-delay products, if it is doubled from there. Whole products destroy
/// each other: with web-search traffic at 40 % load each byte was sent twice.
const SMALL_START: f64 = 0.02;

/// A window that was not used for this long may be twice what the path can take: it is halved, and
/// doubles back unless marks or losses say otherwise.
const IDLE_HALVES: Nanos = 10 * NANOS_PER_SECOND;

/// A window of at least one packet, and at most some bandwidth-delay products at the flow's rate.
#[derive(Debug)]
pub(super) struct Window {
    setup: Setup,
    products_max: f64,
    base_rtt: Nanos,
    bytes: f64,
}

impl Window {
    /// A window of one product.
    pub fn new(setup: &Setup, products_max: f64) -> Self {
        let base_rtt = setup.base_rtt.max(1);
        let mut window = Self { setup: *setup, products_max, base_rtt, bytes: 0.0 };
        window.set(window.product());
        window
    }

    /// A first window of at most one product, and the window below which it is to be doubled each
    /// round trip: a whole product, or, if it is small, what the setup says. On an unknown path a
    /// small one is no less than what is on the way within a data centre, which a port's buffer can
    /// take, and doubles without bound; one that is remembered only adds to that.
    pub fn first(setup: &Setup, is_small: bool) -> (Self, f64) {
        let mut window = Self::new(setup, 1.0);
        if !is_small {
            return (window, 0.0);
        }
        let small = window.small_bytes();
        let doubling_below = match setup.start {
            Start::Remembered { window_bytes, age } if window_bytes as f64 > small => {
                window.set(window_bytes as f64);
                window.age(age);
                window_bytes as f64
            }
            Start::Remembered { .. } | Start::Unknown => {
                window.set(small);
                f64::INFINITY
            }
            Start::Exactly(window_bytes) => {
                window.set(window_bytes as f64);
                0.0
            }
        };
        (window, doubling_below)
    }

    fn small_bytes(&self) -> f64 {
        self.near_product().max(SMALL_START * self.product())
    }

    /// Makes it no less than what an unknown path starts with.
    pub fn restart(&mut self) {
        self.set(self.bytes.max(self.small_bytes()));
    }

    /// Shrinks it because it was not used for this long, no further than to what an unknown path
    /// starts with.
    pub fn age(&mut self, age: Nanos) {
        let least = self.small_bytes().min(self.bytes);
        self.set(aged(self.bytes, age).max(least));
    }

    /// Its bytes.
    pub fn bytes(&self) -> f64 {
        self.bytes
    }

    /// Sets it, within its bounds.
    pub fn set(&mut self, bytes: f64) {
        let Setup { domain, rate_bytes_per_second, .. } = &self.setup;
        let rate = domain.line_bytes_per_second.min(*rate_bytes_per_second);
        let least = domain.packet_bytes as f64;
        let most = self.products_max * bandwidth_delay(rate, self.base_rtt);
        self.bytes = bytes.clamp(least, most.max(least));
    }

    /// Round trip of the path without queues.
    pub fn base_rtt(&self) -> Nanos {
        self.base_rtt
    }

    /// Adopts a better value of it, if there is one.
    pub fn measured(&mut self, rtt_least: Nanos) {
        if rtt_least > 0 && rtt_least != self.base_rtt {
            self.base_rtt = rtt_least;
            self.set(self.bytes);
        }
    }

    /// Bytes on the flow's path at the rate of the hosts' links …
    pub fn product(&self) -> f64 {
        bandwidth_delay(self.setup.domain.line_bytes_per_second, self.base_rtt)
    }

    /// … and within a data centre.
    pub fn near_product(&self) -> f64 {
        let domain = &self.setup.domain;
        bandwidth_delay(domain.line_bytes_per_second, domain.near_rtt)
    }

    /// Share of the window that a completely marked round trip takes, in Uno and in Gemini. With
    /// one threshold for all flows, equal marks lead to equal rates whatever the round trip.
    pub fn decrease_max(&self, threshold_product: f64) -> f64 {
        let threshold = threshold_product / 7.0;
        4.0 * threshold / (self.product() + threshold)
    }

    /// The window, and the rate that spreads it over `1 / pace` round trips.
    pub fn allowance(&self, pace: f64) -> Allowance {
        let rate = pace * self.bytes * NANOS_PER_SECOND as f64 / self.base_rtt as f64;
        let Setup { domain, rate_bytes_per_second, .. } = &self.setup;
        let rate_max = domain.line_bytes_per_second.min(*rate_bytes_per_second).max(1);
        Allowance::new(self.bytes, rate, rate_max)
    }
}

/// What is left of a window that was not used for this long: half as much after each ten seconds.
pub(super) fn aged(bytes: f64, age: Nanos) -> f64 {
    bytes * 0.5_f64.powf(age as f64 / IDLE_HALVES as f64)
}

/// Bytes that a rate keeps on a path with this round trip.
fn bandwidth_delay(bytes_per_second: u64, rtt: Nanos) -> f64 {
    bytes_per_second as f64 * rtt as f64 / NANOS_PER_SECOND as f64
}

/// The whole part of a number that is not negative.
#[must_use]
pub fn whole(value: f64) -> u64 {
    #[expect(clippy::cast_sign_loss, reason = "the caller's values are not negative")]
    let whole = value as u64;
    whole
}
