//! Blocks overwritten in place, on a device whose blocks have metadata: leaf pages and log contain
//! the IV of each block, and the block itself contains the rest.
//!
//! A write is announced in the log, durably, before it is made. After a crash, a block must be the
//! one flushed last or one of those announced since; otherwise its reads are refused.

use std::io;
use std::sync::Arc;

use sealane_proto::freshness::fast_path::Included;
use sealane_proto::freshness::leaf::{Iv, Ivs, LEAF_BYTES, Leaf, LeafFormat, LeafPage};
use sealane_proto::freshness::pending::Known;
use sealane_proto::sector::{
    BLOCK_BYTES, Block, block_iv, check_written, field, metadata, metadata_mut,
};

use super::super::pages::BlockFile;
use super::failure::Refusal;
use super::geometry::Geometry;
use super::keys::StoreKeys;
use super::map::{Layout, Map};

impl Layout for Ivs {
    const IS_IN_PLACE: bool = true;

    fn slot(_entry: &Iv) -> Option<u64> {
        None
    }

    /// Whether the block has the IV.
    fn has_arrived(
        lba: u64,
        iv: &Iv,
        file: &dyn BlockFile,
        geometry: &Geometry,
        _keys: &StoreKeys,
    ) -> io::Result<bool> {
        let metadata = file.read_metadata(geometry.in_place_block(lba))?;
        Ok(metadata[field::IV.0..field::IV.1] == *iv)
    }

    /// Derives the page from the IVs of its blocks. It is wrong if one of them was written or
    /// deallocated since the last merge.
    fn derive(set: u64, file: &dyn BlockFile, geometry: &Geometry) -> io::Result<Option<LeafPage>> {
        let mut page = [0; LEAF_BYTES];
        let start = set * Self::ENTRIES_PER_LEAF;
        let end = geometry.block_count.min(start + Self::ENTRIES_PER_LEAF);
        for (index, lba) in (start..end).enumerate() {
            let metadata = file.read_metadata(geometry.in_place_block(lba))?;
            let iv: Iv = *metadata[field::IV.0..].first_chunk().unwrap_or(&[0; 12]);
            Self::set(&mut page, index, Some(&iv).filter(|iv| **iv != [0; 12]));
        }
        Ok(Some(page))
    }
}

impl Map<Ivs> {
    // Reads.

    /// Takes the IVs of blocks from `lba` on that were read from the device, if nothing else is
    /// known about a block and its fast-path MAC shows that it is current.
    pub fn take_vouched(&self, known: &mut [Known<Iv>], lba: u64, blocks: &[Block]) {
        for ((lba, block), known) in (lba..).zip(blocks).zip(known) {
            if *known == Known::Absent && self.is_vouched_for(lba, block) {
                *known = Known::Entry(block_iv(block));
            }
        }
    }

    fn is_vouched_for(&self, lba: u64, block: &Block) -> bool {
        let node = self.leaves.node(lba / Ivs::ENTRIES_PER_LEAF);
        let Ok(mac) = metadata(block, field::MAC).try_into() else { return false };
        self.keys.fast_path().is_current(lba, &block_iv(block), node, mac)
    }

    /// Turns blocks from `lba` on that were read from the device into the result of a read, once
    /// everything is known about them: removes fast-path MACs and zeroes unwritten blocks. Fails if
    /// a block isn't the version written last.
    pub fn check_blocks(known: &[Known<Iv>], lba: u64, blocks: &mut [Block]) -> io::Result<()> {
        for ((lba, block), known) in (lba..).zip(blocks).zip(known) {
            match known {
                Known::Entry(iv) if block_iv(block) == *iv => {
                    metadata_mut(block, field::MAC).fill(0);
                }
                Known::Entry(_) => return Err(Refusal::Stale(lba).into()),
                Known::Orphaned => return Err(Refusal::Orphaned(lba).into()),
                Known::Void | Known::Absent => block.fill(0),
            }
        }
        Ok(())
    }

    /// Issues fast-path MACs for blocks of one set that were read from the device, after a full
    /// check. Returns for each whether the MAC has changed; `None` if the block is unwritten or has
    /// a pending change; an error if it isn't the version written last. Fails if the leaf page
    /// isn't the version written last. Nobody may write the blocks until they have been written
    /// back to the device. Blocks if it must read the leaf page.
    pub fn vouch<'a>(
        &self,
        set: u64,
        blocks: impl IntoIterator<Item = (u64, &'a mut Block)>,
    ) -> io::Result<Vec<io::Result<Option<bool>>>> {
        let known = |(lba, block)| (lba, block, self.current(lba, 1)[0]);
        // Must come first: changes merged afterwards are in the leaf page.
        let blocks: Vec<_> = blocks.into_iter().map(known).collect();
        let leaf = self.leaf(set)?.and_then(|page| self.leaves.with_node(set, &page));
        let vouched = blocks.into_iter().map(|(lba, block, known)| match &leaf {
            Some(leaf) if known == Known::Absent => self.vouch_under(leaf, lba, block),
            _ => Ok(None),
        });
        Ok(vouched.collect())
    }

    fn vouch_under(&self, leaf: &Leaf, lba: u64, block: &mut Block) -> io::Result<Option<bool>> {
        let index = (lba % Ivs::ENTRIES_PER_LEAF) as usize;
        let Some(included) = Included::of(leaf, index) else { return Ok(None) };
        if Some(block_iv(block)) != leaf.entry::<Ivs>(index) {
            return Err(Refusal::Stale(lba).into());
        }
        let mac = self.keys.fast_path().issue(&included);
        let is_new = metadata(block, field::MAC) != mac;
        metadata_mut(block, field::MAC).copy_from_slice(&mac);
        Ok(Some(is_new))
    }

    // Changes.

    /// Registers a write of blocks from `lba` on for announcement. [`Map::announce`] must complete
    /// before the write is made. Returns `None` if room must be made first.
    pub fn intend(&self, lba: u64, blocks: &[u8]) -> io::Result<Option<Arc<[Iv]>>> {
        let refuse = |detail: String| Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        let blocks = blocks.as_chunks::<BLOCK_BYTES>().0;
        let (count, intents_max) = (blocks.len() as u64, self.geometry.intents_max());
        if count > intents_max {
            return refuse(format!("{count} blocks are more than the store takes in one write"));
        }
        if let Some(reason) = blocks.iter().find_map(|block| check_written(block).err()) {
            return refuse(reason.id().into());
        }
        let ivs: Arc<[Iv]> = blocks.iter().map(block_iv).collect();
        let mut state = self.state();
        state.check()?;
        if state.intents.doubts() as u64 + count > intents_max {
            let detail = "too many writes failed and were not repeated".into();
            return Err(Refusal::Failed(detail).into());
        }
        let announced = state.intents.count() as u64;
        if announced + count > intents_max || state.pending() + count > self.geometry.pending_max {
            return Ok(None);
        }
        state.intents.add(lba, &ivs)?;
        Ok(Some(ivs))
    }

    /// Records that the write from `lba` on has completed.
    pub fn arrived(&self, lba: u64, ivs: &[Iv]) -> io::Result<()> {
        let mut state = self.state();
        state.intents.settle(lba);
        for (lba, iv) in (lba..).zip(ivs) {
            state.active.insert(lba, *iv);
        }
        state.check()
    }

    /// Records that the write from `lba` on has failed or was not made.
    pub fn give_up(&self, lba: u64) {
        self.state().intents.give_up(lba);
    }
}
