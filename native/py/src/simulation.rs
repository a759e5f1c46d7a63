//! Bindings of the simulator: a scenario in; lists and counters out.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use sealane_engine::reduce::{self, Reduction};
use sealane_proto::session::{
    Detection, PayloadMode, Reliability, SessionStatistics, Steering, Version,
};
use sealane_sim::{Outcome, PathLinks, Ring, RingReceive, RingSend, Scenario, Site, run, run_ring};

use crate::link::{LinkSettings, link_counters};

/// A day.
const TIME_NANOS_MAX: u64 = 86_400_000_000_000;

/// Runs a session in virtual time. See `_native.pyi`.
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
    parity_gap_nanos = 0,
    path_count = 1,
    unit_bytes = 4096,
    chunk_units = 16,
    real_payload = false,
    forward = None,
    backward = None,
    blackout_nanos = None,
    idle_timeout_nanos = 60_000_000_000,
    reordering_nanos = 0,
    detection = "reports",
    time_nanos_max = TIME_NANOS_MAX,
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
    parity_gap_nanos: u64,
    path_count: u8,
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
    let forward = forward.map_or(Scenario::fast(seed).forward, |link| link.config);
    let backward = backward.map_or(forward, |link| link.config);
    let scenario = Scenario {
        seed,
        count,
        message_bytes_min: message_bytes,
        message_bytes_max: message_bytes_max.unwrap_or(message_bytes),
        depth,
        reliability: reliability_of(erasure_code, interleaving),
        parity_gap: parity_gap_nanos,
        streams: false,
        unit_bytes,
        chunk_units,
        slots,
        rate_bytes_per_second: forward.rate_bits_per_second / 8,
        idle_timeout: idle_timeout_nanos,
        reordering: reordering_nanos,
        detection: detection_of(detection)?,
        version: Version::V6,
        steering: Steering::default(),
        receiver_steering: None,
        payload: if real_payload { PayloadMode::Real } else { PayloadMode::LengthsOnly },
        forward,
        backward,
        blackout: blackout_nanos,
        pauses: None,
        more_paths: vec![
            PathLinks { forward, backward, blackout: None };
            usize::from(path_count).saturating_sub(1)
        ],
        time_max: time_nanos_max,
    };
    let outcome =
        py.detach(|| run(&scenario)).map_err(|error| PyValueError::new_err(error.to_string()))?;
    outcome_of(py, &outcome)
}

/// Runs an operation around a ring of sites in virtual time. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (
    *,
    sites,
    arrays = None,
    dtype = "float32",
    repeats = 1,
    seed = 0,
    depth = 16,
    slots = 16,
    erasure_code = None,
    interleaving = 1,
    unit_bytes = 4096,
    link = None,
    detection = "reports",
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments are the ring")]
pub fn simulate_ring<'py>(
    py: Python<'py>,
    sites: Vec<SitePlan>,
    arrays: Option<Vec<Vec<u8>>>,
    dtype: &str,
    repeats: u32,
    seed: u64,
    depth: u16,
    slots: u16,
    erasure_code: Option<(u8, u8)>,
    interleaving: u8,
    unit_bytes: u16,
    link: Option<LinkSettings>,
    detection: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let combine: fn(&mut [u8], &[u8]) = match dtype {
        "float32" => add_float32,
        "bfloat16" => add_bfloat16,
        other => {
            let message = format!("dtype {other:?}: \"float32\" or \"bfloat16\"");
            return Err(PyValueError::new_err(message));
        }
    };
    let fast = Scenario::fast(seed);
    let path = link.map_or(fast.forward, |link| link.config);
    let is_real = arrays.is_some();
    let session = Scenario {
        depth,
        slots,
        reliability: reliability_of(erasure_code, interleaving),
        unit_bytes,
        rate_bytes_per_second: path.rate_bits_per_second / 8,
        detection: detection_of(detection)?,
        payload: if is_real { PayloadMode::Real } else { PayloadMode::LengthsOnly },
        forward: path,
        backward: path,
        time_max: TIME_NANOS_MAX,
        ..fast
    };
    let ring = Ring { session, sites: sites.into_iter().map(site_of).collect(), repeats };
    let mut arrays = arrays.unwrap_or_default();
    let outcome = py
        .detach(|| run_ring(&ring, &mut arrays, &combine))
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    let sessions: PyResult<Vec<_>> =
        outcome.sessions.iter().map(|session| outcome_of(py, session)).collect();
    let arrays: Vec<_> = arrays.iter().map(|array| PyBytes::new(py, array)).collect();
    let result = PyDict::new(py);
    result.set_item("completion_nanos", outcome.completion_nanos)?;
    result.set_item("sessions", sessions?)?;
    result.set_item("arrays", arrays)?;
    Ok(result)
}

/// Sends (start, end, after) and receives (start, end, whether combined) of a site.
type SitePlan = (Vec<(u64, u64, u32)>, Vec<(u64, u64, bool)>);

fn site_of((sends, receives): SitePlan) -> Site {
    let send = |(start, end, after)| RingSend { range: start..end, after };
    let receive = |(start, end, is_combined)| RingReceive { range: start..end, is_combined };
    Site {
        sends: sends.into_iter().map(send).collect(),
        receives: receives.into_iter().map(receive).collect(),
    }
}

fn add_float32(ours: &mut [u8], theirs: &[u8]) {
    for (a, b) in ours.as_chunks_mut::<4>().0.iter_mut().zip(theirs.as_chunks::<4>().0) {
        *a = (f32::from_ne_bytes(*a) + f32::from_ne_bytes(*b)).to_ne_bytes();
    }
}

fn add_bfloat16(ours: &mut [u8], theirs: &[u8]) {
    let elements = |bytes: &[u8]| -> Vec<u16> {
        bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_ne_bytes(*pair)).collect()
    };
    let mut sum = elements(ours);
    reduce::reduce_bfloat16(&mut sum, &elements(theirs), Reduction::Sum);
    for (pair, element) in ours.as_chunks_mut::<2>().0.iter_mut().zip(sum) {
        *pair = element.to_ne_bytes();
    }
}

fn detection_of(name: &str) -> PyResult<Detection> {
    match name {
        "reports" => Ok(Detection::Reports),
        "timeout" => Ok(Detection::Timeout),
        other => {
            let message = format!("detection {other:?}: \"reports\" or \"timeout\"");
            Err(PyValueError::new_err(message))
        }
    }
}

fn reliability_of(erasure_code: Option<(u8, u8)>, depth: u8) -> Reliability {
    erasure_code.map_or(Reliability::SelectiveRepeat, |(k, m)| Reliability::ErasureCoded {
        k,
        m,
        depth,
    })
}

fn outcome_of<'py>(py: Python<'py>, outcome: &Outcome) -> PyResult<Bound<'py, PyDict>> {
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
    result.set_item("foreign_units", outcome.foreign_units)?;
    result.set_item("foreign_messages", outcome.foreign_messages)?;
    result.set_item("violations", violations)?;
    Ok(result)
}

/// All of a session's statistics by name.
pub fn statistics<'py>(
    py: Python<'py>,
    counters: &SessionStatistics,
) -> PyResult<Bound<'py, PyDict>> {
    let result = PyDict::new(py);
    for (name, value) in counters.fields() {
        result.set_item(name, value)?;
    }
    Ok(result)
}
