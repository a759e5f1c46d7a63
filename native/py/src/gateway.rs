//! Bindings of the gateway's storage data path.

use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict};
use sealane_engine::storage::gateway::{
    BackError, BackQueue, GatewaySettings, GatewayVolume as EngineGateway, Incarnation,
    JournalPool as EnginePool, QueueName, VolumeFormat,
};
use sealane_proto::key_ring::KeyRing;
use sealane_proto::nvme::controller_queue::ControllerLimits;
use sealane_proto::nvme::host_queue::HostLimits;
use sealane_proto::nvme::pdu::Digests;
use sealane_proto::sector::{BLOCK_BYTES, CounterRange, DATA_BYTES, VolumeIdentity};

use crate::accelerator::Accelerator;
use crate::host_queue::HostQueueDescription;
use crate::load::{LoadSettings, measured};
use crate::storage::{
    SecureQueueParameters, StorageEvent, array, duplicate, invalid, milestone_bytes, milestone_of,
    statistics, take_secret, taken, transfer_error,
};

create_exception!(
    sealane._native,
    StaleAssociationError,
    PyException,
    "The association of a back-end queue is over; open a newer one."
);
create_exception!(
    sealane._native,
    QueueClosedError,
    PyException,
    "The back end's front-end queue is closed."
);

/// Reason ids with which the control plane may fail a volume.
const FAILURES: [&str; 5] = [
    "verification.limit",
    "gateway.barred",
    "volume.withdrawn",
    "volume.rolled_back",
    "volume.unflushed_lost",
];

/// Registers everything in this file.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<GatewayVolume>()?;
    module.add_class::<JournalPool>()?;
    module.add("StaleAssociationError", module.py().get_type::<StaleAssociationError>())?;
    module.add("QueueClosedError", module.py().get_type::<QueueClosedError>())
}

fn seconds(value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(invalid)
}

/// Memory shared by the journals of a gateway's volumes.
#[pyclass(frozen, module = "sealane._native")]
struct JournalPool {
    pool: EnginePool,
}

#[pymethods]
impl JournalPool {
    #[new]
    #[pyo3(signature = (*, bytes_max))]
    fn new(bytes_max: usize) -> Self {
        Self { pool: EnginePool::new(bytes_max) }
    }

    #[getter]
    fn taken(&self) -> usize {
        self.pool.taken()
    }

    #[getter]
    fn volumes(&self) -> usize {
        self.pool.journals()
    }
}

/// An attached volume on a gateway; nothing of it remains once it is closed.
#[pyclass(frozen, module = "sealane._native")]
struct GatewayVolume {
    volume: RwLock<Option<Arc<EngineGateway>>>,
}

impl GatewayVolume {
    fn open(&self) -> PyResult<Arc<EngineGateway>> {
        let volume = self.volume.read().unwrap_or_else(PoisonError::into_inner);
        volume.clone().ok_or_else(|| QueueClosedError::new_err("the volume is closed"))
    }
}

