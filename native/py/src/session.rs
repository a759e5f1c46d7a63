//! Bindings of session endpoints (daemon) and rings (job).

use std::fmt::Display;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyBlockingIOError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};
use sealane_engine::session::doorbell::JobBell;
use sealane_engine::session::endpoint::{
    Endpoint, EndpointConfig, EndpointError, Figures, StartConfig, State, random_seed,
};
use sealane_engine::session::job::Job;
use sealane_engine::session::path_report::PathReport;
use sealane_engine::session::region;
use sealane_engine::session::ring::{Operation, PostRefused, Submission, Terms};
use sealane_engine::session::share;
use sealane_engine::session::statistics::names;
use sealane_engine::session::wire::WireAddress;
use sealane_proto::aead::{KEY_BYTES, Secret};
use sealane_proto::congestion::{Algorithm, Domain, Start};
use sealane_proto::session::{self, PathState, PlanRow, Reliability, SessionKeys, Units};

use crate::bitmap::ChunkBitmap;
use crate::lingering::{self, Held};
use crate::permit::Permit;
use crate::region::Region;

fn endpoint_error(error: EndpointError) -> PyErr {
    match error {
        EndpointError::Invalid(message) => PyValueError::new_err(message),
        EndpointError::Started | EndpointError::OtherMemories => {
            PyRuntimeError::new_err(error.to_string())
        }
        EndpointError::System(error) => PyErr::from(error),
    }
}

/// Takes a key from the caller's bytearray and wipes it there.
fn take_key(bytes: &Bound<'_, PyByteArray>) -> PyResult<Secret> {
    let mut copy = bytes.to_vec();
    let key: &mut [u8; KEY_BYTES] = copy
        .as_mut_slice()
        .try_into()
        .map_err(|_| PyValueError::new_err(format!("a key has {KEY_BYTES} bytes")))?;
    for index in 0..KEY_BYTES {
        bytes.set_item(index, 0)?;
    }
    // This also wipes the copy on the heap.
    Ok(Secret::take(key))
}

/// The scheme of these numbers: (0, 0, 1) is selective repeat, which has nothing to interleave.
fn scheme(k: u8, m: u8, depth: u8) -> Reliability {
    if (k, m, depth) == (0, 0, 1) {
        return Reliability::SelectiveRepeat;
    }
    Reliability::ErasureCoded { k, m, depth }
}

fn statistics_dict<'py>(py: Python<'py>, values: &[u64]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (index, name) in names().enumerate() {
        dict.set_item(name, values.get(index).copied().unwrap_or(0))?;
    }
    Ok(dict)
}

fn parse_each<T: FromStr<Err: Display>>(texts: &[String]) -> PyResult<Vec<T>> {
    let parse = |text: &String| {
        text.parse().map_err(|error: T::Err| PyValueError::new_err(error.to_string()))
    };
    texts.iter().map(parse).collect()
}

fn path_dict<'py>(py: Python<'py>, path: &PathReport) -> PyResult<Bound<'py, PyDict>> {
    let account = &path.account;
    let statistics = PyDict::new(py);
    let dict = PyDict::new(py);
    let state = match account.state {
        PathState::Challenged => "challenged",
        PathState::Validated => "validated",
        PathState::Silent => "silent",
        PathState::Abandoned => "abandoned",
    };
    dict.set_item("wire", path.local_address.wire())?;
    dict.set_item("local_address", path.local_address.network_address().to_string())?;
    dict.set_item("peer_address", path.peer_address.to_string())?;
    dict.set_item("state", state)?;
    for (name, value) in [
        ("packets_sent", account.packets_sent),
        ("wire_bytes_sent", account.wire_bytes_sent),
        ("packets_received", account.arrived.received),
        ("lost_packets", account.lost_packets),
        ("lost_runs", account.lost_runs),
        ("peer_drops", account.dropped_packets),
        ("srtt_nanos", account.srtt),
        ("ce_received", account.arrived.ce),
        ("ce_echoed", account.received.ce),
        ("device_failures", path.failures),
    ] {
        statistics.set_item(name, value)?;
    }
    dict.set_item("statistics", statistics)?;
    Ok(dict)
}

