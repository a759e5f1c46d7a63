//! AES-256-GCM (NIST SP 800-38D) for packets and sectors: 96-bit nonces, 128-bit tags.
//!
//! A key is expanded once, together with the powers of its hash key, and then only read. A call has
//! an overhead of some 30 ns besides the time for its bytes. It requires a processor with AVX-512,
//! VAES and VPCLMULQDQ; on others no [`Key`] can be created, and the caller uses a library. Running
//! time depends only on lengths: no table lookup or branch depends on a secret.
//!
//! Nothing here chooses nonces: a (key, nonce) pair must never seal twice.
#![deny(unsafe_code)]

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod kernel;
#[cfg(not(target_arch = "x86_64"))]
mod unavailable;

#[cfg(target_arch = "x86_64")]
use kernel::Schedule;
#[cfg(not(target_arch = "x86_64"))]
use unavailable::Schedule;

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;
/// Bytes of a nonce (IV).
pub const NONCE_BYTES: usize = 12;
/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;
/// Bytes of a block of the cipher.
pub const BLOCK_BYTES: usize = 16;
/// Most bytes of plaintext for one nonce (SP 800-38D §5.2.1.1).
pub const DATA_BYTES_MAX: u64 = (1 << 36) - 32;
/// Most bytes of additional data for one tag.
pub const AAD_BYTES_MAX: u64 = (1 << 61) - 1;

/// The tag does not match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("authentication failed")]
pub struct NotAuthentic;

/// An expanded key. It is wiped when dropped, and never printed.
pub struct Key(Box<Schedule>);

impl Key {
    /// Expands a key; `None` if the processor lacks a required feature.
    #[must_use]
    pub fn new(secret: &[u8; KEY_BYTES]) -> Option<Self> {
        Schedule::new(secret).map(Self)
    }

    /// Encrypts in place and returns the tag.
    ///
    /// # Panics
    /// If `data` or `aad` is longer than GCM allows, which no caller's buffer can be.
    #[must_use]
    pub fn seal(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], data: &mut [u8]) -> [u8; TAG_BYTES] {
        check_lengths(aad.len(), data.len());
        self.0.seal(nonce, aad, data)
    }

    /// Encrypts `plaintext` into `ciphertext` and returns the tag.
    ///
    /// # Panics
    /// If the two differ in length, and as [`Self::seal`].
    #[must_use]
    pub fn seal_into(
        &self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        plaintext: &[u8],
        ciphertext: &mut [u8],
    ) -> [u8; TAG_BYTES] {
        assert_eq!(plaintext.len(), ciphertext.len(), "plaintext and ciphertext are equally long");
        check_lengths(aad.len(), plaintext.len());
        self.0.seal_into(nonce, aad, (plaintext, ciphertext))
    }

    /// The tag of two pieces of additional data, as if they were one, and no ciphertext (GMAC).
    ///
    /// # Panics
    /// If the first piece isn't a whole number of blocks, and as [`Self::seal`].
    #[must_use]
    pub fn tag_of_pieces(
        &self,
        nonce: &[u8; NONCE_BYTES],
        [first, last]: [&[u8]; 2],
    ) -> [u8; TAG_BYTES] {
        assert!(first.len().is_multiple_of(BLOCK_BYTES), "only the last block may be partial");
        check_lengths(first.len() + last.len(), 0);
        self.0.tag_of_pieces(nonce, [first, last])
    }

    /// The tag of a ciphertext, in half the time that opening takes. It proves what was hashed; that
    /// the ciphertext was made with this nonce, only [`Self::keystream`] shows.
    ///
    /// # Panics
    /// As [`Self::seal`].
    #[must_use]
    pub fn tag(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], ciphertext: &[u8]) -> [u8; TAG_BYTES] {
        check_lengths(aad.len(), ciphertext.len());
        self.0.tag(nonce, aad, ciphertext)
    }

    /// What block `place` of a message, counted from 0, is combined with.
    ///
    /// # Panics
    /// If no message has that many blocks.
    #[must_use]
    pub fn keystream(&self, nonce: &[u8; NONCE_BYTES], place: u32) -> [u8; BLOCK_BYTES] {
        check_lengths(0, (place as usize + 1) * BLOCK_BYTES);
        self.0.keystream(nonce, place)
    }

    /// Decrypts in place. After an error `data` is all zeros.
    ///
    /// # Panics
    /// As [`Self::seal`].
    pub fn open_in_place(
        &self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        data: &mut [u8],
        tag: &[u8; TAG_BYTES],
    ) -> Result<(), NotAuthentic> {
        check_lengths(aad.len(), data.len());
        if self.0.open_in_place(nonce, aad, data, tag) {
            return Ok(());
        }
        data.fill(0);
        Err(NotAuthentic)
    }

    /// Decrypts `ciphertext` into `plaintext`. After an error `plaintext` is all zeros.
    ///
    /// # Panics
    /// If the two differ in length, and as [`Self::seal`].
    pub fn open(
        &self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        ciphertext: &[u8],
        tag: &[u8; TAG_BYTES],
        plaintext: &mut [u8],
    ) -> Result<(), NotAuthentic> {
        assert_eq!(ciphertext.len(), plaintext.len(), "ciphertext and plaintext are equally long");
        check_lengths(aad.len(), ciphertext.len());
        if self.0.open(nonce, aad, (ciphertext, plaintext), tag) {
            return Ok(());
        }
        plaintext.fill(0);
        Err(NotAuthentic)
    }
}

impl core::fmt::Debug for Key {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("Key(…)")
    }
}

fn check_lengths(aad_bytes: usize, data_bytes: usize) {
    let is_allowed = data_bytes as u64 <= DATA_BYTES_MAX && aad_bytes as u64 <= AAD_BYTES_MAX;
    assert!(is_allowed, "longer than GCM allows");
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: (usize, usize) = (AAD_BYTES_MAX as usize, DATA_BYTES_MAX as usize);

    /// One counter for the tag, and one for each block up to the highest 32-bit value; both lengths
    /// in bits fit 64 bits.
    #[test]
    fn lengths_end_where_a_counter_would_repeat() {
        assert_eq!(1 + DATA_BYTES_MAX / 16, u64::from(u32::MAX));
        assert_eq!(AAD_BYTES_MAX, u64::MAX / 8);
        check_lengths(MOST.0, MOST.1);
    }

    #[test]
    #[should_panic(expected = "longer than GCM allows")]
    fn more_data_is_a_mistake() {
        check_lengths(0, MOST.1 + 1);
    }

    #[test]
    #[should_panic(expected = "longer than GCM allows")]
    fn more_additional_data_is_a_mistake() {
        check_lengths(MOST.0 + 1, 0);
    }
}
