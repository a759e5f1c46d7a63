//! The tree over level-0 nodes. It is kept in memory, allocated where it isn't void, and updated by
//! sorted batches.
//!
//! A batch is applied level by level. Below some level it is divided into disjoint subtrees, which
//! any number of threads can hash concurrently without a lock; the few nodes above them are updated
//! at the end, by one thread. Sums don't depend on the order of their terms, so the root is the
//! same however the batch is divided (`docs/decisions/0025-batched-tree.md`).

use std::ops::Range;
use std::sync::Arc;

use super::node::{ARITY, LEVELS_MAX, NODE_BYTES, Node, NodeKey};

/// Nodes that are allocated together: the square of the arity, so that a region's parents are the
/// children of one node, and regions of all levels have the same boundaries.
const REGION_NODES: usize = ARITY * ARITY;
/// A subtree may exceed its even share of a batch by one part in this number; beyond that, smaller
/// subtrees are tried.
const SHARE_EXCESS: usize = 4;

type Region = Box<[u128; REGION_NODES]>;

/// A change of a node: its index in its level, and the difference (XOR) to what it was.
type Change = (u64, u128);

/// The root of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Root {
    /// Number of batches and void ranges applied so far.
    pub commit: u64,
    /// Identifies this tree's leaves; it doesn't reveal any node.
    pub tag: [u8; NODE_BYTES],
}

/// Memory of regions that became void. Freeing that of a full petabyte takes a second, so drop it
/// where nothing waits for that.
#[derive(Debug)]
pub struct Freed(#[expect(dead_code, reason = "only dropped")] Vec<Region>);

#[derive(Debug)]
struct Level {
    node_count: u64,
    regions: Vec<Option<Region>>,
}

/// The regions of one level that one thread may change, and the index of the first.
#[derive(Debug)]
struct Regions<'a> {
    first: u64,
    regions: &'a mut [Option<Region>],
}

/// A part of a batch and of the tree that one thread hashes.
#[derive(Debug)]
pub struct Subtree<'a> {
    key: &'a NodeKey,
    /// From level 0 up.
    levels: Vec<Regions<'a>>,
    batch: &'a [(u64, Option<Node>)],
    /// The changes to make in the level above.
    above: Vec<Change>,
}

/// The nodes of all leaves and all nodes above them.
#[derive(Debug)]
pub struct Tree {
    key: Arc<NodeKey>,
    levels: Vec<Level>,
    commit: u64,
}

impl Tree {
    /// Creates a tree whose leaves are all void.
    ///
    /// # Panics
    /// If there are no leaves, or more than any device has blocks (2⁵⁶).
    #[must_use]
    pub fn new(key: Arc<NodeKey>, leaf_count: u64) -> Self {
        assert!((1..=1 << 56).contains(&leaf_count), "leaves of a tree: {leaf_count}");
        let mut levels = vec![Level::new(leaf_count)];
        let mut node_count = leaf_count;
        while node_count > 1 {
            node_count = node_count.div_ceil(ARITY as u64);
            levels.push(Level::new(node_count));
        }
        debug_assert!(levels.len() <= LEVELS_MAX);
        Self { key, levels, commit: 0 }
    }

    // Commands.

    /// Sets the nodes of leaves (None: void), in ascending order of leaves, each at most once, and
    /// commits the root.
    ///
    /// # Panics
    /// If a leaf is beyond the tree or out of order.
    pub fn update(&mut self, batch: &[(u64, Option<Node>)]) {
        self.update_on(batch, 1, |subtrees| subtrees.iter_mut().for_each(Subtree::hash));
    }

