//! The kernel for all other processors: multiplication by shifts, eight bytes per word.

use crate::field::POLYNOMIAL;

const WORDS: usize = 8;
const TILE_BYTES: usize = WORDS * 8;

type Tile = [u64; WORDS];

/// Like [`crate::kernels::multiply`], from byte `start` of each symbol on.
pub fn multiply(coefficients: &[u8], sources: &[&[u8]], outputs: &mut [&mut [u8]], start: usize) {
    let rows = outputs.len();
    let end = outputs.first().map_or(0, |output| output.len());
    let mut sums = vec![[0; WORDS]; rows];
    for at in (start..end).step_by(TILE_BYTES) {
        let width = TILE_BYTES.min(end - at);
        sums.fill([0; WORDS]);
        for (source, factors) in sources.iter().zip(coefficients.chunks_exact(rows)) {
            add_products(load(&source[at..at + width]), factors, &mut sums);
        }
        for (sum, output) in sums.iter().zip(outputs.iter_mut()) {
            store(sum, &mut output[at..at + width]);
        }
    }
}

/// Adds to each sum the product of `tile` and the sum's factor: the tile is doubled seven times,
/// and added to the sums whose factor has the corresponding bit.
fn add_products(mut tile: Tile, factors: &[u8], sums: &mut [Tile]) {
    for bit in 0..8 {
        for (factor, sum) in factors.iter().zip(sums.iter_mut()) {
            if factor >> bit & 1 == 1 {
                sum.iter_mut().zip(&tile).for_each(|(sum, word)| *sum ^= word);
            }
        }
        tile = tile.map(double_bytes);
    }
}

fn double_bytes(word: u64) -> u64 {
    let carries = word >> 7 & 0x0101_0101_0101_0101;
    ((word & 0x7f7f_7f7f_7f7f_7f7f) << 1) ^ (carries * u64::from(POLYNOMIAL))
}

fn load(bytes: &[u8]) -> Tile {
    let mut tile = [0; WORDS];
    for (word, bytes) in tile.iter_mut().zip(bytes.chunks(8)) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(padded);
    }
    tile
}

fn store(tile: &Tile, bytes: &mut [u8]) {
    for (word, bytes) in tile.iter().zip(bytes.chunks_mut(8)) {
        bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
    }
}
