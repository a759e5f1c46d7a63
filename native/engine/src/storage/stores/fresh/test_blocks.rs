//! Blocks for tests: they have the form of sealed sectors, and each part contains LBA and version.

use sealane_proto::sector::{
    BLOCK_BYTES, Block, DATA_BYTES, FORMAT_VERSION, METADATA_BYTES, field, metadata_mut,
};

use super::super::pages::Page;

/// Bytes of a part.
const PART_BYTES: usize = 64;

/// Version `version`, from 1 on, of a block. No two versions have the same IV.
pub fn block(lba: u64, version: u64) -> Block {
    let mut block = [0; BLOCK_BYTES];
    for (index, part) in (0u64..).zip(block[..DATA_BYTES].chunks_exact_mut(PART_BYTES)) {
        let fields = [lba, version, index].map(u64::to_le_bytes);
        part[..24].copy_from_slice(fields.as_flattened());
    }
    block[DATA_BYTES..].copy_from_slice(&metadata(lba, version));
    block
}

fn metadata(lba: u64, version: u64) -> [u8; METADATA_BYTES] {
    let mut block = [0; BLOCK_BYTES];
    let name = [version, lba].map(u64::to_le_bytes);
    metadata_mut(&mut block, field::TAG).copy_from_slice(name.as_flattened());
    metadata_mut(&mut block, field::IV).copy_from_slice(&name.as_flattened()[..12]);
    metadata_mut(&mut block, field::VERSION).fill(FORMAT_VERSION);
    *block.last_chunk().expect("a block ends with its metadata")
}

/// The version of a block, or `None` if it is no complete version. Checks the start of each
/// 512-byte sector: the rest of a sector can't come from another write.
pub fn version_of(lba: u64, data: &Page, metadata: &[u8; METADATA_BYTES]) -> Option<u64> {
    let version = u64::from_le_bytes(data.0[8..16].try_into().expect("8 bytes"));
    let is_whole = (0u64..).step_by(8).zip(data.0.chunks_exact(512)).all(|(index, start)| {
        let expected = [lba, version, index].map(u64::to_le_bytes);
        start[..24] == *expected.as_flattened()
    });
    (is_whole && *metadata == self::metadata(lba, version)).then_some(version)
}
