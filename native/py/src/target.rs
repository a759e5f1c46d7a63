//! Bindings of the target: namespaces and controllers.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict};
use sealane_engine::storage::store::BlockStore;
use sealane_engine::storage::stores::device::Device;
use sealane_engine::storage::stores::fresh::opening::Opening;
use sealane_engine::storage::stores::fresh_store::Trust;
use sealane_engine::storage::stores::in_place_store::{InPlaceStore, raw_blocks};
use sealane_engine::storage::stores::nvme::NvmeStore;
use sealane_engine::storage::stores::remote::RemoteDevice as EngineDevice;
use sealane_engine::storage::stores::remote_sectors::{RemoteBlocks, RemoteSectorStore};
use sealane_engine::storage::stores::sealed_file::SealedFileStore;
use sealane_engine::storage::stores::selection::{self, StoreOptions};
use sealane_engine::storage::target::jobs::{JobStart, Jobs, Order};
use sealane_engine::storage::target::{
    AnaState, Controller as EngineController, Namespace as EngineNamespace, QosLimits,
};
use sealane_proto::nvme::controller_queue::ControllerLimits;
use sealane_proto::nvme::pdu::Digests;
use sealane_proto::sector::BLOCK_BYTES;

use crate::host_queue::HostQueueDescription;
use crate::jobs::{job_error, job_status, kind_of, order_of};
use crate::permit::Permit;
use crate::storage::{
    SecureQueueParameters, StorageEvent, array, duplicate, invalid, milestone_bytes, milestone_of,
    statistics, take_secret, taken,
};
use crate::store_anchor::{StoreAnchor, store_error};

/// Registers everything in this file.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<RemoteDevice>()?;
    module.add_class::<StoreAnchor>()?;
    module.add_class::<StoreOpening>()?;
    module.add_class::<Namespace>()?;
    module.add_function(wrap_pyfunction!(examine_drive, module)?)?;
    module.add_function(wrap_pyfunction!(erase_drive, module)?)?;
    module.add_function(wrap_pyfunction!(drive_blocks, module)?)?;
    module.add_class::<Controller>()
}

/// A plain namespace of a third party's target, for one store.
#[pyclass(frozen, module = "sealane._native")]
struct RemoteDevice(Mutex<Option<Remote>>);

/// The block format decides what its blocks hold.
enum Remote {
    /// Pages of a store that maps sectors to pages.
    Pages(Arc<EngineDevice>),
    /// Sectors with their metadata.
    Sectors(RemoteBlocks),
}

impl RemoteDevice {
    fn take(&self) -> PyResult<Remote> {
        let device = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        device.ok_or_else(|| invalid("the device is already used or closed"))
    }
}

