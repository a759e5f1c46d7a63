//! Of which slots leaf pages tell: a bit each, in pages that are leaves of the tree themselves.

use std::collections::BTreeSet;
use std::sync::Arc;

use sealane_proto::freshness::leaf::{LEAF_BYTES, LeafPage};

use super::geometry::SLOTS_PER_MAP;

/// The pages, as the merge under way leaves them.
#[derive(Debug)]
pub struct SlotMaps {
    pages: Vec<Option<Box<LeafPage>>>,
    dirty: BTreeSet<u64>,
}

impl SlotMaps {
    /// No leaf page tells of any slot.
    #[must_use]
    pub fn new(page_count: u64) -> Self {
        let pages = (0..page_count).map(|_| None).collect();
        Self { pages, dirty: BTreeSet::new() }
    }

    /// Has so many pages from now on, none fewer.
    pub fn extend(&mut self, page_count: u64) {
        self.pages.resize_with(page_count as usize, || None);
    }

    /// The pages that tell of a slot, by index. Nothing has changed since they were asked for.
    pub fn all(&self) -> impl Iterator<Item = (u64, Arc<LeafPage>)> + '_ {
        (0..).zip(&self.pages).filter_map(|(index, page)| Some((index, Arc::new(**page.as_ref()?))))
    }

    /// Takes a page as the device has it.
    pub fn load(&mut self, index: u64, page: &LeafPage) {
        self.pages[index as usize] = Some(Box::new(*page));
    }

    /// Notes whether a leaf page tells of a slot.
    pub fn set(&mut self, slot: u64, is_told: bool) {
        let (index, bit) = (slot / SLOTS_PER_MAP, (slot % SLOTS_PER_MAP) as usize);
        let page = self.pages[index as usize].get_or_insert_with(|| Box::new([0; LEAF_BYTES]));
        let mask = 1 << (bit % 8);
        if is_told {
            page[bit / 8] |= mask;
        } else {
            page[bit / 8] &= !mask;
        }
        self.dirty.insert(index);
    }

    /// A page.
    #[must_use]
    pub fn page(&self, index: u64) -> Arc<LeafPage> {
        Arc::new(self.pages[index as usize].as_deref().copied().unwrap_or([0; LEAF_BYTES]))
    }

    /// Has a page written again as it is.
    pub fn rewrite(&mut self, index: u64) {
        self.dirty.insert(index);
    }

    /// Pages changed since this was asked last; None: it tells of no slot any more.
    pub fn take_dirty(&mut self) -> Vec<(u64, Option<Arc<LeafPage>>)> {
        let dirty = std::mem::take(&mut self.dirty);
        let page = |index: u64| {
            let page = &mut self.pages[index as usize];
            if page.as_deref() == Some(&[0; LEAF_BYTES]) {
                *page = None;
            }
            (index, page.as_deref().map(|page| Arc::new(*page)))
        };
        dirty.into_iter().map(page).collect()
    }
}

/// The slots that a page tells of.
pub fn slots_of(index: u64, page: &LeafPage) -> impl Iterator<Item = u64> + '_ {
    let bytes = (index * SLOTS_PER_MAP..).step_by(8).zip(page);
    bytes.flat_map(|(first, byte)| {
        (0..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| first + bit)
    })
}
