//! Keyed node functions: sums of encrypted blocks, so that an update costs only as much as has
//! changed.
//!
//! Level 0: node = AES(*seal*; Σ AES(*leaf*; block *i* ⊕ mask *i*) ⊕ AES(*leaf*; leaf number ⊕ mask
//! 256)), over the 256 blocks of a leaf page. The sum never leaves the process. The node is its
//! encryption, so nodes need not be secret.
//!
//! Above: sum over 16 children of AES(*inner*; child ⊕ mask of level and place) ⊕ AES(*inner*; the
//! same mask), which is zero if all children are void. Inner nodes never leave the process; of the
//! root, only the output of a PRF does. `docs/decisions/0024-node-function.md` argues why this is
//! sound.

use std::num::NonZeroU128;

use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes256, Block};
use zeroize::Zeroizing;

use super::leaf::{LEAF_BYTES, LeafPage};
use crate::aead::{HmacKey, Secret};

/// Number of children of an inner node.
pub const ARITY: usize = 16;
/// Bytes of a node.
pub const NODE_BYTES: usize = 16;
/// Maximum levels of a tree.
pub const LEVELS_MAX: usize = 16;

/// Number of blocks of a leaf page.
const LEAF_BLOCKS: usize = LEAF_BYTES / NODE_BYTES;
/// Blocks encrypted at a time: enough to use the AES units fully, and few enough to stay in
/// registers and first-level cache.
const BATCH: usize = 64;
/// Maximum changed blocks for an incremental update; with more, the whole page is summed. Each
/// changed block costs two encryptions, a whole page one for each block.
const CHANGED_MAX: usize = LEAF_BLOCKS / 2;

/// A node of level 0. Void sets have none; `Option<Node>` has the same size, and zero bytes mean
/// void.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node(NonZeroU128);

impl Node {
    /// Encodes a node for storage; zeros mean void.
    #[must_use]
    pub fn to_bytes(node: Option<Self>) -> [u8; NODE_BYTES] {
        Self::to_word(node).to_le_bytes()
    }

    /// Decodes a stored node; zeros mean void.
    #[must_use]
    pub fn from_bytes(bytes: [u8; NODE_BYTES]) -> Option<Self> {
        Self::from_word(u128::from_le_bytes(bytes))
    }

    pub(super) fn to_word(node: Option<Self>) -> u128 {
        node.map_or(0, |node| node.0.get())
    }

    pub(super) fn from_word(word: u128) -> Option<Self> {
        NonZeroU128::new(word).map(Self)
    }
}

/// Keys of all node functions of one tree, derived from one secret. Wiped when dropped.
pub struct NodeKey {
    leaf: Aes256,
    seal: Aes256,
    inner: Aes256,
    leaf_masks: Zeroizing<Vec<u128>>,
    inner_masks: Zeroizing<Vec<[u128; ARITY]>>,
    root: HmacKey,
}

impl core::fmt::Debug for NodeKey {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("NodeKey(…)")
    }
}

/// The AES-256 key derived by HKDF for a label.
pub(super) fn cipher(secret: &Secret, label: &str) -> Aes256 {
    Aes256::new(&Array::from(*Zeroizing::new(*secret.derive(label, b"").bytes())))
}

fn block(word: u128) -> Block {
    word.to_le_bytes().into()
}

fn word(block: &Block) -> u128 {
    u128::from_le_bytes((*block).into())
}

fn add(sum: u128, blocks: &[Block]) -> u128 {
    blocks.iter().fold(sum, |sum, block| sum ^ word(block))
}

impl NodeKey {
    /// Derives the keys (HKDF-SHA256) from this tree's own secret, which must be the same at every
    /// opening.
    #[must_use]
    pub fn new(secret: &Secret) -> Self {
        let masks = cipher(secret, "sealane freshness masks");
        let mask = |place: usize| {
            let mut mask = block(place as u128);
            masks.encrypt_block(&mut mask);
            word(&mask)
        };
        let of_level = |level| std::array::from_fn(|place| mask((level + 1) << 16 | place));
        Self {
            leaf: cipher(secret, "sealane freshness leaf"),
            seal: cipher(secret, "sealane freshness node"),
            inner: cipher(secret, "sealane freshness inner"),
            leaf_masks: Zeroizing::new((0..=LEAF_BLOCKS).map(mask).collect()),
            inner_masks: Zeroizing::new((0..LEVELS_MAX).map(of_level).collect()),
            root: HmacKey::new(&secret.derive("sealane freshness root", b"")),
        }
    }