#[pymethods]
impl RemoteDevice {
    #[new]
    #[pyo3(signature = (queue, *, block_count, timeout_seconds))]
    fn new(queue: HostQueueDescription, block_count: u64, timeout_seconds: f64) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(timeout_seconds).map_err(invalid)?;
        let (socket, limits) = (queue.socket()?, queue.limits());
        let device = if limits.block_bytes == BLOCK_BYTES {
            RemoteBlocks::start(socket, limits, block_count, timeout).map(Remote::Sectors)
        } else {
            let device = EngineDevice::start(socket, limits, block_count, timeout);
            device.map(|device| Remote::Pages(Arc::new(device)))
        };
        let device = device.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => invalid(error),
            _ => error.into(),
        })?;
        Ok(Self(Mutex::new(Some(device))))
    }

    fn erase(&self, py: Python<'_>, volume_id: &[u8]) -> PyResult<()> {
        let (device, volume_id) = (self.take()?, array("volume_id", volume_id)?);
        Ok(py.detach(|| match device {
            Remote::Pages(device) => SealedFileStore::erase_on(&*device, volume_id),
            Remote::Sectors(blocks) => blocks.erase(volume_id),
        })?)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

/// Progress of opening a store.
#[pyclass(frozen, module = "sealane._native")]
struct StoreOpening(Arc<Opening>);

#[pymethods]
impl StoreOpening {
    #[new]
    fn new() -> Self {
        Self(Arc::default())
    }

    fn progress(&self) -> (u64, u64) {
        self.0.progress()
    }
}

/// A namespace of a target.
#[pyclass(frozen, module = "sealane._native")]
struct Namespace {
    namespace: Arc<EngineNamespace>,
    jobs: Jobs,
}

impl Namespace {
    fn over(namespace: EngineNamespace) -> Self {
        let namespace = Arc::new(namespace);
        Self { jobs: Jobs::new(Arc::clone(&namespace)), namespace }
    }
}

#[pymethods]
impl Namespace {
    #[new]
    #[pyo3(signature = (*, store, block_count, sealed, path=None, exist="create".to_owned(),
        drive=None, in_place=false, freshness=true, metadata=false, secret=None, anchor=None,
        opening=None, reserves=false))]
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools)] // all by keyword
    fn new(
        py: Python<'_>,
        store: String,
        block_count: u64,
        sealed: bool,
        path: Option<PathBuf>,
        exist: String,
        drive: Option<String>,
        in_place: bool,
        freshness: bool,
        metadata: bool,
        secret: Option<&Bound<'_, PyByteArray>>,
        anchor: Option<&StoreAnchor>,
        opening: Option<&StoreOpening>,
        reserves: bool,
    ) -> PyResult<Self> {
        let opening = opening.map(|opening| Arc::clone(&opening.0));
        let secret = secret.map(|secret| take_secret("secret", secret)).transpose()?;
        let anchor = anchor.map(StoreAnchor::shared);
        if block_count == 0 {
            return Err(invalid("block_count 0; a namespace has at least 1 block"));
        }
        let creates = creates(&exist)?;
        let namespace = py.detach(|| -> io::Result<EngineNamespace> {
            let options = StoreOptions {
                kind: &store,
                block_count,
                is_sealed: sealed || metadata,
                path: path.as_deref(),
                creates,
                drive: drive.as_deref(),
                in_place,
                is_fresh: sealed && freshness,
                trust: &Trust {
                    secret: secret.as_ref(),
                    anchor,
                    opening: opening.as_deref(),
                    reserves,
                },
            };
            let store = selection::open(&options)?;
            let namespace = if sealed {
                namespace_over(store, freshness)?
            } else {
                EngineNamespace::plain(store)?
            };
            namespace.offer(block_count);
            Ok(namespace)
        });
        let namespace = namespace.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => invalid(error),
            _ => store_error(error),
        })?;
        Ok(Self::over(namespace))
    }

    /// Opens or creates a sealed namespace on a third party's plain one.
    #[staticmethod]
    #[pyo3(signature = (device, *, volume_id, block_count, store_key, exist, freshness=true,
        anchor=None))]
    #[allow(clippy::too_many_arguments)] // all by keyword
    fn on_device(
        py: Python<'_>,
        device: &RemoteDevice,
        volume_id: &[u8],
        block_count: u64,
        store_key: &Bound<'_, PyByteArray>,
        exist: &str,
        freshness: bool,
        anchor: Option<&StoreAnchor>,
    ) -> PyResult<Self> {
        let anchor = anchor.map(StoreAnchor::shared);
        let creates = creates(exist)?;
        let volume_id = array("volume_id", volume_id)?;
        let key = take_secret("store_key", store_key)?;
        let device = device.take()?;
        let namespace = py.detach(|| -> io::Result<EngineNamespace> {
            let trust = Trust { secret: Some(&key), anchor, ..Trust::default() };
            let store: Box<dyn BlockStore> = match device {
                Remote::Pages(device) => {
                    let device: Arc<dyn Device> = device;
                    Box::new(if creates {
                        SealedFileStore::create_on(device, volume_id, &trust, block_count)?
                    } else {
                        SealedFileStore::open_on(device, volume_id, &trust)?
                    })
                }
                Remote::Sectors(blocks) if freshness => {
                    let raw = Box::new(blocks.raw());
                    Box::new(if creates {
                        InPlaceStore::create_on(raw, volume_id, &trust, block_count)?
                    } else {
                        InPlaceStore::open_on(raw, volume_id, &trust)?
                    })
                }
                Remote::Sectors(blocks) => Box::new(if creates {
                    RemoteSectorStore::create(blocks, volume_id, &key, block_count)?
                } else {
                    RemoteSectorStore::open(blocks, volume_id, &key)?
                }),
            };
            selection::check_size(&*store, block_count, freshness && !creates)?;
            let namespace = namespace_over(store, freshness)?;
            namespace.offer(block_count);
            Ok(namespace)
        });
        Ok(Self::over(namespace.map_err(store_error)?))
    }

    #[getter]
    fn block_count(&self) -> u64 {
        self.namespace.block_count()
    }

    fn extend(&self, py: Python<'_>, block_count: u64) -> PyResult<()> {
        py.detach(|| self.namespace.extend(block_count)).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => invalid(error),
            _ => store_error(error),
        })
    }

    #[getter]
    fn layout(&self) -> &'static str {
        self.namespace.layout()
    }

    #[getter]
    fn sealed(&self) -> bool {
        self.namespace.is_sealed()
    }

    #[getter]
    fn milestone<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        milestone_bytes(py, self.namespace.milestone())
    }

    fn contains(&self, milestone: &[u8]) -> PyResult<bool> {
        let reported = milestone_of("milestone", milestone)?;
        Ok(reported.is_none_or(|reported| self.namespace.contains(&reported)))
    }

    #[pyo3(signature = (*, iops=0, bytes_per_second=0, read_iops=0, write_iops=0,
        read_bytes_per_second=0, write_bytes_per_second=0))]
    fn set_limits(
        &self,
        iops: u64,
        bytes_per_second: u64,
        read_iops: u64,
        write_iops: u64,
        read_bytes_per_second: u64,
        write_bytes_per_second: u64,
    ) {
        self.namespace.set_limits(QosLimits {
            iops,
            bytes_per_second,
            read_iops,
            write_iops,
            read_bytes_per_second,
            write_bytes_per_second,
        });
    }

    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        statistics(py, self.namespace.statistics())
    }

    fn reservation<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (held, generation, registrants) = self.namespace.with_reservations(|known| {
            (known.held(), known.generation(), known.registrants().collect::<Vec<_>>())
        });
        let result = PyDict::new(py);
        result.set_item("type", held.map_or(0, |(kind, _)| kind as u8))?;
        result.set_item("holder", held.and_then(|(_, holder)| holder))?;
        result.set_item("generation", generation)?;
        result.set_item("registrants", registrants)?;
        Ok(result)
    }

    fn take_events(&self) -> Vec<StorageEvent> {
        taken(self.namespace.events())
    }

    fn event_fd(&self) -> i32 {
        self.namespace.events().as_fd().as_raw_fd()
    }

    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.namespace.sync())?)
    }

    #[pyo3(signature = (kind, *, position=0, bytes_per_second=0, paused=false))]
    fn start_job(
        &self,
        py: Python<'_>,
        kind: &str,
        position: u64,
        bytes_per_second: u64,
        paused: bool,
    ) -> PyResult<()> {
        let kind = kind_of(kind)?;
        let start = JobStart { position, bytes_per_second, is_paused: paused };
        py.detach(|| self.jobs.start(kind, start)).map_err(job_error)
    }

    fn order_job(&self, kind: &str, order: &str) -> PyResult<()> {
        self.jobs.order(kind_of(kind)?, order_of(order)?).map_err(job_error)
    }

    fn set_job_rate(&self, kind: &str, bytes_per_second: u64) -> PyResult<()> {
        self.jobs.order(kind_of(kind)?, Order::Rate(bytes_per_second)).map_err(job_error)
    }

    fn jobs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        self.jobs.list().iter().map(|job| job_status(py, job)).collect()
    }

    fn end_jobs(&self, py: Python<'_>) {
        py.detach(|| self.jobs.end());
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            self.jobs.end();
            self.namespace.close();
        });
    }
}

