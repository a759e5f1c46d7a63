//! What each block may read as, seen through one life of a store (`docs/understand/crash-consistency.md` §2, §3).

use std::collections::{BTreeMap, VecDeque};

/// A version of a block; each write has its own, [`UNWRITTEN`] is shared by all that unwrite.
pub type Version = u64;
/// Never written, or deallocated.
pub const UNWRITTEN: Version = 0;

/// A version, and when it was made: what was made later is newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Made {
    when: u64,
    version: Version,
}

/// One block.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    /// What it may be while it isn't changed in this life. A read leaves one of them.
    base: Vec<Version>,
    /// Given to the device in this life, and no flush vouches for it.
    since: Vec<Made>,
    latest: Option<Made>,
    flushed: Option<Made>,
    /// The last change that was acknowledged, and its mark.
    marked: Option<(Made, u64)>,
    /// Made by writes that were told to have failed: one of them may be there.
    failed: Vec<Version>,
}

/// A write that a gateway keeps, to send it again as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// First block.
    pub lba: u64,
    /// How many.
    pub blocks: u64,
    /// What it makes of them.
    pub version: Version,
}

/// How many of them gateways keep.
const SENT_MAX: usize = 24;

/// All blocks.
#[derive(Debug, Clone, Default)]
pub struct History {
    blocks: BTreeMap<u64, Block>,
    clock: u64,
    /// Writes of this life and those before that may be sent again, latest last.
    pub sent: VecDeque<Sent>,
    /// The store's opening that this life has.
    pub opening: [u8; 16],
    /// The greatest mark of a change that a flush vouches for.
    flushed_mark: u64,
    /// Blocks that a growth was told to have ended with; 0: none was.
    pub block_count: u64,
}

impl Block {
    fn unwritten() -> Self {
        let (since, failed) = (Vec::new(), Vec::new());
        let base = vec![UNWRITTEN];
        Self { base, since, latest: None, flushed: None, marked: None, failed }
    }

    fn allowed(&self) -> Vec<Version> {
        let kept = self.latest.map_or_else(|| self.base.clone(), |latest| vec![latest.version]);
        kept.into_iter().chain(self.failed.iter().copied()).collect()
    }
}

impl History {
    fn block(&mut self, lba: u64) -> &mut Block {
        self.blocks.entry(lba).or_insert_with(Block::unwritten)
    }

    /// A gateway sends a write, whatever comes of it.
    pub fn sent(&mut self, sent: Sent) {
        if self.sent.len() == SENT_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back(sent);
    }

    /// The device is given a version.
    pub fn issued(&mut self, lba: u64, version: Version) {
        self.clock += 1;
        let when = self.clock;
        self.block(lba).since.push(Made { when, version });
    }

    /// A change was acknowledged with this mark: the last of that version that was issued.
    pub fn acknowledged(&mut self, lba: u64, version: Version, mark: u64) {
        self.clock += 1;
        let when = self.clock;
        let block = self.block(lba);
        // It may have been issued before others that ended first: it is the newest now.
        block.since.retain(|made| made.version != version || version == UNWRITTEN);
        block.since.push(Made { when, version });
        block.latest = Some(Made { when, version });
        block.marked = Some((Made { when, version }, mark));
        block.failed.clear();
    }

    /// A write failed when all of it was on the device.
    pub fn failed(&mut self, lba: u64, version: Version) {
        self.block(lba).failed.push(version);
    }

    /// Whether a block's last change that was acknowledged in this life made this version.
    pub fn is_latest(&self, lba: u64, version: Version) -> bool {
        let latest = self.blocks.get(&lba).and_then(|block| block.latest);
        latest.is_some_and(|latest| latest.version == version)
    }

    /// What a flush that begins now vouches for.
    pub fn now(&self) -> u64 {
        self.clock
    }

    /// Whether something was acknowledged after that time.
    pub fn has_changed_since(&self, when: u64) -> bool {
        self.blocks.values().any(|block| block.latest.is_some_and(|latest| latest.when > when))
    }

    /// A flush that began then was acknowledged.
    pub fn flushed(&mut self, began: u64) {
        for block in self.blocks.values_mut() {
            let latest = block.latest.filter(|latest| latest.when <= began);
            block.flushed = latest.or(block.flushed);
            let marked = block.marked.filter(|(made, _)| made.when <= began);
            self.flushed_mark = self.flushed_mark.max(marked.map_or(0, |(_, mark)| mark));
        }
    }

    /// An opening found the log of this life up to there: changes with smaller marks are contained, or
    /// something newer of their blocks is. False: it should have found more.
    pub fn found(&mut self, log_flushed: Option<u64>) -> bool {
        let found = log_flushed.unwrap_or(0);
        for block in self.blocks.values_mut() {
            if let Some((made, _)) = block.marked.filter(|(_, mark)| *mark <= found)
                && block.since.contains(&made)
            {
                block.base.clear();
                block.since.retain(|other| other.when >= made.when);
            }
        }
        found >= self.flushed_mark
    }

    /// From now on nothing older than what was flushed may come back.
    pub fn settle(&mut self) {
        for block in self.blocks.values_mut() {
            if let Some(flushed) = block.flushed {
                block.base = vec![flushed.version];
                block.since.retain(|made| made.when > flushed.when);
            }
        }
    }

    /// A read returned a version.
    pub fn returned(&mut self, lba: u64, version: Version) -> Result<(), String> {
        let block = self.block(lba);
        let allowed = block.allowed();
        if !allowed.contains(&version) {
            return Err(format!("block {lba} reads as version {version}, allowed is {allowed:?}"));
        }
        if block.latest.is_none() || block.failed.contains(&version) {
            block.base = vec![version];
            block.latest = block.latest.filter(|latest| latest.version == version);
        }
        block.failed.clear();
        Ok(())
    }

    /// Blocks that were ever changed.
    pub fn changed(&self) -> Vec<u64> {
        self.blocks.keys().copied().collect()
    }

    /// The history of a life after this one, which ends now.
    pub fn next(&self) -> Self {
        let left = |block: &Block| {
            let since = block.since.iter().map(|made| made.version);
            let mut base: Vec<_> = block.base.iter().copied().chain(since).collect();
            base.sort_unstable();
            base.dedup();
            Block { base, ..Block::unwritten() }
        };
        let blocks = self.blocks.iter().map(|(lba, block)| (*lba, left(block))).collect();
        let sent = self.sent.clone();
        let (clock, block_count) = (self.clock, self.block_count);
        Self { blocks, clock, sent, block_count, ..Self::default() }
    }
}
