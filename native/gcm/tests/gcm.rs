//! Tests the kernel against NIST's vectors and against a library. If the processor doesn't support
//! it, there is nothing to test.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use proptest::prelude::*;
use sealane_gcm::{Key, NotAuthentic, TAG_BYTES};

fn bytes(hex: &str) -> Vec<u8> {
    let hex = hex.trim_start_matches('-');
    let digits = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("two digits");
    (0..hex.len()).step_by(2).map(digits).collect()
}

fn keys(secret: &[u8; 32]) -> Option<(Key, LessSafeKey)> {
    let unbound = UnboundKey::new(&AES_256_GCM, secret).unwrap();
    Some((Key::new(secret)?, LessSafeKey::new(unbound)))
}

fn library_seal(key: &LessSafeKey, nonce: [u8; 12], aad: &[u8], data: &mut [u8]) -> [u8; 16] {
    let nonce = Nonce::assume_unique_for_key(nonce);
    let tag = key.seal_in_place_separate_tag(nonce, Aad::from(aad), data).unwrap();
    tag.as_ref().try_into().unwrap()
}

/// Bytes that vary with the position.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Compares sealing with the library, and opens the result in every way.
fn compare(keys: &(Key, LessSafeKey), nonce: [u8; 12], aad: &[u8], plaintext: &[u8], at: usize) {
    let (key, library) = keys;
    let mut expected = plaintext.to_vec();
    let tag = library_seal(library, nonce, aad, &mut expected);
    let mut buffer = pattern(9, at + plaintext.len() + 70);
    let rest = buffer.clone();
    let (before, behind) = (at, at + plaintext.len());
    buffer[before..behind].copy_from_slice(plaintext);
    assert_eq!(key.seal(&nonce, aad, &mut buffer[before..behind]), tag);
    assert!(buffer[before..behind] == expected);
    let mut made = pattern(7, plaintext.len());
    assert_eq!(key.seal_into(&nonce, aad, plaintext, &mut made), tag);
    assert!(made == expected);
    assert_eq!(key.tag(&nonce, aad, &expected), tag);
    let hashed = key.seal(&nonce, aad, &mut []);
    for blocks in 0..=(aad.len() / 16).min(4) {
        let (first, last) = aad.split_at(blocks * 16);
        assert_eq!(key.tag_of_pieces(&nonce, [first, last]), hashed, "{blocks} blocks");
    }
    for (place, block) in plaintext.chunks_exact(16).enumerate().step_by(7) {
        let made = key.keystream(&nonce, place as u32);
        let combined: Vec<u8> = block.iter().zip(made).map(|(a, b)| a ^ b).collect();
        assert!(combined == expected[place * 16..][..16], "block {place}");
    }
    let mut opened = pattern(8, plaintext.len());
    assert_eq!(key.open(&nonce, aad, &expected, &tag, &mut opened), Ok(()));
    assert!(opened == plaintext);
    assert_eq!(key.open_in_place(&nonce, aad, &mut buffer[before..behind], &tag), Ok(()));
    assert!(buffer[before..behind] == *plaintext);
    let untouched = buffer[..before] == rest[..before] && buffer[behind..] == rest[behind..];
    assert!(untouched, "bytes outside the message must not change");
}

#[test]
fn vectors_of_the_validation_program() {
    let mut count = 0;
    for line in include_str!("vectors/gcmEncryptExtIV256.txt").lines() {
        let fields: Vec<_> = line.split(' ').map(bytes).collect();
        let [secret, nonce, plaintext, aad, ciphertext, tag] = &fields[..] else {
            panic!("{line}")
        };
        let Some(key) = Key::new(&secret[..].try_into().unwrap()) else { return };
        let nonce: [u8; 12] = nonce[..].try_into().unwrap();
        let mut data = plaintext.clone();
        let made = key.seal(&nonce, aad, &mut data);
        assert_eq!((&made[..], &data), (&tag[..], ciphertext), "{line}");
        assert_eq!(key.open_in_place(&nonce, aad, &mut data, &made), Ok(()));
        assert_eq!(&data, plaintext);
        count += 1;
    }
    assert_eq!(count, 100);
}

