//! Worlds: seeded workloads of a store on a device that crashes at any instant, or belongs to an
//! adversary. Every read is checked against the history of its block.
//! `docs/understand/crash-consistency.md` describes the checked properties. `make freshness-worlds`
//! runs 100,000 worlds, `SEED=n make freshness-world` shows one.

mod adversary;
mod attacks;
mod beside;
mod history;
mod in_place_attacks;
mod life;
mod machine;
mod watch;
mod workload;

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::aead::Secret;
use sealane_proto::freshness::leaf::Ivs;
use sealane_proto::freshness::milestone::Milestone;

use super::super::pages::BlockFile;
use super::anchor::{Anchor, AnchorPolicy};
use super::geometry::{Geometry, Sizes};
use super::keys::{Authority, StoreKeys};
use super::map::Map;
use super::placed::Placed;
use super::superblock::Superblock;
use adversary::{ATTACKS, Adversary};
use history::{History, Version};
use life::Life;
use machine::{Crash, Device, PoweredAnchor};
use watch::Watch;
use workload::Workload;

const SUPERBLOCK_UUID: [u8; 16] = [1; 16];
const SUPERBLOCK_SEED: [u8; 32] = [2; 32];
/// Most lives of a world.
const LIVES_MAX: usize = 5;
/// Most steps of a life.
const STEPS_MAX: u64 = 80;
/// Most consecutive openings that may be interrupted or refused.
const OPENINGS_MAX: u32 = 4;

/// A violation of a checked property.
#[derive(Debug)]
pub struct Violation(String);

fn pick(random: &mut ChaCha8Rng, choices: usize) -> usize {
    (random.next_u64() % choices as u64) as usize
}

fn chance(random: &mut ChaCha8Rng, percent: u32) -> bool {
    random.next_u32() % 100 < percent
}

/// Most growths of a store.
const GROWTHS_MAX: usize = 2;

/// The next sizes of a growing store: by half a set, or by one and a half.
fn grown(geometry: &Geometry) -> Option<Geometry> {
    let sizes = geometry.sizes();
    let more = geometry.leaf_entries * [3, 1][geometry.earlier.len() % 2] / 2;
    let (block_count, log_pages) = (sizes.block_count + more, sizes.log_pages + 2);
    let slot_count = if sizes.slot_count == 0 { 0 } else { sizes.slot_count + more };
    let next = Sizes { block_count, slot_count, log_pages, ..sizes };
    geometry.with_extent(next).filter(|next| next.earlier.len() <= GROWTHS_MAX)
}

/// Pages of a device that the store and all its growths fit on.
fn device_pages(geometry: &Geometry) -> u64 {
    let mut largest = geometry.clone();
    while let Some(next) = grown(&largest) {
        largest = next;
    }
    largest.device_pages()
}

/// Counters over worlds, which show what a run has covered.
#[derive(Debug, Default, Clone)]
struct Tally {
    worlds: u64,
    lives: u64,
    steps: u64,
    kills: u64,
    power_cuts: u64,
    growths: u64,
    writes_beside: u64,
    /// Writes that were sent again: those that another version had followed, and those already
    /// current.
    sent_again: [u64; 2],
    durable_writes: u64,
    openings_cut_off: u64,
    openings_refused: u64,
    forks: u64,
    reads_answered: u64,
    reads_refused: u64,
    reads_vouched: u64,
    gateways_assured: u64,
    gateways_refused: u64,
    found_by_scrubs: u64,
    attacks: [u64; ATTACKS.len()],
}

impl Tally {
    fn add(&mut self, other: &Self) {
        let Self { worlds, lives, steps, kills, power_cuts, .. } = other;
        self.worlds += worlds;
        self.lives += lives;
        self.steps += steps;
        self.kills += kills;
        self.power_cuts += power_cuts;
        self.growths += other.growths;
        self.writes_beside += other.writes_beside;
        for (count, more) in self.sent_again.iter_mut().zip(other.sent_again) {
            *count += more;
        }
        self.durable_writes += other.durable_writes;
        self.openings_cut_off += other.openings_cut_off;
        self.openings_refused += other.openings_refused;
        self.forks += other.forks;
        self.reads_answered += other.reads_answered;
        self.reads_refused += other.reads_refused;
        self.reads_vouched += other.reads_vouched;
        self.gateways_assured += other.gateways_assured;
        self.gateways_refused += other.gateways_refused;
        self.found_by_scrubs += other.found_by_scrubs;
        for (count, more) in self.attacks.iter_mut().zip(other.attacks) {
            *count += more;
        }
    }
}

/// The kind of world that a seed makes.
#[derive(Debug, Clone, Copy)]
struct Kind {
    is_honest: bool,
    policy: Option<AnchorPolicy>,
}

