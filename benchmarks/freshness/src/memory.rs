//! Memory that full stores, from 1 GiB up, need for their trees, compared with the formula: 16 bytes for
//! each node, leaves and all levels above them. Leaf pages and pending changes don't count.

use std::sync::Arc;

use sealane_engine::storage::stores::fresh::counters::Counters;
use sealane_engine::storage::stores::fresh::geometry::Geometry;
use sealane_engine::storage::stores::fresh::leaves::{Leaves, Written};
use sealane_engine::storage::stores::fresh::nodes::Held;
use sealane_proto::aead::Secret;
use sealane_proto::freshness::leaf::{Ivs, LEAF_BYTES, LeafFormat};
use sealane_proto::freshness::node::NodeKey;

use crate::sample::{Random, print, resident_bytes};
use crate::trees::node;

const SIZES: [u64; 5] =
    [1 << 30, 1 << 40, 3_840_000_000_000, 100_000_000_000_000, 1_000_000_000_000_000];
const BATCH: u64 = 65_536;

/// Measures stores of up to `terabytes_max` terabytes.
pub fn run(terabytes_max: u64) {
    for bytes in SIZES.into_iter().filter(|bytes| *bytes <= terabytes_max * 1_000_000_000_000) {
        let geometry = Geometry::in_place(bytes / 4096, Ivs::ENTRIES_PER_LEAF);
        let before = resident_bytes();
        let key = NodeKey::new(&Secret::take(&mut [7; 32]));
        let leaves = Leaves::new(geometry.clone(), key, Arc::<Counters>::default());
        fill(&leaves, geometry.leaves());
        let resident = resident_bytes().saturating_sub(before);
        let [tree, copies, formula] = leaves.memory_bytes();
        let figures = [
            ("data_bytes", bytes as f64),
            ("formula_bytes", formula as f64),
            ("tree_bytes", tree as f64),
            ("copies_bytes", copies as f64),
            ("resident_bytes", resident as f64),
        ];
        print("memory", &figures);
    }
}

/// Gives every leaf a node. All share one page, because memory of pages isn't measured.
fn fill(leaves: &Leaves, leaf_count: u64) {
    let page = Arc::new([1; LEAF_BYTES]);
    let mut random = Random(3);
    for first in (0..leaf_count).step_by(BATCH as usize) {
        let written = |leaf| {
            let held = node(&mut random).map(|node| Held { node, copy: 0 });
            Written { leaf, page: held.map(|held| (Arc::clone(&page), held)), growth: 1 }
        };
        let batch: Vec<_> = (first..leaf_count.min(first + BATCH)).map(written).collect();
        leaves.written(&batch, 1);
    }
}
