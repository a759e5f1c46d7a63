//! AES-256-GCM and GMAC for all higher layers: separate tags, explicit nonces, typed keys.
//!
//! AES-256-GCM runs in the product's own kernel where the processor supports it, otherwise in a
//! library; both produce the same bytes (decision 49). Nothing here chooses a nonce: the owner of a
//! key owns its nonce sequence, documented at the type that wraps the key (a lease, a packet
//! number, a command number).

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use aws_lc_rs::hmac;
use sealane_gcm as gcm;
use zeroize::Zeroize;

/// Bytes of a key.
pub const KEY_BYTES: usize = gcm::KEY_BYTES;
/// Bytes of a nonce (IV).
pub const NONCE_BYTES: usize = gcm::NONCE_BYTES;
/// Bytes of a tag or MAC.
pub const TAG_BYTES: usize = gcm::TAG_BYTES;
/// Bytes of the shortest truncated MAC that is accepted.
pub const TRUNCATED_MAC_BYTES: usize = 8;

/// A tag or MAC does not match; the bytes must not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("authentication failed")]
pub struct NotAuthentic;

/// 32 secret bytes, wiped when dropped, never printed.
#[derive(Clone, zeroize::ZeroizeOnDrop)]
pub struct Secret([u8; KEY_BYTES]);

impl Secret {
    /// Takes over the bytes and wipes the caller's copy.
    pub fn take(bytes: &mut [u8; KEY_BYTES]) -> Self {
        let secret = Self(*bytes);
        bytes.zeroize();
        secret
    }

    /// Derives a secret for one use: HKDF-SHA256 (RFC 5869) with `label` and `context` as info.
    ///
    /// # Panics
    /// Never: the output length is one hash block.
    #[must_use]
    pub fn derive(&self, label: &str, context: &[u8]) -> Self {
        let prk = Prk::new_less_safe(HKDF_SHA256, &self.0);
        let length = [u8::try_from(label.len()).expect("labels are short")];
        let info = [&length[..], label.as_bytes(), context];
        let okm = prk.expand(&info, SecretLength).expect("length is fixed");
        let mut bytes = [0; KEY_BYTES];
        okm.fill(&mut bytes).expect("length is fixed");
        Self::take(&mut bytes)
    }

    /// Extracts a uniform secret from keying material (HKDF-Extract).
    ///
    /// # Panics
    /// Never: the output length is one hash block.
    #[must_use]
    pub fn extract(salt: &[u8], material: &[u8]) -> Self {
        let prk = Salt::new(HKDF_SHA256, salt).extract(material);
        let mut bytes = [0; KEY_BYTES];
        let okm = prk.expand(&[b"sealane extract"], SecretLength).expect("length is fixed");
        okm.fill(&mut bytes).expect("length is fixed");
        Self::take(&mut bytes)
    }

    /// The bytes, for ciphers of this crate, and for an accelerator that may hold this key.
    pub fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl core::fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("Secret(…)")
    }
}

struct SecretLength;

impl KeyType for SecretLength {
    fn len(&self) -> usize {
        KEY_BYTES
    }
}

/// How much of a ciphertext is compared with its plaintext, besides its tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sample {
    /// The block of 16 bytes at this place, counted from 0.
    Block(u32),
    /// All of it.
    Whole,
}

/// AES-256-GCM (NIST SP 800-38D) under one key.
#[derive(Debug)]
enum Cipher {
    Kernel(gcm::Key),
    Library(Box<LessSafeKey>),
}

impl Cipher {
    fn new(secret: &Secret) -> Self {
        gcm::Key::new(&secret.0).map_or_else(|| Self::library(secret), Self::Kernel)
    }

    fn library(secret: &Secret) -> Self {
        let unbound = UnboundKey::new(&AES_256_GCM, &secret.0).expect("key length is fixed");
        Self::Library(Box::new(LessSafeKey::new(unbound)))
    }

