//! Tests the code against textbook arithmetic, with every kernel that this processor supports.

use proptest::prelude::*;
use sealane_erasure::{Coder, ErasureError, Kernel, SYMBOLS_MAX};

fn product(mut a: u8, mut b: u8) -> u8 {
    let mut sum = 0;
    while b != 0 {
        sum ^= if b & 1 == 1 { a } else { 0 };
        a = (a << 1) ^ if a & 0x80 == 0 { 0 } else { 0x1d };
        b >>= 1;
    }
    sum
}

fn inverse(a: u8) -> u8 {
    (1..=255).find(|b| product(a, *b) == 1).expect("a is not 0")
}

/// Parity as defined in docs/formats/session-wire.md.
fn reference_parity(data: &[Vec<u8>], m: usize) -> Vec<Vec<u8>> {
    let length = data[0].len();
    let row = |i: usize| {
        let mut parity = vec![0; length];
        for (j, symbol) in data.iter().enumerate() {
            let factor = product(255 ^ j as u8, inverse((255 - i) as u8 ^ j as u8));
            parity.iter_mut().zip(symbol).for_each(|(sum, byte)| *sum ^= product(factor, *byte));
        }
        parity
    };
    (0..m).map(row).collect()
}

fn coders() -> impl Iterator<Item = (Kernel, Coder)> {
    Kernel::ALL.into_iter().filter_map(|kernel| Some((kernel, Coder::with_kernel(kernel)?)))
}

fn symbols(count: usize, length: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut state = seed | 1;
    let mut byte = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..count).map(|_| (0..length).map(|_| byte()).collect()).collect()
}

/// The same bytes at an odd address, so that nothing is aligned.
fn shifted(symbols: &[Vec<u8>], by: usize) -> Vec<Vec<u8>> {
    symbols.iter().map(|symbol| [&vec![0xee; by][..], symbol].concat()).collect()
}

fn encode(coder: &mut Coder, data: &[Vec<u8>], m: usize) -> Vec<Vec<u8>> {
    let mut parity = vec![vec![0xaa; data[0].len()]; m];
    let sources: Vec<&[u8]> = data.iter().map(|symbol| &symbol[..]).collect();
    let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|out| &mut out[..]).collect();
    coder.encode(&sources, &mut outputs).unwrap();
    parity
}

/// Decodes with the remaining symbols (data first) and returns all data.
fn decode(
    coder: &mut Coder,
    is_left: &[bool],
    data: &[Vec<u8>],
    parity: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, ErasureError> {
    let mut out: Vec<Vec<u8>> = data.to_vec();
    let mut present = Vec::new();
    let mut missing = Vec::new();
    for (i, symbol) in out.iter_mut().enumerate() {
        if is_left[i] {
            present.push((i, &symbol[..]));
        } else {
            symbol.fill(0x55);
            missing.push((i, &mut symbol[..]));
        }
    }
    let parity = parity.iter().enumerate().filter(|(i, _)| is_left[data.len() + i]);
    let parity: Vec<(usize, &[u8])> = parity.map(|(i, symbol)| (i, &symbol[..])).collect();
    coder.decode(&present, &parity, &mut missing)?;
    Ok(out)
}

#[test]
fn this_machine_tries_more_than_the_portable_kernel() {
    // At least on x86-64 CI machines, and on every aarch64.
    let has_others = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));
    assert!(!has_others || coders().count() > 1);
}

