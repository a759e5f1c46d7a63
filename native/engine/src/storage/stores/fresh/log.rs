//! The log: changes in the order in which they were made, in a chain of pages.
//!
//! A page's tag, under the key of its opening, covers the tag of the page before. Thus pages that
//! form a chain on the device were written one after the other by one opening.

use std::fmt::Debug;

use sealane_proto::freshness::leaf::LeafFormat;

use super::super::pages::Page;
use super::codec::{Fields, get, get_u64};
use super::keys::{BODY_BYTES, Kind, PageKey, Tag};

const MAGIC: [u8; 8] = *b"SEALLOGP";
/// Bytes before the records.
const HEADER_BYTES: usize = 5 * 8 + 16 + 2;
/// Bytes of a record before its content.
const LBA_BYTES: usize = 8;
/// Set in the first block of a deallocated range.
const VOID: u64 = 1 << 63;
/// Set in the block of a carried entry.
const CARRIED: u64 = 1 << 62;

/// One change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record<E> {
    /// A block has this entry from now on.
    Entry {
        /// The block.
        lba: u64,
        /// Its entry.
        entry: E,
        /// Whether this repeats the previous record with the same block and entry, because that
        /// record's write has not ended. Otherwise the record is a write of its own, even if an
        /// earlier write had the same entry.
        is_carried: bool,
    },
    /// Blocks are unwritten from now on.
    Void {
        /// First block.
        lba: u64,
        /// How many.
        blocks: u64,
    },
}

impl<E> Record<E> {
    /// A record of a write of its own.
    pub const fn written(lba: u64, entry: E) -> Self {
        Self::Entry { lba, entry, is_carried: false }
    }

    /// First block and number of blocks.
    #[must_use]
    pub fn range(&self) -> (u64, u64) {
        match self {
            Self::Entry { lba, .. } => (*lba, 1),
            Self::Void { lba, blocks } => (*lba, *blocks),
        }
    }
}

/// One page of the log.
#[derive(Debug, Clone, PartialEq)]
pub struct LogPage<E> {
    /// Epoch of the opening that wrote the page.
    pub epoch: u64,
    /// Number of the page in the log.
    pub number: u64,
    /// Log pages before this one were flushed when the page was written.
    pub flushed: u64,
    /// Next write sequence when the page was written.
    pub sequence: u64,
    /// Tag of the page before.
    pub previous: Tag,
    /// Its records.
    pub records: Vec<Record<E>>,
}

/// Most records of one page.
#[must_use]
pub const fn records_per_page<F: LeafFormat>() -> usize {
    (BODY_BYTES - HEADER_BYTES) / record_bytes::<F>()
}

const fn record_bytes<F: LeafFormat>() -> usize {
    let content = if F::ENTRY_BYTES > 8 { F::ENTRY_BYTES } else { 8 };
    LBA_BYTES + content
}

impl<E: Copy + Debug> LogPage<E> {
    /// Encodes the page. Returns it with its tag.
    ///
    /// # Panics
    /// If it has more records than a page holds.
    #[must_use]
    pub fn encode<F: LeafFormat<Entry = E>>(&self, key: &PageKey) -> (Page, Tag) {
        assert!(self.records.len() <= records_per_page::<F>(), "more records than a page holds");
        let mut page = Page::ZERO;
        let mut fields = Fields::new(&mut page);
        fields.put(&MAGIC);
        for field in [self.epoch, self.number, self.flushed, self.sequence] {
            fields.put_u64(field);
        }
        fields.put(&self.previous);
        fields.put(&(self.records.len() as u16).to_le_bytes());
        for record in &self.records {
            let bytes = fields.next(record_bytes::<F>());
            let (place, content) = bytes.split_at_mut(LBA_BYTES);
            match record {
                Record::Entry { lba, entry, is_carried } => {
                    let carried = if *is_carried { CARRIED } else { 0 };
                    place.copy_from_slice(&(lba | carried).to_le_bytes());
                    F::encode(entry, &mut content[..F::ENTRY_BYTES]);
                }
                Record::Void { lba, blocks } => {
                    place.copy_from_slice(&(lba | VOID).to_le_bytes());
                    content[..8].copy_from_slice(&blocks.to_le_bytes());
                }
            }
        }
        let tag = key.seal(Kind::Log, &mut page);
        (page, tag)
    }

    /// Parses and authenticates the log's page with this epoch and number. Returns it with its tag.
    /// The caller must check that it continues the page before.
    #[must_use]
    pub fn decode<F: LeafFormat<Entry = E>>(
        page: &Page,
        (epoch, number): (u64, u64),
        key: &PageKey,
    ) -> Option<(Self, Tag)> {
        let rest = &mut &page.0[..];
        if get(rest) != MAGIC || [get_u64(rest), get_u64(rest)] != [epoch, number] {
            return None;
        }
        let (flushed, sequence, previous) = (get_u64(rest), get_u64(rest), get(rest));
        let count = usize::from(u16::from_le_bytes(get(rest)));
        let tag = key.check(Kind::Log, page)?;
        if count > records_per_page::<F>() {
            return None;
        }
        let records = rest.chunks_exact(record_bytes::<F>()).take(count).map(|bytes| {
            let mut content = bytes;
            let lba = get_u64(&mut content);
            if lba & VOID == 0 {
                let entry = F::decode(&content[..F::ENTRY_BYTES]);
                Record::Entry { lba: lba & !CARRIED, entry, is_carried: lba & CARRIED != 0 }
            } else {
                Record::Void { lba: lba & !VOID, blocks: get_u64(&mut content) }
            }
        });
        let records = records.collect();
        Some((Self { epoch, number, flushed, sequence, previous, records }, tag))
    }
}
