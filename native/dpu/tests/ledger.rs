//! Cards that do everything wrong seal for a gateway under load: on its wire no IV seals twice, and
//! each sector opens to what was written. `make accelerator-ledger` gives them 10^6 jobs; SEED=n
//! repeats their draws, if not how threads and processes meet.

mod running;
mod volume;
mod wire;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use sealane_engine::accelerator::Device;
use sealane_engine::storage::gateway::GatewayVolume;
use sealane_proto::sector::{BLOCK_BYTES, CounterRange, DATA_BYTES};

use running::Running;
use volume::{SECTORS, connect, namespace, plan, seal_key, statistic};
use wire::{Arrived, Wire};

/// What a card of a life does. The first ones go on; after the others the gateway gives it up.
const LIVES: [&str; 18] = [
    "full",
    "latency",
    "reorder",
    "late-write",
    "after-end",
    "lost",
    "duplicate",
    "invented",
    "overrun",
    "wrong-tag",
    "wrong-ciphertext",
    "refused",
    "old-nonce",
    "hidden-nonce",
    "dead",
    "lies",
    "stop",
    "kill",
];
/// Those that the card itself makes repeat nonces; nothing of that may be sent.
const REPEATING: [&str; 2] = ["old-nonce", "hidden-nonce"];
const JOBS_OF_A_LIFE: u64 = 4000;
const JOBS_OF_A_LIFE_MIN: u64 = 500;
const LIFE: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(1);
/// In how many looks a card that was stopped or killed must have been given up. Looks, not seconds:
/// on a machine that stands still or is busy, the load's thread gets no more time than this one.
const GIVEN_UP_LOOKS: u32 = 10_000;
const PROGRESS: Duration = Duration::from_secs(5);
/// Lives without a job after which the load counts as stuck.
const STALLED_LIVES: u64 = 2 * LIVES.len() as u64;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// A card's arguments in a life of so many jobs; a shorter one has as many faults.
fn arguments(kind: &str, jobs: u64, random: &mut ChaCha8Rng) -> Vec<String> {
    let profile = match kind {
        "full" | "lies" => "tiny",
        _ => ["bf3-dpdk", "bf3-doca"][usize::from(!random.next_u32().is_multiple_of(4))],
    };
    let rare = 0.8 / jobs as f64 * f64::from(1 + random.next_u32() % 10);
    let fault = match kind {
        "full" | "stop" | "kill" => None,
        "after-end" | "lies" => Some(kind.to_owned()),
        "latency" | "reorder" => Some(format!("{kind}=0.05")),
        _ => Some(format!("{kind}={rare}")),
    };
    let seed = random.next_u64().to_string();
    let mut made = vec!["--profile".into(), profile.into(), "--seed".into(), seed];
    made.extend(fault.map(|fault| format!("--fault={fault}")));
    made
}

fn signal(card: &Running, signal: Signal) {
    kill_process(Pid::from_child(&card.process), signal).unwrap();
}