struct World<F: Workload> {
    kind: Kind,
    superblock: Superblock,
    secret: Secret,
    device: Arc<Device>,
    anchor: Option<Arc<PoweredAnchor>>,
    adversary: Adversary,
    random: ChaCha8Rng,
    version: Version,
    tally: Tally,
    trace: Vec<String>,
    layout: PhantomData<F>,
}

impl<F: Workload> World<F> {
    fn new(seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let policies = [None, Some(AnchorPolicy::EveryCommit), Some(AnchorPolicy::Checkpoints)];
        let policy = policies[pick(&mut random, 3)];
        Self::of(seed, Kind { is_honest: chance(&mut random, 50), policy })
    }

    fn of(seed: u64, kind: Kind) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed ^ u64::MAX);
        let geometry = F::geometry(&mut random);
        let superblock =
            Superblock { uuid: SUPERBLOCK_UUID, seed: SUPERBLOCK_SEED, geometry: geometry.clone() };
        let device =
            Arc::new(Device::new(device_pages(&geometry), !F::IS_IN_PLACE, !kind.is_honest));
        let anchor = kind.policy.map(|policy| Arc::new(PoweredAnchor::new(&device, policy)));
        Self {
            kind,
            superblock,
            secret: Secret::take(&mut [seed as u8; 32]),
            device,
            anchor,
            random,
            version: 0,
            tally: Tally { worlds: 1, ..Tally::default() },
            trace: vec![format!("seed {seed}: {}, {kind:?}, {geometry:?}", F::NAME)],
            adversary: Adversary::new(geometry),
            layout: PhantomData,
        }
    }

    fn anchor(&self) -> Option<Arc<dyn Anchor>> {
        self.anchor.clone().map(|anchor| anchor as Arc<dyn Anchor>)
    }

    fn file(&self) -> Arc<dyn BlockFile> {
        Arc::clone(&self.device) as Arc<dyn BlockFile>
    }

    fn life(&self, map: Map<F>, history: History) -> Life<F> {
        Life::new(map, history, &self.device, self.anchor.as_ref(), self.kind.is_honest)
    }

    fn create(&mut self) -> std::io::Result<Life<F>> {
        let authority = Authority::Secret(&self.secret);
        let map = Map::create(self.file(), &self.superblock, &authority, self.anchor())?;
        Ok(self.life(map, History::default()))
    }

    fn run(&mut self) -> Result<(), Violation> {
        let mut life = self.create().map_err(|error| Violation(format!("create: {error}")))?;
        if chance(&mut self.random, 30) {
            // With few free slots, slots are soon reused.
            life.fill(&mut self.version)?;
        }
        for _ in 0..=pick(&mut self.random, LIVES_MAX) {
            let lived = self.live(&mut life);
            self.trace.append(&mut life.trace);
            self.tally.reads_answered += life.reads[0];
            self.tally.reads_refused += life.reads[1];
            self.tally.reads_vouched += life.vouched.get();
            self.tally.found_by_scrubs += life.found_by_scrubs;
            self.tally.growths += life.growths;
            self.tally.writes_beside += life.beside;
            for (count, more) in self.tally.sent_again.iter_mut().zip(life.sent_again) {
                *count += more;
            }
            self.tally.durable_writes += life.durable;
            lived?;
            self.crash();
            let Life { history, told, is_told_anew, .. } = life;
            match self.open(history, (told, is_told_anew))? {
                Some(next) => life = next,
                None => return Ok(()),
            }
        }
        // Finally also read the blocks that were not read before.
        self.device.fail_after(None);
        let read = life.read_all();
        self.trace.append(&mut life.trace);
        read
    }

    fn live(&mut self, life: &mut Life<F>) -> Result<(), Violation> {
        self.tally.lives += 1;
        let points = chance(&mut self.random, 70).then(|| self.random.next_u64() % 300);
        self.device.fail_after(points);
        let steps = self.random.next_u64() % STEPS_MAX;
        let mut overtaken = None;
        for _ in 0..steps {
            self.tally.steps += 1;
            if !self.kind.is_honest {
                self.meddle(true);
            }
            let goes_on = life.step(&mut self.random, &mut self.version)?;
            if self.device.is_off() || !goes_on && chance(&mut self.random, 50) {
                return Ok(());
            }
            self.fork(life, &mut overtaken)?;
        }
        if chance(&mut self.random, 20) { life.finish() } else { Ok(()) }
    }

    /// A second process opens the store; from then on, the first one must not make anything
    /// durable.
    fn fork(
        &mut self,
        life: &mut Life<F>,
        overtaken: &mut Option<(Life<F>, u64)>,
    ) -> Result<(), Violation> {
        let is_anchored = self.kind.policy == Some(AnchorPolicy::EveryCommit);
        if self.kind.is_honest || !is_anchored {
            return Ok(());
        }
        match overtaken {
            None if chance(&mut self.random, 1) => {
                if let Ok(map) = self.map() {
                    self.tally.forks += 1;
                    self.trace.append(&mut life.trace);
                    self.trace.push("a second process opens the store".into());
                    let next = self.life(map, life.history.next());
                    let when = life.history.now();
                    *overtaken = Some((std::mem::replace(life, next), when));
                }
                Ok(())
            }
            // The overtaken process continues for a while.
            Some((old, when)) if chance(&mut self.random, 30) => {
                let outcome = old.step(&mut self.random, &mut self.version);
                let outcome = outcome.and_then(|_| old.flush());
                let trace = old.trace.drain(..);
                life.trace.extend(trace.map(|line| format!("the one overtaken: {line}")));
                if outcome? && old.history.has_changed_since(*when) {
                    return Err(Violation(
                        "a store that was overtaken acknowledged a flush".into(),
                    ));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Lets the adversary act; often it does nothing.
    fn meddle(&mut self, is_online: bool) {
        let Self { adversary, device, random, trace, .. } = self;
        if chance(random, 10) {
            adversary.snapshot(device, random);
        }
        if chance(random, if is_online { 8 } else { 80 }) {
            let before = adversary.made;
            adversary.attack(device, random);
            let made = adversary.made.iter().zip(before).position(|(now, before)| *now != before);
            trace.extend(made.map(|kind| format!("adversary: {}", ATTACKS[kind])));
        } else if chance(random, 15) {
            trace.push("adversary: none".into());
            device.repent();
        }
    }

    fn crash(&mut self) {
        let crash = if chance(&mut self.random, 30) { Crash::Kill } else { Crash::PowerCut };
        match crash {
            Crash::Kill => self.tally.kills += 1,
            Crash::PowerCut => self.tally.power_cuts += 1,
        }
        self.trace.push(format!("crash: {crash:?}"));
        self.device.crash(crash, &mut self.random);
        if !self.kind.is_honest {
            self.meddle(false);
        }
    }

    fn map(&self) -> std::io::Result<Map<F>> {
        let authority = Authority::Secret(&self.secret);
        let keys = StoreKeys::new(&SUPERBLOCK_UUID, &SUPERBLOCK_SEED, &authority);
        Map::open(self.file(), &self.superblock, keys, self.anchor())
    }

    /// Determines what the next life may find, given the milestone of a gateway that continues with
    /// this store. `None` if it doesn't continue and, without an anchor, nothing is guaranteed.
    fn meet(
        &mut self,
        map: &Map<F>,
        mut history: History,
        (told, is_told_anew): (Milestone, bool),
    ) -> Result<Option<History>, Violation> {
        let openings = map.openings();
        let mut earlier = openings.earlier.iter();
        let own = earlier.find(|earlier| earlier.opening == history.opening);
        if !history.found(own.map(|own| own.log_flushed)) && self.kind.is_honest {
            return Err(Violation("marks: less is found than was flushed".into()));
        }
        if map.contains(&told) {
            self.tally.gateways_assured += 1;
            // Flushed changes stay, whatever the anchor's record.
            history.settle();
        } else if self.kind.is_honest {
            return Err(Violation("false alarm: a living gateway refuses the store".into()));
        } else {
            self.trace.push("a living gateway refuses the store".into());
            self.tally.gateways_refused += 1;
        }
        // Without an anchor, an adversary may roll the device back to before the last opening,
        // unless a gateway has a milestone of that opening.
        let may_be_rolled_back = !self.kind.is_honest && self.kind.policy.is_none();
        let is_known = !may_be_rolled_back || is_told_anew && map.contains(&told);
        Ok(is_known.then(|| history.next()))
    }

    /// Opens the store, possibly after interrupted openings. `None` if it is refused.
    fn open(
        &mut self,
        history: History,
        told: (Milestone, bool),
    ) -> Result<Option<Life<F>>, Violation> {
        for opening in 0..OPENINGS_MAX {
            if chance(&mut self.random, 40) && opening + 1 < OPENINGS_MAX {
                let points = self.random.next_u64() % 20;
                self.device.fail_after(Some(points));
            }
            match self.map() {
                Ok(map) => {
                    self.trace.push("opened".into());
                    // Without an anchor, nothing is guaranteed on a hostile device.
                    let is_known = self.kind.is_honest || self.kind.policy.is_some();
                    let (found, promised) = (map.geometry().block_count, history.block_count);
                    if is_known && found < promised {
                        let shrunk =
                            format!("shrunk: {found} blocks, {promised} were acknowledged");
                        return Err(Violation(shrunk));
                    }
                    self.device.fail_after(None);
                    let met = self.meet(&map, history, told)?;
                    return Ok(met.map(|history| self.life(map, history)));
                }
                Err(error) if self.device.is_off() => {
                    self.trace.push(format!("opening is cut off: {error}"));
                    self.tally.openings_cut_off += 1;
                    self.crash();
                }
                Err(error) if self.kind.is_honest => {
                    return Err(Violation(format!("false alarm: opening is refused: {error}")));
                }
                Err(error) => {
                    self.trace.push(format!("opening is refused: {error}"));
                    self.tally.openings_refused += 1;
                    self.device.fail_after(None);
                    self.device.repent();
                }
            }
        }
        Ok(None)
    }
}

/// Runs a world. Even seeds use blocks out of place, odd ones blocks in place.
fn run(seed: u64) -> Result<Tally, String> {
    named(
        seed,
        || if seed.is_multiple_of(2) { run_of::<Placed>(seed) } else { run_of::<Ivs>(seed) },
    )
}

/// Runs a world. If it panics, the error names the seed.
fn named(seed: u64, world: impl FnOnce() -> Result<Tally, String>) -> Result<Tally, String> {
    let outcome = catch_unwind(AssertUnwindSafe(world));
    outcome.unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        Err(format!("{said}\nSEED={seed} make freshness-world shows this world"))
    })
}

fn run_of<F: Workload>(seed: u64) -> Result<Tally, String> {
    let mut world = World::<F>::new(seed);
    let outcome = world.run();
    let mut tally = world.tally;
    tally.attacks = world.adversary.made;
    outcome.map(|()| tally).map_err(|Violation(violation)| {
        let trace = world.trace.join("\n  ");
        format!(
            "{violation}\n  {trace}\n{violation}\nSEED={seed} make freshness-world shows this world"
        )
    })
}

/// Runs worlds on all cores. Returns the counters, and the first few violations.
fn run_all(seeds: std::ops::Range<u64>) -> (Tally, Vec<String>) {
    let next = AtomicU64::new(seeds.start);
    let watch = Arc::new(Watch::default());
    let _watching = watch.begin();
    let work = || {
        let (mut tally, mut wrong) = (Tally::default(), Vec::new());
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end || wrong.len() == 3 {
                return (tally, wrong);
            }
            let outcome = watch.watched(seed, || run(seed));
            match outcome {
                Ok(more) => tally.add(&more),
                Err(violation) => wrong.push(violation),
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let mut all = (Tally::default(), Vec::new());
        for worker in workers {
            let (tally, wrong) = worker.join().expect("a worker that returns");
            all.0.add(&tally);
            all.1.extend(wrong);
        }
        all
    })
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|value| value.parse().expect("a number"))
}

