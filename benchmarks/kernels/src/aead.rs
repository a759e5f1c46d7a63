//! AES-256-GCM for a packet, a sector and a large unit, and GMAC over a sector: the product's kernel and
//! other libraries.

use std::hint::black_box;

use aes_gcm::aead::{AeadInPlace, KeyInit};
use aws_lc_rs::aead as aws;
use aws_lc_rs::cipher::{AES_256, EncryptionContext, StreamingEncryptingKey, UnboundCipherKey};
use aws_lc_rs::iv::FixedLength;
use ring::aead as ringed;

use crate::{Case, measure};

/// An arbitrary key.
pub const KEY: [u8; 32] = [7; 32];

/// A distinct nonce for each call.
pub fn nonce(number: u64) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&number.to_le_bytes());
    nonce
}

/// Measures sealing in place with a separate tag; GMAC is sealing of empty data.
pub fn measure_all(rounds: u64) {
    for (shape, data_bytes, aad_bytes) in
        [("1408 B", 1408, 32), ("4096 B", 4096, 32), ("8192 B", 8192, 32), ("GMAC 4160 B", 0, 4160)]
    {
        seal(rounds, shape, data_bytes, aad_bytes);
        if data_bytes > 0 {
            open(rounds, shape, data_bytes, aad_bytes);
        }
        if data_bytes == 4096 {
            check(rounds, shape, data_bytes, aad_bytes);
        }
    }
    write(rounds);
}

/// Bytes of a sector, and of one with its metadata.
const DATA_BYTES: usize = 4096;
const SECTOR_BYTES: usize = DATA_BYTES + 64;
/// A gateway's journal, far larger than the caches.
const JOURNAL_BYTES: usize = 64 << 20;

/// The memory through which a gateway's writes of one sector pass.
struct Gateway {
    commands: Vec<[u8; DATA_BYTES]>,
    journal: Vec<[u8; SECTOR_BYTES]>,
    stamped: [u8; SECTOR_BYTES],
    waiting: Vec<u8>,
}

impl Gateway {
    fn new() -> Self {
        Self {
            commands: vec![[5; DATA_BYTES]; 32],
            journal: vec![[1; SECTOR_BYTES]; JOURNAL_BYTES / SECTOR_BYTES],
            stamped: [0; SECTOR_BYTES],
            waiting: vec![0; 3 * SECTOR_BYTES],
        }
    }

    /// Seals a sector, with or without a copy of it first, and puts it behind the commands that
    /// wait, stamped with its MAC, with or without another copy.
    fn write(&mut self, key: &sealane_gcm::Key, number: u64, is_copied: (bool, bool)) {
        let at = number as usize;
        let plain = &self.commands[at % self.commands.len()];
        let slots = self.journal.len();
        let sector = &mut self.journal[at % slots];
        let (data, metadata) = sector.split_at_mut(DATA_BYTES);
        let tag = if is_copied.0 {
            data.copy_from_slice(black_box(plain));
            key.seal(&nonce(number), &[3; 33], data)
        } else {
            key.seal_into(&nonce(number), &[3; 33], black_box(plain), data)
        };
        metadata[..16].copy_from_slice(&tag);
        let place = &mut self.waiting[at % 3 * SECTOR_BYTES..][..SECTOR_BYTES];
        let sector = &*black_box(sector);
        if is_copied.1 {
            self.stamped.copy_from_slice(sector);
            let mac = key.seal(&nonce(number), black_box(&self.stamped), &mut []);
            self.stamped[DATA_BYTES + 28..][..16].copy_from_slice(&mac);
            place.copy_from_slice(black_box(&self.stamped));
        } else {
            let mut metadata = [0; SECTOR_BYTES - DATA_BYTES];
            metadata.copy_from_slice(&sector[DATA_BYTES..]);
            let mac = key.tag_of_pieces(&nonce(number), [&sector[..DATA_BYTES], &metadata]);
            metadata[28..44].copy_from_slice(&mac);
            place[..DATA_BYTES].copy_from_slice(&sector[..DATA_BYTES]);
            place[DATA_BYTES..].copy_from_slice(&metadata);
        }
        black_box(place);
    }
}

/// Measures the two copies of a sector that a gateway no longer makes.
fn write(rounds: u64) {
    let Some(key) = &sealane_gcm::Key::new(&KEY) else {
        return;
    };
    let ways = [
        ("both copies", (true, true)),
        ("one, to send", (false, true)),
        ("one, to seal", (true, false)),
        ("no copy", (false, false)),
    ];
    let mut cases = ways.map(|(name, is_copied)| {
        let mut gateway = Gateway::new();
        Case::new(name, move |number| gateway.write(key, number, is_copied))
    });
    measure(rounds, "write", "4096 B", DATA_BYTES, &mut cases);
}

