//! Blocks that are written where they are, on a device whose blocks have metadata: leaf pages and
//! log name the IV of each, and the block itself has the rest.
//!
//! A write is announced in the log, durably, before it is made. After a crash the block is looked
//! at: it is what was flushed last or one of those announced since, or its reads are refused.

use std::io;

use sealane_proto::freshness::fast_path::FastPathKey;
use sealane_proto::freshness::leaf::{Iv, Ivs};
use sealane_proto::sector::{BLOCK_BYTES, block_iv, check_written, field};

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
}

impl Map<Ivs> {
    /// The key of fast-path MACs.
    #[must_use]
    pub fn fast_path(&self) -> FastPathKey {
        self.keys.fast_path()
    }

    /// Has blocks about to be written from `lba` announced; [`Map::announce`] must have ended before
    /// they are. None: room must be made first.
    pub fn intend(&self, lba: u64, blocks: &[u8]) -> io::Result<Option<Vec<Iv>>> {
        let refuse = |detail: String| Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        let blocks = blocks.as_chunks::<BLOCK_BYTES>().0;
        let (count, intents_max) = (blocks.len() as u64, self.geometry.intents_max());
        if count > intents_max {
            return refuse(format!("{count} blocks are more than the store takes in one write"));
        }
        if let Some(reason) = blocks.iter().find_map(|block| check_written(block).err()) {
            return refuse(reason.id().into());
        }
        let ivs: Vec<Iv> = blocks.iter().map(block_iv).collect();
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

    /// Notes blocks from `lba` that were written.
    pub fn arrived(&self, lba: u64, ivs: &[Iv]) -> io::Result<()> {
        let mut state = self.state();
        for (lba, iv) in (lba..).zip(ivs) {
            state.intents.settle(lba);
            state.active.insert(lba, *iv);
        }
        state.check()
    }

    /// Notes blocks from `lba` that could not be written, or were not.
    pub fn give_up(&self, lba: u64, blocks: u64) {
        let mut state = self.state();
        (lba..lba + blocks).for_each(|lba| state.intents.give_up(lba));
    }
}
