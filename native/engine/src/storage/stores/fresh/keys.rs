//! Keys of one store, all derived from its secret (`docs/formats/stores.md` §2), and the tags made
//! with them.

use sealane_proto::aead::{HmacKey, MacKey, NONCE_BYTES, Secret};
use sealane_proto::digest::are_equal;
use sealane_proto::freshness::fast_path::FastPathKey;

use super::super::pages::{PAGE_BYTES, Page};

/// Bytes of a page's tag.
pub const TAG_BYTES: usize = 16;
/// Bytes of a page before its tag.
pub const BODY_BYTES: usize = PAGE_BYTES - TAG_BYTES;
/// Bytes of a block's checksum.
pub const CHECKSUM_BYTES: usize = 8;

/// A tag: the first 16 bytes of HMAC-SHA256 over the kind and the page's body.
pub type Tag = [u8; TAG_BYTES];

/// What a tag authenticates; included in the tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The superblock.
    Superblock = 0,
    /// A checkpoint.
    Checkpoint = 1,
    /// A page of the log, under the key of its opening.
    Log = 2,
    /// A page of nodes.
    Nodes = 3,
    /// A label.
    Label = 4,
}

/// Who can make authentic pages of a store.
#[derive(Debug)]
pub enum Authority<'a> {
    /// Anybody who can read the superblock, which contains the key: tags only detect torn pages.
    Device,
    /// Whoever has this secret: pages made or changed by others are refused.
    Secret(&'a Secret),
}

/// A key for tags of pages.
#[derive(Debug)]
pub struct PageKey(HmacKey);

impl PageKey {
    /// The tag of a message of a kind.
    ///
    /// # Panics
    /// Never: a MAC is longer than a tag.
    #[must_use]
    pub fn tag(&self, kind: Kind, message: &[u8]) -> Tag {
        *self.0.mac(kind as u8, message).first_chunk().expect("a MAC has 32 bytes")
    }

    /// Appends the tag of its body to a page.
    pub fn seal(&self, kind: Kind, page: &mut Page) -> Tag {
        let (body, end) = page.0.split_at_mut(BODY_BYTES);
        let tag = self.tag(kind, body);
        end.copy_from_slice(&tag);
        tag
    }

    /// Authenticates a page. Returns its tag if it is right.
    #[must_use]
    pub fn check(&self, kind: Kind, page: &Page) -> Option<Tag> {
        let (body, end) = page.0.split_at(BODY_BYTES);
        let tag = self.tag(kind, body);
        are_equal(&tag, end).then_some(tag)
    }
}

/// The keys of one store.
///
/// Tags are HMACs, because whoever controls the device can make the store use a number twice by
/// restoring an older state, which GMAC doesn't tolerate. A block's checksum is a GMAC with the
/// write sequence as its nonce. It distinguishes complete blocks from torn ones, also if a tenant
/// chose the data. The block's authenticity comes from its seal, whose tag and IV are in the
/// authenticated entry.
#[derive(Debug)]
pub struct StoreKeys {
    pages: PageKey,
    blocks: MacKey,
    log: Secret,
    tree: Secret,
    fast_path: FastPathKey,
}

impl StoreKeys {
    /// The keys of the store with this UUID and seed.
    #[must_use]
    pub fn new(uuid: &[u8; 16], seed: &[u8; 32], authority: &Authority<'_>) -> Self {
        let mut seed = *seed;
        let root = match authority {
            Authority::Device => Secret::take(&mut seed),
            // Each store has a fresh seed, so no two share a key.
            Authority::Secret(secret) => secret.derive("sealane store v4 root", &seed),
        };
        let key = |label| root.derive(label, uuid);
        let tree = key("sealane store v4 tree");
        Self {
            pages: PageKey(HmacKey::new(&key("sealane store v4 pages"))),
            blocks: MacKey::new(&key("sealane store v4 blocks")),
            log: key("sealane store v4 log"),
            fast_path: FastPathKey::new(&tree),
            tree,
        }
    }

    /// The key of all pages except those of the log.
    #[must_use]
    pub fn pages(&self) -> &PageKey {
        &self.pages
    }

    /// The key of the log of one opening. No two openings share a key, even with the same epoch, so
    /// no page of an interrupted or forked opening continues the log of another.
    #[must_use]
    pub fn log(&self, epoch: u64, nonce: &[u8; 16]) -> PageKey {
        let mut context = [0; 24];
        context[..8].copy_from_slice(&epoch.to_le_bytes());
        context[8..].copy_from_slice(nonce);
        PageKey(HmacKey::new(&self.log.derive("sealane store v4 log of an opening", &context)))
    }

    /// The secret of the tree.
    #[must_use]
    pub fn tree(&self) -> &Secret {
        &self.tree
    }

    /// The key of fast-path MACs.
    #[must_use]
    pub fn fast_path(&self) -> &FastPathKey {
        &self.fast_path
    }

    /// Checksum of a block: data, then metadata.
    ///
    /// # Panics
    /// Never: a MAC is longer than a checksum.
    #[must_use]
    pub fn block(&self, sequence: u64, block: &[u8]) -> [u8; CHECKSUM_BYTES] {
        let mut nonce = [0; NONCE_BYTES];
        nonce[..8].copy_from_slice(&sequence.to_le_bytes());
        *self.blocks.mac(nonce, block).first_chunk().expect("a MAC has 16 bytes")
    }
}
