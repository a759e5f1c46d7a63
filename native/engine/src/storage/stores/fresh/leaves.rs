//! The tree over the leaf pages, which copy of each is current, and a cache of leaf pages.
//!
//! All of this changes together, under one lock that is never held across I/O: a cached page always
//! matches the tree's node.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quick_cache::unsync::Cache;
use sealane_proto::freshness::leaf::{Leaf, LeafPage};
use sealane_proto::freshness::node::{ARITY, NODE_BYTES, Node, NodeKey};
use sealane_proto::freshness::tree::{Root, Subtree, Tree};

use super::super::pages::Page;
use super::checkpoint::REGIONS;
use super::counters::{Counters, count};
use super::failure::Refusal;
use super::geometry::Geometry;
use super::hashers::side_by_side;
use super::keys::{StoreKeys, Tag};
use super::nodes::{Copies, Held, NODES_PER_PAGE, NodePage};

/// Most leaf pages in the cache: 64 MiB, which cover 4.7 GiB of blocks out of place.
const CACHE_PAGES: usize = 16_384;

/// Location of a leaf.
#[derive(Debug)]
pub enum Found {
    /// It has no entries.
    Void,
    /// In the cache.
    Cached(Arc<LeafPage>),
    /// On the device.
    At(Fetch),
}

/// A leaf to read from the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fetch {
    /// The leaf.
    pub leaf: u64,
    /// Its page on the device.
    pub place: u64,
    /// Its node, and which copy it is.
    pub held: Held,
}

/// Result of checking a leaf that was read.
#[derive(Debug)]
pub enum Checked {
    /// The leaf, as of when the fetch was made.
    Right(Arc<LeafPage>),
    /// The leaf has changed since: look it up again.
    Changed,
}

/// The current state of a leaf, for a merge.
#[derive(Debug)]
pub struct Current {
    /// The leaf.
    pub leaf: u64,
    /// Its node and copy; `None` if it is void.
    pub held: Option<Held>,
    /// Its page, if it is cached.
    pub page: Option<Arc<LeafPage>>,
}

impl Current {
    /// The copy to write next: the one that the last checkpoint doesn't need.
    #[must_use]
    pub fn spare_copy(&self) -> u8 {
        self.held.map_or(0, |held| 1 - held.copy)
    }
}

/// The new state of a leaf.
#[derive(Debug)]
pub struct Written {
    /// The leaf.
    pub leaf: u64,
    /// Its page, with its node and the copy it was written to; `None` if it became void.
    pub page: Option<(Arc<LeafPage>, Held)>,
    /// By how many the number of its entries has grown.
    pub growth: i32,
}

/// The two copies of a page of nodes on a device, each with its tag; `None` if a copy is invalid.
pub type NodePages = [Option<(NodePage, Tag)>; 2];

/// What is known about the leaves of one page of nodes.
#[derive(Debug)]
struct NodesHeld {
    /// The copy that belongs to the last checkpoint, and its tag.
    current: Option<(u8, Tag)>,
    copies: Copies,
    /// Number of blocks with entries in the leaves.
    written: u32,
}

#[derive(Debug)]
struct State {
    tree: Tree,
    pages: Vec<Option<Box<NodesHeld>>>,
    /// Pages of nodes that have changed since the last checkpoint.
    dirty: BTreeSet<u64>,
    /// Regions in which leaves became void at once: all their existing pages have changed.
    dirty_regions: BTreeSet<usize>,
    /// By region: number of leaves that aren't void, and the checkpoint number below which its
    /// pages are void.
    held: Vec<u64>,
    void_since: Box<[u64; REGIONS]>,
    /// Whether the regions have changed: then the next checkpoint writes all pages of nodes, and
    /// earlier ones are void.
    is_renewed: bool,
    cache: Cache<u64, Arc<LeafPage>>,
}

/// The leaves of a store.
#[derive(Debug)]
pub struct Leaves {
    geometry: Geometry,
    key: Arc<NodeKey>,
    counters: Arc<Counters>,
    state: Mutex<State>,
}