    /// The node of a leaf page; None if the page is void (all zeros).
    #[must_use]
    pub fn leaf_node(&self, leaf: u64, page: &LeafPage) -> Option<Node> {
        if *page == [0; LEAF_BYTES] {
            return None;
        }
        let mut blocks = [Block::default(); BATCH];
        let mut sum = self.place_of_leaf(leaf);
        let parts = page.as_chunks::<NODE_BYTES>().0.as_chunks::<BATCH>().0;
        for (part, masks) in parts.iter().zip(self.leaf_masks.as_chunks::<BATCH>().0) {
            for ((place, found), mask) in blocks.iter_mut().zip(part).zip(masks) {
                *place = block(u128::from_le_bytes(*found) ^ mask);
            }
            self.leaf.encrypt_blocks(&mut blocks);
            sum = add(sum, &blocks);
        }
        Some(self.sealed(sum))
    }

    /// The node of a leaf page that changed from `before`, with `node`, to `after`.
    #[must_use]
    pub fn changed_leaf_node(
        &self,
        leaf: u64,
        node: Option<Node>,
        before: &LeafPage,
        after: &LeafPage,
    ) -> Option<Node> {
        let Some(node) = node else { return self.leaf_node(leaf, after) };
        if *after == [0; LEAF_BYTES] {
            return None;
        }
        let mut blocks = [Block::default(); 2 * CHANGED_MAX];
        let mut count = 0;
        let (old, new) = (before.as_chunks::<NODE_BYTES>().0, after.as_chunks::<NODE_BYTES>().0);
        for ((old, new), mask) in old.iter().zip(new).zip(&**self.leaf_masks) {
            if old == new {
                continue;
            }
            let Some([one, other]) = blocks.get_mut(count..count + 2) else {
                return self.leaf_node(leaf, after);
            };
            *one = block(u128::from_le_bytes(*old) ^ mask);
            *other = block(u128::from_le_bytes(*new) ^ mask);
            count += 2;
        }
        let changed = &mut blocks[..count];
        self.leaf.encrypt_blocks(changed);
        Some(self.sealed(add(self.opened(node), changed)))
    }

    /// Appends the differences that changed children make in the sums of their parents on `level`.
    /// Each child, one level below, is given by its place among 16 siblings and its old and new
    /// words. At most [`Self::CHILDREN_MAX`] at a time.
    pub(super) fn child_changes(
        &self,
        level: usize,
        children: &[(usize, u128, u128)],
        changes: &mut Vec<u128>,
    ) {
        let masks = &self.inner_masks[level];
        let mut blocks = [Block::default(); BATCH];
        let blocks = &mut blocks[..2 * children.len()];
        for (pair, (place, old, new)) in blocks.as_chunks_mut::<2>().0.iter_mut().zip(children) {
            let mask = masks[place % ARITY];
            *pair = [block(old ^ mask), block(new ^ mask)];
        }
        self.inner.encrypt_blocks(blocks);
        changes.extend(blocks.as_chunks::<2>().0.iter().map(|[old, new]| word(old) ^ word(new)));
    }

    /// Maximum children that `child_changes` takes at a time.
    pub(super) const CHILDREN_MAX: usize = BATCH / 2;

    /// The public tag of a root: it doesn't reveal the node, and no other root has the same.
    pub(super) fn root_tag(&self, leaf_count: u64, top: u128) -> [u8; NODE_BYTES] {
        let mut message = [0; 24];
        message[..8].copy_from_slice(&leaf_count.to_le_bytes());
        message[8..].copy_from_slice(&top.to_le_bytes());
        let mac = self.root.mac(0, &message);
        std::array::from_fn(|index| mac[index])
    }

    fn place_of_leaf(&self, leaf: u64) -> u128 {
        let mut place = block(u128::from(leaf) ^ self.leaf_masks[LEAF_BLOCKS]);
        self.leaf.encrypt_block(&mut place);
        word(&place)
    }

    fn sealed(&self, sum: u128) -> Node {
        let mut node = block(sum);
        self.seal.encrypt_block(&mut node);
        // One of the 2^128 sums encrypts to zero and takes another sum's node.
        Node(NonZeroU128::new(word(&node)).unwrap_or(NonZeroU128::MIN))
    }

