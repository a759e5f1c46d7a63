//! Measures the pieces of freshness: one JSON object a line on standard output, for
//! `python -m benchmarks.freshness`, which shows them.

mod load;
mod pending;
mod sample;
mod stores;
mod trees;
mod writers;
mod writes;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: u64| {
        arguments
            .get(index)
            .and_then(|value| value.parse().ok())
            .unwrap_or(default)
    };
    match arguments.first().map(String::as_str) {
        Some("functions") => trees::functions(number(1, 31)),
        Some("updates") => trees::updates(number(1, 5), number(2, 19)),
        Some("memory") => trees::memory(number(1, 100)),
        Some("pending") => pending::run(),
        Some("writes") => writes::run(number(1, 256), number(2, 1 << 20)),
        Some("stores") => {
            let ways: Vec<&str> = arguments[5..].iter().map(String::as_str).collect();
            let directory = std::path::Path::new(&arguments[1]);
            let seconds = arguments[4].parse().expect("seconds");
            stores::run(&ways, directory, number(2, 256), number(3, 3), seconds);
        }
        Some("writers") => writers::run(number(1, 3)),
        _ => {
            eprintln!(
                "functions [ROUNDS] | updates [ROUNDS] [LOG2_POOL, 0: whole tree] | memory [TB_MAX] | pending | writers [ROUNDS] | writes [GIB_MAX] [WRITES]"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