impl Leaves {
    /// Leaves that are all void.
    #[must_use]
    pub fn new(geometry: Geometry, key: NodeKey, counters: Arc<Counters>) -> Self {
        let key = Arc::new(key);
        let state = State {
            tree: Tree::new(Arc::clone(&key), geometry.leaves()),
            pages: (0..geometry.node_pages()).map(|_| None).collect(),
            dirty: BTreeSet::new(),
            dirty_regions: BTreeSet::new(),
            held: vec![0; REGIONS],
            void_since: Box::new([0; REGIONS]),
            is_renewed: false,
            cache: Cache::new(CACHE_PAGES),
        };
        Self { geometry, key, counters, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No holder can panic in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn region(&self, page: u64) -> usize {
        (page / self.geometry.region_pages()) as usize
    }

    fn pages_of(&self, region: usize) -> Range<u64> {
        let size = self.geometry.region_pages();
        let start = region as u64 * size;
        start..self.geometry.node_pages().min(start + size)
    }

    // Questions.

    /// Looks up a leaf.
    #[must_use]
    pub fn find(&self, leaf: u64) -> Found {
        let state = self.state();
        let Some(held) = state.current(leaf) else { return Found::Void };
        if let Some(page) = state.cache.get(&leaf) {
            count(&self.counters.leaf_hits, 1);
            return Found::Cached(Arc::clone(page));
        }
        count(&self.counters.leaf_misses, 1);
        Found::At(Fetch { leaf, place: self.geometry.leaf(leaf, held.copy), held })
    }

    /// The leaf's location on the device, even if it is cached; `None` if it is void.
    #[must_use]
    pub fn fetch(&self, leaf: u64) -> Option<Fetch> {
        let held = self.state().current(leaf)?;
        Some(Fetch { leaf, place: self.geometry.leaf(leaf, held.copy), held })
    }

    /// A leaf's page, if it is cached.
    #[must_use]
    pub fn cached(&self, leaf: u64) -> Option<Arc<LeafPage>> {
        self.state().cache.peek(&leaf).cloned()
    }

    /// Number of cached leaf pages.
    #[must_use]
    pub fn cached_pages(&self) -> u64 {
        self.state().cache.len() as u64
    }

    /// The node of a leaf; `None` if it is void.
    #[must_use]
    pub fn node(&self, leaf: u64) -> Option<Node> {
        self.state().tree.node(leaf)
    }

    /// A leaf's page with its node, for a page that was just found in the cache or checked. `None`
    /// if it has changed since, or is void.
    #[must_use]
    pub fn with_node(&self, leaf: u64, page: &LeafPage) -> Option<Leaf> {
        Leaf::check(&self.key, leaf, Box::new(*page), self.node(leaf)).ok()
    }

    /// Whether a page that was read is the leaf's page with this node.
    #[must_use]
    pub fn is_page_of(&self, leaf: u64, node: Node, page: &LeafPage) -> bool {
        self.key.leaf_node(leaf, page) == Some(node)
    }

    /// Checks a leaf that was read, and caches it. Fails if it isn't the version written last.
    pub fn check(&self, fetch: &Fetch, page: &LeafPage) -> Result<Checked, Refusal> {
        self.checked(fetch, page, true)
    }

    /// Like [`Self::check`], but doesn't cache the page.
    pub fn check_only(&self, fetch: &Fetch, page: &LeafPage) -> Result<Checked, Refusal> {
        self.checked(fetch, page, false)
    }

    fn checked(&self, fetch: &Fetch, page: &LeafPage, keeps: bool) -> Result<Checked, Refusal> {
        let is_right = self.is_page_of(fetch.leaf, fetch.held.node, page);
        let mut state = self.state();
        let is_current = state.tree.node(fetch.leaf) == Some(fetch.held.node);
        if !is_right {
            let stale = Refusal::StaleLeaf(fetch.leaf);
            return if is_current { Err(stale) } else { Ok(Checked::Changed) };
        }
        let page = Arc::new(*page);
        if keeps && is_current {
            state.cache.insert(fetch.leaf, Arc::clone(&page));
        }
        Ok(Checked::Right(page))
    }

    /// The current states of leaves.
    #[must_use]
    pub fn current(&self, leaves: impl IntoIterator<Item = u64>) -> Vec<Current> {
        let state = self.state();
        let current = |leaf| {
            let held = state.current(leaf);
            let page = held.and_then(|_| state.cache.get(&leaf)).map(Arc::clone);
            Current { leaf, held, page }
        };
        leaves.into_iter().map(current).collect()
    }

    /// The node of a leaf that has changed from `before`, with the given node, to `after`.
    #[must_use]
    pub fn changed_node(
        &self,
        leaf: u64,
        node: Option<Node>,
        before: &LeafPage,
        after: &LeafPage,
    ) -> Option<Node> {
        self.key.changed_leaf_node(leaf, node, before, after)
    }

    /// The first leaf in the range that isn't void.
    #[must_use]
    pub fn next_held(&self, start: u64, end: u64) -> Option<u64> {
        let state = self.state();
        let mut leaf = start;
        while leaf < end {
            match &state.pages[(leaf / NODES_PER_PAGE) as usize] {
                Some(page) if page.copies.get((leaf % NODES_PER_PAGE) as usize).is_some() => {
                    return Some(leaf);
                }
                Some(_) => leaf += 1,
                None => leaf = (leaf / NODES_PER_PAGE + 1) * NODES_PER_PAGE,
            }
        }
        None
    }

    /// The tree's root, with the number of root commits since the store was opened.
    #[must_use]
    pub fn root(&self) -> Root {
        self.state().tree.root()
    }

    /// Bytes of memory of the tree, of the table of copies, and of the nodes by the formula: 16 for
    /// each node. The cache of leaf pages is excluded.
    #[must_use]
    pub fn memory_bytes(&self) -> [u64; 3] {
        let state = self.state();
        let held = state.pages.iter().flatten().count() * size_of::<NodesHeld>();
        let table = state.pages.capacity() * size_of::<Option<Box<NodesHeld>>>();
        let (mut nodes, mut level) = (self.geometry.leaves(), self.geometry.leaves());
        while level > 1 {
            level = level.div_ceil(ARITY as u64);
            nodes += level;
        }
        [state.tree.memory_bytes(), (held + table) as u64, nodes * NODE_BYTES as u64]
    }

    /// By region, the checkpoint number below which its pages are void.
    #[must_use]
    pub fn void_since(&self) -> Box<[u64; REGIONS]> {
        self.state().void_since.clone()
    }

    // Changes.

    /// Updates the leaves, which must be sorted, after they were written. `hashers` threads hash
    /// the tree.
    pub fn written(&self, leaves: &[Written], hashers: usize) {
        let node =
            |written: &Written| (written.leaf, written.page.as_ref().map(|(_, held)| held.node));
        let nodes: Vec<_> = leaves.iter().map(node).collect();
        let mut state = self.state();
        state.tree.update_on(&nodes, hashers, |subtrees| side_by_side(subtrees, Subtree::hash));
        for Written { leaf, page, growth } in leaves {
            let index = leaf / NODES_PER_PAGE;
            let place = &mut state.pages[index as usize];
            let held = place.get_or_insert_with(|| Box::new(NodesHeld::VOID));
            let copy = page.as_ref().map(|(_, held)| held.copy);
            let before = held.copies.set((leaf % NODES_PER_PAGE) as usize, copy);
            held.written = held.written.wrapping_add_signed(*growth);
            let region = self.region(index);
            state.held[region] += u64::from(copy.is_some());
            state.held[region] -= u64::from(before.is_some());
            state.dirty.insert(index);
            match page {
                Some((page, _)) => state.cache.insert(*leaf, Arc::clone(page)),
                None => drop(state.cache.remove(leaf)),
            }
        }
        let growth = leaves.iter().map(|written| i64::from(written.growth)).sum::<i64>();
        self.counters.written.fetch_add(growth.cast_unsigned(), Ordering::Relaxed);
    }

    /// Makes all leaves of some pages of nodes void, without reporting their entries.
    pub fn void(&self, pages: Range<u64>) {
        let end = (pages.end * NODES_PER_PAGE).min(self.geometry.leaves());
        let leaves = (pages.start * NODES_PER_PAGE).min(end)..end;
        let mut state = self.state();
        let mut lost = 0;
        let mut start = pages.start;
        while start < pages.end {
            let region = self.region(start);
            let end = pages.end.min(self.pages_of(region).end);
            let found = &mut state.pages[start as usize..end as usize];
            let is_held = |(_, page): &(u64, &mut Box<NodesHeld>)| page.copies != Copies::VOID;
            let found = (start..end).zip(found).filter_map(|(at, page)| Some((at, page.as_mut()?)));
            let mut changed = Vec::new();
            let mut leaves_held = 0;
            for (index, page) in found.filter(is_held) {
                lost += u64::from(page.written);
                leaves_held += page.copies.held();
                (page.copies, page.written) = (Copies::VOID, 0);
                changed.push(index);
            }
            state.held[region] -= leaves_held;
            if state.held[region] > 0 {
                state.dirty.extend(changed);
            } else if leaves_held > 0 {
                state.dirty_regions.insert(region);
            }
            start = end;
        }
        let freed = state.tree.void(leaves);
        drop(state);
        self.counters.written.fetch_sub(lost, Ordering::Relaxed);
        // Freeing the memory takes a second for a petabyte.
        drop(freed);
    }

    /// Drops all cached pages.
    #[cfg(test)]
    pub fn forget_pages(&self) {
        self.state().cache.clear();
    }

    /// Extends the leaves of a store that grew. Existing leaves keep their entries.
    pub fn grow(&mut self, geometry: Geometry) {
        let key = Arc::clone(&self.key);
        let region_pages = geometry.region_pages();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut tree = Tree::new(key, geometry.leaves());
        state.held.fill(0);
        for (index, page) in (0..).zip(&state.pages) {
            let Some(page) = page else { continue };
            let leaves = (index * NODES_PER_PAGE..).zip(0..NODES_PER_PAGE as usize);
            let nodes = leaves.filter_map(|(leaf, place)| {
                page.copies.get(place)?;
                Some((leaf, state.tree.node(leaf)))
            });
            let nodes: Vec<_> = nodes.collect();
            state.held[(index / region_pages) as usize] += nodes.len() as u64;
            state.dirty.insert(index);
            tree.update(&nodes);
        }
        state.tree = tree;
        state.pages.resize_with(geometry.node_pages() as usize, || None);
        state.dirty_regions.clear();
        state.is_renewed = true;
        self.geometry = geometry;
    }

    // Checkpoints.

    /// Begins a checkpoint. Returns the pages of nodes that it must write. Regions without entries
    /// are only recorded as void and cost nothing.
    pub fn begin_checkpoint(&self, number: u64) -> Vec<u64> {
        let mut state = self.state();
        let mut dirty = std::mem::take(&mut state.dirty);
        if std::mem::take(&mut state.is_renewed) {
            state.void_since.fill(number);
        }
        for region in std::mem::take(&mut state.dirty_regions) {
            let pages = self.pages_of(region);
            if state.held[region] > 0 {
                dirty.extend(pages.filter(|index| state.pages[*index as usize].is_some()));
            } else {
                dirty.insert(pages.start);
            }
        }
        let mut indices = Vec::new();
        for index in dirty {
            let region = self.region(index);
            if state.held[region] > 0 {
                indices.push(index);
            } else if state.void_since[region] != number + 1 {
                // A page with this number may remain from a checkpoint that was not completed.
                state.void_since[region] = number + 1;
                let pages = self.pages_of(region);
                state.pages[pages.start as usize..pages.end as usize].fill_with(|| None);
            }
        }
        indices
    }

    /// A page of nodes for the checkpoint with this number, with the place to write it to.
    #[must_use]
    pub fn node_page(&self, number: u64, index: u64, keys: &StoreKeys) -> Option<(u64, Page)> {
        let (page, copy) = self.nodes_to_write(number, index)?;
        let (page, tag) = page.encode(keys);
        // Only the writer of checkpoints changes which copy is current.
        self.state().pages[index as usize].as_mut()?.current = Some((copy, tag));
        Some((self.geometry.nodes(index, copy), page))
    }

    fn nodes_to_write(&self, number: u64, index: u64) -> Option<(NodePage, u8)> {
        let mut state = self.state();
        let State { tree, pages, .. } = &mut *state;
        let held = pages[index as usize].as_mut()?;
        let leaves = (index * NODES_PER_PAGE..).zip(0..NODES_PER_PAGE as usize);
        let leaves = leaves.map(|(leaf, place)| {
            let copy = held.copies.get(place)?;
            Some(Held { node: tree.node(leaf)?, copy })
        });
        let page = NodePage { number, index, written: held.written, leaves: leaves.collect() };
        Some((page, held.current.map_or(0, |(copy, _)| 1 - copy)))
    }

    /// Whether an opening would take these copies from the device for the current page of nodes,
    /// with `number` as the last checkpoint. Nobody may write a checkpoint meanwhile.
    #[must_use]
    pub fn is_node_page_right(&self, number: u64, index: u64, copies: NodePages) -> bool {
        let state = self.state();
        let found = state.latest(number, self.region(index), index, copies);
        let held = state.pages[index as usize].as_ref().and_then(|held| held.current);
        found.map(|(copy, (_, tag))| (copy, tag)) == held
    }

    /// Makes the next checkpoint write this page of nodes.
    pub fn rewrite_node_page(&self, index: u64) {
        let mut state = self.state();
        state.pages[index as usize].get_or_insert_with(|| Box::new(NodesHeld::VOID));
        state.dirty.insert(index);
    }

    // Opening.

    /// Loads the regions of a checkpoint; must be called before loading its pages.
    pub fn load_regions(&self, void_since: &[u64; REGIONS]) {
        self.state().void_since.copy_from_slice(void_since);
    }

    /// Loads a page of nodes from its copies on the device: the latest one that belongs to
    /// checkpoint `number` or an earlier one.
    pub fn load(&self, number: u64, index: u64, copies: NodePages) {
        let mut state = self.state();
        let is_later = |(page, _): &(NodePage, Tag)| page.index == index && page.number > number;
        if copies.iter().flatten().any(is_later) {
            // It belongs to a checkpoint that was not completed. The next checkpoint must overwrite
            // it, or a later opening would take it for part of one that was.
            state.dirty.insert(index);
        }
        let Some((copy, (page, tag))) = state.latest(number, self.region(index), index, copies)
        else {
            if state.dirty.contains(&index) {
                state.pages[index as usize] = Some(Box::new(NodesHeld::VOID));
            }
            return;
        };
        let mut held = Box::new(NodesHeld::VOID);
        (held.current, held.written) = (Some((copy, tag)), page.written);
        let leaves = index * NODES_PER_PAGE..self.geometry.leaves();
        let leaves = leaves.zip(page.leaves).enumerate();
        let nodes = leaves.filter_map(|(place, (leaf, found))| {
            let found = found?;
            held.copies.set(place, Some(found.copy));
            Some((leaf, Some(found.node)))
        });
        let nodes: Vec<_> = nodes.collect();
        state.tree.update(&nodes);
        let region = self.region(index);
        state.held[region] += nodes.len() as u64;
        count(&self.counters.written, u64::from(held.written));
        state.pages[index as usize] = Some(held);
    }
}

impl State {
    /// The latest copy of a page of nodes that belongs to checkpoint `number` or an earlier one.
    fn latest(
        &self,
        number: u64,
        region: usize,
        index: u64,
        copies: NodePages,
    ) -> Option<(u8, (NodePage, Tag))> {
        let numbers = self.void_since[region]..=number;
        let copies = (0..).zip(copies).filter_map(|(copy, page)| Some((copy, page?)));
        let counts = |page: &NodePage| page.index == index && numbers.contains(&page.number);
        let copies = copies.filter(|(_, (page, _))| counts(page));
        copies.max_by_key(|(_, (page, _))| page.number)
    }

    fn current(&self, leaf: u64) -> Option<Held> {
        let page = self.pages.get((leaf / NODES_PER_PAGE) as usize)?.as_ref()?;
        let copy = page.copies.get((leaf % NODES_PER_PAGE) as usize)?;
        Some(Held { node: self.tree.node(leaf)?, copy })
    }
}

impl NodesHeld {
    const VOID: Self = Self { current: None, copies: Copies::VOID, written: 0 };
}
