//! The fast-path MAC in a sector's metadata: it shows that this IV was current under this level-0
//! node, so that a read needs no leaf page (arXiv:2510.18756 §3.3.3).
//!
//! CBC-MAC with AES-256 over exactly three blocks: IV, LBA, node. Its outputs are stored on the
//! device; forging one is as hard as distinguishing AES from a random permutation.

use aes::cipher::BlockCipherEncrypt;
use aes::{Aes256, Block};

use super::leaf::{Iv, Ivs, Leaf, LeafFormat};
use super::node::{NODE_BYTES, Node, cipher};
use crate::aead::Secret;

/// Bytes of the MAC.
pub const FAST_PATH_MAC_BYTES: usize = 16;

/// The field's value for "none": the leaf page must be read.
pub const NONE: FastPathMac = [0; FAST_PATH_MAC_BYTES];

/// A fast-path MAC, as stored in a sector's metadata.
pub type FastPathMac = [u8; FAST_PATH_MAC_BYTES];

/// A sector's IV and a level-0 node that includes it. Created only from a leaf, whose page and node
/// match, so no MAC is ever issued for a node that doesn't include the IV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Included {
    lba: u64,
    iv: Iv,
    node: Node,
}

impl Included {
    /// The leaf's IV and node for the sector at `index` of its set; None if it is unwritten.
    #[must_use]
    pub fn of(leaf: &Leaf, index: usize) -> Option<Self> {
        let (iv, node) = (leaf.entry::<Ivs>(index)?, leaf.node()?);
        Some(Self { lba: leaf.index() * Ivs::ENTRIES_PER_LEAF + index as u64, iv, node })
    }
}

/// The key for fast-path MACs of one store. Wiped when dropped.
pub struct FastPathKey(Aes256);

impl core::fmt::Debug for FastPathKey {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("FastPathKey(…)")
    }
}

impl FastPathKey {
    /// Derives the key (HKDF-SHA256) from the tree's secret.
    #[must_use]
    pub fn new(secret: &Secret) -> Self {
        Self(cipher(secret, "sealane freshness fast path"))
    }

    /// The MAC for an IV that its node includes.
    #[must_use]
    pub fn issue(&self, included: &Included) -> FastPathMac {
        self.mac(included.lba, &included.iv, included.node)
    }

    /// Whether a sector read from the device with this IV and MAC is current under its set's
    /// current node. False only means that the leaf page must be checked.
    #[must_use]
    pub fn is_current(&self, lba: u64, iv: &Iv, node: Option<Node>, mac: &FastPathMac) -> bool {
        let Some(node) = node.filter(|_| *mac != NONE) else { return false };
        aws_lc_rs::constant_time::verify_slices_are_equal(&self.mac(lba, iv, node), mac).is_ok()
    }

    fn mac(&self, lba: u64, iv: &Iv, node: Node) -> FastPathMac {
        let mut state = Block::default();
        state[..iv.len()].copy_from_slice(iv);
        self.0.encrypt_block(&mut state);
        mix(&mut state, &lba.to_le_bytes());
        self.0.encrypt_block(&mut state);
        mix(&mut state, &Node::to_bytes(Some(node)));
        self.0.encrypt_block(&mut state);
        let mac: [u8; NODE_BYTES] = state.into();
        mac
    }
}

fn mix(state: &mut Block, bytes: &[u8]) {
    state.iter_mut().zip(bytes).for_each(|(state, byte)| *state ^= byte);
}

#[cfg(test)]
mod tests {
    use super::super::node::NodeKey;
    use super::*;

    fn world() -> (FastPathKey, NodeKey, Leaf) {
        let secret = Secret::take(&mut [7; 32]);
        let (key, nodes) = (FastPathKey::new(&secret), NodeKey::new(&secret));
        let mut leaf = Leaf::void(2);
        leaf.change::<Ivs>(&nodes, [(3, Some([1; 12])), (4, Some([2; 12]))]);
        (key, nodes, leaf)
    }

    #[test]
    fn a_sector_is_current_only_under_its_node() {
        let (key, nodes, mut leaf) = world();
        let mac = key.issue(&Included::of(&leaf, 3).expect("written"));
        let node = leaf.node();
        assert!(key.is_current(683, &[1; 12], node, &mac));
        assert!(!key.is_current(684, &[1; 12], node, &mac));
        assert!(!key.is_current(683, &[2; 12], node, &mac));
        assert!(!key.is_current(683, &[1; 12], None, &mac));
        for bit in 0..128 {
            let mut flipped = mac;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!key.is_current(683, &[1; 12], node, &flipped));
        }
        leaf.change::<Ivs>(&nodes, [(4, Some([3; 12]))]);
        assert!(!key.is_current(683, &[1; 12], leaf.node(), &mac), "a sibling changed");
        let other = FastPathKey::new(&Secret::take(&mut [8; 32]));
        assert!(!other.is_current(683, &[1; 12], node, &mac));
    }

    #[test]
    fn none_is_never_accepted_and_unwritten_sectors_get_no_mac() {
        let (key, _, leaf) = world();
        assert!(!key.is_current(683, &[1; 12], leaf.node(), &NONE));
        assert_eq!(Included::of(&leaf, 5), None);
        assert_eq!(Included::of(&leaf, 340), None);
    }
}
