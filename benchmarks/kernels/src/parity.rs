//! Parity by a card: what a processor saves, and what it must do itself.
//!
//! The card's memory gets a copy of the data, and parity is copied out of it. Wrong parity is found
//! by random combinations of its rows: with r drawn, the sum of r_j times parity j must be that of
//! the data with coefficients r C. One combination misses a wrong column of bytes with 1/256; t of
//! them are a product of t rows with k + m symbols, as decoding t lost symbols of k + m is.

use std::hint::black_box;

use sealane_erasure::{Coder, Kernel};

use crate::{Case, measure};

/// (k, m), symbol bytes.
const SHAPES: [(usize, usize, usize); 5] =
    [(32, 8, 4096), (32, 8, 1408), (32, 4, 4096), (32, 2, 4096), (8, 2, 4096)];
/// Combinations.
const ROWS: [usize; 3] = [1, 2, 4];

fn symbols(count: usize, bytes: usize) -> Vec<Vec<u8>> {
    (0..count).map(|i| (0..bytes).map(|j| (i * 31 + j * 7) as u8).collect()).collect()
}

/// Measures encoding, the copies, and the check, for every kernel that the processor has.
pub fn measure_all(rounds: u64) {
    for (k, m, bytes) in SHAPES {
        let data = symbols(k + m, bytes);
        let mut arena = vec![0; (k + m) * bytes];
        let mut cases = vec![Case::new("copies", |_| {
            for (symbol, place) in data.iter().zip(arena.chunks_mut(bytes)) {
                place.copy_from_slice(black_box(symbol));
            }
            black_box(&arena);
        })];
        for kernel in Kernel::ALL {
            let Some(mut coder) = Coder::with_kernel(kernel) else { continue };
            let name = format!("{kernel:?}").to_lowercase();
            let (data, mut parity) = (&data, vec![vec![0; bytes]; m]);
            cases.push(Case::new(format!("{name}, encode"), move |_| {
                let data: Vec<&[u8]> = data[..k].iter().map(|symbol| &symbol[..]).collect();
                let mut parity: Vec<&mut [u8]> =
                    parity.iter_mut().map(|symbol| &mut symbol[..]).collect();
                coder.encode(black_box(&data), &mut parity).unwrap();
                black_box(&parity);
            }));
            for rows in ROWS.into_iter().filter(|rows| *rows < m) {
                let mut coder = Coder::with_kernel(kernel).expect("as before");
                let mut sums = vec![vec![0; bytes]; rows];
                cases.push(Case::new(format!("{name}, check {rows}"), move |_| {
                    let known = |range: std::ops::Range<usize>| {
                        range.map(|i| (i, &data[i][..])).collect::<Vec<_>>()
                    };
                    let (present, spare) = (known(rows..k + m), known(0..rows));
                    let mut lost: Vec<(usize, &mut [u8])> =
                        sums.iter_mut().map(|sum| &mut sum[..]).enumerate().collect();
                    coder.decode(black_box(&present), &spare, &mut lost).unwrap();
                    black_box(&lost);
                }));
            }
        }
        measure(rounds, "parity", &format!("({k}, {m}) {bytes} B"), k * bytes, &mut cases);
    }
}
