//! Worlds that must satisfy every rule, and checkers that must notice when one does not.

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::link::{LinkConfig, LinkError, Loss};
use sealane_proto::session::{BURST_PACKETS, Detection, PayloadMode, Reliability};

use crate::memory::Sabotage;
use crate::world::{WorldSabotage, run_sabotaged};
use crate::{Outcome, Rule, Scenario, ScenarioError, run};

mod acceptance;
mod cold;
mod marks;
mod parity;
mod paths;
mod recovery;
mod ring;
mod steering;

const CODED: Reliability = Reliability::ErasureCoded { k: 8, m: 3, depth: 1 };
const BOTH: [Reliability; 2] = [Reliability::SelectiveRepeat, CODED];
const PERCENT: u32 = 10_000_000;
const MILLISECOND: u64 = 1_000_000;

/// Runs a scenario and requires that no rule is broken; a failure says how to replay it.
fn check(scenario: &Scenario) -> Outcome {
    let outcome = run(scenario).expect("a valid scenario");
    let seed = scenario.seed;
    assert!(
        outcome.violations.is_empty(),
        "world {seed}: {:#?}\nreplay: sealane_sim::run(&{scenario:?})\nor, if it is a hostile \
         world: SEALANE_SIM_SEED={seed} cargo test -p sealane-sim hostile",
        outcome.violations,
    );
    assert!(outcome.completion_nanos.iter().all(Option::is_some));
    outcome
}

/// A world in which everything goes wrong, differently for each seed.
fn hostile(seed: u64) -> Scenario {
    let mut draws = ChaCha8Rng::seed_from_u64(seed);
    let mut below = |end: u64| draws.next_u64() % end;
    let delay_nanos = [20_000, MILLISECOND, 12_500_000, 80 * MILLISECOND][below(4) as usize];
    let rate_bytes_per_second = [250_000, 25_000_000, 1_250_000_000][below(3) as usize];
    let reliability = match below(2) {
        0 => Reliability::SelectiveRepeat,
        _ => Reliability::ErasureCoded {
            k: 1 + below(40) as u8,
            m: 1 + below(12) as u8,
            depth: 1 + below(6) as u8,
        },
    };
    let path = LinkConfig {
        loss: Loss::Independent(PERCENT * below(11) as u32),
        duplicate_parts_per_billion: PERCENT * below(7) as u32,
        reorder_parts_per_billion: PERCENT * below(13) as u32,
        reorder_nanos_max: delay_nanos * below(4),
        corrupt_parts_per_billion: PERCENT * below(5) as u32,
        ..LinkConfig::clean(rate_bytes_per_second * 8, delay_nanos, 1 << 20)
    };
    let start = MILLISECOND * below(300);
    let slots = 1 << below(5);
    let detection = [Detection::Reports, Detection::Timeout][usize::from(below(4) == 0)];
    Scenario {
        reliability,
        detection,
        streams: below(2) == 0,
        reordering: [0, path.reorder_nanos_max][below(2) as usize],
        unit_bytes: [256, 1408, 4096][below(3) as usize],
        chunk_units: 1 + below(9) as u16,
        message_bytes_max: 40_000 >> below(8),
        slots,
        depth: 1 + below(slots.into()) as u16,
        rate_bytes_per_second,
        forward: path,
        backward: LinkConfig { loss: Loss::Independent(PERCENT * below(11) as u32), ..path },
        blackout: (below(4) == 0).then_some((start, start + MILLISECOND * 80)),
        ..Scenario::small(seed)
    }
}

/// A hostile world with the wanted property, and enough messages for every fault to occur.
fn hostile_with(is_wanted: impl Fn(&Scenario) -> bool) -> Scenario {
    let found = (1000..2000).map(hostile).find(is_wanted).expect("such a world");
    Scenario { count: 60, message_bytes_max: 40_000, ..found }
}

#[test]
fn a_clean_path_needs_nothing_twice() {
    for reliability in BOTH {
        let outcome = check(&Scenario { reliability, ..Scenario::small(1) });
        assert_eq!(outcome.sender.retransmitted_packets, 0);
        assert_eq!(outcome.receiver.decoded_units, 0);
        assert_eq!(outcome.receiver.duplicates, 0);
        assert_eq!(outcome.receiver.forged + outcome.receiver.replayed, 0);
        assert_eq!(outcome.sender.sends_completed, 8);
        assert_eq!(outcome.sender.payload_bytes_sent, outcome.receiver.payload_bytes_received);
        let srtt = outcome.sender.srtt_nanos;
        assert!((25 * MILLISECOND..26 * MILLISECOND).contains(&srtt), "{srtt}");
    }
}

