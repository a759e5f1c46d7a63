//! Replaces the kernel on processors that it does not support: no key can be created.

use crate::{BLOCK_BYTES, KEY_BYTES, NONCE_BYTES, TAG_BYTES};

/// A type without values.
pub enum Schedule {}

impl Schedule {
    pub fn new(_: &[u8; KEY_BYTES]) -> Option<Box<Self>> {
        None
    }

    pub fn seal(&self, _: &[u8; NONCE_BYTES], _: &[u8], _: &mut [u8]) -> [u8; TAG_BYTES] {
        match *self {}
    }

    pub fn seal_into(
        &self,
        _: &[u8; NONCE_BYTES],
        _: &[u8],
        _: (&[u8], &mut [u8]),
    ) -> [u8; TAG_BYTES] {
        match *self {}
    }

    pub fn tag_of_pieces(&self, _: &[u8; NONCE_BYTES], _: [&[u8]; 2]) -> [u8; TAG_BYTES] {
        match *self {}
    }

    pub fn tag(&self, _: &[u8; NONCE_BYTES], _: &[u8], _: &[u8]) -> [u8; TAG_BYTES] {
        match *self {}
    }

    pub fn keystream(&self, _: &[u8; NONCE_BYTES], _: u32) -> [u8; BLOCK_BYTES] {
        match *self {}
    }

    pub fn open_in_place(
        &self,
        _: &[u8; NONCE_BYTES],
        _: &[u8],
        _: &mut [u8],
        _: &[u8; TAG_BYTES],
    ) -> bool {
        match *self {}
    }

    pub fn open(
        &self,
        _: &[u8; NONCE_BYTES],
        _: &[u8],
        _: (&[u8], &mut [u8]),
        _: &[u8; TAG_BYTES],
    ) -> bool {
        match *self {}
    }
}