    /// As [`Tree::update`]; `run` must call [`Subtree::hash`] once on each of at most `hashers`
    /// subtrees, on any threads.
    ///
    /// # Panics
    /// If a leaf is beyond the tree or out of order.
    pub fn update_on(
        &mut self,
        batch: &[(u64, Option<Node>)],
        hashers: usize,
        run: impl FnOnce(&mut [Subtree<'_>]),
    ) {
        assert!(batch.is_sorted_by(|(one, _), (next, _)| one < next), "a batch out of order");
        assert!(batch.last().is_none_or(|(last, _)| *last < self.leaf_count()), "beyond the tree");
        let (height, cuts) = self.divide(batch, hashers.max(1));
        let mut subtrees = self.subtrees(batch, height, &cuts);
        run(&mut subtrees);
        let changes = subtrees.into_iter().flat_map(|subtree| subtree.above).collect();
        self.climb_from(height, changes);
        self.commit += 1;
    }

    /// Makes a range of leaves void and commits the root. Its time depends on the number of regions
    /// in the range, not of leaves. Returns the regions' memory.
    ///
    /// # Panics
    /// If the range ends beyond the tree.
    pub fn void(&mut self, leaves: Range<u64>) -> Freed {
        assert!(leaves.end <= self.leaf_count(), "beyond the tree");
        let (mut start, mut end) = (leaves.start, leaves.end.max(leaves.start));
        let mut freed = Vec::new();
        let mut changes: Vec<Change> = Vec::new();
        for height in 0..self.levels.len() {
            let level = &mut self.levels[height];
            let arity = ARITY as u64;
            // Parents whose children all become void; the last one may have fewer than others.
            let parent_end =
                if end == level.node_count { end.div_ceil(arity) } else { end / arity };
            let parent_start = start.div_ceil(arity).min(parent_end.max(start / arity));
            let parents = parent_start..parent_end.max(parent_start);
            let inner =
                (parents.start * arity).clamp(start, end)..(parents.end * arity).clamp(start, end);
            let edges = (start..inner.start).chain(inner.end..end);
            changes.extend(edges.map(|index| (index, level.node(index))));
            changes.sort_unstable_by_key(|(index, _)| *index);
            level.clear(inner, &mut freed);
            let mut above = Vec::new();
            level.all().climb(&self.key, height + 1, &changes, &mut above);
            changes = above;
            (start, end) = (parents.start, parents.end);
        }
        self.commit += 1;
        Freed(freed)
    }

    // Questions.

    /// The key for its nodes.
    #[must_use]
    pub fn key(&self) -> &Arc<NodeKey> {
        &self.key
    }

    /// Number of leaves.
    #[must_use]
    pub fn leaf_count(&self) -> u64 {
        self.levels[0].node_count
    }

    /// The node of a leaf; None if it is void or there is no such leaf.
    #[must_use]
    pub fn node(&self, leaf: u64) -> Option<Node> {
        Node::from_word(self.levels[0].node(leaf))
    }

    /// The current root.
    #[must_use]
    pub fn root(&self) -> Root {
        let top = self.levels.last().map_or(0, |level| level.node(0));
        Root { commit: self.commit, tag: self.key.root_tag(self.leaf_count(), top) }
    }

    /// Bytes of memory used by nodes and the tables of their regions.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let bytes = |level: &Level| {
            let allocated =
                level.regions.iter().flatten().count() * size_of::<[u128; REGION_NODES]>();
            allocated + level.regions.capacity() * size_of::<Option<Region>>()
        };
        self.levels.iter().map(bytes).sum::<usize>() as u64
    }

    // A batch.

    /// The height of the subtrees, and the regions of that level at which they begin, ascending.
    /// The higher the subtrees, the less is left for the last, single thread; if they are too high,
    /// one subtree has most of the batch.
    fn divide(&self, batch: &[(u64, Option<Node>)], hashers: usize) -> (usize, Vec<u64>) {
        let top = self.levels.len() - 1;
        if hashers == 1 {
            return (top, Vec::new());
        }
        let share = batch.len().div_ceil(hashers);
        let mut division = (top, Vec::new());
        for height in (0..=top).rev() {
            let shift = region_shift(height);
            let region = |leaf: u64| leaf >> shift;
            let mut cuts: Vec<u64> = (1..hashers)
                .filter_map(|hasher| batch.get(hasher * share))
                .map(|(leaf, _)| region(*leaf))
                .collect();
            cuts.dedup();
            let place = |cut: &u64| batch.partition_point(|(leaf, _)| region(*leaf) < *cut);
            let places: Vec<usize> =
                [0].into_iter().chain(cuts.iter().map(place)).chain([batch.len()]).collect();
            let largest = places.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
            division = (height, cuts);
            if largest <= share + share / SHARE_EXCESS {
                break;
            }
        }
        division
    }

    fn subtrees<'a>(
        &'a mut self,
        batch: &'a [(u64, Option<Node>)],
        height: usize,
        cuts: &[u64],
    ) -> Vec<Subtree<'a>> {
        let mut rest: Vec<Regions<'a>> =
            self.levels[..=height].iter_mut().map(Level::all).collect();
        let mut batch = batch;
        let mut subtrees = Vec::with_capacity(cuts.len() + 1);
        for cut in cuts {
            let levels = rest.iter_mut().enumerate();
            let levels = levels.map(|(level, rest)| rest.take_to(cut << (4 * (height - level))));
            let levels = levels.collect();
            let leaf = cut << region_shift(height);
            let (part, others) = batch.split_at(batch.partition_point(|(found, _)| *found < leaf));
            batch = others;
            subtrees.push(Subtree { key: &self.key, levels, batch: part, above: Vec::new() });
        }
        subtrees.push(Subtree { key: &self.key, levels: rest, batch, above: Vec::new() });
        subtrees
    }

    /// Applies changes to the levels above `height`, up to the top.
    fn climb_from(&mut self, height: usize, mut changes: Vec<Change>) {
        for height in height + 1..self.levels.len() {
            let mut above = Vec::new();
            self.levels[height].all().climb(&self.key, height + 1, &changes, &mut above);
            changes = above;
        }
    }
}

