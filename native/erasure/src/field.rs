//! GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1, the code's generator matrix, and its inversion.

/// Reduction polynomial, without its highest term.
pub const POLYNOMIAL: u8 = 0x1d;
/// Most data and parity symbols of a code together: each has its own field element, and the one
/// left over makes every difference between a parity and a data element nonzero.
pub const SYMBOLS_MAX: usize = 255;

/// Powers of the generator 2, repeated three times so that sums of three logarithms need no
/// reduction; and logarithms.
const TABLES: ([u8; 765], [u8; 256]) = exponents_and_logarithms();
static EXPONENTS: [u8; 765] = TABLES.0;
static LOGARITHMS: [u8; 256] = TABLES.1;

/// By factor: the 8 × 8 bit matrix of the multiplication, in the format of GF2P8AFFINEQB.
#[cfg(any(target_arch = "x86_64", test))]
pub static AFFINE: [u64; 256] = affine_matrices();
/// By factor: its products with 0 … 15, then with 0, 16, … 240, in the format of PSHUFB.
pub static NIBBLES: [[u8; 32]; 256] = nibble_products();

const fn double(value: u8) -> u8 {
    (value << 1) ^ if value & 0x80 == 0 { 0 } else { POLYNOMIAL }
}

const fn exponents_and_logarithms() -> ([u8; 765], [u8; 256]) {
    let mut exponents = [0; 765];
    let mut logarithms = [0; 256];
    let mut value = 1;
    let mut power = 0;
    while power < 765 {
        exponents[power] = value;
        if power < 255 {
            logarithms[value as usize] = power as u8;
        }
        value = double(value);
        power += 1;
    }
    (exponents, logarithms)
}

const fn product(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    TABLES.0[TABLES.1[a as usize] as usize + TABLES.1[b as usize] as usize]
}

#[cfg(any(target_arch = "x86_64", test))]
const fn affine_matrices() -> [u64; 256] {
    let mut matrices = [0; 256];
    let mut factor = 0;
    while factor < 256 {
        let mut column = 0;
        while column < 8 {
            let image = product(factor as u8, 1 << column);
            let mut row = 0;
            while row < 8 {
                // The matrix row for bit `row` of the product is byte 7 - row of the operand.
                let bit = (image >> row & 1) as u64;
                matrices[factor] |= bit << ((7 - row) * 8 + column);
                row += 1;
            }
            column += 1;
        }
        factor += 1;
    }
    matrices
}

const fn nibble_products() -> [[u8; 32]; 256] {
    let mut tables = [[0; 32]; 256];
    let mut factor = 0;
    while factor < 256 {
        let mut nibble = 0;
        while nibble < 16 {
            tables[factor][nibble] = product(factor as u8, nibble as u8);
            tables[factor][nibble + 16] = product(factor as u8, (nibble << 4) as u8);
            nibble += 1;
        }
        factor += 1;
    }
    tables
}

/// The coefficient of data symbol `data` in parity symbol `parity`: a Cauchy matrix with columns
/// scaled so that the first parity is the plain sum. Every square submatrix is invertible. It does
/// not depend on k or m, so a block with fewer data symbols is the same code with zeros for the
/// others. `data + parity` must be below [`SYMBOLS_MAX`].
pub fn coefficient(parity: usize, data: usize) -> u8 {
    exponent(log_scale(data) + 255 - logarithm(sum_parity_data(parity, data)))
}

/// The coefficients that restore missing data symbols from the `present` ones and as many `parity`
/// symbols as are `missing`, all different. The code evaluates a polynomial of k coefficients at
/// k + m points, up to a factor at each; Lagrange's formula over the known points gives the value
/// at another.
#[derive(Debug)]
pub struct Restoration {
    /// Points and the logarithms of their factors, for missing and for known symbols.
    missing: Vec<(u8, usize)>,
    known: Vec<(u8, usize)>,
}

impl Restoration {
    /// Prepares the coefficients; the work is proportional to symbols times missing symbols.
    pub fn new(present: &[usize], parity: &[usize], missing: &[usize]) -> Self {
        let lost: Vec<u8> = missing.iter().map(|i| *i as u8).collect();
        let spare: Vec<u8> = parity.iter().map(|i| (255 - i) as u8).collect();
        let of_missing = missing.iter().map(|i| {
            let point = *i as u8;
            let over = log_distances(point, &spare);
            (point, quotient(over, log_distances(point, &lost) + log_scale(*i)))
        });
        let of_present = present.iter().map(|i| {
            let point = *i as u8;
            let over = log_distances(point, &lost) + log_scale(*i);
            (point, quotient(over, log_distances(point, &spare)))
        });
        let of_parity = spare.iter().map(|point| {
            let over = log_distances(*point, &lost);
            (*point, quotient(over, log_distances(*point, &spare)))
        });
        Self { missing: of_missing.collect(), known: of_present.chain(of_parity).collect() }
    }

