//! Bindings of background jobs.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sealane_engine::storage::target::jobs::{JobError, JobKind, JobStatus, Order};

use crate::storage::invalid;

create_exception!(
    sealane._native,
    JobRefusedError,
    PyException,
    "A background job was refused. Arguments: (reason id, text)."
);

/// Converts a job's refusal for Python.
pub(crate) fn job_error(error: JobError) -> PyErr {
    JobRefusedError::new_err((error.id(), error.to_string()))
}

/// The job kind with this name.
pub(crate) fn kind_of(name: &str) -> PyResult<JobKind> {
    let mut kinds = [JobKind::Scrub, JobKind::Refresh].into_iter();
    let kind = kinds.find(|kind| kind.id() == name);
    kind.ok_or_else(|| invalid(format!("job {name:?}; allowed: \"scrub\", \"refresh\"")))
}

/// The order with this name.
pub(crate) fn order_of(name: &str) -> PyResult<Order> {
    match name {
        "pause" => Ok(Order::Pause),
        "resume" => Ok(Order::Resume),
        "cancel" => Ok(Order::Cancel),
        _ => Err(invalid(format!("order {name:?}; allowed: \"pause\", \"resume\", \"cancel\""))),
    }
}

/// A job's progress as a dictionary.
pub(crate) fn job_status<'py>(py: Python<'py>, job: &JobStatus) -> PyResult<Bound<'py, PyDict>> {
    let result = PyDict::new(py);
    result.set_item("kind", job.kind.id())?;
    result.set_item("state", job.state.id())?;
    result.set_item("detail", &job.detail)?;
    result.set_item("position", job.position)?;
    result.set_item("total", job.total)?;
    result.set_item("checked", job.checked)?;
    result.set_item("unchecked", job.unchecked)?;
    result.set_item("refreshed", job.refreshed)?;
    result.set_item("found", job.found)?;
    result.set_item("repaired", job.repaired)?;
    let findings = job.findings.iter();
    let findings = findings.map(|it| (it.lba, it.reason.id(), &it.detail, it.is_known));
    result.set_item("findings", findings.collect::<Vec<_>>())?;
    result.set_item("bytes", job.bytes)?;
    result.set_item("bytes_per_second", job.bytes_per_second)?;
    result.set_item("active_ms", job.active / 1_000_000)?;
    result.set_item("yields", job.yields)?;
    Ok(result)
}
