//! Consecutive little-endian fields of a page.

use super::super::pages::Page;

/// Writes fields into a page.
pub struct Fields<'a> {
    rest: &'a mut [u8],
}

impl<'a> Fields<'a> {
    /// Starts at the page's first byte.
    pub fn new(page: &'a mut Page) -> Self {
        Self { rest: &mut page.0 }
    }

    /// Writes the next bytes.
    ///
    /// # Panics
    /// If the page has no room for them: its format is wrong.
    pub fn put(&mut self, bytes: &[u8]) {
        self.next(bytes.len()).copy_from_slice(bytes);
    }

    /// Writes the next eight bytes.
    pub fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }

    /// Returns the next bytes for the caller to fill.
    pub fn next(&mut self, length: usize) -> &mut [u8] {
        let (front, rest) = std::mem::take(&mut self.rest).split_at_mut(length);
        self.rest = rest;
        front
    }
}

/// Reads the next bytes.
///
/// # Panics
/// If there are too few: pages have room for their fields.
pub fn get<const BYTES: usize>(rest: &mut &[u8]) -> [u8; BYTES] {
    let (front, back) = rest.split_first_chunk().expect("pages have room for their fields");
    *rest = back;
    *front
}

/// Reads the next eight bytes.
pub fn get_u64(rest: &mut &[u8]) -> u64 {
    u64::from_le_bytes(get(rest))
}