/// Lets a card seal until it is given up, or its time or `jobs_of_a_life` are over.
fn live(
    volume: &GatewayVolume,
    card: &Running,
    kind: &str,
    jobs_of_a_life: u64,
    random: &mut ChaCha8Rng,
) {
    // On a busy machine a card may take longer to answer than it has.
    let Ok(device) = card.try_connect() else { return };
    let device: Arc<dyn Device> = Arc::new(device);
    let count = |name| statistic(volume, name);
    let (jobs, lost) = (count("accelerator_jobs"), count("accelerators_lost"));
    let start = Instant::now();
    // After so many jobs it is stopped or killed.
    let halt = u64::from(random.next_u32()) % jobs_of_a_life;
    let fails = matches!(kind, "stop" | "kill");
    let mut looks_since_halt = None;
    loop {
        // Also gives the queue of a new load to the card; fails once the card is gone.
        let outcome = volume.accelerate(Some(Arc::clone(&device)));
        let is_lost = count("accelerators_lost") > lost;
        if outcome.is_err() || is_lost {
            break;
        }
        let given = count("accelerator_jobs") - jobs;
        if let Some(looks) = &mut looks_since_halt {
            *looks += 1;
            assert!(
                *looks < GIVEN_UP_LOOKS,
                "{kind}: a card that does nothing is still used after {:?}: {:?}",
                start.elapsed(),
                volume.statistics()
            );
        } else if fails && given > halt {
            looks_since_halt = Some(0);
            signal(card, if kind == "stop" { Signal::STOP } else { Signal::KILL });
        } else if start.elapsed() >= LIFE || given >= jobs_of_a_life {
            break;
        }
        std::thread::sleep(LOOK);
    }
    if kind == "stop" {
        // What it had begun it ends now, in memory that nobody else has.
        signal(card, Signal::CONT);
    }
    if random.next_u32().is_multiple_of(2) {
        volume.accelerate(None).unwrap();
    }
}

/// Writes to the volume until `is_over`; returns the number of sectors.
fn load(volume: &GatewayVolume, arrived: &Arc<Arrived>, seed: u64, is_over: &AtomicBool) -> u64 {
    let namespace = namespace(Wire::new(SECTORS, arrived));
    let mut written = 0;
    for epoch in 1.. {
        if is_over.load(Ordering::Relaxed) {
            let (controller, fd, back) = connect(&namespace, epoch);
            let reads = plan(false, 1, Duration::from_millis(200), seed);
            volume.run_load(fd, back, &reads).expect("every sector opens");
            controller.close();
            break;
        }
        arrived.begin();
        let (controller, fd, back) = connect(&namespace, epoch);
        let sectors = [8, 8, 4, 1][epoch as usize % 4];
        let plan = plan(true, sectors, Duration::from_secs(1), seed.wrapping_add(epoch));
        let result = volume.run_load(fd, back, &plan).expect("no write fails");
        written += result.commands * u64::from(sectors);
        controller.close();
    }
    written
}

#[test]
fn the_wire_shows_an_iv_used_twice_a_sector_that_does_not_open_and_other_bytes() {
    let (key, arrived) = (seal_key(), Arrived::new(seal_key()));
    let mut counters = CounterRange::new(1, 1, 1, 1 << 20).unwrap();
    let mut sealed = |lba, byte| {
        let mut block = [0; BLOCK_BYTES];
        key.seal(counters.take().unwrap(), lba, &[byte; DATA_BYTES], &mut block);
        block
    };
    let first = sealed(1, 1);
    arrived.note(1, &first);
    assert!(arrived.look(|noted| noted.wrong.is_empty()));
    let mut changed = sealed(2, 2);
    changed[0] ^= 1;
    for (lba, block, complaint) in [
        (1, first, "seals sectors 1 and 1"),
        (2, changed, "doesn't open"),
        (9, sealed(9, 9), "other bytes"),
    ] {
        let before = arrived.look(|noted| noted.wrong.len());
        arrived.note(lba, &block);
        let found = arrived.look(|noted| noted.wrong[before..].to_vec());
        assert!(found.len() == 1 && found[0].contains(complaint), "{found:?}");
    }
}

