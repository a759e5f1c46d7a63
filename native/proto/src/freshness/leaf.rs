//! Leaf pages: the current entry of each sector of a set.

use std::fmt::Debug;

use super::node::{Node, NodeKey};
use super::pending::Known;
use crate::sector::IV_BYTES;

/// Bytes of a leaf page: one metadata block on the device.
pub const LEAF_BYTES: usize = 4096;

/// A leaf page as stored on the device.
pub type LeafPage = [u8; LEAF_BYTES];

/// The entries that a layout keeps for sectors in its leaf pages and its log. A page of zeros is
/// void: no sector of its set is written.
pub trait LeafFormat: Debug + Send + Sync + 'static {
    /// The entry of a written sector. Each write of a store has a different one.
    type Entry: Copy + PartialEq + Eq + Debug + Send + Sync + 'static;
    /// Number of sectors of a set.
    const ENTRIES_PER_LEAF: u64;
    /// Bytes of an entry in a log record.
    const ENTRY_BYTES: usize;

    /// The entry of an orphaned sector, whose current version is unknown. No write has this entry.
    const ORPHAN: Self::Entry;

    /// The entry, possibly [`Self::ORPHAN`], of a sector by its index in the set; None if it is
    /// unwritten or there is no such index.
    fn get(page: &LeafPage, index: usize) -> Option<Self::Entry>;
    /// The state of a sector, by its index in the set, according to the page.
    fn known(page: &LeafPage, index: usize) -> Known<Self::Entry> {
        match Self::get(page, index) {
            None => Known::Void,
            Some(entry) if entry == Self::ORPHAN => Known::Orphaned,
            Some(entry) => Known::Entry(entry),
        }
    }
    /// The page of a set of `sectors` sectors that are all orphaned.
    fn orphaned(sectors: u64) -> LeafPage {
        let mut page = [0; LEAF_BYTES];
        (0..sectors as usize).for_each(|index| Self::set(&mut page, index, Some(&Self::ORPHAN)));
        page
    }
    /// Sets the entry of a sector; None makes it unwritten. Does nothing if the index is beyond the
    /// set.
    fn set(page: &mut LeafPage, index: usize, entry: Option<&Self::Entry>);
    /// Writes an entry to [`Self::ENTRY_BYTES`] of a log record.
    fn encode(entry: &Self::Entry, bytes: &mut [u8]);
    /// Decodes an entry. The bytes are authentic, as they come from the log.
    fn decode(bytes: &[u8]) -> Self::Entry;
}

/// The layout in which a sector keeps its place and its own metadata: 340 IVs in a page, in order
/// of sectors, then 16 bytes of zeros (arXiv:2510.18756 §3.3). An IV of all zeros means unwritten,
/// and an IV of all ones (the last counter) orphaned; neither is ever granted.
#[derive(Debug)]
pub struct Ivs;

/// The initialization vector of a sector.
pub type Iv = [u8; IV_BYTES];

impl LeafFormat for Ivs {
    type Entry = Iv;
    const ENTRIES_PER_LEAF: u64 = 340;
    const ENTRY_BYTES: usize = IV_BYTES;
    const ORPHAN: Iv = [0xFF; IV_BYTES];

    fn get(page: &LeafPage, index: usize) -> Option<Iv> {
        let ivs = &page.as_chunks::<IV_BYTES>().0[..Self::ENTRIES_PER_LEAF as usize];
        ivs.get(index).copied().filter(|iv| *iv != [0; IV_BYTES])
    }

    fn set(page: &mut LeafPage, index: usize, entry: Option<&Iv>) {
        let ivs = &mut page.as_chunks_mut::<IV_BYTES>().0[..Self::ENTRIES_PER_LEAF as usize];
        if let Some(iv) = ivs.get_mut(index) {
            *iv = entry.copied().unwrap_or_default();
        }
    }

    fn encode(entry: &Iv, bytes: &mut [u8]) {
        bytes[..IV_BYTES].copy_from_slice(entry);
    }

    fn decode(bytes: &[u8]) -> Iv {
        std::array::from_fn(|index| bytes[index])
    }
}

/// A leaf page doesn't match its node: it is old, of another set, or damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("leaf page {0} is not the current one")]
pub struct StaleLeaf(pub u64);

