//! The engine's load generator for Python.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use sealane_engine::storage::load::{LoadPlan, run_load as run};
use sealane_proto::nvme::host_queue::HostLimits;

use crate::host_queue::HostQueueDescription;
use crate::storage::{invalid, transfer_error};

/// How long nothing may be heard.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Keeps `depth` commands outstanding on each queue for `seconds`.
#[pyfunction]
#[pyo3(signature = (queues, *, is_write, is_random, io_bytes, depth, span_bytes, seconds, seed))]
#[allow(clippy::too_many_arguments)] // all by keyword
fn run_load(
    py: Python<'_>,
    queues: Vec<HostQueueDescription>,
    is_write: bool,
    is_random: bool,
    io_bytes: usize,
    depth: usize,
    span_bytes: u64,
    seconds: f64,
    seed: u64,
) -> PyResult<Bound<'_, PyDict>> {
    let queues = queues.iter().map(|queue| Ok((queue.socket()?, queue.limits())));
    let queues = queues.collect::<PyResult<Vec<_>>>()?;
    let block_bytes = queues.first().map_or(0, |(_, limits)| limits.block_bytes);
    let same = queues.iter().all(|(_, limits)| limits.block_bytes == block_bytes);
    if block_bytes == 0 || !same || io_bytes == 0 || !io_bytes.is_multiple_of(block_bytes) {
        return Err(invalid("a load moves whole blocks of one size"));
    }
    let fits = |limits: &HostLimits| {
        io_bytes <= limits.transfer_max && (1..usize::from(limits.queue_depth)).contains(&depth)
    };
    if !queues.iter().all(|(_, limits)| fits(limits)) {
        return Err(invalid("a load's size or depth is beyond what the queues take"));
    }
    let plan = LoadPlan {
        is_write,
        is_random,
        io_blocks: (io_bytes / block_bytes) as u32,
        depth,
        span: 0..span_bytes / block_bytes as u64,
        duration: Duration::try_from_secs_f64(seconds).map_err(invalid)?,
        timeout: TIMEOUT,
        seed,
    };
    let result = py.detach(|| run(queues, &plan)).map_err(transfer_error)?;
    let found = PyDict::new(py);
    let microseconds = |quantile| result.latency.value_at_quantile(quantile) as f64 / 1e3;
    found.set_item("commands", result.commands)?;
    found.set_item("bytes", result.bytes)?;
    found.set_item("seconds", result.elapsed.as_secs_f64())?;
    found.set_item("cpu_seconds", result.cpu.as_secs_f64())?;
    found.set_item("latency_p50_us", microseconds(0.5))?;
    found.set_item("latency_p99_us", microseconds(0.99))?;
    found.set_item("latency_p999_us", microseconds(0.999))?;
    Ok(found)
}

/// Adds the function to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(run_load, module)?)
}
