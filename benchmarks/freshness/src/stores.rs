//! What stores that keep freshness cost beside those that don't: rates and processor time of random
//! reads and writes of 4 KiB.

use std::path::Path;
use std::time::Duration;

use sealane_engine::storage::store::BlockStore;
use sealane_engine::storage::stores::emulated::{EmulatedStore, Profile};
use sealane_engine::storage::stores::in_place_store::{InPlaceStore, raw_blocks};
use sealane_engine::storage::stores::memory::MemoryStore;
use sealane_engine::storage::stores::plain_file::PlainFileStore;
use sealane_engine::storage::stores::sealed_file::{SealedFileStore, Trust};

use crate::load::{Load, Pattern};
use crate::sample::{percentile, print};

fn open(way: &str, directory: &Path, blocks: u64) -> Box<dyn BlockStore> {
    let path = directory.join(format!("sealane-benchmark-{way}"));
    // Left by a run that was ended.
    let _ = std::fs::remove_file(&path);
    let drive = |blocks| EmulatedStore::new(blocks, true, &Profile::parse("evo870").expect("drive"));
    let store: Box<dyn BlockStore> = match way {
        "plain_file" => Box::new(PlainFileStore::create(&path, blocks).expect("store")),
        "file" => {
            Box::new(SealedFileStore::create(&path, blocks, &Trust::default()).expect("store"))
        }
        "memory" => Box::new(MemoryStore::new(blocks, true)),
        "drive" => Box::new(drive(blocks)),
        "in_place" => {
            let raw = Box::new(MemoryStore::new(raw_blocks(blocks), true));
            Box::new(InPlaceStore::create(raw, blocks, &Trust::default()).expect("store"))
        }
        "in_place_drive" => {
            let raw = Box::new(drive(raw_blocks(blocks)));
            Box::new(InPlaceStore::create(raw, blocks, &Trust::default()).expect("store"))
        }
        _ => panic!("no store {way}"),
    };
    // It goes with the process.
    let _ = std::fs::remove_file(&path);
    store
}

/// Loads stores in turn, round by round.
pub fn run(ways: &[&str], directory: &Path, mebibytes: u64, rounds: u64, seconds: f64) {
    let span = mebibytes << 8;
    let opened: Vec<_> = ways.iter().map(|way| (*way, open(way, directory, span))).collect();
    let mut loads: Vec<_> = opened.iter().map(|(way, store)| (*way, store, Load::new(&**store, 1))).collect();
    for (_, _, load) in &mut loads {
        // Twice, so that slots are all taken once: a file system gives blocks out at the first write.
        load.fill(span);
        load.fill(span);
    }
    for round in 0..rounds {
        for is_write in [false, true] {
            for (way, store, load) in &mut loads {
                let flush_every = if is_write { 1024 } else { 0 };
                let pattern = Pattern { is_write, span, depth: 32, flush_every };
                let before = store.statistics();
                let outcome = load.run(pattern, Duration::from_secs_f64(seconds));
                let per = |value: f64| value * 1e6 / outcome.operations as f64;
                print(
                    way,
                    &[
                        ("round", round as f64),
                        ("is_write", f64::from(u8::from(is_write))),
                        ("operations_a_second", outcome.operations as f64 / outcome.seconds),
                        ("own_us", per(outcome.own)),
                        ("others_us", per(outcome.others)),
                        ("p50_nanos", percentile(&outcome.latencies, 50.0)),
                        ("p99_nanos", percentile(&outcome.latencies, 99.0)),
                    ],
                );
                if std::env::var_os("VERBOSE").is_some() {
                    let changes: Vec<_> = store
                        .statistics()
                        .into_iter()
                        .zip(before)
                        .map(|((name, now), (_, then))| (name, now.wrapping_sub(then)))
                        .filter(|(_, change)| *change != 0)
                        .collect();
                    eprintln!("{changes:?}");
                }
            }
        }
    }
}