    fn seal(&self, nonce: [u8; NONCE_BYTES], aad: &[u8], data: &mut [u8]) -> [u8; TAG_BYTES] {
        match self {
            Self::Kernel(key) => key.seal(&nonce, aad, data),
            Self::Library(key) => {
                let nonce = Nonce::assume_unique_for_key(nonce);
                let tag = key
                    .seal_in_place_separate_tag(nonce, Aad::from(aad), data)
                    .expect("length is within the limits of GCM");
                tag.as_ref().try_into().expect("tag length is fixed")
            }
        }
    }

    fn seal_into(
        &self,
        nonce: [u8; NONCE_BYTES],
        aad: &[u8],
        plaintext: &[u8],
        ciphertext: &mut [u8],
    ) -> [u8; TAG_BYTES] {
        match self {
            Self::Kernel(key) => key.seal_into(&nonce, aad, plaintext, ciphertext),
            Self::Library(key) => {
                let nonce = Nonce::assume_unique_for_key(nonce);
                let (aad, mut tag) = (Aad::from(aad), [0; TAG_BYTES]);
                key.seal_out_of_place_scatter(nonce, aad, plaintext, ciphertext, &[], &mut tag)
                    .expect("lengths are equal and within the limits of GCM");
                tag
            }
        }
    }

    fn tag_of_pieces(&self, nonce: [u8; NONCE_BYTES], pieces: [&[u8]; 2]) -> [u8; TAG_BYTES] {
        match self {
            Self::Kernel(key) => key.tag_of_pieces(&nonce, pieces),
            // The library takes only contiguous bytes.
            Self::Library(_) => self.seal(nonce, &pieces.concat(), &mut []),
        }
    }

    fn open_in_place<'a>(
        &self,
        nonce: [u8; NONCE_BYTES],
        aad: &[u8],
        sealed: &'a mut [u8],
    ) -> Result<&'a mut [u8], NotAuthentic> {
        match self {
            Self::Kernel(key) => {
                let (data, tag) = sealed.split_last_chunk_mut().ok_or(NotAuthentic)?;
                key.open_in_place(&nonce, aad, data, tag).map_err(|_| NotAuthentic)?;
                Ok(data)
            }
            Self::Library(key) => {
                let nonce = Nonce::assume_unique_for_key(nonce);
                key.open_in_place(nonce, Aad::from(aad), sealed).map_err(|_| NotAuthentic)
            }
        }
    }

    fn check_sealed(
        &self,
        nonce: [u8; NONCE_BYTES],
        aad: &[u8],
        (plaintext, ciphertext): (&[u8], &[u8]),
        tag: &[u8; TAG_BYTES],
        sample: Sample,
    ) -> Result<(), NotAuthentic> {
        let block = |bytes: &[u8], place: u32| {
            let (blocks, _) = bytes.as_chunks::<{ gcm::BLOCK_BYTES }>();
            blocks.get(place as usize).copied().map(u128::from_ne_bytes).ok_or(NotAuthentic)
        };
        let sampled = match sample {
            Sample::Block(place) => {
                Some((place, block(plaintext, place)?, block(ciphertext, place)?))
            }
            Sample::Whole => None,
        };
        let (Self::Kernel(key), Some((place, plain, sealed))) = (self, sampled) else {
            let mut opened = zeroize::Zeroizing::new(vec![0; ciphertext.len()]);
            self.open(nonce, aad, ciphertext, tag, &mut opened)?;
            return if *opened == plaintext { Ok(()) } else { Err(NotAuthentic) };
        };
        let keystream = u128::from_ne_bytes(key.keystream(&nonce, place));
        let is_right = key.tag(&nonce, aad, ciphertext) == *tag && plain ^ keystream == sealed;
        if is_right { Ok(()) } else { Err(NotAuthentic) }
    }

    fn open(
        &self,
        nonce: [u8; NONCE_BYTES],
        aad: &[u8],
        ciphertext: &[u8],
        tag: &[u8; TAG_BYTES],
        plaintext: &mut [u8],
    ) -> Result<(), NotAuthentic> {
        match self {
            Self::Kernel(key) => {
                key.open(&nonce, aad, ciphertext, tag, plaintext).map_err(|_| NotAuthentic)
            }
            Self::Library(key) => {
                let nonce = Nonce::assume_unique_for_key(nonce);
                key.open_separate_gather(nonce, Aad::from(aad), ciphertext, tag, plaintext)
                    .map_err(|_| NotAuthentic)
            }
        }
    }
}