#[test]
fn small_codes_decode_exactly_when_k_symbols_are_left_for_every_pattern() {
    for (k, m) in [(1, 1), (1, 4), (4, 1), (4, 2), (3, 5), (8, 3), (5, 7)] {
        let data = symbols(k, 67, 3);
        for (kernel, mut coder) in coders() {
            let parity = encode(&mut coder, &data, m);
            assert_eq!(parity, reference_parity(&data, m), "{kernel:?}");
            for pattern in 0..1_u32 << (k + m) {
                let is_left: Vec<bool> = (0..k + m).map(|bit| pattern >> bit & 1 == 1).collect();
                let decoded = decode(&mut coder, &is_left, &data, &parity);
                let expected =
                    if pattern.count_ones() as usize >= k || is_left[..k].iter().all(|is| *is) {
                        Ok(data.clone())
                    } else {
                        Err(ErasureError::TooFew)
                    };
                assert_eq!(decoded, expected, "{kernel:?} ({k}, {m}) {pattern:b}");
            }
        }
    }
}

#[test]
fn every_length_around_a_vector_is_coded_like_the_reference() {
    for length in (0..=200).chain([255, 256, 257, 511, 512, 513, 1408, 1409]) {
        let data = symbols(5, length, 9);
        let expected = reference_parity(&data, 15);
        for (kernel, mut coder) in coders() {
            for by in [0, 1, 7, 63] {
                let moved = shifted(&data, by);
                let sources: Vec<&[u8]> = moved.iter().map(|symbol| &symbol[by..]).collect();
                let mut out = vec![vec![0x77; length + by + 1]; 15];
                let mut outputs: Vec<&mut [u8]> =
                    out.iter_mut().map(|out| &mut out[by..by + length]).collect();
                coder.encode(&sources, &mut outputs).unwrap();
                for (out, expected) in out.iter().zip(&expected) {
                    assert_eq!(&out[by..by + length], expected, "{kernel:?} {length}");
                    let around = out[..by].iter().chain(&out[by + length..]);
                    assert!(around.copied().all(|byte| byte == 0x77), "{kernel:?} wrote outside");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_k_symbols_are_enough_with_every_kernel(
        k in 1_usize..200, m in 1_usize..56, length in 1_usize..300, seed: u64,
        order in proptest::collection::vec(any::<u32>(), SYMBOLS_MAX),
    ) {
        let data = symbols(k, length, seed);
        let mut ranked: Vec<usize> = (0..k + m).collect();
        ranked.sort_by_key(|i| order[*i]);
        let mut is_left = vec![false; k + m];
        ranked.iter().take(k).for_each(|i| is_left[*i] = true);
        let expected = reference_parity(&data, m);
        for (kernel, mut coder) in coders() {
            let parity = encode(&mut coder, &data, m);
            prop_assert_eq!(&parity, &expected, "{:?}", kernel);
            prop_assert_eq!(decode(&mut coder, &is_left, &data, &parity), Ok(data.clone()));
        }
    }
}

#[test]
fn the_largest_codes_decode() {
    for (k, m) in [(254, 1), (1, 254), (127, 128), (200, 55)] {
        let data = symbols(k, 33, 11);
        for (_, mut coder) in coders() {
            let parity = encode(&mut coder, &data, m);
            // As many data symbols are lost as parity can restore.
            let lost = m.min(k);
            let is_left: Vec<bool> = (0..k + m).map(|i| i >= lost).collect();
            assert_eq!(
                decode(&mut coder, &is_left, &data, &parity),
                Ok(data.clone()),
                "({k}, {m})"
            );
        }
    }
}

#[test]
fn a_block_with_fewer_symbols_is_the_same_code_with_zeros() {
    let short = symbols(3, 40, 5);
    let mut padded = short.clone();
    padded.resize(9, vec![0; 40]);
    let mut coder = Coder::default();
    assert_eq!(encode(&mut coder, &short, 4), encode(&mut coder, &padded, 4));
}

#[test]
fn the_first_parity_symbol_is_the_sum() {
    let data = symbols(6, 50, 8);
    let sum = data.iter().fold(vec![0; 50], |sum, symbol| {
        sum.iter().zip(symbol).map(|(a, b)| a ^ b).collect::<Vec<u8>>()
    });
    assert_eq!(encode(&mut Coder::default(), &data, 3)[0], sum);
}

#[test]
fn bad_shapes_are_refused_and_leave_the_coder_usable() {
    let mut coder = Coder::default();
    let zeros = [0; 4];
    let (mut a, mut b, mut short) = ([1; 4], [1; 4], [1; 3]);
    assert_eq!(coder.encode(&[], &mut [&mut a]), Err(ErasureError::Shape));
    assert_eq!(coder.encode(&[], &mut [&mut []]), Err(ErasureError::Shape));
    assert_eq!(coder.encode(&[&zeros], &mut []), Err(ErasureError::Shape));
    assert_eq!(coder.encode(&[&zeros, &zeros[1..]], &mut [&mut a]), Err(ErasureError::Shape));
    assert_eq!(coder.encode(&[&zeros], &mut [&mut a, &mut short]), Err(ErasureError::Shape));
    assert_eq!(coder.encode(&[&zeros[..]; 255], &mut [&mut a]), Err(ErasureError::Shape));
    let decode = |coder: &mut Coder, present: &[usize], parity: &[usize], lost: [usize; 2]| {
        let symbol = |i: &usize| (*i, &zeros[..]);
        let present: Vec<_> = present.iter().map(symbol).collect();
        let parity: Vec<_> = parity.iter().map(symbol).collect();
        let (mut a, mut b) = ([1; 4], [1; 4]);
        coder.decode(&present, &parity, &mut [(lost[0], &mut a), (lost[1], &mut b)])
    };
    assert_eq!(decode(&mut coder, &[0], &[0, 1], [1, 1]), Err(ErasureError::Index));
    assert_eq!(decode(&mut coder, &[1], &[0, 1], [1, 2]), Err(ErasureError::Index));
    assert_eq!(decode(&mut coder, &[0], &[0, 0], [1, 2]), Err(ErasureError::Index));
    assert_eq!(decode(&mut coder, &[0], &[0, 1], [1, 3]), Err(ErasureError::Index));
    assert_eq!(decode(&mut coder, &[0], &[0, 252], [1, 2]), Err(ErasureError::Index));
    assert_eq!(decode(&mut coder, &[0], &[0, usize::MAX], [1, 2]), Err(ErasureError::Index));
    assert_eq!(decode(&mut coder, &[0], &[5], [1, 2]), Err(ErasureError::TooFew));
    assert_eq!(decode(&mut coder, &[0], &[0, 251], [1, 2]), Ok(()));
    let lost = &mut [(0, &mut a[..]), (1, &mut short[..])];
    assert_eq!(coder.decode(&[], &[(0, &zeros), (1, &zeros)], lost), Err(ErasureError::Shape));
    assert_eq!(coder.decode(&[], &[], &mut []), Err(ErasureError::Shape));
    assert_eq!(coder.encode(&[&zeros], &mut [&mut a, &mut b]), Ok(()));
    assert_eq!((a, b), (zeros, zeros));
}

#[test]
fn parity_is_that_of_the_vectors() {
    // Generated by tests/reference/erasure.py.
    let lines = include_str!("vectors.txt").lines();
    assert_eq!(lines.clone().count(), 6);
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        let [k, m, length] = [0, 1, 2].map(|i| words[i].parse::<usize>().unwrap());
        let byte = |i: usize, j: usize| ((i * 37 + j * 101 + i * j) % 256) as u8;
        let data: Vec<Vec<u8>> =
            (0..k).map(|i| (0..length).map(|j| byte(i, j)).collect()).collect();
        let bytes = |word: &&str| -> Vec<u8> {
            (0..length).map(|i| u8::from_str_radix(&word[2 * i..2 * i + 2], 16).unwrap()).collect()
        };
        let expected: Vec<Vec<u8>> = words[3..].iter().map(bytes).collect();
        for (_, mut coder) in coders() {
            assert_eq!(encode(&mut coder, &data, m), expected, "({k}, {m}) {length}");
        }
    }
}
