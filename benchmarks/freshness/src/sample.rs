//! JSON output, clocks and pseudo-random numbers.

use std::fmt::Write as _;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A petabyte in bytes, and in sets of 340 sectors.
pub const PETABYTE_LEAVES: u64 = 1_000_000_000_000_000_u64.div_ceil(4096 * 340);

/// Prints one sample: its kind, and figures by name.
pub fn print(what: &str, figures: &[(&str, f64)]) {
    let mut line = format!("{{\"what\": \"{what}\"");
    for (name, figure) in figures {
        // Writing to a string can't fail.
        let _ = write!(line, ", \"{name}\": {figure}");
    }
    println!("{line}}}");
}

/// Returns the processor time of the process so far.
pub fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the resident memory of the process in bytes.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages = status.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.expect("resident pages") * rustix::param::page_size() as u64
}

/// SplitMix64 (Steele, Lea, Flood).
pub struct Random(pub u64);

impl Random {
    /// Returns the next number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(mixed ^ (mixed >> 31)) * u128::from(bound)) >> 64) as u64
    }
}

/// Returns a percentile of sorted values.
pub fn percentile(sorted: &[u64], percent: f64) -> f64 {
    let index = ((sorted.len() as f64 * percent / 100.0) as usize).min(sorted.len() - 1);
    sorted[index] as f64
}
