//! Blocks of tests: sealed sectors in form, of which every part names LBA and version.

use sealane_proto::sector::{
    BLOCK_BYTES, Block, FORMAT_VERSION, METADATA_BYTES, field, metadata_mut,
};

use super::super::pages::Page;

/// Bytes of a part.
const PART_BYTES: usize = 64;

/// A version of a block, from 1 on.
pub fn block(lba: u64, version: u64) -> Block {
    let mut block = [0; BLOCK_BYTES];
    for (index, part) in (0u64..).zip(block.chunks_exact_mut(PART_BYTES)) {
        let fields = [lba, version, index].map(u64::to_le_bytes);
        part[..24].copy_from_slice(fields.as_flattened());
    }
    metadata_mut(&mut block, (field::MAC.0, METADATA_BYTES)).fill(0);
    metadata_mut(&mut block, field::VERSION).fill(FORMAT_VERSION);
    block
}

/// Which version a block is as a whole; None if it is none. Looks at the start of each sector of 512
/// bytes: what lies between can't be of another write.
pub fn version_of(lba: u64, data: &Page, metadata: &[u8; METADATA_BYTES]) -> Option<u64> {
    let version = u64::from_le_bytes(data.0[8..16].try_into().expect("8 bytes"));
    let starts = data.0.chunks_exact(512).chain([&metadata[..]]);
    let is_whole = (0u64..).step_by(8).zip(starts).all(|(index, start)| {
        let expected = [lba, version, index].map(u64::to_le_bytes);
        start[..24] == *expected.as_flattened()
    });
    is_whole.then_some(version)
}