    fn opened(&self, node: Node) -> u128 {
        let mut sum = block(node.0.get());
        self.seal.decrypt_block(&mut sum);
        word(&sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> NodeKey {
        NodeKey::new(&Secret::take(&mut [7; 32]))
    }

    fn page() -> LeafPage {
        std::array::from_fn(|index| (index % 251 + index / 251) as u8)
    }

    #[test]
    fn every_block_and_the_leafs_number_change_the_node() {
        let (key, page) = (key(), page());
        let node = key.leaf_node(3, &page);
        assert_ne!(node, key.leaf_node(4, &page));
        for index in (0..LEAF_BYTES).step_by(15) {
            let mut other = page;
            other[index] ^= 1;
            assert_ne!(node, key.leaf_node(3, &other), "byte {index}");
        }
    }

    #[test]
    fn blocks_that_change_places_change_the_node() {
        let (key, page) = (key(), page());
        for other in 1..LEAF_BLOCKS {
            let mut swapped = page;
            let (first, rest) = swapped.split_at_mut(other * NODE_BYTES);
            first[..NODE_BYTES].swap_with_slice(&mut rest[..NODE_BYTES]);
            assert_ne!(key.leaf_node(3, &page), key.leaf_node(3, &swapped), "block {other}");
        }
    }

    #[test]
    fn another_secret_makes_other_nodes() {
        let other = NodeKey::new(&Secret::take(&mut [8; 32]));
        assert_ne!(key().leaf_node(3, &page()), other.leaf_node(3, &page()));
        assert_ne!(key().root_tag(1, 5), other.root_tag(1, 5));
    }

    #[test]
    fn an_incremental_update_gives_the_same_node_as_the_whole_page() {
        let (key, before) = (key(), page());
        let node = key.leaf_node(9, &before);
        for changed in [0, 1, 5, 127, 128, 129, 256] {
            let mut after = before;
            after.iter_mut().step_by(16).take(changed).for_each(|byte| *byte ^= 0x80);
            let found = key.changed_leaf_node(9, node, &before, &after);
            assert_eq!(found, key.leaf_node(9, &after), "{changed} blocks");
        }
        assert_eq!(key.changed_leaf_node(9, None, &[0; LEAF_BYTES], &before), node);
        assert_eq!(key.changed_leaf_node(9, node, &before, &[0; LEAF_BYTES]), None);
    }

    #[test]
    fn void_pages_have_no_node_and_are_stored_as_zeros() {
        assert_eq!(key().leaf_node(3, &[0; LEAF_BYTES]), None);
        assert_eq!(Node::to_bytes(None), [0; NODE_BYTES]);
        let node = key().leaf_node(3, &page());
        assert_eq!(Node::from_bytes(Node::to_bytes(node)), node);
        assert_eq!(Node::from_bytes([0; NODE_BYTES]), None);
    }

    #[test]
    fn a_child_contributes_by_level_and_place_and_not_at_all_if_void() {
        let key = key();
        let change = |level, place, old, new| {
            let mut changes = Vec::new();
            key.child_changes(level, &[(place, old, new)], &mut changes);
            changes[0]
        };
        let one = change(1, 0, 0, 77);
        assert_ne!(one, change(2, 0, 0, 77));
        assert_ne!(one, change(1, 1, 0, 77));
        assert_eq!(one ^ change(1, 0, 77, 78), change(1, 0, 0, 78));
        assert_eq!(change(1, 0, 77, 77), 0);
    }

    #[test]
    fn nodes_equal_those_of_another_implementation() {
        // Nodes are stored, so a change of the functions is a change of the stores' format.
        let key = key();
        let mut inner = Vec::new();
        key.child_changes(1, &[(2, 0, 77)], &mut inner);
        let found = [
            ("leaf", Node::to_bytes(key.leaf_node(3, &page()))),
            ("inner", inner[0].to_le_bytes()),
            ("root", key.root_tag(20, 5)),
        ];
        let hex = |bytes: [u8; 16]| bytes.map(|byte| format!("{byte:02x}")).concat();
        let found = found.map(|(name, bytes)| format!("{name} {}\n", hex(bytes))).concat();
        assert_eq!(found, include_str!("node_vectors.txt"));
    }
}
