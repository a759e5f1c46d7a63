//! Bindings of the simulator of many flows: a cell in; completion times and observations out.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sealane_proto::congestion::{ALGORITHMS, Algorithm};
use sealane_proto::fabric::Sites;
use sealane_proto::link::NANOS_PER_SECOND;
use sealane_proto::session::Marks;
use sealane_sim::{
    Balance, Cell, Chain, Change, Code, Congestion, FlowSetup, HEADER_BYTES, PAYLOAD_BYTES, RIVALS,
    Shared, run_cell, run_shared,
};

use crate::link::LinkSettings;
use crate::simulation::statistics;

/// Runs many flows in one network in virtual time. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (
    *,
    flows,
    host,
    near,
    border,
    wan,
    wan_links,
    congestion,
    without = Vec::new(),
    balance = "subflows",
    code = None,
    chains = Vec::new(),
    outages = Vec::new(),
    sample_every_nanos = 0,
    sample_host = 0,
    seed = 0,
    time_nanos_max = 60_000_000_000,
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments are the cell")]
pub fn simulate_flows<'py>(
    py: Python<'py>,
    flows: Vec<(u16, u16, u64, u64)>,
    host: LinkSettings,
    near: LinkSettings,
    border: LinkSettings,
    wan: LinkSettings,
    wan_links: u16,
    congestion: &str,
    without: Vec<String>,
    balance: &str,
    code: Option<(u8, u8)>,
    chains: Vec<Option<(u32, u64)>>,
    outages: Vec<(u16, u64, u64)>,
    sample_every_nanos: u64,
    sample_host: u16,
    seed: u64,
    time_nanos_max: u64,
) -> PyResult<Bound<'py, PyDict>> {
    let flow = |(from, to, start, bytes)| FlowSetup { from, to, start, bytes };
    let chain = |(follows, chunk_bytes)| Chain { follows, chunk_bytes };
    let outage = |(link, start, end)| Change::outage(link, start, end);
    let cell = Cell {
        seed,
        sites: Sites {
            host: host.config,
            near: near.config,
            border: border.config,
            wan: wan.config,
            wan_links,
        },
        flows: flows.into_iter().map(flow).collect(),
        congestion: congestion_of(congestion, &without)?,
        balance: named("balance", balance, &Balance::ALL)?,
        code: code.map(|(data, parity)| Code { data, parity }),
        chains: chains.into_iter().map(|each| each.map(chain)).collect(),
        changes: outages.into_iter().map(outage).collect(),
        sample_every: sample_every_nanos,
        sample_host,
        time_max: time_nanos_max,
    };
    let outcome =
        py.detach(|| run_cell(&cell)).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let result = PyDict::new(py);
    let flows: Vec<_> = outcome
        .flows
        .iter()
        .map(|flow| (flow.finished_at, flow.sent_packets, flow.repeated_packets))
        .collect();
    result.set_item("flows", flows)?;
    let samples: Vec<_> = outcome
        .samples
        .into_iter()
        .map(|sample| (sample.at, sample.acked_bytes, sample.queued_bytes))
        .collect();
    result.set_item("samples", samples)?;
    result.set_item("chunks", outcome.chunks)?;
    result.set_item("overflowed_packets", outcome.overflowed_packets)?;
    let full = PAYLOAD_BYTES + HEADER_BYTES;
    let bits = u64::from(full) * 8 * NANOS_PER_SECOND;
    result.set_item("packet_nanos", bits.div_ceil(cell.sites.host.rate_bits_per_second.max(1)))?;
    result.set_item("near_way_nanos", cell.sites.one_way(full, false))?;
    result.set_item("far_way_nanos", cell.sites.one_way(full, true))?;
    result.set_item("near_rtt_nanos", cell.round_trip(false))?;
    result.set_item("far_rtt_nanos", cell.round_trip(true))?;
    Ok(result)
}

/// Lets sessions send through one link in virtual time. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (
    *,
    starts_nanos,
    rate_bits_per_second,
    link,
    time_nanos,
    congestion = None,
    are_marks_queues = true,
    seed = 0,
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments are the settings")]
pub fn simulate_sessions<'py>(
    py: Python<'py>,
    starts_nanos: Vec<u64>,
    rate_bits_per_second: u64,
    link: LinkSettings,
    time_nanos: u64,
    congestion: Option<&str>,
    are_marks_queues: bool,
    seed: u64,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let algorithm = |name| named("congestion", name, &ALGORITHMS);
    let shared = Shared {
        seed,
        link: link.config,
        rate_bytes_per_second: rate_bits_per_second / 8,
        starts: starts_nanos,
        congestion: congestion.map(algorithm).transpose()?,
        marks: if are_marks_queues { Marks::Queues } else { Marks::PhantomQueues },
        time: time_nanos,
    };
    let sessions = py
        .detach(|| run_shared(&shared))
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    sessions.iter().map(|counters| statistics(py, counters)).collect()
}

fn congestion_of(name: &str, without: &[String]) -> PyResult<Congestion> {
    let product = ALGORITHMS.map(|(name, algorithm)| (name, Congestion::Product(algorithm)));
    let known: Vec<_> = product.into_iter().chain(RIVALS).collect();
    without.iter().try_fold(named("congestion", name, &known)?, |congestion, rule| {
        let changed = match congestion {
            Congestion::Product(Algorithm::Uno(rules)) => rules.without(rule),
            _ => None,
        };
        changed
            .map(|rules| Congestion::Product(Algorithm::Uno(rules)))
            .ok_or_else(|| PyValueError::new_err(format!("{name:?} has no rule {rule:?}")))
    })
}

fn named<T: Copy>(what: &str, name: &str, known: &[(&str, T)]) -> PyResult<T> {
    known.iter().find(|(known, _)| *known == name).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        PyValueError::new_err(format!("{what} {name:?}; known: {}", names.join(", ")))
    })
}