impl Subtree<'_> {
    /// Hashes its part of the batch as far as no other subtree's nodes are needed.
    pub fn hash(&mut self) {
        let Some((leaves, inner)) = self.levels.split_first_mut() else { return };
        let leaves_changed = self.batch.iter().filter_map(|(leaf, node)| {
            let difference = leaves.node(*leaf) ^ Node::to_word(*node);
            (difference != 0).then_some((*leaf, difference))
        });
        let mut changes: Vec<Change> = leaves_changed.collect();
        let mut above = Vec::with_capacity(changes.len());
        leaves.climb(self.key, 1, &changes, &mut above);
        for (height, level) in (1..).zip(inner) {
            std::mem::swap(&mut changes, &mut above);
            above.clear();
            level.climb(self.key, height + 1, &changes, &mut above);
        }
        self.above = above;
    }
}

/// Shift by which a leaf's number gives the region above it on a level.
fn region_shift(height: usize) -> usize {
    4 * height + REGION_NODES.trailing_zeros() as usize
}

fn place(index: u64) -> (usize, usize) {
    ((index / REGION_NODES as u64) as usize, (index % REGION_NODES as u64) as usize)
}

impl Level {
    fn new(node_count: u64) -> Self {
        let regions = (0..node_count.div_ceil(REGION_NODES as u64)).map(|_| None).collect();
        Self { node_count, regions }
    }

    fn all(&mut self) -> Regions<'_> {
        Regions { first: 0, regions: &mut self.regions }
    }

    fn node(&self, index: u64) -> u128 {
        let (region, place) = place(index);
        let region = self.regions.get(region).and_then(Option::as_ref);
        region.map_or(0, |region| region[place])
    }

    /// Makes nodes void and removes regions that are completely void.
    fn clear(&mut self, nodes: Range<u64>, freed: &mut Vec<Region>) {
        if nodes.is_empty() {
            return;
        }
        let ((first, start), (last, end)) = (place(nodes.start), place(nodes.end - 1));
        for index in first..=last {
            let from = if index == first { start } else { 0 };
            let to = if index == last { end + 1 } else { REGION_NODES };
            let is_last = (index + 1) * REGION_NODES >= self.node_count as usize;
            let is_whole =
                from == 0 && (to == REGION_NODES || is_last && nodes.end == self.node_count);
            let Some(region) = self.regions.get_mut(index) else { return };
            if is_whole {
                freed.extend(region.take());
            } else if let Some(region) = region {
                region[from..to].fill(0);
            }
        }
    }
}

impl Regions<'_> {
    /// Splits off the regions before region `end` of the level.
    fn take_to(&mut self, end: u64) -> Self {
        let count = ((end - self.first) as usize).min(self.regions.len());
        let (taken, rest) = std::mem::take(&mut self.regions).split_at_mut(count);
        let first = std::mem::replace(&mut self.first, end);
        self.regions = rest;
        Self { first, regions: taken }
    }

    fn node(&self, index: u64) -> u128 {
        let (region, place) = place(index);
        let region = self.regions.get(region - self.first as usize).and_then(Option::as_ref);
        region.map_or(0, |region| region[place])
    }

    /// Changes a node; returns its old and new values.
    fn change(&mut self, (index, difference): Change) -> (u128, u128) {
        let (region, place) = place(index);
        let region = &mut self.regions[region - self.first as usize];
        let node = &mut region.get_or_insert_with(|| Box::new([0; REGION_NODES]))[place];
        let old = std::mem::replace(node, *node ^ difference);
        (old, *node)
    }

    /// Changes nodes, in ascending order, and appends the resulting changes of the level above.
    fn climb(
        &mut self,
        key: &NodeKey,
        above: usize,
        changes: &[Change],
        parents: &mut Vec<Change>,
    ) {
        let mut children = [(0, 0, 0); NodeKey::CHILDREN_MAX];
        let mut differences = Vec::with_capacity(NodeKey::CHILDREN_MAX);
        for changes in changes.chunks(NodeKey::CHILDREN_MAX) {
            for (child, change) in children.iter_mut().zip(changes) {
                let (old, new) = self.change(*change);
                *child = (change.0 as usize % ARITY, old, new);
            }
            differences.clear();
            key.child_changes(above, &children[..changes.len()], &mut differences);
            for ((index, _), difference) in changes.iter().zip(&differences) {
                let parent = index / ARITY as u64;
                match parents.last_mut() {
                    Some((last, sum)) if *last == parent => *sum ^= difference,
                    _ => parents.push((parent, *difference)),
                }
            }
        }
    }
}
