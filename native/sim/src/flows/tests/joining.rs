//! A hundred sessions of which most come and go.

use super::*;

/// A twentieth of the line in Uno's evaluation, with near round trips of an eighth of far ones:
/// windows of a dozen sessions are whole packets.
const SLOW: u64 = LINE / 20;
const MS: Nanos = 1_000_000;
/// All are established by then, although some of their first packets meet at the port and are lost.
const START: Nanos = 300 * MS;
/// Sessions that stay, half of them near, half far …
const STAYING: u16 = 8;
/// … and those that join one after the other and leave when they have sent what they have.
const LEAVING: u16 = 92;
const JOIN_EVERY: Nanos = MS / 2;
const LEAVING_BYTES: u64 = 125_000;
/// By then nobody joins or leaves.
const CALM: Nanos = START + 85 * MS;
/// A hundred far round trips later.
const SETTLED: Nanos = CALM + 180 * MS;

fn slow_sites() -> Sites {
    let fast = sites(true);
    let cap_bytes = 1_200_000;
    let thresholds = Thresholds {
        low_bytes: cap_bytes / 50,
        high_bytes: cap_bytes / 5 * 3,
        probability_max_parts: 1_000_000_000,
    };
    let near = LinkConfig {
        rate_bits_per_second: SLOW,
        delay_nanos: 16_000,
        buffer_bytes: 250_000,
        phantom: fast.near.phantom.map(|phantom| Phantom { cap_bytes, thresholds, ..phantom }),
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

/// Alternately far and near, to one host.
fn joining() -> Vec<FlowSetup> {
    let flow_of = |index: u16| {
        let host = (index * 37) % 110;
        let from = if index.is_multiple_of(2) { host } else { 128 + host };
        let joins = u64::from(index.saturating_sub(STAYING)) * JOIN_EVERY;
        let bytes = if index < STAYING { 1 << 30 } else { LEAVING_BYTES };
        FlowSetup { start: START + joins, ..flow(from, 240, bytes) }
    };
    (0..STAYING + LEAVING).map(flow_of).collect()
}

/// Jain's index of the sessions that stay, when the others have left and a hundred round trips later.
fn shares(seed: u64) -> [f64; 2] {
    let every = 30 * MS;
    let cell = Cell {
        seed,
        sites: slow_sites(),
        congestion: Congestion::Product(Algorithm::Uno(Rules::DEFAULT)),
        balance: Balance::Subflows,
        sample_every: every,
        time_max: SETTLED + 3 * every,
        ..cell(joining())
    };
    let outcome = run_sessions(&cell, SessionsSetup { paths: 4, ..product() }).unwrap();
    let stay = usize::from(STAYING);
    let left = outcome.flows[stay..].iter().map(|flow| flow.finished_at);
    assert!(left.clone().all(|at| at > 0 && at < CALM), "{:?}", left.collect::<Vec<Nanos>>());
    let share = |from: usize, to: usize| {
        let bytes = |at: usize| &outcome.samples[at].acked_bytes[..stay];
        let rates = bytes(to).iter().zip(bytes(from)).map(|(to, from)| (to - from) as f64);
        jain(&rates.collect::<Vec<f64>>())
    };
    let last = outcome.samples.len() - 1;
    let calm = (CALM / every) as usize;
    [share(calm - 1, calm), share(last - 3, last)]
}

#[test]
fn sessions_that_stay_share_ever_more_fairly_after_others_came_and_went() {
    // Windows of few packets: a seed alone says little.
    let found = [1, 2, 3].map(shares);
    let [before, after] = [0, 1].map(|when| mean(&found.map(|each| each[when])));
    assert!(after > 0.75 && after > before + 0.05, "{found:.3?}");
}
