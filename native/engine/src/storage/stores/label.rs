//! The first block of a namespace with metadata that a bare store uses: says whose sectors follow.

use std::io;

use super::fresh::keys::{Authority, Kind, StoreKeys};
use super::fresh::superblock::other_version;
use super::pages::Page;

/// First bytes of a label.
const MAGIC: [u8; 8] = *b"SEALSECT";
/// Version of the label's layout.
const VERSION: u32 = 2;

/// The label (`docs/formats/stores.md` §2a): the data of block 0, written once, when a store is
/// created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// Identifies the store.
    pub uuid: [u8; 16],
    /// Makes the key of the label's tag unique to this store.
    pub seed: [u8; 32],
    /// Number of sectors that follow.
    pub sector_count: u64,
}

impl Label {
    fn keys(&self, authority: &Authority<'_>) -> StoreKeys {
        StoreKeys::new(&self.uuid, &self.seed, authority)
    }

    /// Encodes and seals the block's data.
    #[must_use]
    pub fn encode(&self, authority: &Authority<'_>) -> Page {
        let mut page = Page::ZERO;
        page.0[..8].copy_from_slice(&MAGIC);
        page.0[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page.0[16..32].copy_from_slice(&self.uuid);
        page.0[32..64].copy_from_slice(&self.seed);
        page.0[64..72].copy_from_slice(&self.sector_count.to_le_bytes());
        self.keys(authority).pages().seal(Kind::Label, &mut page);
        page
    }

    /// Parses the unauthenticated fields. Fails if the block is no label of this version.
    ///
    /// # Panics
    /// Never: a page is longer than its fields.
    pub fn claimed(page: &Page) -> io::Result<Self> {
        let field = |start: usize, end: usize| &page.0[start..end];
        if field(0, 8) != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a Sealane store"));
        }
        let version = u32::from_le_bytes(field(8, 12).try_into().expect("4 bytes"));
        if version != VERSION {
            let detail = other_version(version, VERSION);
            return Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        }
        Ok(Self {
            uuid: field(16, 32).try_into().expect("16 bytes"),
            seed: field(32, 64).try_into().expect("32 bytes"),
            sector_count: u64::from_le_bytes(field(64, 72).try_into().expect("8 bytes")),
        })
    }

    /// Parses and authenticates.
    pub fn decode(page: &Page, authority: &Authority<'_>) -> io::Result<Self> {
        let claimed = Self::claimed(page)?;
        if claimed.keys(authority).pages().check(Kind::Label, page).is_none() {
            let detail = "label of a Sealane store is damaged or forged";
            return Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        }
        Ok(claimed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_of_another_version_is_refused_by_number() {
        let label = Label { uuid: [1; 16], seed: [2; 32], sector_count: 9 };
        let mut page = label.encode(&Authority::Device);
        page.0[8] = 3;
        let error = Label::claimed(&page).expect_err("version 3");
        assert!(error.to_string().contains("version 3, and this release has version 2"), "{error}");
    }
}
