//! Bindings of element-wise reduction.

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use sealane_engine::reduce::{self, Reduction};

/// A contiguous buffer of 16-bit elements, held until dropped.
struct Elements {
    view: ffi::Py_buffer,
}

impl Elements {
    fn of(object: &Bound<'_, PyAny>, flags: std::ffi::c_int) -> PyResult<Self> {
        let mut view = ffi::Py_buffer::new();
        // SAFETY: `view` is released by `drop`, or was not filled.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut view, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        let elements = Self { view };
        if elements.view.len % 2 != 0 || !elements.view.buf.cast::<u16>().is_aligned() {
            return Err(PyValueError::new_err("the buffer must have aligned 16-bit elements"));
        }
        Ok(elements)
    }

    fn len(&self) -> usize {
        self.view.len.cast_unsigned() / 2
    }
}

impl Drop for Elements {
    fn drop(&mut self) {
        // SAFETY: filled by `PyObject_GetBuffer`, released once, with the interpreter attached.
        unsafe { ffi::PyBuffer_Release(&raw mut self.view) };
    }
}

/// Combines the bfloat16 elements of `other` into those of `into`; both buffers have equal length.
#[pyfunction]
pub fn reduce_bfloat16(
    into: &Bound<'_, PyAny>,
    other: &Bound<'_, PyAny>,
    operation: &str,
) -> PyResult<()> {
    let reduction = match operation {
        "sum" => Reduction::Sum,
        "max" => Reduction::Maximum,
        "min" => Reduction::Minimum,
        "product" => Reduction::Product,
        _ => return Err(PyValueError::new_err(format!("unknown operation {operation:?}"))),
    };
    let into = Elements::of(into, ffi::PyBUF_WRITABLE)?;
    let other = Elements::of(other, ffi::PyBUF_SIMPLE)?;
    let (a, b) = (into.view.buf.addr(), other.view.buf.addr());
    let overlaps = a < b + 2 * other.len() && b < a + 2 * into.len();
    if into.len() != other.len() || overlaps {
        return Err(PyValueError::new_err(
            "the two buffers must have equal length and not overlap",
        ));
    }
    // SAFETY: both are aligned, of that length, and disjoint (checked), and held by the buffer
    // protocol; the GIL is held, and by the caller's contract nobody else writes them.
    let (into, other) = unsafe {
        (
            std::slice::from_raw_parts_mut(into.view.buf.cast::<u16>(), into.len()),
            std::slice::from_raw_parts(other.view.buf.cast::<u16>().cast_const(), other.len()),
        )
    };
    reduce::reduce_bfloat16(into, other, reduction);
    Ok(())
}

/// Multiplies bfloat16 elements by a factor.
#[pyfunction]
pub fn scale_bfloat16(elements: &Bound<'_, PyAny>, factor: f32) -> PyResult<()> {
    let elements = Elements::of(elements, ffi::PyBUF_WRITABLE)?;
    // SAFETY: as in `reduce_bfloat16`.
    let bits =
        unsafe { std::slice::from_raw_parts_mut(elements.view.buf.cast::<u16>(), elements.len()) };
    reduce::scale_bfloat16(bits, factor);
    Ok(())
}
