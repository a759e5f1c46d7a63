//! The job's region: shared bytes, and the arrays allocated in it.

use std::ffi::{CStr, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyBufferError, PyMemoryError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use sealane_engine::session::allocator::Allocator;
use sealane_engine::shared_memory::SharedMemory;

use crate::dlpack::{DEVICE, DataType, Export};
use crate::lingering;

/// Most dimensions of an array.
const DIMENSIONS_MAX: usize = 32;

/// Element types: name, DLPack type, and format in the buffer protocol (`struct` module).
const ELEMENTS: &[(&str, DataType, &CStr)] = &[
    ("bool", element(6, 8), c"?"),
    ("int8", element(0, 8), c"b"),
    ("int16", element(0, 16), c"h"),
    ("int32", element(0, 32), c"i"),
    ("int64", element(0, 64), c"q"),
    ("uint8", element(1, 8), c"B"),
    ("uint16", element(1, 16), c"H"),
    ("uint32", element(1, 32), c"I"),
    ("uint64", element(1, 64), c"Q"),
    ("float16", element(2, 16), c"e"),
    ("float32", element(2, 32), c"f"),
    ("float64", element(2, 64), c"d"),
    // The buffer protocol has no bfloat16; it is exported as its bits.
    ("bfloat16", element(4, 16), c"H"),
];

const fn element(code: u8, bits: u8) -> DataType {
    DataType { code, bits, lanes: 1 }
}

/// Bytes shared with the daemon, and which of them this process uses.
#[derive(Debug)]
pub struct RegionMemory {
    memory: Arc<SharedMemory>,
    allocator: Mutex<Allocator>,
}

/// A range, in use until this is dropped.
#[derive(Debug)]
struct Allocation {
    region: Arc<RegionMemory>,
    offset: u64,
    length: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let mut allocator = self.region.allocator.lock().unwrap_or_else(PoisonError::into_inner);
        allocator.release(self.offset, self.length);
    }
}

/// The job's region: bytes shared with the daemon, exported through the buffer protocol.
#[pyclass(module = "sealane._native", frozen)]
pub struct Region(Arc<RegionMemory>);

impl Region {
    pub fn new(memory: Arc<SharedMemory>) -> Self {
        let allocator = Mutex::new(Allocator::new(memory.len() as u64));
        Self(Arc::new(RegionMemory { memory, allocator }))
    }

    pub fn memory(&self) -> Arc<SharedMemory> {
        Arc::clone(&self.0.memory)
    }
}

#[pymethods]
impl Region {
    fn __len__(&self) -> usize {
        self.0.memory.len()
    }

    #[pyo3(signature = (shape, dtype, alignment=64))]
    fn empty(&self, shape: Vec<i64>, dtype: &str, alignment: u64) -> PyResult<RegionArray> {
        let Some((name, data_type, format)) = ELEMENTS.iter().find(|(name, ..)| *name == dtype)
        else {
            return Err(PyValueError::new_err(format!("unknown element type {dtype:?}")));
        };
        let length = byte_length(&shape, *data_type)?;
        if !alignment.is_power_of_two() || alignment > 4096 {
            return Err(PyValueError::new_err(format!(
                "alignment {alignment}; allowed: a power of two up to 4096"
            )));
        }
        lingering::free_ended();
        let mut allocator = self.0.allocator.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = allocator.allocate(length, alignment).ok_or_else(|| {
            let (free, longest) = allocator.free_bytes();
            PyMemoryError::new_err(format!(
                "{length} bytes needed; {free} of the region's {} are free, {longest} of them \
                 in one piece",
                self.0.memory.len()
            ))
        })?;
        drop(allocator);
        let allocation = Allocation { region: Arc::clone(&self.0), offset, length };
        Ok(RegionArray::new(allocation, shape, (*name, *data_type, *format)))
    }

    /// Offset and length of a contiguous buffer in the region. `ValueError` if it lies elsewhere.
    fn locate(&self, buffer: &Bound<'_, PyAny>) -> PyResult<(u64, u64)> {
        let mut view = ffi::Py_buffer::new();
        // SAFETY: the view is released below; only its address and length are used.
        let (address, length) = unsafe {
            if ffi::PyObject_GetBuffer(buffer.as_ptr(), &raw mut view, ffi::PyBUF_SIMPLE) != 0 {
                return Err(PyErr::fetch(buffer.py()));
            }
            let found = (view.buf.addr(), view.len.cast_unsigned());
            ffi::PyBuffer_Release(&raw mut view);
            found
        };
        let start = self.0.memory.as_mut_ptr().addr();
        address
            .checked_sub(start)
            .filter(|offset| self.0.memory.contains(*offset as u64, length as u64))
            .map(|offset| (offset as u64, length as u64))
            .ok_or_else(|| PyValueError::new_err("the buffer does not lie in the session's region"))
    }

