//! Binding of addresses of a session's paths.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use sealane_engine::session::wire;

/// Where one end of a path sends from and receives at, as a peer is told.
#[pyclass(module = "sealane._native", frozen)]
pub struct WireAddress {
    inner: wire::WireAddress,
}

#[pymethods]
impl WireAddress {
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        let parsed = text.parse().map_err(|error: wire::ParseError| error.to_string());
        parsed.map(|inner| Self { inner }).map_err(PyValueError::new_err)
    }

    #[getter]
    fn wire(&self) -> &'static str {
        self.inner.wire()
    }

    #[getter]
    fn host(&self) -> String {
        self.inner.network_address().ip().to_string()
    }

    #[getter]
    fn mtu_bytes(&self) -> Option<u16> {
        match self.inner {
            wire::WireAddress::Udp(_) => None,
            wire::WireAddress::Verbs(pair) => Some(pair.mtu_bytes),
        }
    }
}
