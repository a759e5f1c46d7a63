//! Binding of the histograms of latencies, added up by role.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use sealane_engine::latency::{GATEWAY, Io, JOBS, SENDS, Sum, TARGET, bounds};

/// Upper bounds of the buckets in nanoseconds, each inclusive.
#[pyfunction]
pub(crate) fn latency_bounds() -> Vec<u64> {
    bounds().to_vec()
}

/// For each role and operation: operations in each bucket alone, the last without a bound, and
/// their nanoseconds together.
#[pyfunction]
pub(crate) fn latencies(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let result = PyDict::new(py);
    for (role, sums) in [("gateway", GATEWAY.sums()), ("target", TARGET.sums())] {
        result.set_item(role, named(py, Io::ALL.map(Io::name).into_iter().zip(sums))?)?;
    }
    result.set_item("fabric", named(py, ["send"].into_iter().zip(SENDS.sums()))?)?;
    result.set_item("accelerator", named(py, ["seal"].into_iter().zip(JOBS.sums()))?)?;
    Ok(result)
}

fn named(
    py: Python<'_>,
    sums: impl Iterator<Item = (&'static str, Sum)>,
) -> PyResult<Bound<'_, PyDict>> {
    let named = PyDict::new(py);
    for (name, sum) in sums {
        named.set_item(name, (sum.buckets.to_vec(), sum.nanos))?;
    }
    Ok(named)
}
