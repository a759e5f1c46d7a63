//! Binding of accelerator cards.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pyo3::prelude::*;
use sealane_engine::accelerator::card::Card;
use sealane_engine::accelerator::{Device, Record, probe};

/// Registers everything in this file.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<AcceleratorRecord>()?;
    module.add_class::<Accelerator>()
}

/// What volumes had of a connected card.
#[pyclass(frozen, module = "sealane._native")]
struct AcceleratorRecord(Arc<Record>);

#[pymethods]
impl AcceleratorRecord {
    fn figures(&self) -> HashMap<&'static str, u64> {
        let Record { jobs, sealed, inline, refusals, losses, nanos, .. } = &*self.0;
        let named = [
            ("jobs", jobs),
            ("sealed", sealed),
            ("inline", inline),
            ("refusals", refusals),
            ("losses", losses),
            ("nanos", nanos),
        ];
        named.map(|(name, counted)| (name, counted.load(Ordering::Relaxed))).into()
    }
}

/// A connected card. Its connection, and with it the card's keys, ends with the last volume that
/// uses it.
#[pyclass(frozen, module = "sealane._native")]
pub(crate) struct Accelerator {
    device: Arc<dyn Device>,
}

impl Accelerator {
    pub(crate) fn device(&self) -> Arc<dyn Device> {
        Arc::clone(&self.device)
    }
}

#[pymethods]
impl Accelerator {
    #[new]
    fn new(py: Python<'_>, socket: PathBuf) -> PyResult<Self> {
        let card = py.detach(|| Card::connect(&socket))?;
        Ok(Self { device: Arc::new(card) })
    }

    /// Why a volume gave it up, if one has.
    #[getter]
    fn loss(&self) -> Option<String> {
        self.device.record().loss()
    }

    /// What volumes had of it; to be asked also when the connection has ended.
    #[getter]
    fn record(&self) -> AcceleratorRecord {
        AcceleratorRecord(Arc::clone(self.device.record()))
    }

    #[getter]
    fn profile(&self) -> &str {
        &self.device.capabilities().profile
    }

    #[getter]
    fn depth(&self) -> u16 {
        self.device.capabilities().depth
    }

    #[getter]
    fn key_slots(&self) -> u16 {
        self.device.capabilities().key_slots
    }

    fn evidence(&self, py: Python<'_>, nonce: [u8; 32]) -> PyResult<Vec<u8>> {
        Ok(py.detach(|| self.device.evidence(&nonce))?)
    }

    fn probe(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| probe(&*self.device))?)
    }
}
