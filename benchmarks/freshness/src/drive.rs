//! Rates and latencies on an emulated drive (`evo870`, slow enough that two cores keep up with it): plain
//! blocks, the store in place that keeps them fresh, and the paper's three I/Os per write when a sector's
//! set isn't cached (arXiv:2510.18756 §4.4).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use sealane_engine::storage::store::{BlockStore, StoreChannel};
use sealane_engine::storage::stores::emulated::{EmulatedStore, Profile};
use sealane_engine::storage::stores::fresh_store::Trust;
use sealane_engine::storage::stores::in_place_store::{InPlaceStore, raw_blocks};

use crate::load::{Load, Outcome, Pattern, Until};
use crate::sample::{percentile, print};

/// Blocks under load: 256 MiB.
const BLOCKS: u64 = 1 << 16;
const WRITERS: [usize; 5] = [1, 2, 4, 8, 16];

/// A drive that outlives its store.
#[derive(Debug, Clone)]
struct Drive(Arc<EmulatedStore>);

impl Drive {
    fn new(blocks: u64) -> Self {
        let profile = Profile::parse("evo870").expect("a known drive");
        Self(Arc::new(EmulatedStore::new(blocks, true, &profile)))
    }
}

impl BlockStore for Drive {
    fn block_bytes(&self) -> usize {
        self.0.block_bytes()
    }

    fn block_count(&self) -> u64 {
        self.0.block_count()
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        self.0.open()
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.0.statistics()
    }
}

/// A plain drive, and a fresh store on another drive; both are filled.
struct Pair {
    plain: Load,
    fresh: Load,
    store: InPlaceStore,
    raw: Drive,
}

impl Pair {
    fn new() -> Self {
        let raw = Drive::new(raw_blocks(BLOCKS));
        let store = InPlaceStore::create(Box::new(raw.clone()), BLOCKS, &Trust::default());
        let store = store.expect("store");
        let (mut plain, mut fresh) = (Load::new(&Drive::new(BLOCKS), 1), Load::new(&store, 1));
        plain.fill(BLOCKS);
        fresh.fill(BLOCKS);
        Self { plain, fresh, store, raw }
    }

    /// Closes the fresh store and opens it again.
    fn restart(self) -> Self {
        let Self { plain, fresh, store, raw } = self;
        drop((fresh, store));
        let store = InPlaceStore::open(Box::new(raw.clone()), &Trust::default()).expect("store");
        let fresh = Load::new(&store, 1);
        Self { plain, fresh, store, raw }
    }

    /// Gives a fast-path MAC to every sector without a pending change.
    fn refresh(&self) {
        let mut upkeep = self.store.upkeep().expect("upkeep").expect("a store in place has some");
        let (mut report, mut lba) = (Default::default(), 0);
        while let Some(piece) = upkeep.next_piece(lba) {
            lba = piece.end;
            upkeep.refresh(piece, &mut report).expect("refresh");
        }
    }

    fn compare(&mut self, what: &str, is_write: bool, milliseconds: u64) {
        let flush_every = if is_write { 1024 } else { 0 };
        let pattern = Pattern { is_write, span: BLOCKS, depth: 32, flush_every };
        let until = Until::Elapsed(Duration::from_millis(milliseconds));
        let rate = |outcome: &Outcome| outcome.operations as f64 / outcome.seconds;
        let plain = rate(&self.plain.run(pattern, until));
        let fresh = rate(&self.fresh.run(pattern, until));
        let mut figures = vec![("plain", plain), ("fresh", fresh)];
        if is_write {
            figures.push(("paper", three_operations(&mut self.plain, until)));
        }
        print(what, &figures);
    }
}

/// Returns writes per second if each one also reads and writes a leaf page.
fn three_operations(load: &mut Load, until: Until) -> f64 {
    let pattern = Pattern { is_write: false, span: BLOCKS, depth: 32, flush_every: 0 };
    let outcome = load.run_each(pattern, until, &[false, true, true]);
    outcome.operations as f64 / outcome.seconds / 3.0
}

/// Measures reads and writes at QD 32.
pub fn run(rounds: u64, milliseconds: u64) {
    let mut pair = Pair::new();
    for _ in 0..rounds {
        pair.compare("random read after random writes", false, milliseconds);
        pair.compare("random write", true, milliseconds);
        pair = pair.restart();
        pair.compare("random read after a restart", false, milliseconds);
        pair.refresh();
        pair.compare("random read after a refresh", false, milliseconds);
    }
}

/// Measures latencies of writers that have one write in flight each.
pub fn latencies(rounds: u64, milliseconds: u64) {
    let mut pair = Pair::new();
    let until = Until::Elapsed(Duration::from_millis(milliseconds));
    for _ in 0..rounds {
        for depth in WRITERS {
            let pattern = Pattern { is_write: true, span: BLOCKS, depth, flush_every: 0 };
            for (what, load) in [("plain", &mut pair.plain), ("fresh", &mut pair.fresh)] {
                let latencies = load.run(pattern, until).latencies;
                print(
                    what,
                    &[
                        ("writers", depth as f64),
                        ("p50_nanos", percentile(&latencies, 50.0)),
                        ("p95_nanos", percentile(&latencies, 95.0)),
                        ("p99_nanos", percentile(&latencies, 99.0)),
                    ],
                );
            }
        }
    }
}
