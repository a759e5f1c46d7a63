//! A checkpoint: where the tree and the log stand. It has two pages on the device, written
//! alternately.

use sealane_proto::freshness::milestone::MILESTONE_BYTES;

use super::super::pages::Page;
use super::codec::{Fields, get, get_u64};
use super::geometry::{GROWTHS_MAX, Sizes};
use super::keys::{BODY_BYTES, Kind, StoreKeys, Tag};
use super::passage::{MILESTONES, Passage};

const MAGIC: [u8; 8] = *b"SEALCHKP";

/// Regions of the pages of nodes; each can be made void at once.
pub const REGIONS: usize = 400;
/// Offset of the growths, which end the body.
const GROWTHS_AT: usize = 112 + 8 * REGIONS + MILESTONE_BYTES * MILESTONES;

/// Where the tree and the log stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Number of the checkpoint. Pages of nodes with a higher number belong to a checkpoint that
    /// was never completed.
    pub number: u64,
    /// Number of the opening.
    pub epoch: u64,
    /// Drawn at random at each opening; the log's key depends on it.
    pub nonce: [u8; 16],
    /// Number of the first log page with changes that aren't in leaf pages.
    pub log_start: u64,
    /// Tag of the log page before that.
    pub log_tag: Tag,
    /// Log pages before this one are flushed.
    pub log_flushed: u64,
    /// Next write sequence.
    pub sequence: u64,
    /// Number of root commits of the tree.
    pub commits: u64,
    /// Whether the store was anchored when this was written. An opening doesn't check it.
    pub is_anchored: bool,
    /// Tag of the tree's root.
    pub root: Tag,
    /// For each region: pages of nodes with a number before this one are void.
    pub void_since: Box<[u64; REGIONS]>,
    /// The openings that led here.
    pub passage: Passage,
    /// The store's sizes after each growth.
    pub growths: Vec<Sizes>,
}

impl Checkpoint {
    /// Encodes the page. Returns it with its tag.
    ///
    /// # Panics
    /// If the store grew too often.
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
        assert!(self.growths.len() <= GROWTHS_MAX, "more growths than a checkpoint holds");
        fields.put_u64(self.growths.len() as u64);
        for sizes in &self.growths {
            let Sizes { block_count, slot_count, log_pages, pending_max } = *sizes;
            fields.put_u64(block_count);
            fields.put_u64(slot_count);
            for count in [log_pages, pending_max] {
                // Valid values have 32 bits: see `Geometry::with_extent`.
                fields.put(&(count as u32).to_le_bytes());
            }
        }
        let tag = keys.pages().seal(Kind::Checkpoint, &mut page);
        (page, tag)
    }

    /// Parses and authenticates the page. Returns it with its tag.
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
        let rest = &mut &page.0[GROWTHS_AT..];
        let growths = usize::try_from(get_u64(rest)).ok().filter(|count| *count <= GROWTHS_MAX)?;
        let sizes = |()| {
            let [block_count, slot_count] = [(); 2].map(|()| get_u64(rest));
            let [log_pages, pending_max] =
                [(); 2].map(|()| u64::from(u32::from_le_bytes(get(rest))));
            Sizes { block_count, slot_count, log_pages, pending_max }
        };
        let growths = std::iter::repeat_n((), growths).map(sizes).collect();
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
            growths,
        };
        Some((checkpoint, tag))
    }
}

const _: () = assert!(GROWTHS_AT + 8 + 24 * GROWTHS_MAX <= BODY_BYTES);