#[pymethods]
impl GatewayVolume {
    #[new]
    #[pyo3(signature = (*, volume_id, generation, sector_count, oldest_key_epoch, key_epoch, key,
        command_timeout_seconds=30.0, hold_seconds=60.0, journal_bytes_max=64 << 20,
        commands_per_key_max=1 << 48, nonce_ledger=None, fully_sealed=false,
        read_only=false, journal_pool=None))]
    #[allow(clippy::too_many_arguments)] // all by keyword
    fn new(
        volume_id: &[u8],
        generation: u32,
        sector_count: u64,
        oldest_key_epoch: u32,
        key_epoch: u32,
        key: &Bound<'_, PyByteArray>,
        command_timeout_seconds: f64,
        hold_seconds: f64,
        journal_bytes_max: usize,
        commands_per_key_max: u64,
        nonce_ledger: Option<PathBuf>,
        fully_sealed: bool,
        read_only: bool,
        journal_pool: Option<&Bound<'_, JournalPool>>,
    ) -> PyResult<Self> {
        if commands_per_key_max == 0 || commands_per_key_max > 1 << 48 {
            return Err(invalid(format!(
                "commands_per_key_max {commands_per_key_max}; allowed: 1 to 2^48"
            )));
        }
        let identity = VolumeIdentity { volume_id: array("volume_id", volume_id)?, generation };
        let settings = GatewaySettings {
            command_timeout: seconds(command_timeout_seconds)?,
            hold: seconds(hold_seconds)?,
            journal_bytes_max,
            commands_per_key_max,
        };
        let format = VolumeFormat {
            block_count: sector_count,
            is_fully_sealed: fully_sealed,
            is_read_only: read_only,
        };
        let secret = take_secret("key", key)?;
        let keys = KeyRing::new(identity, oldest_key_epoch, key_epoch, &secret).map_err(invalid)?;
        let pool = journal_pool.map(|shared| shared.get().pool.clone()).unwrap_or_default();
        let volume =
            EngineGateway::sharing(&pool, keys, format, settings, nonce_ledger.as_deref())?;
        Ok(Self { volume: RwLock::new(Some(Arc::new(volume))) })
    }

    #[pyo3(signature = (*, key_epoch, key))]
    fn add_key(&self, key_epoch: u32, key: &Bound<'_, PyByteArray>) -> PyResult<()> {
        self.open()?.add_key(key_epoch, &take_secret("key", key)?).map_err(invalid)
    }

    /// Lets a card seal for this volume, or none, from now on.
    fn accelerate(
        &self,
        py: Python<'_>,
        accelerator: Option<&Bound<'_, Accelerator>>,
    ) -> PyResult<()> {
        let volume = self.open()?;
        let device = accelerator.map(|accelerator| accelerator.get().device());
        // The volume's last owner stops its threads and unloads its keys: without the GIL.
        Ok(py.detach(move || volume.accelerate(device))?)
    }

    /// Lets the card get no more jobs; returns how many it still has.
    fn rest_accelerator(&self, py: Python<'_>) -> PyResult<usize> {
        let volume = self.open()?;
        // A call that gives the card keys or queues may hold what this one waits for.
        Ok(py.detach(move || volume.rest_accelerator()))
    }

    #[pyo3(signature = (*, broker_instance, start_epoch, start, end))]
    fn add_counters(
        &self,
        broker_instance: u16,
        start_epoch: u32,
        start: u64,
        end: u64,
    ) -> PyResult<()> {
        let range = CounterRange::new(broker_instance, start_epoch, start, end).map_err(invalid)?;
        self.open()?.add_counters(range);
        Ok(())
    }

    fn replace_counters(
        &self,
        ranges: Vec<(u16, u32, u64, u64)>,
    ) -> PyResult<Vec<(u16, u32, u64, u64)>> {
        let new = ranges
            .into_iter()
            .rev()
            .map(|(instance, epoch, start, end)| CounterRange::new(instance, epoch, start, end))
            .collect::<Result<_, _>>()
            .map_err(invalid)?;
        Ok(self.open()?.replace_counters(new).into_iter().map(CounterRange::into_parts).collect())
    }

    fn counters_remaining(&self) -> PyResult<u64> {
        Ok(self.open()?.counters_remaining())
    }

    #[pyo3(signature = (fd, *, association, queue_id, queue_depth, h2c_data_max, in_capsule_max,
        transfer_max, success_flag, header_digest=false, data_digest=false))]
    #[allow(clippy::too_many_arguments)] // all by keyword
    fn start_queue(
        &self,
        fd: i32,
        association: u64,
        queue_id: u16,
        queue_depth: u16,
        h2c_data_max: usize,
        in_capsule_max: usize,
        transfer_max: usize,
        success_flag: bool,
        header_digest: bool,
        data_digest: bool,
    ) -> PyResult<()> {
        let limits = ControllerLimits {
            queue_depth,
            h2c_data_max,
            in_capsule_max,
            transfer_max,
            success_flag,
            digests: Digests { header: header_digest, data: data_digest },
        };
        let name = QueueName { association, queue_id };
        Ok(self.open()?.start_queue(duplicate(fd)?, name, limits)?)
    }

    #[pyo3(signature = (fd, *, association, queue_id, queue_depth, h2c_data_max, transfer_max,
        in_capsule_max, association_epoch, incarnation, confirmed, milestone, secure))]
    #[allow(clippy::too_many_arguments)] // all by keyword
    fn replace_back(
        &self,
        fd: i32,
        association: u64,
        queue_id: u16,
        queue_depth: u16,
        h2c_data_max: usize,
        transfer_max: usize,
        in_capsule_max: usize,
        association_epoch: u64,
        incarnation: u64,
        confirmed: &[u8],
        milestone: &[u8],
        mut secure: PyRefMut<'_, SecureQueueParameters>,
    ) -> PyResult<()> {
        let incarnation = Incarnation {
            number: incarnation,
            confirmed: milestone_of("confirmed", confirmed)?,
            milestone: milestone_of("milestone", milestone)?,
        };
        let limits = HostLimits {
            queue_depth,
            h2c_data_max,
            transfer_max,
            in_capsule_max,
            block_bytes: BLOCK_BYTES,
            nsid: 1,
            digests: Digests::default(),
        };
        let back =
            BackQueue { limits, secure: secure.take()?, epoch: association_epoch, incarnation };
        let name = QueueName { association, queue_id };
        self.open()?.replace_back(name, duplicate(fd)?, back).map_err(|error| match error {
            BackError::Stale(_) => StaleAssociationError::new_err(error.to_string()),
            BackError::Closed => QueueClosedError::new_err(error.to_string()),
        })
    }

    #[pyo3(signature = (queue, settings, *, association_epoch, incarnation, secure))]
    fn run_load<'py>(
        &self,
        py: Python<'py>,
        queue: HostQueueDescription,
        settings: LoadSettings,
        association_epoch: u64,
        incarnation: u64,
        mut secure: PyRefMut<'_, SecureQueueParameters>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let incarnation = Incarnation { number: incarnation, confirmed: None, milestone: None };
        let limits = HostLimits { block_bytes: BLOCK_BYTES, ..queue.limits() };
        let plan = settings.plan(DATA_BYTES, &[limits])?;
        let fd = queue.socket()?;
        let back =
            BackQueue { limits, secure: secure.take()?, epoch: association_epoch, incarnation };
        let volume = self.open()?;
        let result = py.detach(|| volume.run_load(fd, back, &plan)).map_err(transfer_error)?;
        measured(py, &result)
    }

    fn lose_association(&self, detail: &str) -> PyResult<()> {
        self.open()?.lose_association(detail);
        Ok(())
    }

    fn fail(&self, reason: &str, detail: &str) -> PyResult<()> {
        let known = FAILURES.iter().find(|known| **known == reason);
        let reason =
            known.ok_or_else(|| invalid(format!("{reason:?} is not a reason to fail a volume")))?;
        self.open()?.fail(reason, detail);
        Ok(())
    }

    #[getter]
    fn milestone<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(milestone_bytes(py, self.open()?.milestone()))
    }

    #[getter]
    fn settled_incarnation(&self) -> Option<u64> {
        // A closed volume has none.
        self.open().ok()?.settled_incarnation()
    }

    fn idle_ms(&self, association: u64) -> Option<u64> {
        // A closed volume has no queue.
        self.open().ok()?.idle(association).map(|nanos| nanos / 1_000_000)
    }

    fn unanswered(&self, association: u64) -> usize {
        // A closed volume has no queue.
        self.open().map_or(0, |volume| volume.unanswered(association))
    }

    #[pyo3(signature = (association=None))]
    fn close_queues(&self, py: Python<'_>, association: Option<u64>) {
        // The queues of a closed volume are already closed.
        if let Ok(volume) = self.open() {
            py.detach(|| volume.close_queues(association));
        }
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let volume = self.volume.write().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(volume) = &volume {
                volume.close_queues(None);
                // Here, as somebody else may drop it last, on another thread.
                let _ = volume.accelerate(None);
            }
        });
    }

    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // A closed volume has none.
        statistics(py, self.open().map(|volume| volume.statistics()).unwrap_or_default())
    }

    fn take_events(&self) -> Vec<StorageEvent> {
        // A closed volume has none.
        self.open().map(|volume| taken(volume.events())).unwrap_or_default()
    }

    fn event_fd(&self) -> PyResult<i32> {
        Ok(self.open()?.events().as_fd().as_raw_fd())
    }
}
