//! The slots in use by leaf pages: one bit each, in pages that are leaves of the tree themselves.

use std::collections::BTreeSet;
use std::sync::Arc;

use sealane_proto::freshness::leaf::{LEAF_BYTES, LeafPage};

use super::geometry::SLOTS_PER_MAP;

/// The pages as the running merge leaves them.
#[derive(Debug)]
pub struct SlotMaps {
    pages: Vec<Option<Box<LeafPage>>>,
    dirty: BTreeSet<u64>,
}

impl SlotMaps {
    /// No slot is in use.
    #[must_use]
    pub fn new(page_count: u64) -> Self {
        let pages = (0..page_count).map(|_| None).collect();
        Self { pages, dirty: BTreeSet::new() }
    }

    /// Extends the slot maps to `page_count` pages, which must not be fewer than before.
    pub fn extend(&mut self, page_count: u64) {
        self.pages.resize_with(page_count as usize, || None);
    }

    /// The pages with slots in use, by index. There must be no changes since the last
    /// [`Self::take_dirty`].
    pub fn all(&self) -> impl Iterator<Item = (u64, Arc<LeafPage>)> + '_ {
        (0..).zip(&self.pages).filter_map(|(index, page)| Some((index, Arc::new(**page.as_ref()?))))
    }

    /// Loads a page from the device.
    pub fn load(&mut self, index: u64, page: &LeafPage) {
        self.pages[index as usize] = Some(Box::new(*page));
    }

    /// Records whether a leaf page refers to a slot.
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

    /// The current contents of a page.
    #[must_use]
    pub fn page(&self, index: u64) -> Arc<LeafPage> {
        Arc::new(self.pages[index as usize].as_deref().copied().unwrap_or([0; LEAF_BYTES]))
    }

    /// Marks a page for rewriting.
    pub fn rewrite(&mut self, index: u64) {
        self.dirty.insert(index);
    }

    /// Pages changed since the last call; `None` if a page has no slots in use any more.
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

/// The slots in use according to a page.
pub fn slots_of(index: u64, page: &LeafPage) -> impl Iterator<Item = u64> + '_ {
    let bytes = (index * SLOTS_PER_MAP..).step_by(8).zip(page);
    bytes.flat_map(|(first, byte)| {
        (0..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| first + bit)
    })
}
