//! Bindings of the storage data path.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict};
use sealane_engine::storage::events::EventLog;
use sealane_engine::storage::initiator::TransferError;
use sealane_engine::storage::pieces;
use sealane_proto::aead::{KEY_BYTES, Secret};
use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::field;
use sealane_proto::secure_queue::{QueueContext, SecureQueue};

create_exception!(
    sealane._native,
    QueueError,
    PyException,
    "A queue ended or timed out. Arguments: (reason id, text)."
);
create_exception!(
    sealane._native,
    StatusError,
    PyException,
    "A command completed with an error. Arguments: (status code, LBA, text, do not retry)."
);

/// Registers everything in this file.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<SecureQueueParameters>()?;
    module.add_class::<StorageEvent>()?;
    module.add("QueueError", module.py().get_type::<QueueError>())?;
    let refused = module.py().get_type::<crate::store_anchor::StoreRefusedError>();
    module.add("StoreRefusedError", refused)?;
    let refused = module.py().get_type::<crate::jobs::JobRefusedError>();
    module.add("JobRefusedError", refused)?;
    module.add("StatusError", module.py().get_type::<StatusError>())?;
    module.add_function(wrap_pyfunction!(find_pieces, module)?)?;
    module.add_function(wrap_pyfunction!(status_name, module)?)?;
    module.add_function(wrap_pyfunction!(sector_layout, module)?)?;
    crate::gateway::register(module)?;
    crate::host_queue::register(module)?;
    crate::target::register(module)?;
    crate::pdu::register(module)
}

pub(crate) fn invalid(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A duplicate of a descriptor that Python owns and will close.
pub(crate) fn duplicate(fd: i32) -> PyResult<OwnedFd> {
    if fd < 0 {
        return Err(invalid("a file descriptor must not be negative"));
    }
    // SAFETY: the descriptor is borrowed only for this call, during which the caller keeps its
    // socket object alive. A number that isn't open makes the duplication fail with EBADF.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(borrowed.try_clone_to_owned()?)
}

pub(crate) fn array<const N: usize>(name: &str, bytes: &[u8]) -> PyResult<[u8; N]> {
    let length = bytes.len();
    bytes.try_into().map_err(|_| invalid(format!("{name} has {length} bytes; it must have {N}")))
}

/// Decodes a milestone; empty bytes are `None`.
pub(crate) fn milestone_of(name: &str, bytes: &[u8]) -> PyResult<Option<Milestone>> {
    if bytes.is_empty() {
        return Ok(None);
    }
    Ok(Milestone::decode(&array(name, bytes)?))
}

/// Encodes a milestone; `None` is empty bytes.
pub(crate) fn milestone_bytes(py: Python<'_>, milestone: Option<Milestone>) -> Bound<'_, PyBytes> {
    let bytes = milestone.map(|milestone| milestone.encode());
    PyBytes::new(py, bytes.as_ref().map_or(&[], |bytes| bytes))
}

/// Takes 32 secret bytes and zeroes the caller's copy.
pub(crate) fn take_secret(name: &str, bytes: &Bound<'_, PyByteArray>) -> PyResult<Secret> {
    let mut copy = array::<KEY_BYTES>(name, &bytes.to_vec())?;
    for index in 0..bytes.len() {
        bytes.set_item(index, 0)?;
    }
    Ok(Secret::take(&mut copy))
}

pub(crate) fn statistics<'py>(
    py: Python<'py>,
    counters: Vec<(&'static str, u64)>,
) -> PyResult<Bound<'py, PyDict>> {
    let result = PyDict::new(py);
    for (name, value) in counters {
        result.set_item(name, value)?;
    }
    Ok(result)
}

/// Keys and context of one secure queue, consumed by `start_queue`.
#[pyclass(module = "sealane._native")]
pub(crate) struct SecureQueueParameters {
    secret: Option<Secret>,
    context: QueueContext,
}

#[pymethods]
impl SecureQueueParameters {
    #[new]
    #[pyo3(signature = (*, secret, volume_id, host_nqn, queue_id, association_epoch, incarnation))]
    fn new(
        secret: &Bound<'_, PyByteArray>,
        volume_id: &[u8],
        host_nqn: String,
        queue_id: u16,
        association_epoch: u64,
        incarnation: u64,
    ) -> PyResult<Self> {
        let volume_id = array("volume_id", volume_id)?;
        let secret = Some(take_secret("secret", secret)?);
        let context =
            QueueContext { volume_id, host_nqn, queue_id, association_epoch, incarnation };
        Ok(Self { secret, context })
    }
}

impl SecureQueueParameters {
    /// Takes the secret. It makes only one queue: a second one would repeat its nonces.
    pub(crate) fn take(&mut self) -> PyResult<SecureQueue> {
        let secret =
            self.secret.take().ok_or_else(|| invalid("the queue's secret was already used"))?;
        Ok(SecureQueue::new(&secret, &self.context))
    }
}

/// One event of a volume.
#[pyclass(frozen, get_all, module = "sealane._native")]
pub(crate) struct StorageEvent {
    kind: &'static str,
    reason: &'static str,
    lba: Option<u64>,
    association: u64,
    queue_id: u16,
    detail: String,
}

pub(crate) fn taken(log: &EventLog) -> Vec<StorageEvent> {
    let convert = |event: sealane_engine::storage::events::StorageEvent| StorageEvent {
        kind: event.kind,
        reason: event.reason,
        lba: event.lba,
        association: event.association,
        queue_id: event.queue_id,
        detail: event.detail,
    };
    log.take().into_iter().map(convert).collect()
}

pub(crate) fn transfer_error(error: TransferError) -> PyErr {
    let text = error.to_string();
    match error {
        TransferError::Status { status, lba } => {
            StatusError::new_err((status.code(), lba, text, status.is_final()))
        }
        TransferError::Ended { reason, .. } => QueueError::new_err((reason.id(), text)),
        TransferError::TimedOut(_) => QueueError::new_err(("queue.timeout", text)),
        TransferError::Cancelled => QueueError::new_err(("queue.cancelled", text)),
        TransferError::Busy(_) => QueueError::new_err(("queue.busy", text)),
        TransferError::Misaligned(_)
        | TransferError::Length
        | TransferError::Differs { .. }
        | TransferError::Unverifiable => invalid(text),
    }
}

/// Finds the places of pieces in a file.
#[pyfunction]
fn find_pieces(py: Python<'_>, path: PathBuf, pieces: Vec<Vec<u8>>) -> PyResult<Vec<(usize, u64)>> {
    Ok(py.detach(|| pieces::find_pieces(Path::new(&path), &pieces))?)
}

/// The specification's name for a status code (type and code, without flags).
#[pyfunction]
fn status_name(code: u16) -> Option<&'static str> {
    Status::from_field(code << 1).name()
}

/// Metadata fields of the sector format: name to (start, end) in the 64 bytes.
#[pyfunction]
fn sector_layout(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let layout = PyDict::new(py);
    for (name, place) in field::ALL {
        layout.set_item(name, place)?;
    }
    Ok(layout)
}