/// Measures opening from one buffer into another, so that the input stays intact.
fn open(rounds: u64, shape: &str, data_bytes: usize, aad_bytes: usize) {
    let Some(own_key) = sealane_gcm::Key::new(&KEY) else {
        return;
    };
    let aws_key = aws::LessSafeKey::new(aws::UnboundKey::new(&aws::AES_256_GCM, &KEY).unwrap());
    let aad = vec![3; aad_bytes];
    let mut sealed = vec![1; data_bytes];
    let tag = own_key.seal(&nonce(0), &aad, &mut sealed);
    let (mut a, mut b) = (vec![0; data_bytes], vec![0; data_bytes]);
    let mut cases = [
        Case::new("aws-lc-rs", |_| {
            let nonce = aws::Nonce::assume_unique_for_key(nonce(0));
            let aad = aws::Aad::from(&aad);
            aws_key.open_separate_gather(nonce, aad, &sealed, &tag, &mut a).unwrap();
        }),
        Case::new("sealane vaes", |_| {
            own_key.open(&nonce(0), &aad, &sealed, &tag, &mut b).unwrap();
        }),
    ];
    measure(rounds, "open", shape, data_bytes, &mut cases);
}

/// Counter mode without a tag: what every byte of a plaintext is checked against.
fn keystream(nonce: [u8; 12], from: &[u8], to: &mut [u8]) {
    let mut counter = [0; 16];
    counter[..12].copy_from_slice(&nonce);
    counter[15] = 2;
    let key = UnboundCipherKey::new(&AES_256, &KEY).unwrap();
    let start = EncryptionContext::Iv128(FixedLength::from(counter));
    let mut cipher = StreamingEncryptingKey::less_safe_ctr(key, start).unwrap();
    let _ = black_box(cipher.update(from, to).unwrap());
}

/// Measures what checks a sector that somebody else sealed or opened.
fn check(rounds: u64, shape: &str, data_bytes: usize, aad_bytes: usize) {
    let Some(key) = sealane_gcm::Key::new(&KEY) else {
        return;
    };
    let aad = vec![3; aad_bytes];
    let mut sealed = vec![1; data_bytes];
    let tag = key.seal(&nonce(0), &aad, &mut sealed);
    let (mut opened, mut again) = (vec![0; data_bytes], vec![0; data_bytes + 16]);
    let given = vec![1; data_bytes];
    let mut nothing = vec![0; 16];
    let blocks = data_bytes as u32 / 16;
    let mut cases = [
        Case::new("open", |_| {
            key.open(&nonce(0), &aad, &sealed, &tag, &mut opened).unwrap();
        }),
        Case::new("tag", |_| {
            black_box(key.tag(&nonce(0), &aad, &sealed));
        }),
        Case::new("tag and a block", |number| {
            black_box(key.tag(&nonce(0), &aad, &sealed));
            black_box(key.keystream(&nonce(0), number as u32 % blocks));
        }),
        Case::new("counter mode and compare", |_| {
            keystream(nonce(0), &sealed, &mut again);
            assert_eq!(again[..data_bytes], given);
        }),
        Case::new("counter mode of no bytes", |_| {
            keystream(nonce(0), &[], &mut nothing);
        }),
    ];
    measure(rounds, "check", shape, data_bytes, &mut cases);
}

fn seal(rounds: u64, shape: &str, data_bytes: usize, aad_bytes: usize) {
    let aws_key = aws::LessSafeKey::new(aws::UnboundKey::new(&aws::AES_256_GCM, &KEY).unwrap());
    let ring_key =
        ringed::LessSafeKey::new(ringed::UnboundKey::new(&ringed::AES_256_GCM, &KEY).unwrap());
    let rust_key = aes_gcm::Aes256Gcm::new_from_slice(&KEY).unwrap();
    let own_key = sealane_gcm::Key::new(&KEY);
    let aad = vec![3; aad_bytes];
    let (mut a, mut b, mut c, mut d) =
        (vec![1; data_bytes], vec![1; data_bytes], vec![1; data_bytes], vec![1; data_bytes]);
    let mut cases = vec![
        Case::new("aws-lc-rs", |number| {
            let nonce = aws::Nonce::assume_unique_for_key(nonce(number));
            let tag = aws_key.seal_in_place_separate_tag(nonce, aws::Aad::from(&aad), &mut a);
            let _ = black_box(tag.unwrap());
        }),
        Case::new("ring", |number| {
            let nonce = ringed::Nonce::assume_unique_for_key(nonce(number));
            let tag = ring_key.seal_in_place_separate_tag(nonce, ringed::Aad::from(&aad), &mut b);
            let _ = black_box(tag.unwrap());
        }),
        Case::new("aes-gcm", |number| {
            black_box(rust_key.encrypt_in_place_detached(&nonce(number).into(), &aad, &mut c))
                .unwrap();
        }),
    ];
    if let Some(key) = &own_key {
        cases.push(Case::new("sealane vaes", |number| {
            black_box(key.seal(&nonce(number), &aad, &mut d));
        }));
    }
    measure(rounds, "seal", shape, data_bytes.max(aad_bytes), &mut cases);
}
