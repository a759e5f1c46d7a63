//! Python bindings.
use pyo3::prelude::*;

mod session;

/// Native engine.
#[pymodule]
mod _native {
    use super::*;

    #[pymodule_export]
    use super::session::{Completion, Emulator, JobRing, Region, SessionEndpoint};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
