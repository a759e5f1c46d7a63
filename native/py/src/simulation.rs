//! Binding of the simulator: a scenario in, lists and counters out.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sealane_proto::session::{Detection, PayloadMode, Reliability, SessionStatistics};
use sealane_sim::{Scenario, run};

use crate::link::{LinkSettings, link_counters};

/// Runs sessions in virtual time. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (
    *,
    count,
    message_bytes,
    message_bytes_max = None,
    seed = 0,
    depth = 1,
    slots = 16,
    erasure_code = None,
    interleaving = 1,
    unit_bytes = 4096,
    chunk_units = 16,
    real_payload = false,
    forward = None,
    backward = None,
    blackout_nanos = None,
    idle_timeout_nanos = 60_000_000_000,
    reordering_nanos = 0,
    detection = "reports",
    time_nanos_max = 86_400_000_000_000,
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments are the scenario")]
pub fn simulate<'py>(
    py: Python<'py>,
    count: u32,
    message_bytes: u64,
    message_bytes_max: Option<u64>,
    seed: u64,
    depth: u16,
    slots: u16,
    erasure_code: Option<(u8, u8)>,
    interleaving: u8,
    unit_bytes: u16,
    chunk_units: u16,
    real_payload: bool,
    forward: Option<LinkSettings>,
    backward: Option<LinkSettings>,
    blackout_nanos: Option<(u64, u64)>,
    idle_timeout_nanos: u64,
    reordering_nanos: u64,
    detection: &str,
    time_nanos_max: u64,
) -> PyResult<Bound<'py, PyDict>> {
    let detection = match detection {
        "reports" => Detection::Reports,
        "timeout" => Detection::Timeout,
        other => {
            let message = format!("detection {other:?}: \"reports\" or \"timeout\"");
            return Err(PyValueError::new_err(message));
        }
    };
    let forward = forward.map_or(Scenario::fast(seed).forward, |link| link.config);
    let backward = backward.map_or(forward, |link| link.config);
    let scenario = Scenario {
        seed,
        count,
        message_bytes_min: message_bytes,
        message_bytes_max: message_bytes_max.unwrap_or(message_bytes),
        depth,
        reliability: match erasure_code {
            Some((k, m)) => Reliability::ErasureCoded { k, m, depth: interleaving },
            None => Reliability::SelectiveRepeat,
        },
        streams: false,
        unit_bytes,
        chunk_units,
        slots,
        rate_bytes_per_second: forward.rate_bits_per_second / 8,
        idle_timeout: idle_timeout_nanos,
        reordering: reordering_nanos,
        detection,
        payload: if real_payload { PayloadMode::Real } else { PayloadMode::LengthsOnly },
        forward,
        backward,
        blackout: blackout_nanos,
        more_paths: Vec::new(),
        time_max: time_nanos_max,
    };
    let outcome =
        py.detach(|| run(&scenario)).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let signed = |nanos: &Option<u64>| nanos.map_or(-1, u64::cast_signed);
    let completions: Vec<i64> = outcome.completion_nanos.iter().map(signed).collect();
    let violations: Vec<String> = outcome
        .violations
        .iter()
        .map(|found| format!("{:?} at {} ns: {}", found.rule, found.at, found.detail))
        .collect();
    let result = PyDict::new(py);
    result.set_item("completion_nanos", completions)?;
    result.set_item("elapsed_nanos", outcome.elapsed_nanos)?;
    result.set_item("trace_hash", format!("{:016x}", outcome.trace_hash))?;
    result.set_item("steps", outcome.steps)?;
    result.set_item("sender", statistics(py, &outcome.sender)?)?;
    result.set_item("receiver", statistics(py, &outcome.receiver)?)?;
    result.set_item("forward", link_counters(py, &outcome.forward)?)?;
    result.set_item("backward", link_counters(py, &outcome.backward)?)?;
    result.set_item("violations", violations)?;
    Ok(result)
}

fn statistics<'py>(py: Python<'py>, counters: &SessionStatistics) -> PyResult<Bound<'py, PyDict>> {
    let result = PyDict::new(py);
    for (name, value) in counters.fields() {
        result.set_item(name, value)?;
    }
    Ok(result)
}
