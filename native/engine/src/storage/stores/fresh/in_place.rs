//! Blocks that are written where they are, on a device whose blocks have metadata: leaf pages and
//! log name the IV of each, and the block itself has the rest.
//!
//! A write is announced in the log, durably, before it is made. After a crash the block is looked
//! at: it is what was flushed last or one of those announced since, or its reads are refused.

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

    /// Of their IVs. It isn't right if one of them was written or made void since it was merged.
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

    /// Takes the IVs of blocks from `lba` that came from the device, where nothing else is known of
    /// them: of those whose fast-path MAC says that they are current.
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

    /// Makes of blocks from `lba` that came from the device what a read returns, now that all is
    /// known of them: without fast-path MACs, and zeros where nothing is written. An error if one
    /// isn't what was written last.
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

    /// Gives blocks of one set that came from the device their fast-path MACs, after a full check: of
    /// each whether that is another than it had. None: there is none to give, as it is unwritten or has
    /// a change that waits to be merged. An error if it isn't what was written last, or the leaf page
    /// isn't. Nobody may write the blocks meanwhile, and until they are back on the device. May read
    /// their leaf page, and block.
    pub fn vouch<'a>(
        &self,
        set: u64,
        blocks: impl IntoIterator<Item = (u64, &'a mut Block)>,
    ) -> io::Result<Vec<io::Result<Option<bool>>>> {
        let known = |(lba, block)| (lba, block, self.current(lba, 1)[0]);
        // In this order: what was merged since is in the leaf page.
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

    /// Has blocks about to be written from `lba` announced; [`Map::announce`] must have ended before
    /// they are. None: room must be made first.
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
            let detail = "too many writes failed and were not made again".into();
            return Err(Refusal::Failed(detail).into());
        }
        let announced = state.intents.count() as u64;
        if announced + count > intents_max || state.pending() + count > self.geometry.pending_max {
            return Ok(None);
        }
        state.intents.add(lba, &ivs)?;
        Ok(Some(ivs))
    }

    /// Notes that the blocks of the write from `lba` were written.
    pub fn arrived(&self, lba: u64, ivs: &[Iv]) -> io::Result<()> {
        let mut state = self.state();
        state.intents.settle(lba);
        for (lba, iv) in (lba..).zip(ivs) {
            state.active.insert(lba, *iv);
        }
        state.check()
    }

    /// Notes that the blocks of the write from `lba` could not be written, or were not.
    pub fn give_up(&self, lba: u64) {
        self.state().intents.give_up(lba);
    }
}
