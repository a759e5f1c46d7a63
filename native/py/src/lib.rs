//! Python bindings.

use pyo3::prelude::*;

mod session;
mod simulation;

/// Native engine.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::session::{Completion, Emulator, JobRing, Region, SessionEndpoint};
    #[pymodule_export]
    use crate::simulation::simulate;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
