//! Seeded randomness: dice, and the loss processes that use them.

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};

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
    /// In bursts.
    GilbertElliott(GilbertElliott),
}

impl Loss {
    pub(super) fn parts(self) -> [u32; 4] {
        match self {
            Self::Independent(parts) => [parts, 0, 0, 0],
            Self::GilbertElliott(GilbertElliott { p, r, loss_bad, loss_good }) => {
                [p, r, loss_bad, loss_good]
            }
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

#[derive(Debug)]
pub(super) struct LossProcess {
    loss: Loss,
    is_bad: bool,
    dice: Dice,
}

impl LossProcess {
    pub fn new(loss: Loss, dice: Dice) -> Self {
        Self { loss, is_bad: false, dice }
    }

    /// Decides whether the next packet is lost.
    pub fn loses(&mut self) -> bool {
        match self.loss {
            Loss::Independent(parts) => self.dice.happens(parts),
            Loss::GilbertElliott(GilbertElliott { p, r, loss_bad, loss_good }) => {
                let changes = self.dice.happens(if self.is_bad { r } else { p });
                self.is_bad ^= changes;
                self.dice.happens(if self.is_bad { loss_bad } else { loss_good })
            }
        }
    }
}
