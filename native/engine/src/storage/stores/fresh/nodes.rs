//! Pages of nodes: for each leaf, its node and which of its copies is current.

use sealane_proto::freshness::node::Node;

use super::super::pages::Page;
use super::codec::{Fields, get, get_u64};
use super::keys::{Kind, StoreKeys, Tag};

const MAGIC: [u8; 8] = *b"SEALNODE";
/// Bytes of the states of a page's leaves, two bits each.
const STATE_BYTES: usize = 62;
/// Number of leaves that one page describes.
pub const NODES_PER_PAGE: u64 = 4 * STATE_BYTES as u64;

/// A leaf that isn't void: its node, and which of its two copies is current.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Node of the leaf.
    pub node: Node,
    /// The current copy: 0 or 1.
    pub copy: u8,
}

/// The current copies of one page's leaves, two bits each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copies([u8; STATE_BYTES]);

impl Copies {
    /// All leaves are void.
    pub const VOID: Self = Self([0; STATE_BYTES]);

    /// The current copy of a leaf, by its index in the page; `None` if it is void.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<u8> {
        (self.0[index / 4] >> (index % 4 * 2) & 3).checked_sub(1)
    }

    /// Sets the current copy. Returns the previous one.
    pub fn set(&mut self, index: usize, copy: Option<u8>) -> Option<u8> {
        let before = self.get(index);
        let (byte, shift) = (&mut self.0[index / 4], index % 4 * 2);
        *byte = *byte & !(3 << shift) | copy.map_or(0, |copy| copy + 1) << shift;
        before
    }

    /// Number of leaves that aren't void.
    #[must_use]
    pub fn held(&self) -> u64 {
        // At most one of a leaf's two bits is set.
        self.0.iter().map(|byte| u64::from(byte.count_ones())).sum()
    }
}

/// One page of nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePage {
    /// Number of the checkpoint that wrote it.
    pub number: u64,
    /// Its index among the pages of nodes.
    pub index: u64,
    /// Number of blocks with entries in its leaves.
    pub written: u32,
    /// Its leaves; `None` if void.
    pub leaves: Vec<Option<Held>>,
}

impl NodePage {
    /// Encodes the page. Returns it with its tag.
    ///
    /// # Panics
    /// If it has more leaves than a page holds.
    #[must_use]
    pub fn encode(&self, keys: &StoreKeys) -> (Page, Tag) {
        assert!(self.leaves.len() as u64 <= NODES_PER_PAGE, "more leaves than a page holds");
        let mut page = Page::ZERO;
        let mut fields = Fields::new(&mut page);
        fields.put(&MAGIC);
        fields.put_u64(self.number);
        fields.put_u64(self.index);
        fields.put(&self.written.to_le_bytes());
        let mut copies = Copies::VOID;
        for (index, leaf) in self.leaves.iter().enumerate() {
            copies.set(index, leaf.map(|held| held.copy));
        }
        fields.put(&copies.0);
        for leaf in &self.leaves {
            fields.put(&Node::to_bytes(leaf.map(|held| held.node)));
        }
        let tag = keys.pages().seal(Kind::Nodes, &mut page);
        (page, tag)
    }

    /// Parses and authenticates the page. Returns it with its tag.
    #[must_use]
    pub fn decode(page: &Page, keys: &StoreKeys) -> Option<(Self, Tag)> {
        let rest = &mut &page.0[..];
        if get(rest) != MAGIC {
            return None;
        }
        let tag = keys.pages().check(Kind::Nodes, page)?;
        let (number, index) = (get_u64(rest), get_u64(rest));
        let written = u32::from_le_bytes(get(rest));
        let copies = Copies(get(rest));
        let leaves = (0..NODES_PER_PAGE as usize).map(|index| {
            let node = Node::from_bytes(get(rest));
            match (copies.get(index), node) {
                (None, None) => Some(None),
                (Some(copy @ (0 | 1)), Some(node)) => Some(Some(Held { node, copy })),
                _ => None,
            }
        });
        let leaves = leaves.collect::<Option<Vec<_>>>()?;
        Some((Self { number, index, written, leaves }, tag))
    }
}
