//! SHA-256 and constant-time comparison for the crates above this one.

use aws_lc_rs::digest::{SHA256, SHA256_OUTPUT_LEN, digest};

/// SHA-256 of `bytes` (FIPS 180-4).
///
/// # Panics
/// Never: the length of a digest is fixed.
#[must_use]
pub fn sha256(bytes: &[u8]) -> [u8; SHA256_OUTPUT_LEN] {
    digest(&SHA256, bytes).as_ref().try_into().expect("digest length is fixed")
}

/// Whether both are equal, in time that depends only on their lengths.
#[must_use]
pub fn are_equal(left: &[u8], right: &[u8]) -> bool {
    aws_lc_rs::constant_time::verify_slices_are_equal(left, right).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_of_abc_is_the_standards() {
        let digest = sha256(b"abc");
        assert_eq!(digest[..4], [0xba, 0x78, 0x16, 0xbf]);
        assert_eq!(digest[28..], [0xf2, 0x00, 0x15, 0xad]);
    }

    #[test]
    fn only_equal_bytes_are_equal() {
        assert!(are_equal(b"", b"") && are_equal(b"ab", b"ab"));
        assert!(!are_equal(b"ab", b"abc") && !are_equal(b"ab", b"aB"));
    }
}
