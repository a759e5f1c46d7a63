//! Bindings of the engine's load generator.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use sealane_engine::storage::load::{LoadPlan, LoadResult, run_load as run};
use sealane_proto::nvme::host_queue::HostLimits;

use crate::host_queue::HostQueueDescription;
use crate::storage::{invalid, transfer_error};

/// Longest silence of the peer before the load fails.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Settings of a load, without the queues that it runs on.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct LoadSettings {
    is_write: bool,
    is_random: bool,
    io_bytes: usize,
    depth: usize,
    span_bytes: u64,
    seconds: f64,
    seed: u64,
    is_verified: bool,
}

impl LoadSettings {
    /// The plan for queues of these limits; `ValueError` if they can't take it.
    pub(crate) fn plan(&self, block_bytes: usize, limits: &[HostLimits]) -> PyResult<LoadPlan> {
        if self.io_bytes == 0 || !self.io_bytes.is_multiple_of(block_bytes) {
            return Err(invalid(format!(
                "io_bytes {} must be a positive multiple of the block size, {block_bytes}",
                self.io_bytes
            )));
        }
        let fits = |limits: &HostLimits| {
            self.io_bytes <= limits.transfer_max
                && (1..usize::from(limits.queue_depth)).contains(&self.depth)
        };
        if !limits.iter().all(fits) {
            return Err(invalid("io_bytes or depth exceeds the limits of a queue"));
        }
        Ok(LoadPlan {
            is_write: self.is_write,
            is_random: self.is_random,
            io_blocks: (self.io_bytes / block_bytes) as u32,
            depth: self.depth,
            span: 0..self.span_bytes / block_bytes as u64,
            duration: Duration::try_from_secs_f64(self.seconds).map_err(invalid)?,
            timeout: TIMEOUT,
            seed: self.seed,
            is_verified: self.is_verified,
        })
    }
}

/// Keeps `depth` commands outstanding on each queue for `seconds`.
#[pyfunction]
fn run_load(
    py: Python<'_>,
    queues: Vec<HostQueueDescription>,
    settings: LoadSettings,
) -> PyResult<Bound<'_, PyDict>> {
    let queues = queues.iter().map(|queue| Ok((queue.socket()?, queue.limits())));
    let queues = queues.collect::<PyResult<Vec<_>>>()?;
    let limits: Vec<HostLimits> = queues.iter().map(|(_, limits)| *limits).collect();
    let block_bytes = limits.first().map_or(0, |limits| limits.block_bytes);
    let is_same = limits.iter().all(|limits| limits.block_bytes == block_bytes);
    if block_bytes == 0 || !is_same {
        return Err(invalid("all queues of a load must have the same block size"));
    }
    let plan = settings.plan(block_bytes, &limits)?;
    let result = py.detach(|| run(queues, &plan)).map_err(transfer_error)?;
    measured(py, &result)
}

/// Converts the measurements for Python.
pub(crate) fn measured<'py>(py: Python<'py>, result: &LoadResult) -> PyResult<Bound<'py, PyDict>> {
    let found = PyDict::new(py);
    let microseconds = |quantile| result.latency.value_at_quantile(quantile) as f64 / 1e3;
    found.set_item("commands", result.commands)?;
    found.set_item("bytes", result.bytes)?;
    found.set_item("seconds", result.elapsed.as_secs_f64())?;
    found.set_item("cpu_seconds", result.cpu.as_secs_f64())?;
    found.set_item("latency_p50_us", microseconds(0.5))?;
    found.set_item("latency_p99_us", microseconds(0.99))?;
    found.set_item("latency_p999_us", microseconds(0.999))?;
    found.set_item("latency_max_us", result.latency.max() as f64 / 1e3)?;
    found.set_item("verified", result.verified)?;
    Ok(found)
}

/// Adds the function to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(run_load, module)?)
}