/// An AES-256-GCM key.
#[derive(Debug)]
pub struct AeadKey(Cipher);

impl AeadKey {
    /// Expands the key.
    #[must_use]
    pub fn new(secret: &Secret) -> Self {
        Self(Cipher::new(secret))
    }

    /// Encrypts in place and returns the tag. One (key, nonce) pair must never be used twice.
    ///
    /// # Panics
    /// If `data` is longer than GCM allows (64 GiB), which no caller's buffer can be.
    #[must_use]
    pub fn seal(&self, nonce: [u8; NONCE_BYTES], aad: &[u8], data: &mut [u8]) -> [u8; TAG_BYTES] {
        self.0.seal(nonce, aad, data)
    }

    /// Encrypts `plaintext` into `ciphertext` (same length) and returns the tag. One (key, nonce)
    /// pair must never be used twice.
    ///
    /// # Panics
    /// If the two differ in length, and as [`Self::seal`].
    #[must_use]
    pub fn seal_into(
        &self,
        nonce: [u8; NONCE_BYTES],
        aad: &[u8],
        plaintext: &[u8],
        ciphertext: &mut [u8],
    ) -> [u8; TAG_BYTES] {
        self.0.seal_into(nonce, aad, plaintext, ciphertext)
    }

    /// Decrypts a ciphertext that is followed by its tag, in place, and returns the plaintext.
    /// After an error the contents of `sealed` are unspecified and must not be used.
    pub fn open_in_place<'a>(
        &self,
        nonce: [u8; NONCE_BYTES],
        aad: &[u8],
        sealed: &'a mut [u8],
    ) -> Result<&'a mut [u8], NotAuthentic> {
        self.0.open_in_place(nonce, aad, sealed)
    }

    /// Decrypts `ciphertext` into `plaintext` (same length).
    /// After an error the contents of `plaintext` are unspecified and must not be used.
    pub fn open(
        &self,
        nonce: [u8; NONCE_BYTES],
        aad: &[u8],
        ciphertext: &[u8],
        tag: &[u8; TAG_BYTES],
        plaintext: &mut [u8],
    ) -> Result<(), NotAuthentic> {
        self.0.open(nonce, aad, ciphertext, tag, plaintext)
    }

    /// Checks what somebody else sealed with this key: the tag is the one of this nonce, additional
    /// data and ciphertext, and the sample of the ciphertext is that of `plaintext`.
    ///
    /// Whoever has the key can make a tag for any ciphertext, also for one made with another nonce.
    /// A sample of one block finds another nonce always, and one wrong block in `n` with a
    /// probability of 1/n, if its place can't be predicted. Without the product's own kernel all of
    /// it is compared.
    pub fn check_sealed(
        &self,
        nonce: [u8; NONCE_BYTES],
        aad: &[u8],
        (plaintext, ciphertext): (&[u8], &[u8]),
        tag: &[u8; TAG_BYTES],
        sample: Sample,
    ) -> Result<(), NotAuthentic> {
        self.0.check_sealed(nonce, aad, (plaintext, ciphertext), tag, sample)
    }
}

/// An HMAC-SHA256 key (RFC 2104): a MAC that needs no nonce.
pub struct HmacKey(hmac::Key);

impl core::fmt::Debug for HmacKey {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("HmacKey(…)")
    }
}

