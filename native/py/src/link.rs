//! Bindings of emulated links: settings in; addresses and counters out.

use std::net::{IpAddr, SocketAddr};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sealane_engine::emulator::{
    AccessReport, DirectionReport, Emulator as Engine, EmulatorConfig, EmulatorError, Spell,
    WanPort,
};
use sealane_proto::link::{
    GilbertElliott, LinkConfig, LinkCounters, Loss, Phantom, Thresholds, TimedBursts,
};

/// Parses a numeric address with a port.
pub fn parse_address(address: &str) -> PyResult<SocketAddr> {
    address.parse().map_err(|_| {
        PyValueError::new_err(format!("{address:?} is not a numeric address with a port"))
    })
}

/// Properties of one direction of a link.
#[pyclass(module = "sealane._native", frozen, from_py_object)]
#[derive(Clone, Copy)]
pub struct LinkSettings {
    pub config: LinkConfig,
}

fn thresholds((low_bytes, high_bytes, probability_max_parts): (u64, u64, u32)) -> Thresholds {
    Thresholds { low_bytes, high_bytes, probability_max_parts }
}

#[pymethods]
impl LinkSettings {
    #[new]
    #[pyo3(signature = (
        *,
        rate_bits_per_second,
        delay_nanos,
        buffer_bytes,
        loss_parts_per_billion = 0,
        gilbert_elliott = None,
        timed_bursts = None,
        jitter_nanos = 0,
        reorder_parts_per_billion = 0,
        reorder_nanos_max = 0,
        duplicate_parts_per_billion = 0,
        corrupt_parts_per_billion = 0,
        red = None,
        phantom = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments are the settings")]
    fn new(
        rate_bits_per_second: u64,
        delay_nanos: u64,
        buffer_bytes: u64,
        loss_parts_per_billion: u32,
        gilbert_elliott: Option<(u32, u32, u32, u32)>,
        timed_bursts: Option<(u64, u64)>,
        jitter_nanos: u64,
        reorder_parts_per_billion: u32,
        reorder_nanos_max: u64,
        duplicate_parts_per_billion: u32,
        corrupt_parts_per_billion: u32,
        red: Option<(u64, u64, u32)>,
        phantom: Option<(u32, u64, u64, u64, u32)>,
    ) -> PyResult<Self> {
        let loss = match (loss_parts_per_billion, gilbert_elliott, timed_bursts) {
            (parts, None, None) => Loss::Independent(parts),
            (0, Some((p, r, loss_bad, loss_good)), None) => {
                Loss::GilbertElliott(GilbertElliott { p, r, loss_bad, loss_good })
            }
            (0, None, Some((good_nanos, bad_nanos))) => {
                Loss::Timed(TimedBursts { good_nanos, bad_nanos })
            }
            _ => {
                return Err(PyValueError::new_err(
                    "loss_parts_per_billion, gilbert_elliott and timed_bursts exclude each other",
                ));
            }
        };
        let phantom =
            phantom.map(|(drain_parts_per_billion, cap_bytes, low, high, most)| Phantom {
                drain_parts_per_billion,
                cap_bytes,
                thresholds: thresholds((low, high, most)),
            });
        let config = LinkConfig {
            rate_bits_per_second,
            delay_nanos,
            buffer_bytes,
            loss,
            jitter_nanos,
            reorder_parts_per_billion,
            reorder_nanos_max,
            duplicate_parts_per_billion,
            corrupt_parts_per_billion,
            red: red.map(thresholds),
            phantom,
        };
        config.validate().map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self { config })
    }
}

/// A link in real time.
#[pyclass(module = "sealane._native")]
pub struct Emulator {
    engine: Engine,
}

fn emulator_error(error: EmulatorError) -> PyErr {
    match error {
        EmulatorError::System(error) => PyErr::from(error),
        error => PyValueError::new_err(error.to_string()),
    }
}

/// Path, start and end of an outage in nanoseconds.
type Outage = (usize, u64, u64);
/// The same of a detour, and how many nanoseconds longer it is.
type Detour = (usize, u64, u64, u64);

fn emulator_config(
    forward: Vec<LinkSettings>,
    backward: Vec<LinkSettings>,
    seed: u64,
    (outages, detours): (Vec<Outage>, Vec<Detour>),
    strips_ce: (bool, bool),
) -> EmulatorConfig {
    let configs = |settings: Vec<LinkSettings>| settings.iter().map(|link| link.config).collect();
    let spell = |(path, start_nanos, end_nanos), more_nanos| Spell {
        path,
        start_nanos,
        end_nanos,
        more_nanos,
    };
    let outages = outages.into_iter().map(|outage| spell(outage, None));
    let detours = detours.into_iter().map(|(path, start_nanos, end_nanos, more_nanos)| {
        spell((path, start_nanos, end_nanos), Some(more_nanos))
    });
    EmulatorConfig {
        forward: configs(forward),
        backward: configs(backward),
        seed,
        schedule: outages.chain(detours).collect(),
        access: None,
        strips_ce: strips_ce.into(),
        corruption_passes_checksum: true,
    }
}