    /// The coefficient of a known symbol (first the present ones, then the parity) in a missing
    /// one.
    pub fn coefficient(&self, missing: usize, known: usize) -> u8 {
        let (to, to_factor) = self.missing[missing];
        let (from, from_factor) = self.known[known];
        exponent(to_factor + from_factor + 255 - logarithm(to ^ from))
    }
}

/// The logarithm of the product of the differences between a point and others, omitting the point
/// itself.
fn log_distances(point: u8, others: &[u8]) -> usize {
    let others = others.iter().filter(|other| **other != point);
    others.map(|other| logarithm(point ^ other)).sum()
}

/// The logarithm of the scale factor of column `data` of the matrix.
fn log_scale(data: usize) -> usize {
    logarithm(sum_parity_data(0, data))
}

/// The difference, which equals the sum, of the elements of a parity symbol (255, 254, …) and a
/// data symbol (0, 1, …).
fn sum_parity_data(parity: usize, data: usize) -> u8 {
    ((255 - parity) ^ data) as u8
}

/// The logarithm of a quotient, given logarithms; below 255.
fn quotient(over: usize, under: usize) -> usize {
    (over + 255 - under % 255) % 255
}

fn logarithm(value: u8) -> usize {
    usize::from(LOGARITHMS[usize::from(value)])
}

fn exponent(power: usize) -> u8 {
    EXPONENTS[power]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Textbook multiplication: shift and reduce.
    fn naive_product(mut a: u8, mut b: u8) -> u8 {
        let mut product = 0;
        while b != 0 {
            if b & 1 == 1 {
                product ^= a;
            }
            a = double(a);
            b >>= 1;
        }
        product
    }

    #[test]
    fn all_tables_multiply() {
        for a in 0..=255_u8 {
            for b in 0..=255_u8 {
                let expected = naive_product(a, b);
                assert_eq!(product(a, b), expected);
                let [low, high] = [usize::from(b & 15), usize::from(b >> 4)];
                let table = &NIBBLES[usize::from(a)];
                assert_eq!(table[low] ^ table[16 + high], expected);
                let bit = |row: u32| {
                    let mask = (AFFINE[usize::from(a)] >> ((7 - row) * 8)) as u8;
                    ((mask & b).count_ones() as u8 & 1) << row
                };
                assert_eq!((0..8).map(bit).sum::<u8>(), expected);
            }
        }
    }

    #[test]
    fn the_first_parity_is_the_plain_sum_and_no_coefficient_is_zero() {
        for data in 0..SYMBOLS_MAX - 1 {
            assert_eq!(coefficient(0, data), 1);
            for parity in 0..SYMBOLS_MAX - data {
                assert_ne!(coefficient(parity, data), 0);
            }
        }
    }

    #[test]
    fn restoring_undoes_the_matrix() {
        let cases: [(usize, &[usize], &[usize]); 4] = [
            (6, &[0], &[5]),
            (32, &[3, 1], &[0, 31]),
            (32, &[0, 1, 2, 3, 4, 5, 6, 7], &[0, 4, 9, 11, 17, 20, 30, 31]),
            (155, &[7, 99, 9], &[2, 150, 1]),
        ];
        for (k, parity, missing) in cases {
            let present: Vec<usize> = (0..k).filter(|i| !missing.contains(i)).collect();
            let restoration = Restoration::new(&present, parity, missing);
            for (row, lost) in missing.iter().enumerate() {
                // The total coefficient of every data symbol in the value computed for the lost
                // one.
                for data in 0..k {
                    let place = present.iter().position(|i| *i == data);
                    let direct = place.map_or(0, |place| restoration.coefficient(row, place));
                    let through = parity.iter().enumerate().map(|(i, parity)| {
                        let factor = restoration.coefficient(row, present.len() + i);
                        product(factor, coefficient(*parity, data))
                    });
                    let sum = through.fold(direct, |sum, term| sum ^ term);
                    assert_eq!(sum, u8::from(data == *lost), "{parity:?} {missing:?} {data}");
                }
            }
        }
    }
}
