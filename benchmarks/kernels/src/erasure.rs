//! Reed–Solomon over symbols that stay in the caches: the product's kernels, ISA-L and other crates.

use std::hint::black_box;

use reed_solomon_erasure::galois_8::ReedSolomon;
use sealane_erasure::{Coder, Kernel};

use crate::isal::Isal;
use crate::{Case, measure};

/// (k, m), symbol bytes.
const SHAPES: [(usize, usize, usize); 7] = [
    (32, 8, 4096),
    (32, 8, 1408),
    (8, 2, 4096),
    (10, 4, 4096),
    (64, 8, 4096),
    (32, 1, 4096),
    (128, 32, 4096),
];

/// The symbols of one code and their parity.
struct Block {
    k: usize,
    m: usize,
    symbol: usize,
    data: Vec<Vec<u8>>,
    parity: Vec<Vec<u8>>,
    /// Coefficients in row-major order.
    matrix: Vec<u8>,
}

impl Block {
    fn new(k: usize, m: usize, symbol: usize) -> Self {
        let byte = |i: usize, j: usize| ((i * 31 + j * 7) ^ ((i * j) >> 3)) as u8;
        let data: Vec<Vec<u8>> =
            (0..k).map(|i| (0..symbol).map(|j| byte(i, j)).collect()).collect();
        let mut parity = vec![vec![0; symbol]; m];
        encode(&mut Coder::default(), &data, &mut parity);
        // Encoding a single 1 yields that column of the matrix.
        let mut matrix = vec![0; m * k];
        for column in 0..k {
            let one: Vec<Vec<u8>> = (0..k).map(|i| vec![u8::from(i == column)]).collect();
            let mut out = vec![vec![0; 1]; m];
            encode(&mut Coder::default(), &one, &mut out);
            (0..m).for_each(|row| matrix[row * k + column] = out[row][0]);
        }
        Self { k, m, symbol, data, parity, matrix }
    }

    fn bytes(&self) -> usize {
        self.k * self.symbol
    }

    /// Decodes as usual with ISA-L: inverts the rows of survivors, then takes the rows of lost symbols.
    fn isal_decode(&self, isal: &Isal, lost: usize, outputs: &mut [Vec<u8>]) {
        let k = self.k;
        let mut survivors = vec![0; k * k];
        for row in 0..k - lost {
            survivors[row * k + row + lost] = 1;
        }
        survivors[(k - lost) * k..].copy_from_slice(&self.matrix[..lost * k]);
        let inverse = isal.invert(survivors, k);
        let tables = isal.tables(&inverse[..lost * k], k);
        let sources = self.data[lost..].iter().chain(&self.parity[..lost]);
        let sources: Vec<&[u8]> = sources.map(|symbol| &symbol[..]).collect();
        let mut outputs: Vec<&mut [u8]> = outputs.iter_mut().map(|out| &mut out[..]).collect();
        isal.multiply(&tables, &sources, &mut outputs);
    }

    /// Decodes with our kernel: the first `lost` data symbols, from the first parity symbols.
    fn decode(&self, coder: &mut Coder, lost: usize, outputs: &mut [Vec<u8>]) {
        let data = self.data.iter().enumerate().skip(lost);
        let present: Vec<(usize, &[u8])> = data.map(|(i, symbol)| (i, &symbol[..])).collect();
        let parity = self.parity.iter().enumerate().take(lost);
        let parity: Vec<(usize, &[u8])> = parity.map(|(i, symbol)| (i, &symbol[..])).collect();
        let outputs = outputs.iter_mut().enumerate();
        let mut missing: Vec<(usize, &mut [u8])> =
            outputs.map(|(i, out)| (i, &mut out[..])).collect();
        coder.decode(&present, &parity, &mut missing).unwrap();
    }
}

fn encode(coder: &mut Coder, data: &[Vec<u8>], parity: &mut [Vec<u8>]) {
    let data: Vec<&[u8]> = data.iter().map(|symbol| &symbol[..]).collect();
    let mut parity: Vec<&mut [u8]> = parity.iter_mut().map(|symbol| &mut symbol[..]).collect();
    coder.encode(&data, &mut parity).unwrap();
}

/// A crate that accepts any matrix, so that its output equals ours byte for byte.
fn rusty(block: &Block) -> rusty_erasure::Coder {
    let Block { k, m, .. } = block;
    let mut matrix = vec![0; (k + m) * k];
    (0..*k).for_each(|i| matrix[i * k + i] = 1);
    matrix[k * k..].copy_from_slice(&block.matrix);
    let matrix = rusty_erasure::Matrix::from_bytes(k + m, *k, matrix).unwrap();
    rusty_erasure::coder(matrix).unwrap()
}

fn name(kernel: Kernel) -> String {
    format!("sealane {kernel:?}").to_lowercase()
}

/// Measures, for every shape, encoding, and decoding of one lost symbol and of the maximum.
pub fn measure_all(rounds: u64) {
    let isal = Isal::load();
    if isal.is_none() {
        eprintln!("no libisal.so.2: ISA-L is left out");
    }
    for (k, m, symbol) in SHAPES {
        let block = Block::new(k, m, symbol);
        measure_encoding(rounds, &block, isal.as_ref());
        let mut losses = vec![1, 2, m];
        losses.retain(|lost| *lost <= m);
        losses.dedup();
        for lost in losses {
            measure_decoding(rounds, &block, lost, isal.as_ref());
        }
    }
}

