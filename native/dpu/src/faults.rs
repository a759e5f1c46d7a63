//! What the card does wrong, and how often.

use std::collections::HashMap;
use std::str::FromStr;

use clap::ValueEnum;
use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};

/// A way to do one job wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub enum Fault {
    /// Complete it 1 to 20 ms later.
    Latency,
    /// Complete it after the next one.
    Reorder,
    /// Never complete it.
    Lost,
    /// Complete it twice.
    Duplicate,
    /// Also complete a job that was never submitted.
    Invented,
    /// A tag with a wrong bit.
    WrongTag,
    /// A ciphertext with a wrong bit, and the tag of the right one.
    WrongCiphertext,
    /// The ciphertext and tag of a plaintext with a wrong bit.
    WrongPlaintext,
    /// Ciphertext and tag made with the nonce of an earlier job.
    OldNonce,
    /// As `OldNonce`, but with the tag that the right nonce has for this ciphertext.
    HiddenNonce,
    /// Report that it failed.
    Refused,
    /// Do nothing more on this queue.
    Dead,
    /// Announce many more completions than there are.
    Overrun,
    /// Write to the slot again 1 ms after its completion.
    LateWrite,
    /// For 100 ms after the end of a queue, write to all of its slots and its completions.
    AfterEnd,
    /// Say that there is room for many more jobs and keys than there is, and lose those jobs.
    Lies,
}

/// A fault with its probability: `NAME=PROBABILITY`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chance {
    fault: Fault,
    probability: f64,
}

impl FromStr for Chance {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, number) = text.split_once('=').unwrap_or((text, "1"));
        let fault = Fault::from_str(name, false).map_err(|_| {
            let names = Fault::value_variants().iter().filter_map(Fault::to_possible_value);
            let known: Vec<String> = names.map(|value| value.get_name().to_owned()).collect();
            format!("no fault of this name; there are {}", known.join(", "))
        })?;
        let probability: f64 = number.parse().map_err(|error| format!("{number:?}: {error}"))?;
        if !(0.0..=1.0).contains(&probability) {
            return Err(format!("{number} is no probability"));
        }
        Ok(Self { fault, probability })
    }
}

/// Draws faults.
#[derive(Debug)]
pub struct Faults {
    chances: HashMap<Fault, f64>,
    random: ChaCha8Rng,
}

impl Faults {
    /// The draws of a seed.
    pub fn new(chances: &[Chance], seed: u64) -> Self {
        let chances = chances.iter().map(|chance| (chance.fault, chance.probability)).collect();
        Self { chances, random: ChaCha8Rng::seed_from_u64(seed) }
    }

    /// Whether this job has the fault.
    pub fn draw(&mut self, fault: Fault) -> bool {
        let Some(probability) = self.chances.get(&fault).copied() else { return false };
        let drawn = f64::from(self.random.next_u32()) / f64::from(u32::MAX);
        drawn < probability || probability >= 1.0
    }

    /// A number.
    pub fn number(&mut self) -> u64 {
        self.random.next_u64()
    }
}