#[pymethods]
impl Emulator {
    #[staticmethod]
    #[pyo3(signature = (forward, backward, *, seed, forward_to, outages = vec![], detours = vec![], strips_ce = (false, false)))]
    fn relay(
        forward: Vec<LinkSettings>,
        backward: Vec<LinkSettings>,
        seed: u64,
        forward_to: &str,
        outages: Vec<Outage>,
        detours: Vec<Detour>,
        strips_ce: (bool, bool),
    ) -> PyResult<Self> {
        let config = emulator_config(forward, backward, seed, (outages, detours), strips_ce);
        let engine = Engine::relay(config, parse_address(forward_to)?).map_err(emulator_error)?;
        Ok(Self { engine })
    }

    #[staticmethod]
    #[pyo3(signature = (
        forward,
        backward,
        *,
        seed,
        ports,
        mtu,
        outages = vec![],
        detours = vec![],
        corruption_passes_checksum = false,
        access = None,
        strips_ce = (false, false),
    ))]
    #[allow(clippy::too_many_arguments)] // keyword-only, each a value of its own
    fn wan(
        forward: Vec<LinkSettings>,
        backward: Vec<LinkSettings>,
        seed: u64,
        ports: Vec<(String, bool, Vec<IpAddr>)>,
        mtu: u16,
        outages: Vec<Outage>,
        detours: Vec<Detour>,
        corruption_passes_checksum: bool,
        access: Option<LinkSettings>,
        strips_ce: (bool, bool),
    ) -> PyResult<Self> {
        let config = EmulatorConfig {
            access: access.map(|link| link.config),
            corruption_passes_checksum,
            ..emulator_config(forward, backward, seed, (outages, detours), strips_ce)
        };
        let port = |(interface, is_second_side, addresses)| WanPort {
            interface,
            is_second_side,
            addresses,
        };
        let ports = ports.into_iter().map(port).collect();
        let engine = Engine::wan(config, ports, mtu).map_err(emulator_error)?;
        Ok(Self { engine })
    }

    #[getter]
    fn address(&self) -> Option<String> {
        self.engine.address().map(|address| address.to_string())
    }

    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = py.detach(|| self.engine.report());
        let result = PyDict::new(py);
        result.set_item("forward", direction(py, &report.forward)?)?;
        result.set_item("backward", direction(py, &report.backward)?)?;
        let access = PyList::empty(py);
        for ([up, down], arrived) in report.access.iter().zip(&report.arrived_bytes) {
            let both = PyDict::new(py);
            both.set_item("up", access_link(py, up)?)?;
            both.set_item("down", access_link(py, down)?)?;
            both.set_item("arrived_bytes", arrived.clone())?;
            access.append(both)?;
        }
        result.set_item("access", access)?;
        result.set_item("missed_packets", report.medium.missed_packets)?;
        result.set_item("oversized_packets", report.medium.oversized_packets)?;
        result.set_item("foreign_packets", report.medium.foreign_packets)?;
        result.set_item("local_packets", report.medium.local_packets)?;
        result.set_item("cpu_nanos", report.cpu_nanos)?;
        Ok(result)
    }

    fn start_schedule(&self) {
        self.engine.start_schedule();
    }

    fn stop(&mut self, py: Python<'_>) {
        py.detach(|| self.engine.stop());
    }
}

fn access_link<'py>(py: Python<'py>, report: &AccessReport) -> PyResult<Bound<'py, PyDict>> {
    let result = link_counters(py, &report.link)?;
    result.set_item("queued_bytes", report.queued_bytes)?;
    Ok(result)
}

fn direction<'py>(py: Python<'py>, report: &DirectionReport) -> PyResult<Bound<'py, PyDict>> {
    let paths = PyList::empty(py);
    for counters in &report.paths {
        paths.append(link_counters(py, counters)?)?;
    }
    let result = PyDict::new(py);
    result.set_item("paths", paths)?;
    result.set_item("sent_packets", report.sent_packets)?;
    result.set_item("unsent_packets", report.unsent_packets)?;
    result.set_item("slip_nanos", report.slips.clone())?;
    Ok(result)
}

/// A link's counters by name.
pub fn link_counters<'py>(
    py: Python<'py>,
    counters: &LinkCounters,
) -> PyResult<Bound<'py, PyDict>> {
    let result = PyDict::new(py);
    for (name, value) in counters.fields() {
        result.set_item(name, value)?;
    }
    Ok(result)
}
