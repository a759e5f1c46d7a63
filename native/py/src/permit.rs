//! Bindings of permits, which limit the time that a peer may act.

use std::sync::Arc;

use pyo3::prelude::*;
use sealane_engine::permit;

/// The time until which one peer may act.
#[pyclass(module = "sealane._native", frozen, weakref)]
pub struct Permit(Arc<permit::Permit>);

impl Permit {
    pub(crate) fn shared(&self) -> Arc<permit::Permit> {
        Arc::clone(&self.0)
    }
}

#[pymethods]
impl Permit {
    #[new]
    fn new() -> Self {
        Self(Arc::default())
    }

    fn extend(&self, until_ns: u64) {
        self.0.extend(until_ns);
    }

    fn take_back(&self, reason: &str) {
        self.0.take_back(reason);
    }

    #[getter]
    fn holds(&self) -> bool {
        self.0.holds()
    }
}