/// A sample of the worlds, which must cover everything that they can try.
#[test]
fn no_world_is_stale_refused_or_mixed() {
    let (tally, wrong) = run_all(0..1500);
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    let ends = [tally.kills, tally.power_cuts, tally.openings_cut_off, tally.forks];
    let counts = ends.into_iter().chain([tally.growths, tally.writes_beside]);
    let reads = [tally.openings_refused, tally.reads_refused, tally.reads_vouched];
    let gateways = [tally.gateways_assured, tally.gateways_refused, tally.found_by_scrubs];
    let writes = tally.sent_again.into_iter().chain([tally.durable_writes]);
    for count in counts.chain(writes).chain(reads).chain(gateways).chain(tally.attacks) {
        assert!(count > 0, "something was never tried: {tally:#?}");
    }
}

#[test]
fn a_world_that_panics_is_named() {
    let said = named(17, || panic!("waits for log pages")).expect_err("a panic");
    assert_eq!(said, "waits for log pages\nSEED=17 make freshness-world shows this world");
}

#[test]
#[ignore = "minutes: make freshness-worlds"]
fn many_worlds() {
    let first = number("SEED").unwrap_or(0);
    let begun = std::time::Instant::now();
    let (tally, wrong) = run_all(first..first + number("WORLDS").unwrap_or(100_000));
    println!("{tally:#?}");
    for (attack, count) in ATTACKS.iter().zip(tally.attacks) {
        println!("{attack}: {count}");
    }
    println!("{} violations, {:?}", wrong.len(), begun.elapsed());
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
#[ignore = "for one seed: SEED=n make freshness-world"]
fn one_world() {
    let seed = number("SEED").expect("SEED");
    if seed.is_multiple_of(2) { show::<Placed>(seed) } else { show::<Ivs>(seed) }
}

fn show<F: Workload>(seed: u64) {
    let mut world = World::<F>::new(seed);
    let outcome = world.run();
    println!("{}", world.trace.join("\n"));
    println!("{outcome:?}");
    assert!(outcome.is_ok());
}
