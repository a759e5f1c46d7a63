//! Binding of the simulator: a scenario in, lists and counters out.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sealane_proto::link::LinkCounters;
use sealane_proto::session::{PayloadMode, Reliability, SessionStatistics};
use sealane_sim::{Path, Scenario, run};

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
    rate_bits_per_second = 400_000_000_000,
    delay_nanos = 12_500_000,
    buffer_bytes = 16 << 20,
    loss_parts_per_billion = 0,
    backward_loss_parts_per_billion = 0,
    duplicate_parts_per_billion = 0,
    reorder_parts_per_billion = 0,
    reorder_nanos_max = 0,
    corrupt_parts_per_billion = 0,
    blackout_nanos = None,
    idle_timeout_nanos = 60_000_000_000,
    time_nanos_max = 86_400_000_000_000,
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments are the scenario")]
pub fn simulate(
    py: Python<'_>,
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
    rate_bits_per_second: u64,
    delay_nanos: u64,
    buffer_bytes: u64,
    loss_parts_per_billion: u32,
    backward_loss_parts_per_billion: u32,
    duplicate_parts_per_billion: u32,
    reorder_parts_per_billion: u32,
    reorder_nanos_max: u64,
    corrupt_parts_per_billion: u32,
    blackout_nanos: Option<(u64, u64)>,
    idle_timeout_nanos: u64,
    time_nanos_max: u64,
) -> PyResult<Bound<'_, PyDict>> {
    let forward = Path {
        rate_bits_per_second,
        delay_nanos,
        buffer_bytes,
        loss_parts_per_billion,
        duplicate_parts_per_billion,
        reorder_parts_per_billion,
        reorder_nanos_max,
        corrupt_parts_per_billion,
    };
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
        unit_bytes,
        chunk_units,
        slots,
        rate_bytes_per_second: rate_bits_per_second / 8,
        idle_timeout: idle_timeout_nanos,
        payload: if real_payload { PayloadMode::Real } else { PayloadMode::LengthsOnly },
        forward,
        backward: Path { loss_parts_per_billion: backward_loss_parts_per_billion, ..forward },
        blackout: blackout_nanos,
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
    result.set_item("forward", link(py, &outcome.forward)?)?;
    result.set_item("backward", link(py, &outcome.backward)?)?;
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

fn link<'py>(py: Python<'py>, counters: &LinkCounters) -> PyResult<Bound<'py, PyDict>> {
    let result = PyDict::new(py);
    result.set_item("offered_packets", counters.offered_packets)?;
    result.set_item("offered_bytes", counters.offered_bytes)?;
    result.set_item("delivered_packets", counters.delivered_packets)?;
    result.set_item("delivered_bytes", counters.delivered_bytes)?;
    result.set_item("lost_packets", counters.lost_packets)?;
    result.set_item("overflowed_packets", counters.overflowed_packets)?;
    Ok(result)
}
