//! Seeded randomness: dice, and the loss processes that use them.

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};

use super::Nanos;

/// The denominator of every probability given in parts.
pub const PARTS: u32 = 1_000_000_000;

/// A seeded random source.
#[derive(Debug)]
pub(super) struct Dice(ChaCha8Rng);

impl Dice {
    /// Different streams of one seed are independent.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream);
        Self(random)
    }

    pub fn draw(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Draws even if the event is impossible or certain, so that changing only the probability
    /// leaves later draws unchanged.
    pub fn happens(&mut self, parts: u32) -> bool {
        let drawn = u128::from(self.draw()) * u128::from(PARTS);
        (drawn >> 64) < u128::from(parts)
    }

    /// Exponentially distributed, by von Neumann's comparisons of uniform numbers (1951): integers
    /// suffice.
    fn exponential(&mut self, mean: Nanos) -> Nanos {
        let mut whole = 0_u64;
        loop {
            let first = self.draw();
            let (mut last, mut is_odd) = (first, true);
            loop {
                let next = self.draw();
                if next >= last {
                    break;
                }
                (last, is_odd) = (next, !is_odd);
            }
            if is_odd {
                let part = (u128::from(first) * u128::from(mean)) >> 64;
                return mean.saturating_mul(whole).saturating_add(part as u64);
            }
            whole += 1;
        }
    }

    /// Uniform from 0 to `end`, inclusive.
    pub fn up_to(&mut self, end: u64) -> u64 {
        ((u128::from(self.draw()) * (u128::from(end) + 1)) >> 64) as u64
    }
}

/// How packets are lost on the wire; probabilities in parts of [`PARTS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Each packet independently.
    Independent(u32),
    /// In bursts, counted in packets.
    GilbertElliott(GilbertElliott),
    /// In bursts that last for a time.
    Timed(TimedBursts),
}

impl Loss {
    pub(super) fn parts(self) -> [u32; 4] {
        match self {
            Self::Independent(parts) => [parts, 0, 0, 0],
            Self::GilbertElliott(GilbertElliott { p, r, loss_bad, loss_good }) => {
                [p, r, loss_bad, loss_good]
            }
            Self::Timed(_) => [0; 4],
        }
    }
}

/// Two states with their own loss (Gilbert 1960, Elliott 1963) and one step before every packet,
/// starting in the good state. With `loss_bad` certain and `loss_good` zero, bursts have a mean
/// length of 1/r packets and p/(p+r) of all packets are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GilbertElliott {
    /// Probability of moving from the good state to the bad one.
    pub p: u32,
    /// Probability of moving from the bad state to the good one.
    pub r: u32,
    /// Loss in the bad state.
    pub loss_bad: u32,
    /// Loss in the good state.
    pub loss_good: u32,
}

/// Two states in continuous time, starting in the good one: each lasts for an exponentially
/// distributed time, whether packets are sent or not. The bad one loses all, the good one nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedBursts {
    /// Mean time between two bursts; 0 counts as 1.
    pub good_nanos: Nanos,
    /// Mean length of a burst; 0 counts as 1.
    pub bad_nanos: Nanos,
}

/// Shorter means after which a state is independent of the one before (e^-64).
const FORGOTTEN: u64 = 64;

#[derive(Debug)]
pub(super) struct LossProcess {
    loss: Loss,
    is_bad: bool,
    /// End of the present state, if states last for a time.
    until: Option<Nanos>,
    dice: Dice,
}

impl LossProcess {
    pub fn new(loss: Loss, dice: Dice) -> Self {
        Self { loss, is_bad: false, until: None, dice }
    }

    /// Decides whether the next packet, which leaves at `at`, is lost.
    pub fn loses(&mut self, at: Nanos) -> bool {
        match self.loss {
            Loss::Independent(parts) => self.dice.happens(parts),
            Loss::GilbertElliott(GilbertElliott { p, r, loss_bad, loss_good }) => {
                let changes = self.dice.happens(if self.is_bad { r } else { p });
                self.is_bad ^= changes;
                self.dice.happens(if self.is_bad { loss_bad } else { loss_good })
            }
            Loss::Timed(bursts) => self.is_in_burst(bursts, at),
        }
    }

    fn is_in_burst(&mut self, bursts: TimedBursts, at: Nanos) -> bool {
        let (good, bad) = (bursts.good_nanos.max(1), bursts.bad_nanos.max(1));
        let mut until = match self.until {
            Some(until) => until,
            None => self.dice.exponential(good),
        };
        // After a long pause, as few draws as after a short one.
        if at.saturating_sub(until) > good.min(bad).saturating_mul(FORGOTTEN) {
            self.is_bad = self.dice.up_to(good.saturating_add(bad) - 1) < bad;
            let mean = if self.is_bad { bad } else { good };
            until = at.saturating_add(self.dice.exponential(mean).max(1));
        }
        while until <= at {
            self.is_bad = !self.is_bad;
            let mean = if self.is_bad { bad } else { good };
            until = until.saturating_add(self.dice.exponential(mean).max(1));
        }
        self.until = Some(until);
        self.is_bad
    }
}
