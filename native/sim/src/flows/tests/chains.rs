//! Flows that depend on each other: rings, as in an all-reduce.

use super::*;

/// Packets of a chunk.
const PACKETS: u64 = 64;
const CHUNK: u64 = PACKETS * PAYLOAD_BYTES as u64;
const STEPS: u64 = 6;

/// A ring of these hosts, each of which sends six chunks to the next one.
fn ring(hosts: &[u16]) -> Cell {
    let start = 10_000_000;
    let count = hosts.len();
    let to = |index: usize| hosts[(index + 1) % count];
    let flow =
        |(index, from): (usize, &u16)| FlowSetup { start, ..flow(*from, to(index), STEPS * CHUNK) };
    let follows =
        |index| Chain { follows: (index + count as u32 - 1) % count as u32, chunk_bytes: CHUNK };
    Cell {
        congestion: Congestion::Product(Algorithm::Uno(Rules::DEFAULT)),
        balance: Balance::Subflows,
        chains: (0..count as u32).map(follows).map(Some).collect(),
        ..cell(hosts.iter().enumerate().map(flow).collect())
    }
}

fn all_arrive_in_order(cell: &Cell, outcome: &CellOutcome) {
    // The shortest way: both hosts at the same leaf, two cables.
    let sending = PACKETS * 333;
    assert!(outcome.flows.iter().all(|flow| flow.finished_at > 0), "{:?}", outcome.flows);
    for (index, (chain, chunks)) in cell.chains.iter().zip(&outcome.chunks).enumerate() {
        assert_eq!(chunks.len(), STEPS as usize);
        let before = &outcome.chunks[chain.unwrap().follows as usize];
        for (step, (needed, at)) in before.iter().zip(&chunks[1..]).enumerate() {
            assert!(*at >= needed + sending, "chunk {} of worker {index}", step + 1);
        }
    }
}

#[test]
fn a_chunk_leaves_when_the_one_before_it_has_arrived() {
    for hosts in [[130, 150, 170, 200].as_slice(), &[3, 40, 150, 200]] {
        let cell = ring(hosts);
        all_arrive_in_order(&cell, &run_cell(&cell).unwrap());
        all_arrive_in_order(&cell, &run_sessions(&cell, product()).unwrap());
    }
}

#[test]
fn a_ring_on_idle_links_takes_little_more_than_its_ways() {
    let near = ring(&[130, 150, 170, 200]);
    let outcome = run_cell(&near).unwrap();
    let last = *outcome.chunks.iter().flatten().max().unwrap() - 10_000_000;
    let way = near.sites.one_way(PAYLOAD_BYTES + HEADER_BYTES, false);
    let ideal = STEPS * ((PACKETS - 1) * 333 + way);
    assert!(last >= ideal, "{last} ns, ideally {ideal}");
    assert!(last * 10 < ideal * 15, "{last} ns instead of {ideal}");
}

#[test]
fn requests_and_answers_take_turns_beside_flows_that_depend_on_nothing() {
    let mut cell = ring(&[130, 150]);
    cell.flows.push(flow(3, 150, 2 * CHUNK));
    cell.chains.push(None);
    for outcome in [run_cell(&cell).unwrap(), run_sessions(&cell, product()).unwrap()] {
        assert!(outcome.flows.iter().all(|flow| flow.finished_at > 0), "{:?}", outcome.flows);
        let [requests, answers] = [&outcome.chunks[0], &outcome.chunks[1]];
        assert_eq!((requests.len(), answers.len()), (STEPS as usize, STEPS as usize));
        assert!(answers.iter().zip(&requests[1..]).all(|(answer, next)| answer < next));
    }
}

#[test]
fn dependencies_that_make_no_sense_are_refused() {
    let fine = ring(&[130, 150, 170, 200]);
    run_cell(&fine).unwrap();
    let refused = |change: &dyn Fn(&mut Cell)| {
        let mut cell = fine.clone();
        change(&mut cell);
        assert_eq!(run_cell(&cell).expect_err("refused"), CellError::Chain);
    };
    let chains = |cell: &mut Cell, change: &dyn Fn(&mut Chain)| {
        cell.chains.iter_mut().flatten().for_each(change);
    };
    refused(&|cell| cell.chains[1] = Some(Chain { follows: 4, chunk_bytes: CHUNK }));
    refused(&|cell| cell.chains[1] = Some(Chain { follows: 1, chunk_bytes: CHUNK }));
    refused(&|cell| cell.chains[1] = Some(Chain { follows: 0, chunk_bytes: 2 * CHUNK }));
    refused(&|cell| cell.chains[0] = None);
    refused(&|cell| chains(cell, &|chain| chain.chunk_bytes = 0));
    refused(&|cell| chains(cell, &|chain| chain.chunk_bytes = CHUNK + 1));
    refused(&|cell| cell.chains.truncate(3));
    refused(&|cell| cell.code = Some(Code { data: 8, parity: 2 }));
}