/// A leaf page and its node. The type guarantees that page and node match.
#[derive(Debug, Clone)]
pub struct Leaf {
    index: u64,
    page: Box<LeafPage>,
    node: Option<Node>,
}

impl Leaf {
    /// The leaf of a set without written sectors.
    #[must_use]
    pub fn void(index: u64) -> Self {
        Self { index, page: Box::new([0; LEAF_BYTES]), node: None }
    }

    /// Checks a page that came from a device against the leaf's current node.
    pub fn check(
        key: &NodeKey,
        index: u64,
        page: Box<LeafPage>,
        node: Option<Node>,
    ) -> Result<Self, StaleLeaf> {
        // Nodes aren't secret, so the comparison need not take constant time.
        if key.leaf_node(index, &page) == node {
            Ok(Self { index, page, node })
        } else {
            Err(StaleLeaf(index))
        }
    }

    /// Sets entries, by index in the set.
    pub fn change<F: LeafFormat>(
        &mut self,
        key: &NodeKey,
        entries: impl IntoIterator<Item = (usize, Option<F::Entry>)>,
    ) {
        let before = self.page.clone();
        for (index, entry) in entries {
            F::set(&mut self.page, index, entry.as_ref());
        }
        self.node = key.changed_leaf_node(self.index, self.node, &before, &self.page);
    }

    /// Its index in the tree.
    #[must_use]
    pub fn index(&self) -> u64 {
        self.index
    }

    /// The page.
    #[must_use]
    pub fn page(&self) -> &LeafPage {
        &self.page
    }

    /// Its node; None if it is void.
    #[must_use]
    pub fn node(&self) -> Option<Node> {
        self.node
    }

    /// The current entry of a sector; None if it is unwritten or orphaned.
    #[must_use]
    pub fn entry<F: LeafFormat>(&self, index: usize) -> Option<F::Entry> {
        F::get(&self.page, index).filter(|entry| *entry != F::ORPHAN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aead::Secret;

    fn key() -> NodeKey {
        NodeKey::new(&Secret::take(&mut [7; 32]))
    }

    fn leaf(key: &NodeKey) -> Leaf {
        let mut leaf = Leaf::void(5);
        leaf.change::<Ivs>(key, [(0, Some([1; 12])), (339, Some([2; 12])), (340, Some([3; 12]))]);
        leaf
    }

    #[test]
    fn entries_are_found_only_where_they_were_set() {
        let leaf = leaf(&key());
        let written: Vec<_> =
            (0..400).filter_map(|index| Some((index, leaf.entry::<Ivs>(index)?))).collect();
        assert_eq!(written, [(0, [1; 12]), (339, [2; 12])]);
        assert_eq!(leaf.page()[4080..], [0; 16]);
        let mut bytes = [0; Ivs::ENTRY_BYTES];
        Ivs::encode(&[9; 12], &mut bytes);
        assert_eq!(Ivs::decode(&bytes), [9; 12]);
    }

    #[test]
    fn only_the_current_page_of_the_set_is_accepted() {
        let key = key();
        let current = leaf(&key);
        let check = |index, page: &LeafPage, node| Leaf::check(&key, index, Box::new(*page), node);
        assert!(check(5, current.page(), current.node()).is_ok());
        assert_eq!(check(6, current.page(), current.node()).unwrap_err(), StaleLeaf(6));
        assert!(check(5, &[0; LEAF_BYTES], current.node()).is_err());
        assert!(check(5, current.page(), None).is_err());
        assert!(check(5, &[0; LEAF_BYTES], None).is_ok());
        let mut next = current.clone();
        next.change::<Ivs>(&key, [(7, Some([4; 12]))]);
        assert!(check(5, current.page(), next.node()).is_err());
        assert!(check(5, next.page(), next.node()).is_ok());
    }

    #[test]
    fn a_leaf_whose_sectors_are_all_unwritten_is_void() {
        let key = key();
        let mut leaf = leaf(&key);
        leaf.change::<Ivs>(&key, [(0, None), (339, None)]);
        assert_eq!((leaf.node(), leaf.page()), (None, &[0; LEAF_BYTES]));
    }
}
