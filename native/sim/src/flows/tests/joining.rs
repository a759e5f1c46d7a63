//! Sessions that come and go.

use super::*;

const SLOW: u64 = LINE / 10;
const SESSIONS: u16 = 100;
/// Sessions that share the port at a time.
const SHARING: u64 = 8;
const JOIN_EVERY: Nanos = 10_000_000;

fn slow_sites() -> Sites {
    let fast = sites(true);
    let cap_bytes = 2_400_000;
    let phantom = fast.near.phantom.map(|phantom| Phantom {
        cap_bytes,
        thresholds: Thresholds {
            low_bytes: cap_bytes / 50,
            high_bytes: cap_bytes / 5 * 3,
            ..phantom.thresholds
        },
        ..phantom
    });
    let near = LinkConfig {
        rate_bits_per_second: SLOW,
        delay_nanos: 8_000,
        buffer_bytes: 250_000,
        phantom,
        ..fast.near
    };
    Sites {
        near,
        host: LinkConfig { buffer_bytes: 1 << 40, phantom: None, ..near },
        border: near,
        wan: LinkConfig { delay_nanos: 850_000, ..near },
        wan_links: 8,
    }
}

#[test]
fn explore_joins() {
    let bytes = SLOW / 8 * JOIN_EVERY / 1_000_000_000 / 10 * 9;
    let every = 20_000_000;
    let flows: Vec<FlowSetup> = (0..SESSIONS)
        .map(|index| {
            let host = (index * 37) % 110;
            let from = if index % 2 == 0 { host } else { 128 + host };
            let turn = u64::from(index).saturating_sub(SHARING);
            FlowSetup { start: 5_000_000 + turn * JOIN_EVERY, ..flow(from, 240, bytes) }
        })
        .collect();
    for (name, congestion, real) in [
        ("sessions", Congestion::Product(Algorithm::Uno(Rules::DEFAULT)), true),
        ("ours", Congestion::Product(Algorithm::Uno(Rules::DEFAULT)), false),
        ("released", Congestion::Product(Algorithm::Uno(Rules::RELEASED)), false),
        ("dctcp", Congestion::Product(Algorithm::Dctcp), false),
        ("cubic", Congestion::Cubic, false),
    ] {
        let begun = std::time::Instant::now();
        let cell = Cell {
            sites: slow_sites(),
            congestion,
            balance: Balance::Subflows,
            sample_every: every,
            time_max: 5_000_000_000,
            ..cell(flows.clone())
        };
        let outcome =
            if real { run_sessions(&cell, product()).unwrap() } else { run_cell(&cell).unwrap() };
        let mut found = Vec::new();
        for pair in outcome.samples.windows(2) {
            let active = |index: usize| {
                let (flow, ended) = (&cell.flows[index], outcome.flows[index].finished_at);
                flow.start <= pair[0].at && (ended == 0 || ended > pair[1].at)
            };
            let rates: Vec<f64> = (0..cell.flows.len())
                .filter(|i| active(*i))
                .map(|i| (pair[1].acked_bytes[i] - pair[0].acked_bytes[i]) as f64)
                .collect();
            if rates.len() < 4 {
                continue;
            }
            let sum: f64 = rates.iter().sum();
            let squares: f64 = rates.iter().map(|r| r * r).sum();
            found.push((sum * sum / (rates.len() as f64 * squares), rates.len()));
        }
        let times: Vec<f64> = outcome
            .flows
            .iter()
            .zip(&cell.flows)
            .map(|(o, f)| o.finished_at as f64 / 1e6 - f.start as f64 / 1e6)
            .collect();
        let near: Vec<f64> = times.iter().copied().skip(1).step_by(2).collect();
        let far: Vec<f64> = times.iter().copied().step_by(2).collect();
        let jains: Vec<f64> = found.iter().map(|(j, _)| *j).collect();
        println!(
            "{name}: intervals {} mean Jain {:.3} min {:.3}, active {:?}, near {:.1} far {:.1} ms, over {}, {:.1} s",
            found.len(),
            mean(&jains),
            jains.iter().copied().fold(1.0, f64::min),
            found.iter().map(|f| f.1).max(),
            mean(&near),
            mean(&far),
            outcome.overflowed_packets,
            begun.elapsed().as_secs_f64()
        );
    }
}
