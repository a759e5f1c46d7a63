//! Congestion marks: random early detection on the real queue, and Uno's phantom queue.

use super::chance::{Dice, PARTS};
use super::{LinkConfig, NANOS_PER_SECOND, Nanos};

/// The marking probability rises linearly from zero at `low_bytes` to `probability_max_parts` at
/// `high_bytes`, and marking is certain above that. It uses the current queue length, as
/// data-centre switches do, not the moving average of Floyd and Jacobson's original.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Up to this length nothing is marked.
    pub low_bytes: u64,
    /// From this length on everything is marked.
    pub high_bytes: u64,
    /// Probability just below `high_bytes`, in parts of [`PARTS`].
    pub probability_max_parts: u32,
}

impl Thresholds {
    fn parts(&self, level_bytes: u64) -> u32 {
        if level_bytes <= self.low_bytes {
            return 0;
        }
        if level_bytes >= self.high_bytes {
            return PARTS;
        }
        let above = u128::from(level_bytes - self.low_bytes);
        let span = u128::from(self.high_bytes - self.low_bytes);
        (above * u128::from(self.probability_max_parts) / span) as u32
    }
}

/// A queue that exists only as a counter: every arriving packet adds its bytes, even one that the
/// buffer refuses, and it drains more slowly than the wire (Uno, arXiv:2510.15802; its released
/// code drains at 0.952 of the rate and marks from 2 % to 60 % of the cap).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Phantom {
    /// Drain rate relative to the link's rate, in parts of [`PARTS`].
    pub drain_parts_per_billion: u32,
    /// Most bytes that it holds.
    pub cap_bytes: u64,
    /// Its marking thresholds.
    pub thresholds: Thresholds,
}

impl Phantom {
    /// Its drain in bits per second.
    fn drains(&self, link_bits_per_second: u64) -> u128 {
        let parts = u128::from(self.drain_parts_per_billion);
        u128::from(link_bits_per_second) * parts / u128::from(PARTS)
    }
}

/// Exact level of a phantom queue at one instant.
#[derive(Debug)]
struct PhantomLevel {
    phantom: Phantom,
    /// In units of bits × (nanoseconds per second), so that each nanosecond drains a whole number
    /// of units.
    level: u128,
    drain_bits_per_second: u128,
    at: Nanos,
}

const UNITS_PER_BYTE: u128 = 8 * NANOS_PER_SECOND as u128;

impl PhantomLevel {
    fn change_rate(&mut self, bits_per_second: u64, now: Nanos) {
        self.advance(now);
        self.drain_bits_per_second = self.phantom.drains(bits_per_second);
    }

    fn advance(&mut self, now: Nanos) {
        let drained = u128::from(now.saturating_sub(self.at)) * self.drain_bits_per_second;
        self.level = self.level.saturating_sub(drained);
        self.at = self.at.max(now);
    }

    fn arrive(&mut self, wire_bytes: u32, now: Nanos) {
        self.advance(now);
        let cap = u128::from(self.phantom.cap_bytes) * UNITS_PER_BYTE;
        self.level = (self.level + u128::from(wire_bytes) * UNITS_PER_BYTE).min(cap);
    }

    fn bytes(&mut self, now: Nanos) -> u64 {
        self.advance(now);
        (self.level / UNITS_PER_BYTE) as u64
    }
}

/// The marking state of one link.
#[derive(Debug)]
pub(super) struct Marking {
    red: Option<Thresholds>,
    phantom: Option<PhantomLevel>,
    dice: Dice,
}

impl Marking {
    pub fn new(config: &LinkConfig, dice: Dice) -> Self {
        let phantom = config.phantom.map(|phantom| PhantomLevel {
            phantom,
            level: 0,
            drain_bits_per_second: phantom.drains(config.rate_bits_per_second),
            at: 0,
        });
        Self { red: config.red, phantom, dice }
    }

    /// The link has another rate from now on.
    pub fn change_rate(&mut self, bits_per_second: u64, now: Nanos) {
        if let Some(phantom) = &mut self.phantom {
            phantom.change_rate(bits_per_second, now);
        }
    }

    /// Counts an offered packet.
    pub fn arrive(&mut self, wire_bytes: u32, now: Nanos) {
        if let Some(phantom) = &mut self.phantom {
            phantom.arrive(wire_bytes, now);
        }
    }

    /// Whether early detection drops a packet that is not ECN-capable (RFC 3168, section 5).
    pub fn drops_early(&mut self, queued_bytes: u64) -> bool {
        self.red.is_some_and(|red| self.dice.happens(red.parts(queued_bytes)))
    }

    /// Whether to mark a packet that leaves the buffer with `queued_bytes` behind it.
    pub fn marks(&mut self, queued_bytes: u64, now: Nanos) -> bool {
        let by_red = self.red.is_some_and(|red| self.dice.happens(red.parts(queued_bytes)));
        let by_phantom = self.phantom.as_mut().is_some_and(|phantom| {
            let level = phantom.bytes(now);
            self.dice.happens(phantom.phantom.thresholds.parts(level))
        });
        by_red || by_phantom
    }
}