/// Every length up to a large unit, and every length of additional data up to a vector.
#[test]
fn every_length_gives_what_the_library_gives() {
    let Some(keys) = keys(&[7; 32]) else { return };
    let plaintext = pattern(1, 9100);
    let aad = pattern(2, 64);
    for length in 0..=plaintext.len() {
        let nonce = (length as u128 * 0x0101_0101_0301).to_le_bytes()[..12].try_into().unwrap();
        compare(&keys, nonce, &aad[..length % 65], &plaintext[..length], length % 64);
    }
    for aad_bytes in 0..=64 {
        for length in [0, 1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1408] {
            compare(&keys, [3; 12], &aad[..aad_bytes], &plaintext[..length], 0);
        }
    }
}

#[test]
fn long_messages_and_long_additional_data_do_too() {
    let Some(keys) = keys(&[5; 32]) else { return };
    let long = pattern(3, (1 << 20) + 77);
    compare(&keys, [0xff; 12], &[], &long, 3);
    for aad_bytes in [65, 511, 512, 513, 575, 1024, 4160, 100_001] {
        compare(&keys, [1; 12], &long[..aad_bytes], &long[..aad_bytes % 700], 1);
    }
}

#[test]
fn a_wrong_tag_is_refused_and_leaves_zeros() {
    let Some((key, _)) = keys(&[1; 32]) else { return };
    for length in [0, 1, 64, 700, 1408] {
        let plaintext = pattern(4, length);
        let mut sealed = plaintext.clone();
        let tag = key.seal(&[1; 12], b"header", &mut sealed);
        for bit in 0..8 * TAG_BYTES {
            let mut wrong = tag;
            wrong[bit / 8] ^= 1 << (bit % 8);
            let mut data = sealed.clone();
            let opened = key.open_in_place(&[1; 12], b"header", &mut data, &wrong);
            assert_eq!((opened, data), (Err(NotAuthentic), vec![0; length]), "bit {bit}");
            let mut out = pattern(5, length);
            let opened = key.open(&[1; 12], b"header", &sealed, &wrong, &mut out);
            assert_eq!((opened, out), (Err(NotAuthentic), vec![0; length]), "bit {bit}");
        }
        for (nonce, aad) in
            [([2; 12], &b"header"[..]), ([1; 12], b"Header"), ([1; 12], b"header\0")]
        {
            let opened = key.open_in_place(&nonce, aad, &mut sealed.clone(), &tag);
            assert_eq!(opened, Err(NotAuthentic));
        }
        for at in (0..length).step_by(13) {
            let mut flipped = sealed.clone();
            flipped[at] ^= 0x10;
            let opened = key.open_in_place(&[1; 12], b"header", &mut flipped, &tag);
            assert_eq!(opened, Err(NotAuthentic), "byte {at}");
        }
    }
}

#[test]
#[should_panic(expected = "equally long")]
fn opening_into_a_shorter_buffer_is_a_mistake() {
    let key = Key::new(&[1; 32]).expect("equally long: nothing to test without the kernel");
    let _ = key.open(&[0; 12], b"", &[0; 17], &[0; 16], &mut [0; 16]);
}

#[test]
#[should_panic(expected = "equally long")]
fn sealing_into_a_shorter_buffer_is_a_mistake() {
    let key = Key::new(&[1; 32]).expect("equally long: nothing to test without the kernel");
    let _ = key.seal_into(&[0; 12], b"", &[0; 17], &mut [0; 16]);
}

#[test]
#[should_panic(expected = "only the last block may be partial")]
fn a_partial_block_between_pieces_is_a_mistake() {
    let key = Key::new(&[1; 32]).expect("only the last block may be partial: no kernel");
    let _ = key.tag_of_pieces(&[0; 12], [&[0; 17], &[0; 15]]);
}

#[test]
fn a_key_is_not_printed() {
    let Some(key) = Key::new(&[0xab; 32]) else { return };
    assert_eq!(format!("{key:?}"), "Key(…)");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_key_and_nonce(
        secret: [u8; 32],
        nonce: [u8; 12],
        aad in proptest::collection::vec(any::<u8>(), 0..130),
        (length, at) in (0_usize..2000, 0_usize..64),
        seed: u64,
    ) {
        if let Some(keys) = keys(&secret) {
            compare(&keys, nonce, &aad, &pattern(seed, length), at);
        }
    }
}
