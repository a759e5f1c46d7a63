//! Measures the parts of freshness. Prints one JSON object per line for `python -m benchmarks.freshness`,
//! which shows them.

mod device;
mod drive;
mod load;
mod memory;
mod pending;
mod petabyte;
mod reads;
mod sample;
mod stores;
mod trees;
mod writers;
mod writes;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: u64| {
        arguments.get(index).and_then(|value| value.parse().ok()).unwrap_or(default)
    };
    match arguments.first().map(String::as_str) {
        Some("functions") => trees::functions(number(1, 31)),
        Some("updates") => trees::updates(number(1, 5), number(2, 19)),
        Some("memory") => memory::run(number(1, 100)),
        Some("pending") => pending::run(),
        Some("writes") => writes::run(number(1, 256), number(2, 1 << 20)),
        Some("reads") => reads::run(number(1, 5), number(2, 100_000)),
        Some("drive") => drive::run(number(1, 3), number(2, 400)),
        Some("latency") => drive::latencies(number(1, 3), number(2, 400)),
        Some("processor") => {
            let directory = arguments.get(3).map_or("/tmp", String::as_str);
            stores::run(number(1, 3), number(2, 400), Path::new(directory));
        }
        Some("petabyte") => petabyte::run(number(1, 3)),
        Some("writers") => writers::run(number(1, 3)),
        _ => {
            eprintln!(
                "functions [ROUNDS] | updates [ROUNDS] [LOG2_POOL, 0: whole tree] | memory [TB_MAX] | pending \
                 | writers [ROUNDS] | writes [GIB_MAX] [WRITES] | reads [STEPS] [READS] \
                 | drive [ROUNDS] [MILLISECONDS] | latency [ROUNDS] [MILLISECONDS] \
                 | processor [ROUNDS] [MILLISECONDS] [DIRECTORY] | petabyte [ROUNDS]"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