#[test]
fn no_iv_seals_twice_and_nothing_wrong_leaves_whatever_cards_do() {
    let jobs_wanted = number("JOBS").unwrap_or(10_000);
    let jobs_of_a_life =
        (jobs_wanted / LIVES.len() as u64).clamp(JOBS_OF_A_LIFE_MIN, JOBS_OF_A_LIFE);
    let seed = number("SEALANE_SEED").unwrap_or(1);
    eprintln!("{jobs_wanted} jobs, SEED={seed}");
    let volume = volume::volume();
    let arrived = Arrived::new(seal_key());
    let (is_over, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut given: Vec<[u8; 12]> = Vec::new();
    let mut repeated = HashSet::new();
    let mut lives: BTreeMap<&str, u64> = BTreeMap::new();
    let start = Instant::now();
    let count = |name| statistic(&volume, name);
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| {
            written.store(load(&volume, &arrived, seed, &is_over), Ordering::Relaxed);
        });
        let (mut shown, mut moved) = (Instant::now(), (0, 0));
        // A card of an earlier life still runs, and may write to memory that it had.
        let mut earlier: Option<(Running, &str)> = None;
        let mut end = |(card, kind): (Running, &str)| {
            let nonces = card.nonces();
            if REPEATING.contains(&kind) {
                repeated.extend(nonces);
            } else {
                given.extend(nonces);
            }
        };
        for life in 0_u64.. {
            let jobs = count("accelerator_jobs");
            // Each kind, and what is looked at in the end, must have happened.
            let has_all = ["accelerator_refusals", "accelerators_lost", "sectors_inline"]
                .iter()
                .all(|name| count(name) > 0);
            let is_enough = jobs >= jobs_wanted && life >= LIVES.len() as u64 && has_all;
            if is_enough || loading.is_finished() {
                break;
            }
            let kind = LIVES[(life % LIVES.len() as u64) as usize];
            let mut random = ChaCha8Rng::seed_from_u64(seed << 32 | life);
            let arguments = arguments(kind, jobs_of_a_life, &mut random);
            let card = Running::start(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
            live(&volume, &card, kind, jobs_of_a_life, &mut random);
            *lives.entry(kind).or_default() += 1;
            if let Some(earlier) = earlier.replace((card, kind)) {
                end(earlier);
            }
            if count("accelerator_jobs") > moved.0 {
                moved = (count("accelerator_jobs"), life);
            }
            assert!(life - moved.1 < STALLED_LIVES, "SEED={seed}, life {life}: no jobs");
            if shown.elapsed() >= PROGRESS {
                shown = Instant::now();
                let lost = count("accelerators_lost");
                let (jobs, seconds) = (count("accelerator_jobs"), start.elapsed().as_secs());
                eprintln!("{seconds} s: {jobs} jobs, {} cards, {lost} given up", life + 1);
            }
        }
        is_over.store(true, Ordering::Relaxed);
        volume.accelerate(None).unwrap();
        loading.join().expect("the load ends well");
        earlier.into_iter().for_each(end);
    });
    let different: HashSet<[u8; 12]> = given.iter().copied().collect();
    assert_eq!(different.len(), given.len(), "SEED={seed}: a nonce given to cards twice");
    let (jobs, accelerated) = (count("accelerator_jobs"), count("sectors_accelerated"));
    let refused = count("accelerator_refusals");
    arrived.look(|noted| {
        let few: Vec<_> = noted.wrong.iter().take(5).collect();
        assert!(few.is_empty(), "SEED={seed}: {few:?} and others, {} in all", noted.wrong.len());
        assert_eq!(noted.sectors, written.load(Ordering::Relaxed), "each sector arrives once");
        // An IV that a card was given is used up: the processor never seals with it.
        let is_given = |iv: &[u8; 12]| different.contains(iv) || repeated.contains(iv);
        let by_cards = noted.ivs.keys().filter(|(_, iv)| is_given(iv)).count() as u64;
        assert_eq!(by_cards, accelerated, "SEED={seed}: IVs that cards had, on the wire");
        let lost = count("accelerators_lost");
        eprintln!(
            "{jobs} jobs, {accelerated} sealed by cards, {} sectors on the wire, {} of them when a \
             card was full; {} cards, {lost} given up, {refused} results refused, {} s: {lives:?}",
            noted.sectors,
            count("sectors_inline"),
            lives.values().sum::<u64>(),
            start.elapsed().as_secs(),
        );
    });
    assert_eq!(count("refusals"), 0, "all that was read opened");
    assert!(accelerated > 0, "some of what cards do is right");
}