/// The rate that all sessions of a fabric share.
#[pyclass(module = "sealane._native", frozen)]
pub struct SharedLine {
    line: Arc<share::SharedLine>,
}

#[pymethods]
impl SharedLine {
    #[new]
    fn new(rate_bits_per_second: u64) -> Self {
        Self { line: share::SharedLine::new(rate_bits_per_second / 8) }
    }

    #[pyo3(signature = (*, rate_bits_per_second, receives, sends))]
    fn add_user(&self, rate_bits_per_second: u64, receives: u64, sends: u64) -> UserAccount {
        let rate_bytes_per_second = rate_bits_per_second / 8;
        let limits = share::ShareLimits { rate_bytes_per_second, receives, sends };
        UserAccount { account: self.line.add_user(limits) }
    }
}

/// What the jobs of one user use together.
#[pyclass(module = "sealane._native", frozen)]
pub struct UserAccount {
    account: Arc<share::UserAccount>,
}

#[pymethods]
impl UserAccount {
    #[pyo3(signature = (*, rate_bits_per_second, receives, sends))]
    fn add_job(&self, rate_bits_per_second: u64, receives: u64, sends: u64) -> JobAccount {
        let rate_bytes_per_second = rate_bits_per_second / 8;
        let limits = share::ShareLimits { rate_bytes_per_second, receives, sends };
        JobAccount { account: self.account.add_job(limits) }
    }
}

/// What the sessions of one job use together.
#[pyclass(module = "sealane._native", frozen)]
pub struct JobAccount {
    account: Arc<share::JobAccount>,
}

#[pymethods]
impl JobAccount {
    fn usage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let usage = self.account.usage();
        let dict = PyDict::new(py);
        for (name, value) in [
            ("wire_bytes_sent", usage.line.wire_bytes),
            ("waits", usage.line.waits),
            ("waited_nanos", usage.line.waited_nanos),
            ("receives", usage.receives),
            ("sends", usage.sends),
            ("refused_operations", usage.refused),
        ] {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }
}

/// How a session steers what it sends.
#[pyclass(module = "sealane._native", frozen)]
pub struct Steering {
    inner: session::Steering,
}

#[pymethods]
impl Steering {
    #[new]
    #[pyo3(signature = (
        *,
        congestion,
        line_bits_per_second,
        near_rtt_nanos,
        far_rtt_nanos,
        phantom_marks = false,
        window_bytes = 0,
        window_age_nanos = 0,
    ))]
    fn new(
        congestion: Option<&str>,
        line_bits_per_second: u64,
        near_rtt_nanos: u64,
        far_rtt_nanos: u64,
        phantom_marks: bool,
        window_bytes: u64,
        window_age_nanos: u64,
    ) -> PyResult<Self> {
        let domain = Domain {
            line_bytes_per_second: line_bits_per_second / 8,
            near_rtt: near_rtt_nanos,
            far_rtt: far_rtt_nanos,
            // The session's own, once its unit is known.
            packet_bytes: 0,
        };
        let named = |name: &str| {
            Algorithm::named(name)
                .ok_or_else(|| PyValueError::new_err(format!("no controller {name:?}")))
        };
        let congestion = congestion.map(named).transpose()?.map(|chosen| (chosen, domain));
        let is_bad = line_bits_per_second < 8 || near_rtt_nanos == 0 || far_rtt_nanos == 0;
        if congestion.is_some() && is_bad {
            let message = "a controller needs a line of at least 8 bit/s and round trips above 0";
            return Err(PyValueError::new_err(message));
        }
        let age = window_age_nanos;
        let start =
            if window_bytes > 0 { Start::Remembered { window_bytes, age } } else { Start::Unknown };
        let marks =
            if phantom_marks { session::Marks::PhantomQueues } else { session::Marks::Queues };
        let near_rtt = (near_rtt_nanos > 0).then_some(near_rtt_nanos);
        Ok(Self { inner: session::Steering { congestion, near_rtt, marks, start } })
    }
}