    /// Exports the mapping, writable; it stays mapped while any view of it exists.
    #[allow(clippy::needless_pass_by_value)] // the protocol hands it over by value
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let memory = &slf.get().0.memory;
        let start = memory.as_mut_ptr().cast::<c_void>();
        // SAFETY: `view` belongs to the interpreter and is to be filled. The mapping has
        // `memory.len()` bytes and is unmapped only when this object is dropped, which the view
        // keeps alive.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, memory.len().cast_signed(), 0, flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

fn byte_length(shape: &[i64], data_type: DataType) -> PyResult<u64> {
    if shape.len() > DIMENSIONS_MAX || shape.iter().any(|dimension| *dimension < 0) {
        return Err(PyValueError::new_err(format!(
            "shape {shape:?}; allowed: up to {DIMENSIONS_MAX} dimensions, none negative"
        )));
    }
    let bytes = shape
        .iter()
        .try_fold(i64::from(data_type.bits / 8), |product, dimension| {
            product.checked_mul(*dimension)
        })
        .ok_or_else(|| {
            PyMemoryError::new_err(format!("an array of shape {shape:?} is larger than any memory"))
        })?;
    Ok(bytes.cast_unsigned())
}

/// A row-major array in a session's region. Its range is freed once neither the array nor a view of
/// it (buffer protocol, DLPack) remains.
#[pyclass(module = "sealane._native", frozen)]
pub struct RegionArray {
    allocation: Arc<Allocation>,
    shape: Vec<i64>,
    /// Distance of neighbouring elements along each dimension, in elements and in bytes.
    strides: Vec<i64>,
    byte_strides: Vec<i64>,
    name: &'static str,
    data_type: DataType,
    format: &'static CStr,
}

impl RegionArray {
    fn new(
        allocation: Allocation,
        shape: Vec<i64>,
        (name, data_type, format): (&'static str, DataType, &'static CStr),
    ) -> Self {
        let mut strides = vec![1; shape.len()];
        for index in (1..shape.len()).rev() {
            strides[index - 1] = strides[index] * shape[index].max(1);
        }
        let item = i64::from(data_type.bits / 8);
        let byte_strides = strides.iter().map(|stride| stride * item).collect();
        let allocation = Arc::new(allocation);
        Self { allocation, shape, strides, byte_strides, name, data_type, format }
    }

    fn data(&self) -> *mut u8 {
        let start = self.allocation.region.memory.as_mut_ptr();
        start.wrapping_add(self.allocation.offset as usize)
    }
}

#[pymethods]
impl RegionArray {
    /// Offset of the first byte in the region.
    #[getter]
    fn offset(&self) -> u64 {
        self.allocation.offset
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.allocation.length
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        pyo3::types::PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.name
    }

    fn __repr__(&self) -> String {
        format!(
            "RegionArray(shape={:?}, dtype={:?}, offset={})",
            self.shape, self.name, self.allocation.offset
        )
    }

    #[allow(clippy::unused_self)] // all arrays are in host memory
    fn __dlpack_device__(&self) -> (i32, i32) {
        DEVICE
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        if stream.is_some() || dl_device.is_some_and(|device| device != DEVICE) {
            return Err(PyBufferError::new_err("the array is in host memory"));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("the array is exported as it is, never as a copy"));
        }
        let export = Export {
            data: self.data(),
            data_type: self.data_type,
            shape: self.shape.clone(),
            strides: self.strides.clone(),
            owner: Box::new(Arc::clone(&self.allocation)),
        };
        export.capsule(py, max_version)
    }

    /// Exports the array with its shape and format; the range stays in use while a view exists.
    #[allow(clippy::needless_pass_by_value)] // the protocol hands it over by value
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let array = slf.get();
        let start = array.data().cast::<c_void>();
        let length = array.allocation.length.cast_signed() as isize;
        let dimensions = c_int::try_from(array.shape.len())?;
        // SAFETY: `view` belongs to the interpreter and is to be filled. It keeps this object
        // alive, and so the mapping that contains the range and the vectors pointed to, which never
        // change. Without PyBUF_ND or PyBUF_FORMAT the fields stay as FillInfo set them: bytes in
        // one dimension.
        unsafe {
            if ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, length, 0, flags) != 0 {
                return Err(PyErr::fetch(slf.py()));
            }
            if flags & ffi::PyBUF_FORMAT != 0 && flags & ffi::PyBUF_ND != 0 {
                (*view).format = array.format.as_ptr().cast_mut();
                (*view).itemsize = isize::from(array.data_type.bits / 8);
                (*view).ndim = dimensions;
                (*view).shape = array.shape.as_ptr().cast_mut().cast();
                if flags & ffi::PyBUF_STRIDES == ffi::PyBUF_STRIDES {
                    (*view).strides = array.byte_strides.as_ptr().cast_mut().cast();
                }
            }
        }
        Ok(())
    }
}
