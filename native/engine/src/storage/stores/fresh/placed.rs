//! Leaf pages of blocks out of place: the slot of each block, and its metadata except what all
//! blocks have in common.

use std::io;

use sealane_proto::freshness::leaf::{LEAF_BYTES, LeafFormat, LeafPage};
use sealane_proto::nvme::Reason;
use sealane_proto::sector::{
    BLOCK_BYTES, Block, DATA_BYTES, FORMAT_VERSION, IV_BYTES, METADATA_BYTES, check_written, field,
};

use super::super::pages::{BlockFile, Page};
use super::geometry::Geometry;
use super::keys::{CHECKSUM_BYTES, StoreKeys};
use super::map::Layout;

/// Bytes of an entry: slot 6, write sequence 8, checksum 8, tag 16, IV 12, key epoch 4.
const ENTRY_BYTES: usize = 54;
/// Bytes of a slot's number in an entry.
const SLOT_BYTES: usize = 6;
/// Tag and IV, which are adjacent in a block's metadata, too.
const SEAL_BYTES: usize = field::IV.1;

/// The entry of a written block. Authenticated by the leaf page or log record that contains it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedEntry {
    /// Slot of its data.
    pub slot: u64,
    /// Number of the write that placed it; nonce of its checksum.
    pub sequence: u64,
    /// Checksum over data and metadata.
    pub checksum: [u8; CHECKSUM_BYTES],
    seal: [u8; SEAL_BYTES],
    key_epoch: [u8; 4],
}

impl PlacedEntry {
    /// The entry of a block that is written to a slot. Fails if the block has metadata that a
    /// written sector can't have (`docs/formats/secure-queue.md` §1), which an entry has no room
    /// for.
    ///
    /// # Panics
    /// Never: the fields are in the block.
    pub fn new(
        slot: u64,
        sequence: u64,
        checksum: [u8; CHECKSUM_BYTES],
        block: &Block,
    ) -> Result<Self, Reason> {
        check_written(block)?;
        let metadata = &block[DATA_BYTES..];
        Ok(Self {
            slot,
            sequence,
            checksum,
            seal: *metadata.first_chunk().expect("metadata is longer"),
            key_epoch: *metadata[field::KEY_EPOCH.0..].first_chunk().expect("metadata is longer"),
        })
    }

    /// The block's IV.
    ///
    /// # Panics
    /// Never: tag and IV are its first fields.
    #[must_use]
    pub fn iv(&self) -> [u8; IV_BYTES] {
        *self.seal[field::IV.0..].first_chunk().expect("the IV follows the tag")
    }

    /// The block's metadata.
    #[must_use]
    pub fn metadata(&self) -> [u8; METADATA_BYTES] {
        let mut metadata = [0; METADATA_BYTES];
        metadata[..SEAL_BYTES].copy_from_slice(&self.seal);
        metadata[field::KEY_EPOCH.0..field::KEY_EPOCH.1].copy_from_slice(&self.key_epoch);
        metadata[field::VERSION.0] = FORMAT_VERSION;
        metadata
    }
}

/// The leaf format of blocks out of place.
#[derive(Debug, Clone, Copy)]
pub struct Placed;

impl Layout for Placed {
    const IS_IN_PLACE: bool = false;

    fn slot(entry: &PlacedEntry) -> Option<u64> {
        Some(entry.slot)
    }

    /// Whether the slot's contents match the checksum.
    fn has_arrived(
        _lba: u64,
        entry: &PlacedEntry,
        file: &dyn BlockFile,
        geometry: &Geometry,
        keys: &StoreKeys,
    ) -> io::Result<bool> {
        let mut pages = [Page::ZERO];
        file.read(geometry.slot(entry.slot), &mut pages)?;
        let mut block = [0; BLOCK_BYTES];
        block[..DATA_BYTES].copy_from_slice(&pages[0].0);
        block[DATA_BYTES..].copy_from_slice(&entry.metadata());
        Ok(keys.block(entry.sequence, &block) == entry.checksum)
    }

    /// Only the leaf page says where a block is.
    fn derive(
        _set: u64,
        _file: &dyn BlockFile,
        _geometry: &Geometry,
    ) -> io::Result<Option<LeafPage>> {
        Ok(None)
    }
}

impl LeafFormat for Placed {
    type Entry = PlacedEntry;
    const ENTRIES_PER_LEAF: u64 = (LEAF_BYTES / ENTRY_BYTES) as u64;
    const ENTRY_BYTES: usize = ENTRY_BYTES;
    /// Its slot has the highest number, which no device has.
    const ORPHAN: PlacedEntry = PlacedEntry {
        slot: (1 << (8 * SLOT_BYTES)) - 2,
        sequence: 0,
        checksum: [0; CHECKSUM_BYTES],
        seal: [0; SEAL_BYTES],
        key_epoch: [0; 4],
    };

    fn get(page: &[u8; LEAF_BYTES], index: usize) -> Option<PlacedEntry> {
        let bytes = &page.as_chunks::<ENTRY_BYTES>().0.get(index)?;
        bytes[..SLOT_BYTES].iter().any(|byte| *byte != 0).then(|| Self::decode(&bytes[..]))
    }

    fn set(page: &mut [u8; LEAF_BYTES], index: usize, entry: Option<&PlacedEntry>) {
        let Some(bytes) = page.as_chunks_mut::<ENTRY_BYTES>().0.get_mut(index) else { return };
        match entry {
            Some(entry) => Self::encode(entry, bytes),
            None => bytes.fill(0),
        }
    }

    /// The slot is stored plus one, so that zeros mean no entry.
    fn encode(entry: &PlacedEntry, bytes: &mut [u8]) {
        let (slot, rest) = bytes.split_at_mut(SLOT_BYTES);
        slot.copy_from_slice(&entry.slot.wrapping_add(1).to_le_bytes()[..SLOT_BYTES]);
        let (sequence, rest) = rest.split_at_mut(8);
        sequence.copy_from_slice(&entry.sequence.to_le_bytes());
        let (checksum, rest) = rest.split_at_mut(CHECKSUM_BYTES);
        checksum.copy_from_slice(&entry.checksum);
        let (seal, key_epoch) = rest.split_at_mut(SEAL_BYTES);
        seal.copy_from_slice(&entry.seal);
        key_epoch.copy_from_slice(&entry.key_epoch);
    }

    fn decode(bytes: &[u8]) -> PlacedEntry {
        let rest = &mut &bytes[..];
        let mut slot = [0; 8];
        slot[..SLOT_BYTES].copy_from_slice(&super::codec::get::<SLOT_BYTES>(rest));
        PlacedEntry {
            // Zero is no slot: it becomes one beyond the store, which is refused.
            slot: u64::from_le_bytes(slot).wrapping_sub(1),
            sequence: super::codec::get_u64(rest),
            checksum: super::codec::get(rest),
            seal: super::codec::get(rest),
            key_epoch: super::codec::get(rest),
        }
    }
}

const _: () = assert!(ENTRY_BYTES == SLOT_BYTES + 8 + CHECKSUM_BYTES + SEAL_BYTES + 4);
const _: () = assert!(BLOCK_BYTES == LEAF_BYTES + METADATA_BYTES);
