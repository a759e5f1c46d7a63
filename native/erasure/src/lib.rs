//! The erasure code of sessions: Reed–Solomon over GF(2^8) with a Cauchy matrix, systematic and MDS.
//!
//! Any k of k + m symbols suffice, for all k + m ≤ 255. The first parity symbol is the plain sum
//! (XOR) of the data, so m = 1 is the XOR code; XOR codes of several groups are interleaved blocks
//! with m = 1. Symbols are byte strings of one arbitrary length. `docs/formats/session-wire.md`
//! defines the matrix. The multiplication kernel is selected at run time and does not affect the
//! result.
#![deny(unsafe_code)]

mod field;
#[allow(unsafe_code)]
mod kernels;
mod portable;

pub use field::SYMBOLS_MAX;
pub use kernels::Kernel;

use field::Restoration;
use kernels::{Matrix, multiply};

/// Why symbols could not be coded. Every case is a mistake of the caller; the code itself cannot
/// fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ErasureError {
    /// No data or no parity symbols, more than 255 in total, or symbols of different lengths.
    #[error("invalid number or length of symbols")]
    Shape,
    /// An index is out of range or was given twice.
    #[error("symbol index out of range or given twice")]
    Index,
    /// Fewer parity symbols than missing data symbols.
    #[error("too few symbols to decode")]
    TooFew,
}

/// Encodes and decodes; keeps its matrices between calls.
#[derive(Debug)]
pub struct Coder {
    kernel: Kernel,
    /// The most recent encoding matrix.
    encoding: Matrix,
    encoding_shape: (usize, usize),
    decoding: Matrix,
}

impl Default for Coder {
    fn default() -> Self {
        Self::new(Kernel::best())
    }
}

impl Coder {
    fn new(kernel: Kernel) -> Self {
        Self {
            kernel,
            encoding: Matrix::default(),
            encoding_shape: (0, 0),
            decoding: Matrix::default(),
        }
    }

    /// Creates a coder with this kernel, for tests and benchmarks; `None` if the processor lacks
    /// it.
    pub fn with_kernel(kernel: Kernel) -> Option<Self> {
        kernel.is_available().then(|| Self::new(kernel))
    }

    /// Computes the parity symbols of the data symbols: `k = data.len()`, `m = parity.len()`.
    pub fn encode(&mut self, data: &[&[u8]], parity: &mut [&mut [u8]]) -> Result<(), ErasureError> {
        let (k, m) = (data.len(), parity.len());
        let length = data.first().map_or(0, |symbol| symbol.len());
        let is_sound = k > 0
            && m > 0
            && k + m <= SYMBOLS_MAX
            && data.iter().all(|symbol| symbol.len() == length)
            && parity.iter().all(|symbol| symbol.len() == length);
        if !is_sound {
            return Err(ErasureError::Shape);
        }
        if self.encoding_shape != (k, m) {
            self.encoding.fill(m, k, field::coefficient);
            self.encoding_shape = (k, m);
        }
        multiply(self.kernel, &self.encoding, data, parity);
        Ok(())
    }

    /// Computes the missing data symbols. `present` and `missing` together are the k data symbols
    /// and `parity` the available parity symbols, each with its index. It uses as many parity
    /// symbols as data symbols are missing, those with the lowest indices.
    pub fn decode(
        &mut self,
        present: &[(usize, &[u8])],
        parity: &[(usize, &[u8])],
        missing: &mut [(usize, &mut [u8])],
    ) -> Result<(), ErasureError> {
        let k = present.len() + missing.len();
        check_symbols(k, present, parity, missing)?;
        if missing.is_empty() {
            return Ok(());
        }
        let mut used: Vec<(usize, &[u8])> = parity.to_vec();
        used.sort_unstable_by_key(|(index, _)| *index);
        let used = used.get(..missing.len()).ok_or(ErasureError::TooFew)?;
        let indices = |symbols: &[(usize, &[u8])]| symbols.iter().map(|(i, _)| *i).collect();
        let (data, spare): (Vec<_>, Vec<_>) = (indices(present), indices(used));
        let lost: Vec<usize> = missing.iter().map(|(index, _)| *index).collect();
        let restoration = Restoration::new(&data, &spare, &lost);
        self.decoding.fill(lost.len(), k, |row, column| restoration.coefficient(row, column));
        let known: Vec<&[u8]> = present.iter().chain(used).map(|(_, symbol)| *symbol).collect();
        let mut outputs: Vec<&mut [u8]> = missing.iter_mut().map(|(_, out)| &mut **out).collect();
        multiply(self.kernel, &self.decoding, &known, &mut outputs);
        Ok(())
    }
}

fn check_symbols(
    k: usize,
    present: &[(usize, &[u8])],
    parity: &[(usize, &[u8])],
    missing: &[(usize, &mut [u8])],
) -> Result<(), ErasureError> {
    if k == 0 || k >= SYMBOLS_MAX {
        return Err(ErasureError::Shape);
    }
    let symbols = present.iter().chain(parity).map(|(_, symbol)| symbol.len());
    let mut lengths = symbols.chain(missing.iter().map(|(_, symbol)| symbol.len()));
    let length = lengths.next();
    if lengths.any(|other| Some(other) != length) {
        return Err(ErasureError::Shape);
    }
    let mut seen = [false; SYMBOLS_MAX];
    let data = present.iter().map(|(i, _)| *i).chain(missing.iter().map(|(i, _)| *i));
    let data = data.map(|i| (i, i < k));
    let parity = parity.iter().map(|(i, _)| (k.saturating_add(*i), *i < SYMBOLS_MAX - k));
    for (place, is_inside) in data.chain(parity) {
        if !is_inside || std::mem::replace(&mut seen[place], true) {
            return Err(ErasureError::Index);
        }
    }
    Ok(())
}
