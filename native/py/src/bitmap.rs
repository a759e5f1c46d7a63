//! The live bitmap of a receive, exported through Python's buffer protocol.

use std::ffi::{c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sealane_engine::session::bitmap;

/// The landed chunks of a receive: a read-only buffer with one byte for each chunk, in the memory
/// that the fabric writes.
#[pyclass(module = "sealane._native", frozen)]
pub struct ChunkBitmap {
    bitmap: bitmap::ChunkBitmap,
}

impl ChunkBitmap {
    pub(crate) fn new(bitmap: bitmap::ChunkBitmap) -> Self {
        Self { bitmap }
    }
}

#[pymethods]
impl ChunkBitmap {
    #[getter]
    fn is_current(&self) -> bool {
        self.bitmap.is_current()
    }

    fn read<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.bitmap.read().map(|bytes| PyBytes::new(py, &bytes))
    }

    fn __len__(&self) -> usize {
        self.bitmap.len()
    }

    /// Exports the bytes in place; they stay mapped while any view of them exists.
    #[allow(clippy::needless_pass_by_value)] // the protocol hands it over by value
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let bitmap = &slf.get().bitmap;
        let start = bitmap.as_ptr().cast_mut().cast::<c_void>();
        // SAFETY: `view` belongs to the interpreter and is to be filled. It keeps this object
        // alive, and so the mapping that contains these bytes. Like the mapping it is read-only:
        // requests for a writable view are refused.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bitmap.len().cast_signed(), 1, flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