#[test]
fn loss_from_none_to_a_tenth_is_survived() {
    for loss in [0, PERCENT / 1000, PERCENT / 10, PERCENT, 10 * PERCENT] {
        for reliability in BOTH {
            let mut scenario = Scenario { reliability, count: 20, ..Scenario::small(7) };
            scenario.message_bytes_max = 200_000;
            scenario.forward.loss = Loss::Independent(loss);
            scenario.backward.loss = Loss::Independent(loss);
            let outcome = check(&scenario);
            if loss == 10 * PERCENT {
                assert!(outcome.sender.retransmitted_packets > 0);
                assert_eq!(outcome.receiver.decoded_units > 0, reliability == CODED);
            }
        }
    }
}

/// `SEALANE_SIM_SEED=n` runs only world n; `SEALANE_SIM_WORLDS=n` runs n worlds, from world
/// `SEALANE_SIM_FIRST` on.
#[test]
fn hundreds_of_hostile_worlds_stay_whole() {
    let number = |name| {
        let text = std::env::var(name).ok()?;
        Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
    };
    let seeds = if let Some(seed) = number("SEALANE_SIM_SEED") {
        seed..seed + 1
    } else {
        let first = number("SEALANE_SIM_FIRST").unwrap_or(0);
        first..first + number("SEALANE_SIM_WORLDS").unwrap_or(300)
    };
    for seed in seeds {
        check(&hostile(seed));
    }
}

#[test]
fn the_faults_are_really_there() {
    let outcome = check(&hostile_with(|scenario| {
        let LinkConfig { corrupt_parts_per_billion, duplicate_parts_per_billion, .. } =
            scenario.forward;
        corrupt_parts_per_billion > 0 && duplicate_parts_per_billion > 0
    }));
    assert!(outcome.receiver.forged > 0, "{:?}", outcome.receiver);
    assert!(outcome.receiver.replayed > 0, "{:?}", outcome.receiver);
    assert!(outcome.forward.lost_packets > 0);
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in [3, 8, 77] {
        assert_eq!(check(&hostile(seed)), check(&hostile(seed)));
    }
    assert_ne!(check(&hostile(3)).trace_hash, check(&hostile(5)).trace_hash);
}

#[test]
fn a_blackout_heals_without_an_error_and_without_a_flood() {
    for reliability in BOTH {
        let mut scenario = Scenario { reliability, count: 4, ..Scenario::small(5) };
        scenario.message_bytes_min = 2_000_000;
        scenario.message_bytes_max = 2_000_000;
        scenario.blackout = Some((150 * MILLISECOND, 10_150 * MILLISECOND));
        let outcome = check(&scenario);
        assert_eq!(outcome.sender.stalls, 1);
        assert!(outcome.elapsed_nanos < 13_000 * MILLISECOND, "{}", outcome.elapsed_nanos);
        // Ten seconds at the rate would be 250 MB.
        assert!(outcome.sender.wire_bytes_sent < 40_000_000, "{}", outcome.sender.wire_bytes_sent);
    }
}

#[test]
fn lost_acknowledgements_cost_no_payload() {
    let mut scenario = Scenario { count: 50, ..Scenario::small(9) };
    scenario.backward.loss = Loss::Independent(10 * PERCENT);
    check(&scenario);
}

#[test]
fn a_shallow_buffer_is_never_overrun_at_the_agreed_rate() {
    let mut scenario = Scenario::small(2);
    scenario.message_bytes_min = 1_000_000;
    scenario.message_bytes_max = 1_000_000;
    scenario.forward.buffer_bytes = BURST_PACKETS * 1520;
    let outcome = check(&scenario);
    assert_eq!(outcome.forward.overflowed_packets, 0);
    // Slightly faster than the path, and it is overrun.
    scenario.rate_bytes_per_second += scenario.rate_bytes_per_second / 4;
    assert!(check(&scenario).forward.overflowed_packets > 0);
}

#[test]
fn every_loss_pattern_of_a_small_block_is_mended_or_resent() {
    let reliability = Reliability::ErasureCoded { k: 4, m: 2, depth: 1 };
    let mut decoded = 0;
    let mut resent = 0;
    for seed in 0..400 {
        let mut scenario = Scenario { reliability, count: 1, depth: 1, ..Scenario::small(seed) };
        scenario.message_bytes_min = 4 * 1408 - 100;
        scenario.message_bytes_max = 4 * 1408;
        scenario.forward.loss = Loss::Independent(30 * PERCENT);
        let outcome = check(&scenario);
        decoded += u32::from(outcome.receiver.decoded_units > 0);
        resent += u32::from(outcome.sender.fallbacks > 0);
    }
    assert!(decoded > 100 && resent > 30, "{decoded} {resent}");
}

