//! Products of a coefficient matrix and symbols, using the processor's features. It contains all
//! unsafe code of the crate: calls of functions that need a processor feature, and loads and stores
//! whose bounds are ensured by the assertions in [`multiply`].

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::{
    uint8x16_t, vandq_u8, vdupq_n_u8, veorq_u8, vld1q_u8, vqtbl1q_u8, vshrq_n_u8, vst1q_u8,
};
#[cfg(target_arch = "x86_64")]
#[allow(clippy::wildcard_imports)] // intrinsics have a prefix of their own
use std::arch::x86_64::*;

#[cfg(target_arch = "x86_64")]
use crate::field::AFFINE;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::field::NIBBLES;
use crate::portable;

/// Most outputs computed in one pass over the sources.
const ROWS_MAX: usize = 8;

/// A multiplication method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// AVX-512 with GFNI's affine instruction: 64 products per instruction.
    Gfni,
    /// AVX2 with two 16-entry tables for each coefficient.
    Avx2,
    /// Arm's Advanced SIMD with the same tables.
    Neon,
    /// Shifts and XORs of 64-bit words.
    Portable,
}

impl Kernel {
    /// All kernels, fastest first.
    pub const ALL: [Self; 4] = [Self::Gfni, Self::Avx2, Self::Neon, Self::Portable];

    /// Whether this processor can run it.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Gfni => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("gfni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Self::Portable => true,
            #[allow(unreachable_patterns)] // the other processors' kernels
            _ => false,
        }
    }

    /// The fastest kernel that this processor supports.
    pub fn best() -> Self {
        let available = Self::ALL.into_iter().find(|kernel| kernel.is_available());
        available.unwrap_or(Self::Portable)
    }
}

/// Number of rows of a pass, and their coefficients, source by source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pass {
    rows: usize,
    coefficients: Vec<u8>,
    /// Whether all coefficients of the first row are 1.
    first_is_sum: bool,
}

/// A coefficient matrix, divided into passes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Matrix {
    passes: Vec<Pass>,
    rows: usize,
    columns: usize,
}

impl Matrix {
    /// Replaces the matrix with one of `rows` × `columns`.
    pub fn fill(&mut self, rows: usize, columns: usize, entry: impl Fn(usize, usize) -> u8) {
        self.passes.clear();
        (self.rows, self.columns) = (rows, columns);
        let mut start = 0;
        while start < rows {
            // Passes of 8, 4, 2 and 1 rows, for which the kernels are compiled.
            let count = 1 << (rows - start).min(ROWS_MAX).ilog2();
            let mut coefficients = Vec::with_capacity(count * columns);
            for column in 0..columns {
                coefficients.extend((start..start + count).map(|row| entry(row, column)));
            }
            let first_is_sum = coefficients.iter().step_by(count).all(|factor| *factor == 1);
            self.passes.push(Pass { rows: count, coefficients, first_is_sum });
            start += count;
        }
    }
}

