//! Node functions of a Merkle tree: a leaf page of 4096 bytes, 16 children of 16 bytes, and one changed entry
//! of 12 bytes. Only sums can be updated from the entry without the rest of the page.

use std::hint::black_box;

use aegis::aegis128x4::Aegis128X4Mac;
use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Aes256, Block};
use aws_lc_rs::aead as aws;
use polyval::{Polyval, universal_hash::UniversalHash};

use crate::aead::{KEY, nonce};
use crate::{Case, measure};

const PAGE: [u8; 4096] = [5; 4096];

/// The sum of the encrypted blocks, each an index and 12 bytes.
fn summed<C: BlockCipherEncrypt<BlockSize = aes::cipher::consts::U16>>(
    cipher: &C,
    message: &[u8],
) -> u128 {
    let mut sum = 0;
    let mut blocks = [Block::default(); 64];
    for (first, part) in message.chunks(64 * 12).enumerate() {
        let count = part.len().div_ceil(12);
        for (index, (block, chunk)) in blocks.iter_mut().zip(part.chunks(12)).enumerate() {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&((first * 64 + index) as u32).to_le_bytes());
            bytes[4..4 + chunk.len()].copy_from_slice(chunk);
            *block = bytes.into();
        }
        cipher.encrypt_blocks(&mut blocks[..count]);
        sum = blocks[..count]
            .iter()
            .fold(sum, |sum, block| sum ^ u128::from_le_bytes((*block).into()));
    }
    sum
}

/// The sum of the encrypted 16-byte blocks, each masked by its position.
fn masked<C: BlockCipherEncrypt<BlockSize = aes::cipher::consts::U16>>(
    cipher: &C,
    masks: &[u128],
    message: &[u8],
) -> u128 {
    let mut sum = 0;
    let mut blocks = [Block::default(); 64];
    for (part, masks) in message.chunks(64 * 16).zip(masks.chunks(64)) {
        let count = part.len() / 16;
        for ((block, chunk), mask) in blocks.iter_mut().zip(part.as_chunks::<16>().0).zip(masks) {
            *block = (u128::from_le_bytes(*chunk) ^ mask).to_le_bytes().into();
        }
        cipher.encrypt_blocks(&mut blocks[..count]);
        sum = blocks[..count]
            .iter()
            .fold(sum, |sum, block| sum ^ u128::from_le_bytes((*block).into()));
    }
    sum
}

/// Measures all node functions.
pub fn measure_all(rounds: u64) {
    let aes256 = Aes256::new(&Array::from(KEY));
    let aes128 = Aes128::new(&Array::from([7; 16]));
    let gmac = aws::LessSafeKey::new(aws::UnboundKey::new(&aws::AES_256_GCM, &KEY).unwrap());
    let aegis = Aegis128X4Mac::<16>::new(&[7; 16]);
    let masks: Vec<u128> = (0..256).map(|place: u128| place * 0x0123_4567_89ab_cdef).collect();
    let polyval = Polyval::new(&Array::from([7; 16]));
    for (what, message) in [("leaf page", &PAGE[..]), ("16 children", &PAGE[..256])] {
        let gmac = |number| {
            let nonce = aws::Nonce::assume_unique_for_key(nonce(number));
            let tag = gmac.seal_in_place_separate_tag(nonce, aws::Aad::from(message), &mut []);
            let _ = black_box(tag.unwrap());
        };
        let polyval = |_| {
            let mut hash = polyval.clone();
            hash.update_padded(black_box(message));
            black_box(hash.finalize());
        };
        let aegis = |_| {
            let mut mac = aegis.clone();
            mac.update(black_box(message));
            black_box(mac.finalize());
        };
        let mut cases: [Case<'_>; 8] = [
            Case::new("BLAKE3 keyed", |_| {
                black_box(blake3::keyed_hash(&KEY, black_box(message)));
            }),
            Case::new("GMAC (aws-lc-rs)", gmac),
            Case::new("AEGIS-128X4 MAC", aegis),
            Case::new("POLYVAL", polyval),
            Case::new("AES-256 sum", |_| {
                black_box(summed(&aes256, black_box(message)));
            }),
            Case::new("AES-128 sum", |_| {
                black_box(summed(&aes128, black_box(message)));
            }),
            Case::new("AES-256 masked sum", |_| {
                black_box(masked(&aes256, &masks, black_box(message)));
            }),
            Case::new("AES-128 masked sum", |_| {
                black_box(masked(&aes128, &masks, black_box(message)));
            }),
        ];
        measure(rounds, "node", what, message.len(), &mut cases);
    }
    let mut node = Block::default();
    let (mut clear, mut both) = ([Block::default(); 2], [Block::default(); 2]);
    let mut many = [Block::default(); 256];
    let mut cases: [Case<'_>; 3] = [
        Case::new("AES-256, sum in clear", |_| {
            aes256.encrypt_blocks(black_box(&mut clear));
        }),
        Case::new("AES-256, sum encrypted", |_| {
            aes256.decrypt_block(&mut node);
            aes256.encrypt_blocks(black_box(&mut both));
            aes256.encrypt_block(black_box(&mut node));
        }),
        Case::new("AES-256, 128 sums", |_| {
            aes256.encrypt_blocks(black_box(&mut many));
        }),
    ];
    measure(rounds, "node", "one changed entry", 12, &mut cases);
}
