//! Keys of one store, all derived from its secret (`docs/formats/stores.md` §2), and what they authenticate.

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

/// What a tag is over; part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The superblock.
    Superblock = 0,
    /// A checkpoint.
    Checkpoint = 1,
    /// A page of the log, under its opening's own key.
    Log = 2,
    /// A page of nodes.
    Nodes = 3,
    /// A label.
    Label = 4,
}

/// Who can make the pages of a store.
#[derive(Debug)]
pub enum Authority<'a> {
    /// Whoever reads its superblock, where the key lies: tags tell whole from torn only.
    Device,
    /// Who has this secret: what others made, or changed, is refused.
    Secret(&'a Secret),
}

/// A key that makes the tags of pages.
#[derive(Debug)]
pub struct PageKey(HmacKey);

impl PageKey {
    /// The tag of a message of that kind.
    ///
    /// # Panics
    /// Never: a MAC is longer than a tag.
    #[must_use]
    pub fn tag(&self, kind: Kind, message: &[u8]) -> Tag {
        *self.0.mac(kind as u8, message).first_chunk().expect("a MAC has 32 bytes")
    }

    /// Ends a page with the tag of its body.
    pub fn seal(&self, kind: Kind, page: &mut Page) -> Tag {
        let (body, end) = page.0.split_at_mut(BODY_BYTES);
        let tag = self.tag(kind, body);
        end.copy_from_slice(&tag);
        tag
    }

    /// The tag of a page if it is that of its body.
    #[must_use]
    pub fn check(&self, kind: Kind, page: &Page) -> Option<Tag> {
        let (body, end) = page.0.split_at(BODY_BYTES);
        let tag = self.tag(kind, body);
        are_equal(&tag, end).then_some(tag)
    }
}

/// The keys of one store.
///
/// Tags are HMAC: whoever answers for the device can have a number used twice by putting an older
/// state back, which GMAC doesn't forgive. A block's checksum is GMAC with its write sequence as
/// nonce. It tells torn from whole, also for bytes that a tenant chose; that it is authentic, the
/// block's seal says, whose tag and IV lie in the authentic entry.
#[derive(Debug)]
pub struct StoreKeys {
    pages: PageKey,
    blocks: MacKey,
    log: Secret,
    tree: Secret,
    fast_path: FastPathKey,
}

impl StoreKeys {
    /// The keys of the store of that name and seed.
    #[must_use]
    pub fn new(uuid: &[u8; 16], seed: &[u8; 32], authority: &Authority<'_>) -> Self {
        let mut seed = *seed;
        let root = match authority {
            Authority::Device => Secret::take(&mut seed),
            // A fresh seed for each layout: no two have a key in common.
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

    /// The key of all pages but the log's.
    #[must_use]
    pub fn pages(&self) -> &PageKey {
        &self.pages
    }

    /// The key of the log of one opening. Two openings have no key in common, even if they have the
    /// epoch: so no page of one that was cut off, or forked, continues the log of another.
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
