//! Device I/Os per random write, by size of the working set, of the store in place and of the paper's scheme
//! (arXiv:2510.18756 §4.4). That is a write-back cache of leaf pages without a table of pending changes; it
//! is implemented only here, not in the product.

use std::collections::{BTreeMap, HashMap};

use sealane_engine::storage::store::BlockStore;
use sealane_engine::storage::stores::fresh_store::Trust;
use sealane_engine::storage::stores::in_place_store::InPlaceStore;

use crate::device::Device;
use crate::load::{Load, Pattern, Until};
use crate::sample::{Random, print};

/// Sectors of the volume: 1 TiB, so that the table has its largest size, 1 Mi changes.
const SECTORS: u64 = 1 << 28;
const SET_SECTORS: u64 = 340;
/// Writes between two flushes.
const FLUSH_EVERY: u64 = 1024;
/// Writes between two checks for the end of a merge, and number of merges measured.
const LOOK_EVERY: u64 = 16_384;
const MERGES: u64 = 2;
/// Leaf pages in the cache of the paper's prototype; and in a cache with the memory of our table and leaf
/// cache together.
const PAPER_CACHES: [usize; 2] = [5000, 24_000];

/// Measures working sets up to `gibibytes_max`. The paper's scheme is measured over `writes` writes, after
/// as many to warm up.
pub fn run(gibibytes_max: u64, writes: u64) {
    let mut gibibytes = 1;
    while gibibytes <= gibibytes_max {
        let sectors = gibibytes << 18;
        let [reads, written] = in_place(sectors);
        let mut figures =
            vec![("gibibytes", gibibytes as f64), ("ours", reads + written), ("ours_read", reads)];
        let names = ["paper_5000_pages", "paper_same_memory"];
        let paper = PAPER_CACHES.map(|pages| cached(sectors, writes, pages) as f64 / writes as f64);
        figures.extend(names.into_iter().zip(paper));
        print("writes", &figures);
        gibibytes *= 4;
    }
}

/// Returns blocks read and blocks written per write to the store in place. It counts from the end of the
/// first merge to the end of a later one, so that the full cost of merges is included.
fn in_place(sectors: u64) -> [f64; 2] {
    let device = Device::new(SECTORS, false);
    let store = InPlaceStore::create(Box::new(device.clone()), SECTORS, &Trust::default());
    let store = store.expect("store");
    let mut load = Load::new(&store, 5);
    let pattern = Pattern { is_write: true, span: sectors, depth: 32, flush_every: FLUSH_EVERY };
    let merges = || {
        let statistics = store.statistics();
        statistics.iter().find(|(name, _)| *name == "merges").expect("merges").1
    };
    let mut write_until = |wanted| {
        let mut writes = 0;
        while merges() < wanted {
            writes += load.run(pattern, Until::Operations(LOOK_EVERY)).operations;
        }
        writes
    };
    write_until(1);
    let before = device.counts();
    let writes = write_until(1 + MERGES) as f64;
    let after = device.counts();
    [0, 1].map(|index| (after[index] - before[index]) as f64 / writes)
}

/// Returns the device I/Os of the paper's scheme: the block, its leaf page if it isn't cached, and the
/// changed page evicted for it. Its log is in non-volatile memory and costs nothing.
fn cached(sectors: u64, writes: u64, pages: usize) -> u64 {
    let mut random = Random(6);
    let mut last_use: HashMap<u64, u64> = HashMap::new();
    let mut by_use: BTreeMap<u64, u64> = BTreeMap::new();
    let mut count = 0;
    for number in 0..2 * writes {
        let set = random.below(sectors) / SET_SECTORS;
        let mut operations = 1;
        match last_use.insert(set, number) {
            Some(before) => drop(by_use.remove(&before)),
            None => {
                operations += 1;
                if last_use.len() > pages
                    && let Some((_, oldest)) = by_use.pop_first()
                {
                    last_use.remove(&oldest);
                    operations += 1;
                }
            }
        }
        by_use.insert(number, set);
        count += if number < writes { 0 } else { operations };
    }
    count
}