/// The daemon's handle on the memory of one or several sessions of a job.
#[pyclass(module = "sealane._native", frozen, weakref)]
pub struct SharedRegion(region::Region);

#[pymethods]
impl SharedRegion {
    #[new]
    fn new(py: Python<'_>, size_bytes: u64) -> PyResult<Self> {
        py.detach(|| region::Region::new(size_bytes)).map(Self).map_err(endpoint_error)
    }

    #[getter]
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }
}

/// One session's sockets, memories and worker in the daemon.
#[pyclass(module = "sealane._native", frozen)]
pub struct SessionEndpoint {
    endpoint: Mutex<Endpoint>,
    /// Read by other threads, also while the session is being closed.
    figures: Figures,
}

impl SessionEndpoint {
    fn endpoint(&self) -> MutexGuard<'_, Endpoint> {
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl SessionEndpoint {
    #[new]
    #[pyo3(signature = (bind_addresses, region, ring_entries=256, *, unit_bytes=1408, chunk_units=16, slots=64, account=None, pinned_bytes_max=0))]
    #[allow(clippy::too_many_arguments)] // keyword-only, each a value of its own
    fn new(
        py: Python<'_>,
        bind_addresses: Vec<String>,
        region: &SharedRegion,
        ring_entries: u32,
        unit_bytes: u16,
        chunk_units: u16,
        slots: u16,
        account: Option<&JobAccount>,
        pinned_bytes_max: usize,
    ) -> PyResult<Self> {
        let bind_addresses = parse_each(&bind_addresses)?;
        let config = EndpointConfig { ring_entries, unit_bytes, chunk_units, slots };
        let account = account.map(|job| Arc::clone(&job.account));
        let region = region.0.clone();
        let endpoint = py
            .detach(|| Endpoint::new(config, region, &bind_addresses, account, pinned_bytes_max))
            .map_err(endpoint_error)?;
        Ok(Self { figures: endpoint.figures(), endpoint: Mutex::new(endpoint) })
    }

    #[getter]
    fn local_addresses(&self) -> Vec<String> {
        self.endpoint().local_addresses().iter().map(WireAddress::to_string).collect()
    }

    #[getter]
    fn pinned_bytes(&self) -> usize {
        self.endpoint().pinned_bytes()
    }

    #[getter]
    fn unavailable(&self) -> Vec<String> {
        self.endpoint().unavailable().to_vec()
    }

    fn take_job_fds(&self) -> PyResult<(RawFd, RawFd, RawFd, RawFd, RawFd)> {
        let job = self.endpoint().take_job_descriptors().ok_or_else(|| {
            PyRuntimeError::new_err("the job's descriptors have been taken already")
        })?;
        Ok((
            job.region.into_raw_fd(),
            job.submission.into_raw_fd(),
            job.completion.into_raw_fd(),
            job.bell.doorbell.into_raw_fd(),
            job.bell.call.into_raw_fd(),
        ))
    }

    #[pyo3(signature = (*, peer_addresses, connection_id_local, connection_id_peer, send_key, receive_key, rate_bits_per_second, idle_timeout_ns, initiator, version, reordering_ns = 0, units = None, steering = None, permit = None, path_threads = 0))]
    #[allow(clippy::too_many_arguments)] // keyword-only, each a value of its own
    fn start(
        &self,
        peer_addresses: Vec<String>,
        connection_id_local: u64,
        connection_id_peer: u64,
        send_key: &Bound<'_, PyByteArray>,
        receive_key: &Bound<'_, PyByteArray>,
        rate_bits_per_second: u64,
        idle_timeout_ns: u64,
        initiator: bool,
        version: u8,
        reordering_ns: u64,
        units: Option<Vec<u16>>,
        steering: Option<&Steering>,
        permit: Option<&Permit>,
        path_threads: u8,
    ) -> PyResult<()> {
        let units = units.unwrap_or_else(|| vec![self.endpoint().unit_bytes()]);
        let units = Units::descending(&units).ok_or_else(|| {
            PyValueError::new_err("units must be at least one, in descending order")
        })?;
        let keys = SessionKeys {
            send: take_key(send_key)?,
            receive: take_key(receive_key)?,
            token_seed: random_seed()?,
        };
        let version = session::Version::numbered(version)
            .ok_or_else(|| PyValueError::new_err(format!("no session version {version}")))?;
        let start = StartConfig {
            version,
            peer_addresses: parse_each(&peer_addresses)?,
            connection_id_local,
            connection_id_peer,
            rate_bits_per_second,
            steering: steering.map(|steering| steering.inner).unwrap_or_default(),
            idle_timeout_nanos: idle_timeout_ns,
            reordering_nanos: reordering_ns,
            is_initiator: initiator,
            permit: permit.map(Permit::shared),
            path_threads,
            units,
        };
        self.endpoint().start(&start, &keys).map_err(endpoint_error)
    }

    #[getter]
    fn unit_bytes(&self) -> u16 {
        self.endpoint().unit_bytes()
    }

    fn install_plan(&self, rows: Vec<(u64, u8, u8, u8, u64)>) -> PyResult<()> {
        let rows: Vec<PlanRow> = rows
            .into_iter()
            .map(|(length_max, k, m, depth, parity_gap)| PlanRow {
                length_max,
                reliability: scheme(k, m, depth),
                parity_gap,
            })
            .collect();
        self.endpoint().install_plan(&rows).map_err(endpoint_error)
    }

    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        statistics_dict(py, &self.figures.statistics())
    }