impl HmacKey {
    /// Creates the key from a secret.
    #[must_use]
    pub fn new(secret: &Secret) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, &secret.0))
    }

    /// The MAC over `kind`, a byte that tells kinds of messages apart, and `message`.
    ///
    /// # Panics
    /// Never: the output length is fixed.
    #[must_use]
    pub fn mac(&self, kind: u8, message: &[u8]) -> [u8; 32] {
        let mut context = hmac::Context::with_key(&self.0);
        context.update(&[kind]);
        context.update(message);
        context.sign().as_ref().try_into().expect("MAC length is fixed")
    }
}

/// An AES-256-GMAC key: GCM with no plaintext.
#[derive(Debug)]
pub struct MacKey(Cipher);

impl MacKey {
    /// Expands the key.
    #[must_use]
    pub fn new(secret: &Secret) -> Self {
        Self(Cipher::new(secret))
    }

    /// MAC over `message`. One (key, nonce) pair must never authenticate two messages.
    ///
    /// # Panics
    /// If `message` is longer than GCM allows, which no caller's buffer can be.
    #[must_use]
    pub fn mac(&self, nonce: [u8; NONCE_BYTES], message: &[u8]) -> [u8; TAG_BYTES] {
        self.0.seal(nonce, message, &mut [])
    }

    /// As [`Self::mac`], over a message in two pieces, of which the first is a whole number of
    /// cipher blocks (16 bytes).
    ///
    /// # Panics
    /// If it isn't, and as [`Self::mac`].
    #[must_use]
    pub fn mac_of_pieces(&self, nonce: [u8; NONCE_BYTES], pieces: [&[u8]; 2]) -> [u8; TAG_BYTES] {
        self.0.tag_of_pieces(nonce, pieces)
    }

