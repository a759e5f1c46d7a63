//! Compares sealing, node functions and erasure coding with other libraries on one core.
//!
//! Rounds are interleaved. Prints one line of JSON per case and round for `python -m benchmarks.kernels`.
//! Arguments: rounds, then what to run ("aead", "node", "erasure", "parity"; default: all).

mod aead;
mod erasure;
mod isal;
mod node;
mod parity;

use std::time::Instant;

/// Minimum duration of a sample in nanoseconds, so that clock and loop don't matter.
const SAMPLE_NANOS: f64 = 400_000.0;

/// A named piece of work; the call number makes nonces differ.
pub struct Case<'a> {
    /// Library or kernel.
    pub name: String,
    /// The work, done once per call.
    pub work: Box<dyn FnMut(u64) + 'a>,
}

impl<'a> Case<'a> {
    /// Returns a case.
    pub fn new(name: impl Into<String>, work: impl FnMut(u64) + 'a) -> Self {
        Self { name: name.into(), work: Box::new(work) }
    }
}

/// Runs all cases in turn and prints every sample; each round starts with another case.
pub fn measure(rounds: u64, what: &str, shape: &str, bytes: usize, cases: &mut [Case<'_>]) {
    let calls: Vec<u64> = cases.iter_mut().map(calls_per_sample).collect();
    let count = cases.len() as u64;
    let mut call = 1 << 32;
    for round in 0..rounds {
        for turn in 0..count {
            let index = ((round + turn) % count) as usize;
            let case = &mut cases[index];
            let start = Instant::now();
            for _ in 0..calls[index] {
                call += 1;
                (case.work)(call);
            }
            let nanos = start.elapsed().as_nanos() as f64 / calls[index] as f64;
            println!(
                r#"{{"what": "{what}", "shape": "{shape}", "who": "{}", "bytes": {bytes}, "round": {round}, "nanos": {nanos:.1}}}"#,
                case.name
            );
        }
    }
}

/// Returns the number of calls that fill a sample; finding it also warms up the case.
fn calls_per_sample(case: &mut Case<'_>) -> u64 {
    let mut calls = 1;
    loop {
        let start = Instant::now();
        (0..calls).for_each(|call| (case.work)(call));
        let nanos = start.elapsed().as_nanos() as f64;
        if nanos >= SAMPLE_NANOS {
            return calls;
        }
        calls = (calls * 2).max((calls as f64 * SAMPLE_NANOS / nanos.max(1.0)).min(1e6) as u64);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rounds = arguments.first().map_or(21, |rounds| rounds.parse().expect("rounds: a number"));
    let runs = |what: &str| arguments.len() < 2 || arguments[1..].iter().any(|name| name == what);
    if runs("aead") {
        aead::measure_all(rounds);
    }
    if runs("node") {
        node::measure_all(rounds);
    }
    if runs("erasure") {
        erasure::measure_all(rounds);
    }
    if runs("parity") {
        parity::measure_all(rounds);
    }
}