    fn message_sizes(&self) -> u64 {
        self.figures.message_sizes()
    }

    fn paths<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        self.figures.paths().iter().map(|path| path_dict(py, path)).collect()
    }

    fn state(&self) -> (&'static str, String) {
        match self.endpoint().state() {
            State::Establishing => ("establishing", String::new()),
            State::Established => ("established", String::new()),
            State::Draining => ("draining", String::new()),
            State::Closed { reason } => ("closed", reason),
        }
    }

    fn drain(&self) {
        self.endpoint().drain();
    }

    fn fileno(&self) -> RawFd {
        self.endpoint().notification().as_raw_fd()
    }

    #[pyo3(signature = (reason = "session.closed.requested"))]
    fn close(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.endpoint().close(reason));
    }
}

/// One finished operation.
#[pyclass(module = "sealane._native", frozen, get_all)]
pub struct Completion {
    kind: &'static str,
    status: &'static str,
    user_data: u64,
    handle: u64,
    message: u64,
    length: u64,
    immediate: Option<u32>,
    duration_ns: u64,
    packets: Vec<u8>,
}

/// The rings of a session, in the job's process.
#[pyclass(module = "sealane._native")]
pub struct JobRing {
    job: Option<Job>,
    region: Py<Region>,
    /// What the operations in flight use.
    held: Held,
}

impl JobRing {
    fn job(&mut self) -> PyResult<&mut Job> {
        self.job.as_mut().ok_or_else(|| PyValueError::new_err("the ring is closed"))
    }

    /// Closes the session. What its operations use is kept until the fabric has ended it.
    fn hang_up(&mut self) {
        lingering::free_ended();
        let Some(job) = self.job.take() else { return };
        let held = std::mem::take(&mut self.held);
        if !held.is_empty() && !job.has_ended() {
            lingering::keep(job.into_ring(), held);
        }
    }

    fn command(&mut self, kind: Operation, user_data: u64) -> PyResult<u64> {
        self.post(Submission { kind, offset: 0, length: 0, user_data })
    }

