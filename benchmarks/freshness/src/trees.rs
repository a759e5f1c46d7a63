//! Node functions, updates of a tree over a petabyte, and its memory.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use sealane_proto::aead::Secret;
use sealane_proto::freshness::leaf::{Ivs, Leaf, LeafFormat};
use sealane_proto::freshness::node::{Node, NodeKey};
use sealane_proto::freshness::tree::{Subtree, Tree};

use crate::sample::{PETABYTE_LEAVES, Random, print, processor_time, resident_bytes};

const BATCHES: [usize; 6] = [64, 256, 1024, 4096, 16_384, 65_536];
const HASHERS: [usize; 5] = [1, 2, 4, 8, 16];
const CALLS: u64 = 2000;

pub fn key() -> Arc<NodeKey> {
    Arc::new(NodeKey::new(&Secret::take(&mut [7; 32])))
}

/// Returns an arbitrary node.
pub fn node(random: &mut Random) -> Option<Node> {
    let mut bytes = [1; 16];
    bytes[..8].copy_from_slice(&random.below(u64::MAX).to_le_bytes());
    Node::from_bytes(bytes)
}

pub fn hash_on_threads(subtrees: &mut [Subtree<'_>]) {
    let [only] = subtrees else {
        return std::thread::scope(|scope| {
            for subtree in subtrees {
                scope.spawn(|| subtree.hash());
            }
        });
    };
    only.hash();
}

/// Measures nanoseconds per call of each function.
pub fn functions(rounds: u64) {
    let key = key();
    let mut leaf = Leaf::void(3);
    leaf.change::<Ivs>(&key, (0..340).map(|index| (index, Some([index as u8 | 1; 12]))));
    let time = |name: &str, call: &mut dyn FnMut(u64)| {
        let start = processor_time();
        (0..CALLS).for_each(call);
        let nanos = (processor_time() - start).as_nanos() as f64 / CALLS as f64;
        print("function", &[(name, nanos)]);
    };
    let mut tree = Tree::new(Arc::clone(&key), PETABYTE_LEAVES);
    let mut random = Random(1);
    for _ in 0..rounds {
        time("leaf_page", &mut |_| {
            black_box(key.leaf_node(3, black_box(leaf.page())));
        });
        for count in [1, 4, 16, 64] {
            let mut after = *leaf.page();
            for index in 0..count {
                Ivs::set(&mut after, index * 5, Some(&[9; 12]));
            }
            time(&format!("changed_entries_{count}"), &mut |_| {
                black_box(key.changed_leaf_node(3, leaf.node(), leaf.page(), black_box(&after)));
            });
        }
        time("single_update", &mut |_| tree.update(&[(12_345_678, node(&mut random))]));
        time("look", &mut |_| {
            black_box(tree.node(black_box(12_345_678)));
        });
    }
}

/// Measures batches of updates spread over a petabyte, among 2^`log_pool` leaves whose memory is allocated,
/// or among all leaves (12 GB). Only the update of the path to the root is timed; new nodes are given.
pub fn updates(rounds: u64, log_pool: u64) {
    let mut random = Random(2);
    let mut tree = Tree::new(key(), PETABYTE_LEAVES);
    let mut pool: Vec<u64> = Vec::new();
    if log_pool > 0 {
        pool = (0..1 << log_pool).map(|_| random.below(PETABYTE_LEAVES)).collect();
        pool.sort_unstable();
        pool.dedup();
        let batch: Vec<_> = pool.iter().map(|leaf| (*leaf, node(&mut random))).collect();
        tree.update(&batch);
    } else {
        fill(&mut tree, PETABYTE_LEAVES, &mut random);
    }
    let mut draw = |count: usize| -> Vec<(u64, Option<Node>)> {
        let mut leaves: Vec<u64> = (0..count)
            .map(|_| match pool.len() as u64 {
                0 => random.below(PETABYTE_LEAVES),
                size => pool[random.below(size) as usize],
            })
            .collect();
        leaves.sort_unstable();
        leaves.dedup();
        leaves.into_iter().map(|leaf| (leaf, node(&mut random))).collect()
    };
    for round in 0..rounds {
        for size in BATCHES {
            for hashers in HASHERS {
                let batches: Vec<_> = (0..(65_536 / size).max(1)).map(|_| draw(size)).collect();
                let (start, busy) = (Instant::now(), processor_time());
                for batch in &batches {
                    tree.update_on(batch, hashers, hash_on_threads);
                }
                let updates: usize = batches.iter().map(Vec::len).sum();
                let figures = [
                    ("round", round as f64),
                    ("batch", size as f64),
                    ("hashers", hashers as f64),
                    ("updates", updates as f64),
                    ("seconds", start.elapsed().as_secs_f64()),
                    ("processor_seconds", (processor_time() - busy).as_secs_f64()),
                ];
                print("updates", &figures);
            }
        }
    }
    print("tree", &[("bytes", tree.memory_bytes() as f64), ("resident", resident_bytes() as f64)]);
    let start = Instant::now();
    let freed = tree.void(0..PETABYTE_LEAVES);
    let seconds = start.elapsed().as_secs_f64();
    drop(freed);
    let figures = [("seconds", seconds), ("seconds_with_freeing", start.elapsed().as_secs_f64())];
    print("void_petabyte", &figures);
}

fn fill(tree: &mut Tree, leaf_count: u64, random: &mut Random) {
    let mut next = 0;
    while next < leaf_count {
        let end = (next + 65_536).min(leaf_count);
        let batch: Vec<_> = (next..end).map(|leaf| (leaf, node(random))).collect();
        tree.update(&batch);
        next = end;
    }
}
