//! Compares the stack with the completion-time model of SDR-RDMA (arXiv:2505.05366, appendix A) at
//! 400 Gbit/s, 25 ms and 4 KiB units. While M · T_INJ is below the time-out, means agree within 5
//! %. For longer messages, retransmissions delay new units: the model is a lower bound, and 10 %
//! above it an upper bound.

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::link::{LinkConfig, Loss};
use sealane_proto::session::{Detection, Reliability};
use sealane_sim::{Scenario, run};

/// Wire bytes of a full unit: payload, header, descriptor, tag, UDP and IP.
const WIRE_BYTES: f64 = 4096.0 + 39.0 + 16.0 + 28.0;
const INJECTION: f64 = WIRE_BYTES * 8.0 / 400e9;
/// At 1 Gbit/s.
const SLOW_INJECTION: f64 = WIRE_BYTES * 8.0 / 1e9;
const RTT: f64 = 0.025;
const RTO: f64 = 3.0 * RTT;
const MODEL_SAMPLES: u32 = 4000;

fn uniform(random: &mut ChaCha8Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
}

/// Mean of T_SR(M): every unit is repeated after the time-out + T_INJ until it is not lost.
fn selective_repeat(units: u32, loss: f64, timeout: f64, injection: f64) -> f64 {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut sum = 0.0;
    for _ in 0..MODEL_SAMPLES {
        let mut last = f64::from(units) * injection;
        // Only lost units matter, so jump from one to the next.
        let mut unit = 0.0;
        loop {
            unit += 1.0 + (uniform(&mut random).ln() / (1.0 - loss).ln()).floor();
            if unit > f64::from(units) {
                break;
            }
            let mut repeats = 1.0;
            while uniform(&mut random) < loss {
                repeats += 1.0;
            }
            last = f64::max(last, unit * injection + repeats * (timeout + injection));
        }
        sum += last + RTT;
    }
    sum / f64::from(MODEL_SAMPLES)
}

/// Mean of T_EC(M) without fallback: data, then parity in rounds over the blocks of a group, until
/// each block has as many parity symbols as it lacks data.
fn erasure_coded(units: u32, k: u32, m: u32, loss: f64) -> f64 {
    let mut random = ChaCha8Rng::seed_from_u64(2);
    let blocks = units / k;
    let group = blocks.min((16 << 20) / (m * 4096));
    let mut sum = 0.0;
    for _ in 0..MODEL_SAMPLES / 40 {
        let mut last = units;
        for block in 0..blocks {
            let mut lacking = (0..k).filter(|_| uniform(&mut random) < loss).count();
            let first = block / group * group;
            let mut place = units + first * m + block % group + 1;
            while lacking > 0 {
                last = last.max(place);
                lacking -= usize::from(uniform(&mut random) >= loss);
                place += group.min(blocks - first);
            }
        }
        sum += f64::from(last) * INJECTION + RTT;
    }
    sum / f64::from(MODEL_SAMPLES / 40)
}

fn simulated(
    megabytes: u64,
    loss: u32,
    (reliability, detection): (Reliability, Detection),
    count: u32,
) -> f64 {
    mean_of(Scenario { reliability, detection, count, ..Scenario::fast(20) }, megabytes, loss)
}

fn mean_of(mut scenario: Scenario, megabytes: u64, loss_parts_per_billion: u32) -> f64 {
    scenario.message_bytes_min = megabytes << 20;
    scenario.message_bytes_max = megabytes << 20;
    scenario.forward.loss = Loss::Independent(loss_parts_per_billion);
    let outcome = run(&scenario).expect("a valid scenario");
    assert_eq!(outcome.violations, [], "replay: sealane_sim::run(&{scenario:?})");
    let sum: u64 = outcome.completion_nanos.iter().flatten().sum();
    sum as f64 / 1e9 / f64::from(scenario.count)
}

fn assert_close(case: &str, stack: f64, model: f64) {
    let error = stack / model - 1.0;
    println!(
        "{case}: stack {:.3} ms, model {:.3} ms, {:+.2} %",
        stack * 1e3,
        model * 1e3,
        error * 1e2
    );
    assert!(error.abs() <= 0.05, "{case}: stack {stack} s, model {model} s, error {error}");
}

#[test]
fn selective_repeat_takes_as_long_as_in_the_model() {
    let cases = [
        (1, 1_000_000, 2000),
        (8, 100_000, 1000),
        (8, 1_000_000, 600),
        (8, 10_000_000, 400),
        (128, 100_000, 30),
    ];
    for (megabytes, loss, count) in cases {
        for (detection, timeout) in [(Detection::Timeout, RTO), (Detection::Reports, RTT)] {
            let scheme = (Reliability::SelectiveRepeat, detection);
            let stack = simulated(megabytes, loss, scheme, count);
            let units = (megabytes << 20 >> 12) as u32;
            let model = selective_repeat(units, f64::from(loss) / 1e9, timeout, INJECTION);
            let case = format!("SR {megabytes} MiB, loss {loss} ppb, {detection:?}");
            assert_close(&case, stack, model);
        }
    }
}

#[test]
fn a_message_longer_than_a_time_out_takes_at_most_a_tenth_longer_than_in_the_model() {
    for loss in [100_000, 1_000_000, 10_000_000] {
        for (detection, timeout) in [(Detection::Timeout, RTO), (Detection::Reports, RTT)] {
            let fast = Scenario::fast(27);
            let link = LinkConfig { rate_bits_per_second: 1_000_000_000, ..fast.forward };
            let scenario = Scenario {
                detection,
                count: 30,
                rate_bytes_per_second: 125_000_000,
                forward: link,
                backward: link,
                ..fast
            };
            let stack = mean_of(scenario, 32, loss);
            let units = 32 << 20 >> 12;
            assert!(f64::from(units) * SLOW_INJECTION > 3.0 * RTO);
            let model = selective_repeat(units, f64::from(loss) / 1e9, timeout, SLOW_INJECTION);
            println!(
                "32 MiB, loss {loss} ppb, {detection:?}: {:+.2} %",
                (stack / model - 1.0) * 1e2
            );
            // Two percent tolerance for random variation.
            assert!(
                (0.98..=1.1).contains(&(stack / model)),
                "{loss} {detection:?}: {stack} {model}"
            );
        }
    }
}

#[test]
fn erasure_coding_takes_as_long_as_in_the_model() {
    let reliability = Reliability::ErasureCoded { k: 32, m: 8, depth: 1 };
    for (megabytes, loss, count) in
        [(1, 10_000_000, 200), (8, 1_000_000, 60), (8, 10_000_000, 60), (128, 10_000_000, 6)]
    {
        let stack = simulated(megabytes, loss, (reliability, Detection::Reports), count);
        let units = (megabytes << 20 >> 12) as u32;
        let model = erasure_coded(units, 32, 8, f64::from(loss) / 1e9);
        assert_close(&format!("EC {megabytes} MiB, loss {loss} ppb"), stack, model);
    }
}