fn measure_encoding(rounds: u64, block: &Block, isal: Option<&Isal>) {
    let Block { k, m, symbol, data, .. } = block;
    let mut cases = Vec::new();
    for kernel in Kernel::ALL {
        let Some(mut coder) = Coder::with_kernel(kernel) else {
            continue;
        };
        let mut parity = vec![vec![0; *symbol]; *m];
        encode(&mut coder, data, &mut parity);
        assert_eq!(parity, block.parity);
        cases.push(Case::new(name(kernel), move |_| encode(&mut coder, data, &mut parity)));
    }
    if let Some(isal) = isal {
        let tables = isal.tables(&block.matrix, *k);
        let mut parity = vec![vec![0; *symbol]; *m];
        let mut run = move || {
            let sources: Vec<&[u8]> = data.iter().map(|symbol| &symbol[..]).collect();
            let mut out: Vec<&mut [u8]> = parity.iter_mut().map(|out| &mut out[..]).collect();
            isal.multiply(&tables, &sources, &mut out);
            parity[*m - 1].clone()
        };
        assert_eq!(run(), block.parity[*m - 1], "ISA-L agrees");
        cases.push(Case::new("isa-l 2.30", move |_| {
            black_box(run());
        }));
    }
    let other = ReedSolomon::new(*k, *m).unwrap();
    let mut shards = data.clone();
    shards.resize(k + m, vec![0; *symbol]);
    cases.push(Case::new("reed-solomon-erasure", move |_| other.encode(&mut shards).unwrap()));
    let remade = rusty(block);
    let mut parity = vec![vec![0; *symbol]; *m];
    cases.push(Case::new("rusty_erasure", move |_| {
        let sources: Vec<&[u8]> = data.iter().map(|symbol| &symbol[..]).collect();
        let mut out: Vec<&mut [u8]> = parity.iter_mut().map(|out| &mut out[..]).collect();
        remade.encode(&sources, &mut out).unwrap();
    }));
    let mut encoder = reed_solomon_simd::ReedSolomonEncoder::new(*k, *m, *symbol).unwrap();
    cases.push(Case::new("reed-solomon-simd", move |_| {
        data.iter().for_each(|symbol| encoder.add_original_shard(symbol).unwrap());
        black_box(encoder.encode().unwrap().recovery(0));
    }));
    let shape = format!("({k}, {m}) {symbol} B");
    measure(rounds, "encode", &shape, block.bytes(), &mut cases);
}

fn measure_decoding(rounds: u64, block: &Block, lost: usize, isal: Option<&Isal>) {
    let Block { k, m, symbol, data, .. } = block;
    let mut cases = Vec::new();
    for kernel in Kernel::ALL {
        let Some(mut coder) = Coder::with_kernel(kernel) else {
            continue;
        };
        let mut outputs = vec![vec![0; *symbol]; lost];
        block.decode(&mut coder, lost, &mut outputs);
        assert_eq!(outputs, data[..lost]);
        cases.push(Case::new(name(kernel), move |_| {
            block.decode(&mut coder, lost, &mut outputs);
        }));
    }
    if let Some(isal) = isal {
        let mut outputs = vec![vec![0; *symbol]; lost];
        block.isal_decode(isal, lost, &mut outputs);
        assert_eq!(outputs, data[..lost]);
        cases.push(Case::new("isa-l 2.30", move |_| block.isal_decode(isal, lost, &mut outputs)));
    }
    let other = ReedSolomon::new(*k, *m).unwrap();
    let mut shards = data.clone();
    shards.resize(k + m, vec![0; *symbol]);
    other.encode(&mut shards).unwrap();
    cases.push(Case::new("reed-solomon-erasure", move |_| {
        let mut shards: Vec<_> =
            shards.iter_mut().enumerate().map(|(i, shard)| (&mut shard[..], i >= lost)).collect();
        other.reconstruct_data(&mut shards).unwrap();
    }));
    let remade = rusty(block);
    let mut outputs = vec![vec![0; *symbol]; lost];
    cases.push(Case::new("rusty_erasure", move |_| {
        let known = data.iter().chain(&block.parity).enumerate();
        let known = known.map(|(i, symbol)| (i >= lost).then_some(&symbol[..]));
        let known: Vec<Option<&[u8]>> = known.collect();
        let wanted: Vec<usize> = (0..lost).collect();
        let mut out: Vec<&mut [u8]> = outputs.iter_mut().map(|out| &mut out[..]).collect();
        remade.recover(&known, &wanted, &mut out).unwrap();
    }));
    let recovery = reed_solomon_simd::encode(*k, *m, data).unwrap();
    let mut decoder = reed_solomon_simd::ReedSolomonDecoder::new(*k, *m, *symbol).unwrap();
    cases.push(Case::new("reed-solomon-simd", move |_| {
        for (i, symbol) in data.iter().enumerate().skip(lost) {
            decoder.add_original_shard(i, symbol).unwrap();
        }
        for (i, symbol) in recovery.iter().enumerate().take(lost) {
            decoder.add_recovery_shard(i, symbol).unwrap();
        }
        black_box(decoder.decode().unwrap().restored_original(0));
    }));
    let shape = format!("({k}, {m}) {symbol} B, {lost} lost");
    measure(rounds, "decode", &shape, block.bytes(), &mut cases);
}
