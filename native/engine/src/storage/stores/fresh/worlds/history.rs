//! The versions that each block may have during one life of a store
//! (`docs/understand/crash-consistency.md` §2, §3).

use std::collections::{BTreeMap, VecDeque};

/// A version of a block. Each write has its own; all deallocations share [`UNWRITTEN`].
pub type Version = u64;
/// Never written, or deallocated.
pub const UNWRITTEN: Version = 0;

/// A version and its time: later ones are newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Made {
    when: u64,
    version: Version,
}

/// The history of one block.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    /// Its possible versions until it is changed in this life. A read reduces them to one.
    base: Vec<Version>,
    /// Versions given to the device in this life that no flush covers.
    since: Vec<Made>,
    latest: Option<Made>,
    flushed: Option<Made>,
    /// The last acknowledged change, and its mark.
    marked: Option<(Made, u64)>,
    /// Versions of failed writes: one of them may have reached the device.
    failed: Vec<Version>,
}

/// A write that a gateway keeps so that it can send it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Their new version.
    pub version: Version,
}

/// Most writes that gateways keep.
const SENT_MAX: usize = 24;

/// The histories of all blocks.
#[derive(Debug, Clone, Default)]
pub struct History {
    blocks: BTreeMap<u64, Block>,
    clock: u64,
    /// Writes of this and earlier lives that may be sent again, latest last.
    pub sent: VecDeque<Sent>,
    /// The opening of the store in this life.
    pub opening: [u8; 16],
    /// The highest mark of a change that a flush covers.
    flushed_mark: u64,
    /// Number of blocks after an acknowledged growth; 0 if there was none.
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

    /// Records that a gateway sends a write.
    pub fn sent(&mut self, sent: Sent) {
        if self.sent.len() == SENT_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back(sent);
    }

    /// Records that the device is given a version.
    pub fn issued(&mut self, lba: u64, version: Version) {
        self.clock += 1;
        let when = self.clock;
        self.block(lba).since.push(Made { when, version });
    }

    /// Records that a change was acknowledged with this mark; it is the last one issued with that
    /// version.
    pub fn acknowledged(&mut self, lba: u64, version: Version, mark: u64) {
        self.clock += 1;
        let when = self.clock;
        let block = self.block(lba);
        // Others that were issued later may have completed first: this one is the newest now.
        block.since.retain(|made| made.version != version || version == UNWRITTEN);
        block.since.push(Made { when, version });
        block.latest = Some(Made { when, version });
        block.marked = Some((Made { when, version }, mark));
        block.failed.clear();
    }

    /// Records that a write failed after all of it had reached the device.
    pub fn failed(&mut self, lba: u64, version: Version) {
        self.block(lba).failed.push(version);
    }

    /// Whether the last acknowledged change of a block in this life has this version.
    pub fn is_latest(&self, lba: u64, version: Version) -> bool {
        let latest = self.blocks.get(&lba).and_then(|block| block.latest);
        latest.is_some_and(|latest| latest.version == version)
    }

    /// The current time: a flush that begins now covers all changes up to it.
    pub fn now(&self) -> u64 {
        self.clock
    }

    /// Whether a change was acknowledged after that time.
    pub fn has_changed_since(&self, when: u64) -> bool {
        self.blocks.values().any(|block| block.latest.is_some_and(|latest| latest.when > when))
    }

    /// Records that a flush that began at that time was acknowledged.
    pub fn flushed(&mut self, began: u64) {
        for block in self.blocks.values_mut() {
            let latest = block.latest.filter(|latest| latest.when <= began);
            block.flushed = latest.or(block.flushed);
            let marked = block.marked.filter(|(made, _)| made.when <= began);
            self.flushed_mark = self.flushed_mark.max(marked.map_or(0, |(_, mark)| mark));
        }
    }

    /// Records that an opening found this life's log up to that mark: changes with smaller marks,
    /// or newer changes of their blocks, are contained. Returns false if it should have found more.
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

    /// From now on, blocks must not return to versions older than the flushed ones.
    pub fn settle(&mut self) {
        for block in self.blocks.values_mut() {
            if let Some(flushed) = block.flushed {
                block.base = vec![flushed.version];
                block.since.retain(|made| made.when > flushed.when);
            }
        }
    }

    /// Records that a read returned a version. Fails if that isn't allowed.
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

    /// Ends this life. Returns the history for the next one.
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
