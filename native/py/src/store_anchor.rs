//! Bindings of a store's anchor: hands out states to anchor and takes the answers.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use pyo3::create_exception;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use sealane_engine::storage::stores::fresh::anchor::{Anchor, AnchorError, AnchorPolicy, Anchored};
use sealane_engine::storage::stores::fresh::failure::Refusal;
use sealane_engine::storage::stores::fresh::queued_anchor::QueuedAnchor;

use crate::storage::invalid;

create_exception!(
    sealane._native,
    StoreRefusedError,
    PyOSError,
    "A store was refused. Arguments: (reason id, text)."
);

/// Converts a store's error for Python.
pub(crate) fn store_error(error: io::Error) -> PyErr {
    match Refusal::of(&error) {
        Some(refusal) => StoreRefusedError::new_err((refusal.reason().id(), error.to_string())),
        None => error.into(),
    }
}

/// The anchor of one store; its caller advances it.
#[pyclass(frozen, module = "sealane._native")]
pub(crate) struct StoreAnchor(Arc<QueuedAnchor>);

impl StoreAnchor {
    pub(crate) fn shared(&self) -> Arc<dyn Anchor> {
        Arc::clone(&self.0) as Arc<dyn Anchor>
    }
}

#[pymethods]
impl StoreAnchor {
    #[new]
    #[pyo3(signature = (*, latest, base, every_commit, timeout_seconds, believed=false))]
    fn new(
        latest: Option<(u64, Vec<u8>)>,
        base: u64,
        every_commit: bool,
        timeout_seconds: f64,
        believed: bool,
    ) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(timeout_seconds).map_err(invalid)?;
        let decode = |(number, bytes): (u64, Vec<u8>)| {
            let detail =
                format!("the state anchored as number {number} does not belong to that number");
            Anchored::decode_as(number, &bytes).ok_or(Refusal::RolledBack(detail))
        };
        let latest =
            latest.map(decode).transpose().map_err(|refusal| store_error(refusal.into()))?;
        let policy =
            if every_commit { AnchorPolicy::EveryCommit } else { AnchorPolicy::Checkpoints };
        Ok(Self(Arc::new(QueuedAnchor::new(policy, (latest, base), timeout, believed)?)))
    }

    fn fd(&self) -> i32 {
        self.0.as_fd().as_raw_fd()
    }

    fn take(&self) -> Option<(u64, Vec<u8>)> {
        self.0.take().map(|wanted| (wanted.number, wanted.encode().to_vec()))
    }

    #[pyo3(signature = (number, *, lost=None, unreachable=None))]
    fn answer(&self, number: u64, lost: Option<String>, unreachable: Option<String>) {
        let result = match (lost, unreachable) {
            (Some(detail), _) => Err(AnchorError::Lost(detail)),
            (None, Some(detail)) => Err(AnchorError::Unreachable(detail)),
            (None, None) => Ok(()),
        };
        self.0.answer(number, result);
    }
}