/// Writes the product of matrix and sources to the outputs.
///
/// # Panics
/// If the matrix has another shape, the symbols have different lengths, or the processor doesn't
/// support the kernel.
pub fn multiply(kernel: Kernel, matrix: &Matrix, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
    let length = outputs.first().map_or(0, |output| output.len());
    // All loads and stores in this file rely on these.
    assert!(sources.iter().all(|source| source.len() == length), "sources differ in length");
    assert!(outputs.iter().all(|output| output.len() == length), "outputs differ in length");
    assert_eq!((matrix.rows, matrix.columns), (outputs.len(), sources.len()), "shape of matrix");
    assert!(kernel.is_available(), "this processor does not support {kernel:?}");
    let mut rest = outputs;
    for pass in &matrix.passes {
        let (outputs, behind) = rest.split_at_mut(pass.rows);
        rest = behind;
        match kernel {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the processor has the features, lengths and shape were asserted above.
            Kernel::Gfni => unsafe { gfni_pass(pass, sources, outputs) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the processor has the features, lengths and shape were asserted above.
            Kernel::Avx2 => unsafe { avx2_pass(pass, sources, outputs) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: the processor has the feature, lengths and shape were asserted above.
            Kernel::Neon => unsafe { neon_pass(pass, sources, outputs) },
            _ => portable::multiply(&pass.coefficients, sources, outputs, 0),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
unsafe fn gfni_pass(pass: &Pass, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
    // With fewer rows, registers are free for more vectors per step: each source is then read in
    // longer runs, which helps prefetching. SAFETY: as for this function; the number of rows is
    // outputs.len().
    unsafe {
        match (pass.rows, pass.first_is_sum) {
            (8, false) => gfni_rows::<8, 2, false>(pass, sources, outputs),
            (8, true) => gfni_rows::<8, 2, true>(pass, sources, outputs),
            (4, false) => gfni_rows::<4, 4, false>(pass, sources, outputs),
            (4, true) => gfni_rows::<4, 4, true>(pass, sources, outputs),
            (2, false) => gfni_rows::<2, 4, false>(pass, sources, outputs),
            (2, true) => gfni_rows::<2, 4, true>(pass, sources, outputs),
            (_, false) => gfni_rows::<1, 8, false>(pass, sources, outputs),
            (_, true) => gfni_rows::<1, 8, true>(pass, sources, outputs),
        }
    }
}

/// Computes `ROWS` outputs with `WIDTH` vectors per step, and the rest vector by vector under a
/// mask.
///
/// # Safety
/// The processor has the features; sources and outputs have equal lengths; there are `ROWS`
/// outputs; the pass has `ROWS` coefficients for each source.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
unsafe fn gfni_rows<const ROWS: usize, const WIDTH: usize, const SUM: bool>(
    pass: &Pass,
    sources: &[&[u8]],
    outputs: &mut [&mut [u8]],
) {
    let length = outputs[0].len();
    let step = WIDTH * 64;
    let whole = length - length % step;
    let full = [u64::MAX; WIDTH];
    for at in (0..whole).step_by(step) {
        // SAFETY: at + WIDTH · 64 ≤ length.
        unsafe {
            gfni_tile::<ROWS, WIDTH, SUM>(pass, sources, outputs, at, full);
        }
    }
    for at in (whole..length).step_by(64) {
        let mask = u64::MAX >> (64 - (length - at).min(64));
        // SAFETY: the mask has no bit for bytes from `length` on.
        unsafe {
            gfni_tile::<ROWS, 1, SUM>(pass, sources, outputs, at, [mask]);
        }
    }
}

/// One step: `WIDTH` vectors of each source from byte `at` on, restricted to the bytes in the
/// masks.
///
/// # Safety
/// As for [`gfni_rows`]; the bytes in the masks are inside sources and outputs.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
#[inline]
unsafe fn gfni_tile<const ROWS: usize, const WIDTH: usize, const SUM: bool>(
    pass: &Pass,
    sources: &[&[u8]],
    outputs: &mut [&mut [u8]],
    at: usize,
    masks: [u64; WIDTH],
) {
    let mut sums = [[_mm512_setzero_si512(); WIDTH]; ROWS];
    let product = |vector, factor: u8| {
        let matrix = _mm512_set1_epi64(AFFINE[usize::from(factor)].cast_signed());
        _mm512_gf2p8affine_epi64_epi8::<0>(vector, matrix)
    };
    // Two sources at a time, so that one instruction adds both products.
    let mut pairs = sources.chunks_exact(2);
    let mut factors = pass.coefficients.chunks_exact(2 * ROWS);
    for (pair, factors) in (&mut pairs).zip(&mut factors) {
        // SAFETY: guaranteed by the caller.
        let (a, b): ([_; WIDTH], [_; WIDTH]) =
            unsafe { (gfni_load(pair[0], at, masks), gfni_load(pair[1], at, masks)) };
        for row in 0..ROWS {
            for i in 0..WIDTH {
                let (a, b) = if SUM && row == 0 {
                    (a[i], b[i])
                } else {
                    (product(a[i], factors[row]), product(b[i], factors[ROWS + row]))
                };
                sums[row][i] = _mm512_ternarylogic_epi64::<0x96>(sums[row][i], a, b);
            }
        }
    }
    if let ([last], factors) = (pairs.remainder(), factors.remainder()) {
        // SAFETY: guaranteed by the caller.
        let last: [_; WIDTH] = unsafe { gfni_load(last, at, masks) };
        for row in 0..ROWS {
            for i in 0..WIDTH {
                sums[row][i] = _mm512_xor_si512(sums[row][i], product(last[i], factors[row]));
            }
        }
    }
    for (sums, output) in sums.iter().zip(outputs.iter_mut()) {
        for (i, mask) in masks.into_iter().enumerate() {
            let place = output.as_mut_ptr().wrapping_add(at + i * 64).cast();
            // SAFETY: the bytes in the mask are inside the output.
            unsafe { _mm512_mask_storeu_epi8(place, mask, sums[i]) };
        }
    }
}

/// # Safety
/// The bytes in the masks, from byte `at` on, are inside `source`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn gfni_load<const WIDTH: usize>(
    source: &[u8],
    at: usize,
    masks: [u64; WIDTH],
) -> [__m512i; WIDTH] {
    let mut vectors = [_mm512_setzero_si512(); WIDTH];
    for (i, mask) in masks.into_iter().enumerate() {
        let place = source.as_ptr().wrapping_add(at + i * 64).cast();
        // SAFETY: the bytes in the mask are inside the source.
        vectors[i] = unsafe { _mm512_maskz_loadu_epi8(mask, place) };
    }
    vectors
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2_pass(pass: &Pass, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
    // SAFETY: as for this function; the number of rows is outputs.len().
    unsafe {
        match pass.rows {
            8 => avx2_rows::<8>(pass, sources, outputs),
            4 => avx2_rows::<4>(pass, sources, outputs),
            2 => avx2_rows::<2>(pass, sources, outputs),
            _ => avx2_rows::<1>(pass, sources, outputs),
        }
    }
}

/// Computes `ROWS` outputs with 32 bytes per step; the portable kernel processes the remaining
/// bytes.
///
/// # Safety
/// The processor has AVX2; sources and outputs have equal lengths; there are `ROWS` outputs.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2_rows<const ROWS: usize>(pass: &Pass, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
    let length = outputs[0].len();
    let whole = length - length % 32;
    let nibble = _mm256_set1_epi8(0x0f);
    for at in (0..whole).step_by(32) {
        let mut sums = [_mm256_setzero_si256(); ROWS];
        for (source, factors) in sources.iter().zip(pass.coefficients.chunks_exact(ROWS)) {
            // SAFETY: at + 32 ≤ length.
            let vector = unsafe { _mm256_loadu_si256(source.as_ptr().add(at).cast()) };
            let low = _mm256_and_si256(vector, nibble);
            let high = _mm256_and_si256(_mm256_srli_epi64::<4>(vector), nibble);
            for row in 0..ROWS {
                let tables = NIBBLES[usize::from(factors[row])].as_ptr();
                // SAFETY: both tables of 16 bytes lie within the 32 bytes.
                let (below, above) = unsafe {
                    (_mm_loadu_si128(tables.cast()), _mm_loadu_si128(tables.add(16).cast()))
                };
                let below = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(below), low);
                let above = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(above), high);
                sums[row] = _mm256_xor_si256(sums[row], _mm256_xor_si256(below, above));
            }
        }
        for (sum, output) in sums.iter().zip(outputs.iter_mut()) {
            // SAFETY: at + 32 ≤ length.
            unsafe { _mm256_storeu_si256(output.as_mut_ptr().add(at).cast(), *sum) };
        }
    }
    portable::multiply(&pass.coefficients, sources, outputs, whole);
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn neon_pass(pass: &Pass, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
    // SAFETY: as for this function; the number of rows is outputs.len().
    unsafe {
        match (pass.rows, pass.first_is_sum) {
            (8, false) => neon_rows::<8, 2, false>(pass, sources, outputs),
            (8, true) => neon_rows::<8, 2, true>(pass, sources, outputs),
            (4, false) => neon_rows::<4, 4, false>(pass, sources, outputs),
            (4, true) => neon_rows::<4, 4, true>(pass, sources, outputs),
            (2, false) => neon_rows::<2, 4, false>(pass, sources, outputs),
            (2, true) => neon_rows::<2, 4, true>(pass, sources, outputs),
            (_, false) => neon_rows::<1, 4, false>(pass, sources, outputs),
            (_, true) => neon_rows::<1, 4, true>(pass, sources, outputs),
        }
    }
}

/// Computes `ROWS` outputs with `WIDTH` vectors of 16 bytes per step, which share the loads of the
/// tables; the portable kernel processes the remaining bytes.
///
/// # Safety
/// The processor has Advanced SIMD; sources and outputs have equal lengths; there are `ROWS` outputs.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn neon_rows<const ROWS: usize, const WIDTH: usize, const SUM: bool>(
    pass: &Pass,
    sources: &[&[u8]],
    outputs: &mut [&mut [u8]],
) {
    let length = outputs[0].len();
    let whole = length - length % (WIDTH * 16);
    let nibble = vdupq_n_u8(0x0f);
    for at in (0..whole).step_by(WIDTH * 16) {
        let mut sums = [[vdupq_n_u8(0); WIDTH]; ROWS];
        for (source, factors) in sources.iter().zip(pass.coefficients.chunks_exact(ROWS)) {
            // SAFETY: at + WIDTH · 16 ≤ length.
            let vectors: [uint8x16_t; WIDTH] =
                std::array::from_fn(|i| unsafe { vld1q_u8(source.as_ptr().add(at + i * 16)) });
            for row in 0..ROWS {
                if SUM && row == 0 {
                    for i in 0..WIDTH {
                        sums[row][i] = veorq_u8(sums[row][i], vectors[i]);
                    }
                    continue;
                }
                let tables = NIBBLES[usize::from(factors[row])].as_ptr();
                // SAFETY: both tables of 16 bytes lie within the 32 bytes.
                let (below, above) = unsafe { (vld1q_u8(tables), vld1q_u8(tables.add(16))) };
                for i in 0..WIDTH {
                    let low = vqtbl1q_u8(below, vandq_u8(vectors[i], nibble));
                    let high = vqtbl1q_u8(above, vshrq_n_u8::<4>(vectors[i]));
                    sums[row][i] = veorq_u8(sums[row][i], veorq_u8(low, high));
                }
            }
        }
        for (sums, output) in sums.iter().zip(outputs.iter_mut()) {
            for (i, sum) in sums.iter().enumerate() {
                // SAFETY: at + WIDTH · 16 ≤ length.
                unsafe { vst1q_u8(output.as_mut_ptr().add(at + i * 16), *sum) };
            }
        }
    }
    portable::multiply(&pass.coefficients, sources, outputs, whole);
}
