//! A checkpoint: where tree and log stand. Two pages, written in turn.

use super::super::pages::Page;
use super::codec::{Fields, get, get_u64};
use super::keys::{Kind, StoreKeys, Tag};
use super::passage::{MILESTONES, Passage};

const MAGIC: [u8; 8] = *b"SEALCHKP";

/// Regions of the pages of nodes; each can be made void at once.
pub const REGIONS: usize = 400;

/// Where tree and log stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Counts checkpoints. Pages of nodes with a higher number belong to one never completed.
    pub number: u64,
    /// Counts openings of the store.
    pub epoch: u64,
    /// Drawn at random at each opening; the log's key depends on it.
    pub nonce: [u8; 16],
    /// Number of the first log page with changes that the leaf pages lack.
    pub log_start: u64,
    /// Tag of the log page before that, which the log goes on from.
    pub log_tag: Tag,
    /// Log pages before this one are flushed.
    pub log_flushed: u64,
    /// Next write sequence.
    pub sequence: u64,
    /// Root commits of the tree so far.
    pub commits: u64,
    /// Whether an anchor was advanced for this store: then there must be one.
    pub is_anchored: bool,
    /// Tag of the tree's root.
    pub root: Tag,
    /// Of every region: pages of nodes with a number before this one are void.
    pub void_since: Box<[u64; REGIONS]>,
    /// Which openings led here.
    pub passage: Passage,
}

impl Checkpoint {
    /// The page, and its tag.
    #[must_use]
    pub fn encode(&self, keys: &StoreKeys) -> (Page, Tag) {
        let mut page = Page::ZERO;
        let mut fields = Fields::new(&mut page);
        fields.put(&MAGIC);
        fields.put_u64(self.number);
        fields.put_u64(self.epoch);
        fields.put(&self.nonce);
        fields.put_u64(self.log_start);
        fields.put(&self.log_tag);
        let is_anchored = u64::from(self.is_anchored);
        for field in [self.log_flushed, self.sequence, self.commits, is_anchored] {
            fields.put_u64(field);
        }
        fields.put(&self.root);
        self.void_since.iter().for_each(|number| fields.put_u64(*number));
        self.passage.encode().iter().for_each(|milestone| fields.put(milestone));
        let tag = keys.pages().seal(Kind::Checkpoint, &mut page);
        (page, tag)
    }

    /// Parses and checks the page; also its tag.
    #[must_use]
    pub fn decode(page: &Page, keys: &StoreKeys) -> Option<(Self, Tag)> {
        let rest = &mut &page.0[..];
        if get(rest) != MAGIC {
            return None;
        }
        let (number, epoch, nonce) = (get_u64(rest), get_u64(rest), get(rest));
        let (log_start, log_tag) = (get_u64(rest), get(rest));
        let [log_flushed, sequence, commits, is_anchored] = [(); 4].map(|()| get_u64(rest));
        let root = get(rest);
        let mut void_since = Box::new([0; REGIONS]);
        void_since.iter_mut().for_each(|number| *number = get_u64(rest));
        let passage = Passage::decode(&[(); MILESTONES].map(|()| get(rest)));
        let tag = keys.pages().check(Kind::Checkpoint, page)?;
        let is_anchored = match is_anchored {
            0 => false,
            1 => true,
            _ => return None,
        };
        let checkpoint = Self {
            number,
            epoch,
            nonce,
            log_start,
            log_tag,
            log_flushed,
            sequence,
            commits,
            is_anchored,
            root,
            void_since,
            passage,
        };
        Some((checkpoint, tag))
    }
}
