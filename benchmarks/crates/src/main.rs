//! Times the crates that were compared for docs/decisions 2, 3 and 24: rounds interleaved, medians.

mod node;

use std::hint::black_box;
use std::time::Instant;

use aes_gcm::aead::{AeadInPlace, KeyInit};
use reed_solomon_erasure::galois_8::ReedSolomon;

const ROUNDS: usize = 31;
const KEY: [u8; 32] = [7; 32];
const DATA: usize = 32;
const PARITY: usize = 8;
const SYMBOL: usize = 1408;

/// A named piece of work; the number makes nonces differ.
type Case<'a> = (&'a str, Box<dyn FnMut(u64) + 'a>);

/// Runs all cases in turn, `calls` at a time; gives the median nanoseconds per call of each.
fn medians(cases: &mut [Case<'_>], calls: u64) -> Vec<f64> {
    let mut times = vec![Vec::with_capacity(ROUNDS); cases.len()];
    for round in 0..ROUNDS as u64 {
        for ((_, work), times) in cases.iter_mut().zip(&mut times) {
            let start = Instant::now();
            (0..calls).for_each(|call| work(round * calls + call));
            times.push(start.elapsed().as_nanos() as f64 / calls as f64);
        }
    }
    times
        .into_iter()
        .map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
        .collect()
}

fn report(what: &str, bytes: usize, cases: &mut [Case<'_>], calls: u64) {
    println!("{what}");
    let medians = medians(cases, calls);
    for ((name, _), nanos) in cases.iter().zip(medians) {
        let rate = bytes as f64 / nanos;
        println!("  {name:<24} {nanos:>10.0} ns {rate:>8.2} GB/s");
        eprintln!(r#"{{"what": "{what}", "crate": "{name}", "nanos": {nanos:.1}}}"#);
    }
}

fn nonce(number: u64) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&number.to_le_bytes());
    nonce
}

fn sealing(what: &str, data_bytes: usize, aad_bytes: usize) {
    use aws_lc_rs::aead as aws;
    use ring::aead as ringed;
    let aws_key = aws::LessSafeKey::new(aws::UnboundKey::new(&aws::AES_256_GCM, &KEY).unwrap());
    let ring_key =
        ringed::LessSafeKey::new(ringed::UnboundKey::new(&ringed::AES_256_GCM, &KEY).unwrap());
    let rust_key = aes_gcm::Aes256Gcm::new_from_slice(&KEY).unwrap();
    let aad = vec![3; aad_bytes];
    let (mut a, mut b, mut c) = (
        vec![1; data_bytes],
        vec![1; data_bytes],
        vec![1; data_bytes],
    );
    let mut cases: [Case<'_>; 3] = [
        (
            "aws-lc-rs",
            Box::new(|number| {
                let nonce = aws::Nonce::assume_unique_for_key(nonce(number));
                black_box(aws_key.seal_in_place_separate_tag(nonce, aws::Aad::from(&aad), &mut a))
                    .unwrap();
            }),
        ),
        (
            "ring",
            Box::new(|number| {
                let nonce = ringed::Nonce::assume_unique_for_key(nonce(number));
                black_box(ring_key.seal_in_place_separate_tag(
                    nonce,
                    ringed::Aad::from(&aad),
                    &mut b,
                ))
                .unwrap();
            }),
        ),
        (
            "aes-gcm",
            Box::new(|number| {
                black_box(rust_key.encrypt_in_place_detached(&nonce(number).into(), &aad, &mut c))
                    .unwrap();
            }),
        ),
    ];
    report(what, data_bytes.max(aad_bytes), &mut cases, 500);
}

fn erasure() {
    let data: Vec<Vec<u8>> = (0..DATA)
        .map(|i| (0..SYMBOL).map(|j| (i * 31 + j * 7) as u8).collect())
        .collect();
    let other = ReedSolomon::new(DATA, PARITY).unwrap();
    let mut shards = data.clone();
    shards.resize(DATA + PARITY, vec![0; SYMBOL]);
    other.encode(&mut shards).unwrap();
    let coded = reed_solomon_simd::encode(DATA, PARITY, &data).unwrap();
    let bytes = DATA * SYMBOL;
    let mut encoding: [Case<'_>; 2] = [
        (
            "reed-solomon-simd",
            Box::new(|_| {
                black_box(reed_solomon_simd::encode(DATA, PARITY, &data)).unwrap();
            }),
        ),
        (
            "reed-solomon-erasure",
            Box::new(|_| black_box(other.encode(&mut shards)).unwrap()),
        ),
    ];
    report("encode (32, 8), 1408 B", bytes, &mut encoding, 20);
    drop(encoding);
    for lost in [1, PARITY] {
        let kept: Vec<_> = data.iter().enumerate().skip(lost).collect();
        let spare: Vec<_> = coded.iter().enumerate().take(lost).collect();
        let mut cases: [Case<'_>; 2] = [
            (
                "reed-solomon-simd",
                Box::new(|_| {
                    let (kept, spare) = (kept.iter().copied(), spare.iter().copied());
                    black_box(reed_solomon_simd::decode(DATA, PARITY, kept, spare)).unwrap();
                }),
            ),
            (
                "reed-solomon-erasure",
                Box::new(|_| {
                    let mut shards: Vec<_> = shards.iter().cloned().map(Some).collect();
                    shards[..lost].fill(None);
                    black_box(other.reconstruct_data(&mut shards)).unwrap();
                }),
            ),
        ];
        report(
            &format!("decode (32, 8), 1408 B, {lost} lost"),
            bytes,
            &mut cases,
            10,
        );
    }
}

fn main() {
    sealing("seal 4096 B, 32 B AAD", 4096, 32);
    sealing("seal 1408 B, 32 B AAD", 1408, 32);
    sealing("GMAC over 4160 B", 0, 4160);
    erasure();
    node::functions();
}
