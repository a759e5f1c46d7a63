//! The table of pending changes: cost of insertion and lookup by size, bytes per entry, and the slowest
//! insertion.

use std::hint::black_box;
use std::time::Instant;

use sealane_proto::freshness::pending::{Known, Pending};

use crate::sample::{Random, percentile, print, processor_time, resident_bytes};

/// Sectors of a 3.84 TB drive.
const SECTORS: u64 = 937_500_000;
const LOOKS: u64 = 200_000;

/// Measures tables of 4 Ki to 1 Mi entries.
pub fn run() {
    for entries in [4096, 65_536, 1 << 20] {
        let mut random = Random(4);
        let before = resident_bytes();
        let mut table: Pending<[u8; 12]> = Pending::new();
        let busy = processor_time();
        while table.entries() < entries {
            table.insert(random.below(SECTORS), [1; 12]);
        }
        let insert = (processor_time() - busy).as_nanos() as f64 / entries as f64;
        let bytes = resident_bytes().saturating_sub(before) as f64 / entries as f64;
        let present: Vec<u64> = table.all_entries().map(|(lba, _)| lba).collect();
        let mut look = |name: &'static str, lba: &mut dyn FnMut(&mut Random) -> u64| {
            let busy = processor_time();
            let mut found = 0_u64;
            for _ in 0..LOOKS {
                found += u64::from(table.get(lba(&mut random)) != Known::Absent);
            }
            black_box(found);
            (name, (processor_time() - busy).as_nanos() as f64 / LOOKS as f64)
        };
        let hit =
            look("hit_nanos", &mut |random| present[random.below(present.len() as u64) as usize]);
        let miss = look("miss_nanos", &mut |random| random.below(SECTORS));
        let busy = processor_time();
        let mut found = 0_u64;
        for _ in 0..LOOKS / 32 {
            let lba = random.below(SECTORS - 32);
            table.get_run(lba..lba + 32, |_, known| found += u64::from(known != Known::Absent));
        }
        black_box(found);
        let run = (processor_time() - busy).as_nanos() as f64 / (LOOKS / 32) as f64;
        let mut times: Vec<u64> = (0..LOOKS)
            .map(|_| {
                let lba = random.below(SECTORS);
                let start = Instant::now();
                table.insert(lba, [2; 12]);
                start.elapsed().as_nanos() as u64
            })
            .collect();
        times.sort_unstable();
        let (mut next, mut steps) = (0, 0_u64);
        let busy = processor_time();
        while let Some(step) = table.next_step(next, 340, SECTORS) {
            next = match step {
                sealane_proto::freshness::pending::Step::Void(sets) => sets.end,
                sealane_proto::freshness::pending::Step::Change { set, .. } => set + 1,
            };
            steps += 1;
        }
        let step = (processor_time() - busy).as_nanos() as f64 / steps as f64;
        let figures = [
            ("entries", entries as f64),
            ("insert_nanos", insert),
            hit,
            miss,
            ("run_of_32_nanos", run),
            ("step_nanos", step),
            ("insert_p50_nanos", percentile(&times, 50.0)),
            ("insert_p999_nanos", percentile(&times, 99.9)),
            ("insert_max_nanos", percentile(&times, 100.0)),
            ("bytes_an_entry", bytes),
        ];
        print("pending", &figures);
    }
}