fn namespace_over(store: Box<dyn BlockStore>, freshness: bool) -> io::Result<EngineNamespace> {
    if freshness { EngineNamespace::new(store) } else { EngineNamespace::without_freshness(store) }
}

#[pyfunction]
fn examine_drive(py: Python<'_>, path: PathBuf) -> PyResult<(u64, bool)> {
    Ok(py.detach(|| NvmeStore::examine(&path))?)
}

#[pyfunction]
fn erase_drive(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    Ok(py.detach(|| NvmeStore::erase(&path))?)
}

#[pyfunction]
fn drive_blocks(sector_count: u64) -> u64 {
    raw_blocks(sector_count)
}

fn creates(exist: &str) -> PyResult<bool> {
    match exist {
        "create" => Ok(true),
        "open" => Ok(false),
        _ => Err(invalid(format!("exist {exist:?}; allowed: \"create\", \"open\""))),
    }
}

fn ana_state(name: &str) -> PyResult<AnaState> {
    Ok(match name {
        "optimized" => AnaState::Optimized,
        "non-optimized" => AnaState::NonOptimized,
        "inaccessible" => AnaState::Inaccessible,
        "persistent-loss" => AnaState::PersistentLoss,
        "change" => AnaState::Change,
        _ => return Err(invalid(format!("unknown ANA state {name:?}"))),
    })
}

