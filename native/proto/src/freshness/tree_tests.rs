//! The tree compared with one computed from scratch, child by child, from all leaves.

use std::sync::Arc;

use proptest::prelude::*;

use super::node::{ARITY, Node, NodeKey};
use super::tree::{Root, Subtree, Tree};
use crate::aead::Secret;

fn key() -> Arc<NodeKey> {
    Arc::new(NodeKey::new(&Secret::take(&mut [7; 32])))
}

fn node(value: u64) -> Option<Node> {
    Node::from_word(u128::from(value).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
}

/// The root's tag over these leaves, none of it incremental.
fn from_scratch(key: &NodeKey, leaves: &[Option<Node>]) -> [u8; 16] {
    let mut nodes: Vec<u128> = leaves.iter().map(|node| Node::to_word(*node)).collect();
    let mut level = 1;
    while nodes.len() > 1 {
        let parent = |children: &[u128]| {
            children.iter().enumerate().fold(0, |sum, (place, child)| {
                let mut change = Vec::new();
                key.child_changes(level, &[(place, 0, *child)], &mut change);
                sum ^ change[0]
            })
        };
        nodes = nodes.chunks(ARITY).map(parent).collect();
        level += 1;
    }
    key.root_tag(leaves.len() as u64, nodes[0])
}

fn hash_all(subtrees: &mut [Subtree<'_>]) {
    subtrees.iter_mut().rev().for_each(Subtree::hash);
}

fn hash_on_threads(subtrees: &mut [Subtree<'_>]) {
    std::thread::scope(|scope| {
        for subtree in subtrees {
            scope.spawn(|| subtree.hash());
        }
    });
}

#[derive(Debug, Clone)]
enum Operation {
    /// Leaves and their nodes' values (0: void), and the number of hashers.
    Update(Vec<(u64, u64)>, usize),
    Void(u64, u64),
}

fn operation() -> impl Strategy<Value = Operation> {
    // Both scattered over the tree and close together, so that hashers get uneven parts.
    let leaf = prop_oneof![any::<u64>(), 0..40_u64, 4000..4400_u64];
    let update = prop::collection::vec((leaf, 0..5_u64), 0..60);
    prop_oneof![
        4 => (update, 1..=16_usize).prop_map(|(changes, hashers)| Operation::Update(changes, hashers)),
        1 => (any::<u64>(), any::<u64>()).prop_map(|(one, other)| Operation::Void(one, other)),
    ]
}

fn leaf_counts() -> impl Strategy<Value = u64> {
    prop_oneof![1..40_u64, Just(256), Just(257), 4000..6000_u64, Just(65_536), Just(70_001)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn the_root_equals_one_computed_from_scratch(
        leaf_count in leaf_counts(),
        operations in prop::collection::vec(operation(), 0..12),
    ) {
        let key = key();
        let mut tree = Tree::new(Arc::clone(&key), leaf_count);
        let mut leaves = vec![None; leaf_count as usize];
        for (number, operation) in (1..).zip(operations) {
            match operation {
                Operation::Update(changes, hashers) => {
                    let changes = changes.iter().map(|(leaf, value)| (leaf % leaf_count, node(*value)));
                    let mut batch: Vec<_> = changes.collect();
                    batch.sort_by_key(|(leaf, _)| *leaf);
                    batch.dedup_by_key(|(leaf, _)| *leaf);
                    for (leaf, node) in &batch {
leaves[*leaf as usize] = *node;
}
                    tree.update_on(&batch, hashers, hash_all);
                }
                Operation::Void(one, other) => {
                    let (one, other) = (one % (leaf_count + 1), other % (leaf_count + 1));
                    let range = one.min(other)..one.max(other);
                    leaves[range.start as usize..range.end as usize].fill(None);
                    tree.void(range);
                }
            }
            let expected = Root { commit: number, tag: from_scratch(&key, &leaves) };
            prop_assert_eq!(tree.root(), expected);
        }
        let found: Vec<_> = (0..leaf_count).map(|leaf| tree.node(leaf)).collect();
        prop_assert_eq!(found, leaves);
        prop_assert_eq!(tree.node(leaf_count), None);
    }
}

#[test]
fn any_number_of_threads_computes_the_same_root() {
    let key = key();
    let leaf_count = 70_001;
    let mut leaves = vec![None; leaf_count as usize];
    let mut trees: Vec<Tree> = (0..16).map(|_| Tree::new(Arc::clone(&key), leaf_count)).collect();
    for round in 1..6_u64 {
        let leaf = |index: u64| (index * index * 31 + round * 7919) % leaf_count;
        let mut batch: Vec<_> = (0..5000).map(|index| (leaf(index), node(index * round))).collect();
        batch.sort_by_key(|(leaf, _)| *leaf);
        batch.dedup_by_key(|(leaf, _)| *leaf);
        for (leaf, node) in &batch {
            leaves[*leaf as usize] = *node;
        }
        let expected = Root { commit: round, tag: from_scratch(&key, &leaves) };
        for (hashers, tree) in (1..).zip(&mut trees) {
            tree.update_on(&batch, hashers, hash_on_threads);
            assert_eq!(tree.root(), expected, "{hashers} hashers");
        }
    }
}

#[test]
fn a_batch_is_divided_evenly_wherever_its_leaves_are() {
    let all_over: Vec<_> = (0..8000).map(|index| (index * 8, node(index))).collect();
    let close_by: Vec<_> = (0..8000).map(|index| (index + 4096, node(index))).collect();
    for batch in [all_over, close_by] {
        let mut tree = Tree::new(key(), 65_536);
        tree.update_on(&batch, 8, |subtrees| {
            assert!((6..=8).contains(&subtrees.len()), "{}", subtrees.len());
            hash_all(subtrees);
        });
    }
    let mut tree = Tree::new(key(), 65_536);
    tree.update_on(&[(3, node(1))], 8, |subtrees| {
        assert_eq!(subtrees.len(), 1);
        hash_all(subtrees);
    });
}

#[test]
fn only_regions_that_are_not_void_take_memory() {
    let mut tree = Tree::new(key(), 1 << 30);
    let empty = tree.memory_bytes();
    // Only the tables: 8 bytes for 256 nodes, on nine levels.
    let tables = (1 << 22) + (1 << 18) + (1 << 14) + (1 << 10) + (1 << 6) + 4 + 1 + 1 + 1;
    assert_eq!(empty, 8 * tables);
    tree.update(&[(1 << 29, node(1))]);
    assert_eq!(tree.memory_bytes(), empty + 9 * 4096);
    tree.void(0..1 << 30);
    assert_eq!(tree.memory_bytes(), empty);
}

#[test]
fn a_full_tree_takes_the_memory_of_the_formula() {
    let leaf_count = 100_000_u64;
    let mut tree = Tree::new(key(), leaf_count);
    let batch: Vec<_> = (0..leaf_count).map(|leaf| (leaf, node(leaf + 1))).collect();
    tree.update(&batch);
    let formula = 16.0 * leaf_count as f64 * 16.0 / 15.0;
    let ratio = tree.memory_bytes() as f64 / formula;
    assert!((1.0..1.05).contains(&ratio), "{ratio}");
}

#[test]
fn the_number_of_leaves_is_in_the_root() {
    let tag = |leaf_count| Tree::new(key(), leaf_count).root().tag;
    assert_ne!(tag(20), tag(21));
}

#[test]
#[should_panic(expected = "out of order")]
fn a_batch_out_of_order_is_refused() {
    Tree::new(key(), 10).update(&[(3, None), (2, None)]);
}

#[test]
#[should_panic(expected = "beyond the tree")]
fn a_leaf_beyond_the_tree_is_refused() {
    Tree::new(key(), 10).update(&[(10, None)]);
}
