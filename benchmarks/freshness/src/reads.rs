//! Device I/Os and processor time of a random read, by share of *polluted* sets. In a polluted set a
//! sibling of the sector was written after the sector's fast-path MAC was issued, so the read needs the
//! leaf page (arXiv:2510.18756 §5.3). The working set has six times the leaf pages that fit the cache.
//! For comparison, the paper's scheme: a write-back cache of 5000 leaf pages, and no table.

use std::collections::{BTreeMap, HashMap};

use sealane_engine::storage::store::BlockStore;
use sealane_engine::storage::stores::fresh_store::Trust;
use sealane_engine::storage::stores::in_place_store::InPlaceStore;

use crate::device::Device;
use crate::load::Load;
use crate::sample::{Random, print, processor_time};

const SET_SECTORS: u64 = 340;
/// Sets that are read, and sets that are written only to fill the table and trigger a merge.
const SETS: u64 = 98_304;
const FILLER_SETS: u64 = 4096;
/// The sector of each set that is read, and the one that is written to pollute the set.
const READ: u64 = 7;
const SIBLING: u64 = 9;
const DEPTH: usize = 1024;
/// Leaf pages in the cache of the paper's prototype.
const PAPER_PAGES: usize = 5000;

/// Measures `steps` + 1 shares of polluted sets, from none to all.
pub fn run(steps: u64, reads: u64) {
    let sectors = (SETS + FILLER_SETS) * SET_SECTORS;
    let device = Device::new(sectors, true);
    let store = InPlaceStore::create(Box::new(device.clone()), sectors, &Trust::default());
    let store = store.expect("store");
    let mut load = Load::new(&store, 1);
    let in_sets = |sets: std::ops::Range<u64>, index| -> Vec<u64> {
        sets.map(|set| set * SET_SECTORS + index).collect()
    };
    load.write(&in_sets(0..SETS, READ), DEPTH);
    merge(&store, &mut load);
    refresh(&store, &in_sets(0..SETS, READ));
    let mut polluted = 0;
    for step in 0..=steps {
        let until = SETS * step / steps;
        load.write(&in_sets(polluted..until, SIBLING), DEPTH);
        polluted = until;
        merge(&store, &mut load);
        // The order is independent of which sets are polluted.
        let mut random = Random(2);
        let lbas: Vec<u64> = (0..reads).map(|_| random.below(SETS) * SET_SECTORS + READ).collect();
        let before = device.counts()[0];
        let busy = processor_time();
        load.read(lbas.iter().copied());
        let nanos = (processor_time() - busy).as_nanos() as f64 / reads as f64;
        let ours = (device.counts()[0] - before) as f64 / reads as f64;
        let sets: Vec<u64> = lbas.iter().map(|lba| lba / SET_SECTORS).collect();
        print(
            "reads",
            &[
                ("polluted_percent", 100.0 * step as f64 / steps as f64),
                ("ours", ours),
                ("paper", paper(&sets, polluted) as f64 / reads as f64),
                ("nanos", nanos),
            ],
        );
    }
}

/// Writes sectors that are never read until the table has been merged.
fn merge(store: &InPlaceStore, load: &mut Load) {
    let merges = || {
        let statistics = store.statistics();
        statistics.iter().find(|(name, _)| *name == "merges").expect("merges").1
    };
    let before = merges();
    let filler = SETS * SET_SECTORS..(SETS + FILLER_SETS) * SET_SECTORS;
    let filler: Vec<u64> = filler.collect();
    for lbas in filler.chunks(DEPTH).cycle() {
        if merges() > before {
            return;
        }
        load.write(lbas, DEPTH);
    }
}

/// Issues fast-path MACs, as the refresh job does.
fn refresh(store: &InPlaceStore, lbas: &[u64]) {
    let mut upkeep = store.upkeep().expect("upkeep").expect("a store in place has some");
    let mut report = Default::default();
    for lba in lbas {
        upkeep.refresh(*lba..lba + 1, &mut report).expect("refresh");
    }
    assert_eq!(report.refreshed, lbas.len() as u64, "every sector has its MAC");
}

/// Returns the device I/Os of the paper's scheme for reads of these sets: the sector; for a polluted set,
/// its leaf page unless it is cached; and the write of a changed page evicted for it. At the start, the
/// cache is full of pages changed by the polluting writes.
fn paper(sets: &[u64], polluted: u64) -> u64 {
    let mut last_use: HashMap<u64, (u64, bool)> = HashMap::new();
    let mut by_use: BTreeMap<u64, u64> = BTreeMap::new();
    for set in polluted.saturating_sub(PAPER_PAGES as u64)..polluted {
        last_use.insert(set, (set, true));
        by_use.insert(set, set);
    }
    let mut count = 0;
    for (number, set) in (SETS..).zip(sets) {
        count += 1;
        if *set >= polluted {
            continue;
        }
        let (before, is_changed) = match last_use.get(set) {
            Some((before, is_changed)) => (Some(*before), *is_changed),
            None => (None, false),
        };
        if let Some(before) = before {
            by_use.remove(&before);
        } else {
            count += 1;
            if last_use.len() >= PAPER_PAGES
                && let Some((_, oldest)) = by_use.pop_first()
                && let Some((_, true)) = last_use.remove(&oldest)
            {
                count += 1;
            }
        }
        last_use.insert(*set, (number, is_changed));
        by_use.insert(number, *set);
    }
    count
}
