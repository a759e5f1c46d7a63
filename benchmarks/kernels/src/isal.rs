//! ISA-L's erasure code, loaded at run time if it is installed (Debian: libisal2).

use std::ffi::c_int;

use libloading::Library;

type InitTables = unsafe extern "C" fn(c_int, c_int, *const u8, *mut u8);
type EncodeData =
    unsafe extern "C" fn(c_int, c_int, c_int, *const u8, *const *const u8, *const *mut u8);
type InvertMatrix = unsafe extern "C" fn(*mut u8, *mut u8, c_int) -> c_int;

/// The three functions that a coder needs.
pub struct Isal {
    init_tables: InitTables,
    encode_data: EncodeData,
    invert_matrix: InvertMatrix,
    _library: Library,
}

impl Isal {
    /// Loads the library; `None` if it isn't installed.
    pub fn load() -> Option<Self> {
        // SAFETY: ISA-L runs nothing when loaded; signatures are those of erasure_code.h.
        unsafe {
            let library = Library::new("libisal.so.2").ok()?;
            Some(Self {
                init_tables: *library.get(b"ec_init_tables\0").ok()?,
                encode_data: *library.get(b"ec_encode_data\0").ok()?,
                invert_matrix: *library.get(b"gf_invert_matrix\0").ok()?,
                _library: library,
            })
        }
    }

    /// Expands a row-major coefficient matrix with `columns` columns.
    pub fn tables(&self, matrix: &[u8], columns: usize) -> Vec<u8> {
        let mut tables = vec![0; 32 * matrix.len()];
        let rows = matrix.len() / columns;
        // SAFETY: the table has 32 bytes for each coefficient.
        unsafe {
            (self.init_tables)(
                columns as c_int,
                rows as c_int,
                matrix.as_ptr(),
                tables.as_mut_ptr(),
            );
        }
        tables
    }

    /// Computes outputs = matrix × sources; all have the same length.
    pub fn multiply(&self, tables: &[u8], sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
        assert_eq!(tables.len(), 32 * sources.len() * outputs.len());
        let length = outputs[0].len();
        assert!(sources.iter().all(|source| source.len() == length));
        assert!(outputs.iter().all(|output| output.len() == length));
        let from: Vec<*const u8> = sources.iter().map(|source| source.as_ptr()).collect();
        let to: Vec<*mut u8> = outputs.iter_mut().map(|output| output.as_mut_ptr()).collect();
        // SAFETY: shape and lengths were asserted.
        unsafe {
            (self.encode_data)(
                length as c_int,
                from.len() as c_int,
                to.len() as c_int,
                tables.as_ptr(),
                from.as_ptr(),
                to.as_ptr(),
            );
        }
    }

    /// Inverts an invertible square matrix.
    pub fn invert(&self, mut matrix: Vec<u8>, size: usize) -> Vec<u8> {
        assert_eq!(matrix.len(), size * size);
        let mut inverse = vec![0; size * size];
        // SAFETY: both are size × size.
        let failed = unsafe {
            (self.invert_matrix)(matrix.as_mut_ptr(), inverse.as_mut_ptr(), size as c_int)
        };
        assert_eq!(failed, 0, "singular");
        inverse
    }
}
