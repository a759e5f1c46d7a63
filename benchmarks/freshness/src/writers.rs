//! Latency of writers: until their entry is in the pending table, and until the root covers it.
//!
//! Writers insert entries into the table under its lock. One thread repeatedly takes the whole table,
//! merges it set by set, updates the tree and commits. In the paper's experiment (its figure 7) writers
//! wait for the commit, so both latencies are measured.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use sealane_proto::freshness::leaf::{Ivs, Leaf, LeafFormat};
use sealane_proto::freshness::pending::{Pending, Step};
use sealane_proto::freshness::tree::Tree;

use crate::sample::{PETABYTE_LEAVES, Random, percentile, print};
use crate::trees::key;

/// Sets that are written; their leaf pages are in memory, as in a leaf cache.
const SETS: u64 = 4096;
const SECONDS: f64 = 0.5;

#[derive(Default)]
struct Shared {
    pending: Mutex<(Pending<[u8; 12]>, u64)>,
    is_wanted: Condvar,
    committed: Mutex<u64>,
    commits: Condvar,
    is_over: AtomicBool,
}

/// Measures 1 to 64 writers that wait for the table only, or for the root.
pub fn run(rounds: u64) {
    for round in 0..rounds {
        for writers in [1, 2, 4, 8, 16, 32, 64] {
            for waits_for_root in [false, true] {
                let shared = Shared::default();
                let mut times = measure(&shared, writers, waits_for_root);
                times.sort_unstable();
                let figures = [
                    ("round", round as f64),
                    ("writers", writers as f64),
                    ("waits_for_root", f64::from(u8::from(waits_for_root))),
                    ("writes_a_second", times.len() as f64 / SECONDS),
                    ("p50_nanos", percentile(&times, 50.0)),
                    ("p95_nanos", percentile(&times, 95.0)),
                    ("p99_nanos", percentile(&times, 99.0)),
                ];
                print("writers", &figures);
            }
        }
    }
}

fn measure(shared: &Shared, writers: u64, waits_for_root: bool) -> Vec<u64> {
    std::thread::scope(|scope| {
        let hasher = scope.spawn(|| merge(shared));
        let writing: Vec<_> = (0..writers)
            .map(|writer| scope.spawn(move || write(shared, writer, waits_for_root)))
            .collect();
        std::thread::sleep(Duration::from_secs_f64(SECONDS));
        shared.is_over.store(true, Ordering::Relaxed);
        let times = writing.into_iter().flat_map(|writer| writer.join().expect("writer")).collect();
        shared.is_wanted.notify_one();
        hasher.join().expect("hasher");
        times
    })
}

fn write(shared: &Shared, writer: u64, waits_for_root: bool) -> Vec<u64> {
    let mut random = Random(writer);
    let mut times = Vec::with_capacity(1 << 20);
    let mut iv = [1; 12];
    while !shared.is_over.load(Ordering::Relaxed) {
        let lba = random.below(SETS * Ivs::ENTRIES_PER_LEAF);
        iv[..8].copy_from_slice(&random.below(u64::MAX).to_le_bytes());
        let start = Instant::now();
        let mine = {
            let mut pending = shared.pending.lock().expect("pending");
            pending.0.insert(lba, iv);
            pending.1
        };
        if waits_for_root {
            shared.is_wanted.notify_one();
            let mut committed = shared.committed.lock().expect("committed");
            while *committed <= mine {
                committed = shared.commits.wait(committed).expect("committed");
            }
        }
        times.push(start.elapsed().as_nanos() as u64);
        // The table is bounded: a writer faster than the merge waits here, untimed.
        while shared.pending.lock().expect("pending").0.entries() > 65_536 {
            std::thread::yield_now();
        }
    }
    times
}

fn merge(shared: &Shared) {
    let key = key();
    let mut tree = Tree::new(Arc::clone(&key), PETABYTE_LEAVES);
    let mut leaves: Vec<Leaf> = (0..SETS).map(Leaf::void).collect();
    loop {
        let is_over = shared.is_over.load(Ordering::Relaxed);
        let (taken, number) = {
            let mut pending = shared.pending.lock().expect("pending");
            if pending.0.is_empty() && !is_over {
                pending = shared
                    .is_wanted
                    .wait_timeout(pending, Duration::from_millis(1))
                    .expect("pending")
                    .0;
            }
            pending.1 += 1;
            (std::mem::take(&mut pending.0), pending.1)
        };
        let mut batch = Vec::new();
        let mut next = 0;
        while let Some(step) = taken.next_step(next, Ivs::ENTRIES_PER_LEAF, u64::MAX) {
            let Step::Change { set, entries, .. } = step else { unreachable!("nothing is void") };
            let leaf = &mut leaves[set as usize];
            leaf.change::<Ivs>(&key, entries.into_iter().map(|(index, iv)| (index, Some(iv))));
            batch.push((set, leaf.node()));
            next = set + 1;
        }
        tree.update(&batch);
        *shared.committed.lock().expect("committed") = number;
        shared.commits.notify_all();
        if is_over {
            return;
        }
    }
}
