//! Pages of a store that keeps freshness, as read from a device that may hold anything.

use sealane_engine::storage::stores::fresh::checkpoint::Checkpoint;
use sealane_engine::storage::stores::fresh::keys::{Authority, BODY_BYTES, Kind, StoreKeys};
use sealane_engine::storage::stores::fresh::log::LogPage;
use sealane_engine::storage::stores::fresh::map::Map;
use sealane_engine::storage::stores::fresh::nodes::NodePage;
use sealane_engine::storage::stores::fresh::placed::Placed;
use sealane_engine::storage::stores::fresh::superblock::Superblock;
use sealane_engine::storage::stores::pages::Page;
use sealane_proto::freshness::leaf::{Ivs, Leaf, LeafFormat};
use sealane_proto::freshness::node::NodeKey;
use sealane_proto::freshness::pending::Known;
use sealane_proto::sector::{BLOCK_BYTES, Block, block_iv, field, metadata};

use crate::script::Script;

/// Epoch, number and nonce of log pages that are parsed on their own.
const LOG: (u64, u64, [u8; 16]) = (1, 2, [3; 16]);
const UUID: [u8; 16] = [1; 16];
const SEED: [u8; 32] = [7; 32];

fn keys() -> StoreKeys {
    StoreKeys::new(&UUID, &SEED, &Authority::Device)
}

/// Gives a page its correct tag.
pub(crate) fn seal(kind: Kind, page: &mut Page) {
    match kind {
        // It contains the inputs of its own key, after magic, version and padding.
        Kind::Superblock => {
            let uuid = *page.0[16..].first_chunk().expect("a page has 32 bytes");
            let seed = *page.0[32..].first_chunk().expect("a page has 64 bytes");
            StoreKeys::new(&uuid, &seed, &Authority::Device).pages().seal(kind, page)
        }
        Kind::Log => keys().log(LOG.0, &LOG.2).seal(kind, page),
        _ => keys().pages().seal(kind, page),
    };
}

/// A page that decodes encodes to the same fields.
pub fn store_page(data: &[u8]) {
    let mut script = Script::new(data);
    let kind = script.byte() % 8;
    let mut block = [0; BLOCK_BYTES];
    let content = script.rest();
    let length = content.len().min(BLOCK_BYTES);
    block[..length].copy_from_slice(&content[..length]);
    let mut page = Page::ZERO;
    page.0[..BODY_BYTES].copy_from_slice(&block[..BODY_BYTES]);
    match kind {
        0 => superblock(page),
        1 => checkpoint(page),
        2 => log_page::<Placed>(page),
        3 => log_page::<Ivs>(page),
        4 => nodes(page),
        5 => leaf_page::<Placed>(page),
        6 => leaf_page::<Ivs>(page),
        _ => block_in_place(block),
    }
}

fn superblock(mut page: Page) {
    seal(Kind::Superblock, &mut page);
    if let Ok((decoded, keys)) = Superblock::decode(&page, &Authority::Device) {
        let again = Superblock::decode(&decoded.encode(&keys), &Authority::Device);
        assert_eq!(again.ok().map(|(again, _)| again), Some(decoded));
    }
}

fn checkpoint(mut page: Page) {
    seal(Kind::Checkpoint, &mut page);
    if let Some((decoded, _)) = Checkpoint::decode(&page, &keys()) {
        let (encoded, tag) = decoded.encode(&keys());
        assert_eq!(Checkpoint::decode(&encoded, &keys()), Some((decoded, tag)));
    }
}

fn log_page<F: LeafFormat>(mut page: Page) {
    seal(Kind::Log, &mut page);
    let (key, id) = (keys().log(LOG.0, &LOG.2), (LOG.0, LOG.1));
    if let Some((decoded, _)) = LogPage::decode::<F>(&page, id, &key) {
        let (encoded, tag) = decoded.encode::<F>(&key);
        assert_eq!(LogPage::decode::<F>(&encoded, id, &key), Some((decoded, tag)));
    }
}

fn nodes(mut page: Page) {
    seal(Kind::Nodes, &mut page);
    if let Some((decoded, _)) = NodePage::decode(&page, &keys()) {
        let (encoded, tag) = decoded.encode(&keys());
        assert_eq!(NodePage::decode(&encoded, &keys()), Some((decoded, tag)));
    }
}

/// A leaf page is accepted under its own node and no other; its entries can be encoded again.
fn leaf_page<F: LeafFormat>(page: Page) {
    let key = NodeKey::new(keys().tree());
    let node = key.leaf_node(9, &page.0);
    assert!(Leaf::check(&key, 9, Box::new(page.0), node).is_ok());
    let mut other = Page::ZERO;
    for index in 0..F::ENTRIES_PER_LEAF as usize + 1 {
        let entry = F::get(&page.0, index);
        F::set(&mut other.0, index, entry.as_ref());
        assert_eq!(F::get(&other.0, index), entry);
    }
    assert_eq!(Leaf::check(&key, 9, Box::new(other.0), node).is_ok(), other == page);
}

/// A block in place is either the one written last or refused; its MAC doesn't leave the store.
fn block_in_place(block: Block) {
    let iv = block_iv(&block);
    let mut expected = iv;
    expected[0] ^= block[0] & 1;
    for known in [Known::Entry(expected), Known::Void] {
        let mut blocks = [block];
        match Map::check_blocks(&[known], 5, &mut blocks) {
            Ok(()) if known == Known::Void => assert_eq!(blocks, [[0; BLOCK_BYTES]]),
            Ok(()) => {
                assert_eq!(expected, iv);
                assert!(metadata(&blocks[0], field::MAC).iter().all(|byte| *byte == 0));
            }
            Err(_) => assert_ne!(expected, iv),
        }
    }
}
