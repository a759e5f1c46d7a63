//! DLPack: zero-copy exchange of memory between array libraries
//! (<https://dmlc.github.io/dlpack/latest/>, structures of `dlpack.h` 1.0).

use std::any::Any;
use std::ffi::{CStr, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// `kDLCPU`, device 0.
pub const DEVICE: (i32, i32) = (1, 0);

const NAME: &CStr = c"dltensor";
const NAME_VERSIONED: &CStr = c"dltensor_versioned";
const VERSION: (u32, u32) = (1, 0);

/// `DLDataType`: codes are 0 signed, 1 unsigned, 2 IEEE 754, 4 bfloat, 6 boolean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct DataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: (i32, i32),
    dimensions: i32,
    data_type: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`, for consumers older than version 1.0.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`; no flags: writable, not a copy.
#[repr(C)]
struct ManagedVersioned {
    version: (u32, u32),
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// Owns the memory that the tensor's pointers refer to; freed by the deleter.
struct Context {
    shape: Vec<i64>,
    strides: Vec<i64>,
    _owner: Box<dyn Any + Send + Sync>,
}

/// A contiguous array in memory of this process.
pub struct Export {
    /// First byte; valid while `owner` lives.
    pub data: *mut u8,
    pub data_type: DataType,
    /// Elements along each dimension, and the distance between neighbours (row-major).
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
    /// Kept until the consumer releases the tensor.
    pub owner: Box<dyn Any + Send + Sync>,
}

impl Export {
    /// A capsule for a consumer that knows DLPack up to `version_max` (before 1.0: `None`).
    pub fn capsule(self, py: Python<'_>, version_max: Option<(u32, u32)>) -> PyResult<Py<PyAny>> {
        let Self { data, data_type, shape, strides, owner } = self;
        let mut context = Box::new(Context { shape, strides, _owner: owner });
        let tensor = Tensor {
            data: data.cast(),
            device: DEVICE,
            dimensions: i32::try_from(context.shape.len())?,
            data_type,
            shape: context.shape.as_mut_ptr(),
            strides: context.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        let context = Box::into_raw(context).cast::<c_void>();
        if version_max.is_some_and(|(major, _)| major >= VERSION.0) {
            let deleter = Some(delete_versioned as unsafe extern "C" fn(_));
            let managed = ManagedVersioned { version: VERSION, context, deleter, flags: 0, tensor };
            new_capsule(py, Box::into_raw(Box::new(managed)).cast(), NAME_VERSIONED)
        } else {
            let deleter = Some(delete as unsafe extern "C" fn(_));
            new_capsule(
                py,
                Box::into_raw(Box::new(Managed { tensor, context, deleter })).cast(),
                NAME,
            )
        }
    }
}

fn new_capsule(py: Python<'_>, managed: *mut c_void, name: &'static CStr) -> PyResult<Py<PyAny>> {
    // SAFETY: `managed` is not null, the name is static, and the destructor takes both.
    let capsule = unsafe { ffi::PyCapsule_New(managed, name.as_ptr(), Some(unused)) };
    if capsule.is_null() {
        // SAFETY: nobody else has seen it.
        unsafe { free(managed, name) };
        return Err(PyBufferError::new_err("no memory for a capsule"));
    }
    // SAFETY: a new reference that we own.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) }.unbind())
}

/// Destructor of a capsule. A consumed capsule has another name, and its consumer frees the tensor.
unsafe extern "C" fn unused(capsule: *mut ffi::PyObject) {
    for name in [NAME, NAME_VERSIONED] {
        // SAFETY: the interpreter calls this with the capsule it destroys; a capsule of this name
        // holds what `capsule` put there.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, name.as_ptr()) != 0 {
                free(ffi::PyCapsule_GetPointer(capsule, name.as_ptr()), name);
            }
        }
    }
}

/// # Safety
/// `managed` comes from `Export::capsule`, is of the kind that the name says, and is not in use.
unsafe fn free(managed: *mut c_void, name: &CStr) {
    // SAFETY: as above.
    unsafe { if name == NAME { delete(managed.cast()) } else { delete_versioned(managed.cast()) } }
}

unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: the consumer calls this once with what it was given; both boxes come from `capsule`.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Context>()));
    }
}

unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: as in `delete`.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Context>()));
    }
}