#[test]
fn an_erasure_code_spares_the_time_out() {
    let detection = Detection::Timeout;
    let mut scenario = Scenario { reliability: CODED, detection, depth: 1, ..Scenario::fast(4) };
    scenario.count = 100;
    scenario.message_bytes_min = 1 << 20;
    scenario.message_bytes_max = 1 << 20;
    scenario.forward.loss = Loss::Independent(PERCENT / 10);
    let coded = check(&scenario);
    assert_eq!(coded.sender.retransmitted_packets, 0);
    assert!(coded.receiver.decoded_units > 0);
    scenario.reliability = Reliability::SelectiveRepeat;
    let repeated = check(&scenario);
    assert!(repeated.sender.retransmitted_packets > 0);
    let sum = |outcome: &Outcome| outcome.completion_nanos.iter().flatten().sum::<u64>();
    assert!(sum(&coded) * 3 < sum(&repeated) * 2, "{} {}", sum(&coded), sum(&repeated));
}

#[test]
fn each_checker_notices_its_fault() {
    let noisy = hostile_with(|scenario| scenario.forward.corrupt_parts_per_billion > 0);
    // Long enough for several bursts at the rate, so that double counting adds up.
    let noisy = Scenario { message_bytes_max: 400_000, ..noisy };
    let cases = [
        (WorldSabotage::Memory(Sabotage::FlipBit), Rule::PayloadEqual),
        (WorldSabotage::Memory(Sabotage::WriteTwice), Rule::WrittenOnce),
        (WorldSabotage::Memory(Sabotage::WriteBeyond), Rule::PayloadEqual),
        (WorldSabotage::Memory(Sabotage::LandEarly), Rule::ChunkLanded),
        (WorldSabotage::Memory(Sabotage::WriteOnRefused), Rule::MemoryUnchanged),
        (WorldSabotage::ForgetCredit, Rule::CreditKept),
        (WorldSabotage::CountTwice, Rule::RateKept),
        (WorldSabotage::CompleteTwice, Rule::CompletedOnce),
        (WorldSabotage::CutWires, Rule::CompletedOnce),
    ];
    check(&noisy);
    for (sabotage, rule) in cases {
        let outcome = run_sabotaged(&noisy, sabotage).expect("a valid scenario");
        let found: Vec<Rule> = outcome.violations.iter().map(|violation| violation.rule).collect();
        assert!(found.contains(&rule), "{sabotage:?} gave {found:?}");
    }
}

#[test]
fn a_run_that_takes_too_long_is_a_finding() {
    let scenario = Scenario { time_max: MILLISECOND, ..Scenario::small(1) };
    let outcome = run(&scenario).expect("a valid scenario");
    assert!(outcome.violations.iter().any(|violation| violation.rule == Rule::Finished));
}

#[test]
fn impossible_scenarios_are_refused() {
    let small = Scenario::small(1);
    let refusal = |scenario: Scenario| run(&scenario).map(drop);
    let count = Scenario { count: 0, ..small.clone() };
    assert_eq!(refusal(count), Err(ScenarioError::Count(0)));
    let depth = Scenario { depth: 9, ..small.clone() };
    assert_eq!(refusal(depth), Err(ScenarioError::Depth(9)));
    let range = Scenario { message_bytes_min: 50_000, ..small.clone() };
    assert_eq!(refusal(range), Err(ScenarioError::MessageBytes(50_000, 40_000)));
    let memory = Scenario { message_bytes_max: 1 << 30, ..small.clone() };
    assert_eq!(refusal(memory), Err(ScenarioError::Memory(8 << 30)));
    let reliability = Reliability::ErasureCoded { k: 4, m: 0, depth: 1 };
    let code = Scenario { reliability, ..small.clone() };
    assert_eq!(refusal(code), Err(ScenarioError::Reliability(reliability)));
    let mut likely = small.clone();
    likely.forward.loss = Loss::Independent(101 * PERCENT);
    assert_eq!(refusal(likely), Err(ScenarioError::Link(LinkError::Probability(101 * PERCENT))));
    let mut corrupt = Scenario::fast(1);
    corrupt.forward.corrupt_parts_per_billion = 1;
    assert_eq!(refusal(corrupt), Err(ScenarioError::Corruption));
    let tiny = Scenario { unit_bytes: 255, ..small };
    assert!(matches!(refusal(tiny), Err(ScenarioError::Session(_))));
}
