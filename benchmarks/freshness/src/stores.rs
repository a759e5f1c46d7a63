//! Processor time of stores that keep freshness, compared with plain ones: random reads and writes of 4 KiB,
//! QD 32, one flush per 1024 writes.

use std::path::Path;
use std::time::Duration;

use sealane_engine::storage::store::BlockStore;
use sealane_engine::storage::stores::fresh_store::Trust;
use sealane_engine::storage::stores::in_place_store::{InPlaceStore, raw_blocks};
use sealane_engine::storage::stores::memory::MemoryStore;
use sealane_engine::storage::stores::plain_file::PlainFileStore;
use sealane_engine::storage::stores::sealed_file::SealedFileStore;

use crate::load::{Load, Pattern, Until};
use crate::sample::print;

/// Blocks of each store: 256 MiB.
const BLOCKS: u64 = 1 << 16;
const WAYS: [&str; 4] = ["plain_file", "file", "memory", "in_place"];

fn open(way: &str, directory: &Path) -> Box<dyn BlockStore> {
    let path = directory.join(format!("sealane-benchmark-{}-{way}", std::process::id()));
    let store: Box<dyn BlockStore> = match way {
        "plain_file" => Box::new(PlainFileStore::create(&path, BLOCKS).expect("store")),
        "file" => {
            Box::new(SealedFileStore::create(&path, BLOCKS, &Trust::default()).expect("store"))
        }
        "memory" => Box::new(MemoryStore::new(BLOCKS, true)),
        _ => {
            let raw = Box::new(MemoryStore::new(raw_blocks(BLOCKS), true));
            Box::new(InPlaceStore::create(raw, BLOCKS, &Trust::default()).expect("store"))
        }
    };
    // The open file lives until the process ends. Stores in memory have none.
    let _ = std::fs::remove_file(&path);
    store
}

/// Measures the stores in turn, round by round.
pub fn run(rounds: u64, milliseconds: u64, directory: &Path) {
    let stores = WAYS.map(|way| open(way, directory));
    let mut loads = stores.each_ref().map(|store| Load::new(&**store, 1));
    for load in &mut loads {
        // Twice, so that each slot was written: a file system allocates blocks at their first write.
        load.fill(BLOCKS);
        load.fill(BLOCKS);
    }
    for _ in 0..rounds {
        for is_write in [false, true] {
            for (way, load) in WAYS.iter().zip(&mut loads) {
                let flush_every = if is_write { 1024 } else { 0 };
                let pattern = Pattern { is_write, span: BLOCKS, depth: 32, flush_every };
                let outcome =
                    load.run(pattern, Until::Elapsed(Duration::from_millis(milliseconds)));
                let per = |seconds: f64| seconds * 1e6 / outcome.operations as f64;
                let figures = [
                    ("is_write", f64::from(u8::from(is_write))),
                    ("own_micros", per(outcome.own)),
                    ("others_micros", per(outcome.others)),
                ];
                print(way, &figures);
            }
        }
    }
}