    /// Verifies a MAC over `message`, full or truncated to at least 8 bytes, in constant time.
    pub fn verify(
        &self,
        nonce: [u8; NONCE_BYTES],
        message: &[u8],
        tag: &[u8],
    ) -> Result<(), NotAuthentic> {
        if tag.len() < TRUNCATED_MAC_BYTES {
            return Err(NotAuthentic);
        }
        let mac = self.mac(nonce, message);
        let expected = mac.get(..tag.len()).ok_or(NotAuthentic)?;
        aws_lc_rs::constant_time::verify_slices_are_equal(expected, tag).map_err(|_| NotAuthentic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Secret {
        Secret::take(&mut [7; KEY_BYTES])
    }

    /// The cipher that this processor uses, and the one of other processors.
    fn ciphers() -> [AeadKey; 2] {
        [AeadKey::new(&key()), AeadKey(Cipher::library(&key()))]
    }

    #[test]
    fn sealed_bytes_open_and_any_flip_is_refused() {
        for aead in ciphers() {
            let mut data = *b"sixteen byte msg";
            let tag = aead.seal([1; 12], b"aad", &mut data);
            let mut plain = [0; 16];
            aead.open([1; 12], b"aad", &data, &tag, &mut plain).unwrap();
            assert_eq!(&plain, b"sixteen byte msg");
            for bit in 0..128 {
                let mut flipped = data;
                flipped[bit / 8] ^= 1 << (bit % 8);
                let opened = aead.open([1; 12], b"aad", &flipped, &tag, &mut plain);
                assert_eq!(opened, Err(NotAuthentic));
            }
            assert_eq!(aead.open([2; 12], b"aad", &data, &tag, &mut plain), Err(NotAuthentic));
            assert_eq!(aead.open([1; 12], b"AAD", &data, &tag, &mut plain), Err(NotAuthentic));
        }
    }

    #[test]
    fn sealing_into_another_buffer_and_mac_of_pieces_give_the_same_bytes() {
        let plain: Vec<u8> = (0..4096_u32).map(|index| (index * 7) as u8).collect();
        for aead in ciphers() {
            let mut expected = plain.clone();
            let tag = aead.seal([1; 12], b"aad", &mut expected);
            let mut sealed = vec![5; plain.len()];
            assert_eq!(aead.seal_into([1; 12], b"aad", &plain, &mut sealed), tag, "{aead:?}");
            assert_eq!(sealed, expected);
            let mac = MacKey(aead.0);
            let (first, last) = plain[..4090].split_at(4032);
            let whole = mac.mac([1; 12], &plain[..4090]);
            assert_eq!(mac.mac_of_pieces([1; 12], [first, last]), whole);
            assert_ne!(mac.mac_of_pieces([1; 12], [&first[16..], last]), whole);
        }
    }

    #[test]
    fn what_one_cipher_seals_the_other_opens_in_place() {
        let [own, library] = ciphers();
        for (from, to) in [(&own, &library), (&library, &own), (&own, &own), (&library, &library)] {
            let mut sealed = b"a message".to_vec();
            let tag = from.seal([1; 12], b"aad", &mut sealed);
            sealed.extend_from_slice(&tag);
            let opened = to.open_in_place([1; 12], b"aad", &mut sealed.clone()).map(|m| m.to_vec());
            assert_eq!(opened, Ok(b"a message".to_vec()));
            *sealed.last_mut().unwrap() ^= 1;
            assert_eq!(to.open_in_place([1; 12], b"aad", &mut sealed), Err(NotAuthentic));
            let too_short = &mut [0; TAG_BYTES - 1];
            assert_eq!(to.open_in_place([1; 12], b"aad", too_short), Err(NotAuthentic));
        }
    }

    #[test]
    fn every_cipher_checks_what_was_sealed_elsewhere() {
        let plain = *b"thirty-two bytes are two blocks.";
        for aead in ciphers() {
            let mut sealed = plain;
            let tag = aead.seal([1; 12], b"aad", &mut sealed);
            let check = |nonce, sealed: &[u8], sample| {
                aead.check_sealed([nonce; 12], b"aad", (&plain, sealed), &tag, sample)
            };
            for sample in [Sample::Block(0), Sample::Block(1), Sample::Whole] {
                assert_eq!(check(1, &sealed, sample), Ok(()), "{aead:?}, {sample:?}");
                assert_eq!(check(2, &sealed, sample), Err(NotAuthentic), "{aead:?}, {sample:?}");
            }
            assert_eq!(
                check(1, &sealed, Sample::Block(2)),
                Err(NotAuthentic),
                "{aead:?}: no block"
            );
            sealed[31] ^= 1;
            assert_eq!(check(1, &sealed, Sample::Block(1)), Err(NotAuthentic), "{aead:?}");
        }
    }

    #[test]
    fn gmac_is_gcm_without_plaintext() {
        // GCM test case 13 (McGrew, Viega): zero key, zero nonce, empty plaintext and AAD.
        let mac = MacKey::new(&Secret::take(&mut [0; KEY_BYTES]));
        let expected = [
            0x53, 0x0f, 0x8a, 0xfb, 0xc7, 0x45, 0x36, 0xb9, 0xa9, 0x63, 0xb4, 0xf1, 0xc4, 0xcb,
            0x73, 0x8b,
        ];
        assert_eq!(mac.mac([0; 12], b""), expected);
        assert_eq!(mac.verify([0; 12], b"", &expected), Ok(()));
        assert_eq!(mac.verify([0; 12], b"", &expected[..8]), Ok(()));
        assert_eq!(mac.verify([0; 12], b"x", &expected[..8]), Err(NotAuthentic));
        assert_eq!(mac.verify([0; 12], b"", &[0; 17]), Err(NotAuthentic));
        assert_eq!(mac.verify([0; 12], b"", &expected[..7]), Err(NotAuthentic));
        assert_eq!(mac.verify([0; 12], b"", b""), Err(NotAuthentic));
    }

    #[test]
    fn derivation_separates_labels_and_contexts() {
        let pair = |label, context: &[u8]| key().derive(label, context).0;
        assert_ne!(pair("a", b"bc"), pair("ab", b"c"));
        assert_ne!(pair("a", b"b"), pair("a", b"c"));
        assert_eq!(pair("a", b"b"), pair("a", b"b"));
    }
}