    fn post(&mut self, submission: Submission) -> PyResult<u64> {
        self.job()?.post(&submission).map_err(|refused| match refused {
            PostRefused::Retry => PyBlockingIOError::new_err(refused.to_string()),
            PostRefused::Invalid(_) => PyValueError::new_err(refused.to_string()),
        })
    }
}

impl Drop for JobRing {
    fn drop(&mut self) {
        self.hang_up();
    }
}

#[pymethods]
impl JobRing {
    #[new]
    #[pyo3(signature = (region_fd, submission_fd, completion_fd, doorbell_fd, call_fd, *, region=None))]
    fn new(
        py: Python<'_>,
        region_fd: RawFd,
        submission_fd: RawFd,
        completion_fd: RawFd,
        doorbell_fd: RawFd,
        call_fd: RawFd,
        region: Option<Py<Region>>,
    ) -> PyResult<Self> {
        let raw = [region_fd, submission_fd, completion_fd, doorbell_fd, call_fd];
        if raw.iter().any(|fd| *fd < 0) {
            return Err(PyValueError::new_err("a descriptor is negative"));
        }
        // SAFETY: the stub's contract says that the caller hands over open descriptors and no
        // longer uses them; none of them is -1.
        let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
        let [memory, submission, completion, doorbell, call] = raw.map(own);
        let shared = region.as_ref().map(|region| region.get().memory());
        let bell = JobBell { doorbell, call };
        lingering::free_ended();
        let job =
            Job::attach(memory, submission, completion, bell, shared).map_err(
                |error| match error.kind() {
                    io::ErrorKind::Unsupported => PyRuntimeError::new_err(error.to_string()),
                    _ => error.into(),
                },
            )?;
        let region = match region {
            Some(region) => region,
            None => Py::new(py, Region::new(Arc::clone(job.region())))?,
        };
        Ok(Self { job: Some(job), region, held: Held::new() })
    }

    #[getter]
    fn region(&self, py: Python<'_>) -> Py<Region> {
        self.region.clone_ref(py)
    }

    #[getter]
    fn entries(&mut self) -> PyResult<u32> {
        Ok(self.job()?.layout().entries)
    }

    #[getter]
    fn slots(&mut self) -> PyResult<u16> {
        Ok(self.job()?.layout().slots)
    }

    #[getter]
    fn chunk_bytes(&mut self) -> PyResult<u32> {
        Ok(self.job()?.layout().chunk_bytes)
    }

    #[pyo3(signature = (*, offset, length, user_data, k=0, m=0, depth=1, auto=false, unreliable=false, immediate=None, priority=0, deadline_nanos=None))]
    #[allow(clippy::too_many_arguments)] // keyword-only, each a value of its own
    fn post_send(
        &mut self,
        offset: u64,
        length: u64,
        user_data: u64,
        k: u8,
        m: u8,
        depth: u8,
        auto: bool,
        unreliable: bool,
        immediate: Option<u32>,
        priority: u8,
        deadline_nanos: Option<u64>,
    ) -> PyResult<u64> {
        let reliability = match (auto, unreliable, k, m) {
            (false, false, ..) => scheme(k, m, depth),
            (true, false, 0, 0) => Reliability::Auto,
            (false, true, 0, 0) => Reliability::Unreliable,
            _ => {
                return Err(PyValueError::new_err(
                    "an erasure code, auto and unreliable exclude each other",
                ));
            }
        };
        let terms = Terms { reliability, immediate, priority, deadline: deadline_nanos };
        let kind = Operation::Send(terms);
        self.post(Submission { kind, offset, length, user_data })
    }

    #[pyo3(signature = (*, offset, length, user_data))]
    fn post_receive(&mut self, offset: u64, length: u64, user_data: u64) -> PyResult<u64> {
        self.post(Submission { kind: Operation::Receive, offset, length, user_data })
    }

