//! Pages of nodes: of each leaf its node and which copy of it is current.

use sealane_proto::freshness::node::Node;

use super::super::pages::Page;
use super::codec::{Fields, get, get_u64};
use super::keys::{Kind, StoreKeys};

const MAGIC: [u8; 8] = *b"SEALNODE";
/// Bytes of the states of a page's leaves: two bits each.
const STATE_BYTES: usize = 62;
/// Leaves that one page tells of.
pub const NODES_PER_PAGE: u64 = 4 * STATE_BYTES as u64;

/// A leaf that isn't void: its node, and which of its two copies is current.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Node of the leaf.
    pub node: Node,
    /// The current copy: 0 or 1.
    pub copy: u8,
}

/// One page of nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePage {
    /// Number of the checkpoint it belongs to.
    pub number: u64,
    /// Its place.
    pub index: u64,
    /// Its leaves; None: void.
    pub leaves: Vec<Option<Held>>,
}

impl NodePage {
    /// The page.
    ///
    /// # Panics
    /// If it has more leaves than a page holds.
    #[must_use]
    pub fn encode(&self, keys: &StoreKeys) -> Page {
        assert!(self.leaves.len() as u64 <= NODES_PER_PAGE, "more leaves than a page holds");
        let mut page = Page::ZERO;
        let mut fields = Fields::new(&mut page);
        fields.put(&MAGIC);
        fields.put_u64(self.number);
        fields.put_u64(self.index);
        let states = fields.next(STATE_BYTES);
        for (index, leaf) in self.leaves.iter().enumerate() {
            let state = leaf.map_or(0, |held| held.copy + 1);
            states[index / 4] |= state << (index % 4 * 2);
        }
        for leaf in &self.leaves {
            fields.put(&Node::to_bytes(leaf.map(|held| held.node)));
        }
        keys.pages().seal(Kind::Nodes, &mut page);
        page
    }

    /// Parses and checks the page.
    #[must_use]
    pub fn decode(page: &Page, keys: &StoreKeys) -> Option<Self> {
        let rest = &mut &page.0[..];
        if get(rest) != MAGIC {
            return None;
        }
        keys.pages().check(Kind::Nodes, page)?;
        let (number, index) = (get_u64(rest), get_u64(rest));
        let states: [u8; STATE_BYTES] = get(rest);
        let leaves = (0..NODES_PER_PAGE as usize).map(|index| {
            let node = Node::from_bytes(get(rest));
            match (states[index / 4] >> (index % 4 * 2) & 3, node) {
                (0, None) => Some(None),
                (state @ (1 | 2), Some(node)) => Some(Some(Held { node, copy: state - 1 })),
                _ => None,
            }
        });
        let leaves = leaves.collect::<Option<Vec<_>>>()?;
        Some(Self { number, index, leaves })
    }
}