/// All I/O queues of one association.
#[pyclass(frozen, module = "sealane._native")]
#[allow(clippy::struct_field_names)] // the attributes' names are the specification's
struct Controller {
    engine: EngineController,
    #[pyo3(get)]
    association: u64,
    #[pyo3(get)]
    host_nqn: String,
    #[pyo3(get)]
    controller_id: u16,
}

#[pymethods]
impl Controller {
    #[new]
    #[pyo3(signature = (*, association, host_nqn, host_id, controller_id, read_only=false, permit=None))]
    fn new(
        association: u64,
        host_nqn: String,
        host_id: &[u8],
        controller_id: u16,
        read_only: bool,
        permit: Option<&Permit>,
    ) -> PyResult<Self> {
        let host_id = array("host_id", host_id)?;
        let permit = permit.map(Permit::shared);
        let engine = EngineController::permitted(association, host_id, permit)?;
        let engine = if read_only { engine.read_only() } else { engine };
        Ok(Self { engine, association, host_nqn, controller_id })
    }

    fn set_namespaces(&self, entries: Vec<(u32, Py<Namespace>, String)>) -> PyResult<()> {
        let entries = entries.into_iter().map(|(nsid, namespace, state)| {
            if nsid == 0 || nsid == u32::MAX {
                return Err(invalid(format!("namespace id {nsid:#x} is reserved")));
            }
            Ok((nsid, Arc::clone(&namespace.get().namespace), ana_state(&state)?))
        });
        self.engine.set_namespaces(entries.collect::<PyResult<_>>()?);
        Ok(())
    }

    #[pyo3(signature = (descriptor, *, queue_id, queue_depth, h2c_data_max, in_capsule_max,
        transfer_max, header_digest=false, data_digest=false, success_flag=false, secure=None))]
    #[allow(clippy::too_many_arguments)] // all by keyword
    fn start_queue(
        &self,
        descriptor: i32,
        queue_id: u16,
        queue_depth: u16,
        h2c_data_max: usize,
        in_capsule_max: usize,
        transfer_max: usize,
        header_digest: bool,
        data_digest: bool,
        success_flag: bool,
        secure: Option<PyRefMut<'_, SecureQueueParameters>>,
    ) -> PyResult<()> {
        let descriptor = duplicate(descriptor)?;
        let limits = ControllerLimits {
            queue_depth,
            h2c_data_max,
            in_capsule_max,
            transfer_max,
            success_flag,
            digests: Digests { header: header_digest, data: data_digest },
        };
        let secure = secure.map(|mut secure| secure.take()).transpose()?;
        Ok(self.engine.start_queue(descriptor, queue_id, limits, secure)?)
    }

    fn idle_ms(&self) -> u64 {
        self.engine.idle() / 1_000_000
    }

    fn abort(&self, py: Python<'_>, queue_id: u16, command_id: u16) -> bool {
        py.detach(|| self.engine.abort(queue_id, command_id))
    }

    fn errors(&self) -> Vec<(u64, u16, u16, u16, u64, u32)> {
        let entries = self.engine.errors().into_iter();
        entries
            .map(|entry| {
                let error = entry.error;
                let field = error.status.field();
                (entry.count, entry.queue_id, error.cid, field, error.lba, error.nsid)
            })
            .collect()
    }

    fn queues_running(&self) -> usize {
        self.engine.queues_running()
    }

    fn refusals(&self) -> u64 {
        self.engine.refusals()
    }

    fn take_events(&self) -> Vec<StorageEvent> {
        taken(self.engine.events())
    }

    fn event_fd(&self) -> i32 {
        self.engine.events().as_fd().as_raw_fd()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.engine.close());
    }
}