    #[pyo3(signature = (*, length, user_data, unreliable=false, immediate=None, priority=0, deadline_nanos=None))]
    fn post_stream(
        &mut self,
        length: u64,
        user_data: u64,
        unreliable: bool,
        immediate: Option<u32>,
        priority: u8,
        deadline_nanos: Option<u64>,
    ) -> PyResult<u64> {
        let reliability =
            if unreliable { Reliability::Unreliable } else { Reliability::SelectiveRepeat };
        let terms = Terms { reliability, immediate, priority, deadline: deadline_nanos };
        let kind = Operation::Stream(terms);
        self.post(Submission { kind, offset: 0, length, user_data })
    }

    #[pyo3(signature = (*, stream, offset, length, remote_offset, user_data))]
    fn post_continue(
        &mut self,
        stream: u64,
        offset: u64,
        length: u64,
        remote_offset: u64,
        user_data: u64,
    ) -> PyResult<u64> {
        let kind = Operation::Continue { stream, remote_offset };
        self.post(Submission { kind, offset, length, user_data })
    }

    #[pyo3(signature = (*, stream, user_data))]
    fn post_end(&mut self, stream: u64, user_data: u64) -> PyResult<u64> {
        self.command(Operation::End { stream }, user_data)
    }

    #[pyo3(signature = (*, operation, user_data))]
    fn post_cancel(&mut self, operation: u64, user_data: u64) -> PyResult<u64> {
        self.command(Operation::Cancel { operation }, user_data)
    }

    #[pyo3(signature = (*, receive, user_data))]
    fn post_complete(&mut self, receive: u64, user_data: u64) -> PyResult<u64> {
        self.command(Operation::Complete { receive }, user_data)
    }

    #[pyo3(signature = (*, receive, chunk, user_data))]
    fn post_packet_map(&mut self, receive: u64, chunk: u32, user_data: u64) -> PyResult<u64> {
        self.command(Operation::PacketMap { receive, chunk }, user_data)
    }

    #[pyo3(signature = (limit=64))]
    fn completions(&mut self, limit: usize) -> PyResult<Vec<Completion>> {
        let completions = self.job()?.completions(limit).inspect_err(|error| {
            if error.kind() == io::ErrorKind::BrokenPipe {
                self.held.clear();
            }
        })?;
        for completion in &completions {
            self.held.remove(&completion.user_data);
        }
        Ok(completions
            .iter()
            .map(|completion| Completion {
                kind: completion.opcode.name(),
                status: completion.status.name(),
                user_data: completion.user_data,
                handle: completion.handle,
                message: completion.message,
                length: completion.length,
                immediate: completion.immediate,
                duration_ns: completion.duration_nanos,
                packets: completion.packets.to_vec(),
            })
            .collect())
    }

    fn bitmap(&mut self, handle: u64, chunk_count: usize) -> PyResult<Option<ChunkBitmap>> {
        Ok(self.job()?.bitmap(handle, chunk_count).map(ChunkBitmap::new))
    }

    fn close_reason(&mut self) -> PyResult<String> {
        Ok(self.job()?.close_reason())
    }

    fn wake_for_chunks(&mut self, wanted: bool) -> PyResult<()> {
        self.job()?.wake_for_chunks(wanted);
        Ok(())
    }

    fn quiet_sends(&mut self, are_quiet: bool) -> PyResult<()> {
        self.job()?.quiet_sends(are_quiet);
        Ok(())
    }

    fn statistics<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        statistics_dict(py, &self.job()?.statistics())
    }

    fn fileno(&mut self) -> PyResult<RawFd> {
        Ok(self.job()?.doorbell().as_raw_fd())
    }

    /// Keeps an object that an operation uses until the operation has ended; beyond `close`, until
    /// the fabric has ended the session.
    fn hold(&mut self, user_data: u64, held: Py<PyAny>) {
        self.held.insert(user_data, held);
    }

    fn close(&mut self) {
        self.hang_up();
    }
}
